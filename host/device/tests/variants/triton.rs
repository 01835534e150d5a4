//! TRITON_ATTN: the kernel's two forms by the builder's own choice, each against float64.

use rand::Rng;
use timetable_device::cpu::AttentionConfig;
use timetable_types::{Causal, Metadata};

use crate::{
    scenario::{Scenario, assert_close, builder_config, random_layer},
    support::{pick, rng},
};

/// Runs one kind of step; the most partial results of a query tile, and the output's error.
fn check(
    seed: u64,
    layer: AttentionConfig,
    rows: &[(usize, usize)],
    padding: (usize, usize),
) -> (usize, f64) {
    let rng = &mut rng(seed);
    let mut scenario = Scenario::new(rng, layer, Causal::All(true), rows, padding);
    scenario.config = builder_config(&layer, true);
    let uniform = rows.iter().map(|row| row.0).max().unwrap_or(1) as u32;
    if rows.iter().all(|row| row.0 as u32 == uniform) && uniform < 8 {
        scenario.config.scheduler.num_speculative_tokens = uniform - 1;
    }
    let served = scenario.attend("triton-attn", &scenario.cache(|_, _| true));
    let what = format!("{layer:?} {rows:?} {padding:?}");
    let expected = scenario.expected_whole();
    let error = assert_close(
        &what,
        &served.output,
        &served.lse,
        &expected,
        layer.head_size,
    );
    let Metadata::TritonAttn(record) = &served.metadata else {
        panic!("a record of TRITON_ATTN");
    };
    // 128 programs over the KV heads: how many rows leave the 2D form's grid half empty.
    let all = rows.len() + padding.0;
    let is_3d = uniform == 1 && all <= 128 / layer.num_kv_heads;
    let threshold = record.seq_threshold_3d as usize;
    assert_eq!(is_3d, uniform == 1 && all <= threshold, "{what}");
    if !is_3d {
        assert_eq!(served.max_splits, 1, "{what}");
    }
    (served.max_splits, error)
}

#[test]
fn both_forms_of_the_kernel_are_right() {
    let (mut worst, mut divided) = (0.0f64, 0);
    for seed in 0..40 {
        let rng = &mut rng(12_000 + seed);
        let mut layer = random_layer(rng);
        layer.sliding_window = *pick(rng, &[None, None, Some(40)]);
        let mut keys = || rng.random_range(1..300);
        let decodes: Vec<_> = (0..6).map(|_| (1, keys())).collect();
        // More rows than 128 programs over the KV heads: the 2D form.
        let many: Vec<_> = (0..129).map(|_| (1, keys() / 4 + 1)).collect();
        let mixed = [decodes.clone(), vec![(30, 30), (17, 120)]].concat();
        let prefills = vec![(70, 70), (40, 200), (1, 1)];
        let verified: Vec<_> = (0..5).map(|_| (4, keys() + 4)).collect();
        let steps = [&decodes, &many, &mixed, &prefills, &verified];
        for (index, rows) in steps.into_iter().enumerate() {
            for padding in [(0, 0), (2, 3)] {
                let (splits, error) = check(seed * 10 + index as u64, layer, rows, padding);
                worst = worst.max(error);
                divided += usize::from(splits > 1);
            }
        }
    }
    println!("400 steps, {divided} in segments: {worst:.1e}");
    assert!(divided > 40, "{divided}");
}
