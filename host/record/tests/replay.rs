//! Replaying: the recorded builders build what they built; another one is told apart by meaning and by cost.

mod support;

use std::path::Path;

use support::{Host, component, recorder};
use timetable_attention::Grant;
use timetable_record::{
    Candidate, Recording, ReplayError, ReplayOptions, ReplayReport, Verdict, replay,
};
use timetable_sandbox::{Limits, Sandbox};
use timetable_types::Family;

/// A component, its slot's name, and its options.
type Slot<'a> = (&'a [u8], &'static str, &'a [(&'a str, &'a str)]);

/// Records `steps` steps of a slot for each of `slots`.
fn record(path: &Path, slots: &[Slot<'_>], steps: usize) {
    let sandbox = Sandbox::new(Limits::default()).unwrap();
    let (mut recorder, handle) = recorder(path);
    let mut hosts: Vec<Host> = slots
        .iter()
        .map(|(bytes, name, options)| Host::new(&sandbox, bytes, name, options, 12))
        .collect();
    for _ in 0..steps {
        hosts.iter_mut().for_each(|host| host.step(&mut recorder));
    }
    assert_eq!(handle.finish().left_out, 0);
}

const ALONE: ReplayOptions<'_> = ReplayOptions {
    candidate: None,
    group: None,
    limit: None,
    max_differences: 5,
};

fn run(path: &Path, options: &ReplayOptions<'_>) -> ReplayReport {
    replay(&Recording::open(path).unwrap(), options, |_| {}).unwrap()
}

fn candidate(bytes: &[u8], options: &[(&str, &str)]) -> Candidate {
    let options: Vec<(String, String)> = options
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect();
    Candidate {
        bytes: bytes.to_vec(),
        origin: "new.wasm".to_owned(),
        options: (!options.is_empty()).then_some(options),
        grant: None,
    }
}

#[test]
fn the_recorded_builders_build_the_same_bits() {
    let scratch = tempfile::tempdir().unwrap();
    record(
        scratch.path().join("r").as_path(),
        &[
            (component(Family::FlashAttn), "FLASH_ATTN/0", &[]),
            (component(Family::Flashinfer), "FLASHINFER/1@a", &[]),
        ],
        50,
    );
    let path = scratch.path().join("r");
    let report = run(&path, &ALONE);
    assert!(report.reproduced(), "{report:?}");
    assert_eq!((report.steps, report.plain_steps), (100, 0));
    assert_eq!(report.recorded.identical, 100);
    assert_eq!(report.digest, report.recorded_digest);
    assert_eq!(report.slots["FLASHINFER/1@a"], 50);
    let cost = &report.recorded.cost;
    assert!(cost.calls == 100 && cost.fuel_p50 > Some(0) && cost.build_p99_ns > Some(0));
    assert_eq!(run(&path, &ALONE).digest, report.digest);

    let of = |group, limit| {
        let options = ReplayOptions {
            group,
            limit,
            ..ALONE
        };
        run(&path, &options).steps
    };
    assert_eq!(of(Some("FLASHINFER"), None), 50);
    assert_eq!(of(Some("FLASHINFER/1"), None), 50);
    assert_eq!(of(Some("FLASH_ATTN/0"), Some(7)), 7);
    let nothing = ReplayOptions {
        group: Some("FLASH"),
        ..ALONE
    };
    let error = replay(&Recording::open(&path).unwrap(), &nothing, |_| {}).unwrap_err();
    assert!(matches!(error, ReplayError::Nothing { .. }), "{error}");
    assert!(error.to_string().contains("FLASH_ATTN/0 (`flash-attn`)"));
}

#[test]
fn faults_that_were_recorded_happen_again() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("r");
    let chaos = timetable_reference::chaos(Family::FlashAttn).unwrap();
    let wild: &[(&str, &str)] = &[
        ("chaos", "wild"),
        ("chaos-field", "max_query_len"),
        ("chaos-min-rows", "9"),
    ];
    let trap: &[(&str, &str)] = &[("chaos", "trap"), ("chaos-min-rows", "9")];
    record(
        &path,
        &[(chaos, "FLASH_ATTN/0", wild), (chaos, "FLASH_ATTN/1", trap)],
        20,
    );
    let report = run(&path, &ALONE);
    assert!(report.reproduced(), "{report:?}");
    assert!(report.recorded_faults["trap"] > 0 && report.recorded_faults["refused"] > 0);
    assert_eq!(
        report.faults_again,
        report.recorded_faults.values().sum::<u64>()
    );
    assert_eq!(report.plain_steps, 40);
}

#[test]
fn another_builder_is_compared_in_meaning_and_in_cost() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("r");
    record(
        &path,
        &[(component(Family::FlashAttn), "FLASH_ATTN/0", &[])],
        30,
    );
    let tried = |candidate: &Candidate| {
        let options = ReplayOptions {
            candidate: Some(candidate),
            ..ALONE
        };
        let report = run(&path, &options);
        assert!(report.reproduced(), "the recorded one is not affected");
        report
    };
    let same = tried(&candidate(component(Family::FlashAttn), &[]));
    assert_eq!(same.candidate.as_ref().unwrap().identical, 30);
    assert_eq!(same.candidate_digest.as_ref(), Some(&same.digest));

    let fixed = timetable_reference::component("flash-attn-fixed-split").unwrap();
    let fixed = tried(&candidate(fixed.bytes, &[]));
    let of = fixed.candidate.unwrap();
    assert!(of.same_meaning > 0, "{of:?}");
    assert_eq!(of.same_meaning + of.identical, 30);
    assert_ne!(fixed.candidate_digest.unwrap(), fixed.digest);
    assert!(of.cost.calls == 30 && of.cost.fuel > 0);

    let chaos = timetable_reference::chaos(Family::FlashAttn).unwrap();
    let wild = tried(&candidate(
        chaos,
        &[("chaos", "wild"), ("chaos-field", "max_query_len")],
    ));
    let of = wild.candidate.unwrap();
    assert_eq!(of.refused, 30, "{of:?}");
    assert_eq!(of.differences.len(), 5, "the first are told");
    assert_eq!(of.differences[0].verdict, Verdict::Refused);
    assert!(of.differences[0].what.contains("max_query_len"));

    let trap = tried(&candidate(chaos, &[("chaos", "trap")]));
    assert_eq!(trap.candidate.unwrap().faults["trap"], 30);

    let other = candidate(component(Family::Flashinfer), &[]);
    let options = ReplayOptions {
        candidate: Some(&other),
        ..ALONE
    };
    let error = replay(&Recording::open(&path).unwrap(), &options, |_| {}).unwrap_err();
    assert!(
        error.to_string().contains("builds for `flashinfer`"),
        "{error}"
    );
    let nothing = candidate(b"\0asm", &[]);
    let options = ReplayOptions {
        candidate: Some(&nothing),
        ..ALONE
    };
    let error = replay(&Recording::open(&path).unwrap(), &options, |_| {}).unwrap_err();
    assert!(matches!(error, ReplayError::Candidate { .. }), "{error}");
}

#[test]
fn a_builder_that_leaves_keys_out_is_refused_or_differs_as_it_is_granted() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("r");
    record(
        &path,
        &[(component(Family::Flashinfer), "FLASHINFER/0", &[])],
        100,
    );
    let recording = Recording::open(&path).unwrap();
    let window_sink = timetable_reference::component("flashinfer-window-sink").expect("embedded");
    let bytes = window_sink.bytes;
    let tried = |grant| {
        let candidate = Candidate {
            grant: Some(grant),
            ..candidate(bytes, &[("sink", "16"), ("window", "32")])
        };
        let options = ReplayOptions {
            candidate: Some(&candidate),
            ..ALONE
        };
        let report = replay(&recording, &options, |_| {}).unwrap();
        report.candidate.unwrap()
    };
    let exact = tried(Grant::Exact);
    assert!(exact.refused > 50, "{exact:?}");
    assert!(exact.differences[0].what.contains("grant"), "{exact:?}");
    let subset = tried(Grant::Subset);
    assert_eq!(subset.refused, 0, "{subset:?}");
    assert!(subset.different > 50, "{subset:?}");
    assert_eq!(
        subset.different + subset.same_meaning + subset.identical,
        100
    );
    assert_eq!(subset.differences[0].verdict, Verdict::Different);
    assert!(
        subset.differences[0].what.contains("left out"),
        "{subset:?}"
    );
}
