//! What an attention group's layers are: the constructor arguments that this device executes. It must never know a step.

use timetable_types::{BuilderConfig, Family};

use crate::cache::{CacheDtype, KvCache};
use crate::error::{CudaError, Result};
use crate::kernels::{AttentionKind, CacheElement, Element, HEAD_SIZES};
use crate::upload::StepLimits;

/// Bytes that a group's partial results take at most, if the caller names no other number.
pub const DEFAULT_MAX_PARTIAL_BYTES: usize = 512 << 20;

/// What the layers of one attention group share.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupConfig {
    /// FLASH_ATTN or FLASHINFER.
    pub family: Family,
    /// Hq; a multiple of `num_kv_heads`.
    pub num_heads: u32,
    /// Hkv.
    pub num_kv_heads: u32,
    /// D: elements of one query, key or value.
    pub head_size: u32,
    /// Tokens of a kernel block; a multiple of 16.
    pub block_size: u32,
    /// Element type of queries and outputs. f32: plain attention, which executes no schedule.
    pub element: Element,
    /// Element type of the cache.
    pub cache: CacheDtype,
    /// Multiplies q·k.
    pub scale: f32,
    /// Keys that a token sees, itself included; none: all.
    pub sliding_window: Option<u32>,
    /// c: scores become c · tanh(score / c). None or 0: no cap.
    pub logits_soft_cap: Option<f32>,
    /// The most splits of one request that any schedule may have; the verifier's bound.
    pub max_num_splits: u32,
    /// What bounds a step.
    pub limits: StepLimits,
    /// Multiprocessors of the device: how many work items a list of the largest step has room for.
    pub num_multiprocessors: u32,
    /// Bytes of scratch for partial results, at most.
    pub max_partial_bytes: usize,
    /// A query's result must depend on its own keys alone: not on the batch, nor on which of the request's queries are in the
    /// same step. One kernel, [`AttentionKind::Prefill`], then takes every list: in it a query's sums do not depend on its
    /// tile. That requests are not split is the builder's matter (`BuilderConfig::batch_invariant`): this device executes what
    /// it is given.
    pub batch_invariant: bool,
}

impl GroupConfig {
    /// From what the group's builder is constructed with, which the layers share by definition.
    ///
    /// # Errors
    /// As [`GroupConfig::check`].
    pub fn new(
        family: Family,
        config: &BuilderConfig,
        element: Element,
        cache: CacheDtype,
        limits: StepLimits,
        num_multiprocessors: u32,
    ) -> Result<Self> {
        let (attention, spec) = (&config.attention, &config.kv_cache_spec);
        Self {
            family,
            num_heads: attention.num_heads,
            num_kv_heads: spec.num_kv_heads,
            head_size: spec.head_size,
            block_size: spec.block_size,
            element,
            cache,
            scale: attention.scale as f32,
            sliding_window: spec.sliding_window,
            logits_soft_cap: attention.logits_soft_cap.map(|cap| cap as f32),
            max_num_splits: config.max_num_splits.max(1),
            limits,
            num_multiprocessors,
            max_partial_bytes: DEFAULT_MAX_PARTIAL_BYTES,
            batch_invariant: config.batch_invariant,
        }
        .check()
    }

    /// The same, if this device executes it.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] with the argument, its value and what is accepted.
    pub fn check(mut self) -> Result<Self> {
        let refuse = |what, value: String, remedy| {
            Err(CudaError::Invalid {
                what,
                value,
                remedy,
            })
        };
        if !matches!(self.family, Family::FlashAttn | Family::Flashinfer) {
            return refuse(
                "the attention backend's family",
                self.family.interface().to_owned(),
                "choose FLASH_ATTN or FLASHINFER (--attention-backend)",
            );
        }
        if self.num_kv_heads == 0
            || !self.num_heads.is_multiple_of(self.num_kv_heads)
            || self.num_heads == 0
        {
            return refuse(
                "num_heads",
                format!("{} with {} KV heads", self.num_heads, self.num_kv_heads),
                "it must be a multiple of num_kv_heads",
            );
        }
        let tiled = self.element != Element::F32;
        if tiled && !HEAD_SIZES.contains(&(self.head_size as usize)) {
            return refuse(
                "head_size",
                self.head_size.to_string(),
                "kernels are built for heads of 64, 96, 128 and 256: run this model in f32, or on the CPU device",
            );
        }
        if self.head_size == 0 || self.head_size > 256 || !self.head_size.is_multiple_of(16) {
            return refuse(
                "head_size",
                self.head_size.to_string(),
                "a multiple of 16, at most 256",
            );
        }
        if self.block_size == 0 || !self.block_size.is_multiple_of(16) {
            return refuse(
                "block_size",
                self.block_size.to_string(),
                "a multiple of 16 tokens",
            );
        }
        if self.cache.beside(self.element).is_none() {
            return refuse(
                "kv_cache_dtype",
                format!("{:?} beside {:?}", self.cache, self.element),
                "the model's own dtype, or fp8 beside f16 and bf16",
            );
        }
        if !self.scale.is_finite() {
            return refuse("scale", self.scale.to_string(), "it must be finite");
        }
        if self.sliding_window == Some(0)
            || self
                .sliding_window
                .is_some_and(|window| window > i32::MAX as u32)
        {
            return refuse(
                "sliding_window",
                format!("{:?}", self.sliding_window),
                "leave it out for no window",
            );
        }
        if self.logits_soft_cap == Some(0.0) {
            self.logits_soft_cap = None;
        }
        if let Some(cap) = self.logits_soft_cap
            && !(cap.is_finite() && cap > 0.0)
        {
            return refuse(
                "logits_soft_cap",
                cap.to_string(),
                "it must be finite and positive",
            );
        }
        let entries = self
            .limits
            .max_num_reqs
            .saturating_mul(self.limits.table_width);
        if self.limits.max_num_tokens > i32::MAX as usize / 256 || entries > i32::MAX as usize {
            return refuse(
                "max_num_batched_tokens, max_num_seqs",
                format!(
                    "{} tokens, {entries} entries of the block table",
                    self.limits.max_num_tokens
                ),
                "kernels count in 31 bits",
            );
        }
        self.max_num_splits = self.max_num_splits.clamp(1, 1 << 16);
        Ok(self)
    }

    /// G: query heads that share a KV head.
    pub fn heads_per_kv_head(&self) -> u32 {
        self.num_heads / self.num_kv_heads
    }

    /// Packed rows of one tile of a kernel.
    pub fn tile_rows(&self, kind: AttentionKind) -> u32 {
        match kind {
            AttentionKind::Decode => 16,
            AttentionKind::Prefill64 | AttentionKind::Prefill if self.head_size == 256 => 64,
            // Over fp8 there is no kernel of 64 rows; the one of 128 takes its lists.
            AttentionKind::Prefill64 if self.cache == CacheDtype::Fp8E4m3 => 128,
            AttentionKind::Prefill64 => 64,
            AttentionKind::Prefill => 128,
        }
    }

    /// The kernel that runs a list which `kind` suits.
    pub(crate) fn kind(&self, kind: AttentionKind) -> AttentionKind {
        if self.batch_invariant {
            AttentionKind::Prefill
        } else {
            kind
        }
    }

    /// FLASH_ATTN's kernel for rows of more than 16 packed rows, the most of which are `max_packed`.
    pub(crate) fn prefill_kind(&self, max_packed: u64) -> AttentionKind {
        if max_packed <= 64 && self.cache != CacheDtype::Fp8E4m3 {
            self.kind(AttentionKind::Prefill64)
        } else {
            AttentionKind::Prefill
        }
    }

    /// Does plain attention serve, which has no schedule?
    pub fn is_plain(&self) -> bool {
        self.element == Element::F32
    }

    pub(crate) fn cache_element(&self) -> CacheElement {
        // `check` refused pairs without a kernel.
        self.cache
            .beside(self.element)
            .unwrap_or(CacheElement::Same)
    }

    /// Is `cache` one of this group's layers'?
    ///
    /// # Errors
    /// [`CudaError::Invalid`] with what differs.
    pub fn check_cache(&self, cache: &KvCache) -> Result<()> {
        let pairs = [
            (
                "the cache's num_kv_heads",
                cache.num_kv_heads,
                self.num_kv_heads as usize,
            ),
            (
                "the cache's head_size",
                cache.head_size,
                self.head_size as usize,
            ),
            (
                "the cache's block_size",
                cache.block_size,
                self.block_size as usize,
            ),
            (
                "bytes of the cache's dtype",
                cache.dtype.size(),
                self.cache.size(),
            ),
        ];
        for (what, found, expected) in pairs {
            if found != expected {
                return Err(CudaError::Invalid {
                    what,
                    value: format!("{found}, the attention group's is {expected}"),
                    remedy: "give each layer the cache of its own group",
                });
            }
        }
        Ok(())
    }
}
