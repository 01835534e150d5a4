//! Multi-head latent attention: a token's keys and values of all heads are projections of one cached latent. This module must
//! never know how metadata was built.
//!
//! Names and shapes: vLLM `MLACommonImpl` (`vllm/model_executor/layers/attention/mla_attention.py`) @0.32/0.33.

mod cache;
mod fp8;
mod layer;
mod prefill;
mod prepare;
mod step;

pub use cache::{LatentCache, LatentDtype};
pub use layer::{MlaAttentionImpl, MlaConfig, MlaImpl};
pub use step::MlaStepMetadata;

/// The sizes of a latent attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentSizes {
    /// Query heads.
    pub num_heads: usize,
    /// Elements of a token's latent.
    pub kv_lora_rank: usize,
    /// Elements of a head's query and key that no position rotates.
    pub qk_nope_head_dim: usize,
    /// Elements of a head's query and key that are rotated; the key's are one vector for all heads.
    pub qk_rope_head_dim: usize,
    /// Elements of a head's value.
    pub v_head_dim: usize,
    /// Multiplies q·k.
    pub scale: f32,
}

impl LatentSizes {
    /// Elements of a head's query: both parts.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Elements of a token in the cache: the latent, then the rotated key.
    pub fn head_size(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }
}

/// What one layer brings to a step of T tokens.
#[derive(Clone, Copy, Debug)]
pub struct LatentInputs<'a> {
    /// f32 [T, num_heads, qk_nope_head_dim + qk_rope_head_dim], the second part rotated.
    pub q: &'a [f32],
    /// f32 [T, kv_lora_rank], normed.
    pub kv_c_normed: &'a [f32],
    /// f32 [T, qk_rope_head_dim], rotated.
    pub k_pe: &'a [f32],
    /// f32 [num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]: the layer's weights that make a head's key (its part
    /// without a position) and value of a latent.
    pub kv_b_proj: &'a [f32],
}
