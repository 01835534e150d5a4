//! A version that is being tried: its stage, what was counted of it, and who is told when the stage changes.
//!
//! The step thread, the shadow thread and the reload thread all move it, by one atomic exchange each; what is final stays.
//! Must never know: how a step is built, or where instances are.

use std::sync::{
    Arc, Mutex, OnceLock,
    atomic::{
        AtomicBool, AtomicU8, AtomicU64, AtomicUsize,
        Ordering::{AcqRel, Acquire, Relaxed, Release},
    },
};

use serde::Serialize;
use timetable_attention::FaultKind;

use crate::{
    Gates, LatencyHistogram, ReloadPlan, Stage, VersionInfo, Withdrawal,
    mailbox::lock,
    shared::{Shared, Version},
};

/// Candidates of several groups that get into service together or not at all: what one reload submits. Cheap to clone.
#[derive(Clone)]
pub struct Companions(Arc<Together>);

struct Together {
    not_passed: AtomicUsize,
    withdrawn: AtomicBool,
}

impl Companions {
    /// Of so many groups, each of which gets one of the candidates.
    pub fn of(groups: usize) -> Companions {
        Companions(Arc::new(Together {
            not_passed: AtomicUsize::new(groups),
            withdrawn: AtomicBool::new(false),
        }))
    }
}

/// Build times of the version in service and of the candidate, side by side.
#[derive(Default)]
pub(crate) struct Costs {
    pub(crate) active: LatencyHistogram,
    pub(crate) candidate: LatencyHistogram,
}

/// What was counted in shadow. `steps` is the step thread's, everything else the shadow thread's.
#[derive(Default)]
pub(crate) struct ShadowCounts {
    pub(crate) steps: AtomicU64,
    pub(crate) skipped: AtomicU64,
    pub(crate) observed: AtomicU64,
    pub(crate) declined: AtomicU64,
    pub(crate) differences: AtomicU64,
    pub(crate) active_fuel: AtomicU64,
    pub(crate) candidate_fuel: AtomicU64,
    pub(crate) costs: Costs,
    pub(crate) first_difference: Mutex<Option<String>>,
}

/// What was counted in canary, by the step thread.
#[derive(Default)]
pub(crate) struct CanaryCounts {
    pub(crate) steps: AtomicU64,
    pub(crate) costs: Costs,
}

/// A version and how far it has come.
pub(crate) struct Candidate {
    pub(crate) version: Arc<Version>,
    pub(crate) plan: ReloadPlan,
    pub(crate) shadow: ShadowCounts,
    pub(crate) canary: CanaryCounts,
    faults: AtomicU64,
    companions: Companions,
    stage: AtomicU8,
    passed: AtomicBool,
    withdrawal: OnceLock<Withdrawal>,
    /// Its end was told.
    told: AtomicBool,
}

impl Candidate {
    pub(crate) fn new(
        version: Arc<Version>,
        plan: ReloadPlan,
        companions: Companions,
    ) -> Candidate {
        Candidate {
            version,
            plan,
            shadow: ShadowCounts::default(),
            canary: CanaryCounts::default(),
            faults: AtomicU64::new(0),
            companions,
            stage: AtomicU8::new(Stage::Checked as u8),
            passed: AtomicBool::new(false),
            withdrawal: OnceLock::new(),
            told: AtomicBool::new(false),
        }
    }

    pub(crate) fn gates(&self) -> &Gates {
        &self.plan.gates
    }

    pub(crate) fn stage(&self) -> Stage {
        Stage::from_u8(self.stage.load(Acquire))
    }

    /// To the next stage. False if it was withdrawn meanwhile.
    pub(crate) fn advance(&self, to: Stage) -> bool {
        let moved = self.stage.fetch_update(AcqRel, Acquire, |stage| {
            let is_final = [Stage::Active as u8, Stage::Withdrawn as u8].contains(&stage);
            (!is_final).then_some(to as u8)
        });
        moved.is_ok()
    }

    /// It will not serve. False if it serves, or was withdrawn before.
    pub(crate) fn withdraw(&self, why: Withdrawal) -> bool {
        if !self.advance(Stage::Withdrawn) {
            return false;
        }
        // Nobody else gets here.
        let _ = self.withdrawal.set(why);
        self.companions.0.withdrawn.store(true, Release);
        true
    }

    /// Is it still being tried? No longer, if a companion is not.
    pub(crate) fn is_tried(&self) -> bool {
        if self.companions.0.withdrawn.load(Acquire) {
            self.withdraw(Withdrawal::Companion);
        }
        !matches!(self.stage(), Stage::Active | Stage::Withdrawn)
    }

    /// It has kept to every gate.
    pub(crate) fn pass(&self) {
        if !self.passed.swap(true, AcqRel) {
            self.companions.0.not_passed.fetch_sub(1, AcqRel);
        }
    }

    /// Have it and all its companions kept to every gate?
    pub(crate) fn may_serve(&self) -> bool {
        self.passed.load(Acquire) && self.companions.0.not_passed.load(Acquire) == 0
    }

    /// Counts a fault, which withdraws it where its gate, or the group's fault policy, allows no more. False if it did.
    pub(crate) fn forgives(&self, stage: Stage, kind: FaultKind, policy_allows: bool) -> bool {
        let faults = self.faults.fetch_add(1, Relaxed) + 1;
        let most = self.gates().max_faults;
        if policy_allows && faults <= u64::from(most) {
            return true;
        }
        self.withdraw(Withdrawal::Faults {
            stage,
            kind,
            faults,
            most,
        });
        false
    }

    /// Why it was withdrawn. Whoever did so is about to say it.
    fn why(&self) -> &Withdrawal {
        self.withdrawal.wait()
    }

    pub(crate) fn status(&self) -> CandidateStatus {
        let stage = self.stage();
        let withdrawn = (stage == Stage::Withdrawn).then(|| self.why().to_string());
        let (shadow, canary) = (&self.shadow, &self.canary);
        let median = |histogram: &LatencyHistogram| histogram.quantile(0.5);
        CandidateStatus {
            version: self.version.info.clone(),
            stage,
            plan: self.plan.clone(),
            faults: self.faults.load(Relaxed),
            shadow: ShadowStatus {
                steps: shadow.steps.load(Relaxed),
                observed: shadow.observed.load(Relaxed),
                skipped: shadow.skipped.load(Relaxed),
                declined: shadow.declined.load(Relaxed),
                differences: shadow.differences.load(Relaxed),
                first_difference: lock(&shadow.first_difference).clone(),
                active_fuel: shadow.active_fuel.load(Relaxed),
                candidate_fuel: shadow.candidate_fuel.load(Relaxed),
                active_p50_ns: median(&shadow.costs.active),
                candidate_p50_ns: median(&shadow.costs.candidate),
            },
            canary: CanaryStatus {
                steps: canary.steps.load(Relaxed),
                active_p50_ns: median(&canary.costs.active),
                candidate_p50_ns: median(&canary.costs.candidate),
            },
            withdrawn,
        }
    }
}

/// A version that is being tried, or was tried last.
#[derive(Clone, Debug, Serialize)]
pub struct CandidateStatus {
    /// The version.
    pub version: VersionInfo,
    /// Where it stands: checked, shadow, canary, active or withdrawn.
    pub stage: Stage,
    /// How it gets into service.
    pub plan: ReloadPlan,
    /// Its faults in shadow and canary.
    pub faults: u64,
    /// What was counted in shadow.
    pub shadow: ShadowStatus,
    /// What was counted in canary.
    pub canary: CanaryStatus,
    /// Why it will not serve.
    pub withdrawn: Option<String>,
}

/// A candidate in shadow.
#[derive(Clone, Debug, Serialize)]
pub struct ShadowStatus {
    /// Steps that were served, of the plan's `shadow_steps`.
    pub steps: u64,
    /// Those that it built too and that were compared.
    pub observed: u64,
    /// Those that were not taken: the comparison was behind, or the step's tensors are larger than a sample may be.
    pub skipped: u64,
    /// Those that it declined.
    pub declined: u64,
    /// Those in which its metadata meant something else than what was served.
    pub differences: u64,
    /// What the first difference is.
    pub first_difference: Option<String>,
    /// Fuel of the version in service for the steps that both built on the shadow thread.
    pub active_fuel: u64,
    /// Its own fuel for the same.
    pub candidate_fuel: u64,
    /// Median build time of the version in service on the shadow thread.
    pub active_p50_ns: Option<u64>,
    /// Its own.
    pub candidate_p50_ns: Option<u64>,
}

/// A candidate in canary.
#[derive(Clone, Debug, Serialize)]
pub struct CanaryStatus {
    /// Steps that it served, of the plan's `canary.steps`.
    pub steps: u64,
    /// Median build time of the version in service meanwhile.
    pub active_p50_ns: Option<u64>,
    /// Its own.
    pub candidate_p50_ns: Option<u64>,
}

/// A candidate's stage has changed: says so in the log, and to whoever wants to know; the end once. On the reload thread or a
/// shadow's.
pub(crate) fn tell(shared: &Shared, candidate: &Candidate) {
    let (group, version) = (&shared.name, candidate.version.info.version);
    let stage = candidate.stage();
    if matches!(stage, Stage::Active | Stage::Withdrawn) && candidate.told.swap(true, AcqRel) {
        return;
    }
    match stage {
        Stage::Withdrawn => {
            shared.counts.withdrawals.fetch_add(1, Relaxed);
            tracing::warn!(%group, %version, "candidate withdrawn: {}", candidate.why());
        }
        Stage::Active => {
            shared.counts.activations.fetch_add(1, Relaxed);
            // What serves is what the next version is made of.
            shared.config.store(candidate.version.config.clone());
            tracing::info!(%group, %version, "the candidate serves");
        }
        stage => tracing::info!(%group, %version, "the candidate is in {stage}"),
    }
    shared.tell();
}

/// After the last step of a canary: keeps it to its cost gates. On the reload thread.
pub(crate) fn judge_canary(shared: &Shared, candidate: &Candidate) {
    let costs = &candidate.canary.costs;
    let (active, own) = (costs.active.quantile(0.5), costs.candidate.quantile(0.5));
    match candidate.gates().judge_time(Stage::Canary, active, own) {
        Some(why) => {
            if candidate.withdraw(why) {
                tell(shared, candidate);
            }
        }
        None => candidate.pass(),
    }
}
