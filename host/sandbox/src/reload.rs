//! Replacing a group's builder while requests run: everything that takes time happens on the reload thread, and only a version
//! that loads, constructs and builds is left for the step thread to take, or to be tried first.
//!
//! Must never know: the step thread's own state. It leaves things in mailboxes.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use timetable_attention::{BuildFault, MetadataBuilder};
use timetable_types::{BuilderConfig, Family};

use crate::{
    BuilderCall, BuilderStatus, Companions, Component, ContentHash, FaultPolicy, LoadError,
    ReloadPlan, Stage, VersionInfo, WasmBuilder, Withdrawal,
    bundle::SeenFault,
    candidate::{self, Candidate},
    group::Trial,
    mailbox::lock,
    metrics::VersionMetrics,
    probe, shadow,
    shared::{Case, Ready, Retired, Shared, Version, bundle},
};

/// Why a version does not go into service. The one that served goes on serving.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The component is refused.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// It builds for another family.
    #[error("the component builds {found} metadata, but group `{group}` reads {expected}; give a component of that family", found = found.interface(), expected = expected.interface())]
    Family {
        /// The group.
        group: String,
        /// The group's family.
        expected: Family,
        /// The component's.
        found: Family,
    },
    /// Its constructor failed.
    #[error("the builder cannot be constructed with group `{group}`'s configuration: {fault}")]
    Construct {
        /// The group.
        group: String,
        /// What happened.
        fault: BuildFault,
    },
    /// A test build failed.
    #[error("the builder failed a test build for group `{group}`: {fault}")]
    TestBuild {
        /// The group.
        group: String,
        /// What happened.
        fault: BuildFault,
    },
    /// The host's own check refused it.
    #[error("the builder was not accepted for group `{group}`: {reason}")]
    NotAccepted {
        /// The group.
        group: String,
        /// Why.
        reason: String,
    },
    /// Nothing to go back to.
    #[error("group `{0}` has no previous version to roll back to; reload a component instead")]
    NoPrevious(String),
    /// Nothing to configure.
    #[error("group `{0}` has no component; reload one first")]
    NoComponent(String),
    /// A fault policy that makes no sense.
    #[error("fault policy of group `{group}`: {problem}")]
    Policy {
        /// The group.
        group: String,
        /// The field, its value, and what to give.
        problem: String,
    },
    /// A plan that makes no sense.
    #[error("reload of group `{group}`: {problem}")]
    Plan {
        /// The group.
        group: String,
        /// The field, its value, and what to give.
        problem: String,
    },
    /// No thread for a shadow.
    #[error(
        "the shadow of group `{group}` cannot start: {error}; raise the process's thread limit"
    )]
    Thread {
        /// The group.
        group: String,
        /// What the system said.
        error: std::io::Error,
    },
    /// The reload thread ended in the middle of it.
    #[error(
        "the reload of group `{0}` was given up: its thread failed; see the log, and try again"
    )]
    GivenUp(String),
}

/// Reloads, rolls back and looks at one group's builder, from any thread. Cheap to clone.
#[derive(Clone)]
pub struct ReloadHandle {
    shared: Arc<Shared>,
}

impl ReloadHandle {
    pub(crate) fn new(shared: Arc<Shared>) -> ReloadHandle {
        ReloadHandle { shared }
    }

    /// The group's name.
    pub fn group(&self) -> &str {
        &self.shared.name
    }

    /// The group's family.
    pub fn family(&self) -> Family {
        self.shared.family
    }

    /// Loads, compiles, instantiates, constructs and tries `bytes` on the reload thread; the version takes over at the next
    /// step boundary. Waits until it is ready (not until it has taken over). A bad component changes nothing.
    ///
    /// A version that is waiting already is replaced. Reloading the version in service gives it fresh instances and lifts a
    /// suspension.
    pub fn reload(&self, bytes: &[u8], origin: &str) -> Result<VersionInfo, ReloadError> {
        let (bytes, origin) = (bytes.to_vec(), origin.to_owned());
        self.on_reload_thread(move |shared| {
            let component = shared.sandbox.load(&bytes)?;
            drop(bytes);
            publish(shared, &component, &shared.config.load_full(), &origin)
        })
    }

    /// As `reload`, with a component that is loaded already: for several groups of one family.
    pub fn reload_component(
        &self,
        component: &Component,
        origin: &str,
    ) -> Result<VersionInfo, ReloadError> {
        let (component, origin) = (component.clone(), origin.to_owned());
        self.on_reload_thread(move |shared| {
            publish(shared, &component, &shared.config.load_full(), &origin)
        })
    }

    /// Submits a version and has it go through the stages of `plan`: `component`, or the one in service if that is None, with
    /// `options`, or those of the version before if that is None. Returns when it is checked; from then on its stage stands in
    /// [`BuilderStatus::candidate`]. A plan without stages is `reload_component`.
    ///
    /// A candidate that is being tried already is withdrawn. `companions` are the candidates of other groups that it gets into
    /// service with.
    ///
    /// # Errors
    /// As `reload`; a plan that makes no sense. What serves, or is being tried, stays.
    pub fn submit(
        &self,
        component: Option<&Component>,
        origin: &str,
        options: Option<Vec<(String, String)>>,
        plan: &ReloadPlan,
        companions: &Companions,
    ) -> Result<VersionInfo, ReloadError> {
        if let Some(problem) = plan.problem() {
            return Err(ReloadError::Plan {
                group: self.shared.name.clone(),
                problem,
            });
        }
        let (component, origin) = (component.cloned(), origin.to_owned());
        let (plan, companions) = (plan.clone(), companions.clone());
        self.on_reload_thread(move |shared| {
            let active = || {
                let active = shared.active.load_full();
                active.ok_or_else(|| ReloadError::NoComponent(shared.name.clone()))
            };
            let component = match component {
                Some(component) => component,
                None => active()?.component.clone(),
            };
            let config = match options {
                Some(options) => Arc::new(BuilderConfig {
                    options,
                    ..BuilderConfig::clone(&shared.config.load())
                }),
                None => shared.config.load_full(),
            };
            if plan.is_immediate() {
                let info = publish(shared, &component, &config, &origin)?;
                shared.config.store(config);
                return Ok(info);
            }
            let ready = prepare(shared, &component, &config, &origin)?;
            let info = ready.version.info.clone();
            start(shared, ready, plan, companions)?;
            Ok(info)
        })
    }

    /// Withdraws the candidate, if one is being tried: what serves goes on. Never waits.
    pub fn withdraw(&self) -> Option<VersionInfo> {
        withdraw(&self.shared, Withdrawal::RolledBack)
    }

    /// The component in service with other options: another configuration is another version, with instances of its own.
    /// The options stay for later reloads if this succeeds.
    pub fn reconfigure(&self, options: Vec<(String, String)>) -> Result<VersionInfo, ReloadError> {
        self.on_reload_thread(move |shared| {
            let active = shared
                .active
                .load_full()
                .ok_or_else(|| ReloadError::NoComponent(shared.name.clone()))?;
            let config = BuilderConfig {
                options,
                ..BuilderConfig::clone(&shared.config.load())
            };
            let config = Arc::new(config);
            let info = publish(shared, &active.component, &config, &active.info.origin)?;
            shared.config.store(config);
            Ok(info)
        })
    }

    /// Goes back to the version before, which was kept ready; it takes over at the next step boundary, and the present one
    /// becomes the previous. If a candidate is being tried, or a reload is still waiting for its step boundary, that is withdrawn
    /// instead. Returns the version that serves then; a candidate's own, if that is the plain builder. Later reloads have its
    /// options.
    pub fn rollback(&self) -> Result<VersionInfo, ReloadError> {
        self.on_reload_thread(|shared| {
            if let Some(withdrawn) = withdraw(shared, Withdrawal::RolledBack) {
                let active = shared.active.load();
                return Ok(active
                    .as_ref()
                    .map_or(withdrawn, |active| active.info.clone()));
            }
            if shared.pending.withdraw().is_some()
                && let Some(active) = shared.active.load_full()
            {
                shared.config.store(active.config.clone());
                return Ok(active.info.clone());
            }
            let mut ready = lock(&shared.previous)
                .take()
                .ok_or_else(|| ReloadError::NoPrevious(shared.name.clone()))?;
            // It serves without a spare if none can be made: better than staying with a version that is not wanted.
            ready.spare = make(shared, &ready.version.component, &ready.version.config).ok();
            let version = ready.version.clone();
            shared.config.store(version.config.clone());
            drop(shared.pending.put(ready));
            Ok(version.info.clone())
        })
    }

    /// What is done about faults from the next one on. What was counted so far stays.
    ///
    /// # Errors
    /// If a number makes no sense; the policy in force stays.
    pub fn set_policy(&self, policy: FaultPolicy) -> Result<(), ReloadError> {
        match policy.problem() {
            Some(problem) => Err(ReloadError::Policy {
                group: self.shared.name.clone(),
                problem,
            }),
            None => {
                self.shared.policy.store(Arc::new(policy));
                Ok(())
            }
        }
    }

    /// What is done about faults.
    pub fn policy(&self) -> FaultPolicy {
        **self.shared.policy.load()
    }

    /// `told` is called when what serves, or what is tried, has changed by itself: a return to the last good version, a candidate
    /// in its next stage. So whoever records what is active can look at `status`. It must not wait for a reload.
    pub fn on_change(&self, told: impl Fn() + Send + 'static) {
        *lock(&self.shared.on_change) = Some(Box::new(told));
    }

    /// What the group's builder is doing.
    pub fn status(&self) -> BuilderStatus {
        self.shared.status()
    }

    fn on_reload_thread<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Arc<Shared>) -> Result<T, ReloadError> + Send + 'static,
    ) -> Result<T, ReloadError> {
        let (answer, answered) = crossbeam_channel::bounded(1);
        let shared = self.shared.clone();
        self.shared.sandbox.workshop().run(move || {
            if let Some(retired) = shared.retired.withdraw() {
                retire(&shared, retired);
            }
            // The one who asked may have gone; the version is in place all the same.
            let _ = answer.send(job(&shared));
        });
        // No answer: the job panicked, and its sender was dropped.
        answered
            .recv()
            .unwrap_or_else(|_| Err(ReloadError::GivenUp(self.shared.name.clone())))
    }
}

fn publish(
    shared: &Arc<Shared>,
    component: &Component,
    config: &Arc<BuilderConfig>,
    origin: &str,
) -> Result<VersionInfo, ReloadError> {
    let ready = prepare(shared, component, config, origin)?;
    let info = ready.version.info.clone();
    withdraw(shared, Withdrawal::Replaced);
    drop(shared.pending.put(ready));
    Ok(info)
}

fn withdraw(shared: &Shared, why: Withdrawal) -> Option<VersionInfo> {
    let candidate = shared.candidate.load_full()?;
    if !candidate.withdraw(why) {
        return None;
    }
    candidate::tell(shared, &candidate);
    Some(candidate.version.info.clone())
}

/// A checked version enters the first stage of its plan.
fn start(
    shared: &Arc<Shared>,
    ready: Ready,
    plan: ReloadPlan,
    companions: Companions,
) -> Result<(), ReloadError> {
    let shadowed = plan.shadow_steps > 0;
    let candidate = Arc::new(Candidate::new(ready.version.clone(), plan, companions));
    withdraw(shared, Withdrawal::Replaced);
    shared.candidate.store(Some(candidate.clone()));
    if !shadowed {
        try_in_service(shared, &candidate, ready);
        return Ok(());
    }
    shadow::start(shared, &candidate, ready).map_err(|error| {
        candidate.withdraw(Withdrawal::NoInstance);
        ReloadError::Thread {
            group: shared.name.clone(),
            error,
        }
    })
}

/// A candidate that has passed its shadow, or has none, enters canary; without a canary it has passed.
pub(crate) fn try_in_service(shared: &Shared, candidate: &Arc<Candidate>, ready: Ready) {
    let goes_on = match candidate.plan.canary {
        Some(_) => candidate.advance(Stage::Canary),
        None => {
            candidate.pass();
            candidate.is_tried()
        }
    };
    if goes_on {
        let trial = Trial::canary(candidate.clone(), ready, &shared.policy.load());
        drop(shared.trials.put(trial));
    }
    candidate::tell(shared, candidate);
}

/// A version with an instance and a spare, both constructed and tried.
pub(crate) fn prepare(
    shared: &Shared,
    component: &Component,
    config: &Arc<BuilderConfig>,
    origin: &str,
) -> Result<Ready, ReloadError> {
    if component.family() != shared.family {
        return Err(ReloadError::Family {
            group: shared.name.clone(),
            expected: shared.family,
            found: component.family(),
        });
    }
    let component = &component.under_limits_of(&shared.sandbox);
    let mut instance = make(shared, component, config)?;
    if let Some(accept) = &shared.acceptance {
        accept(&mut instance).map_err(|reason| ReloadError::NotAccepted {
            group: shared.name.clone(),
            reason,
        })?;
    }
    if let Ok(rehearsal) = WasmBuilder::new(component, config) {
        rehearsal.fault_on_purpose();
    }
    let spare = make(shared, component, config)?;
    let version = Version {
        info: VersionInfo {
            version: instance.version(),
            component: component.hash(),
            family: shared.family,
            name: instance.info().name.clone(),
            origin: origin.to_owned(),
            options: config.options.clone(),
        },
        builder: instance.info().clone(),
        component: component.clone(),
        config: config.clone(),
        metrics: VersionMetrics::default(),
        quarantined: AtomicBool::new(false),
    };
    Ok(Ready {
        version: Arc::new(version),
        instance,
        spare: Some(spare),
    })
}

/// A new instance, constructed and tried.
pub(crate) fn make(
    shared: &Shared,
    component: &Component,
    config: &BuilderConfig,
) -> Result<WasmBuilder, ReloadError> {
    let group = || shared.name.clone();
    let mut instance = WasmBuilder::new(component, config).map_err(|fault| {
        keep_unborn(shared, component, config, &fault);
        ReloadError::Construct {
            group: group(),
            fault,
        }
    })?;
    probe::run(&mut instance, config).map_err(|fault| ReloadError::TestBuild {
        group: group(),
        fault,
    })?;
    Ok(instance)
}

/// Keeps a builder that was never constructed as a bundle, if there is a directory for bundles.
fn keep_unborn(shared: &Shared, component: &Component, config: &BuilderConfig, fault: &BuildFault) {
    let Some(bundles) = shared.sandbox.bundles() else {
        return;
    };
    let fault = SeenFault::of(fault);
    let info = VersionInfo {
        version: crate::version::version_hash(component.hash(), config),
        component: component.hash(),
        family: component.family(),
        name: String::new(),
        origin: String::new(),
        options: config.options.clone(),
    };
    if !bundles.admit(info.version, fault.kind) {
        return;
    }
    let case = Case {
        fault,
        call: BuilderCall::Create,
        instance_calls: 0,
        common: None,
        step: None,
        metadata: None,
        again: None,
    };
    bundles.write(bundle(&info, component, config, shared.name.clone(), case));
}

/// After a quarantine: the version before takes over at the next step boundary, unless it was quarantined itself, or somebody
/// has already chosen another.
pub(crate) fn return_to_last_good(shared: &Shared, quarantined: &Arc<Version>) {
    if !shared.in_service(quarantined) || shared.pending.peek(|_| ()).is_some() {
        return;
    }
    if let Some(retired) = shared.retired.withdraw() {
        retire(shared, retired);
    }
    let good = lock(&shared.previous).take_if(|ready| !ready.version.quarantined.load(Relaxed));
    let Some(mut ready) = good else {
        tracing::warn!(
            group = %shared.name,
            "there is no good version to return to; its policy decides what serves until a reload or a rollback"
        );
        return;
    };
    ready.spare = make(shared, &ready.version.component, &ready.version.config).ok();
    tracing::warn!(group = %shared.name, version = %ready.version.info.version, "returning to the last good version");
    shared.counts.returns.fetch_add(1, Relaxed);
    drop(shared.pending.put(ready));
    shared.tell();
}

/// After a fault: a new spare, unless the version has gone out of service and is not being tried.
pub(crate) fn refill(shared: &Shared, version: &Arc<Version>) {
    let spares = if shared.in_service(version) {
        &shared.spares
    } else if shared.tries(version) {
        &shared.candidate_spares
    } else {
        return;
    };
    match make(shared, &version.component, &version.config) {
        Ok(spare) => drop(spares.put((version.clone(), spare))),
        Err(error) => {
            if let ReloadError::Construct {
                fault: BuildFault::Fault { kind, message },
                ..
            } = &error
            {
                shared.note(version, *kind, message);
            }
            tracing::warn!(group = %shared.name, version = %version.info.version, "no spare instance: {error}");
        }
    }
}

/// Keeps the version that went out of service ready for a rollback. If its instances died, it gets a new one; if that fails,
/// there is nothing to go back to.
pub(crate) fn retire(shared: &Shared, retired: Retired) {
    let Retired {
        version,
        instance,
        spare,
    } = retired;
    // Fresh instances of the same version: what one goes back to is still what served before both.
    if shared.serves(&version.info) {
        return;
    }
    let instance = match instance.or(spare) {
        Some(instance) => Ok(instance),
        None => make(shared, &version.component, &version.config),
    };
    match instance {
        Ok(instance) => drop(lock(&shared.previous).replace(Ready {
            version,
            instance,
            spare: None,
        })),
        Err(error) => {
            tracing::warn!(group = %shared.name, version = %version.info.version, "not kept for a rollback: {error}");
        }
    }
}

/// The version's key of a component and a configuration, without making it.
pub fn version_of(component: &Component, config: &BuilderConfig) -> ContentHash {
    crate::version::version_hash(component.hash(), config)
}
