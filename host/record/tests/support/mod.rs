//! A host without an engine: groups that serve steps of requests that grow, and a recorder that is told of them.
#![allow(dead_code, reason = "each test program uses a part")]

use std::{
    path::Path,
    time::{Duration, Instant},
};

use timetable_attention::{
    BlockTable, Grant, StepInputs, VerifyContext, plain_builder, verify, verify_step,
};
use timetable_record::{Behind, Recorder, RecorderHandle, RecorderOptions, record};
use timetable_sandbox::{
    BuildBudget, FaultPolicy, GroupBuilder, GroupSetup, Limits, ObservedStep, Sandbox,
    StepMetadata, StepObserver, StepRecord, TenantName,
};
use timetable_types::*;

pub const BLOCK: usize = 16;
const WIDTH: usize = 64;
const NUM_BLOCKS: u32 = 4096;

/// 8 query heads over 2 KV heads of 64, blocks of 16.
pub fn config(options: &[(&str, &str)]) -> BuilderConfig {
    BuilderConfig {
        kv_cache_spec: KvCacheSpec {
            kind: KvCacheSpecKind::FullAttention,
            block_size: BLOCK as u32,
            num_kv_heads: 2,
            head_size: 64,
            head_size_v: 64,
            dtype: Dtype::Bfloat16,
            sliding_window: None,
            attention_chunk_size: None,
            dcp_sharded: false,
            mamba: None,
        },
        layer_names: vec!["model.layers.0.self_attn.attn".to_owned()],
        attention: AttentionConfig {
            num_heads: 8,
            scale: 0.125,
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
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            max_model_len: (WIDTH * BLOCK) as u32,
            max_num_blocks_per_req: WIDTH as u32,
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
        options: options
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect(),
    }
}

/// The reference component of a family.
pub fn component(family: Family) -> &'static [u8] {
    let name = match family {
        Family::Flashinfer => "flashinfer",
        _ => "flash-attn",
    };
    timetable_reference::component(name)
        .expect("embedded")
        .bytes
}

/// A request that runs.
struct Running {
    req_idx: u32,
    len: usize,
    blocks: Vec<i32>,
}

/// What a step was, for comparison with what was recorded.
#[derive(Clone, Debug)]
pub struct Served {
    pub common: CommonAttentionMetadata,
    pub tensors: StepRecord,
    pub built: StepMetadata,
}

/// One slot and its requests.
pub struct Host {
    pub group: GroupBuilder,
    config: BuilderConfig,
    name: &'static str,
    /// Whose slot it is.
    pub tenant: Option<TenantName>,
    running: Vec<Running>,
    next_block: i32,
    seed: u32,
    pub served: Vec<Served>,
}

impl Host {
    /// A group that `bytes` serves, with `rows` requests of various lengths.
    pub fn new(
        sandbox: &Sandbox,
        bytes: &[u8],
        name: &'static str,
        options: &[(&str, &str)],
        rows: usize,
    ) -> Host {
        let component = sandbox.load(bytes).unwrap();
        let config = config(options);
        let setup = GroupSetup {
            name: name.into(),
            config: config.clone(),
            plain: plain_builder(component.family(), &config).unwrap(),
            acceptance: None,
        };
        let group = GroupBuilder::new(sandbox, setup, &component, "test.wasm").unwrap();
        // Nothing here depends on how busy the machine is.
        let policy = FaultPolicy {
            max_backoff_steps: 0,
            quarantine_faults: 1000,
            build_budget: BuildBudget {
                per_step: Duration::from_secs(60),
                reserve: Duration::from_secs(60),
            },
            ..FaultPolicy::default()
        };
        group.handle().set_policy(policy).unwrap();
        let mut host = Host {
            group,
            config,
            name,
            tenant: None,
            running: Vec::new(),
            next_block: 1,
            seed: 1,
            served: Vec::new(),
        };
        (0..rows).for_each(|row| host.admit(row as u32));
        host
    }

    fn random(&mut self, bound: u32) -> u32 {
        self.seed = self
            .seed
            .wrapping_mul(1_664_525)
            .wrapping_add(1_013_904_223);
        (self.seed >> 8) % bound
    }

    fn admit(&mut self, req_idx: u32) {
        let len = 1 + self.random(200) as usize;
        self.running.push(Running {
            req_idx,
            len,
            blocks: Vec::new(),
        });
    }

    /// One step: new requests prefill, the others decode; now and then one ends and another begins.
    pub fn step(&mut self, recorder: &mut Recorder) {
        if self.random(5) == 0 && !self.running.is_empty() {
            let gone = self.random(self.running.len() as u32) as usize;
            let req_idx = self.running.swap_remove(gone).req_idx;
            self.admit(req_idx);
        }
        let mut rows: Vec<(usize, usize)> = Vec::new();
        for index in 0..self.running.len() {
            let request = &mut self.running[index];
            let query = if request.blocks.is_empty() {
                request.len
            } else {
                request.len += 1;
                1
            };
            while request.blocks.len() * BLOCK < request.len {
                request.blocks.push(self.next_block);
                // Blocks are used again: nothing reads them here.
                self.next_block = self.next_block % (NUM_BLOCKS as i32 - 1) + 1;
            }
            rows.push((index, query));
        }
        rows.sort_by_key(|(index, query)| (*query != 1, *query, *index));
        self.serve(&rows, recorder);
        let full = |request: &Running| request.len >= WIDTH * BLOCK - 1;
        let ended: Vec<u32> = self
            .running
            .iter()
            .filter(|request| full(request))
            .map(|request| request.req_idx)
            .collect();
        self.running.retain(|request| !full(request));
        ended.into_iter().for_each(|req_idx| self.admit(req_idx));
    }

    fn serve(&mut self, rows: &[(usize, usize)], recorder: &mut Recorder) {
        let (mut starts, mut lens, mut req_idx) = (vec![0], Vec::new(), Vec::new());
        let (mut positions, mut slots) = (Vec::new(), Vec::new());
        let mut table = vec![0; rows.len() * WIDTH];
        let mut prefilling = Vec::new();
        for (row, &(index, query)) in rows.iter().enumerate() {
            let request = &self.running[index];
            starts.push(starts[row] + query as i32);
            lens.push(request.len as i32);
            req_idx.push(request.req_idx);
            prefilling.push(u8::from(query > 1));
            table[row * WIDTH..row * WIDTH + request.blocks.len()].copy_from_slice(&request.blocks);
            for position in request.len - query..request.len {
                positions.push(position as i64);
                let block = request.blocks[position / BLOCK] as usize;
                slots.push((block * BLOCK + position % BLOCK) as i64);
            }
        }
        let tokens = positions.len() as u32;
        let common = CommonAttentionMetadata {
            num_reqs: rows.len() as u32,
            num_actual_tokens: tokens,
            max_query_len: rows.iter().map(|row| row.1 as u32).max().unwrap_or(0),
            max_seq_len: lens.iter().map(|len| *len as u32).max().unwrap_or(0),
            causal: Causal::All(true),
            block_table_width: WIDTH as u32,
            slot_mapping_len: tokens,
            query_start_loc_cpu: starts,
            seq_lens_cpu_upper_bound: lens,
            is_prefilling: prefilling,
            dcp: None,
            encoder: None,
            fast_prefill: None,
            req_idx,
            mm_req_doc_ranges: Vec::new(),
            replayssm_decode_base_cpu: Vec::new(),
            extras: Vec::new(),
        };
        let inputs = StepInputs {
            query_start_loc: &common.query_start_loc_cpu,
            seq_lens: &common.seq_lens_cpu_upper_bound,
            block_table: BlockTable {
                data: &table,
                width: WIDTH,
            },
            slot_mapping: &slots,
            positions: &positions,
            causal: None,
            dcp_local_seq_lens: None,
            encoder_seq_lens: None,
            logits_indices_padded: None,
            rswa_prefix_lens: None,
            extras: &[],
        };
        let context = VerifyContext {
            config: &self.config,
            common: &common,
            inputs: &inputs,
            promise: None,
            grant: Grant::Exact,
            num_blocks: NUM_BLOCKS,
        };
        verify_step(&context).expect("a good step");
        self.group.step_boundary();
        let built = self
            .group
            .build_in_context(&context, false, |metadata| verify(metadata, &context))
            .expect("it is served");
        self.served.push(Served {
            common: common.clone(),
            tensors: StepRecord::of(&context, usize::MAX).unwrap(),
            built: built.clone(),
        });
        recorder.observe(ObservedStep {
            slot: self.name,
            tenant: self.tenant.as_ref(),
            context: &context,
            built,
        });
    }
}

/// A recorder that leaves nothing out.
pub fn recorder(path: &Path) -> (Recorder, RecorderHandle) {
    let options = RecorderOptions {
        behind: Behind::Wait,
        ..RecorderOptions::default()
    };
    record(path, &Limits::default(), options).unwrap()
}

/// Waits until what the recorder was told of so far is in a frame of its own.
pub fn settle(handle: &RecorderHandle) {
    let start = Instant::now();
    loop {
        let figures = handle.figures();
        if figures.written + figures.left_out == figures.steps {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{figures:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
