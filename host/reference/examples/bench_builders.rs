//! What a build costs: the embedded components in the sandbox (lowering, fuel, lifting), against their native twins, sampled
//! in turn in one process.
//!
//! `cargo run --release -p timetable-reference --example bench_builders`

#[path = "../tests/support/mod.rs"]
mod support;

use std::{hint::black_box, time::Instant};

use support::{batch, config};
use timetable_attention::MetadataBuilder;
use timetable_reference::{component, native_twin};
use timetable_sandbox::{Limits, Sandbox, WasmBuilder};
use timetable_types::Metadata;

const WARM_UP: usize = 200;

/// Median and 99th percentile.
fn quantiles(samples: &mut [u64]) -> (f64, f64) {
    samples.sort_unstable();
    (
        samples[samples.len() / 2] as f64 / 1e3,
        samples[samples.len() * 99 / 100] as f64 / 1e3,
    )
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

fn measure(sandbox: &Sandbox, name: &str, rows: usize, rounds: usize) {
    let config = config();
    let embedded = component(name).expect("an embedded component");
    let component = sandbox.load(embedded.bytes).expect("the component loads");
    let mut guest = WasmBuilder::new(&component, &config).expect("the component starts");
    let mut twin = native_twin(name, &config).expect("the twin starts");
    let common = batch(rows, 0, 11);
    let fuel = sandbox.limits().fuel_for(rows as u32);
    let (mut wasm, mut native) = (Vec::with_capacity(rounds), Vec::with_capacity(rounds));
    for round in 0..rounds + WARM_UP {
        let start = Instant::now();
        let built = black_box(guest.build(&common, false));
        let elapsed = start.elapsed().as_nanos() as u64;
        drop(built);
        let start = Instant::now();
        let built = black_box(twin.build(&common, false));
        let twin_elapsed = start.elapsed().as_nanos() as u64;
        drop(built);
        if round >= WARM_UP {
            wasm.push(elapsed);
            native.push(twin_elapsed);
        }
    }
    let used = fuel.saturating_sub(guest.fuel_left());
    let ((wasm, wasm_p99), (native, _)) = (quantiles(&mut wasm), quantiles(&mut native));
    let shape = twin
        .build(&common, false)
        .map(|metadata| shape(&metadata))
        .unwrap_or_default();
    println!(
        "{name:24} {rows:5} decodes: wasm {wasm:7.2} µs (p99 {wasm_p99:7.2}), native {native:7.2} µs, ratio {:5.2}, \
         fuel {used:7}; {shape}",
        wasm / native,
    );
}

fn main() {
    let sandbox = Sandbox::new(Limits::default()).expect("the sandbox starts");
    for (name, rounds) in [
        ("flash-attn", 5000),
        ("flash-attn-fixed-split", 5000),
        ("flashinfer", 3000),
    ] {
        for rows in [1, 64, 256, 1024] {
            measure(&sandbox, name, rows, rounds);
        }
    }
}
