//! Public keys that an operator trusts.
//!
//! Must never know: which policy asks for them, or where they were read.

use std::fmt;

use ed25519_dalek::VerifyingKey;
use ed25519_dalek::pkcs8::DecodePublicKey;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::signature::Signature;
use crate::text;

/// The longest key file, in bytes. A key has less than 200; the rest is room for comments.
pub const KEY_BYTES_MAX: u64 = 16 << 10;

/// A public key: minisign's, or a bare ed25519 key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustedKey(Kind);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Minisign(Box<minisign_verify::PublicKey>, String),
    Ed25519(VerifyingKey),
}

/// What is not a public key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// A private one.
    #[error("is a private key; give the public one, and keep this one away from hosts")]
    Private,
    /// A public key of another algorithm, or a damaged one.
    #[error("is no ed25519 public key ({0}); make one with `openssl genpkey -algorithm ed25519`")]
    Pem(String),
    /// No form that is read.
    #[error(
        "`{0}` is no public key; give a minisign key (`RW…`, or the file that `minisign -G` wrote), or an ed25519 key as PEM, \
         or in base64 or hexadecimal"
    )]
    Form(String),
    /// Right in form, and no point of the curve.
    #[error("`{0}` has the form of an ed25519 key but is none; copy it again")]
    NoKey(String),
}

/// The DER of an ed25519 SubjectPublicKeyInfo before the key's 32 bytes (RFC 8410, section 4).
const SPKI_PREFIX: [u8; 12] = [
    0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00,
];

impl TrustedKey {
    /// Reads a key from text: a minisign public key or its file; an ed25519 key as PEM, or in base64 (32 bytes, or
    /// SubjectPublicKeyInfo) or hexadecimal; or what it displays as. Lines that begin with `#` are comments.
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn parse(text: &str) -> Result<TrustedKey, KeyError> {
        let text = text.trim();
        if text.contains("PRIVATE KEY") || text.contains("secret key") {
            return Err(KeyError::Private);
        }
        if text.contains("-----BEGIN") {
            let key = VerifyingKey::from_public_key_pem(text)
                .map_err(|error| KeyError::Pem(error.to_string()))?;
            return sound(key).ok_or_else(|| KeyError::Pem("a weak one".to_owned()));
        }
        let mut lines = text.lines().map(str::trim).filter(|line| {
            !line.is_empty() && !line.starts_with('#') && !line.starts_with("untrusted comment:")
        });
        let (Some(line), None) = (lines.next(), lines.next()) else {
            return Err(KeyError::Form(text::shown(text)));
        };
        let line = line
            .strip_prefix("minisign:")
            .or_else(|| line.strip_prefix("ed25519:"))
            .unwrap_or(line);
        if let Ok(key) = minisign_verify::PublicKey::from_base64(line) {
            return Ok(TrustedKey(Kind::Minisign(Box::new(key), line.to_owned())));
        }
        let bytes = text::hex(line)
            .or_else(|| text::base64(line))
            .ok_or_else(|| KeyError::Form(text::shown(line)))?;
        let bytes = bytes.strip_prefix(&SPKI_PREFIX).unwrap_or(&bytes);
        let bytes: &[u8; 32] = bytes
            .try_into()
            .map_err(|_| KeyError::Form(text::shown(line)))?;
        VerifyingKey::from_bytes(bytes)
            .ok()
            .and_then(sound)
            .ok_or_else(|| KeyError::NoKey(text::shown(line)))
    }

    /// Did this key sign `content`?
    pub fn verifies(&self, content: &[u8], signature: &Signature) -> bool {
        match (&self.0, signature) {
            (Kind::Minisign(key, _), Signature::Minisign(signature)) => {
                // Signatures that were not made of a hash first are as good; older minisigns make them.
                key.verify(content, signature, true).is_ok()
            }
            (Kind::Ed25519(key), Signature::Ed25519(signature)) => {
                key.verify_strict(content, signature).is_ok()
            }
            _ => false,
        }
    }
}

/// The key, unless it is of small order: such a one verifies signatures that nobody made.
fn sound(key: VerifyingKey) -> Option<TrustedKey> {
    (!key.is_weak()).then_some(TrustedKey(Kind::Ed25519(key)))
}

/// `minisign:RW…` or `ed25519:` and 64 hexadecimal digits: what tells keys apart in tables and logs.
impl fmt::Display for TrustedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Minisign(_, line) => write!(f, "minisign:{line}"),
            Kind::Ed25519(key) => {
                f.write_str("ed25519:")?;
                key.as_bytes()
                    .iter()
                    .try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }
    }
}

impl Serialize for TrustedKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TrustedKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        TrustedKey::parse(&String::deserialize(deserializer)?)
            .map_err(|error| serde::de::Error::custom(format!("the key {error}")))
    }
}
