//! A configuration and batches to try a builder's logic with, natively: nothing here is in a component. It must never know a
//! builder.

use timetable_types::{
    AttentionConfig, BuilderConfig, Causal, CommonAttentionMetadata, CudagraphConfig,
    CudagraphMode, DeviceConfig, Dtype, KvCacheLayout, KvCacheSpec, KvCacheSpecKind,
    ParallelConfig, SchedulerConfig,
};

/// 8 query heads over 2 KV heads of 64 elements, pages of 16 keys, at most 8 splits, a CPU with 4 workers.
pub fn config() -> BuilderConfig {
    BuilderConfig {
        kv_cache_spec: KvCacheSpec {
            kind: KvCacheSpecKind::FullAttention,
            block_size: 16,
            num_kv_heads: 2,
            head_size: 64,
            head_size_v: 64,
            dtype: Dtype::Float32,
            sliding_window: None,
            attention_chunk_size: None,
            dcp_sharded: false,
            mamba: None,
        },
        layer_names: vec!["layers.0".to_owned()],
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
            max_num_seqs: 64,
            max_num_batched_tokens: 2_048,
            max_model_len: 8_192,
            max_num_blocks_per_req: 512,
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
            num_workers: 4,
            ctas_per_worker: 1,
            flash_attn_version: 0,
            trtllm_attention: false,
            xqa: false,
        },
        batch_invariant: false,
        max_num_splits: 8,
        model_runner_v2: true,
        options: Vec::new(),
    }
}

/// A step of rows (query tokens, keys), decodes first: `&[(1, 40), (20, 32)]` is a decode with 40 keys and a prefill of 20 tokens
/// after 12.
pub fn batch(rows: &[(u32, u32)]) -> CommonAttentionMetadata {
    let starts = rows.iter().scan(0, |end, (tokens, _)| {
        *end += *tokens as i32;
        Some(*end)
    });
    let tokens = rows.iter().map(|(tokens, _)| tokens).sum();
    CommonAttentionMetadata {
        num_reqs: rows.len() as u32,
        num_actual_tokens: tokens,
        max_query_len: rows.iter().map(|(tokens, _)| *tokens).max().unwrap_or(0),
        max_seq_len: rows.iter().map(|(_, keys)| *keys).max().unwrap_or(0),
        causal: Causal::All(true),
        block_table_width: config().scheduler.max_num_blocks_per_req,
        slot_mapping_len: tokens,
        query_start_loc_cpu: std::iter::once(0).chain(starts).collect(),
        seq_lens_cpu_upper_bound: rows.iter().map(|(_, keys)| *keys as i32).collect(),
        is_prefilling: rows
            .iter()
            .map(|(tokens, _)| u8::from(*tokens > 1))
            .collect(),
        dcp: None,
        encoder: None,
        fast_prefill: None,
        req_idx: Vec::new(),
        mm_req_doc_ranges: Vec::new(),
        replayssm_decode_base_cpu: Vec::new(),
        extras: Vec::new(),
    }
}
