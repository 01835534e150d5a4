//! FLASH_ATTN's metadata: the WIT interface `flash-attn`, in Rust.

use alloc::vec::Vec;

use crate::{Causal, Dtype, Tensor};

variant! {
    /// Order in which requests' tiles are started.
    pub enum TileOrder {
        /// Row 0 first.
        Natural as "natural",
        /// A permutation of the rows.
        Rows as "rows" (Vec<i32>),
    }
}

record! {
    /// How the keys of each request are divided among workers. This is Timetable's own typed schedule: impls execute it.
    ///
    /// With s splits, P pages of keys and page size B, split i covers the keys of pages [i·ceil(P/s), (i+1)·ceil(P/s)).
    /// Splits whose range is empty do nothing. Partial results are merged in split order.
    pub struct Schedule {
        /// Largest entry of `num-splits`; at least 1, at most the launch promise.
        max_num_splits as "max-num-splits": u32,
        /// `s32 [R]`, each in 1..=max-num-splits. Empty: every row is 1.
        num_splits as "num-splits": Vec<i32>,
        /// `tile_order`
        tile_order as "tile-order": TileOrder,
    }
}

record! {
    /// The arguments that the field passes to FlashAttention 3's get_scheduler_metadata. A record for conformance: no impl
    /// here executes it.
    pub struct SchedulerMetadataCall {
        /// `batch_size`
        batch_size as "batch-size": u32,
        /// `max_seqlen_q`
        max_seqlen_q as "max-seqlen-q": u32,
        /// `max_seqlen_k`
        max_seqlen_k as "max-seqlen-k": u32,
        /// `num_heads_q`
        num_heads_q as "num-heads-q": u32,
        /// `num_heads_kv`
        num_heads_kv as "num-heads-kv": u32,
        /// `headdim`
        headdim as "headdim": u32,
        /// `cache_seqlens`
        cache_seqlens as "cache-seqlens": Tensor,
        /// `qkv_dtype`
        qkv_dtype as "qkv-dtype": Dtype,
        /// `cu_seqlens_q`
        cu_seqlens_q as "cu-seqlens-q": Tensor,
        /// `page_size`
        page_size as "page-size": u32,
        /// `causal`
        causal as "causal": bool,
        /// `window_size`
        window_size as "window-size": (i32, i32),
        /// `num_splits`
        num_splits as "num-splits": u32,
        /// Length of the schedule, in s32.
        scheduler_metadata_len as "scheduler-metadata-len": u32,
    }
}

record! {
    /// One step's metadata for FLASH_ATTN: the field's `FlashAttentionMetadata`, and the schedule.
    pub struct Metadata {
        /// `num_actual_tokens`
        num_actual_tokens as "num-actual-tokens": u32,
        /// `max_query_len`
        max_query_len as "max-query-len": u32,
        /// `query_start_loc`
        query_start_loc as "query-start-loc": Tensor,
        /// `max_seq_len`
        max_seq_len as "max-seq-len": u32,
        /// `seq_lens`
        seq_lens as "seq-lens": Tensor,
        /// `block_table`
        block_table as "block-table": Tensor,
        /// `slot_mapping`
        slot_mapping as "slot-mapping": Tensor,
        /// `causal`
        causal as "causal": Causal,
        /// 0 without decode context parallelism.
        max_dcp_context_kv_len as "max-dcp-context-kv-len": u32,
        /// `dcp_context_kv_lens`
        dcp_context_kv_lens as "dcp-context-kv-lens": Option<Tensor>,
        /// `num_decode_reqs`
        num_decode_reqs as "num-decode-reqs": u32,
        /// `num_prefill_reqs`
        num_prefill_reqs as "num-prefill-reqs": u32,
        /// `num_decode_tokens`
        num_decode_tokens as "num-decode-tokens": u32,
        /// `num_prefill_tokens`
        num_prefill_tokens as "num-prefill-tokens": u32,
        /// As the field has it: 0 leaves the choice to the kernel's heuristic.
        max_num_splits as "max-num-splits": u32,
        /// `scheduler_metadata`
        scheduler_metadata as "scheduler-metadata": Option<SchedulerMetadataCall>,
        /// `s32 [T, 2]`, absolute [start, end] per scheduled token, (−1, −1) where none.
        mm_prefix_query_range as "mm-prefix-query-range": Option<Tensor>,
        /// `rswa_prefix_lens`
        rswa_prefix_lens as "rswa-prefix-lens": Option<Tensor>,
        /// `rswa_window`
        rswa_window as "rswa-window": u32,
        /// `schedule`
        schedule as "schedule": Schedule,
    }
}
