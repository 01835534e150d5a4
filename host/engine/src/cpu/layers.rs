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

    /// Bytes that the impl's own scratch takes for a step of `tokens` tokens, f32, which a profile run without metadata does not
    /// touch: absorbed queries and attended latents; the convolution's outputs and the recurrence's. One layer's at a time.
    pub(super) fn scratch_bytes(&self, tokens: usize) -> u64 {
        let elements = match &self.mixing {
            Mixing::Attention { .. } => 0,
            Mixing::Latent { attention, .. } => {
                let sizes = &attention.config().sizes;
                sizes.num_heads * (sizes.head_size() + sizes.kv_lora_rank)
            }
            Mixing::Recurrent { recurrence, .. } => {
                recurrence.config().conv_dim() + recurrence.config().output_size()
            }
        };
        (tokens as u64).saturating_mul(4 * elements as u64)
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
            Executable::Recurrent(prepared) => {
                prepared.prepare(metadata, context.inputs, &context.config.kv_cache_spec)?;
            }
        }
        self.is_there = true;
        Ok(())
    }

    pub(super) fn leave_out(&mut self) {
        self.is_there = false;
    }

    fn of_attention(&self) -> Option<&StepMetadata> {
        match &self.metadata {
            Executable::Attention(metadata) if self.is_there => Some(metadata),
            _ => None,
        }
    }

    fn of_latents(&self) -> Option<&MlaStepMetadata> {
        match &self.metadata {
            Executable::Latent(metadata) if self.is_there => Some(metadata),
            _ => None,
        }
    }

    fn of_states(&self) -> Option<&MambaStepMetadata> {
        match &self.metadata {
            Executable::Recurrent(metadata) if self.is_there => Some(metadata),
            _ => None,
        }
    }
}

/// The elements of the tokens `segment` of a step of `tokens`.
fn part<'a>(elements: &'a [f32], segment: &Range<usize>, tokens: usize) -> &'a [f32] {
    let width = elements.len().checked_div(tokens).unwrap_or(0);
    &elements[segment.start * width..segment.end * width]
}

fn part_mut<'a>(elements: &'a mut [f32], segment: &Range<usize>, tokens: usize) -> &'a mut [f32] {
    let width = elements.len().checked_div(tokens).unwrap_or(0);
    &mut elements[segment.start * width..segment.end * width]
}

/// The layers as the model calls them, for the step that was prepared last.
pub(super) struct StepLayers<'a> {
    /// By group, then by segment.
    pub prepared: &'a [Vec<Prepared>],
    /// The segments' tokens.
    pub segments: &'a [Range<usize>],
    pub layers: &'a mut [Layer],
    pub slot_mapping: &'a [i64],
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
        let tokens = self.slot_mapping.len();
        let layer = &mut self.layers[layer];
        let Mixing::Attention {
            attention, cache, ..
        } = &mut layer.mixing
        else {
            return Err(layer.is_not("attention"));
        };
        attention.do_kv_cache_update(k, v, cache, self.slot_mapping);
        for (prepared, segment) in self.prepared[layer.group].iter().zip(self.segments) {
            let (q, out) = (part(q, segment, tokens), part_mut(out, segment, tokens));
            attention.forward(q, cache, prepared.of_attention(), out, None)?;
        }
        Ok(())
    }

    fn attend_latent(
        &mut self,
        layer: usize,
        inputs: &LatentInputs<'_>,
        out: &mut [f32],
    ) -> Result<(), AttentionError> {
        let tokens = self.slot_mapping.len();
        let layer = &mut self.layers[layer];
        let Mixing::Latent { attention, cache } = &mut layer.mixing else {
            return Err(layer.is_not("latent attention"));
        };
        attention.do_kv_cache_update(inputs.kv_c_normed, inputs.k_pe, cache, self.slot_mapping);
        for (prepared, segment) in self.prepared[layer.group].iter().zip(self.segments) {
            let inputs = LatentInputs {
                q: part(inputs.q, segment, tokens),
                kv_c_normed: part(inputs.kv_c_normed, segment, tokens),
                k_pe: part(inputs.k_pe, segment, tokens),
                ..*inputs
            };
            let out = part_mut(out, segment, tokens);
            attention.forward(&inputs, cache, prepared.of_latents(), out)?;
        }
        Ok(())
    }

    fn recur(
        &mut self,
        layer: usize,
        inputs: &MambaInputs<'_>,
        out: &mut [f32],
    ) -> Result<(), AttentionError> {
        let tokens = self.slot_mapping.len();
        let layer = &mut self.layers[layer];
        let Mixing::Recurrent { recurrence, states } = &mut layer.mixing else {
            return Err(layer.is_not("a recurrence"));
        };
        for (prepared, segment) in self.prepared[layer.group].iter().zip(self.segments) {
            let inputs = inputs.of_tokens(segment.clone(), tokens);
            let out = part_mut(out, segment, tokens);
            recurrence.forward(&inputs, states, prepared.of_states(), out)?;
        }
        Ok(())
    }
}

/// The layers without metadata: every output is zero, nothing is written.
pub(super) struct ProfileLayers<'a> {
    pub layers: &'a mut [Layer],
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
        match &layer.mixing {
            Mixing::Attention {
                attention, cache, ..
            } => Ok(attention.forward(q, cache, None, out, None)?),
            _ => Err(layer.is_not("attention")),
        }
    }

    fn attend_latent(
        &mut self,
        layer: usize,
        inputs: &LatentInputs<'_>,
        out: &mut [f32],
    ) -> Result<(), AttentionError> {
        let layer = &self.layers[layer];
        match &layer.mixing {
            Mixing::Latent { attention, cache } => Ok(attention.forward(inputs, cache, None, out)?),
            _ => Err(layer.is_not("latent attention")),
        }
    }

    fn recur(
        &mut self,
        layer: usize,
        inputs: &MambaInputs<'_>,
        out: &mut [f32],
    ) -> Result<(), AttentionError> {
        let layer = &mut self.layers[layer];
        match &mut layer.mixing {
            Mixing::Recurrent { recurrence, states } => {
                Ok(recurrence.forward(inputs, states, None, out)?)
            }
            _ => Err(layer.is_not("a recurrence")),
        }
    }
}
