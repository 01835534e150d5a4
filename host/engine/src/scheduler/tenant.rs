//! A tenant as the scheduler has it: its weight, its waiting requests, and its part of the step that is being scheduled. This
//! module must never know a name.

use std::collections::VecDeque;

use super::shares::Claim;
use crate::{kv::BlockHash, request::RequestKey};

/// Index of a tenant in the scheduler's table. The first one stands for requests of nobody in particular.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantIndex(pub u32);

impl TenantIndex {
    /// As an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What the scheduler knows of a tenant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TenantShare {
    /// Its weight where tenants compete; above 0.
    pub weight: f64,
    /// Whose builder serves it: tenants of equal slots stand together in a step.
    pub slot: u32,
}

/// Who builds for a segment. Rows stand in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentKey {
    /// The slot.
    pub slot: u32,
    /// The version that the slot tries, instead of the one in service.
    pub is_candidate: bool,
}

impl Default for TenantShare {
    /// Weight 1, the first slot.
    fn default() -> Self {
        Self {
            weight: 1.0,
            slot: 0,
        }
    }
}

/// Whose request it is. The default: nobody's in particular.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// Who is charged.
    pub tenant: TenantIndex,
    /// Whose prefixes it shares: the parent of its first block's name.
    pub prefix_root: BlockHash,
}

/// A tenant's requests, and its part of the step that is being scheduled.
#[derive(Debug)]
pub(super) struct Tenant {
    pub(super) share: TenantShare,
    /// Does its slot's candidate serve it?
    pub(super) is_candidate: bool,
    pub(super) waiting: VecDeque<RequestKey>,
    pub(super) num_running: usize,
    pub(super) claim: Claim,
    /// Tokens of this step that it may still have.
    pub(super) left: usize,
    /// Tokens of this step that it has.
    pub(super) scheduled: usize,
    /// Blocks that its running requests hold, where a victim is looked for.
    pub(super) num_blocks: usize,
    /// Does another segment have this turn?
    pub(super) waits: bool,
    /// Did it have work when the last step was scheduled?
    pub(super) was_at_work: bool,
}

impl Tenant {
    pub(super) fn new(share: TenantShare) -> Self {
        Self {
            share,
            is_candidate: false,
            waiting: VecDeque::new(),
            num_running: 0,
            claim: Claim::default(),
            left: 0,
            scheduled: 0,
            num_blocks: 0,
            waits: false,
            was_at_work: false,
        }
    }

    pub(super) fn segment(&self) -> SegmentKey {
        SegmentKey {
            slot: self.share.slot,
            is_candidate: self.is_candidate,
        }
    }

    pub(super) fn is_at_work(&self) -> bool {
        self.num_running > 0 || !self.waiting.is_empty()
    }

    pub(super) fn blocks_for_weight(&self) -> f64 {
        self.num_blocks as f64 / self.share.weight
    }

    pub(super) fn rows_for_weight(&self) -> f64 {
        self.num_running as f64 / self.share.weight
    }
}
