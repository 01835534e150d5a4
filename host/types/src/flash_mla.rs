//! FLASHMLA's metadata, and its relatives': the WIT interface `flash-mla`, in Rust.

use alloc::vec::Vec;

use crate::{Dtype, RowRange, Scratch, Tensor};

record! {
    /// A run of consecutive prefills whose context, or part of it, fits the workspace.
    pub struct ContextChunk {
        /// `index`
        index as "index": u32,
        /// Prefills [start, end) of the prefill part.
        request_slice as "request-slice": RowRange,
        /// Query tokens [start, end) of the prefill part.
        token_slice as "token-slice": RowRange,
        /// `continuation_token_end`
        continuation_token_end as "continuation-token-end": u32,
        /// `is_continuation`
        is_continuation as "is-continuation": bool,
        /// `num_context_tokens`
        num_context_tokens as "num-context-tokens": u32,
        /// `s32 [n + 1]`, rebased to the chunk.
        query_start_loc as "query-start-loc": Vec<i32>,
        /// `max_query_len`
        max_query_len as "max-query-len": u32,
        /// `s32 [n + 1]`: running sum of the chunk's context lengths.
        cu_seq_lens as "cu-seq-lens": Vec<i32>,
        /// `s32 [n]`: first context token of each request in this chunk.
        starts as "starts": Vec<i32>,
        /// `max_seq_len`
        max_seq_len as "max-seq-len": u32,
        /// `s32 [n]`
        seq_lens as "seq-lens": Vec<i32>,
        /// s32 [num-context-tokens]; `segment-ids` of cu-seq-lens.
        token_to_seq as "token-to-seq": Tensor,
        /// `all_rows_active`
        all_rows_active as "all-rows-active": bool,
        /// `num_local_context_tokens`
        num_local_context_tokens as "num-local-context-tokens": u32,
        /// `dcp`
        dcp as "dcp": Option<DcpContextChunk>,
    }
}

record! {
    /// What a chunk adds under decode context parallelism: every rank's share of its context, padded so that ranks agree.
    pub struct DcpContextChunk {
        /// `padded_local_seq_lens`
        padded_local_seq_lens as "padded-local-seq-lens": Vec<i32>,
        /// Row-major [n, ranks].
        local_context_lens_allranks as "local-context-lens-allranks": Vec<i32>,
        /// `padded_local_cu_seq_lens`
        padded_local_cu_seq_lens as "padded-local-cu-seq-lens": Vec<i32>,
        /// `segment-ids` of padded-local-cu-seq-lens.
        padded_local_token_to_seq as "padded-local-token-to-seq": Tensor,
        /// `local_starts`
        local_starts as "local-starts": Vec<i32>,
    }
}

record! {
    /// The context of prefills, in chunks that the workspace holds one at a time.
    pub struct ChunkedContext {
        /// `s32 [prefills]`
        context_lens as "context-lens": Vec<i32>,
        /// [rows, latent rank + rotary part]
        workspace as "workspace": Scratch,
        /// `chunks`
        chunks as "chunks": Vec<ContextChunk>,
        /// Query tokens of prefills that have no context.
        empty_token_slices as "empty-token-slices": Vec<RowRange>,
    }
}

record! {
    /// The rows that prefill: the new tokens' attention, and the context's, chunk by chunk.
    pub struct MlaPrefill {
        /// `block_table`
        block_table as "block-table": Tensor,
        /// `query_start_loc`
        query_start_loc as "query-start-loc": Tensor,
        /// `max_query_len`
        max_query_len as "max-query-len": u32,
        /// `chunked_context`
        chunked_context as "chunked-context": Option<ChunkedContext>,
        /// `q_data_type`
        q_data_type as "q-data-type": Dtype,
        /// `output_dtype`
        output_dtype as "output-dtype": Dtype,
        /// `s32 [prefills]`
        query_lens_cpu as "query-lens-cpu": Vec<i32>,
        /// `use_dense_mha`
        use_dense_mha as "use-dense-mha": bool,
    }
}

record! {
    /// Tile schedule of FlashMLA's decode kernel.
    pub struct TileSchedule {
        /// `s32 [parts, 8]`: first request, first block, last request, last block, first split, …
        tile_scheduler_metadata as "tile-scheduler-metadata": Tensor,
        /// `s32 [decodes + 1]`: running sum of split counts; a padded row adds none.
        num_splits as "num-splits": Tensor,
    }
}

record! {
    /// FlashAttention 3's schedule for MLA decode, as passed to get_scheduler_metadata.
    pub struct MlaSchedulerMetadataCall {
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
        /// `headdim_v`
        headdim_v as "headdim-v": u32,
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
        /// `num_splits`
        num_splits as "num-splits": u32,
        /// `scheduler_metadata_len`
        scheduler_metadata_len as "scheduler-metadata-len": u32,
    }
}

variant! {
    /// Who divides the keys of decodes among workers, and how.
    pub enum DecodeSchedule {
        /// The kernel decides at its first call.
        Lazy as "lazy",
        /// `tiles`
        Tiles as "tiles" (TileSchedule),
        /// `flash-attn`
        FlashAttn as "flash-attn" (MlaSchedulerMetadataCall),
    }
}

record! {
    /// The rows that decode.
    pub struct MlaDecode {
        /// `block_table`
        block_table as "block-table": Tensor,
        /// `seq_lens`
        seq_lens as "seq-lens": Tensor,
        /// Global lengths under decode context parallelism.
        dcp_tot_seq_lens as "dcp-tot-seq-lens": Option<Tensor>,
        /// `query_start_loc`
        query_start_loc as "query-start-loc": Option<Tensor>,
        /// `max_query_len`
        max_query_len as "max-query-len": u32,
        /// `max_seq_len`
        max_seq_len as "max-seq-len": u32,
        /// `max_num_splits`
        max_num_splits as "max-num-splits": u32,
        /// `schedule`
        schedule as "schedule": DecodeSchedule,
    }
}

record! {
    /// One step's metadata for FLASHMLA and its relatives: the field's `MLACommonMetadata`.
    pub struct Metadata {
        /// `num_reqs`
        num_reqs as "num-reqs": u32,
        /// `max_query_len`
        max_query_len as "max-query-len": u32,
        /// `max_seq_len`
        max_seq_len as "max-seq-len": u32,
        /// `num_actual_tokens`
        num_actual_tokens as "num-actual-tokens": u32,
        /// `query_start_loc`
        query_start_loc as "query-start-loc": Tensor,
        /// `slot_mapping`
        slot_mapping as "slot-mapping": Tensor,
        /// `num_decodes`
        num_decodes as "num-decodes": u32,
        /// `num_decode_tokens`
        num_decode_tokens as "num-decode-tokens": u32,
        /// `num_prefills`
        num_prefills as "num-prefills": u32,
        /// `causal`
        causal as "causal": bool,
        /// `head_dim`
        head_dim as "head-dim": u32,
        /// `prefill`
        prefill as "prefill": Option<MlaPrefill>,
        /// `decode`
        decode as "decode": Option<MlaDecode>,
    }
}
