//! KV cache specs: what one layer keeps per block, and how many bytes and blocks that is.
//!
//! Specs are values: equal specs share a KV cache group and an attention group. A spec must never know a tensor, a device or
//! an allocator. Formulas: vLLM `vllm/v1/kv_cache_interface.py` @0.32/0.33, as recorded in `tests/vectors/kv_cache_shape.json`.

use timetable_types::{
    Dtype, KvCacheSpec, KvCacheSpecKind, MambaCacheMode, MambaSpec as MambaParameters, MambaType,
};

mod attention;
mod mamba;
mod quant;
mod uniform;

pub use attention::{
    AttentionSpec, ChunkedLocalAttentionSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec,
    FullAttentionSpec, MlaAttentionSpec, SlidingWindowMlaSpec, SlidingWindowSpec, TokensPerState,
};
pub use mamba::MambaSpec;
pub use quant::KvQuantMode;
pub use uniform::UniformTypeKvCacheSpecs;

/// Bytes of one element of `dtype`.
pub const fn dtype_size(dtype: Dtype) -> u64 {
    match dtype {
        Dtype::Float32 | Dtype::Int32 => 4,
        Dtype::Float16 | Dtype::Bfloat16 => 2,
        Dtype::Float8E4m3 | Dtype::Float8E5m2 | Dtype::Uint8 => 1,
    }
}

/// Why specs do not fit together, or do not describe a cache.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// Layers of one group differ in more than the window. The field's text.
    #[error("All attention layers in the same KV cache group must be the same.")]
    NotTheSame,
    /// More than one window among merged layers. The field's text.
    #[error("All attention layers in the same KV cache group must have the same window size.")]
    WindowsDiffer,
    /// A sliding window and a chunk in one merged spec. The field's text.
    #[error(
        "Model with both sliding window layers and chunked local attention layers is not supported."
    )]
    WindowAndChunk,
    /// There was nothing to merge.
    #[error("a KV cache group needs at least one layer; it got none")]
    Empty,
    /// A size that must not be zero.
    #[error("{field} must be at least 1, got {value}: correct the layer's KV cache spec")]
    Zero {
        /// The field's name.
        field: &'static str,
        /// What it was.
        value: u64,
    },
    /// A block that its states do not fill.
    #[error(
        "block_size {block_size} does not hold a whole number of states of {tokens}/{states} tokens: choose a block_size that is a multiple of {tokens}"
    )]
    PartialState {
        /// Tokens of a block.
        block_size: u32,
        /// Tokens of `states` states.
        tokens: u32,
        /// States of `tokens` tokens.
        states: u32,
    },
    /// A padded page smaller than its content.
    #[error(
        "page_size_padded {padded} is smaller than the {real} bytes that a page holds: raise it to at least that"
    )]
    PaddedTooSmall {
        /// The page asked for, in bytes.
        padded: u64,
        /// What must fit in it, in bytes.
        real: u64,
    },
    /// Mamba shapes and dtypes do not pair up.
    #[error("a Mamba spec has {shapes} state shapes and {dtypes} dtypes: give one dtype per shape")]
    ShapesAndDtypes {
        /// Number of shapes.
        shapes: usize,
        /// Number of dtypes.
        dtypes: usize,
    },
    /// Members of a UniformType group that are not of one type.
    #[error(
        "layer {layer}: {what} differs from layer {first}'s, so the two cannot share a UniformType KV cache group: put them in separate groups"
    )]
    NotUniform {
        /// The layer that does not fit.
        layer: String,
        /// The layer it is compared with.
        first: String,
        /// What differs.
        what: &'static str,
    },
    /// A UniformType spec has no single form; ask for a member's.
    #[error("a UniformType KV cache spec describes several layers: take the spec of one layer")]
    UniformHasNoSingleForm,
    /// A number that does not fit the contract's 32 bits, or a page beyond 64.
    #[error("{field} {value} is too large: it must fit in {bits} bits")]
    TooLarge {
        /// The field's name.
        field: &'static str,
        /// What it was.
        value: u128,
        /// Bits it must fit in.
        bits: u32,
    },
}

/// The KV cache spec of one layer, or of a KV cache group. Sizes in tokens unless named otherwise.
///
/// Equality and hash cover every field; they drive grouping.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum CacheSpec {
    /// Every key is kept.
    FullAttention(FullAttentionSpec),
    /// Only the last `sliding_window` keys are kept.
    SlidingWindow(SlidingWindowSpec),
    /// Only the current chunk's keys are kept.
    ChunkedLocalAttention(ChunkedLocalAttentionSpec),
    /// One latent vector per token.
    MlaAttention(MlaAttentionSpec),
    /// A latent vector per token, only the last `sliding_window` of them.
    SlidingWindowMla(SlidingWindowMlaSpec),
    /// A recurrent state per request.
    Mamba(MambaSpec),
    /// Encoder keys, written once.
    CrossAttention(CrossAttentionSpec),
    /// No cache.
    EncoderOnlyAttention(EncoderOnlyAttentionSpec),
    /// Several layers of one kind with different sizes, in one group.
    UniformType(UniformTypeKvCacheSpecs),
}

impl CacheSpec {
    /// The attention part, where there is one.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        match self {
            CacheSpec::FullAttention(s) => Some(&s.attention),
            CacheSpec::SlidingWindow(s) => Some(&s.attention),
            CacheSpec::ChunkedLocalAttention(s) => Some(&s.attention),
            CacheSpec::MlaAttention(s) => Some(&s.attention),
            CacheSpec::SlidingWindowMla(s) => Some(&s.attention),
            CacheSpec::CrossAttention(s) => Some(&s.attention),
            CacheSpec::EncoderOnlyAttention(s) => Some(&s.attention),
            CacheSpec::Mamba(_) | CacheSpec::UniformType(_) => None,
        }
    }

    /// As [`attention`](Self::attention), for a backend's `customize_spec`.
    pub fn attention_mut(&mut self) -> Option<&mut AttentionSpec> {
        match self {
            CacheSpec::FullAttention(s) => Some(&mut s.attention),
            CacheSpec::SlidingWindow(s) => Some(&mut s.attention),
            CacheSpec::ChunkedLocalAttention(s) => Some(&mut s.attention),
            CacheSpec::MlaAttention(s) => Some(&mut s.attention),
            CacheSpec::SlidingWindowMla(s) => Some(&mut s.attention),
            CacheSpec::CrossAttention(s) => Some(&mut s.attention),
            CacheSpec::EncoderOnlyAttention(s) => Some(&mut s.attention),
            CacheSpec::Mamba(_) | CacheSpec::UniformType(_) => None,
        }
    }

    /// Tokens of one block.
    pub fn block_size(&self) -> u32 {
        match self {
            CacheSpec::Mamba(s) => s.block_size,
            CacheSpec::UniformType(s) => s.block_size(),
            _ => self.attention().map_or(0, |a| a.block_size),
        }
    }

    /// Bytes of one block of this layer (of all members of a UniformType), padding included.
    pub fn page_size_bytes(&self) -> u64 {
        match self {
            CacheSpec::MlaAttention(s) => s.page_size_bytes(),
            CacheSpec::SlidingWindowMla(s) => s.page_size_bytes(),
            CacheSpec::Mamba(s) => s.page_size_bytes(),
            CacheSpec::UniformType(s) => s.page_size_bytes(),
            _ => self.attention().map_or(0, AttentionSpec::page_size_bytes),
        }
    }

    /// Head slots of one block: H of the logical shape `[NB, H, N, C]`. 1 for MLA and Mamba.
    pub fn num_heads(&self) -> u32 {
        match self {
            CacheSpec::Mamba(_) => 1,
            CacheSpec::UniformType(s) => s.first().num_heads(),
            _ => self.attention().map_or(0, AttentionSpec::num_heads),
        }
    }

    /// States of one block: N of the logical shape. 1 for Mamba.
    pub fn num_states(&self) -> u32 {
        match self {
            CacheSpec::Mamba(_) => 1,
            CacheSpec::UniformType(s) => s.first().num_states(),
            _ => self.attention().map_or(0, AttentionSpec::num_states),
        }
    }

    /// States of a kernel block of `kernel_block_size` tokens; 1 for Mamba.
    pub fn num_kernel_states(&self, kernel_block_size: u32) -> u32 {
        match self {
            CacheSpec::Mamba(_) => 1,
            CacheSpec::UniformType(s) => s.first().num_kernel_states(kernel_block_size),
            _ => self
                .attention()
                .map_or(0, |a| a.tokens_per_state.states_in(kernel_block_size)),
        }
    }

    /// Bytes of one state of one head slot: C of the logical shape.
    pub fn state_content_size_bytes(&self) -> u64 {
        match self {
            CacheSpec::MlaAttention(s) => s.state_content_size_bytes(),
            CacheSpec::SlidingWindowMla(s) => s.state_content_size_bytes(),
            CacheSpec::Mamba(s) => s.page_size_bytes(),
            CacheSpec::UniformType(s) => s.first().state_content_size_bytes(),
            _ => self
                .attention()
                .map_or(0, AttentionSpec::state_content_size_bytes),
        }
    }

    /// Is this cache sharded over the decode-context-parallel ranks? Mamba never is.
    pub fn dcp_sharded(&self) -> bool {
        match self {
            CacheSpec::Mamba(_) => false,
            CacheSpec::UniformType(s) => s.first().dcp_sharded(),
            _ => self.attention().is_some_and(|a| a.dcp_sharded),
        }
    }

    /// Does the runner write new keys through a slot mapping?
    pub fn uses_slot_mapping(&self) -> bool {
        !matches!(self, CacheSpec::Mamba(_))
    }

    /// Tokens that a block table's width is rounded up to; none for Mamba.
    pub fn block_table_token_alignment(&self) -> Option<u32> {
        match self {
            CacheSpec::Mamba(_) => None,
            _ => Some(crate::kernel_block::BLOCK_TABLE_TOKEN_ALIGNMENT),
        }
    }

    /// Columns of a request's block-table row: the most blocks that a request of `max_model_len` tokens holds on one rank.
    ///
    /// `ceil(max_len / block_size)`, with `block_size · dcp_world_size` where the cache is sharded; Mamba: see
    /// [`MambaSpec::max_num_blocks_per_req`].
    pub fn max_num_blocks_per_req(&self, max_model_len: u32, dcp_world_size: u32) -> u32 {
        match self {
            CacheSpec::Mamba(s) => s.max_num_blocks_per_req(max_model_len),
            CacheSpec::UniformType(s) => s
                .first()
                .max_num_blocks_per_req(max_model_len, dcp_world_size),
            _ => self.attention().map_or(0, |a| {
                a.max_num_blocks_per_req(max_model_len, dcp_world_size)
            }),
        }
    }

    /// The most blocks that a request occupies at once, given that at most `in_flight` tokens are computed ahead: what the
    /// scheduler must be able to admit. Windows and chunks bound it.
    pub fn max_admission_blocks(
        &self,
        max_model_len: u32,
        in_flight: u32,
        dcp_world_size: u32,
    ) -> u32 {
        match self {
            CacheSpec::SlidingWindow(s) => s.max_admission_blocks(max_model_len, in_flight),
            CacheSpec::SlidingWindowMla(s) => s.max_admission_blocks(max_model_len, in_flight),
            CacheSpec::ChunkedLocalAttention(s) => s.max_admission_blocks(max_model_len, in_flight),
            CacheSpec::EncoderOnlyAttention(_) => 0,
            _ => self.max_num_blocks_per_req(max_model_len, dcp_world_size),
        }
    }

    /// The same spec with blocks of `block_size` tokens: what a builder is given when its kernel block is smaller.
    pub fn copy_with_new_block_size(&self, block_size: u32) -> CacheSpec {
        let mut copy = self.clone();
        match &mut copy {
            CacheSpec::Mamba(s) => s.block_size = block_size,
            CacheSpec::UniformType(s) => s.set_block_size(block_size),
            other => {
                if let Some(a) = other.attention_mut() {
                    a.block_size = block_size;
                }
            }
        }
        copy
    }

    /// The kind, in the contract's words; none for a UniformType, which has its members'.
    pub fn kind(&self) -> Option<KvCacheSpecKind> {
        Some(match self {
            CacheSpec::FullAttention(_) => KvCacheSpecKind::FullAttention,
            CacheSpec::SlidingWindow(_) => KvCacheSpecKind::SlidingWindow,
            CacheSpec::ChunkedLocalAttention(_) => KvCacheSpecKind::ChunkedLocalAttention,
            CacheSpec::MlaAttention(_) => KvCacheSpecKind::MlaAttention,
            CacheSpec::SlidingWindowMla(_) => KvCacheSpecKind::SlidingWindowMla,
            CacheSpec::Mamba(_) => KvCacheSpecKind::Mamba,
            CacheSpec::CrossAttention(_) => KvCacheSpecKind::CrossAttention,
            CacheSpec::EncoderOnlyAttention(_) => KvCacheSpecKind::EncoderOnlyAttention,
            CacheSpec::UniformType(_) => return None,
        })
    }

    /// The kind's name in reports: the contract's, in the field's spelling, or `UNIFORM_TYPE`.
    pub fn kind_name(&self) -> &'static str {
        match self.kind() {
            Some(KvCacheSpecKind::FullAttention) => "FULL_ATTENTION",
            Some(KvCacheSpecKind::SlidingWindow) => "SLIDING_WINDOW",
            Some(KvCacheSpecKind::ChunkedLocalAttention) => "CHUNKED_LOCAL_ATTENTION",
            Some(KvCacheSpecKind::MlaAttention) => "MLA_ATTENTION",
            Some(KvCacheSpecKind::SlidingWindowMla) => "SLIDING_WINDOW_MLA",
            Some(KvCacheSpecKind::Mamba) => "MAMBA",
            Some(KvCacheSpecKind::CrossAttention) => "CROSS_ATTENTION",
            Some(KvCacheSpecKind::EncoderOnlyAttention) => "ENCODER_ONLY_ATTENTION",
            None => "UNIFORM_TYPE",
        }
    }

    /// The contract's record: what a builder sees, with `kernel_block_size` tokens per block.
    ///
    /// # Errors
    /// [`SpecError::UniformHasNoSingleForm`] for a UniformType spec.
    pub fn to_contract(&self, kernel_block_size: u32) -> Result<KvCacheSpec, SpecError> {
        let kind = self.kind().ok_or(SpecError::UniformHasNoSingleForm)?;
        let (mut sliding_window, mut attention_chunk_size) = (None, None);
        match self {
            CacheSpec::FullAttention(s) => {
                sliding_window = s.sliding_window;
                attention_chunk_size = s.attention_chunk_size;
            }
            CacheSpec::SlidingWindow(s) => sliding_window = Some(s.sliding_window),
            CacheSpec::SlidingWindowMla(s) => sliding_window = Some(s.sliding_window),
            CacheSpec::ChunkedLocalAttention(s) => {
                attention_chunk_size = Some(s.attention_chunk_size);
            }
            _ => {}
        }
        Ok(match self {
            CacheSpec::Mamba(s) => KvCacheSpec {
                kind,
                block_size: kernel_block_size,
                num_kv_heads: 1,
                head_size: 0,
                head_size_v: 0,
                dtype: s.dtypes.first().copied().unwrap_or(Dtype::Float32),
                sliding_window,
                attention_chunk_size,
                dcp_sharded: false,
                mamba: Some(s.to_contract()),
            },
            _ => {
                // Every other kind but UniformType, refused above, has an attention part.
                let a = self.attention().ok_or(SpecError::UniformHasNoSingleForm)?;
                KvCacheSpec {
                    kind,
                    block_size: kernel_block_size,
                    num_kv_heads: a.num_kv_heads,
                    head_size: a.head_size,
                    head_size_v: a.head_size_v,
                    dtype: a.dtype,
                    sliding_window,
                    attention_chunk_size,
                    dcp_sharded: a.dcp_sharded,
                    mamba: None,
                }
            }
        })
    }

    /// Checks that the spec describes a cache: nothing is zero that must not be, blocks hold whole states, padded pages are
    /// large enough.
    ///
    /// # Errors
    /// The first [`SpecError`] found.
    pub fn validate(&self) -> Result<(), SpecError> {
        match self {
            CacheSpec::Mamba(s) => s.validate(),
            CacheSpec::UniformType(s) => s.members().iter().try_for_each(|(_, m)| m.validate()),
            other => {
                if let Some(a) = other.attention() {
                    a.validate()?;
                }
                match other {
                    CacheSpec::SlidingWindow(s) => non_zero("sliding_window", s.sliding_window),
                    CacheSpec::SlidingWindowMla(s) => non_zero("sliding_window", s.sliding_window),
                    CacheSpec::ChunkedLocalAttention(s) => {
                        non_zero("attention_chunk_size", s.attention_chunk_size)
                    }
                    CacheSpec::FullAttention(s)
                        if s.sliding_window.is_some() && s.attention_chunk_size.is_some() =>
                    {
                        Err(SpecError::WindowAndChunk)
                    }
                    _ => Ok(()),
                }
            }
        }
    }

    /// One spec for layers that share a KV cache group. Full attention merges windows and chunks; every other kind must be
    /// equal throughout.
    ///
    /// # Errors
    /// The field's texts: [`SpecError::NotTheSame`], [`SpecError::WindowsDiffer`], [`SpecError::WindowAndChunk`].
    pub fn merge(specs: &[CacheSpec]) -> Result<CacheSpec, SpecError> {
        let first = specs.first().ok_or(SpecError::Empty)?;
        if let CacheSpec::FullAttention(_) = first {
            let full: Vec<&FullAttentionSpec> = specs
                .iter()
                .map(|s| match s {
                    CacheSpec::FullAttention(f) => Ok(f),
                    _ => Err(SpecError::NotTheSame),
                })
                .collect::<Result<_, _>>()?;
            return FullAttentionSpec::merge(&full).map(CacheSpec::FullAttention);
        }
        if specs.iter().all(|s| s == first) {
            Ok(first.clone())
        } else {
            Err(SpecError::NotTheSame)
        }
    }
}

/// An error for zero.
fn non_zero(field: &'static str, value: u32) -> Result<(), SpecError> {
    if value == 0 {
        Err(SpecError::Zero { field, value: 0 })
    } else {
        Ok(())
    }
}

macro_rules! from_member {
    ($($variant:ident($spec:ty),)*) => {
        $(impl From<$spec> for CacheSpec {
            fn from(spec: $spec) -> Self {
                CacheSpec::$variant(spec)
            }
        })*
    };
}

from_member! {
    FullAttention(FullAttentionSpec),
    SlidingWindow(SlidingWindowSpec),
    ChunkedLocalAttention(ChunkedLocalAttentionSpec),
    MlaAttention(MlaAttentionSpec),
    SlidingWindowMla(SlidingWindowMlaSpec),
    Mamba(MambaSpec),
    CrossAttention(CrossAttentionSpec),
    EncoderOnlyAttention(EncoderOnlyAttentionSpec),
    UniformType(UniformTypeKvCacheSpecs),
}
