//! Random valid batches, from a seed.

use timetable_attention::{
    Grant, StepInputs, VerifyContext,
    batch::{ContextParallel, GroupStep, SlotRule, StepTensors, slot_mapping_into},
    types::{
        AttentionConfig, BuilderConfig, CudagraphConfig, CudagraphMode, DcpInputs, DeviceConfig,
        Dtype, KvCacheLayout, KvCacheSpec, KvCacheSpecKind, ParallelConfig, SchedulerConfig,
    },
};

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

    /// In low..=high.
    pub fn between(&mut self, low: i64, high: i64) -> i64 {
        low + (self.next() % (high - low + 1) as u64) as i64
    }

    pub fn chance(&mut self, one_in: u64) -> bool {
        self.next().is_multiple_of(one_in)
    }

    pub fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[(self.next() % values.len() as u64) as usize]
    }
}

pub fn config(random: &mut Random) -> BuilderConfig {
    let num_kv_heads = random.pick(&[1, 2, 8]);
    let sliding_window = random.chance(4).then(|| random.pick(&[16u32, 33, 128]));
    let block_size = random.pick(&[1, 16, 24, 128]);
    let dcp_world_size = if random.chance(4) {
        random.pick(&[2, 4])
    } else {
        1
    };
    BuilderConfig {
        kv_cache_spec: KvCacheSpec {
            kind: match sliding_window {
                Some(_) => KvCacheSpecKind::SlidingWindow,
                None => KvCacheSpecKind::FullAttention,
            },
            block_size,
            num_kv_heads,
            head_size: 64,
            head_size_v: 64,
            dtype: Dtype::Bfloat16,
            sliding_window,
            attention_chunk_size: None,
            dcp_sharded: dcp_world_size > 1,
            mamba: None,
        },
        layer_names: vec!["layers.0".to_owned()],
        attention: AttentionConfig {
            num_heads: num_kv_heads * random.pick(&[1, 3, 8]),
            scale: 0.125,
            logits_soft_cap: random.chance(3).then_some(30.0),
            sliding_windows: sliding_window
                .map(|window| window as i32)
                .into_iter()
                .collect(),
            model_dtype: Dtype::Bfloat16,
            kv_cache_dtype: "auto".to_owned(),
            kv_cache_layout: KvCacheLayout::Lbnhc,
            has_sinks: false,
            use_rswa: false,
            rswa_window: 0,
            kv_lora_rank: 0,
            qk_rope_head_dim: 0,
        },
        scheduler: SchedulerConfig {
            max_num_seqs: 64,
            max_num_batched_tokens: 8_192,
            max_model_len: 4_096,
            max_num_blocks_per_req: 4_096,
            num_speculative_tokens: random.pick(&[0, 3]),
            parallel_drafting: false,
        },
        cudagraph: CudagraphConfig {
            mode: CudagraphMode::None,
            capture_sizes: Vec::new(),
            max_capture_size: 0,
        },
        parallel: ParallelConfig {
            dcp_world_size,
            dcp_rank: random.between(0, i64::from(dcp_world_size) - 1) as u32,
            // The interleave divides the block.
            cp_kv_cache_interleave_size: if block_size > 1 {
                random.pick(&[1, 8])
            } else {
                1
            },
            prefill_context_parallel: false,
        },
        device: DeviceConfig {
            compute_capability: (9, 0),
            num_workers: random.pick(&[1, 4, 132]),
            ctas_per_worker: random.pick(&[1, 2]),
            flash_attn_version: 3,
            trtllm_attention: false,
            xqa: false,
        },
        batch_invariant: false,
        max_num_splits: random.pick(&[1, 4, 32]),
        model_runner_v2: true,
        options: Vec::new(),
    }
}

/// A batch that `verify_step` accepts: decodes first, then prefills and extends, then perhaps rows of padding.
#[derive(Clone)]
pub struct Batch {
    pub config: BuilderConfig,
    pub step: GroupStep,
    pub num_blocks: u32,
}

impl Batch {
    pub fn random(seed: u64) -> Self {
        let mut random = Random(seed);
        let config = config(&mut random);
        Self::with_config(random, config)
    }

    pub fn with_config(mut random: Random, config: BuilderConfig) -> Self {
        let decodes = random.between(0, 9);
        let prefills = if random.chance(3) {
            0
        } else {
            random.between(0, 5)
        };
        let padding = if random.chance(3) {
            random.between(1, 4)
        } else {
            0
        };
        let block_size = i64::from(config.kv_cache_spec.block_size);
        let world = i64::from(config.parallel.dcp_world_size);
        let (mut starts, mut seq_lens, mut is_prefilling) = (vec![0i32], Vec::new(), Vec::new());
        let mut positions = Vec::new();
        for row in 0..decodes + prefills {
            let prefill = row >= decodes;
            let query = if prefill { random.between(2, 90) } else { 1 };
            let context = if prefill && random.chance(2) {
                0
            } else {
                random.between(0, 700)
            };
            starts.push(starts[row as usize] + query as i32);
            seq_lens.push((context + query) as i32);
            is_prefilling.push(u8::from(prefill));
            positions.extend(context..context + query);
        }
        let tokens = positions.len();
        let longest = seq_lens.iter().copied().max().unwrap_or(0).max(1);
        let width = (i64::from(longest) + block_size * world - 1) / (block_size * world)
            + random.between(1, 5);
        let num_blocks = 2_000u32;
        let mut next = random.between(1, 50) as i32;
        let mut block_table = Vec::new();
        for &len in &seq_lens {
            let pages = (i64::from(len) + block_size * world - 1) / (block_size * world);
            for column in 0..width {
                // Blocks of a request lie apart, as they do after a while of serving.
                next = (next + random.between(1, 3) as i32) % num_blocks as i32;
                block_table.push(if column < pages { next } else { 0 });
            }
        }
        for _ in 0..padding {
            starts.push(tokens as i32);
            seq_lens.push(0);
            is_prefilling.push(0);
            block_table.extend(std::iter::repeat_n(0, width as usize));
        }
        let padded_tokens = tokens
            + if padding > 0 {
                random.between(0, 6) as usize
            } else {
                0
            };
        let mut slot_mapping = vec![0; padded_tokens];
        let rule = SlotRule {
            block_size: config.kv_cache_spec.block_size,
            context_parallel: (world > 1).then_some(ContextParallel {
                size: config.parallel.dcp_world_size,
                rank: config.parallel.dcp_rank,
                interleave: config.parallel.cp_kv_cache_interleave_size,
            }),
        };
        let width = width as usize;
        let beyond = slot_mapping_into(
            rule,
            |row| block_table.get(row * width..(row + 1) * width),
            &starts,
            &positions,
            &mut slot_mapping,
        );
        assert_eq!(beyond, 0, "every position has a block");
        positions.resize(padded_tokens, 0);
        let max_query_len = starts
            .windows(2)
            .map(|pair| pair[1] - pair[0])
            .max()
            .unwrap_or(0);
        let dcp_local_seq_lens = (world > 1).then(|| {
            let mut local = Vec::new();
            timetable_attention::types::batch::dcp_local_seq_lens_into(
                &seq_lens,
                config.parallel.dcp_world_size,
                config.parallel.dcp_rank,
                config.parallel.cp_kv_cache_interleave_size,
                &mut local,
            );
            local
        });
        // Under asynchronous speculation the device's lengths of decodes may fall below the host's bound.
        let bound = seq_lens.clone();
        if config.scheduler.num_speculative_tokens > 0 && world == 1 && random.chance(2) {
            for (row, len) in seq_lens.iter_mut().enumerate().take(decodes as usize) {
                let query = starts[row + 1] - starts[row];
                *len = (*len - random.between(0, 3) as i32).max(query);
            }
        }
        let max_seq_len = bound.iter().copied().max().unwrap_or(0) as u32;
        let mut step = GroupStep::new(
            StepTensors {
                query_start_loc: starts,
                seq_lens,
                block_table,
                block_table_width: width,
                slot_mapping,
                positions,
                dcp_local_seq_lens: dcp_local_seq_lens.clone(),
                ..StepTensors::default()
            },
            bound,
            padded_tokens as u32,
            max_query_len as u32,
            max_seq_len,
        );
        step.cam.is_prefilling = is_prefilling;
        step.cam.dcp = dcp_local_seq_lens.map(|lens| DcpInputs {
            dcp_local_seq_lens_cpu_upper_bound: lens,
        });
        Batch {
            config,
            step,
            num_blocks,
        }
    }

    /// Calls `f` with the batch's context.
    pub fn with<T>(&self, grant: Grant, f: impl FnOnce(&VerifyContext<'_>) -> T) -> T {
        let inputs: StepInputs<'_> = self.step.tensors.inputs();
        f(&VerifyContext {
            config: &self.config,
            common: &self.step.cam,
            inputs: &inputs,
            promise: None,
            grant,
            num_blocks: self.num_blocks,
        })
    }
}

/// A fixed configuration: 8 query heads on 2 KV heads of 64, pages of 16, at most 4 splits, 4 workers.
pub fn fixed_config() -> BuilderConfig {
    let mut config = config(&mut Random(0));
    config.kv_cache_spec.kind = KvCacheSpecKind::FullAttention;
    config.kv_cache_spec.block_size = 16;
    config.kv_cache_spec.num_kv_heads = 2;
    config.kv_cache_spec.sliding_window = None;
    config.kv_cache_spec.dcp_sharded = false;
    config.attention.num_heads = 8;
    config.attention.sliding_windows = vec![-1];
    config.attention.logits_soft_cap = None;
    config.scheduler.num_speculative_tokens = 0;
    config.parallel = ParallelConfig {
        dcp_world_size: 1,
        dcp_rank: 0,
        cp_kv_cache_interleave_size: 1,
        prefill_context_parallel: false,
    };
    config.device.num_workers = 4;
    config.device.ctas_per_worker = 1;
    config.max_num_splits = 4;
    config
}

/// Two decodes of lengths 40 and 17, a prefill of 20 tokens behind a context of 12, a row of padding, 2 tokens of padding.
pub fn fixed_batch(config: BuilderConfig) -> Batch {
    let sharded = config.parallel.dcp_world_size > 1;
    let mut slot_mapping = vec![-1i64; 24];
    if !sharded {
        let slots = [6 * 16 + 7, 8 * 16].into_iter();
        // Blocks 9 and 10 follow one another.
        let prefill = (12..32).map(|position| 9 * 16 + position);
        slot_mapping[..22].copy_from_slice(&slots.chain(prefill).collect::<Vec<i64>>());
    }
    let seq_lens = vec![40, 17, 32, 0];
    let local = sharded.then(|| {
        let mut local = Vec::new();
        timetable_attention::types::batch::dcp_local_seq_lens_into(
            &seq_lens,
            config.parallel.dcp_world_size,
            config.parallel.dcp_rank,
            config.parallel.cp_kv_cache_interleave_size,
            &mut local,
        );
        local
    });
    let mut step = GroupStep::new(
        StepTensors {
            query_start_loc: vec![0, 1, 2, 22, 22],
            seq_lens: seq_lens.clone(),
            block_table: vec![4, 5, 6, 0, 7, 8, 0, 0, 9, 10, 0, 0, 0, 0, 0, 0],
            block_table_width: 4,
            slot_mapping,
            positions: [39, 16].into_iter().chain(12..32).chain([0, 0]).collect(),
            dcp_local_seq_lens: local.clone(),
            ..StepTensors::default()
        },
        seq_lens,
        24,
        20,
        40,
    );
    step.cam.is_prefilling = vec![0, 0, 1];
    step.cam.dcp = local.map(|lens| DcpInputs {
        dcp_local_seq_lens_cpu_upper_bound: lens,
    });
    Batch {
        config,
        step,
        num_blocks: 11,
    }
}
