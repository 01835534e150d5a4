//! Who may ask, and as which tenant. A key is kept as its SHA-256 only, so it can be neither logged nor compared letter by
//! letter.
//!
//! Must never know: where the file lies.

use std::collections::HashMap;

use sha2::{Digest, Sha256};
use timetable_sandbox::TenantName;

/// API keys by their SHA-256, each with its tenant. Without any, everybody may ask, as nobody in particular.
#[derive(Clone, Debug, Default)]
pub struct Keys(HashMap<[u8; 32], Option<TenantName>>);

/// A line of the file that says no key. Never repeats the line: it may be a key.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// It has too many words.
    #[error("line {0}: give a key, or a key and a tenant, and nothing else")]
    Words(usize),
    /// The hash is none.
    #[error("line {0}: `sha256:` is not followed by 64 hexadecimal digits")]
    Hash(usize),
    /// The tenant's name is none.
    #[error("line {0}: the second word is no tenant's name; write KEY TENANT, in this order")]
    Tenant(usize),
    /// The key is there already.
    #[error("line {0}: the key is in the file twice; take one away")]
    Twice(usize),
    /// An empty file would let everybody in.
    #[error("there is no key; add one, or leave the setting out to let everybody in")]
    Empty,
}

impl Keys {
    /// Reads a file's text: a line for each key, `KEY [TENANT]` or `sha256:HEX [TENANT]`; `#` begins a comment.
    ///
    /// # Errors
    /// The first line that says no key.
    pub fn parse(text: &str) -> Result<Self, KeysError> {
        let mut keys = HashMap::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let mut words = line.split_whitespace();
            let (Some(key), tenant, None) = (words.next(), words.next(), words.next()) else {
                return Err(KeysError::Words(number));
            };
            let hash = match key.strip_prefix("sha256:") {
                Some(hex) => unhex(hex).ok_or(KeysError::Hash(number))?,
                None => Sha256::digest(key).into(),
            };
            let tenant = tenant.map(str::parse::<TenantName>).transpose();
            let tenant = tenant.map_err(|_| KeysError::Tenant(number))?;
            if keys.insert(hash, tenant).is_some() {
                return Err(KeysError::Twice(number));
            }
        }
        match keys.is_empty() {
            true => Err(KeysError::Empty),
            false => Ok(Keys(keys)),
        }
    }

    /// May everybody ask?
    pub fn is_open(&self) -> bool {
        self.0.is_empty()
    }

    /// The tenants that keys are of.
    pub fn tenants(&self) -> impl Iterator<Item = &TenantName> {
        self.0.values().flatten()
    }

    /// Whose a request with this key is; none: nobody's that is known here. The time it takes says nothing of other keys but
    /// what their hashes begin with.
    pub(crate) fn tenant(&self, key: Option<&str>) -> Option<Option<TenantName>> {
        if self.is_open() {
            return Some(None);
        }
        let hash: [u8; 32] = Sha256::digest(key?).into();
        self.0.get(&hash).cloned()
    }
}

fn unhex(hex: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if hex.len() != 64 || !hex.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&hex[at..at + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_known_by_itself_or_by_its_hash_and_never_repeated() {
        let hash = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"; // secret
        let keys = Keys::parse(&format!("# ours\nsk-one acme\n\nsha256:{hash}\n")).unwrap();
        let acme: TenantName = "acme".parse().unwrap();
        assert_eq!(keys.tenant(Some("sk-one")), Some(Some(acme)));
        assert_eq!(keys.tenant(Some("secret")), Some(None));
        for wrong in [None, Some(""), Some("sk-on"), Some(hash)] {
            assert_eq!(keys.tenant(wrong), None);
        }
        assert!(!format!("{keys:?}").contains("sk-one"));
        assert_eq!(Keys::default().tenant(None), Some(None));
    }

    #[test]
    fn a_line_that_says_no_key_is_named_by_its_number_alone() {
        for (text, expected) in [
            ("", "there is no key"),
            ("sk-a b c", "line 1"),
            ("\nsha256:12", "line 2: `sha256:`"),
            ("sk-a no/name", "line 1: "),
            ("sk-a\nsk-a x", "line 2: the key is in the file twice"),
        ] {
            let error = Keys::parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            assert!(!error.contains("sk-a"), "{error}");
        }
    }
}
