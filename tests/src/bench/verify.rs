//! The verifier's time. Batches are of pages of 16 tokens. "references" is FLASH_ATTN's metadata, all tensors by reference;
//! "step" is the host's own tensors, block ids included; "plan" is FLASHINFER's, with its work list. "by value" are records with
//! 65,536 entries of one kind.

use std::hint::black_box;

use timetable_attention::{
    Grant, Verifier, VerifyContext,
    batch::GroupStep,
    plain_builder,
    types::{
        BuilderConfig, Family, Metadata, MmDocRange, PageSelection, RowRange, Tensor,
        flash_attn::TileOrder, flashinfer,
    },
    verify_step,
};
use timetable_sandbox::measure::interleaved;

use super::{
    Row,
    batches::{NUM_BLOCKS, PAGE, batch, config},
};

const ROUNDS: usize = 301;
const CALLS: u32 = 32;

/// FLASHINFER with each decode in chunks of `chunk` keys.
fn planned(metadata: &mut Metadata, chunk: u32) -> usize {
    let Metadata::Flashinfer(record) = metadata else {
        return 0;
    };
    let Some(flashinfer::Decode::Wrapper(plan)) = &mut record.decode else {
        return 0;
    };
    let work = &mut plan.work;
    work.kv_chunk_size = chunk;
    work.request_indices.clear();
    work.kv_tile_indices.clear();
    work.merge_indptr = vec![0];
    for (row, &len) in plan.seq_lens.iter().enumerate() {
        for part in 0..(len as u32).div_ceil(chunk) {
            work.request_indices.push(row as i32);
            work.kv_tile_indices.push(part as i32);
        }
        work.merge_indptr.push(work.request_indices.len() as i32);
    }
    let items = work.request_indices.len();
    work.qo_tile_indices = vec![0; items];
    work.worker_indptr = (0..=264)
        .map(|worker| (worker * items / 264) as i32)
        .collect();
    work.split_kv = true;
    items
}

pub(super) fn measure() -> Vec<Row> {
    let mut verifier = Verifier::new();
    let mut rows = Vec::new();
    for (name, decodes, prefill, longest, bar) in [
        ("256 decodes to 2k", 256, 0, 2_048u32, Some(2.0)),
        ("256 decodes to 32k", 256, 0, 32_768, Some(2.0)),
        ("8,192 tokens mixed", 200, 7_992, 2_048, Some(15.0)),
        ("1,024 decodes to 2k", 1_024, 0, 2_048, None),
    ] {
        let max_model_len = u32::max(longest, prefill).next_power_of_two();
        let config = config(max_model_len);
        let step = batch(decodes, prefill, longest, max_model_len / PAGE);
        let inputs = step.tensors.inputs();
        let ctx = VerifyContext {
            config: &config,
            common: &step.cam,
            inputs: &inputs,
            promise: None,
            grant: Grant::Exact,
            num_blocks: NUM_BLOCKS,
        };
        let ids: u32 = step
            .tensors
            .seq_lens
            .iter()
            .map(|&len| (len as u32).div_ceil(PAGE))
            .sum();
        let mut plain = plain_builder(Family::FlashAttn, &config).expect("plain");
        let references = plain.build(&step.cam, false).expect("built");
        let mut plain = plain_builder(Family::Flashinfer, &config).expect("plain");
        let mut plan = plain.build(&step.cam, false).expect("built");
        let items = planned(&mut plan, 512);
        verify_step(&ctx).expect("a good step");
        for metadata in [&references, &plan] {
            verifier.verify(metadata, &ctx).expect("good metadata");
        }
        // One verifier: in a step it is used by each group in turn.
        let times = {
            let verifier = std::cell::RefCell::new(&mut verifier);
            let verify = |metadata: &Metadata| {
                black_box(verifier.borrow_mut().verify(black_box(metadata), &ctx)).expect("good");
            };
            interleaved(
                ROUNDS,
                CALLS,
                &mut [
                    &mut || verify(&references),
                    &mut || black_box(verify_step(black_box(&ctx))).expect("good"),
                    &mut || verify(&plan),
                ],
            )
        };
        let row = |kind: &str, index: usize| {
            let time = times[index];
            Row::new(format!("verify/{kind}/{name}"), time.median_ns / 1e3, "µs")
                .note(format!("p99 {:.2}", time.p99_ns / 1e3))
        };
        rows.push(row("references", 0).at_most(bar));
        rows.push(row("step", 1).note(format!("{ids} block ids")));
        rows.push(row("plan", 2).note(format!("{items} decode items")));
    }
    rows.extend(by_value());
    rows
}

/// Entries of each kind.
const ENTRIES: u32 = 65_536;

/// A record with many entries.
struct ByValue {
    what: &'static str,
    config: BuilderConfig,
    step: GroupStep,
    metadata: Metadata,
    bar: Option<f64>,
}

fn by_value() -> Vec<Row> {
    let mut verifier = Verifier::new();
    let mut rows = Vec::new();
    for case in [columns(), schedule(), spans(), items()] {
        let inputs = case.step.tensors.inputs();
        let ctx = VerifyContext {
            config: &case.config,
            common: &case.step.cam,
            inputs: &inputs,
            promise: None,
            grant: Grant::Subset,
            num_blocks: NUM_BLOCKS,
        };
        let mut verify = || {
            black_box(verifier.verify(black_box(&case.metadata), &ctx)).expect("good metadata");
        };
        verify();
        let time = interleaved(ROUNDS, 4, &mut [&mut verify])[0];
        let row = Row::new(
            format!("verify/by value/{}", case.what),
            time.median_ns / 1e3,
            "µs",
        );
        let note = format!("{ENTRIES} entries, p99 {:.2}", time.p99_ns / 1e3);
        rows.push(row.note(note).at_most(case.bar));
    }
    rows
}

fn built(family: Family, config: &BuilderConfig, step: &GroupStep) -> Metadata {
    let mut plain = plain_builder(family, config).expect("plain");
    plain.build(&step.cam, false).expect("built")
}

/// 256 decodes of 257 pages, of which all but the second are attended to.
fn columns() -> ByValue {
    let (rows, pages) = (256, ENTRIES / 256 + 1);
    let config = config(8_192);
    let mut step = batch(rows, 0, 1, 512);
    let len = (pages * PAGE) as i32;
    step.tensors.seq_lens.fill(len);
    step.cam.seq_lens_cpu_upper_bound.fill(len);
    step.cam.max_seq_len = len as u32;
    let mut metadata = built(Family::Flashinfer, &config, &step);
    if let Metadata::Flashinfer(record) = &mut metadata
        && let Some(flashinfer::Decode::Wrapper(plan)) = &mut record.decode
    {
        let chosen = (0..pages).filter(|column| *column != 1);
        plan.paged_kv_indices = Tensor::SelectPages(PageSelection {
            rows: RowRange {
                start: 0,
                end: rows,
            },
            columns: (0..rows).flat_map(|_| chosen.clone()).collect(),
        });
        plan.paged_kv_indptr = (0..=rows).map(|row| (row * (pages - 1)) as i32).collect();
        plan.seq_lens.fill(((pages - 1) * PAGE) as i32);
    }
    ByValue {
        what: "column indexes",
        config,
        step,
        metadata,
        bar: Some(10.0),
    }
}

/// 32,768 rows: far more than a step has, each with its splits and its place in the order.
fn schedule() -> ByValue {
    let rows = ENTRIES / 2;
    let config = config(16);
    let step = batch(rows, 0, 16, 1);
    let mut metadata = built(Family::FlashAttn, &config, &step);
    if let Metadata::FlashAttn(record) = &mut metadata {
        record.schedule.max_num_splits = 2;
        record.schedule.num_splits = (0..rows as i32).map(|row| 1 + row % 2).collect();
        record.schedule.tile_order = TileOrder::Rows((0..rows as i32).rev().collect());
    }
    ByValue {
        what: "splits and order",
        config,
        step,
        metadata,
        bar: None,
    }
}

/// One prompt of 32,768 tokens, a span over each half.
fn spans() -> ByValue {
    let tokens = ENTRIES / 2;
    let config = config(tokens);
    let mut step = batch(0, tokens, 1, tokens / PAGE);
    let half = |start| MmDocRange {
        row: 0,
        start,
        end: start + tokens / 2 - 1,
    };
    step.cam.mm_req_doc_ranges = vec![half(0), half(tokens / 2)];
    let metadata = built(Family::FlashAttn, &config, &step);
    ByValue {
        what: "spans of tokens",
        config,
        step,
        metadata,
        bar: Some(10.0),
    }
}

/// 256 decodes in chunks of a page, to 64 each: 16,384 items of four entries.
fn items() -> ByValue {
    let config = config(1_024);
    let mut step = batch(256, 0, 1, 64);
    step.tensors.seq_lens.fill(1_024);
    step.cam.seq_lens_cpu_upper_bound.fill(1_024);
    step.cam.max_seq_len = 1_024;
    let mut metadata = built(Family::Flashinfer, &config, &step);
    planned(&mut metadata, PAGE);
    ByValue {
        what: "work items",
        config,
        step,
        metadata,
        bar: Some(10.0),
    }
}
