//! The work list: query tiles against chunks of keys, dealt to workers so that they finish together.
//!
//! Cost of an item = packed query rows × keys. Where every request is one tile of equal rows (decodes), items are whole
//! chunks, which are equal, and one remainder per request; `uniform` deals those in linear time. Anything else (prefills)
//! goes through `general`. The chunk size is the smallest that keeps the number of items within a budget.
//!
//! It must never know the metadata around it, nor where keys lie.

mod general;
mod loads;
mod search;
mod uniform;

use timetable_guest::types::{CaptureShape, flashinfer::WorkList};

/// The workers and what a chunk may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Units that take items: threads, or the share of one KV head in multiprocessors × resident blocks. At least 1.
    pub workers: u32,
    /// Is an item a block for each KV head, and are all meant to run at once? Then there are as many as workers, or as tiles
    /// if those are more, and few beyond. Else a worker takes its items one after the other, and has several.
    pub is_gpu: bool,
    /// Keys of a page; a chunk is a multiple. At least 1.
    pub page_size: u32,
    /// The most chunks of one tile, at least 1; 1 is no split at all.
    pub max_splits: u32,
}

/// Rows to plan.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// s32 [n + 1], rising, from any start.
    pub query_start_loc: &'a [i32],
    /// `s32 [n]`: keys of each request.
    pub kv_lens: &'a [i32],
    /// s32 [n + 1]: running sum of each request's pages, from 0.
    pub paged_kv_indptr: &'a [i32],
    /// Query heads that share a KV head.
    pub group_size: u32,
    /// Decides the largest tile.
    pub head_size: u32,
    /// Does a query see keys up to its own only?
    pub causal: bool,
}

/// Busiest worker over mean, in per mille, that a list of four items a worker or more keeps to.
const BALANCE_PER_MILLE: u64 = 1080;
/// Items that a worker has on average, before a list counts as fine-grained.
const FINE_ITEMS: usize = 4;
/// A chunk that is at most this part of a worker's share balances by itself, dealt in order.
const FINEST: u64 = 10;
/// No chunk is shorter than this many keys, unless a page is longer: the merge would cost more.
const MIN_CHUNK_KEYS: u32 = 128;

/// Packed query rows of a tile, for rows that pack `packed` query rows on average.
pub fn tile_rows(packed: u64, head_size: u32) -> u32 {
    match packed {
        ..=16 => 16,
        17..=64 => 64,
        _ if head_size < 256 => 128,
        _ => 64,
    }
}

/// The most query tiles that a batch of `shape` can have: a tile has 16 rows or more, but for the last of each request.
pub fn most_tiles(shape: &CaptureShape, group_size: u32) -> u64 {
    let (reqs, group) = (u64::from(shape.num_reqs), u64::from(group_size));
    let of_request = (u64::from(shape.max_query_len) * group).div_ceil(16);
    (reqs + u64::from(shape.num_tokens) * group / 16).min(reqs * of_request.max(1))
}

/// The most work items of a list with that many tiles.
///
/// On a GPU `uniform` either counts no more items than workers, or takes chunks of at least a worker's share of the keys: a tile
/// then has ceil(keys / chunk) < keys / chunk + 1 items, and the sum is less than tiles + workers. `general` grows the chunk
/// until its count is at most that.
pub fn most_items(tiles: u64, grid: Grid) -> u64 {
    let workers = u64::from(grid.workers);
    let most = if grid.is_gpu {
        tiles + workers
    } else {
        2 * tiles + 2 * FINEST * workers
    };
    most.min(tiles.saturating_mul(u64::from(grid.max_splits)))
}

/// Plans the batch.
pub fn work_list(batch: &Batch<'_>, grid: Grid) -> WorkList {
    let rows = batch.kv_lens.len();
    let starts = batch.query_start_loc;
    let tokens = (starts[rows] - starts[0]).max(0) as u64;
    let q_len = if rows == 0 { 0 } else { starts[1] - starts[0] };
    // Decodes: the first rows have one length, the rest (padding) have none.
    if q_len > 0 && tokens.is_multiple_of(q_len as u64) {
        let full = (tokens / q_len as u64) as usize;
        let packed = q_len as u64 * u64::from(batch.group_size);
        let tile = tile_rows(packed, batch.head_size);
        let is_uniform = full <= rows
            && packed <= u64::from(tile)
            && starts[full] == starts[rows]
            && all_of_length(&starts[..=full], q_len);
        if is_uniform {
            // The last query of each row sees all its keys, so causality cuts nothing.
            return uniform::plan(batch, full, tile, grid);
        }
    }
    general::plan(batch, grid)
}

fn all_of_length(starts: &[i32], q_len: i32) -> bool {
    starts
        .iter()
        .zip(&starts[1..])
        .fold(true, |all, (start, end)| all & (end - start == q_len))
}
