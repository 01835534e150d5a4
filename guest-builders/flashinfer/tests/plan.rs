//! Properties of the work list: every key of every query tile exactly once, bounds, and balance.

use std::collections::HashMap;

use flashinfer_builder::{Batch, Grid, most_items, most_tiles, work_list};
use proptest::prelude::*;
use timetable_guest::types::{CaptureShape, flashinfer::WorkList};

#[derive(Clone, Debug)]
struct Case {
    query_lens: Vec<i32>,
    kv_lens: Vec<i32>,
    group_size: u32,
    causal: bool,
    grid: Grid,
}

impl Case {
    fn starts(&self) -> Vec<i32> {
        running(7, &self.query_lens)
    }

    fn plan(&self) -> WorkList {
        let pages: Vec<i32> = self
            .kv_lens
            .iter()
            .map(|&len| (len as u32).div_ceil(self.grid.page_size) as i32)
            .collect();
        work_list(
            &Batch {
                query_start_loc: &self.starts(),
                kv_lens: &self.kv_lens,
                paged_kv_indptr: &running(0, &pages),
                group_size: self.group_size,
                head_size: 64,
                causal: self.causal,
            },
            self.grid,
        )
    }
}

fn running(start: i32, counts: &[i32]) -> Vec<i32> {
    let mut sums = vec![start];
    for count in counts {
        sums.push(sums[sums.len() - 1] + count);
    }
    sums
}

/// Checks the list against the contract's words, and returns (items per worker, busiest worker's cost over the mean).
fn check(case: &Case, list: &WorkList) -> Result<(f64, f64), TestCaseError> {
    let (chunk, tile) = (list.kv_chunk_size, list.cta_tile_q);
    prop_assert!(chunk > 0 && chunk.is_multiple_of(case.grid.page_size));
    let items = list.request_indices.len();
    prop_assert_eq!(list.qo_tile_indices.len(), items);
    prop_assert_eq!(list.kv_tile_indices.len(), items);
    let mut seen: HashMap<(i32, i32), Vec<i32>> = HashMap::new();
    for i in 0..items {
        seen.entry((list.request_indices[i], list.qo_tile_indices[i]))
            .or_default()
            .push(list.kv_tile_indices[i]);
    }
    let mut merge = vec![0];
    let mut is_split = false;
    for (request, (&q_len, &kv_len)) in case.query_lens.iter().zip(&case.kv_lens).enumerate() {
        let packed = q_len as u32 * case.group_size;
        for index in 0..packed.div_ceil(tile) {
            let last_row = ((index + 1) * tile).min(packed) - 1;
            let visible = if case.causal {
                kv_len - q_len + (last_row / case.group_size) as i32 + 1
            } else {
                kv_len
            };
            let expected: Vec<i32> = (0..(visible as u32).div_ceil(chunk) as i32).collect();
            let mut chunks = seen
                .remove(&(request as i32, index as i32))
                .unwrap_or_default();
            chunks.sort_unstable();
            prop_assert_eq!(&chunks, &expected, "request {} tile {}", request, index);
            is_split |= chunks.len() > 1;
            merge.push(merge[merge.len() - 1] + chunks.len() as i32);
        }
    }
    prop_assert!(seen.is_empty(), "items of no request: {seen:?}");
    prop_assert_eq!(&list.merge_indptr, &merge);
    prop_assert_eq!(list.split_kv, is_split);
    let workers = case.grid.workers as usize;
    prop_assert_eq!(list.worker_indptr.len(), workers + 1);
    prop_assert_eq!(list.worker_indptr[0], 0);
    prop_assert_eq!(list.worker_indptr[workers], items as i32);
    let cost = |item: usize| {
        let request = list.request_indices[item] as usize;
        let packed = case.query_lens[request] as u32 * case.group_size;
        let rows = (packed - list.qo_tile_indices[item] as u32 * tile).min(tile);
        let keys =
            (case.kv_lens[request] as u32 - list.kv_tile_indices[item] as u32 * chunk).min(chunk);
        u64::from(rows) * u64::from(keys)
    };
    let (mut total, mut busiest) = (0, 0);
    for pair in list.worker_indptr.windows(2) {
        prop_assert!(pair[0] <= pair[1]);
        let load: u64 = (pair[0] as usize..pair[1] as usize).map(cost).sum();
        total += load;
        busiest = busiest.max(load);
    }
    for pair in list.merge_indptr.windows(2) {
        prop_assert!((pair[1] - pair[0]) as u32 <= case.grid.max_splits);
    }
    let mean = total as f64 / workers as f64;
    let ratio = if total == 0 {
        1.0
    } else {
        busiest as f64 / mean
    };
    Ok((items as f64 / workers as f64, ratio))
}

fn decodes() -> impl Strategy<Value = Case> {
    (
        1_usize..600,
        prop_oneof![Just(100_i32), Just(2000), Just(32_000)],
        1_u32..300,
        prop_oneof![Just(16_u32), Just(1), Just(24), Just(128)],
        1_i32..5,
        any::<u64>(),
        0_u8..4,
    )
        .prop_map(|(rows, longest, workers, page_size, q_len, seed, shape)| {
            let mut state = seed | 1;
            let mut next = |bound: i32| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                ((state >> 33) % bound as u64) as i32
            };
            let kv_lens: Vec<i32> = (0..rows)
                .map(|row| match shape {
                    0 => q_len + next(longest),
                    1 => longest,
                    2 if row == 0 => longest * 30,
                    2 => q_len + next(longest / 50 + 1),
                    _ => q_len + next(longest) * next(2),
                })
                .collect();
            Case {
                query_lens: vec![q_len; rows],
                kv_lens,
                group_size: 4,
                causal: true,
                grid: Grid {
                    workers,
                    is_gpu: false,
                    page_size,
                    max_splits: u32::MAX,
                },
            }
        })
}

fn anything() -> impl Strategy<Value = Case> {
    (
        proptest::collection::vec((0_i32..300, 0_i32..5000), 0..40),
        1_u32..9,
        any::<bool>(),
        1_u32..200,
        prop_oneof![Just(16_u32), Just(1), Just(48)],
        prop_oneof![Just(1_u32), Just(7), Just(u32::MAX)],
    )
        .prop_map(
            |(rows, group_size, causal, workers, page_size, max_splits)| Case {
                query_lens: rows.iter().map(|&(q_len, _)| q_len).collect(),
                kv_lens: rows
                    .iter()
                    .map(|&(q_len, context)| if q_len == 0 { 0 } else { q_len + context })
                    .collect(),
                group_size,
                causal,
                grid: Grid {
                    workers,
                    is_gpu: false,
                    page_size,
                    max_splits,
                },
            },
        )
}

/// 1.10 × mean, or what whole pages allow: a worker's share of a few pages cannot be divided better.
fn bound(case: &Case, list: &WorkList) -> f64 {
    let keys: f64 = case.kv_lens.iter().map(|&len| f64::from(len)).sum();
    let share = keys / f64::from(case.grid.workers);
    let page = f64::from(case.grid.page_size);
    if share < 10.0 * page {
        1.0 + f64::from(list.kv_chunk_size) / share
    } else {
        1.10
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn decode_plans_cover_every_key_once_and_are_balanced(case in decodes()) {
        let list = case.plan();
        let (per_worker, ratio) = check(&case, &list)?;
        if per_worker >= 4.0 {
            prop_assert!(ratio <= bound(&case, &list), "{per_worker} items a worker, busiest {ratio} × mean");
        }
    }

    #[test]
    fn any_plan_covers_every_visible_key_once(case in anything()) {
        let list = case.plan();
        check(&case, &list)?;
    }

    #[test]
    fn trailing_padding_rows_are_inert(case in decodes(), padding in 1_usize..20) {
        let list = case.plan();
        let mut padded = case;
        padded.query_lens.extend(std::iter::repeat_n(0, padding));
        padded.kv_lens.extend(std::iter::repeat_n(0, padding));
        prop_assert_eq!(padded.plan(), list);
    }

    #[test]
    fn no_list_has_more_items_than_are_promised(
        case in prop_oneof![decodes(), anything()],
        is_gpu in any::<bool>(),
        max_splits in prop_oneof![Just(1_u32), 2..40_u32, Just(u32::MAX)],
        (more_reqs, more_tokens) in (0_u32..8, 0_u32..40),
        is_uniform in any::<bool>(),
    ) {
        let mut case = case;
        case.grid = Grid { is_gpu, max_splits, ..case.grid };
        let list = case.plan();
        check(&case, &list)?;
        let longest = case.query_lens.iter().copied().max().unwrap_or(0) as u32;
        let uniform = is_uniform && case.query_lens.iter().all(|&q_len| q_len as u32 == longest);
        let shape = CaptureShape {
            num_tokens: case.query_lens.iter().sum::<i32>() as u32 + more_tokens,
            num_reqs: case.query_lens.len() as u32 + more_reqs,
            max_query_len: longest,
            uniform_query_len: uniform.then_some(longest),
        };
        let tiles = most_tiles(&shape, case.group_size);
        prop_assert!(list.merge_indptr.len() as u64 - 1 <= tiles);
        prop_assert!(list.request_indices.len() as u64 <= most_items(tiles, case.grid));
        if is_gpu && longest * case.group_size <= 16 {
            // One tile a request: the promise is the rows and the workers.
            prop_assert!(most_items(tiles, case.grid) <= u64::from(shape.num_reqs) + u64::from(case.grid.workers));
        }
    }

    #[test]
    fn without_splits_a_row_does_not_depend_on_the_others(case in decodes()) {
        let mut case = case;
        case.grid.max_splits = 1;
        let list = case.plan();
        check(&case, &list)?;
        prop_assert!(list.kv_tile_indices.iter().all(|&chunk| chunk == 0));
    }
}

/// A batch of prefills is balanced too where its tiles are many.
#[test]
fn a_chunked_prefill_beside_decodes_is_balanced() {
    let mut query_lens = vec![1; 64];
    query_lens.extend([2048, 1500, 700, 33]);
    let kv_lens: Vec<i32> = query_lens
        .iter()
        .enumerate()
        .map(|(row, q_len)| q_len + 37 * row as i32)
        .collect();
    let case = Case {
        query_lens,
        kv_lens,
        group_size: 4,
        causal: true,
        grid: Grid {
            workers: 16,
            is_gpu: false,
            page_size: 16,
            max_splits: u32::MAX,
        },
    };
    let (per_worker, ratio) = check(&case, &case.plan()).unwrap();
    assert!(per_worker >= 4.0, "{per_worker} items a worker");
    assert!(ratio <= 1.10, "busiest {ratio} × mean");
}

/// How even the plans of typical decode batches are: with few items a worker, too, nobody waits for long.
#[test]
fn typical_decode_batches_are_even() {
    for (rows, workers) in [
        (8, 264),
        (64, 264),
        (256, 264),
        (1024, 264),
        (256, 2),
        (16, 2),
        (512, 16),
    ] {
        let mut state = 12_345_u64;
        let kv_lens: Vec<i32> = (0..rows)
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                1 + ((state >> 33) % 32_000) as i32
            })
            .collect();
        let case = Case {
            query_lens: vec![1; rows],
            kv_lens,
            group_size: 4,
            causal: true,
            grid: Grid {
                workers,
                is_gpu: false,
                page_size: 16,
                max_splits: u32::MAX,
            },
        };
        let (per_worker, ratio) = check(&case, &case.plan()).unwrap();
        println!(
            "{rows:5} rows, {workers:3} workers: {per_worker:6.1} items a worker, busiest {ratio:.3} × mean"
        );
        let bound = if per_worker >= 4.0 { 1.10 } else { 1.25 };
        assert!(ratio <= bound, "busiest {ratio} × mean");
    }
}

/// On a GPU, items are as many as run at once where rows are fewer, and rows that fill it are not split.
#[test]
fn a_gpu_gets_as_many_items_as_it_runs_at_once() {
    let counts = |rows: &[i32]| {
        let case = Case {
            query_lens: vec![1; rows.len()],
            kv_lens: rows.to_vec(),
            group_size: 4,
            causal: true,
            grid: Grid {
                workers: 33,
                is_gpu: true,
                page_size: 16,
                max_splits: 32,
            },
        };
        let list = case.plan();
        check(&case, &list).unwrap();
        let pairs = list.merge_indptr.windows(2);
        pairs.map(|pair| pair[1] - pair[0]).collect::<Vec<_>>()
    };
    assert!((16..=32).contains(&counts(&[8192])[0]));
    assert_eq!(counts(&[8192; 16]), [2; 16]);
    for rows in [17, 20, 33, 34, 64, 256] {
        assert_eq!(counts(&vec![8192; rows]), vec![1; rows]);
    }
    let mut rows = vec![100; 256];
    rows[7] = 100_000;
    let counts = counts(&rows);
    assert!((20..=32).contains(&counts[7]), "{}", counts[7]);
    assert_eq!(counts.iter().sum::<i32>() - counts[7], 255);
}
