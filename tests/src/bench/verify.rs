//! The verifier's time. Batches are of pages of 16 tokens. "references" is FLASH_ATTN's metadata, all tensors by reference;
//! "step" is the host's own tensors, block ids included; "plan" is FLASHINFER's, with its work list.

use std::hint::black_box;

use timetable_attention::{
    Grant, Verifier, VerifyContext, plain_builder,
    types::{Family, Metadata, flashinfer},
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
    rows
}
