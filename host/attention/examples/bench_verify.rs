//! Medians of the verifier's time, one line each: name, value, unit.
//!
//! `cargo run --release -p timetable-attention --example bench_verify`
//!
//! Batches are of pages of 16 tokens. "references" is FLASH_ATTN's metadata, all tensors by reference; "step" is the host's
//! own tensors, block ids included; "plan" is FLASHINFER's, with its work list.

use std::{hint::black_box, time::Instant};

use timetable_attention::{
    Grant, Verifier, VerifyContext,
    batch::{GroupStep, StepTensors},
    plain_builder,
    types::{
        AttentionConfig, BuilderConfig, CudagraphConfig, CudagraphMode, DeviceConfig, Dtype,
        Family, KvCacheLayout, KvCacheSpec, KvCacheSpecKind, Metadata, ParallelConfig,
        SchedulerConfig, flashinfer,
    },
    verify_step,
};

const PAGE: u32 = 16;
const NUM_BLOCKS: u32 = 1 << 17;

fn config(max_model_len: u32) -> BuilderConfig {
    BuilderConfig {
        kv_cache_spec: KvCacheSpec {
            kind: KvCacheSpecKind::FullAttention,
            block_size: PAGE,
            num_kv_heads: 8,
            head_size: 128,
            head_size_v: 128,
            dtype: Dtype::Bfloat16,
            sliding_window: None,
            attention_chunk_size: None,
            dcp_sharded: false,
            mamba: None,
        },
        layer_names: vec!["layers.0".to_owned()],
        attention: AttentionConfig {
            num_heads: 32,
            scale: 0.088,
            logits_soft_cap: None,
            sliding_windows: vec![-1],
            model_dtype: Dtype::Bfloat16,
            kv_cache_dtype: "auto".to_owned(),
            kv_cache_layout: KvCacheLayout::Lbnhc,
            has_sinks: false,
            use_rswa: false,
            rswa_window: 0,
            kv_lora_rank: 0,
            qk_rope_head_dim: 0,
        },
        scheduler: SchedulerConfig {
            max_num_seqs: 1_024,
            max_num_batched_tokens: 8_192,
            max_model_len,
            max_num_blocks_per_req: max_model_len / PAGE,
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
            compute_capability: (9, 0),
            num_workers: 132,
            ctas_per_worker: 2,
            flash_attn_version: 3,
            trtllm_attention: false,
            xqa: false,
        },
        batch_invariant: false,
        max_num_splits: 64,
        model_runner_v2: true,
        options: Vec::new(),
    }
}

/// `decodes` rows of lengths spread over 1..=`longest`, then one prefill of `prefill` tokens without context.
fn batch(decodes: u32, prefill: u32, longest: u32, width: u32) -> GroupStep {
    let mut seq_lens: Vec<i32> = (0..decodes)
        .map(|row| (1 + row.wrapping_mul(2_654_435_761) % longest) as i32)
        .collect();
    let mut query_start_loc: Vec<i32> = (0..=decodes as i32).collect();
    let mut positions: Vec<i64> = seq_lens.iter().map(|&len| i64::from(len) - 1).collect();
    if prefill > 0 {
        seq_lens.push(prefill as i32);
        query_start_loc.push((decodes + prefill) as i32);
        positions.extend(0..i64::from(prefill));
    }
    let rows = seq_lens.len();
    let ids = (0..rows as u32 * width).map(|id| (id.wrapping_mul(40_503) % NUM_BLOCKS) as i32);
    let block_table: Vec<i32> = ids.collect();
    let mut slot_mapping = Vec::new();
    for (row, pair) in query_start_loc.windows(2).enumerate() {
        for token in pair[0]..pair[1] {
            let position = positions[token as usize];
            let id = block_table[row * width as usize + (position / 16) as usize];
            slot_mapping.push(i64::from(id) * 16 + position % 16);
        }
    }
    let tensors = StepTensors {
        query_start_loc,
        seq_lens: seq_lens.clone(),
        block_table,
        block_table_width: width as usize,
        slot_mapping,
        positions,
        ..StepTensors::default()
    };
    let longest = seq_lens.iter().copied().max().unwrap_or(0) as u32;
    GroupStep::new(
        tensors,
        seq_lens,
        decodes + prefill,
        prefill.max(1),
        longest,
    )
}

/// FLASHINFER with each decode in chunks of `chunk` keys.
fn planned(metadata: &mut Metadata, chunk: u32) -> usize {
    let Metadata::Flashinfer(record) = metadata else {
        return 0;
    };
    let Some(flashinfer::Decode::Wrapper(plan)) = &mut record.decode else {
        return 0;
    };
    let work = &mut plan.work;
    work.kv_chunk_size = chunk;
    work.request_indices.clear();
    work.kv_tile_indices.clear();
    work.merge_indptr = vec![0];
    for (row, &len) in plan.seq_lens.iter().enumerate() {
        for part in 0..(len as u32).div_ceil(chunk) {
            work.request_indices.push(row as i32);
            work.kv_tile_indices.push(part as i32);
        }
        work.merge_indptr.push(work.request_indices.len() as i32);
    }
    let items = work.request_indices.len();
    work.qo_tile_indices = vec![0; items];
    work.worker_indptr = (0..=264)
        .map(|worker| (worker * items / 264) as i32)
        .collect();
    work.split_kv = true;
    items
}

/// Median of samples of many calls, in microseconds a call.
fn median(mut call: impl FnMut()) -> f64 {
    let mut samples: Vec<f64> = (0..301)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..32 {
                call();
            }
            start.elapsed().as_secs_f64() * 1e6 / 32.0
        })
        .collect();
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

fn main() {
    let mut verifier = Verifier::new();
    for (name, decodes, prefill, longest) in [
        ("256 decodes to 2k", 256, 0, 2_048u32),
        ("256 decodes to 32k", 256, 0, 32_768),
        ("8,192-token mixed, 200 decodes to 2k", 200, 7_992, 2_048),
        ("1,024 decodes to 2k", 1_024, 0, 2_048),
    ] {
        let max_model_len = u32::max(longest, prefill).next_power_of_two();
        let config = config(max_model_len);
        let step = batch(decodes, prefill, longest, max_model_len / PAGE);
        let inputs = step.tensors.inputs();
        let ctx = VerifyContext {
            config: &config,
            common: &step.cam,
            inputs: &inputs,
            promise: None,
            grant: Grant::Exact,
            num_blocks: NUM_BLOCKS,
        };
        let ids: u32 = step
            .tensors
            .seq_lens
            .iter()
            .map(|&len| (len as u32).div_ceil(PAGE))
            .sum();
        let mut plain = plain_builder(Family::FlashAttn, &config).expect("plain");
        let references = plain.build(&step.cam, false).expect("built");
        let mut plain = plain_builder(Family::Flashinfer, &config).expect("plain");
        let mut plan = plain.build(&step.cam, false).expect("built");
        let items = planned(&mut plan, 512);
        verify_step(&ctx).expect("a good step");
        for metadata in [&references, &plan] {
            verifier.verify(metadata, &ctx).expect("good metadata");
        }
        let by_reference = median(|| {
            black_box(verifier.verify(black_box(&references), &ctx)).expect("good");
        });
        let by_step = median(|| black_box(verify_step(black_box(&ctx))).expect("good"));
        let by_plan = median(|| {
            black_box(verifier.verify(black_box(&plan), &ctx)).expect("good");
        });
        println!("verify, references, {name}\t{by_reference:.2}\tµs");
        println!("verify, step ({ids} block ids), {name}\t{by_step:.2}\tµs");
        println!(
            "verify, step + references, {name}\t{:.2}\tµs",
            by_step + by_reference
        );
        println!("verify, plan ({items} decode items), {name}\t{by_plan:.2}\tµs");
    }
}
