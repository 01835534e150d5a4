//! Outputs that nothing wrote are zeros, whatever stood there before: metadata that leaves out rows, tokens, tiles or items,
//! under every path. What it does cover is right.

mod support;

use support::{Batch, config, rng};
use timetable_device::{
    cpu::{StepMetadata, new_impl},
    reference::max_relative_error,
};
use timetable_types::{
    Causal, Family, Input, Metadata, Tensor, TensorSlice,
    flash_attn::TileOrder,
    flashinfer::{self, Decode, Plan, Prefill},
};

/// No attention over standard normal values gives this.
const POISON: f32 = 1e30;
/// 4 heads of 64.
const WIDTH: usize = 256;

/// Rows of 1, 1 and 40 query tokens, then 3 tokens of padding.
fn batch() -> Batch {
    let rows = [(1, 40), (1, 17), (40, 60)];
    Batch::new(&mut rng(3), config(4, 2, 64), Causal::All(true), &rows, 3)
}

const TOKENS: usize = 45;

/// The output's tokens: right, zeros, or as they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    Right,
    Zeros,
    Untouched,
}

fn run(batch: &Batch, metadata: &Metadata) -> Vec<Token> {
    let mut step = StepMetadata::new();
    step.prepare(metadata, &batch.inputs(), batch.config.block_size as u32)
        .expect("it is executed as it stands");
    let layer = new_impl(metadata.family(), batch.config).expect("an impl");
    let mut output = vec![POISON; batch.query.len()];
    layer
        .forward(&batch.query, &batch.cache, Some(&step), &mut output, None)
        .expect("it runs");
    let mut lse = vec![POISON; batch.num_tokens * 4];
    let mut again = vec![POISON; batch.query.len()];
    layer
        .forward_with_lse(&batch.query, &batch.cache, &step, &mut again, &mut lse)
        .expect("it runs");
    assert_eq!(support::bits(&output), support::bits(&again));
    let expected = batch.expected(true).output;
    let tokens = output
        .chunks(WIDTH)
        .zip(expected.chunks(WIDTH))
        .zip(lse.chunks(4));
    tokens
        .enumerate()
        .map(|(token, ((found, expected), lse))| {
            if found.iter().all(|&x| x == POISON) {
                Token::Untouched
            } else if found.iter().all(|&x| x == 0.0) {
                assert!(lse.iter().all(|&lse| lse == f32::NEG_INFINITY), "{token}");
                Token::Zeros
            } else {
                let error = max_relative_error(found, expected, 64);
                assert!(error <= 2e-6, "token {token}: {error:e}");
                Token::Right
            }
        })
        .collect()
}

/// Tokens in `right` are right, the rest below `written` zeros, the rest as they were.
#[track_caller]
fn check(metadata: &Metadata, right: &[(usize, usize)], written: usize) {
    let found = run(&batch(), metadata);
    for (token, &found) in found.iter().enumerate() {
        let wanted = match token {
            token
                if right
                    .iter()
                    .any(|&(start, end)| (start..end).contains(&token)) =>
            {
                Token::Right
            }
            token if token < written => Token::Zeros,
            _ => Token::Untouched,
        };
        assert_eq!(found, wanted, "token {token}");
    }
}

#[test]
fn what_a_schedule_leaves_out_is_zeros() {
    let batch = batch();
    let good = batch.flash_attn();
    check(&Metadata::FlashAttn(good.clone()), &[(0, 42)], TOKENS);
    // A row that the order leaves out, at each place.
    for (order, right) in [
        (vec![0, 2], [(0, 1), (2, 42)]),
        (vec![1, 2], [(1, 2), (2, 42)]),
        (vec![1, 0], [(0, 1), (1, 2)]),
        (vec![], [(0, 0), (0, 0)]),
    ] {
        let mut record = good.clone();
        record.schedule.num_splits = vec![2, 1, 3];
        record.schedule.tile_order = TileOrder::Rows(order);
        check(&Metadata::FlashAttn(record), &right, TOKENS);
    }
    // Query starts of the first two rows, or of none.
    for (end, right) in [(3, (0, 2)), (2, (0, 1)), (1, (0, 0))] {
        let mut record = good.clone();
        record.query_start_loc = Tensor::Slice(TensorSlice {
            source: Input::QueryStartLoc,
            start: 0,
            end,
        });
        check(&Metadata::FlashAttn(record), &[right], TOKENS);
    }
    // A grid of fewer query tokens than the longest row has, and of fewer tokens than the step has.
    let mut record = good.clone();
    record.max_query_len = 0;
    check(&Metadata::FlashAttn(record), &[], TOKENS);
    let mut record = good;
    record.query_start_loc = Tensor::Slice(TensorSlice {
        source: Input::QueryStartLoc,
        start: 0,
        end: 2,
    });
    record.num_actual_tokens = 2;
    check(&Metadata::FlashAttn(record), &[(0, 1)], 2);
}

fn flashinfer() -> flashinfer::Metadata {
    match batch().random_flashinfer(&mut rng(9), 2) {
        Metadata::Flashinfer(record) => record,
        _ => panic!("another family"),
    }
}

fn plans(record: &mut flashinfer::Metadata) -> [&mut Plan; 2] {
    match (&mut record.decode, &mut record.prefill) {
        (Some(Decode::Wrapper(decode)), Some(Prefill::Wrapper(prefill))) => [decode, prefill],
        _ => panic!("two plans"),
    }
}

#[test]
fn what_a_plan_leaves_out_is_zeros() {
    let whole = |record| Metadata::Flashinfer(record);
    check(&whole(flashinfer()), &[(0, 42)], TOKENS);
    // A part that is not there.
    let mut record = flashinfer();
    record.decode = None;
    check(&whole(record), &[(2, 42)], TOKENS);
    let mut record = flashinfer();
    record.prefill = None;
    check(&whole(record), &[(0, 2)], TOKENS);
    let mut record = flashinfer();
    (record.decode, record.prefill) = (None, None);
    check(&whole(record), &[], TOKENS);
    // Workers that run nothing, or none at all; items of which no tile takes a result.
    for (part, right) in [(0, (2, 42)), (1, (0, 2))] {
        let mut record = flashinfer();
        plans(&mut record)[part].work.worker_indptr = vec![0, 0, 0];
        check(&whole(record), &[right], TOKENS);
        let mut record = flashinfer();
        plans(&mut record)[part].work.worker_indptr = vec![0];
        check(&whole(record), &[right], TOKENS);
        let mut record = flashinfer();
        plans(&mut record)[part].work.merge_indptr.fill(0);
        check(&whole(record), &[right], TOKENS);
        let mut record = flashinfer();
        let work = &mut plans(&mut record)[part].work;
        work.request_indices.fill(99);
        check(&whole(record), &[right], TOKENS);
    }
}

/// One tile's items named for another: its tokens are zeros, not those of the step before.
#[test]
fn a_tile_without_items_is_zeros() {
    let mut record = flashinfer();
    let work = &mut plans(&mut record)[1].work;
    // One chunk a tile, 32 packed rows: 16 tokens.
    work.kv_chunk_size = 64;
    work.cta_tile_q = 32;
    work.request_indices = vec![0, 0, 0];
    work.qo_tile_indices = vec![0, 2, 2];
    work.kv_tile_indices = vec![0, 0, 0];
    work.worker_indptr = vec![0, 3];
    work.merge_indptr = vec![0, 1, 2, 3];
    check(&Metadata::Flashinfer(record), &[(0, 18), (34, 42)], TOKENS);
}

#[test]
fn a_profile_run_is_zeros() {
    let batch = batch();
    for family in [Family::FlashAttn, Family::Flashinfer] {
        let layer = new_impl(family, batch.config).expect("an impl");
        let mut output = vec![POISON; batch.query.len()];
        layer
            .forward(&batch.query, &batch.cache, None, &mut output, None)
            .expect("it runs");
        assert!(output.iter().all(|&x| x == 0.0));
    }
}
