//! The builder of one attention group as the engine holds it: a component that may be replaced while requests run, a candidate
//! that is being tried, and the plain builder that serves whenever the component does not.
//!
//! A fault costs no step, unless the policy says so: the same step is built by the plain builder. Must never know: what a step's
//! metadata means (the verifier is the caller's), how a version is prepared, or who asked for it.

mod held;
mod step;
mod trial;

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
    TenantName, VersionHandle, Withdrawal,
    metrics::Fallback,
    reload, rerun,
    shared::{Evidence, Finding, Ready, Shared},
};
use held::Held;
pub use step::{Arm, BuiltBy, StepError, StepMetadata};
pub(crate) use trial::Trial;

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

/// The builder of one attention group (and micro-batch). Owned by the step thread.
pub struct GroupBuilder {
    shared: Arc<Shared>,
    plain: Box<dyn MetadataBuilder>,
    current: Option<Held>,
    trial: Option<Trial>,
}

impl Drop for GroupBuilder {
    /// A candidate that no more steps are shown to is tried no longer; its thread ends.
    fn drop(&mut self) {
        if let Some(candidate) = &*self.shared.candidate.load() {
            candidate.withdraw(Withdrawal::Ended);
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
            trial: None,
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
        group.install(Held::of(ready, &group.shared.policy.load()));
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

    /// Takes a version that is ready into service, and a spare that was made; decides whether a candidate serves this step.
    /// True if `info` or the launch promises may have changed, and are to be asked for again. Without news it costs four loads;
    /// a swap less than a microsecond.
    ///
    /// `build` does this itself; call it before if the batch's order depends on `info`.
    pub fn step_boundary(&mut self) -> bool {
        let mut changed = false;
        // Whoever looks finds it in one place or the other.
        let serves = |ready: &Ready| self.shared.active.store(Some(ready.version.clone()));
        if let Some(ready) = self.shared.pending.take_after(serves) {
            self.install(Held::of(ready, &self.shared.policy.load()));
            changed = true;
        }
        if let Some((version, spare)) = self.shared.spares.take() {
            match &mut self.current {
                Some(current) if current.lacks_spare_of(&version) => {
                    if current.take_spare(spare) {
                        self.set_state();
                        self.order_spare(Arm::Active);
                    }
                }
                _ => self.bury(spare),
            }
        }
        if let Some(Finding { version, fault }) = self.shared.findings.take()
            && let Some(arm) = self.arm_of(&version)
        {
            self.fault(arm, &fault, None);
        }
        if let Some(trial) = self.shared.trials.take() {
            changed |= self.begin_trial(trial);
        }
        if self.trial.is_some() {
            changed |= self.go_on_with_trial();
        }
        changed
    }

    /// The tenants whose rows the candidate builds in this step, each segment through [`Arm::Candidate`]. Empty where there is
    /// no candidate, or it gets a share of whole steps. Changes only in `step_boundary`.
    pub fn canary_tenants(&self) -> &[TenantName] {
        match &self.trial {
            Some(Trial::Canary(canary)) => canary.tenants(),
            _ => &[],
        }
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
        self.serve(
            self.arm(),
            &BuilderCall::Build { fast_build },
            batch,
            &verify,
        )
    }

    /// As `build_current`, for the batch of `context`, which is kept in the bundle of a fault: a refusal can then be replayed.
    /// It is also what a candidate in shadow is shown. `accept` is still what decides.
    ///
    /// # Errors
    /// As `build`.
    pub fn build_in_context<R: fmt::Display>(
        &mut self,
        context: &VerifyContext<'_>,
        fast_build: bool,
        accept: impl Fn(&Metadata) -> Result<(), R>,
    ) -> Result<StepMetadata, StepError> {
        self.build_by(self.arm(), context, fast_build, accept)
    }

    /// As `build_in_context`, by that version: for a segment of the step, where [`GroupBuilder::canary_tenants`] names whose rows
    /// are the candidate's.
    ///
    /// # Errors
    /// As `build`.
    pub fn build_by<R: fmt::Display>(
        &mut self,
        arm: Arm,
        context: &VerifyContext<'_>,
        fast_build: bool,
        accept: impl Fn(&Metadata) -> Result<(), R>,
    ) -> Result<StepMetadata, StepError> {
        let batch = Batch {
            common: context.common,
            context: Some(context),
        };
        self.serve(arm, &BuilderCall::Build { fast_build }, batch, &accept)
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
        self.serve(
            self.arm(),
            &BuilderCall::BuildForCudagraphCapture,
            batch,
            &verify,
        )
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
            self.arm(),
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
        self.serve(self.arm(), &call, batch, &verify)
    }

    /// What a graph captured with `shape` may rely on, whoever builds the step that is replayed: the largest of what the
    /// component, a candidate in canary and the plain builder promise.
    ///
    /// # Errors
    /// If the plain builder has none. A component that faults here is treated as in `build`.
    pub fn launch_promise(&mut self, shape: &CaptureShape) -> Result<LaunchPromise, BuildFault> {
        let mut promise = self.plain.launch_promise(shape)?;
        for arm in [Arm::Active, Arm::Candidate] {
            let Some(instance) = self
                .held(arm)
                .filter(|held| held.standing.may_be_called())
                .and_then(|held| held.instance.as_mut())
            else {
                continue;
            };
            match instance.launch_promise(shape) {
                Ok(offered) => promise = covering(&offered, &promise),
                Err(fault) => {
                    let instance_calls = instance.calls();
                    let call = BuilderCall::LaunchPromise(shape.clone());
                    self.fault(
                        arm,
                        &fault,
                        Some(Evidence {
                            call: &call,
                            common: None,
                            context: None,
                            metadata: None,
                            instance_calls,
                        }),
                    );
                }
            }
        }
        Ok(promise)
    }

    /// Whose turn this step is, where the caller does not say.
    fn arm(&self) -> Arm {
        match &self.trial {
            Some(Trial::Canary(canary)) if canary.serves => Arm::Candidate,
            _ => Arm::Active,
        }
    }

    fn held(&mut self, arm: Arm) -> Option<&mut Held> {
        match (arm, &mut self.trial) {
            (Arm::Active, _) => self.current.as_mut(),
            (Arm::Candidate, Some(Trial::Canary(canary))) => Some(&mut canary.held),
            (Arm::Candidate, _) => None,
        }
    }

    /// A call begins. May the component in service be asked?
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
        arm: Arm,
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
        let arm = match arm {
            Arm::Candidate if self.candidate_may_serve(is_step) => Arm::Candidate,
            _ => Arm::Active,
        };

        let mut fault = None;
        let mut asked = None;
        let mut fuel = 0;
        if (arm == Arm::Candidate || self.may_serve(is_step))
            && let Some(held) = self.held(arm)
            && let Some(instance) = &mut held.instance
        {
            let start = Instant::now();
            let built = call.on(instance, batch.common);
            let elapsed = start.elapsed();
            let instance_calls = instance.calls();
            fuel = instance.fuel_used();
            let version = VersionHandle(held.version.clone());
            let within = !is_step || held.standing.pay(elapsed, &policy.build_budget);
            let (seen, metadata) = match built {
                Some(Ok(metadata)) if !within => (overspent(elapsed, &policy), Some(metadata)),
                Some(Ok(metadata)) => match verify(&metadata) {
                    Ok(()) => {
                        if is_step {
                            let cost = (elapsed, instance_calls);
                            self.served(arm, call, &batch, &metadata, cost, &policy);
                        }
                        return Ok(StepMetadata {
                            metadata,
                            built_by: match arm {
                                Arm::Active => BuiltBy::Component,
                                Arm::Candidate => BuiltBy::Candidate,
                            },
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
                arm,
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
        let has_component = self.current.is_some() || fault.is_some();
        if policy.on_fault != OnFault::Fallback && !declined && has_component {
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
                        self.count_fallback(&fault);
                        self.show(call, &batch, &metadata);
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

    /// The plain builder served a step; `fault` is the component's in it.
    fn count_fallback(&self, fault: &Option<BuildFault>) {
        let reason = match (fault, self.state()) {
            (Some(BuildFault::Declined(_)), _) => Fallback::Declined,
            (Some(_), _) => Fallback::Fault,
            (None, _) if self.current.is_none() => return,
            (None, GroupState::Quarantined) => Fallback::Quarantined,
            (None, GroupState::Recovering) => Fallback::Recovering,
            // The step that ends the back-off was left out too.
            (None, _) => Fallback::BackingOff,
        };
        self.shared.counts.fallbacks.add(reason);
    }

    fn state(&self) -> GroupState {
        GroupState::from_u8(self.shared.state.load(Relaxed))
    }

    /// After a step that a component built well, in so much time, as its so many-th call.
    fn served(
        &mut self,
        arm: Arm,
        call: &BuilderCall<'_>,
        batch: &Batch<'_>,
        metadata: &Metadata,
        (elapsed, instance_calls): (Duration, u64),
        policy: &FaultPolicy,
    ) {
        let nanoseconds = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        if let Some(held) = self.held(arm) {
            let version = held.version.clone();
            let is_sample = held.standing.is_sample(policy);
            version
                .metrics
                .step(nanoseconds, metadata, batch.common.num_reqs);
            if is_sample {
                let common = batch.common;
                rerun::order(
                    &self.shared,
                    &version,
                    call,
                    common,
                    metadata,
                    instance_calls,
                );
            }
        }
        self.show(call, batch, metadata);
        self.count_canary(arm, nanoseconds);
    }

    /// Shows a served step to a candidate in shadow.
    fn show(&self, call: &BuilderCall<'_>, batch: &Batch<'_>, metadata: &Metadata) {
        if let Some(Trial::Shadow(tap)) = &self.trial {
            tap.show(call, batch.context, metadata);
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
