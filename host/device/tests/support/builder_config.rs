//! What builders of the tests are constructed with, before a test changes it.

use timetable_types::{
    AttentionConfig, BuilderConfig, CudagraphConfig, CudagraphMode, DeviceConfig, Dtype,
    KvCacheLayout, KvCacheSpec, KvCacheSpecKind, ParallelConfig, SchedulerConfig,
};

/// 4 query heads on 2 KV heads of 32, pages of 16, at most 4 splits, 4 workers; f32 everywhere.
pub fn config() -> BuilderConfig {
    BuilderConfig {
        kv_cache_spec: KvCacheSpec {
            kind: KvCacheSpecKind::FullAttention,
            block_size: 16,
            num_kv_heads: 2,
            head_size: 32,
            head_size_v: 32,
            dtype: Dtype::Float32,
            sliding_window: None,
            attention_chunk_size: None,
            dcp_sharded: false,
            mamba: None,
        },
        layer_names: vec!["layers.0".to_owned()],
        attention: AttentionConfig {
            num_heads: 4,
            scale: 0.176_776_7,
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
            max_num_seqs: 16,
            max_num_batched_tokens: 256,
            max_model_len: 256,
            max_num_blocks_per_req: 16,
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
            num_workers: 4,
            ctas_per_worker: 1,
            flash_attn_version: 3,
            trtllm_attention: false,
            xqa: false,
        },
        batch_invariant: false,
        max_num_splits: 4,
        model_runner_v2: true,
        options: Vec::new(),
    }
}
