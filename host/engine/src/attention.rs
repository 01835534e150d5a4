//! The engine's attention groups: layers that share a builder and a step's metadata.
//!
//! Which layers share a group is the plan's matter, and what a group sees of a step its view's (`view`): all groups with keys
//! share one block table and one slot mapping. A group has a *slot* for everybody, and one for each tenant with a builder of its own; each slot builds for its own segment of
//! a step, and its failure is that segment's alone. What is built here is verified here, and handed to the executor, which alone
//! knows the layers and the device. This module must never know requests or tokens.

mod plan;
mod view;

pub use plan::{AttentionPlan, backend_name};

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use timetable_attention::{
    BuildFault, FaultKind, Grant, MetadataBuilder, Refusal, Verifier, VerifyContext,
    batch::capture_batch,
    graphs::{BatchExecutionDescriptor, covering},
    group::{AttentionGroup, BatchView},
    plain_builder, verify_step,
};
use timetable_sandbox::{
    Acceptance, Arm, BuiltBy, FaultPolicy, GroupBuilder, GroupSetup, ObservedStep, ReloadHandle,
    Sandbox, StepMetadata, StepObserver, TenantName,
};
use timetable_types::{
    BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata, Family, LaunchPromise,
    Metadata,
};

use crate::{
    batch::{BatchShape, InputBatch, NoSlot, Segment},
    config::{BuilderSource, Builders, EngineConfig, EngineError, NativeBuilderFactory},
    executor::{Executor, SegmentPlace, Unprepared, eager_shape},
    spans,
    tenants::SlotConfig,
    timings::{Lap, StepTimings},
};
use view::View;

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

/// A group's place for one builder.
struct Slot {
    name: String,
    config: BuilderConfig,
    grant: Grant,
    builder: StepBuilder,
    verifier: RefCell<Verifier>,
}

/// What a slot is made of.
struct SlotSetup<'a> {
    name: String,
    family: Family,
    config: BuilderConfig,
    grant: Grant,
    sandbox: &'a Sandbox,
    source: &'a BuilderSource,
    policy: Option<FaultPolicy>,
}

/// Layers that share a step's metadata: a slot for everybody, then those of tenants, in the order of their segments.
struct Group {
    slots: Vec<Slot>,
    /// Kernel blocks of the cache, or states of the pool.
    num_blocks: u32,
}

/// Groups that see the same of a step.
struct SeenBy {
    view: View,
    /// Indexes of them, at least one.
    groups: Vec<usize>,
}

/// All groups.
pub(crate) struct Attention {
    groups: Vec<Group>,
    views: Vec<SeenBy>,
    /// Whose the slots are, after the first.
    tenants: Vec<TenantName>,
    plan: AttentionPlan,
    /// Is told of every step that a sandboxed slot served.
    observer: Option<Box<dyn StepObserver>>,
}

/// What a step's builders did.
#[derive(Debug, Default)]
pub(crate) struct BuildOutcome {
    /// Some group was served by its plain builder after a fault in this step.
    pub fell_back: bool,
    /// Segments without metadata, of a step that others run in.
    pub failed: Vec<(usize, StepError)>,
}

impl Attention {
    /// A builder for each slot of each of the plan's groups, made of `configs`, for steps of `shape` at most. `acceptance` is the
    /// device's own check of a group's new version.
    pub(crate) fn new(
        engine: &EngineConfig,
        plan: AttentionPlan,
        (configs, shape): (Vec<BuilderConfig>, &BatchShape),
        sandbox: &Sandbox,
        builders: Builders<'_>,
        acceptance: impl Fn(usize) -> Option<Acceptance>,
    ) -> Result<Self, EngineError> {
        let slots = slots(engine, sandbox, builders)?;
        for (_, slot) in &slots {
            slot.source.check(&plan)?;
        }
        let group = |(index, config): (usize, BuilderConfig)| {
            let of_device = acceptance(index);
            let backend = &plan.groups()[index].backend.name;
            let family = plan.family(index);
            let slot = |(tenant, of_tenant): &(Option<TenantName>, TenantSlot<'_>)| {
                let tenant = tenant.as_ref();
                let chosen = of_tenant.source.of_family(family);
                let setup = SlotSetup {
                    name: tenant.map_or_else(
                        || format!("{backend}/{index}"),
                        |tenant| format!("{backend}/{index}@{tenant}"),
                    ),
                    family,
                    config: BuilderConfig {
                        options: chosen.options.unwrap_or(of_tenant.options).to_vec(),
                        ..config.clone()
                    },
                    grant: chosen.grant.unwrap_or(of_tenant.grant),
                    sandbox: &of_tenant.sandbox,
                    source: chosen.source,
                    policy: of_tenant.policy,
                };
                Slot::new(setup, of_device.as_ref())
            };
            Ok(Group {
                slots: slots.iter().map(slot).collect::<Result<_, EngineError>>()?,
                num_blocks: 1,
            })
        };
        let groups = configs
            .into_iter()
            .enumerate()
            .map(group)
            .collect::<Result<_, EngineError>>()?;
        let mut views: Vec<(BatchView, SeenBy)> = Vec::new();
        for (index, group) in plan.groups().iter().enumerate() {
            let view = group.view();
            match views.iter_mut().find(|(other, _)| *other == view) {
                Some((_, seen)) => seen.groups.push(index),
                None => views.push((
                    view,
                    SeenBy {
                        view: View::new(view, shape)?,
                        groups: vec![index],
                    },
                )),
            }
        }
        Ok(Self {
            groups,
            views: views.into_iter().map(|(_, seen)| seen).collect(),
            tenants: slots.into_iter().filter_map(|(tenant, _)| tenant).collect(),
            plan,
            observer: None,
        })
    }

    /// The cache has so many of the kernels' blocks, and the pool so many states.
    pub(crate) fn set_num_blocks(&mut self, num_blocks: usize, num_states: usize) {
        for (group, layers) in self.groups.iter_mut().zip(self.plan.groups()) {
            group.num_blocks = match layers.view() {
                BatchView::States => num_states as u32,
                BatchView::Plain | BatchView::Local { .. } => num_blocks as u32,
            };
        }
    }

    /// From here on, `observer` is told of every step that a sandboxed slot served.
    pub(crate) fn set_observer(&mut self, observer: Option<Box<dyn StepObserver>>) {
        self.observer = observer;
    }

    /// What each group's builders promise for steps of `shape`, whichever of them builds.
    pub(crate) fn launch_promises(
        &mut self,
        shape: &CaptureShape,
    ) -> Result<Vec<LaunchPromise>, BuildFault> {
        let of_slot = |slot: &mut Slot| match &mut slot.builder {
            StepBuilder::Sandboxed(builder) => builder.launch_promise(shape),
            StepBuilder::Native { builder, plain } => {
                let plain = plain.launch_promise(shape)?;
                Ok(covering(&builder.launch_promise(shape)?, &plain))
            }
        };
        let of_group = |group: &mut Group| {
            let (first, others) = group.slots.split_first_mut().expect("a slot for everybody");
            others.iter_mut().try_fold(of_slot(first)?, |all, slot| {
                Ok(covering(&all, &of_slot(slot)?))
            })
        };
        self.groups.iter_mut().map(of_group).collect()
    }

    /// As [`Attention::launch_promises`], for the largest step outside graphs.
    pub(crate) fn eager_promises(&mut self) -> Result<Vec<LaunchPromise>, BuildFault> {
        let of_batch = self
            .views
            .iter()
            .find(|seen| matches!(seen.view, View::Plain));
        match of_batch {
            Some(seen) => {
                let scheduler = &self.groups[seen.groups[0]].slots[0].config.scheduler;
                let shape = eager_shape(scheduler);
                self.launch_promises(&shape)
            }
            None => Ok(Vec::new()),
        }
    }

    /// Takes new versions of builders into service.
    pub(crate) fn step_boundary(&mut self) {
        for slot in self.groups.iter_mut().flat_map(|group| &mut group.slots) {
            if let StepBuilder::Sandboxed(builder) = &mut slot.builder {
                builder.step_boundary();
            }
        }
    }

    /// Does some slot try a candidate on tenants whom it names? Changes only in `step_boundary`.
    pub(crate) fn tries_on_tenants(&self) -> bool {
        let mut slots = self.groups.iter().flat_map(|group| &group.slots);
        slots.any(|slot| !slot.builder.canary_tenants().is_empty())
    }

    /// Is a tenant whom `slot` serves one of those?
    pub(crate) fn tries_on(&self, slot: usize, tenant: &TenantName) -> bool {
        let mut slots = self.groups.iter().map(|group| &group.slots[slot]);
        slots.any(|slot| slot.builder.canary_tenants().contains(tenant))
    }

    /// What the rule book said of the layers.
    pub(crate) fn plan(&self) -> &AttentionPlan {
        &self.plan
    }

    /// Handles of the groups whose builder for everybody can be replaced.
    pub(crate) fn reload_handles(&self) -> Vec<ReloadHandle> {
        self.group_handles()
            .into_iter()
            .map(|(handle, _)| handle)
            .collect()
    }

    /// As [`Attention::reload_handles`], with each group's layers.
    pub(crate) fn group_handles(&self) -> Vec<(ReloadHandle, &AttentionGroup)> {
        self.handles_of(0)
    }

    /// The handles of tenants' own slots, with each group's layers.
    pub(crate) fn tenant_handles(&self) -> Vec<(&TenantName, ReloadHandle, &AttentionGroup)> {
        let of_tenant = |(index, tenant)| {
            let handles = self.handles_of(index + 1).into_iter();
            handles.map(move |(handle, layers)| (tenant, handle, layers))
        };
        self.tenants
            .iter()
            .enumerate()
            .flat_map(of_tenant)
            .collect()
    }

    fn handles_of(&self, slot: usize) -> Vec<(ReloadHandle, &AttentionGroup)> {
        self.groups
            .iter()
            .zip(self.plan.groups())
            .filter_map(|(group, layers)| match &group.slots[slot].builder {
                StepBuilder::Sandboxed(builder) => Some((builder.handle(), layers)),
                StepBuilder::Native { .. } => None,
            })
            .collect()
    }

    /// What each slot's builder says of itself, with the slot's name, its group's layers beside it.
    pub(crate) fn builders(&self) -> impl Iterator<Item = (&str, &BuilderInfo, &AttentionGroup)> {
        let groups = self.groups.iter().zip(self.plan.groups());
        groups.flat_map(|(group, layers)| {
            group.slots.iter().map(move |slot| {
                let info = match &slot.builder {
                    StepBuilder::Sandboxed(builder) => builder.info(),
                    StepBuilder::Native { builder, .. } => builder.info(),
                };
                (slot.name.as_str(), info, layers)
            })
        })
    }

    /// For each segment of a divided batch and each view of it: verifies the tensors, then has its slot build each group's metadata, verifies them
    /// and has `executor` prepare them, for a step that runs as `graph`.
    ///
    /// # Errors
    /// Nothing can run: the tensors are refused, or no segment has metadata.
    pub(crate) fn build(
        &mut self,
        batch: &InputBatch,
        graph: &BatchExecutionDescriptor,
        executor: &mut dyn Executor,
        timings: &mut StepTimings,
    ) -> Result<BuildOutcome, StepError> {
        let mut outcome = BuildOutcome::default();
        let num_segments = batch.num_segments();
        for index in 0..num_segments {
            let segment = batch.segment(index);
            match self.build_segment((index, &segment), graph, executor, timings) {
                Ok(fell_back) => outcome.fell_back |= fell_back,
                Err(error @ StepError::Metadata { .. }) if num_segments > 1 => {
                    executor.leave_out(index);
                    outcome.failed.push((index, error));
                }
                Err(error) => return Err(error),
            }
        }
        match outcome.failed.len() == num_segments {
            true => Err(outcome.failed.swap_remove(0).1),
            false => Ok(outcome),
        }
    }

    /// True if some group was served by the plain builder after a fault.
    fn build_segment(
        &mut self,
        (index, segment): (usize, &Segment<'_>),
        graph: &BatchExecutionDescriptor,
        executor: &mut dyn Executor,
        timings: &mut StepTimings,
    ) -> Result<bool, StepError> {
        let mut fell_back = false;
        let slot = segment.key.slot as usize;
        for SeenBy { view, groups } in &mut self.views {
            let mut lap = Lap::start();
            let (common, inputs) = view.of(segment);
            for (nth, &group_index) in groups.iter().enumerate() {
                let group = &mut self.groups[group_index];
                let promise = executor.promise(group_index, graph);
                let Slot {
                    name,
                    config,
                    grant,
                    builder,
                    verifier,
                } = &mut group.slots[slot];
                let context = VerifyContext {
                    config,
                    common,
                    inputs: &inputs,
                    promise: promise.as_ref(),
                    grant: *grant,
                    num_blocks: group.num_blocks,
                };
                if nth == 0 {
                    verify_step(&context).map_err(StepError::Tensors)?;
                    timings.verify_ns += lap.ns();
                }
                let accepting = Accepting {
                    group: group_index,
                    segment: SegmentPlace {
                        index,
                        first_row: segment.first_row,
                        first_token: segment.first_token,
                    },
                    verifier,
                    executor: RefCell::new(&mut *executor),
                    verify_ns: Cell::new(0),
                    prepare_ns: Cell::new(0),
                };
                let built = builder
                    .build(segment.key.is_candidate, &accepting, &context, timings)
                    .map_err(|message| StepError::Metadata {
                        group: name.clone(),
                        message,
                    })?;
                fell_back |= built.fell_back;
                if let (Some(observer), Some(built)) = (&mut self.observer, built.served) {
                    observer.observe(ObservedStep {
                        slot: name,
                        tenant: slot.checked_sub(1).map(|index| &self.tenants[index]),
                        context: &context,
                        built,
                    });
                }
            }
        }
        Ok(fell_back)
    }
}

/// What one slot of every group is made of.
struct TenantSlot<'a> {
    options: &'a [(String, String)],
    grant: Grant,
    sandbox: Sandbox,
    source: &'a BuilderSource,
    policy: Option<FaultPolicy>,
}

/// The slots, in the order of their segments: everybody's, then those of tenants.
fn slots<'a>(
    engine: &'a EngineConfig,
    sandbox: &Sandbox,
    builders: Builders<'a>,
) -> Result<Vec<(Option<TenantName>, TenantSlot<'a>)>, EngineError> {
    let everybody = TenantSlot {
        options: &engine.builder_options,
        grant: engine.grant,
        sandbox: sandbox.clone(),
        source: builders.default,
        policy: None,
    };
    let mut slots = vec![(None, everybody)];
    for tenant in &engine.tenants {
        let Some(config) = &tenant.slot else { continue };
        let SlotConfig {
            limits,
            grant,
            policy,
            options,
        } = config;
        let sandbox = match limits {
            Some(limits) => sandbox.with_call_limits(limits).map_err(|error| {
                let tenant = tenant.name.clone();
                EngineError::TenantLimits { tenant, error }
            })?,
            None => sandbox.clone(),
        };
        let source = builders
            .tenants
            .iter()
            .find(|(name, _)| *name == tenant.name);
        let slot = TenantSlot {
            options,
            grant: *grant,
            sandbox,
            source: source.map_or(&BuilderSource::Plain, |(_, source)| source),
            policy: Some(*policy),
        };
        slots.push((Some(tenant.name.clone()), slot));
    }
    let has_slot = |name: &TenantName| slots.iter().any(|(of, _)| of.as_ref() == Some(name));
    match builders.tenants.iter().find(|(name, _)| !has_slot(name)) {
        Some((name, _)) => Err(EngineError::Setting {
            name: "tenants",
            value: name.to_string(),
            remedy: "a builder was given for it; configure the tenant, with a slot of its own",
        }),
        None => Ok(slots),
    }
}

impl Slot {
    fn new(setup: SlotSetup<'_>, of_device: Option<&Acceptance>) -> Result<Self, EngineError> {
        let SlotSetup {
            name,
            family,
            config,
            grant,
            sandbox,
            source,
            policy,
        } = setup;
        let plain = plain_builder(family, &config).map_err(EngineError::Plain)?;
        let setup = |plain| GroupSetup {
            name: name.clone(),
            config: config.clone(),
            plain,
            acceptance: Some(acceptance(&config, grant, of_device.cloned())),
        };
        let builder = match source {
            BuilderSource::Plain | BuilderSource::ByFamily(_) => {
                StepBuilder::Sandboxed(Box::new(GroupBuilder::plain(sandbox, setup(plain))))
            }
            BuilderSource::Component { component, origin } => StepBuilder::Sandboxed(Box::new(
                GroupBuilder::new(sandbox, setup(plain), component, origin)?,
            )),
            BuilderSource::Native(make) => StepBuilder::Native {
                builder: native(make, family, &config)?,
                plain,
            },
        };
        if let (Some(policy), StepBuilder::Sandboxed(builder)) = (policy, &builder) {
            builder.handle().set_policy(policy)?;
        }
        Ok(Self {
            name,
            config,
            grant,
            builder,
            verifier: RefCell::default(),
        })
    }
}

/// The factory's builder, if it is of the group's family.
fn native(
    make: &NativeBuilderFactory,
    family: Family,
    config: &BuilderConfig,
) -> Result<Box<dyn MetadataBuilder>, EngineError> {
    let builder = make(config).map_err(EngineError::Native)?;
    if builder.family() == family {
        return Ok(builder);
    }
    Err(EngineError::Native(BuildFault::Fault {
        kind: FaultKind::Constructor,
        message: format!(
            "it builds metadata of `{}`, and a group needs those of `{}`; give a builder for each family",
            builder.family().interface(),
            family.interface()
        ),
    }))
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
    segment: SegmentPlace,
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
        let part = spans::verify();
        let verified = self.verifier.borrow_mut().verify(metadata, context);
        drop(part);
        self.verify_ns.set(self.verify_ns.get() + lap.ns());
        verified.map_err(Unusable::Refused)?;
        let _part = spans::prepare();
        let mut executor = self.executor.borrow_mut();
        let done = executor.prepare(self.group, self.segment, metadata, context);
        self.prepare_ns.set(self.prepare_ns.get() + lap.ns());
        done.map_err(Unusable::Prepare)
    }
}

impl StepBuilder {
    /// Whose rows the candidate is to build.
    fn canary_tenants(&self) -> &[TenantName] {
        match self {
            StepBuilder::Sandboxed(builder) => builder.canary_tenants(),
            StepBuilder::Native { .. } => &[],
        }
    }

    /// Has accepted metadata; else what both builders did wrong.
    fn build(
        &mut self,
        is_candidate: bool,
        accepting: &Accepting<'_>,
        context: &VerifyContext<'_>,
        timings: &mut StepTimings,
    ) -> Result<Built, String> {
        let _part = spans::build(accepting.segment.index, accepting.group);
        let accept = |metadata: &Metadata| accepting.accept(metadata, context);
        let mut lap = Lap::start();
        let built = match self {
            StepBuilder::Sandboxed(builder) => {
                let built = match is_candidate {
                    true => builder.build_by(Arm::Candidate, context, false, accept),
                    false => builder.build_in_context(context, false, accept),
                };
                built
                    .map(|served| Built {
                        fell_back: served.fault.is_some(),
                        served: Some(served),
                    })
                    .map_err(|error| error.to_string())
            }
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
        if let Ok(Built {
            served: Some(served),
            ..
        }) = &built
            && served.built_by != BuiltBy::Plain
            && let Some(version) = &served.version
        {
            version.verified(verify_ns);
        }
        timings.verify_ns += verify_ns;
        timings.prepare_ns += prepare_ns;
        timings.build_ns += lap.ns().saturating_sub(verify_ns + prepare_ns);
        built
    }
}

/// A new version is asked for small steps before it may serve, and what it builds must pass the verifier: one whose every
/// step would be refused never replaces a good one. The device's own check comes last: what it prepares is for a version that
/// passed everything else.
fn acceptance(config: &BuilderConfig, grant: Grant, of_device: Option<Acceptance>) -> Acceptance {
    let config = config.clone();
    Arc::new(move |builder| {
        let max_seqs = config.scheduler.max_num_seqs.max(1);
        let max_tokens = config.scheduler.max_num_batched_tokens.max(1);
        let longest = max_tokens.min(config.scheduler.max_model_len.max(1));
        for (rows, tokens) in [
            (1, 1),
            (max_seqs.min(7), max_seqs.min(7)),
            (1, longest.min(40)),
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
                grant,
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
