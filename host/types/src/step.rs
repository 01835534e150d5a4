//! The inputs of one step: `CommonAttentionMetadata` and the names of the host's device tensors.

use alloc::{string::String, vec::Vec};

enumeration! {
    /// The host's device tensors of one step. R rows (requests), T tokens, W table columns.
    pub enum Input in "snake_case" {
        /// `s32 [R + 1]`
        QueryStartLoc as "query-start-loc",
        /// `s32 [R]`
        SeqLens as "seq-lens",
        /// `s32 [R, W]`
        BlockTable as "block-table",
        /// `s64 [T]`
        SlotMapping as "slot-mapping",
        /// `s64 [T]`
        Positions as "positions",
        /// `s32 [R]`, only if `causal` is per request
        Causal as "causal",
        /// `s32 [R]`
        DcpLocalSeqLens as "dcp-local-seq-lens",
        /// `s32 [R]`
        EncoderSeqLens as "encoder-seq-lens",
        /// `s32 [n]`
        LogitsIndicesPadded as "logits-indices-padded",
        /// `s32 [R]`
        RswaPrefixLens as "rswa-prefix-lens",
    }
}

enumeration! {
    /// Host-side vectors that a builder may ask for. What it does not ask for arrives empty.
    pub enum HostInput in "snake_case" {
        /// `query-start-loc-cpu`
        QueryStartLocCpu as "query-start-loc-cpu",
        /// `seq-lens-cpu-upper-bound`
        SeqLensCpuUpperBound as "seq-lens-cpu-upper-bound",
        /// `is-prefilling`
        IsPrefilling as "is-prefilling",
        /// `dcp-local-seq-lens-cpu-upper-bound`
        DcpLocalSeqLensCpuUpperBound as "dcp-local-seq-lens-cpu-upper-bound",
        /// `encoder-seq-lens-cpu`
        EncoderSeqLensCpu as "encoder-seq-lens-cpu",
        /// `req-idx`
        ReqIdx as "req-idx",
        /// `mm-req-doc-ranges`
        MmReqDocRanges as "mm-req-doc-ranges",
        /// `replayssm-decode-base-cpu`
        ReplayssmDecodeBaseCpu as "replayssm-decode-base-cpu",
        /// `extras`
        Extras as "extras",
    }
}

variant! {
    /// One causal flag for the batch, or one per request on the device.
    pub enum Causal {
        /// `all`
        All as "all" (bool),
        /// `per-request`
        PerRequest as "per-request",
    }
}

record! {
    /// Decode context parallelism.
    pub struct DcpInputs {
        /// `s32 [R]`, an upper bound of this rank's share of each length.
        dcp_local_seq_lens_cpu_upper_bound as "dcp-local-seq-lens-cpu-upper-bound": Vec<i32>,
    }
}

record! {
    /// Cross attention.
    pub struct EncoderInputs {
        /// `s32 [R]`
        encoder_seq_lens_cpu as "encoder-seq-lens-cpu": Vec<i32>,
    }
}

record! {
    /// KV-sharing fast prefill, where armed.
    pub struct FastPrefillInputs {
        /// `num_logits_indices`
        num_logits_indices as "num-logits-indices": u32,
        /// `max_logits_per_req`
        max_logits_per_req as "max-logits-per-req": u32,
        /// Length of `logits-indices-padded`.
        num_logits_indices_padded as "num-logits-indices-padded": u32,
    }
}

record! {
    /// A bidirectional span of a multimodal document: rows' token positions [start, end], end inclusive.
    pub struct MmDocRange {
        /// `row`
        row as "row": u32,
        /// `start`
        start as "start": u32,
        /// `end`
        end as "end": u32,
    }
}

variant! {
    /// A model state's own field.
    pub enum ExtraValue {
        /// `integer`
        Integer as "integer" (i64),
        /// A host vector, by value.
        Host as "host" (Vec<i32>),
        /// A device vector of s32 with that many rows, referred to as `tensor.extra(name)`.
        Device as "device" (u32),
    }
}

record! {
    /// A model state's own field, by name.
    pub struct Extra {
        /// `name`
        name as "name": String,
        /// `value`
        value as "value": ExtraValue,
    }
}

record! {
    /// What a step's attention has in common for all layers of a KV cache group: the host-side part, and the shapes of the
    /// device tensors. `common_prefix_len` of the field is always 0 and is not here.
    pub struct CommonAttentionMetadata {
        /// Rows, padded for full CUDA graphs.
        num_reqs as "num-reqs": u32,
        /// Tokens, padded for full CUDA graphs; may exceed the last query start.
        num_actual_tokens as "num-actual-tokens": u32,
        /// `max_query_len`
        max_query_len as "max-query-len": u32,
        /// `max_seq_len`
        max_seq_len as "max-seq-len": u32,
        /// `causal`
        causal as "causal": Causal,
        /// W of `block-table`.
        block_table_width as "block-table-width": u32,
        /// Length of `slot-mapping`.
        slot_mapping_len as "slot-mapping-len": u32,
        /// `s32 [R + 1]`: starts at 0, never falls.
        query_start_loc_cpu as "query-start-loc-cpu": Vec<i32>,
        /// `s32 [R]`: at least the true lengths; exact for rows that prefill; 0 in padded rows.
        seq_lens_cpu_upper_bound as "seq-lens-cpu-upper-bound": Vec<i32>,
        /// One byte per row, 0 or 1. May be shorter than R: rows beyond it are not prefilling.
        is_prefilling as "is-prefilling": Vec<u8>,
        /// `dcp`
        dcp as "dcp": Option<DcpInputs>,
        /// `encoder`
        encoder as "encoder": Option<EncoderInputs>,
        /// `fast_prefill`
        fast_prefill as "fast-prefill": Option<FastPrefillInputs>,
        /// Row → index in the request table; equal neighbours are parts of one request. Empty: not given.
        req_idx as "req-idx": Vec<u32>,
        /// Empty: none.
        mm_req_doc_ranges as "mm-req-doc-ranges": Vec<MmDocRange>,
        /// `s32 [R]`; empty: none.
        replayssm_decode_base_cpu as "replayssm-decode-base-cpu": Vec<i32>,
        /// `extras`
        extras as "extras": Vec<Extra>,
    }
}
