//! Which requests compute how many tokens in the next step.
//!
//! First come, first served, under three limits: rows, tokens of a step, blocks. Running requests first, in the order in
//! which they were admitted; then waiting ones, with as much of their prompt as the token budget leaves (chunked prefill).
//! When a running request finds no block, the youngest running request loses all of its blocks and is computed again later.
//!
//! That order holds within a tenant. Where tenants compete, a step's tokens are dealt by their weights (`shares`) and what one
//! leaves the others get; a free row goes to the one with the fewest for its weight; and blocks are taken from the one that
//! holds the most for its weight. The request that came first of all that run keeps its blocks, so that each one's turn
//! comes. With one tenant at work nothing of this shows.
//!
//! Rows of equal *segment* (tenants that one builder serves) stand together in a step, which has a most of segments; the others
//! wait their turn.
//!
//! A step may be scheduled while the one before it runs: a request whose token is not known yet counts as one token longer
//! (`num_pending`). Blocks that a request gives back meanwhile may be handed out at once, because a device runs steps in the order
//! in which they were submitted.
//!
//! Behind a request's last token a row may have drafts (`drafts`), as far as budget and blocks are left.
//!
//! The scheduler must never know the model, a tensor, or a metadata builder.

mod drafts;
mod shares;
mod tenant;

pub use self::tenant::{Owner, SegmentKey, TenantIndex, TenantShare};

use self::{
    shares::{Claim, deal},
    tenant::Tenant,
};
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
    /// Draft tokens of a row; 0 without speculation.
    pub num_speculative_tokens: usize,
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
    /// The tenant that it belongs to.
    pub tenant: TenantIndex,
    /// The tenant's segment.
    pub segment: SegmentKey,
    /// Tokens computed in this step, drafts included, at least 1.
    pub num_tokens: usize,
    /// The last of them that are drafts.
    pub num_drafts: usize,
    /// Place in the order in which rows were scheduled.
    rank: u32,
}

/// A step's rows: by segment, and within each decodes first.
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
    fn push(
        &mut self,
        key: RequestKey,
        tenant: TenantIndex,
        segment: SegmentKey,
        (num_tokens, num_drafts): (usize, usize),
    ) {
        let rank = self.rows.len() as u32;
        self.rows.push(ScheduledRow {
            key,
            tenant,
            segment,
            num_tokens,
            num_drafts,
            rank,
        });
        self.num_tokens += num_tokens;
    }

    /// Rows with drafts first, then those of a decode's length (`order_decodes_first` of the rule book), then by length, ties as
    /// scheduled: the recorded runner's order. Unstable sorting with the rank as the last key, because stable sorting allocates.
    fn order_rows(&mut self, decode_query_len: usize) {
        self.rows.sort_unstable_by_key(|row| {
            let has_none = row.num_drafts == 0;
            let is_other = row.num_tokens != decode_query_len;
            (row.segment, has_none, is_other, row.num_tokens, row.rank)
        });
    }
}

/// The scheduler and the requests it knows.
pub struct Scheduler {
    limits: SchedulerLimits,
    kv: KvCacheManager,
    requests: Vec<Option<Request>>,
    free_keys: Vec<RequestKey>,
    /// By [`TenantIndex`]; at least one.
    tenants: Vec<Tenant>,
    /// What they claim of the step that is being scheduled; memory that is reused.
    claims: Vec<Claim>,
    /// Segments that compete for a place in it, with the level of each one's lowest tenant; memory that is reused.
    turns: Vec<(f64, SegmentKey)>,
    /// Up to which tenants that competed were served: where one that comes anew begins.
    level: f64,
    /// The same of this step alone.
    step_level: f64,
    max_segments: usize,
    running: Vec<RequestKey>,
    /// Free indexes in the tables of running requests. One table for each slot: a builder sees its own rows' indexes, which say
    /// nothing of others.
    free_slots: Vec<Vec<u32>>,
    /// Free recurrent states, one for each row that can run. Whoever starts has computed nothing, so nobody reads what another
    /// left behind.
    free_states: Vec<u32>,
    next_arrival: u64,
    next_epoch: u64,
    schedule: Schedule,
    num_preemptions: u64,
}

impl Scheduler {
    /// For requests of nobody in particular.
    ///
    /// # Panics
    /// If a limit is 0.
    pub fn new(limits: SchedulerLimits, kv: KvCacheManager) -> Self {
        Self::with_tenants(limits, kv, &[TenantShare::default()], usize::MAX)
    }

    /// For `tenants`, the first of which stands for nobody in particular, and steps with rows of at most `max_segments` segments.
    ///
    /// # Panics
    /// If a limit is 0, or there is no tenant.
    pub fn with_tenants(
        limits: SchedulerLimits,
        kv: KvCacheManager,
        tenants: &[TenantShare],
        max_segments: usize,
    ) -> Self {
        assert!(!tenants.is_empty(), "no tenant");
        assert!(max_segments > 0, "max_segments is 0");
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
            claims: Vec::with_capacity(tenants.len()),
            turns: Vec::with_capacity(tenants.len()),
            level: 0.0,
            step_level: 0.0,
            max_segments,
            running: Vec::with_capacity(rows),
            free_slots: vec![(0..rows as u32).collect(); num_slots(tenants)],
            free_states: (1..=rows as u32).rev().collect(),
            tenants: tenants.iter().copied().map(Tenant::new).collect(),
            next_arrival: 0,
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
        self.tenants.iter().map(|tenant| tenant.waiting.len()).sum()
    }

    /// From the next step on the tenant's rows are for the version that its slot tries, or no longer.
    pub fn set_candidate(&mut self, tenant: TenantIndex, is_candidate: bool) {
        self.tenants[tenant.index()].is_candidate = is_candidate;
    }

    /// A tenant's requests that hold blocks, and those that hold none.
    pub fn num_of_tenant(&self, tenant: TenantIndex) -> (usize, usize) {
        let tenant = &self.tenants[tenant.index()];
        (tenant.num_running, tenant.waiting.len())
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

    /// Takes a request of nobody in particular in. `max_tokens`: of output; none: as many as context and cache allow.
    pub fn add(
        &mut self,
        prompt: Vec<u32>,
        max_tokens: Option<usize>,
    ) -> Result<RequestKey, AddRequestError> {
        self.add_for(Owner::default(), prompt, max_tokens)
    }

    /// As [`Scheduler::add`], for a tenant of the scheduler's table.
    pub fn add_for(
        &mut self,
        owner: Owner,
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
            waits_for_choice: false,
            drafts: Vec::new(),
            max_total_tokens,
            blocks: RequestBlocks::rooted(owner.prefix_root),
            tenant: owner.tenant,
            arrival: self.next_arrival,
            slot: None,
            state: 0,
            epoch: 0,
            num_preemptions: 0,
        };
        self.next_arrival += 1;
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
        self.tenants[owner.tenant.index()].waiting.push_back(key);
        Ok(key)
    }

    /// From here on the request is scheduled only when all of its tokens are known.
    pub fn wait_for_choices(&mut self, key: RequestKey) {
        let request = self.requests[key.index()].as_mut().expect("not ended");
        request.waits_for_choice = true;
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
        let compete = self.deal_tokens();
        self.schedule_running();
        if self.schedule.preempted.is_empty() {
            self.schedule_waiting();
            if compete {
                self.schedule_what_is_left();
            }
        }
        if compete {
            if self.schedule.rows.is_empty() {
                self.schedule_first_come();
            }
            self.charge();
        }
        self.schedule
            .order_rows(1 + self.limits.num_speculative_tokens);
        &self.schedule
    }

    /// The step chosen last.
    pub fn last_schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Says how many tokens of the step each tenant may have. True if several tenants have work: only then anybody's part is
    /// less than the whole.
    fn deal_tokens(&mut self) -> bool {
        let budget = self.limits.max_num_batched_tokens;
        let at_work = self.tenants.iter().filter(|tenant| tenant.is_at_work());
        let compete = at_work.take(2).count() == 2;
        for tenant in &mut self.tenants {
            tenant.waits = false;
            tenant.left = budget;
            tenant.scheduled = 0;
            let is_at_work = tenant.is_at_work();
            // One that was idle has no claim to what it did not use.
            if is_at_work && !tenant.was_at_work {
                tenant.claim.level = tenant.claim.level.max(self.level);
            }
            tenant.was_at_work = is_at_work;
            tenant.claim.demand = 0;
        }
        if !compete {
            return false;
        }
        self.measure_demand(budget);
        self.choose_segments();
        self.claims.clear();
        self.claims.extend(self.tenants.iter().map(|tenant| Claim {
            weight: tenant.share.weight,
            quota: 0,
            ..tenant.claim
        }));
        self.step_level = deal(&mut self.claims, budget);
        self.level = self.level.max(self.step_level);
        for (tenant, claim) in self.tenants.iter_mut().zip(&self.claims) {
            tenant.claim = *claim;
            tenant.left = claim.quota;
        }
        true
    }

    /// What each tenant could use of a step: the next tokens of what runs, and prompts, as long as there are rows for them.
    fn measure_demand(&mut self, budget: usize) {
        for &key in &self.running {
            let request = self.requests[key.index()].as_ref().expect("running");
            if !request.waits_for_token() {
                self.tenants[request.tenant.index()].claim.demand +=
                    remaining(request) + request.drafts.len();
            }
        }
        let free_rows = self.limits.max_num_seqs - self.running.len();
        for tenant in &mut self.tenants {
            for key in tenant.waiting.iter().take(free_rows) {
                let request = self.requests[key.index()].as_ref().expect("waiting");
                if tenant.claim.demand >= budget || request.num_pending > 0 {
                    break;
                }
                tenant.claim.demand += request.tokens.len();
            }
            tenant.claim.demand = tenant.claim.demand.min(budget);
        }
    }

    /// Leaves out the tenants of all but `max_segments` segments: those served least go first.
    fn choose_segments(&mut self) {
        self.turns.clear();
        for tenant in self.tenants.iter().filter(|tenant| tenant.claim.demand > 0) {
            let (level, segment) = (tenant.claim.level, tenant.segment());
            match self.turns.iter_mut().find(|turn| turn.1 == segment) {
                Some(turn) => turn.0 = turn.0.min(level),
                None => self.turns.push((level, segment)),
            }
        }
        if self.turns.len() <= self.max_segments {
            return;
        }
        let order =
            |a: &(f64, SegmentKey), b: &(f64, SegmentKey)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
        self.turns.sort_unstable_by(order);
        let left_out = &self.turns[self.max_segments..];
        for tenant in &mut self.tenants {
            let segment = tenant.segment();
            if left_out.iter().any(|turn| turn.1 == segment) {
                tenant.waits = true;
                tenant.claim.demand = 0;
            }
        }
    }

    /// What the step gives to each tenant counts, if others wanted it too. Who could not use its part keeps no claim to it.
    fn charge(&mut self) {
        for tenant in &mut self.tenants {
            let claim = &mut tenant.claim;
            if claim.demand == 0 && tenant.scheduled == 0 {
                continue;
            }
            claim.level += tenant.scheduled as f64 / claim.weight;
            if claim.quota == claim.demand || tenant.scheduled < claim.quota {
                claim.level = claim.level.max(self.step_level);
            }
        }
    }

    /// Tokens that the step has room for.
    fn budget(&self) -> usize {
        self.limits.max_num_batched_tokens - self.schedule.num_tokens
    }

    fn schedule_running(&mut self) {
        let mut index = 0;
        while index < self.running.len() && self.budget() > 0 {
            let key = self.running[index];
            let request = self.request(key);
            let part = self.tenants[request.tenant.index()].left.min(self.budget());
            // The token that it waits for is its last, or one that the host chooses.
            if part == 0 || request.waits_for_token() {
                index += 1;
                continue;
            }
            let num_tokens = remaining(request).min(part);
            let end = request.num_computed + num_tokens;
            debug_assert!(num_tokens > 0, "a running request without a next token");
            // One request alone always fits: `add` refused it otherwise. So this ends at the latest when it is the last.
            let mut granted = true;
            while granted && !self.grow(key, end) {
                let victim = self.victim();
                granted = self.running[victim] != key;
                index -= usize::from(victim < index);
                self.preempt(victim);
            }
            if granted {
                let num_drafts = self.grow_for_drafts(index, end, part - num_tokens);
                self.push_row(key, num_tokens, num_drafts, end);
                index += 1;
            }
        }
    }

    /// A row for a request that holds the blocks of its first `end` tokens, and of `num_drafts` after them.
    fn push_row(&mut self, key: RequestKey, num_tokens: usize, num_drafts: usize, end: usize) {
        self.publish(key, end);
        let index = self.request(key).tenant;
        let tenant = &mut self.tenants[index.index()];
        let num_tokens = num_tokens + num_drafts;
        tenant.left -= num_tokens;
        tenant.scheduled += num_tokens;
        let segment = tenant.segment();
        self.schedule
            .push(key, index, segment, (num_tokens, num_drafts));
    }

    fn schedule_waiting(&mut self) {
        while self.budget() > 0 && self.running.len() < self.limits.max_num_seqs {
            let Some(next) = self.next_to_start() else {
                break;
            };
            let part = self.tenants[next].left.min(self.budget());
            let key = self.tenants[next].waiting[0];
            let request = self.requests[key.index()].as_mut().expect("waiting");
            // It lost its blocks while a step in flight chooses a token for it: it starts again once that is known.
            if request.num_pending > 0 {
                self.tenants[next].left = 0;
                continue;
            }
            let hit = self.kv.cached_prefix(&mut request.blocks, &request.tokens);
            let num_tokens = (request.tokens.len() - hit.num_tokens).min(part);
            let end = hit.num_tokens + num_tokens;
            if !self
                .kv
                .admit(&mut request.blocks, hit, end, request.tokens.len())
            {
                break;
            }
            self.start(next, hit);
            self.push_row(key, num_tokens, 0, end);
        }
    }

    /// Whose first waiting request starts next: of those who may have tokens, the tenant with the fewest rows for its weight,
    /// then who came first.
    fn next_to_start(&self) -> Option<usize> {
        let arrival = |tenant: &Tenant| self.request(tenant.waiting[0]).arrival;
        let may_start = |tenant: &Tenant| tenant.left > 0 && !tenant.waiting.is_empty();
        let (index, _) = self
            .tenants
            .iter()
            .enumerate()
            .filter(|(_, tenant)| may_start(tenant))
            .min_by(|(_, a), (_, b)| {
                let rows = a.rows_for_weight().total_cmp(&b.rows_for_weight());
                rows.then_with(|| arrival(a).cmp(&arrival(b)))
            })?;
        Some(index)
    }

    /// Tokens that a tenant could not use after all (a prefix was cached, a row or a block was missing) go to whoever can.
    fn schedule_what_is_left(&mut self) {
        for tenant in self.tenants.iter_mut().filter(|tenant| !tenant.waits) {
            tenant.left = self.limits.max_num_batched_tokens;
        }
        // Rows were pushed in the order of `running`, so that both are walked at once.
        let (num_rows, mut row) = (self.schedule.rows.len(), 0);
        for index in 0..self.running.len() {
            let key = self.running[index];
            let so_far = match self.schedule.rows[..num_rows].get(row) {
                Some(scheduled) if scheduled.key == key => scheduled.num_tokens,
                _ => 0,
            };
            row += usize::from(so_far > 0);
            let request = self.request(key);
            let tenant = request.tenant.index();
            // Drafts are what a row has beyond what remains: nothing of it is left over.
            let more = remaining(request).saturating_sub(so_far).min(self.budget());
            let waits = request.waits_for_token();
            let end = request.num_computed + so_far + more;
            if self.tenants[tenant].waits || more == 0 || waits {
                continue;
            }
            if !self.grow(key, end) {
                continue;
            }
            if so_far == 0 {
                self.push_row(key, more, 0, end);
            } else {
                self.publish(key, end);
                self.schedule.rows[row - 1].num_tokens += more;
                self.schedule.num_tokens += more;
                self.tenants[tenant].scheduled += more;
            }
        }
        self.schedule_waiting();
    }

    /// Those whose turn it was found no block. The running request that came first of all always can go on, so its segment does.
    fn schedule_first_come(&mut self) {
        let arrival = |key: &&RequestKey| self.request(**key).arrival;
        let Some(&first) = self.running.iter().min_by_key(arrival) else {
            return;
        };
        let of = Tenant::segment;
        let segment = of(&self.tenants[self.request(first).tenant.index()]);
        for tenant in &mut self.tenants {
            let goes_on = of(tenant) == segment;
            tenant.left = if goes_on {
                self.limits.max_num_batched_tokens
            } else {
                0
            };
        }
        self.schedule_running();
    }

    fn start(&mut self, tenant: usize, hit: PrefixHit) {
        self.next_epoch += 1;
        let tenant = &mut self.tenants[tenant];
        let key = tenant.waiting.pop_front().expect("it starts");
        let free = &mut self.free_slots[tenant.share.slot as usize];
        let slot = free.pop().expect("fewer running than slots");
        let request = self.requests[key.index()].as_mut().expect("waiting");
        request.slot = Some(slot);
        request.state = self.free_states.pop().expect("one for each row");
        request.epoch = self.next_epoch;
        request.num_computed = hit.num_tokens;
        request.prefill_len = request.tokens.len();
        tenant.num_running += 1;
        self.running.push(key);
    }

    /// Gives back the index in the table of running requests, and the state; false if the request has none.
    fn leave_running(&mut self, request: &mut Request) -> bool {
        let Some(slot) = request.slot.take() else {
            return false;
        };
        let tenant = &mut self.tenants[request.tenant.index()];
        tenant.num_running -= 1;
        self.free_slots[tenant.share.slot as usize].push(slot);
        self.free_states.push(std::mem::take(&mut request.state));
        true
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

    /// Which of the running requests loses its blocks: the youngest of the tenant that holds the most for its weight, but not
    /// the one that came first of all.
    fn victim(&mut self) -> usize {
        let last = self.running.len() - 1;
        for tenant in &mut self.tenants {
            tenant.num_blocks = 0;
        }
        let mut first = (u64::MAX, last);
        for (index, key) in self.running.iter().enumerate() {
            let request = self.requests[key.index()].as_ref().expect("running");
            self.tenants[request.tenant.index()].num_blocks += request.blocks.ids.len();
            first = first.min((request.arrival, index));
        }
        let of = |index: usize| &self.tenants[self.request(self.running[index]).tenant.index()];
        let of_one_tenant = of(last).num_running == self.running.len();
        // From the last on, so that the youngest of a tenant is the one that is found.
        (0..=last)
            .rev()
            .filter(|&index| index != first.1 && !of_one_tenant)
            .reduce(|found, index| {
                let more = of(index).blocks_for_weight() > of(found).blocks_for_weight();
                if more { index } else { found }
            })
            .unwrap_or(last)
    }

    fn preempt(&mut self, index: usize) {
        let key = self.running.remove(index);
        let mut request = self.requests[key.index()].take().expect("running");
        if let Some(row) = self.schedule.rows.iter().position(|row| row.key == key) {
            // What this step was to write will not be written.
            let row = self.schedule.rows.remove(row);
            self.schedule.num_tokens -= row.num_tokens;
            let tenant = &mut self.tenants[row.tenant.index()];
            tenant.left += row.num_tokens;
            tenant.scheduled -= row.num_tokens;
            let first = request.num_computed / self.kv.block_size();
            self.kv.unpublish(&mut request.blocks, first);
        }
        self.kv.release(&mut request.blocks);
        self.leave_running(&mut request);
        request.num_computed = 0;
        request.drafts.clear();
        request.num_preemptions += 1;
        self.tenants[request.tenant.index()].waiting.push_front(key);
        self.requests[key.index()] = Some(request);
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
        if self.leave_running(&mut request) {
            self.running.retain(|&other| other != key);
        } else {
            let tenant = &mut self.tenants[request.tenant.index()];
            tenant.waiting.retain(|&other| other != key);
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

/// Tokens of a running request that the next steps compute.
fn remaining(request: &Request) -> usize {
    request.num_tokens_with_pending() - request.num_computed
}

fn num_slots(tenants: &[TenantShare]) -> usize {
    let slots = tenants.iter().map(|tenant| tenant.slot as usize + 1);
    slots.max().unwrap_or(1)
}
