//! Field case 28: thousands of instances and reloads leave resident memory flat. One test, for it measures the process.
//!
//! The full numbers are 10,000 instances and 1,000 compiles; `TIMETABLE_TEST_FULL=1` asks for them, otherwise a tenth is made.

mod support;

use support::{Answer, Guest, config, decodes, resident_kib};
use timetable_attention::MetadataBuilder;
use timetable_sandbox::{Limits, Sandbox, WasmBuilder};

#[test]
fn field_case_28_resident_memory_is_flat() {
    let share = if std::env::var_os("TIMETABLE_TEST_FULL").is_some() {
        1
    } else {
        10
    };
    let (instances, compiles) = (10_000 / share, 1_000 / share);
    let sandbox = Sandbox::new(Limits::default()).unwrap();
    let bytes: Vec<_> = (1..=2)
        .map(|splits| {
            Guest {
                answer: Answer::Metadata { splits },
                ..Guest::default()
            }
            .component()
        })
        .collect();

    let make = |component: &timetable_sandbox::Component| {
        let mut builder = WasmBuilder::new(component, &config()).unwrap();
        builder.build(&decodes(64), false).unwrap();
    };
    let load_and_make = |round: usize| make(&sandbox.load(&bytes[round % 2]).unwrap());

    // Warm-up, until the pool has as many warm slots as it keeps and the allocator has met every size.
    let component = sandbox.load(&bytes[0]).unwrap();
    (0..instances / 10).for_each(|_| make(&component));
    (0..60).for_each(load_and_make);

    let before = resident_kib();
    (0..instances).for_each(|_| make(&component));
    let after_instances = resident_kib();
    (0..compiles).for_each(load_and_make);
    let after_compiles = resident_kib();
    println!(
        "resident: {before} KiB; after {instances} instances {after_instances} KiB; after {compiles} compiles \
         {after_compiles} KiB"
    );
    for after in [after_instances, after_compiles] {
        assert!(
            after * 100 <= before * 105,
            "resident memory grew from {before} KiB to {after} KiB"
        );
    }
}
