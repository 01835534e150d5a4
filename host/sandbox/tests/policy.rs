//! What is done about faults: fail-step, fail-closed, back-off, quarantine and the return to the last good version, build budget.

mod support;

use std::time::{Duration, Instant};

use support::{Act, Answer, Guest, Plain, config, decodes, sandbox};
use timetable_attention::{BuildFault, FaultKind};
use timetable_sandbox::{
    BuildBudget, BuiltBy, FaultPolicy, GroupBuilder, GroupSetup, GroupState, OnFault, ReloadHandle,
    StepError, StepMetadata,
};
use timetable_types::*;

fn splits(splits: u32) -> Vec<u8> {
    Guest {
        answer: Answer::Metadata { splits },
        ..Guest::default()
    }
    .component()
}

/// A guest whose instances behave for two calls (the test builds), then do `build` at each.
fn third_call(build: Act) -> Vec<u8> {
    Guest {
        build,
        from_call: 3,
        ..Guest::default()
    }
    .component()
}

fn group(bytes: &[u8], policy: FaultPolicy) -> (GroupBuilder, ReloadHandle) {
    let sandbox = sandbox();
    let component = sandbox.load(bytes).unwrap();
    let setup = GroupSetup {
        name: "group 0".into(),
        config: config(),
        plain: Plain::boxed(),
        acceptance: None,
    };
    let group = GroupBuilder::new(&sandbox, setup, &component, "test").unwrap();
    let handle = group.handle();
    handle.set_policy(policy).unwrap();
    (group, handle)
}

fn on_fault(on_fault: OnFault) -> FaultPolicy {
    FaultPolicy {
        on_fault,
        ..FaultPolicy::default()
    }
}

fn step(group: &mut GroupBuilder) -> Result<StepMetadata, StepError> {
    group.build(&decodes(4), false, |_: &Metadata| Ok::<(), String>(()))
}

/// Waits for the reload thread, without steps.
#[track_caller]
fn until(group: &mut GroupBuilder, mut done: impl FnMut(&mut GroupBuilder) -> bool) {
    let start = Instant::now();
    while !done(group) {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "{:?}",
            group.handle().status()
        );
        std::thread::sleep(Duration::from_millis(1));
        group.step_boundary();
    }
}

#[track_caller]
fn kind(fault: Option<&BuildFault>) -> FaultKind {
    match fault {
        Some(BuildFault::Fault { kind, .. }) => *kind,
        other => panic!("expected a fault, found {other:?}"),
    }
}

#[test]
fn fail_step_fails_the_step_and_never_asks_the_plain_builder() {
    let (mut group, handle) = group(&third_call(Act::Unreachable), on_fault(OnFault::FailStep));
    for faults in 1..=3 {
        until(&mut group, |group| {
            group.handle().status().state == GroupState::Active
        });
        let error = step(&mut group).unwrap_err();
        assert_eq!(kind(error.component.as_ref()), FaultKind::Trap);
        assert!(error.plain.is_none());
        let text = error.to_string();
        assert!(text.contains("the component: trap"), "{text}");
        assert!(text.contains("its policy is fail-step"), "{text}");
        assert_eq!(handle.status().failed_steps, faults);
    }
    assert_eq!(handle.status().plain_steps, 0);

    // A good version serves again.
    handle.reload(&splits(2), "mended").unwrap();
    assert_eq!(step(&mut group).unwrap().built_by, BuiltBy::Component);
}

#[test]
fn fail_step_fails_the_steps_that_no_instance_is_ready_for() {
    let (mut group, handle) = group(&third_call(Act::Unreachable), on_fault(OnFault::FailStep));
    let quarantined =
        |group: &mut GroupBuilder| group.handle().status().state == GroupState::Quarantined;
    until(&mut group, |group| {
        assert!(step(group).is_err(), "the plain builder is not asked");
        quarantined(group)
    });
    let text = step(&mut group).unwrap_err().to_string();
    assert!(text.contains("trap"), "what took it out of service: {text}");
    assert_eq!(handle.status().plain_steps, 0);
}

#[test]
fn a_declined_batch_is_built_plainly_whatever_the_policy() {
    for policy in OnFault::ALL {
        let (mut group, handle) = group(&third_call(Act::Decline), on_fault(policy));
        for _ in 0..3 {
            assert_eq!(step(&mut group).unwrap().built_by, BuiltBy::Plain);
        }
        assert_eq!(handle.status().state, GroupState::Active, "{policy}");
    }
}

#[test]
fn fail_closed_fails_every_step_until_a_reload() {
    let (mut group, handle) = group(&third_call(Act::Unreachable), on_fault(OnFault::FailClosed));
    for _ in 0..5 {
        let error = step(&mut group).unwrap_err();
        assert_eq!(kind(error.component.as_ref()), FaultKind::Trap);
        assert!(error.to_string().contains("fail-closed"), "{error}");
    }
    let status = handle.status();
    assert_eq!(status.state, GroupState::Closed);
    assert_eq!(status.faults["trap"], 1, "it was called once");
    assert_eq!((status.failed_steps, status.plain_steps), (5, 0));
    handle.reload(&splits(2), "mended").unwrap();
    assert_eq!(step(&mut group).unwrap().built_by, BuiltBy::Component);
}

#[test]
fn back_off_leaves_out_ever_more_steps() {
    let (mut group, handle) = group(&third_call(Act::Unreachable), FaultPolicy::default());
    let mut waits = Vec::new();
    for _ in 0..5 {
        // Steps that the component is not called in, until it is, and faults.
        let mut waited = 0;
        loop {
            until(&mut group, |group| {
                group.handle().status().state != GroupState::Recovering
            });
            let served = step(&mut group).unwrap();
            assert_eq!(served.built_by, BuiltBy::Plain);
            if served.fault.is_some() {
                break;
            }
            waited += 1;
        }
        waits.push(waited);
    }
    assert_eq!(waits, [0, 0, 1, 3, 7]);
    let status = handle.status();
    assert_eq!(status.state, GroupState::BackingOff);
    assert_eq!(status.backoff_steps, 11);
    assert_eq!(status.all_faults["trap"], 5);
}

#[test]
fn a_quarantined_version_gives_way_to_the_last_good_one() {
    let policy = FaultPolicy {
        quarantine_faults: 3,
        max_backoff_steps: 0,
        ..FaultPolicy::default()
    };
    let (mut group, handle) = group(&splits(2), policy);
    assert_eq!(step(&mut group).unwrap().built_by, BuiltBy::Component);
    handle.reload(&third_call(Act::Unreachable), "bad").unwrap();
    let mut failed = 0;
    until(&mut group, |group| {
        failed += u32::from(step(group).is_err());
        group.handle().status().returns == 1
    });
    assert_eq!(failed, 0, "no step is lost on the way back");
    until(&mut group, |group| {
        step(group).unwrap().built_by == BuiltBy::Component
    });
    let status = handle.status();
    assert_eq!(status.active.as_ref().unwrap().origin, "test");
    assert_eq!((status.quarantines, status.returns), (1, 1));
    assert_eq!(status.all_faults["trap"], 3);

    // The quarantined one can be had back, but is not returned to by itself: when the next is bad as well, nobody is left.
    handle
        .reload(&third_call(Act::DivideByZero), "bad too")
        .unwrap();
    until(&mut group, |group| {
        step(group).unwrap();
        group.handle().status().returns == 2
    });
    handle.rollback().ok();
    let pinned = FaultPolicy {
        return_to_last_good: false,
        ..policy
    };
    handle.set_policy(pinned).unwrap();
    handle
        .reload(&third_call(Act::OutOfBounds), "bad again")
        .unwrap();
    until(&mut group, |group| {
        step(group).unwrap();
        group.handle().status().state == GroupState::Quarantined
    });
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(step(&mut group).unwrap().built_by, BuiltBy::Plain);
    assert_eq!(handle.status().returns, 2);
}

#[test]
fn nobody_returns_to_a_quarantined_version() {
    let policy = FaultPolicy {
        quarantine_faults: 1,
        ..FaultPolicy::default()
    };
    let (mut group, handle) = group(&third_call(Act::Unreachable), policy);
    step(&mut group).unwrap();
    assert_eq!(handle.status().state, GroupState::Quarantined);
    handle
        .reload(&third_call(Act::DivideByZero), "bad too")
        .unwrap();
    let served = step(&mut group).unwrap();
    assert_eq!(kind(served.fault.as_ref()), FaultKind::Trap);
    // The reload thread has looked for a good one by the time that it answers to another order.
    assert!(handle.reconfigure(vec![("a".into(), "b".into())]).is_ok());
    assert_eq!(handle.status().returns, 0);
    assert_eq!(handle.status().quarantines, 2);
}

#[test]
fn an_overspent_build_budget_takes_a_builder_out_of_service() {
    let policy = FaultPolicy {
        build_budget: BuildBudget {
            per_step: Duration::from_nanos(1),
            reserve: Duration::from_millis(1),
        },
        ..FaultPolicy::default()
    };
    let (mut group, handle) = group(&splits(2), policy);
    let mut faults = Vec::new();
    until(&mut group, |group| {
        faults.extend(step(group).unwrap().fault);
        group.handle().status().state == GroupState::Quarantined
    });
    assert_eq!(faults.len(), 1);
    assert_eq!(kind(faults.first()), FaultKind::BuildBudget);
    let text = faults[0].to_string();
    assert!(text.contains("1ns a step with 1ms in reserve"), "{text}");
    assert_eq!(step(&mut group).unwrap().built_by, BuiltBy::Plain);
    assert_eq!(handle.status().faults["build_budget"], 1);
}

#[test]
fn a_builder_that_keeps_to_the_contract_passes_every_re_run() {
    let policy = FaultPolicy {
        rerun_every: 1,
        ..FaultPolicy::default()
    };
    let (mut group, handle) = group(&splits(2), policy);
    until(&mut group, |group| {
        assert_eq!(step(group).unwrap().built_by, BuiltBy::Component);
        group.handle().status().reruns >= 20
    });
    assert_eq!(handle.status().all_faults.get("non_determinism"), None);
}

#[test]
fn a_policy_that_makes_no_sense_changes_nothing() {
    let (_group, handle) = group(&splits(1), FaultPolicy::default());
    let error = handle
        .set_policy(FaultPolicy {
            quarantine_faults: 0,
            ..FaultPolicy::default()
        })
        .unwrap_err();
    assert!(
        error.to_string().contains("quarantine_faults is 0"),
        "{error}"
    );
    assert_eq!(handle.policy(), FaultPolicy::default());
}
