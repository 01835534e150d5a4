//! FLASHINFER's metadata: the WIT interface `flashinfer`, in Rust.

use alloc::vec::Vec;

use crate::{Dtype, KvCacheLayout, Matrix, Tensor};

enumeration! {
    /// Which of the field's plan functions the arguments are for.
    pub enum PlanFunction in "snake_case" {
        /// `batch-decode-plan`
        BatchDecodePlan as "batch-decode-plan",
        /// `fast-decode-plan`
        FastDecodePlan as "fast-decode-plan",
        /// `batch-prefill-plan`
        BatchPrefillPlan as "batch-prefill-plan",
        /// `batch-dcp-prefill-plan`
        BatchDcpPrefillPlan as "batch-dcp-prefill-plan",
    }
}

record! {
    /// The work list: what FlashInfer's plan() decides, typed. Impls execute it.
    ///
    /// Work item w is one tile of `cta-tile-q` packed query rows of request `request-indices[w]` against one chunk of
    /// `kv-chunk-size` keys: query rows [q·tile, (q+1)·tile) with q = `qo-tile-indices[w]` (a packed row is one query token of
    /// one of the query heads that share a KV head, token-major), keys [k·chunk, (k+1)·chunk) with k = `kv-tile-indices[w]`,
    /// both cut to the request's own. Every (query tile, key chunk) of every request occurs exactly once; chunks wholly
    /// outside a sliding window or after the last causal key may be left out.
    /// Request indices are relative to the first row of this part.
    pub struct WorkList {
        /// Keys of one chunk; a multiple of the page size.
        kv_chunk_size as "kv-chunk-size": u32,
        /// `cta_tile_q`
        cta_tile_q as "cta-tile-q": u32,
        /// `request_indices`
        request_indices as "request-indices": Vec<i32>,
        /// `qo_tile_indices`
        qo_tile_indices as "qo-tile-indices": Vec<i32>,
        /// `kv_tile_indices`
        kv_tile_indices as "kv-tile-indices": Vec<i32>,
        /// `s32 [workers + 1]`: worker i executes items [i, i + 1) in order.
        worker_indptr as "worker-indptr": Vec<i32>,
        /// `s32 [query tiles + 1]`, tiles in request order: how many partial results each tile merges, as a running sum.
        /// Partial results are merged in the order of their chunks.
        merge_indptr as "merge-indptr": Vec<i32>,
        /// Does any tile have more than one chunk?
        split_kv as "split-kv": bool,
    }
}

record! {
    /// Arguments of the field's plan function, and the plan.
    pub struct Plan {
        /// `function`
        function as "function": PlanFunction,
        /// `s32 [n + 1]`, rebased to this part.
        qo_indptr as "qo-indptr": Tensor,
        /// `s32 [n + 1]`: running sum of each request's pages.
        paged_kv_indptr as "paged-kv-indptr": Vec<i32>,
        /// s32: pages, by reference.
        paged_kv_indices as "paged-kv-indices": Tensor,
        /// `s32 [n]`: keys in the last page, 1..=page size, 0 for a request without keys.
        paged_kv_last_page_len as "paged-kv-last-page-len": Vec<i32>,
        /// `s32 [n]`: lengths of the keys.
        seq_lens as "seq-lens": Vec<i32>,
        /// `num_qo_heads`
        num_qo_heads as "num-qo-heads": u32,
        /// `num_kv_heads`
        num_kv_heads as "num-kv-heads": u32,
        /// `head_dim`
        head_dim as "head-dim": u32,
        /// `page_size`
        page_size as "page-size": u32,
        /// `causal`
        causal as "causal": bool,
        /// `sm_scale`
        sm_scale as "sm-scale": f64,
        /// `window_left`
        window_left as "window-left": i32,
        /// `logits_soft_cap`
        logits_soft_cap as "logits-soft-cap": Option<f64>,
        /// `q_data_type`
        q_data_type as "q-data-type": Dtype,
        /// `kv_data_type`
        kv_data_type as "kv-data-type": Dtype,
        /// `o_data_type`
        o_data_type as "o-data-type": Dtype,
        /// In tokens; −1: not fixed.
        fixed_split_size as "fixed-split-size": i32,
        /// `disable_split_kv`
        disable_split_kv as "disable-split-kv": bool,
        /// `q_len_per_req`
        q_len_per_req as "q-len-per-req": u32,
        /// 1 without decode context parallelism.
        dcp_world_size as "dcp-world-size": u32,
        /// Rows of a captured decode graph that this wrapper belongs to; 0: no graph.
        cudagraph_batch_size as "cudagraph-batch-size": u32,
        /// `work`
        work as "work": WorkList,
    }
}

enumeration! {
    /// The generated kernel that runs decodes.
    pub enum TrtllmKernel in "snake_case" {
        /// `xqa`
        Xqa as "xqa",
        /// `trtllm-gen`
        TrtllmGen as "trtllm-gen",
    }
}

record! {
    /// Decodes without a plan: the field's `FlashInferTrtllmAPIDecode`.
    pub struct TrtllmDecode {
        /// `kernel`
        kernel as "kernel": TrtllmKernel,
        /// `block_tables`
        block_tables as "block-tables": Tensor,
        /// `seq_lens`
        seq_lens as "seq-lens": Tensor,
        /// `max_seq_len`
        max_seq_len as "max-seq-len": u32,
        /// `q_len_per_req`
        q_len_per_req as "q-len-per-req": u32,
        /// `q_cu_seq_lens`
        q_cu_seq_lens as "q-cu-seq-lens": Option<Tensor>,
        /// Packed u16 draft mask of XQA, as rows of s32.
        mask as "mask": Option<Matrix>,
        /// `dcp_query_start_loc`
        dcp_query_start_loc as "dcp-query-start-loc": Option<Tensor>,
    }
}

record! {
    /// Prefills without a plan: the field's `TRTLLMPrefill`.
    pub struct TrtllmPrefill {
        /// `block_tables`
        block_tables as "block-tables": Tensor,
        /// `seq_lens`
        seq_lens as "seq-lens": Tensor,
        /// `cum_seq_lens_q`
        cum_seq_lens_q as "cum-seq-lens-q": Tensor,
        /// `cum_seq_lens_kv`
        cum_seq_lens_kv as "cum-seq-lens-kv": Tensor,
        /// `max_q_len`
        max_q_len as "max-q-len": u32,
        /// `max_seq_len`
        max_seq_len as "max-seq-len": u32,
    }
}

variant! {
    /// How the rows that decode are run.
    pub enum Decode {
        /// `wrapper`
        Wrapper as "wrapper" (Plan),
        /// `trtllm`
        Trtllm as "trtllm" (TrtllmDecode),
    }
}

variant! {
    /// How the rows that prefill are run.
    pub enum Prefill {
        /// `wrapper`
        Wrapper as "wrapper" (Plan),
        /// `trtllm`
        Trtllm as "trtllm" (TrtllmPrefill),
    }
}

record! {
    /// One step's metadata for FLASHINFER: the field's `FlashInferMetadata`.
    pub struct Metadata {
        /// `kv_cache_layout`
        kv_cache_layout as "kv-cache-layout": KvCacheLayout,
        /// `num_actual_tokens`
        num_actual_tokens as "num-actual-tokens": u32,
        /// `slot_mapping`
        slot_mapping as "slot-mapping": Tensor,
        /// `q_data_type_prefill`
        q_data_type_prefill as "q-data-type-prefill": Dtype,
        /// `q_data_type_decode`
        q_data_type_decode as "q-data-type-decode": Dtype,
        /// `num_decodes`
        num_decodes as "num-decodes": u32,
        /// `num_decode_tokens`
        num_decode_tokens as "num-decode-tokens": u32,
        /// `num_prefills`
        num_prefills as "num-prefills": u32,
        /// `num_prefill_tokens`
        num_prefill_tokens as "num-prefill-tokens": u32,
        /// `causal`
        causal as "causal": bool,
        /// `prefill`
        prefill as "prefill": Option<Prefill>,
        /// `decode`
        decode as "decode": Option<Decode>,
    }
}
