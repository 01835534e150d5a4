//! The CPU executor behind two steps in flight: what the step loop sees of a device that runs steps by itself, without one.
//! It hands each step's tokens out one step late, mirrors the block table from the recorded changes, pads batches as graphs
//! do and holds them to the graphs' promises, and fails where it is told to. Knows no test.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use timetable_attention::{
    VerifyContext,
    graphs::{BatchExecutionDescriptor, BatchQuery, RuntimeMode},
};
use timetable_engine::{
    AttentionPlan, BuilderSource, CpuExecutor, Engine, EngineConfig, EngineError, Executor,
    ModelRunner,
    executor::{
        DeviceFacts, ExecutorSetup, GraphPlan, SegmentPlace, Step, StepFailure, StepResults,
        Unprepared,
    },
    model::ModelConfig,
    tokenizer::Tokenizer,
};
use timetable_types::{Dtype, LaunchPromise, Metadata};

use crate::drive;

/// What goes wrong, by the number of the step, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `submit` fails.
    Submit {
        /// Which step.
        step: usize,
        /// Is the device gone?
        fatal: bool,
    },
    /// `collect` fails, and nothing that the step or the one after it should have written was written.
    Collect {
        /// Which step.
        step: usize,
        /// Is the device gone?
        fatal: bool,
    },
    /// The device is found gone before the step is dispatched.
    Boundary {
        /// Which step.
        step: usize,
    },
}

/// How the executor behaves.
#[derive(Clone, Copy, Debug, Default)]
pub struct Behaviour {
    /// Say that it is a GPU of compute capability 9.0 in its f32 mode, and run every batch as the graph that the rule book
    /// dispatches it to would.
    pub graphs: bool,
    /// Without graphs: pad rows and tokens of batches to the next multiples of these, as full graphs do. 0: never.
    pub pad_to: (u32, u32),
    /// Pad only batches that consist of decodes.
    pub pad_only_decodes: bool,
    /// What goes wrong.
    pub fault: Option<Fault>,
}

/// A step that was submitted.
enum InFlight {
    /// The inner executor has its tokens.
    Ran,
    /// It did not run; its tokens are made up, so many.
    Skipped(usize),
    /// It did not run, and fails when it is collected.
    Failed,
}

/// See the module.
pub struct TwoInFlight {
    inner: CpuExecutor,
    behaviour: Behaviour,
    shape: (usize, usize),
    table: Vec<i32>,
    in_flight: VecDeque<InFlight>,
    submitted: usize,
    collected: usize,
    graphs: Option<GraphPlan>,
    dispatched: Arc<Dispatched>,
}

/// Batches that ran in each mode.
#[derive(Debug, Default)]
pub struct Dispatched {
    /// Outside graphs.
    pub none: AtomicU64,
    /// Padded tokens, attention as it is.
    pub piecewise: AtomicU64,
    /// Padded rows and tokens.
    pub full: AtomicU64,
}

impl TwoInFlight {
    /// Around a model.
    pub fn new(model: Box<dyn ModelRunner>, behaviour: Behaviour) -> Self {
        Self {
            inner: CpuExecutor::new(model),
            behaviour,
            shape: (0, 0),
            table: Vec::new(),
            in_flight: VecDeque::new(),
            submitted: 0,
            collected: 0,
            graphs: None,
            dispatched: Arc::default(),
        }
    }

    /// Counts on while the engine has the executor.
    pub fn dispatched(&self) -> Arc<Dispatched> {
        self.dispatched.clone()
    }

    fn mirror(&mut self, step: &mut Step<'_>) {
        let width = step.batch.table_width();
        for update in step.batch.table_updates() {
            let start = update.row * width + update.first_column;
            self.table[start..start + update.entries.len()].copy_from_slice(update.entries);
        }
        step.batch.clear_table_updates();
        let host = step.batch.inputs().block_table.data;
        assert_eq!(
            &self.table[..host.len()],
            host,
            "the changes that were recorded make the device's table the host's"
        );
    }
}

fn failure(fatal: bool) -> StepFailure {
    StepFailure::Device {
        message: "made to fail".to_owned(),
        fatal,
    }
}

impl Executor for TwoInFlight {
    fn model_config(&self) -> &ModelConfig {
        self.inner.model_config()
    }

    fn facts(&self, config: &EngineConfig) -> Result<DeviceFacts, EngineError> {
        if !self.behaviour.graphs {
            return self.inner.facts(config);
        }
        let head_size = self.inner.model_config().head_dim as u32;
        Ok(DeviceFacts::cuda(
            config,
            (9, 0),
            132,
            Dtype::Float32,
            head_size,
        ))
    }

    fn depth(&self) -> usize {
        2
    }

    fn max_segments(&self) -> usize {
        self.inner.max_segments()
    }

    fn setup(&mut self, setup: &ExecutorSetup<'_>) -> Result<(), EngineError> {
        self.shape = (setup.shape.max_num_seqs, setup.shape.max_num_batched_tokens);
        self.table = vec![0; setup.shape.max_num_seqs * setup.table_width];
        self.inner.setup(setup)
    }

    fn start(&mut self, graphs: GraphPlan) -> Result<usize, EngineError> {
        self.graphs = self.behaviour.graphs.then(|| graphs.clone());
        self.inner.start(graphs)
    }

    fn step_boundary(&mut self) -> Result<(), StepFailure> {
        match self.behaviour.fault {
            Some(Fault::Boundary { step }) if step <= self.submitted => Err(failure(true)),
            _ => Ok(()),
        }
    }

    fn dispatch(&mut self, query: &BatchQuery, num_segments: usize) -> BatchExecutionDescriptor {
        if let Some(graphs) = &self.graphs {
            let graph = match num_segments {
                1 => graphs.manager.dispatch(query),
                _ => graphs.manager.dispatch_in_parts(query),
            };
            let count = match graph.cg_mode {
                RuntimeMode::None => &self.dispatched.none,
                RuntimeMode::Piecewise => &self.dispatched.piecewise,
                RuntimeMode::Full => &self.dispatched.full,
            };
            count.fetch_add(1, Ordering::Relaxed);
            return graph;
        }
        let eager = self.inner.dispatch(query, num_segments);
        let (rows, tokens) = self.behaviour.pad_to;
        let decodes = query.uniform_token_count == Some(1);
        if rows == 0 || num_segments > 1 || (self.behaviour.pad_only_decodes && !decodes) {
            return eager;
        }
        let pad = |count: u32, to: u32, most: usize| count.next_multiple_of(to).min(most as u32);
        BatchExecutionDescriptor {
            cg_mode: RuntimeMode::Full,
            num_tokens: pad(query.num_tokens, tokens, self.shape.1),
            num_reqs: Some(pad(query.num_reqs, rows, self.shape.0)),
            ..eager
        }
    }

    fn promise(&self, group: usize, graph: &BatchExecutionDescriptor) -> Option<LaunchPromise> {
        let full = self.graphs.as_ref()?.full.iter();
        let captured = full.clone().find(|full| full.descriptor == *graph);
        assert_eq!(captured.is_some(), graph.cg_mode == RuntimeMode::Full);
        captured.map(|full| full.promises[group].clone())
    }

    fn prepare(
        &mut self,
        group: usize,
        segment: SegmentPlace,
        metadata: &Metadata,
        context: &VerifyContext<'_>,
    ) -> Result<(), Unprepared> {
        self.inner.prepare(group, segment, metadata, context)
    }

    fn leave_out(&mut self, segment: usize) {
        self.inner.leave_out(segment);
    }

    fn submit(&mut self, mut step: Step<'_>) -> Result<(), StepFailure> {
        assert!(self.in_flight.len() < 2, "a third step was submitted");
        let number = self.submitted;
        self.submitted += 1;
        self.mirror(&mut step);
        match self.behaviour.fault {
            Some(Fault::Submit { step, fatal }) if step == number => Err(failure(fatal)),
            Some(Fault::Collect { step, .. }) if step == number => {
                self.in_flight.push_back(InFlight::Failed);
                Ok(())
            }
            Some(Fault::Collect { step: failed, .. })
                if failed + 1 == number && self.collected <= failed =>
            {
                let tokens = step.batch.logits_rows().len();
                self.in_flight.push_back(InFlight::Skipped(tokens));
                Ok(())
            }
            _ => {
                self.inner.submit(step)?;
                self.in_flight.push_back(InFlight::Ran);
                Ok(())
            }
        }
    }

    fn collect(&mut self, results: &mut StepResults) -> Result<(), StepFailure> {
        self.collected += 1;
        match self.in_flight.pop_front() {
            Some(InFlight::Ran) => self.inner.collect(results),
            Some(InFlight::Skipped(tokens)) => {
                results.tokens.resize(tokens, Ok(7));
                Ok(())
            }
            Some(InFlight::Failed) => {
                let fatal = matches!(
                    self.behaviour.fault,
                    Some(Fault::Collect { fatal: true, .. })
                );
                Err(failure(fatal))
            }
            None => panic!("collected without a step in flight"),
        }
    }
}

/// An engine with two steps in flight.
pub fn engine(
    config: &EngineConfig,
    model: Box<dyn ModelRunner>,
    behaviour: Behaviour,
    tokenizer: Option<Arc<Tokenizer>>,
    source: &BuilderSource,
) -> Engine {
    start(
        config,
        TwoInFlight::new(model, behaviour),
        tokenizer,
        source,
    )
}

/// An engine on such an executor.
pub fn start(
    config: &EngineConfig,
    executor: TwoInFlight,
    tokenizer: Option<Arc<Tokenizer>>,
    source: &BuilderSource,
) -> Engine {
    let facts = executor.facts(config).expect("the facts of the device");
    let plan = AttentionPlan::for_device(config, executor.model_config(), facts).expect("a plan");
    let executor = Box::new(executor);
    Engine::with_executor(config, plan, executor, tokenizer, drive::sandbox(), source)
        .expect("the engine starts")
}
