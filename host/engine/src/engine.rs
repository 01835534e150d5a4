//! The step loop: requests in, tokens out.
//!
//! One step is schedule → batch → build and verify metadata → submit → collect → output, on one thread. On a device that
//! runs steps by itself there are two in flight: a step is scheduled and submitted while the one before it runs, so a token
//! is learned one step late. Then a row that turns out to follow an end is dropped, and what needs a token's value (block
//! names, ends, text) waits for it. What fails in a step ends that step's requests with an error; the engine itself lives,
//! unless the device is gone.

mod active;
mod failures;
mod speculate;

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use timetable_attention::{
    graphs::{Explanation, RuntimeMode},
    group::AttentionGroup,
    report::StartupReport,
};
use timetable_sandbox::{ReloadHandle, Sandbox, StepObserver, TenantName};
use timetable_types::BuilderInfo;
use tracing::Span;

use self::{
    active::{Active, Text},
    speculate::Chosen,
};
use crate::{
    attention::{Attention, AttentionPlan, BuildOutcome, StepError},
    batch::{BatchShape, InputBatch, feed_reference},
    config::{Builders, EngineConfig, EngineError},
    cpu::CpuExecutor,
    executor::{
        CacheRequest, Executor, ExecutorSetup, RowSampling, Step, StepFailure, StepResults,
    },
    kv::KvCacheManager,
    output::{FinishReason, GenerationRequest, RequestError, RequestId, RequestUpdate, StepOutput},
    request::RequestKey,
    runner::ModelRunner,
    sampling::{Adjustment, Sampler, StopMatcher, TokenLogprobs},
    scheduler::{Scheduler, SchedulerLimits, TenantIndex},
    spans,
    speculation::{SpeculativeConfig, TokenIndex},
    startup::{Startup, depth, graph_plan},
    tenants::{TenantStats, Tenants},
    timeline::{StepRecord, Timeline},
    timings::{EngineStats, Lap, STEP_NS, STEP_TOKENS, StepTimings},
    tokenizer::{TextStream, Tokenizer},
};

/// For tests and evaluation: sees the row of logits from which each token is chosen, with the token's place in the output.
pub type LogitsObserver = Box<dyn FnMut(RequestId, usize, &[f32]) + Send>;

/// One row of a step in flight.
#[derive(Clone, Copy)]
struct FlightRow {
    key: RequestKey,
    /// The request's admission: the key may be another's by the time the step is collected.
    epoch: u64,
    tenant: TenantIndex,
    /// Tokens computed before the step.
    start: usize,
    /// Tokens computed in it.
    num_tokens: usize,
    /// The last of them that are drafts.
    num_drafts: usize,
    /// Does the step choose a token for it, and one after each draft?
    samples: bool,
    /// Does its row of logits come with the token?
    logits: bool,
}

impl FlightRow {
    /// Rows of logits.
    fn num_logits(&self) -> usize {
        if self.samples { 1 + self.num_drafts } else { 0 }
    }
}

/// A step that was submitted and not collected.
#[derive(Default)]
struct Flight {
    rows: Vec<FlightRow>,
    num_tokens: usize,
    timings: StepTimings,
    /// A step before it failed, and its requests have ended: its results are nobody's.
    dropped: bool,
    /// Some group was served by its plain builder after a fault.
    fell_back: bool,
    /// Requests of it ended with an error.
    failed: bool,
    span: Option<Span>,
}

/// What became of an attempt to submit a step.
enum Submitted {
    /// There was nothing to schedule.
    Nothing,
    InFlight,
    /// Its requests have ended.
    Failed,
}

/// The engine. Not shared: see [`EngineHandle`](crate::handle::EngineHandle) for use from several threads.
pub struct Engine {
    executor: Box<dyn Executor>,
    /// Steps in flight at most.
    depth: usize,
    tokenizer: Option<Arc<Tokenizer>>,
    scheduler: Scheduler,
    tenants: Tenants,
    batch: InputBatch,
    attention: Attention,
    /// Some slot tried a candidate on tenants in the step before.
    tries_on_tenants: bool,
    /// By request key.
    active: Vec<Option<Active>>,
    keys: HashMap<RequestId, RequestKey>,
    next_id: u64,
    /// Oldest first.
    flights: VecDeque<Flight>,
    /// Memory of flights that have ended.
    spare: Vec<Flight>,
    sampling: Vec<RowSampling>,
    speculative: Option<SpeculativeConfig>,
    /// Memory that is reused.
    drafts: Vec<u32>,
    results: StepResults,
    /// Logits that a request's parameters change.
    adjusted: Vec<f32>,
    /// The tokens of a row, while they are given out.
    chosen: Vec<Chosen>,
    output: StepOutput,
    observer: Option<LogitsObserver>,
    stats: EngineStats,
    timeline: Option<Arc<Timeline>>,
    num_blocks: usize,
    startup: Startup,
    /// Why no further step runs.
    dead: Option<String>,
}

impl Engine {
    /// Makes the layers, their builders, and a KV cache of the configured size, on the CPU; with a memory fraction, after a
    /// profile run. Without a tokenizer the engine makes no text.
    pub fn new<'a>(
        config: &EngineConfig,
        model: Box<dyn ModelRunner>,
        tokenizer: Option<Arc<Tokenizer>>,
        sandbox: &Sandbox,
        builders: impl Into<Builders<'a>>,
    ) -> Result<Self, EngineError> {
        let plan = AttentionPlan::new(config, model.config())?;
        Self::with_plan(config, plan, model, tokenizer, sandbox, builders)
    }

    /// As [`Engine::new`], with the plan that was made of the same config and model: for a caller whose source depends on
    /// the backend that was chosen.
    pub fn with_plan<'a>(
        config: &EngineConfig,
        plan: AttentionPlan,
        model: Box<dyn ModelRunner>,
        tokenizer: Option<Arc<Tokenizer>>,
        sandbox: &Sandbox,
        builders: impl Into<Builders<'a>>,
    ) -> Result<Self, EngineError> {
        let executor = Box::new(CpuExecutor::new(model));
        Self::with_executor(config, plan, executor, tokenizer, sandbox, builders)
    }

    /// As [`Engine::with_plan`], on any device, and with builders for tenants' slots if [`Builders`] are given: `plan` was made of the same config and the executor's model and facts.
    pub fn with_executor<'a>(
        config: &EngineConfig,
        plan: AttentionPlan,
        mut executor: Box<dyn Executor>,
        tokenizer: Option<Arc<Tokenizer>>,
        sandbox: &Sandbox,
        builders: impl Into<Builders<'a>>,
    ) -> Result<Self, EngineError> {
        let facts = executor.facts(config)?;
        if facts != *plan.facts() {
            return Err(EngineError::Device(format!(
                "the plan was made for {:?} and the executor is {facts:?}: make the plan of the executor's own facts",
                plan.facts()
            )));
        }
        let depth = depth(config, &*executor)?;
        let sizes = executor.model_config().clone();
        let limits = SchedulerLimits {
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
            max_model_len: config.model_len(sizes.max_position_embeddings),
            num_speculative_tokens: config.num_speculative_tokens(),
        };
        let shape = BatchShape {
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_model_len: limits.max_model_len,
            block_size: config.block_size,
            kernel_block_size: plan.kernel_block_size(),
        };
        let batch = InputBatch::new(shape)?;
        let table_width = batch.table_width();
        let groups = plan
            .groups()
            .iter()
            .map(|group| plan.builder_config(group, config, &sizes, table_width))
            .collect::<Result<Vec<_>, _>>()?;
        let tenants = Tenants::new(&config.tenants, config.default_share);
        let max_segments = config
            .max_tenant_segments
            .min(executor.max_segments())
            .min(tenants.max_segments());
        let num_states = plan.num_states(limits.max_num_seqs);
        let blocks_of_one = limits.max_model_len.div_ceil(config.block_size);
        executor.setup(&ExecutorSetup {
            config,
            plan: &plan,
            groups: &groups,
            shape,
            table_width,
            cache: CacheRequest {
                size: config.cache_size,
                block_bytes: plan.block_bytes(),
                states_bytes: plan.state_bytes().saturating_mul(num_states as u64),
                most: limits.max_num_seqs * blocks_of_one + 1,
            },
            num_states,
            max_segments,
        })?;
        let acceptance = |group| executor.acceptance(group);
        let builders = builders.into();
        let groups = (groups, &shape);
        let mut attention = Attention::new(config, plan, groups, sandbox, builders, acceptance)?;
        let infos = attention.builders().map(|(_, info, layers)| (info, layers));
        let startup = Startup::new(config, attention.plan(), infos)?;
        let graphs = graph_plan(config, &startup, &mut attention)?;
        let num_blocks = executor.start(graphs)?;
        let kernel_blocks = num_blocks * (config.block_size / shape.kernel_block_size);
        attention.set_num_blocks(kernel_blocks, num_states);
        let kv = KvCacheManager::new(
            num_blocks,
            config.block_size,
            startup.enables_prefix_caching(config.enable_prefix_caching),
        );
        Ok(Self {
            executor,
            depth,
            tokenizer,
            scheduler: Scheduler::with_tenants(limits, kv, tenants.shares(), max_segments),
            tenants,
            batch,
            attention,
            tries_on_tenants: false,
            active: Vec::new(),
            keys: HashMap::new(),
            next_id: 0,
            flights: VecDeque::with_capacity(depth),
            spare: Vec::new(),
            sampling: Vec::with_capacity(config.max_num_seqs),
            speculative: config.speculative,
            drafts: Vec::new(),
            results: StepResults::default(),
            adjusted: Vec::new(),
            chosen: Vec::new(),
            output: StepOutput::default(),
            observer: None,
            stats: EngineStats::default(),
            timeline: None,
            num_blocks,
            startup,
            dead: None,
        })
    }

    /// Which backend each layer got, and every hazard that start-up found.
    pub fn startup_report(&self) -> &StartupReport {
        &self.startup.report
    }

    /// The configured CUDA graph mode, each change with its reason, and what survived.
    pub fn cudagraph_mode(&self) -> &Explanation {
        &self.startup.cudagraph_mode
    }

    /// Blocks of the KV cache, the null block included.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// The scheduler and its block manager, to look at.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Handles that replace the groups' builders while requests run, those for everybody. Empty with a native builder.
    pub fn reload_handles(&self) -> Vec<ReloadHandle> {
        self.attention.reload_handles()
    }

    /// As [`Engine::reload_handles`], with each group's layers.
    pub fn group_handles(&self) -> Vec<(ReloadHandle, &AttentionGroup)> {
        self.attention.group_handles()
    }

    /// The handles of tenants' own builders, with each group's layers.
    pub fn tenant_handles(&self) -> Vec<(&TenantName, ReloadHandle, &AttentionGroup)> {
        self.attention.tenant_handles()
    }

    /// The name of each slot of each attention group, and what its builder says of itself.
    pub fn builders(&self) -> impl Iterator<Item = (&str, &BuilderInfo)> {
        self.attention
            .builders()
            .map(|(name, info, _)| (name, info))
    }

    /// Counts and times since the start.
    pub fn stats(&self) -> EngineStats {
        let kv = self.scheduler.kv();
        let (prefix_queries, prefix_hits) = kv.prefix_stats();
        // The null block is nobody's.
        let kv_blocks = kv.pool().num_blocks() - 1;
        EngineStats {
            kv_blocks,
            kv_blocks_used: kv_blocks.saturating_sub(kv.pool().num_free()),
            preemptions: self.scheduler.num_preemptions(),
            prefix_queries,
            prefix_hits,
            running: self.scheduler.num_running(),
            waiting: self.scheduler.num_waiting(),
            ..self.stats
        }
    }

    /// Counts for each tenant; the first are those of nobody in particular.
    pub fn tenant_stats(&mut self) -> &[TenantStats] {
        for (index, stats) in self.tenants.stats.iter_mut().enumerate() {
            let tenant = TenantIndex(index as u32);
            (stats.running, stats.waiting) = self.scheduler.num_of_tenant(tenant);
        }
        &self.tenants.stats
    }

    /// For tests and evaluation: `observer` sees every row of logits from which a token is chosen, before the token counts.
    /// One step at a time is in flight meanwhile.
    pub fn set_logits_observer(&mut self, observer: Option<LogitsObserver>) {
        self.observer = observer;
    }

    /// From here on, `observer` is told of every step that a sandboxed slot served, on the thread that runs steps.
    pub fn set_step_observer(&mut self, observer: Option<Box<dyn StepObserver>>) {
        self.attention.set_observer(observer);
    }

    /// From here on, every step that ends is recorded there.
    pub fn set_timeline(&mut self, timeline: Option<Arc<Timeline>>) {
        self.timeline = timeline;
    }

    /// Is there nothing to do?
    pub fn is_idle(&self) -> bool {
        self.keys.is_empty() && self.flights.is_empty()
    }

    /// Why the engine runs no further step and takes no further request: its device is gone. None while it lives.
    pub fn fatal_error(&self) -> Option<&str> {
        self.dead.as_deref()
    }

    /// Steps in flight at most: 2 with asynchronous scheduling.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Takes a request in. It starts with the next step that has room.
    pub fn add_request(&mut self, request: GenerationRequest) -> Result<RequestId, RequestError> {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.add_request_as(id, request)?;
        Ok(id)
    }

    /// As [`Engine::add_request`], under a name that the caller keeps unique.
    pub(crate) fn add_request_as(
        &mut self,
        id: RequestId,
        request: GenerationRequest,
    ) -> Result<(), RequestError> {
        if let Some(message) = &self.dead {
            return Err(RequestError::Device(message.clone()));
        }
        request.check_tokens(self.executor.model_config().vocab_size)?;
        let GenerationRequest {
            prompt,
            params,
            forced,
            tenant,
        } = request;
        let owner = self.tenants.owner(tenant.as_ref())?;
        let sampler = Sampler::new(&params)?;
        if self.tokenizer.is_none() && !params.stop.is_empty() {
            return Err(RequestError::NoTokenizer);
        }
        let text = self.tokenizer.is_some().then(|| Text {
            stream: TextStream::new(true),
            stops: StopMatcher::new(&params.stop),
        });
        let index = self.speculative.map(|speculative| {
            TokenIndex::new(&speculative, prompt.len() + params.max_tokens.min(1024))
        });
        let max_tokens = Some(params.max_tokens);
        let adjustment = Adjustment::new(&params, &prompt);
        let key = self.scheduler.add_for(owner, prompt, max_tokens)?;
        if params.needs_host() {
            self.scheduler.wait_for_choices(key);
        }
        self.tenants.stats[owner.tenant.index()].requests += 1;
        if self.active.len() <= key.index() {
            self.active.resize_with(key.index() + 1, || None);
        }
        self.active[key.index()] = Some(Active {
            id,
            params,
            sampler,
            adjustment,
            forced,
            text,
            index,
        });
        self.keys.insert(id, key);
        Ok(())
    }

    /// Ends a request; it gets no further update. False if there is no such request (any more).
    pub fn abort(&mut self, id: RequestId) -> bool {
        let Some(key) = self.keys.remove(&id) else {
            return false;
        };
        self.active[key.index()] = None;
        self.scheduler.finish(key);
        self.stats.finished[FinishReason::Abort as usize] += 1;
        true
    }

    /// Submits steps while there is work and room in flight, then collects one: the updates are that step's. Without requests
    /// it does nothing and returns no updates.
    pub fn step(&mut self) -> &StepOutput {
        self.output.clear();
        let depth = match self.observer {
            Some(_) => 1,
            None => self.depth,
        };
        while self.dead.is_none() && self.flights.len() < depth {
            match self.submit() {
                Submitted::InFlight => {}
                Submitted::Nothing | Submitted::Failed => break,
            }
        }
        if let Some(flight) = self.flights.pop_front() {
            self.collect(flight);
        }
        &self.output
    }

    /// The last step's updates, by value.
    pub fn take_updates(&mut self) -> std::vec::Drain<'_, RequestUpdate> {
        self.output.updates.drain(..)
    }

    /// Schedules a step and hands it to the executor.
    fn submit(&mut self) -> Submitted {
        if self.scheduler.num_running() + self.scheduler.num_waiting() == 0 {
            return Submitted::Nothing;
        }
        let mut timings = StepTimings::default();
        let mut lap = Lap::start();
        let span = spans::step(self.stats.steps + self.flights.len() as u64);
        let in_step = span.enter();
        let part = spans::schedule();
        // The builders first: whose rows a candidate builds decides the order of rows, and graphs that a new version needs are
        // there before the version is.
        self.attention.step_boundary();
        self.place_candidates();
        let schedule = self.scheduler.schedule();
        let (num_reqs, num_tokens) = (schedule.rows.len(), schedule.num_tokens);
        self.output.num_preempted += schedule.preempted.len();
        if num_reqs == 0 {
            return Submitted::Nothing;
        }
        drop(part);
        spans::scheduled(&span, num_reqs, num_tokens);
        timings.schedule_ns = lap.ns();
        let part = spans::batch();
        let mut flight = self.spare.pop().unwrap_or_default();
        self.fill_batch(&mut flight);
        drop(part);
        timings.batch_ns = lap.ns();
        let ran = self.run(&mut timings);
        drop(in_step);
        flight.span = Some(span);
        flight.num_tokens = num_tokens;
        flight.timings = timings;
        flight.fell_back = ran.as_ref().is_ok_and(|outcome| outcome.fell_back);
        flight.failed = !matches!(&ran, Ok(outcome) if outcome.failed.is_empty());
        let outcome = match ran {
            Ok(outcome) => outcome,
            Err(failure) => {
                lap.ns();
                self.fail(&failure, &flight);
                flight.timings.output_ns += lap.ns();
                self.count(flight);
                return Submitted::Failed;
            }
        };
        self.scheduler.complete();
        self.fail_segments(&outcome, &flight);
        let mut index = 0;
        for row in flight.rows.iter().filter(|row| row.samples) {
            if self.scheduler.is_current(row.key, row.epoch) {
                let feed = match self.sampling[index].forced {
                    Some(token) => token as i32,
                    None => feed_reference(index),
                };
                self.scheduler.set_pending(row.key, feed);
            }
            index += row.num_logits();
        }
        self.flights.push_back(flight);
        Submitted::InFlight
    }

    /// Tells the scheduler whose rows are a candidate's.
    fn place_candidates(&mut self) {
        let tries = self.attention.tries_on_tenants();
        if !tries && !self.tries_on_tenants {
            return;
        }
        self.tries_on_tenants = tries;
        for (tenant, name) in self.tenants.named() {
            let is_candidate = tries && self.attention.tries_on(self.tenants.slot(tenant), name);
            self.scheduler.set_candidate(tenant, is_candidate);
        }
    }

    /// The batch, the rows of `flight`, and how each token is to be chosen.
    fn fill_batch(&mut self, flight: &mut Flight) {
        flight.rows.clear();
        flight.dropped = false;
        self.sampling.clear();
        self.batch.begin();
        for row in &self.scheduler.last_schedule().rows {
            let request = self.scheduler.request(row.key);
            self.batch.begin_segment(row.segment);
            self.batch.push_scheduled(request, row);
            let end = request.num_computed() + row.num_tokens - row.num_drafts;
            let samples = end == request.num_tokens_with_pending();
            let mut logits = false;
            if samples && let Some(active) = &self.active[row.key.index()] {
                let index = end - request.prompt_len();
                for index in index..=index + row.num_drafts {
                    let mut sampling = active.sampling(index);
                    sampling.logits |= self.observer.is_some();
                    logits = sampling.logits;
                    self.sampling.push(sampling);
                }
            }
            flight.rows.push(FlightRow {
                key: row.key,
                epoch: request.epoch,
                tenant: row.tenant,
                start: request.num_computed(),
                num_tokens: row.num_tokens,
                num_drafts: row.num_drafts,
                samples,
                logits,
            });
        }
        self.batch.divide();
    }

    /// Metadata, and the step to the executor.
    fn run(&mut self, timings: &mut StepTimings) -> Result<BuildOutcome, StepFailure> {
        self.batch.check().map_err(StepError::Slots)?;
        let mut lap = Lap::start();
        self.executor.step_boundary()?;
        let num_segments = self.batch.num_segments();
        let graph = self.executor.dispatch(&self.batch.query(), num_segments);
        if graph.cg_mode != RuntimeMode::None {
            let rows = graph
                .num_reqs
                .filter(|_| graph.cg_mode == RuntimeMode::Full);
            self.batch
                .pad(graph.num_tokens as usize, rows.map(|rows| rows as usize))
                .map_err(|error| StepFailure::Device {
                    message: error.to_string(),
                    fatal: false,
                })?;
        }
        timings.batch_ns += lap.ns();
        let outcome = self
            .attention
            .build(&self.batch, &graph, &mut *self.executor, timings)?;
        self.stats.fallback_steps += u64::from(outcome.fell_back);
        let _part = spans::submit();
        self.executor.submit(Step {
            batch: &mut self.batch,
            graph,
            sampling: &self.sampling,
        })?;
        Ok(outcome)
    }

    /// Waits for a step and gives its tokens to its requests.
    fn collect(&mut self, mut flight: Flight) {
        let span = flight.span.take();
        let _in_step = span.as_ref().map(Span::enter);
        let _part = spans::collect();
        let mut results = std::mem::take(&mut self.results);
        results.clear();
        let collected = self.executor.collect(&mut results).and_then(|()| {
            let logits_rows = |row: &FlightRow| row.num_logits();
            let expected: usize = flight.rows.iter().map(logits_rows).sum();
            let wanted = flight.rows.iter().filter(|row| row.logits);
            let wanted: usize = wanted.map(logits_rows).sum();
            let rows = results.logits.len() / self.executor.model_config().vocab_size;
            match results.tokens.len() {
                found if found == expected && (rows == wanted || flight.dropped) => Ok(()),
                found => Err(StepFailure::Device {
                    message: format!(
                        "the device gave {found} tokens for {expected} rows, and {rows} rows of logits where {wanted} were wanted: this is a defect of its executor"
                    ),
                    fatal: false,
                }),
            }
        });
        let mut lap = Lap::start();
        match collected {
            Ok(()) if flight.dropped => {}
            Ok(()) => {
                self.emit(&flight, &results);
                self.draft(&flight);
            }
            // What was submitted after it may have read what it should have written.
            Err(failure) => {
                flight.failed = true;
                self.fail(&failure, &flight);
                self.fail_flights(&failure);
                self.scheduler.withdraw_all();
            }
        }
        flight.timings += results.timings;
        flight.timings.output_ns += lap.ns();
        self.count(flight);
        self.results = results;
    }

    /// A step has ended.
    fn count(&mut self, mut flight: Flight) {
        flight.span = None;
        self.output.num_reqs += flight.rows.len();
        self.output.num_tokens += flight.num_tokens;
        self.stats.steps += 1;
        self.stats.tokens_computed += flight.num_tokens as u64;
        self.tenants
            .count_step(flight.rows.iter().map(|row| (row.tenant, row.num_tokens)));
        self.stats
            .step_tokens
            .record(&STEP_TOKENS, flight.num_tokens as u64);
        self.stats
            .step_ns
            .record(&STEP_NS, flight.timings.total_ns());
        self.stats.last = flight.timings;
        self.stats.total += flight.timings;
        if let Some(timeline) = &self.timeline {
            timeline.record(&StepRecord {
                step: self.stats.steps,
                requests: flight.rows.len() as u64,
                tokens: flight.num_tokens as u64,
                fell_back: flight.fell_back,
                failed: flight.failed,
                timings: flight.timings,
            });
        }
        self.spare.push(flight);
    }

    fn emit_token(&mut self, key: RequestKey, token: u32, logprobs: Option<Box<TokenLogprobs>>) {
        self.scheduler.append(key, token);
        self.stats.tokens_sampled += 1;
        let request = self.scheduler.request(key);
        let at_limit = request.is_at_limit();
        if request.output().len() == 1 {
            self.stats.prompt_tokens += request.prompt_len() as u64;
        }
        self.tenants.stats[request.tenant().index()].tokens_sampled += 1;
        let Some(active) = self.active[key.index()].as_mut() else {
            return;
        };
        let eos = &self.executor.model_config().eos_token_ids;
        let is_stop = active.params.is_stop_token(token, eos);
        let (text, stopped) = match (&mut active.text, &self.tokenizer) {
            (Some(text), Some(tokenizer)) => text.push(tokenizer, token, is_stop, at_limit),
            _ => (String::new(), false),
        };
        let finish = if is_stop || stopped {
            Some(FinishReason::Stop)
        } else if at_limit {
            Some(FinishReason::Length)
        } else {
            None
        };
        let id = active.id;
        if let Some(reason) = finish {
            self.stats.finished[reason as usize] += 1;
            self.forget(id, key);
            self.scheduler.finish(key);
        }
        self.output.updates.push(RequestUpdate {
            id,
            token: Some(token),
            text,
            logprobs,
            finish,
            error: None,
        });
    }

    fn forget(&mut self, id: RequestId, key: RequestKey) {
        self.active[key.index()] = None;
        self.keys.remove(&id);
    }

    fn end_with(&mut self, key: RequestKey, error: RequestError) {
        let Some(active) = &self.active[key.index()] else {
            return;
        };
        let id = active.id;
        self.forget(id, key);
        let request = self.scheduler.finish(key);
        self.tenants.stats[request.tenant().index()].failed_requests += 1;
        self.stats.finished[FinishReason::Error as usize] += 1;
        self.output.updates.push(RequestUpdate {
            id,
            token: None,
            text: String::new(),
            logprobs: None,
            finish: Some(FinishReason::Error),
            error: Some(error),
        });
    }
}
