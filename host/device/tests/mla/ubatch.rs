//! Micro-batches: a step that is cut in two, each part built by a builder of its own, gives what the whole step gives.

use rand::Rng;
use timetable_attention::batch::{
    GroupStep, maybe_create_ubatch_slices, pad_ubatch_slices, slice_input_batch,
    split_attn_metadata,
};
use timetable_device::reference::max_relative_error;

use crate::{
    batch::{Batch, Ran, layout, sizes},
    metadata::reference,
    random::{BOUND, errors, pick, random_rows, rng},
};

#[test]
fn a_step_in_two_parts_gives_what_the_whole_gives() {
    let (mut worst, mut runs, mut cut) = (0.0f64, 0, 0);
    for seed in 0..24 {
        let rng = &mut rng(9_000 + seed);
        let mut layout = layout(sizes(pick(rng, &[1, 2, 5]), 256, 16, 64, 24), 64);
        layout.drafts = pick(rng, &[0, 1, 3]);
        let (rows, _) = random_rows(rng, 300, layout.drafts as usize);
        let tokens: usize = rows.iter().map(|row| row.0).sum();
        if tokens < 2 {
            continue;
        }
        let padding = pick(rng, &[(0, 0), (1, 1)]);
        let mut batch = Batch::new(rng, layout, &rows, padding);
        // A cache for which FLASHMLA makes a tile schedule.
        batch.ranks[0].config.attention.kv_cache_dtype = "fp8".to_owned();
        let step = &batch.ranks[0].step;
        let scheduled: Vec<u32> = rows.iter().map(|row| row.0 as u32).collect();
        let split_point = rng.random_range(1..tokens);
        let slices = maybe_create_ubatch_slices(&scheduled, tokens, 2, Some(split_point));
        let slices = pad_ubatch_slices(&slices, tokens + padding.1, rows.len() + padding.0);
        cut += usize::from(slices[0].requests.end > slices[1].requests.start);
        let first = split_attn_metadata(&slices, step).expect("two parts");
        let second: Vec<GroupStep> = slices
            .iter()
            .map(|slice| slice_input_batch(slice, step))
            .collect();
        // A cache in f32 holds what the step has written, bit for bit.
        let expected = batch.expected(0);
        let rows_of_workspace = pick(rng, &[64, 192, 4_096]);
        for name in ["flash-mla", "flash-attn-mla", "triton-mla"] {
            let whole = batch.run(&reference(&batch, name, rows_of_workspace));
            let whole: Vec<f64> = whole.output.iter().map(|&x| f64::from(x)).collect();
            for (generation, parts) in [(1, &first), (2, &second)] {
                let (mut output, mut lse) = (Vec::new(), Vec::new());
                for (slice, part) in slices.iter().zip(parts) {
                    let part = batch.cut(part.clone(), slice.tokens.clone());
                    let metadata = reference(&part, name, rows_of_workspace);
                    part.verify(0, &metadata[0]);
                    let ran = part.run(&metadata);
                    output.extend(ran.output);
                    lse.extend(ran.lse);
                }
                let size = layout.sizes.v_head_dim;
                let to_whole = max_relative_error(&output, &whole, size);
                let (error, of_lse) = errors(&Ran { output, lse }, &expected, &layout.sizes);
                worst = worst.max(error).max(to_whole);
                runs += 1;
                assert!(
                    error <= BOUND && of_lse <= BOUND && to_whole <= BOUND,
                    "{name}, runner {generation}, {rows:?} at {split_point}: {error:e}, lse {of_lse:e}, to the whole {to_whole:e}"
                );
            }
        }
    }
    println!("{runs} runs, {cut} steps with a request in both parts: {worst:.1e}");
    assert!(cut > 5, "{cut}");
}
