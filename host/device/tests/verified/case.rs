//! A step whose cache holds NaN wherever a request may not look, and the right answer in float64. What metadata gives there
//! is found by running it on the CPU device, once for each request with everybody else's keys poisoned too. It must never know
//! how metadata was built or broken.

#[path = "ranks.rs"]
mod ranks;

use timetable_attention::{
    Grant, StepInputs, VerifyContext,
    batch::{ContextParallel, GroupStep, SlotRule, StepTensors, slot_mapping_into},
};
use timetable_device::cpu::{AttentionConfig, CacheDtype, KvCache, StepMetadata, new_impl};
use timetable_types::{
    BuilderConfig, Causal, KvCacheSpecKind, LaunchPromise, Metadata, batch::dcp_local_seq_lens_into,
};

#[path = "../support/builder_config.rs"]
mod builder_config;
#[path = "latent.rs"]
mod latent;

pub use builder_config::config;
use latent::LatentCase;

use crate::recurrent::Recurrent;

/// Where random choices start: the same every time, or where `TIMETABLE_TEST_SEED` says.
pub fn seed() -> u64 {
    let seed = std::env::var("TIMETABLE_TEST_SEED").ok();
    let seed = seed
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(20_261_130);
    println!("TIMETABLE_TEST_SEED={seed}");
    seed
}

/// SplitMix64: small, and the same everywhere.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `count`, which is at least 1.
    pub fn below(&mut self, count: usize) -> usize {
        (self.next() % count as u64) as usize
    }

    pub fn chance(&mut self, one_in: u64) -> bool {
        self.next().is_multiple_of(one_in)
    }

    pub fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    /// In −1..1.
    pub fn real(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Output that nothing wrote.
pub const UNWRITTEN: f32 = 1e30;
/// What rounding may do to an f32 result.
const BOUND: f64 = 2e-6;

/// A step, what it is verified with, and its keys.
pub struct Case {
    pub config: BuilderConfig,
    pub step: GroupStep,
    pub grant: Grant,
    pub promise: Option<LaunchPromise>,
    pub num_blocks: u32,
    /// A model state's own device fields.
    pub extras: Vec<(&'static str, Vec<i32>)>,
    layer: AttentionConfig,
    query: Vec<f32>,
    /// For each row, f32 [keys, kv heads, head size].
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    /// For each row that has tokens, the cache in which only its own keys are no NaN.
    caches: Vec<(usize, KvCache)>,
    /// f64 [tokens, heads, head size]: attention to every key.
    expected: Vec<f64>,
    /// Where the group keeps states: its layer.
    pub recurrent: Option<Recurrent>,
    /// Where the layer is one of latent attention, all of these.
    latent: Option<LatentCase>,
}

/// What running metadata showed.
#[derive(Debug, PartialEq)]
pub enum Ran {
    /// Each request got what it should.
    Right,
    /// The device runs no such record; the text says which.
    NotHere(String),
    /// What a request got instead.
    Wrong(String),
}

impl Case {
    /// Rows of (query tokens, keys), then `padding` rows and tokens without a request.
    pub fn new(
        mut config: BuilderConfig,
        causal: Causal,
        rows: &[(usize, usize)],
        (padding_rows, padding_tokens): (usize, usize),
        edit: impl FnOnce(&mut BuilderConfig, &mut GroupStep),
    ) -> Self {
        let random = &mut Random(rows.iter().map(|row| row.1 as u64 + 7).product());
        let block_size = config.kv_cache_spec.block_size as usize;
        let world = config.parallel.dcp_world_size as usize;
        let pages = |keys: usize| keys.div_ceil(block_size * world);
        let width = rows.iter().map(|row| pages(row.1)).max().unwrap_or(0) + 2;
        let used: usize = rows.iter().map(|row| pages(row.1)).sum();
        let num_blocks = used + 3;
        let mut free: Vec<i32> = (0..num_blocks as i32).collect();
        for place in (1..free.len()).rev() {
            free.swap(place, random.below(place + 1));
        }
        let (mut starts, mut lens, mut table, mut positions) =
            (vec![0i32], Vec::new(), Vec::new(), Vec::new());
        for &(query, keys) in rows {
            starts.push(starts[starts.len() - 1] + query as i32);
            lens.push(keys as i32);
            positions.extend((keys - query) as i64..keys as i64);
            let mut own = free.split_off(free.len() - pages(keys));
            // The columns behind a request's own name blocks that are others'.
            own.extend((own.len()..width).map(|_| random.below(num_blocks) as i32));
            table.extend(own);
        }
        let tokens = positions.len();
        for _ in 0..padding_rows {
            starts.push(tokens as i32);
            lens.push(0);
            table.extend((0..width).map(|_| random.below(num_blocks) as i32));
        }
        let mut slots = vec![-1; tokens + padding_tokens];
        let rule = SlotRule {
            block_size: block_size as u32,
            context_parallel: (world > 1).then_some(ContextParallel {
                size: world as u32,
                rank: config.parallel.dcp_rank,
                interleave: config.parallel.cp_kv_cache_interleave_size,
            }),
        };
        let row_of = |row: usize| table.get(row * width..(row + 1) * width);
        assert_eq!(
            slot_mapping_into(rule, row_of, &starts, &positions, &mut slots),
            0
        );
        positions.resize(tokens + padding_tokens, 0);
        let local = (world > 1).then(|| {
            let mut local = Vec::new();
            let parallel = &config.parallel;
            dcp_local_seq_lens_into(
                &lens,
                parallel.dcp_world_size,
                parallel.dcp_rank,
                parallel.cp_kv_cache_interleave_size,
                &mut local,
            );
            local
        });
        let flags = (0..lens.len()).map(|row| (row % 2) as i32).collect();
        let mut step = GroupStep::new(
            StepTensors {
                query_start_loc: starts,
                seq_lens: lens.clone(),
                block_table: table,
                block_table_width: width,
                slot_mapping: slots,
                positions,
                causal: (causal == Causal::PerRequest).then_some(flags),
                dcp_local_seq_lens: local.clone(),
                ..StepTensors::default()
            },
            lens,
            (tokens + padding_tokens) as u32,
            rows.iter().map(|row| row.0).max().unwrap_or(0) as u32,
            rows.iter().map(|row| row.1).max().unwrap_or(0) as u32,
        );
        step.cam.causal = causal;
        step.cam.is_prefilling = rows.iter().map(|row| u8::from(row.0 > 1)).collect();
        step.cam.dcp = local.map(|lens| timetable_types::DcpInputs {
            dcp_local_seq_lens_cpu_upper_bound: lens,
        });
        edit(&mut config, &mut step);
        Self::with_contents(config, step, num_blocks, rows, random)
    }

    fn with_contents(
        config: BuilderConfig,
        step: GroupStep,
        num_blocks: usize,
        rows: &[(usize, usize)],
        random: &mut Random,
    ) -> Self {
        let spec = &config.kv_cache_spec;
        // The ranks of context parallelism share their queries' heads.
        let ranks = match spec.kind {
            KvCacheSpecKind::MlaAttention => 1,
            _ => config.parallel.dcp_world_size as usize,
        };
        let layer = AttentionConfig {
            num_heads: config.attention.num_heads as usize * ranks,
            head_size: spec.head_size as usize,
            scale: config.attention.scale as f32,
            num_kv_heads: spec.num_kv_heads as usize,
            sliding_window: spec.sliding_window,
            logits_soft_cap: config.attention.logits_soft_cap.map(|cap| cap as f32),
            kv_cache_dtype: CacheDtype::F32,
            block_size: spec.block_size as usize,
            batch_invariant: false,
        };
        let tokens = rows.iter().map(|row| row.0).sum::<usize>();
        let all = step.cam.num_actual_tokens as usize;
        let width = layer.num_heads * layer.head_size;
        let mut query: Vec<f32> = (0..tokens * width).map(|_| 2.0 * random.real()).collect();
        query.resize(all * width, f32::NAN);
        let mut contents = || -> Vec<Vec<f32>> {
            let elements = layer.num_kv_heads * layer.head_size;
            let of = rows.iter().map(|row| row.1 * elements);
            of.map(|count| (0..count).map(|_| random.real()).collect())
                .collect()
        };
        let (keys, values) = (contents(), contents());
        let mut case = Case {
            grant: Grant::Exact,
            promise: None,
            num_blocks: num_blocks as u32,
            extras: Vec::new(),
            layer,
            query,
            keys,
            values,
            caches: Vec::new(),
            expected: Vec::new(),
            recurrent: None,
            latent: None,
            config,
            step,
        };
        let kind = case.config.kv_cache_spec.kind;
        if kind == KvCacheSpecKind::MlaAttention {
            let latent = LatentCase::new(&case.config, &case.step, num_blocks, rows, random);
            case.latent = Some(latent);
            return case;
        }
        let has_keys = kind != KvCacheSpecKind::Mamba;
        if case.config.parallel.dcp_world_size == 1 && has_keys {
            case.caches = (0..rows.len())
                .filter(|&row| rows[row].0 > 0)
                .map(|row| (row, case.poisoned_for(row)))
                .collect();
            case.expected = case.attention(|_, _| true);
        }
        case
    }

    /// Calls `f` with the step's context.
    pub fn with<T>(&self, f: impl FnOnce(&VerifyContext<'_>) -> T) -> T {
        let extras = self.extras.iter();
        let extras: Vec<_> = extras
            .map(|(name, rows)| (*name, rows.as_slice()))
            .collect();
        let inputs = StepInputs {
            extras: &extras,
            ..self.step.tensors.inputs()
        };
        f(&VerifyContext {
            config: &self.config,
            common: &self.step.cam,
            inputs: &inputs,
            promise: self.promise.as_ref(),
            grant: self.grant,
            num_blocks: self.num_blocks,
        })
    }

    fn query_len(&self, row: usize) -> usize {
        let starts = &self.step.tensors.query_start_loc;
        (starts[row + 1] - starts[row]) as usize
    }

    /// NaN but for the keys of `row` that its window reaches.
    fn poisoned_for(&self, row: usize) -> KvCache {
        let layer = self.layer;
        let mut cache = KvCache::new(
            self.num_blocks as usize,
            layer.num_kv_heads,
            layer.block_size,
            layer.head_size,
            layer.kv_cache_dtype,
        );
        cache.fill(f32::NAN);
        let elements = layer.num_kv_heads * layer.head_size;
        let count = self.keys[row].len() / elements;
        let freed = layer.sliding_window.map_or(0, |window| {
            (count + 1).saturating_sub(self.query_len(row) + window as usize)
        });
        let blocks = self.step.tensors.table().row(row);
        let slots: Vec<i64> = (0..count)
            .map(|position| match position < freed {
                true => -1,
                false => {
                    let block = i64::from(blocks[position / layer.block_size]);
                    block * layer.block_size as i64 + (position % layer.block_size) as i64
                }
            })
            .collect();
        let family = timetable_types::Family::FlashAttn;
        new_impl(family, layer)
            .expect("an impl")
            .do_kv_cache_update(&self.keys[row], &self.values[row], &mut cache, &slots);
        cache
    }

    /// Attention in f64, each row to those of its keys that `attends(row, key)` names, as far as causality and window allow.
    pub fn attention(&self, attends: impl Fn(usize, usize) -> bool) -> Vec<f64> {
        let layer = &self.layer;
        let (size, group) = (layer.head_size, layer.num_heads / layer.num_kv_heads);
        let mut output = vec![0.0; self.query.len()];
        let element = |of: &[f32], key: usize, head: usize, d: usize| {
            f64::from(of[(key * layer.num_kv_heads + head) * size + d])
        };
        for row in 0..self.keys.len() {
            let first = self.step.tensors.query_start_loc[row] as usize;
            let (query, count) = (
                self.query_len(row),
                self.keys[row].len() / (layer.num_kv_heads * size),
            );
            let causal = match self.step.cam.causal {
                Causal::All(causal) => causal,
                Causal::PerRequest => self.step.tensors.causal.as_ref().expect("flags")[row] != 0,
            };
            for token in 0..query {
                let position = count - query + token;
                let seen: Vec<usize> = (0..count)
                    .filter(|&key| attends(row, key) && !(causal && key > position))
                    .filter(|&key| {
                        layer.sliding_window.is_none_or(|window| {
                            key + window as usize > position && key < position + window as usize
                        })
                    })
                    .collect();
                for head in 0..layer.num_heads {
                    let at = ((first + token) * layer.num_heads + head) * size;
                    let scores: Vec<f64> = seen
                        .iter()
                        .map(|&key| {
                            let dot: f64 = (0..size)
                                .map(|d| {
                                    f64::from(self.query[at + d])
                                        * element(&self.keys[row], key, head / group, d)
                                })
                                .sum();
                            let score = f64::from(layer.scale) * dot;
                            layer.logits_soft_cap.map_or(score, |cap| {
                                f64::from(cap) * (score / f64::from(cap)).tanh()
                            })
                        })
                        .collect();
                    let max = scores.iter().fold(f64::NEG_INFINITY, |max, &s| max.max(s));
                    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
                    for (score, &key) in scores.iter().zip(&seen) {
                        for d in 0..size {
                            output[at + d] += (score - max).exp() / sum
                                * element(&self.values[row], key, head / group, d);
                        }
                    }
                }
            }
        }
        output
    }

    /// Prepares metadata that the verifier refused, and runs it if the device takes it. It may be refused again, or give wrong
    /// numbers; to return is the promise.
    pub fn survives(&self, metadata: &Metadata) -> bool {
        if let Some(recurrent) = &self.recurrent {
            return recurrent.run(self, metadata).is_ok();
        }
        if let Some(latent) = &self.latent {
            return latent.survives(metadata, &self.step);
        }
        if self.config.parallel.dcp_world_size > 1 {
            return !matches!(self.run_rank(metadata), Ran::NotHere(_));
        }
        let mut step = StepMetadata::new();
        let inputs = self.step.tensors.inputs();
        let prepared = step.prepare(metadata, &inputs, self.layer.block_size as u32);
        let (Ok(()), Some((_, cache))) = (prepared, self.caches.first()) else {
            return false;
        };
        let layer = new_impl(metadata.family(), self.layer).expect("an impl");
        let mut output = vec![UNWRITTEN; self.query.len()];
        let ran = layer.forward(&self.query, cache, Some(&step), &mut output, None);
        ran.is_ok()
    }

    /// Runs `metadata` against `expected`, or against attention to every key.
    pub fn run(&self, metadata: &Metadata, expected: Option<&[f64]>) -> Ran {
        if let Some(recurrent) = &self.recurrent {
            return match recurrent.run(self, metadata) {
                Ok(Ok(())) => Ran::Right,
                Ok(Err(problem)) => Ran::Wrong(problem),
                Err(problem) => Ran::NotHere(problem),
            };
        }
        if let Some(latent) = &self.latent {
            return latent.run(metadata, &self.step);
        }
        if self.caches.is_empty() {
            return self.run_rank(metadata);
        }
        let mut step = StepMetadata::new();
        let inputs = self.step.tensors.inputs();
        if let Err(error) = step.prepare(metadata, &inputs, self.layer.block_size as u32) {
            return Ran::NotHere(error.to_string());
        }
        let layer = new_impl(metadata.family(), self.layer).expect("an impl");
        let expected = expected.unwrap_or(&self.expected);
        let width = self.layer.num_heads * self.layer.head_size;
        let starts = &self.step.tensors.query_start_loc;
        let covered = starts[starts.len() - 1] as usize * width;
        let mut output = vec![UNWRITTEN; self.query.len()];
        for (row, cache) in &self.caches {
            output.fill(UNWRITTEN);
            if let Err(error) = layer.forward(&self.query, cache, Some(&step), &mut output, None) {
                return Ran::Wrong(format!("row {row}: {error}"));
            }
            let own = starts[*row] as usize * width..starts[row + 1] as usize * width;
            let size = self.layer.head_size;
            if let Outcome::Differs(at, found, right) =
                compare(&output[own.clone()], &expected[own], size)
            {
                let (token, head) = (at / self.layer.num_heads, at % self.layer.num_heads);
                return Ran::Wrong(format!(
                    "row {row}, token {token}, head {head}: {found} where {right} was right"
                ));
            }
            if output[covered..].iter().any(|&x| x != 0.0) {
                return Ran::Wrong("a token of no request is not zeros".to_owned());
            }
        }
        Ran::Right
    }
}

/// How an output compares with the right one.
pub enum Outcome {
    Close,
    /// Which row, its first element, and what was right there.
    Differs(usize, f32, f64),
}

/// Rows of `size` elements.
pub fn compare(output: &[f32], expected: &[f64], size: usize) -> Outcome {
    let pairs = output.chunks(size).zip(expected.chunks(size));
    for (row, (found, wanted)) in pairs.enumerate() {
        let scale = wanted.iter().fold(0.0f64, |scale, x| scale.max(x.abs()));
        let close = found
            .iter()
            .zip(wanted)
            .all(|(&found, wanted)| (f64::from(found) - wanted).abs() <= BOUND * scale.max(1e-3));
        if !close {
            return Outcome::Differs(row, found[0], wanted[0]);
        }
    }
    Outcome::Close
}
