//! What the socket of a running host controls: its groups' builders, and the record of what is active.

mod configure;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use serde_json::{Value, json};
use timetable_attention::group::AttentionGroup;
use timetable_engine::histogram::Histogram;
use timetable_engine::timings::{STEP_NS, STEP_TOKENS};
use timetable_engine::{EngineStats, FinishReason, StepRecord, StepTimings, TenantStats, Timeline};
use timetable_provenance::{Digest, Evidence, Trust};
use timetable_sandbox::{
    Companions, Component, ContentHash, KeptCandidate, KeptVersion, ReloadHandle, ReloadPlan,
    Sandbox, SlotState, Stage, StateDir, StateError, TenantName, VersionInfo,
};

use self::configure::Settings;
use super::{Control, Submission};
use crate::commands::{builder_name, slot_name};
use crate::config::{Effective, Flags};

/// One attention group of the running engine.
pub struct Group {
    /// Its layers, their backend and their KV cache group.
    pub layers: AttentionGroup,
    /// Whose builder it is. None: everybody's.
    pub tenant: Option<TenantName>,
    /// Reloads and looks at its builder.
    pub handle: ReloadHandle,
}

impl Group {
    /// FLASH_ATTN, FLASHINFER, …
    fn backend(&self) -> &str {
        &self.layers.backend.name
    }

    /// Is its builder given under this name?
    fn is_of(&self, name: &str) -> bool {
        let builder = builder_name(self.backend(), self.handle.family());
        [self.backend(), builder]
            .iter()
            .any(|of| of.eq_ignore_ascii_case(name))
    }
}

/// How long the end waits for what is still to be written.
const SETTLE: Duration = Duration::from_secs(2);

/// Reads the engine's counts and times, and its tenants', as of its last step.
pub type StatsReader = Box<dyn Fn() -> (EngineStats, Vec<TenantStats>) + Send + Sync>;

/// Makes a part of the table of builders.
pub type Table = Box<dyn Fn() -> Value + Send + Sync>;

/// The builders of a running host.
pub struct Host {
    sandbox: Sandbox,
    groups: Arc<[Group]>,
    /// What start-up found: members of the table of builders.
    startup: Value,
    stats: StatsReader,
    /// What a server counts, if there is one: the member `http` of the table.
    http: OnceLock<Table>,
    /// None: nobody looks at steps.
    timeline: Option<Arc<Timeline>>,
    /// What it was configured with. Taken before `state`.
    settings: Mutex<Option<Settings>>,
    /// How a version gets into service where nobody says it.
    plan: RwLock<ReloadPlan>,
    /// Also serialises changes: one reload or rollback at a time.
    state: Arc<Mutex<Option<StateDir>>>,
    /// Which components may run here.
    trust: RwLock<Trust>,
    /// What is known of those that were brought, by content.
    evidence: Mutex<BTreeMap<Digest, Evidence>>,
}

impl Host {
    /// `state` keeps components, and what is active, across restarts.
    pub fn new(
        sandbox: Sandbox,
        groups: Vec<Group>,
        startup: Value,
        stats: StatsReader,
        state: Option<StateDir>,
    ) -> Self {
        let keeps = state.is_some();
        let state = state.map(forget_candidates);
        let state = Arc::new(Mutex::new(state));
        let groups: Arc<[Group]> = groups.into();
        if keeps {
            record_changes(&groups, &state);
        }
        Host {
            sandbox,
            groups,
            startup,
            stats,
            http: OnceLock::new(),
            timeline: None,
            settings: Mutex::new(None),
            plan: RwLock::default(),
            state,
            trust: RwLock::default(),
            evidence: Mutex::default(),
        }
    }

    /// Runs only what `trust` admits. `evidence` is of the components that serve first.
    #[must_use]
    pub fn trusting(mut self, trust: Trust, evidence: Vec<Evidence>) -> Self {
        self.trust = RwLock::new(trust);
        let known = evidence.into_iter().map(|known| (known.content, known));
        self.evidence = Mutex::new(known.collect());
        self
    }

    /// How a version gets into service where nobody says it; at once without this.
    #[must_use]
    pub fn reloading_by(mut self, plan: ReloadPlan) -> Self {
        self.plan = RwLock::new(plan);
        self
    }

    /// Its steps are recorded there.
    #[must_use]
    pub fn recording_steps_in(mut self, timeline: Option<Arc<Timeline>>) -> Self {
        self.timeline = timeline;
        self
    }

    /// The flags that it was started with and the configuration in force, so that it can be changed.
    #[must_use]
    pub fn configured(mut self, flags: Flags, effective: Effective) -> Self {
        self.settings = Mutex::new(Some(Settings { flags, effective }));
        self
    }

    /// What the server in front of it counts.
    pub fn serving(&self, http: Table) {
        // One host has one server.
        let _ = self.http.set(http);
    }

    fn trust(&self) -> RwLockReadGuard<'_, Trust> {
        self.trust.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers what is known of a component for as long as it may come back.
    fn remember(&self, evidence: Evidence) {
        let statuses: Vec<_> = self
            .groups
            .iter()
            .map(|group| group.handle.status())
            .collect();
        let may_come_back = |content: &Digest| {
            statuses
                .iter()
                .flat_map(|status| {
                    let candidate = status.candidate.as_ref();
                    let candidate = candidate.map(|candidate| &candidate.version);
                    let (active, pending) = (status.active.as_ref(), status.pending.as_ref());
                    [active, pending, status.previous.as_ref(), candidate]
                })
                .flatten()
                .any(|version| version.component.0 == content.0)
        };
        let mut known = self.evidence.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|content, _| may_come_back(content));
        known.insert(evidence.content, evidence);
    }

    /// May a component that was here before come back?
    fn permits(&self, component: ContentHash) -> Result<(), String> {
        let content = Digest(component.0);
        let known = self.evidence.lock().unwrap_or_else(PoisonError::into_inner);
        let evidence = known.get(&content).cloned();
        self.trust()
            .permits(&evidence.unwrap_or_else(|| Evidence::unsigned(content)))
            .map_err(|error| format!("the previous version's component {error}"))
    }

    /// Waits a moment for fault bundles that are still to be written, and records what serves.
    pub fn settle(&self) {
        if !self.sandbox.settle(SETTLE) {
            tracing::warn!("the reload thread is still busy; fault bundles may be missing");
        }
        record_quietly(&self.groups, &self.state);
    }

    /// The groups of a backend, for everybody or for a tenant that has a builder of its own.
    fn groups_of(&self, backend: &str, tenant: Option<&TenantName>) -> Result<Vec<&Group>, String> {
        let of_backend = |group: &&Group| group.is_of(backend);
        let groups: Vec<&Group> = self.groups.iter().filter(of_backend).collect();
        if groups.is_empty() {
            let known: BTreeSet<&str> = self
                .groups
                .iter()
                .map(|group| builder_name(group.backend(), group.handle.family()))
                .collect();
            let known: Vec<&str> = known.into_iter().collect();
            return Err(format!(
                "backend `{backend}` serves no layer of this host; it runs {}",
                known.join(", ")
            ));
        }
        let of_tenant = |group: &&Group| group.tenant.as_ref() == tenant;
        let own: Vec<&Group> = groups.into_iter().filter(of_tenant).collect();
        match tenant {
            Some(tenant) if own.is_empty() => Err(format!(
                "tenant `{tenant}` has no builder of its own in this host; leave --tenant out, or give it one in the host's configuration"
            )),
            _ => Ok(own),
        }
    }

    /// The component, if it is one for `groups`.
    fn load(&self, bytes: &[u8], groups: &[&Group], backend: &str) -> Result<Component, String> {
        let loaded = self
            .sandbox
            .load_aside(bytes)
            .map_err(|error| error.to_string())?;
        let families = groups.iter().map(|group| group.handle.family());
        match families
            .into_iter()
            .find(|family| *family != loaded.family())
        {
            Some(family) => Err(format!(
                "is a builder of `{}`, and {backend} needs one of `{}`",
                loaded.family().interface(),
                family.interface()
            )),
            None => Ok(loaded),
        }
    }

    /// To the version before: the one that is kept ready, or after a restart the one that the manifest names.
    fn go_back(
        &self,
        groups: &[&Group],
        state: Option<&StateDir>,
    ) -> Result<Vec<VersionInfo>, String> {
        let previous: Vec<Option<VersionInfo>> = groups
            .iter()
            .map(|group| group.handle.status().previous)
            .collect();
        let kept = state
            .filter(|_| previous.iter().all(Option::is_none))
            .and_then(|state| {
                let slot = state.slot(&slot_of(&groups.first()?.handle))?;
                Some((state, slot.previous.as_ref()?))
            });
        let Some((state, kept)) = kept else {
            for info in previous.iter().flatten() {
                self.permits(info.component)?;
            }
            return Self::change(groups, |handle| {
                handle.rollback().map_err(|error| error.to_string())
            });
        };
        let line = |error: &dyn std::fmt::Display| format!("{}: {error}", kept.origin);
        let bytes = state
            .component(kept.component)
            .map_err(|error| line(&error))?;
        let signature = state
            .signature(kept.component)
            .map_err(|error| line(&error))?;
        let admitted = self.trust().admit(&bytes, signature.as_deref());
        self.remember(admitted.map_err(|error| line(&error))?);
        let loaded = self
            .sandbox
            .load_aside(&bytes)
            .map_err(|error| line(&error))?;
        let (plan, companions) = (ReloadPlan::default(), Companions::of(groups.len()));
        Self::change(groups, |handle| {
            let options = Some(kept.options.clone());
            handle
                .submit(Some(&loaded), &kept.origin, options, &plan, &companions)
                .map_err(|error| line(&error))
        })
    }

    /// Applies `change` to every group of the backend, or to none. Each group has a version of its own: its configuration is
    /// part of it.
    fn change(
        groups: &[&Group],
        change: impl Fn(&ReloadHandle) -> Result<VersionInfo, String>,
    ) -> Result<Vec<VersionInfo>, String> {
        let mut changed_to = Vec::with_capacity(groups.len());
        for (index, group) in groups.iter().enumerate() {
            match change(&group.handle) {
                Ok(info) => changed_to.push(info),
                Err(message) => {
                    for changed in &groups[..index] {
                        // The version before was kept ready; if even that fails, the group's own faults fall back per step.
                        if let Err(error) = changed.handle.rollback() {
                            tracing::error!(group = changed.handle.group(), %error, "a half-made change was not withdrawn");
                        }
                    }
                    return Err(message);
                }
            }
        }
        Ok(changed_to)
    }
}

/// The first group's version, with those of all groups beside it.
fn in_groups(infos: &[VersionInfo]) -> Result<Value, String> {
    let first = infos.first().ok_or("there is no group")?;
    let mut answer = value(first)?;
    let versions: Vec<Value> = infos.iter().map(|info| json!(info.version)).collect();
    answer["versions"] = json!(versions);
    Ok(answer)
}

/// What was being tried when the host before ended is not tried again by itself.
fn forget_candidates(mut state: StateDir) -> StateDir {
    let tried = state.slots().filter(|(_, slot)| slot.candidate.is_some());
    let tried: Vec<(String, SlotState)> = tried
        .map(|(name, slot)| (name.to_owned(), slot.clone()))
        .collect();
    let without = tried.into_iter().map(|(name, mut slot)| {
        if let Some(KeptCandidate { version, stage }) = slot.candidate.take() {
            tracing::warn!(
                slot = %name, component = %version.component, origin = %version.origin,
                "a candidate was in {stage} when the host ended; the active version serves: reload it to try it again"
            );
        }
        (name, slot)
    });
    let without: Vec<(String, SlotState)> = without.collect();
    if let Err(error) = state.set(without) {
        tracing::error!(%error, "the manifest still names a candidate");
    }
    state
}

/// Records by itself whatever changes by itself: a return to the last good version, a candidate in its next stage. On a thread
/// of its own, for the threads that tell must not wait for a reload that holds `state`.
fn record_changes(groups: &Arc<[Group]>, state: &Arc<Mutex<Option<StateDir>>>) {
    // One that waits stands for all that changed before it is taken.
    let (changed, changes) = crossbeam_channel::bounded::<()>(1);
    for group in groups.iter() {
        let changed = changed.clone();
        group.handle.on_change(move || {
            // Full: what is waiting stands for this too.
            let _ = changed.try_send(());
        });
    }
    let (groups, state) = (Arc::downgrade(groups), Arc::clone(state));
    let recorder = std::thread::Builder::new().name("recorder".to_owned());
    let started = recorder.spawn(move || {
        for () in changes {
            let Some(groups) = groups.upgrade() else {
                return;
            };
            record_quietly(&groups, &state);
        }
    });
    if let Err(error) = started {
        tracing::error!(%error, "what changes by itself will be recorded with the next reload only");
    }
}

fn record_quietly(groups: &[Group], state: &Mutex<Option<StateDir>>) {
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(state) = state.as_mut()
        && let Err(error) = record(state, groups)
    {
        tracing::error!(%error, "what serves now will not survive a restart");
    }
}

/// Makes the state directory say what `groups` are doing. Writes nothing if it says so already.
fn record(state: &mut StateDir, groups: &[Group]) -> Result<(), StateError> {
    let mut slots: Vec<(String, SlotState)> = Vec::new();
    for group in groups {
        let slot = slot_of(&group.handle);
        // Groups of one slot go together: the first speaks for all.
        if slots.iter().all(|(known, _)| *known != slot) {
            let now = now(state, &group.handle);
            slots.push((slot, now));
        }
    }
    state.set(slots)
}

/// The manifest's name for whom a group builds.
fn slot_of(handle: &ReloadHandle) -> String {
    let (group, tenant) = match handle.group().split_once('@') {
        Some((group, tenant)) => (group, Some(tenant)),
        None => (handle.group(), None),
    };
    let backend = group.split('/').next().unwrap_or(group);
    let family = handle.family();
    slot_name(builder_name(backend, family), family, tenant)
}

fn now(state: &StateDir, handle: &ReloadHandle) -> SlotState {
    let status = handle.status();
    // An embedded component, or one given on the command line, is not kept: it is found again as it was found now.
    let kept = |info: &VersionInfo| {
        state.has(info.component).then(|| KeptVersion {
            component: info.component,
            origin: info.origin.clone(),
            options: info.options.clone(),
        })
    };
    let tried = status
        .candidate
        .as_ref()
        .filter(|candidate| !matches!(candidate.stage, Stage::Active | Stage::Withdrawn));
    let (serves, before) = match &status.pending {
        Some(pending) => (Some(pending), status.active.as_ref()),
        None => (status.active.as_ref(), status.previous.as_ref()),
    };
    let active = serves.and_then(kept);
    // After a restart none is ready, but what served before what serves is still known.
    let known = state
        .slot(&slot_of(handle))
        .filter(|slot| slot.active == active);
    let previous = match before {
        Some(info) => kept(info),
        None => known.and_then(|slot| slot.previous.clone()),
    };
    SlotState {
        active,
        previous,
        candidate: tried.and_then(|candidate| {
            Some(KeptCandidate {
                version: kept(&candidate.version)?,
                stage: candidate.stage,
            })
        }),
    }
}

impl Control for Host {
    fn reload(&self, submission: Submission<'_>) -> Result<Value, String> {
        let Submission {
            backend,
            tenant,
            origin,
            component,
            signature,
            options,
            plan,
        } = submission;
        let groups = self.groups_of(backend, tenant)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let name = if component.is_some() { origin } else { backend };
        let line = |error: &dyn std::fmt::Display| {
            format!("{name}: {error}; the builder in service stays")
        };
        // Before anything else looks at the bytes.
        let evidence = component
            .map(|bytes| self.trust().admit(bytes, signature))
            .transpose()
            .map_err(|error| line(&error))?;
        let plan = plan.unwrap_or_else(|| {
            let own = self.plan.read().unwrap_or_else(PoisonError::into_inner);
            own.clone()
        });
        let loaded = component
            .map(|bytes| self.load(bytes, &groups, backend))
            .transpose()
            .map_err(|error| line(&error))?;
        // Kept before it serves, so that what is active can always be read back.
        if let (Some(state), Some(bytes)) = (state.as_ref(), component) {
            let kept = state.keep(bytes).and_then(|hash| {
                signature.map_or(Ok(()), |bytes| state.keep_signature(hash, bytes))
            });
            kept.map_err(|error| line(&error))?;
        }
        let companions = Companions::of(groups.len());
        let infos = Self::change(&groups, |handle| {
            let origin = match component {
                Some(_) => origin.to_owned(),
                // The component in service came from where it came from.
                None => handle
                    .status()
                    .active
                    .map_or_else(String::new, |active| active.origin),
            };
            handle
                .submit(
                    loaded.as_ref(),
                    &origin,
                    options.clone(),
                    &plan,
                    &companions,
                )
                .map_err(|error| line(&error))
        })?;
        let signed_by = evidence.as_ref().and_then(Evidence::signed_by);
        let signed_by = signed_by.map(ToString::to_string);
        if let Some(evidence) = evidence {
            self.remember(evidence);
        }
        if let Some(state) = state.as_mut() {
            record(state, &self.groups).map_err(|error| {
                format!("{name} was taken, but that will not survive a restart: {error}")
            })?;
        }
        let mut answer = in_groups(&infos)?;
        let candidate = groups
            .iter()
            .zip(&infos)
            .filter(|_| !plan.is_immediate())
            .find_map(|(group, info)| {
                let candidate = group.handle.status().candidate?;
                (candidate.version == *info).then_some(candidate)
            });
        let stage = candidate.map_or(Stage::Checked, |candidate| candidate.stage);
        answer["stage"] = json!(stage);
        answer["signed_by"] = json!(signed_by);
        Ok(answer)
    }

    fn rollback(&self, backend: &str, tenant: Option<&TenantName>) -> Result<Value, String> {
        let groups = self.groups_of(backend, tenant)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let withdrawn: Vec<VersionInfo> = groups
            .iter()
            .filter_map(|group| group.handle.withdraw())
            .collect();
        let answer = match withdrawn.first() {
            Some(info) => json!({ "withdrawn": value(info)? }),
            None => in_groups(&self.go_back(&groups, state.as_ref())?)?,
        };
        if let Some(state) = state.as_mut() {
            record(state, &self.groups).map_err(|error| {
                format!("{backend} was rolled back, but will not be after a restart: {error}")
            })?;
        }
        Ok(answer)
    }

    fn configure(&self, path: &str, text: String) -> Result<Value, String> {
        self.apply(Path::new(path), text)
    }

    fn steps(&self, count: usize) -> Result<Value, String> {
        let timeline = self.timeline.as_ref();
        let timeline = timeline.ok_or("this host keeps no timeline of its steps")?;
        let steps: Vec<Value> = timeline.last(count).iter().map(step).collect();
        Ok(json!({ "capacity": timeline.capacity(), "steps": steps }))
    }

    fn builders(&self) -> Result<Value, String> {
        let builders = self
            .groups
            .iter()
            .map(|group| {
                let mut status = value(&group.handle.status())?;
                status["backend"] = json!(group.backend());
                status["tenant"] = json!(group.tenant);
                status["layers"] = json!(group.layers.layer_names.len());
                status["layer_names"] = json!(group.layers.layer_names);
                status["kv_cache_group"] = json!(group.layers.kv_cache_group_id);
                status["kind"] = json!(group.layers.spec.kind_name());
                status["view"] = json!(group.layers.view().to_string());
                Ok(status)
            })
            .collect::<Result<Vec<Value>, String>>()?;
        let mut table = self.startup.clone();
        table["builders"] = json!(builders);
        table["instances"] = value(&self.sandbox.instances())?;
        let (stats, tenants) = (self.stats)();
        table["engine"] = engine(&stats);
        table["engine"]["tenants"] = tenants.iter().map(tenant).collect();
        if let Some(http) = self.http.get() {
            table["http"] = http();
        }
        Ok(table)
    }
}

/// The engine's counts, and the nanoseconds of each part of all its steps.
pub fn engine(stats: &EngineStats) -> Value {
    let total = &stats.total;
    let finished: BTreeMap<&str, u64> = FinishReason::ALL
        .map(|reason| (reason.name(), stats.finished[reason as usize]))
        .into();
    json!({
        "steps": stats.steps,
        "failed_steps": stats.failed_steps,
        "fallback_steps": stats.fallback_steps,
        "tokens_computed": stats.tokens_computed,
        "tokens_sampled": stats.tokens_sampled,
        "speculation": {
            "num_drafts": stats.speculation.num_drafts,
            "num_draft_tokens": stats.speculation.num_draft_tokens,
            "num_accepted_tokens": stats.speculation.num_accepted_tokens,
            "num_accepted_tokens_per_pos": stats.speculation.accepted_per_pos(),
        },
        "preemptions": stats.preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
        "kv_cache_blocks": stats.kv_blocks,
        "kv_cache_usage": stats.kv_blocks_used as f64 / stats.kv_blocks.max(1) as f64,
        "finished": finished,
        "step_tokens": histogram(&stats.step_tokens, &STEP_TOKENS),
        "step_ns": histogram(&stats.step_ns, &STEP_NS),
        "running": stats.running,
        "waiting": stats.waiting,
        "total_ns": {
            "schedule": total.schedule_ns,
            "batch": total.batch_ns,
            "build": total.build_ns,
            "verify": total.verify_ns,
            "prepare": total.prepare_ns,
            "submit": total.submit_ns,
            "wait": total.wait_ns,
            "model": total.model_ns,
            "sample": total.sample_ns,
            "output": total.output_ns,
        },
        "device_total_ns": {
            "copy": total.copy_ns,
            "kernel": total.kernel_ns,
            "idle": total.idle_ns,
        },
    })
}

/// One step of the timeline: when it ended, since the host began, and the nanoseconds of its parts.
fn step((ended, record): &(Duration, StepRecord)) -> Value {
    let parts = record.timings.parts();
    let named = |range: std::ops::Range<usize>| -> BTreeMap<&str, u64> {
        let names = StepTimings::NAMES[range.clone()].iter().copied();
        names.zip(parts[range].iter().copied()).collect()
    };
    json!({
        "step": record.step,
        "ended_us": ended.as_micros() as u64,
        "requests": record.requests,
        "tokens": record.tokens,
        "fell_back": record.fell_back,
        "failed": record.failed,
        "ns": named(0..StepTimings::HOST_PARTS),
        "device_ns": named(StepTimings::HOST_PARTS..StepTimings::NAMES.len()),
    })
}

fn tenant(stats: &TenantStats) -> Value {
    json!({
        "name": stats.name.as_ref().map(TenantName::as_str),
        "requests": stats.requests,
        "failed_requests": stats.failed_requests,
        "steps": stats.steps,
        "tokens_computed": stats.tokens_computed,
        "tokens_sampled": stats.tokens_sampled,
        "running": stats.running,
        "waiting": stats.waiting,
    })
}

fn histogram<const N: usize>(histogram: &Histogram<N>, bounds: &[u64; N]) -> Value {
    json!({ "count": histogram.count(), "sum": histogram.sum, "at_most": histogram.at_most(bounds) })
}

fn value(data: &impl serde::Serialize) -> Result<Value, String> {
    serde_json::to_value(data)
        .map_err(|error| format!("the answer could not be written as JSON ({error})"))
}
