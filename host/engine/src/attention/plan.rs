//! The rule book's answers for one engine, before anything exists: its backend, its layers' groups, their block sizes and
//! the cache's layout.
//!
//! Every decision is `timetable_attention`'s; here the questions are put. This module must never know a builder, a cache or
//! a request.

use std::borrow::Cow;

use timetable_attention::{
    backend::{BackendRegistry, BackendRow, Configuration, Device},
    graphs::{
        CaptureSizeConfig, CaptureSizeError, apply_config_overrides, default_capture_sizes,
        user_capture_sizes,
    },
    group::{
        AttentionGroup, AttentionLayer, KvCacheGroup, LayerMap, attention_groups,
        choose_kernel_blocks, kv_cache_groups,
    },
    kernel_block::KernelBlockSize,
    layout::{LayoutRequest, resolve_layout, supported_layouts},
    select::{Request, Selection, select},
    spec::{CacheSpec, FullAttentionSpec, KvQuantMode, UniformTypeKvCacheSpecs},
};
use timetable_types::{
    self as types, BuilderConfig, CudagraphConfig, Dtype, Family, KvCacheLayout,
};

use crate::{
    config::{EngineConfig, EngineError},
    executor::DeviceFacts,
    model::ModelConfig,
    startup,
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

/// The name of a layer's attention, as the field has it.
pub(super) fn layer_name(index: usize) -> String {
    format!("model.layers.{index}.self_attn.attn")
}

/// The backend of an engine's layers and their groups.
///
/// All layers stand in one KV cache group: one block table, one slot mapping, and every block is kept until its request ends.
/// So the spec of a layer with a window is that of full attention with `sliding_window`, which is the rule book's form for
/// a window whose keys are all kept; layers that differ in it share the KV cache group as a UniformType spec, and each kind
/// has an attention group of its own.
#[derive(Clone, Debug)]
pub struct AttentionPlan {
    backend: String,
    family: Family,
    supports_batch_invariance: bool,
    groups: Vec<AttentionGroup>,
    layer_map: LayerMap,
    layout: KvCacheLayout,
    selection_warnings: Vec<String>,
    facts: DeviceFacts,
    capture_sizes: Vec<u32>,
}

impl AttentionPlan {
    /// The plan for the CPU device; see [`AttentionPlan::for_device`].
    ///
    /// # Errors
    /// As [`AttentionPlan::for_device`].
    pub fn new(engine: &EngineConfig, model: &ModelConfig) -> Result<Self, EngineError> {
        Self::for_device(engine, model, DeviceFacts::cpu(engine))
    }

    /// Asks the rule book. One backend serves every layer, so it is asked for a window if any layer has one.
    ///
    /// # Errors
    /// A setting out of range; no backend for the model ([`EngineError::Backend`]: an explicit choice never falls back);
    /// specs, block sizes or layouts that do not fit together.
    pub fn for_device(
        engine: &EngineConfig,
        model: &ModelConfig,
        facts: DeviceFacts,
    ) -> Result<Self, EngineError> {
        engine.check(model.max_position_embeddings)?;
        let Selection { row, log, warning } = chosen(engine, model, &facts)?;
        tracing::info!("{log}");
        let family = Family::ALL
            .into_iter()
            .find(|family| backend_name(*family) == row.name)
            .ok_or_else(|| EngineError::NoContract(row.name.to_string()))?;
        let layers = layers(engine, model, &row, &facts)?;
        let kv_cache_groups = [one_kv_cache_group(&layers)?];
        let mut groups = attention_groups(&layers, &kv_cache_groups)?;
        choose_kernel_blocks(
            &mut groups,
            &kv_cache_groups,
            |group| match engine.kernel_block_size {
                Some(size) => Cow::Owned(vec![KernelBlockSize::Exact(size as u32)]),
                None => row.kernel_block_sizes_for(Some(&group.spec), rules(&facts)),
            },
            |_| false,
        )?;
        let declared = vec![row.kv_cache_layouts.as_deref(); groups.len()];
        let layout = resolve_layout(&LayoutRequest {
            configured: None,
            workers: &[supported_layouts(&declared)?],
            specs: &kv_cache_groups.map(|group| group.spec),
            environment: None,
            connector_prefers: None,
        })?;
        Ok(Self {
            backend: row.name.to_string(),
            family,
            supports_batch_invariance: row.flags.supports_batch_invariance,
            layer_map: LayerMap::new(&groups)?,
            groups,
            layout: layout.layout,
            selection_warnings: warning.into_iter().chain(layout.warning).collect(),
            facts,
            capture_sizes: capture_sizes(engine, &facts)?,
        })
    }

    /// The device that the plan was made for.
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Token counts that graphs may be captured for, rising; none on a device without graphs.
    pub fn capture_sizes(&self) -> &[u32] {
        &self.capture_sizes
    }

    /// The backend's name: FLASH_ATTN, FLASHINFER.
    pub fn backend(&self) -> &str {
        &self.backend
    }

    /// The family of metadata that the backend's layers read.
    pub fn family(&self) -> Family {
        self.family
    }

    /// Does the backend's result for a request not depend on the batch, where that is asked for?
    pub fn supports_batch_invariance(&self) -> bool {
        self.supports_batch_invariance
    }

    /// The attention groups, in the order of their first layers.
    pub fn groups(&self) -> &[AttentionGroup] {
        &self.groups
    }

    /// What the operator should know of the choice, in the field's words.
    pub fn selection_warnings(&self) -> &[String] {
        &self.selection_warnings
    }

    /// Index of a layer's attention group.
    pub fn group_of(&self, layer: usize) -> Option<usize> {
        self.layer_map.group_of(&layer_name(layer))
    }

    /// Tokens of the blocks that kernels read: one size, because all groups share a table and a backend.
    pub fn kernel_block_size(&self) -> usize {
        self.groups
            .first()
            .map_or(1, |group| group.block_size() as usize)
    }

    /// Bytes of one of the manager's blocks, over all layers.
    pub fn block_bytes(&self) -> u64 {
        let of_group =
            |group: &AttentionGroup| group.spec.page_size_bytes() * group.layer_names.len() as u64;
        self.groups.iter().map(of_group).sum()
    }

    /// What the builder of a group is made of; block tables have `table_width` columns.
    ///
    /// # Errors
    /// As [`CacheSpec::to_contract`].
    pub fn builder_config(
        &self,
        group: &AttentionGroup,
        engine: &EngineConfig,
        model: &ModelConfig,
        table_width: usize,
    ) -> Result<BuilderConfig, EngineError> {
        let kv_cache_spec = group.spec.to_contract(group.block_size())?;
        let window = kv_cache_spec.sliding_window;
        Ok(BuilderConfig {
            kv_cache_spec,
            layer_names: group.layer_names.clone(),
            attention: types::AttentionConfig {
                num_heads: group.num_heads,
                scale: f64::from(model.attention_scale()),
                logits_soft_cap: None,
                sliding_windows: vec![window.map_or(-1, |window| window as i32)],
                model_dtype: self.facts.model_dtype,
                kv_cache_dtype: engine
                    .kv_cache_dtype
                    .name(self.facts.model_dtype)
                    .to_owned(),
                kv_cache_layout: self.layout,
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
                num_speculative_tokens: engine.num_speculative_tokens() as u32,
                parallel_drafting: false,
            },
            cudagraph: CudagraphConfig {
                // As configured, but for what no builder's answer can change.
                mode: apply_config_overrides(
                    engine.cudagraph_mode,
                    &startup::config_facts(&self.facts),
                )
                .0,
                capture_sizes: self.capture_sizes.clone(),
                max_capture_size: self.capture_sizes.last().copied().unwrap_or(0),
            },
            parallel: types::ParallelConfig {
                dcp_world_size: 1,
                dcp_rank: 0,
                cp_kv_cache_interleave_size: 1,
                prefill_context_parallel: false,
            },
            device: types::DeviceConfig {
                compute_capability: self
                    .facts
                    .device
                    .capability()
                    .map_or((0, 0), |capability| (capability.major, capability.minor)),
                num_workers: self.facts.num_workers,
                ctas_per_worker: self.facts.ctas_per_worker,
                flash_attn_version: self.facts.flash_attn_version,
                trtllm_attention: false,
                xqa: false,
            },
            batch_invariant: engine.batch_invariant,
            max_num_splits: if engine.batch_invariant {
                1
            } else {
                engine.max_num_splits
            },
            model_runner_v2: true,
            options: engine.builder_options.clone(),
        })
    }
}

/// Whose answers of the rule book apply. In f32 a GPU is its own reference: the field's backends have no f32 kernels there, so
/// the question is put for the CPU device, whose contracts and dtypes the f32 mode has.
fn rules(facts: &DeviceFacts) -> Device {
    match facts.model_dtype {
        Dtype::Float32 => Device::Cpu,
        _ => facts.device,
    }
}

/// The configured token counts, or the field's.
fn capture_sizes(engine: &EngineConfig, facts: &DeviceFacts) -> Result<Vec<u32>, CaptureSizeError> {
    let Some(capability) = facts.device.capability() else {
        return Ok(Vec::new());
    };
    let max_num_batched_tokens = engine.max_num_batched_tokens as u32;
    match &engine.cudagraph_capture_sizes {
        Some(sizes) => {
            user_capture_sizes(sizes, None, max_num_batched_tokens).map(|(sizes, ..)| sizes)
        }
        None => Ok(default_capture_sizes(&CaptureSizeConfig {
            max_num_seqs: engine.max_num_seqs as u32,
            max_num_batched_tokens,
            decode_query_len: 1 + engine.num_speculative_tokens() as u32,
            compute_capability_major: capability.major,
            interactivity: false,
        })),
    }
}

/// The backend for every layer of the model.
fn chosen(
    engine: &EngineConfig,
    model: &ModelConfig,
    facts: &DeviceFacts,
) -> Result<Selection, EngineError> {
    let config = Configuration {
        kv_cache_dtype: Some(engine.kv_cache_dtype.name(facts.model_dtype).to_owned()),
        block_size: u32::try_from(engine.block_size).ok(),
        has_sliding_window: model.sliding_window.is_some(),
        use_batch_invariant: engine.batch_invariant,
        ..Configuration::new(model.head_dim as u32, facts.model_dtype)
    };
    let request = Request {
        config: &config,
        num_heads: model.num_attention_heads as u32,
        device: rules(facts),
        requested: engine.attention_backend.as_deref(),
    };
    Ok(select(&BackendRegistry::new(), &request)?)
}

/// Every layer, with its own spec.
fn layers(
    engine: &EngineConfig,
    model: &ModelConfig,
    row: &BackendRow,
    facts: &DeviceFacts,
) -> Result<Vec<AttentionLayer>, EngineError> {
    let dtype = engine.kv_cache_dtype.resolve(facts.model_dtype);
    let layer = |index| {
        let mut spec = FullAttentionSpec::new(
            engine.block_size as u32,
            model.num_key_value_heads as u32,
            model.head_dim as u32,
            dtype,
        );
        spec.sliding_window = model
            .layer_sliding_window(index)
            .map(|window| window as u32);
        spec.attention.kv_quant_mode =
            KvQuantMode::from_cache_dtype(engine.kv_cache_dtype.name(facts.model_dtype));
        // One rank has every key.
        spec.attention.dcp_sharded = false;
        let spec = row.customize_spec(&CacheSpec::from(spec));
        spec.validate()?;
        Ok(AttentionLayer {
            name: layer_name(index),
            backend: row.class(),
            num_heads: model.num_attention_heads as u32,
            spec,
            kv_sharing_target: None,
        })
    };
    (0..model.num_hidden_layers).map(layer).collect()
}

/// The one KV cache group of all layers: of their spec where they agree, else of a UniformType one.
fn one_kv_cache_group(layers: &[AttentionLayer]) -> Result<KvCacheGroup, EngineError> {
    if let [group] = kv_cache_groups(layers)?.as_slice() {
        return Ok(group.clone());
    }
    let members = layers
        .iter()
        .map(|layer| (layer.name.clone(), layer.spec.clone()))
        .collect();
    Ok(KvCacheGroup {
        layer_names: layers.iter().map(|layer| layer.name.clone()).collect(),
        spec: UniformTypeKvCacheSpecs::new(members)?.into(),
    })
}
