//! The step loop: requests in, tokens out.
//!
//! One step is schedule → batch → build and verify metadata → forward pass → sample → output, in this order and on one
//! thread. What fails in a step ends that step's requests with an error; the engine itself lives.

use std::{collections::HashMap, sync::Arc};

use timetable_attention::{graphs::Explanation, group::AttentionGroup, report::StartupReport};
use timetable_sandbox::{ReloadHandle, Sandbox};
use timetable_types::BuilderInfo;

use crate::{
    attention::{Attention, AttentionPlan, StepError},
    batch::{BatchShape, InputBatch},
    config::{BuilderSource, CacheSize, EngineConfig, EngineError},
    kv::KvCacheManager,
    memory,
    output::{
        FinishReason, GenerationRequest, RequestError, RequestId, RequestUpdate, StepFailure,
        StepOutput,
    },
    request::RequestKey,
    runner::ModelRunner,
    sampling::{Sampler, SamplingParams, StopMatcher},
    scheduler::{Scheduler, SchedulerLimits},
    startup::Startup,
    timings::{EngineStats, Lap, StepTimings},
    tokenizer::{TextStream, Tokenizer},
};

/// Tokens of the profile run at most. Its scratch memory grows with its tokens, so a longer step's is computed from it.
const MAX_PROFILE_TOKENS: usize = 128;

/// For tests and evaluation: sees the row of logits from which each token is chosen, with the token's place in the output.
pub type LogitsObserver = Box<dyn FnMut(RequestId, usize, &[f32]) + Send>;

/// The text of one request.
struct Text {
    stream: TextStream,
    stops: StopMatcher,
}

/// What the engine keeps of a request besides the scheduler's state.
struct Active {
    id: RequestId,
    params: SamplingParams,
    sampler: Sampler,
    forced: Vec<u32>,
    text: Option<Text>,
}

/// The engine. Not shared: see [`EngineHandle`](crate::handle::EngineHandle) for use from several threads.
pub struct Engine {
    model: Box<dyn ModelRunner>,
    tokenizer: Option<Arc<Tokenizer>>,
    scheduler: Scheduler,
    batch: InputBatch,
    attention: Attention,
    /// By request key.
    active: Vec<Option<Active>>,
    keys: HashMap<RequestId, RequestKey>,
    next_id: u64,
    logits: Vec<f32>,
    sampled: Vec<(RequestKey, Result<u32, RequestError>)>,
    output: StepOutput,
    observer: Option<LogitsObserver>,
    stats: EngineStats,
    num_blocks: usize,
    startup: Startup,
}

impl Engine {
    /// Makes the layers, their builders, and a KV cache of the configured size; with a memory fraction, after a profile run.
    /// Without a tokenizer the engine makes no text.
    pub fn new(
        config: &EngineConfig,
        model: Box<dyn ModelRunner>,
        tokenizer: Option<Arc<Tokenizer>>,
        sandbox: &Sandbox,
        source: &BuilderSource,
    ) -> Result<Self, EngineError> {
        let plan = AttentionPlan::new(config, model.config())?;
        Self::with_plan(config, plan, model, tokenizer, sandbox, source)
    }

    /// As [`Engine::new`], with the plan that was made of the same config and model: for a caller whose source depends on
    /// the backend that was chosen.
    pub fn with_plan(
        config: &EngineConfig,
        plan: AttentionPlan,
        mut model: Box<dyn ModelRunner>,
        tokenizer: Option<Arc<Tokenizer>>,
        sandbox: &Sandbox,
        source: &BuilderSource,
    ) -> Result<Self, EngineError> {
        let sizes = model.config().clone();
        let limits = SchedulerLimits {
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
            max_model_len: config
                .max_model_len
                .unwrap_or(sizes.max_position_embeddings),
        };
        let batch = InputBatch::new(BatchShape {
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_model_len: limits.max_model_len,
            block_size: config.block_size,
            kernel_block_size: plan.kernel_block_size(),
        })?;
        let width = batch.table_width();
        let mut attention = Attention::new(config, &sizes, plan, width, sandbox, source)?;
        let infos = attention.builders().map(|(_, info)| info);
        let startup = Startup::new(config, attention.plan(), infos)?;
        let num_blocks = match config.cache_size {
            CacheSize::Blocks(blocks) => blocks,
            CacheSize::MemoryFraction(fraction) => {
                profiled_blocks(config, &limits, &mut *model, &attention, fraction)?
            }
        };
        let bytes = attention
            .plan()
            .block_bytes()
            .saturating_mul(num_blocks as u64);
        let total = memory::total_bytes();
        if bytes > total {
            return Err(EngineError::CacheTooLarge {
                blocks: num_blocks,
                bytes,
                total,
            });
        }
        attention.allocate(config, num_blocks);
        let kv = KvCacheManager::new(num_blocks, config.block_size, config.enable_prefix_caching);
        Ok(Self {
            model,
            tokenizer,
            scheduler: Scheduler::new(limits, kv),
            batch,
            attention,
            active: Vec::new(),
            keys: HashMap::new(),
            next_id: 0,
            logits: Vec::new(),
            sampled: Vec::with_capacity(config.max_num_seqs),
            output: StepOutput::default(),
            observer: None,
            stats: EngineStats::default(),
            num_blocks,
            startup,
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

    /// Handles that replace the groups' builders while requests run. Empty with a native builder.
    pub fn reload_handles(&self) -> Vec<ReloadHandle> {
        self.attention.reload_handles()
    }

    /// As [`Engine::reload_handles`], with each group's layers.
    pub fn group_handles(&self) -> Vec<(ReloadHandle, &AttentionGroup)> {
        self.attention.group_handles()
    }

    /// Each attention group's name and what its builder says of itself.
    pub fn builders(&self) -> impl Iterator<Item = (&str, &BuilderInfo)> {
        self.attention.builders()
    }

    /// Counts and times since the start.
    pub fn stats(&self) -> EngineStats {
        let (prefix_queries, prefix_hits) = self.scheduler.kv().prefix_stats();
        EngineStats {
            preemptions: self.scheduler.num_preemptions(),
            prefix_queries,
            prefix_hits,
            running: self.scheduler.num_running(),
            waiting: self.scheduler.num_waiting(),
            ..self.stats
        }
    }

    /// For tests and evaluation: `observer` sees every row of logits before a token is chosen from it.
    pub fn set_logits_observer(&mut self, observer: Option<LogitsObserver>) {
        self.observer = observer;
    }

    /// Is there nothing to do?
    pub fn is_idle(&self) -> bool {
        self.keys.is_empty()
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
        let GenerationRequest {
            prompt,
            params,
            forced,
        } = request;
        let sampler = Sampler::new(&params)?;
        self.check_tokens(&prompt)?;
        self.check_tokens(&forced)?;
        if self.tokenizer.is_none() && !params.stop.is_empty() {
            return Err(RequestError::NoTokenizer);
        }
        let text = self.tokenizer.is_some().then(|| Text {
            stream: TextStream::new(true),
            stops: StopMatcher::new(&params.stop),
        });
        let key = self.scheduler.add(prompt, Some(params.max_tokens))?;
        if self.active.len() <= key.index() {
            self.active.resize_with(key.index() + 1, || None);
        }
        self.active[key.index()] = Some(Active {
            id,
            params,
            sampler,
            forced,
            text,
        });
        self.keys.insert(id, key);
        Ok(())
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), RequestError> {
        let vocab_size = self.model.config().vocab_size;
        match tokens
            .iter()
            .position(|&token| token as usize >= vocab_size)
        {
            Some(index) => Err(RequestError::Vocabulary {
                token: tokens[index],
                index,
                vocab_size,
            }),
            None => Ok(()),
        }
    }

    /// Ends a request; it gets no further update. False if there is no such request (any more).
    pub fn abort(&mut self, id: RequestId) -> bool {
        let Some(key) = self.keys.remove(&id) else {
            return false;
        };
        self.active[key.index()] = None;
        self.scheduler.finish(key);
        true
    }

    /// One step. Without requests it does nothing and returns no updates.
    pub fn step(&mut self) -> &StepOutput {
        self.output.clear();
        let mut timings = StepTimings::default();
        let mut lap = Lap::start();
        let schedule = self.scheduler.schedule();
        let (num_reqs, num_tokens) = (schedule.rows.len(), schedule.num_tokens);
        self.output.num_preempted = schedule.preempted.len();
        if num_reqs == 0 {
            return &self.output;
        }
        timings.schedule_ns = lap.ns();
        self.fill_batch();
        timings.batch_ns = lap.ns();
        let ran = self.run(&mut timings);
        lap.ns();
        match ran {
            Ok(()) => {
                self.scheduler.complete();
                self.sample();
                timings.sample_ns = lap.ns();
                self.emit();
            }
            Err(failure) => self.fail(&failure),
        }
        self.output.num_reqs = num_reqs;
        self.output.num_tokens = num_tokens;
        self.stats.steps += 1;
        self.stats.tokens_computed += num_tokens as u64;
        timings.output_ns = lap.ns();
        self.stats.last = timings;
        self.stats.total += timings;
        &self.output
    }

    /// The last step's updates, by value.
    pub fn take_updates(&mut self) -> std::vec::Drain<'_, RequestUpdate> {
        self.output.updates.drain(..)
    }

    fn fill_batch(&mut self) {
        self.batch.begin();
        for row in &self.scheduler.last_schedule().rows {
            self.batch
                .push_scheduled(self.scheduler.request(row.key), row.num_tokens);
        }
    }

    /// Metadata and forward pass; leaves the logits.
    fn run(&mut self, timings: &mut StepTimings) -> Result<(), StepFailure> {
        self.batch
            .check()
            .map_err(|error| StepFailure::Metadata(StepError::Slots(error)))?;
        let inputs = self.batch.inputs();
        let outcome = self
            .attention
            .build(self.batch.common(), &inputs, timings)
            .map_err(StepFailure::Metadata)?;
        self.stats.fallback_steps += u64::from(outcome.fell_back);
        let mut lap = Lap::start();
        let mut layers = self.attention.layers(inputs.slot_mapping);
        let ran = self.model.forward(
            self.batch.token_ids(),
            self.batch.positions(),
            &mut layers,
            self.batch.logits_rows(),
            &mut self.logits,
        );
        timings.model_ns = lap.ns();
        ran.map_err(StepFailure::Model)
    }

    /// A token for every row whose tokens are all computed now.
    fn sample(&mut self) {
        self.sampled.clear();
        let vocab_size = self.model.config().vocab_size;
        let mut rows = self.logits.chunks_exact(vocab_size);
        for row in &self.scheduler.last_schedule().rows {
            let request = self.scheduler.request(row.key);
            if request.num_computed() < request.tokens().len() {
                continue;
            }
            let (Some(logits), Some(active)) = (rows.next(), self.active[row.key.index()].as_mut())
            else {
                continue;
            };
            let index = request.output().len();
            if let Some(observer) = &mut self.observer {
                observer(active.id, index, logits);
            }
            let token = match active.forced.get(index) {
                Some(&token) => Ok(token),
                None => active.sampler.sample(logits).map_err(RequestError::from),
            };
            self.sampled.push((row.key, token));
        }
    }

    fn emit(&mut self) {
        let mut sampled = std::mem::take(&mut self.sampled);
        for (key, token) in sampled.drain(..) {
            match token {
                Ok(token) => self.emit_token(key, token),
                Err(error) => self.end_with(key, error),
            }
        }
        self.sampled = sampled;
    }

    fn emit_token(&mut self, key: RequestKey, token: u32) {
        self.scheduler.append(key, token);
        self.stats.tokens_sampled += 1;
        let at_limit = self.scheduler.request(key).is_at_limit();
        let Some(active) = self.active[key.index()].as_mut() else {
            return;
        };
        let eos = &self.model.config().eos_token_ids;
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
        if finish.is_some() {
            self.forget(id, key);
            self.scheduler.finish(key);
        }
        self.output.updates.push(RequestUpdate {
            id,
            token: Some(token),
            text,
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
        self.scheduler.finish(key);
        self.output.updates.push(RequestUpdate {
            id,
            token: None,
            text: String::new(),
            finish: Some(FinishReason::Error),
            error: Some(error),
        });
    }

    /// Ends every request of the step. What the step should have written is not in the cache, so its blocks lose the names
    /// under which others would find them.
    fn fail(&mut self, failure: &StepFailure) {
        tracing::error!(error = ?failure, "a step failed; its requests end with an error");
        self.stats.failed_steps += 1;
        for index in 0..self.scheduler.last_schedule().rows.len() {
            let key = self.scheduler.last_schedule().rows[index].key;
            self.scheduler.withdraw(key);
        }
        for index in 0..self.scheduler.last_schedule().rows.len() {
            let key = self.scheduler.last_schedule().rows[index].key;
            self.end_with(key, failure.for_request());
        }
    }
}

impl Text {
    /// The text that became certain, and whether a stop string ended it. A stop token's own text is not shown; at the end
    /// everything held back is.
    fn push(
        &mut self,
        tokenizer: &Tokenizer,
        token: u32,
        is_stop: bool,
        is_last: bool,
    ) -> (String, bool) {
        let mut text = String::new();
        if !is_stop {
            let piece = self.stream.push(tokenizer, token);
            let outcome = self.stops.push(&piece);
            text = outcome.text;
            if outcome.stopped.is_some() {
                return (text, true);
            }
        }
        if is_stop || is_last {
            let outcome = self.stops.push(&self.stream.finish(tokenizer));
            text.push_str(&outcome.text);
            if outcome.stopped.is_some() {
                return (text, true);
            }
            text.push_str(&self.stops.finish());
        }
        (text, false)
    }
}

/// Blocks that fit into `fraction` of memory beside everything that a step of the largest size needs.
fn profiled_blocks(
    config: &EngineConfig,
    limits: &SchedulerLimits,
    model: &mut dyn ModelRunner,
    attention: &Attention,
    fraction: f64,
) -> Result<usize, EngineError> {
    let tokens = limits.max_num_batched_tokens.min(MAX_PROFILE_TOKENS);
    let before = memory::resident_bytes();
    let positions: Vec<i64> = (0..tokens)
        .map(|i| (i % limits.max_model_len) as i64)
        .collect();
    let logits_rows: Vec<usize> = (0..tokens.min(limits.max_num_seqs)).collect();
    let mut logits = Vec::new();
    let mut layers = attention.profile_layers();
    model
        .forward(
            &vec![0; tokens],
            &positions,
            &mut layers,
            &logits_rows,
            &mut logits,
        )
        .map_err(EngineError::Profile)?;
    let after = memory::resident_bytes();
    let scratch =
        after.saturating_sub(before) * limits.max_num_batched_tokens as u64 / tokens as u64;
    let used = before + scratch;
    let total = memory::total_bytes();
    let budget = (total as f64 * fraction) as u64;
    let block_bytes = attention.plan().block_bytes();
    let most = limits.max_num_seqs * limits.max_model_len.div_ceil(config.block_size) + 1;
    let blocks = (budget.saturating_sub(used) / block_bytes).min(most as u64) as usize;
    if blocks < 2 {
        return Err(EngineError::NoMemory {
            fraction,
            total,
            budget,
            used,
            tokens: limits.max_num_batched_tokens,
        });
    }
    tracing::info!(blocks, used, budget, "sized the KV cache");
    Ok(blocks)
}
