//! The engine's attention: layers with their caches, and the groups of layers that share a builder and a step's metadata.
//!
//! A group is made of layers that agree in backend, spec (heads, sizes, window) and query heads. All groups share one KV cache
//! group: one block table, one slot mapping. This module must never know requests or tokens.

use std::cell::{Cell, RefCell};

use timetable_attention::{
    BuildFault, Grant, MetadataBuilder, Refusal, StepInputs, Verifier, VerifyContext,
    plain_builder, verify_step,
};
use timetable_device::cpu::{
    AttentionConfig, AttentionImpl, KvCache, PrepareError, StepMetadata, new_impl,
};
use timetable_sandbox::{GroupBuilder, GroupSetup, ReloadHandle, Sandbox};
use timetable_types::{
    self as types, BuilderConfig, BuilderInfo, CommonAttentionMetadata, Family, Metadata,
};

use crate::{
    batch::NoSlot,
    config::{BuilderSource, EngineConfig, EngineError},
    model::{AttentionError, AttentionLayers, ModelConfig},
    timings::{Lap, StepTimings},
};

/// The name that operators give a family's backend.
pub const fn backend_name(family: Family) -> &'static str {
    match family {
        Family::FlashAttn => "FLASH_ATTN",
        Family::Flashinfer => "FLASHINFER",
        Family::TritonAttn => "TRITON_ATTN",
        Family::FlashMla => "FLASHMLA",
        Family::Mamba => "MAMBA",
    }
}

/// Why a step has no metadata. Its requests fail with this; the engine lives.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StepError {
    /// The host's own tensors are inconsistent.
    #[error("this step's tensors are refused: {0}")]
    Tensors(Refusal),
    /// A request's blocks do not reach its length.
    #[error("this step's slots are refused: {0}")]
    Slots(NoSlot),
    /// Neither the builder nor the plain builder has acceptable metadata.
    #[error("group {group}: {message}")]
    Metadata {
        /// The attention group.
        group: String,
        /// What both did wrong.
        message: String,
    },
}

/// Why one builder's metadata was not taken.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error("{0}")]
    Refused(Refusal),
    #[error("{0}")]
    Prepare(PrepareError),
}

/// Who builds for a group.
enum StepBuilder {
    Sandboxed(Box<GroupBuilder>),
    Native {
        builder: Box<dyn MetadataBuilder>,
        plain: Box<dyn MetadataBuilder>,
    },
}

/// Layers that share a builder and a step's metadata.
struct Group {
    name: String,
    config: BuilderConfig,
    builder: StepBuilder,
    verifier: RefCell<Verifier>,
    prepared: RefCell<StepMetadata>,
}

/// One layer.
struct Layer {
    group: usize,
    attention: Box<dyn AttentionImpl>,
    cache: KvCache,
}

/// All layers and all groups.
pub(crate) struct Attention {
    groups: Vec<Group>,
    layers: Vec<Layer>,
    num_blocks: usize,
    kernel_block_size: usize,
}

/// What a step's builders did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BuildOutcome {
    /// Some group was served by its plain builder after a fault in this step.
    pub fell_back: bool,
}

impl Attention {
    /// Layers without a cache yet, and their groups in the order of their first layers.
    pub(crate) fn new(
        engine: &EngineConfig,
        model: &ModelConfig,
        table_width: usize,
        sandbox: &Sandbox,
        source: &BuilderSource,
    ) -> Result<Self, EngineError> {
        let kernel_block_size = engine.kernel_block_size.unwrap_or(engine.block_size);
        let mut windows: Vec<Option<usize>> = Vec::new();
        let mut names: Vec<Vec<String>> = Vec::new();
        let mut layers = Vec::with_capacity(model.num_hidden_layers);
        for index in 0..model.num_hidden_layers {
            let window = model.layer_sliding_window(index);
            let group = windows
                .iter()
                .position(|&other| other == window)
                .unwrap_or_else(|| {
                    windows.push(window);
                    names.push(Vec::new());
                    windows.len() - 1
                });
            names[group].push(format!("model.layers.{index}.self_attn.attn"));
            layers.push(Layer {
                group,
                attention: new_impl(
                    engine.attention_backend,
                    layer_config(engine, model, window, kernel_block_size),
                )?,
                cache: empty_cache(engine, model, kernel_block_size, 1),
            });
        }
        let groups = windows
            .into_iter()
            .zip(names)
            .enumerate()
            .map(|(index, (window, layer_names))| {
                let config = builder_config(engine, model, window, table_width, layer_names);
                Group::new(index, engine.attention_backend, config, sandbox, source)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            groups,
            layers,
            num_blocks: 1,
            kernel_block_size,
        })
    }

    /// Gives every layer a zeroed cache of `num_blocks` blocks of the manager.
    pub(crate) fn allocate(
        &mut self,
        engine: &EngineConfig,
        model: &ModelConfig,
        num_blocks: usize,
    ) {
        let ratio = engine.block_size / self.kernel_block_size;
        self.num_blocks = num_blocks * ratio;
        for layer in &mut self.layers {
            layer.cache = empty_cache(engine, model, self.kernel_block_size, self.num_blocks);
        }
    }

    /// Handles of the groups whose builders can be replaced.
    pub(crate) fn reload_handles(&self) -> Vec<ReloadHandle> {
        self.groups
            .iter()
            .filter_map(|group| match &group.builder {
                StepBuilder::Sandboxed(builder) => Some(builder.handle()),
                StepBuilder::Native { .. } => None,
            })
            .collect()
    }

    /// As [`Attention::reload_handles`], with the number of layers of each group.
    pub(crate) fn group_handles(&self) -> Vec<(ReloadHandle, usize)> {
        let layers_of = |group| {
            self.layers
                .iter()
                .filter(|layer| layer.group == group)
                .count()
        };
        self.groups
            .iter()
            .enumerate()
            .filter_map(|(index, group)| match &group.builder {
                StepBuilder::Sandboxed(builder) => Some((builder.handle(), layers_of(index))),
                StepBuilder::Native { .. } => None,
            })
            .collect()
    }

    /// What each group's builder says of itself, with the group's name.
    pub(crate) fn builders(&self) -> impl Iterator<Item = (&str, &BuilderInfo)> {
        self.groups.iter().map(|group| {
            let info = match &group.builder {
                StepBuilder::Sandboxed(builder) => builder.info(),
                StepBuilder::Native { builder, .. } => builder.info(),
            };
            (group.name.as_str(), info)
        })
    }

    /// Verifies the step's tensors, then builds, verifies and prepares every group's metadata.
    pub(crate) fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        inputs: &StepInputs<'_>,
        timings: &mut StepTimings,
    ) -> Result<BuildOutcome, StepError> {
        let mut outcome = BuildOutcome::default();
        let num_blocks = self.num_blocks as u32;
        let mut lap = Lap::start();
        for (index, group) in self.groups.iter_mut().enumerate() {
            let context = VerifyContext {
                config: &group.config,
                common,
                inputs,
                promise: None,
                grant: Grant::Exact,
                num_blocks,
            };
            if index == 0 {
                verify_step(&context).map_err(StepError::Tensors)?;
                timings.verify_ns += lap.ns();
            }
            outcome.fell_back |= group.builder.build(
                &group.name,
                &group.verifier,
                &group.prepared,
                &context,
                self.kernel_block_size as u32,
                timings,
            )?;
        }
        Ok(outcome)
    }

    /// The layers as the model calls them, for the step that was built last.
    pub(crate) fn layers<'a>(&'a mut self, slot_mapping: &'a [i64]) -> impl AttentionLayers + 'a {
        StepLayers {
            groups: &self.groups,
            layers: &mut self.layers,
            slot_mapping,
        }
    }

    /// The layers without metadata: every output is zero, nothing is written.
    pub(crate) fn profile_layers(&self) -> impl AttentionLayers + '_ {
        ProfileLayers {
            layers: &self.layers,
        }
    }
}

impl Group {
    fn new(
        index: usize,
        family: Family,
        config: BuilderConfig,
        sandbox: &Sandbox,
        source: &BuilderSource,
    ) -> Result<Self, EngineError> {
        let name = format!("{}/{index}", backend_name(family));
        let plain = plain_builder(family, &config).map_err(EngineError::Plain)?;
        let setup = |plain| GroupSetup {
            name: name.clone(),
            config: config.clone(),
            plain,
            acceptance: None,
        };
        let builder = match source {
            BuilderSource::Plain => {
                StepBuilder::Sandboxed(Box::new(GroupBuilder::plain(sandbox, setup(plain))))
            }
            BuilderSource::Component { component, origin } => StepBuilder::Sandboxed(Box::new(
                GroupBuilder::new(sandbox, setup(plain), component, origin)?,
            )),
            BuilderSource::Native(make) => StepBuilder::Native {
                builder: make(&config).map_err(EngineError::Native)?,
                plain,
            },
        };
        Ok(Self {
            name,
            config,
            builder,
            verifier: RefCell::default(),
            prepared: RefCell::default(),
        })
    }
}

impl StepBuilder {
    /// Leaves verified metadata in `prepared`. Returns whether the plain builder had to step in. What the device cannot
    /// prepare is refused like what the verifier refuses: the plain builder may still serve the step.
    fn build(
        &mut self,
        group: &str,
        verifier: &RefCell<Verifier>,
        prepared: &RefCell<StepMetadata>,
        context: &VerifyContext<'_>,
        block_size: u32,
        timings: &mut StepTimings,
    ) -> Result<bool, StepError> {
        let verify_ns = Cell::new(0);
        let prepare_ns = Cell::new(0);
        let accept = |metadata: &Metadata| {
            let mut lap = Lap::start();
            let verified = verifier.borrow_mut().verify(metadata, context);
            verify_ns.set(verify_ns.get() + lap.ns());
            verified.map_err(Unusable::Refused)?;
            let done = prepared
                .borrow_mut()
                .prepare(metadata, context.inputs, block_size);
            prepare_ns.set(prepare_ns.get() + lap.ns());
            done.map_err(Unusable::Prepare)
        };
        let mut lap = Lap::start();
        let built = match self {
            StepBuilder::Sandboxed(builder) => builder
                .build(context.common, false, accept)
                .map(|built| built.fault.is_some())
                .map_err(|error| error.to_string()),
            StepBuilder::Native { builder, plain } => {
                native_or_plain(&mut **builder, &mut **plain, context.common, accept)
            }
        };
        timings.verify_ns += verify_ns.get();
        timings.prepare_ns += prepare_ns.get();
        timings.build_ns += lap.ns().saturating_sub(verify_ns.get() + prepare_ns.get());
        built.map_err(|message| StepError::Metadata {
            group: group.to_owned(),
            message,
        })
    }
}

fn native_or_plain(
    builder: &mut dyn MetadataBuilder,
    plain: &mut dyn MetadataBuilder,
    common: &CommonAttentionMetadata,
    accept: impl Fn(&Metadata) -> Result<(), Unusable>,
) -> Result<bool, String> {
    let attempt = |builder: &mut dyn MetadataBuilder| {
        let metadata = builder
            .build(common, false)
            .map_err(|fault: BuildFault| fault.to_string())?;
        accept(&metadata).map_err(|error| error.to_string())
    };
    match attempt(builder) {
        Ok(()) => Ok(false),
        Err(first) => attempt(plain).map(|()| true).map_err(|second| {
            format!("the plain builder: {second}; before it, the native one: {first}")
        }),
    }
}

struct StepLayers<'a> {
    groups: &'a [Group],
    layers: &'a mut [Layer],
    slot_mapping: &'a [i64],
}

impl AttentionLayers for StepLayers<'_> {
    fn attend(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), AttentionError> {
        let Layer {
            group,
            attention,
            cache,
        } = &mut self.layers[layer];
        attention.do_kv_cache_update(k, v, cache, self.slot_mapping);
        let prepared = self.groups[*group].prepared.borrow();
        attention.forward(q, cache, Some(&prepared), out, None)?;
        Ok(())
    }
}

struct ProfileLayers<'a> {
    layers: &'a [Layer],
}

impl AttentionLayers for ProfileLayers<'_> {
    fn attend(
        &mut self,
        layer: usize,
        q: &[f32],
        _k: &[f32],
        _v: &[f32],
        out: &mut [f32],
    ) -> Result<(), AttentionError> {
        let layer = &self.layers[layer];
        layer.attention.forward(q, &layer.cache, None, out, None)?;
        Ok(())
    }
}

fn empty_cache(
    engine: &EngineConfig,
    model: &ModelConfig,
    kernel_block_size: usize,
    num_blocks: usize,
) -> KvCache {
    KvCache::new(
        num_blocks,
        model.num_key_value_heads,
        kernel_block_size,
        model.head_dim,
        engine.kv_cache_dtype,
    )
}

fn layer_config(
    engine: &EngineConfig,
    model: &ModelConfig,
    window: Option<usize>,
    kernel_block_size: usize,
) -> AttentionConfig {
    AttentionConfig {
        num_heads: model.num_attention_heads,
        head_size: model.head_dim,
        scale: model.attention_scale(),
        num_kv_heads: model.num_key_value_heads,
        sliding_window: window.map(|window| window as u32),
        logits_soft_cap: None,
        kv_cache_dtype: engine.kv_cache_dtype,
        block_size: kernel_block_size,
    }
}

/// What the builder of a group is made of: layers with `window` (in tokens, the current one included) on a CPU, and block
/// tables of `table_width` columns.
pub fn builder_config(
    engine: &EngineConfig,
    model: &ModelConfig,
    window: Option<usize>,
    table_width: usize,
    layer_names: Vec<String>,
) -> BuilderConfig {
    let dtype = match engine.kv_cache_dtype {
        timetable_device::cpu::CacheDtype::F32 => types::Dtype::Float32,
        timetable_device::cpu::CacheDtype::Bf16 => types::Dtype::Bfloat16,
    };
    BuilderConfig {
        kv_cache_spec: types::KvCacheSpec {
            kind: types::KvCacheSpecKind::FullAttention,
            block_size: engine.kernel_block_size.unwrap_or(engine.block_size) as u32,
            num_kv_heads: model.num_key_value_heads as u32,
            head_size: model.head_dim as u32,
            head_size_v: model.head_dim as u32,
            dtype,
            // Every block of a request is kept, so the spec is that of full attention with a window, as the field merges
            // them when group-wise freeing is off.
            sliding_window: window.map(|window| window as u32),
            attention_chunk_size: None,
            dcp_sharded: false,
            mamba: None,
        },
        layer_names,
        attention: types::AttentionConfig {
            num_heads: model.num_attention_heads as u32,
            scale: f64::from(model.attention_scale()),
            logits_soft_cap: None,
            sliding_windows: vec![window.map_or(-1, |window| window as i32)],
            model_dtype: types::Dtype::Float32,
            kv_cache_dtype: match dtype {
                types::Dtype::Float32 => "auto".to_owned(),
                _ => "bfloat16".to_owned(),
            },
            kv_cache_layout: types::KvCacheLayout::Lbhnc,
            has_sinks: false,
            use_rswa: false,
            rswa_window: 0,
            kv_lora_rank: 0,
            qk_rope_head_dim: 0,
        },
        scheduler: types::SchedulerConfig {
            max_num_seqs: engine.max_num_seqs as u32,
            max_num_batched_tokens: engine.max_num_batched_tokens as u32,
            max_model_len: engine
                .max_model_len
                .unwrap_or(model.max_position_embeddings) as u32,
            max_num_blocks_per_req: table_width as u32,
            num_speculative_tokens: 0,
            parallel_drafting: false,
        },
        cudagraph: types::CudagraphConfig {
            mode: types::CudagraphMode::None,
            capture_sizes: Vec::new(),
            max_capture_size: 0,
        },
        parallel: types::ParallelConfig {
            dcp_world_size: 1,
            dcp_rank: 0,
            cp_kv_cache_interleave_size: 1,
            prefill_context_parallel: false,
        },
        device: types::DeviceConfig {
            compute_capability: (0, 0),
            num_workers: engine.num_workers,
            ctas_per_worker: 1,
            flash_attn_version: 0,
            trtllm_attention: false,
            xqa: false,
        },
        batch_invariant: false,
        max_num_splits: engine.max_num_splits,
        model_runner_v2: true,
        options: engine.builder_options.clone(),
    }
}
