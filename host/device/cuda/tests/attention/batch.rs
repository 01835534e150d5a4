//! Random groups and batches, and what attention over them gives, in f64. It must never know a device.

use half::{bf16, f16};
use rand::{Rng, seq::SliceRandom};
use rand_pcg::Pcg64;
use timetable_attention::{
    Grant, StepInputs, VerifyContext,
    batch::{GroupStep, PaddingValues, StepTensors, pad_step},
};
use timetable_device_cuda::{
    attention::GroupConfig,
    cache::{CacheDtype, CacheShape},
    kernels::Element,
    upload::StepLimits,
};
use timetable_types::{
    AttentionConfig, BuilderConfig, CudagraphConfig, CudagraphMode, DeviceConfig, Dtype, Family,
    KvCacheLayout, KvCacheSpec, KvCacheSpecKind, Metadata, ParallelConfig, SchedulerConfig,
    flash_attn::TileOrder,
    flashinfer::{Decode, Plan, Prefill, WorkList},
};

pub(crate) const NUM_BLOCKS: usize = 420;
pub(crate) const WIDTH: usize = 64;
pub(crate) const MAX_REQS: usize = 24;
pub(crate) const MAX_TOKENS: usize = 512;
/// Steps of one configuration.
pub(crate) const STEPS: usize = 8;

/// One attention group and its layer.
pub(crate) struct Setup {
    pub(crate) config: BuilderConfig,
    pub(crate) group: GroupConfig,
    pub(crate) layout: KvCacheLayout,
    pub(crate) scales: Option<(f32, f32)>,
}

impl Setup {
    pub(crate) fn random(rng: &mut Pcg64, multiprocessors: u32) -> Self {
        let element = [Element::Bf16, Element::F16, Element::F32][rng.random_range(0..3)];
        let dtype = match element {
            Element::Bf16 => Dtype::Bfloat16,
            Element::F16 => Dtype::Float16,
            Element::F32 => Dtype::Float32,
        };
        let is_fp8 = element != Element::F32 && rng.random_bool(0.3);
        let cache = match CacheDtype::of(dtype) {
            _ if is_fp8 => CacheDtype::Fp8E4m3,
            Some(cache) => cache,
            None => panic!("{dtype:?} has a cache"),
        };
        let (num_heads, num_kv_heads) =
            [(4, 1), (8, 2), (9, 3), (2, 2), (24, 1)][rng.random_range(0..5)];
        let head_size = [64, 96, 128, 256][rng.random_range(0..4)];
        let block_size = [16, 32][rng.random_range(0..2)];
        let layout = [
            KvCacheLayout::Lbhnc,
            KvCacheLayout::Lbnhc,
            KvCacheLayout::Bhlnc,
        ][rng.random_range(0..3)];
        let family = [Family::FlashAttn, Family::Flashinfer][rng.random_range(0..2)];
        let window = rng.random_bool(0.3).then(|| rng.random_range(1..150));
        let config = BuilderConfig {
            layer_names: vec!["a layer".to_owned()],
            kv_cache_spec: KvCacheSpec {
                kind: KvCacheSpecKind::FullAttention,
                block_size,
                num_kv_heads,
                head_size,
                head_size_v: head_size,
                dtype: if is_fp8 { Dtype::Float8E4m3 } else { dtype },
                sliding_window: window,
                attention_chunk_size: None,
                dcp_sharded: false,
                mamba: None,
            },
            attention: AttentionConfig {
                num_heads,
                scale: 1.0 / f64::from(head_size).sqrt(),
                logits_soft_cap: rng.random_bool(0.3).then_some(5.0),
                sliding_windows: window.map(|window| window as i32).into_iter().collect(),
                model_dtype: dtype,
                kv_cache_dtype: if is_fp8 { "fp8" } else { "auto" }.to_owned(),
                kv_cache_layout: layout,
                has_sinks: false,
                use_rswa: false,
                rswa_window: 0,
                kv_lora_rank: 0,
                qk_rope_head_dim: 0,
            },
            scheduler: SchedulerConfig {
                max_num_seqs: MAX_REQS as u32,
                max_num_batched_tokens: MAX_TOKENS as u32,
                max_model_len: WIDTH as u32 * block_size,
                max_num_blocks_per_req: WIDTH as u32,
                num_speculative_tokens: 0,
                parallel_drafting: false,
            },
            cudagraph: CudagraphConfig {
                mode: CudagraphMode::FullAndPiecewise,
                capture_sizes: vec![MAX_REQS as u32],
                max_capture_size: MAX_REQS as u32,
            },
            parallel: ParallelConfig {
                dcp_world_size: 1,
                dcp_rank: 0,
                cp_kv_cache_interleave_size: 1,
                prefill_context_parallel: false,
            },
            device: DeviceConfig {
                compute_capability: (9, 0),
                num_workers: multiprocessors,
                ctas_per_worker: 2,
                flash_attn_version: 3,
                trtllm_attention: false,
                xqa: false,
            },
            batch_invariant: false,
            max_num_splits: 32,
            model_runner_v2: true,
            options: Vec::new(),
        };
        let limits = StepLimits {
            max_num_reqs: MAX_REQS,
            max_num_tokens: MAX_TOKENS,
            table_width: WIDTH,
        };
        let group = GroupConfig::new(family, &config, element, cache, limits, multiprocessors)
            .expect("a good group");
        Self {
            config,
            group,
            layout,
            scales: is_fp8.then_some((0.5, 2.0)),
        }
    }

    pub(crate) fn cache_shape(&self) -> CacheShape {
        CacheShape {
            num_layers: 2,
            num_blocks: NUM_BLOCKS,
            num_kv_heads: self.group.num_kv_heads as usize,
            block_size: self.group.block_size as usize,
            head_size: self.group.head_size as usize,
            dtype: self.group.cache,
            layout: self.layout,
        }
    }
}

/// A number that every dtype here has: queries, and keys and values, which an fp8 cache holds divided by a power of two.
pub(crate) fn small(rng: &mut Pcg64) -> f32 {
    f32::from(rng.random_range(-15_i8..=15)) / 8.0
}

pub(crate) fn encode(element: Element, values: &[f32]) -> Vec<u8> {
    match element {
        Element::Bf16 => values
            .iter()
            .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
            .collect(),
        Element::F16 => values
            .iter()
            .flat_map(|&x| f16::from_f32(x).to_le_bytes())
            .collect(),
        Element::F32 => values.iter().flat_map(|&x| x.to_le_bytes()).collect(),
    }
}

pub(crate) fn decode(element: Element, bytes: &[u8]) -> Vec<f32> {
    match element {
        Element::Bf16 => bytes
            .chunks(2)
            .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect(),
        Element::F16 => bytes
            .chunks(2)
            .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect(),
        Element::F32 => bytes
            .chunks(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect(),
    }
}

/// e4m3 of a value that it has: sign, exponent and three bits.
pub(crate) fn e4m3(value: f32) -> u8 {
    let sign = if value < 0.0 { 0x80 } else { 0 };
    let size = value.abs();
    if size == 0.0 {
        return sign;
    }
    let exponent = size.log2().floor() as i32;
    let mantissa = (size / (exponent as f32).exp2() - 1.0) * 8.0;
    assert!(
        mantissa.fract() == 0.0 && (-6..=8).contains(&exponent),
        "{value} is no e4m3"
    );
    sign | ((exponent + 7) as u8) << 3 | mantissa as u8
}

/// A batch: its tensors, queries, and the keys and values of every request, this step's last.
pub(crate) struct Batch {
    pub(crate) step: GroupStep,
    /// f32 `[T, Hq, D]`
    pub(crate) query: Vec<f32>,
    /// For each row f32 `[len, Hkv, D]`.
    pub(crate) keys: Vec<Vec<f32>>,
    pub(crate) values: Vec<Vec<f32>>,
}

impl Batch {
    pub(crate) fn random(
        rng: &mut Pcg64,
        setup: &Setup,
        num_decodes: usize,
        num_prefills: usize,
    ) -> Self {
        let block = setup.group.block_size as usize;
        let mut blocks: Vec<i32> = (1..NUM_BLOCKS as i32).collect();
        blocks.shuffle(rng);
        let (mut starts, mut lens) = (vec![0_i32], Vec::new());
        let mut table = Vec::new();
        let mut slots = Vec::new();
        for row in 0..num_decodes + num_prefills {
            let query = if row < num_decodes {
                1
            } else {
                rng.random_range(2..60)
            };
            // The last row takes what is left of the tokens.
            let query = query.min(MAX_TOKENS as i32 - starts[row]);
            let len = query
                + if rng.random_bool(0.3) {
                    0
                } else {
                    rng.random_range(0..(16 * block as i32))
                };
            let own: Vec<i32> = (0..(len as usize).div_ceil(block))
                .map(|_| blocks.pop().expect("enough blocks"))
                .collect();
            slots.extend((len - query..len).map(|key| {
                i64::from(own[key as usize / block]) * block as i64 + i64::from(key) % block as i64
            }));
            table.extend_from_slice(&own);
            // Never read.
            table.resize((row + 1) * WIDTH, i32::MAX);
            starts.push(starts[row] + query);
            lens.push(len);
        }
        let tokens = starts[lens.len()] as usize;
        let tensors = StepTensors {
            query_start_loc: starts,
            seq_lens: lens.clone(),
            block_table: table,
            block_table_width: WIDTH,
            slot_mapping: slots,
            positions: vec![0; tokens],
            ..StepTensors::default()
        };
        let longest = |values: &mut dyn Iterator<Item = i32>| values.max().unwrap_or(0) as u32;
        let max_query = longest(
            &mut tensors
                .query_start_loc
                .windows(2)
                .map(|pair| pair[1] - pair[0]),
        );
        let mut step = GroupStep::new(
            tensors,
            lens.clone(),
            tokens as u32,
            max_query,
            longest(&mut lens.iter().copied()),
        );
        step.cam.is_prefilling = vec![0; lens.len()];
        let mut numbers = |count: usize| -> Vec<f32> { (0..count).map(|_| small(rng)).collect() };
        let kv = (setup.group.num_kv_heads * setup.group.head_size) as usize;
        let q = (setup.group.num_heads * setup.group.head_size) as usize;
        Self {
            query: numbers(tokens * q),
            keys: lens.iter().map(|&len| numbers(len as usize * kv)).collect(),
            values: lens.iter().map(|&len| numbers(len as usize * kv)).collect(),
            step,
        }
    }

    /// The same with padded rows and tokens; queries are zeros there.
    pub(crate) fn padded(mut self, setup: &Setup, num_reqs: usize, num_tokens: usize) -> Self {
        self.step = pad_step(
            &self.step,
            num_tokens as u32,
            num_reqs as u32,
            PaddingValues::default(),
        )
        .expect("larger");
        let q = (setup.group.num_heads * setup.group.head_size) as usize;
        self.query.resize(num_tokens * q, 0.0);
        self
    }

    pub(crate) fn num_tokens(&self) -> usize {
        self.step.cam.num_actual_tokens as usize
    }

    /// This step's keys or values, f32 `[T, Hkv, D]`: of padded tokens NaN, which no slot takes.
    pub(crate) fn fresh(&self, of_row: &[Vec<f32>], width: usize) -> Vec<f32> {
        let starts = &self.step.tensors.query_start_loc;
        let mut fresh = Vec::new();
        for (row, all) in of_row.iter().enumerate() {
            let query = (starts[row + 1] - starts[row]) as usize;
            fresh.extend_from_slice(&all[all.len() - query * width..]);
        }
        fresh.resize(self.num_tokens() * width, f32::NAN);
        fresh
    }

    /// The cache's bytes before the step: NaN but for what its requests have stored.
    pub(crate) fn cache(&self, setup: &Setup) -> Vec<u8> {
        let shape = setup.cache_shape();
        let strides = shape.strides().expect("small");
        let mut bytes = vec![0xFF_u8; shape.bytes().expect("small")];
        let (size, width) = (shape.dtype.size(), shape.head_size);
        let tensors = &self.step.tensors;
        for (row, (keys, values)) in self.keys.iter().zip(&self.values).enumerate() {
            let query = tensors.query_start_loc[row + 1] - tensors.query_start_loc[row];
            for key in 0..(tensors.seq_lens[row] - query) as usize {
                let block = tensors.block_table[row * WIDTH + key / shape.block_size] as i64;
                for head in 0..shape.num_kv_heads {
                    let at = strides.layer
                        + block * strides.block
                        + head as i64 * strides.head
                        + (key % shape.block_size) as i64 * strides.token;
                    let from = (key * shape.num_kv_heads + head) * width;
                    for (part, of_row) in [keys, values].into_iter().enumerate() {
                        let stored = self.stored(setup, &of_row[from..from + width], part);
                        let begin = (at as usize + part * width) * size;
                        bytes[begin..begin + stored.len()].copy_from_slice(&stored);
                    }
                }
            }
        }
        bytes
    }

    pub(crate) fn stored(&self, setup: &Setup, state: &[f32], part: usize) -> Vec<u8> {
        match setup.scales {
            Some((key, value)) => {
                let scale = [key, value][part];
                state.iter().map(|&x| e4m3(x / scale)).collect()
            }
            None => encode(setup.group.element, state),
        }
    }

    /// f64 attention: outputs `[T, Hq, D]` and LSE `[T, Hq]`.
    pub(crate) fn reference(&self, setup: &Setup) -> (Vec<f64>, Vec<f64>) {
        let group = &setup.group;
        let (heads, size) = (group.num_heads as usize, group.head_size as usize);
        let kv_heads = group.num_kv_heads as usize;
        let mut output = vec![0.0; self.num_tokens() * heads * size];
        let mut lse = vec![f64::NEG_INFINITY; self.num_tokens() * heads];
        let starts = &self.step.tensors.query_start_loc;
        for (row, (keys, values)) in self.keys.iter().zip(&self.values).enumerate() {
            let len = self.step.tensors.seq_lens[row] as usize;
            let query = (starts[row + 1] - starts[row]) as usize;
            for token in 0..query {
                let position = len - query + token;
                let low = group
                    .sliding_window
                    .map_or(0, |window| (position + 1).saturating_sub(window as usize));
                for head in 0..heads {
                    let kv_head = head / (heads / kv_heads);
                    let at = (starts[row] as usize + token) * heads + head;
                    let q = &self.query[at * size..(at + 1) * size];
                    let state = |key: usize| {
                        let begin = (key * kv_heads + kv_head) * size;
                        begin..begin + size
                    };
                    let scores: Vec<f64> = (low..=position)
                        .map(|key| {
                            let pairs = q.iter().zip(&keys[state(key)]);
                            let dot: f64 = pairs.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                            let score = dot * f64::from(group.scale);
                            group.logits_soft_cap.map_or(score, |cap| {
                                f64::from(cap) * (score / f64::from(cap)).tanh()
                            })
                        })
                        .collect();
                    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let total: f64 = scores.iter().map(|score| (score - top).exp()).sum();
                    lse[at] = top + total.ln();
                    let output = &mut output[at * size..(at + 1) * size];
                    for (score, key) in scores.iter().zip(low..) {
                        let weight = (score - top).exp() / total;
                        for (sum, &value) in output.iter_mut().zip(&values[state(key)]) {
                            *sum += weight * f64::from(value);
                        }
                    }
                }
            }
        }
        (output, lse)
    }
}

pub(crate) fn context<'a>(
    setup: &'a Setup,
    batch: &'a Batch,
    inputs: &'a StepInputs<'a>,
) -> VerifyContext<'a> {
    VerifyContext {
        config: &setup.config,
        common: &batch.step.cam,
        inputs,
        promise: None,
        grant: Grant::Exact,
        num_blocks: NUM_BLOCKS as u32,
    }
}

/// A schedule or work list that is not the plain builder's.
pub(crate) fn reschedule(
    rng: &mut Pcg64,
    metadata: &mut Metadata,
    step: &GroupStep,
    head_size: u32,
) {
    let rows = step.tensors.seq_lens.len();
    let starts = &step.tensors.query_start_loc;
    match metadata {
        Metadata::FlashAttn(record) => {
            record.schedule.num_splits = (0..rows).map(|_| rng.random_range(1..9)).collect();
            record.schedule.max_num_splits = 8;
            let mut order: Vec<i32> = (0..rows as i32).collect();
            order.shuffle(rng);
            record.schedule.tile_order = TileOrder::Rows(order);
        }
        Metadata::Flashinfer(record) => {
            let first = record.num_decodes as usize;
            if let Some(Decode::Wrapper(plan)) = &mut record.decode {
                rework(rng, plan, &starts[..=first], &[16, 64]);
            }
            if let Some(Prefill::Wrapper(plan)) = &mut record.prefill {
                let tiles: &[u32] = if head_size == 256 {
                    &[16, 64]
                } else {
                    &[16, 64, 128]
                };
                rework(rng, plan, &starts[first..], tiles);
            }
        }
        other => panic!("{:?}", other.family()),
    }
}

pub(crate) fn rework(rng: &mut Pcg64, plan: &mut Plan, starts: &[i32], tiles: &[u32]) {
    let tile = tiles[rng.random_range(0..tiles.len())];
    let chunk = plan.page_size * rng.random_range(3..20);
    let group = plan.num_qo_heads / plan.num_kv_heads;
    let (mut items, mut merge_indptr) = (Vec::new(), vec![0]);
    for (row, pair) in starts.windows(2).enumerate() {
        let packed = (pair[1] - pair[0]) as u32 * group;
        for q in 0..packed.div_ceil(tile) {
            let chunks = (plan.seq_lens[row] as u32).div_ceil(chunk).max(1);
            merge_indptr.push(merge_indptr[merge_indptr.len() - 1] + chunks as i32);
            items.extend((0..chunks).map(|k| (row as i32, q as i32, k as i32)));
        }
    }
    items.shuffle(rng);
    let num_tiles = merge_indptr.len() - 1;
    plan.work = WorkList {
        kv_chunk_size: chunk,
        cta_tile_q: tile,
        request_indices: items.iter().map(|item| item.0).collect(),
        qo_tile_indices: items.iter().map(|item| item.1).collect(),
        kv_tile_indices: items.iter().map(|item| item.2).collect(),
        worker_indptr: vec![0, items.len() as i32],
        split_kv: items.len() > num_tiles,
        merge_indptr,
    };
}

/// A batch of the test: decodes alone, padded to the captured shape, or a mixture.
pub(crate) fn random_batch(rng: &mut Pcg64, setup: &Setup) -> (Batch, bool) {
    if rng.random_bool(0.5) {
        let decodes = rng.random_range(1..=16);
        let batch = Batch::random(rng, setup, decodes, 0);
        return (batch.padded(setup, 16, 16), true);
    }
    let (decodes, prefills) = (rng.random_range(0..8), rng.random_range(0..6));
    let batch = Batch::random(rng, setup, decodes, prefills);
    if rng.random_bool(0.5) {
        let tokens = (batch.num_tokens() + 3).min(MAX_TOKENS);
        return (batch.padded(setup, decodes + prefills + 2, tokens), false);
    }
    (batch, false)
}
