//! Detached signatures, in the forms that `minisign` and ed25519 tools write.
//!
//! Must never know: keys, or what is signed.

use std::fmt;

use crate::text;

/// The longest signature, in bytes, whatever its form. minisign's have about 300.
pub const SIGNATURE_BYTES_MAX: u64 = 4 << 10;

/// A detached signature of a component's bytes.
#[derive(Clone)]
pub enum Signature {
    /// As `minisign -S` writes it: `FILE.minisig`.
    Minisign(Box<minisign_verify::Signature>),
    /// 64 bytes, raw, in hexadecimal or in base64: `FILE.sig`.
    Ed25519(ed25519_dalek::Signature),
}

/// What is not a signature.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignatureError {
    /// Too long for one.
    #[error(
        "has {0} bytes, and no signature has more than {SIGNATURE_BYTES_MAX}; give the detached signature, not the component"
    )]
    TooLong(usize),
    /// Begins like minisign's and is damaged.
    #[error(
        "is a damaged minisign signature ({0}); copy the whole file, four lines, or sign again with `minisign -S -m FILE`"
    )]
    Minisign(String),
    /// No form that is read.
    #[error(
        "is no signature: it has {0} bytes, and begins with neither `untrusted comment:` nor 64 raw, hexadecimal or base64 bytes; \
         sign with `minisign -S -m FILE`, or with ed25519 into FILE.sig"
    )]
    Form(usize),
}

impl Signature {
    /// Reads a signature, telling the forms apart by their content.
    ///
    /// # Errors
    /// See [`SignatureError`].
    pub fn parse(bytes: &[u8]) -> Result<Signature, SignatureError> {
        if bytes.len() as u64 > SIGNATURE_BYTES_MAX {
            return Err(SignatureError::TooLong(bytes.len()));
        }
        let form = || SignatureError::Form(bytes.len());
        if let Ok(raw) = <&[u8; 64]>::try_from(bytes) {
            return Ok(Signature::Ed25519(ed25519_dalek::Signature::from_bytes(
                raw,
            )));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| form())?.trim();
        if text.starts_with("untrusted comment:") {
            return minisign_verify::Signature::decode(text)
                .map(|signature| Signature::Minisign(Box::new(signature)))
                .map_err(|error| SignatureError::Minisign(error.to_string()));
        }
        text::hex(text)
            .or_else(|| text::base64(text))
            .and_then(|bytes| <[u8; 64]>::try_from(bytes).ok())
            .map(|raw| Signature::Ed25519(ed25519_dalek::Signature::from_bytes(&raw)))
            .ok_or_else(form)
    }
}

impl fmt::Debug for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Signature::Minisign(_) => "Signature::Minisign",
            Signature::Ed25519(_) => "Signature::Ed25519",
        })
    }
}
