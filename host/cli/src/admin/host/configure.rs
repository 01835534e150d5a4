//! `timetable config apply`: the file is read anew, what can change while the host runs does, and what cannot is named.
//!
//! What may fail happens first, and is withdrawn if something after it fails; so a change is made whole or not at all.

use std::path::Path;
use std::sync::{PoisonError, RwLockWriteGuard};

use serde_json::{Value, json};
use timetable_provenance::Trust;
use timetable_sandbox::FaultDir;

use super::{Control, Host, Submission};
use crate::config::{self, Config, Effective, File, Flags};
use crate::provenance;

/// What a host was started with, and what is in force now.
pub struct Settings {
    /// The flags, which come before any file.
    pub flags: Flags,
    /// In force.
    pub effective: Effective,
}

impl Settings {
    /// What `text`, which lies at `path`, would make of the host at its next start, and what it makes of it now.
    fn read(&self, path: &Path, text: String) -> Result<(Effective, Effective), String> {
        let refused = |problems: &[config::Problem]| config::refused(Some(path), problems);
        let (file, problems) = File::parse(path, text);
        if !problems.is_empty() {
            return Err(refused(&problems).to_string());
        }
        let flags = self
            .flags
            .layer(Some(&file.layer))
            .map_err(|e| e.to_string())?;
        let wanted = Effective::new(Some(&file), &flags).map_err(|p| refused(&p).to_string())?;
        let now = self.effective.live(&wanted)?;
        Ok((wanted, now))
    }
}

impl Host {
    /// Applies the configuration `text`, which lies at `path`.
    ///
    /// # Errors
    /// The file has problems, or a builder does not go into service with what it says; then nothing has changed.
    pub(super) fn apply(&self, path: &Path, text: String) -> Result<Value, String> {
        let mut settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        let settings = settings
            .as_mut()
            .ok_or("this host was started without settings; restart it with --config FILE")?;
        let (wanted, now) = settings.read(path, text)?;
        let before = &settings.effective;
        let said: Vec<Value> = before
            .difference(&wanted)
            .into_iter()
            .map(|change| {
                json!({
                    "setting": change.key.to_string(),
                    "from": change.from,
                    "to": change.to,
                    "live": change.live,
                })
            })
            .collect();

        let faults = self.open_faults(&before.config, &now.config)?;
        let trust = provenance::trust(&now.config.provenance).map_err(|error| error.to_string())?;
        // New components are held against the new policy.
        let trust = std::mem::replace(&mut *self.trust_mut(), trust);
        let versions = self
            .change_builders(&before.config, &now.config)
            .inspect_err(|_| *self.trust_mut() = trust)?;
        // From here on nothing fails.
        match faults {
            Some(Some(dir)) => self.sandbox.keep_faults_in(dir),
            Some(None) => self.sandbox.keep_no_faults(),
            None => {}
        }
        for group in self.groups.iter() {
            let own = now.config.slot(group.backend(), group.tenant.as_ref());
            let policy = own.policy;
            if policy != group.handle.policy()
                && let Err(error) = group.handle.set_policy(policy)
            {
                tracing::error!(group = group.handle.group(), %error, "the fault policy stays");
            }
        }
        *self.plan.write().unwrap_or_else(PoisonError::into_inner) = now.config.reload.plan();
        settings.effective = now;
        Ok(json!({ "changes": said, "versions": versions }))
    }

    fn trust_mut(&self) -> RwLockWriteGuard<'_, Trust> {
        self.trust.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The fault directory, if something about it changes: none within is none from now on.
    #[allow(clippy::option_option, reason = "whether it changes, and to what")]
    fn open_faults(
        &self,
        before: &Config,
        now: &Config,
    ) -> Result<Option<Option<FaultDir>>, String> {
        if before.faults == now.faults {
            return Ok(None);
        }
        let dir = now.faults.dir.as_ref();
        dir.map(|path| FaultDir::open(path, now.faults.limits))
            .transpose()
            .map(Some)
            .map_err(|error| error.to_string())
    }

    /// A new version for each slot whose component or options change; all of them, or none.
    fn change_builders(&self, before: &Config, now: &Config) -> Result<Vec<Value>, String> {
        let mut changes = Vec::new();
        let mut seen = Vec::new();
        for group in self.groups.iter() {
            let slot = (group.backend(), group.tenant.as_ref());
            if seen.contains(&slot) {
                continue;
            }
            seen.push(slot);
            let of = |config: &Config| config.slot(slot.0, slot.1);
            let (old, new) = (of(before), of(now));
            // What serves goes on where none is named any more.
            let other = (&old.component, &old.signature) != (&new.component, &new.signature);
            let component = match other {
                true => new.fetch().map_err(|error| error.to_string())?,
                false => None,
            };
            let options = (old.options != new.options).then(|| new.options());
            if component.is_some() || options.is_some() {
                changes.push((slot, component, options));
            }
        }
        let mut made = Vec::new();
        let mut changed = Vec::new();
        for ((backend, tenant), component, options) in changes {
            let origin = component.as_ref().map_or("", |(origin, _)| origin);
            let fetched = component.as_ref().map(|(_, fetched)| fetched);
            let submission = Submission {
                backend,
                tenant,
                origin,
                component: fetched.map(|fetched| &fetched.component[..]),
                signature: fetched.and_then(|fetched| fetched.signature.as_deref()),
                options,
                plan: Some(now.reload.plan()),
            };
            match self.reload(submission) {
                Ok(version) => {
                    made.push(json!({ "backend": backend, "tenant": tenant, "version": version }));
                    changed.push((backend, tenant));
                }
                Err(message) => {
                    for (backend, tenant) in changed {
                        if let Err(error) = self.rollback(backend, tenant) {
                            tracing::error!(%backend, ?tenant, %error, "a half-made change was not withdrawn");
                        }
                    }
                    return Err(message);
                }
            }
        }
        Ok(made)
    }
}
