//! The engine's attention groups: layers that share a builder and a step's metadata.
//!
//! Which layers share a group is the plan's matter. All groups share one KV cache group: one block table, one slot mapping.
//! What is built here is verified here, and handed to the executor, which alone knows the layers and the device. This module
//! must never know requests or tokens.

mod plan;

pub use plan::{AttentionPlan, backend_name};

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use timetable_attention::{
    BuildFault, Grant, MetadataBuilder, Refusal, StepInputs, Verifier, VerifyContext,
    batch::capture_batch,
    graphs::{BatchExecutionDescriptor, covering},
    group::AttentionGroup,
    plain_builder, verify_step,
};
use timetable_sandbox::{
    Acceptance, GroupBuilder, GroupSetup, ObservedStep, ReloadHandle, Sandbox, StepMetadata,
    StepObserver,
};
use timetable_types::{
    BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata, Family, LaunchPromise,
    Metadata,
};

use crate::{
    batch::NoSlot,
    config::{BuilderSource, EngineError},
    executor::{Executor, Unprepared, eager_shape},
    timings::{Lap, StepTimings},
};

/// Why a step has no metadata. Its requests fail with this; the engine lives.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StepError {
    /// The host's own tensors are inconsistent.
    #[error("this step's tensors are refused: {0}")]
    Tensors(Refusal),
    /// A request's blocks do not reach its length.
    #[error("this step's slots are refused: {0}")]
    Slots(NoSlot),
    /// Neither the builder nor the plain builder has acceptable metadata.
    #[error("group {group}: {message}")]
    Metadata {
        /// The attention group.
        group: String,
        /// What both did wrong.
        message: String,
    },
}

/// Why one builder's metadata was not taken.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error("{0}")]
    Refused(Refusal),
    #[error("{0}")]
    Prepare(Unprepared),
}

/// Who builds for a group.
enum StepBuilder {
    Sandboxed(Box<GroupBuilder>),
    Native {
        builder: Box<dyn MetadataBuilder>,
        plain: Box<dyn MetadataBuilder>,
    },
}

/// Layers that share a builder and a step's metadata.
struct Group {
    name: String,
    config: BuilderConfig,
    builder: StepBuilder,
    verifier: RefCell<Verifier>,
}

/// All groups.
pub(crate) struct Attention {
    groups: Vec<Group>,
    /// Kernel blocks of the cache.
    num_blocks: usize,
    plan: AttentionPlan,
    /// Is told of every step that a sandboxed slot served.
    observer: Option<Box<dyn StepObserver>>,
}

/// What a step's builders did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BuildOutcome {
    /// Some group was served by its plain builder after a fault in this step.
    pub fell_back: bool,
}

impl Attention {
    /// A builder for each of the plan's groups, made of `configs`. `acceptance` is the device's own check of a group's new
    /// version.
    pub(crate) fn new(
        plan: AttentionPlan,
        configs: Vec<BuilderConfig>,
        sandbox: &Sandbox,
        source: &BuilderSource,
        acceptance: impl Fn(usize) -> Option<Acceptance>,
    ) -> Result<Self, EngineError> {
        let groups = configs
            .into_iter()
            .enumerate()
            .map(|(index, config)| {
                let name = format!("{}/{index}", plan.backend());
                let of_device = acceptance(index);
                Group::new(
                    name,
                    plan.family(),
                    config,
                    sandbox,
                    source,
                    of_device.as_ref(),
                )
            })
            .collect::<Result<Vec<_>, EngineError>>()?;
        Ok(Self {
            groups,
            num_blocks: 1,
            plan,
            observer: None,
        })
    }

    /// The cache has so many of the kernels' blocks.
    pub(crate) fn set_num_blocks(&mut self, num_blocks: usize) {
        self.num_blocks = num_blocks;
    }

    /// From here on, `observer` is told of every step that a sandboxed slot served.
    pub(crate) fn set_observer(&mut self, observer: Option<Box<dyn StepObserver>>) {
        self.observer = observer;
    }

    /// What each group's builder promises for steps of `shape`, whoever builds them.
    pub(crate) fn launch_promises(
        &mut self,
        shape: &CaptureShape,
    ) -> Result<Vec<LaunchPromise>, BuildFault> {
        let promise = |group: &mut Group| match &mut group.builder {
            StepBuilder::Sandboxed(builder) => builder.launch_promise(shape),
            StepBuilder::Native { builder, plain } => {
                let plain = plain.launch_promise(shape)?;
                Ok(covering(&builder.launch_promise(shape)?, &plain))
            }
        };
        self.groups.iter_mut().map(promise).collect()
    }

    /// As [`Attention::launch_promises`], for the largest step outside graphs.
    pub(crate) fn eager_promises(&mut self) -> Result<Vec<LaunchPromise>, BuildFault> {
        match self.groups.first() {
            Some(group) => {
                let shape = eager_shape(&group.config.scheduler);
                self.launch_promises(&shape)
            }
            None => Ok(Vec::new()),
        }
    }

    /// Takes new versions of builders into service.
    pub(crate) fn step_boundary(&mut self) {
        for group in &mut self.groups {
            if let StepBuilder::Sandboxed(builder) = &mut group.builder {
                builder.step_boundary();
            }
        }
    }

    /// What the rule book said of the layers.
    pub(crate) fn plan(&self) -> &AttentionPlan {
        &self.plan
    }

    /// Handles of the groups whose builders can be replaced.
    pub(crate) fn reload_handles(&self) -> Vec<ReloadHandle> {
        self.groups
            .iter()
            .filter_map(|group| match &group.builder {
                StepBuilder::Sandboxed(builder) => Some(builder.handle()),
                StepBuilder::Native { .. } => None,
            })
            .collect()
    }

    /// As [`Attention::reload_handles`], with each group's layers.
    pub(crate) fn group_handles(&self) -> Vec<(ReloadHandle, &AttentionGroup)> {
        self.groups
            .iter()
            .zip(self.plan.groups())
            .filter_map(|(group, layers)| match &group.builder {
                StepBuilder::Sandboxed(builder) => Some((builder.handle(), layers)),
                StepBuilder::Native { .. } => None,
            })
            .collect()
    }

    /// What each group's builder says of itself, with the group's name.
    pub(crate) fn builders(&self) -> impl Iterator<Item = (&str, &BuilderInfo)> {
        self.groups.iter().map(|group| {
            let info = match &group.builder {
                StepBuilder::Sandboxed(builder) => builder.info(),
                StepBuilder::Native { builder, .. } => builder.info(),
            };
            (group.name.as_str(), info)
        })
    }

    /// Verifies the step's tensors, then builds and verifies every group's metadata and has `executor` prepare it, for a step
    /// that runs as `graph`.
    pub(crate) fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        inputs: &StepInputs<'_>,
        graph: &BatchExecutionDescriptor,
        executor: &mut dyn Executor,
        timings: &mut StepTimings,
    ) -> Result<BuildOutcome, StepError> {
        let mut outcome = BuildOutcome::default();
        let num_blocks = self.num_blocks as u32;
        let mut lap = Lap::start();
        for (index, group) in self.groups.iter_mut().enumerate() {
            let promise = executor.promise(index, graph);
            let Group {
                name,
                config,
                builder,
                verifier,
            } = group;
            let context = VerifyContext {
                config,
                common,
                inputs,
                promise: promise.as_ref(),
                grant: Grant::Exact,
                num_blocks,
            };
            if index == 0 {
                verify_step(&context).map_err(StepError::Tensors)?;
                timings.verify_ns += lap.ns();
            }
            let accepting = Accepting {
                group: index,
                verifier,
                executor: RefCell::new(&mut *executor),
                verify_ns: Cell::new(0),
                prepare_ns: Cell::new(0),
            };
            let built = builder
                .build(&accepting, &context, timings)
                .map_err(|message| StepError::Metadata {
                    group: name.clone(),
                    message,
                })?;
            outcome.fell_back |= built.fell_back;
            if let (Some(observer), Some(built)) = (&mut self.observer, built.served) {
                observer.observe(ObservedStep {
                    slot: name,
                    tenant: None,
                    context: &context,
                    built,
                });
            }
        }
        Ok(outcome)
    }
}

impl Group {
    fn new(
        name: String,
        family: Family,
        config: BuilderConfig,
        sandbox: &Sandbox,
        source: &BuilderSource,
        of_device: Option<&Acceptance>,
    ) -> Result<Self, EngineError> {
        let plain = plain_builder(family, &config).map_err(EngineError::Plain)?;
        let setup = |plain| GroupSetup {
            name: name.clone(),
            config: config.clone(),
            plain,
            acceptance: Some(acceptance(&config, of_device.cloned())),
        };
        let builder = match source {
            BuilderSource::Plain => {
                StepBuilder::Sandboxed(Box::new(GroupBuilder::plain(sandbox, setup(plain))))
            }
            BuilderSource::Component { component, origin } => StepBuilder::Sandboxed(Box::new(
                GroupBuilder::new(sandbox, setup(plain), component, origin)?,
            )),
            BuilderSource::Native(make) => StepBuilder::Native {
                builder: make(&config).map_err(EngineError::Native)?,
                plain,
            },
        };
        Ok(Self {
            name,
            config,
            builder,
            verifier: RefCell::default(),
        })
    }
}

/// What became of a group's step.
struct Built {
    /// The plain builder had to step in.
    fell_back: bool,
    /// What the sandboxed slot served with.
    served: Option<StepMetadata>,
}

/// Who takes a group's metadata, and how long that took.
struct Accepting<'a> {
    group: usize,
    verifier: &'a RefCell<Verifier>,
    executor: RefCell<&'a mut dyn Executor>,
    verify_ns: Cell<u64>,
    prepare_ns: Cell<u64>,
}

impl Accepting<'_> {
    /// Verified, then prepared. What the device cannot prepare is refused like what the verifier refuses: the plain builder
    /// may still serve the step.
    fn accept(&self, metadata: &Metadata, context: &VerifyContext<'_>) -> Result<(), Unusable> {
        let mut lap = Lap::start();
        let verified = self.verifier.borrow_mut().verify(metadata, context);
        self.verify_ns.set(self.verify_ns.get() + lap.ns());
        verified.map_err(Unusable::Refused)?;
        let mut executor = self.executor.borrow_mut();
        let done = executor.prepare(self.group, metadata, context);
        self.prepare_ns.set(self.prepare_ns.get() + lap.ns());
        done.map_err(Unusable::Prepare)
    }
}

impl StepBuilder {
    /// Has accepted metadata; else what both builders did wrong.
    fn build(
        &mut self,
        accepting: &Accepting<'_>,
        context: &VerifyContext<'_>,
        timings: &mut StepTimings,
    ) -> Result<Built, String> {
        let accept = |metadata: &Metadata| accepting.accept(metadata, context);
        let mut lap = Lap::start();
        let built = match self {
            StepBuilder::Sandboxed(builder) => builder
                .build_in_context(context, false, accept)
                .map(|served| Built {
                    fell_back: served.fault.is_some(),
                    served: Some(served),
                })
                .map_err(|error| error.to_string()),
            StepBuilder::Native { builder, plain } => {
                native_or_plain(&mut **builder, &mut **plain, context.common, accept).map(
                    |fell_back| Built {
                        fell_back,
                        served: None,
                    },
                )
            }
        };
        let (verify_ns, prepare_ns) = (accepting.verify_ns.get(), accepting.prepare_ns.get());
        timings.verify_ns += verify_ns;
        timings.prepare_ns += prepare_ns;
        timings.build_ns += lap.ns().saturating_sub(verify_ns + prepare_ns);
        built
    }
}

/// A new version is asked for small steps before it may serve, and what it builds must pass the verifier: one whose every
/// step would be refused never replaces a good one. The device's own check comes last: what it prepares is for a version that
/// passed everything else.
fn acceptance(config: &BuilderConfig, of_device: Option<Acceptance>) -> Acceptance {
    let config = config.clone();
    Arc::new(move |builder| {
        let max_seqs = config.scheduler.max_num_seqs.max(1);
        let max_tokens = config.scheduler.max_num_batched_tokens.max(1);
        for (rows, tokens) in [
            (1, 1),
            (max_seqs.min(7), max_seqs.min(7)),
            (1, max_tokens.min(40)),
        ] {
            let shape = CaptureShape {
                num_tokens: tokens.max(rows),
                num_reqs: rows,
                max_query_len: tokens.max(rows).div_ceil(rows),
                uniform_query_len: None,
            };
            let width = config.scheduler.max_num_blocks_per_req as usize;
            let step = capture_batch(&shape, width, config.scheduler.max_model_len)
                .map_err(|error| error.to_string())?;
            let metadata = match builder.build(&step.cam, false) {
                Ok(metadata) => metadata,
                // It may decline what it does not serve; the plain builder does then.
                Err(BuildFault::Declined(_)) => continue,
                Err(fault) => return Err(fault.to_string()),
            };
            let inputs = step.tensors.inputs();
            let context = VerifyContext {
                config: &config,
                common: &step.cam,
                inputs: &inputs,
                promise: None,
                grant: Grant::Exact,
                num_blocks: 1,
            };
            Verifier::new()
                .verify(&metadata, &context)
                .map_err(|refusal| format!("a step of {rows} rows is refused: {refusal}"))?;
        }
        of_device.as_ref().map_or(Ok(()), |check| check(builder))
    })
}

fn native_or_plain(
    builder: &mut dyn MetadataBuilder,
    plain: &mut dyn MetadataBuilder,
    common: &CommonAttentionMetadata,
    accept: impl Fn(&Metadata) -> Result<(), Unusable>,
) -> Result<bool, String> {
    let attempt = |builder: &mut dyn MetadataBuilder| {
        let metadata = builder
            .build(common, false)
            .map_err(|fault: BuildFault| fault.to_string())?;
        accept(&metadata).map_err(|error| error.to_string())
    };
    match attempt(builder) {
        Ok(()) => Ok(false),
        Err(first) => attempt(plain).map(|()| true).map_err(|second| {
            format!("the plain builder: {second}; before it, the native one: {first}")
        }),
    }
}
