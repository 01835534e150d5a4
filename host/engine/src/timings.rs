//! Where a step's time went. Numbers only: nothing is formatted while steps run.

use crate::{histogram::Histogram, output::FinishReason, speculation::MAX_SPECULATIVE_TOKENS};
use std::{
    ops::AddAssign,
    time::{Duration, Instant},
};

/// Nanoseconds of the parts of one step, or of many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimings {
    /// Choosing rows and blocks.
    pub schedule_ns: u64,
    /// Tables, slots, positions, `CommonAttentionMetadata`.
    pub batch_ns: u64,
    /// The builders, a fallback in the same step included.
    pub build_ns: u64,
    /// The verifier: the step's tensors once, each group's metadata once.
    pub verify_ns: u64,
    /// Symbolic tensors resolved, schedules flattened for the layers.
    pub prepare_ns: u64,
    /// The model's forward pass: its layers, the scatter into the cache, attention.
    pub model_ns: u64,
    /// From logits to tokens.
    pub sample_ns: u64,
    /// Tokens appended, ends found, text made, updates written.
    pub output_ns: u64,
    /// On another device than the host: the step packed and enqueued.
    pub submit_ns: u64,
    /// On another device than the host: waiting for the step's tokens.
    pub wait_ns: u64,
    /// The device's own time of copies to it; none on the host. The device's times pass while the host works.
    pub copy_ns: u64,
    /// The device's own time from the step's first kernel to its last one's end; none on the host.
    pub kernel_ns: u64,
    /// The device's own time between the step before and this one's first copy; none on the host.
    pub idle_ns: u64,
}

impl StepTimings {
    /// What [`StepTimings::parts`] are, in order: the host's, then the device's.
    pub const NAMES: [&'static str; 13] = [
        "schedule", "batch", "build", "verify", "prepare", "submit", "wait", "model", "sample",
        "output", "copy", "kernel", "idle",
    ];
    /// How many of them are the host's.
    pub const HOST_PARTS: usize = 10;

    /// Every part, in nanoseconds.
    pub const fn parts(&self) -> [u64; Self::NAMES.len()] {
        let Self {
            schedule_ns,
            batch_ns,
            build_ns,
            verify_ns,
            prepare_ns,
            submit_ns,
            wait_ns,
            model_ns,
            sample_ns,
            output_ns,
            copy_ns,
            kernel_ns,
            idle_ns,
        } = *self;
        [
            schedule_ns,
            batch_ns,
            build_ns,
            verify_ns,
            prepare_ns,
            submit_ns,
            wait_ns,
            model_ns,
            sample_ns,
            output_ns,
            copy_ns,
            kernel_ns,
            idle_ns,
        ]
    }

    /// The inverse of [`StepTimings::parts`].
    pub const fn of_parts(parts: [u64; Self::NAMES.len()]) -> Self {
        let [
            schedule_ns,
            batch_ns,
            build_ns,
            verify_ns,
            prepare_ns,
            submit_ns,
            wait_ns,
            model_ns,
            sample_ns,
            output_ns,
            copy_ns,
            kernel_ns,
            idle_ns,
        ] = parts;
        Self {
            schedule_ns,
            batch_ns,
            build_ns,
            verify_ns,
            prepare_ns,
            submit_ns,
            wait_ns,
            model_ns,
            sample_ns,
            output_ns,
            copy_ns,
            kernel_ns,
            idle_ns,
        }
    }

    /// Everything on the host that is not the model, not sampling and not waiting.
    pub fn host_ns(&self) -> u64 {
        self.total_ns() - self.model_ns - self.sample_ns - self.wait_ns
    }

    /// All of the host's thread.
    pub fn total_ns(&self) -> u64 {
        self.schedule_ns
            + self.batch_ns
            + self.build_ns
            + self.verify_ns
            + self.prepare_ns
            + self.model_ns
            + self.sample_ns
            + self.output_ns
            + self.submit_ns
            + self.wait_ns
    }
}

impl AddAssign for StepTimings {
    fn add_assign(&mut self, other: Self) {
        self.schedule_ns += other.schedule_ns;
        self.batch_ns += other.batch_ns;
        self.build_ns += other.build_ns;
        self.verify_ns += other.verify_ns;
        self.prepare_ns += other.prepare_ns;
        self.model_ns += other.model_ns;
        self.sample_ns += other.sample_ns;
        self.output_ns += other.output_ns;
        self.submit_ns += other.submit_ns;
        self.wait_ns += other.wait_ns;
        self.copy_ns += other.copy_ns;
        self.kernel_ns += other.kernel_ns;
        self.idle_ns += other.idle_ns;
    }
}

/// Bounds of a step's tokens: the field's.
pub const STEP_TOKENS: [u64; 14] = [
    1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768,
];

/// Bounds of a step's time, in nanoseconds: 50 µs to 10 s.
pub const STEP_NS: [u64; 17] = [
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
];

/// What became of drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpeculationStats {
    /// Rows that verified drafts.
    pub num_drafts: u64,
    /// Tokens that they verified.
    pub num_draft_tokens: u64,
    /// Of them, those that the model chose too.
    pub num_accepted_tokens: u64,
    /// Accepted tokens by their place among a row's drafts.
    pub num_accepted_tokens_per_pos: [u64; MAX_SPECULATIVE_TOKENS],
}

impl SpeculationStats {
    /// [`SpeculationStats::num_accepted_tokens_per_pos`] up to the last place where any was accepted.
    pub fn accepted_per_pos(&self) -> &[u64] {
        let counts = &self.num_accepted_tokens_per_pos;
        let len = counts.iter().take_while(|count| **count > 0).count();
        &counts[..len]
    }

    /// A row with drafts was computed.
    pub(crate) fn count(&mut self, num_drafts: usize, num_accepted: usize) {
        self.num_drafts += 1;
        self.num_draft_tokens += num_drafts as u64;
        self.num_accepted_tokens += num_accepted as u64;
        for count in &mut self.num_accepted_tokens_per_pos[..num_accepted] {
            *count += 1;
        }
    }
}

/// What the engine has done since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Steps with at least one row.
    pub steps: u64,
    /// Steps whose requests failed.
    pub failed_steps: u64,
    /// Steps in which some group was served by its plain builder after a fault in the same step.
    pub fallback_steps: u64,
    /// Tokens computed.
    pub tokens_computed: u64,
    /// Tokens sampled.
    pub tokens_sampled: u64,
    /// Drafted and accepted tokens.
    pub speculation: SpeculationStats,
    /// Times that a request lost its blocks to another.
    pub preemptions: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found there.
    pub prefix_hits: u64,
    /// Prompt tokens of requests that got their first token.
    pub prompt_tokens: u64,
    /// Requests that ended, by [`FinishReason`].
    pub finished: [u64; FinishReason::ALL.len()],
    /// Tokens of each step, by [`STEP_TOKENS`].
    pub step_tokens: Histogram<{ STEP_TOKENS.len() }>,
    /// Nanoseconds of the host's thread for each step, waiting included, by [`STEP_NS`].
    pub step_ns: Histogram<{ STEP_NS.len() }>,
    /// Blocks of the KV cache that requests can have.
    pub kv_blocks: usize,
    /// Those that requests hold.
    pub kv_blocks_used: usize,
    /// Requests that hold blocks.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// The step before this moment.
    pub last: StepTimings,
    /// All steps.
    pub total: StepTimings,
}

/// A clock that is read once per part.
pub(crate) struct Lap(Instant);

impl Lap {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// Time since the last call.
    pub(crate) fn ns(&mut self) -> u64 {
        let now = Instant::now();
        let elapsed = now - std::mem::replace(&mut self.0, now);
        nanoseconds(elapsed)
    }
}

pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
