//! A configuration and batches for tests and benchmarks of builders.

use timetable_types::{
    AttentionConfig, BuilderConfig, Causal, CommonAttentionMetadata, CudagraphConfig,
    CudagraphMode, DeviceConfig, Dtype, Family, KvCacheLayout, KvCacheSpec, KvCacheSpecKind,
    ParallelConfig, SchedulerConfig,
};

/// 8 query heads over 2 KV heads of 64, pages of 16, 264 workers.
pub fn config() -> BuilderConfig {
    BuilderConfig {
        kv_cache_spec: KvCacheSpec {
            kind: KvCacheSpecKind::FullAttention,
            block_size: 16,
            num_kv_heads: 2,
            head_size: 64,
            head_size_v: 64,
            dtype: Dtype::Bfloat16,
            sliding_window: None,
            attention_chunk_size: None,
            dcp_sharded: false,
            mamba: None,
        },
        layer_names: vec![
            "model.layers.0.self_attn".to_owned(),
            "model.layers.1.self_attn".to_owned(),
        ],
        attention: AttentionConfig {
            num_heads: 8,
            scale: 0.125,
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
            max_num_seqs: 1024,
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
        options: vec![("unused".to_owned(), "value".to_owned())],
    }
}

/// The same for a component's family: the MLA backends have one latent of 576 for all heads.
pub fn config_of(family: Family) -> BuilderConfig {
    let mut config = config();
    if family == Family::FlashMla {
        config.kv_cache_spec.kind = KvCacheSpecKind::MlaAttention;
        config.kv_cache_spec.num_kv_heads = 1;
        config.kv_cache_spec.head_size = 576;
        config.kv_cache_spec.head_size_v = 0;
        config.attention.kv_lora_rank = 512;
        config.attention.qk_rope_head_dim = 64;
    }
    config
}

/// `decodes` rows of one token with varied lengths, then `prefills` rows of 37 tokens.
pub fn batch(decodes: usize, prefills: usize, seed: u32) -> CommonAttentionMetadata {
    let mut state = seed;
    let mut next = |bound: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % bound
    };
    let mut query_start_loc_cpu = vec![0];
    let mut seq_lens_cpu_upper_bound = Vec::new();
    for row in 0..decodes + prefills {
        let query_len = if row < decodes { 1 } else { 37 };
        query_start_loc_cpu.push(query_start_loc_cpu[row] + query_len);
        seq_lens_cpu_upper_bound.push(query_len + next(32_000) as i32);
    }
    let tokens = *query_start_loc_cpu.last().unwrap() as u32;
    CommonAttentionMetadata {
        num_reqs: (decodes + prefills) as u32,
        num_actual_tokens: tokens,
        max_query_len: if prefills > 0 { 37 } else { 1 },
        max_seq_len: seq_lens_cpu_upper_bound.iter().copied().max().unwrap_or(0) as u32,
        causal: Causal::All(true),
        block_table_width: 2048,
        slot_mapping_len: tokens,
        query_start_loc_cpu,
        seq_lens_cpu_upper_bound,
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
