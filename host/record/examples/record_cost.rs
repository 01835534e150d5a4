//! What a recorder costs the step thread, beside the build of the same steps, and how many bytes a step takes.

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::Duration;

use support::{Host, component};
use timetable_record::{RecorderOptions, record};
use timetable_sandbox::{Limits, Sandbox};
use timetable_types::Family;

const STEPS: usize = 2000;

fn main() {
    println!("{STEPS} steps each, requests of up to 1,023 tokens; times in µs, p50 / p99");
    for family in [Family::FlashAttn, Family::Flashinfer] {
        for rows in [1, 64, 256] {
            let scratch = tempfile::tempdir().expect("a temporary directory");
            let sandbox = Sandbox::new(Limits::default()).expect("a sandbox");
            let (mut recorder, handle) = record(
                &scratch.path().join("recording"),
                &Limits::default(),
                RecorderOptions::default(),
            )
            .expect("a recording");
            let mut host = Host::new(&sandbox, component(family), "slot/0", &[], rows);
            let mut builds = Vec::new();
            for step in 0..STEPS {
                host.step(&mut recorder);
                builds.extend(host.served.drain(..).map(|served| served.built.build_time));
                // As fast as the writer: a host's steps are slower.
                while handle.figures().written + handle.figures().left_out < step as u64 {
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
            let mut observe = std::mem::take(&mut host.observe);
            let figures = handle.finish();
            println!(
                "{:<11} {rows:>4} rows: record {}, build {}; {} bytes a step, {} left out",
                family.interface(),
                quantiles(&mut observe),
                quantiles(&mut builds),
                figures.bytes / figures.written.max(1),
                figures.left_out
            );
        }
    }
}

fn quantiles(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let at = |q: f64| times[((times.len() - 1) as f64 * q) as usize].as_nanos() as f64 / 1e3;
    format!("{:.1} / {:.1}", at(0.5), at(0.99))
}
