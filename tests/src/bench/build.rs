//! What a build costs: the embedded components in the sandbox (lowering, fuel, lifting, the result dropped), against their
//! native twins, sampled in turn in one process.

use std::hint::black_box;

use timetable_attention::MetadataBuilder;
use timetable_reference::{component, native_twin};
use timetable_sandbox::{WasmBuilder, measure::interleaved};
use timetable_types::Metadata;

use super::{
    Row,
    batches::{PAGE, batch, config},
};
use crate::drive::sandbox;

/// Samples of one call each.
const ROUNDS: usize = 4000;
const LONGEST: u32 = 32_768;

/// Builder and rows, with the bar in µs where there is one.
const CASES: [(&str, u32, Option<f64>); 9] = [
    ("flash-attn", 1, None),
    ("flash-attn", 256, Some(2.0)),
    ("flash-attn", 1024, Some(5.0)),
    ("flash-attn-fixed-split", 1, None),
    ("flash-attn-fixed-split", 256, None),
    ("flash-attn-fixed-split", 1024, None),
    ("flashinfer", 1, None),
    ("flashinfer", 256, Some(12.0)),
    ("flashinfer", 1024, Some(40.0)),
];

pub(super) fn measure() -> Vec<Row> {
    CASES
        .iter()
        .flat_map(|&(name, rows, bar)| run(name, rows, bar))
        .collect()
}

fn shape(metadata: &Metadata) -> String {
    match metadata {
        Metadata::FlashAttn(metadata) => {
            format!("{} splits at most", metadata.schedule.max_num_splits)
        }
        Metadata::Flashinfer(metadata) => match &metadata.decode {
            Some(timetable_types::flashinfer::Decode::Wrapper(plan)) => {
                format!(
                    "{} items, chunk {}",
                    plan.work.request_indices.len(),
                    plan.work.kv_chunk_size
                )
            }
            _ => String::new(),
        },
        _ => String::new(),
    }
}

fn run(name: &str, rows: u32, bar: Option<f64>) -> [Row; 2] {
    let config = config(LONGEST);
    let embedded = component(name).expect("an embedded component");
    let component = sandbox().load(embedded.bytes).expect("the component loads");
    let mut guest = WasmBuilder::new(&component, &config).expect("the component starts");
    let mut twin = native_twin(name, &config).expect("the twin starts");
    let common = batch(rows, 0, LONGEST, LONGEST / PAGE).cam;
    let shape = shape(&twin.build(&common, false).expect("the twin builds"));
    let times = interleaved(
        ROUNDS,
        1,
        &mut [
            &mut || drop(black_box(guest.build(&common, false)).expect("the component builds")),
            &mut || drop(black_box(twin.build(&common, false)).expect("the twin builds")),
        ],
    );
    let fuel = sandbox().limits().fuel_for(rows);
    let used = fuel.saturating_sub(guest.fuel_left());
    let (wasm, native) = (times[0].median_ns / 1e3, times[1].median_ns / 1e3);
    let row = Row::new(format!("build/{name}/{rows} rows"), wasm, "µs");
    [
        row.clone().at_most(bar).note(format!(
            "p99 {:.2}, fuel {used} of {fuel}; {shape}",
            times[0].p99_ns / 1e3
        )),
        Row {
            name: format!("{}, against native", row.name),
            ..row.against(native, format!("native twin, {native:.2} µs"))
        },
    ]
}
