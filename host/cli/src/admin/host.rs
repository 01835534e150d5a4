//! What the socket of a running host controls: its groups' builders, and the record of what is active.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::Duration;

use serde_json::{Value, json};
use timetable_attention::group::AttentionGroup;
use timetable_engine::EngineStats;
use timetable_provenance::{Digest, Evidence, Trust};
use timetable_sandbox::{ContentHash, ReloadHandle, Sandbox, StateDir, StateError, VersionInfo};

use super::Control;

/// One attention group of the running engine.
pub struct Group {
    /// Its layers, their backend and their KV cache group.
    pub layers: AttentionGroup,
    /// Reloads and looks at its builder.
    pub handle: ReloadHandle,
}

impl Group {
    /// FLASH_ATTN, FLASHINFER, …
    fn backend(&self) -> &str {
        &self.layers.backend.name
    }
}

/// How long the end waits for what is still to be written.
const SETTLE: Duration = Duration::from_secs(2);

/// Reads the engine's counts and times, as of its last step.
pub type StatsReader = Box<dyn Fn() -> EngineStats + Send + Sync>;

/// The builders of a running host.
pub struct Host {
    sandbox: Sandbox,
    groups: Vec<Group>,
    /// What start-up found: members of the table of builders.
    startup: Value,
    stats: StatsReader,
    /// Also serialises changes: one reload or rollback at a time.
    state: Arc<Mutex<Option<StateDir>>>,
    /// Which components may run here.
    trust: Trust,
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
        let state = Arc::new(Mutex::new(state));
        for group in &groups {
            let (state, backend) = (Arc::clone(&state), group.backend().to_owned());
            group
                .handle
                .on_return(move |info| record_return(&state, &backend, info));
        }
        Host {
            sandbox,
            groups,
            startup,
            stats,
            state,
            trust: Trust::default(),
            evidence: Mutex::default(),
        }
    }

    /// Runs only what `trust` admits. `evidence` is of the component that serves first.
    #[must_use]
    pub fn trusting(mut self, trust: Trust, evidence: Evidence) -> Self {
        self.trust = trust;
        self.evidence = Mutex::new(BTreeMap::from([(evidence.content, evidence)]));
        self
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
                .flat_map(|status| [&status.active, &status.pending, &status.previous])
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
        self.trust
            .permits(&evidence.unwrap_or_else(|| Evidence::unsigned(content)))
            .map_err(|error| format!("the previous version's component {error}"))
    }

    /// Waits a moment for fault bundles that are still to be written.
    pub fn settle(&self) {
        if !self.sandbox.settle(SETTLE) {
            tracing::warn!("the reload thread is still busy; fault bundles may be missing");
        }
    }

    fn groups_of(&self, backend: &str) -> Result<Vec<&Group>, String> {
        let groups: Vec<&Group> = self
            .groups
            .iter()
            .filter(|group| group.backend().eq_ignore_ascii_case(backend))
            .collect();
        if groups.is_empty() {
            let mut known: Vec<&str> = self.groups.iter().map(Group::backend).collect();
            known.dedup();
            return Err(format!(
                "backend `{backend}` serves no layer of this host; it runs {}",
                known.join(", ")
            ));
        }
        Ok(groups)
    }

    /// Applies `change` to every group of the backend, or to none.
    fn change(
        groups: &[&Group],
        change: impl Fn(&ReloadHandle) -> Result<VersionInfo, String>,
    ) -> Result<VersionInfo, String> {
        let mut last = None;
        for (index, group) in groups.iter().enumerate() {
            match change(&group.handle) {
                Ok(info) => last = Some(info),
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
        last.ok_or_else(|| "there is no group".to_owned())
    }
}

/// Makes `info` the version that serves after a restart.
fn record(state: &mut StateDir, info: &VersionInfo) -> Result<(), StateError> {
    if state.component(info.component).is_ok() {
        state.activate_kept(info.family, info.component, &info.origin)
    } else {
        // An embedded component, or one given on the command line: nothing to keep.
        state.deactivate(info.family)
    }
}

/// As `record`, for a version that was returned to after a quarantine. On the reload thread, which a reload that holds `state`
/// may be waiting for: such a reload records what serves itself.
fn record_return(state: &Mutex<Option<StateDir>>, backend: &str, info: &VersionInfo) {
    let mut state = match state.try_lock() {
        Ok(state) => state,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return,
    };
    if let Some(state) = state.as_mut()
        && let Err(error) = record(state, info)
    {
        tracing::error!(%backend, %error, "the return to the last good version will not survive a restart");
    }
}

impl Control for Host {
    fn reload(
        &self,
        backend: &str,
        origin: &str,
        component: &[u8],
        signature: Option<&[u8]>,
    ) -> Result<Value, String> {
        let groups = self.groups_of(backend)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let line = |error: &dyn std::fmt::Display| {
            format!("{origin}: {error}; the builder in service stays")
        };
        // Before anything else looks at the bytes.
        let evidence = self
            .trust
            .admit(component, signature)
            .map_err(|error| line(&error))?;
        let loaded = self.sandbox.load(component).map_err(|error| line(&error))?;
        if let Some(family) = groups
            .iter()
            .map(|group| group.handle.family())
            .find(|family| *family != loaded.family())
        {
            return Err(line(&format!(
                "is a builder of `{}`, and {backend} needs one of `{}`",
                loaded.family().interface(),
                family.interface()
            )));
        }
        // Kept before it serves, so that what is active can always be read back.
        let kept = state
            .as_ref()
            .map(|state| {
                let hash = state.keep(component)?;
                signature.map_or(Ok(()), |bytes| state.keep_signature(hash, bytes))?;
                Ok::<_, StateError>(hash)
            })
            .transpose()
            .map_err(|error| line(&error))?;
        let info = Self::change(&groups, |handle| {
            handle
                .reload_component(&loaded, origin)
                .map_err(|error| line(&error))
        })?;
        let signed_by = evidence.signed_by().map(ToString::to_string);
        self.remember(evidence);
        if let (Some(state), Some(hash)) = (state.as_mut(), kept) {
            state
                .activate_kept(info.family, hash, origin)
                .map_err(|error| {
                    format!("{origin} serves, but will not after a restart: {error}")
                })?;
            // Its faults may have taken it out of service by now, when `record_return` could not have its say.
            let serves = groups.iter().find_map(|group| {
                let status = group.handle.status();
                status.pending.or(status.active)
            });
            if let Some(serves) = serves.filter(|serves| serves.version != info.version) {
                record(state, &serves).map_err(|error| error.to_string())?;
            }
        }
        let mut answer = value(&info)?;
        answer["signed_by"] = json!(signed_by);
        Ok(answer)
    }

    fn rollback(&self, backend: &str) -> Result<Value, String> {
        let groups = self.groups_of(backend)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for group in &groups {
            if let Some(previous) = group.handle.status().previous {
                self.permits(previous.component)?;
            }
        }
        let info = Self::change(&groups, |handle| {
            handle.rollback().map_err(|error| error.to_string())
        })?;
        if let Some(state) = state.as_mut() {
            let recorded = record(state, &info);
            recorded.map_err(|error| {
                format!("{backend} was rolled back, but will not be after a restart: {error}")
            })?;
        }
        value(&info)
    }

    fn builders(&self) -> Result<Value, String> {
        let builders = self
            .groups
            .iter()
            .map(|group| {
                let mut status = value(&group.handle.status())?;
                status["backend"] = json!(group.backend());
                status["layers"] = json!(group.layers.layer_names.len());
                status["layer_names"] = json!(group.layers.layer_names);
                status["kv_cache_group"] = json!(group.layers.kv_cache_group_id);
                Ok(status)
            })
            .collect::<Result<Vec<Value>, String>>()?;
        let mut table = self.startup.clone();
        table["builders"] = json!(builders);
        table["engine"] = engine(&(self.stats)());
        Ok(table)
    }
}

/// The engine's counts, and the nanoseconds of each part of all its steps.
pub fn engine(stats: &EngineStats) -> Value {
    let total = &stats.total;
    json!({
        "steps": stats.steps,
        "failed_steps": stats.failed_steps,
        "fallback_steps": stats.fallback_steps,
        "tokens_computed": stats.tokens_computed,
        "tokens_sampled": stats.tokens_sampled,
        "preemptions": stats.preemptions,
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

fn value(data: &impl serde::Serialize) -> Result<Value, String> {
    serde_json::to_value(data)
        .map_err(|error| format!("the answer could not be written as JSON ({error})"))
}
