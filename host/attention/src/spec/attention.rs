//! Specs of layers that keep keys and values (or one latent vector) per token.
//!
//! Formulas: vLLM `vllm/v1/kv_cache_interface.py` @0.32/0.33, as [`super`] says.

use timetable_types::Dtype;

use super::{KvQuantMode, SpecError, dtype_size, non_zero};

/// How many tokens one stored state stands for: `tokens / states`, usually 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokensPerState {
    /// Tokens …
    pub tokens: u32,
    /// … of this many states.
    pub states: u32,
}

impl TokensPerState {
    /// One state per token.
    pub const ONE: TokensPerState = TokensPerState {
        tokens: 1,
        states: 1,
    };

    /// States of a block of `block_size` tokens: `block_size // tokens_per_state`.
    pub const fn states_in(self, block_size: u32) -> u32 {
        if self.tokens == 0 {
            return 1;
        }
        (block_size as u64 * self.states as u64 / self.tokens as u64) as u32
    }
}

/// What every attention spec has. Sizes in tokens or elements unless named otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AttentionSpec {
    /// Tokens of one manager block.
    pub block_size: u32,
    /// KV heads on this rank.
    pub num_kv_heads: u32,
    /// Elements of a key.
    pub head_size: u32,
    /// Elements of a value; 0 for MLA, whose latent vector is both.
    pub head_size_v: u32,
    /// Element type of the cache.
    pub dtype: Dtype,
    /// How the cache is quantised.
    pub kv_quant_mode: KvQuantMode,
    /// Bytes of a page, if it is padded beyond its content.
    pub page_size_padded: Option<u64>,
    /// Head slots of a block where a backend packs them differently (NVFP4: keys' heads, then values').
    pub num_head_slots: Option<u32>,
    /// Bytes of one state of one head slot where a backend packs content differently (scales beside values).
    pub state_content_bytes: Option<u64>,
    /// Tokens per state.
    pub tokens_per_state: TokensPerState,
    /// Is this cache sharded over the decode-context-parallel ranks?
    pub dcp_sharded: bool,
}

impl AttentionSpec {
    /// A plain spec: keys and values of `head_size` elements, no padding, one state per token, sharded under DCP.
    pub fn new(block_size: u32, num_kv_heads: u32, head_size: u32, dtype: Dtype) -> Self {
        AttentionSpec {
            block_size,
            num_kv_heads,
            head_size,
            head_size_v: head_size,
            dtype,
            kv_quant_mode: KvQuantMode::None,
            page_size_padded: None,
            num_head_slots: None,
            state_content_bytes: None,
            tokens_per_state: TokensPerState::ONE,
            dcp_sharded: true,
        }
    }

    /// H of the logical shape: `num_head_slots or num_kv_heads`.
    pub fn num_heads(&self) -> u32 {
        self.num_head_slots.unwrap_or(self.num_kv_heads)
    }

    /// N of the logical shape: `block_size // tokens_per_state`.
    pub fn num_states(&self) -> u32 {
        self.tokens_per_state.states_in(self.block_size)
    }

    /// C of the logical shape, in bytes: `state_content_bytes or (head_size + head_size_v) · dtype_size`.
    pub fn state_content_size_bytes(&self) -> u64 {
        self.state_content_bytes.unwrap_or_else(|| {
            (u64::from(self.head_size) + u64::from(self.head_size_v)) * dtype_size(self.dtype)
        })
    }

    /// Bytes of a page without padding: `H · N · C`.
    pub fn real_page_size_bytes(&self) -> u64 {
        u64::from(self.num_heads())
            .saturating_mul(u64::from(self.num_states()))
            .saturating_mul(self.state_content_size_bytes())
    }

    /// Bytes of a page: `page_size_padded or H · N · C`.
    pub fn page_size_bytes(&self) -> u64 {
        self.page_size_padded
            .unwrap_or_else(|| self.real_page_size_bytes())
    }

    /// `ceil(max_len / (block_size · dcp_world_size))`, the world counted only where the cache is sharded.
    pub fn max_num_blocks_per_req(&self, max_model_len: u32, dcp_world_size: u32) -> u32 {
        let world = if self.dcp_sharded {
            u64::from(dcp_world_size.max(1))
        } else {
            1
        };
        let tokens = u64::from(self.block_size.max(1)) * world;
        u64::from(max_model_len).div_ceil(tokens) as u32
    }

    pub(super) fn validate(&self) -> Result<(), SpecError> {
        non_zero("block_size", self.block_size)?;
        non_zero("num_kv_heads", self.num_kv_heads)?;
        non_zero("head_size", self.head_size)?;
        non_zero("tokens_per_state", self.tokens_per_state.tokens)?;
        non_zero("tokens_per_state", self.tokens_per_state.states)?;
        let TokensPerState { tokens, states } = self.tokens_per_state;
        if !(u64::from(self.block_size) * u64::from(states)).is_multiple_of(u64::from(tokens)) {
            return Err(SpecError::PartialState {
                block_size: self.block_size,
                tokens,
                states,
            });
        }
        let real = u128::from(self.num_heads())
            * u128::from(self.num_states())
            * u128::from(self.state_content_size_bytes());
        if real > u128::from(u64::MAX) {
            return Err(SpecError::TooLarge {
                field: "page_size_bytes",
                value: real,
                bits: 64,
            });
        }
        match self.page_size_padded {
            Some(padded) if u128::from(padded) < real => Err(SpecError::PaddedTooSmall {
                padded,
                real: real as u64,
            }),
            _ => Ok(()),
        }
    }
}

/// Every key is kept, although layers with a window may read only some.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FullAttentionSpec {
    /// Sizes.
    pub attention: AttentionSpec,
    /// The window of layers whose cache is kept whole although they have one.
    pub sliding_window: Option<u32>,
    /// As `sliding_window`, for chunked local attention. At most one of the two.
    pub attention_chunk_size: Option<u32>,
    /// Do queries see later keys too?
    pub non_causal: bool,
}

impl FullAttentionSpec {
    /// Plain full attention; see [`AttentionSpec::new`].
    pub fn new(block_size: u32, num_kv_heads: u32, head_size: u32, dtype: Dtype) -> Self {
        FullAttentionSpec {
            attention: AttentionSpec::new(block_size, num_kv_heads, head_size, dtype),
            sliding_window: None,
            attention_chunk_size: None,
            non_causal: false,
        }
    }

    /// Bytes of a page: `page_size_padded or num_kv_heads · block_size · (head_size + head_size_v) · dtype_size`.
    pub fn page_size_bytes(&self) -> u64 {
        self.attention.page_size_bytes()
    }

    /// One spec for several layers: windows and chunks are merged, everything else must be equal.
    ///
    /// # Errors
    /// [`SpecError::NotTheSame`], [`SpecError::WindowsDiffer`], [`SpecError::WindowAndChunk`], [`SpecError::Empty`].
    pub fn merge(specs: &[&FullAttentionSpec]) -> Result<FullAttentionSpec, SpecError> {
        let first = specs.first().ok_or(SpecError::Empty)?;
        if specs
            .iter()
            .any(|s| s.attention != first.attention || s.non_causal != first.non_causal)
        {
            return Err(SpecError::NotTheSame);
        }
        let sliding_window = one_value(specs.iter().filter_map(|s| s.sliding_window))?;
        let attention_chunk_size = one_value(specs.iter().filter_map(|s| s.attention_chunk_size))?;
        if sliding_window.is_some() && attention_chunk_size.is_some() {
            return Err(SpecError::WindowAndChunk);
        }
        Ok(FullAttentionSpec {
            attention: first.attention.clone(),
            sliding_window,
            attention_chunk_size,
            non_causal: first.non_causal,
        })
    }
}

/// The only value of `values`, none of none.
fn one_value(mut values: impl Iterator<Item = u32>) -> Result<Option<u32>, SpecError> {
    let Some(first) = values.next() else {
        return Ok(None);
    };
    if values.all(|v| v == first) {
        Ok(Some(first))
    } else {
        Err(SpecError::WindowsDiffer)
    }
}

/// Only the last `sliding_window` keys are kept.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SlidingWindowSpec {
    /// Sizes.
    pub attention: AttentionSpec,
    /// Keys a query sees, its own included.
    pub sliding_window: u32,
    /// Tokens kept beyond the window.
    pub extra_retained_tokens: u32,
}

impl SlidingWindowSpec {
    /// A window of `sliding_window` tokens; see [`AttentionSpec::new`].
    pub fn new(
        block_size: u32,
        num_kv_heads: u32,
        head_size: u32,
        dtype: Dtype,
        sliding_window: u32,
    ) -> Self {
        SlidingWindowSpec {
            attention: AttentionSpec::new(block_size, num_kv_heads, head_size, dtype),
            sliding_window,
            extra_retained_tokens: 0,
        }
    }

    /// Bytes of a page; the window does not change it.
    pub fn page_size_bytes(&self) -> u64 {
        self.attention.page_size_bytes()
    }

    /// `ceil(min(window − 1 + extra + in_flight, max_len) / block_size) + 1`: the window may straddle one block more.
    pub fn max_admission_blocks(&self, max_model_len: u32, in_flight: u32) -> u32 {
        window_blocks(
            self.sliding_window,
            self.extra_retained_tokens,
            in_flight,
            max_model_len,
            self.attention.block_size,
        )
    }
}

fn window_blocks(window: u32, extra: u32, in_flight: u32, max_len: u32, block_size: u32) -> u32 {
    let tokens = u64::from(window).saturating_sub(1) + u64::from(extra) + u64::from(in_flight);
    let tokens = tokens.min(u64::from(max_len));
    (tokens.div_ceil(u64::from(block_size.max(1))) + 1) as u32
}

/// Only the keys of the current chunk are kept.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ChunkedLocalAttentionSpec {
    /// Sizes.
    pub attention: AttentionSpec,
    /// Tokens of a chunk.
    pub attention_chunk_size: u32,
}

impl ChunkedLocalAttentionSpec {
    /// Chunks of `attention_chunk_size` tokens; see [`AttentionSpec::new`].
    pub fn new(
        block_size: u32,
        num_kv_heads: u32,
        head_size: u32,
        dtype: Dtype,
        attention_chunk_size: u32,
    ) -> Self {
        ChunkedLocalAttentionSpec {
            attention: AttentionSpec::new(block_size, num_kv_heads, head_size, dtype),
            attention_chunk_size,
        }
    }

    /// `ceil(min(chunk + in_flight, max_len) / block_size)`.
    pub fn max_admission_blocks(&self, max_model_len: u32, in_flight: u32) -> u32 {
        let tokens = (u64::from(self.attention_chunk_size) + u64::from(in_flight))
            .min(u64::from(max_model_len));
        tokens.div_ceil(u64::from(self.attention.block_size.max(1))) as u32
    }
}

/// Bytes per token of DeepSeek's packed fp8 latent cache (`fp8_ds_mla`).
const FP8_DS_MLA_BYTES: u64 = 656;
/// Bytes per token of the packed NVFP4 latent cache (`nvfp4_ds_mla`).
const NVFP4_DS_MLA_BYTES: u64 = 352;

/// Bytes of one latent vector: opaque for the `*_ds_mla` formats, else as any spec.
fn latent_bytes(attention: &AttentionSpec, cache_dtype_str: Option<&str>) -> u64 {
    match cache_dtype_str {
        Some("fp8_ds_mla") => FP8_DS_MLA_BYTES,
        Some("nvfp4_ds_mla") => NVFP4_DS_MLA_BYTES,
        _ => attention.state_content_size_bytes(),
    }
}

fn latent_page(attention: &AttentionSpec, dtype: Option<&str>, alignment: Option<u32>) -> u64 {
    if let Some(padded) = attention.page_size_padded {
        return padded;
    }
    let real = u64::from(attention.num_heads())
        .saturating_mul(u64::from(attention.num_states()))
        .saturating_mul(latent_bytes(attention, dtype));
    match alignment {
        Some(alignment) if alignment > 1 => real
            .div_ceil(u64::from(alignment))
            .saturating_mul(u64::from(alignment)),
        _ => real,
    }
}

/// Multi-head latent attention: one vector of `kv_lora_rank + qk_rope_head_dim` elements per token, shared by all heads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MlaAttentionSpec {
    /// Sizes: `num_kv_heads` 1, `head_size_v` 0.
    pub attention: AttentionSpec,
    /// The cache dtype as configured; `fp8_ds_mla` and `nvfp4_ds_mla` are packed formats.
    pub cache_dtype_str: Option<String>,
    /// Pages are padded up to a multiple of this many bytes.
    pub alignment: Option<u32>,
}

impl MlaAttentionSpec {
    /// A latent vector of `head_size` elements (576 for DeepSeek) per token.
    pub fn new(block_size: u32, head_size: u32, dtype: Dtype) -> Self {
        MlaAttentionSpec {
            attention: AttentionSpec {
                head_size_v: 0,
                ..AttentionSpec::new(block_size, 1, head_size, dtype)
            },
            cache_dtype_str: None,
            alignment: None,
        }
    }

    /// Bytes of one latent vector: 656 for `fp8_ds_mla`, 352 for `nvfp4_ds_mla`, else `head_size · dtype_size`.
    pub fn state_content_size_bytes(&self) -> u64 {
        latent_bytes(&self.attention, self.cache_dtype_str.as_deref())
    }

    /// Bytes of a page: padded if asked for, else content rounded up to `alignment`.
    pub fn page_size_bytes(&self) -> u64 {
        latent_page(
            &self.attention,
            self.cache_dtype_str.as_deref(),
            self.alignment,
        )
    }
}

/// As [`MlaAttentionSpec`], keeping only the last `sliding_window` vectors.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SlidingWindowMlaSpec {
    /// Sizes: `num_kv_heads` 1, `head_size_v` 0.
    pub attention: AttentionSpec,
    /// Keys a query sees, its own included.
    pub sliding_window: u32,
    /// Tokens kept beyond the window.
    pub extra_retained_tokens: u32,
    /// The cache dtype as configured.
    pub cache_dtype_str: Option<String>,
    /// Pages are padded up to a multiple of this many bytes.
    pub alignment: Option<u32>,
}

impl SlidingWindowMlaSpec {
    /// A latent vector of `head_size` elements per token, the last `sliding_window` of them.
    pub fn new(block_size: u32, head_size: u32, dtype: Dtype, sliding_window: u32) -> Self {
        SlidingWindowMlaSpec {
            attention: MlaAttentionSpec::new(block_size, head_size, dtype).attention,
            sliding_window,
            extra_retained_tokens: 0,
            cache_dtype_str: None,
            alignment: None,
        }
    }

    /// As [`MlaAttentionSpec::state_content_size_bytes`].
    pub fn state_content_size_bytes(&self) -> u64 {
        latent_bytes(&self.attention, self.cache_dtype_str.as_deref())
    }

    /// As [`MlaAttentionSpec::page_size_bytes`].
    pub fn page_size_bytes(&self) -> u64 {
        latent_page(
            &self.attention,
            self.cache_dtype_str.as_deref(),
            self.alignment,
        )
    }

    /// As [`SlidingWindowSpec::max_admission_blocks`].
    pub fn max_admission_blocks(&self, max_model_len: u32, in_flight: u32) -> u32 {
        window_blocks(
            self.sliding_window,
            self.extra_retained_tokens,
            in_flight,
            max_model_len,
            self.attention.block_size,
        )
    }
}

/// Keys of an encoder's output, written once per request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CrossAttentionSpec {
    /// Sizes.
    pub attention: AttentionSpec,
}

impl CrossAttentionSpec {
    /// Bytes that a request of `max_num_encoder_input_tokens` needs: `ceil(tokens / block_size) · page_size_bytes`.
    pub fn max_memory_usage_bytes(&self, max_num_encoder_input_tokens: u32) -> u64 {
        u64::from(max_num_encoder_input_tokens.div_ceil(self.attention.block_size.max(1)))
            .saturating_mul(self.attention.page_size_bytes())
    }
}

/// Attention without a cache. It uses no memory and never stands in a KV cache group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EncoderOnlyAttentionSpec {
    /// Sizes.
    pub attention: AttentionSpec,
}

impl EncoderOnlyAttentionSpec {
    /// Always 0: nothing is cached.
    pub const fn max_memory_usage_bytes(&self) -> u64 {
        0
    }
}
