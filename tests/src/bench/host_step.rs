//! The host's work of a step that is neither the model nor sampling.

use timetable_engine::BuilderSource;
use timetable_types::Family;

use super::Row;
use crate::{drive, step_host};

const REQUESTS: usize = 256;
const STEPS: usize = 2000;

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
    cases
        .iter()
        .map(|(name, family, source, bar)| {
            let work = step_host::measure(*family, source, REQUESTS, STEPS);
            let parts = work.parts;
            let us = |ns: u64| ns as f64 / 1e3;
            Row::new(
                format!("host-step/{name}/{} decodes", work.requests),
                us(work.median_ns),
                "µs",
            )
            .at_most(*bar)
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
        .collect()
}
