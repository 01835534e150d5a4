//! The rule book's answers for one engine, before anything exists: its layers' backends and groups, their block sizes and the
//! cache's layout.
//!
//! Every decision is `timetable_attention`'s; here the questions are put. This module must never know a builder, a cache or
//! a request.

use std::borrow::Cow;

use timetable_attention::{
    backend::{
        Backend, BackendRegistry, BackendRow, Configuration, Device, MambaBackend, ModelFacts,
        family_of,
    },
    batch::max_virtual_rows,
    graphs::{
        CaptureSizeConfig, CaptureSizeError, apply_config_overrides, default_capture_sizes,
        user_capture_sizes,
    },
    group::{
        AttentionGroup, AttentionLayer, BatchView, KvCacheGroup, attention_groups,
        choose_kernel_blocks, kv_cache_groups,
    },
    kernel_block::KernelBlockSize,
    layout::{LayoutRequest, resolve_layout, supported_layouts},
    select::{Request, Selection, select},
    spec::{
        CacheSpec, FullAttentionSpec, KvQuantMode, MambaSpec, MlaAttentionSpec,
        UniformTypeKvCacheSpecs,
    },
};
use timetable_device::cpu::{mamba::MambaConfig, mla::LatentSizes};
use timetable_types::{
    self as types, BuilderConfig, CudagraphConfig, Dtype, Family, KvCacheLayout, MambaType,
};

use crate::{
    config::{EngineConfig, EngineError, KvCacheDtype},
    executor::DeviceFacts,
    model::{Mixer, ModelConfig},
    startup,
};

/// Tokens of a chunk of the gated delta net's scan: the field's FLA_CHUNK_SIZE.
const GDN_CHUNK: u32 = 64;

/// The name that operators give a family's backend; of several the first.
pub const fn backend_name(family: Family) -> &'static str {
    match family {
        Family::FlashAttn => "FLASH_ATTN",
        Family::Flashinfer => "FLASHINFER",
        Family::TritonAttn => "TRITON_ATTN",
        Family::FlashMla => "FLASHMLA",
        Family::Mamba => "MAMBA",
    }
}

/// The name of a layer's mixer, as the field has it.
fn layer_name(index: usize, mixer: &Mixer) -> String {
    let part = match mixer {
        Mixer::Attention { .. } | Mixer::Latent(_) => "self_attn.attn",
        Mixer::Recurrent(MambaConfig::Gdn(_)) => "linear_attn",
        Mixer::Recurrent(_) => "mixer",
    };
    format!("model.layers.{index}.{part}")
}

/// The backends of an engine's layers and their groups.
///
/// One backend serves every attention layer, another every layer of latent attention, and the type of a recurrent layer decides
/// its own. Layers with keys stand in one KV cache group: one block table, one slot mapping, and every block is kept until its
/// request ends. So the spec of a layer with a window or a chunk is that of full attention with `sliding_window` or
/// `attention_chunk_size`, which is the rule book's form where all keys are kept; layers that differ share the KV cache group as
/// a UniformType spec, and each kind has an attention group of its own. Recurrent layers have one state for each running request
/// and stand in groups of their own.
#[derive(Clone, Debug)]
pub struct AttentionPlan {
    groups: Vec<AttentionGroup>,
    families: Vec<Family>,
    supports_batch_invariance: Vec<bool>,
    /// By layer.
    group_of: Vec<usize>,
    kernel_block_size: usize,
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

    /// Asks the rule book. One backend serves every attention layer, so it is asked for a window if any layer has one.
    ///
    /// # Errors
    /// A setting out of range; no backend for the model ([`EngineError::Backend`]: an explicit choice never falls back);
    /// specs, block sizes or layouts that do not fit together; layers that the device does not run.
    pub fn for_device(
        engine: &EngineConfig,
        model: &ModelConfig,
        facts: DeviceFacts,
    ) -> Result<Self, EngineError> {
        engine.check(model.max_position_embeddings)?;
        let mixers: Vec<Mixer> = (0..model.num_hidden_layers)
            .map(|layer| model.mixer(layer))
            .collect();
        let is_recurrent = |mixer: &Mixer| matches!(mixer, Mixer::Recurrent(_));
        if engine.speculative.is_some() && mixers.iter().any(is_recurrent) {
            return Err(EngineError::Setting {
                name: "num_speculative_tokens",
                value: engine.num_speculative_tokens().to_string(),
                remedy: "the model has recurrent layers, and a state cannot take back a draft that is refused; leave speculation out (--speculative-method)",
            });
        }
        let mut selection_warnings = Vec::new();
        let rows = Rows::chosen(engine, model, &mixers, &facts, &mut selection_warnings)?;
        let layers = layers(engine, model, &mixers, &rows, &facts)?;
        let kv_cache_groups = groups_of_one_table(&layers)?;
        let mut groups = attention_groups(&layers, &kv_cache_groups)?;
        choose_kernel_blocks(
            &mut groups,
            &kv_cache_groups,
            |group| match (engine.kernel_block_size, rows.of(group)) {
                (Some(size), _) => Cow::Owned(vec![KernelBlockSize::Exact(size as u32)]),
                (None, Some(row)) => row.kernel_block_sizes_for(Some(&group.spec), rules(&facts)),
                (None, None) => Cow::Borrowed(&[]),
            },
            |_| false,
        )?;
        let families: Vec<Family> = groups
            .iter()
            .map(|group| family(group, &facts))
            .collect::<Result<_, _>>()?;
        let with_keys = |spec: &CacheSpec| !matches!(spec, CacheSpec::Mamba(_));
        let declared: Vec<_> = groups
            .iter()
            .filter_map(|group| rows.of(group))
            .map(|row| row.kv_cache_layouts.as_deref())
            .collect();
        let specs = kv_cache_groups.into_iter().map(|group| group.spec);
        let layout = resolve_layout(&LayoutRequest {
            configured: None,
            workers: &[supported_layouts(&declared)?],
            specs: &specs.filter(with_keys).collect::<Vec<_>>(),
            environment: None,
            connector_prefers: None,
        })?;
        selection_warnings.extend(layout.warning);
        let home = |layer: &AttentionLayer| {
            let holds = |group: &AttentionGroup| group.layer_names.contains(&layer.name);
            groups.iter().position(holds).unwrap_or(groups.len())
        };
        Ok(Self {
            group_of: layers.iter().map(home).collect(),
            supports_batch_invariance: groups
                .iter()
                .map(|group| {
                    let row = rows.of(group);
                    row.is_some_and(|row| row.flags.supports_batch_invariance)
                })
                .collect(),
            // One size, because a KV cache group's kernels share one.
            kernel_block_size: groups
                .iter()
                .find(|group| with_keys(&group.spec))
                .map_or(engine.block_size, |group| group.block_size() as usize),
            families,
            groups,
            layout: layout.layout,
            selection_warnings,
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

    /// The family of metadata that a group's layers read.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn family(&self, group: usize) -> Family {
        self.families[group]
    }

    /// Each group's backend, by name, and family; each pair once, in the order of the groups.
    pub fn backends(&self) -> Vec<(&str, Family)> {
        let mut found = Vec::new();
        for (group, &family) in self.groups.iter().zip(&self.families) {
            let pair = (&*group.backend.name, family);
            if !found.contains(&pair) {
                found.push(pair);
            }
        }
        found
    }

    /// For each group: does its backend's result for a request not depend on the batch, where that is asked for?
    pub fn supports_batch_invariance(&self) -> &[bool] {
        &self.supports_batch_invariance
    }

    /// The attention groups: those with keys in the order of their first layers, then those with states.
    pub fn groups(&self) -> &[AttentionGroup] {
        &self.groups
    }

    /// What the operator should know of the choice, in the field's words.
    pub fn selection_warnings(&self) -> &[String] {
        &self.selection_warnings
    }

    /// Index of a layer's attention group.
    pub fn group_of(&self, layer: usize) -> Option<usize> {
        self.group_of.get(layer).copied()
    }

    /// Tokens of the blocks that kernels read.
    pub fn kernel_block_size(&self) -> usize {
        self.kernel_block_size
    }

    /// Bytes of one of the manager's blocks, over all layers with keys; 0 if there are none.
    pub fn block_bytes(&self) -> u64 {
        self.bytes(|view| view != BatchView::States)
    }

    /// Bytes of one request's states, over all recurrent layers; 0 if there are none.
    pub fn state_bytes(&self) -> u64 {
        self.bytes(|view| view == BatchView::States)
    }

    fn bytes(&self, counts: impl Fn(BatchView) -> bool) -> u64 {
        let groups = self.groups.iter().filter(|group| counts(group.view()));
        let of_group = |group: &AttentionGroup| {
            let layers = group.layer_names.len() as u64;
            group.spec.page_size_bytes().saturating_mul(layers)
        };
        groups.map(of_group).fold(0, u64::saturating_add)
    }

    /// States of a pool for steps of `max_num_seqs` requests, the null state included; 0 for a model without recurrent layers.
    pub fn num_states(&self, max_num_seqs: usize) -> usize {
        match self.state_bytes() {
            0 => 0,
            _ => 1 + max_num_seqs,
        }
    }

    /// What the builder of a group is made of; the batch's block table has `table_width` columns.
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
        let (max_num_seqs, max_num_blocks_per_req) = match group.view() {
            BatchView::Plain => (engine.max_num_seqs, table_width),
            BatchView::Local { chunk } => (
                max_virtual_rows(engine.max_num_seqs, engine.max_num_batched_tokens, chunk),
                (chunk / group.block_size()) as usize,
            ),
            BatchView::States => (engine.max_num_seqs, 1),
        };
        let index = self.groups.iter().position(|other| other == group);
        let layer = self.group_of.iter().position(|&of| Some(of) == index);
        let latent = layer.and_then(|layer| match model.mixer(layer) {
            Mixer::Latent(sizes) => Some(sizes),
            _ => None,
        });
        let scale = latent.map_or_else(|| model.attention_scale(), |sizes| sizes.scale);
        Ok(BuilderConfig {
            kv_cache_spec,
            layer_names: group.layer_names.clone(),
            attention: types::AttentionConfig {
                // Layers without heads count as one: the record has no place for none.
                num_heads: group.num_heads.max(1),
                scale: f64::from(scale),
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
                kv_lora_rank: latent.map_or(0, |sizes| sizes.kv_lora_rank as u32),
                qk_rope_head_dim: latent.map_or(0, |sizes| sizes.qk_rope_head_dim as u32),
            },
            scheduler: types::SchedulerConfig {
                max_num_seqs: max_num_seqs as u32,
                max_num_batched_tokens: engine.max_num_batched_tokens as u32,
                max_model_len: engine.model_len(model.max_position_embeddings) as u32,
                max_num_blocks_per_req: max_num_blocks_per_req as u32,
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

/// The backends that were chosen for layers with keys, as far as the model has them.
struct Rows {
    attention: Option<BackendRow>,
    latent: Option<BackendRow>,
}

impl Rows {
    /// Asks for each kind of layer that there is. A backend that the operator named is asked for the kind that it serves, or, so
    /// that the refusal says why it cannot, for the one there is.
    fn chosen(
        engine: &EngineConfig,
        model: &ModelConfig,
        mixers: &[Mixer],
        facts: &DeviceFacts,
        warnings: &mut Vec<String>,
    ) -> Result<Self, EngineError> {
        let registry = BackendRegistry::new();
        let attends = mixers.iter().any(|m| matches!(m, Mixer::Attention { .. }));
        let latent = mixers.iter().find_map(|mixer| match mixer {
            Mixer::Latent(sizes) => Some(sizes),
            _ => None,
        });
        let requested = engine.attention_backend.as_deref();
        let is_latent = match requested {
            Some(name) => {
                registry
                    .row(name, rules(facts))
                    .map_err(timetable_attention::select::SelectError::from)?
                    .flags
                    .is_mla
            }
            None => false,
        };
        if let (Some(name), false, None) = (requested, attends, latent) {
            return Err(EngineError::Setting {
                name: "attention_backend",
                value: name.to_owned(),
                remedy: "every layer of this model is recurrent, and its type decides; leave it out, or say auto",
            });
        }
        let mut ask = |config: &Configuration, num_heads: usize, is_meant: bool| {
            let request = Request {
                config,
                num_heads: num_heads as u32,
                device: rules(facts),
                requested: requested.filter(|_| is_meant),
            };
            let Selection { row, log, warning } = select(&registry, &request)?;
            tracing::info!("{log}");
            warnings.extend(warning);
            Ok::<_, EngineError>(row)
        };
        let config = |head_size: usize| Configuration {
            kv_cache_dtype: Some(engine.kv_cache_dtype.name(facts.model_dtype).to_owned()),
            block_size: u32::try_from(engine.block_size).ok(),
            use_batch_invariant: engine.batch_invariant,
            ..Configuration::new(head_size as u32, facts.model_dtype)
        };
        let attention = attends.then(|| {
            let has_window = |mixer: &Mixer| {
                matches!(
                    mixer,
                    Mixer::Attention {
                        sliding_window: Some(_),
                        ..
                    }
                )
            };
            let config = Configuration {
                has_sliding_window: mixers.iter().any(has_window),
                ..config(model.head_dim)
            };
            let is_meant = !is_latent || latent.is_none();
            ask(&config, model.num_attention_heads, is_meant)
        });
        let attention = attention.transpose()?;
        let latent = latent.map(|sizes| {
            let config = Configuration {
                use_mla: true,
                model: ModelFacts {
                    qk_nope_head_dim: Some(sizes.qk_nope_head_dim as u32),
                    qk_rope_head_dim: Some(sizes.qk_rope_head_dim as u32),
                    v_head_dim: Some(sizes.v_head_dim as u32),
                    index_topk: None,
                },
                ..config(sizes.head_size())
            };
            ask(&config, sizes.num_heads, is_latent || !attends)
        });
        Ok(Self {
            attention,
            latent: latent.transpose()?,
        })
    }

    /// The row of a group's backend; none of a group with states.
    fn of(&self, group: &AttentionGroup) -> Option<&BackendRow> {
        let rows = [&self.attention, &self.latent];
        let mut rows = rows.into_iter().flatten();
        rows.find(|row| row.name == *group.backend.name)
    }
}

/// Every layer, with its own spec.
fn layers(
    engine: &EngineConfig,
    model: &ModelConfig,
    mixers: &[Mixer],
    rows: &Rows,
    facts: &DeviceFacts,
) -> Result<Vec<AttentionLayer>, EngineError> {
    let layer = |(index, mixer): (usize, &Mixer)| {
        let (backend, num_heads, spec) = match (mixer, &rows.attention, &rows.latent) {
            (
                Mixer::Attention {
                    sliding_window,
                    attention_chunk_size,
                },
                Some(row),
                _,
            ) => {
                let mut spec = attention_spec(engine, model, facts);
                spec.sliding_window = sliding_window.map(|window| window as u32);
                // A chunk that holds the longest request is no chunk.
                let max_model_len = engine.model_len(model.max_position_embeddings);
                let chunk = attention_chunk_size.filter(|&chunk| chunk < max_model_len);
                spec.attention_chunk_size = chunk.map(|chunk| chunk as u32);
                let class = match chunk {
                    Some(_) => row.class().wrapped("ChunkedLocalAttention"),
                    None => row.class(),
                };
                let spec = row.customize_spec(&spec.into());
                (class, model.num_attention_heads, spec)
            }
            (Mixer::Latent(sizes), _, Some(row)) => {
                let spec = row.customize_spec(&latent_spec(engine, sizes, facts).into());
                (row.class(), sizes.num_heads, spec)
            }
            (Mixer::Recurrent(config), ..) => {
                let class = MambaBackend::of(config.mamba_type()).class();
                let max_model_len = engine.model_len(model.max_position_embeddings);
                (class, 0, state_spec(config, max_model_len).into())
            }
            _ => unreachable!("a backend is chosen for each kind of layer that there is"),
        };
        spec.validate()?;
        Ok(AttentionLayer {
            name: layer_name(index, mixer),
            backend,
            num_heads: num_heads as u32,
            spec,
            kv_sharing_target: None,
        })
    };
    mixers.iter().enumerate().map(layer).collect()
}

fn attention_spec(
    engine: &EngineConfig,
    model: &ModelConfig,
    facts: &DeviceFacts,
) -> FullAttentionSpec {
    let mut spec = FullAttentionSpec::new(
        engine.block_size as u32,
        model.num_key_value_heads as u32,
        model.head_dim as u32,
        engine.kv_cache_dtype.resolve(facts.model_dtype),
    );
    spec.attention.kv_quant_mode =
        KvQuantMode::from_cache_dtype(engine.kv_cache_dtype.name(facts.model_dtype));
    // One rank has every key.
    spec.attention.dcp_sharded = false;
    spec
}

fn latent_spec(
    engine: &EngineConfig,
    sizes: &LatentSizes,
    facts: &DeviceFacts,
) -> MlaAttentionSpec {
    let name = engine.kv_cache_dtype.name(facts.model_dtype);
    let mut spec = MlaAttentionSpec::new(
        engine.block_size as u32,
        sizes.head_size() as u32,
        engine.kv_cache_dtype.resolve(facts.model_dtype),
    );
    spec.attention.kv_quant_mode = KvQuantMode::from_cache_dtype(name);
    spec.attention.dcp_sharded = false;
    spec.cache_dtype_str =
        (engine.kv_cache_dtype == KvCacheDtype::Fp8DsMla).then(|| name.to_owned());
    spec
}

/// Without prefix caching a group's nominal block is the whole context, as in the field.
fn state_spec(config: &MambaConfig, max_model_len: usize) -> MambaSpec {
    let shapes = config.state_shapes().to_vec();
    let dtypes = vec![Dtype::Float32; shapes.len()];
    let mut spec = MambaSpec::new(max_model_len as u32, config.mamba_type(), shapes, dtypes);
    spec.chunk_size = match (config, config.mamba_type()) {
        (MambaConfig::Mamba2(config), _) => config.chunk_size as u32,
        (_, MambaType::Gdn) => GDN_CHUNK,
        _ => 0,
    };
    spec
}

/// The family of a group's metadata, if the device executes them.
fn family(group: &AttentionGroup, facts: &DeviceFacts) -> Result<Family, EngineError> {
    let backend = &*group.backend.name;
    let family = family_of(backend).ok_or_else(|| EngineError::NoContract(backend.to_owned()))?;
    let lacks = |needs: String, remedy| {
        let runs = facts.families.iter().map(|family| family.interface());
        Err(EngineError::DeviceLacks {
            layer: group.layer_names[0].clone(),
            needs,
            runs: runs.collect::<Vec<_>>().join(", "),
            remedy,
        })
    };
    let on_cpu = "run the model on the CPU device (--device cpu)";
    if !facts.families.contains(&family) {
        let needs = format!("metadata of `{}` ({backend})", family.interface());
        // Another backend serves the same layers.
        let is_plain = Backend::from_name(backend).is_some() && family != Family::FlashMla;
        return match is_plain {
            true => lacks(
                needs,
                "choose FLASH_ATTN or FLASHINFER (--attention-backend)",
            ),
            false => lacks(needs, on_cpu),
        };
    }
    match group.view() {
        BatchView::Local { chunk } if !facts.virtual_batches => lacks(
            format!("a virtual batch of chunks of {chunk} tokens"),
            on_cpu,
        ),
        _ => Ok(family),
    }
}

/// The KV cache groups: one of all layers with keys, of their spec where they agree, else of a UniformType one; and those of
/// layers with states, by spec.
fn groups_of_one_table(layers: &[AttentionLayer]) -> Result<Vec<KvCacheGroup>, EngineError> {
    let is_state = |spec: &CacheSpec| matches!(spec, CacheSpec::Mamba(_));
    let (states, keys): (Vec<_>, Vec<_>) = kv_cache_groups(layers)?
        .into_iter()
        .partition(|group| is_state(&group.spec));
    let keys = match keys.len() {
        0 | 1 => keys,
        _ => {
            let of_keys = || layers.iter().filter(|layer| !is_state(&layer.spec));
            let members = of_keys().map(|layer| (layer.name.clone(), layer.spec.clone()));
            vec![KvCacheGroup {
                layer_names: of_keys().map(|layer| layer.name.clone()).collect(),
                spec: UniformTypeKvCacheSpecs::new(members.collect())?.into(),
            }]
        }
    };
    Ok(keys.into_iter().chain(states).collect())
}
