//! What a build costs: the embedded components in the sandbox (lowering, fuel, lifting, the result dropped), against their
//! native twins, sampled in turn in one process.

use std::hint::black_box;

use timetable_attention::MetadataBuilder;
use timetable_reference::{component, native_twin};
use timetable_sandbox::{WasmBuilder, measure::interleaved};
use timetable_types::{
    BuilderConfig, CommonAttentionMetadata, KvCacheSpecKind, MambaCacheMode, MambaSpec, MambaType,
    Metadata,
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

/// Types of layers that keep states, with the bar in µs for the mixed step of 256 rows.
const STATEFUL: [(MambaType, Option<f64>); 5] = [
    (MambaType::Mamba2, Some(15.0)),
    (MambaType::Gdn, Some(20.0)),
    (MambaType::Mamba1, None),
    (MambaType::ShortConv, None),
    (MambaType::Linear, None),
];

pub(super) fn measure() -> Vec<Row> {
    let decodes = CASES.iter().flat_map(|&(name, rows, bar)| {
        let common = batch(rows, 0, LONGEST, LONGEST / PAGE).cam;
        run(
            name,
            &format!("{rows} rows"),
            &config(LONGEST),
            &common,
            bar,
        )
    });
    let mixed = STATEFUL.iter().flat_map(|&(mamba_type, bar)| {
        let mut config = config(LONGEST);
        config.kv_cache_spec.kind = KvCacheSpecKind::Mamba;
        config.kv_cache_spec.mamba = Some(MambaSpec {
            mamba_type,
            cache_mode: MambaCacheMode::None,
            num_speculative_blocks: 0,
            chunk_size: 256,
        });
        let case = format!("{mamba_type:?}, 256 rows, mixed");
        run("mamba", &case, &config, &mixed_step(256), bar)
    });
    decodes.chain(mixed).collect()
}

/// Decodes, four chunks of 512 tokens of prompts that have 2,048 already, and four prompts of 512.
fn mixed_step(rows: u32) -> CommonAttentionMetadata {
    let mut common = batch(rows - 8, 0, 2_000, 2_000 / PAGE).cam;
    common
        .seq_lens_cpu_upper_bound
        .iter_mut()
        .for_each(|len| *len += 1_000);
    common.is_prefilling = vec![0; rows as usize - 8];
    for context in [2_048, 2_048, 2_048, 2_048, 0, 0, 0, 0] {
        let start = common.num_actual_tokens as i32;
        common.query_start_loc_cpu.push(start + 512);
        common.seq_lens_cpu_upper_bound.push(512 + context);
        common.is_prefilling.push(1);
        common.num_reqs += 1;
        common.num_actual_tokens += 512;
    }
    common.max_query_len = 512;
    common.max_seq_len = 3_000;
    common
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
