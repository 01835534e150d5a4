//! Faults that users of attention backends reported, as small inputs with the right answer. The numbers are the list's.

mod support;

use support::{Batch, bits, config, normals, rng};
use timetable_device::{
    cpu::{CacheDtype, ImplError, KvCache, PrepareError, StepMetadata, merge_states, new_impl},
    reference::max_relative_error,
};
use timetable_types::{
    Causal, Family, Metadata, batch::dcp_local_seq_lens_all_ranks, flash_attn, flashinfer,
};

fn small_cache(dtype: CacheDtype) -> KvCache {
    KvCache::new(16, 2, 4, 8, dtype)
}

fn small_impl(dtype: CacheDtype) -> Box<dyn timetable_device::cpu::AttentionImpl> {
    let mut config = config(2, 2, 8);
    config.block_size = 4;
    config.kv_cache_dtype = dtype;
    new_impl(Family::FlashAttn, config).unwrap()
}

/// Which slots hold anything.
fn written(cache: &KvCache) -> Vec<usize> {
    let slots = 0..cache.num_blocks() * cache.block_size();
    slots
        .filter(|&slot| (0..2).any(|head| cache.key(slot, head).iter().any(|&x| x != 0.0)))
        .collect()
}

#[test]
fn case_06_a_narrow_table_leaves_tokens_without_slots() {
    let (mut cache, layer) = (small_cache(CacheDtype::F32), small_impl(CacheDtype::F32));
    let (key, value) = (normals(&mut rng(6), 4 * 16), normals(&mut rng(60), 4 * 16));
    layer.do_kv_cache_update(&key, &value, &mut cache, &[14, 15, -1, -1]);
    assert_eq!(written(&cache), [14, 15]);

    let mut cache = small_cache(CacheDtype::F32);
    let (key, value) = (normals(&mut rng(7), 5 * 16), normals(&mut rng(70), 5 * 16));
    layer.do_kv_cache_update(&key, &value, &mut cache, &[31, 12, 13, 14, 15]);
    assert_eq!(written(&cache), [12, 13, 14, 15, 31]);
    for (row, slot) in [31, 12, 13, 14, 15].into_iter().enumerate() {
        for head in 0..2 {
            let elements = (row * 2 + head) * 8..(row * 2 + head + 1) * 8;
            assert_eq!(cache.key(slot, head), key[elements.clone()]);
            assert_eq!(cache.value(slot, head), value[elements]);
        }
    }
}

#[test]
fn case_07_padding_slots_change_nothing() {
    for dtype in [CacheDtype::F32, CacheDtype::Bf16] {
        let mut cache = small_cache(dtype);
        cache.fill(0.37);
        let before = cache.clone();
        let rows = normals(&mut rng(7), 5 * 16);
        small_impl(dtype).do_kv_cache_update(&rows, &rows, &mut cache, &[-1; 5]);
        assert_eq!(cache.bytes(), before.bytes());
    }
}

#[test]
fn case_08_the_scatter_loops_over_slots() {
    for dtype in [CacheDtype::F32, CacheDtype::Bf16] {
        let mut cache = small_cache(dtype);
        let rows = normals(&mut rng(8), 16 * 16);
        let slots: Vec<i64> = (20..30).collect();
        small_impl(dtype).do_kv_cache_update(&rows, &rows, &mut cache, &slots);
        assert_eq!(written(&cache), (20..30).collect::<Vec<_>>());
    }
}

/// The ranks of decode context parallelism, each with its own share of one request's keys: a rank with nothing returns
/// zeros and −∞, and the ranks' results merge to the whole.
#[test]
fn case_10_a_rank_without_keys_returns_zeros_and_minus_infinity() {
    let config = config(4, 2, 32);
    for (keys, world, interleave) in [(7, 2, 1), (17, 4, 1), (1, 4, 1), (130, 4, 64), (0, 2, 1)] {
        let shares = dcp_local_seq_lens_all_ranks(&[keys], world, interleave);
        let query = normals(&mut rng(10), 4 * 32);
        let mut whole = (Vec::new(), Vec::new());
        let mut parts = Vec::new();
        for (rank, &share) in shares.iter().enumerate() {
            let mut random = rng(100 + rank as u64);
            let rows = [(1, share as usize)];
            let mut batch = Batch::new(&mut random, config, Causal::All(false), &rows, 0);
            batch.query.clone_from(&query);
            let (output, lse) = batch.run(&Metadata::FlashAttn(batch.flash_attn()));
            if share == 0 {
                assert!(output.iter().all(|&x| x == 0.0), "rank {rank}");
                assert!(lse.iter().all(|&x| x == f32::NEG_INFINITY), "rank {rank}");
            }
            whole.0.extend_from_slice(&batch.keys[0]);
            whole.1.extend_from_slice(&batch.values[0]);
            parts.push((output, lse));
        }
        // Attention over all keys: their order does not matter to a query that sees them all.
        let rows = [(1, keys as usize)];
        let mut batch = Batch::new(&mut rng(11), config, Causal::All(false), &rows, 0);
        (batch.query, batch.keys[0], batch.values[0]) = (query, whole.0, whole.1);
        let expected = batch.expected(false);
        let mut merged = vec![f32::NAN; 4 * 32];
        for (head, merged) in merged.chunks_mut(32).enumerate() {
            let of_head = parts
                .iter()
                .map(|(output, lse)| (&output[head * 32..(head + 1) * 32], f64::from(lse[head])));
            let lse = merge_states(of_head, merged);
            let wanted = expected.lse[head];
            assert!(
                lse == wanted || (lse - wanted).abs() < 1e-5,
                "{lse} {wanted}"
            );
        }
        assert!(max_relative_error(&merged, &expected.output, 32) <= 2e-6);
    }
}

#[test]
fn case_12_a_length_beyond_the_table_and_a_block_beyond_the_cache_are_refused() {
    let mut config = config(1, 1, 32);
    config.block_size = 256;
    let mut batch = Batch::new(&mut rng(12), config, Causal::All(true), &[(1, 1_024)], 0);
    batch.width = 4;
    batch.block_table.truncate(4);
    let metadata = Metadata::FlashAttn(batch.flash_attn());
    let mut step = StepMetadata::new();
    step.prepare(&metadata, &batch.inputs(), 256).unwrap();

    let largest = batch.block_table.iter().position_max().unwrap();
    batch.block_table[largest] = batch.cache.num_blocks() as i32;
    step.prepare(&metadata, &batch.inputs(), 256).unwrap();
    let layer = new_impl(Family::FlashAttn, config).unwrap();
    let mut output = vec![0.0; 32];
    let error = layer.forward(&batch.query, &batch.cache, Some(&step), &mut output, None);
    assert!(matches!(error, Err(ImplError::Shape { .. })), "{error:?}");

    batch.seq_lens[0] = 1_025;
    let error = step.prepare(&metadata, &batch.inputs(), 256).unwrap_err();
    assert!(
        matches!(
            error,
            PrepareError::Inconsistent {
                field: "block_table",
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(step.family(), None, "what failed to prepare must not run");
}

trait PositionMax {
    fn position_max(self) -> Option<usize>;
}

impl<'a, I: Iterator<Item = &'a i32>> PositionMax for I {
    fn position_max(self) -> Option<usize> {
        self.enumerate()
            .max_by_key(|&(_, &x)| x)
            .map(|(index, _)| index)
    }
}

#[test]
fn case_15_padded_rows_are_zeros_and_disturb_nothing() {
    for family in [Family::FlashAttn, Family::Flashinfer] {
        let live = [(1, 33), (1, 48), (1, 5)];
        let layer = config(6, 2, 64);
        let alone = Batch::new(&mut rng(15), layer, Causal::All(true), &live, 0);
        // The same step, padded by a row: query 0, length 0, table row 0, and one more token.
        let mut padded = Batch::new(&mut rng(15), layer, Causal::All(true), &live, 1);
        padded.rows.push((0, 0));
        padded.query_start_loc.push(3);
        padded.seq_lens.push(0);
        padded.causal_flags.push(1);
        padded.block_table.extend(vec![0; padded.width]);

        // One seed: the live rows get the same schedule, or the same plan.
        let metadata = |batch: &Batch| match family {
            Family::FlashAttn => {
                let mut metadata = batch.flash_attn();
                metadata.schedule.max_num_splits = 3;
                metadata.schedule.num_splits = vec![3, 2, 1, 1][..batch.rows.len()].to_vec();
                Metadata::FlashAttn(metadata)
            }
            _ => batch.random_flashinfer(&mut rng(151), batch.rows.len()),
        };
        let (expected, expected_lse) = alone.run(&metadata(&alone));
        let (output, lse) = padded.run(&metadata(&padded));
        let (width, heads) = (6 * 64, 6);
        assert_eq!(bits(&output[..3 * width]), bits(&expected), "{family:?}");
        assert_eq!(bits(&lse[..3 * heads]), bits(&expected_lse), "{family:?}");
        assert!(
            output[3 * width..].iter().all(|x| x.to_bits() == 0),
            "{family:?}"
        );
        assert!(
            lse[3 * heads..].iter().all(|&x| x == f32::NEG_INFINITY),
            "{family:?}"
        );
    }
}

#[test]
fn case_16_a_full_last_page_has_16_keys() {
    let lengths = [(1, 17), (1, 16), (1, 1), (1, 33)];
    let batch = Batch::new(
        &mut rng(16),
        config(4, 2, 64),
        Causal::All(true),
        &lengths,
        0,
    );
    let metadata = batch.random_flashinfer(&mut rng(161), 4);
    let Metadata::Flashinfer(record) = &metadata else {
        panic!("flashinfer")
    };
    let Some(flashinfer::Decode::Wrapper(plan)) = &record.decode else {
        panic!("a plan")
    };
    assert_eq!(plan.paged_kv_indptr, [0, 2, 3, 4, 7]);
    assert_eq!(plan.paged_kv_last_page_len, [1, 16, 1, 1]);
    let expected = batch.expected(true);
    let (output, _) = batch.run(&metadata);
    assert!(max_relative_error(&output, &expected.output, 64) <= 2e-6);

    // What the fault made of it: 16 % 16 keys in the last page. It must give other numbers, and nothing worse.
    let mut wrong = record.clone();
    let Some(flashinfer::Decode::Wrapper(plan)) = &mut wrong.decode else {
        panic!("a plan")
    };
    plan.paged_kv_last_page_len[1] = 0;
    let (output, _) = batch.run(&Metadata::Flashinfer(wrong));
    assert!(output[4 * 64..2 * 4 * 64].iter().all(|&x| x == 0.0));

    // [17, 16, 0, 0] padded.
    let lengths = [(1, 17), (1, 16), (0, 0), (0, 0)];
    let batch = Batch::new(
        &mut rng(16),
        config(4, 2, 64),
        Causal::All(true),
        &lengths,
        2,
    );
    let metadata = batch.random_flashinfer(&mut rng(161), 4);
    let Metadata::Flashinfer(record) = &metadata else {
        panic!("flashinfer")
    };
    let Some(flashinfer::Decode::Wrapper(plan)) = &record.decode else {
        panic!("a plan")
    };
    assert_eq!(plan.paged_kv_indptr, [0, 2, 3, 3, 3]);
    let (output, _) = batch.run(&metadata);
    assert!(max_relative_error(&output, &batch.expected(true).output, 64) <= 2e-6);
}

#[test]
fn case_18_captured_at_1_replayed_at_100_000() {
    const CAPTURED_SPLITS: i32 = 32;
    let schedule = |splits| flash_attn::Schedule {
        max_num_splits: CAPTURED_SPLITS as u32,
        num_splits: vec![splits],
        tile_order: flash_attn::TileOrder::Natural,
    };
    // One key, the captured bound of splits: 31 of them are empty.
    let layer = config(1, 1, 32);
    let captured = Batch::new(&mut rng(18), layer, Causal::All(true), &[(1, 1)], 0);
    let mut metadata = captured.flash_attn();
    metadata.schedule = schedule(CAPTURED_SPLITS);
    let (output, _) = captured.run(&Metadata::FlashAttn(metadata));
    assert_eq!(output, captured.values[0]);

    // The same split count at 100,000 keys, against the eager result without splits and the f64 reference.
    let replayed = Batch::new(&mut rng(180), layer, Causal::All(true), &[(1, 100_000)], 0);
    let mut metadata = replayed.flash_attn();
    metadata.schedule = schedule(CAPTURED_SPLITS);
    let mut step = StepMetadata::new();
    let split = Metadata::FlashAttn(metadata);
    step.prepare(&split, &replayed.inputs(), 16).unwrap();
    assert_eq!(step.max_splits(), CAPTURED_SPLITS as usize);
    let (output, _) = replayed.run(&split);
    let (eager, _) = replayed.run(&Metadata::FlashAttn(replayed.flash_attn()));
    let expected = replayed.expected(true).output;
    assert!(max_relative_error(&output, &expected, 32) <= 2e-6);
    let eager: Vec<f64> = eager.iter().map(|&x| f64::from(x)).collect();
    assert!(max_relative_error(&output, &eager, 32) <= 2e-6);
}

#[test]
fn case_22_rows_without_keys_are_zeros_with_lse_minus_infinity() {
    // Rows whose queries have no keys at all, and one whose first queries stand before its first key.
    let rows = [(1, 20), (3, 0), (5, 2), (1, 0)];
    let batch = Batch::new(&mut rng(22), config(4, 1, 64), Causal::All(true), &rows, 0);
    let expected = batch.expected(true);
    for metadata in [
        batch.random_flash_attn(&mut rng(220)),
        batch.random_flashinfer(&mut rng(221), 0),
    ] {
        let (output, lse) = batch.run(&metadata);
        assert!(max_relative_error(&output, &expected.output, 64) <= 2e-6);
        for (token, lse) in lse.chunks(4).enumerate() {
            let empty = matches!(token, 1..=6 | 9);
            assert!(
                lse.iter().all(|&x| (x == f32::NEG_INFINITY) == empty),
                "{token} {lse:?}"
            );
            let row = &output[token * 256..(token + 1) * 256];
            assert_eq!(row.iter().all(|&x| x == 0.0), empty, "{token}");
        }
    }
    // No work for rows without keys, however many splits they are given.
    let rows = [(1, 0), (3, 0)];
    let batch = Batch::new(&mut rng(22), config(4, 1, 64), Causal::All(true), &rows, 0);
    let mut metadata = batch.flash_attn();
    metadata.schedule.max_num_splits = 8;
    metadata.schedule.num_splits = vec![8, 8];
    let mut step = StepMetadata::new();
    step.prepare(&Metadata::FlashAttn(metadata), &batch.inputs(), 16)
        .unwrap();
    assert_eq!(step.num_work_items(), 0);
}

/// Field case 24: the split count of the schedule is the one that runs; nothing chooses again.
#[test]
fn case_24_the_splits_of_the_schedule_are_those_executed() {
    let rows = [(1, 1_000), (1, 16), (1, 40)];
    let batch = Batch::new(&mut rng(24), config(2, 1, 32), Causal::All(true), &rows, 0);
    let mut metadata = batch.flash_attn();
    metadata.schedule.max_num_splits = 8;
    metadata.schedule.num_splits = vec![7, 1, 3];
    let mut step = StepMetadata::new();
    step.prepare(&Metadata::FlashAttn(metadata), &batch.inputs(), 16)
        .unwrap();
    assert_eq!(step.max_splits(), 7);
    // 63 pages in 7 parts of 9; 1; 3 pages in 3 parts.
    let keys: Vec<_> = step
        .work_items()
        .map(|item| (item.request, item.queries, item.keys))
        .collect();
    let mut wanted: Vec<_> = (0..7)
        .map(|part| (0, 0..1, part * 144..((part + 1) * 144).min(1_000)))
        .collect();
    wanted.push((1, 0..1, 0..16));
    wanted.extend((0..3).map(|part| (2, 0..1, part * 16..((part + 1) * 16).min(40))));
    assert_eq!(keys, wanted);
    let requests: Vec<_> = step.requests().collect();
    assert_eq!(
        (requests[2].tokens.clone(), requests[2].num_keys),
        (2..3, 40)
    );
    let (page, width) = (batch.block_table[2 * batch.width + 2] as usize, 16);
    assert_eq!(requests[2].slot(39), page * width + 7);
}

#[test]
fn a_profile_run_gives_zeros_and_quantised_output_is_refused() {
    for (family, name) in [
        (Family::FlashAttn, "FlashAttentionImpl"),
        (Family::Flashinfer, "FlashInferImpl"),
    ] {
        let layer = new_impl(family, config(2, 1, 8)).unwrap();
        let cache = KvCache::new(1, 1, 16, 8, CacheDtype::F32);
        let mut output = vec![f32::NAN; 3 * 16];
        layer.forward(&[], &cache, None, &mut output, None).unwrap();
        assert!(output.iter().all(|&x| x == 0.0));
        let error = layer
            .forward(&[], &cache, None, &mut output, Some(1.0))
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("fused output quantization is not yet supported for {name}")
        );
    }
}

#[test]
fn rows_from_num_actual_tokens_on_stay_as_they_are() {
    let batch = Batch::new(
        &mut rng(1),
        config(2, 1, 32),
        Causal::All(true),
        &[(2, 9)],
        0,
    );
    let mut step = StepMetadata::new();
    step.prepare(
        &Metadata::FlashAttn(batch.flash_attn()),
        &batch.inputs(),
        16,
    )
    .unwrap();
    let layer = new_impl(Family::FlashAttn, batch.config).unwrap();
    let mut output = vec![7.0; 4 * 64];
    let mut query = batch.query.clone();
    query.resize(4 * 64, f32::NAN);
    layer
        .forward(&query, &batch.cache, Some(&step), &mut output, None)
        .unwrap();
    assert!(output[..2 * 64].iter().all(|&x| x.is_finite() && x != 7.0));
    assert!(output[2 * 64..].iter().all(|&x| x == 7.0));
}

#[test]
fn metadata_is_executed_even_when_it_is_wrong() {
    let rows = [(1, 100), (1, 80)];
    let batch = Batch::new(&mut rng(3), config(4, 2, 64), Causal::All(true), &rows, 0);
    let right = batch.run(&Metadata::FlashAttn(batch.flash_attn())).0;

    // A row that the tile order forgets is zeros; the other is untouched.
    let mut forgot = batch.flash_attn();
    forgot.schedule.tile_order = flash_attn::TileOrder::Rows(vec![1, 1]);
    let output = batch.run(&Metadata::FlashAttn(forgot)).0;
    assert!(output[..256].iter().all(|&x| x == 0.0));
    assert_eq!(bits(&output[256..]), bits(&right[256..]));

    // A work list that loses an item loses its keys: other numbers, still finite.
    let Metadata::Flashinfer(mut record) = batch.random_flashinfer(&mut rng(30), 2) else {
        panic!("flashinfer")
    };
    let Some(flashinfer::Decode::Wrapper(plan)) = &mut record.decode else {
        panic!("a plan")
    };
    let last = plan.work.worker_indptr.len() - 1;
    let items = plan.work.request_indices.len() as i32;
    for end in &mut plan.work.worker_indptr[1..=last] {
        *end = (*end).min(items - 1);
    }
    let output = batch.run(&Metadata::Flashinfer(record)).0;
    assert!(output.iter().all(|x| x.is_finite()));
    assert_ne!(bits(&output), bits(&right));

    // Another layer's plan is refused by name.
    let metadata = batch.random_flashinfer(&mut rng(31), 2);
    let mut step = StepMetadata::new();
    step.prepare(&metadata, &batch.inputs(), 16).unwrap();
    let mut other = batch.config;
    other.sliding_window = Some(8);
    let layer = new_impl(Family::Flashinfer, other).unwrap();
    let mut output = vec![0.0; batch.query.len()];
    let error = layer.forward(&batch.query, &batch.cache, Some(&step), &mut output, None);
    assert!(matches!(
        error,
        Err(ImplError::Hyperparameter {
            what: "window_left",
            ..
        })
    ));
}
