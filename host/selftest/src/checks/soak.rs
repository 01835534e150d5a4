//! The soak: random batches whose metadata comes from the real components and passes the verifier, in caches where everything
//! that is not a request's own holds NaN.
//!
//! Each batch runs twice. First every block that belongs to nobody is poisoned, and each request's values are all one number of
//! its own: a result is that number, or something else was read. Then every block but one request's is poisoned, and that
//! request's results are the same bits again, without a NaN.

use rayon::prelude::*;
use timetable_device_cuda::upload::StepLimits;
use timetable_types::{BuilderConfig, Family};

use super::{CheckError, Context};
use crate::{
    batch::{Batch, Shape},
    builders::{self, Builder},
    element,
    gpu::POISON,
    pipeline::{Layer, Pipeline},
    random::Random,
    report::Group,
};

/// Rows of a step at most.
const MAX_REQS: usize = 16;
/// Tokens of a step at most.
const MAX_TOKENS: usize = 192;
/// Keys of a request at most.
const MAX_LEN: usize = 640;
/// Batches that are made side by side.
const AT_ONCE: usize = 64;

/// The component, and the layer that it builds for.
struct Case {
    builder: &'static str,
    family: Family,
    shape: Shape,
}

fn cases() -> Vec<Case> {
    let shape = Shape {
        head_size: 64,
        ..Shape::new()
    };
    vec![
        Case {
            builder: "flash-attn",
            family: Family::FlashAttn,
            shape: shape.clone(),
        },
        Case {
            builder: "flash-attn-fixed-split",
            family: Family::FlashAttn,
            shape: Shape {
                head_size: 128,
                kv_heads: 1,
                group: 7,
                nhd: false,
                window: Some(150),
                ..Shape::new()
            },
        },
        Case {
            builder: "flashinfer",
            family: Family::Flashinfer,
            shape: shape.clone(),
        },
        Case {
            builder: "flashinfer",
            family: Family::Flashinfer,
            shape: Shape {
                page: 32,
                group: 8,
                kv_heads: 1,
                soft_cap: Some(20.0),
                ..shape
            },
        },
    ]
}

pub(super) fn run(context: &mut Context<'_>) -> Result<Vec<Group>, CheckError> {
    let cases = cases();
    let sandbox = builders::sandbox().map_err(CheckError::Sandbox)?;
    let mut groups = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        let mut group = Group::with_bar(
            format!(
                "soak {} D={} page {}",
                case.builder, case.shape.head_size, case.shape.page
            ),
            element::bar(case.shape.dtype),
        );
        let (count, rest) = (
            context.soak as usize / cases.len(),
            context.soak as usize % cases.len(),
        );
        let count = count + usize::from(index < rest);
        soak(context, &mut group, &sandbox, case, count)?;
        groups.push(group);
    }
    Ok(groups)
}

/// The configuration of a step's largest size, whatever the batch.
pub(super) fn largest(
    mut config: BuilderConfig,
    limits: StepLimits,
    max_len: usize,
) -> BuilderConfig {
    config.scheduler.max_num_seqs = limits.max_num_reqs as u32;
    config.scheduler.max_num_batched_tokens = limits.max_num_tokens as u32;
    config.scheduler.max_model_len = max_len as u32;
    config.scheduler.max_num_blocks_per_req = limits.table_width as u32;
    config
}

fn soak(
    context: &mut Context<'_>,
    group: &mut Group,
    sandbox: &timetable_sandbox::Sandbox,
    case: &Case,
    count: usize,
) -> Result<(), CheckError> {
    let gpu = context.gpu;
    let limits = StepLimits {
        max_num_reqs: MAX_REQS,
        max_num_tokens: MAX_TOKENS,
        table_width: MAX_LEN / case.shape.page + 1,
        max_num_logits: MAX_REQS,
    };
    let shape = Shape {
        min_blocks: MAX_REQS * limits.table_width + 2,
        min_width: limits.table_width,
        ..case.shape.clone()
    };
    let config = shape.config(
        32,
        gpu.device.capability(),
        gpu.device.num_multiprocessors(),
    );
    let config = largest(config, limits, MAX_LEN);
    let mut builder =
        Builder::new(sandbox, case.builder, config.clone()).map_err(CheckError::Sandbox)?;
    let ones = vec![1.0; shape.kv_heads];
    let layer = Layer {
        family: case.family,
        config: &config,
        shape: &shape,
        num_blocks: shape.min_blocks,
        limits,
        scales: (&ones, &ones),
    };
    let mut pipeline = Pipeline::new(gpu, &layer, |_| Vec::new())?;
    let mut done = 0;
    while done < count {
        let seeds: Vec<u64> = (0..AT_ONCE.min(count - done))
            .map(|_| context.random.int(0, i64::MAX) as u64)
            .collect();
        let batches: Vec<Batch> = seeds.par_iter().map(|&seed| batch(&shape, seed)).collect();
        for (batch, seed) in batches.iter().zip(seeds) {
            one(context, group, &mut pipeline, &mut builder, batch, seed)?;
        }
        done += batches.len();
    }
    Ok(())
}

/// A request's own number.
fn own(row: usize) -> f32 {
    1.0 + 0.25 * row as f32
}

/// Decodes, chunks and prefills in one batch; each request's values are its own number.
fn batch(shape: &Shape, seed: u64) -> Batch {
    let mut random = Random::new(seed);
    let rows = random.count(1, MAX_REQS);
    let mut shape = shape.clone();
    let mut left = MAX_TOKENS - rows;
    for _ in 0..rows {
        let q_len = if random.one_in(3) {
            1 + random.count(0, left.min(100))
        } else {
            1
        };
        left -= q_len - 1;
        shape.query_lens.push(q_len);
    }
    // Decodes first, as the runner orders them.
    shape.query_lens.sort_unstable_by_key(|&q_len| q_len > 1);
    for index in 0..rows {
        let q_len = shape.query_lens[index];
        let most = if random.one_in(4) { MAX_LEN } else { 200 };
        let before = if q_len > 1 && random.one_in(2) {
            0
        } else {
            random.count(0, most - q_len.min(most))
        };
        shape.kv_lens.push((q_len + before).min(MAX_LEN));
    }
    let size = shape.head_size;
    Batch::with_values(&shape, &mut random, |row, mut states| {
        for state in states.chunks_mut(2 * size) {
            state[size..].fill(own(row));
        }
        states
    })
}

fn one(
    context: &Context<'_>,
    group: &mut Group,
    pipeline: &mut Pipeline,
    builder: &mut Builder,
    batch: &Batch,
    seed: u64,
) -> Result<(), CheckError> {
    let gpu = context.gpu;
    let what = || format!("batch of seed {seed}: {}", batch.shape.describe());
    let metadata = match builder.build(&batch.step, batch.num_blocks, None) {
        Ok(metadata) => metadata,
        Err(refused) => {
            group.check(false, || format!("{}: {refused}", what()));
            return Ok(());
        }
    };
    let inputs = batch.step.tensors.inputs();
    let dtype = batch.shape.dtype;
    pipeline
        .query
        .write(0, &element::encode(dtype, &batch.query))?;
    pipeline.load_cache(&batch.cache)?;
    pipeline.output.fill(POISON)?;
    pipeline.lse.fill(POISON)?;
    let verified = builder.context(&batch.step, &inputs, batch.num_blocks, None);
    if let Err(error) = pipeline.begin(gpu, &gpu.stream, &metadata, &verified, &batch.step, None) {
        gpu.stream.synchronize()?;
        group.check(false, || format!("{}: {error}", what()));
        return Ok(());
    }
    let run = |pipeline: &Pipeline| -> Result<Vec<u8>, CheckError> {
        // SAFETY: the step was begun above; the stream is waited for before anything changes.
        unsafe { pipeline.eager(gpu, &gpu.stream, false) }?;
        gpu.stream.synchronize()?;
        let bytes = batch.query.len() * element::bytes(dtype);
        let mut output = vec![0u8; bytes];
        pipeline.output.read(0, &mut output)?;
        Ok(output)
    };
    let first = run(pipeline)?;
    let row_size = batch.shape.heads() * batch.shape.head_size;
    let values = element::decode(dtype, &first);
    let starts = &batch.step.tensors.query_start_loc;
    for row in 0..batch.num_reqs() {
        let (from, to) = (starts[row] as usize, starts[row + 1] as usize);
        let mut worst = 0.0f64;
        for &value in &values[from * row_size..to * row_size] {
            let off = f64::from((value - own(row)).abs() / own(row));
            worst = worst.max(if off.is_nan() { f64::INFINITY } else { off });
        }
        group.error(worst, || format!("{}: request {row}", what()));
    }
    let mut lse = vec![0f32; batch.num_tokens() * batch.shape.heads()];
    pipeline.lse.read(0, &mut lse)?;
    group.check(lse.iter().all(|x| x.is_finite()), || {
        format!("{}: an LSE is not finite", what())
    });

    let victim = Random::new(seed ^ 1).count(0, batch.num_reqs() - 1);
    pipeline.load_cache(&only(batch, victim))?;
    pipeline.output.fill(POISON)?;
    let second = run(pipeline)?;
    let row_bytes = row_size * element::bytes(dtype);
    let own = starts[victim] as usize * row_bytes..starts[victim + 1] as usize * row_bytes;
    group.equal(&second[own.clone()], &first[own], || {
        format!("{}: request {victim}, all other blocks poisoned", what())
    });
    Ok(())
}

/// The cache with one request's blocks; all others hold NaN.
fn only(batch: &Batch, row: usize) -> Vec<u8> {
    let block_bytes = batch.shape.block_elements() * element::bytes(batch.shape.cache_dtype);
    let mut cache = vec![POISON; batch.cache.len()];
    let pages = batch.shape.kv_lens[row].div_ceil(batch.shape.page);
    for &block in &batch.step.tensors.table().row(row)[..pages] {
        let at = block as usize * block_bytes;
        cache[at..at + block_bytes].copy_from_slice(&batch.cache[at..at + block_bytes]);
    }
    cache
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_component_serves_the_soaks_batches() {
        let sandbox = builders::sandbox().unwrap();
        for case in cases() {
            let limits = StepLimits {
                max_num_reqs: MAX_REQS,
                max_num_tokens: MAX_TOKENS,
                table_width: MAX_LEN / case.shape.page + 1,
                max_num_logits: MAX_REQS,
            };
            let shape = Shape {
                min_blocks: MAX_REQS * limits.table_width + 2,
                min_width: limits.table_width,
                ..case.shape
            };
            let config = largest(shape.config(32, (9, 0), 132), limits, MAX_LEN);
            let mut builder = Builder::new(&sandbox, case.builder, config).unwrap();
            for seed in 0..10 {
                let batch = batch(&shape, seed);
                let built = builder.build(&batch.step, batch.num_blocks, None);
                assert!(built.is_ok(), "{} seed {seed}: {built:?}", case.builder);
                let kept = element::decode(shape.cache_dtype, &only(&batch, 0));
                assert!(kept.iter().any(|x| x.is_finite()) || shape.window.is_some());
            }
        }
    }
}
