//! A device that computes nothing: it says how long a step would take by a simple cost model, and its tokens are those that the
//! requests name. So the scheduler, the KV blocks, the batch and the builders can be driven at any speed, without a model.
//!
//! The builders are told of an H100-like GPU; no graph is captured. This module must never know a builder or a scheduler.

use std::collections::VecDeque;

use timetable_attention::VerifyContext;
use timetable_types::{Dtype, Family, Metadata};

use crate::{
    config::{CacheSize, EngineConfig, EngineError},
    executor::{
        DeviceFacts, Executor, ExecutorSetup, GraphPlan, SegmentPlace, Step, StepFailure,
        StepResults, Unprepared,
    },
    model::{Architecture, ModelConfig, RopeConfig, RopeScaling, RopeStyle, Traits},
};

/// What a step costs on the simulated device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCost {
    /// Of every step: reading the weights, launching the kernels. Nanoseconds.
    pub step_ns: f64,
    /// Of every token that is computed. Nanoseconds.
    pub token_ns: f64,
    /// Of every key that a row of the step has, its context's included: reading the cache. Nanoseconds.
    pub key_ns: f64,
}

impl Default for StepCost {
    /// About an 8-billion-parameter model in bf16 on an H100: 16 GB of weights and 128 KiB of keys and values a token, both read
    /// at 3 TB/s; 50,000 prompt tokens a second.
    fn default() -> Self {
        Self {
            step_ns: 6e6,
            token_ns: 2e4,
            key_ns: 45.0,
        }
    }
}

impl StepCost {
    /// A step of `tokens` tokens whose rows have `keys` keys in all. Nanoseconds.
    pub fn of(&self, tokens: u64, keys: u64) -> u64 {
        (self.step_ns + self.token_ns * tokens as f64 + self.key_ns * keys as f64) as u64
    }
}

/// Sizes like those of an 8-billion-parameter Llama 3, for a device that computes nothing.
pub fn simulated_model() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        vocab_size: 128_256,
        hidden_size: 4096,
        intermediate_size: 14_336,
        num_hidden_layers: 32,
        num_attention_heads: 32,
        num_key_value_heads: 8,
        head_dim: 128,
        max_position_embeddings: 131_072,
        rms_norm_eps: 1e-5,
        rope: RopeConfig {
            theta: 500_000.0,
            dim: 128,
            style: RopeStyle::HalfRotation,
            scaling: RopeScaling::None,
        },
        tie_word_embeddings: false,
        attention_bias: false,
        sliding_window: None,
        first_window_layer: 0,
        mixers: Vec::new(),
        traits: Traits::default(),
        eos_token_ids: Vec::new(),
        bos_token_id: None,
    }
}

/// Runs steps that compute nothing. A step's simulated time is its [`kernel_ns`](crate::StepTimings::kernel_ns).
#[derive(Debug)]
pub struct SimulatedExecutor {
    model: ModelConfig,
    cost: StepCost,
    num_blocks: usize,
    done: VecDeque<StepResults>,
    spare: Vec<StepResults>,
}

impl SimulatedExecutor {
    /// For a model of these sizes.
    pub fn new(model: ModelConfig, cost: StepCost) -> Self {
        Self {
            model,
            cost,
            num_blocks: 0,
            done: VecDeque::new(),
            spare: Vec::new(),
        }
    }
}

impl Executor for SimulatedExecutor {
    fn model_config(&self) -> &ModelConfig {
        &self.model
    }

    fn facts(&self, config: &EngineConfig) -> Result<DeviceFacts, EngineError> {
        const MULTIPROCESSORS: u32 = 132;
        let facts = DeviceFacts::cuda(
            config,
            (9, 0),
            MULTIPROCESSORS,
            config.model_dtype.named().unwrap_or(Dtype::Bfloat16),
            self.model.head_dim as u32,
        );
        // Whatever the metadata say, nothing is computed by them.
        Ok(DeviceFacts {
            families: &Family::ALL,
            virtual_batches: true,
            ..facts
        })
    }

    fn max_segments(&self) -> usize {
        usize::MAX
    }

    fn setup(&mut self, setup: &ExecutorSetup<'_>) -> Result<(), EngineError> {
        // There is no memory of which a fraction could be meant.
        let CacheSize::Blocks(blocks) = setup.cache.size else {
            return Err(EngineError::Setting {
                name: "cache_size",
                value: format!("{:?}", setup.cache.size),
                remedy: "a simulated device has no memory; give a number of blocks",
            });
        };
        self.num_blocks = blocks;
        Ok(())
    }

    fn start(&mut self, _graphs: GraphPlan) -> Result<usize, EngineError> {
        Ok(self.num_blocks)
    }

    fn prepare(
        &mut self,
        _group: usize,
        _segment: SegmentPlace,
        _metadata: &Metadata,
        _context: &VerifyContext<'_>,
    ) -> Result<(), Unprepared> {
        Ok(())
    }

    fn leave_out(&mut self, _segment: usize) {}

    fn submit(&mut self, step: Step<'_>) -> Result<(), StepFailure> {
        let mut results = self.spare.pop().unwrap_or_default();
        results.clear();
        let vocab_size = self.model.vocab_size.max(1);
        let inputs = step.batch.inputs();
        for (&row, sampling) in step.batch.logits_rows().iter().zip(step.sampling) {
            // A request that names no tokens gets its positions: those are the likeliest.
            let position = inputs.positions[row] as usize % vocab_size;
            let token = sampling.forced.unwrap_or(position as u32);
            results.tokens.push(Ok(token));
            if sampling.logits {
                let first = results.logits.len();
                results.logits.resize(first + vocab_size, 0.0);
                results.logits[first + position] = 1.0;
            }
        }
        let keys: u64 = inputs.seq_lens.iter().map(|&len| len.max(0) as u64).sum();
        let tokens = step.batch.num_actual_tokens() as u64;
        results.timings.kernel_ns = self.cost.of(tokens, keys);
        self.done.push_back(results);
        Ok(())
    }

    fn collect(&mut self, results: &mut StepResults) -> Result<(), StepFailure> {
        let Some(done) = self.done.pop_front() else {
            return Err(StepFailure::Device {
                message: "no step is in flight: this is a defect of the step loop".to_owned(),
                fatal: false,
            });
        };
        self.spare.push(std::mem::replace(results, done));
        Ok(())
    }
}
