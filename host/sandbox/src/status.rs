//! What a group's builder is doing, as people and tools read it.
//!
//! Must never know: the step loop. It reads what the step thread wrote.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;
use timetable_attention::FaultKind;
use timetable_types::Family;

use crate::{
    BundleFigures, CandidateStatus, ContentHash, FaultPolicy, LatencyFigures, Stage, Summary,
    VersionInfo,
};

/// Which builder serves a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum GroupState {
    /// No component: the plain builder serves.
    Plain = 0,
    /// The component serves.
    Active = 1,
    /// The component's instance died and the next is being prepared; the policy decides what serves.
    Recovering = 2,
    /// Too many faults, or one that is not forgiven: it is not called until the next reload or rollback.
    Quarantined = 3,
    /// It faulted and is left out for some steps.
    BackingOff = 4,
    /// It faulted and its policy is fail-closed: every step fails until a reload or a rollback.
    Closed = 5,
}

impl GroupState {
    pub(crate) fn from_u8(value: u8) -> GroupState {
        match value {
            1 => GroupState::Active,
            2 => GroupState::Recovering,
            3 => GroupState::Quarantined,
            4 => GroupState::BackingOff,
            5 => GroupState::Closed,
            _ => GroupState::Plain,
        }
    }

    /// The name used in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            GroupState::Plain => "plain",
            GroupState::Active => "active",
            GroupState::Recovering => "recovering",
            GroupState::Quarantined => "quarantined",
            GroupState::BackingOff => "backing_off",
            GroupState::Closed => "closed",
        }
    }
}

impl fmt::Display for GroupState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Equal faults of one version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FaultRecord {
    /// The kind.
    pub kind: FaultKind,
    /// What was seen.
    pub message: String,
    /// The version that misbehaved.
    pub version: ContentHash,
    /// How often.
    pub count: u64,
}

/// What one version did so far.
#[derive(Clone, Debug, Serialize)]
pub struct VersionFigures {
    /// The hash of component and configuration.
    pub version: ContentHash,
    /// What the builder calls itself.
    pub name: String,
    /// Where it stands: active, previous, or the stage of a candidate.
    pub stage: Stage,
    /// Steps that it built and that were served so.
    pub steps: u64,
    /// Times of its builds, verification not included.
    pub build: LatencyFigures,
    /// Times of verifying what it built.
    pub verify: LatencyFigures,
    /// The largest split count of each step.
    pub splits: Summary,
    /// The work items of each step.
    pub work_items: Summary,
    /// Its faults, by kind.
    pub faults: BTreeMap<&'static str, u64>,
}

/// The state of one attention group's builder.
#[derive(Clone, Debug, Serialize)]
pub struct BuilderStatus {
    /// The group's name, as the engine gave it.
    pub group: String,
    /// The family.
    pub family: Family,
    /// Which builder serves.
    pub state: GroupState,
    /// What is done about faults.
    pub policy: FaultPolicy,
    /// The version in service. None: the plain builder.
    pub active: Option<VersionInfo>,
    /// The version that takes over at the next step boundary.
    pub pending: Option<VersionInfo>,
    /// The version that a rollback returns to.
    pub previous: Option<VersionInfo>,
    /// The version that is being tried, or was tried last, until the next reload.
    pub candidate: Option<CandidateStatus>,
    /// Candidates that got into service.
    pub activations: u64,
    /// Candidates that were withdrawn.
    pub withdrawals: u64,
    /// Steps that the version in service built.
    pub steps: u64,
    /// Steps that the plain builder built, in all.
    pub plain_steps: u64,
    /// Those of them that it built although there is a component, by reason: fault, declined, backing_off, quarantined, recovering.
    pub fallbacks: BTreeMap<&'static str, u64>,
    /// What the version in service, the one being tried and the one before did so far.
    pub versions: Vec<VersionFigures>,
    /// Steps that failed, in all: nobody had acceptable metadata, or the policy left none to the plain builder.
    pub failed_steps: u64,
    /// Steps in which the component was left out after faults, in all.
    pub backoff_steps: u64,
    /// How often a version was quarantined.
    pub quarantines: u64,
    /// How often the last good version took over by itself.
    pub returns: u64,
    /// Sampled steps that were built again by a fresh instance.
    pub reruns: u64,
    /// Median time of a build, in nanoseconds, verification not included. None before the first.
    pub build_p50_ns: Option<u64>,
    /// 99th percentile of it.
    pub build_p99_ns: Option<u64>,
    /// Median time of verifying what it built, in nanoseconds.
    pub verify_p50_ns: Option<u64>,
    /// 99th percentile of it.
    pub verify_p99_ns: Option<u64>,
    /// The largest split count of each step.
    pub splits: Summary,
    /// The work items of each step: (row, split) pairs of FLASH_ATTN, the work list of FLASHINFER.
    pub work_items: Summary,
    /// Faults of the version in service, by kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// Faults of all versions, by kind.
    pub all_faults: BTreeMap<&'static str, u64>,
    /// The last distinct faults of any version, oldest first.
    pub fault_records: Vec<FaultRecord>,
    /// Fault bundles of the whole sandbox.
    pub bundles: BundleFigures,
    /// Ticker threads of the sandbox's watchdog that were dead or stuck, and replaced.
    pub watchdog_restarts: u64,
    /// How many of them were stuck.
    pub watchdog_stalls: u64,
}
