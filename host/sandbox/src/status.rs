//! What a group's builder is doing, as people and tools read it.
//!
//! Must never know: the step loop. It reads what the step thread wrote.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;
use timetable_attention::FaultKind;
use timetable_types::Family;

use crate::{ContentHash, Summary, VersionInfo};

/// Which builder serves a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum GroupState {
    /// No component: the plain builder serves.
    Plain = 0,
    /// The component serves.
    Active = 1,
    /// The component's instance died and the next is being prepared; the plain builder serves.
    Recovering = 2,
    /// Too many faults in a row: the plain builder serves until the next reload or rollback.
    Suspended = 3,
}

impl GroupState {
    pub(crate) fn from_u8(value: u8) -> GroupState {
        match value {
            1 => GroupState::Active,
            2 => GroupState::Recovering,
            3 => GroupState::Suspended,
            _ => GroupState::Plain,
        }
    }

    /// The name used in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            GroupState::Plain => "plain",
            GroupState::Active => "active",
            GroupState::Recovering => "recovering",
            GroupState::Suspended => "suspended",
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

/// The state of one attention group's builder.
#[derive(Clone, Debug, Serialize)]
pub struct BuilderStatus {
    /// The group's name, as the engine gave it.
    pub group: String,
    /// The family.
    pub family: Family,
    /// Which builder serves.
    pub state: GroupState,
    /// The version in service. None: the plain builder.
    pub active: Option<VersionInfo>,
    /// The version that takes over at the next step boundary.
    pub pending: Option<VersionInfo>,
    /// The version that a rollback returns to.
    pub previous: Option<VersionInfo>,
    /// Steps that the version in service built.
    pub steps: u64,
    /// Steps that the plain builder built, in all.
    pub plain_steps: u64,
    /// Median time of a build, in nanoseconds, verification not included. None before the first.
    pub build_p50_ns: Option<u64>,
    /// 99th percentile of it.
    pub build_p99_ns: Option<u64>,
    /// The largest split count of each step.
    pub splits: Summary,
    /// The work items of each step: (row, split) pairs of FLASH_ATTN, the work list of FLASHINFER.
    pub work_items: Summary,
    /// Faults of the version in service, by kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// The last distinct faults of any version, oldest first.
    pub fault_records: Vec<FaultRecord>,
}
