//! The builder of one attention group as the engine holds it: a component that may be replaced while requests run, and the
//! plain builder that serves whenever the component does not.
//!
//! A fault costs no step, unless the policy says so: the same step is built by the plain builder. Must never know: what a step's
//! metadata means (the verifier is the caller's), how a version is prepared, or who asked for it.

use std::{
    borrow::Cow,
    fmt,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use timetable_attention::{
    BuildFault, FaultKind, MetadataBuilder, VerifyContext, graphs::covering,
};
use timetable_types::{
    BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata, Family, LaunchPromise,
    Metadata,
};

use crate::{
    BuilderCall, Component, FaultPolicy, GroupState, OnFault, ReloadError, ReloadHandle, Sandbox,
    VersionHandle, WasmBuilder,
    policy::{Standing, Verdict},
    reload, rerun,
    shared::{Evidence, Finding, Ready, Retired, Shared, Version},
};

/// A check of a new version before it goes into service, beside the built-in one (it constructs and builds small steps): for
/// example conformance cases through the verifier. Runs on the reload thread.
pub type Acceptance = Arc<dyn Fn(&mut dyn MetadataBuilder) -> Result<(), String> + Send + Sync>;

/// What a group's builder is made of.
pub struct GroupSetup {
    /// A name for people, unique among the engine's groups.
    pub name: String,
    /// What builders are constructed with.
    pub config: BuilderConfig,
    /// The plain builder of the backend: no splits, nothing clever. It decides the group's family.
    pub plain: Box<dyn MetadataBuilder>,
    /// A check of new versions, beside the built-in one.
    pub acceptance: Option<Acceptance>,
}

/// A version in service, with what the step thread owns of it.
struct Current {
    version: Arc<Version>,
    /// None while the next instance is being prepared.
    instance: Option<WasmBuilder>,
    spare: Option<WasmBuilder>,
    standing: Standing,
    /// Why it is out of service, for the steps that fail because it is.
    last_fault: Option<BuildFault>,
}

/// The builder of one attention group (and micro-batch). Owned by the step thread.
pub struct GroupBuilder {
    shared: Arc<Shared>,
    plain: Box<dyn MetadataBuilder>,
    current: Option<Current>,
}

/// Who built a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuiltBy {
    /// The component.
    Component,
    /// The plain builder.
    Plain,
}

/// A step's metadata, verified.
#[derive(Clone, Debug)]
pub struct StepMetadata {
    /// The metadata.
    pub metadata: Metadata,
    /// Who built it.
    pub built_by: BuiltBy,
    /// What the component did wrong in this very step, if it did.
    pub fault: Option<BuildFault>,
    /// The version that was asked in this step, whether it served or faulted. None: the plain builder was asked alone.
    pub version: Option<VersionHandle>,
    /// How long the call took whose metadata this is.
    pub build_time: Duration,
    /// Fuel of the component's call, where it was asked; 0 elsewhere.
    pub fuel: u64,
}

/// A step without metadata: its requests fail with this error, the process lives.
#[derive(Clone, Debug, thiserror::Error)]
pub struct StepError {
    /// What the component did wrong in this step, or what took it out of service before. None if it was not asked.
    pub component: Option<BuildFault>,
    /// What the plain builder did wrong. None: the policy leaves no step to it.
    pub plain: Option<BuildFault>,
    /// The policy.
    pub policy: OnFault,
}

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "this step has no metadata: ")?;
        match (&self.plain, &self.component) {
            (Some(plain), None) => write!(f, "the plain builder: {plain}"),
            (Some(plain), Some(fault)) => write!(
                f,
                "the plain builder: {plain}; before it, the component: {fault}"
            ),
            (None, Some(fault)) => write!(
                f,
                "the component: {fault}; its policy is {}, which leaves no step to the plain builder",
                self.policy
            ),
            (None, None) => write!(
                f,
                "the component has no instance ready, and its policy is {}",
                self.policy
            ),
        }
    }
}

/// A call's batch, and what its result is verified against, as far as the caller says so.
#[derive(Clone, Copy)]
struct Batch<'a> {
    common: &'a CommonAttentionMetadata,
    context: Option<&'a VerifyContext<'a>>,
}

impl GroupBuilder {
    /// A group that its plain builder serves until a component is loaded through `handle`.
    pub fn plain(sandbox: &Sandbox, setup: GroupSetup) -> GroupBuilder {
        let GroupSetup {
            name,
            config,
            plain,
            acceptance,
        } = setup;
        let shared = Shared::new(sandbox, name, plain.family(), config, acceptance);
        GroupBuilder {
            shared: Arc::new(shared),
            plain,
            current: None,
        }
    }

    /// A group that `component` serves from the first step on. Prepares it on the calling thread, about 100 µs.
    ///
    /// # Errors
    /// As a reload of that component.
    pub fn new(
        sandbox: &Sandbox,
        setup: GroupSetup,
        component: &Component,
        origin: &str,
    ) -> Result<GroupBuilder, ReloadError> {
        let mut group = GroupBuilder::plain(sandbox, setup);
        let config = group.shared.config.load_full();
        let ready = reload::prepare(&group.shared, component, &config, origin)?;
        group.install(ready);
        Ok(group)
    }

    /// For those who reload, roll back, or look: any thread.
    pub fn handle(&self) -> ReloadHandle {
        ReloadHandle::new(self.shared.clone())
    }

    /// The family whose metadata this group reads.
    pub fn family(&self) -> Family {
        self.shared.family
    }

    /// What the version in service said of itself; the plain builder's word if there is none. Changes only in
    /// `step_boundary`, never because of a fault.
    pub fn info(&self) -> &BuilderInfo {
        match &self.current {
            Some(current) => &current.version.builder,
            None => self.plain.info(),
        }
    }

    /// Takes a version that is ready into service, and a spare that was made. True if the version changed: `info` and launch
    /// promises are then to be asked for again. Without news it costs three loads; a swap less than a microsecond.
    ///
    /// `build` does this itself; call it before if the batch's order depends on `info`.
    pub fn step_boundary(&mut self) -> bool {
        if let Some(ready) = self.shared.pending.take() {
            self.install(ready);
            return true;
        }
        if let Some((version, spare)) = self.shared.spares.take() {
            match &mut self.current {
                Some(current)
                    if Arc::ptr_eq(&current.version, &version) && current.spare.is_none() =>
                {
                    current.spare = Some(spare);
                    if current.instance.is_none() && current.standing.out().is_none() {
                        current.instance = current.spare.take();
                        self.set_state();
                        self.order_spare();
                    }
                }
                _ => self.bury(spare),
            }
        }
        if let Some(Finding { version, fault }) = self.shared.findings.take()
            && self
                .current
                .as_ref()
                .is_some_and(|current| Arc::ptr_eq(&current.version, &version))
        {
            self.fault(&fault, None);
        }
        false
    }

    /// This step's metadata: of the component if it serves and `verify` accepts it, else, as the policy says, of the plain
    /// builder, which `verify` must accept as well.
    ///
    /// # Errors
    /// If the plain builder's metadata is refused too, it has none, or the policy does not ask it. The step's requests then
    /// fail; the group stays usable.
    pub fn build<R: fmt::Display>(
        &mut self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
        verify: impl Fn(&Metadata) -> Result<(), R>,
    ) -> Result<StepMetadata, StepError> {
        self.step_boundary();
        self.build_current(common, fast_build, verify)
    }

    /// As `build`, without a step boundary: for a caller that went through `step_boundary` in this step, and must not see
    /// another version after it.
    ///
    /// # Errors
    /// As `build`.
    pub fn build_current<R: fmt::Display>(
        &mut self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
        verify: impl Fn(&Metadata) -> Result<(), R>,
    ) -> Result<StepMetadata, StepError> {
        let batch = Batch {
            common,
            context: None,
        };
        self.serve(&BuilderCall::Build { fast_build }, batch, &verify)
    }

    /// As `build_current`, for the batch of `context`, which is kept in the bundle of a fault: a refusal can then be replayed.
    /// `accept` is still what decides.
    ///
    /// # Errors
    /// As `build`.
    pub fn build_in_context<R: fmt::Display>(
        &mut self,
        context: &VerifyContext<'_>,
        fast_build: bool,
        accept: impl Fn(&Metadata) -> Result<(), R>,
    ) -> Result<StepMetadata, StepError> {
        let batch = Batch {
            common: context.common,
            context: Some(context),
        };
        self.serve(&BuilderCall::Build { fast_build }, batch, &accept)
    }

    /// Metadata for capturing a CUDA graph with this batch's shape. No step boundary.
    ///
    /// # Errors
    /// As `build`.
    pub fn build_for_cudagraph_capture<R: fmt::Display>(
        &mut self,
        common: &CommonAttentionMetadata,
        verify: impl Fn(&Metadata) -> Result<(), R>,
    ) -> Result<StepMetadata, StepError> {
        let batch = Batch {
            common,
            context: None,
        };
        self.serve(&BuilderCall::BuildForCudagraphCapture, batch, &verify)
    }

    /// Metadata for step `draft_index` of a drafter. No step boundary: all drafts of a step have one version.
    ///
    /// # Errors
    /// As `build`.
    pub fn build_for_drafting<R: fmt::Display>(
        &mut self,
        common: &CommonAttentionMetadata,
        draft_index: u32,
        verify: impl Fn(&Metadata) -> Result<(), R>,
    ) -> Result<StepMetadata, StepError> {
        let batch = Batch {
            common,
            context: None,
        };
        self.serve(
            &BuilderCall::BuildForDrafting { draft_index },
            batch,
            &verify,
        )
    }

    /// `metadata`, of an equal group, for the block table and slots that `common` describes; built anew by a builder that
    /// cannot update. No step boundary.
    ///
    /// # Errors
    /// As `build`.
    pub fn update_block_table<R: fmt::Display>(
        &mut self,
        metadata: &Metadata,
        common: &CommonAttentionMetadata,
        verify: impl Fn(&Metadata) -> Result<(), R>,
    ) -> Result<StepMetadata, StepError> {
        let call = BuilderCall::UpdateBlockTable {
            metadata: Cow::Borrowed(metadata),
        };
        let batch = Batch {
            common,
            context: None,
        };
        self.serve(&call, batch, &verify)
    }

    /// What a graph captured with `shape` may rely on, whoever builds the step that is replayed: the larger of the
    /// component's and the plain builder's promise.
    ///
    /// # Errors
    /// If the plain builder has none. A component that faults here is treated as in `build`.
    pub fn launch_promise(&mut self, shape: &CaptureShape) -> Result<LaunchPromise, BuildFault> {
        let plain = self.plain.launch_promise(shape)?;
        let may_serve = self
            .current
            .as_ref()
            .is_some_and(|current| current.standing.may_be_called());
        let Some(instance) = self.instance().filter(|_| may_serve) else {
            return Ok(plain);
        };
        match instance.launch_promise(shape) {
            Ok(promise) => Ok(covering(&promise, &plain)),
            Err(fault) => {
                let instance_calls = instance.calls();
                let call = BuilderCall::LaunchPromise(shape.clone());
                self.fault(
                    &fault,
                    Some(Evidence {
                        call: &call,
                        common: None,
                        context: None,
                        metadata: None,
                        instance_calls,
                    }),
                );
                Ok(plain)
            }
        }
    }

    fn instance(&mut self) -> Option<&mut WasmBuilder> {
        self.current.as_mut()?.instance.as_mut()
    }

    /// A call begins. May the component be asked?
    fn may_serve(&mut self, is_step: bool) -> bool {
        let Some(current) = &mut self.current else {
            return false;
        };
        if !is_step {
            return current.standing.may_be_called();
        }
        let backing_off = current.standing.backing_off();
        let may = current.standing.begin_step();
        if backing_off {
            self.shared.counts.backoff_steps.fetch_add(1, Relaxed);
            if !current.standing.backing_off() {
                self.set_state();
            }
        }
        may
    }

    fn serve<R: fmt::Display>(
        &mut self,
        call: &BuilderCall<'_>,
        batch: Batch<'_>,
        verify: &impl Fn(&Metadata) -> Result<(), R>,
    ) -> Result<StepMetadata, StepError> {
        let policy = **self.shared.policy.load();
        let is_step = call.is_step();
        let refused = |refusal: R| BuildFault::Fault {
            kind: FaultKind::Refused,
            message: refusal.to_string(),
        };

        let mut fault = None;
        let mut asked = None;
        let mut fuel = 0;
        if self.may_serve(is_step)
            && let Some(current) = &mut self.current
            && let Some(instance) = &mut current.instance
        {
            let start = Instant::now();
            let built = call.on(instance, batch.common);
            let elapsed = start.elapsed();
            let instance_calls = instance.calls();
            fuel = instance.fuel_used();
            let version = VersionHandle(current.version.clone());
            let within = !is_step || current.standing.pay(elapsed, &policy.build_budget);
            let (seen, metadata) = match built {
                Some(Ok(metadata)) if !within => (overspent(elapsed, &policy), Some(metadata)),
                Some(Ok(metadata)) => match verify(&metadata) {
                    Ok(()) => {
                        if is_step {
                            self.served(call, &batch, &metadata, elapsed, instance_calls, &policy);
                        }
                        return Ok(StepMetadata {
                            metadata,
                            built_by: BuiltBy::Component,
                            fault: None,
                            version: Some(version),
                            build_time: elapsed,
                            fuel,
                        });
                    }
                    Err(refusal) => (refused(refusal), Some(metadata)),
                },
                Some(Err(seen)) => (seen, None),
                None => (no_metadata(call), None),
            };
            self.fault(
                &seen,
                Some(Evidence {
                    call,
                    common: Some(batch.common),
                    context: batch.context,
                    metadata,
                    instance_calls,
                }),
            );
            fault = Some(seen);
            asked = Some(version);
        }

        // To decline a batch is no fault, so that no policy is asked.
        let declined = matches!(fault, Some(BuildFault::Declined(_)));
        if policy.on_fault != OnFault::Fallback && !declined && self.current.is_some() {
            if is_step {
                self.shared.counts.failed_steps.fetch_add(1, Relaxed);
            }
            let before = || self.current.as_ref()?.last_fault.clone();
            return Err(StepError {
                component: fault.or_else(before),
                plain: None,
                policy: policy.on_fault,
            });
        }
        let start = Instant::now();
        let built = call.on(&mut *self.plain, batch.common);
        let build_time = start.elapsed();
        let plain = match built {
            Some(Ok(metadata)) => match verify(&metadata) {
                Ok(()) => {
                    if is_step {
                        self.shared.counts.plain_steps.fetch_add(1, Relaxed);
                    }
                    return Ok(StepMetadata {
                        metadata,
                        built_by: BuiltBy::Plain,
                        fault,
                        version: asked,
                        build_time,
                        fuel,
                    });
                }
                Err(refusal) => refused(refusal),
            },
            Some(Err(plain)) => plain,
            None => no_metadata(call),
        };
        if is_step {
            self.shared.counts.failed_steps.fetch_add(1, Relaxed);
        }
        Err(StepError {
            component: fault,
            plain: Some(plain),
            policy: policy.on_fault,
        })
    }

    /// After a step that the component built well.
    fn served(
        &self,
        call: &BuilderCall<'_>,
        batch: &Batch<'_>,
        metadata: &Metadata,
        elapsed: Duration,
        instance_calls: u64,
        policy: &FaultPolicy,
    ) {
        let Some(current) = &self.current else {
            return;
        };
        let nanoseconds = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        let version = &current.version;
        version
            .metrics
            .step(nanoseconds, metadata, batch.common.num_reqs);
        if current.standing.is_sample(policy) {
            rerun::order(
                &self.shared,
                version,
                call,
                batch.common,
                metadata,
                instance_calls,
            );
        }
    }

    /// Records a fault. Any but a declined batch ends the instance: the spare takes its place, and the dead one is dropped
    /// by the reload thread.
    fn fault(&mut self, fault: &BuildFault, evidence: Option<Evidence<'_>>) {
        let policy = **self.shared.policy.load();
        let Some(current) = &mut self.current else {
            return;
        };
        let (kind, message) = match fault {
            BuildFault::Declined(error) => (FaultKind::Declined, &error.message),
            BuildFault::Fault { kind, message } => (*kind, message),
        };
        self.shared.note(&current.version, kind, message);
        if kind == FaultKind::Declined {
            return;
        }
        if let Some(evidence) = evidence {
            self.shared.keep(&current.version, fault, evidence);
        }
        let dead = current.instance.take();
        current.last_fault = Some(fault.clone());
        match current.standing.fault(kind, &policy) {
            Verdict::GoOn => {
                current.instance = current.spare.take();
                self.order_spare();
            }
            Verdict::Quarantine => {
                let faults = current.standing.recent_faults();
                self.shared
                    .quarantine(&current.version, kind, faults, &policy);
            }
            Verdict::Close => tracing::error!(
                group = %self.shared.name, version = %current.version.info.version, %kind,
                "the builder faulted and its policy is fail-closed: every step fails until a reload or a rollback"
            ),
        }
        self.set_state();
        if let Some(dead) = dead {
            self.bury(dead);
        }
    }

    /// Puts a version into service and hands the one before to the reload thread, which keeps it ready for a rollback.
    fn install(&mut self, ready: Ready) {
        self.shared.active.store(Some(ready.version.clone()));
        let before = self.current.replace(Current {
            version: ready.version,
            instance: Some(ready.instance),
            spare: ready.spare,
            standing: Standing::new(&self.shared.policy.load()),
            last_fault: None,
        });
        self.set_state();
        if let Some(Current {
            version,
            instance,
            spare,
            ..
        }) = before
        {
            // Taken by the next job of the reload thread. If somebody looks just now, or an older one was not taken yet,
            // that thread is woken after all: instances are not dropped here.
            match self.shared.retired.offer(Retired {
                version,
                instance,
                spare,
            }) {
                Ok(None) => {}
                Ok(Some(older)) => self.shared.sandbox.workshop().run(move || drop(older)),
                Err(retired) => {
                    let shared = self.shared.clone();
                    self.shared
                        .sandbox
                        .workshop()
                        .run(move || reload::retire(&shared, retired));
                }
            }
        }
    }

    fn set_state(&self) {
        let state = match &self.current {
            None => GroupState::Plain,
            Some(current) => match current.standing.out() {
                Some(Verdict::Close) => GroupState::Closed,
                Some(_) => GroupState::Quarantined,
                None if current.standing.backing_off() => GroupState::BackingOff,
                None if current.instance.is_none() => GroupState::Recovering,
                None => GroupState::Active,
            },
        };
        self.shared.state.store(state as u8, Relaxed);
    }

    fn bury(&self, instance: WasmBuilder) {
        self.shared.sandbox.workshop().run(move || drop(instance));
    }

    fn order_spare(&self) {
        if let Some(current) = &self.current {
            let (shared, version) = (self.shared.clone(), current.version.clone());
            self.shared
                .sandbox
                .workshop()
                .run(move || reload::refill(&shared, &version));
        }
    }
}

#[cold]
fn overspent(elapsed: Duration, policy: &FaultPolicy) -> BuildFault {
    let budget = &policy.build_budget;
    BuildFault::Fault {
        kind: FaultKind::BuildBudget,
        message: format!(
            "its calls took more than its budget of {:?} a step with {:?} in reserve; the last one took {elapsed:?}",
            budget.per_step, budget.reserve
        ),
    }
}

#[cold]
fn no_metadata(call: &BuilderCall<'_>) -> BuildFault {
    BuildFault::Fault {
        kind: FaultKind::LiftBound,
        message: format!("{call:?} gives no metadata"),
    }
}
