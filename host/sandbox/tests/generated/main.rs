//! Components that nobody wrote, through the loader, the calls and the verifier: generated ones with the world's exports, and
//! real ones with damage. The host never crashes or hangs, and what passes the verifier runs on the CPU device, everything
//! that is not the request's own poisoned, and is right.
//!
//! `TIMETABLE_TEST_SEED` starts elsewhere; `TIMETABLE_SOAK=N` does N times as much.

#[allow(dead_code, reason = "it is used whole in its own test")]
#[path = "../../../device/tests/verified/bases.rs"]
mod bases;
#[path = "../../../device/tests/verified/bench.rs"]
mod bench;
#[allow(dead_code, reason = "it is used whole in its own test")]
#[path = "../../../device/tests/verified/case.rs"]
mod case;
mod guest;
mod lower;
mod mutated;
#[path = "../../../device/tests/verified/reading.rs"]
mod reading;
#[path = "../../../device/tests/verified/recurrent.rs"]
mod recurrent;

use std::{collections::BTreeMap, time::Instant};

use bases::{Base, suite};
use bench::{Bench, Verdict};
use case::{Random, seed};
use lower::{Contract, Wildness};
use timetable_attention::{BuildFault, MetadataBuilder};
use timetable_sandbox::{Component, Limits, Sandbox, WasmBuilder};
use timetable_types::{CaptureShape, Family, Metadata};

/// Modules that must have loaded and returned from `build`.
const RETURNED: u32 = 2_000;

/// What came of calls, counted.
#[derive(Default)]
pub(crate) struct Counts(BTreeMap<String, u32>);

impl Counts {
    pub(crate) fn add(&mut self, what: impl Into<String>) {
        *self.0.entry(what.into()).or_default() += 1;
    }

    pub(crate) fn of(&self, what: &str) -> u32 {
        self.0.get(what).copied().unwrap_or(0)
    }

    pub(crate) fn print(&self, title: &str, since: Instant) {
        println!("{title}, {:.1} s:", since.elapsed().as_secs_f64());
        self.0
            .iter()
            .for_each(|(what, count)| println!("  {count:6} {what}"));
    }
}

/// How many times as much as usual.
pub(crate) fn soak() -> u32 {
    let times = std::env::var("TIMETABLE_SOAK").ok();
    times.and_then(|times| times.parse().ok()).unwrap_or(1)
}

pub(crate) fn sandbox() -> Sandbox {
    let limits = Limits {
        max_instances: 256,
        ..Limits::default()
    };
    Sandbox::new(limits).expect("a sandbox")
}

/// The good records of a family, with what others are held against.
pub(crate) fn benches(bases: &[Base]) -> Vec<Bench<'_>> {
    bases.iter().map(Bench::new).collect()
}

/// Builds a step with a component, every way there is; did it return metadata, or decline, at least once?
pub(crate) fn exercise(component: &Component, bench: &mut Bench<'_>, counts: &mut Counts) -> bool {
    let case = &bench.base.case;
    let mut builder = match WasmBuilder::new(component, &case.config) {
        Ok(builder) => builder,
        Err(BuildFault::Fault { kind, .. }) => {
            counts.add(format!("not constructed: {kind}"));
            return false;
        }
        Err(BuildFault::Declined(_)) => return false,
    };
    let common = &case.step.cam;
    let shape = CaptureShape {
        num_tokens: 4,
        num_reqs: 4,
        max_query_len: 1,
        uniform_query_len: Some(1),
    };
    if builder.launch_promise(&shape).is_err() {
        counts.add("no promise");
        return false;
    }
    let mut returned = false;
    for turn in 0..3 {
        let built = match turn {
            0 => builder.build(common, false),
            1 => builder.build_for_cudagraph_capture(common),
            _ => builder.build(common, true),
        };
        match built {
            Ok(metadata) => {
                returned = true;
                judge(&metadata, bench, counts);
            }
            Err(BuildFault::Declined(_)) => {
                returned = true;
                counts.add("build declined");
            }
            Err(BuildFault::Fault { kind, .. }) => {
                counts.add(format!("build failed: {kind}"));
                break;
            }
        }
    }
    returned
}

fn judge(metadata: &Metadata, bench: &mut Bench<'_>, counts: &mut Counts) {
    match bench.verdict(metadata) {
        Verdict::Refused => counts.add("build returned, refused by the verifier"),
        Verdict::Inert => counts.add("build returned, accepted and right"),
        Verdict::Harmful(problem) => panic!("{}: {problem}: {metadata:?}", bench.base.name),
    }
}

#[test]
fn generated_modules_are_refused_or_right() {
    let random = &mut Random(seed());
    let contract = Contract::new();
    let sandbox = sandbox();
    let start = Instant::now();
    let mut counts = Counts::default();
    let families: Vec<(Family, Vec<Base>)> = Family::ALL
        .into_iter()
        .map(|family| (family, suite(family).unwrap_or_default()))
        .collect();
    let mut benches: Vec<(Family, Vec<Bench<'_>>)> = families
        .iter()
        .map(|(family, bases)| (*family, benches(bases)))
        .collect();
    let (mut made, mut returned) = (0, 0);
    while returned < RETURNED * soak() {
        made += 1;
        assert!(
            made < 4 * RETURNED * soak(),
            "only {returned} of {made} returned"
        );
        // Families with rules mostly; the others' metadata must be lifted and then refused all the same.
        let at = match random.chance(8) {
            true => random.below(benches.len()),
            false => random.below(4),
        };
        let family = benches[at].0;
        let with = if benches[at].1.is_empty() { 0 } else { at };
        let (_, of_family) = &mut benches[with];
        let bench_at = random.below(of_family.len());
        let bench = &mut of_family[bench_at];
        let good = serde_json::to_value(&bench.base.metadata).expect("it serialises");
        let good = (bench.base.metadata.family() == family && !random.chance(6)).then_some(&good);
        let wildness = random.pick(&[
            Wildness {
                values: 0,
                structure: 0,
            },
            Wildness {
                values: 300,
                structure: 0,
            },
            Wildness {
                values: 100,
                structure: 0,
            },
            Wildness {
                values: 60,
                structure: 2_000,
            },
            Wildness {
                values: 10,
                structure: 0,
            },
            Wildness {
                values: 3,
                structure: 400,
            },
        ]);
        let image = lower::lower(
            &contract,
            family.interface(),
            good,
            wildness,
            guest::RESULT,
            random,
        );
        let Some(bytes) = guest::component(&contract, family.interface(), &image, random) else {
            counts.add("no arbitrary code");
            continue;
        };
        let component = match sandbox.load(&bytes) {
            Ok(component) => component,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                counts.add("not loaded");
                continue;
            }
        };
        counts.add("loaded");
        returned += u32::from(exercise(&component, bench, &mut counts));
    }
    counts.print(
        &format!("{made} generated modules, {returned} returned from build"),
        start,
    );
    assert!(counts.of("loaded") >= RETURNED);
    assert!(counts.of("build returned, accepted and right") > 100);
    assert!(counts.of("build returned, refused by the verifier") > 1_000);
}
