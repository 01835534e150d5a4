//! Random paged batches against the f64 reference: decode, prefill, mixed, speculation, chunked context, padding.
//!
//! The relative error is max |a − b| / max |b| over one output row (one token of one head), the largest over all rows; the
//! log-sum-exp's is absolute up to 1 and relative above.

use rand::Rng;
use rand_pcg::Pcg64Mcg;
use timetable_device::{
    cpu::{
        instruction_set,
        mla::{LatentDtype, LatentSizes},
    },
    reference::{latent, max_relative_error},
};
use timetable_types::Metadata;

use crate::{
    batch::{Batch, Layout, Ran, layout, sizes},
    metadata::{plain, random, record, reference},
};

pub const BOUND: f64 = 2e-6;

pub fn rng(seed: u64) -> Pcg64Mcg {
    rand::SeedableRng::seed_from_u64(seed)
}

pub fn pick<T: Copy>(rng: &mut Pcg64Mcg, choices: &[T]) -> T {
    choices[rng.random_range(0..choices.len())]
}

/// Rows of one of the kinds of steps that an engine makes; decodes, of `1 + drafts` tokens, first. Their number.
pub fn random_rows(
    rng: &mut Pcg64Mcg,
    max_keys: usize,
    drafts: usize,
) -> (Vec<(usize, usize)>, usize) {
    let kind = rng.random_range(0..4);
    let mut rows = Vec::new();
    if kind != 0 {
        for _ in 0..rng.random_range(1..=6) {
            rows.push((1 + drafts, rng.random_range(1 + drafts..=max_keys)));
        }
    }
    let decodes = rows.len();
    if kind != 1 {
        for _ in 0..rng.random_range(1..=4) {
            let query = rng.random_range(2 + drafts..=max_keys.min(60));
            let context = match rng.random_range(0..3) {
                0 => 0,
                _ => rng.random_range(0..=max_keys - query),
            };
            rows.push((query, query + context));
        }
    }
    (rows, decodes)
}

/// The largest errors of output and log-sum-exp.
pub fn errors(ran: &Ran, expected: &latent::Attention, sizes: &LatentSizes) -> (f64, f64) {
    let output = max_relative_error(&ran.output, &expected.output, sizes.v_head_dim);
    let mut lse = 0.0f64;
    for (&actual, &expected) in ran.lse.iter().zip(&expected.lse) {
        if expected == f64::NEG_INFINITY {
            assert_eq!(actual, f32::NEG_INFINITY);
        } else {
            let error = (f64::from(actual) - expected).abs() / expected.abs().max(1.0);
            lse = lse.max(if error.is_nan() { f64::INFINITY } else { error });
        }
    }
    (output, lse)
}

/// The worst so far.
#[derive(Default)]
pub struct Worst {
    pub output: f64,
    pub lse: f64,
    pub runs: usize,
}

impl Worst {
    /// Runs metadata that the verifier must take; checks and notes the errors.
    pub fn check(&mut self, batch: &Batch, metadata: &[Metadata], what: &str) -> Ran {
        for (rank, metadata) in metadata.iter().enumerate() {
            batch.verify(rank, metadata);
        }
        let ran = batch.run(metadata);
        let decodes = record(&metadata[0]).num_decodes as usize;
        let expected = batch.expected(decodes);
        let (output, lse) = errors(&ran, &expected, &batch.layout.sizes);
        self.output = self.output.max(output);
        self.lse = self.lse.max(lse);
        self.runs += 1;
        assert!(
            output <= BOUND && lse <= BOUND,
            "{what}: output {output:e}, lse {lse:e}; {:?} {:?} {metadata:?}",
            batch.layout,
            batch.rows
        );
        if batch.layout.world == 1 {
            check_layer(batch, &metadata[0], &ran);
        }
        ran
    }

    pub fn print(&self, what: &str) {
        println!(
            "{what}, {} runs, {}: output {:.1e}, lse {:.1e}",
            self.runs,
            instruction_set(),
            self.output,
            self.lse
        );
    }
}

/// The whole layer is its two calls, bit for bit.
fn check_layer(batch: &Batch, metadata: &Metadata, ran: &Ran) {
    let step = batch.prepare(0, metadata);
    let mut output = vec![f32::NAN; ran.output.len()];
    batch
        .layout
        .attention()
        .forward(
            &batch.inputs(),
            &batch.ranks[0].cache,
            Some(&step),
            &mut output,
        )
        .expect("forward");
    assert_eq!(bits(&output), bits(&ran.output));
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn random_layout(rng: &mut Pcg64Mcg, dtype: LatentDtype) -> Layout {
    let (latent, rope) = match dtype {
        LatentDtype::Fp8DsMla => (512, 64),
        _ => pick(rng, &[(24, 8), (40, 4), (64, 16), (33, 7), (128, 32)]),
    };
    let (nope, value) = pick(rng, &[(16, 16), (12, 20), (32, 8), (5, 33)]);
    let heads = pick(rng, &[1, 2, 3, 4, 7]);
    let mut layout = layout(
        sizes(heads, latent, nope, rope, value),
        pick(rng, &[1, 4, 16, 16, 48, 64]),
    );
    layout.dtype = dtype;
    layout.drafts = pick(rng, &[0, 0, 1, 3]);
    layout
}

/// `count` random batches, each under the plain builder's metadata and random metadata with any rows as decodes.
fn random_batches(seed: u64, count: usize, dtype: LatentDtype) {
    let mut worst = Worst::default();
    for seed in seed..seed + count as u64 {
        let rng = &mut rng(seed);
        let layout = random_layout(rng, dtype);
        let (rows, decodes) = random_rows(rng, 200, layout.drafts as usize);
        let padding = pick(rng, &[(0, 0), (0, 0), (1, 0), (2, 3)]);
        let batch = Batch::new(rng, layout, &rows, padding);
        let what = format!("seed {seed}");
        worst.check(&batch, &plain(&batch), &what);
        let any = rng.random_range(0..=rows.len());
        for decodes in [decodes, any] {
            worst.check(&batch, &random(rng, &batch, decodes), &what);
        }
    }
    worst.print(&format!("{count} batches, {dtype:?}"));
}

#[test]
fn random_batches_f32() {
    random_batches(1_000, 150, LatentDtype::F32);
}

#[test]
fn random_batches_bf16() {
    random_batches(2_000, 60, LatentDtype::Bf16);
}

#[test]
fn random_batches_fp8_ds_mla() {
    random_batches(3_000, 20, LatentDtype::Fp8DsMla);
}

#[test]
fn metadata_of_the_reference_builders() {
    for name in ["flash-mla", "flash-attn-mla", "triton-mla"] {
        let mut worst = Worst::default();
        let (mut segments, mut splits) = (0, 0);
        for seed in 0..16 {
            let rng = &mut rng(4_000 + seed);
            let (latent, dtype) = pick(
                rng,
                &[
                    (256, LatentDtype::F32),
                    (448, LatentDtype::Bf16),
                    (512, LatentDtype::Fp8DsMla),
                ],
            );
            let heads = pick(rng, &[1, 2, 5]);
            let mut layout = layout(sizes(heads, latent, 16, 64, 24), 64);
            layout.dtype = dtype;
            layout.drafts = pick(rng, &[0, 1]);
            let (rows, _) = random_rows(rng, 400, layout.drafts as usize);
            let padding = pick(rng, &[(0, 0), (1, 2)]);
            let batch = Batch::new(rng, layout, &rows, padding);
            // Contexts in chunks of one block, of some, and whole.
            let metadata = reference(&batch, name, pick(rng, &[64, 192, 4_096]));
            let step = batch.prepare(0, &metadata[0]);
            segments += step.num_context_segments();
            splits = splits.max(step.max_splits());
            worst.check(&batch, &metadata, &format!("{name}, seed {seed}"));
        }
        worst.print(name);
        assert!(name == "flash-attn-mla" || segments > 0, "no context");
        assert!(name != "flash-mla" || splits > 1, "no tile schedule");
    }
}

#[test]
fn long_contexts_keep_their_accuracy() {
    let mut worst = Worst::default();
    for (seed, keys) in [(1, 2_049), (2, 4_100)] {
        let rng = &mut rng(5_000 + seed);
        let layout = layout(sizes(2, 64, 16, 16, 24), 16);
        let rows = [(1, keys), (1, keys / 3), (1_100, keys), (7, keys)];
        let batch = Batch::new(rng, layout, &rows, (0, 0));
        for decodes in [2, 0, 3] {
            let metadata = random(rng, &batch, decodes);
            worst.check(&batch, &metadata, &format!("{keys} keys"));
        }
    }
    worst.print("contexts to 4,100 keys");
}

#[test]
fn neither_threads_nor_other_requests_change_a_bit() {
    for seed in 0..6 {
        let rng = &mut rng(6_000 + seed);
        let layout = layout(sizes(4, 64, 16, 16, 24), 16);
        let rows = [(1, 700), (1, 3), (90, 1_300), (70, 70), (33, 600)];
        let batch = Batch::new(rng, layout, &rows, (0, 0));
        let metadata = random(rng, &batch, 2);
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            pool.expect("threads").install(|| batch.run(&metadata))
        };
        let one = on(1);
        for threads in [2, 3, 8] {
            let many = on(threads);
            assert_eq!(bits(&one.output), bits(&many.output), "{threads} threads");
            assert_eq!(bits(&one.lse), bits(&many.lse), "{threads} threads");
        }
        // Each alone, from the same cache.
        let together = batch.run(&plain(&batch));
        let width = layout.sizes.num_heads * layout.sizes.v_head_dim;
        for (row, &(query, _)) in rows.iter().enumerate() {
            let alone = batch.part(row, 0..query);
            let found = alone.run(&plain(&alone));
            let first = batch.first_token(row) * width;
            let wanted = &together.output[first..first + query * width];
            assert_eq!(bits(&found.output), bits(wanted), "row {row}");
        }
    }
}

#[test]
fn a_query_has_the_same_bits_in_any_step_where_results_are_batch_invariant() {
    use timetable_device::cpu::mla::{MlaConfig, MlaImpl};

    let rng = &mut rng(6_500);
    let mut layout = layout(sizes(2, 64, 16, 16, 24), 16);
    layout.drafts = 3;
    let batch = Batch::new(rng, layout, &[(4, 150)], (0, 0));
    let attention = MlaImpl::new(MlaConfig {
        batch_invariant: true,
        ..*layout.attention().config()
    })
    .expect("an impl");
    let run = |batch: &Batch| {
        let step = batch.prepare(0, &plain(batch)[0]);
        let mut output = vec![f32::NAN; batch.num_tokens * 2 * layout.sizes.v_head_dim];
        attention
            .forward(
                &batch.inputs(),
                &batch.ranks[0].cache,
                Some(&step),
                &mut output,
            )
            .expect("forward");
        assert_eq!(step.num_decode_tokens(), batch.num_tokens);
        output
    };
    let together = run(&batch);
    let width = 2 * layout.sizes.v_head_dim;
    for token in 0..4 {
        let alone = run(&batch.part(0, token..token + 1));
        let wanted = &together[token * width..(token + 1) * width];
        assert_eq!(bits(&alone), bits(wanted), "token {token}");
    }
}
