//! Fault bundles: what is kept of a fault, and what another machine makes of it.

mod support;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use support::{Act, Answer, Guest, config, decodes};
use timetable_attention::{FaultKind, Grant, StepInputs, VerifyContext, plain_builder, verify};
use timetable_sandbox::{
    BuilderCall, BundleLimits, FaultBundle, FaultDir, FaultPolicy, GroupBuilder, GroupSetup,
    Limits, Outcome, Sandbox,
};
use timetable_types::*;

fn sandbox_with(dir: &Path, limits: BundleLimits) -> Sandbox {
    let sandbox = Sandbox::new(Limits::default()).unwrap();
    sandbox.keep_faults_in(FaultDir::open(dir, limits).unwrap());
    sandbox
}

fn group(sandbox: &Sandbox, bytes: &[u8]) -> GroupBuilder {
    let component = sandbox.load(bytes).unwrap();
    let setup = GroupSetup {
        name: "FLASH_ATTN/0".into(),
        config: config(),
        plain: plain_builder(Family::FlashAttn, &config()).unwrap(),
        acceptance: None,
    };
    let group = GroupBuilder::new(sandbox, setup, &component, "bad.wasm").unwrap();
    let policy = FaultPolicy {
        max_backoff_steps: 0,
        quarantine_faults: 1000,
        ..FaultPolicy::default()
    };
    group.handle().set_policy(policy).unwrap();
    group
}

/// Bundles are written by the reload thread.
#[track_caller]
fn wait_for(dir: &FaultDir, files: usize) -> Vec<FaultBundle> {
    let start = Instant::now();
    loop {
        let found = dir.bundles().unwrap();
        if found.len() >= files {
            return found
                .iter()
                .map(|path| FaultBundle::from_bytes(&std::fs::read(path).unwrap()).unwrap())
                .collect();
        }
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "{} of {files} bundles",
            found.len()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A batch's own tensors, one block for each row.
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
        (0..rows as usize).for_each(|row| table[row * width] = row as i32 + 1);
        Step {
            table,
            slots: (0..i64::from(rows))
                .map(|row| (row + 1) * 16 + row)
                .collect(),
            positions: (0..i64::from(rows)).collect(),
            common,
        }
    }

    fn build(&self, group: &mut GroupBuilder) -> timetable_sandbox::StepMetadata {
        let inputs = StepInputs {
            query_start_loc: &self.common.query_start_loc_cpu,
            seq_lens: &self.common.seq_lens_cpu_upper_bound,
            block_table: timetable_attention::BlockTable {
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
        let config = config();
        let context = VerifyContext {
            config: &config,
            common: &self.common,
            inputs: &inputs,
            promise: None,
            grant: Grant::Exact,
            num_blocks: 64,
        };
        timetable_attention::verify_step(&context).expect("a good step");
        group.step_boundary();
        group
            .build_in_context(&context, false, |metadata| verify(metadata, &context))
            .expect("it is served")
    }
}

#[test]
fn a_fault_is_kept_with_all_that_it_depends_on_and_replays() {
    for (act, kind) in [
        (Act::Unreachable, FaultKind::Trap),
        (Act::DivideByZero, FaultKind::Trap),
        (Act::Loop, FaultKind::Fuel),
        (Act::Grow(1000), FaultKind::Memory),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("faults");
        let sandbox = sandbox_with(&path, BundleLimits::default());
        let bytes = Guest {
            build: act,
            from_call: 3,
            ..Guest::default()
        }
        .component();
        let mut group = group(&sandbox, &bytes);
        let step = Step::decodes(5);
        assert!(step.build(&mut group).fault.is_some());
        let faults = FaultDir::open(&path, BundleLimits::default()).unwrap();
        let bundle = wait_for(&faults, 1).remove(0);

        let header = &bundle.header;
        assert_eq!(header.fault.kind, kind);
        assert_eq!(header.call, BuilderCall::Build { fast_build: false });
        assert_eq!(header.instance_calls, 3, "two test builds and this one");
        assert_eq!(header.common.as_ref(), Some(&step.common));
        assert_eq!(header.config, config());
        assert_eq!(header.limits, Limits::default());
        assert_eq!(header.origin, "bad.wasm");
        assert_eq!(bundle.component, bytes);
        let kept = header.step.as_ref().expect("the step's tensors");
        assert_eq!(kept.blocks, [1, 2, 3, 4, 5], "only the columns in use");
        assert_eq!(header.metadata, None, "nothing came back");

        // The guest counts its calls: a fresh one faults in its third.
        let replay = bundle.replay().unwrap();
        assert_eq!(replay.outcome, Outcome::Reproduced, "{replay:?}");
        assert_eq!(replay.calls, 3);
        assert_eq!(replay.here.as_ref(), Some(&header.fault));
        assert!(replay.remarks[0].contains("keeps state"), "{replay:?}");
    }
}

#[test]
fn a_refusal_replays_with_what_came_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("faults");
    let sandbox = sandbox_with(&path, BundleLimits::default());
    let bytes = Guest {
        answer: Answer::Metadata { splits: 9 },
        ..Guest::default()
    }
    .component();
    let mut group = group(&sandbox, &bytes);
    Step::decodes(5).build(&mut group);
    let faults = FaultDir::open(&path, BundleLimits::default()).unwrap();
    let bundle = wait_for(&faults, 1).remove(0);
    assert_eq!(bundle.header.fault.kind, FaultKind::Refused);
    let says = "num_decode_reqs is 5, must be 0";
    assert_eq!(bundle.header.fault.message, says);
    assert!(bundle.header.metadata.is_some());
    let replay = bundle.replay().unwrap();
    assert_eq!(replay.outcome, Outcome::Reproduced, "{replay:?}");
    assert_eq!(replay.here.as_ref(), Some(&bundle.header.fault));
    assert_eq!((replay.calls, replay.same_metadata), (1, Some(true)));

    // Without the step's tensors nothing can be verified, and that is said.
    let mut without = bundle.clone();
    without.header.step = None;
    let replay = without.replay().unwrap();
    assert_eq!(replay.outcome, Outcome::DoesNotReplay);
    assert!(replay.remarks[0].contains("tensors are not in the bundle"));
    // A fault that does not happen is told apart.
    let mut other = bundle;
    other.header.fault.kind = FaultKind::Trap;
    other.header.step = None;
    let replay = other.replay().unwrap();
    assert_eq!(replay.outcome, Outcome::NotReproduced);
    assert_eq!((replay.here, replay.same_metadata), (None, Some(true)));
}

#[test]
fn kinds_that_do_not_replay_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("faults");
    let endless = Limits {
        fuel_per_call: u64::MAX / 2,
        watchdog: Duration::from_millis(100),
        watchdog_tick: Duration::from_millis(10),
        ..Limits::default()
    };
    let sandbox = Sandbox::new(endless).unwrap();
    sandbox.keep_faults_in(FaultDir::open(&path, BundleLimits::default()).unwrap());
    let guest = |build| {
        Guest {
            build,
            from_call: 3,
            ..Guest::default()
        }
        .component()
    };
    Step::decodes(2).build(&mut group(&sandbox, &guest(Act::Loop)));
    Step::decodes(2).build(&mut group(&sandbox, &guest(Act::StackOverflow)));
    let faults = FaultDir::open(&path, BundleLimits::default()).unwrap();
    let bundles = wait_for(&faults, 2);
    for (bundle, (kind, says)) in bundles.iter().zip([
        (FaultKind::Watchdog, "wall-clock time"),
        (FaultKind::StackDepth, "does not replay for certain"),
    ]) {
        assert_eq!(bundle.header.fault.kind, kind);
        let replay = bundle.replay().unwrap();
        assert_eq!(replay.outcome, Outcome::DoesNotReplay);
        assert!(
            replay.remarks.iter().any(|remark| remark.contains(says)),
            "{replay:?}"
        );
    }
}

#[test]
fn a_constructor_that_refuses_is_kept_and_replays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("faults");
    let sandbox = sandbox_with(&path, BundleLimits::default());
    let group = group(&sandbox, &Guest::default().component());
    let refuses = Guest {
        refuse_config: true,
        ..Guest::default()
    }
    .component();
    group.handle().reload(&refuses, "refuses.wasm").unwrap_err();
    let faults = FaultDir::open(&path, BundleLimits::default()).unwrap();
    let bundle = wait_for(&faults, 1).remove(0);
    assert_eq!(bundle.header.fault.kind, FaultKind::Constructor);
    assert_eq!(bundle.header.call, BuilderCall::Create);
    let replay = bundle.replay().unwrap();
    assert_eq!(replay.outcome, Outcome::Reproduced, "{replay:?}");
    assert!(replay.here.unwrap().message.contains("no such head size"));
}

#[test]
fn the_directory_is_bounded_in_files_and_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("faults");
    let bad = |splits| {
        Guest {
            answer: Answer::Metadata { splits },
            ..Guest::default()
        }
        .component()
    };
    let limits = BundleLimits {
        max_files: 3,
        max_alike: 2,
        ..BundleLimits::default()
    };
    let sandbox = sandbox_with(&path, limits);
    let faults = FaultDir::open(&path, limits).unwrap();
    let written = |n: u64| {
        let start = Instant::now();
        while sandbox.bundle_figures().unwrap().written < n {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    // Five versions, each with more faults than are kept of one kind.
    for version in 0..5_u32 {
        let mut group = group(&sandbox, &bad(9 + version));
        for fault in 0..4 {
            let start = Instant::now();
            while Step::decodes(2).build(&mut group).fault.is_none() {
                assert!(start.elapsed() < Duration::from_secs(20));
            }
            if fault < 2 {
                written(u64::from(2 * version + fault + 1));
            }
        }
    }
    let figures = sandbox.bundle_figures().unwrap();
    assert_eq!(figures.written, 10);
    assert_eq!(figures.left_out, 10, "alike");
    let left = wait_for(&faults, 3);
    assert_eq!(left.len(), 3, "the newest");
    let newest = sandbox.load(&bad(13)).unwrap().hash();
    assert_eq!(left[2].header.component, newest);

    // One file may take the whole directory, and none more than that.
    let size = std::fs::metadata(&faults.bundles().unwrap()[0])
        .unwrap()
        .len();
    let tight = BundleLimits {
        max_bytes: size + size / 2,
        ..BundleLimits::default()
    };
    let sandbox = sandbox_with(&path, tight);
    Step::decodes(2).build(&mut group(&sandbox, &bad(20)));
    let start = Instant::now();
    while sandbox.bundle_figures().unwrap().written < 1 {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(wait_for(&faults, 1).len(), 1);
    let nothing = BundleLimits {
        max_bundle_bytes: 100,
        ..BundleLimits::default()
    };
    let sandbox = sandbox_with(&path, nothing);
    Step::decodes(2).build(&mut group(&sandbox, &bad(21)));
    let start = Instant::now();
    while sandbox.bundle_figures().unwrap().failed < 1 {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(faults.bundles().unwrap().len(), 1);
}

#[test]
fn a_damaged_bundle_is_refused_wherever_it_is_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("faults");
    let sandbox = sandbox_with(&path, BundleLimits::default());
    let bytes = Guest {
        build: Act::Unreachable,
        from_call: 3,
        ..Guest::default()
    }
    .component();
    Step::decodes(3).build(&mut group(&sandbox, &bytes));
    let faults = FaultDir::open(&path, BundleLimits::default()).unwrap();
    let bundle = wait_for(&faults, 1).remove(0);
    let bytes = bundle.to_bytes().unwrap();
    assert_eq!(FaultBundle::from_bytes(&bytes).unwrap(), bundle);
    for cut in (0..bytes.len()).step_by(97) {
        let error = FaultBundle::from_bytes(&bytes[..cut]).unwrap_err();
        assert!(!error.to_string().contains('\n'), "{error}");
    }
    for at in (0..bytes.len()).step_by(61) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        FaultBundle::from_bytes(&damaged).unwrap_err();
    }
    // A header that is whole, but contradicts itself.
    let mut wild = bundle;
    if let Some(step) = &mut wild.header.step {
        step.columns = vec![u32::MAX; 3];
    }
    wild.header.fault.kind = FaultKind::Refused;
    let bytes = wild.to_bytes().unwrap();
    let error = FaultBundle::from_bytes(&bytes).unwrap().replay();
    // The component traps at its third call; before it, its metadata would be verified against the wild step.
    let text = error.unwrap_err().to_string();
    assert!(text.contains("contradicts itself"), "{text}");
}
