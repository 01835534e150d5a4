//! KV blocks: who owns which, which are shared, which hold a known prefix.
//!
//! Blocks are numbers here. This module must never know a tensor, a device, or what a token means.

mod hash;
mod manager;
mod pool;

pub use hash::{BlockHash, PREFIX_ROOT};
pub use manager::{KvCacheManager, PrefixHit, RequestBlocks};
pub use pool::{BlockId, BlockPool, NULL_BLOCK_ID};
