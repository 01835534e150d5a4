//! The configuration and the steps that builders and the verifier are measured with. Must never know who is measured.

use timetable_attention::{
    batch::{GroupStep, StepTensors},
    types::{
        AttentionConfig, BuilderConfig, CudagraphConfig, CudagraphMode, DeviceConfig, Dtype,
        KvCacheLayout, KvCacheSpec, KvCacheSpecKind, ParallelConfig, SchedulerConfig,
    },
};

/// Tokens of a page.
pub const PAGE: u32 = 16;
/// Pages of the cache.
pub const NUM_BLOCKS: u32 = 1 << 17;

/// A large GPU-like configuration: 32 query heads over 8 KV heads of 128, 132 × 2 workers, lengths to `max_model_len`.
pub fn config(max_model_len: u32) -> BuilderConfig {
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
pub fn batch(decodes: u32, prefill: u32, longest: u32, width: u32) -> GroupStep {
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
