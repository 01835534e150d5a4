//! The step thread's part in trying a candidate: it shows steps to a shadow, lets a canary serve its share, and puts a candidate
//! that passed into service.
//!
//! Must never know: what a gate is; it counts, and looks at the candidate's stage.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use timetable_attention::FaultKind;

use super::{Arm, GroupBuilder, Held};
use crate::{
    FaultPolicy, Stage, TenantName,
    candidate::{self, Candidate},
    policy::Verdict,
    shadow::Tap,
    shared::{Ready, Version},
    stage::in_share,
};

/// A candidate on its way to the step thread, or with it.
#[allow(clippy::large_enum_variant, reason = "one a group")]
pub(crate) enum Trial {
    /// It is shown steps.
    Shadow(Tap),
    /// It serves some steps; or all of them from now on, if it has passed.
    Canary(Canary),
}

/// A candidate with its instances.
pub(crate) struct Canary {
    pub(crate) candidate: Arc<Candidate>,
    pub(crate) held: Held,
    /// Does it serve this step?
    pub(crate) serves: bool,
    /// Step boundaries since it came.
    step: u64,
    /// Its cost was handed over for judgement.
    judged: bool,
}

impl Trial {
    pub(crate) fn canary(candidate: Arc<Candidate>, ready: Ready, policy: &FaultPolicy) -> Trial {
        Trial::Canary(Canary {
            candidate,
            held: Held::of(ready, policy),
            serves: false,
            step: 0,
            judged: false,
        })
    }
}

impl Canary {
    pub(super) fn tenants(&self) -> &[TenantName] {
        let canary = self.candidate.plan.canary.as_ref();
        canary.map_or(&[], |canary| canary.tenants.as_slice())
    }
}

impl GroupBuilder {
    /// A candidate comes. True if launch promises may have changed.
    pub(super) fn begin_trial(&mut self, trial: Trial) -> bool {
        let is_canary = matches!(trial, Trial::Canary(_));
        // The one before was withdrawn, or is this one's shadow.
        self.end_trial();
        self.trial = Some(trial);
        is_canary
    }

    /// A step begins while a candidate is tried. True if it is in service from this step on.
    pub(super) fn go_on_with_trial(&mut self) -> bool {
        match &mut self.trial {
            None => false,
            Some(Trial::Shadow(tap)) => {
                if tap.is_done() || !tap.candidate.is_tried() {
                    self.trial = None;
                }
                false
            }
            Some(Trial::Canary(canary)) => {
                if !canary.candidate.is_tried() {
                    self.withdrawn();
                    return false;
                }
                if canary.candidate.may_serve() {
                    return self.promote();
                }
                let wanted = canary.candidate.plan.canary.as_ref();
                let per_mille = wanted.map_or(0, |wanted| wanted.per_mille);
                canary.serves = in_share(canary.step, per_mille);
                canary.step += 1;
                if let Some((version, spare)) = self.shared.candidate_spares.take() {
                    if !canary.held.lacks_spare_of(&version) {
                        self.bury(spare);
                    } else if canary.held.take_spare(spare) {
                        self.order_spare(Arm::Candidate);
                    }
                }
                false
            }
        }
    }

    /// May the candidate be called for this step? Not where every step is to fail; where it backs off, what serves goes on.
    pub(super) fn candidate_may_serve(&mut self, is_step: bool) -> bool {
        let closed = self
            .current
            .as_ref()
            .is_some_and(|current| current.standing.out() == Some(Verdict::Close));
        let Some(held) = self.held(Arm::Candidate).filter(|_| !closed) else {
            return false;
        };
        let may = match is_step {
            true => held.standing.begin_step(),
            false => held.standing.may_be_called(),
        };
        may && held.instance.is_some()
    }

    /// Which arm `version` is, if it still is one.
    pub(super) fn arm_of(&mut self, version: &Arc<Version>) -> Option<Arm> {
        [Arm::Active, Arm::Candidate].into_iter().find(|arm| {
            self.held(*arm)
                .is_some_and(|held| Arc::ptr_eq(&held.version, version))
        })
    }

    /// A step was built well by `arm` while there is a canary.
    pub(super) fn count_canary(&mut self, arm: Arm, nanoseconds: u64) {
        let Some(Trial::Canary(canary)) = &mut self.trial else {
            return;
        };
        let counts = &canary.candidate.canary;
        if arm == Arm::Active {
            counts.costs.active.record(nanoseconds);
            return;
        }
        counts.costs.candidate.record(nanoseconds);
        let steps = counts.steps.fetch_add(1, Relaxed) + 1;
        let wanted = canary.candidate.plan.canary.as_ref();
        if !canary.judged && wanted.is_some_and(|wanted| steps >= u64::from(wanted.steps)) {
            canary.judged = true;
            let (shared, candidate) = (self.shared.clone(), canary.candidate.clone());
            self.shared
                .sandbox
                .workshop()
                .run(move || candidate::judge_canary(&shared, &candidate));
        }
    }

    /// The candidate faulted; `goes_on` if the fault policy would let it. Its gate may withdraw it.
    pub(super) fn candidate_faulted(&mut self, kind: FaultKind, goes_on: bool) {
        let Some(Trial::Canary(canary)) = &self.trial else {
            return;
        };
        if canary.candidate.forgives(Stage::Canary, kind, goes_on) {
            self.order_spare(Arm::Candidate);
        } else {
            self.withdrawn();
        }
    }

    /// It passed, and so did its companions.
    fn promote(&mut self) -> bool {
        match self.trial.take() {
            Some(Trial::Canary(canary)) if canary.candidate.advance(Stage::Active) => {
                self.install(canary.held);
                self.tell(&canary.candidate);
                // One that was ordered for a candidate may not find it any more.
                if self
                    .current
                    .as_ref()
                    .is_some_and(|held| held.spare.is_none())
                {
                    self.order_spare(Arm::Active);
                }
                true
            }
            trial => {
                self.trial = trial;
                self.withdrawn();
                false
            }
        }
    }

    /// The candidate was withdrawn: its instances are dropped on the reload thread, and who wants to know is told there.
    fn withdrawn(&mut self) {
        if let Some(Trial::Canary(canary)) = &self.trial {
            self.tell(&canary.candidate);
        }
        self.end_trial();
    }

    fn end_trial(&mut self) {
        if let Some(Trial::Canary(canary)) = self.trial.take() {
            self.shared.sandbox.workshop().run(move || drop(canary));
        }
    }

    fn tell(&self, candidate: &Arc<Candidate>) {
        let (shared, candidate) = (self.shared.clone(), candidate.clone());
        self.shared
            .sandbox
            .workshop()
            .run(move || candidate::tell(&shared, &candidate));
    }
}
