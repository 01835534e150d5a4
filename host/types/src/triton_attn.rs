//! TRITON_ATTN's metadata: the WIT interface `triton-attn`, in Rust.

use crate::{Causal, Scratch, Tensor};

record! {
    /// One step's metadata for TRITON_ATTN: the field's `TritonAttentionMetadata`.
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
        /// Batches of at most this many rows use the 3D kernel.
        seq_threshold_3d as "seq-threshold-3d": u32,
        /// `num_par_softmax_segments`
        num_par_softmax_segments as "num-par-softmax-segments": u32,
        /// f32 [threshold, heads, segments, next_pow2(head size)]
        softmax_segm_output as "softmax-segm-output": Scratch,
        /// `f32 [threshold, heads, segments]`
        softmax_segm_max as "softmax-segm-max": Scratch,
        /// `softmax_segm_expsum`
        softmax_segm_expsum as "softmax-segm-expsum": Scratch,
        /// `s32 [R, ranges, 2]`, 0-padded.
        mm_prefix_range as "mm-prefix-range": Option<Tensor>,
        /// `rswa_prefix_lens`
        rswa_prefix_lens as "rswa-prefix-lens": Option<Tensor>,
        /// `rswa_window`
        rswa_window as "rswa-window": u32,
    }
}
