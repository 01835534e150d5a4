//! 05: the sandbox in a serving engine that is not Timetable's: a scheduler loop of its own, builders replaced while requests run,
//! a builder that faults, and what the sandbox says of all that.
//!
//! ```text
//! cargo run --release -p timetable-examples --example 05_other_engine
//! ```
//!
//! What such an engine must do itself is in `Engine::step`: give the step's own tensors to `verify_step`, take metadata from the
//! group, and hold it to the verifier before its kernels see it. Here the kernels are left out; each step's work is counted.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use timetable_attention::batch::{GroupStep, SlotRule, StepTensors, slot_mapping_into};
use timetable_attention::{Grant, Verifier, VerifyContext, plain_builder, verify_step};
use timetable_sandbox::{
    BuilderStatus, BuiltBy, FaultPolicy, GroupBuilder, GroupSetup, Limits, ReloadHandle, Sandbox,
    chosen,
};
use timetable_types::{BuilderConfig, Family};

const BLOCK_SIZE: usize = 16;
const NUM_BLOCKS: usize = 1_024;
/// Requests that run at the same time, tokens of a step, blocks of a request: at most.
const MAX_REQUESTS: usize = 12;
const MAX_TOKENS: usize = 256;
const MAX_BLOCKS: usize = 64;

/// A request of the engine.
struct Request {
    prompt: usize,
    answer: usize,
    computed: usize,
    blocks: Vec<i32>,
}

impl Request {
    /// Tokens that are still to be computed.
    fn left(&self) -> usize {
        self.prompt + self.answer - self.computed
    }

    /// Tokens of the next step: the rest of the prompt, as far as there is room, or one.
    fn next(&self, room: usize) -> usize {
        self.prompt.saturating_sub(self.computed).max(1).min(room)
    }
}

/// The engine: a queue, what runs, free blocks, and one attention group's builder.
struct Engine {
    waiting: VecDeque<Request>,
    running: Vec<Request>,
    free: Vec<i32>,
    config: BuilderConfig,
    group: GroupBuilder,
    verifier: RefCell<Verifier>,
    /// Finished requests, steps, and steps that the plain builder served.
    finished: usize,
    steps: usize,
    plain: usize,
    work_items: u64,
}

impl Engine {
    fn new(sandbox: &Sandbox, bytes: &[u8], config: BuilderConfig) -> Result<Engine> {
        let component = sandbox.load(bytes)?;
        let plain = plain_builder(component.family(), &config);
        let setup = GroupSetup {
            name: "layers.0-31".to_owned(),
            config: config.clone(),
            plain: plain.map_err(|error| anyhow::anyhow!(error.message))?,
            // What a new version must do before it serves, besides building small steps.
            acceptance: None,
        };
        Ok(Engine {
            waiting: VecDeque::new(),
            running: Vec::new(),
            free: (0..NUM_BLOCKS as i32).collect(),
            group: GroupBuilder::new(sandbox, setup, &component, "embedded")?,
            config,
            verifier: RefCell::default(),
            finished: 0,
            steps: 0,
            plain: 0,
            work_items: 0,
        })
    }

    /// Admits requests and gives each of the running its tokens and blocks; decodes go first.
    fn schedule(&mut self) -> Vec<usize> {
        while self.running.len() < MAX_REQUESTS
            && let Some(request) = self.waiting.pop_front()
        {
            self.running.push(request);
        }
        self.running
            .sort_by_key(|request| request.computed < request.prompt);
        let mut room = MAX_TOKENS;
        let mut tokens = Vec::new();
        for request in &mut self.running {
            if room == 0 {
                break;
            }
            let count = request.next(room);
            room -= count;
            let blocks = (request.computed + count).div_ceil(BLOCK_SIZE);
            while request.blocks.len() < blocks {
                request
                    .blocks
                    .push(self.free.pop().expect("the cache is large enough for all"));
            }
            tokens.push(count);
        }
        tokens
    }

    /// The step's tensors, as every engine of the field has them.
    fn batch(&self, tokens: &[usize]) -> GroupStep {
        let rows = self.running.iter().zip(tokens);
        let (mut query_start_loc, mut positions) = (vec![0], Vec::new());
        let (mut seq_lens, mut block_table) = (Vec::new(), Vec::new());
        for (request, &count) in rows {
            positions.extend((request.computed..request.computed + count).map(|at| at as i64));
            query_start_loc.push(positions.len() as i32);
            seq_lens.push((request.computed + count) as i32);
            block_table.extend(&request.blocks);
            block_table.resize(seq_lens.len() * MAX_BLOCKS, 0);
        }
        let mut slot_mapping = vec![0; positions.len()];
        let rule = SlotRule {
            block_size: BLOCK_SIZE as u32,
            context_parallel: None,
        };
        slot_mapping_into(
            rule,
            |row| block_table.get(row * MAX_BLOCKS..(row + 1) * MAX_BLOCKS),
            &query_start_loc,
            &positions,
            &mut slot_mapping,
        );
        let total = positions.len() as u32;
        let longest = seq_lens.iter().copied().max().unwrap_or(0) as u32;
        let tensors = StepTensors {
            query_start_loc,
            seq_lens: seq_lens.clone(),
            block_table,
            block_table_width: MAX_BLOCKS,
            slot_mapping,
            positions,
            ..StepTensors::default()
        };
        let query = tokens.iter().copied().max().unwrap_or(0) as u32;
        let mut step = GroupStep::new(tensors, seq_lens, total, query, longest);
        // Those behind the last that has tokens wait for the next step.
        let scheduled = &self.running[..tokens.len()];
        let prefills = scheduled
            .iter()
            .map(|request| request.computed < request.prompt);
        step.cam.is_prefilling = prefills.map(u8::from).collect();
        step
    }

    /// One step. False if there is nothing left to do.
    fn step(&mut self) -> Result<bool> {
        let tokens = self.schedule();
        if tokens.is_empty() {
            return Ok(false);
        }
        let step = self.batch(&tokens);
        let inputs = step.tensors.inputs();
        let context = VerifyContext {
            config: &self.config,
            common: &step.cam,
            inputs: &inputs,
            promise: None,
            grant: Grant::Exact,
            num_blocks: NUM_BLOCKS as u32,
        };
        verify_step(&context).context("the engine's own tensors")?;
        // A new version is taken here, and nowhere else; it allocates and compiles nothing on this thread.
        self.group.step_boundary();
        let built = self.group.build_in_context(&context, false, |metadata| {
            self.verifier.borrow_mut().verify(metadata, &context)
        })?;
        // Here the engine's kernels would run `built.metadata`.
        self.steps += 1;
        self.plain += usize::from(built.built_by == BuiltBy::Plain);
        let rows = tokens.len() as u32;
        self.work_items += chosen(&built.metadata, rows).map_or(0, |(_, items)| items);
        for (request, count) in self.running.iter_mut().zip(tokens) {
            request.computed += count;
        }
        let free = &mut self.free;
        let before = self.running.len();
        self.running.retain(|request| {
            let goes_on = request.left() > 0;
            if !goes_on {
                free.extend(&request.blocks);
            }
            goes_on
        });
        self.finished += before - self.running.len();
        Ok(true)
    }
}

/// The group's configuration: what a builder may see.
fn config(options: &[(&str, &str)]) -> Result<BuilderConfig> {
    let mut config = timetable_examples::step(&[(1, 1)])?.config;
    config.scheduler.max_num_seqs = MAX_REQUESTS as u32;
    config.scheduler.max_num_batched_tokens = MAX_TOKENS as u32;
    config.scheduler.max_model_len = (MAX_BLOCKS * BLOCK_SIZE) as u32;
    config.scheduler.max_num_blocks_per_req = MAX_BLOCKS as u32;
    let options = options.iter();
    config.options = options
        .map(|&(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    Ok(config)
}

/// Waits until the group's state is as `wanted` says.
fn wait(handle: &ReloadHandle, wanted: impl Fn(&BuilderStatus) -> bool) -> Result<BuilderStatus> {
    let begun = Instant::now();
    loop {
        let status = handle.status();
        if wanted(&status) {
            return Ok(status);
        }
        ensure!(
            begun.elapsed() < Duration::from_secs(60),
            "it never came: {status:?}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What an operator does meanwhile, on a thread of its own; the group's state after each deed.
fn operate(handle: &ReloadHandle) -> Result<Vec<BuilderStatus>> {
    let served = |status: &BuilderStatus| status.pending.is_none() && status.steps > 100;
    let embedded =
        |name: &str| timetable_reference::component(name).context("an embedded component");
    // Who operates this engine takes bad versions back himself; the host would return to the last good one after some faults.
    handle.set_policy(FaultPolicy {
        return_to_last_good: false,
        ..handle.status().policy
    })?;
    let mut seen = vec![wait(handle, served)?];
    handle.reload(embedded("flash-attn-fixed-split")?.bytes, "fixed-split")?;
    seen.push(wait(handle, served)?);
    // A component that is none changes nothing.
    let refused = handle.reload(b"certainly not wasm", "a mistake");
    ensure!(refused.is_err(), "text is no component");
    // One that traps in every step of nine requests or more: it passes the small steps of a reload.
    let chaos = timetable_reference::chaos(Family::FlashAttn).context("the chaos builder")?;
    handle.reload(chaos, "chaos")?;
    seen.push(wait(handle, |status| {
        status.all_faults.contains_key("trap")
    })?);
    handle.rollback()?;
    seen.push(wait(handle, served)?);
    Ok(seen)
}

/// What the example found.
pub struct Outcome {
    /// What it printed.
    pub text: String,
    /// Requests that were admitted, and that ended well.
    pub requests: [usize; 2],
    /// Steps in all, and those of the plain builder.
    pub steps: [usize; 2],
    /// The group's state: at first, after the reload, after the fault, after the rollback.
    pub states: Vec<BuilderStatus>,
}

/// Serves until the operator has done everything.
pub fn run() -> Result<Outcome> {
    let sandbox = Sandbox::new(Limits::default())?;
    let first = timetable_reference::component("flash-attn").context("an embedded component")?;
    // The chaos builder's options; others do not know them.
    let config = config(&[("chaos", "trap"), ("chaos-min-rows", "9")])?;
    let mut engine = Engine::new(&sandbox, first.bytes, config)?;
    let handle = engine.group.handle();
    let done = AtomicBool::new(false);
    let mut admitted = 0;
    let states = std::thread::scope(|scope| {
        let operator = scope.spawn(|| {
            let seen = operate(&handle);
            done.store(true, Relaxed);
            seen
        });
        loop {
            // Requests of many lengths keep coming until the operator is done.
            while !done.load(Relaxed) && engine.waiting.len() < MAX_REQUESTS {
                admitted += 1;
                engine.waiting.push_back(Request {
                    prompt: 1 + admitted * 37 % 300,
                    answer: 1 + admitted * 11 % 60,
                    computed: 0,
                    blocks: Vec::new(),
                });
            }
            if !engine.step()? {
                break;
            }
        }
        operator.join().expect("the operator does not panic")
    })?;

    let mut text = String::new();
    for status in &states {
        let version = status.active.as_ref();
        writeln!(
            text,
            "{}: {:12} {:24} {:6} steps, {:6} by the plain builder, faults {:?}",
            status.group,
            status.state.to_string(),
            version.map_or("", |version| &version.origin),
            status.steps,
            status.plain_steps,
            status.all_faults,
        )?;
    }
    writeln!(
        text,
        "{} requests admitted, {} finished, {} steps, {} by the plain builder, {} work items",
        admitted, engine.finished, engine.steps, engine.plain, engine.work_items
    )?;
    Ok(Outcome {
        text,
        requests: [admitted, engine.finished],
        steps: [engine.steps, engine.plain],
        states,
    })
}

#[allow(dead_code, reason = "the test runs `run`")]
fn main() -> Result<()> {
    print!("{}", run()?.text);
    Ok(())
}
