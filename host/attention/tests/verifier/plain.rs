//! Whatever batch `verify_step` accepts, the plain builders' metadata passes, alone and within their own launch promise.

use proptest::prelude::*;
use timetable_attention::{
    Grant, Verifier, VerifyContext,
    batch::{PaddingValues, capture_batch, pad_step},
    plain_builder,
    types::{CaptureShape, Family, LaunchPromise, Metadata},
    verify, verify_step,
};

use crate::support::{Batch, fixed_config};

/// Those whose backend serves the batch's configuration: TRITON_ATTN knows no ranks.
fn families(batch: &Batch) -> Vec<Family> {
    let mut families = vec![Family::FlashAttn, Family::Flashinfer, Family::FlashMla];
    if batch.config.parallel.dcp_world_size == 1 {
        families.push(Family::TritonAttn);
    }
    families
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plain_metadata_of_padded_steps_passes(seed: u64, rows in 0u32..9, tokens in 0u32..40) {
        let mut batch = Batch::random(seed);
        let (num_tokens, num_reqs) =
            (batch.step.cam.num_actual_tokens + tokens, batch.step.cam.num_reqs + rows);
        let values = PaddingValues { seq_len: 0, ..PaddingValues::default() };
        batch.step = pad_step(&batch.step, num_tokens, num_reqs, values).expect("larger");
        batch.with(Grant::Exact, |ctx| {
            prop_assert_eq!(verify_step(ctx), Ok(()));
            for family in families(&batch) {
                let mut builder = plain_builder(family, &batch.config).expect("configuration");
                let metadata = builder.build(&batch.step.cam, false).expect("built");
                prop_assert_eq!(verify(&metadata, ctx), Ok(()), "{:?}", metadata);
            }
            Ok(())
        })?;
    }

    #[test]
    fn plain_metadata_always_passes(seed: u64) {
        let batch = Batch::random(seed);
        let mut verifier = Verifier::new();
        batch.with(Grant::Exact, |ctx| {
            prop_assert_eq!(verify_step(ctx), Ok(()));
            for family in families(&batch) {
                let mut builder = plain_builder(family, &batch.config).expect("configuration");
                let metadata = builder.build(&batch.step.cam, false).expect("built");
                prop_assert_eq!(verifier.verify(&metadata, ctx), Ok(()), "{:?}", metadata);
                // The MLA backends' graphs hold decodes only.
                if matches!(&metadata, Metadata::FlashMla(record) if record.num_prefills > 0) {
                    continue;
                }
                let promise = builder
                    .launch_promise(&CaptureShape {
                        num_tokens: batch.step.cam.num_actual_tokens,
                        num_reqs: batch.step.cam.num_reqs,
                        max_query_len: batch.step.cam.max_query_len,
                        uniform_query_len: None,
                    })
                    .expect("promised");
                let captured = VerifyContext { promise: Some(&promise), ..*ctx };
                prop_assert_eq!(verifier.verify(&metadata, &captured), Ok(()));
            }
            Ok(())
        })?;
    }
}

/// The step that a graph is captured with, and one that replays it, are within the builder's own promise.
#[test]
fn captured_and_replayed_steps_are_within_the_promise() {
    let mut config = fixed_config();
    config.scheduler.max_model_len = 131_072;
    let shape = CaptureShape {
        num_tokens: 4,
        num_reqs: 4,
        max_query_len: 1,
        uniform_query_len: Some(1),
    };
    let captured = Batch {
        step: capture_batch(&shape, 8_192, 131_072).expect("a shape"),
        config,
        num_blocks: 10_000,
    };
    // Captured at length 1, replayed at 100,000 with one row of padding.
    let mut replayed = Batch {
        step: captured.step.clone(),
        ..captured.clone()
    };
    replayed.step.tensors.seq_lens = vec![100_000, 1, 17, 0];
    replayed.step.tensors.query_start_loc = vec![0, 1, 2, 3, 3];
    replayed.step.cam.seq_lens_cpu_upper_bound = vec![100_000, 1, 17, 0];
    replayed.step.cam.query_start_loc_cpu = vec![0, 1, 2, 3, 3];
    replayed.step.cam.max_seq_len = 100_000;
    for family in families(&captured) {
        let mut builder = plain_builder(family, &captured.config).expect("configuration");
        let promise = builder.launch_promise(&shape).expect("promised");
        for batch in [&captured, &replayed] {
            let metadata = builder
                .build_for_cudagraph_capture(&batch.step.cam)
                .expect("built");
            batch.with(Grant::Exact, |ctx| {
                let ctx = VerifyContext {
                    promise: Some(&promise),
                    ..*ctx
                };
                assert_eq!(verify_step(&ctx), Ok(()));
                assert_eq!(verify(&metadata, &ctx), Ok(()), "{metadata:?}");
            });
        }
    }
    // A step of two tokens a row is not what the graph was captured for.
    let mut longer = replayed;
    longer.step.tensors.query_start_loc = vec![0, 2, 3, 4, 4];
    longer.step.cam.query_start_loc_cpu = vec![0, 2, 3, 4, 4];
    longer.step.cam.max_query_len = 2;
    let promise = LaunchPromise {
        max_num_splits: 1,
        max_work_items: 8,
        scratch_bytes: 0,
        max_query_len: 1,
        uniform_query_len: Some(1),
    };
    let refusal = |promise: &LaunchPromise| {
        longer.with(Grant::Exact, |ctx| {
            let ctx = VerifyContext {
                promise: Some(promise),
                ..*ctx
            };
            verify_step(&ctx).expect_err("too long").to_string()
        })
    };
    assert_eq!(refusal(&promise), "max_query_len is 2, must be at most 1");
    let wider = LaunchPromise {
        max_query_len: 4,
        ..promise
    };
    assert_eq!(refusal(&wider), "query_start_loc[1] is 2, must be 1");
}
