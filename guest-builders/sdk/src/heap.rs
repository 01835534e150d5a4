//! The guest's allocator: a heap for what a builder keeps, and an arena for one call's arguments, temporaries and result.
//!
//! The arena is a bump pointer that is rewound at the end of a call, when nothing of the call is left alive. If something is
//! (the builder cached an allocation made during a call), the arena is given up for good and everything comes from the heap,
//! so that a careless builder is slower but never wrong and never grows without bound.
//!
//! This module must never know wasm: it works on addresses and asks `Pages` for memory, so that its tests run anywhere.

/// Where memory comes from.
pub trait Pages {
    /// At least `bytes` more, as (address, length), aligned to 16; none when there is no more.
    fn grow(&mut self, bytes: usize) -> Option<(usize, usize)>;
}

const CLASSES: usize = 32;
const SMALLEST_CLASS: usize = 4;
const CHUNK: usize = 65_536;
const FIRST_ARENA: usize = 4 * 65_536;
/// Alignment of every heap block; larger ones are served, but not reused.
const BLOCK_ALIGN: usize = 16;

/// Two kinds of memory behind one allocator. Addresses are absolute; 0 is failure.
pub struct Heap<P> {
    pages: P,
    /// The arena: [base, end), used below `top`.
    base: usize,
    top: usize,
    end: usize,
    /// Live blocks in the arena.
    live: usize,
    /// Do allocations go to the arena?
    in_call: bool,
    /// Has a builder kept a block of the arena?
    retired: bool,
    /// The part of a retired arena whose blocks may still be released: those are not reused.
    retired_blocks: (usize, usize),
    /// Did the arena run out during this call?
    spilled: bool,
    /// Free heap blocks by the power of two of their size, linked through their first word.
    free: [usize; CLASSES],
    /// Unused heap memory.
    chunk: (usize, usize),
}

/// Where allocations went before `keep_allocations`.
#[derive(Clone, Copy, Debug)]
pub struct Phase(bool);

impl<P: Pages> Heap<P> {
    pub const fn new(pages: P) -> Self {
        Self {
            pages,
            base: 0,
            top: 0,
            end: 0,
            live: 0,
            in_call: false,
            retired: false,
            retired_blocks: (0, 0),
            spilled: false,
            free: [0; CLASSES],
            chunk: (0, 0),
        }
    }

    /// A block, or 0.
    #[inline(always)]
    pub fn allocate(&mut self, size: usize, align: usize) -> usize {
        if self.in_call {
            let start = (self.top + align - 1) & !(align - 1);
            if size <= self.end.saturating_sub(start) {
                self.top = start + size;
                self.live += 1;
                return start;
            }
        }
        self.allocate_slowly(size, align)
    }

    #[cold]
    #[inline(never)]
    fn allocate_slowly(&mut self, size: usize, align: usize) -> usize {
        if self.in_call {
            if let Some((start, length)) = self.pages.grow(size + align) {
                if start == self.end {
                    self.end += length;
                    return self.allocate(size, align);
                }
                self.give_to_heap(start, start + length);
            }
            self.spilled = true;
        }
        self.allocate_in_heap(size, align)
    }

    fn allocate_in_heap(&mut self, size: usize, align: usize) -> usize {
        if align > BLOCK_ALIGN {
            let start = self.allocate_in_heap(size + align, BLOCK_ALIGN);
            return if start == 0 {
                0
            } else {
                (start + align - 1) & !(align - 1)
            };
        }
        let class = class_of(size);
        let block = self.free[class];
        if block != 0 {
            // SAFETY: a free block holds the address of the next one of its class in its first word.
            self.free[class] = unsafe { (block as *const usize).read() };
            return block;
        }
        let bytes = 1 << class;
        if self.chunk.1 - self.chunk.0 < bytes {
            let Some((start, length)) = self.pages.grow(bytes.max(CHUNK)) else {
                return 0;
            };
            self.give_to_heap(start, start + length);
        }
        if self.chunk.1 - self.chunk.0 < bytes {
            return 0;
        }
        let start = self.chunk.0;
        self.chunk.0 += bytes;
        start
    }

    /// Unused memory for the heap: joined with what it has, or the larger of the two.
    fn give_to_heap(&mut self, start: usize, end: usize) {
        let start = (start + BLOCK_ALIGN - 1) & !(BLOCK_ALIGN - 1);
        if start == self.chunk.1 {
            self.chunk.1 = end;
        } else if end.saturating_sub(start) > self.chunk.1 - self.chunk.0 {
            self.chunk = (start, end);
        }
    }

    /// Takes a block back.
    ///
    /// # Safety
    /// `block` is a live block of this heap with that size and alignment.
    #[inline(always)]
    pub unsafe fn release(&mut self, block: usize, size: usize, align: usize) {
        if block >= self.base && block < self.end {
            self.live -= 1;
            if block + size == self.top {
                self.top = block;
            }
            return;
        }
        // SAFETY: passed on.
        unsafe { self.release_to_heap(block, size, align) }
    }

    #[inline(never)]
    unsafe fn release_to_heap(&mut self, block: usize, size: usize, align: usize) {
        if align > BLOCK_ALIGN || (block >= self.retired_blocks.0 && block < self.retired_blocks.1)
        {
            return;
        }
        let class = class_of(size);
        // SAFETY: the block is dead and at least one word long.
        unsafe { (block as *mut usize).write(self.free[class]) };
        self.free[class] = block;
    }

    /// A block of another size with the same first bytes, or 0.
    ///
    /// # Safety
    /// `block` is a live block of this heap with size `old` and that alignment.
    pub unsafe fn resize(&mut self, block: usize, old: usize, align: usize, new: usize) -> usize {
        let in_arena = block >= self.base && block < self.end;
        if in_arena {
            if block + old == self.top && new <= self.end - block {
                self.top = block + new;
                return block;
            }
        } else if align <= BLOCK_ALIGN
            && class_of(old) == class_of(new)
            && !(block >= self.retired_blocks.0 && block < self.retired_blocks.1)
        {
            return block;
        }
        // What lives in the heap stays there: it is the builder's own, even while a call runs.
        let moved = if in_arena {
            self.allocate(new, align)
        } else {
            self.allocate_in_heap(new, align)
        };
        if moved != 0 {
            // SAFETY: both blocks are live and disjoint.
            unsafe {
                core::ptr::copy_nonoverlapping(block as *const u8, moved as *mut u8, old.min(new));
                self.release(block, old, align);
            }
        }
        moved
    }

    /// From here on, and until `restore`, allocations are the builder's own.
    pub fn keep_allocations(&mut self) -> Phase {
        let before = Phase(self.in_call);
        self.in_call = false;
        before
    }

    /// Ends `keep_allocations`.
    pub fn restore(&mut self, phase: Phase) {
        self.in_call = phase.0;
    }

    /// The builder is made: calls get their arena.
    pub fn seal(&mut self) {
        if self.base == 0
            && !self.retired
            && let Some((start, length)) = self.pages.grow(FIRST_ARENA)
        {
            (self.base, self.top, self.end) = (start, start, start + length);
            self.in_call = true;
        }
    }

    /// The call is over: nothing of it may be alive.
    #[inline]
    pub fn end_call(&mut self) {
        if self.live == 0 && !self.spilled {
            self.top = self.base;
        } else {
            self.end_unusual_call();
        }
    }

    #[cold]
    #[inline(never)]
    fn end_unusual_call(&mut self) {
        let size = self.end - self.base;
        if self.live != 0 {
            // The builder kept a block. Give the arena up.
            self.retired = true;
            self.in_call = false;
            self.retired_blocks = (self.base, self.top);
            let (top, end) = (self.top, self.end);
            (self.base, self.top, self.end, self.live) = (0, 0, 0, 0);
            self.give_to_heap(top, end);
        } else if let Some((start, length)) = self.pages.grow(2 * size) {
            let (base, end) = (self.base, self.end);
            (self.base, self.top, self.end) = (start, start, start + length);
            self.give_to_heap(base, end);
        } else {
            self.top = self.base;
        }
        self.spilled = false;
    }
}

/// The power of two of a heap block for `size` bytes.
const fn class_of(size: usize) -> usize {
    let class = (usize::BITS - size.saturating_sub(1).leading_zeros()) as usize;
    if class < SMALLEST_CLASS {
        SMALLEST_CLASS
    } else {
        class
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A memory of `limit` bytes that grows contiguously, as a wasm memory does.
    struct Fixed {
        memory: Vec<u128>,
        used: usize,
    }

    impl Fixed {
        fn new(limit: usize) -> Self {
            Self {
                memory: vec![0; limit / 16],
                used: 0,
            }
        }
    }

    impl Pages for Fixed {
        fn grow(&mut self, bytes: usize) -> Option<(usize, usize)> {
            let bytes = bytes.next_multiple_of(CHUNK);
            if self.used + bytes > self.memory.len() * 16 {
                return None;
            }
            let start = self.memory.as_mut_ptr() as usize + self.used;
            self.used += bytes;
            Some((start, bytes))
        }
    }

    fn fill(block: usize, size: usize, tag: u8) {
        // SAFETY: a live block of that size.
        unsafe { core::ptr::write_bytes(block as *mut u8, tag, size) };
    }

    fn holds(block: usize, size: usize, tag: u8) -> bool {
        // SAFETY: a live block of that size.
        unsafe { core::slice::from_raw_parts(block as *const u8, size) }
            .iter()
            .all(|&byte| byte == tag)
    }

    #[test]
    fn a_call_that_leaves_nothing_behind_uses_the_same_memory_again() {
        let mut heap = Heap::new(Fixed::new(1 << 20));
        heap.seal();
        let first = heap.allocate(100, 4);
        // SAFETY: the block is live.
        unsafe { heap.release(first, 100, 4) };
        heap.end_call();
        for _ in 0..1000 {
            let a = heap.allocate(100, 4);
            let b = heap.allocate(5000, 4);
            assert_eq!(a, first);
            // SAFETY: both blocks are live.
            unsafe {
                heap.release(a, 100, 4);
                heap.release(b, 5000, 4);
            }
            heap.end_call();
        }
        assert_eq!(heap.pages.used, FIRST_ARENA);
    }

    #[test]
    fn a_builder_that_caches_an_allocation_of_each_call_stays_right_and_bounded() {
        let mut heap = Heap::new(Fixed::new(1 << 20));
        heap.seal();
        let mut cached: Option<usize> = None;
        for call in 0..10_000_u32 {
            let temporary = heap.allocate(4096, 4);
            let fresh = heap.allocate(1000, 4);
            assert!(temporary != 0 && fresh != 0, "out of memory in call {call}");
            fill(fresh, 1000, call as u8);
            if let Some(old) = cached.replace(fresh) {
                assert!(holds(old, 1000, (call - 1) as u8));
                // SAFETY: live until here.
                unsafe { heap.release(old, 1000, 4) };
            }
            // SAFETY: live.
            unsafe { heap.release(temporary, 4096, 4) };
            heap.end_call();
        }
    }

    #[test]
    fn what_the_builder_keeps_may_grow_during_a_call() {
        let mut heap = Heap::new(Fixed::new(1 << 20));
        let kept = heap.allocate(100, 4);
        heap.seal();
        fill(kept, 100, 7);
        // SAFETY: live.
        let grown = unsafe { heap.resize(kept, 100, 4, 10_000) };
        heap.end_call();
        assert!(!heap.retired, "a block of the heap moved into the arena");
        let other = heap.allocate(50_000, 4);
        fill(other, 50_000, 9);
        assert!(holds(grown, 100, 7));
    }

    #[test]
    fn a_call_larger_than_the_arena_gets_a_larger_arena_next_time() {
        let mut heap = Heap::new(Fixed::new(8 << 20));
        heap.seal();
        let kept = heap.keep_allocations();
        let state = heap.allocate(100_000, 4);
        heap.restore(kept);
        assert_ne!(state, 0);
        let large = heap.allocate(2 * FIRST_ARENA, 4);
        assert_ne!(large, 0);
        // SAFETY: live.
        unsafe { heap.release(large, 2 * FIRST_ARENA, 4) };
        heap.end_call();
        assert!(!heap.spilled && !heap.retired);
    }

    #[test]
    fn no_more_memory_is_zero_and_not_a_wild_block() {
        let mut heap = Heap::new(Fixed::new(FIRST_ARENA));
        heap.seal();
        assert_eq!(heap.allocate(2 * FIRST_ARENA, 4), 0);
        assert_ne!(heap.allocate(100, 4), 0);
    }

    proptest! {
        /// Blocks never overlap and keep their bytes, whatever the order of allocations, releases, resizes and calls.
        #[test]
        fn blocks_keep_their_bytes(steps in proptest::collection::vec((0_u8..6, 1_usize..3000, 0_usize..64), 1..300)) {
            let mut heap = Heap::new(Fixed::new(64 << 20));
            let mut live: Vec<(usize, usize, u8)> = Vec::new();
            for (i, (what, size, which)) in steps.into_iter().enumerate() {
                let tag = i as u8;
                match what {
                    0..=2 => {
                        let block = heap.allocate(size, 4);
                        prop_assert_ne!(block, 0);
                        fill(block, size, tag);
                        live.push((block, size, tag));
                    }
                    3 if !live.is_empty() => {
                        let at = which % live.len();
                        let (block, size, tag) = live.swap_remove(at);
                        prop_assert!(holds(block, size, tag));
                        // SAFETY: live until here.
                        unsafe { heap.release(block, size, 4) };
                    }
                    4 if !live.is_empty() => {
                        let at = which % live.len();
                        let (block, old, tag) = live[at];
                        // SAFETY: live.
                        let moved = unsafe { heap.resize(block, old, 4, size) };
                        prop_assert!(holds(moved, old.min(size), tag));
                        fill(moved, size, tag);
                        live[at] = (moved, size, tag);
                    }
                    5 if which == 0 => heap.seal(),
                    5 => heap.end_call(),
                    _ => {}
                }
                for &(block, size, tag) in &live {
                    prop_assert!(holds(block, size, tag));
                }
            }
        }
    }
}
