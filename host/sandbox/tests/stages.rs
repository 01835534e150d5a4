//! A reload in stages: a candidate is shown live steps, serves some, and gets into service or is withdrawn; whatever it does, every
//! step is served.

mod support;

use std::time::{Duration, Instant};

use support::{Act, Answer, Guest, config, decodes, sandbox};
use timetable_attention::{BlockTable, Grant, StepInputs, VerifyContext, plain_builder, verify};
use timetable_sandbox::{
    Arm, BuiltBy, Canary, Companions, FaultPolicy, Gates, GroupBuilder, GroupSetup, OnFault,
    ReloadError, ReloadHandle, ReloadPlan, Sandbox, Stage, StepError, StepMetadata, TenantName,
    VersionInfo,
};
use timetable_types::{CaptureShape, CommonAttentionMetadata, Family, Metadata};

/// A step of some decodes, with its tensors.
struct Step {
    common: CommonAttentionMetadata,
    table: Vec<i32>,
    slots: Vec<i64>,
    positions: Vec<i64>,
}

impl Step {
    fn decodes(rows: u32) -> Step {
        let common = decodes(rows);
        let width = common.block_table_width as usize;
        let mut table = vec![0; rows as usize * width];
        for row in 0..rows as usize {
            table[row * width] = row as i32 + 1;
        }
        let positions: Vec<i64> = (0..i64::from(rows)).collect();
        let slots = positions.iter().map(|at| (at + 1) * 16 + at % 16).collect();
        Step {
            common,
            table,
            slots,
            positions,
        }
    }

    fn with<T>(&self, look: impl FnOnce(&VerifyContext<'_>) -> T) -> T {
        let config = config();
        let inputs = StepInputs {
            query_start_loc: &self.common.query_start_loc_cpu,
            seq_lens: &self.common.seq_lens_cpu_upper_bound,
            block_table: BlockTable {
                data: &self.table,
                width: self.common.block_table_width as usize,
            },
            slot_mapping: &self.slots,
            positions: &self.positions,
            causal: None,
            dcp_local_seq_lens: None,
            encoder_seq_lens: None,
            logits_indices_padded: None,
            rswa_prefix_lens: None,
            extras: &[],
        };
        look(&VerifyContext {
            config: &config,
            common: &self.common,
            inputs: &inputs,
            promise: None,
            grant: Grant::Exact,
            num_blocks: 1000,
        })
    }
}

fn setup(name: &str) -> GroupSetup {
    GroupSetup {
        name: name.into(),
        config: config(),
        plain: plain_builder(Family::FlashAttn, &config()).unwrap(),
        acceptance: None,
    }
}

fn guest(splits: u32, build: Act, from_call: i32) -> Vec<u8> {
    Guest {
        answer: Answer::Metadata { splits },
        build,
        from_call,
        counts_decodes: false,
        ..Guest::default()
    }
    .component()
}

fn good(splits: u32) -> Vec<u8> {
    guest(splits, Act::Nothing, 1)
}

/// One whose every instance traps in its first live step: two calls are the test builds'.
fn trapping(splits: u32) -> Vec<u8> {
    guest(splits, Act::Unreachable, 3)
}

struct Served {
    group: GroupBuilder,
    handle: ReloadHandle,
    step: Step,
    /// The largest split count tells versions apart; and who built.
    log: Vec<(u32, BuiltBy)>,
}

impl Served {
    fn new(sandbox: &Sandbox, bytes: &[u8]) -> Served {
        let component = sandbox.load(bytes).unwrap();
        let group = GroupBuilder::new(sandbox, setup("group 0"), &component, "first").unwrap();
        Served::of(group)
    }

    fn of(group: GroupBuilder) -> Served {
        Served {
            handle: group.handle(),
            group,
            step: Step::decodes(4),
            log: Vec::new(),
        }
    }

    fn try_step(&mut self) -> Result<StepMetadata, StepError> {
        self.group.step_boundary();
        self.try_build(None)
    }

    fn try_build(&mut self, arm: Option<Arm>) -> Result<StepMetadata, StepError> {
        let (group, log) = (&mut self.group, &mut self.log);
        self.step.with(|context| {
            let accept = |metadata: &Metadata| verify(metadata, context);
            let built = match arm {
                Some(arm) => group.build_by(arm, context, false, accept),
                None => group.build_in_context(context, false, accept),
            }?;
            log.push((max_splits(&built), built.built_by));
            Ok(built)
        })
    }

    #[track_caller]
    fn step(&mut self) -> StepMetadata {
        self.try_step().expect("a step")
    }

    /// Steps until the candidate is in `stage`, at most twenty seconds.
    #[track_caller]
    fn until(&mut self, stage: Stage) {
        let start = Instant::now();
        while self.stage() != Some(stage) {
            let status = self.handle.status();
            assert!(start.elapsed() < Duration::from_secs(20), "{status:?}");
            self.step();
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn stage(&self) -> Option<Stage> {
        Some(self.handle.status().candidate?.stage)
    }

    fn why(&self) -> String {
        let candidate = self.handle.status().candidate.expect("a candidate");
        candidate.withdrawn.expect("it was withdrawn")
    }

    fn submit(&self, sandbox: &Sandbox, bytes: &[u8], plan: &ReloadPlan) -> VersionInfo {
        let component = sandbox.load(bytes).unwrap();
        self.handle
            .submit(Some(&component), "second", None, plan, &Companions::of(1))
            .unwrap()
    }

    fn built_by(&self, who: BuiltBy) -> usize {
        self.log.iter().filter(|(_, by)| *by == who).count()
    }
}

fn max_splits(step: &StepMetadata) -> u32 {
    match &step.metadata {
        Metadata::FlashAttn(metadata) => metadata.schedule.max_num_splits,
        other => panic!("{other:?}"),
    }
}

/// Times are the machine's, and it may be busy: only what a test is about is a gate.
fn gates() -> Gates {
    Gates {
        max_build_ratio: f64::INFINITY,
        max_extra_build_us: u32::MAX,
        min_observed_per_mille: 0,
        ..Gates::default()
    }
}

fn plan(shadow_steps: u32, canary: Option<(u32, u32)>) -> ReloadPlan {
    ReloadPlan {
        shadow_steps,
        canary: canary.map(|(per_mille, steps)| Canary {
            per_mille,
            steps,
            ..Canary::default()
        }),
        gates: gates(),
    }
}

#[test]
fn a_candidate_goes_through_shadow_and_canary_and_then_serves() {
    let sandbox = sandbox();
    let mut served = Served::new(&sandbox, &good(1));
    served.step();
    let first = served.handle.status().active.unwrap();
    let second = served.submit(&sandbox, &good(2), &plan(30, Some((250, 20))));
    assert_eq!(
        served.stage(),
        Some(Stage::Shadow),
        "checked, and no step yet"
    );

    served.until(Stage::Canary);
    assert!(
        served
            .log
            .iter()
            .all(|built| *built == (1, BuiltBy::Component))
    );
    let shadow = served.handle.status().candidate.unwrap().shadow;
    assert_eq!(shadow.steps, 30);
    assert_eq!(shadow.observed + shadow.skipped, 30, "{shadow:?}");
    assert!(shadow.observed > 0);
    assert_eq!((shadow.differences, shadow.declined), (0, 0));
    assert!(shadow.active_p50_ns.is_some() && shadow.candidate_p50_ns.is_some());
    assert_eq!(
        shadow.active_fuel, shadow.candidate_fuel,
        "equal code, equal steps"
    );

    served.log.clear();
    served.until(Stage::Active);
    // Whole steps, every fourth, and not one before the gate is passed that says so.
    let by_candidate = served.built_by(BuiltBy::Candidate);
    assert!(by_candidate >= 20, "{:?}", served.log);
    let chosen: Vec<usize> = (0..served.log.len())
        .filter(|step| served.log[*step].1 == BuiltBy::Candidate)
        .collect();
    assert!(
        chosen.windows(2).all(|pair| pair[1] - pair[0] == 4),
        "{chosen:?}"
    );
    // The last step may be the first of the new version's own.
    for built in &served.log[..served.log.len() - 1] {
        let expected = if built.1 == BuiltBy::Candidate { 2 } else { 1 };
        assert_eq!(built.0, expected);
    }

    let step = served.step();
    assert_eq!((max_splits(&step), step.built_by), (2, BuiltBy::Component));
    let status = served.handle.status();
    assert_eq!(status.active.as_ref(), Some(&second));
    assert_eq!(status.previous.as_ref(), Some(&first));
    assert_eq!((status.plain_steps, status.failed_steps), (0, 0));
    assert_eq!(served.handle.rollback().unwrap(), first);
    assert_eq!(max_splits(&served.step()), 1);
    // Counted on the reload thread, which has answered since.
    assert_eq!(served.handle.status().activations, 1);
}

#[test]
fn what_a_shadow_does_wrong_costs_nothing_but_the_candidate() {
    let sandbox = sandbox();
    for (bytes, part) in [
        (
            trapping(2),
            "1 faults by the end of shadow, the last one trap",
        ),
        (guest(2, Act::Loop, 3), "the last one fuel"),
        (guest(2, Act::Grow(100), 3), "the last one memory"),
        // More splits than the configuration allows: only the verifier finds it.
        (good(9), "the last one refused"),
    ] {
        let mut served = Served::new(&sandbox, &good(1));
        served.step();
        served.submit(&sandbox, &bytes, &plan(1000, Some((1000, 1))));
        served.until(Stage::Withdrawn);
        assert!(served.why().contains(part), "{}", served.why());
        (0..5).for_each(|_| drop(served.step()));
        assert!(
            served
                .log
                .iter()
                .all(|built| *built == (1, BuiltBy::Component))
        );
        let status = served.handle.status();
        assert!(status.faults.is_empty(), "of the version in service");
        assert_eq!(status.all_faults.values().sum::<u64>(), 1);
        assert!(status.previous.is_none());
    }
}

#[test]
fn a_canarys_fault_is_served_plainly_and_ends_it_at_once() {
    let sandbox = sandbox();
    let mut served = Served::new(&sandbox, &good(3));
    served.step();
    served.submit(&sandbox, &trapping(2), &plan(0, Some((1000, 10))));
    let step = served.step();
    assert_eq!(step.built_by, BuiltBy::Plain);
    assert!(step.fault.is_some());
    assert_eq!(served.stage(), Some(Stage::Withdrawn));
    assert!(
        served
            .why()
            .starts_with("1 faults by the end of canary, the last one trap")
    );
    for _ in 0..5 {
        let step = served.step();
        assert_eq!((max_splits(&step), step.built_by), (3, BuiltBy::Component));
    }
    let status = served.handle.status();
    assert_eq!(
        (status.plain_steps, status.failed_steps, status.quarantines),
        (1, 0, 0)
    );
}

#[test]
fn under_another_policy_a_canarys_fault_fails_one_step_and_closes_nothing() {
    let sandbox = sandbox();
    for on_fault in [OnFault::FailStep, OnFault::FailClosed] {
        let mut served = Served::new(&sandbox, &good(3));
        let policy = FaultPolicy {
            on_fault,
            ..FaultPolicy::default()
        };
        served.handle.set_policy(policy).unwrap();
        served.step();
        served.submit(&sandbox, &trapping(2), &plan(0, Some((1000, 10))));
        let error = served.try_step().unwrap_err();
        assert!(error.component.is_some() && error.plain.is_none());
        let step = served.step();
        assert_eq!((max_splits(&step), step.built_by), (3, BuiltBy::Component));
        assert_eq!(served.handle.status().failed_steps, 1);
    }
}

#[test]
fn forgiven_faults_leave_the_steps_between_to_the_version_in_service() {
    let sandbox = sandbox();
    let mut served = Served::new(&sandbox, &good(3));
    served.step();
    let mut plan = plan(0, Some((1000, 1000)));
    plan.gates.max_faults = 3;
    served.submit(&sandbox, &trapping(2), &plan);
    served.until(Stage::Withdrawn);
    assert!(
        served.why().starts_with("4 faults by the end of canary"),
        "{}",
        served.why()
    );
    assert_eq!(served.built_by(BuiltBy::Plain), 4, "{:?}", served.log);
    assert_eq!(served.built_by(BuiltBy::Candidate), 0);
    assert!(
        served.built_by(BuiltBy::Component) > 1,
        "those that it backed off for"
    );
    assert_eq!(served.handle.status().failed_steps, 0);
}

#[test]
fn cost_gates_withdraw_a_candidate() {
    let sandbox = sandbox();
    let mut served = Served::new(&sandbox, &good(1));
    served.step();
    let mut dear = plan(10, None);
    dear.gates.max_fuel_ratio = 0.99;
    served.submit(&sandbox, &good(2), &dear);
    served.until(Stage::Withdrawn);
    assert!(
        served.why().contains("its gate is max_fuel_ratio 0.99"),
        "{}",
        served.why()
    );

    // Beside the plain builder nothing is measured, and every microsecond is extra.
    for (shadow, canary) in [(10, None), (0, Some((1000, 10)))] {
        let mut served = Served::of(GroupBuilder::plain(&sandbox, setup("group 0")));
        let mut slow = plan(shadow, canary);
        slow.gates.max_extra_build_us = 0;
        served.submit(&sandbox, &good(2), &slow);
        served.until(Stage::Withdrawn);
        assert!(
            served.why().contains("max_extra_build_us 0"),
            "{}",
            served.why()
        );
        assert_eq!(served.step().built_by, BuiltBy::Plain);
    }
}

#[test]
fn a_shadow_that_saw_too_little_does_not_pass() {
    let sandbox = sandbox();
    let mut served = Served::new(&sandbox, &good(1));
    let mut plan = plan(8, None);
    plan.gates.min_observed_per_mille = 500;
    served.submit(&sandbox, &good(2), &plan);
    // Without a context nothing can be verified.
    let start = Instant::now();
    while served.stage() != Some(Stage::Withdrawn) {
        assert!(start.elapsed() < Duration::from_secs(20));
        let accept = |_: &Metadata| Ok::<(), String>(());
        served.group.build(&decodes(4), false, accept).unwrap();
    }
    assert!(
        served
            .why()
            .starts_with("only 0 of 8 shadow steps were compared"),
        "{}",
        served.why()
    );
}

#[test]
fn a_rollback_withdraws_the_candidate_and_what_served_goes_on() {
    let sandbox = sandbox();
    let mut served = Served::new(&sandbox, &good(1));
    served.step();
    let first = served.handle.status().active.unwrap();
    for plan in [plan(1_000_000, None), plan(0, Some((1, 1000)))] {
        served.submit(&sandbox, &good(2), &plan);
        (0..5).for_each(|_| drop(served.step()));
        assert_eq!(served.handle.rollback().unwrap(), first);
        assert_eq!(served.why(), "it was rolled back");
        (0..5).for_each(|_| drop(served.step()));
        assert!(served.handle.withdraw().is_none(), "there is none any more");
        assert!(matches!(
            served.handle.rollback(),
            Err(ReloadError::NoPrevious(_))
        ));
    }
    assert!(
        served
            .log
            .iter()
            .all(|built| *built == (1, BuiltBy::Component))
    );
}

#[test]
fn another_reload_takes_the_candidates_place() {
    let sandbox = sandbox();
    let mut served = Served::new(&sandbox, &good(1));
    served.submit(&sandbox, &good(2), &plan(0, Some((500, 1_000))));
    served.until(Stage::Canary);
    let third = served.submit(&sandbox, &good(3), &plan(5, None));
    let candidate = served.handle.status().candidate.unwrap();
    assert_eq!(candidate.version, third);
    served.until(Stage::Active);
    // An immediate one too.
    served.submit(&sandbox, &good(2), &plan(0, Some((500, 1_000))));
    served.handle.reload(&good(4), "four").unwrap();
    assert_eq!(served.why(), "another version was submitted");
    served.log.clear();
    (0..10).for_each(|_| drop(served.step()));
    assert!(
        served
            .log
            .iter()
            .all(|built| *built == (4, BuiltBy::Component)),
        "{:?}",
        served.log
    );
    assert_eq!(served.handle.status().withdrawals, 2);
}

#[test]
fn a_bad_plan_or_component_changes_nothing() {
    let sandbox = sandbox();
    let mut served = Served::new(&sandbox, &good(1));
    let trying = served.submit(&sandbox, &good(2), &plan(1_000_000, None));
    let component = sandbox.load(&good(3)).unwrap();
    let wrong = plan(0, Some((0, 1)));
    let error = served
        .handle
        .submit(Some(&component), "x", None, &wrong, &Companions::of(1));
    let text = error.unwrap_err().to_string();
    assert!(
        text.contains("reload of group `group 0`: canary has no share"),
        "{text}"
    );
    let component = sandbox.load(&guest(3, Act::Unreachable, 1)).unwrap();
    let error = served.handle.submit(
        Some(&component),
        "x",
        None,
        &plan(9, None),
        &Companions::of(1),
    );
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("failed a test build")
    );
    assert_eq!(served.handle.status().candidate.unwrap().version, trying);
    assert_eq!(served.stage(), Some(Stage::Shadow));
    assert_eq!(max_splits(&served.step()), 1);
}

#[test]
fn another_configuration_goes_the_same_way() {
    let sandbox = sandbox();
    let mut served = Served::new(&sandbox, &good(1));
    served.step();
    let first = served.handle.status().active.unwrap();
    let options = vec![("a".to_owned(), "b".to_owned())];
    let submit = |served: &Served, options: &[(String, String)]| {
        let options = Some(options.to_vec());
        let plan = plan(5, Some((500, 5)));
        served
            .handle
            .submit(None, "options", options, &plan, &Companions::of(1))
            .unwrap()
    };
    let second = submit(&served, &options);
    assert_eq!(
        (second.component, &second.options),
        (first.component, &options)
    );
    assert_ne!(second.version, first.version);
    served.until(Stage::Active);
    // They stay for later reloads.
    served.handle.reload(&good(2), "two").unwrap();
    served.step();
    assert_eq!(served.handle.status().active.unwrap().options, options);
    // Those of a candidate that is withdrawn do not.
    submit(&served, &[]);
    served.handle.withdraw().unwrap();
    served.handle.reload(&good(3), "three").unwrap();
    served.step();
    assert_eq!(served.handle.status().active.unwrap().options, options);
}

#[test]
fn companions_serve_together_or_not_at_all() {
    let sandbox = sandbox();
    let mut groups = [
        Served::new(&sandbox, &good(1)),
        Served::new(&sandbox, &good(1)),
    ];
    let submit = |groups: &[Served; 2], components: [&[u8]; 2], steps: [u32; 2]| {
        let companions = Companions::of(2);
        for ((served, bytes), steps) in groups.iter().zip(components).zip(steps) {
            let component = sandbox.load(bytes).unwrap();
            let plan = plan(steps, Some((1000, 5)));
            served
                .handle
                .submit(Some(&component), "second", None, &plan, &companions)
                .unwrap();
        }
    };
    submit(&groups, [&good(2), &trapping(2)], [5, 200]);
    groups[0].until(Stage::Canary);
    (0..50).for_each(|_| drop(groups[0].step()));
    assert_eq!(
        groups[0].stage(),
        Some(Stage::Canary),
        "it waits for the other"
    );
    groups[1].until(Stage::Withdrawn);
    groups[0].until(Stage::Withdrawn);
    assert_eq!(
        groups[0].why(),
        "the candidate of another group of this backend was withdrawn"
    );
    for served in &mut groups {
        let step = served.step();
        assert_eq!((max_splits(&step), step.built_by), (1, BuiltBy::Component));
    }

    submit(&groups, [&good(2), &good(2)], [5, 50]);
    groups[0].until(Stage::Canary);
    (0..50).for_each(|_| drop(groups[0].step()));
    assert_eq!(groups[0].stage(), Some(Stage::Canary));
    groups[1].until(Stage::Active);
    groups[0].until(Stage::Active);
    for served in &mut groups {
        let step = served.step();
        assert_eq!((max_splits(&step), step.built_by), (2, BuiltBy::Component));
    }
}

#[test]
fn a_canary_of_tenants_serves_their_segments_only() {
    let sandbox = sandbox();
    let mut served = Served::new(&sandbox, &good(1));
    let tenants = vec![TenantName::new("lab").unwrap()];
    let mut plan = plan(0, None);
    plan.canary = Some(Canary {
        tenants: tenants.clone(),
        steps: 5,
        ..Canary::default()
    });
    assert!(served.group.canary_tenants().is_empty());
    served.submit(&sandbox, &good(2), &plan);
    for round in 0..5 {
        served.group.step_boundary();
        assert_eq!(served.group.canary_tenants(), tenants, "{round}");
        for (arm, expected) in [
            (None, (1, BuiltBy::Component)),
            (Some(Arm::Active), (1, BuiltBy::Component)),
            (Some(Arm::Candidate), (2, BuiltBy::Candidate)),
        ] {
            served.try_build(arm).unwrap();
            assert_eq!(served.log.last(), Some(&expected));
        }
    }
    served.until(Stage::Active);
    assert!(served.group.canary_tenants().is_empty());
    // A candidate that is gone is the version in service.
    served.try_build(Some(Arm::Candidate)).unwrap();
    assert_eq!(served.log.last(), Some(&(2, BuiltBy::Component)));
}

#[test]
fn launch_promises_cover_a_candidate_in_canary() {
    let sandbox = sandbox();
    let mut served = Served::new(&sandbox, &good(2));
    let shape = CaptureShape {
        num_tokens: 4,
        num_reqs: 4,
        max_query_len: 1,
        uniform_query_len: None,
    };
    let promised =
        |served: &mut Served| served.group.launch_promise(&shape).unwrap().max_num_splits;
    assert_eq!(promised(&mut served), 2);
    served.submit(&sandbox, &good(5), &plan(0, Some((1, 1000))));
    assert!(
        served.group.step_boundary(),
        "promises are to be asked for again"
    );
    assert_eq!(promised(&mut served), 5);
    served.handle.withdraw().unwrap();
    served.group.step_boundary();
    assert_eq!(promised(&mut served), 2);
}

#[test]
fn a_group_that_ends_ends_its_trials() {
    let sandbox = sandbox();
    for plan in [plan(100, None), plan(0, Some((1, 1000)))] {
        let served = Served::new(&sandbox, &good(1));
        served.submit(&sandbox, &good(2), &plan);
        let handle = served.handle.clone();
        drop(served);
        let candidate = handle.status().candidate.unwrap();
        assert_eq!(candidate.stage, Stage::Withdrawn);
        assert_eq!(candidate.withdrawn.as_deref(), Some("the host ended"));
    }
}

/// Every kind of candidate, one after the other, while steps run without a pause.
#[test]
fn staged_reloads_while_steps_run_lose_no_step() {
    let sandbox = sandbox();
    let mut served = Served::new(&sandbox, &good(1));
    let handle = served.handle.clone();
    let done = std::sync::atomic::AtomicBool::new(false);
    let components: Vec<_> = [
        good(2),
        trapping(3),
        good(9),
        good(4),
        guest(5, Act::Unreachable, 40),
    ]
    .iter()
    .map(|bytes| sandbox.load(bytes).unwrap())
    .collect();
    let (mut activated, mut withdrawn) = (0, 0);
    std::thread::scope(|scope| {
        let reloads = scope.spawn(|| {
            for round in 0..100 {
                let (shadow, canary) =
                    [(4, Some((500, 4))), (0, Some((1000, 60))), (6, None)][round % 3];
                let component = &components[round % components.len()];
                handle
                    .submit(
                        Some(component),
                        "storm",
                        None,
                        &plan(shadow, canary),
                        &Companions::of(1),
                    )
                    .unwrap();
                loop {
                    let candidate = handle.status().candidate.unwrap();
                    match candidate.stage {
                        Stage::Active => break activated += 1,
                        Stage::Withdrawn => break withdrawn += 1,
                        _ => std::thread::sleep(Duration::from_micros(300)),
                    }
                }
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        while !done.load(std::sync::atomic::Ordering::Relaxed) && !reloads.is_finished() {
            served.step();
            std::thread::sleep(Duration::from_micros(50));
        }
        reloads.join().unwrap();
    });
    assert_eq!(served.handle.status().failed_steps, 0);
    assert_eq!(activated + withdrawn, 100);
    assert!(
        activated >= 40 && withdrawn >= 40,
        "{activated} {withdrawn}"
    );
    // Nothing that was refused was ever executed.
    assert!(served.log.iter().all(|(splits, _)| *splits != 9));
}
