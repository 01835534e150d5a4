//! The host's work of a step that is not the model, 256 decodes. Prints one JSON object a line: name, value, unit.
//!
//! Run: `cargo bench -p timetable-tests --bench step_host`

use timetable_engine::BuilderSource;
use timetable_tests::{drive, step_host};
use timetable_types::Family;

fn main() {
    let cases = [
        (
            "flash_attn",
            Family::FlashAttn,
            drive::component("flash-attn"),
        ),
        (
            "flashinfer",
            Family::Flashinfer,
            drive::component("flashinfer"),
        ),
        ("flash_attn_plain", Family::FlashAttn, BuilderSource::Plain),
    ];
    for (name, family, source) in cases {
        let work = step_host::measure(family, &source, 256, 2000);
        let value = work.median_ns as f64 / 1000.0;
        let parts = work.parts;
        println!(
            "{{\"name\":\"step_host_work/{name}/{}\",\"value\":{value:.1},\"unit\":\"us\",\"schedule_ns\":{},\"batch_ns\":{},\
             \"build_ns\":{},\"verify_ns\":{},\"prepare_ns\":{},\"output_ns\":{}}}",
            work.requests,
            parts.schedule_ns,
            parts.batch_ns,
            parts.build_ns,
            parts.verify_ns,
            parts.prepare_ns,
            parts.output_ns
        );
    }
}
