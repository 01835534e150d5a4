//! Whatever batch `verify_step` accepts, the plain builders' metadata passes, alone and within their own launch promise.

use proptest::prelude::*;
use timetable_attention::{
    Grant, Verifier, VerifyContext, plain_builder,
    types::{CaptureShape, Causal, Dtype, Family, Input, Metadata, Scratch, Tensor, triton_attn},
    verify, verify_step,
};

use crate::support::Batch;

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plain_metadata_always_passes(seed: u64) {
        let batch = Batch::random(seed);
        let mut verifier = Verifier::new();
        batch.with(Grant::Exact, |ctx| {
            prop_assert_eq!(verify_step(ctx), Ok(()));
            for family in [Family::FlashAttn, Family::Flashinfer] {
                let mut builder = plain_builder(family, &batch.config).expect("configuration");
                let metadata = builder.build(&batch.step.cam, false).expect("built");
                prop_assert_eq!(verifier.verify(&metadata, ctx), Ok(()), "{:?}", metadata);
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

#[test]
fn families_without_rules_are_refused_and_have_no_plain_builder() {
    let batch = Batch::random(1);
    let scratch = || Scratch {
        shape: vec![1],
        dtype: Dtype::Float32,
    };
    let metadata = Metadata::TritonAttn(triton_attn::Metadata {
        num_actual_tokens: batch.step.cam.num_actual_tokens,
        max_query_len: batch.step.cam.max_query_len,
        query_start_loc: Tensor::Input(Input::QueryStartLoc),
        max_seq_len: batch.step.cam.max_seq_len,
        seq_lens: Tensor::Input(Input::SeqLens),
        block_table: Tensor::Input(Input::BlockTable),
        slot_mapping: Tensor::Input(Input::SlotMapping),
        causal: Causal::All(true),
        seq_threshold_3d: 0,
        num_par_softmax_segments: 1,
        softmax_segm_output: scratch(),
        softmax_segm_max: scratch(),
        softmax_segm_expsum: scratch(),
        mm_prefix_range: None,
        rswa_prefix_lens: None,
        rswa_window: 0,
    });
    let refusal = batch.with(Grant::Exact, |ctx| {
        verify(&metadata, ctx).expect_err("no rules")
    });
    assert_eq!(
        refusal.to_string(),
        "no verifier rules for family triton-attn yet"
    );
    for (family, text) in [
        (
            Family::TritonAttn,
            "no plain builder for family triton-attn yet",
        ),
        (
            Family::FlashMla,
            "no plain builder for family flash-mla yet",
        ),
        (Family::Mamba, "no plain builder for family mamba yet"),
    ] {
        let error = plain_builder(family, &batch.config)
            .err()
            .expect("none yet");
        assert_eq!(error.message, text);
    }
}
