//! Attention against the f64 reference on random paged batches.
//!
//! The relative error is max |a − b| / max |b| over one output row (one token of one head), the largest over all rows; the
//! log-sum-exp's is absolute up to 1 and relative above.

mod support;

use rand::Rng;
use support::{Batch, bits, config, random_config, random_rows, rng};
use timetable_device::{
    cpu::{AttentionConfig, CacheDtype, instruction_set},
    reference::{Attention, max_relative_error},
};
use timetable_types::{Causal, Metadata};

const F32_BOUND: f64 = 2e-6;
const BF16_BOUND: f64 = 1e-2;

/// The largest relative error of output and LSE.
fn errors(batch: &Batch, metadata: &Metadata, expected: &Attention) -> (f64, f64) {
    let (output, lse) = batch.run(metadata);
    let output_error = max_relative_error(&output, &expected.output, batch.config.head_size);
    let mut lse_error = 0.0f64;
    for (&actual, &expected) in lse.iter().zip(&expected.lse) {
        if expected == f64::NEG_INFINITY {
            assert_eq!(actual, f32::NEG_INFINITY);
        } else {
            let error = (f64::from(actual) - expected).abs() / expected.abs().max(1.0);
            lse_error = lse_error.max(if error.is_nan() { f64::INFINITY } else { error });
        }
    }
    (output_error, lse_error)
}

/// `count` random batches, each under random metadata of both families.
fn random_batches(seed: u64, count: usize, dtype: CacheDtype) {
    let mut worst = [0.0f64; 4];
    for index in 0..count {
        let rng = &mut rng(seed + index as u64);
        let config = random_config(rng, dtype);
        let (rows, num_decodes) = random_rows(rng, 300);
        let causal = match rng.random_range(0..8) {
            0 => Causal::All(false),
            1 => Causal::PerRequest,
            _ => Causal::All(true),
        };
        let padding = if rng.random() {
            0
        } else {
            rng.random_range(1..=5)
        };
        let batch = Batch::new(rng, config, causal, &rows, padding);
        let mut all = vec![batch.random_flash_attn(rng), batch.random_flash_attn(rng)];
        if matches!(batch.causal, Causal::All(_)) {
            all.push(batch.random_flashinfer(rng, num_decodes));
            all.push(batch.random_flashinfer(rng, 0));
        }
        let held = batch.expected(true);
        let exact = (dtype == CacheDtype::Bf16).then(|| batch.expected(false));
        for metadata in &all {
            let (output, lse) = errors(&batch, metadata, &held);
            worst[0] = worst[0].max(output);
            worst[1] = worst[1].max(lse);
            assert!(
                output <= F32_BOUND && lse <= F32_BOUND,
                "seed {}: output {output:e}, lse {lse:e}; {config:?} {rows:?} {metadata:?}",
                seed + index as u64
            );
            if let Some(exact) = &exact {
                let (output, lse) = errors(&batch, metadata, exact);
                worst[2] = worst[2].max(output);
                worst[3] = worst[3].max(lse);
                assert!(
                    output <= BF16_BOUND && lse <= BF16_BOUND,
                    "seed {}: output {output:e}, lse {lse:e}; {config:?} {rows:?} {metadata:?}",
                    seed + index as u64
                );
            }
        }
    }
    println!(
        "{count} batches, {dtype:?}, {}: against the cache's contents: output {:.1e}, lse {:.1e}",
        instruction_set(),
        worst[0],
        worst[1]
    );
    if dtype == CacheDtype::Bf16 {
        println!(
            "against unrounded keys and values: output {:.1e}, lse {:.1e}",
            worst[2], worst[3]
        );
    }
}

#[test]
fn random_batches_f32() {
    random_batches(1_000, 300, CacheDtype::F32);
}

#[test]
fn random_batches_bf16() {
    random_batches(2_000, 150, CacheDtype::Bf16);
}

#[test]
fn long_contexts_keep_their_accuracy() {
    let mut worst = 0.0f64;
    for (seed, keys) in [(1, 4_096), (2, 5_001), (3, 9_999), (4, 20_000)] {
        let rng = &mut rng(seed);
        let mut config = config(4, 2, 64);
        config.sliding_window = if seed == 3 { Some(6_000) } else { None };
        let batch = Batch::new(
            rng,
            config,
            Causal::All(true),
            &[(1, keys), (1, keys / 3), (7, keys)],
            0,
        );
        let expected = batch.expected(true);
        let all = [
            Metadata::FlashAttn(batch.flash_attn()),
            batch.random_flash_attn(rng),
            batch.random_flashinfer(rng, 2),
            batch.random_flashinfer(rng, 0),
        ];
        for metadata in &all {
            let (output, lse) = errors(&batch, metadata, &expected);
            worst = worst.max(output);
            assert!(
                output <= F32_BOUND && lse <= F32_BOUND,
                "{keys}: {output:e}, {lse:e}"
            );
        }
    }
    println!("contexts to 20,000 keys: {worst:.1e}");
}

#[test]
fn sharp_softmax_keeps_its_accuracy() {
    // Queries three times as large: scores to ±15, a few keys take all the weight. A score's own rounding grows with it
    // and multiplies the weight, so the bound is looser here.
    const BOUND: f64 = 2.0 * F32_BOUND;
    for seed in 0..40 {
        let rng = &mut rng(7_000 + seed);
        let (rows, num_decodes) = random_rows(rng, 300);
        let config = random_config(rng, CacheDtype::F32);
        let mut batch = Batch::new(rng, config, Causal::All(true), &rows, 0);
        for x in &mut batch.query {
            *x *= 3.0;
        }
        let expected = batch.expected(true);
        for metadata in [
            batch.random_flash_attn(rng),
            batch.random_flashinfer(rng, num_decodes),
        ] {
            let (output, lse) = errors(&batch, &metadata, &expected);
            assert!(
                output <= BOUND && lse <= BOUND,
                "{seed}: {output:e}, {lse:e}"
            );
        }
    }
}

#[test]
fn a_row_does_not_depend_on_what_else_is_in_the_batch() {
    for seed in 0..20 {
        let rng = &mut rng(9_000 + seed);
        let config = random_config(rng, CacheDtype::F32);
        let (rows, _) = random_rows(rng, 200);
        let batch = Batch::new(rng, config, Causal::All(true), &rows, 0);
        let (together, _) = batch.run(&Metadata::FlashAttn(batch.flash_attn()));
        let width = config.num_heads * config.head_size;
        for (row, &lengths) in rows.iter().enumerate() {
            let tokens =
                batch.query_start_loc[row] as usize..batch.query_start_loc[row + 1] as usize;
            let table = row * batch.width..(row + 1) * batch.width;
            let alone = Batch {
                config,
                causal: Causal::All(true),
                rows: vec![lengths],
                num_tokens: tokens.len(),
                query_start_loc: vec![0, tokens.len() as i32],
                seq_lens: vec![batch.seq_lens[row]],
                block_table: batch.block_table[table].to_vec(),
                width: batch.width,
                causal_flags: vec![1],
                query: batch.query[tokens.start * width..tokens.end * width].to_vec(),
                keys: vec![],
                values: vec![],
                cache: batch.cache.clone(),
            };
            let (output, _) = alone.run(&Metadata::FlashAttn(alone.flash_attn()));
            let expected = &together[tokens.start * width..tokens.end * width];
            assert_eq!(bits(&output), bits(expected), "seed {seed}, row {row}");
        }
    }
}

#[test]
fn a_query_has_the_same_bits_in_any_chunk_where_results_are_batch_invariant() {
    for seed in 0..20 {
        let rng = &mut rng(9_500 + seed);
        for dtype in [CacheDtype::F32, CacheDtype::Bf16] {
            let config = AttentionConfig {
                batch_invariant: true,
                ..random_config(rng, dtype)
            };
            let whole = Batch::new(rng, config, Causal::All(true), &[(70, 150)], 0);
            let (together, _) = whole.run(&Metadata::FlashAttn(whole.flash_attn()));
            let width = config.num_heads * config.head_size;
            for (start, end) in [(0, 1), (1, 18), (18, 69), (69, 70)] {
                let chunk = Batch {
                    rows: vec![(end - start, 80 + end)],
                    num_tokens: end - start,
                    query_start_loc: vec![0, (end - start) as i32],
                    seq_lens: vec![(80 + end) as i32],
                    query: whole.query[start * width..end * width].to_vec(),
                    block_table: whole.block_table.clone(),
                    causal_flags: vec![1],
                    keys: vec![],
                    values: vec![],
                    cache: whole.cache.clone(),
                    config,
                    causal: Causal::All(true),
                    width: whole.width,
                };
                let (output, _) = chunk.run(&Metadata::FlashAttn(chunk.flash_attn()));
                let expected = &together[start * width..end * width];
                assert_eq!(
                    bits(&output),
                    bits(expected),
                    "seed {seed}, [{start}, {end})"
                );
            }
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let rng = &mut rng(11);
    let rows = [(1, 2_000), (1, 1_500), (1, 3), (130, 900), (70, 70)];
    let batch = Batch::new(rng, config(9, 3, 64), Causal::All(true), &rows, 0);
    let expected = batch.expected(true);
    for metadata in [
        batch.random_flash_attn(rng),
        batch.random_flashinfer(rng, 3),
    ] {
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            pool.install(|| batch.run(&metadata))
        };
        let (one, one_lse) = on(1);
        assert!(max_relative_error(&one, &expected.output, 64) <= F32_BOUND);
        for threads in [2, 3, 8] {
            let (many, many_lse) = on(threads);
            assert_eq!(bits(&one), bits(&many), "{threads} threads");
            assert_eq!(bits(&one_lse), bits(&many_lse), "{threads} threads");
        }
    }
}
