//! The executor on a CUDA device: made of a model, set up for an engine, started with its graphs, then one step after the other.
//!
//! A step is packed into a pinned slot, copied and unpacked, run (as kernels, as pieces with attention between them, or as one
//! graph), and its tokens are chosen on the device and copied back; two steps may be in flight. Nothing is allocated in a step.
//! This module must never know a builder's choices, nor a request.

use std::{
    collections::VecDeque,
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};

use timetable_attention::{
    VerifyContext,
    graphs::{BatchExecutionDescriptor, BatchQuery, CudagraphManager, RuntimeMode},
};
use timetable_device_cuda::{
    CudaError,
    attention::{GroupLaunch, GroupState, Replay},
    driver::{Device, Event, GraphExec, Stream},
    kernels::{Element, Kernels},
    nvtx,
    upload::{PackError, StepPtrs, UnpackStep, UploadRing},
};
use timetable_sandbox::Acceptance;
use timetable_types::{Dtype, LaunchPromise, Metadata};

use super::{
    core::{Core, Span},
    error::CudaStartError,
    flights::Flights,
    graphs::{FullExec, GraphSet, PiecewiseGraphs},
    memory::MemoryReport,
    pack::PackScratch,
    recapture::{Exchange, Retired},
    setup::{Parts, start},
    tensors::name,
    weights::Weights,
};
use crate::{
    config::{DeviceChoice, EngineConfig, EngineError},
    executor::{
        DeviceFacts, Executor, ExecutorSetup, GraphPlan, SegmentPlace, Step, StepFailure,
        StepResults, Unprepared,
    },
    model::{ModelConfig, rope::Rope},
    sampling::SamplingError,
    timings::Lap,
};

/// Steps in flight at most.
pub(super) const DEPTH: usize = 2;

/// Segments of a step at most. Each has a workspace for every attention group.
const MAX_SEGMENTS: usize = 16;

/// A model on a device, before an engine's sizes are known.
pub(super) struct Loaded {
    pub(super) kernels: Kernels,
    pub(super) weights: Weights,
    pub(super) rope: Rope,
}

/// What steps run with.
pub(super) struct Running {
    pub(super) core: Arc<Core>,
    /// For each attention group, for each segment that a step may have: the first segment's groups first.
    pub(super) groups: Vec<GroupState>,
    pub(super) set: GraphSet,
    pub(super) piecewise: PiecewiseGraphs,
    pub(super) manager: CudagraphManager,
    pub(super) ring: UploadRing,
    pub(super) flights: Flights,
    pub(super) scratch: PackScratch,
    pub(super) stream: Stream,
    /// Tokens of a block of the kernels' table.
    pub(super) block_size: u32,
    pub(super) steps: StepState,
}

/// How long the end of an executor waits for the device's work.
const DROP_LIMIT: Duration = Duration::from_secs(10);

/// What one step leaves for the next.
pub(super) struct StepState {
    /// As what the step that is prepared now will run.
    graph: BatchExecutionDescriptor,
    /// As `Running::groups`: may the graph replay what was prepared?
    replay: Vec<Replay>,
    /// For each segment: it has no metadata.
    left_out: Vec<bool>,
    /// The segments of the step that is submitted.
    spans: Vec<Span>,
    /// Tokens that the step before chose, which references may name.
    num_fed: usize,
    /// For each step in flight, its known tokens and the time that its submission took.
    host: VecDeque<HostSide>,
    spare: Vec<HostSide>,
}

#[derive(Default)]
struct HostSide {
    forced: Vec<Option<u32>>,
    submit_ns: u64,
}

impl StepState {
    pub(super) fn new(num_states: usize, max_segments: usize, max_rows: usize) -> Self {
        let side = || HostSide {
            forced: Vec::with_capacity(max_rows),
            submit_ns: 0,
        };
        Self {
            graph: BatchExecutionDescriptor {
                cg_mode: RuntimeMode::None,
                num_tokens: 0,
                num_reqs: None,
                uniform_token_count: None,
                max_query_len: None,
                num_active_loras: 0,
                num_ubatches: 1,
            },
            replay: vec![Replay::Fits; num_states],
            left_out: vec![false; max_segments],
            spans: Vec::with_capacity(max_segments),
            num_fed: 0,
            host: VecDeque::with_capacity(DEPTH + 1),
            spare: (0..=DEPTH).map(|_| side()).collect(),
        }
    }

    /// Where the segments of `step` stand.
    fn find_spans(&mut self, step: &Step<'_>) {
        self.spans.clear();
        for index in 0..step.batch.num_segments() {
            let tokens = step.batch.segment(index).tokens();
            self.spans.push(Span {
                first_token: tokens.start,
                num_tokens: tokens.len(),
                left_out: self.left_out[index],
            });
        }
    }
}

/// Runs a model on one CUDA device.
pub struct CudaExecutor {
    device: Device,
    model: ModelConfig,
    element: Element,
    /// Its memory goes once the device's work has ended: `drop` waits for it.
    running: Option<Running>,
    loaded: Option<Loaded>,
    parts: Option<Parts>,
    exchange: Arc<Exchange>,
    memory: Arc<OnceLock<MemoryReport>>,
    /// Why the device no longer serves.
    lost: Option<String>,
}

impl CudaExecutor {
    /// Opens the device that `config` names, loads the kernels, and the model at `path` (a GGUF file or a Hugging Face directory)
    /// in the configured dtype, bf16 where it is left open.
    ///
    /// # Errors
    /// No driver, device or kernels for it; what is wrong with the model's file; too little memory. Each with its remedy.
    pub fn new(config: &EngineConfig, path: &Path) -> Result<Self, CudaStartError> {
        let ordinal = match config.device {
            DeviceChoice::Cuda { ordinal } => ordinal,
            DeviceChoice::Cpu => 0,
        };
        let device = Device::open(u32::try_from(ordinal).unwrap_or(u32::MAX))?;
        let kernels = Kernels::load(&device)?;
        let dtype = config.model_dtype.named().and_then(Element::of);
        let (model, rope, weights) = Weights::load(&device, path, dtype)?;
        tracing::info!(
            device = device.name(),
            dtype = name(weights.element),
            "the model is on the device"
        );
        Ok(Self {
            device,
            element: weights.element,
            model,
            running: None,
            loaded: Some(Loaded {
                kernels,
                weights,
                rope,
            }),
            parts: None,
            exchange: Arc::default(),
            memory: Arc::default(),
            lost: None,
        })
    }

    /// Where the device's memory went; filled when the engine has started. Kept by whoever wants to show it: the executor itself
    /// goes into the engine.
    pub fn memory(&self) -> Arc<OnceLock<MemoryReport>> {
        self.memory.clone()
    }

    /// The device's name, such as "NVIDIA H200".
    pub fn device_name(&self) -> &str {
        self.device.name()
    }

    fn running(&mut self) -> Result<&mut Running, StepFailure> {
        if let Some(message) = &self.lost {
            return Err(StepFailure::Device {
                message: message.clone(),
                fatal: true,
            });
        }
        self.running.as_mut().ok_or_else(|| StepFailure::Device {
            message: "the CUDA executor has not started: this is a defect of the engine".to_owned(),
            fatal: false,
        })
    }

    /// Remembers that the device is gone.
    fn note(&mut self, failure: &StepFailure) {
        if let StepFailure::Device {
            message,
            fatal: true,
        } = failure
        {
            self.lost.get_or_insert_with(|| message.clone());
        }
    }
}

fn failed(error: &CudaError) -> StepFailure {
    StepFailure::Device {
        message: error.to_string(),
        fatal: error.is_fatal(),
    }
}

fn dtype_of(element: Element) -> Dtype {
    match element {
        Element::Bf16 => Dtype::Bfloat16,
        Element::F16 => Dtype::Float16,
        Element::F32 => Dtype::Float32,
    }
}

impl Executor for CudaExecutor {
    fn model_config(&self) -> &ModelConfig {
        &self.model
    }

    fn facts(&self, config: &EngineConfig) -> Result<DeviceFacts, EngineError> {
        let asked = config.model_dtype.named();
        if let Some(asked) = asked.filter(|&asked| asked != dtype_of(self.element)) {
            return Err(EngineError::Device(format!(
                "the model was loaded in {} and the engine is configured for {asked:?}: load it with the same dtype",
                name(self.element)
            )));
        }
        Ok(DeviceFacts::cuda(
            config,
            self.device.capability(),
            self.device.num_multiprocessors(),
            dtype_of(self.element),
            self.model.head_dim as u32,
        ))
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn max_segments(&self) -> usize {
        MAX_SEGMENTS
    }

    fn setup(&mut self, setup: &ExecutorSetup<'_>) -> Result<(), EngineError> {
        let loaded = self.loaded.take().ok_or_else(|| {
            EngineError::Device("the CUDA executor was set up before: make another one".to_owned())
        })?;
        let parts = Parts::new(&self.device, &self.model, loaded, setup);
        self.parts = Some(parts.map_err(EngineError::from)?);
        Ok(())
    }

    fn acceptance(&self, group: usize) -> Option<Acceptance> {
        let exchange = self.exchange.clone();
        Some(Arc::new(move |builder| exchange.accept(group, builder)))
    }

    fn start(&mut self, graphs: GraphPlan) -> Result<usize, EngineError> {
        let parts = self.parts.take().ok_or_else(|| {
            EngineError::Device(
                "the CUDA executor was not set up: this is a defect of the engine".to_owned(),
            )
        })?;
        let started = start(&self.device, parts, &graphs).map_err(EngineError::from)?;
        self.exchange.start(started.recapture);
        self.running = Some(started.running);
        let memory = self.memory.get_or_init(|| started.memory);
        tracing::info!("{memory}");
        Ok(memory.num_blocks as usize)
    }

    fn step_boundary(&mut self) -> Result<(), StepFailure> {
        let Some(next) = self.exchange.take() else {
            return Ok(());
        };
        let Some(running) = &mut self.running else {
            return Ok(());
        };
        match running.replace(&self.device, next) {
            Ok(retired) => self.exchange.retire(retired),
            Err(error) => {
                tracing::error!(%error, "the graphs of a new version could not be taken");
                let failure = failed(&error);
                self.note(&failure);
                // What served before still does, unless the device is gone.
                if error.is_fatal() {
                    return Err(failure);
                }
            }
        }
        Ok(())
    }

    fn dispatch(&mut self, query: &BatchQuery, num_segments: usize) -> BatchExecutionDescriptor {
        let eager = BatchExecutionDescriptor {
            cg_mode: RuntimeMode::None,
            num_tokens: query.num_tokens,
            num_reqs: Some(query.num_reqs),
            uniform_token_count: None,
            max_query_len: None,
            num_active_loras: query.num_active_loras,
            num_ubatches: query.num_ubatches,
        };
        let Some(running) = &mut self.running else {
            return eager;
        };
        let chosen = match num_segments {
            1 => running.manager.dispatch(query),
            _ => running.manager.dispatch_in_parts(query),
        };
        let captured = match chosen.cg_mode {
            RuntimeMode::None => true,
            RuntimeMode::Piecewise => running.piecewise.find(chosen.num_tokens).is_some(),
            RuntimeMode::Full => running.set.find(&chosen).is_some(),
        };
        running.steps.graph = if captured { chosen } else { eager };
        running.steps.graph
    }

    fn promise(&self, group: usize, graph: &BatchExecutionDescriptor) -> Option<LaunchPromise> {
        if graph.cg_mode != RuntimeMode::Full {
            return None;
        }
        let promises = &self.running.as_ref()?.set.promises;
        promises.of_graph(group, graph).cloned()
    }

    fn prepare(
        &mut self,
        group: usize,
        segment: SegmentPlace,
        metadata: &Metadata,
        context: &VerifyContext<'_>,
    ) -> Result<(), Unprepared> {
        let Running {
            core,
            groups,
            set,
            steps,
            ..
        } = self.running()?;
        let captured = set
            .find(&steps.graph)
            .filter(|_| steps.graph.cg_mode == RuntimeMode::Full)
            .and_then(|graph| graph.launches.get(group));
        let index = segment.index * core.groups.len() + group;
        let state = groups
            .get_mut(index)
            .ok_or("no such attention group or segment on the device")?;
        state.set_tensors(core.ptrs().part(segment.first_row, segment.first_token));
        steps.left_out[segment.index] = false;
        steps.replay[index] = state.prepare(metadata, context, captured)?;
        Ok(())
    }

    fn leave_out(&mut self, segment: usize) {
        if let Some(running) = &mut self.running
            && let Some(left_out) = running.steps.left_out.get_mut(segment)
        {
            *left_out = true;
        }
    }

    #[allow(
        clippy::needless_pass_by_value,
        reason = "the trait hands the step over: an executor may keep what is in it"
    )]
    fn submit(&mut self, step: Step<'_>) -> Result<(), StepFailure> {
        let submitted = self.running()?.submit(step);
        if let Err(failure) = &submitted {
            self.note(failure);
        }
        submitted
    }

    fn collect(&mut self, results: &mut StepResults) -> Result<(), StepFailure> {
        let vocab_size = self.model.vocab_size;
        let collected = self.running()?.collect(results, vocab_size);
        if let Err(failure) = &collected {
            self.note(failure);
        }
        collected
    }
}

impl Running {
    /// Takes a new set of graphs and workspaces; gives back what served before.
    fn replace(&mut self, device: &Device, mut next: GraphSet) -> Result<Retired, CudaError> {
        let last_use = Event::new(device, false)?;
        self.stream.record(&last_use)?;
        for (group, workspace) in self.groups.iter_mut().zip(&next.workspaces) {
            if !Arc::ptr_eq(group.workspace(), workspace) {
                group.set_workspace(workspace.clone());
            }
        }
        let ring = next
            .ring
            .take()
            .map(|ring| std::mem::replace(&mut self.ring, ring));
        Ok(Retired {
            set: std::mem::replace(&mut self.set, next),
            ring,
            last_use,
        })
    }

    #[allow(
        clippy::needless_pass_by_value,
        reason = "the trait hands the step over: an executor may keep what is in it"
    )]
    fn submit(&mut self, step: Step<'_>) -> Result<(), StepFailure> {
        let _range = nvtx::Range::new("submit");
        let mut lap = Lap::start();
        let num_rows = step.batch.logits_rows().len();
        if self.flights.len() >= DEPTH {
            return Err(StepFailure::Device {
                message: format!(
                    "{} steps are in flight: collect one before another is submitted",
                    self.flights.len()
                ),
                fatal: false,
            });
        }
        if let Err(error) = self.enqueue(&step, num_rows) {
            // Whatever was enqueued of it ends before anything else begins.
            self.flights.forget_last();
            self.steps.num_fed = 0;
            let ended = self.stream.synchronize();
            return Err(match ended {
                Err(later) if later.is_fatal() => failed(&later),
                _ => error,
            });
        }
        step.batch.clear_table_updates();
        self.steps.num_fed = num_rows;
        let mut side = self.steps.spare.pop().unwrap_or_default();
        side.forced.clear();
        side.forced
            .extend(step.sampling.iter().map(|row| row.forced));
        side.submit_ns = lap.ns();
        self.steps.host.push_back(side);
        Ok(())
    }

    fn enqueue(&mut self, step: &Step<'_>, num_rows: usize) -> Result<(), StepFailure> {
        let ptrs = self.core.ptrs();
        let num_tokens = step.batch.token_ids().len();
        self.steps.find_spans(step);
        self.upload(step, &ptrs, num_tokens)?;
        let run = |running: &mut Self| -> Result<(), CudaError> {
            let core = running.core.clone();
            let stream = &running.stream;
            let (rows, tokens) = (num_rows as u32, num_tokens as u32);
            running.forward(step.graph, tokens)?;
            let _range = nvtx::Range::new("sample");
            // SAFETY: the step's tensors were unpacked on this stream; its rows and tokens fitted the buffers when they were packed.
            unsafe {
                core.forward.head(stream, rows, tokens)?;
                core.forward.sample(stream, rows)?;
                let rows = step.sampling.iter().enumerate();
                let wanted = rows.filter(|(_, row)| row.logits).map(|(index, _)| index);
                let logits = core.forward.logits();
                let flights = &mut running.flights;
                flights.end(stream, num_rows, ptrs.sampled, logits, wanted)
            }
        };
        run(self).map_err(|error| failed(&error))
    }

    /// Packs the step and has it copied and unpacked.
    fn upload(
        &mut self,
        step: &Step<'_>,
        ptrs: &StepPtrs,
        num_tokens: usize,
    ) -> Result<(), StepFailure> {
        let _range = nvtx::Range::new("upload");
        let full = |error: PackError| StepFailure::Device {
            message: error.to_string(),
            fatal: false,
        };
        let mut packer = self.ring.begin().map_err(|error| failed(&error))?;
        self.scratch
            .step(
                &mut packer,
                ptrs,
                step.batch,
                step.sampling,
                self.steps.num_fed,
            )
            .map_err(full)?;
        let num_groups = self.core.groups.len();
        for (span, groups) in self.steps.spans.iter().zip(self.groups.chunks(num_groups)) {
            for group in groups.iter().filter(|_| !span.left_out) {
                group.pack(&mut packer).map_err(full)?;
            }
        }
        let packed = packer.finish();
        let num_reqs = step.batch.common().num_reqs as usize;
        let unpack = UnpackStep::new(num_reqs, num_tokens, self.block_size);
        let marks = Some(self.flights.marks());
        // SAFETY: every destination lies within the step's buffers or a group's workspace, by the sizes they were packed against;
        // both live as long as the stream's work, which `drop` waits for, and only the step's stream uses them.
        unsafe {
            self.ring.submit(
                &self.stream,
                &self.core.forward.kernels,
                packed,
                unpack,
                ptrs,
                marks,
            )
        }
        .map_err(|error| failed(&error))
    }

    /// The forward pass, as the step was dispatched; without graphs where some group's step exceeds what was captured.
    fn forward(&self, graph: BatchExecutionDescriptor, tokens: u32) -> Result<(), CudaError> {
        // A full graph runs a step of one segment.
        let mut replay = self.steps.replay[..self.core.groups.len()].iter();
        let fits = replay.all(|fits| *fits == Replay::Fits);
        let full = self.set.find(&graph);
        match (graph.cg_mode, full) {
            (RuntimeMode::Full, Some(FullExec { exec, .. })) if fits => {
                let _range = nvtx::Range::new("full graph");
                // SAFETY: what it was captured with is the core's and the set's, which live; the step keeps to the promise.
                unsafe { self.stream.launch_graph(exec) }
            }
            (RuntimeMode::Piecewise, _) => {
                let _range = nvtx::Range::new("piecewise graphs");
                match self.piecewise.find(graph.num_tokens) {
                    Some(pieces) if graph.num_tokens == tokens => self.pieces(pieces),
                    _ => self.eager(tokens),
                }
            }
            _ => {
                let _range = nvtx::Range::new("kernels");
                self.eager(tokens)
            }
        }
    }

    /// What was prepared for a segment and a group.
    fn launch(&self, segment: usize, group: usize) -> Option<GroupLaunch<'_>> {
        let index = segment * self.core.groups.len() + group;
        self.groups.get(index)?.eager()
    }

    fn pieces(&self, pieces: &[GraphExec]) -> Result<(), CudaError> {
        let (spans, launches) = (&self.steps.spans, |span, group| self.launch(span, group));
        // SAFETY: the step that was prepared for these launches was unpacked on this stream; what the pieces were captured with lives.
        unsafe {
            self.core.plan(&self.stream, spans, &launches)?;
            for (piece, exec) in pieces.iter().enumerate() {
                self.stream.launch_graph(exec)?;
                if piece < self.core.forward.num_layers() {
                    self.core.attend(&self.stream, piece, spans, &launches)?;
                }
            }
        }
        Ok(())
    }

    fn eager(&self, tokens: u32) -> Result<(), CudaError> {
        let (spans, launches) = (&self.steps.spans, |span, group| self.launch(span, group));
        // SAFETY: as above; the batch's tokens are those that attention was prepared for, or padding beyond them.
        unsafe { self.core.whole(&self.stream, spans, &launches, tokens) }
    }

    fn collect(&mut self, results: &mut StepResults, vocab_size: usize) -> Result<(), StepFailure> {
        let _range = nvtx::Range::new("collect");
        let mut lap = Lap::start();
        let side = self.steps.host.pop_front().unwrap_or_default();
        let StepResults {
            tokens,
            logits,
            timings,
        } = results;
        let collected = self.flights.collect(timings, |sampled, observed| {
            let forced = side.forced.iter().copied().chain(std::iter::repeat(None));
            tokens.extend(sampled.iter().zip(forced).map(|(&token, forced)| {
                // Below 0 no logit of the row was a number.
                let chosen = u32::try_from(token).map_err(|_| SamplingError::Logits(vocab_size));
                forced.map_or(chosen, Ok)
            }));
            logits.extend_from_slice(observed);
        });
        timings.submit_ns += side.submit_ns;
        timings.wait_ns += lap.ns();
        self.steps.spare.push(side);
        collected.map_err(|error| failed(&error))
    }
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        // Memory that the device still uses must not be freed: captures end first, then the step's stream.
        if let Some(running) = &self.running
            && let Err(error) = running.stream.synchronize_within(DROP_LIMIT)
        {
            tracing::debug!(%error, "the device's work did not end");
            if let CudaError::Hung { .. } = error {
                // To free anything would wait for the device, which hangs: the process's end frees it.
                std::mem::forget((
                    self.running.take(),
                    self.loaded.take(),
                    self.parts.take(),
                    self.exchange.clone(),
                ));
                return;
            }
        }
        self.exchange.stop();
    }
}
