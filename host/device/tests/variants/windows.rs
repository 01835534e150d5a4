//! Sliding windows over tables whose leading blocks were given back: their entries are the null block, block 0, and whatever lies
//! there must not be read.

use rand::Rng;
use timetable_attention::batch::window_null_blocks;
use timetable_types::Causal;

use crate::{
    scenario::{BUILDERS, Scenario, assert_close, builder_config, random_layer},
    support::{bits, pick, random_rows, rng},
};

#[test]
fn blocks_below_the_window_may_be_the_null_block() {
    let (mut worst, mut freed) = (0.0f64, 0);
    for seed in 0..60 {
        let rng = &mut rng(4_000 + seed);
        let mut layer = random_layer(rng);
        let window = *pick(rng, &[1, 7, 16, 33, 64]);
        layer.sliding_window = Some(window);
        let (rows, _) = random_rows(rng, 300);
        let padding = *pick(rng, &[(0, 0), (1, 2)]);
        let mut scenario = Scenario::new(rng, layer, Causal::All(true), &rows, padding);
        scenario.config = builder_config(&layer, rng.random());
        let expected = scenario.expected_whole();
        // The whole table, with every key there.
        let whole = scenario.cache(|_, _| true);
        let full: Vec<_> = BUILDERS.map(|name| scenario.attend(name, &whole)).into();

        // The same without what no query reaches.
        let reach = window - 1;
        let nulls: Vec<u32> = (0..rows.len())
            .map(|row| {
                let (query, keys) = scenario.lengths(row);
                window_null_blocks((keys - query) as u32, reach, layer.block_size as u32)
            })
            .collect();
        let kept = |row: usize, key: usize| key >= nulls[row] as usize * layer.block_size;
        let cache = scenario.cache(kept);
        let width = scenario.step.tensors.block_table_width;
        for (row, &count) in nulls.iter().enumerate() {
            scenario.step.tensors.block_table[row * width..][..count as usize].fill(0);
            freed += count;
        }
        for (name, full) in BUILDERS.into_iter().zip(&full) {
            let served = scenario.attend(name, &cache);
            let what = format!("{name}, window {window}, {rows:?}");
            let error = assert_close(
                &what,
                &served.output,
                &served.lse,
                &expected,
                layer.head_size,
            );
            worst = worst.max(error);
            assert_eq!(bits(&served.output), bits(&full.output), "{what}");
            assert_eq!(bits(&served.lse), bits(&full.lse), "{what}");
        }
    }
    println!("60 steps, {freed} blocks given back: {worst:.1e}");
    assert!(freed > 500, "{freed}");
}

/// One block more than may be given back is seen: the null block's NaN reaches the output.
#[test]
fn a_block_within_the_window_may_not() {
    for name in BUILDERS {
        let mut layer = crate::support::config(4, 2, 32);
        layer.sliding_window = Some(20);
        let mut scenario =
            Scenario::new(&mut rng(5), layer, Causal::All(true), &[(3, 100)], (0, 0));
        // Position 97 sees keys 78 to 97: blocks 4, 5 and 6.
        let nulls = window_null_blocks(97, 19, 16);
        assert_eq!(nulls, 4);
        let cache = scenario.cache(|_, _| true);
        scenario.step.tensors.block_table[..nulls as usize].fill(0);
        assert!(
            scenario
                .attend(name, &cache)
                .output
                .iter()
                .all(|x| x.is_finite())
        );
        scenario.step.tensors.block_table[nulls as usize] = 0;
        assert!(
            scenario
                .attend(name, &cache)
                .output
                .iter()
                .any(|x| x.is_nan()),
            "{name}"
        );
    }
}
