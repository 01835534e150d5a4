//! Micro-batches: a step that is cut in two, each part built by a builder of its own, gives what the whole step gives.

use rand::Rng;
use timetable_attention::batch::{
    GroupStep, UbatchSlice, maybe_create_ubatch_slices, pad_ubatch_slices, slice_input_batch,
    split_attn_metadata,
};
use timetable_types::Causal;

use crate::{
    scenario::{BUILDERS, Scenario, assert_close, builder_config, random_layer, serve},
    support::{bits, pick, random_rows, rng},
};

/// The parts' outputs, one after the other.
fn in_parts(
    scenario: &Scenario,
    name: &str,
    slices: &[UbatchSlice],
    parts: &[GroupStep],
) -> (Vec<f32>, Vec<f32>) {
    let cache = scenario.cache(|_, _| true);
    let (mut output, mut lse) = (Vec::new(), Vec::new());
    for (slice, part) in slices.iter().zip(parts) {
        let query = scenario.queries(slice.tokens.clone());
        let layer = &scenario.layer;
        let served = serve(
            name,
            &scenario.config,
            part,
            scenario.num_blocks,
            layer,
            &query,
            &cache,
        );
        output.extend(served.output);
        lse.extend(served.lse);
    }
    (output, lse)
}

#[test]
fn a_step_in_two_parts_gives_what_the_whole_gives() {
    let (mut worst, mut cut) = (0.0f64, 0);
    for seed in 0..60 {
        let rng = &mut rng(6_000 + seed);
        let mut layer = random_layer(rng);
        // Bit for bit where splits and the form of the kernel do not follow the batch.
        layer.batch_invariant = rng.random();
        layer.sliding_window = *pick(rng, &[None, None, Some(20)]);
        let (rows, _) = random_rows(rng, 200);
        let tokens: usize = rows.iter().map(|row| row.0).sum();
        if tokens < 2 {
            continue;
        }
        let padding = *pick(rng, &[(0, 0), (1, 1)]);
        let mut scenario = Scenario::new(rng, layer, Causal::All(true), &rows, padding);
        scenario.config = builder_config(&layer, rng.random());
        let scheduled: Vec<u32> = rows.iter().map(|row| row.0 as u32).collect();
        let split_point = rng.random_range(1..tokens);
        let slices = maybe_create_ubatch_slices(&scheduled, tokens, 2, Some(split_point));
        let padded = pad_ubatch_slices(&slices, tokens + padding.1, rows.len() + padding.0);
        cut += usize::from(slices[0].requests.end > slices[1].requests.start);
        let first = split_attn_metadata(&padded, &scenario.step).expect("two parts");
        let second: Vec<GroupStep> = padded
            .iter()
            .map(|slice| slice_input_batch(slice, &scenario.step))
            .collect();
        let expected = scenario.expected_whole();
        for name in BUILDERS {
            for (generation, parts) in [(1, &first), (2, &second)] {
                let what = format!("{name}, runner {generation}, {rows:?} at {split_point}");
                let (output, lse) = in_parts(&scenario, name, &padded, parts);
                let error = assert_close(&what, &output, &lse, &expected, layer.head_size);
                worst = worst.max(error);
                if layer.batch_invariant {
                    let whole = scenario.attend(name, &scenario.cache(|_, _| true));
                    assert_eq!(bits(&output), bits(&whole.output), "{what}");
                    assert_eq!(bits(&lse), bits(&whole.lse), "{what}");
                }
            }
        }
    }
    println!("60 steps, {cut} with a request in both parts: {worst:.1e}");
    assert!(cut > 10, "{cut}");
}
