//! Two queues for dealing the longest item first to the worker with the least: buckets, so that both are linear. Loads are
//! compared to a sixteenth of the longest item or finer (`shift`). It must never know what an item is.

/// No worker, no item.
pub const NONE: i32 = -1;

/// Bits below which items are not told apart, for items up to `longest`, which is then below 2^(shift + 5).
pub const fn resolution(longest: u32) -> u32 {
    if longest < 16 { 0 } else { longest.ilog2() - 4 }
}

/// Indices of the items that are not 0, the longest first, equal ones (to 2^shift) in order.
pub fn longest_first(items: impl ExactSizeIterator<Item = u32>, shift: u32) -> Vec<i32> {
    // 32 buckets of lengths, the longest first, and one for items that are 0.
    let mut starts = [0_u32; 34];
    let mut buckets: Vec<u8> = Vec::with_capacity(items.len());
    for item in items {
        let bucket = if item > 0 {
            31 - (item >> shift).min(31)
        } else {
            32
        };
        buckets.push(bucket as u8);
        starts[bucket as usize + 1] += 1;
    }
    for bucket in 1..starts.len() {
        starts[bucket] += starts[bucket - 1];
    }
    let mut order = vec![0; starts[32] as usize];
    for (item, &bucket) in buckets.iter().enumerate() {
        let start = &mut starts[usize::from(bucket.min(32))];
        if let Some(place) = order.get_mut(*start as usize) {
            *place = item as i32;
        }
        *start += 1;
    }
    order
}

const LEVELS: usize = 512;

/// Workers by load. Loads only grow, so the least is found by looking up from the last one found.
pub struct Loads {
    loads: Vec<u32>,
    /// The next worker of the same level.
    next: Vec<i32>,
    /// First worker of each level.
    heads: [i32; LEVELS],
    least: usize,
    shift: u32,
    /// The most load of a worker.
    pub most: u32,
}

impl Loads {
    /// `one_more` workers begin with `more`, the rest with nothing.
    pub fn new(workers: usize, one_more: usize, more: u32, shift: u32) -> Self {
        let mut this = Self {
            loads: vec![0; workers],
            next: vec![NONE; workers],
            heads: [NONE; LEVELS],
            least: 0,
            shift,
            most: 0,
        };
        for worker in (0..workers).rev() {
            let load = if worker < one_more { more } else { 0 };
            this.put(worker, load);
        }
        this
    }

    #[inline(always)]
    fn put(&mut self, worker: usize, load: u32) {
        let level = ((load >> self.shift) as usize).min(LEVELS - 1);
        self.loads[worker] = load;
        self.most = self.most.max(load);
        self.next[worker] = self.heads[level];
        self.heads[level] = worker as i32;
    }

    /// Gives `load` to the worker with the least load.
    #[inline(always)]
    pub fn give(&mut self, load: u32) -> usize {
        while self.heads[self.least] == NONE {
            self.least += 1;
        }
        let worker = self.heads[self.least] as usize;
        self.heads[self.least] = self.next[worker];
        self.put(worker, self.loads[worker] + load);
        worker
    }
}
