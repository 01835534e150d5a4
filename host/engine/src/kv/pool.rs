//! The pool of blocks: reference counts, the free list, and the map from content to block.
//!
//! Nothing here moves data: a cached block is found again by its hash and shared by counting. A free block keeps its content
//! and its name until it is handed out, so the free list is also the eviction order.
//!
//! The order is the one recorded from the engine that this project follows: blocks come from the front; a freed block whose
//! content nobody can find goes back to the front, one that can still be hit goes to the back (least recently used first).

use std::collections::HashMap;

use super::hash::{BlockHash, BuildFirstBytes};

/// Index of a block in the KV cache tensors of every layer.
pub type BlockId = u32;

/// Block 0: table entries that mean "nothing" point here. It is never handed out, so a stray read or write through a zeroed
/// table entry touches no request's data.
pub const NULL_BLOCK_ID: BlockId = 0;

/// "No neighbour" in the free list, which is linked through the blocks.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Block {
    ref_count: u32,
    prev: u32,
    next: u32,
    hash: Option<BlockHash>,
}

/// All blocks of one KV cache.
pub struct BlockPool {
    blocks: Vec<Block>,
    head: u32,
    tail: u32,
    num_free: usize,
    cached: HashMap<BlockHash, BlockId, BuildFirstBytes>,
    num_evictions: u64,
}

impl BlockPool {
    /// A pool of `num_blocks` blocks, the null block included.
    ///
    /// # Panics
    /// If there is no block besides the null block, or more than `u32::MAX - 1`.
    pub fn new(num_blocks: usize) -> Self {
        assert!(
            (2..u32::MAX as usize).contains(&num_blocks),
            "a KV cache of {num_blocks} blocks: it needs the null block and at least one more"
        );
        let last = num_blocks as u32 - 1;
        let blocks = (0..=last)
            .map(|id| Block {
                ref_count: 0,
                prev: if id <= 1 { NONE } else { id - 1 },
                next: if id == 0 || id == last { NONE } else { id + 1 },
                hash: None,
            })
            .collect();
        Self {
            blocks,
            head: 1,
            tail: last,
            num_free: num_blocks - 1,
            cached: HashMap::with_capacity_and_hasher(num_blocks, BuildFirstBytes::default()),
            num_evictions: 0,
        }
    }

    /// Blocks, the null block included.
    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that nobody holds, cached ones included.
    pub fn num_free(&self) -> usize {
        self.num_free
    }

    /// Cached blocks that were given up to make room.
    pub fn num_evictions(&self) -> u64 {
        self.num_evictions
    }

    /// How many holders `block` has.
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.blocks[block as usize].ref_count
    }

    /// The name of `block`'s content, if it can be found by it.
    pub fn hash_of(&self, block: BlockId) -> Option<&BlockHash> {
        self.blocks[block as usize].hash.as_ref()
    }

    /// The block whose content is named `hash`. The caller does not hold it yet: see [`BlockPool::share`].
    pub fn find(&self, hash: &BlockHash) -> Option<BlockId> {
        self.cached.get(hash).copied()
    }

    /// Takes the next free block; its former content is forgotten. `None` if none is free.
    pub fn allocate(&mut self) -> Option<BlockId> {
        if self.head == NONE {
            return None;
        }
        let id = self.head;
        self.unlink(id);
        if self.forget(id) {
            self.num_evictions += 1;
        }
        self.blocks[id as usize].ref_count = 1;
        Some(id)
    }

    /// One more holder of a block that was found by its hash.
    pub fn share(&mut self, block: BlockId) {
        assert_ne!(block, NULL_BLOCK_ID, "the null block has no holders");
        if self.blocks[block as usize].ref_count == 0 {
            self.unlink(block);
        }
        self.blocks[block as usize].ref_count += 1;
    }

    /// One holder fewer for each of `blocks`, given in the order in which the holder had them. The last of them are given
    /// up first: a prefix is worth more than what follows it.
    ///
    /// # Panics
    /// If one of them has no holder.
    pub fn release(&mut self, blocks: &[BlockId]) {
        // Unnamed blocks go to the front in reverse order, so the last block of the request must be linked last of all to
        // stand first; walking forward does that. Named blocks go to the back in reverse order.
        for &id in blocks {
            let block = &mut self.blocks[id as usize];
            assert!(block.ref_count > 0, "block {id} released without a holder");
            block.ref_count -= 1;
            if block.ref_count == 0 && block.hash.is_none() {
                self.link_front(id);
            }
        }
        for &id in blocks.iter().rev() {
            let block = &self.blocks[id as usize];
            if block.ref_count == 0 && block.hash.is_some() {
                self.link_back(id);
            }
        }
    }

    /// Names the content of a held block, so that others find it. The first block of a name keeps it; a later copy stays
    /// unnamed.
    pub fn publish(&mut self, block: BlockId, hash: BlockHash) {
        debug_assert!(
            self.ref_count(block) > 0,
            "block {block} published while free"
        );
        if self.blocks[block as usize].hash.is_none() {
            self.cached.entry(hash).or_insert_with(|| {
                self.blocks[block as usize].hash = Some(hash);
                block
            });
        }
    }

    /// Takes a block's name away (its content was not written after all). Returns whether it had one.
    pub fn forget(&mut self, block: BlockId) -> bool {
        match self.blocks[block as usize].hash.take() {
            Some(hash) => {
                self.cached.remove(&hash);
                true
            }
            None => false,
        }
    }

    /// Takes every block's name away.
    pub fn forget_all(&mut self) {
        for block in &mut self.blocks {
            block.hash = None;
        }
        self.cached.clear();
    }

    /// The free list, first to be handed out first. For tests and diagnosis.
    pub fn free_list(&self) -> Vec<BlockId> {
        let mut ids = Vec::with_capacity(self.num_free);
        let mut id = self.head;
        while id != NONE {
            ids.push(id);
            id = self.blocks[id as usize].next;
        }
        ids
    }

    fn unlink(&mut self, id: BlockId) {
        let Block { prev, next, .. } = self.blocks[id as usize];
        match prev {
            NONE => self.head = next,
            prev => self.blocks[prev as usize].next = next,
        }
        match next {
            NONE => self.tail = prev,
            next => self.blocks[next as usize].prev = prev,
        }
        let block = &mut self.blocks[id as usize];
        (block.prev, block.next) = (NONE, NONE);
        self.num_free -= 1;
    }

    fn link_front(&mut self, id: BlockId) {
        let head = self.head;
        (self.blocks[id as usize].prev, self.blocks[id as usize].next) = (NONE, head);
        match head {
            NONE => self.tail = id,
            head => self.blocks[head as usize].prev = id,
        }
        self.head = id;
        self.num_free += 1;
    }

    fn link_back(&mut self, id: BlockId) {
        let tail = self.tail;
        (self.blocks[id as usize].prev, self.blocks[id as usize].next) = (tail, NONE);
        match tail {
            NONE => self.head = id,
            tail => self.blocks[tail as usize].next = id,
        }
        self.tail = id;
        self.num_free += 1;
    }
}
