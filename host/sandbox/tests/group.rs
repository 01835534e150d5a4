//! A group's builder in service: swaps at step boundaries, faults that cost no step, reloads that change nothing when they
//! fail, rollback.

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use support::{Act, Answer, Guest, Plain, config, decodes, sandbox};
use timetable_attention::{BuildFault, FaultKind};
use timetable_sandbox::{
    BuiltBy, FaultPolicy, GroupBuilder, GroupSetup, GroupState, ReloadError, ReloadHandle, Sandbox,
    StepMetadata,
};
use timetable_types::*;

fn setup() -> GroupSetup {
    GroupSetup {
        name: "group 0".into(),
        config: config(),
        plain: Plain::boxed(),
        acceptance: None,
    }
}

fn splits(splits: u32) -> Vec<u8> {
    Guest {
        answer: Answer::Metadata { splits },
        ..Guest::default()
    }
    .component()
}

/// A guest whose instances behave for two calls (the test builds), then do `build` at the third.
fn third_call(build: Act) -> Vec<u8> {
    Guest {
        build,
        from_call: 3,
        ..Guest::default()
    }
    .component()
}

fn group_in(sandbox: &Sandbox, bytes: &[u8]) -> (GroupBuilder, ReloadHandle) {
    let component = sandbox.load(bytes).unwrap();
    let group = GroupBuilder::new(sandbox, setup(), &component, "test").unwrap();
    let handle = group.handle();
    (group, handle)
}

/// The next instance is called in the next step, whatever happened before.
fn without_back_off(handle: &ReloadHandle) {
    let policy = FaultPolicy {
        max_backoff_steps: 0,
        ..FaultPolicy::default()
    };
    handle.set_policy(policy).expect("a policy");
}

fn accept(_: &Metadata) -> Result<(), String> {
    Ok(())
}

/// The group's largest split count tells the versions apart.
fn max_splits(step: &StepMetadata) -> u32 {
    match &step.metadata {
        Metadata::FlashAttn(metadata) => metadata.schedule.max_num_splits,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn step(group: &mut GroupBuilder) -> StepMetadata {
    group.build(&decodes(4), false, accept).expect("a step")
}

/// Steps until the reload thread has done what was ordered, at most ten seconds.
#[track_caller]
fn until(group: &mut GroupBuilder, mut done: impl FnMut(&mut GroupBuilder) -> bool) {
    let start = Instant::now();
    while !done(group) {
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "{:?}",
            group.handle().status()
        );
        std::thread::sleep(Duration::from_millis(1));
        group.step_boundary();
    }
}

#[test]
fn a_group_without_a_component_is_served_by_its_plain_builder() {
    let sandbox = sandbox();
    let mut group = GroupBuilder::plain(&sandbox, setup());
    assert_eq!(step(&mut group).built_by, BuiltBy::Plain);
    let status = group.handle().status();
    assert_eq!(
        (status.state, status.plain_steps, status.steps),
        (GroupState::Plain, 1, 0)
    );
    assert_eq!(group.info().name, "plain");
    assert!(matches!(
        group.handle().rollback(),
        Err(ReloadError::NoPrevious(_))
    ));
    assert!(matches!(
        group.handle().reconfigure(vec![]),
        Err(ReloadError::NoComponent(_))
    ));

    group.handle().reload(&splits(3), "three").unwrap();
    assert!(group.step_boundary());
    assert_eq!(group.info().name, "test guest");
    assert_eq!(max_splits(&step(&mut group)), 3);
}

#[test]
fn a_version_takes_over_at_the_step_boundary_only() {
    let sandbox = sandbox();
    let (mut group, handle) = group_in(&sandbox, &splits(1));
    assert_eq!(max_splits(&step(&mut group)), 1);
    let info = handle.reload(&splits(2), "two").unwrap();

    // Ready, but this step is not over: drafts and captures are of the version that built it.
    let status = handle.status();
    assert_eq!(status.pending.as_ref(), Some(&info));
    assert_ne!(status.active.as_ref(), Some(&info));
    let draft = group.build_for_drafting(&decodes(4), 1, accept).unwrap();
    assert_eq!(max_splits(&draft), 1);
    let capture = group
        .build_for_cudagraph_capture(&decodes(4), accept)
        .unwrap();
    assert_eq!(max_splits(&capture), 1);
    let update = group
        .update_block_table(&draft.metadata, &decodes(4), accept)
        .unwrap();
    assert_eq!(max_splits(&update), 1);

    assert_eq!(max_splits(&step(&mut group)), 2);
    let status = handle.status();
    assert_eq!(status.active.as_ref(), Some(&info));
    assert_eq!(status.pending, None);
    assert_eq!(
        (info.origin.as_str(), info.name.as_str()),
        ("two", "test guest")
    );
    assert_eq!(status.steps, 1, "drafts and captures are not steps");
    assert!(status.build_p50_ns.unwrap() > 0);
    assert_eq!(status.splits.max, 2);
    assert_eq!(status.work_items.last, 4);
}

#[test]
fn a_bad_reload_changes_nothing() {
    let sandbox = sandbox();
    let (mut group, handle) = group_in(&sandbox, &splits(2));
    let before = handle.status().active;
    let wrong_family = Guest {
        interface: "flashinfer",
        ..Guest::default()
    }
    .component();
    let refused = Guest {
        refuse_config: true,
        ..Guest::default()
    }
    .component();
    let traps = Guest {
        build: Act::Unreachable,
        ..Guest::default()
    }
    .component();
    let declines = Guest {
        answer: Answer::Declined("never"),
        ..Guest::default()
    }
    .component();
    let cases: [(&[u8], &str); 6] = [
        (b"garbage", "not a WebAssembly component"),
        (&Guest::default().core_module(), "core module"),
        (
            &wrong_family,
            "builds flashinfer metadata, but group `group 0` reads flash-attn",
        ),
        (
            &refused,
            "cannot be constructed with group `group 0`'s configuration",
        ),
        (&traps, "failed a test build for group `group 0`: trap"),
        (
            &declines,
            "failed a test build for group `group 0`: the builder declined the batch: never",
        ),
    ];
    for (bytes, says) in cases {
        let error = handle.reload(bytes, "bad").unwrap_err().to_string();
        assert!(error.contains(says), "{says:?} is not in: {error}");
        assert!(!error.contains('\n'), "{error}");
        let step = step(&mut group);
        assert_eq!((step.built_by, max_splits(&step)), (BuiltBy::Component, 2));
    }
    assert_eq!(handle.status().active, before);
    assert_eq!(handle.status().pending, None);
}

#[test]
fn the_hosts_own_check_is_asked() {
    let sandbox = sandbox();
    let setup = GroupSetup {
        acceptance: Some(Arc::new(|builder| {
            match builder.build(&decodes(2), false) {
                Ok(Metadata::FlashAttn(m)) if m.schedule.max_num_splits <= 4 => Ok(()),
                other => Err(format!("conformance case 1: {other:?}")),
            }
        })),
        ..setup()
    };
    let mut group = GroupBuilder::plain(&sandbox, setup);
    group.handle().reload(&splits(4), "four").unwrap();
    let error = group.handle().reload(&splits(5), "five").unwrap_err();
    assert!(error.to_string().contains("conformance case 1"), "{error}");
    assert_eq!(max_splits(&step(&mut group)), 4);
}

#[test]
fn rollback_returns_to_the_version_before_and_back_again() {
    let sandbox = sandbox();
    let (mut group, handle) = group_in(&sandbox, &splits(1));
    step(&mut group);
    handle.reload(&splits(2), "two").unwrap();
    assert_eq!(max_splits(&step(&mut group)), 2);
    let back = handle.rollback().unwrap();
    assert_eq!(back.origin, "test");
    assert_eq!(max_splits(&step(&mut group)), 1);
    assert_eq!(handle.rollback().unwrap().origin, "two");
    assert_eq!(max_splits(&step(&mut group)), 2);
    assert_eq!(handle.status().steps, 2, "a version's count goes on");

    // The version in service again, with fresh instances: the version before stays the version before.
    handle.reload(&splits(2), "two again").unwrap();
    assert_eq!(max_splits(&step(&mut group)), 2);
    assert_eq!(handle.status().previous.unwrap().origin, "test");
    assert_eq!(handle.rollback().unwrap().origin, "test");
    assert_eq!(max_splits(&step(&mut group)), 1);
    assert_eq!(handle.rollback().unwrap().origin, "two again");
    assert_eq!(max_splits(&step(&mut group)), 2);

    // A reload that has not taken over yet is withdrawn.
    handle.reload(&splits(3), "three").unwrap();
    assert_eq!(handle.rollback().unwrap().origin, "two again");
    assert_eq!(max_splits(&step(&mut group)), 2);
}

#[test]
fn field_case_29_other_options_are_another_version_with_its_own_instance() {
    let sandbox = sandbox();
    let (mut group, handle) = group_in(&sandbox, &splits(2));
    step(&mut group);
    let before = handle.status().active.unwrap();
    let info = handle
        .reconfigure(vec![("splits".into(), "4".into())])
        .unwrap();
    assert_eq!(info.component, before.component);
    assert_ne!(info.version, before.version);
    step(&mut group);
    let status = handle.status();
    assert_eq!(status.active.unwrap().version, info.version);
    assert_eq!(status.steps, 1);
    // The options hold for reloads to come.
    let again = handle.reload(&splits(2), "again").unwrap();
    assert_eq!(again.version, info.version);
}

#[test]
fn a_fault_costs_no_step_and_the_spare_takes_over() {
    let sandbox = sandbox();
    for (act, kind) in [
        (Act::Unreachable, FaultKind::Trap),
        (Act::OutOfBounds, FaultKind::Trap),
        (Act::Loop, FaultKind::Fuel),
        (Act::Grow(1000), FaultKind::Memory),
    ] {
        let (mut group, handle) = group_in(&sandbox, &third_call(act));
        let faulty = step(&mut group);
        assert_eq!((faulty.built_by, max_splits(&faulty)), (BuiltBy::Plain, 1));
        match &faulty.fault {
            Some(BuildFault::Fault { kind: seen, .. }) => assert_eq!(*seen, kind),
            other => panic!("{other:?}"),
        }
        let status = handle.status();
        assert_eq!(status.faults.get(kind.name()), Some(&1));
        assert_eq!(status.fault_records.len(), 1);
        assert_eq!(
            status.fault_records[0].version,
            status.active.as_ref().unwrap().version
        );
        assert_eq!(status.plain_steps, 1);
        // The spare, tried like the first, faults at its third call as well: a second instance, the same story.
        let second = step(&mut group);
        assert_eq!(second.built_by, BuiltBy::Plain);
        assert!(second.fault.is_some());
        assert_eq!(handle.status().fault_records[0].count, 2);
        assert_eq!(
            group.info().name,
            "test guest",
            "a fault does not change what the engine reads"
        );
    }
}

#[test]
fn field_case_25_a_new_instance_is_prepared_off_the_step_thread() {
    let sandbox = sandbox();
    let (mut group, handle) = group_in(&sandbox, &third_call(Act::Unreachable));
    without_back_off(&handle);
    step(&mut group); // the first instance dies, the spare takes over
    step(&mut group); // the spare dies, unless the next was ready
    until(&mut group, |group| {
        group.handle().status().state == GroupState::Active
    });
    let third = step(&mut group);
    assert_eq!(third.built_by, BuiltBy::Plain);
    assert!(third.fault.is_some(), "the new instance was called");
    assert!(handle.status().fault_records[0].count >= 3);
}

#[test]
fn a_refused_result_is_a_fault_and_the_plain_builder_is_verified_too() {
    let sandbox = sandbox();
    let (mut group, handle) = group_in(&sandbox, &splits(9));
    without_back_off(&handle);
    let at_most = |most: u32| {
        move |metadata: &Metadata| match metadata {
            Metadata::FlashAttn(m) if m.schedule.max_num_splits <= most => Ok(()),
            Metadata::FlashAttn(m) => Err(format!(
                "schedule.max_num_splits is {}, above {most}",
                m.schedule.max_num_splits
            )),
            other => Err(format!("{other:?}")),
        }
    };
    let served = group.build(&decodes(4), false, at_most(8)).unwrap();
    assert_eq!(served.built_by, BuiltBy::Plain);
    assert_eq!(handle.status().faults.get("refused"), Some(&1));
    assert!(
        handle.status().fault_records[0]
            .message
            .contains("schedule.max_num_splits is 9, above 8")
    );

    // Refused as well: the step fails with both reasons, and the group goes on.
    until(&mut group, |group| {
        group.handle().status().state == GroupState::Active
    });
    let error = group.build(&decodes(4), false, at_most(0)).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("the plain builder: refused: schedule.max_num_splits is 1, above 0"),
        "{text}"
    );
    assert!(
        text.contains("the component: refused: schedule.max_num_splits is 9"),
        "{text}"
    );
    until(&mut group, |group| {
        group.handle().status().state == GroupState::Active
    });
    assert_eq!(
        max_splits(&group.build(&decodes(4), false, at_most(9)).unwrap()),
        9
    );
}

#[test]
fn a_declined_batch_is_built_by_the_plain_builder_and_the_instance_lives() {
    let sandbox = sandbox();
    let (mut group, handle) = group_in(&sandbox, &third_call(Act::Decline));
    for _ in 0..20 {
        let step = step(&mut group);
        assert_eq!(step.built_by, BuiltBy::Plain);
        match step.fault {
            Some(BuildFault::Declined(error)) => assert_eq!(error.message, "no such head size (7)"),
            other => panic!("{other:?}"),
        }
    }
    let status = handle.status();
    assert_eq!(status.faults["declined"], 20);
    assert_eq!((status.state, status.plain_steps), (GroupState::Active, 20));
}

#[test]
fn a_builder_that_always_faults_is_left_alone_until_a_reload() {
    let sandbox = sandbox();
    let (mut group, handle) = group_in(&sandbox, &third_call(Act::Unreachable));
    let policy = FaultPolicy {
        quarantine_faults: 3,
        ..FaultPolicy::default()
    };
    handle.set_policy(policy).unwrap();
    let mut faults = 0;
    until(&mut group, |group| {
        faults += u32::from(step(group).fault.is_some());
        group.handle().status().state == GroupState::Quarantined
    });
    assert_eq!(faults, 3);
    for _ in 0..10 {
        let step = step(&mut group);
        assert_eq!(
            (step.built_by, step.fault.is_some()),
            (BuiltBy::Plain, false)
        );
    }
    let status = handle.status();
    assert_eq!(
        (status.state, status.faults["trap"]),
        (GroupState::Quarantined, 3)
    );

    handle.reload(&splits(2), "mended").unwrap();
    let mended = step(&mut group);
    assert_eq!(
        (mended.built_by, max_splits(&mended)),
        (BuiltBy::Component, 2)
    );
    assert_eq!(handle.status().state, GroupState::Active);
    // The bad one can be had back: its instance is made anew.
    assert_eq!(handle.rollback().unwrap().origin, "test");
    assert!(step(&mut group).fault.is_some());
}

#[test]
fn launch_promises_hold_for_whoever_builds() {
    let sandbox = sandbox();
    let (mut group, _) = group_in(&sandbox, &splits(1));
    let shape = CaptureShape {
        num_tokens: 300,
        num_reqs: 300,
        max_query_len: 2,
        uniform_query_len: None,
    };
    let promise = group.launch_promise(&shape).unwrap();
    // The guest promises 256 items and 4,096 bytes; the plain builder 300 items, query length 2 and no scratch.
    assert_eq!(promise.max_work_items, 300);
    assert_eq!(promise.scratch_bytes, 4096);
    assert_eq!(promise.max_query_len, 2);
}

#[test]
fn reloads_while_steps_run_lose_no_step() {
    let sandbox = sandbox();
    let versions = [splits(1), splits(2)];
    let (mut group, handle) = group_in(&sandbox, &versions[0]);
    let stop = Arc::new(AtomicBool::new(false));
    let reloader = std::thread::spawn({
        let stop = stop.clone();
        move || {
            for round in 1..=100 {
                handle.reload(&versions[round % 2], "round").unwrap();
            }
            stop.store(true, Ordering::Release);
            handle
        }
    });
    let (mut steps, mut swaps) = (0_u64, 0_u32);
    let mut last = 1;
    while !stop.load(Ordering::Acquire) {
        let step = step(&mut group);
        assert_eq!(step.built_by, BuiltBy::Component);
        assert!(step.fault.is_none());
        swaps += u32::from(max_splits(&step) != last);
        last = max_splits(&step);
        steps += 1;
        std::thread::sleep(Duration::from_micros(200));
    }
    let handle = reloader.join().unwrap();
    println!("{steps} steps, {swaps} swaps seen");
    assert!(swaps >= 20, "{swaps} swaps in {steps} steps");
    assert_eq!(handle.status().plain_steps, 0);
}
