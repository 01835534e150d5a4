//! Graphs: a builder keeps to what it promised at capture, whatever is replayed.

use timetable_attention::{Grant, VerifyContext, plain_builder, verify, verify_step};
use timetable_device::{
    cpu::{AttentionConfig, CacheDtype},
    reference::max_relative_error,
};
use timetable_reference::native_twin;
use timetable_types::{
    BuilderConfig, CaptureShape, Causal, CudagraphMode, Family, LaunchPromise, Metadata,
};

use crate::{
    scenario::{BOUND, Scenario, Served, assert_close, builder_config, run},
    support::rng,
};

/// Verified as a step of a graph that was captured with `promise`, then run.
fn replay(
    scenario: &Scenario,
    config: &BuilderConfig,
    promise: Option<&LaunchPromise>,
    metadata: Metadata,
) -> Served {
    let inputs = scenario.step.tensors.inputs();
    let context = VerifyContext {
        config,
        common: &scenario.step.cam,
        inputs: &inputs,
        promise,
        grant: Grant::Exact,
        num_blocks: scenario.num_blocks,
    };
    verify_step(&context).expect("a good step");
    verify(&metadata, &context).expect("within the promise");
    let cache = scenario.cache(|_, _| true);
    run(
        metadata,
        &scenario.step,
        &scenario.layer,
        &scenario.query,
        &cache,
    )
}

/// One promise, one builder: splits at 1 key and at 100,000 are within it, and what comes of them is what comes of none.
#[test]
fn field_case_18_one_promise_at_1_key_and_at_100_000() {
    let layer = AttentionConfig {
        num_heads: 1,
        head_size: 32,
        scale: 1.0 / 32f32.sqrt(),
        num_kv_heads: 1,
        sliding_window: None,
        logits_soft_cap: None,
        kv_cache_dtype: CacheDtype::F32,
        block_size: 16,
        batch_invariant: false,
    };
    let [one, many] = [1, 100_000].map(|keys| {
        let causal = Causal::All(true);
        Scenario::new(&mut rng(18_000), layer, causal, &[(1, keys)], (0, 0))
    });
    let expected = [one.expected_whole(), many.expected_whole()];
    let shape = CaptureShape {
        num_tokens: 1,
        num_reqs: 1,
        max_query_len: 1,
        uniform_query_len: Some(1),
    };
    for on_gpu in [false, true] {
        let mut config = builder_config(&layer, on_gpu);
        config.scheduler.max_model_len = 131_072;
        config.scheduler.max_num_blocks_per_req = 8_192;
        config.cudagraph.mode = CudagraphMode::Full;
        config.cudagraph.capture_sizes = vec![1];
        config.cudagraph.max_capture_size = 1;
        let mut eager = plain_builder(Family::FlashAttn, &config).expect("a plain builder");
        let eager = eager.build(&many.step.cam, false).expect("metadata");
        let eager = replay(&many, &config, None, eager);
        assert_eq!(eager.max_splits, 1);
        let eager: Vec<f64> = eager.output.iter().map(|&x| f64::from(x)).collect();
        for name in ["flash-attn", "flash-attn-fixed-split"] {
            let what = format!("{name}, GPU {on_gpu}");
            let mut builder = native_twin(name, &config).expect("a builder");
            let promise = builder.launch_promise(&shape).expect("a promise");
            let cam = &one.step.cam;
            let capture = builder.build_for_cudagraph_capture(cam).expect("metadata");
            let captured = replay(&one, &config, Some(&promise), capture);
            assert_eq!(captured.output, one.values[0], "{what}");
            let metadata = builder.build(&many.step.cam, false).expect("metadata");
            let replayed = replay(&many, &config, Some(&promise), metadata);
            let (splits, most) = (replayed.max_splits, promise.max_num_splits as usize);
            assert!(splits > 1 && splits <= most, "{what}: {splits} of {most}");
            for (served, expected) in [&captured, &replayed].into_iter().zip(&expected) {
                assert_close(&what, &served.output, &served.lse, expected, 32);
            }
            let error = max_relative_error(&replayed.output, &eager, 32);
            assert!(error <= BOUND, "{what}: {error:e} beside eager");
        }
    }
}
