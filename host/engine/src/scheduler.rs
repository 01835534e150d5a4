//! Which requests compute how many tokens in the next step.
//!
//! First come, first served, under three limits: rows, tokens of a step, blocks. Running requests first, in the order in
//! which they were admitted; then waiting ones, with as much of their prompt as the token budget leaves (chunked prefill).
//! When a running request finds no block, the youngest running request loses all of its blocks and is computed again later.
//!
//! A step may be scheduled while the one before it runs: a request whose token is not known yet counts as one token longer
//! (`num_pending`). Blocks that a request gives back meanwhile may be handed out at once, because a device runs steps in the order
//! in which they were submitted.
//!
//! The scheduler must never know the model, a tensor, or a metadata builder.

use std::collections::VecDeque;

use crate::{
    kv::{KvCacheManager, PrefixHit, RequestBlocks},
    request::{Request, RequestKey},
};

/// Limits of the scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerLimits {
    /// Rows of a step.
    pub max_num_seqs: usize,
    /// Tokens of a step.
    pub max_num_batched_tokens: usize,
    /// Tokens of a request, prompt and output.
    pub max_model_len: usize,
}

/// Why a request was refused before it started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddRequestError {
    /// Nothing to continue.
    #[error("the prompt has no tokens: give at least one (a begin-of-sequence token will do)")]
    EmptyPrompt,
    /// Nothing to produce.
    #[error("max_tokens is 0: ask for at least one token")]
    NoTokensAsked,
    /// The prompt fills the context.
    #[error(
        "the prompt has {prompt_len} tokens and the context holds {max_model_len}, one of them for the answer: shorten the \
         prompt or raise --max-model-len"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_len: usize,
        /// Tokens of the context.
        max_model_len: usize,
    },
    /// The whole cache is too small for it.
    #[error(
        "the request needs {needed} KV cache blocks of {block_size} tokens and the cache has {available}: lower max_tokens, \
         shorten the prompt, or give the cache more memory"
    )]
    NeverFits {
        /// Blocks for all of its tokens.
        needed: usize,
        /// Blocks of the cache, without the null block.
        available: usize,
        /// Tokens of a block.
        block_size: usize,
    },
}

/// One row of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduledRow {
    /// Whose row.
    pub key: RequestKey,
    /// Tokens computed in this step, at least 1.
    pub num_tokens: usize,
    /// Place in the order in which rows were scheduled.
    rank: u32,
}

/// A step's rows, decodes first.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// Rows in batch order.
    pub rows: Vec<ScheduledRow>,
    /// Requests that lost their blocks.
    pub preempted: Vec<RequestKey>,
    /// Sum of the rows' tokens.
    pub num_tokens: usize,
}

impl Schedule {
    /// Adds a row and keeps the sum.
    fn push(&mut self, key: RequestKey, num_tokens: usize) {
        let rank = self.rows.len() as u32;
        self.rows.push(ScheduledRow {
            key,
            num_tokens,
            rank,
        });
        self.num_tokens += num_tokens;
    }

    /// Single-token rows first, then by length, ties as scheduled: the recorded runner's order for rows without drafts.
    /// Unstable sorting with the rank as the last key, because stable sorting allocates.
    fn order_rows(&mut self) {
        self.rows
            .sort_unstable_by_key(|row| (row.num_tokens != 1, row.num_tokens, row.rank));
    }
}

/// The scheduler and the requests it knows.
pub struct Scheduler {
    limits: SchedulerLimits,
    kv: KvCacheManager,
    requests: Vec<Option<Request>>,
    free_keys: Vec<RequestKey>,
    waiting: VecDeque<RequestKey>,
    running: Vec<RequestKey>,
    free_slots: Vec<u32>,
    next_epoch: u64,
    schedule: Schedule,
    num_preemptions: u64,
}

impl Scheduler {
    /// # Panics
    /// If a limit is 0.
    pub fn new(limits: SchedulerLimits, kv: KvCacheManager) -> Self {
        assert!(limits.max_num_seqs > 0, "max_num_seqs is 0");
        assert!(
            limits.max_num_batched_tokens > 0,
            "max_num_batched_tokens is 0"
        );
        assert!(limits.max_model_len > 1, "max_model_len is below 2");
        let rows = limits.max_num_seqs;
        Self {
            kv,
            requests: Vec::new(),
            free_keys: Vec::new(),
            waiting: VecDeque::new(),
            running: Vec::with_capacity(rows),
            free_slots: (0..rows as u32).collect(),
            next_epoch: 0,
            schedule: Schedule {
                rows: Vec::with_capacity(rows),
                ..Schedule::default()
            },
            num_preemptions: 0,
            limits,
        }
    }

    /// The limits.
    pub fn limits(&self) -> &SchedulerLimits {
        &self.limits
    }

    /// The KV blocks, to look at.
    pub fn kv(&self) -> &KvCacheManager {
        &self.kv
    }

    /// Requests that hold blocks.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Requests that hold nothing yet, or no longer.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Times that a request lost its blocks.
    pub fn num_preemptions(&self) -> u64 {
        self.num_preemptions
    }

    /// A request.
    ///
    /// # Panics
    /// If it has ended.
    pub fn request(&self, key: RequestKey) -> &Request {
        self.requests[key.index()]
            .as_ref()
            .expect("the request has ended")
    }

    /// Is `key` still the request that was admitted as `epoch`? Not after it ended.
    pub(crate) fn is_current(&self, key: RequestKey, epoch: u64) -> bool {
        let request = self.requests.get(key.index()).and_then(Option::as_ref);
        request.is_some_and(|request| request.epoch == epoch)
    }

    /// Takes a request in. `max_tokens`: of output; none: as many as context and cache allow.
    pub fn add(
        &mut self,
        prompt: Vec<u32>,
        max_tokens: Option<usize>,
    ) -> Result<RequestKey, AddRequestError> {
        let prompt_len = prompt.len();
        let max_total_tokens = self.max_total_tokens(prompt_len, max_tokens)?;
        let request = Request {
            tokens: prompt,
            prompt_len,
            prefill_len: prompt_len,
            num_computed: 0,
            num_pending: 0,
            feed: 0,
            max_total_tokens,
            blocks: RequestBlocks::default(),
            slot: None,
            epoch: 0,
            num_preemptions: 0,
        };
        let key = match self.free_keys.pop() {
            Some(key) => {
                self.requests[key.index()] = Some(request);
                key
            }
            None => {
                self.requests.push(Some(request));
                RequestKey(self.requests.len() as u32 - 1)
            }
        };
        self.waiting.push_back(key);
        Ok(key)
    }

    fn max_total_tokens(
        &self,
        prompt_len: usize,
        max_tokens: Option<usize>,
    ) -> Result<usize, AddRequestError> {
        let max_model_len = self.limits.max_model_len;
        if prompt_len == 0 {
            return Err(AddRequestError::EmptyPrompt);
        }
        if max_tokens == Some(0) {
            return Err(AddRequestError::NoTokensAsked);
        }
        if prompt_len >= max_model_len {
            return Err(AddRequestError::PromptTooLong {
                prompt_len,
                max_model_len,
            });
        }
        // The last token that is sampled needs no keys and values.
        let most = self.kv.capacity_tokens() + 1;
        let asked = match max_tokens {
            Some(count) => prompt_len.saturating_add(count).min(max_model_len),
            None => max_model_len.min(most).max(prompt_len + 1),
        };
        if asked > most {
            let block_size = self.kv.block_size();
            return Err(AddRequestError::NeverFits {
                needed: (asked - 1).div_ceil(block_size),
                available: self.kv.pool().num_blocks() - 1,
                block_size,
            });
        }
        Ok(asked)
    }

    /// Chooses the next step's rows. Empty if there is nothing to do. Rows count as computed only with
    /// [`Scheduler::complete`].
    pub fn schedule(&mut self) -> &Schedule {
        self.schedule.rows.clear();
        self.schedule.preempted.clear();
        self.schedule.num_tokens = 0;
        self.schedule_running();
        if self.schedule.preempted.is_empty() {
            self.schedule_waiting();
        }
        self.schedule.order_rows();
        &self.schedule
    }

    /// The step chosen last.
    pub fn last_schedule(&self) -> &Schedule {
        &self.schedule
    }

    fn schedule_running(&mut self) {
        let mut index = 0;
        while index < self.running.len() {
            let budget = self.limits.max_num_batched_tokens - self.schedule.num_tokens;
            if budget == 0 {
                break;
            }
            let key = self.running[index];
            // The token that it waits for is its last: nothing follows.
            if self.request(key).is_at_limit_with_pending() {
                index += 1;
                continue;
            }
            let (num_tokens, end) = next_chunk(self.request(key), budget);
            // One request alone always fits: `add` refused it otherwise. So this ends at the latest when it is the last.
            let mut granted = true;
            while !self.grow(key, end) {
                let victim = *self.running.last().expect("this request at least");
                self.preempt_last();
                if victim == key {
                    granted = false;
                    break;
                }
            }
            if !granted {
                break;
            }
            self.publish(key, end);
            self.schedule.push(key, num_tokens);
            index += 1;
        }
    }

    fn schedule_waiting(&mut self) {
        while let Some(&key) = self.waiting.front() {
            let budget = self.limits.max_num_batched_tokens - self.schedule.num_tokens;
            if budget == 0 || self.running.len() == self.limits.max_num_seqs {
                break;
            }
            let request = self.requests[key.index()].as_mut().expect("waiting");
            // It lost its blocks while a step in flight chooses a token for it: it starts again once that is known.
            if request.num_pending > 0 {
                break;
            }
            let hit = self.kv.cached_prefix(&mut request.blocks, &request.tokens);
            let num_tokens = (request.tokens.len() - hit.num_tokens).min(budget);
            let end = hit.num_tokens + num_tokens;
            if !self
                .kv
                .admit(&mut request.blocks, hit, end, request.tokens.len())
            {
                break;
            }
            self.waiting.pop_front();
            self.start(key, hit);
            self.publish(key, end);
            self.schedule.push(key, num_tokens);
        }
    }

    fn start(&mut self, key: RequestKey, hit: PrefixHit) {
        self.next_epoch += 1;
        let slot = self.free_slots.pop().expect("fewer running than slots");
        let request = self.requests[key.index()].as_mut().expect("waiting");
        request.slot = Some(slot);
        request.epoch = self.next_epoch;
        request.num_computed = hit.num_tokens;
        request.prefill_len = request.tokens.len();
        self.running.push(key);
    }

    fn grow(&mut self, key: RequestKey, num_tokens: usize) -> bool {
        let request = self.requests[key.index()].as_mut().expect("running");
        self.kv.grow(&mut request.blocks, num_tokens)
    }

    /// Offers the full blocks among the first `num_tokens` tokens, as far as the tokens are known: a block's name is made of
    /// its tokens.
    fn publish(&mut self, key: RequestKey, num_tokens: usize) {
        let request = self.requests[key.index()].as_mut().expect("running");
        let known = num_tokens.min(request.tokens.len());
        self.kv.publish(&mut request.blocks, &request.tokens, known);
    }

    fn preempt_last(&mut self) {
        let key = self.running.pop().expect("a running request");
        let request = self.requests[key.index()].as_mut().expect("running");
        self.kv.release(&mut request.blocks);
        request.num_computed = 0;
        request.num_preemptions += 1;
        self.free_slots.push(request.slot.take().expect("running"));
        self.waiting.push_front(key);
        self.schedule.preempted.push(key);
        self.num_preemptions += 1;
    }

    /// The rows of the last schedule were computed, or a device will compute them before anything that is submitted later:
    /// their tokens have keys and values now.
    pub fn complete(&mut self) {
        for row in &self.schedule.rows {
            if let Some(request) = self.requests[row.key.index()].as_mut() {
                request.num_computed += row.num_tokens;
            }
        }
    }

    /// A row of the last schedule computes the request's last token, and its next one is not known yet: `feed` stands for it,
    /// an id or a [feed reference](crate::batch::feed_reference). The request goes on meanwhile.
    pub fn set_pending(&mut self, key: RequestKey, feed: i32) {
        let request = self.requests[key.index()].as_mut().expect("not ended");
        request.num_pending += 1;
        request.feed = feed;
    }

    /// Appends a token that the model produced: the first pending one, if one is.
    pub fn append(&mut self, key: RequestKey, token: u32) {
        let request = self.requests[key.index()].as_mut().expect("not ended");
        request.tokens.push(token);
        if request.num_pending > 0 {
            request.num_pending -= 1;
            // With this token the block that it ends has a name.
            let num_computed = request.num_computed;
            self.publish(key, num_computed);
        }
    }

    /// Ends a request, whatever its state, and gives its blocks back.
    pub fn finish(&mut self, key: RequestKey) -> Request {
        let mut request = self.requests[key.index()]
            .take()
            .expect("the request has ended already");
        match request.slot.take() {
            Some(slot) => {
                self.free_slots.push(slot);
                self.running.retain(|&other| other != key);
            }
            None => self.waiting.retain(|&other| other != key),
        }
        self.kv.release(&mut request.blocks);
        self.free_keys.push(key);
        request
    }

    /// For a row of a step that failed, before it is finished: what the step should have written, from token `start` on, is
    /// not in the cache, so nobody may find it there.
    pub fn withdraw(&mut self, key: RequestKey, start: usize) {
        let request = self.requests[key.index()].as_mut().expect("not ended");
        let first = start / self.kv.block_size();
        self.kv.unpublish(&mut request.blocks, first);
    }

    /// As [`Scheduler::withdraw`] for a step that failed after others were scheduled on top of it: requests that held its
    /// blocks may have left them behind with their names, so every name goes.
    pub fn withdraw_all(&mut self) {
        self.kv.forget_all();
    }
}

/// The next tokens of a running request under `budget`: how many, and the number computed after them.
fn next_chunk(request: &Request, budget: usize) -> (usize, usize) {
    let num_tokens = (request.num_tokens_with_pending() - request.num_computed).min(budget);
    debug_assert!(num_tokens > 0, "a running request without a next token");
    (num_tokens, request.num_computed + num_tokens)
}
