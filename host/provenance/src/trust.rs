//! Whether a component may run here: the operator's policy, resolved, and what it says of a content and its signature.
//!
//! Must never know: where components come from, or what they do.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::digest::DigestError;
use crate::key::{KEY_BYTES_MAX, KeyError};
use crate::signature::Signature;
use crate::text::read_bounded;
use crate::{Digest, ProvenancePolicy, Require, TrustedKey};

/// The longest file of allowed hashes, in bytes: about 200,000 lines.
pub const HASHES_BYTES_MAX: u64 = 16 << 20;

/// A policy with its files read: what a host asks before it compiles a component.
#[derive(Clone, Debug, Default)]
pub struct Trust {
    require: Require,
    keys: Vec<TrustedKey>,
    allowed: BTreeSet<Digest>,
    built_in: BTreeSet<Digest>,
}

/// What is known of a component's provenance. Outlives its bytes, so that a policy that changed can be asked again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// The component's hash.
    pub content: Digest,
    signed: Signed,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Signed {
    /// No signature came with it.
    No,
    /// By this key, which was trusted.
    By(TrustedKey),
    /// By nobody who is trusted, or it is a signature of something else.
    ByNobody,
    /// What came is no signature: why, with the remedy.
    Unusable(String),
}

impl Evidence {
    /// Of a content that came without a signature.
    pub fn unsigned(content: Digest) -> Evidence {
        Evidence {
            content,
            signed: Signed::No,
        }
    }

    /// The trusted key that signed the content, if one did.
    pub fn signed_by(&self) -> Option<&TrustedKey> {
        match &self.signed {
            Signed::By(key) => Some(key),
            _ => None,
        }
    }
}

/// Why a policy cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// A signature is required and no key is trusted.
    #[error(
        "provenance: a signature is required, but no key is trusted; give one with --trusted-key FILE, or `keys`"
    )]
    NoKeys,
    /// The allow-list is required and empty.
    #[error(
        "provenance: an allow-list is required, but it is empty; give one with --allow-hashes FILE, or `allowed_hashes`"
    )]
    NoHashes,
    /// A file that cannot be read.
    #[error("{path}: cannot be read ({error}); give a readable file", path = path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// A file of a key that is none.
    #[error("key {path}: {error}", path = path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// Why.
        error: KeyError,
    },
    /// A line of the allow-list that is no hash.
    #[error("allow-list {path}, line {line}: {error}", path = path.display())]
    Hash {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Why.
        error: DigestError,
    },
}

/// Why a component may not run. Each message says what, with the value, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Untrusted {
    /// It came without a signature.
    #[error(
        "{content} is not signed, and this host runs only what a trusted key signed ({keys} trusted); sign it (`minisign -S -m \
         FILE`) and give the signature beside it as FILE.minisig or FILE.sig, or with --signature"
    )]
    NotSigned {
        /// The component's hash.
        content: Digest,
        /// Number of trusted keys.
        keys: usize,
    },
    /// Its signature is none that can be read.
    #[error("{content}: its signature {problem}")]
    Unusable {
        /// The component's hash.
        content: Digest,
        /// What is wrong, and the remedy.
        problem: String,
    },
    /// Nobody who is trusted signed this content.
    #[error(
        "{content}: its signature is by none of the {keys} trusted keys, or is of other bytes; sign this very file with a \
         trusted key, or have the operator trust its key"
    )]
    NotTrusted {
        /// The component's hash.
        content: Digest,
        /// Number of trusted keys.
        keys: usize,
    },
    /// Not in the allow-list.
    #[error(
        "{content} is not among the {allowed} contents that this host allows; have the operator add it to the allow-list"
    )]
    NotAllowed {
        /// The component's hash.
        content: Digest,
        /// Number of allowed contents.
        allowed: usize,
    },
}

impl Trust {
    /// Reads the files that `policy` names, and looks whether it can admit anything at all.
    ///
    /// # Errors
    /// See [`PolicyError`].
    pub fn new(policy: &ProvenancePolicy) -> Result<Trust, PolicyError> {
        let mut keys = policy.keys.clone();
        for path in &policy.key_files {
            keys.push(key_file(path)?);
        }
        let mut allowed: BTreeSet<Digest> = policy.allowed_hashes.iter().copied().collect();
        for path in &policy.allowed_hashes_files {
            hashes_file(path, &mut allowed)?;
        }
        match policy.require {
            Require::Signature | Require::Both if keys.is_empty() => {
                return Err(PolicyError::NoKeys);
            }
            Require::AllowList | Require::Both if allowed.is_empty() => {
                return Err(PolicyError::NoHashes);
            }
            Require::Either if keys.is_empty() && allowed.is_empty() => {
                return Err(PolicyError::NoKeys);
            }
            _ => {}
        }
        Ok(Trust {
            require: policy.require,
            keys,
            allowed,
            built_in: BTreeSet::new(),
        })
    }

    /// Components that the program itself contains: part of it, and always admitted.
    #[must_use]
    pub fn with_built_in(mut self, contents: impl IntoIterator<Item = Digest>) -> Trust {
        self.built_in.extend(contents);
        self
    }

    /// What must vouch for a component.
    pub fn require(&self) -> Require {
        self.require
    }

    /// What is known of `content`, with the bytes of its signature if one came with it. Refuses nothing.
    pub fn examine(&self, content: &[u8], signature: Option<&[u8]>) -> Evidence {
        let signed = match signature.map(Signature::parse) {
            None => Signed::No,
            Some(Err(error)) => Signed::Unusable(error.to_string()),
            Some(Ok(signature)) => self
                .keys
                .iter()
                .find(|key| key.verifies(content, &signature))
                .map_or(Signed::ByNobody, |key| Signed::By(key.clone())),
        };
        Evidence {
            content: Digest::of(content),
            signed,
        }
    }

    /// May a component of which this is known run?
    ///
    /// # Errors
    /// See [`Untrusted`].
    pub fn permits(&self, evidence: &Evidence) -> Result<(), Untrusted> {
        let content = evidence.content;
        if self.built_in.contains(&content) {
            return Ok(());
        }
        let allowed = || {
            let allowed = self.allowed.len();
            match self.allowed.contains(&content) {
                true => Ok(()),
                false => Err(Untrusted::NotAllowed { content, allowed }),
            }
        };
        match self.require {
            Require::None => Ok(()),
            Require::Signature => self.signed(evidence),
            Require::AllowList => allowed(),
            // The list first: a listed content needs no signature. What is said is what is wrong with the signature.
            Require::Either => allowed().or_else(|_| self.signed(evidence)),
            Require::Both => self.signed(evidence).and_then(|()| allowed()),
        }
    }

    /// [`Trust::examine`] and [`Trust::permits`] in one.
    ///
    /// # Errors
    /// See [`Untrusted`].
    pub fn admit(&self, content: &[u8], signature: Option<&[u8]>) -> Result<Evidence, Untrusted> {
        let evidence = self.examine(content, signature);
        self.permits(&evidence)?;
        Ok(evidence)
    }

    fn signed(&self, evidence: &Evidence) -> Result<(), Untrusted> {
        let (content, keys) = (evidence.content, self.keys.len());
        match &evidence.signed {
            // The policy may be another than the one that it was examined by.
            Signed::By(key) if self.keys.contains(key) => Ok(()),
            Signed::By(_) | Signed::ByNobody => Err(Untrusted::NotTrusted { content, keys }),
            Signed::No => Err(Untrusted::NotSigned { content, keys }),
            Signed::Unusable(problem) => Err(Untrusted::Unusable {
                content,
                problem: problem.clone(),
            }),
        }
    }
}

fn key_file(path: &Path) -> Result<TrustedKey, PolicyError> {
    let bytes = read(path, KEY_BYTES_MAX)?;
    TrustedKey::parse(&String::from_utf8_lossy(&bytes)).map_err(|error| PolicyError::Key {
        path: path.to_owned(),
        error,
    })
}

fn hashes_file(path: &Path, into: &mut BTreeSet<Digest>) -> Result<(), PolicyError> {
    let bytes = read(path, HASHES_BYTES_MAX)?;
    for (index, line) in String::from_utf8_lossy(&bytes).lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let digits = line.split_whitespace().next().unwrap_or(line);
        into.insert(digits.parse().map_err(|error| PolicyError::Hash {
            path: path.to_owned(),
            line: index + 1,
            error,
        })?);
    }
    Ok(())
}

fn read(path: &Path, max: u64) -> Result<Vec<u8>, PolicyError> {
    read_bounded(path, max).map_err(|error| PolicyError::Unreadable {
        path: path.to_owned(),
        error,
    })
}
