//! What an operator demands of components, as configuration.
//!
//! Must never know: components, or how anything is verified.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{Digest, TrustedKey};

/// What must vouch for a component before it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Require {
    /// Nothing. The sandbox and the verifier contain a builder whoever wrote it.
    #[default]
    None,
    /// A signature by a trusted key.
    Signature,
    /// The content's hash is in the allow-list.
    AllowList,
    /// One of the two.
    Either,
    /// Both.
    Both,
}

impl Require {
    /// May a signature be what admits a component?
    pub fn signature(self) -> bool {
        !matches!(self, Require::None | Require::AllowList)
    }

    /// May the allow-list be what admits a component?
    pub fn allow_list(self) -> bool {
        !matches!(self, Require::None | Require::Signature)
    }
}

/// The operator's demands. Components that the program itself contains are part of it, and always admitted.
///
/// Default: nothing is required, no keys, no hashes. A check costs a SHA-256 of the component and one signature
/// verification for each key, on the thread that loads it, never on the step thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProvenancePolicy {
    /// What must vouch for a component: `none`, `signature`, `allow-list`, `either`, `both`.
    pub require: Require,
    /// Trusted public keys, as text: minisign's `RW…`, or ed25519 as PEM, base64 or hexadecimal.
    pub keys: Vec<TrustedKey>,
    /// Files with one trusted public key each, at most 16 KiB.
    pub key_files: Vec<PathBuf>,
    /// Allowed contents: SHA-256, 64 hexadecimal digits, with or without `sha256:` before.
    pub allowed_hashes: Vec<Digest>,
    /// Files with allowed contents, one a line as `sha256sum` prints them (what follows the digits is a comment, and so is a
    /// line that begins with `#`); at most 16 MiB each.
    pub allowed_hashes_files: Vec<PathBuf>,
}
