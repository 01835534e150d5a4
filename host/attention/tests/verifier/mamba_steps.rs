//! The Mamba family: whole steps, of any batch, captured, and wrong in what the model state gives.

use proptest::prelude::*;
use timetable_attention::{
    Grant, StepInputs, VerifyContext,
    batch::capture_batch,
    plain_builder,
    types::{CaptureShape, ExtraValue, Family, LaunchPromise, MambaCacheMode, MambaType, Metadata},
    verify, verify_step,
};

use crate::{
    mamba_fields::{fixed, good, stateful, with},
    support::{Batch, Random, fixed_config},
};

#[test]
fn a_captured_graph_has_no_prefills() {
    for mamba_type in [MambaType::Mamba1, MambaType::Linear, MambaType::Gdn] {
        let batch = fixed(mamba_type, 0);
        let metadata = Metadata::Mamba(good(&batch));
        let promise = LaunchPromise {
            max_num_splits: 1,
            max_work_items: 0,
            scratch_bytes: 0,
            max_query_len: 20,
            uniform_query_len: None,
        };
        let refusal = with(&batch, |ctx| {
            let ctx = VerifyContext {
                promise: Some(&promise),
                ..*ctx
            };
            verify(&metadata, &ctx).expect_err("prefills").to_string()
        });
        assert!(
            refusal.starts_with("num_prefills is ") && refusal.ends_with(", must be 0"),
            "{refusal}"
        );
    }
}

#[test]
fn states_have_rules_of_their_own_in_a_step() {
    let said = |change: fn(&mut Batch)| {
        let mut batch = fixed(MambaType::Mamba2, 3);
        change(&mut batch);
        with(&batch, |ctx| match verify_step(ctx) {
            Ok(()) => "accepted".to_owned(),
            Err(refusal) => refusal.to_string(),
        })
    };
    assert_eq!(said(|_| ()), "accepted");
    assert_eq!(
        said(|batch| {
            batch.step.tensors.seq_lens[3] = 5;
            batch.step.cam.seq_lens_cpu_upper_bound[3] = 5;
        }),
        "seq_lens[3] is 5, must be 0"
    );
    assert_eq!(
        said(|batch| {
            batch.step.cam.extras[1].value = ExtraValue::Host(vec![0, 4, -1, -1]);
        }),
        "num_decode_draft_tokens_cpu[1] is 4, must be at most 3"
    );
    assert_eq!(
        said(|batch| batch.step.cam.extras[1].value = ExtraValue::Host(vec![0, 0])),
        "num_decode_draft_tokens_cpu has 2 elements, must have 4"
    );
    let batch = fixed(MambaType::Mamba2, 3);
    let refusal = batch.with(Grant::Exact, |ctx| {
        let inputs = StepInputs {
            extras: &[("num_accepted_tokens", &[1, 0, 1, 1])],
            ..*ctx.inputs
        };
        verify_step(&VerifyContext {
            inputs: &inputs,
            ..*ctx
        })
        .expect_err("none accepted")
        .to_string()
    });
    assert_eq!(refusal, "num_accepted_tokens[1] is 0, must be at least 1");
}

/// A step that a graph is captured with: no row has a state, and all are in the null block.
#[test]
fn captured_decodes_are_within_the_promise() {
    for (mamba_type, drafts) in [
        (MambaType::Mamba1, 0),
        (MambaType::Mamba2, 3),
        (MambaType::Linear, 0),
        (MambaType::Gdn, 0),
        (MambaType::Gdn, 3),
    ] {
        let shape = CaptureShape {
            num_tokens: 4 * (1 + drafts),
            num_reqs: 4,
            max_query_len: 1 + drafts,
            uniform_query_len: Some(1 + drafts),
        };
        let captured = Batch {
            step: capture_batch(&shape, 8, 4_096).expect("a shape"),
            config: fixed(mamba_type, drafts).config,
            num_blocks: 10,
        };
        let mut builder = plain_builder(Family::Mamba, &captured.config).expect("configuration");
        let promise = builder.launch_promise(&shape).expect("promised");
        let metadata = builder
            .build_for_cudagraph_capture(&captured.step.cam)
            .expect("built");
        captured.with(Grant::Exact, |ctx| {
            let ctx = VerifyContext {
                promise: Some(&promise),
                ..*ctx
            };
            assert_eq!(verify_step(&ctx), Ok(()), "{mamba_type:?}");
            assert_eq!(
                verify(&metadata, &ctx),
                Ok(()),
                "{mamba_type:?}: {metadata:?}"
            );
        });
    }
}

proptest! {
    #[test]
    fn plain_metadata_of_any_type_passes(seed: u64) {
        let mut random = Random(seed);
        let mamba_type = random.pick(MambaType::ALL);
        let mode = random.pick(MambaCacheMode::ALL);
        let takes_drafts = !matches!(mamba_type, MambaType::Mamba1 | MambaType::Linear);
        let drafts = if takes_drafts { random.pick(&[0, 1, 3]) } else { 0 };
        let mut plain = fixed_config();
        plain.kv_cache_spec.block_size = random.pick(&[1, 16, 24, 128]);
        let batch = stateful(Batch::with_config(random, plain), mamba_type, mode, drafts);
        let mut builder = plain_builder(Family::Mamba, &batch.config).expect("configuration");
        let metadata = builder.build(&batch.step.cam, false).expect("built");
        with(&batch, |ctx| {
            prop_assert_eq!(verify_step(ctx), Ok(()));
            prop_assert_eq!(verify(&metadata, ctx), Ok(()), "{:?}", metadata);
            let again = builder.update_block_table(&metadata, &batch.step.cam);
            prop_assert_eq!(again.expect("updated"), metadata.clone());
            Ok(())
        })?;
    }
}
