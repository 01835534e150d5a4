//! What a builder may see of the host's configuration: spec, model, scheduler, graphs, parallelism, device.

use alloc::{string::String, vec::Vec};

enumeration! {
    /// Element types of queries, keys, values and caches.
    pub enum Dtype in "snake_case" {
        /// `float32`
        Float32 as "float32",
        /// `float16`
        Float16 as "float16",
        /// `bfloat16`
        Bfloat16 as "bfloat16",
        /// `float8-e4m3`
        Float8E4m3 as "float8-e4m3",
        /// `float8-e5m2`
        Float8E5m2 as "float8-e5m2",
        /// `uint8`
        Uint8 as "uint8",
        /// `int32`
        Int32 as "int32",
    }
}

enumeration! {
    /// Physical order of a KV cache: L(ayer) B(lock) H(ead) N (state in block) C(ontent).
    pub enum KvCacheLayout in "SCREAMING_SNAKE_CASE" {
        /// `lbnhc`
        Lbnhc as "lbnhc",
        /// `lbhnc`
        Lbhnc as "lbhnc",
        /// `lhbnc`
        Lhbnc as "lhbnc",
        /// `blhnc`
        Blhnc as "blhnc",
        /// `blnhc`
        Blnhc as "blnhc",
        /// `bhlnc`
        Bhlnc as "bhlnc",
    }
}

enumeration! {
    /// How much CUDA graph capture a builder's metadata allows. Ordered, weakest first.
    pub enum CudagraphSupport in "SCREAMING_SNAKE_CASE" {
        /// `never`
        Never as "never",
        /// `uniform-single-token-decode`
        UniformSingleTokenDecode as "uniform-single-token-decode",
        /// `uniform-batch`
        UniformBatch as "uniform-batch",
        /// `always`
        Always as "always",
    }
}

enumeration! {
    /// The configured or resolved CUDA graph mode.
    pub enum CudagraphMode in "SCREAMING_SNAKE_CASE" {
        /// `none`
        None as "none",
        /// `piecewise`
        Piecewise as "piecewise",
        /// `full`
        Full as "full",
        /// `full-decode-only`
        FullDecodeOnly as "full-decode-only",
        /// `full-and-piecewise`
        FullAndPiecewise as "full-and-piecewise",
    }
}

enumeration! {
    /// What kind of KV cache the group has.
    pub enum KvCacheSpecKind in "SCREAMING_SNAKE_CASE" {
        /// `full-attention`
        FullAttention as "full-attention",
        /// `sliding-window`
        SlidingWindow as "sliding-window",
        /// `chunked-local-attention`
        ChunkedLocalAttention as "chunked-local-attention",
        /// `mla-attention`
        MlaAttention as "mla-attention",
        /// `sliding-window-mla`
        SlidingWindowMla as "sliding-window-mla",
        /// `mamba`
        Mamba as "mamba",
        /// `cross-attention`
        CrossAttention as "cross-attention",
        /// `encoder-only-attention`
        EncoderOnlyAttention as "encoder-only-attention",
    }
}

enumeration! {
    /// Mamba-like layer types.
    pub enum MambaType in "snake_case" {
        /// `mamba1`
        Mamba1 as "mamba1",
        /// `mamba2`
        Mamba2 as "mamba2",
        /// `gdn`
        Gdn as "gdn",
        /// `short-conv`
        ShortConv as "short-conv",
        /// `linear`
        Linear as "linear",
    }
}

enumeration! {
    /// How Mamba states are kept: one row of states per request, or states at block boundaries too.
    pub enum MambaCacheMode in "snake_case" {
        /// `none`
        None as "none",
        /// `align`
        Align as "align",
    }
}

record! {
    /// The KV cache spec of the builder's attention group. Sizes in tokens unless named otherwise.
    pub struct KvCacheSpec {
        /// `kind`
        kind as "kind": KvCacheSpecKind,
        /// Tokens of one kernel block (a page). The manager's block may be a multiple.
        block_size as "block-size": u32,
        /// `num_kv_heads`
        num_kv_heads as "num-kv-heads": u32,
        /// `head_size`
        head_size as "head-size": u32,
        /// `head_size_v`
        head_size_v as "head-size-v": u32,
        /// `dtype`
        dtype as "dtype": Dtype,
        /// Sliding window in tokens, the current token included.
        sliding_window as "sliding-window": Option<u32>,
        /// Chunk of chunked local attention, in tokens.
        attention_chunk_size as "attention-chunk-size": Option<u32>,
        /// Is this cache sharded over the decode-context-parallel ranks?
        dcp_sharded as "dcp-sharded": bool,
        /// `mamba`
        mamba as "mamba": Option<MambaSpec>,
    }
}

record! {
    /// What a cache of states says beyond its page.
    pub struct MambaSpec {
        /// `mamba_type`
        mamba_type as "mamba-type": MambaType,
        /// `cache_mode`
        cache_mode as "cache-mode": MambaCacheMode,
        /// `num_speculative_blocks`
        num_speculative_blocks as "num-speculative-blocks": u32,
        /// Tokens of one chunk of the chunked scan (Mamba2, GDN).
        chunk_size as "chunk-size": u32,
    }
}

record! {
    /// The model's attention as this group's layers see it, per rank.
    pub struct AttentionConfig {
        /// `num_heads`
        num_heads as "num-heads": u32,
        /// `scale`
        scale as "scale": f64,
        /// `logits_soft_cap`
        logits_soft_cap as "logits-soft-cap": Option<f64>,
        /// One entry for each distinct window among the layers of the model that use this backend: tokens, the current one
        /// included, as in the spec; −1 is "no window".
        sliding_windows as "sliding-windows": Vec<i32>,
        /// `model_dtype`
        model_dtype as "model-dtype": Dtype,
        /// The cache dtype as configured: "auto", "fp8", …
        kv_cache_dtype as "kv-cache-dtype": String,
        /// `kv_cache_layout`
        kv_cache_layout as "kv-cache-layout": KvCacheLayout,
        /// `has_sinks`
        has_sinks as "has-sinks": bool,
        /// `use_rswa`
        use_rswa as "use-rswa": bool,
        /// `rswa_window`
        rswa_window as "rswa-window": u32,
        /// Latent rank and rotary part of MLA; 0 elsewhere.
        kv_lora_rank as "kv-lora-rank": u32,
        /// `qk_rope_head_dim`
        qk_rope_head_dim as "qk-rope-head-dim": u32,
    }
}

record! {
    /// Limits of the scheduler.
    pub struct SchedulerConfig {
        /// `max_num_seqs`
        max_num_seqs as "max-num-seqs": u32,
        /// `max_num_batched_tokens`
        max_num_batched_tokens as "max-num-batched-tokens": u32,
        /// `max_model_len`
        max_model_len as "max-model-len": u32,
        /// Columns of the widest block table that a step may bring.
        max_num_blocks_per_req as "max-num-blocks-per-req": u32,
        /// Draft tokens per decode; 0 without speculation.
        num_speculative_tokens as "num-speculative-tokens": u32,
        /// `parallel_drafting`
        parallel_drafting as "parallel-drafting": bool,
    }
}

record! {
    /// The resolved CUDA graph mode, and the sizes that it captures.
    pub struct CudagraphConfig {
        /// `mode`
        mode as "mode": CudagraphMode,
        /// Token counts of captured graphs, rising.
        capture_sizes as "capture-sizes": Vec<u32>,
        /// `max_capture_size`
        max_capture_size as "max-capture-size": u32,
    }
}

record! {
    /// Context parallelism: 1 and 0 where there is none.
    pub struct ParallelConfig {
        /// `dcp_world_size`
        dcp_world_size as "dcp-world-size": u32,
        /// `dcp_rank`
        dcp_rank as "dcp-rank": u32,
        /// `cp_kv_cache_interleave_size`
        cp_kv_cache_interleave_size as "cp-kv-cache-interleave-size": u32,
        /// `prefill_context_parallel`
        prefill_context_parallel as "prefill-context-parallel": bool,
    }
}

record! {
    /// What kind of device runs the kernels.
    pub struct DeviceConfig {
        /// Compute capability, (major, minor); (0, 0) on a CPU.
        compute_capability as "compute-capability": (u32, u32),
        /// Streaming multiprocessors, or worker threads of a CPU.
        num_workers as "num-workers": u32,
        /// Thread blocks that are resident on one multiprocessor; 1 on a CPU.
        ctas_per_worker as "ctas-per-worker": u32,
        /// FlashAttention version in use: 2, 3 or 4; 0 where the question makes no sense.
        flash_attn_version as "flash-attn-version": u32,
        /// Are TensorRT-LLM's generated kernels (or XQA) usable for this group?
        trtllm_attention as "trtllm-attention": bool,
        /// `xqa`
        xqa as "xqa": bool,
    }
}

record! {
    /// What a builder is made of. It is part of the builder's version: another configuration is another version.
    pub struct BuilderConfig {
        /// `kv_cache_spec`
        kv_cache_spec as "kv-cache-spec": KvCacheSpec,
        /// `layer_names`
        layer_names as "layer-names": Vec<String>,
        /// `attention`
        attention as "attention": AttentionConfig,
        /// `scheduler`
        scheduler as "scheduler": SchedulerConfig,
        /// `cudagraph`
        cudagraph as "cudagraph": CudagraphConfig,
        /// `parallel`
        parallel as "parallel": ParallelConfig,
        /// `device`
        device as "device": DeviceConfig,
        /// `batch_invariant`
        batch_invariant as "batch-invariant": bool,
        /// The largest number of KV splits of one request that the kernels' scratch allows; at least 1.
        max_num_splits as "max-num-splits": u32,
        /// Does the resolved MRV2-style runner order rows decode first?
        model_runner_v2 as "model-runner-v2": bool,
        /// Options of this builder's own, as the operator gave them.
        options as "options": Vec<(String, String)>,
    }
}
