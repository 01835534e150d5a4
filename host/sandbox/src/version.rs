//! What identifies a version of a builder: the component's content and the configuration it is constructed with.
//!
//! Must never know: how a version is loaded or run.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use timetable_types::{BuilderConfig, Family};

/// A SHA-256. Displays as its first 12 hexadecimal digits; `to_hex` gives all 64.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContentHash(pub [u8; 32]);

impl ContentHash {
    /// The hash of `bytes`.
    pub fn of(bytes: &[u8]) -> ContentHash {
        ContentHash(Sha256::digest(bytes).into())
    }

    /// 64 lower-case hexadecimal digits.
    pub fn to_hex(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The inverse of `to_hex`. None if it is not 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<ContentHash> {
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let mut hash = [0; 32];
        for (byte, digits) in hash.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).ok()?;
            *byte = u8::from_str_radix(digits, 16).ok()?;
        }
        Some(ContentHash(hash))
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..6]
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex())
    }
}

impl Serialize for ContentHash {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_hex())
    }
}

impl<'de> Deserialize<'de> for ContentHash {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        ContentHash::from_hex(&text).ok_or_else(|| {
            serde::de::Error::custom(format!(
                "{text:?} is not a SHA-256 of 64 hexadecimal digits"
            ))
        })
    }
}

/// The version's key: the hash of the component and the configuration. Another configuration is another version.
pub(crate) fn version_hash(component: ContentHash, config: &BuilderConfig) -> ContentHash {
    let mut hash = Sha256::new();
    hash.update(b"timetable builder version 1\n");
    hash.update(component.0);
    // Canonical: the record's fields in the contract's order, floats in shortest form that reads back the same.
    match serde_json::to_vec(config) {
        Ok(config) => hash.update(config),
        // No record of the contract has a map with keys that are not strings, so this does not occur; if it does, versions
        // stay distinct by the debug form.
        Err(_) => hash.update(format!("{config:?}")),
    }
    ContentHash(hash.finalize().into())
}

/// What there is to say of a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VersionInfo {
    /// The hash of component and configuration.
    pub version: ContentHash,
    /// The hash of the component alone: its name in a state directory.
    pub component: ContentHash,
    /// The family whose metadata it builds.
    pub family: Family,
    /// What the builder calls itself.
    pub name: String,
    /// Where it came from, as the one who loaded it said: a path, "embedded", …
    pub origin: String,
    /// What it was constructed with, beside what the engine says.
    pub options: Vec<(String, String)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_reads_back_and_displays_short() {
        let hash = ContentHash::of(b"abc");
        // FIPS 180-2, appendix B.1.
        assert_eq!(
            hash.to_hex(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(ContentHash::from_hex(&hash.to_hex()), Some(hash));
        assert_eq!(hash.to_string(), "ba7816bf8f01");
        assert_eq!(ContentHash::from_hex("ba78"), None);
        assert_eq!(ContentHash::from_hex(&"zz".repeat(32)), None);
    }
}
