//! Configurations and batches for tests.

use timetable_attention::batch::{GroupStep, StepTensors};
use timetable_types::{
    AttentionConfig, BuilderConfig, CommonAttentionMetadata, CudagraphConfig, CudagraphMode,
    DeviceConfig, Dtype, KvCacheLayout, KvCacheSpec, KvCacheSpecKind, ParallelConfig,
    SchedulerConfig,
};

/// A builder's configuration for a device with 132 multiprocessors.
pub(crate) fn config(
    block_size: u32,
    num_heads: u32,
    num_kv_heads: u32,
    head_size: u32,
) -> BuilderConfig {
    BuilderConfig {
        layer_names: vec!["model.layers.0.self_attn.attn".to_owned()],
        kv_cache_spec: KvCacheSpec {
            kind: KvCacheSpecKind::FullAttention,
            block_size,
            num_kv_heads,
            head_size,
            head_size_v: head_size,
            dtype: Dtype::Bfloat16,
            sliding_window: None,
            attention_chunk_size: None,
            dcp_sharded: false,
            mamba: None,
        },
        attention: AttentionConfig {
            num_heads,
            scale: 0.125,
            logits_soft_cap: None,
            sliding_windows: Vec::new(),
            model_dtype: Dtype::Bfloat16,
            kv_cache_dtype: "auto".to_owned(),
            kv_cache_layout: KvCacheLayout::Lbhnc,
            has_sinks: false,
            use_rswa: false,
            rswa_window: 0,
            kv_lora_rank: 0,
            qk_rope_head_dim: 0,
        },
        scheduler: SchedulerConfig {
            max_num_seqs: 64,
            max_num_batched_tokens: 1024,
            max_model_len: 8192,
            max_num_blocks_per_req: 512,
            num_speculative_tokens: 0,
            parallel_drafting: false,
        },
        cudagraph: CudagraphConfig {
            mode: CudagraphMode::FullAndPiecewise,
            capture_sizes: vec![1, 2, 4, 8, 16, 32, 64],
            max_capture_size: 64,
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
        max_num_splits: 32,
        model_runner_v2: true,
        options: Vec::new(),
    }
}

/// The host's record of a step with these tensors.
pub(crate) fn common(tensors: &StepTensors, num_tokens: u32) -> CommonAttentionMetadata {
    let longest_query = tensors
        .query_start_loc
        .windows(2)
        .map(|pair| pair[1] - pair[0])
        .max();
    let longest = tensors.seq_lens.iter().copied().max().unwrap_or(0);
    GroupStep::new(
        tensors.clone(),
        tensors.seq_lens.clone(),
        num_tokens,
        longest_query.unwrap_or(0) as u32,
        longest as u32,
    )
    .cam
}
