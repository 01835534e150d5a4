//! The CPU executor's layers: for each the device's impl with the cache or the states that it keeps, and for each group and
//! segment of a step the metadata as impls of its kind execute them.
//!
//! This module must never know a builder, a scheduler or how a model is computed between its mixers.

use std::ops::Range;

use timetable_attention::VerifyContext;
use timetable_device::cpu::{
    AttentionConfig, AttentionImpl, CacheDtype, ImplError, KvCache, StepMetadata,
    mamba::{MambaImpl, MambaInputs, MambaStates, MambaStepMetadata},
    mla::{
        LatentCache, LatentDtype, LatentInputs, MlaAttentionImpl, MlaConfig, MlaImpl,
        MlaStepMetadata,
    },
    new_impl,
};
use timetable_types::{BuilderConfig, Dtype, Family, Metadata};

use crate::{
    config::{EngineError, KvCacheDtype},
    executor::Unprepared,
    model::{AttentionError, AttentionLayers, Mixer},
};

/// One layer.
pub(super) struct Layer {
    group: usize,
    mixing: Mixing,
}

/// An impl, and what it keeps.
enum Mixing {
    Attention {
        attention: Box<dyn AttentionImpl>,
        cache: KvCache,
        config: AttentionConfig,
    },
    Latent {
        attention: MlaImpl,
        cache: LatentCache,
    },
    Recurrent {
        recurrence: MambaImpl,
        states: MambaStates,
    },
}

/// How large caches and pools are.
#[derive(Clone, Copy)]
pub(super) struct Room {
    /// Kernel blocks of a cache.
    pub num_blocks: usize,
    /// States of a pool.
    pub num_states: usize,
}

impl Room {
    /// For a profile run.
    pub(super) const LEAST: Room = Room {
        num_blocks: 1,
        num_states: 1,
    };
}

impl Layer {
    /// A layer of `group`, whose builder is made of `config`, with the least room.
    ///
    /// # Errors
    /// What the device has no impl for.
    pub(super) fn new(
        (group, config, backend): (usize, &BuilderConfig, &str),
        family: Family,
        mixer: &Mixer,
        (kv_cache_dtype, model_dtype): (KvCacheDtype, Dtype),
    ) -> Result<Self, EngineError> {
        let refuse = |remedy| EngineError::Setting {
            name: "kv_cache_dtype",
            value: kv_cache_dtype.name(model_dtype).to_owned(),
            remedy,
        };
        let mixing = match mixer {
            Mixer::Attention { .. } => {
                let dtype = match kv_cache_dtype.resolve(model_dtype) {
                    Dtype::Float32 => CacheDtype::F32,
                    Dtype::Bfloat16 => CacheDtype::Bf16,
                    _ => {
                        let remedy =
                            "the CPU keeps float32 and bfloat16; choose one of them, or a GPU";
                        return Err(refuse(remedy));
                    }
                };
                let config = attention_config(config, dtype);
                Mixing::Attention {
                    attention: new_impl(family, config)?,
                    cache: attention_cache(&config, Room::LEAST),
                    config,
                }
            }
            Mixer::Latent(sizes) => {
                let kv_cache_dtype = match kv_cache_dtype.resolve(model_dtype) {
                    Dtype::Float32 => LatentDtype::F32,
                    Dtype::Bfloat16 => LatentDtype::Bf16,
                    _ if kv_cache_dtype == KvCacheDtype::Fp8DsMla => LatentDtype::Fp8DsMla,
                    _ => {
                        let remedy =
                            "the CPU keeps latents in float32, bfloat16 and fp8_ds_mla; choose one";
                        return Err(refuse(remedy));
                    }
                };
                let config = MlaConfig {
                    kv_cache_dtype,
                    batch_invariant: config.batch_invariant,
                    impl_name: match backend {
                        "FLASH_ATTN_MLA" => "FlashAttnMLAImpl",
                        "TRITON_MLA" => "TritonMLAImpl",
                        _ => "FlashMLAImpl",
                    },
                    ..MlaConfig::new(*sizes, config.kv_cache_spec.block_size as usize)
                };
                Mixing::Latent {
                    attention: MlaImpl::new(config)?,
                    cache: latent_cache(&config, Room::LEAST)?,
                }
            }
            Mixer::Recurrent(config) => Mixing::Recurrent {
                recurrence: MambaImpl::new(*config)?,
                states: MambaStates::new(Room::LEAST.num_states, config),
            },
        };
        Ok(Self { group, mixing })
    }

    /// Replaces the cache or the states by empty ones of that size.
    pub(super) fn make_room(&mut self, room: Room) -> Result<(), EngineError> {
        match &mut self.mixing {
            Mixing::Attention { cache, config, .. } => *cache = attention_cache(config, room),
            Mixing::Latent { attention, cache } => *cache = latent_cache(attention.config(), room)?,
            Mixing::Recurrent { recurrence, states } => {
                *states = MambaStates::new(room.num_states, recurrence.config());
            }
        }
        Ok(())
    }

    fn is_not(&self, what: &str) -> AttentionError {
        let is = match self.mixing {
            Mixing::Attention { .. } => "attention",
            Mixing::Latent { .. } => "latent attention",
            Mixing::Recurrent { .. } => "a recurrence",
        };
        format!("its configuration says {is}, and the model computes {what}: this is a defect of the model").into()
    }
}

fn attention_cache(config: &AttentionConfig, room: Room) -> KvCache {
    KvCache::new(
        room.num_blocks,
        config.num_kv_heads,
        config.block_size,
        config.head_size,
        config.kv_cache_dtype,
    )
}

fn latent_cache(config: &MlaConfig, room: Room) -> Result<LatentCache, ImplError> {
    LatentCache::new(
        room.num_blocks,
        config.block_size,
        config.sizes.kv_lora_rank,
        config.sizes.qk_rope_head_dim,
        config.kv_cache_dtype,
    )
}

fn attention_config(config: &BuilderConfig, kv_cache_dtype: CacheDtype) -> AttentionConfig {
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
        batch_invariant: config.batch_invariant,
    }
}

/// One group's metadata of one segment.
pub(super) struct Prepared {
    metadata: Executable,
    /// False: the segment was left out, and its outputs are zeros.
    is_there: bool,
}

/// As impls of a family execute them.
enum Executable {
    Attention(StepMetadata),
    Latent(MlaStepMetadata),
    Recurrent(MambaStepMetadata),
}

impl Prepared {
    /// Nothing, for a group of `family`.
    pub(super) fn new(family: Family) -> Self {
        let metadata = match family {
            Family::FlashMla => Executable::Latent(MlaStepMetadata::new()),
            Family::Mamba => Executable::Recurrent(MambaStepMetadata::new()),
            Family::FlashAttn | Family::Flashinfer | Family::TritonAttn => {
                Executable::Attention(StepMetadata::new())
            }
        };
        Self {
            metadata,
            is_there: false,
        }
    }

    pub(super) fn prepare(
        &mut self,
        metadata: &Metadata,
        context: &VerifyContext<'_>,
    ) -> Result<(), Unprepared> {
        let block_size = context.config.kv_cache_spec.block_size;
        self.is_there = false;
        match &mut self.metadata {
            Executable::Attention(prepared) => {
                prepared.prepare(metadata, context.inputs, block_size)?;
            }
            Executable::Latent(prepared) => {
                prepared.prepare(metadata, context.inputs, block_size)?;
            }
            Executable::Recurrent(prepared) => prepared.prepare(metadata, context.inputs)?,
        }
        self.is_there = true;
        Ok(())
    }

    pub(super) fn leave_out(&mut self) {
        self.is_there = false;
    }
}

/// The layers as the model calls them, for the step that was prepared last.
pub(super) struct StepLayers<'a> {
    /// By group, then by segment.
    pub prepared: &'a [Vec<Prepared>],
    /// Empty: the step is one segment.
    pub segments: &'a [Range<usize>],
    pub layers: &'a mut [Layer],
    pub slot_mapping: &'a [i64],
}

impl StepLayers<'_> {
    /// The metadata and the tokens of each segment.
    fn segments(&self, group: usize) -> impl Iterator<Item = (Option<&Executable>, Range<usize>)> {
        let prepared = self.prepared[group].iter().map(|prepared| {
            let metadata = prepared.is_there.then_some(&prepared.metadata);
            // One that was left out has none: zeros.
            metadata
        });
        let whole = std::slice::from_ref(&self.whole);
        let _ = whole;
        prepared.zip(self.segments.iter().cloned())
    }
}
