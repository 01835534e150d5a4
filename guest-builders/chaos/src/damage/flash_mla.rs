//! The MLA backends' fields.

use timetable_guest::types::flash_mla::{ContextChunk, Metadata, MlaDecode, MlaPrefill};

use super::{Damage, Place};

impl Damage for Metadata {
    const FIELDS: &'static [&'static str] = &[
        "num_reqs",
        "max_query_len",
        "max_seq_len",
        "num_actual_tokens",
        "query_start_loc",
        "slot_mapping",
        "num_decodes",
        "num_decode_tokens",
        "num_prefills",
        "causal",
        "head_dim",
        "decode.block_table",
        "decode.seq_lens",
        "decode.dcp_tot_seq_lens",
        "decode.query_start_loc",
        "decode.max_query_len",
        "decode.max_seq_len",
        "decode.max_num_splits",
        "prefill.block_table",
        "prefill.query_start_loc",
        "prefill.max_query_len",
        "prefill.q_data_type",
        "prefill.output_dtype",
        "prefill.query_lens_cpu",
        "prefill.use_dense_mha",
        "context_lens",
        "workspace",
        "chunk.index",
        "chunk.request_slice",
        "chunk.token_slice",
        "chunk.continuation_token_end",
        "chunk.is_continuation",
        "chunk.num_context_tokens",
        "chunk.query_start_loc",
        "chunk.max_query_len",
        "chunk.cu_seq_lens",
        "chunk.starts",
        "chunk.max_seq_len",
        "chunk.seq_lens",
        "chunk.token_to_seq",
        "chunk.all_rows_active",
        "chunk.num_local_context_tokens",
    ];

    fn places(&mut self) -> Vec<(&'static str, Place<'_>)> {
        let Metadata {
            num_reqs,
            max_query_len,
            max_seq_len,
            num_actual_tokens,
            query_start_loc,
            slot_mapping,
            num_decodes,
            num_decode_tokens,
            num_prefills,
            causal,
            head_dim,
            prefill,
            decode,
        } = self;
        let mut places = vec![
            ("num_reqs", Place::U32(num_reqs)),
            ("max_query_len", Place::U32(max_query_len)),
            ("max_seq_len", Place::U32(max_seq_len)),
            ("num_actual_tokens", Place::U32(num_actual_tokens)),
            ("query_start_loc", Place::Tensor(query_start_loc)),
            ("slot_mapping", Place::Tensor(slot_mapping)),
            ("num_decodes", Place::U32(num_decodes)),
            ("num_decode_tokens", Place::U32(num_decode_tokens)),
            ("num_prefills", Place::U32(num_prefills)),
            ("causal", Place::Flag(causal)),
            ("head_dim", Place::U32(head_dim)),
        ];
        if let Some(decode) = decode {
            places.extend(of_decode(decode));
        }
        if let Some(prefill) = prefill {
            of_prefill(prefill, &mut places);
        }
        places
    }

    /// Any bound of splits is a good one.
    fn vary(&mut self, turn: u64) {
        if let Some(decode) = &mut self.decode {
            decode.max_num_splits = (turn % 2) as u32;
        }
    }
}

fn of_decode(decode: &mut MlaDecode) -> [(&'static str, Place<'_>); 7] {
    let MlaDecode {
        block_table,
        seq_lens,
        dcp_tot_seq_lens,
        query_start_loc,
        max_query_len,
        max_seq_len,
        max_num_splits,
        // The kernel's own, in the good builder's records.
        schedule: _,
    } = decode;
    [
        ("decode.block_table", Place::Tensor(block_table)),
        ("decode.seq_lens", Place::Tensor(seq_lens)),
        (
            "decode.dcp_tot_seq_lens",
            Place::MaybeTensor(dcp_tot_seq_lens),
        ),
        (
            "decode.query_start_loc",
            Place::MaybeTensor(query_start_loc),
        ),
        ("decode.max_query_len", Place::U32(max_query_len)),
        ("decode.max_seq_len", Place::U32(max_seq_len)),
        ("decode.max_num_splits", Place::U32(max_num_splits)),
    ]
}

fn of_prefill<'m>(prefill: &'m mut MlaPrefill, places: &mut Vec<(&'static str, Place<'m>)>) {
    let MlaPrefill {
        block_table,
        query_start_loc,
        max_query_len,
        chunked_context,
        q_data_type,
        output_dtype,
        query_lens_cpu,
        use_dense_mha,
    } = prefill;
    places.extend([
        ("prefill.block_table", Place::Tensor(block_table)),
        ("prefill.query_start_loc", Place::Tensor(query_start_loc)),
        ("prefill.max_query_len", Place::U32(max_query_len)),
        ("prefill.q_data_type", Place::Dtype(q_data_type)),
        ("prefill.output_dtype", Place::Dtype(output_dtype)),
        ("prefill.query_lens_cpu", Place::List(query_lens_cpu)),
        ("prefill.use_dense_mha", Place::Flag(use_dense_mha)),
    ]);
    if let Some(context) = chunked_context {
        places.push(("context_lens", Place::List(&mut context.context_lens)));
        places.push(("workspace", Place::Scratch(&mut context.workspace)));
        if let Some(chunk) = context.chunks.first_mut() {
            places.extend(of_chunk(chunk));
        }
    }
}

fn of_chunk(chunk: &mut ContextChunk) -> [(&'static str, Place<'_>); 15] {
    let ContextChunk {
        index,
        continuation_token_end,
        is_continuation,
        num_context_tokens,
        query_start_loc,
        max_query_len,
        cu_seq_lens,
        starts,
        max_seq_len,
        seq_lens,
        token_to_seq,
        all_rows_active,
        num_local_context_tokens,
        request_slice,
        token_slice,
        // Only ranks have it.
        dcp: _,
    } = chunk;
    [
        ("chunk.index", Place::U32(index)),
        ("chunk.request_slice", Place::Range(request_slice)),
        ("chunk.token_slice", Place::Range(token_slice)),
        (
            "chunk.continuation_token_end",
            Place::U32(continuation_token_end),
        ),
        ("chunk.is_continuation", Place::Flag(is_continuation)),
        ("chunk.num_context_tokens", Place::U32(num_context_tokens)),
        ("chunk.query_start_loc", Place::List(query_start_loc)),
        ("chunk.max_query_len", Place::U32(max_query_len)),
        ("chunk.cu_seq_lens", Place::List(cu_seq_lens)),
        ("chunk.starts", Place::List(starts)),
        ("chunk.max_seq_len", Place::U32(max_seq_len)),
        ("chunk.seq_lens", Place::List(seq_lens)),
        ("chunk.token_to_seq", Place::Tensor(token_to_seq)),
        ("chunk.all_rows_active", Place::Flag(all_rows_active)),
        (
            "chunk.num_local_context_tokens",
            Place::U32(num_local_context_tokens),
        ),
    ]
}
