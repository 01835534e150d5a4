//! A step with all that builders, verifier and device ask for, and attention in float64 under any mask. It must never know how a
//! builder works.

use rand::{Rng, seq::SliceRandom};
use rand_pcg::Pcg64Mcg;
use timetable_attention::{
    Grant, Refusal, VerifyContext,
    batch::{GroupStep, SlotRule, StepTensors, slot_mapping_into},
    verify, verify_step,
};
use timetable_device::{
    cpu::{AttentionConfig, CacheDtype, KvCache, StepMetadata, new_impl},
    reference::{self, Attention, max_relative_error},
};
use timetable_reference::{component, native_twin};
use timetable_types::{BuilderConfig, Causal, Family, KvCacheSpecKind, Metadata, SchedulerConfig};

use crate::support::{normals, pick};

#[path = "../support/builder_config.rs"]
mod defaults;

/// What rounding may do to an f32 result, relative to its row's largest element.
pub const BOUND: f64 = 2e-6;

/// Reference builders of paged attention.
pub const BUILDERS: [&str; 4] = [
    "flash-attn",
    "flash-attn-fixed-split",
    "flashinfer",
    "triton-attn",
];

/// The configuration of a builder for a layer like `layer`, on a CPU or on a GPU of compute capability 9.
pub fn builder_config(layer: &AttentionConfig, on_gpu: bool) -> BuilderConfig {
    let mut config = defaults::config();
    let spec = &mut config.kv_cache_spec;
    if layer.sliding_window.is_some() {
        spec.kind = KvCacheSpecKind::SlidingWindow;
    }
    spec.block_size = layer.block_size as u32;
    spec.num_kv_heads = layer.num_kv_heads as u32;
    (spec.head_size, spec.head_size_v) = (layer.head_size as u32, layer.head_size as u32);
    spec.sliding_window = layer.sliding_window;
    let attention = &mut config.attention;
    attention.num_heads = layer.num_heads as u32;
    attention.scale = f64::from(layer.scale);
    attention.logits_soft_cap = layer.logits_soft_cap.map(f64::from);
    attention.sliding_windows = vec![layer.sliding_window.map_or(-1, |window| window as i32)];
    config.scheduler = SchedulerConfig {
        max_num_seqs: 64,
        max_num_batched_tokens: 2_048,
        max_model_len: 4_096,
        max_num_blocks_per_req: 4_096,
        ..config.scheduler
    };
    let device = &mut config.device;
    device.compute_capability = if on_gpu { (9, 0) } else { (0, 0) };
    device.num_workers = if on_gpu { 20 } else { 4 };
    device.flash_attn_version = if on_gpu { 3 } else { 0 };
    config.batch_invariant = layer.batch_invariant;
    config.max_num_splits = if layer.batch_invariant { 1 } else { 8 };
    config
}

/// A step before any rule has changed it, and its keys.
pub struct Scenario {
    pub layer: AttentionConfig,
    pub config: BuilderConfig,
    pub step: GroupStep,
    pub num_blocks: u32,
    /// f32 [tokens, heads, head size]; NaN for a token of no request.
    pub query: Vec<f32>,
    /// For each request f32 [keys, kv heads, head size].
    pub keys: Vec<Vec<f32>>,
    pub values: Vec<Vec<f32>>,
}

impl Scenario {
    /// Rows of (query tokens, keys), then `padding` rows and tokens of no request. No request has block 0, the null block.
    pub fn new(
        rng: &mut Pcg64Mcg,
        layer: AttentionConfig,
        causal: Causal,
        rows: &[(usize, usize)],
        (padding_rows, padding_tokens): (usize, usize),
    ) -> Self {
        let block_size = layer.block_size;
        let pages = |keys: usize| keys.div_ceil(block_size);
        let used: usize = rows.iter().map(|row| pages(row.1)).sum();
        let width = rows.iter().map(|row| pages(row.1)).max().unwrap_or(0) + 1;
        let num_blocks = used + 3;
        let mut free: Vec<i32> = (1..num_blocks as i32).collect();
        free.shuffle(rng);
        let (mut starts, mut lens, mut table, mut positions) =
            (vec![0i32], Vec::new(), Vec::new(), Vec::new());
        for &(query, keys) in rows {
            starts.push(starts[starts.len() - 1] + query as i32);
            lens.push(keys as i32);
            positions.extend((keys - query) as i64..keys as i64);
            let mut own = free.split_off(free.len() - pages(keys));
            own.resize(width, 0);
            table.extend(own);
        }
        let tokens = positions.len();
        for _ in 0..padding_rows {
            starts.push(tokens as i32);
            lens.push(0);
        }
        table.resize(lens.len() * width, 0);
        let mut slots = vec![-1; tokens + padding_tokens];
        let rule = SlotRule {
            block_size: block_size as u32,
            context_parallel: None,
        };
        let row_of = |row: usize| table.get(row * width..(row + 1) * width);
        let beyond = slot_mapping_into(rule, row_of, &starts, &positions, &mut slots);
        assert_eq!(beyond, 0);
        positions.resize(tokens + padding_tokens, 0);
        let flags = lens.iter().map(|_| rng.random_range(0..2)).collect();
        let mut step = GroupStep::new(
            StepTensors {
                query_start_loc: starts,
                seq_lens: lens.clone(),
                block_table: table,
                block_table_width: width,
                slot_mapping: slots,
                positions,
                causal: (causal == Causal::PerRequest).then_some(flags),
                ..StepTensors::default()
            },
            lens,
            (tokens + padding_tokens) as u32,
            rows.iter().map(|row| row.0).max().unwrap_or(0) as u32,
            rows.iter().map(|row| row.1).max().unwrap_or(0) as u32,
        );
        step.cam.causal = causal;
        step.cam.is_prefilling = rows.iter().map(|row| u8::from(row.0 > 1)).collect();
        let width = layer.num_heads * layer.head_size;
        let mut query = normals(rng, tokens * width);
        query.resize((tokens + padding_tokens) * width, f32::NAN);
        let mut contents = || -> Vec<Vec<f32>> {
            let elements = layer.num_kv_heads * layer.head_size;
            let of = rows.iter().map(|row| row.1 * elements);
            of.map(|count| normals(rng, count)).collect()
        };
        Self {
            keys: contents(),
            values: contents(),
            config: builder_config(&layer, false),
            layer,
            step,
            num_blocks: num_blocks as u32,
            query,
        }
    }

    /// The cache with those keys of each request that `keeps(row, key)` names; all else is NaN.
    pub fn cache(&self, keeps: impl Fn(usize, usize) -> bool) -> KvCache {
        let layer = &self.layer;
        let mut cache = KvCache::new(
            self.num_blocks as usize,
            layer.num_kv_heads,
            layer.block_size,
            layer.head_size,
            layer.kv_cache_dtype,
        );
        cache.fill(f32::NAN);
        let writer = new_impl(Family::FlashAttn, *layer).expect("an impl");
        for (row, (keys, values)) in self.keys.iter().zip(&self.values).enumerate() {
            let blocks = self.step.tensors.table().row(row);
            let count = keys.len() / (layer.num_kv_heads * layer.head_size);
            let slots: Vec<i64> = (0..count)
                .map(|key| match keeps(row, key) {
                    false => -1,
                    true => {
                        let block = i64::from(blocks[key / layer.block_size]);
                        block * layer.block_size as i64 + (key % layer.block_size) as i64
                    }
                })
                .collect();
            writer.do_kv_cache_update(keys, values, &mut cache, &slots);
        }
        cache
    }

    /// Query and key lengths of a request.
    pub fn lengths(&self, row: usize) -> (usize, usize) {
        let tensors = &self.step.tensors;
        let starts = &tensors.query_start_loc;
        (
            (starts[row + 1] - starts[row]) as usize,
            tensors.seq_lens[row] as usize,
        )
    }

    /// Attention in float64 of every query to those keys that `sees(row, position, key)` names.
    pub fn expected(&self, sees: impl Fn(usize, usize, usize) -> bool) -> Attention {
        let layer = &self.layer;
        let mut requests = Vec::new();
        let mut seen: Vec<(usize, Vec<usize>)> = Vec::new();
        for row in 0..self.keys.len() {
            let (query, keys) = self.lengths(row);
            for token in 0..query {
                let position = keys - query + token;
                let of: Vec<usize> = (0..keys).filter(|&key| sees(row, position, key)).collect();
                requests.push(reference::Request {
                    first_token: self.step.tensors.query_start_loc[row] as usize + token,
                    q_len: 1,
                    kv_len: of.len(),
                    causal: true,
                });
                seen.push((row, of));
            }
        }
        let plain = reference::Layer {
            num_heads: layer.num_heads,
            num_kv_heads: layer.num_kv_heads,
            head_size: layer.head_size,
            scale: f64::from(layer.scale),
            sliding_window: None,
            logits_soft_cap: layer.logits_soft_cap.map(f64::from),
        };
        let tokens = self.step.cam.num_actual_tokens as usize;
        reference::attention(
            &plain,
            &requests,
            tokens,
            &self.query,
            |request, key, head| {
                let (row, of) = &seen[request];
                let start = (of[key] * layer.num_kv_heads + head) * layer.head_size;
                let range = start..start + layer.head_size;
                (
                    self.keys[*row][range.clone()].to_vec(),
                    self.values[*row][range].to_vec(),
                )
            },
        )
    }

    /// Attention to what causality and window allow, by the step's own flags.
    pub fn expected_whole(&self) -> Attention {
        let window = self.layer.sliding_window.map(|window| window as usize);
        self.expected(|row, position, key| {
            let causal = match self.step.cam.causal {
                Causal::All(causal) => causal,
                Causal::PerRequest => self.step.tensors.causal.as_ref().expect("flags")[row] != 0,
            };
            (!causal || key <= position)
                && window.is_none_or(|window| key + window > position && key < position + window)
        })
    }

    /// The queries of these tokens.
    pub fn queries(&self, tokens: impl IntoIterator<Item = usize>) -> Vec<f32> {
        let width = self.layer.num_heads * self.layer.head_size;
        tokens
            .into_iter()
            .flat_map(|token| &self.query[token * width..(token + 1) * width])
            .copied()
            .collect()
    }

    /// What the builder called `name` and the device make of the step.
    pub fn attend(&self, name: &str, cache: &KvCache) -> Served {
        let query = &self.query;
        serve(
            name,
            &self.config,
            &self.step,
            self.num_blocks,
            &self.layer,
            query,
            cache,
        )
    }
}

/// What came of a step.
pub struct Served {
    /// f32 [tokens, heads, head size]
    pub output: Vec<f32>,
    /// f32 [tokens, heads]
    pub lse: Vec<f32>,
    pub metadata: Metadata,
    /// The most partial results that a query tile merged.
    pub max_splits: usize,
}

/// The family of the builder called `name`.
pub fn family(name: &str) -> Family {
    component(name).expect("a reference builder").family
}

/// The metadata of the step by the builder called `name`, verified under the grant that it needs.
pub fn build(name: &str, config: &BuilderConfig, step: &GroupStep, num_blocks: u32) -> Metadata {
    let mut builder = native_twin(name, config).expect("the builder takes the configuration");
    let metadata = builder.build(&step.cam, false).expect("the builder builds");
    let grant = component(name).expect("a reference builder").grant;
    if let Err(refusal) = verified(config, step, num_blocks, grant, &metadata) {
        panic!("{name}: {refusal}");
    }
    metadata
}

/// The step, then the metadata by the verifier's rules.
pub fn verified(
    config: &BuilderConfig,
    step: &GroupStep,
    num_blocks: u32,
    grant: Grant,
    metadata: &Metadata,
) -> Result<(), Refusal> {
    let inputs = step.tensors.inputs();
    let context = VerifyContext {
        config,
        common: &step.cam,
        inputs: &inputs,
        promise: None,
        grant,
        num_blocks,
    };
    verify_step(&context)?;
    verify(metadata, &context)
}

/// Builds, verifies, prepares and runs; output and log-sum-exps are NaN before.
pub fn serve(
    name: &str,
    config: &BuilderConfig,
    step: &GroupStep,
    num_blocks: u32,
    layer: &AttentionConfig,
    query: &[f32],
    cache: &KvCache,
) -> Served {
    let metadata = build(name, config, step, num_blocks);
    run(metadata, step, layer, query, cache)
}

/// Prepares metadata and runs them.
pub fn run(
    metadata: Metadata,
    step: &GroupStep,
    layer: &AttentionConfig,
    query: &[f32],
    cache: &KvCache,
) -> Served {
    let mut prepared = StepMetadata::new();
    prepared
        .prepare(&metadata, &step.tensors.inputs(), layer.block_size as u32)
        .expect("the device takes it");
    let attention = new_impl(metadata.family(), *layer).expect("an impl");
    let mut output = vec![f32::NAN; query.len()];
    let mut lse = vec![f32::NAN; query.len() / layer.head_size];
    attention
        .forward_with_lse(query, cache, &prepared, &mut output, &mut lse)
        .expect("the device runs it");
    Served {
        output,
        lse,
        metadata,
        max_splits: prepared.max_splits(),
    }
}

/// Fails unless output and log-sum-exps are `expected`'s up to rounding. Returns the output's error.
pub fn assert_close(
    what: &str,
    output: &[f32],
    lse: &[f32],
    expected: &Attention,
    size: usize,
) -> f64 {
    let error = max_relative_error(output, &expected.output, size);
    assert!(error <= BOUND, "{what}: output {error:e}");
    for (row, (&found, &wanted)) in lse.iter().zip(&expected.lse).enumerate() {
        if wanted == f64::NEG_INFINITY {
            assert_eq!(found, f32::NEG_INFINITY, "{what}: lse of row {row}");
        } else {
            let error = (f64::from(found) - wanted).abs() / wanted.abs().max(1.0);
            assert!(
                error <= BOUND,
                "{what}: lse of row {row} {found}, not {wanted}"
            );
        }
    }
    error
}

/// A small layer: heads, head size, block size and soft cap at random, without a window.
pub fn random_layer(rng: &mut Pcg64Mcg) -> AttentionConfig {
    let (num_heads, num_kv_heads) = *pick(rng, &[(1, 1), (4, 2), (6, 2), (8, 1)]);
    let head_size = *pick(rng, &[32, 64, 80]);
    AttentionConfig {
        num_heads,
        head_size,
        scale: 1.0 / (head_size as f32).sqrt(),
        num_kv_heads,
        sliding_window: None,
        logits_soft_cap: rng.random_bool(0.2).then_some(30.0),
        kv_cache_dtype: CacheDtype::F32,
        block_size: *pick(rng, &[1, 4, 16, 24]),
        batch_invariant: false,
    }
}
