//! What a build costs: the embedded components in the sandbox (lowering, fuel, lifting, the result dropped), against their
//! native twins, sampled in turn in one process.

use std::hint::black_box;

use timetable_attention::MetadataBuilder;
use timetable_reference::{component, native_twin};
use timetable_sandbox::{WasmBuilder, measure::interleaved};
use timetable_types::{
    BuilderConfig, CommonAttentionMetadata, KvCacheSpecKind, MambaCacheMode, MambaSpec, MambaType,
    Metadata, flash_mla::DecodeSchedule,
};

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

/// Builders of the mixed step of 256 rows, with the bar in µs.
const MIXED: [(&str, f64); 5] = [
    ("triton-attn", 2.0),
    ("flashinfer", 25.0),
    ("flash-mla", 10.0),
    ("flash-attn-mla", 10.0),
    ("triton-mla", 10.0),
];

/// Types of layers that keep states, with the bar in µs for the mixed step of 256 rows.
const STATEFUL: [(MambaType, Option<f64>); 5] = [
    (MambaType::Mamba2, Some(15.0)),
    (MambaType::Gdn, Some(20.0)),
    (MambaType::Mamba1, None),
    (MambaType::ShortConv, None),
    (MambaType::Linear, None),
];

/// The longest context of the context plan.
const LONG_CONTEXT: u32 = 131_072;

pub(super) fn measure() -> Vec<Row> {
    let mut rows = Vec::new();
    for (name, decodes, bar) in CASES {
        let common = batch(decodes, 0, LONGEST, LONGEST / PAGE).cam;
        let case = format!("{decodes} rows");
        rows.extend(run(name, &case, &config(LONGEST), &common, bar));
    }
    for (name, bar) in MIXED {
        let mut config = config(LONGEST);
        if name.ends_with("mla") {
            latent(name, &mut config);
        }
        let common = mixed_step(256);
        rows.extend(run(name, "256 rows, mixed", &config, &common, Some(bar)));
    }
    // Tiles of an fp8 cache, which another cache leaves to the kernel: for the multiprocessors of an H100.
    let mut tiled = config(LONGEST);
    latent("flash-mla", &mut tiled);
    tiled.attention.kv_cache_dtype = "fp8".to_owned();
    tiled.device.num_workers = 132;
    let (name, case) = ("flash-mla", "256 rows, mixed, tiles of an fp8 cache");
    rows.extend(run(name, case, &tiled, &mixed_step(256), Some(10.0)));
    for (mamba_type, bar) in STATEFUL {
        let case = format!("{mamba_type:?}, 256 rows, mixed");
        let config = stateful(mamba_type);
        rows.extend(run("mamba", &case, &config, &mixed_step(256), bar));
    }
    // What grows with context and with tokens: the chunks of a context, and those of a scan.
    let mut long = config(LONG_CONTEXT + 128);
    latent("triton-mla", &mut long);
    let contexts = prefills((0..64).map(|row| (128, (row + 1) * LONG_CONTEXT as i32 / 64)));
    let case = "64 prefills to 128 k context";
    rows.extend(run("triton-mla", case, &long, &contexts, Some(200.0)));
    let mut scan = stateful(MambaType::Mamba2);
    scan.scheduler.max_num_batched_tokens = 16_384;
    let tokens = prefills((0..16).map(|row| (1_024, row * 1_000)));
    let case = "Mamba2, 16 k tokens of 16 prefills";
    rows.extend(run("mamba", case, &scan, &tokens, Some(50.0)));
    rows
}

/// One layer of DeepSeek's sizes: 16 heads on this rank, a latent of 512 with a rotary part of 64.
fn latent(name: &str, config: &mut BuilderConfig) {
    let spec = &mut config.kv_cache_spec;
    spec.kind = KvCacheSpecKind::MlaAttention;
    spec.num_kv_heads = 1;
    spec.head_size = 576;
    spec.head_size_v = 0;
    if name == "flash-mla" {
        spec.block_size = 64;
    }
    config.attention.num_heads = 16;
    config.attention.kv_lora_rank = 512;
    config.attention.qk_rope_head_dim = 64;
}

fn stateful(mamba_type: MambaType) -> BuilderConfig {
    let mut config = config(LONGEST);
    config.kv_cache_spec.kind = KvCacheSpecKind::Mamba;
    config.kv_cache_spec.mamba = Some(MambaSpec {
        mamba_type,
        cache_mode: MambaCacheMode::None,
        num_speculative_blocks: 0,
        // The gated delta net's kernels have one size.
        chunk_size: if mamba_type == MambaType::Gdn {
            64
        } else {
            256
        },
    });
    config
}

/// Decodes of 1,001 to 2,000 keys, four chunks of 512 tokens of prompts that have 2,048 already, and four prompts of 512.
fn mixed_step(rows: u32) -> CommonAttentionMetadata {
    let mut common = batch(rows - 8, 0, 1_000, 1_000 / PAGE + 1).cam;
    common
        .seq_lens_cpu_upper_bound
        .iter_mut()
        .for_each(|len| *len += 1_000);
    common.is_prefilling = vec![0; rows as usize - 8];
    let contexts = [2_048, 2_048, 2_048, 2_048, 0, 0, 0, 0];
    add_prefills(
        &mut common,
        contexts.into_iter().map(|context| (512, context)),
    );
    common
}

/// Rows of (tokens, context) that prefill.
fn prefills(rows: impl Iterator<Item = (i32, i32)>) -> CommonAttentionMetadata {
    let mut common = batch(0, 0, 1, 1).cam;
    add_prefills(&mut common, rows);
    common
}

fn add_prefills(common: &mut CommonAttentionMetadata, rows: impl Iterator<Item = (i32, i32)>) {
    for (tokens, context) in rows {
        let start = common.num_actual_tokens as i32;
        common.query_start_loc_cpu.push(start + tokens);
        common.seq_lens_cpu_upper_bound.push(tokens + context);
        common.is_prefilling.push(1);
        common.num_reqs += 1;
        common.num_actual_tokens += tokens as u32;
        common.max_query_len = common.max_query_len.max(tokens as u32);
    }
    common.slot_mapping_len = common.num_actual_tokens;
    let longest = common.seq_lens_cpu_upper_bound.iter().copied().max();
    common.max_seq_len = longest.unwrap_or(0) as u32;
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
        Metadata::FlashMla(metadata) => {
            let context = metadata
                .prefill
                .as_ref()
                .and_then(|prefill| prefill.chunked_context.as_ref());
            let chunks = context.map_or(0, |context| context.chunks.len());
            let decode = metadata.decode.as_ref();
            match decode.map(|decode| (&decode.schedule, decode.max_num_splits)) {
                Some((DecodeSchedule::Tiles(_), splits)) => {
                    format!("{splits} splits at most, {chunks} context chunks")
                }
                _ => format!("{chunks} context chunks"),
            }
        }
        _ => String::new(),
    }
}

fn run(
    name: &str,
    case: &str,
    config: &BuilderConfig,
    common: &CommonAttentionMetadata,
    bar: Option<f64>,
) -> [Row; 2] {
    let embedded = component(name).expect("an embedded component");
    let component = sandbox().load(embedded.bytes).expect("the component loads");
    let mut guest = WasmBuilder::new(&component, config).expect("the component starts");
    let mut twin = native_twin(name, config).expect("the twin starts");
    let shape = shape(&twin.build(common, false).expect("the twin builds"));
    let times = interleaved(
        ROUNDS,
        1,
        &mut [
            &mut || drop(black_box(guest.build(common, false)).expect("the component builds")),
            &mut || drop(black_box(twin.build(common, false)).expect("the twin builds")),
        ],
    );
    let limits = sandbox().limits();
    let fuel = limits.fuel_for_batch(common.num_reqs, common.num_actual_tokens);
    let used = fuel.saturating_sub(guest.fuel_left());
    let (wasm, native) = (times[0].median_ns / 1e3, times[1].median_ns / 1e3);
    let row = Row::new(format!("build/{name}/{case}"), wasm, "µs");
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
