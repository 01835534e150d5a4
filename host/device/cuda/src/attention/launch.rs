//! How a step's attention is launched: kernels, grids and bounds. Frozen into a captured graph from the builder's launch
//! promise, or counted for one eager step. It must never know device memory.

use timetable_types::{CaptureShape, Family, LaunchPromise};

use super::config::GroupConfig;
use crate::kernels::AttentionKind;

/// The most packed rows of a request that the decode kernel takes.
pub(crate) const DECODE_ROWS: u64 = 16;

/// One list of work items and the kernel that runs it. FLASH_ATTN's first list has the requests of at most 16 packed rows, the
/// second the others; FLASHINFER's first is its decode part, the second its prefill part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListLaunch {
    /// The kernel.
    pub kind: AttentionKind,
    /// Packed rows of one of its tiles.
    pub tile_rows: u32,
    /// Items at most, at least 1: the grid is this times KV heads, or `max_blocks`.
    pub max_work_items: u32,
    /// FLASH_ATTN: packed rows of a request at least …
    pub min_packed_rows: u32,
    /// … and at most.
    pub max_packed_rows: u32,
    /// Packed rows of a partial result at most.
    pub partial_rows: u32,
    /// FLASHINFER: requests of the part at most.
    pub max_reqs: u32,
    /// FLASHINFER: query tiles of the part at most.
    pub max_tiles: u32,
    /// Blocks of the grid at most; they share the list. None: one for each item and KV head, which is for counted lists.
    pub max_blocks: Option<u32>,
}

/// All launches of one step, or of one captured graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Rows, padding included.
    pub num_reqs: u32,
    /// Tokens, padding included.
    pub num_tokens: u32,
    /// FLASH_ATTN: splits of one request at most.
    pub max_num_splits: u32,
    /// At least one of them is there, unless attention is plain: it also clears the tokens that no request covers.
    pub lists: [Option<ListLaunch>; 2],
}

impl Launch {
    /// What a graph of `shape` is captured with, so that it replays every step that keeps `promise`.
    ///
    /// FLASH_ATTN: `max_work_items` bounds the sum of `num_splits` over the rows. FLASHINFER: it bounds the work items of each
    /// part. Both are raised to what the plain builder needs. A step with more is run eagerly ([`super::Replay`]).
    pub fn captured(config: &GroupConfig, shape: &CaptureShape, promise: &LaunchPromise) -> Self {
        let max_query_len = shape
            .max_query_len
            .min(promise.max_query_len)
            .min(shape.num_tokens)
            .max(1);
        let shape = Shape {
            reqs: u64::from(shape.num_reqs),
            tokens: u64::from(shape.num_tokens),
            max_query_len: u64::from(max_query_len),
            uniform: shape.uniform_query_len.map(u64::from),
            group: u64::from(config.heads_per_kv_head()),
        };
        let max_num_splits = promise.max_num_splits.clamp(1, config.max_num_splits);
        let lists = match config.family {
            _ if config.is_plain() => [None, None],
            Family::Flashinfer => flashinfer(config, &shape, promise),
            _ => flash_attn(config, &shape, promise, max_num_splits),
        };
        Self {
            num_reqs: shape.reqs as u32,
            num_tokens: shape.tokens as u32,
            max_num_splits,
            lists,
        }
    }

    /// Work items of both lists at most.
    pub fn max_work_items(&self) -> u64 {
        self.lists
            .iter()
            .flatten()
            .map(|list| u64::from(list.max_work_items))
            .sum()
    }
}

/// Blocks of a captured grid on each multiprocessor: some 2 run at a time, and the rest let the device even out their lengths.
const CAPTURED_BLOCKS: u32 = 16;

/// Blocks of a captured grid at most. A promise is often far above what a step has, and a block that finds no item costs some
/// nanoseconds a layer still: 8,192 items promised to 8 KV heads are 65,536 blocks. A multiple of the KV heads, so that a
/// block keeps its head.
fn captured_blocks(config: &GroupConfig) -> u32 {
    let heads = config.num_kv_heads.max(1);
    (CAPTURED_BLOCKS * config.num_multiprocessors / heads).max(1) * heads
}

struct Shape {
    reqs: u64,
    tokens: u64,
    max_query_len: u64,
    uniform: Option<u64>,
    group: u64,
}

impl Shape {
    fn max_packed(&self) -> u64 {
        self.max_query_len * self.group
    }
}

/// Within what a grid and a counter can hold.
pub(crate) fn items(count: u64) -> u32 {
    count.clamp(1, MAX_ITEMS) as u32
}

/// Query tiles of one FLASHINFER part of so many requests at most: the plan kernel keeps 4 bytes for each tile and request in
/// shared memory, of which every device that this runs on has 96 KiB. A part with more is refused when it is prepared.
pub(crate) fn max_plan_tiles(reqs: u64) -> u64 {
    24_000_u64.saturating_sub(reqs + 1)
}

/// Items of one list: 48 bytes each, and a grid of fewer than 2³¹ blocks with up to 2,048 KV heads.
const MAX_ITEMS: u64 = 1 << 20;

fn flash_attn(
    config: &GroupConfig,
    shape: &Shape,
    promise: &LaunchPromise,
    max_num_splits: u32,
) -> [Option<ListLaunch>; 2] {
    let splits = u64::from(max_num_splits);
    let max_blocks = Some(captured_blocks(config));
    // The sum of the rows' splits: padded rows count one.
    let promised = u64::from(promise.max_work_items).clamp(shape.reqs, shape.reqs.max(1) * splits);
    let least_packed = shape.uniform.unwrap_or(1) * shape.group;
    let decode_kind = config.kind(AttentionKind::Decode);
    let decode = (least_packed <= DECODE_ROWS).then(|| ListLaunch {
        kind: decode_kind,
        tile_rows: config.tile_rows(decode_kind),
        max_work_items: items(promised.min(shape.reqs.min(shape.tokens) * splits)),
        min_packed_rows: 1,
        max_packed_rows: DECODE_ROWS as u32,
        partial_rows: shape.max_packed().min(DECODE_ROWS) as u32,
        max_reqs: 0,
        max_tiles: 0,
        max_blocks,
    });
    let max_packed = shape.max_packed();
    let prefill = (max_packed > DECODE_ROWS).then(|| {
        let kind = config.prefill_kind(max_packed);
        let tile = u64::from(config.tile_rows(kind));
        // Each of these rows has at least 17 packed rows.
        let rows = shape
            .reqs
            .min(shape.tokens * shape.group / (DECODE_ROWS + 1));
        let most_of_row = max_packed.div_ceil(tile);
        let tiles = (shape.tokens * shape.group / tile + rows).min(rows * most_of_row);
        let split_tiles = most_of_row * promised.saturating_sub(shape.reqs);
        ListLaunch {
            kind,
            tile_rows: tile as u32,
            max_work_items: items((tiles * splits).min(tiles + split_tiles)),
            min_packed_rows: DECODE_ROWS as u32 + 1,
            max_packed_rows: i32::MAX as u32,
            partial_rows: max_packed.min(tile) as u32,
            max_reqs: 0,
            max_tiles: 0,
            max_blocks,
        }
    });
    [decode, prefill]
}

fn flashinfer(
    config: &GroupConfig,
    shape: &Shape,
    promise: &LaunchPromise,
) -> [Option<ListLaunch>; 2] {
    // Tiles are 16 packed rows or more, and a row's last may be short.
    let tiles = shape.reqs + shape.tokens * shape.group / 16;
    let list = |kind, rows: u64| {
        let tile = config.tile_rows(kind);
        ListLaunch {
            kind,
            tile_rows: tile,
            max_work_items: items(u64::from(promise.max_work_items).max(tiles)),
            min_packed_rows: 1,
            max_packed_rows: i32::MAX as u32,
            partial_rows: rows.min(u64::from(tile)) as u32,
            max_reqs: shape.reqs as u32,
            max_tiles: tiles.min(max_plan_tiles(shape.reqs)) as u32,
            max_blocks: Some(captured_blocks(config)),
        }
    };
    let kind = |packed: u64| {
        config.kind(AttentionKind::of_tile(
            u32::try_from(packed).unwrap_or(u32::MAX),
        ))
    };
    match shape.uniform {
        // Queries of one length: decodes all, or prefills that run as such. The tile is chosen by that length.
        Some(query_len) => {
            let packed = query_len * shape.group;
            [Some(list(kind(packed), packed)), None]
        }
        None => {
            let prefill =
                (shape.max_query_len > 1).then(|| list(AttentionKind::Prefill, shape.max_packed()));
            [Some(list(kind(shape.group), shape.group)), prefill]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::testing;

    fn promise(max_num_splits: u32, max_work_items: u32, max_query_len: u32) -> LaunchPromise {
        LaunchPromise {
            max_num_splits,
            max_work_items,
            scratch_bytes: 0,
            max_query_len,
            uniform_query_len: None,
        }
    }

    fn shape(
        num_reqs: u32,
        num_tokens: u32,
        max_query_len: u32,
        uniform: Option<u32>,
    ) -> CaptureShape {
        CaptureShape {
            num_tokens,
            num_reqs,
            max_query_len,
            uniform_query_len: uniform,
        }
    }

    #[test]
    fn a_decode_graph_has_one_list_with_a_place_for_every_split() {
        let config = testing::group(Family::FlashAttn);
        let launch = Launch::captured(&config, &shape(64, 64, 1, Some(1)), &promise(8, 512, 1));
        let [Some(list), None] = launch.lists else {
            panic!("{launch:?}");
        };
        assert_eq!(
            (list.kind, list.max_work_items, list.partial_rows),
            (AttentionKind::Decode, 512, 4)
        );
        assert_eq!(launch.max_num_splits, 8);
        // Blocks share the list: as many as fill the device some times over, whole items' heads.
        let heads = config.num_kv_heads;
        let blocks = list.max_blocks.unwrap();
        assert!(blocks.is_multiple_of(heads) && blocks <= 16 * config.num_multiprocessors.max(1));
        assert!(blocks + heads > 16 * config.num_multiprocessors);
        // A promise of fewer items is taken at its word, one below the rows is not.
        let tight = Launch::captured(&config, &shape(64, 64, 1, Some(1)), &promise(8, 100, 1));
        assert_eq!(tight.max_work_items(), 100);
        let none = Launch::captured(&config, &shape(64, 64, 1, Some(1)), &promise(8, 3, 1));
        assert_eq!(none.max_work_items(), 64);
    }

    #[test]
    fn a_mixed_graph_has_both_lists_and_a_longer_query_the_larger_tile() {
        let config = testing::group(Family::FlashAttn);
        let launch = Launch::captured(&config, &shape(8, 64, 64, None), &promise(2, 16, 64));
        let [Some(decode), Some(prefill)] = launch.lists else {
            panic!("{launch:?}");
        };
        assert_eq!((decode.max_work_items, decode.partial_rows), (16, 16));
        assert_eq!(
            (prefill.kind, prefill.tile_rows),
            (AttentionKind::Prefill, 128)
        );
        // 2 whole tiles and a short one in each of 8 rows, twice.
        assert_eq!(prefill.max_work_items, (2 + 8) * 2);
        let short = Launch::captured(&config, &shape(8, 64, 16, None), &promise(2, 16, 16));
        assert_eq!(
            short.lists[1].map(|list| list.kind),
            Some(AttentionKind::Prefill64)
        );
        let invariant = GroupConfig {
            batch_invariant: true,
            ..config
        };
        let short = Launch::captured(&invariant, &shape(8, 64, 16, None), &promise(2, 16, 16));
        assert_eq!(
            short.lists.map(|list| list.map(|list| list.kind)),
            [Some(AttentionKind::Prefill); 2]
        );
    }

    #[test]
    fn one_kernel_serves_every_list_where_results_must_not_depend_on_the_batch() {
        for family in [Family::FlashAttn, Family::Flashinfer] {
            let config = GroupConfig {
                batch_invariant: true,
                ..testing::group(family)
            };
            for (shape, lists) in [
                (shape(64, 64, 1, Some(1)), 1),
                (shape(8, 64, 16, None), 2),
                (shape(8, 512, 512, None), 2),
            ] {
                let launch = Launch::captured(&config, &shape, &promise(1, 0, 512));
                let found: Vec<_> = launch.lists.iter().flatten().collect();
                assert_eq!(found.len(), lists, "{family:?} {shape:?}");
                for list in found {
                    assert_eq!(
                        (list.kind, list.tile_rows),
                        (
                            AttentionKind::Prefill,
                            config.tile_rows(AttentionKind::Prefill)
                        ),
                        "{family:?} {shape:?}"
                    );
                }
            }
        }
    }

    /// The launches of the largest step outside graphs run at every start, so they must fit every device.
    #[test]
    fn a_list_of_more_tiles_than_a_plan_holds_is_still_launched_for_those_that_it_holds() {
        let config = testing::group(Family::Flashinfer);
        let largest = shape(256, 1 << 17, 1 << 17, None);
        let launch = Launch::captured(&config, &largest, &promise(8, 0, 1 << 17));
        for list in launch.lists.iter().flatten() {
            assert_eq!(list.max_reqs, 256);
            assert!(4 * (list.max_reqs + 1 + list.max_tiles) <= 96 << 10);
            assert!(list.max_tiles > 20_000);
        }
    }

    #[test]
    fn a_work_list_has_room_for_the_promise_and_for_the_plain_builder() {
        let config = testing::group(Family::Flashinfer);
        let launch = Launch::captured(&config, &shape(64, 64, 1, Some(1)), &promise(8, 500, 1));
        let [Some(list), None] = launch.lists else {
            panic!("{launch:?}");
        };
        assert_eq!(
            (list.kind, list.max_work_items),
            (AttentionKind::Decode, 500)
        );
        assert_eq!((list.max_reqs, list.max_tiles), (64, 64 + 16));
        let plain = Launch::captured(&config, &shape(64, 64, 1, Some(1)), &promise(1, 0, 1));
        assert_eq!(plain.max_work_items(), 80);
    }
}
