//! The per-layer impl of latent attention: what it is constructed with, and what the engine calls. It must never know how a
//! step was scheduled.
//!
//! A decode does not make keys and values of its cached latents: as q·(W_UK c) = (W_UKᵀ q)·c, the query is projected into the
//! latents' space, attends to them as they lie in the cache (one KV head, key and value in one), and the result is projected
//! to values by W_UV. A prefill has many queries for its keys, so there projecting the keys is less work.

use std::cell::RefCell;

use rayon::prelude::*;

use super::{
    LatentCache, LatentDtype, LatentInputs, LatentSizes, MlaStepMetadata,
    cache::{Storage, check_sizes},
    prefill,
};
use crate::cpu::{
    AttentionConfig, CacheDtype, ImplError,
    execute::{SEQUENTIAL_COST, execute_over},
    kernel::{Content, Projection, combine, project},
};

/// What one latent attention layer is constructed with; the field's constructor arguments that this device executes, and those
/// that no latent attention has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlaConfig {
    /// Heads and what they are made of.
    pub sizes: LatentSizes,
    /// Dtype of this layer's cache.
    pub kv_cache_dtype: LatentDtype,
    /// Tokens of one block of this layer's cache.
    pub block_size: usize,
    /// A query's result must not depend, in a bit, on which of the request's queries are in the same step.
    pub batch_invariant: bool,
    /// The field's class name, for texts: `FlashMLAImpl`, `FlashAttnMLAImpl`, `TritonMLAImpl`.
    pub impl_name: &'static str,
    /// Refused.
    pub alibi_slopes: bool,
    /// Refused.
    pub sliding_window: Option<u32>,
    /// Refused, but for 0.
    pub logits_soft_cap: Option<f32>,
}

impl MlaConfig {
    /// A layer of FLASHMLA's with an f32 cache.
    pub fn new(sizes: LatentSizes, block_size: usize) -> Self {
        MlaConfig {
            sizes,
            kv_cache_dtype: LatentDtype::F32,
            block_size,
            batch_invariant: false,
            impl_name: "FlashMLAImpl",
            alibi_slopes: false,
            sliding_window: None,
            logits_soft_cap: None,
        }
    }
}

/// One layer's latent attention on this device: the field's three methods.
///
/// `forward_includes_kv_cache_update` is false: the caller writes the cache first.
pub trait MlaAttentionImpl: Send + Sync {
    /// Writes this step's latents (`f32 [T', kv_lora_rank]`) and rotated keys (`f32 [T', qk_rope_head_dim]`) into the cache, one
    /// behind the other. The slots (`s64 [n]`) are the forward context's, never a builder's. Loops over slots: slot −1 is
    /// skipped, rows from n on write nothing. A cache without blocks takes nothing.
    ///
    /// # Panics
    /// If a slot lies outside the cache or has no row: slots are the host's own.
    fn do_kv_cache_update(
        &self,
        kv_c_normed: &[f32],
        k_pe: &[f32],
        kv_cache: &mut LatentCache,
        slot_mapping: &[i64],
    );

    /// Attention of absorbed queries (f32 [n, num_heads, kv_lora_rank + qk_rope_head_dim], n = num_decode_tokens) to latents as
    /// they lie in the cache, by the metadata's schedule, into `output` (f32 [n, num_heads, kv_lora_rank]) and, if wanted, the
    /// natural log-sum-exps (f32 [n, num_heads]). A row without keys, or that the metadata does not cover: zeros, −∞.
    ///
    /// Under decode context parallelism: of the keys that this rank holds.
    ///
    /// # Errors
    /// If the metadata is unprepared, or a tensor, the cache or the metadata has another shape than the layer.
    fn forward_mqa(
        &self,
        q: &[f32],
        kv_cache: &LatentCache,
        metadata: &MlaStepMetadata,
        output: &mut [f32],
        lse: Option<&mut [f32]>,
    ) -> Result<(), ImplError>;

    /// Attention of the tokens behind the decodes (`inputs`: of these alone): to each other causally, and to their context,
    /// gathered from the cache chunk by chunk as the metadata says and projected by kv_b_proj; merged by log-sum-exps. `output`:
    /// f32 [n, num_heads, v_head_dim]; `lse`: f32 [n, num_heads].
    ///
    /// Under decode context parallelism: of the context that this rank holds and, on rank 0, of the new tokens, so that the
    /// ranks' results merged are the whole.
    ///
    /// # Errors
    /// As `forward_mqa`.
    fn forward_mha(
        &self,
        inputs: &LatentInputs<'_>,
        kv_cache: &LatentCache,
        metadata: &MlaStepMetadata,
        output: &mut [f32],
        lse: Option<&mut [f32]>,
    ) -> Result<(), ImplError>;
}

/// The CPU device's impl, for every backend of the family.
#[derive(Clone, Debug)]
pub struct MlaImpl {
    config: MlaConfig,
}

/// Absorbed queries and attended latents of one forward call: kept by the calling thread from layer to layer.
#[derive(Default)]
struct Scratch {
    query: Vec<f32>,
    latents: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Tokens whose products with the same weights are computed together.
const TOGETHER: usize = 4;

impl MlaImpl {
    /// The impl of a layer.
    ///
    /// # Errors
    /// If a size is 0, the scale is not finite, the cache dtype has no such sizes, or the layer has what latent attention has
    /// not: slopes, a window, a soft cap.
    pub fn new(config: MlaConfig) -> Result<Self, ImplError> {
        let sizes = &config.sizes;
        let soft_cap = config.logits_soft_cap.unwrap_or(0.0) != 0.0;
        if config.alibi_slopes || config.sliding_window.is_some() || soft_cap {
            return Err(ImplError::LatentFeatures(config.impl_name));
        }
        for (name, value) in [
            ("num_heads", sizes.num_heads),
            ("qk_nope_head_dim", sizes.qk_nope_head_dim),
            ("v_head_dim", sizes.v_head_dim),
        ] {
            if value == 0 {
                return Err(ImplError::Config {
                    name,
                    value: "0".to_owned(),
                    remedy: "it must be at least 1",
                });
            }
        }
        check_sizes(
            config.block_size,
            sizes.kv_lora_rank,
            sizes.qk_rope_head_dim,
            config.kv_cache_dtype,
        )?;
        if !sizes.scale.is_finite() {
            return Err(ImplError::Config {
                name: "scale",
                value: sizes.scale.to_string(),
                remedy: "it must be finite",
            });
        }
        Ok(MlaImpl { config })
    }

    /// What the layer was made with.
    pub fn config(&self) -> &MlaConfig {
        &self.config
    }

    /// The whole layer, after the cache was written: queries of rows that decode are absorbed, attend by `forward_mqa` and are
    /// projected to values; the rest goes by `forward_mha`. `inputs`: T' ≥ num_actual_tokens tokens. Rows [0,
    /// num_actual_tokens) of `output` (f32 [T', num_heads · v_head_dim]) are written; later rows stay as they are. A token that
    /// no request has becomes zeros. No metadata (a profile run): all of `output` becomes zeros.
    ///
    /// # Errors
    /// As `forward_mqa`; under decode context parallelism, where the ranks' results have to be merged first.
    pub fn forward(
        &self,
        inputs: &LatentInputs<'_>,
        kv_cache: &LatentCache,
        metadata: Option<&MlaStepMetadata>,
        output: &mut [f32],
    ) -> Result<(), ImplError> {
        let Some(metadata) = metadata else {
            output.fill(0.0);
            return Ok(());
        };
        let sizes = &self.config.sizes;
        self.check(kv_cache, metadata)?;
        if let Some(rank) = metadata.rank {
            return Err(ImplError::Config {
                name: "dcp_world_size",
                value: rank.size.to_string(),
                remedy: "call forward_mqa and forward_mha on each rank and merge their results by log-sum-exps",
            });
        }
        let tokens = metadata.num_actual_tokens;
        self.check_inputs(inputs, tokens)?;
        let width = sizes.num_heads * sizes.v_head_dim;
        at_least("elements of output", output.len(), tokens, width)?;
        let (decodes, prefills) =
            output[..tokens * width].split_at_mut(metadata.num_decode_tokens * width);

        let mut scratch = SCRATCH.take();
        let count = metadata.num_decode_tokens * sizes.num_heads;
        scratch.query.resize(count * sizes.head_size(), 0.0);
        scratch.latents.resize(count * sizes.kv_lora_rank, 0.0);
        self.absorb(inputs, &mut scratch.query);
        let attended = self.forward_mqa(
            &scratch.query,
            kv_cache,
            metadata,
            &mut scratch.latents,
            None,
        );
        if attended.is_ok() {
            self.project_values(&scratch.latents, inputs.kv_b_proj, decodes);
        }
        SCRATCH.set(scratch);
        attended?;

        let first = metadata.num_decode_tokens;
        let rest = LatentInputs {
            q: &inputs.q[first * sizes.num_heads * sizes.qk_head_dim()..],
            kv_c_normed: &inputs.kv_c_normed[first * sizes.kv_lora_rank..],
            k_pe: &inputs.k_pe[first * sizes.qk_rope_head_dim..],
            kv_b_proj: inputs.kv_b_proj,
        };
        self.forward_mha(&rest, kv_cache, metadata, prefills, None)
    }

    /// Queries in the latents' space: of each of the first tokens and heads that `absorbed` (f32 [n, num_heads, kv_lora_rank +
    /// qk_rope_head_dim]) has, W_UKᵀ · its part without a position, then the rotated part.
    ///
    /// # Panics
    /// If `inputs` has fewer tokens than `absorbed`, or weights of other sizes.
    pub fn absorb(&self, inputs: &LatentInputs<'_>, absorbed: &mut [f32]) {
        let sizes = self.config.sizes;
        let (heads, query, to) = (sizes.num_heads, sizes.qk_head_dim(), sizes.head_size());
        let (nope, latent) = (sizes.qk_nope_head_dim, sizes.kv_lora_rank);
        let per_head = (nope + sizes.v_head_dim) * latent;
        by_tokens(
            absorbed,
            heads * to,
            heads * nope * latent,
            |first, absorbed| {
                let tokens = absorbed.len() / (heads * to);
                for head in 0..heads {
                    let projection = Projection {
                        x: &inputs.q[(first * heads + head) * query..],
                        x_stride: heads * query,
                        inputs: nope,
                        weights: &inputs.kv_b_proj[head * per_head..][..nope * latent],
                        outputs: latent,
                    };
                    combine(&projection, tokens, &mut absorbed[head * to..], heads * to);
                }
                for (row, absorbed) in absorbed.chunks_mut(to).enumerate() {
                    let rotated = &inputs.q[(first * heads + row) * query + nope..][..query - nope];
                    absorbed[latent..].copy_from_slice(rotated);
                }
            },
        );
    }

    /// Values of attended latents: W_UV · each token's and head's (f32 [n, num_heads, kv_lora_rank]), into `output` (f32 [n,
    /// num_heads, v_head_dim]).
    ///
    /// # Panics
    /// If `latents` has fewer rows than `output`, or the weights have other sizes.
    pub fn project_values(&self, latents: &[f32], kv_b_proj: &[f32], output: &mut [f32]) {
        let sizes = self.config.sizes;
        let (heads, size, latent) = (sizes.num_heads, sizes.v_head_dim, sizes.kv_lora_rank);
        let nope = sizes.qk_nope_head_dim;
        by_tokens(
            output,
            heads * size,
            heads * size * latent,
            |first, output| {
                let tokens = output.len() / (heads * size);
                for head in 0..heads {
                    let at = (head * (nope + size) + nope) * latent;
                    let projection = Projection {
                        x: &latents[(first * heads + head) * latent..],
                        x_stride: heads * latent,
                        inputs: latent,
                        weights: &kv_b_proj[at..][..size * latent],
                        outputs: size,
                    };
                    project(
                        &projection,
                        tokens,
                        &mut output[head * size..],
                        heads * size,
                    );
                }
            },
        );
    }

    /// Is the metadata prepared, and for a layer and a cache like these?
    fn check(&self, kv_cache: &LatentCache, metadata: &MlaStepMetadata) -> Result<(), ImplError> {
        let (config, sizes) = (&self.config, &self.config.sizes);
        if !metadata.is_prepared {
            return Err(ImplError::WrongMetadata {
                impl_name: config.impl_name,
                found: "no family (unprepared)",
            });
        }
        for (what, found, expected) in [
            (
                "the cache's kv_lora_rank",
                kv_cache.kv_lora_rank(),
                sizes.kv_lora_rank,
            ),
            (
                "the cache's qk_rope_head_dim",
                kv_cache.qk_rope_head_dim(),
                sizes.qk_rope_head_dim,
            ),
            (
                "the cache's block_size",
                kv_cache.block_size(),
                config.block_size,
            ),
            (
                "the metadata's block_size",
                metadata.block_size,
                config.block_size,
            ),
            (
                "bytes of a token of the cache",
                kv_cache
                    .dtype()
                    .entry_size(sizes.kv_lora_rank, sizes.qk_rope_head_dim),
                config
                    .kv_cache_dtype
                    .entry_size(sizes.kv_lora_rank, sizes.qk_rope_head_dim),
            ),
            (
                "the metadata's head_dim",
                metadata.head_dim,
                sizes.head_size(),
            ),
        ] {
            if found != expected {
                return Err(ImplError::Shape {
                    what,
                    found,
                    expected,
                });
            }
        }
        let (found, expected) = (kv_cache.num_blocks(), metadata.num_blocks_used);
        at_least("blocks of the cache", found, expected, 1)
    }

    fn check_inputs(&self, inputs: &LatentInputs<'_>, tokens: usize) -> Result<(), ImplError> {
        let sizes = &self.config.sizes;
        let per_query = sizes.num_heads * sizes.qk_head_dim();
        at_least("elements of q", inputs.q.len(), tokens, per_query)?;
        let (kv_c, k_pe) = (inputs.kv_c_normed.len(), inputs.k_pe.len());
        at_least("elements of kv_c_normed", kv_c, tokens, sizes.kv_lora_rank)?;
        at_least("elements of k_pe", k_pe, tokens, sizes.qk_rope_head_dim)?;
        let per_head = sizes.qk_nope_head_dim + sizes.v_head_dim;
        let (weights, expected) = (
            inputs.kv_b_proj.len(),
            sizes.num_heads * per_head * sizes.kv_lora_rank,
        );
        if weights != expected {
            return Err(ImplError::Shape {
                what: "elements of kv_b_proj",
                found: weights,
                expected,
            });
        }
        Ok(())
    }
}

impl MlaAttentionImpl for MlaImpl {
    fn do_kv_cache_update(
        &self,
        kv_c_normed: &[f32],
        k_pe: &[f32],
        kv_cache: &mut LatentCache,
        slot_mapping: &[i64],
    ) {
        if kv_cache.num_blocks() > 0 {
            kv_cache.concat_and_cache(kv_c_normed, k_pe, slot_mapping);
        }
    }

    fn forward_mqa(
        &self,
        q: &[f32],
        kv_cache: &LatentCache,
        metadata: &MlaStepMetadata,
        output: &mut [f32],
        lse: Option<&mut [f32]>,
    ) -> Result<(), ImplError> {
        self.check(kv_cache, metadata)?;
        let sizes = &self.config.sizes;
        let rows = metadata.num_decode_tokens * sizes.num_heads;
        at_least("elements of q", q.len(), rows, sizes.head_size())?;
        at_least("elements of output", output.len(), rows, sizes.kv_lora_rank)?;
        let lse = wanted(lse, rows)?;
        let config = AttentionConfig {
            num_heads: sizes.num_heads,
            head_size: sizes.head_size(),
            scale: sizes.scale,
            num_kv_heads: 1,
            sliding_window: None,
            logits_soft_cap: None,
            kv_cache_dtype: CacheDtype::F32,
            block_size: self.config.block_size,
            batch_invariant: self.config.batch_invariant,
        };
        let content = Content {
            stride: kv_cache.stride(),
            value_size: sizes.kv_lora_rank,
            value_start: 0,
        };
        let (step, output) = (&metadata.decode, &mut output[..rows * sizes.kv_lora_rank]);
        match &kv_cache.storage {
            Storage::F32(cache) => execute_over(&config, step, q, cache, content, output, lse),
            Storage::Bf16(cache) => execute_over(&config, step, q, cache, content, output, lse),
            Storage::Fp8DsMla(cache) => execute_over(&config, step, q, cache, content, output, lse),
        }
        Ok(())
    }

    fn forward_mha(
        &self,
        inputs: &LatentInputs<'_>,
        kv_cache: &LatentCache,
        metadata: &MlaStepMetadata,
        output: &mut [f32],
        lse: Option<&mut [f32]>,
    ) -> Result<(), ImplError> {
        self.check(kv_cache, metadata)?;
        let sizes = self.config.sizes;
        let tokens = metadata.num_actual_tokens - metadata.num_decode_tokens;
        self.check_inputs(inputs, tokens)?;
        let rows = tokens * sizes.num_heads;
        at_least("elements of output", output.len(), rows, sizes.v_head_dim)?;
        let lse = wanted(lse, rows)?;
        let forward = prefill::Forward {
            sizes,
            batch_invariant: self.config.batch_invariant,
            inputs: *inputs,
            cache: kv_cache,
            step: metadata,
        };
        forward.run(&mut output[..rows * sizes.v_head_dim], lse);
        Ok(())
    }
}

/// Runs `of(first token, its part)` for parts of `to`, `width` elements to a token and `cost` multiply-adds.
fn by_tokens(
    to: &mut [f32],
    width: usize,
    cost: usize,
    of: impl Fn(usize, &mut [f32]) + Send + Sync,
) {
    if to.is_empty() {
        return;
    }
    if (to.len() / width * cost) as u64 <= SEQUENTIAL_COST {
        of(0, to);
    } else {
        to.par_chunks_mut(TOGETHER * width)
            .enumerate()
            .for_each(|(index, to)| of(index * TOGETHER, to));
    }
}

fn at_least(what: &'static str, found: usize, rows: usize, width: usize) -> Result<(), ImplError> {
    let expected = rows.saturating_mul(width);
    match found >= expected {
        true => Ok(()),
        false => Err(ImplError::Shape {
            what,
            found,
            expected,
        }),
    }
}

fn wanted(lse: Option<&mut [f32]>, rows: usize) -> Result<Option<&mut [f32]>, ImplError> {
    lse.map(|lse| {
        at_least("elements of lse", lse.len(), rows, 1)?;
        Ok(&mut lse[..rows])
    })
    .transpose()
}
