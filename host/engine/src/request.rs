//! One request as the scheduler sees it: its tokens, how many of them have keys and values, and the blocks that hold those.
//!
//! This module must never know text, sampling or who is waiting for the answer.

use crate::{kv::RequestBlocks, scheduler::TenantIndex};

/// A request inside the scheduler: an index that is reused after the request has ended. Rows, samplers and streams are found
/// by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestKey(pub u32);

impl RequestKey {
    /// As an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// State of one request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Prompt, then output.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    /// Tokens known when the request was (re)admitted: those before it are prefill.
    pub(crate) prefill_len: usize,
    pub(crate) num_computed: usize,
    /// Tokens after `tokens` that steps in flight choose.
    pub(crate) num_pending: usize,
    /// Stands for the last of them in the step that is submitted next: its id where it is known all the same, else a
    /// [feed reference](crate::batch::feed_reference).
    pub(crate) feed: i32,
    /// The host chooses its tokens, from logits that come to it: a device cannot go on before it has.
    pub(crate) waits_for_choice: bool,
    /// What may follow all of these: proposed, not chosen.
    pub(crate) drafts: Vec<u32>,
    /// No further token once there are this many.
    pub(crate) max_total_tokens: usize,
    pub(crate) blocks: RequestBlocks,
    pub(crate) tenant: TenantIndex,
    /// Place in the order in which requests were taken in.
    pub(crate) arrival: u64,
    /// Index in the table of running requests (`req_idx`); none while waiting.
    pub(crate) slot: Option<u32>,
    /// Its recurrent state, from 1, whether the model has such or not; 0 while waiting.
    pub(crate) state: u32,
    /// Changes with each admission, so that a table row knows when its occupant's blocks are others.
    pub(crate) epoch: u64,
    pub(crate) num_preemptions: u32,
}

impl Request {
    /// Prompt, then output.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens of the prompt.
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Tokens after the prompt.
    pub fn output(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }

    /// Tokens whose keys and values are in the cache.
    pub fn num_computed(&self) -> usize {
        self.num_computed
    }

    /// Known tokens, and those that steps in flight choose.
    pub(crate) fn num_tokens_with_pending(&self) -> usize {
        self.tokens.len() + self.num_pending
    }

    /// Tokens that may follow, which the next step verifies as far as it has room for them.
    pub fn drafts(&self) -> &[u32] {
        &self.drafts
    }

    /// Blocks held, in the order of the tokens.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks.ids
    }

    /// Whose it is.
    pub fn tenant(&self) -> TenantIndex {
        self.tenant
    }

    /// Index in the table of running requests; none while waiting.
    pub fn slot(&self) -> Option<u32> {
        self.slot
    }

    /// Its recurrent state, where the model has such: unique among running requests, from 1; 0 while waiting.
    pub fn state(&self) -> u32 {
        self.state
    }

    /// Does the next step compute tokens that were known at admission? The field's `is_prefilling`.
    pub fn is_prefilling(&self) -> bool {
        self.num_computed < self.prefill_len
    }

    /// How often it lost its blocks to another.
    pub fn num_preemptions(&self) -> u32 {
        self.num_preemptions
    }

    /// Prompt and output together have no more tokens than these.
    pub fn max_total_tokens(&self) -> usize {
        self.max_total_tokens
    }

    /// Is there no room for another token, by its own limit or the context's?
    pub fn is_at_limit(&self) -> bool {
        self.tokens.len() >= self.max_total_tokens
    }

    /// Can it not go on before a pending token is known: because that is its last, or because the host chooses it?
    pub(crate) fn waits_for_token(&self) -> bool {
        let is_last = self.num_tokens_with_pending() >= self.max_total_tokens;
        self.num_pending > 0 && (self.waits_for_choice || is_last)
    }
}
