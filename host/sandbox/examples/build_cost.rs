//! What a component's build costs bare, through a group, and with address space reserved for elided bounds checks; fuel of
//! long prefills. For any component file; the embedded ones, swaps included, are `cargo xtask bench build reload`.
//!
//! `cargo run --release -p timetable-sandbox --example build_cost -- flash-attn-builder.wasm flashinfer-builder.wasm`

#[path = "../tests/support/mod.rs"]
mod support;

use std::{convert::Infallible, time::Instant};

use timetable_attention::MetadataBuilder;
use timetable_sandbox::{
    GroupBuilder, GroupSetup, Limits, Sandbox, WasmBuilder, measure::interleaved,
};
use timetable_types::{BuilderConfig, CommonAttentionMetadata, Family, Metadata};

const ROUNDS: usize = 301;
const CALLS: u32 = 50;

/// `rows` decodes of up to 32 k tokens, and a configuration that admits them.
fn batch(rows: u32) -> (BuilderConfig, CommonAttentionMetadata) {
    let mut config = support::config();
    config.scheduler.max_num_seqs = 1024;
    config.scheduler.max_model_len = 32_768;
    config.scheduler.max_num_blocks_per_req = 2048;
    config.device.compute_capability = (9, 0);
    config.device.num_workers = 132;
    config.device.ctas_per_worker = 2;
    config.device.flash_attn_version = 3;
    config.attention.num_heads = 32;
    config.kv_cache_spec.num_kv_heads = 8;
    config.kv_cache_spec.head_size = 128;
    config.kv_cache_spec.head_size_v = 128;
    let mut common = support::decodes(rows);
    let mut state = 1_u32;
    for len in &mut common.seq_lens_cpu_upper_bound {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *len = 1 + ((state >> 8) % 32_000) as i32;
    }
    common.max_seq_len = common
        .seq_lens_cpu_upper_bound
        .iter()
        .copied()
        .max()
        .unwrap_or(0) as u32;
    common.block_table_width = 2048;
    (config, common)
}

fn main() {
    let guests: Vec<(String, Vec<u8>)> = std::env::args()
        .skip(1)
        .map(|path| {
            let bytes = std::fs::read(&path).expect("the component reads");
            (path, bytes)
        })
        // A guest that does nothing: what is left is the host's share.
        .chain([(
            "(a guest that does nothing)".to_owned(),
            support::Guest::default().component(),
        )])
        .collect();
    let small = Sandbox::new(Limits::default()).expect("a sandbox");
    let large = Limits {
        memory_reservation_bytes: 1 << 32,
        ..Limits::default()
    };
    let large = Sandbox::new(large).expect("a sandbox of 256 GiB address space");
    for (path, bytes) in guests {
        let start = Instant::now();
        let component = small.load(&bytes).expect("the component loads");
        let load_ms = start.elapsed().as_secs_f64() * 1e3;
        let start = Instant::now();
        let elided = large.load(&bytes).expect("the component loads");
        println!(
            "{path}: loads in {load_ms:.1} ms ({:.1} with elided checks)",
            start.elapsed().as_secs_f64() * 1e3
        );
        for rows in [1, 64, 256, 1024] {
            let (config, common) = batch(rows);
            let mut bare = WasmBuilder::new(&component, &config).expect("constructs");
            let mut unchecked = WasmBuilder::new(&elided, &config).expect("constructs");
            let setup = GroupSetup {
                name: "bench".into(),
                config: config.clone(),
                plain: support::Plain::boxed(),
                acceptance: None,
            };
            let mut group = (component.family() == Family::FlashAttn)
                .then(|| GroupBuilder::new(&small, setup, &component, &path).expect("a group"));
            let mut variants: Vec<&mut dyn FnMut()> = Vec::new();
            let mut build = || drop(bare.build(&common, false).expect("builds"));
            let mut build_unchecked = || drop(unchecked.build(&common, false).expect("builds"));
            let mut build_in_group = group.as_mut().map(|group| {
                || {
                    let accept = |_: &Metadata| Ok::<(), Infallible>(());
                    drop(group.build(&common, false, accept).expect("builds"));
                }
            });
            variants.push(&mut build);
            variants.push(&mut build_unchecked);
            if let Some(build_in_group) = &mut build_in_group {
                variants.push(build_in_group);
            }
            let times = interleaved(ROUNDS, CALLS, &mut variants);
            let used = small.limits().fuel_for(rows) - bare.fuel_left();
            print!("{rows:6} decodes:");
            for (name, time) in ["build", "elided bounds checks", "in a group"]
                .iter()
                .zip(&times)
            {
                print!(
                    "  {name} {:.2} µs (p99 {:.2})",
                    time.median_ns / 1e3,
                    time.p99_ns / 1e3
                );
            }
            println!("  fuel {used}");
        }
        fuel_of_prefills(&small, &component);
    }
}

/// Fuel is granted by rows; prefills of few rows and many tokens must fit as well.
fn fuel_of_prefills(sandbox: &Sandbox, component: &timetable_sandbox::Component) {
    for (tokens, context) in [(8192, 0), (2048, 28_672), (512, 32_000)] {
        let (mut config, mut common) = batch(1);
        config.scheduler.max_num_batched_tokens = 8192;
        common.num_actual_tokens = tokens;
        common.max_query_len = tokens;
        common.max_seq_len = tokens + context;
        common.slot_mapping_len = tokens;
        common.query_start_loc_cpu = vec![0, tokens as i32];
        common.seq_lens_cpu_upper_bound = vec![(tokens + context) as i32];
        common.is_prefilling = vec![1];
        let mut builder = WasmBuilder::new(component, &config).expect("constructs");
        let start = Instant::now();
        let built = builder.build(&common, false).map(drop);
        let elapsed = start.elapsed().as_nanos() as f64 / 1e3;
        let (granted, left) = (
            sandbox.limits().fuel_for_batch(1, tokens),
            builder.fuel_left(),
        );
        println!(
            "prefill of {tokens} tokens after {context}: {built:?}, {elapsed:.0} µs, fuel {} of {granted}",
            granted - left
        );
    }
}
