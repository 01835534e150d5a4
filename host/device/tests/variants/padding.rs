//! Padding for a graph: rows and tokens of no request, behind the live ones.

use timetable_attention::batch::{PaddingValues, pad_step};
use timetable_types::Causal;

use crate::{
    scenario::{BUILDERS, Scenario, random_layer, serve},
    support::{bits, random_rows, rng},
};

/// Field case 15 by every builder: what the rule book pads comes back as zeros and −∞, whatever lay in the output before, and the live
/// rows have the bits that they have without it.
#[test]
fn field_case_15_padded_rows_are_zeros_by_every_builder() {
    for seed in 0..30 {
        let rng = &mut rng(50_000 + seed);
        let mut layer = random_layer(rng);
        layer.batch_invariant = true;
        let (rows, _) = random_rows(rng, 150);
        let scenario = Scenario::new(rng, layer, Causal::All(true), &rows, (0, 0));
        let tokens = scenario.step.cam.num_actual_tokens;
        let (more_tokens, more_rows) = (5, 3);
        let padded = pad_step(
            &scenario.step,
            tokens + more_tokens,
            rows.len() as u32 + more_rows,
            PaddingValues::default(),
        );
        let padded = padded.expect("it fits");
        let mut query = scenario.query.clone();
        let width = layer.num_heads * layer.head_size;
        query.resize(query.len() + more_tokens as usize * width, f32::NAN);
        let cache = scenario.cache(|_, _| true);
        for name in BUILDERS {
            let live = scenario.attend(name, &cache);
            let (config, blocks) = (&scenario.config, scenario.num_blocks);
            let found = serve(name, config, &padded, blocks, &layer, &query, &cache);
            let (own, rest) = found.output.split_at(live.output.len());
            assert_eq!(bits(own), bits(&live.output), "{name}, {rows:?}");
            assert!(rest.iter().all(|x| x.to_bits() == 0), "{name}, {rows:?}");
            let (own, rest) = found.lse.split_at(live.lse.len());
            assert_eq!(bits(own), bits(&live.lse), "{name}, {rows:?}");
            assert!(
                rest.iter().all(|&x| x == f32::NEG_INFINITY),
                "{name}, {rows:?}"
            );
        }
    }
}
