//! Whatever batch `verify_step` accepts, the plain builders' metadata passes, alone and within their own launch promise.

use proptest::prelude::*;
use timetable_attention::{
    Grant, Verifier, VerifyContext, plain_builder,
    types::{CaptureShape, Family},
    verify_step,
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
