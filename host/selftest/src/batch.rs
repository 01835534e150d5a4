//! Random paged batches on the host: requests, their pages in a shuffled cache, contents, and the reference's answer. It must
//! never know a kernel or a builder.
//!
//! Every state that no query of its own request sees holds NaN: other requests' blocks as far as they are not theirs either,
//! tails of pages, keys before a window. Unused columns of the block table name a block that the
//! cache has, that is nobody's and holds NaN.

use rayon::prelude::*;
use timetable_attention::batch::{GroupStep, StepTensors};
use timetable_device::reference::{self, Layer, Request};
use timetable_types::{
    AttentionConfig, BuilderConfig, Causal, CudagraphConfig, CudagraphMode, DeviceConfig, Dtype,
    KvCacheLayout, KvCacheSpec, KvCacheSpecKind, ParallelConfig, SchedulerConfig,
};

use crate::{element, random::Random};

/// What a batch looks like.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Of queries and results.
    pub dtype: Dtype,
    /// Of the cache.
    pub cache_dtype: Dtype,
    /// D
    pub head_size: usize,
    /// Hkv
    pub kv_heads: usize,
    /// Query heads of one KV head.
    pub group: usize,
    /// Tokens of a page.
    pub page: usize,
    /// LBNHC rather than LBHNC.
    pub nhd: bool,
    /// Keys that a token sees, itself included.
    pub window: Option<usize>,
    /// Soft cap of the scores.
    pub soft_cap: Option<f64>,
    /// Causal attention.
    pub causal: bool,
    /// Query tokens of each request.
    pub query_lens: Vec<usize>,
    /// Keys of each request, its query tokens included.
    pub kv_lens: Vec<usize>,
    /// Tokens beyond the last request's.
    pub padding: usize,
    /// Blocks of the cache at least; those that are nobody's hold NaN.
    pub min_blocks: usize,
    /// Columns of the block table at least.
    pub min_width: usize,
}

impl Shape {
    /// bf16, 2 KV heads of 128 with 4 query heads each, pages of 16 tokens, NHD, no requests.
    pub fn new() -> Self {
        Shape {
            dtype: Dtype::Bfloat16,
            cache_dtype: Dtype::Bfloat16,
            head_size: 128,
            kv_heads: 2,
            group: 4,
            page: 16,
            nhd: true,
            window: None,
            soft_cap: None,
            causal: true,
            query_lens: Vec::new(),
            kv_lens: Vec::new(),
            padding: 0,
            min_blocks: 0,
            min_width: 0,
        }
    }

    /// Hq
    pub fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    /// Multiplies q·k.
    pub fn scale(&self) -> f64 {
        // As the kernels take it, in f32.
        f64::from((1.0 / (self.head_size as f64).sqrt()) as f32)
    }

    /// Elements of one block of the cache.
    pub fn block_elements(&self) -> usize {
        self.kv_heads * self.page * 2 * self.head_size
    }

    /// First element of a state: a key, its value behind it.
    pub fn state_at(&self, block: usize, offset: usize, kv_head: usize) -> usize {
        let content = 2 * self.head_size;
        let state = if self.nhd {
            (offset * self.kv_heads + kv_head) * content
        } else {
            (kv_head * self.page + offset) * content
        };
        block * self.block_elements() + state
    }

    /// For people.
    pub fn describe(&self) -> String {
        format!(
            "{} cache {} D={} Hkv={} G={} page={} {} window={} cap={} {} queries {:?} keys {:?} padding {}",
            element::name(self.dtype),
            element::name(self.cache_dtype),
            self.head_size,
            self.kv_heads,
            self.group,
            self.page,
            if self.nhd { "NHD" } else { "HND" },
            self.window.map_or(0, |window| window),
            self.soft_cap.unwrap_or(0.0),
            if self.causal { "causal" } else { "not causal" },
            First(&self.query_lens),
            First(&self.kv_lens),
            self.padding
        )
    }

    /// What a builder for this batch's layer is made of.
    pub fn config(
        &self,
        max_num_splits: u32,
        capability: (u32, u32),
        workers: u32,
    ) -> BuilderConfig {
        let window = self.window.map_or(-1, |window| window as i32);
        let longest = self.kv_lens.iter().copied().max().unwrap_or(1).max(16) as u32;
        let tokens = (self.query_lens.iter().sum::<usize>() + self.padding).max(1) as u32;
        BuilderConfig {
            kv_cache_spec: KvCacheSpec {
                kind: match self.window {
                    None => KvCacheSpecKind::FullAttention,
                    Some(_) => KvCacheSpecKind::SlidingWindow,
                },
                block_size: self.page as u32,
                num_kv_heads: self.kv_heads as u32,
                head_size: self.head_size as u32,
                head_size_v: self.head_size as u32,
                dtype: self.cache_dtype,
                sliding_window: self.window.map(|window| window as u32),
                attention_chunk_size: None,
                dcp_sharded: false,
                mamba: None,
            },
            layer_names: vec!["model.layers.0.self_attn".to_owned()],
            attention: AttentionConfig {
                num_heads: self.heads() as u32,
                scale: self.scale(),
                logits_soft_cap: self.soft_cap,
                sliding_windows: vec![window],
                model_dtype: self.dtype,
                kv_cache_dtype: match self.cache_dtype {
                    Dtype::Float8E4m3 => "fp8_e4m3",
                    _ => "auto",
                }
                .to_owned(),
                kv_cache_layout: if self.nhd {
                    KvCacheLayout::Lbnhc
                } else {
                    KvCacheLayout::Lbhnc
                },
                has_sinks: false,
                use_rswa: false,
                rswa_window: 0,
                kv_lora_rank: 0,
                qk_rope_head_dim: 0,
            },
            scheduler: SchedulerConfig {
                max_num_seqs: self.query_lens.len().max(1) as u32,
                max_num_batched_tokens: tokens,
                max_model_len: longest,
                max_num_blocks_per_req: longest.div_ceil(self.page as u32) + 1,
                num_speculative_tokens: 0,
                parallel_drafting: false,
            },
            cudagraph: CudagraphConfig {
                mode: CudagraphMode::None,
                capture_sizes: Vec::new(),
                max_capture_size: 0,
            },
            parallel: ParallelConfig {
                dcp_world_size: 1,
                dcp_rank: 0,
                cp_kv_cache_interleave_size: 1,
                prefill_context_parallel: false,
            },
            device: DeviceConfig {
                compute_capability: capability,
                num_workers: workers,
                ctas_per_worker: 2,
                flash_attn_version: 2,
                trtllm_attention: false,
                xqa: false,
            },
            batch_invariant: false,
            max_num_splits,
            model_runner_v2: true,
            options: Vec::new(),
        }
    }
}

impl Default for Shape {
    fn default() -> Self {
        Self::new()
    }
}

/// The first few of a list.
struct First<'a>(&'a [usize]);

impl std::fmt::Debug for First<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = &self.0[..self.0.len().min(6)];
        write!(f, "{shown:?}")?;
        if shown.len() < self.0.len() {
            write!(f, "… ({})", self.0.len())?;
        }
        Ok(())
    }
}

/// A batch with its contents.
pub struct Batch {
    /// What it looks like.
    pub shape: Shape,
    /// The step: query starts, lengths, block table, slots, positions.
    pub step: GroupStep,
    /// Blocks of the cache, block 0 included, which belongs to nobody.
    pub num_blocks: usize,
    /// The queries as their dtype holds them, f32 [T, Hq, D], padding included.
    pub query: Vec<f32>,
    /// For each request its states, scaled: f32 [kv_len, Hkv, 2·D].
    pub states: Vec<Vec<f32>>,
    /// Device bytes of the cache.
    pub cache: Vec<u8>,
    /// fp8 caches: `[Hkv]` each; else ones.
    pub k_scale: Vec<f32>,
    /// As `k_scale`.
    pub v_scale: Vec<f32>,
}

/// The reference's answer.
pub struct Answer {
    /// f64 [T, Hq, D]; zeros for a token of no request.
    pub output: Vec<f64>,
    /// f64 [T, Hq], natural; −∞ for a token without keys.
    pub lse: Vec<f64>,
}

impl Batch {
    /// Fills a batch of that shape with normal values.
    pub fn new(shape: &Shape, random: &mut Random) -> Self {
        Self::with_values(shape, random, |_, values| values)
    }

    /// As [`Batch::new`]; `change(request, states)` may change a request's states `[kv_len, Hkv, 2·D]` before they are
    /// rounded.
    pub fn with_values(
        shape: &Shape,
        random: &mut Random,
        change: impl Fn(usize, Vec<f32>) -> Vec<f32>,
    ) -> Self {
        let (page, content) = (shape.page, 2 * shape.head_size);
        let pages: Vec<usize> = shape.kv_lens.iter().map(|len| len.div_ceil(page)).collect();
        let num_blocks = (pages.iter().sum::<usize>() + 2).max(shape.min_blocks);
        let mut order: Vec<i32> = (1..num_blocks as i32).collect();
        random.shuffle(&mut order);
        // The block that is left over is nobody's: what unused columns name.
        let nobody = order.pop().unwrap_or(0);
        let width = (pages.iter().copied().max().unwrap_or(0) + 1).max(shape.min_width);
        let (mut k_scale, mut v_scale) = (vec![1.0; shape.kv_heads], vec![1.0; shape.kv_heads]);
        if shape.cache_dtype == Dtype::Float8E4m3 {
            for scale in k_scale.iter_mut().chain(&mut v_scale) {
                *scale = 0.5 + 0.125 * random.int(0, 8) as f32;
            }
        }
        let element_bytes = element::bytes(shape.cache_dtype);
        let mut cache = vec![0xff; num_blocks * shape.block_elements() * element_bytes];
        let mut tensors = StepTensors {
            query_start_loc: vec![0],
            block_table_width: width,
            ..StepTensors::default()
        };
        let mut states = Vec::new();
        for (row, (&q_len, &kv_len)) in shape.query_lens.iter().zip(&shape.kv_lens).enumerate() {
            let blocks: Vec<i32> = order.split_off(order.len() - pages[row]);
            tensors.block_table.extend(&blocks);
            tensors
                .block_table
                .extend(std::iter::repeat_n(nobody, width - blocks.len()));
            let drawn = random.normal(kv_len * shape.kv_heads * content, 1.0);
            let bytes = element::encode(shape.cache_dtype, &change(row, drawn));
            // Keys before the first query's window are seen by nobody.
            let first = match shape.window {
                _ if q_len == 0 => kv_len,
                Some(window) => (kv_len + 1).saturating_sub(q_len + window),
                None => 0,
            };
            for key in first..kv_len {
                for head in 0..shape.kv_heads {
                    let to = shape.state_at(blocks[key / page] as usize, key % page, head);
                    let from = (key * shape.kv_heads + head) * content;
                    cache[to * element_bytes..(to + content) * element_bytes].copy_from_slice(
                        &bytes[from * element_bytes..(from + content) * element_bytes],
                    );
                }
            }
            let mut values = element::decode(shape.cache_dtype, &bytes);
            if shape.cache_dtype == Dtype::Float8E4m3 {
                for (index, state) in values.chunks_mut(content).enumerate() {
                    let head = index % shape.kv_heads;
                    let (k, v) = state.split_at_mut(shape.head_size);
                    k.iter_mut().for_each(|x| *x *= k_scale[head]);
                    v.iter_mut().for_each(|x| *x *= v_scale[head]);
                }
            }
            states.push(values);
            for position in kv_len - q_len..kv_len {
                tensors.positions.push(position as i64);
                tensors.slot_mapping.push(
                    i64::from(blocks[position / page]) * page as i64 + (position % page) as i64,
                );
            }
            tensors.query_start_loc.push(tensors.positions.len() as i32);
            tensors.seq_lens.push(kv_len as i32);
        }
        let num_tokens = tensors.positions.len() + shape.padding;
        tensors.positions.resize(num_tokens, 0);
        tensors.slot_mapping.resize(num_tokens, -1);
        let query = random.normal(num_tokens * shape.heads() * shape.head_size, 1.0);
        let lens = tensors.seq_lens.clone();
        let longest = |lens: &[usize]| lens.iter().copied().max().unwrap_or(0) as u32;
        let mut step = GroupStep::new(
            tensors,
            lens,
            num_tokens as u32,
            longest(&shape.query_lens),
            longest(&shape.kv_lens),
        );
        step.cam.causal = Causal::All(shape.causal);
        Batch {
            step,
            num_blocks,
            query: element::rounded(shape.dtype, &query),
            states,
            cache,
            k_scale,
            v_scale,
            shape: shape.clone(),
        }
    }

    /// T, padding included.
    pub fn num_tokens(&self) -> usize {
        self.step.cam.num_actual_tokens as usize
    }

    /// R
    pub fn num_reqs(&self) -> usize {
        self.shape.query_lens.len()
    }

    /// Attention in f64, every request on its own.
    pub fn answer(&self) -> Answer {
        let shape = &self.shape;
        let (heads, size, group) = (shape.heads(), shape.head_size, shape.group);
        let layer = Layer {
            num_heads: group,
            num_kv_heads: 1,
            head_size: size,
            scale: shape.scale(),
            sliding_window: shape.window,
            logits_soft_cap: shape.soft_cap,
        };
        let mut answer = Answer {
            output: vec![0.0; self.num_tokens() * heads * size],
            lse: vec![f64::NEG_INFINITY; self.num_tokens() * heads],
        };
        let parts: Vec<(usize, usize)> = (0..self.num_reqs())
            .flat_map(|row| (0..shape.kv_heads).map(move |head| (row, head)))
            .collect();
        let results: Vec<_> = parts
            .par_iter()
            .map(|&(row, kv_head)| {
                let first = self.step.tensors.query_start_loc[row] as usize;
                let q_len = shape.query_lens[row];
                let mut query = Vec::with_capacity(q_len * group * size);
                for token in first..first + q_len {
                    let from = (token * heads + kv_head * group) * size;
                    query.extend_from_slice(&self.query[from..from + group * size]);
                }
                let request = Request {
                    first_token: 0,
                    q_len,
                    kv_len: shape.kv_lens[row],
                    causal: shape.causal,
                };
                reference::attention(&layer, &[request], q_len, &query, |_, key, _| {
                    let from = (key * shape.kv_heads + kv_head) * 2 * size;
                    let state = &self.states[row][from..from + 2 * size];
                    (state[..size].to_vec(), state[size..].to_vec())
                })
            })
            .collect();
        for ((row, kv_head), result) in parts.into_iter().zip(results) {
            let first = self.step.tensors.query_start_loc[row] as usize;
            for token in 0..shape.query_lens[row] {
                let to = (first + token) * heads + kv_head * group;
                let from = token * group;
                answer.lse[to..to + group].copy_from_slice(&result.lse[from..from + group]);
                answer.output[to * size..(to + group) * size]
                    .copy_from_slice(&result.output[from * size..(from + group) * size]);
            }
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use timetable_attention::{Grant, VerifyContext, verify_step};

    use super::*;

    fn shape() -> Shape {
        Shape {
            head_size: 64,
            window: Some(9),
            query_lens: vec![1, 3, 20, 0],
            kv_lens: vec![40, 3, 33, 12],
            padding: 2,
            ..Shape::new()
        }
    }

    #[test]
    fn a_batch_is_a_step_that_the_verifier_accepts() {
        let shape = shape();
        let batch = Batch::new(&shape, &mut Random::new(1));
        let config = shape.config(8, (9, 0), 132);
        let inputs = batch.step.tensors.inputs();
        let accepted = verify_step(&VerifyContext {
            config: &config,
            common: &batch.step.cam,
            inputs: &inputs,
            promise: None,
            grant: Grant::Exact,
            num_blocks: batch.num_blocks as u32,
        });
        assert!(accepted.is_ok(), "{accepted:?}");
        assert_eq!(batch.query.len(), 26 * 8 * 64);
    }

    #[test]
    fn what_no_query_sees_is_nan_and_the_answer_is_not() {
        let shape = shape();
        let batch = Batch::new(&shape, &mut Random::new(2));
        let values = element::decode(shape.cache_dtype, &batch.cache);
        let seen = values.iter().filter(|x| !x.is_nan()).count();
        // Row 0 sees its last 9 keys, row 1 all 3, row 2 the last 28, row 3 asks nothing.
        assert_eq!(seen, (9 + 3 + 28) * 2 * 2 * 64);
        let answer = batch.answer();
        assert!(answer.output.iter().all(|x| x.is_finite()));
        let tokens = |lse: &[f64]| lse.iter().filter(|x| x.is_finite()).count();
        assert_eq!(tokens(&answer.lse), 24 * 8);
    }
}
