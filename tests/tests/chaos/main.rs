//! The chaos builder in a host: whatever it does wrong, the step is served, the fault is told apart, and its bundle makes it
//! happen again.

mod support;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use chaos_builder::{Damage, Mischief};
use support::{BACKENDS, Backend, Host, MIN_ROWS, MORE_RECORDS, build, config, patient, wait};
use timetable_attention::{BuildFault, FaultKind, MetadataBuilder};
use timetable_sandbox::{
    BuildBudget, BuilderCall, BuiltBy, FaultPolicy, GroupState, Limits, Outcome, ReloadError,
    Sandbox, WasmBuilder,
};
use timetable_types::{Family, Metadata};

/// What each mischief of one call is, to the sandbox or to the verifier.
const KINDS: [(Mischief, FaultKind); 12] = [
    (Mischief::Trap, FaultKind::Trap),
    (Mischief::SpinLoads, FaultKind::Fuel),
    (Mischief::SpinDivisions, FaultKind::Fuel),
    (Mischief::SpinPages, FaultKind::Fuel),
    (Mischief::Grow, FaultKind::Memory),
    (Mischief::Recurse, FaultKind::StackDepth),
    (Mischief::HugeList, FaultKind::LiftBound),
    (Mischief::LongList, FaultKind::Refused),
    (Mischief::OffByOne, FaultKind::Refused),
    (Mischief::Wild, FaultKind::Refused),
    (Mischief::Drop, FaultKind::Refused),
    (Mischief::Duplicate, FaultKind::Refused),
];

/// A field for each, so that the damage is one that nobody accepts.
fn options(backend: Backend, mischief: Mischief) -> Vec<(&'static str, &'static str)> {
    let mut options = vec![("chaos", mischief.name()), ("chaos-min-rows", "9")];
    if matches!(mischief, Mischief::OffByOne | Mischief::Wild) {
        options.push(("chaos-field", backend.counted()));
    }
    options
}

#[track_caller]
fn kind(fault: Option<&BuildFault>) -> FaultKind {
    match fault {
        Some(BuildFault::Fault { kind, .. }) => *kind,
        Some(BuildFault::Declined(_)) => FaultKind::Declined,
        None => panic!("expected a fault"),
    }
}

#[test]
fn it_behaves_unless_it_is_told_otherwise() {
    for backend in BACKENDS {
        let host = Host::new(backend, true);
        for step in [
            backend.mixed(),
            backend.decodes(1),
            backend.decodes(256),
            backend.step(&[(300, 300)]),
        ] {
            let mut group = host.group(&step, &[]).unwrap();
            for _ in 0..3 {
                let built = build(&mut group, &step);
                assert_eq!(
                    built.built_by,
                    BuiltBy::Component,
                    "{}: {:?}",
                    backend.name,
                    built.fault
                );
            }
        }
        assert_eq!(host.bundles().len(), 0);
    }
}

#[test]
fn every_mischief_is_served_told_apart_and_replayed() {
    for family in Family::ALL {
        assert!(BACKENDS.iter().any(|backend| backend.family == family));
    }
    for backend in BACKENDS {
        let step = backend.mixed();
        assert!(step.step.cam.num_reqs as usize >= MIN_ROWS);
        for (mischief, expected) in KINDS {
            let host = Host::new(backend, true);
            let plain = host.plain(&step);
            let mut group = host.group(&step, &options(backend, mischief)).unwrap();
            let built = build(&mut group, &step);
            let what = format!("{} of {}", mischief.name(), backend.name);
            assert_eq!(
                kind(built.fault.as_ref()),
                expected,
                "{what}: {:?}",
                built.fault
            );
            assert_eq!(built.built_by, BuiltBy::Plain, "{what}");
            assert_eq!(built.metadata, plain, "{what}");
            assert_eq!(group.handle().status().faults[expected.name()], 1, "{what}");

            host.wait_for_bundles(1);
            let bundle = host.bundles().remove(0);
            assert_eq!(bundle.header.fault.kind, expected, "{what}");
            let replay = bundle.replay().unwrap();
            if expected == FaultKind::StackDepth {
                assert_eq!(replay.outcome, Outcome::DoesNotReplay, "{what}");
            } else {
                assert_eq!(replay.outcome, Outcome::Reproduced, "{what}: {replay:?}");
                assert_eq!(replay.here.as_ref(), Some(&bundle.header.fault), "{what}");
                assert_eq!(replay.calls, 1, "{what}: a fresh instance does it at once");
            }
        }
    }
}

#[test]
fn just_under_its_limits_it_serves() {
    for backend in BACKENDS {
        let step = backend.mixed();
        let host = Host::new(backend, true);
        for mischief in [
            Mischief::JustUnderFuel,
            Mischief::JustUnderMemory,
            Mischief::JustUnderStack,
        ] {
            let mut group = host.group(&step, &options(backend, mischief)).unwrap();
            for _ in 0..3 {
                let built = build(&mut group, &step);
                assert_eq!(
                    built.built_by,
                    BuiltBy::Component,
                    "{}: {:?}",
                    backend.name,
                    built.fault
                );
            }
        }
    }
}

/// It does use what it claims to: with four fifths of the fuel, half of the stack or half of the memory the same call faults.
#[test]
fn just_under_its_limits_is_most_of_them() {
    let defaults = Limits::default();
    let cases = [
        (
            Mischief::JustUnderFuel,
            FaultKind::Fuel,
            Limits {
                fuel_per_call: defaults.fuel_per_call * 4 / 5,
                fuel_per_row: defaults.fuel_per_row * 4 / 5,
                fuel_per_token: defaults.fuel_per_token * 4 / 5,
                ..defaults.clone()
            },
        ),
        (
            Mischief::JustUnderStack,
            FaultKind::StackDepth,
            Limits {
                max_wasm_stack_bytes: defaults.max_wasm_stack_bytes / 2,
                ..defaults.clone()
            },
        ),
        (
            Mischief::JustUnderMemory,
            FaultKind::Memory,
            Limits {
                max_memory_bytes: defaults.max_memory_bytes / 2,
                ..defaults
            },
        ),
    ];
    for backend in BACKENDS {
        let step = backend.mixed();
        for (mischief, expected, limits) in &cases {
            let sandbox = Sandbox::new(limits.clone()).unwrap();
            let bytes = timetable_reference::chaos(backend.family).unwrap();
            let component = sandbox.load(bytes).unwrap();
            let config = config(&step, &options(backend, *mischief));
            let mut builder = WasmBuilder::new(&component, &config).unwrap();
            let fault = builder.build(&step.step.cam, false).unwrap_err();
            assert_eq!(kind(Some(&fault)), *expected, "{}: {fault}", backend.name);
        }
    }
}

/// Fuel is a count and not a time: what keeps to its fuel may still take too long, and pays for it.
#[test]
fn divisions_within_its_fuel_overspend_its_budget() {
    for backend in BACKENDS {
        let step = backend.decodes(64);
        let host = Host::new(backend, true);
        let mut group = host
            .group(&step, &options(backend, Mischief::JustUnderFuel))
            .unwrap();
        let policy = FaultPolicy {
            build_budget: BuildBudget {
                per_step: Duration::from_micros(20),
                reserve: Duration::from_millis(5),
            },
            ..patient()
        };
        group.handle().set_policy(policy).unwrap();
        let mut faults = Vec::new();
        wait("quarantine", || {
            faults.extend(build(&mut group, &step).fault);
            group.handle().status().state == GroupState::Quarantined
        });
        assert_eq!(kind(faults.last()), FaultKind::BuildBudget);
        host.wait_for_bundles(1);
        let replay = host.bundles().remove(0).replay().unwrap();
        assert_eq!(replay.outcome, Outcome::DoesNotReplay);
        assert!(replay.remarks[0].contains("build budget"), "{replay:?}");
    }
}

#[test]
fn state_of_its_own_is_found_by_a_re_run() {
    for backend in BACKENDS {
        let step = backend.mixed();
        let host = Host::new(backend, true);
        let mut group = host
            .group(&step, &options(backend, Mischief::State))
            .unwrap();
        let policy = FaultPolicy {
            rerun_every: 3,
            ..patient()
        };
        group.handle().set_policy(policy).unwrap();
        wait("quarantine", || {
            build(&mut group, &step);
            group.handle().status().state == GroupState::Quarantined
        });
        let status = group.handle().status();
        assert_eq!(status.faults["non_determinism"], 1);
        let text = &status.fault_records.last().expect("a record").message;
        let field = match backend.family {
            Family::FlashAttn => "schedule.tile_order",
            Family::Flashinfer => "worker_indptr",
            Family::TritonAttn => "num_par_softmax_segments",
            Family::FlashMla => "max_num_splits",
            Family::Mamba => "conv.batch_ptr",
        };
        assert!(text.contains(field), "{text}");
        assert_eq!(build(&mut group, &step).built_by, BuiltBy::Plain);

        let bundle = host.bundles().remove(0);
        assert_eq!(bundle.header.fault.kind, FaultKind::NonDeterminism);
        assert!(bundle.header.again.is_some(), "what a fresh instance built");
        let replay = bundle.replay().unwrap();
        assert_eq!(replay.outcome, Outcome::Reproduced, "{replay:?}");
    }
}

#[test]
fn a_leak_ends_in_its_memory_cap_and_replays_after_as_many_calls() {
    for backend in BACKENDS {
        let step = backend.mixed();
        let host = Host::new(backend, true);
        let mut group = host
            .group(&step, &options(backend, Mischief::Leak))
            .unwrap();
        let mut steps = 0;
        let fault = loop {
            steps += 1;
            if let Some(fault) = build(&mut group, &step).fault {
                break fault;
            }
            assert!(steps < 1000, "4 MiB hold no thousand times 64 KiB");
        };
        assert_eq!(kind(Some(&fault)), FaultKind::Memory, "{fault}");
        assert!(steps > 5, "{steps}");
        host.wait_for_bundles(1);
        let bundle = host.bundles().remove(0);
        let replay = bundle.replay().unwrap();
        assert_eq!(replay.outcome, Outcome::Reproduced, "{replay:?}");
        assert!(replay.calls > 5, "{replay:?}");
        assert!(
            replay
                .remarks
                .iter()
                .any(|remark| remark.contains("keeps state"))
        );
    }
}

#[test]
fn a_batch_that_it_declines_is_no_fault() {
    for backend in BACKENDS {
        let step = backend.mixed();
        let host = Host::new(backend, true);
        let mut group = host
            .group(&step, &options(backend, Mischief::Decline))
            .unwrap();
        for _ in 0..3 {
            let built = build(&mut group, &step);
            assert_eq!(kind(built.fault.as_ref()), FaultKind::Declined);
            assert_eq!(built.metadata, host.plain(&step));
        }
        assert_eq!(group.handle().status().state, GroupState::Active);
        assert_eq!(host.bundles().len(), 0);
    }
}

#[test]
fn one_that_cannot_be_constructed_changes_nothing_and_is_kept() {
    for backend in BACKENDS {
        let step = backend.mixed();
        for (mischief, expected) in [
            (Mischief::RefuseConfig, FaultKind::Constructor),
            (Mischief::TrapInCreate, FaultKind::Trap),
        ] {
            let host = Host::new(backend, true);
            let mut group = host.group(&step, &[]).unwrap();
            let options = vec![("chaos".to_owned(), mischief.name().to_owned())];
            let error = group.handle().reconfigure(options).unwrap_err();
            assert!(matches!(error, ReloadError::Construct { .. }), "{error}");
            assert_eq!(build(&mut group, &step).built_by, BuiltBy::Component);
            host.wait_for_bundles(1);
            let bundle = host.bundles().remove(0);
            assert_eq!(bundle.header.call, BuilderCall::Create);
            assert_eq!(bundle.header.fault.kind, expected);
            let replay = bundle.replay().unwrap();
            assert_eq!(replay.outcome, Outcome::Reproduced, "{replay:?}");
        }
    }
}

/// Fields with several right values: bounds that may be looser, arguments that nothing executes, schedules as good as the
/// builder's.
const SEVERAL_RIGHT: &[&str] = &[
    "max_seq_len",
    "max_num_splits",
    "seq_threshold_3d",
    "decode.max_seq_len",
    "decode.max_num_splits",
    "chunk.max_seq_len",
    "workspace",
    "cu_chunk_seqlen_p",
    "schedule.max_num_splits",
    "decode.fixed_split_size",
    "decode.disable_split_kv",
    "decode.q_len_per_req",
    "decode.work.kv_chunk_size",
    "decode.work.cta_tile_q",
    "decode.work.worker_indptr",
    "decode.work.split_kv",
    "prefill.fixed_split_size",
    "prefill.disable_split_kv",
    "prefill.q_len_per_req",
    "prefill.work.kv_chunk_size",
    "prefill.work.cta_tile_q",
    "prefill.work.worker_indptr",
    "prefill.work.split_kv",
];

/// The fields of a record; those that its family's records can have.
fn fields(metadata: &mut Metadata) -> (Vec<&'static str>, &'static [&'static str]) {
    fn of<M: Damage>(metadata: &mut M) -> (Vec<&'static str>, &'static [&'static str]) {
        let places = metadata.places();
        (places.iter().map(|(name, _)| *name).collect(), M::FIELDS)
    }
    match metadata {
        Metadata::FlashAttn(metadata) => of(metadata),
        Metadata::Flashinfer(metadata) => of(metadata),
        Metadata::TritonAttn(metadata) => of(metadata),
        Metadata::FlashMla(metadata) => of(metadata),
        Metadata::Mamba(metadata) => of(metadata),
    }
}

#[test]
fn any_field_that_is_wrong_is_refused_and_the_step_served() {
    const MISCHIEFS: [Mischief; 4] = [
        Mischief::OffByOne,
        Mischief::Wild,
        Mischief::Drop,
        Mischief::Duplicate,
    ];
    let mut missed: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut wrong = Vec::new();
    for backend in BACKENDS.into_iter().chain(MORE_RECORDS) {
        let host = Host::new(backend, false);
        for step in [backend.mixed(), backend.decodes(12)] {
            let plain = host.plain(&step);
            let mut good = build(&mut host.group(&step, &[]).unwrap(), &step).metadata;
            let (fields, all) = fields(&mut good);
            let missed = missed
                .entry(backend.family.interface())
                .or_insert_with(|| all.iter().copied().collect());
            let (mut refused, mut accepted) = (0, Vec::new());
            for field in &fields {
                missed.remove(field);
                host.settle();
                for mischief in MISCHIEFS {
                    for seed in ["0", "1", "2", "3", "4", "5"] {
                        let options = [
                            ("chaos", mischief.name()),
                            ("chaos-field", *field),
                            ("chaos-min-rows", "9"),
                            ("chaos-seed", seed),
                        ];
                        let mut group = host.group(&step, &options).unwrap();
                        let built = build(&mut group, &step);
                        if let Some(fault) = &built.fault {
                            assert_eq!(kind(Some(fault)), FaultKind::Refused, "{field}: {fault}");
                            assert_eq!(built.metadata, plain, "{field}");
                            refused += 1;
                        } else if matches!(mischief, Mischief::Drop | Mischief::Duplicate) {
                            // One that is not a list cannot lose an element, and nothing is then done to it.
                            break;
                        } else {
                            accepted.push((*field, mischief.name()));
                        }
                    }
                }
            }
            accepted.dedup();
            println!("{}: {refused} refused; accepted {accepted:?}", backend.name);
            assert!(refused >= fields.len() * 6, "{}: {refused}", backend.name);
            accepted.retain(|(field, _)| !SEVERAL_RIGHT.contains(field));
            wrong.extend(accepted.into_iter().map(|found| (backend.name, found)));
        }
    }
    assert_eq!(wrong, []);
    missed.retain(|_, fields| !fields.is_empty());
    assert_eq!(missed, BTreeMap::new(), "in no record");
}

/// Lengths and rows at random, mischief at random: every step is served with verified metadata.
#[test]
fn random_mischief_never_costs_a_step() {
    for backend in BACKENDS {
        let host = Host::new(backend, false);
        let mut kinds = BTreeMap::new();
        let mut components = 0;
        for seed in 0..60_u64 {
            let seed_text = seed.to_string();
            let options = [
                ("chaos", "random"),
                ("chaos-min-rows", "9"),
                ("chaos-seed", seed_text.as_str()),
            ];
            let shapes: Vec<_> = (0..6_u64)
                .map(|batch| {
                    let mut state = seed * 1000 + batch;
                    let mut random = |below: u64| {
                        state = state
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1_442_695_040_888_963_407);
                        ((state >> 33) % below) as usize
                    };
                    let decodes = 9 + random(20);
                    let mut rows: Vec<_> = (0..decodes).map(|_| (1, 2 + random(300))).collect();
                    for _ in 0..random(3) {
                        let tokens = 2 + random(60);
                        rows.push((tokens, tokens + random(200)));
                    }
                    backend.step(&rows)
                })
                .collect();
            let mut group = host.group(&shapes[0], &options).unwrap();
            for step in &shapes {
                let built = build(&mut group, step);
                match &built.fault {
                    Some(fault) => *kinds.entry(kind(Some(fault)).name()).or_insert(0) += 1,
                    None if built.built_by == BuiltBy::Component => components += 1,
                    None => {}
                }
            }
        }
        println!("{}: {components} by the component, {kinds:?}", backend.name);
        for kind in [
            "trap",
            "fuel",
            "memory",
            "stack_depth",
            "lift_bound",
            "refused",
            "declined",
        ] {
            assert!(kinds.contains_key(kind), "no {kind} in {kinds:?}");
        }
    }
}

#[test]
fn a_command_that_is_none_is_refused_with_what_there_is() {
    let backend = BACKENDS[0];
    let step = backend.mixed();
    let host = Host::new(backend, false);
    for (options, says) in [
        ([("chaos", "havoc")], "there are behave, random, trap"),
        ([("chaos-field", "x")], "there are num_actual_tokens"),
        ([("chaos-form-call", "1")], "chaos-from-call"),
        ([("chaos-seed", "-1")], "not a whole number"),
    ] {
        let error = match host.group(&step, &options) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{options:?} was taken"),
        };
        assert!(error.contains(says), "{says:?} is not in: {error}");
    }
}

/// Time that this thread ran, not counting what the machine gave to others.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// Wall-clock and CPU times of calls.
#[derive(Default)]
struct Times {
    wall: Vec<Duration>,
    cpu: Vec<Duration>,
}

impl Times {
    fn measure<R>(&mut self, call: impl FnOnce() -> R) -> R {
        let (cpu, wall) = (cpu_time(), Instant::now());
        let result = call();
        self.wall.push(wall.elapsed());
        self.cpu.push(cpu_time().saturating_sub(cpu));
        result
    }

    fn median(times: &[Duration]) -> Duration {
        let mut sorted = times.to_vec();
        sorted.sort();
        sorted.get(sorted.len() / 2).copied().unwrap_or_default()
    }
}

/// What a fault costs the step thread, beyond a step that the plain builder builds. Printed, not judged: a busy machine is no
/// failure.
#[test]
fn the_extra_latency_of_each_mischief_is_reported() {
    const ROUNDS: usize = 15;
    let cases = BACKENDS.map(|backend| (backend, 256));
    for (backend, rows) in cases.into_iter().chain([(BACKENDS[1], 1024)]) {
        let step = backend.decodes(rows);
        let host = Host::new(backend, true);
        let inputs = step.inputs(&[]);
        let context = step.context(&inputs);
        let mut plain = timetable_attention::plain_builder(backend.family, &step.config).unwrap();
        let mut times = Times::default();
        for _ in 0..200 {
            drop(times.measure(|| plain.build(&step.step.cam, false)));
        }
        let plain = Times::median(&times.wall);
        println!(
            "{}: {rows} decodes, beyond the plain build's {plain:?}; wall-clock median, worst and first, CPU median",
            backend.name
        );
        let all = KINDS
            .iter()
            .map(|(mischief, _)| *mischief)
            .chain([Mischief::JustUnderFuel]);
        for mischief in all {
            let mut group = host.group(&step, &options(backend, mischief)).unwrap();
            let mut times = Times::default();
            for _ in 0..ROUNDS {
                wait("an instance", || {
                    group.step_boundary();
                    group.handle().status().state == GroupState::Active
                });
                let built = times.measure(|| {
                    group
                        .build_in_context(&context, false, |metadata| {
                            timetable_attention::verify(metadata, &context)
                        })
                        .expect("served")
                });
                assert_eq!(built.fault.is_none(), mischief == Mischief::JustUnderFuel);
            }
            let worst = times.wall.iter().max().copied().unwrap_or_default();
            println!(
                "  {:<16} {:>10.1?} {:>10.1?} {:>10.1?} {:>10.1?}",
                mischief.name(),
                Times::median(&times.wall).saturating_sub(plain),
                worst.saturating_sub(plain),
                times.wall[0].saturating_sub(plain),
                Times::median(&times.cpu),
            );
        }
        // The step after a trap: the spare builds it.
        let above = (rows + 1).to_string();
        let larger = backend.decodes(rows + 1);
        let mut times = Times::default();
        for _ in 0..ROUNDS {
            let options = [("chaos", "trap"), ("chaos-min-rows", above.as_str())];
            let mut group = host.group(&larger, &options).unwrap();
            assert!(build(&mut group, &step).fault.is_none());
            assert!(build(&mut group, &larger).fault.is_some());
            let built = times.measure(|| {
                group
                    .build_in_context(&context, false, |metadata| {
                        timetable_attention::verify(metadata, &context)
                    })
                    .expect("served")
            });
            assert_eq!(built.built_by, BuiltBy::Component);
        }
        println!(
            "  the step after a trap, by the spare: {:.1?}",
            Times::median(&times.wall)
        );
    }
}
