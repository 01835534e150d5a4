//! What one request asks of the pool: blocks for its next tokens, a cached prefix, and an end to both.
//!
//! One KV cache group: every layer has its own tensors, and one block id stands for the same tokens in all of them. Layers
//! with a sliding window keep their blocks for the whole length, as the field does when group-wise freeing is off.

use super::{
    hash::BlockHash,
    pool::{BlockId, BlockPool},
};

/// A cached prefix of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixHit {
    /// Blocks that hold it.
    pub num_blocks: usize,
    /// Tokens in them.
    pub num_tokens: usize,
}

/// The blocks of one request, in the order of its tokens.
#[derive(Clone, Debug, Default)]
pub struct RequestBlocks {
    /// The parent of the first block's name: whose prefixes these are.
    root: BlockHash,
    /// Blocks held.
    pub ids: Vec<BlockId>,
    /// Names of the full blocks of the request's tokens, as far as computed. Survives preemption: tokens do not change.
    hashes: Vec<BlockHash>,
    /// The first blocks of `ids` that were offered to the prefix cache.
    num_published: usize,
}

impl RequestBlocks {
    /// None yet, with names that begin at `root`: [`PREFIX_ROOT`](super::PREFIX_ROOT), or a tenant's own.
    pub fn rooted(root: BlockHash) -> Self {
        Self {
            root,
            ..Self::default()
        }
    }

    /// Blocks that were offered to the prefix cache.
    pub fn num_published(&self) -> usize {
        self.num_published
    }

    fn hash_full_blocks(&mut self, tokens: &[u32], num_blocks: usize, block_size: usize) {
        for index in self.hashes.len()..num_blocks {
            let parent = self.hashes.last().copied().unwrap_or(self.root);
            let block = &tokens[index * block_size..(index + 1) * block_size];
            self.hashes.push(BlockHash::chain(&parent, block));
        }
    }
}

/// Hands out the blocks of one KV cache.
pub struct KvCacheManager {
    pool: BlockPool,
    block_size: usize,
    enable_prefix_caching: bool,
    num_prefix_queries: u64,
    num_prefix_hits: u64,
}

impl KvCacheManager {
    /// `num_blocks` blocks of `block_size` tokens, the null block included.
    ///
    /// # Panics
    /// If `block_size` is 0, or as [`BlockPool::new`].
    pub fn new(num_blocks: usize, block_size: usize, enable_prefix_caching: bool) -> Self {
        assert!(block_size > 0, "a block of 0 tokens");
        Self {
            pool: BlockPool::new(num_blocks),
            block_size,
            enable_prefix_caching,
            num_prefix_queries: 0,
            num_prefix_hits: 0,
        }
    }

    /// Are the blocks of equal prefixes shared?
    pub fn enables_prefix_caching(&self) -> bool {
        self.enable_prefix_caching
    }

    /// The pool, to look at.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The most tokens that one request can ever have in this cache.
    pub fn capacity_tokens(&self) -> usize {
        (self.pool.num_blocks() - 1) * self.block_size
    }

    /// Tokens looked up in the prefix cache, and tokens found there, since the start.
    pub fn prefix_stats(&self) -> (u64, u64) {
        (self.num_prefix_queries, self.num_prefix_hits)
    }

    /// The longest cached prefix of `tokens`. At least one token is left to compute, because only a computed token has
    /// logits. Takes nothing: the hit holds until the next change of the pool.
    pub fn cached_prefix(&self, request: &mut RequestBlocks, tokens: &[u32]) -> PrefixHit {
        if !self.enable_prefix_caching {
            return PrefixHit::default();
        }
        let most = tokens.len().saturating_sub(1) / self.block_size;
        request.hash_full_blocks(tokens, most, self.block_size);
        let num_blocks = request.hashes[..most]
            .iter()
            .take_while(|hash| self.pool.find(hash).is_some())
            .count();
        PrefixHit {
            num_blocks,
            num_tokens: num_blocks * self.block_size,
        }
    }

    /// Gives a request that holds nothing the blocks of `hit`, then blocks for `num_tokens` tokens in all. All or nothing:
    /// returns false, and changes nothing, if there are too few.
    pub fn admit(
        &mut self,
        request: &mut RequestBlocks,
        hit: PrefixHit,
        num_tokens: usize,
        num_lookup_tokens: usize,
    ) -> bool {
        assert!(
            request.ids.is_empty(),
            "a request that holds blocks was admitted again"
        );
        let found = request.hashes[..hit.num_blocks]
            .iter()
            .map(|hash| self.pool.find(hash).expect("the hit was just looked up"));
        let hit_from_free = found.clone().filter(|&id| self.pool.ref_count(id) == 0);
        let num_new = num_tokens.div_ceil(self.block_size) - hit.num_blocks;
        if num_new + hit_from_free.count() > self.pool.num_free() {
            return false;
        }
        request.ids.extend(found);
        for &id in &request.ids {
            self.pool.share(id);
        }
        request.num_published = hit.num_blocks;
        if self.enable_prefix_caching {
            self.num_prefix_queries += num_lookup_tokens as u64;
            self.num_prefix_hits += hit.num_tokens as u64;
        }
        let grown = self.grow(request, num_tokens);
        debug_assert!(grown, "counted above");
        grown
    }

    /// Extends a request's blocks to hold `num_tokens` tokens. All or nothing: returns false, and changes nothing, if there
    /// are too few.
    pub fn grow(&mut self, request: &mut RequestBlocks, num_tokens: usize) -> bool {
        let needed = num_tokens.div_ceil(self.block_size);
        let num_new = needed.saturating_sub(request.ids.len());
        if num_new > self.pool.num_free() {
            return false;
        }
        for _ in 0..num_new {
            request.ids.extend(self.pool.allocate());
        }
        true
    }

    /// Offers the full blocks among the first `num_tokens` of `tokens` to the prefix cache. Their content must be written
    /// in this step at the latest: rows of one step may share what the step itself writes, because every layer writes its
    /// keys and values before it attends.
    pub fn publish(&mut self, request: &mut RequestBlocks, tokens: &[u32], num_tokens: usize) {
        if !self.enable_prefix_caching {
            return;
        }
        let num_full = num_tokens / self.block_size;
        if num_full <= request.num_published {
            return;
        }
        request.hash_full_blocks(tokens, num_full, self.block_size);
        for index in request.num_published..num_full {
            self.pool.publish(request.ids[index], request.hashes[index]);
        }
        request.num_published = num_full;
    }

    /// Takes back the names of the blocks from `first` on: their content was not written.
    pub fn unpublish(&mut self, request: &mut RequestBlocks, first: usize) {
        for index in first..request.num_published {
            let id = request.ids[index];
            if self.pool.hash_of(id) == Some(&request.hashes[index]) {
                self.pool.forget(id);
            }
        }
        request.num_published = request.num_published.min(first);
    }

    /// Takes every name back: nothing that is in the cache now will be found.
    pub fn forget_all(&mut self) {
        self.pool.forget_all();
    }

    /// Gives everything back.
    pub fn release(&mut self, request: &mut RequestBlocks) {
        self.pool.release(&request.ids);
        request.ids.clear();
        request.num_published = 0;
    }
}
