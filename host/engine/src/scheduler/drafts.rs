//! Draft tokens of rows: how many of them a step takes, and what is left of them once it was computed.
//!
//! Drafts have what nobody else needs: no row goes without its next token for them, and no request loses blocks. This module must
//! never know where they come from.

use super::Scheduler;
use crate::request::RequestKey;

impl Scheduler {
    /// What may follow a request's tokens. One that has a pending token, or whose prompt is not computed yet, has none.
    pub fn set_drafts(&mut self, key: RequestKey, drafts: &[u32]) {
        let request = self.requests[key.index()].as_mut().expect("not ended");
        request.drafts.clear();
        let follows = request.num_pending == 0 && request.num_computed + 1 == request.tokens.len();
        if follows {
            request.drafts.extend_from_slice(drafts);
        }
    }

    /// The row with `num_drafts` drafts was computed, and `num_accepted` of them are what the model chooses: the others' keys and
    /// values will be overwritten. Do this before the tokens are appended.
    pub fn settle_drafts(&mut self, key: RequestKey, num_drafts: usize, num_accepted: usize) {
        let request = self.requests[key.index()].as_mut().expect("not ended");
        request.num_computed -= num_drafts - num_accepted;
        request.drafts.clear();
    }

    /// Blocks for the drafts of `running[index]`, which has those of its first `end` tokens: for how many of them, with `room`
    /// tokens of the step left. A token and a block stay for each row that is to follow.
    pub(super) fn grow_for_drafts(&mut self, index: usize, end: usize, room: usize) -> usize {
        let key = self.running[index];
        let request = self.request(key);
        if request.drafts.is_empty() || end < request.tokens.len() {
            return 0;
        }
        let behind = self.running.len() - 1 - index;
        let wanted = request.drafts.len().min(room.saturating_sub(behind));
        let spare = self.kv.pool().num_free().saturating_sub(behind);
        let held = (request.blocks.ids.len() + spare).saturating_mul(self.kv.block_size());
        let num_drafts = wanted.min(held - end);
        let grown = self.grow(key, end + num_drafts);
        debug_assert!(grown, "counted above");
        num_drafts
    }
}
