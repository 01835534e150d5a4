//! Decode and prefill attention of the CPU device: ns per (query head · key), GB/s of cache read, against a memcpy of as
//! many bytes by as many threads.
//!
//! "cpu ns" is the processor time of all threads per (query head · key), which a busy machine disturbs less than wall time.

use std::{hint::black_box, time::Instant};

use rayon::prelude::*;
use timetable_attention::{BlockTable, StepInputs};
use timetable_device::cpu::{
    AttentionConfig, CacheDtype, KvCache, StepMetadata, instruction_set, new_impl,
};
use timetable_types::{Causal, Family, Input, Metadata, Tensor, flash_attn};

use super::Row;

struct Case {
    name: &'static str,
    requests: usize,
    q_len: usize,
    kv_len: usize,
    splits: i32,
    heads: (usize, usize, usize),
}

pub(super) fn measure() -> Vec<Row> {
    let cases = [
        Case {
            name: "decode 256 × 500, 9/3 heads of 64",
            requests: 256,
            q_len: 1,
            kv_len: 500,
            splits: 1,
            heads: (9, 3, 64),
        },
        Case {
            name: "decode 256 × 500, 32/8 heads of 128",
            requests: 256,
            q_len: 1,
            kv_len: 500,
            splits: 1,
            heads: (32, 8, 128),
        },
        Case {
            name: "decode 1 × 500, 9/3 heads of 64",
            requests: 1,
            q_len: 1,
            kv_len: 500,
            splits: 2,
            heads: (9, 3, 64),
        },
        Case {
            name: "decode 1 × 8000, 9/3 heads of 64",
            requests: 1,
            q_len: 1,
            kv_len: 8000,
            splits: 8,
            heads: (9, 3, 64),
        },
        Case {
            name: "decode 1 × 8000, 8/8 heads of 128",
            requests: 1,
            q_len: 1,
            kv_len: 8000,
            splits: 8,
            heads: (8, 8, 128),
        },
        Case {
            name: "prefill 1 × 512, 9/3 heads of 64",
            requests: 1,
            q_len: 512,
            kv_len: 512,
            splits: 1,
            heads: (9, 3, 64),
        },
        Case {
            name: "prefill 512 after 3584, 32/8 heads of 128",
            requests: 1,
            q_len: 512,
            kv_len: 4096,
            splits: 1,
            heads: (32, 8, 128),
        },
    ];
    let mut rows = Vec::new();
    for case in &cases {
        for dtype in [CacheDtype::F32, CacheDtype::Bf16] {
            rows.extend(run(case, dtype));
        }
    }
    rows
}

fn run(case: &Case, dtype: CacheDtype) -> Vec<Row> {
    let (num_heads, num_kv_heads, head_size) = case.heads;
    let config = AttentionConfig {
        num_heads,
        head_size,
        scale: 1.0 / (head_size as f32).sqrt(),
        num_kv_heads,
        sliding_window: None,
        logits_soft_cap: None,
        kv_cache_dtype: dtype,
        block_size: 16,
        batch_invariant: false,
    };
    let width = case.kv_len.div_ceil(16);
    let blocks = width * case.requests;
    let mut cache = KvCache::new(blocks, num_kv_heads, 16, head_size, dtype);
    cache.fill(0.01);
    // Pages as a running engine leaves them: scattered.
    let table: Vec<i32> = (0..blocks)
        .map(|i| ((i * 7919 + 13) % blocks) as i32)
        .collect();
    let tokens = case.requests * case.q_len;
    let query_start_loc: Vec<i32> = (0..=case.requests)
        .map(|r| (r * case.q_len) as i32)
        .collect();
    let seq_lens = vec![case.kv_len as i32; case.requests];
    let inputs = StepInputs {
        query_start_loc: &query_start_loc,
        seq_lens: &seq_lens,
        block_table: BlockTable {
            data: &table,
            width,
        },
        slot_mapping: &[],
        positions: &[],
        causal: None,
        dcp_local_seq_lens: None,
        encoder_seq_lens: None,
        logits_indices_padded: None,
        rswa_prefix_lens: None,
        extras: &[],
    };
    let metadata = metadata(case, tokens);
    let mut step = StepMetadata::new();
    step.prepare(&metadata, &inputs, 16)
        .expect("consistent metadata");
    let attention = new_impl(Family::FlashAttn, config).expect("a valid config");
    let query = vec![0.5; tokens * num_heads * head_size];
    let mut output = vec![0.0; query.len()];
    let (seconds, cpu_seconds) = timed(|| {
        attention
            .forward(black_box(&query), &cache, Some(&step), &mut output, None)
            .expect("shapes fit");
        black_box(&output);
    });

    let causal_keys = |token: usize| case.kv_len - case.q_len + token + 1;
    let keys: usize = (0..case.q_len).map(causal_keys).sum::<usize>() * case.requests;
    let pairs = (keys * num_heads) as f64;
    let bytes = cache.bytes().len() as f64;
    let mut copy = vec![0u8; cache.bytes().len()];
    let (copy_seconds, _) = timed(|| {
        let chunk = copy.len().div_ceil(rayon::current_num_threads());
        copy.par_chunks_mut(chunk)
            .zip(cache.bytes().par_chunks(chunk))
            .for_each(|(to, from)| to.copy_from_slice(black_box(from)));
        black_box(&copy);
    });
    let name = format!(
        "attention/{}, {}",
        case.name,
        format!("{dtype:?}").to_lowercase()
    );
    let mut rows = vec![
        Row::new(&name, seconds * 1e9 / pairs, "ns/head·key").note(format!(
            "cpu ns {:.2}, {:.1} µs a call, {:.1} GFLOP a cpu second, {}",
            cpu_seconds * 1e9 / pairs,
            seconds * 1e6,
            pairs * head_size as f64 * 4.0 / cpu_seconds / 1e9,
            instruction_set()
        )),
    ];
    // A prefill reads a key once for many tokens: it is bound by arithmetic.
    if case.q_len == 1 {
        let copied = bytes / copy_seconds / 1e9;
        rows.push(
            Row::new(name, bytes / seconds / 1e9, "GB/s")
                .against(copied, format!("memcpy, {copied:.1} GB/s")),
        );
    }
    rows
}

fn metadata(case: &Case, tokens: usize) -> Metadata {
    Metadata::FlashAttn(flash_attn::Metadata {
        num_actual_tokens: tokens as u32,
        max_query_len: case.q_len as u32,
        query_start_loc: Tensor::Input(Input::QueryStartLoc),
        max_seq_len: case.kv_len as u32,
        seq_lens: Tensor::Input(Input::SeqLens),
        block_table: Tensor::Input(Input::BlockTable),
        slot_mapping: Tensor::Input(Input::SlotMapping),
        causal: Causal::All(true),
        max_dcp_context_kv_len: 0,
        dcp_context_kv_lens: None,
        num_decode_reqs: 0,
        num_prefill_reqs: 0,
        num_decode_tokens: 0,
        num_prefill_tokens: 0,
        max_num_splits: 0,
        scheduler_metadata: None,
        mm_prefix_query_range: None,
        rswa_prefix_lens: None,
        rswa_window: 0,
        schedule: flash_attn::Schedule {
            max_num_splits: case.splits as u32,
            num_splits: vec![case.splits; case.requests],
            tile_order: flash_attn::TileOrder::Natural,
        },
    })
}

/// Seconds of one call: the median of as many as fit in 0.4 s, at least 5, after one to warm up; and the mean processor
/// time.
fn timed(mut call: impl FnMut()) -> (f64, f64) {
    call();
    let begin = Instant::now();
    let cpu = cpu_seconds();
    let mut times = Vec::new();
    while times.len() < 5 || begin.elapsed().as_secs_f64() < 0.4 {
        let start = Instant::now();
        call();
        times.push(start.elapsed().as_secs_f64());
    }
    let cpu = (cpu_seconds() - cpu) / times.len() as f64;
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], cpu)
}

/// Processor time of all threads so far; 0 where the system does not say (it is Linux's schedstat).
fn cpu_seconds() -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return 0.0;
    };
    let of = |task: std::fs::DirEntry| -> Option<f64> {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    tasks.flatten().filter_map(of).sum::<f64>() / 1e9
}
