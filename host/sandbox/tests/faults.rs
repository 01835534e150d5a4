//! What happens when a component misbehaves: each kind of fault is told apart, ends the instance, and nothing else.

mod support;

use std::time::{Duration, Instant};

use support::{Act, Answer, Guest, config, decodes, sandbox};
use timetable_attention::{BuildFault, FaultKind, MetadataBuilder};
use timetable_sandbox::{Limits, Sandbox, WasmBuilder};
use timetable_types::*;

fn builder_in(sandbox: &Sandbox, guest: &Guest) -> Result<WasmBuilder, BuildFault> {
    let component = sandbox.load(&guest.component()).expect("loads");
    WasmBuilder::new(&component, &config())
}

fn builder(guest: &Guest) -> WasmBuilder {
    builder_in(&sandbox(), guest).expect("constructs")
}

#[track_caller]
fn fault<T: std::fmt::Debug>(result: Result<T, BuildFault>) -> (FaultKind, String) {
    match result {
        Err(BuildFault::Fault { kind, message }) => (kind, message),
        other => panic!("expected a fault, found {other:?}"),
    }
}

#[track_caller]
fn flash_attn(result: Result<Metadata, BuildFault>) -> flash_attn::Metadata {
    match result {
        Ok(Metadata::FlashAttn(metadata)) => metadata,
        other => panic!("expected FLASH_ATTN metadata, found {other:?}"),
    }
}

/// Builds one step, sees `kind`, and sees that the instance is dead and says so.
#[track_caller]
fn dies(guest: &Guest, kind: FaultKind, says: &str) {
    let mut builder = builder(guest);
    let (seen, message) = fault(builder.build(&decodes(4), false));
    assert_eq!(seen, kind, "{message}");
    assert!(message.contains(says), "{says:?} is not in: {message}");
    assert!(!message.contains('\n'), "{message}");
    assert!(builder.is_dead());
    let (_, message) = fault(builder.build(&decodes(4), false));
    assert!(message.contains("died of an earlier fault"), "{message}");
}

#[test]
fn a_good_guest_builds() {
    let mut builder = builder(&Guest::default());
    assert_eq!(builder.family(), Family::FlashAttn);
    assert_eq!(builder.info().name, "test guest");
    assert_eq!(builder.info().reorder_batch_threshold, Some(1));
    assert_eq!(builder.info().max_scratch_bytes, 4096);
    let metadata = flash_attn(builder.build(&decodes(256), false));
    assert_eq!(metadata.num_actual_tokens, 256);
    assert_eq!(metadata.seq_lens, Tensor::Input(Input::SeqLens));
    assert_eq!(metadata.schedule.max_num_splits, 1);
    let shape = CaptureShape {
        num_tokens: 8,
        num_reqs: 8,
        max_query_len: 1,
        uniform_query_len: Some(1),
    };
    assert_eq!(builder.launch_promise(&shape).unwrap().max_work_items, 256);
    flash_attn(builder.build_for_cudagraph_capture(&decodes(8)));
    flash_attn(builder.build_for_drafting(&decodes(8), 1));
    let built = Metadata::FlashAttn(metadata);
    flash_attn(builder.update_block_table(&built, &decodes(8)));
}

#[test]
fn only_needed_inputs_are_sent() {
    let mut guest = Guest {
        answer: Answer::InputLengths,
        ..Guest::default()
    };
    let lengths = |guest: &Guest| {
        let metadata = flash_attn(builder(guest).build(&decodes(5), false));
        (
            metadata.num_decode_reqs,
            metadata.num_prefill_reqs,
            metadata.num_decode_tokens,
        )
    };
    assert_eq!(lengths(&guest), (6, 5, 0));
    guest.needs = &[];
    assert_eq!(lengths(&guest), (0, 0, 0));
    guest.needs = &[HostInput::IsPrefilling, HostInput::IsPrefilling];
    assert_eq!(lengths(&guest), (0, 0, 5));
}

#[test]
fn traps() {
    let trap = |act, says| {
        dies(
            &Guest {
                build: act,
                ..Guest::default()
            },
            FaultKind::Trap,
            says,
        );
    };
    trap(Act::Unreachable, "unreachable");
    trap(Act::DivideByZero, "integer divide by zero");
    trap(Act::OutOfBounds, "out of bounds memory access");
    let deep = Guest {
        build: Act::StackOverflow,
        ..Guest::default()
    };
    dies(&deep, FaultKind::StackDepth, "call stack exhausted");
}

#[test]
fn an_endless_loop_runs_out_of_fuel() {
    dies(
        &Guest {
            build: Act::Loop,
            ..Guest::default()
        },
        FaultKind::Fuel,
        "fuel",
    );
    // Bulk operations are charged by the byte.
    dies(
        &Guest {
            build: Act::FillForEver,
            ..Guest::default()
        },
        FaultKind::Fuel,
        "fuel",
    );
}

#[test]
fn memory_beyond_the_cap() {
    // 2 pages + 60 are 3.9 MiB.
    let within = Guest {
        build: Act::Grow(60),
        ..Guest::default()
    };
    flash_attn(builder(&within).build(&decodes(4), false));
    let beyond = Guest {
        build: Act::Grow(64),
        ..Guest::default()
    };
    dies(
        &beyond,
        FaultKind::Memory,
        "asked for 4325376 bytes of memory; its cap is 4194304",
    );
}

#[test]
fn constructors() {
    let sandbox = sandbox();
    let construct = |guest: Guest| fault(builder_in(&sandbox, &guest).map(drop));
    let (kind, message) = construct(Guest {
        refuse_config: true,
        ..Guest::default()
    });
    assert_eq!(kind, FaultKind::Constructor);
    assert!(message.contains("no such head size"), "{message}");
    assert_eq!(
        construct(Guest {
            create: Act::Unreachable,
            ..Guest::default()
        })
        .0,
        FaultKind::Trap
    );
    assert_eq!(
        construct(Guest {
            create: Act::Loop,
            ..Guest::default()
        })
        .0,
        FaultKind::Fuel
    );
    assert_eq!(
        construct(Guest {
            create: Act::Grow(1000),
            ..Guest::default()
        })
        .0,
        FaultKind::Memory
    );
}

#[test]
fn declining_a_batch_is_no_fault() {
    let guest = Guest {
        answer: Answer::Declined("no cascade attention here"),
        ..Guest::default()
    };
    let mut builder = builder(&guest);
    for _ in 0..3 {
        match builder.build(&decodes(4), false) {
            Err(BuildFault::Declined(error)) => {
                assert_eq!(error.kind, ErrorKind::InvalidValue);
                assert_eq!(error.message, "no cascade attention here");
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(!builder.is_dead());
}

/// After a trap the whole store is unusable: the next call runs in a fresh instance.
#[test]
fn field_case_25_after_a_trap_a_fresh_instance() {
    let guest = Guest {
        build: Act::Unreachable,
        from_call: 3,
        ..Guest::default()
    };
    let component = sandbox().load(&guest.component()).unwrap();
    for _ in 0..2 {
        // Each instance counts its own calls: nothing of the dead one's state is left.
        let mut builder = WasmBuilder::new(&component, &config()).unwrap();
        flash_attn(builder.build(&decodes(1), false));
        flash_attn(builder.build(&decodes(1), false));
        assert_eq!(fault(builder.build(&decodes(1), false)).0, FaultKind::Trap);
        assert!(
            fault(builder.build(&decodes(1), false))
                .1
                .contains("make a new one")
        );
    }
}

fn with_endless_fuel() -> Sandbox {
    Sandbox::new(Limits {
        fuel_per_call: u64::MAX / 2,
        watchdog: Duration::from_millis(100),
        watchdog_tick: Duration::from_millis(10),
        ..Limits::default()
    })
    .unwrap()
}

/// Epoch interruption without a deadline traps at once: the deadline is set before each call.
#[test]
fn field_case_26_the_deadline_is_set_before_each_call() {
    let sandbox = with_endless_fuel();
    let mut builder = builder_in(&sandbox, &Guest::default()).unwrap();
    // Far more ticks pass than one deadline holds; each call has its own.
    let start = sandbox.watchdog().ticks();
    while sandbox.watchdog().ticks() < start + 30 {
        flash_attn(builder.build(&decodes(4), false));
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut endless = builder_in(
        &sandbox,
        &Guest {
            build: Act::Loop,
            ..Guest::default()
        },
    )
    .unwrap();
    let before = Instant::now();
    let (kind, message) = fault(endless.build(&decodes(4), false));
    assert_eq!(kind, FaultKind::Watchdog, "{message}");
    assert!(message.contains("100ms"), "{message}");
    assert!(
        before.elapsed() >= Duration::from_millis(100),
        "{:?}",
        before.elapsed()
    );
}

/// The ticker's death is noticed: the next call starts it again, and has its deadline.
#[test]
fn field_case_26_a_dead_ticker_is_noticed() {
    let sandbox = with_endless_fuel();
    let mut endless = builder_in(
        &sandbox,
        &Guest {
            build: Act::Loop,
            ..Guest::default()
        },
    )
    .unwrap();
    assert!(sandbox.watchdog().is_alive());
    sandbox.watchdog().stop();
    assert!(!sandbox.watchdog().is_alive());
    let ticks = sandbox.watchdog().ticks();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(sandbox.watchdog().ticks(), ticks, "nobody ticks");
    assert_eq!(
        fault(endless.build(&decodes(4), false)).0,
        FaultKind::Watchdog
    );
    assert!(sandbox.watchdog().is_alive());
    assert_eq!(sandbox.watchdog().restarts(), 1);
}

/// A guest can make the host allocate when results are lifted: that is bounded, and forged lists are refused.
#[test]
fn field_case_27_forged_and_huge_lists() {
    let lists = |answer| Guest {
        answer,
        ..Guest::default()
    };
    let forged = lists(Answer::SplitList {
        pointer: 0,
        len: 1 << 28,
    });
    dies(&forged, FaultKind::LiftBound, "out of bounds");
    let wrapping = lists(Answer::SplitList {
        pointer: u32::MAX - 3,
        len: u32::MAX,
    });
    dies(&wrapping, FaultKind::LiftBound, "");
    let unaligned = lists(Answer::SplitList { pointer: 3, len: 1 });
    dies(&unaligned, FaultKind::LiftBound, "align");
    dies(
        &lists(Answer::BadCase),
        FaultKind::LiftBound,
        "discriminant",
    );
    dies(&lists(Answer::BadText), FaultKind::LiftBound, "utf-8");

    // Each list fits the guest's memory of 3 MiB, and so does one alone; together they are above what is lifted.
    let million = 700_000;
    let one = Guest {
        pages: 48,
        ..lists(Answer::SplitList {
            pointer: 0,
            len: million,
        })
    };
    assert_eq!(
        flash_attn(builder(&one).build(&decodes(4), false))
            .schedule
            .num_splits
            .len(),
        million as usize
    );
    let two = Guest {
        pages: 48,
        ..lists(Answer::TwoLists { len: million })
    };
    dies(&two, FaultKind::LiftBound, "too much data");
}

/// Configuration is part of a version's identity.
#[test]
fn field_case_29_configuration_is_part_of_the_version() {
    let component = sandbox().load(&Guest::default().component()).unwrap();
    let version = |config: &BuilderConfig| WasmBuilder::new(&component, config).unwrap().version();
    let plain = config();
    assert_eq!(version(&plain), version(&config()));
    let options = BuilderConfig {
        options: vec![("splits".into(), "4".into())],
        ..config()
    };
    let other = BuilderConfig {
        options: vec![("splits".into(), "8".into())],
        ..config()
    };
    let mut scale = config();
    scale.attention.scale = 0.126;
    let versions = [&plain, &options, &other, &scale].map(version);
    for (i, a) in versions.iter().enumerate() {
        assert!(versions[i + 1..].iter().all(|b| a != b), "{versions:?}");
    }
}

const IN_CHILD: &str = "TIMETABLE_TEST_SEGFAULT_IN_CHILD";

/// A SIGSEGV in host code still kills the process with a core signal; a guest's out-of-bounds access is still a trap.
#[test]
fn field_case_30_segfaults_of_the_host_are_not_swallowed() {
    use std::os::unix::process::ExitStatusExt;

    if std::env::var_os(IN_CHILD).is_some() {
        // wasmtime's signal handlers are in place and have just worked.
        let guest = Guest {
            build: Act::OutOfBounds,
            ..Guest::default()
        };
        assert_eq!(
            fault(builder(&guest).build(&decodes(1), false)).0,
            FaultKind::Trap
        );
        println!("the guest trapped");
        // SAFETY: none: that is the point. The child process is there to die of this read of an unmapped page.
        let value = unsafe { std::ptr::read_volatile(std::ptr::without_provenance::<u32>(8)) };
        println!("survived with {value}");
        std::process::exit(0);
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "field_case_30_segfaults_of_the_host_are_not_swallowed",
            "--nocapture",
        ])
        .env(IN_CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(text.contains("the guest trapped"), "{text}");
    assert!(!text.contains("survived"), "{text}");
    // SIGSEGV is 11.
    assert_eq!(child.status.signal(), Some(11), "{:?}", child.status);
}
