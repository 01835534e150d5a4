//! Whose request, builder, fault or cost something is.
//!
//! Must never know: what a tenant is entitled to.

use std::{borrow::Borrow, fmt, sync::Arc};

use serde::{Deserialize, Serialize};

/// The longest name. Unit: bytes.
const MAX_LEN: usize = 64;

/// A tenant's name: 1 to 64 of `a`–`z`, `0`–`9`, `-`, `_` and `.`, the first a letter or a digit. So it is a metric's label, a
/// key of the configuration file and part of a group's name as it stands. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TenantName(Arc<str>);

/// A name that no tenant can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "tenant name {0:?}: use 1 to 64 of a-z, 0-9, `-`, `_` and `.`, and begin with a letter or a digit"
)]
pub struct TenantNameError(String);

impl TenantName {
    /// # Errors
    /// See [`TenantName`].
    pub fn new(name: &str) -> Result<Self, TenantNameError> {
        let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let mut bytes = name.bytes();
        let fits = name.len() <= MAX_LEN
            && bytes.next().is_some_and(allowed)
            && bytes.all(|byte| allowed(byte) || matches!(byte, b'-' | b'_' | b'.'));
        match fits {
            true => Ok(Self(name.into())),
            // Whoever sends it decides its length.
            false => Err(TenantNameError(name.chars().take(2 * MAX_LEN).collect())),
        }
    }

    /// As it is written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TenantName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl Borrow<str> for TenantName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for TenantName {
    type Err = TenantNameError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::new(name)
    }
}

impl TryFrom<String> for TenantName {
    type Error = TenantNameError;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        Self::new(&name)
    }
}

impl From<TenantName> for String {
    fn from(name: TenantName) -> Self {
        name.0.as_ref().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_labels_as_they_stand() {
        for name in ["a", "team-7", "0.lab_x", &"x".repeat(64)] {
            assert_eq!(TenantName::new(name).unwrap().as_str(), name);
        }
        for name in ["", "-a", ".", "Team", "a b", "a\"b", "ä", &"x".repeat(65)] {
            assert!(TenantName::new(name).is_err(), "{name}");
        }
        let error = TenantName::new("Team A").unwrap_err().to_string();
        assert!(error.starts_with("tenant name \"Team A\": use 1 to 64"));
    }
}
