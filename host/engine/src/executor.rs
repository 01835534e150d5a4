//! What the step loop asks of a device: sizes at start-up, then one step after the other.
//!
//! The step loop makes a batch, has its metadata built and verified, and hands both over; the executor computes the forward
//! pass, chooses a token for each row that wants one, and gives the tokens back. An executor may have more than one step in
//! flight ([`Executor::depth`]): then the tokens of a step that has not been collected are named by *feed references* in the
//! batch's token ids, and the device looks them up itself.
//!
//! Calls come in this order. Once: `facts`, `setup`, `acceptance` of each group, `start`. Then for each step: `step_boundary`,
//! `dispatch`, `promise` and `prepare` of each group and segment (`prepare` again where the plain builder steps in; `leave_out`
//! where a segment has no metadata), `submit`; and one `collect` for each step that was submitted without an error, oldest first.
//!
//! This module must never know a device, a scheduler or a builder.

use std::error::Error;

use timetable_attention::{
    VerifyContext,
    backend::{Capability, Device, FlashAttnQuery, flash_attn_version},
    graphs::{BatchExecutionDescriptor, BatchQuery, CudagraphManager, RuntimeMode},
};
use timetable_sandbox::Acceptance;
use timetable_types::{
    BuilderConfig, CaptureShape, CudagraphMode, Dtype, Family, LaunchPromise, Metadata,
    SchedulerConfig,
};

use crate::{
    attention::{AttentionPlan, StepError},
    batch::{BatchShape, InputBatch},
    config::{CacheSize, EngineConfig, EngineError},
    model::{ModelConfig, ModelError},
    sampling::SamplingError,
    timings::StepTimings,
};

/// What the rule book and the builders are told of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Whose answers of the rule book apply.
    pub device: Device,
    /// Workers that a builder may plan for: multiprocessors, or threads.
    pub num_workers: u32,
    /// What runs at a time on each of them: the attention kernels' blocks on a multiprocessor, one job on a thread.
    pub ctas_per_worker: u32,
    /// The FlashAttention version whose rules apply; 0 where there is none.
    pub flash_attn_version: u32,
    /// In what the layers compute and what attention is handed.
    pub model_dtype: Dtype,
    /// The families whose metadata it executes.
    pub families: &'static [Family],
    /// Does it execute metadata of a step's virtual rows, for chunked attention?
    pub virtual_batches: bool,
}

impl DeviceFacts {
    /// The CPU device's: it computes in f32, with so many threads.
    pub fn cpu(config: &EngineConfig) -> Self {
        Self {
            device: Device::Cpu,
            num_workers: config.num_workers,
            ctas_per_worker: 1,
            flash_attn_version: 0,
            model_dtype: Dtype::Float32,
            families: &Family::ALL,
            virtual_batches: true,
        }
    }

    /// A GPU's, for a model with heads of `head_size` elements.
    pub fn cuda(
        config: &EngineConfig,
        (major, minor): (u32, u32),
        num_multiprocessors: u32,
        model_dtype: Dtype,
        head_size: u32,
    ) -> Self {
        let capability = Capability::new(major, minor);
        Self {
            device: Device::Cuda { capability },
            num_workers: num_multiprocessors,
            ctas_per_worker: 2,
            flash_attn_version: flash_attn_version(&FlashAttnQuery {
                capability,
                head_size,
                block_size: u32::try_from(config.block_size).ok(),
                has_sink: false,
                use_mm_prefix: false,
            }),
            model_dtype,
            families: &[Family::FlashAttn, Family::Flashinfer],
            virtual_batches: false,
        }
    }

    /// Can the device capture graphs?
    pub fn captures_graphs(&self) -> bool {
        self.device != Device::Cpu
    }
}

/// How large a KV cache is wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheRequest {
    /// As configured.
    pub size: CacheSize,
    /// Bytes of one of the manager's blocks, over all layers.
    pub block_bytes: u64,
    /// Bytes of all states of recurrent layers, which are there beside the blocks.
    pub states_bytes: u64,
    /// More blocks than these, the null block included, no set of requests can use.
    pub most: usize,
}

/// What an executor makes its layers of.
#[derive(Clone, Copy, Debug)]
pub struct ExecutorSetup<'a> {
    /// The engine's settings.
    pub config: &'a EngineConfig,
    /// Backends, groups, layout; [`AttentionPlan::group_of`] gives a layer's group.
    pub plan: &'a AttentionPlan,
    /// What each attention group's builder is constructed with, in the order of the plan's groups.
    pub groups: &'a [BuilderConfig],
    /// The largest step.
    pub shape: BatchShape,
    /// Columns of the kernels' block table.
    pub table_width: usize,
    /// The KV cache that is wanted.
    pub cache: CacheRequest,
    /// States of each recurrent layer, the null state included; 0 if there is no such layer.
    pub num_states: usize,
    /// Segments of a step at most.
    pub max_segments: usize,
}

/// A full graph to capture, with what its steps keep to.
#[derive(Clone, Debug, PartialEq)]
pub struct FullGraph {
    /// Its shape.
    pub descriptor: BatchExecutionDescriptor,
    /// For each attention group, whoever builds its metadata.
    pub promises: Vec<LaunchPromise>,
}

/// Which graphs are captured, and the bounds of what runs outside graphs. Empty on a device that captures none.
#[derive(Clone, Debug)]
pub struct GraphPlan {
    /// The mode that survived.
    pub mode: CudagraphMode,
    /// Which captured graph a batch replays.
    pub manager: CudagraphManager,
    /// Full graphs, the largest first.
    pub full: Vec<FullGraph>,
    /// Piecewise graphs, the largest first.
    pub piecewise: Vec<BatchExecutionDescriptor>,
    /// For each attention group, the promise for the largest step outside graphs ([`eager_shape`]).
    pub eager: Vec<LaunchPromise>,
}

/// The shape whose launch promise a full graph is captured with.
pub fn capture_shape(graph: &BatchExecutionDescriptor) -> CaptureShape {
    CaptureShape {
        num_tokens: graph.num_tokens,
        num_reqs: graph.num_reqs.unwrap_or(graph.num_tokens),
        max_query_len: graph
            .uniform_token_count
            .or(graph.max_query_len)
            .unwrap_or(graph.num_tokens),
        uniform_query_len: graph.uniform_token_count,
    }
}

/// The largest step that runs outside graphs.
pub fn eager_shape(scheduler: &SchedulerConfig) -> CaptureShape {
    CaptureShape {
        num_tokens: scheduler.max_num_batched_tokens,
        num_reqs: scheduler.max_num_seqs,
        max_query_len: scheduler.max_num_batched_tokens,
        uniform_query_len: None,
    }
}

/// How the token of one row is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowSampling {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Within (0, 1].
    pub top_p: f32,
    /// 0: all.
    pub top_k: u32,
    /// The request's own random number for this token, within [0, 1); 0 where none is used.
    pub uniform: f64,
    /// The token is known: nothing is chosen, and the result is this.
    pub forced: Option<u32>,
    /// Is the row of logits wanted with the token?
    pub logits: bool,
}

/// One step, ready to run: its metadata are prepared.
#[derive(Debug)]
pub struct Step<'a> {
    /// Padded as `graph` says. Its token ids may hold feed references to the step that was submitted before this one.
    pub batch: &'a mut InputBatch,
    /// What `dispatch` said.
    pub graph: BatchExecutionDescriptor,
    /// For each of [`InputBatch::logits_rows`].
    pub sampling: &'a [RowSampling],
}

/// Where a segment stands in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentPlace {
    /// Which of the step's.
    pub index: usize,
    /// Rows before it.
    pub first_row: usize,
    /// Tokens before it.
    pub first_token: usize,
}

/// What a step came to.
#[derive(Debug, Default)]
pub struct StepResults {
    /// For each of the step's logits rows.
    pub tokens: Vec<Result<u32, SamplingError>>,
    /// `f32 [rows, vocab_size]`: those that were wanted ([`RowSampling::logits`]), in order.
    pub logits: Vec<f32>,
    /// Where the executor's time went: the parts that are its own, the others 0.
    pub timings: StepTimings,
}

impl StepResults {
    /// Empty, with the memory kept.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.logits.clear();
        self.timings = StepTimings::default();
    }
}

/// Why metadata was not taken by the device.
pub type Unprepared = Box<dyn Error + Send + Sync>;

/// Why a whole step failed. Its requests end with this.
#[derive(Debug, thiserror::Error)]
pub enum StepFailure {
    /// There is no metadata.
    #[error(transparent)]
    Metadata(#[from] StepError),
    /// The forward pass on the host failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device refused or failed.
    #[error("{message}")]
    Device {
        /// What failed, and the remedy.
        message: String,
        /// The device is gone: no further step will run, and the engine refuses requests.
        fatal: bool,
    },
}

/// Where layers, KV caches and sampling live. One per engine; owned by its step thread.
pub trait Executor: Send {
    /// The model's sizes.
    fn model_config(&self) -> &ModelConfig;

    /// What the rule book is to be asked with.
    ///
    /// # Errors
    /// A dtype or another setting that the device does not run.
    fn facts(&self, config: &EngineConfig) -> Result<DeviceFacts, EngineError>;

    /// Steps that may be in flight, 1 or 2. With 2, the second is submitted while the first one's tokens are not known yet.
    fn depth(&self) -> usize {
        1
    }

    /// Segments that a step may have: a device that launches attention once for the whole batch takes one.
    fn max_segments(&self) -> usize {
        1
    }

    /// Makes every layer, without a cache.
    ///
    /// # Errors
    /// A layer that the device does not run.
    fn setup(&mut self, setup: &ExecutorSetup<'_>) -> Result<(), EngineError>;

    /// The device's own check of a group's new builder version, on the thread that reloads, before the version is published:
    /// this is where graphs are captured again if the version promises more than they were captured with. Called before
    /// `start` for each group; the check itself may run before `start` too, for the version that an engine starts with.
    fn acceptance(&self, _group: usize) -> Option<Acceptance> {
        None
    }

    /// Sizes and zeroes the KV cache beside everything else that steps need, and captures the graphs. Returns the blocks of
    /// the manager, the null block included.
    ///
    /// # Errors
    /// Too little memory; a graph that cannot be captured.
    fn start(&mut self, graphs: GraphPlan) -> Result<usize, EngineError>;

    /// Between two steps, after the groups' builders took their new versions: what their acceptance prepared is taken now.
    ///
    /// # Errors
    /// The device is gone: the step that was to follow fails with this, since nothing else would say so.
    fn step_boundary(&mut self) -> Result<(), StepFailure> {
        Ok(())
    }

    /// How a batch of so many segments runs, and padded to what. With several it is no full graph, and rows are not padded.
    fn dispatch(&mut self, query: &BatchQuery, _num_segments: usize) -> BatchExecutionDescriptor {
        BatchExecutionDescriptor {
            cg_mode: RuntimeMode::None,
            num_tokens: query.num_tokens,
            num_reqs: Some(query.num_reqs),
            uniform_token_count: None,
            max_query_len: None,
            num_active_loras: query.num_active_loras,
            num_ubatches: query.num_ubatches,
        }
    }

    /// What the full graph `graph` was captured with for a group; none outside full graphs.
    fn promise(&self, _group: usize, _graph: &BatchExecutionDescriptor) -> Option<LaunchPromise> {
        None
    }

    /// Takes a group's metadata of one segment of the step that is submitted next. It has passed the verifier with `context`,
    /// which is that segment's, with rows and tokens from 0. Replaces what was prepared for them before.
    ///
    /// # Errors
    /// Whatever the device does not execute: the group's plain builder may still serve.
    fn prepare(
        &mut self,
        group: usize,
        segment: SegmentPlace,
        metadata: &Metadata,
        context: &VerifyContext<'_>,
    ) -> Result<(), Unprepared>;

    /// A segment of a step of several has no metadata. Its rows stay in the batch, so that no other row's numbers change; their
    /// attention is zero in every layer and nobody looks at their tokens. Called instead of, or after, its `prepare`.
    fn leave_out(&mut self, segment: usize);

    /// Begins a step.
    ///
    /// # Errors
    /// The step did not begin, or failed: it has no results to collect.
    fn submit(&mut self, step: Step<'_>) -> Result<(), StepFailure>;

    /// Waits for the oldest step in flight. `results` arrives empty.
    ///
    /// # Errors
    /// That step failed; it is no longer in flight.
    fn collect(&mut self, results: &mut StepResults) -> Result<(), StepFailure>;
}
