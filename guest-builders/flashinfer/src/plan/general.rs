//! Plans any rows: tiles of different sizes against keys that causality cuts. It must never be
//! needed for decodes: it looks at every item several times.

use timetable_guest::types::flashinfer::WorkList;

use super::{
    BALANCE_PER_MILLE, Batch, FINE_ITEMS, FINEST, Grid, MIN_CHUNK_KEYS,
    loads::{Loads, longest_first, resolution},
    most_items, tile_rows,
};

/// Items that all attempts at a list may deal together: a call has a fixed budget, and something more for each row.
const MOST_DEALT: u64 = 1200;
const DEALT_PER_ROW: u64 = 16;

/// One query tile.
struct Tile {
    request: i32,
    index: i32,
    /// Packed query rows.
    rows: u32,
    /// Keys of the request.
    keys: u32,
    /// Keys that some row of the tile sees: a prefix.
    visible: u32,
}

/// One tile against one chunk.
struct Item {
    tile: u32,
    chunk: u32,
    cost: u64,
}

pub fn plan(batch: &Batch<'_>, grid: Grid) -> WorkList {
    let rows = batch.kv_lens.len();
    let starts = batch.query_start_loc;
    let packed = (starts[rows] - starts[0]).max(0) as u64 * u64::from(batch.group_size);
    let tile = tile_rows(packed.div_ceil(rows.max(1) as u64), batch.head_size);
    let tiles = tiles(batch, tile);
    let longest = tiles.iter().fold(1, |most, tile| most.max(tile.visible));
    let whole = longest.div_ceil(grid.page_size);
    let least = whole.div_ceil(grid.max_splits);
    let mut pages = choose_chunk(&tiles, tile, whole, grid).max(least);
    let workers = grid.workers as usize;
    let mut best: Option<(u64, WorkList)> = None;
    let mut spent = 0;
    loop {
        let items = items(&tiles, pages, grid.page_size);
        let total: u64 = items.iter().map(|item| item.cost).sum();
        let (list, busiest) = deal(&tiles, &items, pages, tile, grid);
        let is_even = items.len() < FINE_ITEMS * workers
            || busiest * workers as u64 * 1000 <= total * BALANCE_PER_MILLE;
        if best.as_ref().is_none_or(|(least, _)| busiest < *least) {
            best = Some((busiest, list));
        }
        spent += items.len() as u64;
        let halved = pages.div_ceil(2).max(least);
        if is_even || grid.is_gpu || halved == pages {
            break;
        }
        let next = count(&tiles, halved, grid.page_size);
        if spent + next > MOST_DEALT + DEALT_PER_ROW * rows as u64
            || next > most_items(tiles.len() as u64, grid)
        {
            break;
        }
        pages = halved;
    }
    best.map_or_else(|| deal(&tiles, &[], 1, tile, grid).0, |(_, list)| list)
}

fn tiles(batch: &Batch<'_>, tile: u32) -> Vec<Tile> {
    let mut tiles = Vec::new();
    let starts = batch.query_start_loc;
    for (request, &keys) in batch.kv_lens.iter().enumerate() {
        let q_len = (starts[request + 1] - starts[request]).max(0) as u32;
        let packed = q_len * batch.group_size;
        let keys = keys.max(0) as u32;
        for index in 0..packed.div_ceil(tile) {
            let end = ((index + 1) * tile).min(packed);
            let last_token = (end - 1) / batch.group_size;
            let visible = if batch.causal {
                (i64::from(keys) - i64::from(q_len) + i64::from(last_token) + 1)
                    .clamp(0, i64::from(keys)) as u32
            } else {
                keys
            };
            tiles.push(Tile {
                request: request as i32,
                index: index as i32,
                rows: end - index * tile,
                keys,
                visible,
            });
        }
    }
    tiles
}

/// Pages of a chunk: few items where there are few tiles, else so small that the largest item is a quarter of a worker's
/// share.
fn choose_chunk(tiles: &[Tile], tile: u32, whole: u32, grid: Grid) -> u32 {
    let workers = u64::from(grid.workers);
    let cost: u64 = tiles
        .iter()
        .map(|tile| u64::from(tile.rows) * u64::from(tile.visible))
        .sum();
    let few = 2 * tiles.len() as u64 <= workers;
    let per_worker = if few || grid.is_gpu {
        1
    } else {
        FINE_ITEMS as u64
    };
    let keys = cost / (workers * per_worker * u64::from(tile)).max(1);
    let least = u64::from(MIN_CHUNK_KEYS.div_ceil(grid.page_size));
    let budget = if few {
        workers
    } else if grid.is_gpu {
        tiles.len() as u64 + workers
    } else {
        (tiles.len() as u64 + 3 * workers).min(MOST_DEALT.max(tiles.len() as u64))
    };
    let mut pages = (keys / u64::from(grid.page_size))
        .max(least)
        .min(u64::from(whole)) as u32;
    while pages < whole && count(tiles, pages, grid.page_size) > budget {
        pages = (pages + pages / 4 + 1).min(whole);
    }
    pages.max(1)
}

/// Items with chunks of `pages` pages.
fn count(tiles: &[Tile], pages: u32, page_size: u32) -> u64 {
    let chunk = pages.saturating_mul(page_size);
    tiles
        .iter()
        .map(|tile| u64::from(tile.visible.div_ceil(chunk)))
        .sum()
}

fn items(tiles: &[Tile], pages: u32, page_size: u32) -> Vec<Item> {
    let chunk = pages.saturating_mul(page_size);
    let mut items = Vec::new();
    for (index, tile) in tiles.iter().enumerate() {
        for k in 0..tile.visible.div_ceil(chunk) {
            items.push(Item {
                tile: index as u32,
                chunk: k,
                cost: u64::from(tile.rows) * u64::from(chunk.min(tile.keys - k * chunk)),
            });
        }
    }
    items
}

/// Gives every item its worker. Also the busiest worker's cost.
fn deal(tiles: &[Tile], items: &[Item], pages: u32, tile: u32, grid: Grid) -> (WorkList, u64) {
    let workers = grid.workers as usize;
    let (total, longest) = items.iter().fold((0, 0), |(total, longest), item| {
        (total + item.cost, item.cost.max(longest))
    });
    let worker_of = if longest * FINEST * workers as u64 <= total {
        in_order(items, total, workers as u64)
    } else {
        longest_to_least(items, longest, workers)
    };
    let mut sizes = vec![0_i32; workers];
    let mut costs = vec![0_u64; workers];
    for (item, &worker) in items.iter().zip(&worker_of) {
        sizes[worker as usize] += 1;
        costs[worker as usize] += item.cost;
    }
    let busiest = costs.into_iter().max().unwrap_or(0);
    let mut worker_indptr = Vec::with_capacity(workers + 1);
    worker_indptr.push(0);
    let mut places = Vec::with_capacity(workers);
    let mut sum = 0;
    for size in sizes {
        places.push(sum as usize);
        sum += size;
        worker_indptr.push(sum);
    }
    let mut list = WorkList {
        kv_chunk_size: pages.saturating_mul(grid.page_size),
        cta_tile_q: tile,
        request_indices: vec![0; items.len()],
        qo_tile_indices: vec![0; items.len()],
        kv_tile_indices: vec![0; items.len()],
        worker_indptr,
        merge_indptr: Vec::with_capacity(tiles.len() + 1),
        split_kv: false,
    };
    // A worker's items keep the order of requests, tiles and chunks.
    for (item, &worker) in items.iter().zip(&worker_of) {
        let place = &mut places[worker as usize];
        list.request_indices[*place] = tiles[item.tile as usize].request;
        list.qo_tile_indices[*place] = tiles[item.tile as usize].index;
        list.kv_tile_indices[*place] = item.chunk as i32;
        *place += 1;
    }
    let mut partials = vec![0; tiles.len()];
    for item in items {
        partials[item.tile as usize] += 1;
    }
    let mut sum = 0;
    list.merge_indptr.push(0);
    for count in partials {
        sum += count;
        list.split_kv |= count > 1;
        list.merge_indptr.push(sum);
    }
    (list, busiest)
}

/// An item belongs to the worker in whose share of the cost its middle lies. Even where items are small beside a share.
fn in_order(items: &[Item], total: u64, workers: u64) -> Vec<u32> {
    let (mut before, mut worker, mut mark) = (0_u64, 0_u64, total);
    items
        .iter()
        .map(|item| {
            let middle = (2 * before + item.cost) * workers;
            while middle >= 2 * mark && worker + 1 < workers {
                worker += 1;
                mark += total;
            }
            before += item.cost;
            worker as u32
        })
        .collect()
}

/// The longest item first, each to the worker with the least so far.
fn longest_to_least(items: &[Item], longest: u64, workers: usize) -> Vec<u32> {
    // A worker gets at most a dozen of the longest items here, so that loads stay within 32 bits.
    let scale = (u64::BITS - longest.leading_zeros()).saturating_sub(27);
    let scaled = |item: &Item| ((item.cost >> scale) as u32).max(1);
    let shift = resolution((longest >> scale) as u32);
    let mut loads = Loads::new(workers, 0, 0, shift);
    let mut worker_of = vec![0; items.len()];
    for item in longest_first(items.iter().map(scaled), shift) {
        let item = item as usize;
        worker_of[item] = loads.give(scaled(&items[item])) as u32;
    }
    worker_of
}
