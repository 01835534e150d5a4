//! Names for the content of full blocks: a chain of SHA-256 over token ids.
//!
//! A block's keys and values depend on every token before it, so its name does too. SHA-256 is used because equal names are
//! taken for equal content without a comparison: a shorter hash would let one request read another's cache.

use std::hash::{BuildHasherDefault, Hasher};

use sha2::{Digest, Sha256};
use timetable_sandbox::TenantName;

/// The name of one full block and everything before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockHash(pub [u8; 32]);

/// The parent of a first block of nobody in particular: the default hash.
pub const PREFIX_ROOT: BlockHash = BlockHash([0; 32]);

impl BlockHash {
    /// The parent of a tenant's first blocks: no request of another tenant, or of nobody, has a block of the same name.
    pub fn of_tenant(tenant: &TenantName) -> Self {
        let mut hasher = Sha256::new();
        hasher.update(b"timetable: the prefix cache of tenant ");
        hasher.update(tenant.as_str());
        Self(hasher.finalize().into())
    }

    /// The name of the block that holds `tokens` and follows the block named `parent`.
    pub fn chain(parent: &BlockHash, tokens: &[u32]) -> Self {
        let mut hasher = Sha256::new();
        hasher.update(parent.0);
        hasher.update(bytemuck::cast_slice::<u32, u8>(tokens));
        Self(hasher.finalize().into())
    }
}

impl std::hash::Hash for BlockHash {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let mut first = [0; 8];
        first.copy_from_slice(&self.0[..8]);
        state.write_u64(u64::from_le_bytes(first));
    }
}

/// Takes eight bytes of a SHA-256 as they are: they are as good as random.
#[derive(Default)]
pub(super) struct FirstBytes(u64);

impl Hasher for FirstBytes {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

/// Builds `FirstBytes`.
pub(super) type BuildFirstBytes = BuildHasherDefault<FirstBytes>;
