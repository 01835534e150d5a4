//! Plans rows that are one query tile of equal rows each: decodes. It must never know other batches.

use timetable_guest::types::flashinfer::WorkList;

use super::{
    BALANCE_PER_MILLE, Batch, FINE_ITEMS, FINEST, Grid, MIN_CHUNK_KEYS,
    loads::{Loads, NONE, longest_first, resolution},
    search::{Chunk, smallest_chunk},
};

/// The list for the first `rows` rows of `batch`, each one tile of up to `tile` packed query rows.
pub fn plan(batch: &Batch<'_>, rows: usize, tile: u32, grid: Grid) -> WorkList {
    let indptr = &batch.paged_kv_indptr[..=rows];
    let lens = &batch.kv_lens[..rows];
    let workers = grid.workers as usize;
    let largest = indptr
        .iter()
        .zip(&indptr[1..])
        .fold(1, |most, (start, end)| most.max(end - start)) as u32;
    let total = indptr[rows] as u64;
    let chunk = choose_chunk(indptr, total, largest, grid);
    let (list, busiest) = deal(indptr, lens, Chunk::new(chunk, largest), tile, grid);
    if grid.is_gpu {
        return list;
    }
    let items = list.request_indices.len();
    let keys: u64 = lens.iter().map(|&len| len as u64).sum();
    let is_even =
        items < FINE_ITEMS * workers || busiest * workers as u64 * 1000 <= keys * BALANCE_PER_MILLE;
    let finest = (keys / (FINEST * u64::from(grid.workers) * u64::from(grid.page_size))) as u32;
    let finest = finest.max(largest.div_ceil(grid.max_splits));
    if is_even || finest >= chunk {
        return list;
    }
    deal(indptr, lens, Chunk::new(finest, largest), tile, grid).0
}

/// Pages of a chunk.
fn choose_chunk(indptr: &[i32], total: u64, largest: u32, grid: Grid) -> u32 {
    let rows = (indptr.len() - 1) as u64;
    let workers = u64::from(grid.workers);
    let longest = u64::from(largest);
    // One item a worker is even already, or items are small beside a worker's share.
    let is_even = (rows <= workers && longest * workers * 100 <= total * 115)
        || longest * workers * FINE_ITEMS as u64 <= total;
    let least = MIN_CHUNK_KEYS
        .div_ceil(grid.page_size)
        .max(largest.div_ceil(grid.max_splits));
    if grid.max_splits == 1 || is_even {
        return largest;
    }
    if grid.is_gpu && 2 * rows > workers {
        // Rows fill the GPU, or nearly so: only those are split that are much longer than a worker's share.
        let is_short = longest * workers <= 2 * total;
        return if is_short {
            largest
        } else {
            (total.div_ceil(workers) as u32).max(least).min(largest)
        };
    }
    // Few rows: one wave of items. Otherwise three more a worker than there are rows, so that remainders even out.
    let budget = if 2 * rows <= workers {
        workers
    } else {
        rows + 3 * workers
    };
    smallest_chunk(indptr, largest, least.min(largest), budget)
}

/// Deals the chunks, and says how many keys the busiest worker has.
fn deal(indptr: &[i32], lens: &[i32], chunk: Chunk, tile: u32, grid: Grid) -> (WorkList, u64) {
    let workers = grid.workers as usize;
    let chunk_keys = chunk.pages().saturating_mul(grid.page_size);
    let counts = chunk.counts(indptr);
    let mut merge_indptr = Vec::with_capacity(counts.len() + 1);
    let mut items = 0_i32;
    merge_indptr.push(0);
    merge_indptr.extend(counts.iter().map(|&count| {
        items += count;
        items
    }));
    let items = items as usize;
    let split_kv = items
        > counts
            .iter()
            .fold(0, |tiles, &count| tiles + usize::from(count > 0));
    let mut order = Order::new(items, workers);
    let keys = lens.iter().fold(0_u64, |sum, &len| sum + len as u64);
    let busiest = if items <= workers {
        order.one_each(&counts);
        u64::from(chunk_keys).min(lens.iter().fold(0, |most, &len| most.max(len)) as u64)
    } else if u64::from(chunk_keys) * FINEST * workers as u64 <= keys {
        order.in_order(&counts, lens, chunk_keys, keys);
        // Each worker's share ends within half an item of its mark, on both sides.
        keys.div_ceil(workers as u64) + u64::from(chunk_keys)
    } else {
        order.evenly(&counts, lens, chunk_keys)
    };
    let list = WorkList {
        kv_chunk_size: chunk_keys,
        cta_tile_q: tile,
        qo_tile_indices: vec![0; items],
        request_indices: order.requests,
        kv_tile_indices: order.chunks,
        worker_indptr: order.worker_indptr,
        merge_indptr,
        split_kv,
    };
    (list, busiest)
}

/// The items in the order of their workers.
struct Order {
    requests: Vec<i32>,
    chunks: Vec<i32>,
    worker_indptr: Vec<i32>,
    workers: usize,
}

impl Order {
    fn new(items: usize, workers: usize) -> Self {
        Self {
            requests: Vec::with_capacity(items),
            chunks: Vec::with_capacity(items),
            worker_indptr: Vec::with_capacity(workers + 1),
            workers,
        }
    }

    /// At most one item for each worker.
    fn one_each(&mut self, counts: &[i32]) {
        for (row, &count) in counts.iter().enumerate() {
            for chunk in 0..count {
                self.requests.push(row as i32);
                self.chunks.push(chunk);
            }
        }
        let items = self.requests.len() as i32;
        self.worker_indptr
            .extend((0..=self.workers as i32).map(|worker| worker.min(items)));
    }

    /// Items in request order, cut where a worker's share of the keys is reached: right to one item.
    fn in_order(&mut self, counts: &[i32], lens: &[i32], chunk_keys: u32, keys: u64) {
        let workers = self.workers as u64;
        let mut dealt = 0_u64;
        let mut mark = 0_u64;
        self.worker_indptr.push(0);
        for (row, (&count, &len)) in counts.iter().zip(lens).enumerate() {
            let mut left = len as u32;
            for chunk in 0..count {
                let item = left.min(chunk_keys);
                left -= item;
                // An item belongs to the worker in whose share its middle lies.
                let middle = (2 * dealt + u64::from(item)) * workers;
                while middle >= 2 * (mark + keys) && self.worker_indptr.len() < self.workers {
                    mark += keys;
                    self.worker_indptr.push(self.requests.len() as i32);
                }
                dealt += u64::from(item);
                self.requests.push(row as i32);
                self.chunks.push(chunk);
            }
        }
        self.worker_indptr
            .resize(self.workers + 1, self.requests.len() as i32);
    }

    /// Whole chunks evenly, then remainders, the longest first, each to the worker with the fewest keys. Lengths and loads
    /// are compared in sixteenths of a chunk or finer, so that both queues are buckets. Returns the most keys of a worker.
    fn evenly(&mut self, counts: &[i32], lens: &[i32], chunk_keys: u32) -> u64 {
        let shift = resolution(chunk_keys);
        let by_length = longest_first(
            counts.iter().zip(lens).map(|(&count, &len)| {
                if count > 0 {
                    len as u32 - (count as u32 - 1) * chunk_keys
                } else {
                    0
                }
            }),
            shift,
        );
        let whole = counts
            .iter()
            .fold(0_i32, |sum, &count| sum + (count - 1).max(0)) as usize;
        let (each, one_more) = (whole / self.workers, whole % self.workers);

        let mut queue = Loads::new(self.workers, one_more, chunk_keys, shift);
        // Remainders of a worker, as a list: the last one given, and for each row the one before.
        let mut last = vec![NONE; self.workers];
        let mut before = vec![NONE; counts.len()];
        for &row in &by_length {
            let row = row as usize;
            let keys = lens[row] as u32 - (counts[row] as u32 - 1) * chunk_keys;
            let worker = queue.give(keys);
            before[row] = last[worker];
            last[worker] = row as i32;
        }

        // Whole chunks in request order, as (row, chunk) of the next one.
        let (mut row, mut chunk) = (0_usize, 0_i32);
        let mut whole_of_row = counts.first().map_or(0, |count| count - 1);
        self.worker_indptr.push(0);
        for (worker, &last) in last.iter().enumerate() {
            for _ in 0..each + usize::from(worker < one_more) {
                while chunk >= whole_of_row {
                    row += 1;
                    chunk = 0;
                    whole_of_row = counts[row] - 1;
                }
                self.requests.push(row as i32);
                self.chunks.push(chunk);
                chunk += 1;
            }
            let mut remainder = last;
            while remainder != NONE {
                self.requests.push(remainder);
                self.chunks.push(counts[remainder as usize] - 1);
                remainder = before[remainder as usize];
            }
            self.worker_indptr.push(self.requests.len() as i32);
        }
        each as u64 * u64::from(chunk_keys) + u64::from(queue.most)
    }
}
