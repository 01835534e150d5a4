use super::*;
use crate::step::BlockTable;

/// Case 10 of the field's: (length, ranks, interleave) and each rank's share.
#[test]
fn dcp_local_lengths_are_the_fields() {
    let cases: [(i32, u32, &[i32]); 6] = [
        (7, 1, &[4, 3]),
        (17, 1, &[5, 4, 4, 4]),
        (1, 1, &[1, 0, 0, 0]),
        (130, 64, &[64, 64, 2, 0]),
        (33, 16, &[17, 16]),
        (0, 1, &[0, 0]),
    ];
    for (len, interleave, shares) in cases {
        for (rank, &share) in shares.iter().enumerate() {
            let dcp = Dcp {
                world: shares.len() as u32,
                rank: rank as u32,
                interleave,
            };
            assert_eq!(dcp.local_len(len), share, "length {len}, rank {rank}");
        }
    }
}

/// Two rows: 1 token at length 17, 3 tokens at length 3; blocks of 16.
fn resolver() -> Resolver<'static> {
    Resolver {
        inputs: StepInputs {
            query_start_loc: &[0, 1, 4],
            seq_lens: &[17, 3],
            block_table: BlockTable {
                data: &[7, 3, 5, 0],
                width: 2,
            },
            slot_mapping: &[48, 80, 81, 82, -1],
            positions: &[16, 0, 1, 2],
            causal: None,
            dcp_local_seq_lens: None,
            encoder_seq_lens: None,
            logits_indices_padded: None,
            rswa_prefix_lens: None,
            extras: &[("accepted", &[2, 1])],
        },
        num_actual_tokens: 5,
        block_size: 16,
        dcp: Dcp {
            world: 2,
            rank: 1,
            interleave: 1,
        },
        room: 65_536,
    }
}

fn value(tensor: &Tensor) -> Vec<i32> {
    let indptr = [0, 2, 3];
    let siblings = Siblings {
        paged_kv_indptr: Some(&indptr),
        cu_seq_lens: Some(&[0, 2, 2, 3]),
    };
    let resolver = resolver();
    let mut out = vec![9; 3];
    resolver
        .resolve_into(tensor, siblings, &mut out)
        .expect("in range");
    let owned = resolver.resolve_i32(tensor, siblings).expect("in range");
    assert_eq!(out, *owned, "both forms agree");
    out
}

const BOTH: RowRange = RowRange { start: 0, end: 2 };

#[test]
fn every_case_has_its_value() {
    use timetable_types::{
        DcpLocal, ExtraGather, Matrix, PageSelection, RowGather, StateGather, TensorSlice,
    };
    let second = RowRange { start: 1, end: 2 };
    let chunks = ConvChunks {
        rows: BOTH,
        block_m: 2,
        length: 5,
    };
    let gather = |column| {
        Tensor::StateIndices(StateGather {
            rows: vec![1, 0],
            column,
            width: 1,
        })
    };
    let cases: Vec<(Tensor, &[i32])> = vec![
        (Tensor::Input(Input::SeqLens), &[17, 3]),
        (Tensor::Input(Input::BlockTable), &[7, 3, 5, 0]),
        (
            Tensor::Slice(TensorSlice {
                source: Input::BlockTable,
                start: 1,
                end: 2,
            }),
            &[5, 0],
        ),
        (Tensor::Extra("accepted".to_owned()), &[2, 1]),
        (Tensor::Values(vec![4, 5]), &[4, 5]),
        (
            Tensor::Matrix(Matrix {
                rows: 1,
                columns: 2,
                values: vec![6, 7],
            }),
            &[6, 7],
        ),
        (Tensor::RebasedQueryStartLoc(second.clone()), &[0, 3]),
        (Tensor::ContextLens(BOTH), &[16, 0]),
        (Tensor::HasContext(BOTH), &[1, 0]),
        (
            Tensor::DcpLocal(DcpLocal {
                source: DcpSource::SeqLens,
                rows: BOTH,
            }),
            &[8, 1],
        ),
        (
            Tensor::DcpLocal(DcpLocal {
                source: DcpSource::ContextLens,
                rows: second,
            }),
            &[0],
        ),
        (Tensor::CuPageCounts(BOTH), &[0, 2, 3]),
        (Tensor::GatherPages(BOTH), &[7, 3, 5]),
        (
            Tensor::SelectPages(PageSelection {
                rows: BOTH,
                columns: vec![0, 1, 1],
            }),
            &[7, 3, 0],
        ),
        (gather(StateColumn::First), &[5, 7]),
        (gather(StateColumn::LastToken), &[5, 3]),
        (
            Tensor::Rows(RowGather {
                source: Input::SeqLens,
                rows: vec![1, 1, 0],
            }),
            &[3, 3, 17],
        ),
        (
            Tensor::ExtraRows(ExtraGather {
                name: "accepted".to_owned(),
                rows: vec![1],
            }),
            &[1],
        ),
        (Tensor::RowMask(vec![1]), &[0, 1]),
        (Tensor::RowTokens(vec![1, 0]), &[1, 2, 3, 0]),
        (Tensor::TokenToRow, &[0, 1, 1, 1, 0]),
        (Tensor::SegmentIds, &[0, 0, 2]),
        (Tensor::ConvChunkRows(chunks.clone()), &[0, 1, 1, -1, -1]),
        (Tensor::ConvChunkOffsets(chunks), &[0, 0, 1, -1, -1]),
    ];
    for (tensor, expected) in cases {
        assert_eq!(value(&tensor), expected, "{tensor:?}");
    }
}

#[test]
fn slots_and_positions_are_s64() {
    let resolver = resolver();
    let slots = Tensor::Input(Input::SlotMapping);
    assert_eq!(
        *resolver.resolve_i64(&slots).expect("s64"),
        [48, 80, 81, 82, -1]
    );
    assert_eq!(
        resolver.resolve_i32(&slots, Siblings::NONE),
        Err(ResolveError::ElementType("slot_mapping"))
    );
    assert_eq!(
        resolver.resolve_i64(&Tensor::Input(Input::SeqLens)),
        Err(ResolveError::ElementType("seq_lens"))
    );
}

#[test]
fn padding_fills_the_rows_beyond() {
    let padded = PaddedTensor {
        tensor: Tensor::Values(vec![4]),
        rows: 3,
        fill: -1,
    };
    let mut out = Vec::new();
    resolver()
        .resolve_padded_into(&padded, Siblings::NONE, &mut out)
        .expect("fits");
    assert_eq!(out, [4, -1, -1]);
    let narrow = PaddedTensor { rows: 0, ..padded };
    assert!(
        resolver()
            .resolve_padded_into(&narrow, Siblings::NONE, &mut out)
            .is_err()
    );
}

#[test]
fn what_the_step_does_not_have_is_an_error() {
    use timetable_types::{
        ExtraGather, Matrix, PageSelection, RowGather, StateGather, TensorSlice,
    };
    let far = RowRange { start: 1, end: 9 };
    let back = RowRange { start: 2, end: 1 };
    let huge = u32::MAX;
    let tensors = vec![
        Tensor::Input(Input::Causal),
        Tensor::Extra("absent".to_owned()),
        Tensor::Slice(TensorSlice {
            source: Input::SeqLens,
            start: 0,
            end: 3,
        }),
        Tensor::Slice(TensorSlice {
            source: Input::BlockTable,
            start: 2,
            end: 1,
        }),
        Tensor::Matrix(Matrix {
            rows: huge,
            columns: huge,
            values: vec![1],
        }),
        Tensor::RebasedQueryStartLoc(far.clone()),
        Tensor::ContextLens(back.clone()),
        Tensor::HasContext(far.clone()),
        Tensor::CuPageCounts(back),
        Tensor::GatherPages(far),
        Tensor::SelectPages(PageSelection {
            rows: BOTH,
            columns: vec![0, 1, 2],
        }),
        Tensor::SelectPages(PageSelection {
            rows: BOTH,
            columns: vec![0, 1],
        }),
        Tensor::SelectPages(PageSelection {
            rows: BOTH,
            columns: vec![0, 1, 1, 1],
        }),
        Tensor::StateIndices(StateGather {
            rows: vec![0],
            column: StateColumn::LastToken,
            width: 2,
        }),
        Tensor::StateIndices(StateGather {
            rows: vec![0; 4],
            column: StateColumn::First,
            width: huge,
        }),
        Tensor::Rows(RowGather {
            source: Input::QueryStartLoc,
            rows: vec![3],
        }),
        Tensor::ExtraRows(ExtraGather {
            name: "accepted".to_owned(),
            rows: vec![2],
        }),
        Tensor::RowMask(vec![2]),
        Tensor::RowTokens(vec![huge]),
        Tensor::ConvChunkRows(ConvChunks {
            rows: BOTH,
            block_m: 0,
            length: 5,
        }),
        Tensor::ConvChunkRows(ConvChunks {
            rows: BOTH,
            block_m: 1,
            length: 3,
        }),
        Tensor::ConvChunkOffsets(ConvChunks {
            rows: BOTH,
            block_m: 1,
            length: huge,
        }),
    ];
    let indptr = [0, 2, 3];
    for tensor in tensors {
        let found = resolver().resolve_i32(&tensor, Siblings::pages(&indptr));
        assert!(found.is_err(), "{tensor:?} gave {found:?}");
    }
    let wide = [0, 3, 3];
    for indptr in [&wide[..], &[0, 2], &[0, 2, 1], &[]] {
        let found = resolver().resolve_i32(&Tensor::GatherPages(BOTH), Siblings::pages(indptr));
        assert!(found.is_err(), "{indptr:?} gave {found:?}");
    }
    for bounds in [&[0, i32::MAX][..], &[0, -1]] {
        let found = resolver().resolve_i32(&Tensor::SegmentIds, Siblings::segments(bounds));
        assert!(found.is_err(), "{bounds:?} gave {found:?}");
    }
}
