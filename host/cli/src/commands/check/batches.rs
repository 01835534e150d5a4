//! What a component is checked with: configurations, and random steps of each from a seed. It must never know a builder.

use timetable_attention::batch::{
    ContextParallel, GroupStep, PaddingValues, SlotRule, StepTensors, pad_step, slot_mapping_into,
};
use timetable_types::{
    AttentionConfig, BuilderConfig, CudagraphConfig, CudagraphMode, DcpInputs, DeviceConfig, Dtype,
    Family, KvCacheLayout, KvCacheSpec, KvCacheSpecKind, MambaCacheMode, MambaSpec, MambaType,
    ParallelConfig, SchedulerConfig, batch::dcp_local_seq_lens_into,
};

/// Blocks of the cache: more than any step uses.
pub const NUM_BLOCKS: u32 = 1 << 21;
/// Longest request.
pub const MAX_MODEL_LEN: u32 = 32_768;
/// Token counts of captured graphs.
pub const CAPTURE_SIZES: [u32; 6] = [1, 2, 8, 32, 64, 256];

/// SplitMix64: small, and the same everywhere.
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In low..=high.
    fn between(&mut self, low: u32, high: u32) -> u32 {
        low + (self.next() % u64::from(high - low + 1)) as u32
    }
}

/// A configuration, and whether every builder is expected to serve it.
pub struct Configuration {
    pub name: &'static str,
    /// A host cannot do without it; a builder may decline the others.
    pub required: bool,
    pub config: BuilderConfig,
}

/// The configurations for builders of `family`: a CPU, a large GPU, and that GPU with one thing changed each.
pub fn configurations(family: Family, options: &[(String, String)]) -> Vec<Configuration> {
    let gpu = || gpu(family, options);
    let mut cpu = gpu();
    cpu.attention.num_heads = 8;
    cpu.attention.model_dtype = Dtype::Float32;
    cpu.kv_cache_spec.num_kv_heads = 2;
    cpu.kv_cache_spec.head_size = 64;
    cpu.kv_cache_spec.head_size_v = 64;
    cpu.kv_cache_spec.dtype = Dtype::Float32;
    if family == Family::FlashMla {
        latent(&mut cpu);
    }
    cpu.cudagraph = CudagraphConfig {
        mode: CudagraphMode::None,
        capture_sizes: Vec::new(),
        max_capture_size: 0,
    };
    cpu.device = DeviceConfig {
        compute_capability: (0, 0),
        num_workers: 2,
        ctas_per_worker: 1,
        flash_attn_version: 0,
        trtllm_attention: false,
        xqa: false,
    };
    cpu.max_num_splits = 8;
    if family == Family::Mamba {
        return stateful(cpu, options);
    }
    let mut window = gpu();
    window.kv_cache_spec.kind = KvCacheSpecKind::SlidingWindow;
    window.kv_cache_spec.sliding_window = Some(1_000);
    window.attention.sliding_windows = vec![1_000];
    let mut speculation = gpu();
    speculation.scheduler.num_speculative_tokens = 3;
    let mut soft_cap = gpu();
    soft_cap.attention.logits_soft_cap = Some(30.0);
    let mut invariant = gpu();
    invariant.batch_invariant = true;
    let mut dcp = gpu();
    dcp.parallel.dcp_world_size = 2;
    dcp.parallel.dcp_rank = 1;
    dcp.kv_cache_spec.dcp_sharded = true;
    [
        ("cpu", true, cpu),
        ("gpu", true, gpu()),
        ("window", false, window),
        ("speculation", false, speculation),
        ("soft cap", false, soft_cap),
        ("batch invariant", false, invariant),
        ("context parallel", false, dcp),
    ]
    .map(|(name, required, config)| Configuration {
        name,
        required,
        config,
    })
    .into()
}

/// Those for builders of groups that keep states: each type of layer, and drafts.
fn stateful(cpu: BuilderConfig, options: &[(String, String)]) -> Vec<Configuration> {
    let gpu = || gpu(Family::Mamba, options);
    let of_type = |mamba_type| {
        let mut config = gpu();
        config.kv_cache_spec.mamba = Some(states(mamba_type, 0));
        config
    };
    let mut speculation = gpu();
    speculation.kv_cache_spec.mamba = Some(states(MambaType::Mamba2, 3));
    speculation.scheduler.num_speculative_tokens = 3;
    // Its graphs are captured with the drafts; the steps here have none.
    speculation.cudagraph = cpu.cudagraph.clone();
    [
        ("cpu", true, cpu),
        ("gpu", true, gpu()),
        ("mamba1", false, of_type(MambaType::Mamba1)),
        ("short conv", false, of_type(MambaType::ShortConv)),
        ("linear", false, of_type(MambaType::Linear)),
        ("gdn", false, of_type(MambaType::Gdn)),
        ("speculation", false, speculation),
    ]
    .map(|(name, required, config)| Configuration {
        name,
        required,
        config,
    })
    .into()
}

fn states(mamba_type: MambaType, drafts: u32) -> MambaSpec {
    MambaSpec {
        mamba_type,
        cache_mode: MambaCacheMode::None,
        num_speculative_blocks: drafts,
        chunk_size: 64,
    }
}

/// 32 query heads over 8 KV heads of 128, or over a latent or with MAMBA2's states for a family that is for those; pages of 16, 132 × 2 workers, full
/// graphs of decodes.
pub fn gpu(family: Family, options: &[(String, String)]) -> BuilderConfig {
    let mut config = paged_gpu(options);
    if family == Family::FlashMla {
        latent(&mut config);
    }
    if family == Family::Mamba {
        config.kv_cache_spec.kind = KvCacheSpecKind::Mamba;
        config.kv_cache_spec.mamba = Some(states(MambaType::Mamba2, 0));
    }
    config
}

/// One entry of 512 + 64 elements for all heads, which no values follow.
fn latent(config: &mut BuilderConfig) {
    config.kv_cache_spec.kind = KvCacheSpecKind::MlaAttention;
    config.kv_cache_spec.num_kv_heads = 1;
    config.kv_cache_spec.head_size = 576;
    config.kv_cache_spec.head_size_v = 0;
    config.attention.kv_lora_rank = 512;
    config.attention.qk_rope_head_dim = 64;
}

fn paged_gpu(options: &[(String, String)]) -> BuilderConfig {
    BuilderConfig {
        kv_cache_spec: KvCacheSpec {
            kind: KvCacheSpecKind::FullAttention,
            block_size: 16,
            num_kv_heads: 8,
            head_size: 128,
            head_size_v: 128,
            dtype: Dtype::Bfloat16,
            sliding_window: None,
            attention_chunk_size: None,
            dcp_sharded: false,
            mamba: None,
        },
        layer_names: vec!["model.layers.0.self_attn.attn".to_owned()],
        attention: AttentionConfig {
            num_heads: 32,
            scale: 0.088_388_347_648_318_44,
            logits_soft_cap: None,
            sliding_windows: vec![-1],
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
            max_num_seqs: 1_024,
            max_num_batched_tokens: 8_192,
            max_model_len: MAX_MODEL_LEN,
            max_num_blocks_per_req: MAX_MODEL_LEN / 16,
            num_speculative_tokens: 0,
            parallel_drafting: false,
        },
        cudagraph: CudagraphConfig {
            mode: CudagraphMode::FullAndPiecewise,
            capture_sizes: CAPTURE_SIZES.to_vec(),
            max_capture_size: CAPTURE_SIZES[CAPTURE_SIZES.len() - 1],
        },
        parallel: ParallelConfig {
            dcp_world_size: 1,
            dcp_rank: 0,
            cp_kv_cache_interleave_size: 1,
            prefill_context_parallel: false,
        },
        device: DeviceConfig {
            compute_capability: (9, 0),
            num_workers: 132,
            ctas_per_worker: 2,
            flash_attn_version: 3,
            trtllm_attention: false,
            xqa: false,
        },
        batch_invariant: false,
        max_num_splits: 32,
        model_runner_v2: true,
        options: options.to_vec(),
    }
}

/// A row: query tokens, keys.
type Row = (u32, u32);

/// One step, and what kind it is.
pub struct Case {
    pub kind: &'static str,
    pub step: GroupStep,
}

/// `count` random steps of `config`.
pub fn cases(config: &BuilderConfig, seed: u64, count: u32) -> Vec<Case> {
    let mut random = Random(seed);
    (0..count)
        .map(|index| {
            let kind = KINDS[index as usize % KINDS.len()];
            let rows = rows(kind, config, &mut random);
            let exact = exact(config, &rows, &mut random);
            let step = if kind == "padded" {
                let (tokens, reqs) = (exact.cam.num_actual_tokens, exact.cam.num_reqs);
                let (more, rows) = (random.between(0, 40), random.between(1, 9));
                let padding = PaddingValues {
                    seq_len: 0,
                    ..PaddingValues::default()
                };
                pad_step(&exact, tokens + more, reqs + rows, padding).unwrap_or(exact)
            } else {
                exact
            };
            Case { kind, step }
        })
        .collect()
}

const KINDS: [&str; 8] = [
    "decodes",
    "prefills",
    "mixed",
    "padded",
    "long contexts",
    "chunked prefills",
    "one row",
    "many decodes",
];

fn rows(kind: &str, config: &BuilderConfig, random: &mut Random) -> Vec<Row> {
    // A decode that verifies its drafts has a token for each.
    let query = 1 + config.scheduler.num_speculative_tokens;
    let mut rows = Vec::new();
    let decodes = |rows: &mut Vec<Row>, count: u32, longest: u32, random: &mut Random| {
        for _ in 0..count {
            let query = random.between(1, query);
            rows.push((query, random.between(query, longest)));
        }
    };
    let prefill = |random: &mut Random, tokens: u32, context: u32| {
        let tokens = random.between(2, tokens);
        (tokens, tokens + random.between(0, context))
    };
    let few = random.between(1, 24);
    match kind {
        "decodes" => decodes(&mut rows, few, 3_000, random),
        "many decodes" => {
            let count = random.between(65, 256);
            decodes(&mut rows, count, 2_000, random);
        }
        "long contexts" => decodes(&mut rows, few, MAX_MODEL_LEN, random),
        "one row" if random.between(0, 1) == 0 => decodes(&mut rows, 1, MAX_MODEL_LEN, random),
        "one row" => rows.push(prefill(random, 4_000, 20_000)),
        "prefills" => rows.extend((0..few.min(8)).map(|_| prefill(random, 900, 0))),
        "chunked prefills" => rows.extend((0..few.min(8)).map(|_| prefill(random, 900, 8_000))),
        _ => {
            decodes(&mut rows, few, 2_000, random);
            let prefills = random.between(1, 4);
            rows.extend((0..prefills).map(|_| prefill(random, 500, 500)));
        }
    }
    // As engines order them: decodes, then what goes on with a prompt, then what begins one.
    rows.sort_by_key(|&(tokens, keys)| match (tokens <= query, keys > tokens) {
        (true, _) => 0,
        (false, true) => 1,
        (false, false) => 2,
    });
    rows
}

/// The step of `rows`, every request with blocks of its own.
fn exact(config: &BuilderConfig, rows: &[Row], random: &mut Random) -> GroupStep {
    let (block, world) = (
        config.kv_cache_spec.block_size,
        config.parallel.dcp_world_size,
    );
    let lens: Vec<i32> = rows.iter().map(|(_, keys)| *keys as i32).collect();
    let longest = rows.iter().map(|(_, keys)| *keys).max().unwrap_or(1);
    let width = longest.div_ceil(block * world) + random.between(0, 3);
    // A row that keeps states has one for each draft.
    let width = width.max(1 + config.scheduler.num_speculative_tokens) as usize;
    let mut query_start_loc = vec![0];
    let (mut positions, mut block_table) = (Vec::new(), Vec::new());
    // Ids that are all different and lie apart, as after a while of serving: the multiplier is odd, their number a power of two.
    let mut next = random.between(1, 1_000);
    for &(query, keys) in rows {
        query_start_loc.push(query_start_loc[query_start_loc.len() - 1] + query as i32);
        positions.extend(i64::from(keys - query)..i64::from(keys));
        let pages = keys.div_ceil(block * world) as usize;
        for column in 0..width {
            next += 1;
            let id = next.wrapping_mul(40_503) % NUM_BLOCKS;
            block_table.push(if column < pages { id as i32 } else { 0 });
        }
    }
    let mut slot_mapping = vec![0; positions.len()];
    let rule = SlotRule {
        block_size: block,
        context_parallel: (world > 1).then_some(ContextParallel {
            size: world,
            rank: config.parallel.dcp_rank,
            interleave: config.parallel.cp_kv_cache_interleave_size,
        }),
    };
    slot_mapping_into(
        rule,
        |row| block_table.get(row * width..(row + 1) * width),
        &query_start_loc,
        &positions,
        &mut slot_mapping,
    );
    let dcp_local_seq_lens = (world > 1).then(|| {
        let mut local = Vec::new();
        let parallel = &config.parallel;
        let interleave = parallel.cp_kv_cache_interleave_size;
        dcp_local_seq_lens_into(&lens, world, parallel.dcp_rank, interleave, &mut local);
        local
    });
    // Under speculation a decode on the device may be shorter than the host knows.
    let drafts = config.scheduler.num_speculative_tokens;
    let seq_lens = rows.iter().map(|&(query, keys)| {
        let rejected = random.between(0, drafts);
        let shorter = if query <= 1 + drafts { rejected } else { 0 };
        // What it had before the step it still has.
        let least = query + u32::from(keys > query);
        keys.saturating_sub(shorter).max(least) as i32
    });
    let seq_lens = seq_lens.collect();
    let tokens = positions.len() as u32;
    let mut step = GroupStep::new(
        StepTensors {
            query_start_loc,
            seq_lens,
            block_table,
            block_table_width: width,
            slot_mapping,
            positions,
            dcp_local_seq_lens: dcp_local_seq_lens.clone(),
            ..StepTensors::default()
        },
        lens,
        tokens,
        rows.iter().map(|(query, _)| *query).max().unwrap_or(0),
        longest,
    );
    step.cam.is_prefilling = rows
        .iter()
        .map(|(query, keys)| u8::from(*query > 1 + drafts || query == keys))
        .collect();
    step.cam.dcp = dcp_local_seq_lens.map(|lens| DcpInputs {
        dcp_local_seq_lens_cpu_upper_bound: lens,
    });
    step
}

/// `rows` decodes of one token behind one or more, of lengths up to `longest`.
pub fn decodes(config: &BuilderConfig, rows: u32, longest: u32, seed: u64) -> GroupStep {
    let mut random = Random(seed);
    let rows: Vec<Row> = (0..rows).map(|_| (1, random.between(2, longest))).collect();
    exact(config, &rows, &mut random)
}
