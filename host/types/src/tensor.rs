//! Symbolic output tensors: how a builder refers to device data that it never sees.

use alloc::{string::String, vec::Vec};

use crate::{Dtype, Input};

record! {
    /// Rows [start, end) of the step.
    pub struct RowRange {
        /// `start`
        start as "start": u32,
        /// `end`
        end as "end": u32,
    }
}

record! {
    /// Rows [start, end) of a tensor of the host's.
    pub struct TensorSlice {
        /// `source`
        source as "source": Input,
        /// `start`
        start as "start": u32,
        /// `end`
        end as "end": u32,
    }
}

record! {
    /// Row-major `s32 [rows, columns]`.
    pub struct Matrix {
        /// `rows`
        rows as "rows": u32,
        /// `columns`
        columns as "columns": u32,
        /// `values`
        values as "values": Vec<i32>,
    }
}

record! {
    /// Memory that kernels write and read and nobody fills.
    pub struct Scratch {
        /// `shape`
        shape as "shape": Vec<u32>,
        /// `dtype`
        dtype as "dtype": Dtype,
    }
}

record! {
    /// Chosen pages of each request, as columns of its own block-table row.
    pub struct PageSelection {
        /// `rows`
        rows as "rows": RowRange,
        /// For each row, in order, the columns of that row's block table that are attended to: strictly rising within a
        /// row. Row boundaries are those of the sibling `paged-kv-indptr`.
        columns as "columns": Vec<u32>,
    }
}

enumeration! {
    /// Which lengths are divided among the ranks of decode context parallelism.
    pub enum DcpSource in "snake_case" {
        /// `seq-lens`
        SeqLens as "seq-lens",
        /// `context-lens`
        ContextLens as "context-lens",
    }
}

record! {
    /// This rank's share of the lengths of `rows`.
    pub struct DcpLocal {
        /// `source`
        source as "source": DcpSource,
        /// `rows`
        rows as "rows": RowRange,
    }
}

enumeration! {
    /// Which column a row's first state index stands in.
    pub enum StateColumn in "snake_case" {
        /// Column 0.
        First as "first",
        /// Column max(seq_len − 1, 0) / block_size: the block of the last token.
        LastToken as "last-token",
    }
}

record! {
    /// For each of `rows`, `width` state indices of its block-table row, from `column` on.
    pub struct StateGather {
        /// `rows`
        rows as "rows": Vec<u32>,
        /// `column`
        column as "column": StateColumn,
        /// `width`
        width as "width": u32,
    }
}

record! {
    /// Chosen rows of a tensor of the host's.
    pub struct RowGather {
        /// `source`
        source as "source": Input,
        /// `rows`
        rows as "rows": Vec<u32>,
    }
}

record! {
    /// Chosen rows of a model state's own device field.
    pub struct ExtraGather {
        /// `name`
        name as "name": String,
        /// `rows`
        rows as "rows": Vec<u32>,
    }
}

record! {
    /// Per `block-m` tokens of each row of `rows`, the row index (or the chunk's index within its row), padded with −1.
    pub struct ConvChunks {
        /// `rows`
        rows as "rows": RowRange,
        /// `block_m`
        block_m as "block-m": u32,
        /// `length`
        length as "length": u32,
    }
}

variant! {
    /// A device tensor of the metadata, by reference. The host evaluates every case from its own tensors of the step, so
    /// that a value on the device needs no copy to the host and a foreign block cannot be said.
    pub enum Tensor {
        /// The whole tensor, unchanged.
        Input as "input" (Input),
        /// Rows [start, end) of it.
        Slice as "slice" (TensorSlice),
        /// A model state's own device field, whole.
        Extra as "extra" (String),
        /// `s32 [n]`, by value.
        Values as "values" (Vec<i32>),
        /// `s32 [rows, columns]`, by value.
        Matrix as "matrix" (Matrix),
        /// `scratch`
        Scratch as "scratch" (Scratch),
        /// `query_start_loc[start ..= end] − query_start_loc[start]`; `s32 [n + 1]`.
        RebasedQueryStartLoc as "rebased-query-start-loc" (RowRange),
        /// seq_lens − query_lens; `s32 [n]`.
        ContextLens as "context-lens" (RowRange),
        /// 1 where seq_lens − query_lens > 0; `bool [n]`.
        HasContext as "has-context" (RowRange),
        /// This rank's share of the lengths under decode context parallelism; `s32 [n]`.
        DcpLocal as "dcp-local" (DcpLocal),
        /// 0, then the running sum of ceil(seq_len / block_size); `s32 [n + 1]`.
        CuPageCounts as "cu-page-counts" (RowRange),
        /// For each row the first `paged_kv_indptr[i + 1] − paged_kv_indptr[i]` entries of its block table, one after the
        /// other; s32. `paged_kv_indptr` is the sibling field.
        GatherPages as "gather-pages" (RowRange),
        /// As gather-pages, with chosen columns. Needs the operator's grant `subset`.
        SelectPages as "select-pages" (PageSelection),
        /// `block_table[row, column .. column + width]`; `s32 [rows, width]`.
        StateIndices as "state-indices" (StateGather),
        /// Chosen rows of a tensor.
        Rows as "rows" (RowGather),
        /// Chosen rows of a model state's own device field.
        ExtraRows as "extra-rows" (ExtraGather),
        /// 1 for the named rows, 0 elsewhere; `bool [R]`.
        RowMask as "row-mask" (Vec<u32>),
        /// The token indices of the named rows, one row after the other; s32.
        RowTokens as "row-tokens" (Vec<u32>),
        /// For each token the row it belongs to; `s32 [T]`.
        TokenToRow as "token-to-row",
        /// 0, 0, …, 1, 1, …: the index of its segment for each element of the sibling `cu-seq-lens`; s32.
        SegmentIds as "segment-ids",
        /// `conv-chunk-rows`
        ConvChunkRows as "conv-chunk-rows" (ConvChunks),
        /// `conv-chunk-offsets`
        ConvChunkOffsets as "conv-chunk-offsets" (ConvChunks),
    }
}

record! {
    /// A tensor in a persistent buffer: `rows` rows, those beyond the tensor's own filled with `fill`.
    pub struct PaddedTensor {
        /// `tensor`
        tensor as "tensor": Tensor,
        /// `rows`
        rows as "rows": u32,
        /// `fill`
        fill as "fill": i32,
    }
}
