//! The Mamba family: each field of its records, broken once.

use timetable_attention::{
    Grant, StepInputs, VerifyContext, plain_builder, rules,
    types::{
        Extra, ExtraGather, ExtraValue, Family, Input, KvCacheSpecKind, MambaCacheMode, MambaSpec,
        MambaType, Metadata, RowRange, StateColumn, Tensor,
        mamba::{self, BaseMetadata, GdnMetadata, LinearMetadata, Mamba2Metadata},
    },
    verify,
};

use crate::support::{Batch, fixed_batch, fixed_config};

/// The batch as a step of a group that keeps states: tables are as wide as it needs, rows of 1 + `drafts` tokens verify.
pub fn stateful(
    mut batch: Batch,
    mamba_type: MambaType,
    mode: MambaCacheMode,
    drafts: u32,
) -> Batch {
    batch.config.kv_cache_spec.kind = KvCacheSpecKind::Mamba;
    batch.config.kv_cache_spec.sliding_window = None;
    batch.config.kv_cache_spec.dcp_sharded = false;
    batch.config.kv_cache_spec.mamba = Some(MambaSpec {
        mamba_type,
        cache_mode: mode,
        num_speculative_blocks: drafts,
        chunk_size: 16,
    });
    batch.config.scheduler.num_speculative_tokens = drafts;
    let step = &mut batch.step;
    let rows = step.cam.num_reqs as usize;
    // A row of one token that begins stands with the prefills: the others have context.
    for row in 0..rows {
        let starts = &step.tensors.query_start_loc;
        if starts[row + 1] - starts[row] == 1 {
            for lens in [
                &mut step.tensors.seq_lens,
                &mut step.cam.seq_lens_cpu_upper_bound,
            ] {
                lens[row] = lens[row].max(2);
            }
            step.cam.max_seq_len = step.cam.max_seq_len.max(2);
        }
    }
    let block = batch.config.kv_cache_spec.block_size as usize;
    let longest = step.cam.max_seq_len as usize;
    let width = longest.div_ceil(block) + 1 + drafts as usize;
    let own = step
        .tensors
        .seq_lens
        .iter()
        .flat_map(|&len| std::iter::repeat_n(i32::from(len > 0), width));
    // Any blocks but the null one, which is padding's.
    step.tensors.block_table = own
        .enumerate()
        .map(|(index, own)| own * (1 + index as i32 % 9))
        .collect();
    step.tensors.block_table_width = width;
    step.cam.block_table_width = width as u32;
    let starts = step.tensors.query_start_loc.clone();
    let query = |row: usize| starts[row + 1] - starts[row];
    let lens = &step.tensors.seq_lens;
    step.cam.is_prefilling = (0..rows)
        .map(|row| u8::from(query(row) > 1 || lens[row] <= query(row)))
        .collect();
    if drafts > 0 {
        let verifies = |row: usize| query(row) == 1 && lens[row] > 1;
        let of_row = |row| if verifies(row) { 0 } else { -1 };
        step.cam.extras = vec![
            Extra {
                name: "num_accepted_tokens".to_owned(),
                value: ExtraValue::Device(rows as u32),
            },
            Extra {
                name: "num_decode_draft_tokens_cpu".to_owned(),
                value: ExtraValue::Host((0..rows).map(of_row).collect()),
            },
        ];
    }
    batch
}

/// Calls `f` with the batch's context, the model state's accepted tokens among its inputs.
pub fn with<T>(batch: &Batch, f: impl FnOnce(&VerifyContext<'_>) -> T) -> T {
    let states = 1 + batch.config.scheduler.num_speculative_tokens as i32;
    let rows = batch.step.cam.num_reqs as i32;
    let accepted: Vec<i32> = (0..rows).map(|row| 1 + row % states).collect();
    let extras = [("num_accepted_tokens", accepted.as_slice())];
    batch.with(Grant::Exact, |ctx| {
        let inputs = StepInputs {
            extras: if states > 1 { &extras } else { &[] },
            ..*ctx.inputs
        };
        f(&VerifyContext {
            inputs: &inputs,
            ..*ctx
        })
    })
}

/// Two decodes, a prefill of 20 tokens behind 12 and a row of padding.
pub fn fixed(mamba_type: MambaType, drafts: u32) -> Batch {
    stateful(
        fixed_batch(fixed_config()),
        mamba_type,
        MambaCacheMode::None,
        drafts,
    )
}

pub fn good(batch: &Batch) -> mamba::Metadata {
    let mut builder = plain_builder(Family::Mamba, &batch.config).expect("plain");
    match builder.build(&batch.step.cam, false).expect("built") {
        Metadata::Mamba(metadata) => metadata,
        other => panic!("another family's: {other:?}"),
    }
}

fn verdict(batch: &Batch, metadata: mamba::Metadata) -> String {
    let metadata = Metadata::Mamba(metadata);
    with(batch, |ctx| match verify(&metadata, ctx) {
        Ok(()) => "accepted".to_owned(),
        Err(refusal) => refusal.to_string(),
    })
}

fn range(start: u32, end: u32) -> RowRange {
    RowRange { start, end }
}

fn gather(tensor: &mut Tensor) -> &mut timetable_attention::types::StateGather {
    match tensor {
        Tensor::StateIndices(gather) => gather,
        other => panic!("no states: {other:?}"),
    }
}

/// A change of a record, and what is said of it.
type Break<T> = (fn(&mut T), &'static str);

#[test]
fn every_field_of_the_common_part_has_a_rule() {
    let batch = fixed(MambaType::Mamba1, 0);
    let mamba::Metadata::Mamba1(record) = good(&batch) else {
        panic!("another type's");
    };
    assert_eq!(
        verdict(&batch, mamba::Metadata::Mamba1(record.clone())),
        "accepted"
    );
    let cases: &[Break<BaseMetadata>] = &[
        (|m| m.num_reqs = 5, "num_reqs is 5, must be 4"),
        (|m| m.num_decodes = 5, "num_decodes is 5, must be at most 4"),
        (|m| m.num_decodes = 3, "num_prefills is 2, must be 1"),
        (|m| m.num_prefills = 1, "num_prefills is 1, must be 2"),
        (
            |m| m.num_decode_tokens = 3,
            "num_decode_tokens is 3, must be 2",
        ),
        (
            |m| m.num_prefill_tokens = 20,
            "num_prefill_tokens is 20, must be 22",
        ),
        (
            |m| m.seq_lens = Tensor::Input(Input::Positions),
            "seq_lens must refer to the step's own seq_lens of its rows",
        ),
        (
            |m| m.has_initial_states_p = None,
            "has_initial_states_p is missing",
        ),
        (
            |m| m.has_initial_states_p = Some(Tensor::HasContext(range(1, 4))),
            "has_initial_states_p must refer to the step's own context of its rows",
        ),
        (
            |m| m.has_initial_states_p = Some(Tensor::Values(vec![0, 0])),
            "has_initial_states_p[0] is 0, must be 1",
        ),
        (
            |m| m.query_start_loc_p = None,
            "query_start_loc_p is missing",
        ),
        (
            |m| m.query_start_loc_p = Some(Tensor::Input(Input::QueryStartLoc)),
            "query_start_loc_p must refer to the step's own query_start_loc of its rows",
        ),
        (
            |m| m.query_start_loc_p = Some(Tensor::Values(vec![0, 21, 20])),
            "query_start_loc_p[1] is 21, must be 20",
        ),
        (
            |m| m.state_indices_tensor_p = Tensor::Values(vec![3, 4]),
            "state_indices_tensor_p must refer to the step's own state columns of its rows",
        ),
        (
            |m| gather(&mut m.state_indices_tensor_p).rows[0] = 1,
            "state_indices_tensor_p[0] is 1, must be 2",
        ),
        (
            |m| gather(&mut m.state_indices_tensor_p).width = 2,
            "state_indices_tensor_p.width is 2, must be 1",
        ),
        (
            |m| m.state_indices_tensor_d.rows = 3,
            "state_indices_tensor_d.rows is 3, must be 2",
        ),
        (
            |m| m.state_indices_tensor_d.fill = -1,
            "state_indices_tensor_d.fill is -1, must be 0",
        ),
        (
            |m| gather(&mut m.state_indices_tensor_d.tensor).rows.push(2),
            "state_indices_tensor_d has 3 elements, must have 2",
        ),
        (
            |m| gather(&mut m.state_indices_tensor_d.tensor).column = StateColumn::LastToken,
            "state_indices_tensor_d is 1, must be as configured (0)",
        ),
        (
            |m| m.query_start_loc_d = Some(m.state_indices_tensor_d.clone()),
            "query_start_loc_d is given, must be absent",
        ),
        (
            |m| m.num_accepted_tokens = Some(m.state_indices_tensor_d.clone()),
            "num_accepted_tokens is given, must be absent",
        ),
        (|m| m.conv = None, "conv is missing"),
        (
            |m| m.conv.as_mut().expect("given").block_m = 16,
            "conv.block_m is 16, must be 8",
        ),
        (
            |m| m.conv.as_mut().expect("given").nums[0] = 2,
            "conv.nums[0] is 2, must be 3",
        ),
        (
            |m| m.conv.as_mut().expect("given").total = 4,
            "conv.total is 4, must be 3",
        ),
        (
            |m| m.conv.as_mut().expect("given").batch_ptr = Tensor::Values(vec![0, 0]),
            "conv.batch_ptr is 2, must be at least 3",
        ),
        (
            |m| m.conv.as_mut().expect("given").batch_ptr = Tensor::Values(vec![0, 0, 1]),
            "conv.batch_ptr[2] is 1, must be 0",
        ),
        (
            |m| {
                let conv = m.conv.as_mut().expect("given");
                conv.token_chunk_offset_ptr = conv.batch_ptr.clone();
            },
            "conv.token_chunk_offset_ptr must refer to the step's own blocks of the convolution of its rows",
        ),
    ];
    for (change, text) in cases {
        let mut broken = record.clone();
        change(&mut broken);
        assert_eq!(verdict(&batch, mamba::Metadata::Mamba1(broken)), *text);
    }
}

#[test]
fn every_field_of_a_verification_has_a_rule() {
    let batch = fixed(MambaType::ShortConv, 3);
    let mamba::Metadata::ShortConv(record) = good(&batch) else {
        panic!("another type's");
    };
    assert_eq!(
        verdict(&batch, mamba::Metadata::ShortConv(record.clone())),
        "accepted"
    );
    let cases: &[Break<BaseMetadata>] = &[
        (
            |m| m.query_start_loc_d = None,
            "query_start_loc_d is missing",
        ),
        (
            |m| m.query_start_loc_d.as_mut().expect("given").rows = 4,
            "query_start_loc_d.rows is 4, must be 3",
        ),
        (
            |m| {
                m.query_start_loc_d.as_mut().expect("given").tensor =
                    Tensor::Input(Input::QueryStartLoc);
            },
            "query_start_loc_d must refer to the step's own query_start_loc of its rows",
        ),
        (
            |m| m.num_accepted_tokens = None,
            "num_accepted_tokens is missing",
        ),
        (
            |m| m.num_accepted_tokens.as_mut().expect("given").fill = 0,
            "num_accepted_tokens.fill is 0, must be 1",
        ),
        (
            |m| m.num_accepted_tokens.as_mut().expect("given").tensor = Tensor::Values(vec![1, 1]),
            "num_accepted_tokens must refer to the step's own num_accepted_tokens of its rows",
        ),
        (
            |m| {
                m.num_accepted_tokens.as_mut().expect("given").tensor =
                    Tensor::ExtraRows(ExtraGather {
                        name: "num_accepted_tokens".to_owned(),
                        rows: vec![1, 0],
                    });
            },
            "num_accepted_tokens[0] is 1, must be 0",
        ),
        (
            |m| gather(&mut m.state_indices_tensor_d.tensor).width = 1,
            "state_indices_tensor_d.width is 1, must be 4",
        ),
    ];
    for (change, text) in cases {
        let mut broken = record.clone();
        change(&mut broken);
        assert_eq!(verdict(&batch, mamba::Metadata::ShortConv(broken)), *text);
    }
}

#[test]
fn every_field_of_mamba2_has_a_rule() {
    let batch = fixed(MambaType::Mamba2, 0);
    let mamba::Metadata::Mamba2(record) = good(&batch) else {
        panic!("another type's");
    };
    assert_eq!(
        (
            &record.cu_chunk_seqlen_p,
            &record.seq_idx_p,
            &record.last_chunk_indices_p
        ),
        (&vec![0, 4, 20], &vec![0, 0], &vec![1, 1])
    );
    let cases: &[Break<Mamba2Metadata>] = &[
        (|_| (), "accepted"),
        // Shorter chunks than there might be are the builder's business.
        (
            |m| {
                m.cu_chunk_seqlen_p = vec![0, 7, 14, 20];
                m.seq_idx_p = vec![0, 0, 0];
                m.last_chunk_indices_p = vec![2, 2];
            },
            "accepted",
        ),
        (|m| m.base.num_reqs = 3, "base.num_reqs is 3, must be 4"),
        (
            |m| m.prep_initial_states = false,
            "prep_initial_states is 0, must be 1",
        ),
        (|m| m.chunk_size = 32, "chunk_size is 32, must be 16"),
        (
            |m| m.cu_chunk_seqlen_p[0] = 1,
            "cu_chunk_seqlen_p[0] is 1, must be 0",
        ),
        (
            |m| m.cu_chunk_seqlen_p[1] = 3,
            "cu_chunk_seqlen_p[2] is 20, must be at most 19",
        ),
        (
            |m| m.cu_chunk_seqlen_p[1] = 0,
            "cu_chunk_seqlen_p[1] is 0, must be at least 1",
        ),
        (
            |m| m.cu_chunk_seqlen_p[2] = 21,
            "cu_chunk_seqlen_p[2] is 21, must be at most 20",
        ),
        (
            |m| m.cu_chunk_seqlen_p.push(20),
            "cu_chunk_seqlen_p has 4 elements, must have 3",
        ),
        (|m| m.seq_idx_p[1] = 1, "seq_idx_p[1] is 1, must be 0"),
        (
            |m| m.last_chunk_indices_p[0] = 0,
            "last_chunk_indices_p[0] is 0, must be 1",
        ),
        (
            |m| m.last_chunk_indices_p.truncate(1),
            "last_chunk_indices_p has 1 elements, must have 2",
        ),
        (
            |m| {
                m.cu_chunk_seqlen_p.truncate(2);
                m.seq_idx_p.truncate(1);
            },
            "cu_chunk_seqlen_p[1] is 4, must be 20",
        ),
        (
            |m| {
                let any = Tensor::Input(Input::SeqLens);
                m.replayssm = Some(mamba::ReplayssmMetadata {
                    write_pos_d: any.clone(),
                    is_flush_d: any.clone(),
                    replayssm_state_indices_d: any,
                });
            },
            "replayssm is given, must be absent",
        ),
    ];
    for (change, text) in cases {
        let mut broken = record.clone();
        change(&mut broken);
        assert_eq!(verdict(&batch, mamba::Metadata::Mamba2(broken)), *text);
    }
}

#[test]
fn every_field_of_linear_has_a_rule() {
    let batch = fixed(MambaType::Linear, 0);
    let mamba::Metadata::Linear(record) = good(&batch) else {
        panic!("another type's");
    };
    let cases: &[Break<LinearMetadata>] = &[
        (|_| (), "accepted"),
        (|m| m.num_prefills = 1, "num_prefills is 1, must be 2"),
        (
            |m| m.num_prefill_tokens = 20,
            "num_prefill_tokens is 20, must be 22",
        ),
        (|m| m.num_decodes = 3, "num_prefills is 2, must be 1"),
        (
            |m| m.num_decode_tokens = 1,
            "num_decode_tokens is 1, must be 2",
        ),
        (
            |m| m.query_start_loc = Tensor::Input(Input::SeqLens),
            "query_start_loc must refer to the step's own query_start_loc of its rows",
        ),
        (
            |m| m.seq_lens = Tensor::Input(Input::QueryStartLoc),
            "seq_lens must refer to the step's own seq_lens of its rows",
        ),
        (
            |m| gather(&mut m.state_indices_tensor).rows.truncate(3),
            "state_indices_tensor has 3 elements, must have 4",
        ),
        (
            |m| gather(&mut m.state_indices_tensor).column = StateColumn::LastToken,
            "state_indices_tensor is 1, must be as configured (0)",
        ),
    ];
    for (change, text) in cases {
        let mut broken = record.clone();
        change(&mut broken);
        assert_eq!(verdict(&batch, mamba::Metadata::Linear(broken)), *text);
    }
}

#[test]
fn every_field_of_gdn_has_a_rule() {
    let batch = fixed(MambaType::Gdn, 0);
    let mamba::Metadata::Gdn(record) = good(&batch) else {
        panic!("another type's");
    };
    let cases: &[Break<GdnMetadata>] = &[
        (|_| (), "accepted"),
        (
            |m| m.num_prefills = 0,
            "num_prefills is 0, must be at least 1",
        ),
        (
            |m| m.num_prefills = 3,
            "num_prefills is 3, must be at most 2",
        ),
        (
            |m| m.num_prefill_tokens = 19,
            "num_prefill_tokens is 19, must be at least 20",
        ),
        (
            |m| m.num_prefill_tokens = 23,
            "num_prefill_tokens is 23, must be at most 22",
        ),
        (|m| m.num_decodes = 3, "num_decode_tokens is 2, must be 22"),
        (
            |m| m.num_decode_tokens = 3,
            "num_decode_tokens is 3, must be 2",
        ),
        (
            |m| m.num_spec_decodes = 1,
            "num_spec_decodes is 1, must be 0",
        ),
        (
            |m| m.num_spec_decode_tokens = 1,
            "num_spec_decode_tokens is 1, must be 0",
        ),
        (
            |m| m.num_actual_tokens = 22,
            "num_actual_tokens is 22, must be 24",
        ),
        (
            |m| m.has_initial_state = Some(Tensor::Values(vec![1, 1, 0, 0])),
            "has_initial_state[2] is 0, must be 1",
        ),
        (
            |m| m.non_spec_query_start_loc = None,
            "non_spec_query_start_loc is missing",
        ),
        (
            |m| {
                m.non_spec_state_indices_tensor
                    .as_mut()
                    .expect("given")
                    .rows = 3;
            },
            "non_spec_state_indices_tensor.rows is 3, must be 4",
        ),
        (
            |m| m.spec_query_start_loc = m.non_spec_query_start_loc.clone(),
            "spec_query_start_loc is given, must be absent",
        ),
        (
            |m| m.spec_state_indices_tensor = m.non_spec_state_indices_tensor.clone(),
            "spec_state_indices_tensor is given, must be absent",
        ),
        (
            |m| m.spec_sequence_masks = m.non_spec_query_start_loc.clone(),
            "spec_sequence_masks is given, must be absent",
        ),
        (
            |m| m.spec_token_indx = Some(Tensor::RowTokens(vec![])),
            "spec_token_indx is given, must be absent",
        ),
        (
            |m| m.non_spec_token_indx = Some(Tensor::RowTokens(vec![])),
            "non_spec_token_indx is given, must be absent",
        ),
        (
            |m| m.num_accepted_tokens = m.non_spec_query_start_loc.clone(),
            "num_accepted_tokens is given, must be absent",
        ),
        (
            |m| m.uniform_spec_sequence_length = Some(1),
            "uniform_spec_sequence_length is given, must be absent",
        ),
        (
            |m| m.chunk_indices[2] = 1,
            "chunk_indices[2] is 1, must be 0",
        ),
        (
            |m| m.chunk_indices.truncate(2),
            "chunk_indices[2] is -1, must be 0",
        ),
        (
            |m| m.chunk_offsets[1] = 1,
            "chunk_offsets[1] is 1, must be 2",
        ),
        (
            |m| m.prefill_query_start_loc = Some(Tensor::Values(vec![0, 20])),
            "prefill_query_start_loc has 2 elements, must have 3",
        ),
        (
            |m| m.prefill_state_indices = None,
            "prefill_state_indices is missing",
        ),
        (
            |m| m.prefill_has_initial_state = None,
            "prefill_has_initial_state is missing",
        ),
        (|m| m.conv = None, "conv is missing"),
    ];
    for (change, text) in cases {
        let mut broken = record.clone();
        change(&mut broken);
        assert_eq!(verdict(&batch, mamba::Metadata::Gdn(broken)), *text);
    }
}

#[test]
fn every_field_of_gdns_verifications_has_a_rule() {
    let batch = fixed(MambaType::Gdn, 3);
    let mamba::Metadata::Gdn(record) = good(&batch) else {
        panic!("another type's");
    };
    let cases: &[Break<GdnMetadata>] = &[
        (|_| (), "accepted"),
        (|m| m.uniform_spec_sequence_length = Some(1), "accepted"),
        (
            |m| m.uniform_spec_sequence_length = Some(2),
            "uniform_spec_sequence_length is 2, must be 1",
        ),
        (|m| m.num_decodes = 1, "num_decodes is 1, must be 0"),
        (
            |m| m.num_spec_decodes = 1,
            "num_spec_decodes is 1, must be 2",
        ),
        (
            |m| m.num_spec_decode_tokens = 3,
            "num_spec_decode_tokens is 3, must be 2",
        ),
        (
            |m| m.spec_sequence_masks = None,
            "spec_sequence_masks is missing",
        ),
        (
            |m| m.spec_sequence_masks.as_mut().expect("given").tensor = Tensor::RowMask(vec![0, 2]),
            "spec_sequence_masks[1] is 2, must be 1",
        ),
        (
            |m| {
                m.spec_query_start_loc.as_mut().expect("given").tensor =
                    Tensor::Values(vec![0, 1, 1]);
            },
            "spec_query_start_loc[2] is 1, must be 2",
        ),
        (
            |m| m.spec_query_start_loc.as_mut().expect("given").fill = 0,
            "spec_query_start_loc.fill is 0, must be 2",
        ),
        (
            |m| m.spec_state_indices_tensor.as_mut().expect("given").rows = 4,
            "spec_state_indices_tensor.rows is 4, must be 2",
        ),
        (
            |m| gather(&mut m.spec_state_indices_tensor.as_mut().expect("given").tensor).width = 3,
            "spec_state_indices_tensor.width is 3, must be 4",
        ),
        (
            |m| m.num_accepted_tokens = None,
            "num_accepted_tokens is missing",
        ),
        (
            |m| m.spec_token_indx = Some(Tensor::RowTokens(vec![1, 0])),
            "spec_token_indx[0] is 1, must be 0",
        ),
        (
            |m| m.spec_token_indx = Some(Tensor::Values(vec![0, 2])),
            "spec_token_indx[1] is 2, must be 1",
        ),
        (
            |m| m.non_spec_token_indx = Some(Tensor::Values(vec![])),
            "non_spec_token_indx[0] is -1, must be 2",
        ),
        (
            |m| m.non_spec_query_start_loc = None,
            "non_spec_query_start_loc is missing",
        ),
    ];
    for (change, text) in cases {
        let mut broken = record.clone();
        change(&mut broken);
        assert_eq!(verdict(&batch, mamba::Metadata::Gdn(broken)), *text);
    }
}

/// Whatever the flags say: a row that begins has no state, and its block what the owner before left.
#[test]
fn a_row_without_a_state_never_decodes_from_one() {
    for mamba_type in [MambaType::Mamba1, MambaType::Mamba2, MambaType::Gdn] {
        let mut batch = fixed(mamba_type, 0);
        let good = good(&batch);
        assert_eq!(verdict(&batch, good.clone()), "accepted");
        batch.step.tensors.seq_lens[1] = 1;
        batch.step.cam.seq_lens_cpu_upper_bound[1] = 1;
        let said = verdict(&batch, good);
        assert!(
            said.ends_with("[1] is 5, must be 0"),
            "{mamba_type:?}: {said}"
        );
    }
}

#[test]
fn a_record_of_another_type_is_refused() {
    let batch = fixed(MambaType::Mamba2, 0);
    let other = good(&fixed(MambaType::Linear, 0));
    assert_eq!(
        verdict(&batch, other),
        "mamba_type is 4, must be as configured (1)"
    );
    let mut without = fixed(MambaType::Mamba2, 0);
    let record = good(&without);
    without.config.kv_cache_spec.mamba = None;
    assert_eq!(verdict(&without, record), "kv_cache_spec.mamba is missing");
    assert!(rules(Family::Mamba).is_some_and(|rules| !rules.selects_blocks));
}
