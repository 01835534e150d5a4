//! Drafts: each decode verifies a few tokens, and the lengths that the host knows are bounds of those on the device.

use rand::Rng;
use timetable_types::Causal;

use crate::{
    scenario::{Scenario, assert_close, builder_config, random_layer},
    support::{pick, rng},
};

/// Field case 23: drafts that were rejected shorten the lengths on the device; builders see the host's bounds, and no key behind
/// a length is read.
#[test]
fn field_case_23_lengths_after_rejection_are_the_devices() {
    let mut worst = 0.0f64;
    for seed in 0..40 {
        let rng = &mut rng(40_000 + seed);
        let layer = random_layer(rng);
        let drafts = rng.random_range(1..=4usize);
        let rows: Vec<(usize, usize)> = (0..rng.random_range(1..=6))
            .map(|_| (1 + drafts, rng.random_range(1 + 2 * drafts..200)))
            .collect();
        let padding = *pick(rng, &[(0, 0), (1, 2)]);
        let mut scenario = Scenario::new(rng, layer, Causal::All(true), &rows, padding);
        scenario.config = builder_config(&layer, rng.random());
        scenario.config.scheduler.num_speculative_tokens = drafts as u32;
        // What the step before rejected is known on the device only.
        for len in &mut scenario.step.tensors.seq_lens[..rows.len()] {
            *len -= rng.random_range(0..=drafts) as i32;
        }
        let lens = scenario.step.tensors.seq_lens.clone();
        assert!(
            lens.iter()
                .zip(&scenario.step.cam.seq_lens_cpu_upper_bound)
                .all(|(len, bound)| len <= bound)
        );
        let expected = scenario.expected_whole();
        let cache = scenario.cache(|row, key| key < lens[row] as usize);
        // FLASHINFER plans from the host's lengths: its engine runs one step at a time, so that they are exact.
        for name in ["flash-attn", "flash-attn-fixed-split", "triton-attn"] {
            let served = scenario.attend(name, &cache);
            let what = format!("{name}, {drafts} drafts, {rows:?}, {lens:?}");
            let error = assert_close(
                &what,
                &served.output,
                &served.lse,
                &expected,
                layer.head_size,
            );
            worst = worst.max(error);
        }
    }
    println!("40 steps: {worst:.1e}");
}
