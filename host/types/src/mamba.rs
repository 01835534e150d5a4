//! The Mamba family's metadata: the WIT interface `mamba`, in Rust.

use alloc::vec::Vec;

use crate::{PaddedTensor, Tensor};

record! {
    /// Chunks of a causal convolution over prefills, `block-m` tokens each.
    pub struct CausalConv1d {
        /// `block_m`
        block_m as "block-m": u32,
        /// `s32 [prefills]`: chunks of each.
        nums as "nums": Vec<i32>,
        /// Sum of nums.
        total as "total": u32,
        /// s32: for each chunk its prefill, padded with −1.
        batch_ptr as "batch-ptr": Tensor,
        /// s32: for each chunk its index within the prefill, padded with −1.
        token_chunk_offset_ptr as "token-chunk-offset-ptr": Tensor,
    }
}

record! {
    /// What MAMBA1, MAMBA2 and SHORT_CONV share.
    pub struct BaseMetadata {
        /// `num_prefills`
        num_prefills as "num-prefills": u32,
        /// `num_prefill_tokens`
        num_prefill_tokens as "num-prefill-tokens": u32,
        /// `num_decodes`
        num_decodes as "num-decodes": u32,
        /// `num_decode_tokens`
        num_decode_tokens as "num-decode-tokens": u32,
        /// `num_reqs`
        num_reqs as "num-reqs": u32,
        /// `bool [prefills]`
        has_initial_states_p as "has-initial-states-p": Option<Tensor>,
        /// `s32 [prefills + 1]`, rebased.
        query_start_loc_p as "query-start-loc-p": Option<Tensor>,
        /// `s32 [prefills]`
        state_indices_tensor_p as "state-indices-tensor-p": Tensor,
        /// `s32 [decodes]` or [decodes, 1 + speculative tokens]
        state_indices_tensor_d as "state-indices-tensor-d": PaddedTensor,
        /// `query_start_loc_d`
        query_start_loc_d as "query-start-loc-d": Option<PaddedTensor>,
        /// `s32 [decodes]`
        num_accepted_tokens as "num-accepted-tokens": Option<PaddedTensor>,
        /// `seq_lens`
        seq_lens as "seq-lens": Tensor,
        /// `conv`
        conv as "conv": Option<CausalConv1d>,
    }
}

record! {
    /// ReplaySSM's fields, where a model uses it.
    pub struct ReplayssmMetadata {
        /// `write_pos_d`
        write_pos_d as "write-pos-d": Tensor,
        /// `is_flush_d`
        is_flush_d as "is-flush-d": Tensor,
        /// `replayssm_state_indices_d`
        replayssm_state_indices_d as "replayssm-state-indices-d": Tensor,
    }
}

record! {
    /// MAMBA2: the common part, and the chunks of the prefills' scan.
    pub struct Mamba2Metadata {
        /// `base`
        base as "base": BaseMetadata,
        /// `prep_initial_states`
        prep_initial_states as "prep-initial-states": bool,
        /// `chunk_size`
        chunk_size as "chunk-size": u32,
        /// `s32 [chunks]`: the prefill of each chunk.
        seq_idx_p as "seq-idx-p": Vec<i32>,
        /// `s32 [chunks + 1]`
        cu_chunk_seqlen_p as "cu-chunk-seqlen-p": Vec<i32>,
        /// `s32 [prefills]`
        last_chunk_indices_p as "last-chunk-indices-p": Vec<i32>,
        /// `replayssm`
        replayssm as "replayssm": Option<ReplayssmMetadata>,
    }
}

record! {
    /// GDN: rows that verify drafts, and the others, each with its own query starts and states.
    pub struct GdnMetadata {
        /// `num_prefills`
        num_prefills as "num-prefills": u32,
        /// `num_prefill_tokens`
        num_prefill_tokens as "num-prefill-tokens": u32,
        /// `num_decodes`
        num_decodes as "num-decodes": u32,
        /// `num_decode_tokens`
        num_decode_tokens as "num-decode-tokens": u32,
        /// `num_spec_decodes`
        num_spec_decodes as "num-spec-decodes": u32,
        /// `num_spec_decode_tokens`
        num_spec_decode_tokens as "num-spec-decode-tokens": u32,
        /// `num_actual_tokens`
        num_actual_tokens as "num-actual-tokens": u32,
        /// `bool [rows without drafts]`
        has_initial_state as "has-initial-state": Option<Tensor>,
        /// `spec_query_start_loc`
        spec_query_start_loc as "spec-query-start-loc": Option<PaddedTensor>,
        /// `non_spec_query_start_loc`
        non_spec_query_start_loc as "non-spec-query-start-loc": Option<PaddedTensor>,
        /// `s32 [spec rows, 1 + speculative tokens]`
        spec_state_indices_tensor as "spec-state-indices-tensor": Option<PaddedTensor>,
        /// `non_spec_state_indices_tensor`
        non_spec_state_indices_tensor as "non-spec-state-indices-tensor": Option<PaddedTensor>,
        /// `bool [R]`, on the device and on the host.
        spec_sequence_masks as "spec-sequence-masks": Option<PaddedTensor>,
        /// `spec_token_indx`
        spec_token_indx as "spec-token-indx": Option<Tensor>,
        /// `non_spec_token_indx`
        non_spec_token_indx as "non-spec-token-indx": Option<Tensor>,
        /// `num_accepted_tokens`
        num_accepted_tokens as "num-accepted-tokens": Option<PaddedTensor>,
        /// `uniform_spec_sequence_length`
        uniform_spec_sequence_length as "uniform-spec-sequence-length": Option<u32>,
        /// `s32 [chunks, 2]`: (row, chunk of the row), row-major.
        chunk_indices as "chunk-indices": Vec<i32>,
        /// `s32 [rows + 1]`
        chunk_offsets as "chunk-offsets": Vec<i32>,
        /// `prefill_query_start_loc`
        prefill_query_start_loc as "prefill-query-start-loc": Option<Tensor>,
        /// `prefill_state_indices`
        prefill_state_indices as "prefill-state-indices": Option<Tensor>,
        /// `prefill_has_initial_state`
        prefill_has_initial_state as "prefill-has-initial-state": Option<Tensor>,
        /// `conv`
        conv as "conv": Option<CausalConv1d>,
    }
}

record! {
    /// LINEAR: the split, and one state for each row.
    pub struct LinearMetadata {
        /// `num_prefills`
        num_prefills as "num-prefills": u32,
        /// `num_prefill_tokens`
        num_prefill_tokens as "num-prefill-tokens": u32,
        /// `num_decodes`
        num_decodes as "num-decodes": u32,
        /// `num_decode_tokens`
        num_decode_tokens as "num-decode-tokens": u32,
        /// `query_start_loc`
        query_start_loc as "query-start-loc": Tensor,
        /// `seq_lens`
        seq_lens as "seq-lens": Tensor,
        /// `s32 [R]`
        state_indices_tensor as "state-indices-tensor": Tensor,
    }
}

variant! {
    /// One step's metadata of the stateful backends.
    pub enum Metadata {
        /// `mamba1`
        Mamba1 as "mamba1" (BaseMetadata),
        /// `mamba2`
        Mamba2 as "mamba2" (Mamba2Metadata),
        /// `gdn`
        Gdn as "gdn" (GdnMetadata),
        /// `short-conv`
        ShortConv as "short-conv" (BaseMetadata),
        /// `linear`
        Linear as "linear" (LinearMetadata),
    }
}
