//! Properties of the schedule: within its bounds for every batch, and balanced for decodes.

use flash_attn_builder::BalancedSplits;
use proptest::prelude::*;
use timetable_guest::{
    Builder,
    types::{
        AttentionConfig, BuilderConfig, CaptureShape, Causal, CommonAttentionMetadata,
        CudagraphConfig, CudagraphMode, DeviceConfig, Dtype, KvCacheLayout, KvCacheSpec,
        KvCacheSpecKind, ParallelConfig, SchedulerConfig, flash_attn::TileOrder,
    },
};

fn config(workers: u32, max_num_splits: u32, block_size: u32) -> BuilderConfig {
    BuilderConfig {
        kv_cache_spec: KvCacheSpec {
            kind: KvCacheSpecKind::FullAttention,
            block_size,
            num_kv_heads: 2,
            head_size: 64,
            head_size_v: 64,
            dtype: Dtype::Float32,
            sliding_window: None,
            attention_chunk_size: None,
            dcp_sharded: false,
            mamba: None,
        },
        layer_names: Vec::new(),
        attention: AttentionConfig {
            num_heads: 8,
            scale: 0.125,
            logits_soft_cap: None,
            sliding_windows: vec![-1],
            model_dtype: Dtype::Float32,
            kv_cache_dtype: "auto".to_owned(),
            kv_cache_layout: KvCacheLayout::Lbnhc,
            has_sinks: false,
            use_rswa: false,
            rswa_window: 0,
            kv_lora_rank: 0,
            qk_rope_head_dim: 0,
        },
        scheduler: SchedulerConfig {
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            max_model_len: 32_768,
            max_num_blocks_per_req: 2048,
            num_speculative_tokens: 0,
            parallel_drafting: false,
        },
        cudagraph: CudagraphConfig {
            mode: CudagraphMode::None,
            capture_sizes: Vec::new(),
            max_capture_size: 0,
        },
        parallel: ParallelConfig {
            dcp_world_size: 1,
            dcp_rank: 0,
            cp_kv_cache_interleave_size: 1,
            prefill_context_parallel: false,
        },
        device: DeviceConfig {
            compute_capability: (0, 0),
            num_workers: workers,
            ctas_per_worker: 1,
            flash_attn_version: 0,
            trtllm_attention: false,
            xqa: false,
        },
        batch_invariant: false,
        max_num_splits,
        model_runner_v2: true,
        options: Vec::new(),
    }
}

fn batch(rows: &[(i32, i32)]) -> CommonAttentionMetadata {
    let mut starts = vec![0];
    for (query_len, _) in rows {
        starts.push(starts[starts.len() - 1] + query_len);
    }
    let lens: Vec<i32> = rows
        .iter()
        .map(|(query_len, context)| query_len + context)
        .collect();
    let tokens = starts[rows.len()] as u32;
    CommonAttentionMetadata {
        num_reqs: rows.len() as u32,
        num_actual_tokens: tokens,
        max_query_len: rows.iter().map(|row| row.0).max().unwrap_or(0) as u32,
        max_seq_len: lens.iter().copied().max().unwrap_or(0) as u32,
        causal: Causal::All(true),
        block_table_width: 2048,
        slot_mapping_len: tokens,
        query_start_loc_cpu: starts,
        seq_lens_cpu_upper_bound: lens,
        is_prefilling: Vec::new(),
        dcp: None,
        encoder: None,
        fast_prefill: None,
        req_idx: Vec::new(),
        mm_req_doc_ranges: Vec::new(),
        replayssm_decode_base_cpu: Vec::new(),
        extras: Vec::new(),
    }
}

proptest! {
    #[test]
    fn schedules_keep_their_bounds(
        rows in proptest::collection::vec((prop_oneof![Just(1), 1..40, Just(500)], 0..30_000), 0..80),
        workers in 1_u32..300,
        max_num_splits in 1_u32..40,
        block_size in prop_oneof![Just(16_u32), Just(48), Just(128)],
        batch_invariant in any::<bool>(),
        fast_build in any::<bool>(),
        is_gpu in any::<bool>(),
        more_reqs in 0_u32..8,
    ) {
        let mut config = config(workers, max_num_splits, block_size);
        config.batch_invariant = batch_invariant;
        config.device.compute_capability.0 = if is_gpu { 9 } else { 0 };
        let mut builder = BalancedSplits::create(config).unwrap();
        let schedule = builder.build(&batch(&rows), fast_build).unwrap().schedule;
        let shape = CaptureShape {
            num_tokens: 8192,
            num_reqs: rows.len() as u32 + more_reqs,
            max_query_len: 8192,
            uniform_query_len: None,
        };
        let promise = builder.launch_promise(&shape);
        prop_assert!(schedule.max_num_splits <= promise.max_num_splits);
        // Rows that are not there count one.
        let splits = if schedule.num_splits.is_empty() {
            rows.len() as i32
        } else {
            schedule.num_splits.iter().sum()
        };
        prop_assert!(splits as u32 + more_reqs <= promise.max_work_items, "{} promised", promise.max_work_items);
        if is_gpu {
            // Two KV heads share the workers.
            prop_assert!(promise.max_work_items <= shape.num_reqs + workers.div_ceil(2));
        }
        let most = if batch_invariant { 1 } else { max_num_splits };
        prop_assert!((1..=most).contains(&schedule.max_num_splits));
        prop_assert!(schedule.num_splits.is_empty() || schedule.num_splits.len() == rows.len());
        let largest = schedule.num_splits.iter().copied().max().unwrap_or(1);
        prop_assert_eq!(largest as u32, schedule.max_num_splits);
        for (&splits, (query_len, context)) in schedule.num_splits.iter().zip(&rows) {
            let pages = ((query_len + context) as u32).div_ceil(block_size).max(1);
            prop_assert!(splits >= 1 && splits as u32 <= pages, "{} splits of {} pages", splits, pages);
        }
        if let TileOrder::Rows(mut order) = schedule.tile_order {
            prop_assert!(!batch_invariant && !fast_build);
            order.sort_unstable();
            prop_assert_eq!(order, (0..rows.len() as i32).collect::<Vec<_>>());
        }
    }

    /// No split of a decode is longer than half a worker's share, unless the bound on splits or the smallest split says so.
    #[test]
    fn decode_splits_are_small_beside_a_workers_share(
        contexts in proptest::collection::vec(1..30_000, 1..80),
        workers in 1_u32..64,
    ) {
        let rows: Vec<(i32, i32)> = contexts.iter().map(|&context| (1, context)).collect();
        let mut builder = BalancedSplits::create(config(workers, 4096, 16)).unwrap();
        let schedule = builder.build(&batch(&rows), false).unwrap().schedule;
        // Two KV heads, each split for itself.
        let share = contexts.iter().map(|&context| f64::from(context + 1)).sum::<f64>() * 2.0 / f64::from(workers);
        for (row, &context) in contexts.iter().enumerate() {
            let splits = schedule.num_splits.get(row).copied().unwrap_or(1);
            let keys = f64::from(context + 1) / f64::from(splits);
            prop_assert!(keys <= (share / 2.0).max(80.0), "{} keys in a split, a share is {}", keys, share);
        }
    }
}

/// Splits on a GPU of 132 multiprocessors that each run two blocks, of 8 KV heads.
fn on_a_gpu(rows: &[(i32, i32)], max_num_splits: u32) -> Vec<i32> {
    let mut config = config(132, max_num_splits, 16);
    config.device.compute_capability = (9, 0);
    config.device.ctas_per_worker = 2;
    config.kv_cache_spec.num_kv_heads = 8;
    config.attention.num_heads = 32;
    let mut builder = BalancedSplits::create(config).unwrap();
    let schedule = builder.build(&batch(rows), false).unwrap().schedule;
    if schedule.num_splits.is_empty() {
        vec![1; rows.len()]
    } else {
        schedule.num_splits
    }
}

#[test]
fn a_gpu_gets_as_many_splits_as_it_runs_at_once() {
    let one = on_a_gpu(&[(1, 8191)], 64)[0];
    assert!((16..=33).contains(&one), "{one}");
    assert_eq!(on_a_gpu(&[(1, 131_071)], 64), [33]);
    assert_eq!(on_a_gpu(&[(1, 131_071)], 32), [32]);
    assert_eq!(on_a_gpu(&[(1, 8191); 8], 32), [4; 8]);
    assert_eq!(on_a_gpu(&[(1, 8191); 16], 32), [2; 16]);
    for rows in [17, 33, 64, 256] {
        assert_eq!(on_a_gpu(&vec![(1, 8191); rows], 32), vec![1; rows]);
    }
    // Nothing to gain from splits of a few keys.
    assert_eq!(on_a_gpu(&[(1, 100)], 32), [1]);
}

#[test]
fn a_long_row_among_short_ones_is_split_by_itself() {
    let mut rows = vec![(1, 99); 256];
    rows[7] = (1, 99_999);
    let mut splits = on_a_gpu(&rows, 32);
    assert!((20..=32).contains(&splits[7]), "{}", splits[7]);
    splits[7] = 1;
    assert_eq!(splits, [1; 256]);
    // A prefill is another launch: the decodes beside it are split as if they were alone.
    rows = vec![(1, 8191), (2048, 50_000)];
    assert_eq!(on_a_gpu(&rows, 64), [on_a_gpu(&rows[..1], 64)[0], 1]);
}

/// Places without work cost: of the rows that are split, few are left.
#[test]
fn lengths_of_all_sorts_fill_a_gpu() {
    for rows in [2, 3, 5, 11, 16] {
        let lens: Vec<(i32, i32)> = (0..rows).map(|row| (1, 3000 + 997 * row)).collect();
        let sum: i32 = on_a_gpu(&lens, 64).iter().sum();
        assert!((33 - rows..=33).contains(&sum), "{rows} rows: {sum}");
    }
}
