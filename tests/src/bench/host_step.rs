//! The host's work of a step that is neither the model nor sampling.

use std::time::Instant;

use timetable_engine::{BuilderSource, Builders, StepRecord, Timeline, spans};
use timetable_types::Family;

use super::Row;
use crate::{drive, step_host};

const REQUESTS: usize = 256;
const STEPS: usize = 2000;
/// Tenants with a builder of their own: what a step may have by default.
const SEGMENTS: usize = 4;

pub(super) fn measure() -> Vec<Row> {
    let cases = [
        (
            "FLASH_ATTN",
            Family::FlashAttn,
            drive::component("flash-attn"),
            Some(100.0),
        ),
        (
            "FLASHINFER",
            Family::Flashinfer,
            drive::component("flashinfer"),
            Some(100.0),
        ),
        (
            "FLASH_ATTN, plain builder",
            Family::FlashAttn,
            BuilderSource::Plain,
            None,
        ),
    ];
    let of_tenant = |index: usize| {
        let name = format!("t{index}").parse().expect("a tenant's name");
        (name, drive::component("flash-attn"))
    };
    let tenants: Vec<_> = (0..SEGMENTS).map(of_tenant).collect();
    let apart = (
        "FLASH_ATTN, 4 tenants' builders",
        Family::FlashAttn,
        Builders {
            default: &BuilderSource::Plain,
            tenants: &tenants,
        },
        None,
    );
    let mut rows: Vec<Row> = cases
        .iter()
        .map(|(name, family, source, bar)| (*name, *family, Builders::from(source), *bar))
        .chain([apart])
        .map(|(name, family, builders, bar)| {
            let work = step_host::measure(family, builders, REQUESTS, STEPS);
            let parts = work.parts;
            let us = |ns: u64| ns as f64 / 1e3;
            Row::new(
                format!("host-step/{name}/{} decodes", work.requests),
                us(work.median_ns),
                "µs",
            )
            .at_most(bar)
            .note(format!(
                "schedule {:.1}, batch {:.1}, build {:.1}, verify {:.1}, prepare {:.1}, output {:.1}",
                us(parts.schedule_ns),
                us(parts.batch_ns),
                us(parts.build_ns),
                us(parts.verify_ns),
                us(parts.prepare_ns),
                us(parts.output_ns)
            ))
        })
        .collect();
    rows.push(spans());
    rows.push(timeline());
    rows
}

/// What a step's spans cost while nobody listens: the same calls as a step of one group makes.
fn spans() -> Row {
    const TURNS: u32 = 200_000;
    let turn = |number: u64| {
        let step = spans::step(std::hint::black_box(number));
        let in_step = step.enter();
        drop(spans::schedule());
        spans::scheduled(&step, REQUESTS, REQUESTS);
        drop(spans::batch());
        let build = spans::build(0, 0);
        drop(spans::verify());
        drop(spans::prepare());
        drop(build);
        drop(spans::submit());
        drop(in_step);
        let _in_step = step.enter();
        drop(spans::collect());
    };
    (0..1000).for_each(turn);
    let start = Instant::now();
    (0..u64::from(TURNS)).for_each(turn);
    let ns = start.elapsed().as_nanos() as f64 / f64::from(TURNS);
    Row::new("host-step/a step's spans, nobody listening", ns, "ns")
        .note("8 spans; every step above has them".to_owned())
}

/// What the timeline of a host with an admin page costs a step.
fn timeline() -> Row {
    const TURNS: u64 = 2_000_000;
    let timeline = Timeline::new(512);
    let record = |step| {
        timeline.record(&StepRecord {
            step,
            requests: REQUESTS as u64,
            ..std::hint::black_box(StepRecord::default())
        });
    };
    (1..=1000).for_each(record);
    let start = Instant::now();
    (1001..=1000 + TURNS).for_each(record);
    let ns = start.elapsed().as_nanos() as f64 / TURNS as f64;
    Row::new("host-step/a step's record in the timeline", ns, "ns")
        .at_most(Some(100.0))
        .note("only where the admin page is open".to_owned())
}
