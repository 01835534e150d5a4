//! The CPU executor: the model's forward pass on the host's processors, one layer of the CPU device for each of the model's,
//! and sampling on the host.
//!
//! A step runs whole in `submit`; `collect` hands its tokens out. This module must never know a builder or a scheduler.

mod layers;

use std::{collections::VecDeque, ops::Range};

use timetable_attention::VerifyContext;
use timetable_types::Metadata;

use crate::{
    config::{CacheSize, DeviceChoice, EngineConfig, EngineError, ModelDtype},
    executor::{
        CacheRequest, DeviceFacts, Executor, ExecutorSetup, GraphPlan, SegmentPlace, Step,
        StepFailure, StepResults, Unprepared,
    },
    memory,
    model::ModelConfig,
    runner::ModelRunner,
    sampling::{Choice, Chooser},
    timings::Lap,
};
use layers::{Layer, Prepared, ProfileLayers, Room, StepLayers};

/// Tokens of the profile run at most. Its scratch memory grows with its tokens, so a longer step's is computed from it.
const MAX_PROFILE_TOKENS: usize = 128;

/// What `setup` leaves for `start`.
struct Sizes {
    cache: CacheRequest,
    num_states: usize,
    /// Kernel blocks of one of the manager's.
    ratio: usize,
    max_num_logits: usize,
    max_num_batched_tokens: usize,
    max_model_len: usize,
}

/// Runs a [`ModelRunner`] on the host.
pub struct CpuExecutor {
    model: Box<dyn ModelRunner>,
    sizes: Option<Sizes>,
    layers: Vec<Layer>,
    /// By group, then by segment of the step.
    prepared: Vec<Vec<Prepared>>,
    /// The segments' tokens.
    segments: Vec<Range<usize>>,
    token_ids: Vec<u32>,
    /// The tokens of the step that was submitted last, for references.
    last_tokens: Vec<u32>,
    logits: Vec<f32>,
    chooser: Chooser,
    /// Steps that were not collected yet, and memory of those that were.
    done: VecDeque<StepResults>,
    spare: Vec<StepResults>,
}

impl CpuExecutor {
    /// For a model that is loaded.
    pub fn new(model: Box<dyn ModelRunner>) -> Self {
        Self {
            model,
            sizes: None,
            layers: Vec::new(),
            prepared: Vec::new(),
            segments: Vec::new(),
            token_ids: Vec::new(),
            last_tokens: Vec::new(),
            logits: Vec::new(),
            chooser: Chooser::default(),
            done: VecDeque::new(),
            spare: Vec::new(),
        }
    }

    /// Blocks that fit into `fraction` of memory beside everything that a step of the largest size needs.
    fn profiled_blocks(&mut self, sizes: &Sizes, fraction: f64) -> Result<usize, EngineError> {
        let tokens = sizes.max_num_batched_tokens.min(MAX_PROFILE_TOKENS);
        let before = memory::resident_bytes();
        let positions: Vec<i64> = (0..tokens)
            .map(|i| (i % sizes.max_model_len) as i64)
            .collect();
        let logits_rows: Vec<usize> = (0..tokens.min(sizes.max_num_logits)).collect();
        let mut logits = Vec::new();
        let mut layers = ProfileLayers {
            layers: &mut self.layers,
        };
        self.model
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
            after.saturating_sub(before) * sizes.max_num_batched_tokens as u64 / tokens as u64;
        let of_layers = self.layers.iter();
        let of_layers = of_layers.map(|layer| layer.scratch_bytes(sizes.max_num_batched_tokens));
        let used = (before + scratch).saturating_add(of_layers.max().unwrap_or(0));
        let total = memory::total_bytes();
        let budget = (total as f64 * fraction) as u64;
        let CacheRequest {
            block_bytes,
            states_bytes,
            most,
            ..
        } = sizes.cache;
        let used = used.saturating_add(states_bytes);
        let left = budget.saturating_sub(used);
        // Without keys every block is free of cost, if the states fit.
        let blocks = left.checked_div(block_bytes);
        let blocks = blocks.unwrap_or(left).min(most as u64) as usize;
        if blocks < 2 {
            return Err(EngineError::NoMemory {
                fraction,
                total,
                budget,
                used,
                tokens: sizes.max_num_batched_tokens,
            });
        }
        tracing::info!(blocks, used, budget, "sized the KV cache");
        Ok(blocks)
    }

    /// The forward pass and the tokens, into `results`.
    fn run(&mut self, step: &Step<'_>, results: &mut StepResults) -> Result<(), StepFailure> {
        let Step {
            batch, sampling, ..
        } = step;
        self.token_ids.clear();
        for &id in batch.token_ids() {
            // A reference names a token of the step before, which this device has always chosen by now.
            let token = u32::try_from(id).ok().or_else(|| {
                let index = usize::try_from(-1 - i64::from(id)).ok()?;
                self.last_tokens.get(index).copied()
            });
            self.token_ids
                .push(token.ok_or_else(|| StepFailure::Device {
                    message: format!(
                        "token reference {id} names none of the {} tokens of the step before: this is a defect of the step loop",
                        self.last_tokens.len()
                    ),
                    fatal: false,
                })?);
        }
        let mut lap = Lap::start();
        let inputs = batch.inputs();
        self.segments.clear();
        let tokens = (0..batch.num_segments()).map(|index| batch.segment(index).tokens());
        self.segments.extend(tokens);
        let mut layers = StepLayers {
            prepared: &self.prepared,
            segments: &self.segments,
            layers: &mut self.layers,
            slot_mapping: inputs.slot_mapping,
        };
        let ran = self.model.forward(
            &self.token_ids,
            batch.positions(),
            &mut layers,
            batch.logits_rows(),
            &mut self.logits,
        );
        results.timings.model_ns = lap.ns();
        ran?;
        let rows = self.logits.chunks_exact(self.model.config().vocab_size);
        for (row, logits) in sampling.iter().zip(rows) {
            let choice = Choice {
                temperature: row.temperature,
                top_k: row.top_k as usize,
                top_p: row.top_p,
                min_p: 0.0,
            };
            results.tokens.push(match row.forced {
                Some(token) => Ok(token),
                None => self.chooser.choose(logits, choice, row.uniform),
            });
            if row.logits {
                results.logits.extend_from_slice(logits);
            }
        }
        // A row without a token ends with an error; what is computed for it meanwhile is dropped.
        let tokens = results.tokens.iter();
        self.last_tokens.clear();
        self.last_tokens
            .extend(tokens.map(|token| token.as_ref().copied().unwrap_or(0)));
        results.timings.sample_ns = lap.ns();
        Ok(())
    }
}

impl Executor for CpuExecutor {
    fn model_config(&self) -> &ModelConfig {
        self.model.config()
    }

    fn facts(&self, config: &EngineConfig) -> Result<DeviceFacts, EngineError> {
        if config.device != DeviceChoice::Cpu {
            return Err(EngineError::Setting {
                name: "device",
                value: config.device.to_string(),
                remedy: "a model on the host's processors runs on cpu; make the engine with an executor of the other device",
            });
        }
        if !matches!(config.model_dtype, ModelDtype::Auto | ModelDtype::Float32) {
            return Err(EngineError::Setting {
                name: "dtype",
                value: format!("{:?}", config.model_dtype).to_lowercase(),
                remedy: "the CPU computes in float32; leave it out, or choose a GPU",
            });
        }
        Ok(DeviceFacts::cpu(config))
    }

    fn max_segments(&self) -> usize {
        usize::MAX
    }

    fn setup(&mut self, setup: &ExecutorSetup<'_>) -> Result<(), EngineError> {
        let ExecutorSetup {
            config,
            plan,
            groups,
            shape,
            cache,
            num_states,
            max_segments,
            ..
        } = *setup;
        let dtypes = (config.kv_cache_dtype, plan.facts().model_dtype);
        let model = self.model.config();
        let layer = |index| {
            let group = plan
                .group_of(index)
                .expect("the plan puts every layer of the model into a group");
            let backend = &plan.groups()[group].backend.name;
            let of_group = (group, &groups[group], &**backend);
            Layer::new(of_group, plan.family(group), &model.mixer(index), dtypes)
        };
        self.layers = (0..model.num_hidden_layers)
            .map(layer)
            .collect::<Result<_, EngineError>>()?;
        let unprepared = |group| {
            let of_segment = |_| Prepared::new(plan.family(group));
            (0..max_segments).map(of_segment).collect()
        };
        self.prepared = (0..groups.len()).map(unprepared).collect();
        self.sizes = Some(Sizes {
            cache,
            num_states,
            ratio: shape.block_size / shape.kernel_block_size,
            max_num_logits: shape.max_num_seqs * (1 + config.num_speculative_tokens()),
            max_num_batched_tokens: shape.max_num_batched_tokens,
            max_model_len: shape.max_model_len,
        });
        Ok(())
    }

    fn start(&mut self, _graphs: GraphPlan) -> Result<usize, EngineError> {
        let sizes = self
            .sizes
            .take()
            .expect("an executor is set up before it starts");
        let blocks = match sizes.cache.size {
            CacheSize::Blocks(blocks) => blocks,
            CacheSize::MemoryFraction(fraction) => self.profiled_blocks(&sizes, fraction)?,
        };
        let blocks_bytes = sizes.cache.block_bytes.saturating_mul(blocks as u64);
        let bytes = blocks_bytes.saturating_add(sizes.cache.states_bytes);
        let total = memory::total_bytes();
        if bytes > total {
            return Err(EngineError::CacheTooLarge {
                blocks,
                bytes,
                total,
            });
        }
        let room = Room {
            num_blocks: blocks * sizes.ratio,
            num_states: sizes.num_states,
        };
        for layer in &mut self.layers {
            layer.make_room(room)?;
        }
        Ok(blocks)
    }

    fn prepare(
        &mut self,
        group: usize,
        segment: SegmentPlace,
        metadata: &Metadata,
        context: &VerifyContext<'_>,
    ) -> Result<(), Unprepared> {
        self.prepared[group][segment.index].prepare(metadata, context)
    }

    fn leave_out(&mut self, segment: usize) {
        for group in &mut self.prepared {
            group[segment].leave_out();
        }
    }

    fn submit(&mut self, step: Step<'_>) -> Result<(), StepFailure> {
        let mut results = self.spare.pop().unwrap_or_default();
        results.clear();
        match self.run(&step, &mut results) {
            Ok(()) => {
                self.done.push_back(results);
                Ok(())
            }
            Err(failure) => {
                self.spare.push(results);
                Err(failure)
            }
        }
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
