//! Damage to the Mamba family's records.

use timetable_guest::types::{
    PaddedTensor, Tensor,
    mamba::{BaseMetadata, CausalConv1d, GdnMetadata, LinearMetadata, Mamba2Metadata, Metadata},
};

use super::{Damage, Place};

type Places<'m> = Vec<(&'static str, Place<'m>)>;

impl Damage for Metadata {
    const FIELDS: &'static [&'static str] = &[
        "num_prefills",
        "num_prefill_tokens",
        "num_decodes",
        "num_decode_tokens",
        "num_reqs",
        "has_initial_states_p",
        "query_start_loc_p",
        "state_indices_tensor_p",
        "state_indices_tensor_d",
        "query_start_loc_d",
        "num_accepted_tokens",
        "seq_lens",
        "conv.block_m",
        "conv.nums",
        "conv.total",
        "conv.batch_ptr",
        "conv.token_chunk_offset_ptr",
        "prep_initial_states",
        "chunk_size",
        "seq_idx_p",
        "cu_chunk_seqlen_p",
        "last_chunk_indices_p",
        "query_start_loc",
        "state_indices_tensor",
        "num_spec_decodes",
        "num_spec_decode_tokens",
        "num_actual_tokens",
        "uniform_spec_sequence_length",
        "has_initial_state",
        "spec_query_start_loc",
        "non_spec_query_start_loc",
        "spec_state_indices_tensor",
        "non_spec_state_indices_tensor",
        "spec_sequence_masks",
        "spec_token_indx",
        "non_spec_token_indx",
        "chunk_indices",
        "chunk_offsets",
        "prefill_query_start_loc",
        "prefill_state_indices",
        "prefill_has_initial_state",
    ];

    fn places(&mut self) -> Places<'_> {
        match self {
            Metadata::Mamba1(base) | Metadata::ShortConv(base) => of_base(base),
            Metadata::Mamba2(metadata) => of_mamba2(metadata),
            Metadata::Gdn(metadata) => of_gdn(metadata),
            Metadata::Linear(metadata) => of_linear(metadata),
        }
    }

    fn vary(&mut self, turn: u64) {
        let conv = match self {
            Metadata::Mamba1(base) | Metadata::ShortConv(base) => base.conv.as_mut(),
            Metadata::Mamba2(metadata) => metadata.base.conv.as_mut(),
            Metadata::Gdn(metadata) => metadata.conv.as_mut(),
            Metadata::Linear(_) => None,
        };
        // A buffer may be shorter, as long as it holds the chunks.
        if let Some(conv) = conv
            && let Tensor::ConvChunkRows(chunks) = &mut conv.batch_ptr
        {
            chunks.length -= (turn % 3) as u32;
        }
    }
}

fn padded<'m>(places: &mut Places<'m>, name: &'static str, tensor: &'m mut Option<PaddedTensor>) {
    places.extend(tensor.as_mut().map(|padded| (name, Place::Padded(padded))));
}

fn of_base(base: &mut BaseMetadata) -> Places<'_> {
    let BaseMetadata {
        num_prefills,
        num_prefill_tokens,
        num_decodes,
        num_decode_tokens,
        num_reqs,
        has_initial_states_p,
        query_start_loc_p,
        state_indices_tensor_p,
        state_indices_tensor_d,
        query_start_loc_d,
        num_accepted_tokens,
        seq_lens,
        conv,
    } = base;
    let mut places = vec![
        ("num_prefills", Place::U32(num_prefills)),
        ("num_prefill_tokens", Place::U32(num_prefill_tokens)),
        ("num_decodes", Place::U32(num_decodes)),
        ("num_decode_tokens", Place::U32(num_decode_tokens)),
        ("num_reqs", Place::U32(num_reqs)),
        (
            "has_initial_states_p",
            Place::MaybeTensor(has_initial_states_p),
        ),
        ("query_start_loc_p", Place::MaybeTensor(query_start_loc_p)),
        (
            "state_indices_tensor_p",
            Place::Tensor(state_indices_tensor_p),
        ),
        (
            "state_indices_tensor_d",
            Place::Padded(state_indices_tensor_d),
        ),
        ("seq_lens", Place::Tensor(seq_lens)),
    ];
    padded(&mut places, "query_start_loc_d", query_start_loc_d);
    padded(&mut places, "num_accepted_tokens", num_accepted_tokens);
    of_conv(&mut places, conv);
    places
}

fn of_conv<'m>(places: &mut Places<'m>, conv: &'m mut Option<CausalConv1d>) {
    if let Some(CausalConv1d {
        block_m,
        nums,
        total,
        batch_ptr,
        token_chunk_offset_ptr,
    }) = conv
    {
        places.extend([
            ("conv.block_m", Place::U32(block_m)),
            ("conv.nums", Place::List(nums)),
            ("conv.total", Place::U32(total)),
            ("conv.batch_ptr", Place::Tensor(batch_ptr)),
            (
                "conv.token_chunk_offset_ptr",
                Place::Tensor(token_chunk_offset_ptr),
            ),
        ]);
    }
}

fn of_mamba2(metadata: &mut Mamba2Metadata) -> Places<'_> {
    let Mamba2Metadata {
        base,
        prep_initial_states,
        chunk_size,
        seq_idx_p,
        cu_chunk_seqlen_p,
        last_chunk_indices_p,
        replayssm: _,
    } = metadata;
    let mut places = of_base(base);
    places.extend([
        ("prep_initial_states", Place::Flag(prep_initial_states)),
        ("chunk_size", Place::U32(chunk_size)),
        ("seq_idx_p", Place::List(seq_idx_p)),
        ("cu_chunk_seqlen_p", Place::List(cu_chunk_seqlen_p)),
        ("last_chunk_indices_p", Place::List(last_chunk_indices_p)),
    ]);
    places
}

fn of_linear(metadata: &mut LinearMetadata) -> Places<'_> {
    let LinearMetadata {
        num_prefills,
        num_prefill_tokens,
        num_decodes,
        num_decode_tokens,
        query_start_loc,
        seq_lens,
        state_indices_tensor,
    } = metadata;
    vec![
        ("num_prefills", Place::U32(num_prefills)),
        ("num_prefill_tokens", Place::U32(num_prefill_tokens)),
        ("num_decodes", Place::U32(num_decodes)),
        ("num_decode_tokens", Place::U32(num_decode_tokens)),
        ("query_start_loc", Place::Tensor(query_start_loc)),
        ("seq_lens", Place::Tensor(seq_lens)),
        ("state_indices_tensor", Place::Tensor(state_indices_tensor)),
    ]
}

fn of_gdn(metadata: &mut GdnMetadata) -> Places<'_> {
    let GdnMetadata {
        num_prefills,
        num_prefill_tokens,
        num_decodes,
        num_decode_tokens,
        num_spec_decodes,
        num_spec_decode_tokens,
        num_actual_tokens,
        has_initial_state,
        spec_query_start_loc,
        non_spec_query_start_loc,
        spec_state_indices_tensor,
        non_spec_state_indices_tensor,
        spec_sequence_masks,
        spec_token_indx,
        non_spec_token_indx,
        num_accepted_tokens,
        uniform_spec_sequence_length,
        chunk_indices,
        chunk_offsets,
        prefill_query_start_loc,
        prefill_state_indices,
        prefill_has_initial_state,
        conv,
    } = metadata;
    let mut places = vec![
        ("num_prefills", Place::U32(num_prefills)),
        ("num_prefill_tokens", Place::U32(num_prefill_tokens)),
        ("num_decodes", Place::U32(num_decodes)),
        ("num_decode_tokens", Place::U32(num_decode_tokens)),
        ("num_spec_decodes", Place::U32(num_spec_decodes)),
        ("num_spec_decode_tokens", Place::U32(num_spec_decode_tokens)),
        ("num_actual_tokens", Place::U32(num_actual_tokens)),
        (
            "uniform_spec_sequence_length",
            Place::MaybeU32(uniform_spec_sequence_length),
        ),
        ("has_initial_state", Place::MaybeTensor(has_initial_state)),
        ("spec_token_indx", Place::MaybeTensor(spec_token_indx)),
        (
            "non_spec_token_indx",
            Place::MaybeTensor(non_spec_token_indx),
        ),
        ("chunk_indices", Place::List(chunk_indices)),
        ("chunk_offsets", Place::List(chunk_offsets)),
        (
            "prefill_query_start_loc",
            Place::MaybeTensor(prefill_query_start_loc),
        ),
        (
            "prefill_state_indices",
            Place::MaybeTensor(prefill_state_indices),
        ),
        (
            "prefill_has_initial_state",
            Place::MaybeTensor(prefill_has_initial_state),
        ),
    ];
    padded(&mut places, "spec_query_start_loc", spec_query_start_loc);
    padded(
        &mut places,
        "non_spec_query_start_loc",
        non_spec_query_start_loc,
    );
    padded(
        &mut places,
        "spec_state_indices_tensor",
        spec_state_indices_tensor,
    );
    padded(
        &mut places,
        "non_spec_state_indices_tensor",
        non_spec_state_indices_tensor,
    );
    padded(&mut places, "spec_sequence_masks", spec_sequence_masks);
    padded(&mut places, "num_accepted_tokens", num_accepted_tokens);
    of_conv(&mut places, conv);
    places
}
