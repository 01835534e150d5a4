//! A version with what the step thread owns of it, and what a fault or another version makes of that.
//!
//! Must never know: what a step is built from.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use timetable_attention::{BuildFault, FaultKind};

use super::{Arm, GroupBuilder};
use crate::{
    FaultPolicy, GroupState, WasmBuilder,
    policy::{Standing, Verdict},
    reload,
    shared::{Evidence, Ready, Retired, Version},
};

/// A version with its instances and its record.
pub(crate) struct Held {
    pub(crate) version: Arc<Version>,
    /// None while the next instance is being prepared.
    pub(crate) instance: Option<WasmBuilder>,
    pub(crate) spare: Option<WasmBuilder>,
    pub(crate) standing: Standing,
    /// Why it is out of service, for the steps that fail because it is.
    pub(crate) last_fault: Option<BuildFault>,
}

impl Held {
    pub(crate) fn of(ready: Ready, policy: &FaultPolicy) -> Held {
        Held {
            version: ready.version,
            instance: Some(ready.instance),
            spare: ready.spare,
            standing: Standing::new(policy),
            last_fault: None,
        }
    }

    pub(super) fn lacks_spare_of(&self, version: &Arc<Version>) -> bool {
        Arc::ptr_eq(&self.version, version) && self.spare.is_none()
    }

    /// True if it is the next instance at once, so that another spare is wanted.
    pub(super) fn take_spare(&mut self, spare: WasmBuilder) -> bool {
        self.spare = Some(spare);
        let wanted = self.instance.is_none() && self.standing.out().is_none();
        if wanted {
            self.instance = self.spare.take();
        }
        wanted
    }
}

impl GroupBuilder {
    /// Records a fault. Any but a declined batch ends the instance: the spare takes its place, and the dead one is dropped
    /// by the reload thread.
    pub(super) fn fault(&mut self, arm: Arm, fault: &BuildFault, evidence: Option<Evidence<'_>>) {
        let policy = **self.shared.policy.load();
        let shared = self.shared.clone();
        let Some(held) = self.held(arm) else {
            return;
        };
        let (kind, message) = match fault {
            BuildFault::Declined(error) => (FaultKind::Declined, &error.message),
            BuildFault::Fault { kind, message } => (*kind, message),
        };
        shared.note(&held.version, kind, message);
        if kind == FaultKind::Declined {
            return;
        }
        if let Some(evidence) = evidence {
            shared.keep(&held.version, fault, evidence);
        }
        let dead = held.instance.take();
        held.last_fault = Some(fault.clone());
        let verdict = held.standing.fault(kind, &policy);
        let goes_on = verdict == Verdict::GoOn;
        if goes_on {
            held.instance = held.spare.take();
        }
        match arm {
            Arm::Candidate => self.candidate_faulted(kind, goes_on),
            Arm::Active => {
                match verdict {
                    Verdict::GoOn => self.order_spare(arm),
                    Verdict::Quarantine => {
                        let faults = held.standing.recent_faults();
                        shared.quarantine(&held.version, kind, faults, &policy);
                    }
                    Verdict::Close => tracing::error!(
                        group = %shared.name, version = %held.version.info.version, %kind,
                        "the builder faulted and its policy is fail-closed: every step fails until a reload or a rollback"
                    ),
                }
                self.set_state();
            }
        }
        if let Some(dead) = dead {
            self.bury(dead);
        }
    }

    /// Puts a version into service and hands the one before to the reload thread, which keeps it ready for a rollback.
    pub(super) fn install(&mut self, held: Held) {
        self.shared.active.store(Some(held.version.clone()));
        let before = self.current.replace(held);
        self.set_state();
        if let Some(Held {
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

    pub(super) fn set_state(&self) {
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

    pub(super) fn bury(&self, instance: WasmBuilder) {
        self.shared.sandbox.workshop().run(move || drop(instance));
    }

    pub(super) fn order_spare(&mut self, arm: Arm) {
        if let Some(held) = self.held(arm) {
            let version = held.version.clone();
            let shared = self.shared.clone();
            self.shared
                .sandbox
                .workshop()
                .run(move || reload::refill(&shared, &version));
        }
    }
}
