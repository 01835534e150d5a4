//! KV-sharing fast prefill: trailing layers compute only the tokens whose logits are wanted, and get for them what the whole step
//! gives.

use rand::Rng;
use timetable_attention::batch::{arm_fast_prefill, make_kv_sharing_fast_prefill_step};
use timetable_types::Causal;

use crate::{
    scenario::{BUILDERS, Scenario, assert_close, builder_config, random_layer, serve},
    support::{bits, random_rows, rng},
};

#[test]
fn the_wanted_tokens_get_what_the_whole_step_gives() {
    let (mut worst, mut armed_steps) = (0.0f64, 0);
    for seed in 0..60 {
        let rng = &mut rng(8_000 + seed);
        let mut layer = random_layer(rng);
        layer.batch_invariant = rng.random();
        let (rows, _) = random_rows(rng, 200);
        let mut scenario = Scenario::new(rng, layer, Causal::All(true), &rows, (0, 0));
        scenario.config = builder_config(&layer, rng.random());
        // The last token of each request, or its last few; none of a prompt that goes on.
        let starts = scenario.step.tensors.query_start_loc.clone();
        let mut wanted = Vec::new();
        for (row, &(query, _)) in rows.iter().enumerate() {
            let last = rng.random_range(usize::from(row == 0)..=query.min(3)) as i32;
            wanted.extend(starts[row + 1] - last..starts[row + 1]);
        }
        let prefills = rows.iter().any(|row| row.0 > 1);
        let Some((padded, armed)) =
            arm_fast_prefill(&wanted, &starts, &[4, 8, 16, 32], prefills, false)
        else {
            assert!(!prefills);
            continue;
        };
        scenario.step.tensors.logits_indices_padded = Some(padded);
        scenario.step.cam.fast_prefill = Some(armed);
        let mut step = make_kv_sharing_fast_prefill_step(&scenario.step).expect("it is armed");
        // These layers read another's cache and write nothing.
        step.tensors.slot_mapping.fill(-1);
        armed_steps += 1;
        let cache = scenario.cache(|_, _| true);
        let mut expected = scenario.expected_whole();
        let width = layer.num_heads * layer.head_size;
        let tokens: Vec<usize> = wanted.iter().map(|&token| token as usize).collect();
        let rows_of = |all: &[f64], width: usize| -> Vec<f64> {
            let of = tokens
                .iter()
                .flat_map(|&token| &all[token * width..(token + 1) * width]);
            of.copied().collect()
        };
        expected.output = rows_of(&expected.output, width);
        expected.lse = rows_of(&expected.lse, layer.num_heads);
        let query = scenario.queries(tokens.iter().copied());
        for name in BUILDERS {
            let what = format!("{name}, {rows:?}, {wanted:?}");
            let served = serve(
                name,
                &scenario.config,
                &step,
                scenario.num_blocks,
                &layer,
                &query,
                &cache,
            );
            let error = assert_close(
                &what,
                &served.output,
                &served.lse,
                &expected,
                layer.head_size,
            );
            worst = worst.max(error);
            if layer.batch_invariant {
                let whole = scenario.attend(name, &cache).output;
                let whole: Vec<f32> = tokens
                    .iter()
                    .flat_map(|&token| &whole[token * width..(token + 1) * width])
                    .copied()
                    .collect();
                assert_eq!(bits(&served.output), bits(&whole), "{what}");
            }
        }
    }
    println!("{armed_steps} steps: {worst:.1e}");
    assert!(armed_steps > 30, "{armed_steps}");
}
