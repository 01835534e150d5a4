//! Random paged batches, and random schedules and work lists for them, made here and nowhere else: no builder's logic is
//! used, so that a builder's mistake cannot hide one of the device's.
#![allow(dead_code, reason = "each test binary uses its own part")]

use rand::{Rng, SeedableRng, seq::SliceRandom};
use rand_pcg::Pcg64Mcg;
use timetable_attention::{BlockTable, StepInputs};
use timetable_device::{
    cpu::{AttentionConfig, CacheDtype, KvCache, StepMetadata, new_impl},
    reference,
};
use timetable_types::{
    Causal, Dtype, Family, Input, KvCacheLayout, Metadata, RowRange, Tensor, TensorSlice,
    flash_attn, flashinfer,
};

pub fn rng(seed: u64) -> Pcg64Mcg {
    Pcg64Mcg::seed_from_u64(seed)
}

/// Standard normal (Box and Muller).
pub fn normal(rng: &mut Pcg64Mcg) -> f32 {
    let (u, v): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    ((-2.0 * u.ln()).sqrt() * (2.0 * std::f64::consts::PI * v).cos()) as f32
}

pub fn normals(rng: &mut Pcg64Mcg, count: usize) -> Vec<f32> {
    (0..count).map(|_| normal(rng)).collect()
}

pub fn config(num_heads: usize, num_kv_heads: usize, head_size: usize) -> AttentionConfig {
    AttentionConfig {
        num_heads,
        head_size,
        scale: 1.0 / (head_size as f32).sqrt(),
        num_kv_heads,
        sliding_window: None,
        logits_soft_cap: None,
        kv_cache_dtype: CacheDtype::F32,
        block_size: 16,
        batch_invariant: false,
    }
}

/// A layer drawn from what the product must run: MHA, GQA, MQA; odd and usual head and block sizes; window; soft cap.
pub fn random_config(rng: &mut Pcg64Mcg, dtype: CacheDtype) -> AttentionConfig {
    let (num_heads, num_kv_heads) = *pick(
        rng,
        &[
            (1, 1),
            (2, 2),
            (2, 1),
            (3, 1),
            (4, 2),
            (8, 2),
            (9, 3),
            (5, 1),
            (8, 1),
            (16, 1),
        ],
    );
    let mut config = config(
        num_heads,
        num_kv_heads,
        *pick(rng, &[32, 40, 64, 64, 80, 128, 256]),
    );
    config.block_size = *pick(rng, &[1, 4, 16, 16, 16, 32, 48, 128]);
    config.kv_cache_dtype = dtype;
    if rng.random_bool(0.35) {
        config.sliding_window = Some(*pick(rng, &[1, 2, 7, 16, 33, 64, 100, 1000]));
    }
    if rng.random_bool(0.25) {
        config.logits_soft_cap = Some(*pick(rng, &[0.5, 5.0, 30.0, 50.0]));
    }
    config
}

pub fn pick<'a, T>(rng: &mut Pcg64Mcg, choices: &'a [T]) -> &'a T {
    &choices[rng.random_range(0..choices.len())]
}

/// One step: requests with their keys already in the cache.
pub struct Batch {
    pub config: AttentionConfig,
    pub causal: Causal,
    /// (query tokens, keys), live rows first.
    pub rows: Vec<(usize, usize)>,
    pub num_tokens: usize,
    pub query_start_loc: Vec<i32>,
    pub seq_lens: Vec<i32>,
    pub block_table: Vec<i32>,
    pub width: usize,
    pub causal_flags: Vec<i32>,
    /// f32 [num_tokens, num_heads, head_size]
    pub query: Vec<f32>,
    /// Per row, f32 [keys, num_kv_heads, head_size], unrounded.
    pub keys: Vec<Vec<f32>>,
    pub values: Vec<Vec<f32>>,
    pub cache: KvCache,
}

impl Batch {
    /// Rows with random contents. Everything in the cache that the step may not read is NaN, and so are the queries of
    /// padding tokens.
    pub fn new(
        rng: &mut Pcg64Mcg,
        config: AttentionConfig,
        causal: Causal,
        rows: &[(usize, usize)],
        padding_tokens: usize,
    ) -> Self {
        let mut query_start_loc = vec![0];
        let mut tokens = 0;
        for &(q_len, _) in rows {
            tokens += q_len;
            query_start_loc.push(tokens as i32);
        }
        let num_tokens = tokens + padding_tokens;
        let causal_flags: Vec<i32> = rows.iter().map(|_| rng.random_range(0..2)).collect();
        let row_width = config.num_heads * config.head_size;
        let mut query = normals(rng, tokens * row_width);
        query.resize(num_tokens * row_width, f32::NAN);

        let pages = |keys: usize| keys.div_ceil(config.block_size);
        let used: usize = rows.iter().map(|&(_, keys)| pages(keys)).sum();
        let width = rows
            .iter()
            .map(|&(_, keys)| pages(keys))
            .max()
            .unwrap_or(0)
            .max(1)
            + 1;
        let num_blocks = used + 3;
        let mut blocks: Vec<i32> = (0..num_blocks as i32).collect();
        blocks.shuffle(rng);
        let mut cache = KvCache::new(
            num_blocks,
            config.num_kv_heads,
            config.block_size,
            config.head_size,
            config.kv_cache_dtype,
        );
        cache.fill(f32::NAN);
        let writer = new_impl(Family::FlashAttn, config).unwrap();
        let mut block_table = Vec::new();
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        let mut next = 0;
        for (row, &(q_len, kv_len)) in rows.iter().enumerate() {
            let own = &blocks[next..next + pages(kv_len)];
            next += pages(kv_len);
            block_table.extend_from_slice(own);
            block_table.resize((row + 1) * width, 0);
            let elements = kv_len * config.num_kv_heads * config.head_size;
            let (key, value) = (normals(rng, elements), normals(rng, elements));
            // Keys before every window are as good as freed: they stay NaN.
            let freed = match (&causal, config.sliding_window) {
                (_, Some(window)) => (kv_len + 1).saturating_sub(q_len + window as usize),
                _ => 0,
            };
            let slots: Vec<i64> = (0..kv_len)
                .map(|position| {
                    let block = own[position / config.block_size] as i64;
                    let slot = block * config.block_size as i64;
                    let slot = slot + (position % config.block_size) as i64;
                    if position < freed { -1 } else { slot }
                })
                .collect();
            writer.do_kv_cache_update(&key, &value, &mut cache, &slots);
            keys.push(key);
            values.push(value);
        }
        Batch {
            config,
            causal,
            num_tokens,
            query_start_loc,
            seq_lens: rows.iter().map(|&(_, keys)| keys as i32).collect(),
            rows: rows.to_vec(),
            block_table,
            width,
            causal_flags,
            query,
            keys,
            values,
            cache,
        }
    }

    pub fn inputs(&self) -> StepInputs<'_> {
        StepInputs {
            query_start_loc: &self.query_start_loc,
            seq_lens: &self.seq_lens,
            block_table: BlockTable {
                data: &self.block_table,
                width: self.width,
            },
            slot_mapping: &[],
            positions: &[],
            causal: Some(&self.causal_flags),
            dcp_local_seq_lens: None,
            encoder_seq_lens: None,
            logits_indices_padded: None,
            rswa_prefix_lens: None,
            extras: &[],
        }
    }

    fn is_causal(&self, row: usize) -> bool {
        match self.causal {
            Causal::All(causal) => causal,
            Causal::PerRequest => self.causal_flags[row] != 0,
        }
    }

    /// The expected result, from the unrounded keys and values, or from what the cache holds.
    pub fn expected(&self, from_cache: bool) -> reference::Attention {
        let config = &self.config;
        let layer = reference::Layer {
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            head_size: config.head_size,
            scale: f64::from(config.scale),
            sliding_window: config.sliding_window.map(|window| window as usize),
            logits_soft_cap: config.logits_soft_cap.map(f64::from),
        };
        let requests: Vec<_> = (0..self.rows.len())
            .map(|row| reference::Request {
                first_token: self.query_start_loc[row] as usize,
                q_len: self.rows[row].0,
                kv_len: self.rows[row].1,
                causal: self.is_causal(row),
            })
            .collect();
        reference::attention(
            &layer,
            &requests,
            self.num_tokens,
            &self.query,
            |row, key, head| {
                if from_cache {
                    let page = key / config.block_size;
                    let block = self.block_table[row * self.width + page] as usize;
                    let slot = block * config.block_size + key % config.block_size;
                    (self.cache.key(slot, head), self.cache.value(slot, head))
                } else {
                    let start = (key * config.num_kv_heads + head) * config.head_size;
                    let range = start..start + config.head_size;
                    (
                        self.keys[row][range.clone()].to_vec(),
                        self.values[row][range].to_vec(),
                    )
                }
            },
        )
    }

    /// Runs `metadata`; the output is NaN before. Output f32 [num_tokens, num_heads, head_size] and LSE.
    pub fn run(&self, metadata: &Metadata) -> (Vec<f32>, Vec<f32>) {
        let mut step = StepMetadata::new();
        step.prepare(metadata, &self.inputs(), self.config.block_size as u32)
            .unwrap();
        let attention = new_impl(metadata.family(), self.config).unwrap();
        let mut output = vec![f32::NAN; self.query.len()];
        attention
            .forward(&self.query, &self.cache, Some(&step), &mut output, None)
            .unwrap();
        let mut again = vec![f32::NAN; self.query.len()];
        let mut lse = vec![f32::NAN; self.num_tokens * self.config.num_heads];
        attention
            .forward_with_lse(&self.query, &self.cache, &step, &mut again, &mut lse)
            .unwrap();
        assert_eq!(
            bits(&output),
            bits(&again),
            "two runs of one schedule differ"
        );
        (output, lse)
    }

    /// FLASH_ATTN's metadata without splits.
    pub fn flash_attn(&self) -> flash_attn::Metadata {
        flash_attn::Metadata {
            num_actual_tokens: self.num_tokens as u32,
            max_query_len: self.rows.iter().map(|row| row.0).max().unwrap_or(0) as u32,
            query_start_loc: Tensor::Input(Input::QueryStartLoc),
            max_seq_len: self.rows.iter().map(|row| row.1).max().unwrap_or(0) as u32,
            seq_lens: Tensor::Input(Input::SeqLens),
            block_table: Tensor::Input(Input::BlockTable),
            slot_mapping: Tensor::Input(Input::SlotMapping),
            causal: self.causal.clone(),
            max_dcp_context_kv_len: 0,
            dcp_context_kv_lens: None,
            num_decode_reqs: 0,
            num_prefill_reqs: 0,
            num_decode_tokens: 0,
            num_prefill_tokens: 0,
            max_num_splits: 0,
            scheduler_metadata: None,
            mm_prefix_query_range: None,
            rswa_prefix_lens: None,
            rswa_window: 0,
            schedule: flash_attn::Schedule {
                max_num_splits: 1,
                num_splits: vec![],
                tile_order: flash_attn::TileOrder::Natural,
            },
        }
    }

    /// Any valid schedule.
    pub fn random_flash_attn(&self, rng: &mut Pcg64Mcg) -> Metadata {
        let mut metadata = self.flash_attn();
        let max = *pick(rng, &[1, 2, 3, 8, 32]);
        let n = self.rows.len();
        metadata.schedule.max_num_splits = max as u32;
        if max > 1 || rng.random() {
            metadata.schedule.num_splits = (0..n).map(|_| rng.random_range(1..=max)).collect();
        }
        if rng.random() {
            let mut order: Vec<i32> = (0..n as i32).collect();
            order.shuffle(rng);
            metadata.schedule.tile_order = flash_attn::TileOrder::Rows(order);
        }
        Metadata::FlashAttn(metadata)
    }

    /// Any valid plan: the first `num_decodes` rows in one work list, the rest in another. Only with one causal flag.
    pub fn random_flashinfer(&self, rng: &mut Pcg64Mcg, num_decodes: usize) -> Metadata {
        let Causal::All(causal) = self.causal else {
            panic!("one causal flag")
        };
        let n = self.rows.len();
        let num_decode_tokens = self.query_start_loc[num_decodes] as u32;
        let num_prefill_tokens = self.query_start_loc[n] as u32 - num_decode_tokens;
        let decode = (num_decodes > 0)
            .then(|| flashinfer::Decode::Wrapper(self.random_plan(rng, 0..num_decodes)));
        let prefill = (num_decodes < n)
            .then(|| flashinfer::Prefill::Wrapper(self.random_plan(rng, num_decodes..n)));
        Metadata::Flashinfer(flashinfer::Metadata {
            kv_cache_layout: KvCacheLayout::Lbhnc,
            num_actual_tokens: self.num_tokens as u32,
            slot_mapping: Tensor::Input(Input::SlotMapping),
            q_data_type_prefill: Dtype::Float32,
            q_data_type_decode: Dtype::Float32,
            num_decodes: num_decodes as u32,
            num_decode_tokens,
            num_prefills: (n - num_decodes) as u32,
            num_prefill_tokens,
            causal,
            prefill,
            decode,
        })
    }

    fn random_plan(&self, rng: &mut Pcg64Mcg, rows: std::ops::Range<usize>) -> flashinfer::Plan {
        let config = &self.config;
        let Causal::All(causal) = self.causal else {
            panic!("one causal flag")
        };
        let of = &self.rows[rows.clone()];
        let pages: Vec<usize> = of
            .iter()
            .map(|row| row.1.div_ceil(config.block_size))
            .collect();
        let last = of.iter().zip(&pages).map(|(row, &pages)| match pages {
            0 => 0,
            pages => row.1 - (pages - 1) * config.block_size,
        });
        let range = RowRange {
            start: rows.start as u32,
            end: rows.end as u32,
        };
        let qo_indptr = if rows.start == 0 && rng.random() {
            Tensor::Slice(TensorSlice {
                source: Input::QueryStartLoc,
                start: 0,
                end: rows.end as u32 + 1,
            })
        } else {
            Tensor::RebasedQueryStartLoc(range.clone())
        };
        flashinfer::Plan {
            function: flashinfer::PlanFunction::BatchPrefillPlan,
            qo_indptr,
            paged_kv_indptr: running_sum(pages.iter().copied()),
            paged_kv_indices: Tensor::GatherPages(range),
            paged_kv_last_page_len: last.map(|last| last as i32).collect(),
            seq_lens: of.iter().map(|row| row.1 as i32).collect(),
            num_qo_heads: config.num_heads as u32,
            num_kv_heads: config.num_kv_heads as u32,
            head_dim: config.head_size as u32,
            page_size: config.block_size as u32,
            causal,
            sm_scale: f64::from(config.scale),
            window_left: config.sliding_window.map_or(-1, |window| window as i32 - 1),
            logits_soft_cap: config.logits_soft_cap.map(f64::from),
            q_data_type: Dtype::Float32,
            kv_data_type: Dtype::Float32,
            o_data_type: Dtype::Float32,
            fixed_split_size: -1,
            disable_split_kv: false,
            q_len_per_req: 1,
            dcp_world_size: 1,
            cudagraph_batch_size: 0,
            work: self.random_work(rng, of, causal),
        }
    }

    fn random_work(
        &self,
        rng: &mut Pcg64Mcg,
        rows: &[(usize, usize)],
        causal: bool,
    ) -> flashinfer::WorkList {
        let config = &self.config;
        let group = config.num_heads / config.num_kv_heads;
        let chunk = config.block_size * *pick(rng, &[1, 2, 3, 8, 64]);
        let tile = *pick(rng, &[1, 2, 3, 8, 16, 64, 128]);
        let leave_out = rng.random::<bool>();
        let mut items = Vec::new();
        let mut partials = Vec::new();
        for (row, &(q_len, kv_len)) in rows.iter().enumerate() {
            let packed = q_len * group;
            for q in 0..packed.div_ceil(tile) {
                // Positions of the tile's first and last token; what they see.
                let offset = kv_len as i64 - q_len as i64;
                let first = offset + (q * tile / group) as i64;
                let last = offset + ((((q + 1) * tile).min(packed) - 1) / group) as i64;
                let window = config.sliding_window.map(i64::from);
                let low = window.map_or(0, |window| first - window + 1);
                let high = match (causal, window) {
                    (true, _) => last + 1,
                    (false, Some(window)) => last + window,
                    (false, None) => i64::MAX,
                };
                let before = items.len();
                for k in 0..kv_len.div_ceil(chunk) {
                    let (start, end) = ((k * chunk) as i64, ((k + 1) * chunk) as i64);
                    if !leave_out || (end > low && start < high) {
                        items.push((row as i32, q as i32, k as i32));
                    }
                }
                partials.push(items.len() - before);
            }
        }
        let split_kv = partials.iter().any(|&count| count > 1);
        items.shuffle(rng);
        let workers = rng.random_range(1..=7);
        let mut cuts: Vec<i32> = (1..workers)
            .map(|_| rng.random_range(0..=items.len() as i32))
            .collect();
        cuts.push(0);
        cuts.push(items.len() as i32);
        cuts.sort_unstable();
        flashinfer::WorkList {
            kv_chunk_size: chunk as u32,
            cta_tile_q: tile as u32,
            request_indices: items.iter().map(|item| item.0).collect(),
            qo_tile_indices: items.iter().map(|item| item.1).collect(),
            kv_tile_indices: items.iter().map(|item| item.2).collect(),
            worker_indptr: cuts,
            merge_indptr: running_sum(partials.into_iter()),
            split_kv,
        }
    }
}

pub fn running_sum(counts: impl Iterator<Item = usize>) -> Vec<i32> {
    let mut sums = vec![0];
    for count in counts {
        sums.push(sums[sums.len() - 1] + count as i32);
    }
    sums
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Rows of one of the kinds of steps that an engine makes; decodes first. Their number.
pub fn random_rows(rng: &mut Pcg64Mcg, max_keys: usize) -> (Vec<(usize, usize)>, usize) {
    let kind = rng.random_range(0..4);
    let mut decodes = Vec::new();
    let mut prefills = Vec::new();
    if kind != 0 {
        for _ in 0..rng.random_range(1..=6) {
            decodes.push((1, rng.random_range(1..=max_keys)));
        }
    }
    if kind != 1 {
        for _ in 0..rng.random_range(1..=3) {
            let q_len = rng.random_range(1..=max_keys.min(90));
            // A whole prompt, or a chunk of one after some context.
            let context = if rng.random() {
                0
            } else {
                rng.random_range(0..=max_keys - q_len)
            };
            prefills.push((q_len, q_len + context));
        }
    }
    let num_decodes = decodes.len();
    decodes.extend(prefills);
    (decodes, num_decodes)
}
