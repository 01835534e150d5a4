//! Which attention groups of a step build their metadata, and which take another group's and swap the block table.
//! It must never know what metadata looks like.
//!
//! Source: vLLM 0.33 `build_attn_metadata`, its cache of metadata by spec and builder.

use timetable_types::{KvCacheSpec, KvCacheSpecKind};

/// Whose loop over groups applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunnerGeneration {
    /// The first: caches for every spec, never while a graph is captured.
    V1,
    /// The second: caches for Mamba specs only, during capture too.
    V2,
}

/// What the loop asks of a group.
#[derive(Clone, Copy, Debug)]
pub struct GroupReuse<'a> {
    /// The group's spec.
    pub spec: &'a KvCacheSpec,
    /// What tells one kind of builder from another: its class, or a component's version.
    pub builder: &'a str,
    /// The builder's own word.
    pub supports_update_block_table: bool,
}

/// What the loop does for a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupAction {
    /// Builds.
    Build,
    /// Calls `update_block_table` on the metadata of that earlier group.
    UpdateBlockTable {
        /// Index of the group that built.
        from: usize,
    },
}

/// What each group does in a step, in order. A group reuses the first earlier one of equal spec and builder that built.
#[must_use]
pub fn plan_group_reuse(
    groups: &[GroupReuse<'_>],
    runner: RunnerGeneration,
    capturing: bool,
) -> Vec<GroupAction> {
    let may_reuse = |group: &GroupReuse<'_>| {
        group.supports_update_block_table
            && match runner {
                RunnerGeneration::V1 => !capturing,
                RunnerGeneration::V2 => group.spec.kind == KvCacheSpecKind::Mamba,
            }
    };
    groups
        .iter()
        .enumerate()
        .map(|(index, group)| {
            let same =
                |other: &GroupReuse<'_>| other.builder == group.builder && other.spec == group.spec;
            match groups[..index]
                .iter()
                .position(|other| may_reuse(other) && same(other))
            {
                Some(from) if may_reuse(group) => GroupAction::UpdateBlockTable { from },
                _ => GroupAction::Build,
            }
        })
        .collect()
}
