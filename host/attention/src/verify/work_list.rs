//! The work list: every (query tile, key chunk) that must be attended to, exactly once, in linear time.
//!
//! Two passes over the items, unless they stand in order. The first finds each tile's lowest chunk; then a tile's items must fill its places of
//! `merge_indptr` one each, in chunk order. There are as many places as items, so items that all hit different places
//! leave none empty, and a tile's chunks form one run without gaps. What remains is that the run covers the keys the tile
//! needs and ends within the request.

use timetable_types::flashinfer::WorkList;

use super::{
    Scratch,
    lanes::{self, Bits, Divisor},
    refusal::{Refusal, Rule, between, length},
};

/// The longest chunk, in keys: more than any sequence.
const MAX_CHUNK: i64 = 1 << 30;
/// Packed query rows of a tile: those that kernels exist for, which are also the field's. Heads of 256 leave no room for 128.
const TILES: [u32; 3] = [16, 64, 128];
const LARGE_HEAD: u32 = 256;

/// What the list must cover.
pub(super) struct Demand<'a> {
    /// s32 [n + 1]: query starts of the part's rows, not rebased.
    pub(super) query_starts: &'a [i32],
    /// s32 [n]: keys of each row.
    pub(super) key_lens: &'a [i32],
    /// Query heads that share a KV head.
    pub(super) group_size: u32,
    /// Elements of a head.
    pub(super) head_size: u32,
    pub(super) page_size: u32,
    /// Query tokens are the last of their keys, and see none after themselves.
    pub(super) causal: bool,
    /// Keys before the current one that are seen; negative for all.
    pub(super) window_left: i32,
    /// How much shorter than `key_lens` the device's lengths may be: rejected speculative tokens.
    pub(super) inexact_by: i64,
    /// The most chunks of one tile.
    pub(super) max_splits: i64,
    /// The most items; none outside graphs.
    pub(super) max_items: Option<u32>,
    /// The most workers.
    pub(super) max_workers: i64,
    /// The plan's `disable_split_kv`.
    pub(super) disable_split_kv: bool,
}

pub(super) fn verify(
    work: &WorkList,
    demand: &Demand<'_>,
    scratch: &mut Scratch,
) -> Result<(), Refusal> {
    let WorkList {
        kv_chunk_size,
        cta_tile_q,
        request_indices,
        qo_tile_indices,
        kv_tile_indices,
        worker_indptr,
        merge_indptr,
        split_kv,
    } = work;
    let rows = demand.key_lens.len();
    let items = request_indices.len();

    // Whole pages, so that a chunk starts at a page.
    let page = demand.page_size.max(1);
    if *kv_chunk_size == 0 || kv_chunk_size % page != 0 {
        return Err(Refusal::new(
            "kv_chunk_size",
            (*kv_chunk_size).into(),
            Rule::MultipleOf,
            page.into(),
        ));
    }
    // Bounded, so that no product of an index and a size leaves s32 in a kernel.
    between("kv_chunk_size", *kv_chunk_size, page, MAX_CHUNK)?;
    let (tiles, rule) = if demand.head_size < LARGE_HEAD {
        (&TILES[..], Rule::OneOf("16, 64, 128"))
    } else {
        (&TILES[..2], Rule::OneOf("16, 64"))
    };
    if !tiles.contains(cta_tile_q) {
        return Err(Refusal::new("cta_tile_q", (*cta_tile_q).into(), rule, 0));
    }
    // The three columns of the list are equally long, and within the promise.
    if let Some(most) = demand.max_items {
        between("request_indices", items as i64, 0, most).map_err(|refusal| Refusal {
            field: "work_items",
            ..refusal
        })?;
    }
    between("work_items", items as i64, 0, i32::MAX)?;
    length("qo_tile_indices", qo_tile_indices.len(), items)?;
    length("kv_tile_indices", kv_tile_indices.len(), items)?;
    running_sum("worker_indptr", worker_indptr, items)?;
    between(
        "worker_indptr",
        worker_indptr.len() as i64 - 1,
        1,
        demand.max_workers,
    )
    .map_err(|refusal| Refusal {
        field: "workers",
        ..refusal
    })?;

    // Query tiles and key chunks of each row. A row without keys may have one item, which writes its empty result.
    let (by_tile, by_chunk) = (Divisor::new(*cta_tile_q), Divisor::new(*kv_chunk_size));
    scratch.tile_start.clear();
    scratch.chunks.clear();
    let mut tiles = 0u64;
    for row in 0..rows {
        scratch.tile_start.push(tiles as u32);
        let query = (demand.query_starts[row + 1] - demand.query_starts[row]) as u64;
        tiles += by_tile.ceil(query * u64::from(demand.group_size));
        let keys = demand.key_lens[row].max(0) as u64;
        scratch.chunks.push(by_chunk.ceil(keys).max(1) as u32);
    }
    scratch.tile_start.push(tiles as u32);
    let tiles = tiles as usize;
    length("merge_indptr", merge_indptr.len(), tiles + 1)?;
    running_sum("merge_indptr", merge_indptr, items)?;

    if !in_order(work, scratch) {
        each_has_a_place(work, rows, scratch)?;
    }
    // Each tile's run of chunks covers the keys that it must attend to.
    let by_group = Divisor::new(demand.group_size.max(1));
    let mut any_split = false;
    for row in 0..rows {
        let (start, end) = (
            scratch.tile_start[row] as usize,
            scratch.tile_start[row + 1] as usize,
        );
        let keys = i64::from(demand.key_lens[row]);
        let query = i64::from(demand.query_starts[row + 1] - demand.query_starts[row]);
        let context = keys - query;
        for tile in start..end {
            let count = i64::from(merge_indptr[tile + 1] - merge_indptr[tile]);
            if count > demand.max_splits {
                return Err(Refusal::at(
                    "merge_indptr",
                    tile,
                    count,
                    Rule::AtMost,
                    demand.max_splits,
                ));
            }
            any_split |= count > 1;
            let packed = (tile - start) as u64 * u64::from(*cta_tile_q);
            // Keys [low, high) are seen by a query of the tile. The last tile ends with the last query, which sees all.
            let high = if demand.causal && tile + 1 < end {
                let last = by_group.floor(packed + u64::from(*cta_tile_q) - 1) as i64;
                (context + last + 1).clamp(0, keys)
            } else {
                keys
            };
            let low = if demand.window_left >= 0 {
                let first = by_group.floor(packed) as i64;
                // A shorter length on the device moves the window down.
                let reach = i64::from(demand.window_left) + demand.inexact_by;
                (context + first - reach).max(0)
            } else {
                0
            };
            if low >= high {
                continue;
            }
            let (low, high) = (
                by_chunk.floor(low as u64) as i64,
                by_chunk.ceil(high as u64) as i64,
            );
            let first = if count == 0 {
                0
            } else {
                i64::from(scratch.first_chunk[tile])
            };
            if first > low {
                return Err(Refusal::at(
                    "kv_tile_indices",
                    tile,
                    first,
                    Rule::AtMost,
                    low,
                ));
            }
            if first + count < high {
                let last = first + count - 1;
                return Err(Refusal::at(
                    "kv_tile_indices",
                    tile,
                    last,
                    Rule::AtLeast,
                    high - 1,
                ));
            }
        }
    }
    // Without the merge, a second chunk would overwrite the first.
    if any_split && !split_kv {
        return Err(Refusal::new("split_kv", 0, Rule::Equal, 1));
    }
    if any_split && demand.disable_split_kv {
        return Err(Refusal::new("split_kv", 1, Rule::Equal, 0));
    }
    Ok(())
}

/// Do the items stand tile by tile, each tile's chunks one after the other? Most long lists do, and then lanes show it. Leaves
/// the lowest chunk of each tile.
fn in_order(work: &WorkList, scratch: &mut Scratch) -> bool {
    let WorkList {
        request_indices,
        qo_tile_indices,
        kv_tile_indices,
        merge_indptr,
        ..
    } = work;
    scratch.first_chunk.clear();
    for (row, (tiles, &chunks)) in scratch
        .tile_start
        .windows(2)
        .zip(&scratch.chunks)
        .enumerate()
    {
        for tile in tiles[0]..tiles[1] {
            let start = merge_indptr[tile as usize] as usize;
            let items = start..merge_indptr[tile as usize + 1] as usize;
            let first = kv_tile_indices.get(start).filter(|_| !items.is_empty());
            scratch.first_chunk.push(first.copied().unwrap_or(i32::MAX));
            let Some(&first) = first else { continue };
            let within = first >= 0 && first as u64 + items.len() as u64 <= u64::from(chunks);
            if !within
                || !lanes::all_equal_i32(&request_indices[items.clone()], row as i32)
                || !lanes::all_equal_i32(&qo_tile_indices[items.clone()], (tile - tiles[0]) as i32)
                || !lanes::counts_up(&kv_tile_indices[items], first)
            {
                return false;
            }
        }
    }
    true
}

/// Does each item name a tile and a chunk that exist, and take a place of its own among the tile's? Leaves the lowest chunk of
/// each tile.
fn each_has_a_place(work: &WorkList, rows: usize, scratch: &mut Scratch) -> Result<(), Refusal> {
    let WorkList {
        request_indices,
        qo_tile_indices,
        kv_tile_indices,
        merge_indptr,
        ..
    } = work;
    let (items, tiles) = (request_indices.len(), merge_indptr.len() - 1);
    // First pass: every index names a row, a tile and a chunk that exist; the lowest chunk of each tile.
    scratch.first_chunk.clear();
    scratch.first_chunk.resize(tiles, i32::MAX);
    scratch.item_tile.clear();
    for (item, ((&request, &tile), &chunk)) in request_indices
        .iter()
        .zip(qo_tile_indices)
        .zip(kv_tile_indices)
        .enumerate()
    {
        // Negative indices are large ones here; `index` tells them apart.
        let Some((&[start, end], &chunks)) = scratch
            .tile_start
            .get(request as u32 as usize..)
            .and_then(|starts| starts.first_chunk::<2>())
            .zip(scratch.chunks.get(request as u32 as usize))
        else {
            return index("request_indices", item, request, rows as i64);
        };
        if tile as u32 >= end - start {
            return index("qo_tile_indices", item, tile, i64::from(end - start));
        }
        if chunk as u32 >= chunks {
            return index("kv_tile_indices", item, chunk, i64::from(chunks));
        }
        let tile = start + tile as u32;
        let first = &mut scratch.first_chunk[tile as usize];
        *first = (*first).min(chunk);
        scratch.item_tile.push(tile);
    }
    // Second pass: each item has a place of its own.
    let mut seen = Bits::clear(&mut scratch.seen, items);
    for (item, (&tile, &chunk)) in scratch.item_tile.iter().zip(kv_tile_indices).enumerate() {
        let tile = tile as usize;
        let place = i64::from(merge_indptr[tile]) + i64::from(chunk - scratch.first_chunk[tile]);
        if place >= i64::from(merge_indptr[tile + 1]) {
            let bound = i64::from(merge_indptr[tile + 1]);
            return Err(Refusal::at("merge_indptr", tile, place, Rule::Below, bound));
        }
        if !seen.insert(place as usize) {
            return Err(Refusal::at(
                "kv_tile_indices",
                item,
                chunk.into(),
                Rule::Once,
                1,
            ));
        }
    }
    Ok(())
}

/// 0 first, never falling, `total` last.
fn running_sum(field: &'static str, sums: &[i32], total: usize) -> Result<(), Refusal> {
    let Some((&last, _)) = sums.split_last() else {
        return Err(Refusal::new(field, 0, Rule::Length, 1));
    };
    if sums[0] != 0 {
        return Err(Refusal::at(field, 0, sums[0].into(), Rule::Equal, 0));
    }
    let (_, rising) = lanes::steps(sums);
    if !rising {
        for (element, pair) in sums.windows(2).enumerate() {
            if pair[1] < pair[0] {
                return Err(Refusal::at(
                    field,
                    element + 1,
                    pair[1].into(),
                    Rule::AtLeast,
                    pair[0].into(),
                ));
            }
        }
    }
    if i64::from(last) != total as i64 {
        return Err(Refusal::at(
            field,
            sums.len() - 1,
            last.into(),
            Rule::Equal,
            total as i64,
        ));
    }
    Ok(())
}

fn index(field: &'static str, item: usize, value: i32, end: i64) -> Result<(), Refusal> {
    if value < 0 {
        Err(Refusal::at(field, item, value.into(), Rule::AtLeast, 0))
    } else if i64::from(value) >= end {
        Err(Refusal::at(field, item, value.into(), Rule::Below, end))
    } else {
        Ok(())
    }
}
