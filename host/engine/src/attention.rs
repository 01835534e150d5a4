//! The engine's attention: layers with their caches, and the groups of layers that share a builder and a step's metadata.
//!
//! Which layers share a group is the plan's matter. All groups share one KV cache group: one block table, one slot mapping.
//! This module must never know requests or tokens.

mod plan;

pub(crate) use plan::DEVICE;
pub use plan::{AttentionPlan, backend_name};

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use timetable_attention::{
    BuildFault, Grant, MetadataBuilder, Refusal, StepInputs, Verifier, VerifyContext,
    batch::capture_batch, group::AttentionGroup, plain_builder, verify_step,
};
use timetable_device::cpu::{
    AttentionConfig, AttentionImpl, CacheDtype, KvCache, PrepareError, StepMetadata, new_impl,
};
use timetable_sandbox::{Acceptance, GroupBuilder, GroupSetup, ReloadHandle, Sandbox};
use timetable_types::{
    BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata, Family, KvCacheSpec,
    Metadata,
};

use crate::{
    batch::NoSlot,
    config::{BuilderSource, EngineConfig, EngineError},
    model::{AttentionError, AttentionLayers, ModelConfig},
    timings::{Lap, StepTimings},
};

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
    plan: AttentionPlan,
}

/// What a step's builders did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BuildOutcome {
    /// Some group was served by its plain builder after a fault in this step.
    pub fell_back: bool,
}

impl Attention {
    /// The plan's layers, without a cache yet, and a builder for each of its groups.
    pub(crate) fn new(
        engine: &EngineConfig,
        model: &ModelConfig,
        plan: AttentionPlan,
        table_width: usize,
        sandbox: &Sandbox,
        source: &BuilderSource,
    ) -> Result<Self, EngineError> {
        let groups = plan
            .groups()
            .iter()
            .enumerate()
            .map(|(index, group)| {
                let config = plan.builder_config(group, engine, model, table_width)?;
                let name = format!("{}/{index}", plan.backend());
                Group::new(name, plan.family(), config, sandbox, source)
            })
            .collect::<Result<Vec<_>, EngineError>>()?;
        let dtype = engine.kv_cache_dtype;
        let layer = |index| {
            let group = plan
                .group_of(index)
                .expect("the plan puts every layer of the model into a group");
            let config = &groups[group].config;
            Ok(Layer {
                group,
                attention: new_impl(plan.family(), layer_config(config, dtype))?,
                cache: empty_cache(&config.kv_cache_spec, dtype, 1),
            })
        };
        let layers = (0..model.num_hidden_layers)
            .map(layer)
            .collect::<Result<_, EngineError>>()?;
        Ok(Self {
            groups,
            layers,
            num_blocks: 1,
            plan,
        })
    }

    /// Gives every layer a zeroed cache of `num_blocks` blocks of the manager.
    pub(crate) fn allocate(&mut self, engine: &EngineConfig, num_blocks: usize) {
        self.num_blocks = num_blocks * (engine.block_size / self.plan.kernel_block_size());
        for layer in &mut self.layers {
            let spec = &self.groups[layer.group].config.kv_cache_spec;
            layer.cache = empty_cache(spec, engine.kv_cache_dtype, self.num_blocks);
        }
    }

    /// What the rule book said of the layers.
    pub(crate) fn plan(&self) -> &AttentionPlan {
        &self.plan
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

    /// As [`Attention::reload_handles`], with each group's layers.
    pub(crate) fn group_handles(&self) -> Vec<(ReloadHandle, &AttentionGroup)> {
        self.groups
            .iter()
            .zip(self.plan.groups())
            .filter_map(|(group, layers)| match &group.builder {
                StepBuilder::Sandboxed(builder) => Some((builder.handle(), layers)),
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
                group.config.kv_cache_spec.block_size,
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
        name: String,
        family: Family,
        config: BuilderConfig,
        sandbox: &Sandbox,
        source: &BuilderSource,
    ) -> Result<Self, EngineError> {
        let plain = plain_builder(family, &config).map_err(EngineError::Plain)?;
        let setup = |plain| GroupSetup {
            name: name.clone(),
            config: config.clone(),
            plain,
            acceptance: Some(acceptance(&config)),
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

/// A new version is asked for small steps before it may serve, and what it builds must pass the verifier: one whose every
/// step would be refused never replaces a good one.
fn acceptance(config: &BuilderConfig) -> Acceptance {
    let config = config.clone();
    Arc::new(move |builder| {
        let max_seqs = config.scheduler.max_num_seqs.max(1);
        let max_tokens = config.scheduler.max_num_batched_tokens.max(1);
        for (rows, tokens) in [
            (1, 1),
            (max_seqs.min(7), max_seqs.min(7)),
            (1, max_tokens.min(40)),
        ] {
            let shape = CaptureShape {
                num_tokens: tokens.max(rows),
                num_reqs: rows,
                max_query_len: tokens.max(rows).div_ceil(rows),
                uniform_query_len: None,
            };
            let width = config.scheduler.max_num_blocks_per_req as usize;
            let step = capture_batch(&shape, width, config.scheduler.max_model_len)
                .map_err(|error| error.to_string())?;
            let metadata = match builder.build(&step.cam, false) {
                Ok(metadata) => metadata,
                // It may decline what it does not serve; the plain builder does then.
                Err(BuildFault::Declined(_)) => continue,
                Err(fault) => return Err(fault.to_string()),
            };
            let inputs = step.tensors.inputs();
            let context = VerifyContext {
                config: &config,
                common: &step.cam,
                inputs: &inputs,
                promise: None,
                grant: Grant::Exact,
                num_blocks: 1,
            };
            Verifier::new()
                .verify(&metadata, &context)
                .map_err(|refusal| format!("a step of {rows} rows is refused: {refusal}"))?;
        }
        Ok(())
    })
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

fn empty_cache(spec: &KvCacheSpec, dtype: CacheDtype, num_blocks: usize) -> KvCache {
    KvCache::new(
        num_blocks,
        spec.num_kv_heads as usize,
        spec.block_size as usize,
        spec.head_size as usize,
        dtype,
    )
}

fn layer_config(config: &BuilderConfig, kv_cache_dtype: CacheDtype) -> AttentionConfig {
    let spec = &config.kv_cache_spec;
    AttentionConfig {
        num_heads: config.attention.num_heads as usize,
        head_size: spec.head_size as usize,
        scale: config.attention.scale as f32,
        num_kv_heads: spec.num_kv_heads as usize,
        sliding_window: spec.sliding_window,
        logits_soft_cap: None,
        kv_cache_dtype,
        block_size: spec.block_size as usize,
    }
}
