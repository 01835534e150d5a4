//! The builder of example 04 as a candidate beside the reference builder: that it attends to other keys is seen in shadow, and a gate
//! decides about it.

use std::time::{Duration, Instant};

use timetable_attention::{Grant, Verifier, VerifyContext, plain_builder};
use timetable_examples::step;
use timetable_sandbox::{
    BuiltBy, CandidateStatus, Companions, Gates, GroupBuilder, GroupSetup, Limits, ReloadPlan,
    Sandbox, Stage,
};

#[test]
fn other_keys_are_a_difference_that_a_gate_may_allow() {
    let described = step(&[(1, 400), (1, 40)]).expect("a step");
    let sandbox = Sandbox::new(Limits::default()).expect("a sandbox");
    let reference = timetable_reference::component("flashinfer").expect("embedded");
    let reference = sandbox.load(reference.bytes).expect("it loads");
    let candidate = timetable_reference::component("flashinfer-window-sink").expect("embedded");
    let candidate = sandbox.load(candidate.bytes).expect("it loads");
    let setup = GroupSetup {
        name: "layers.0".to_owned(),
        config: described.config.clone(),
        plain: plain_builder(reference.family(), &described.config).expect("a plain builder"),
        acceptance: None,
    };
    let mut group = GroupBuilder::new(&sandbox, setup, &reference, "embedded").expect("a group");
    let handle = group.handle();
    let inputs = described.inputs(&[]);
    let context = VerifyContext {
        grant: Grant::Subset,
        ..described.context(&inputs)
    };
    let mut ends = |max_differences: u32| -> CandidateStatus {
        let plan = ReloadPlan {
            shadow_steps: 10,
            canary: None,
            gates: Gates {
                max_differences,
                max_build_ratio: f64::INFINITY,
                max_fuel_ratio: f64::INFINITY,
                max_extra_build_us: u32::MAX,
                min_observed_per_mille: 0,
                ..Gates::default()
            },
        };
        let options = Some(vec![("window".to_owned(), "64".to_owned())]);
        handle
            .submit(Some(&candidate), "04", options, &plan, &Companions::of(1))
            .expect("a version that is checked");
        let start = Instant::now();
        loop {
            group.step_boundary();
            let built = group
                .build_in_context(&context, false, |metadata| {
                    Verifier::new().verify(metadata, &context)
                })
                .expect("a step");
            assert_eq!(built.built_by, BuiltBy::Component, "{:?}", built.fault);
            let status = handle.status().candidate.expect("a candidate");
            if matches!(status.stage, Stage::Active | Stage::Withdrawn) {
                return status;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "{status:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    };

    let status = ends(0);
    assert_eq!(status.stage, Stage::Withdrawn);
    let why = status.withdrawn.expect("a reason");
    assert!(
        why.starts_with("in 1 shadow steps its metadata meant something else"),
        "{why}"
    );
    let first = status.shadow.first_difference.expect("what it is");
    assert!(
        first.starts_with("1 of the step's rows attend to other keys; the first is row 0"),
        "{first}"
    );

    let status = ends(10);
    assert_eq!(status.stage, Stage::Active);
    assert_eq!(status.shadow.differences, status.shadow.observed);
    assert!(status.shadow.differences > 0, "{status:?}");
}
