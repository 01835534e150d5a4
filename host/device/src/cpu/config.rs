//! The per-layer impl: what it is constructed with, the trait, and the two functions that the engine calls. It must never
//! know how a step was scheduled.

use timetable_types::Family;

use super::{CacheDtype, KvCache, StepMetadata, execute};

/// What one attention layer is constructed with; the field's constructor arguments that this device executes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Query heads; a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Elements of one query, key or value.
    pub head_size: usize,
    /// Multiplies q·k.
    pub scale: f32,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Keys that a token sees, itself included; none: all.
    pub sliding_window: Option<u32>,
    /// c: scores become c · tanh(score / c). None or 0: no cap.
    pub logits_soft_cap: Option<f32>,
    /// Dtype of this layer's cache.
    pub kv_cache_dtype: CacheDtype,
    /// Tokens of one block of this layer's cache.
    pub block_size: usize,
    /// A query's result must not depend, in a bit, on which of the request's queries are in the same step: every number of
    /// rows then takes one form of the kernel.
    pub batch_invariant: bool,
}

/// Why an impl could not be made, or did not run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ImplError {
    /// No impl of this kind for this family on this device.
    #[error("metadata of {interface} does not run on the CPU device {form}: {remedy}")]
    NotOnThisDevice {
        /// The family's interface.
        interface: &'static str,
        /// As what it was to run.
        form: &'static str,
        /// What would work.
        remedy: &'static str,
    },
    /// A constructor argument that no impl accepts.
    #[error("attention config: {name} is {value}: {remedy}")]
    Config {
        /// Which.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is accepted.
        remedy: &'static str,
    },
    /// The field's refusal, in the field's words.
    #[error("fused output quantization is not yet supported for {0}")]
    FusedOutputQuantization(&'static str),
    /// The field's refusal, in the field's words.
    #[error(
        "{0} does not support one of the following: alibi_slopes, sliding_window, logits_soft_cap (latent attention has none of them: leave them out)"
    )]
    LatentFeatures(&'static str),
    /// The metadata are another backend's, or not prepared.
    #[error("{impl_name} was given metadata of {found}: prepare this group's metadata first")]
    WrongMetadata {
        /// The field's class name.
        impl_name: &'static str,
        /// The family found.
        found: &'static str,
    },
    /// A tensor is too short, or the cache has another shape than the config.
    #[error("{what}: {found}, expected {expected}")]
    Shape {
        /// Which.
        what: &'static str,
        /// Found.
        found: usize,
        /// Expected (at least).
        expected: usize,
    },
    /// The plan was made for another layer.
    #[error(
        "the plan's {what} is {plan}, this layer's is {layer}: the layers of an attention group must share it (disable the sliding window, or give the layer a group of its own)"
    )]
    Hyperparameter {
        /// Which.
        what: &'static str,
        /// The plan's.
        plan: f64,
        /// The layer's.
        layer: f64,
    },
}

/// One layer's attention on this device.
///
/// `forward_includes_kv_cache_update` is false: the caller scatters first.
pub trait AttentionImpl: Send + Sync {
    /// Writes this step's keys and values (`f32 [T', num_kv_heads, head_size]`) into the cache. The slots (`s64 [n]`) are the
    /// forward context's, never a builder's. Loops over slots: slot −1 is skipped, rows from n on write nothing.
    ///
    /// # Panics
    /// If a slot lies outside the cache or has no row: slots are the host's own.
    fn do_kv_cache_update(
        &self,
        key: &[f32],
        value: &[f32],
        kv_cache: &mut KvCache,
        slot_mapping: &[i64],
    );

    /// Attention of `query` (f32 [T', num_heads, head_size], T' ≥ num_actual_tokens) over the cache, into rows
    /// [0, num_actual_tokens) of `output` (f32 [T', num_heads * head_size]); later rows stay as they are. A row that the
    /// metadata does not cover becomes zeros. No metadata (a profile run): all of `output` becomes zeros.
    fn forward(
        &self,
        query: &[f32],
        kv_cache: &KvCache,
        metadata: Option<&StepMetadata>,
        output: &mut [f32],
        output_scale: Option<f32>,
    ) -> Result<(), ImplError>;

    /// As `forward`, and the natural log-sum-exp of the scores of each token and head: f32 [num_actual_tokens, num_heads],
    /// −∞ where there was no key.
    fn forward_with_lse(
        &self,
        query: &[f32],
        kv_cache: &KvCache,
        metadata: &StepMetadata,
        output: &mut [f32],
        lse: &mut [f32],
    ) -> Result<(), ImplError>;
}

/// The impl of `family` for a layer.
pub fn new_impl(
    family: Family,
    config: AttentionConfig,
) -> Result<Box<dyn AttentionImpl>, ImplError> {
    Ok(Box::new(PagedAttentionImpl::new(family, config)?))
}

fn checked(mut config: AttentionConfig) -> Result<AttentionConfig, ImplError> {
    let refuse = |name, value: String, remedy| {
        Err(ImplError::Config {
            name,
            value,
            remedy,
        })
    };
    for (name, value) in [
        ("num_heads", config.num_heads),
        ("num_kv_heads", config.num_kv_heads),
        ("head_size", config.head_size),
        ("block_size", config.block_size),
    ] {
        if value == 0 {
            return refuse(name, "0".into(), "it must be at least 1");
        }
    }
    if !config.num_heads.is_multiple_of(config.num_kv_heads) {
        return refuse(
            "num_heads",
            config.num_heads.to_string(),
            "it must be a multiple of num_kv_heads",
        );
    }
    if !config.scale.is_finite() {
        return refuse("scale", config.scale.to_string(), "it must be finite");
    }
    if config.sliding_window == Some(0) {
        return refuse("sliding_window", "0".into(), "leave it out for no window");
    }
    if config.logits_soft_cap == Some(0.0) {
        config.logits_soft_cap = None;
    }
    if let Some(cap) = config.logits_soft_cap
        && !(cap.is_finite() && cap > 0.0)
    {
        return refuse(
            "logits_soft_cap",
            cap.to_string(),
            "it must be finite and positive",
        );
    }
    Ok(config)
}

/// Every family of paged attention: the metadata is already in one form when it arrives here.
pub(super) struct PagedAttentionImpl {
    family: Family,
    /// The field's class name.
    name: &'static str,
    config: AttentionConfig,
}

impl AttentionImpl for PagedAttentionImpl {
    fn do_kv_cache_update(
        &self,
        key: &[f32],
        value: &[f32],
        kv_cache: &mut KvCache,
        slot_mapping: &[i64],
    ) {
        kv_cache.scatter(key, value, slot_mapping);
    }

    fn forward(
        &self,
        query: &[f32],
        kv_cache: &KvCache,
        metadata: Option<&StepMetadata>,
        output: &mut [f32],
        output_scale: Option<f32>,
    ) -> Result<(), ImplError> {
        if output_scale.is_some() {
            return Err(ImplError::FusedOutputQuantization(self.name));
        }
        let Some(metadata) = metadata else {
            output.fill(0.0);
            return Ok(());
        };
        self.run(query, kv_cache, metadata, output, None)
    }

    fn forward_with_lse(
        &self,
        query: &[f32],
        kv_cache: &KvCache,
        metadata: &StepMetadata,
        output: &mut [f32],
        lse: &mut [f32],
    ) -> Result<(), ImplError> {
        let expected = metadata.num_actual_tokens * self.config.num_heads;
        if lse.len() < expected {
            return Err(ImplError::Shape {
                what: "elements of lse",
                found: lse.len(),
                expected,
            });
        }
        self.run(
            query,
            kv_cache,
            metadata,
            output,
            Some(&mut lse[..expected]),
        )
    }
}

impl PagedAttentionImpl {
    pub(super) fn new(family: Family, config: AttentionConfig) -> Result<Self, ImplError> {
        let not_paged = |remedy| {
            Err(ImplError::NotOnThisDevice {
                interface: family.interface(),
                form: "as attention over paged keys and values",
                remedy,
            })
        };
        let name = match family {
            Family::FlashAttn => "FlashAttentionImpl",
            Family::Flashinfer => "FlashInferImpl",
            Family::TritonAttn => "TritonAttentionImpl",
            Family::FlashMla => return not_paged("make an `MlaImpl` of the layer's `MlaConfig`"),
            Family::Mamba => return not_paged("make a `MambaImpl` of the layer's `MambaConfig`"),
        };
        Ok(Self {
            family,
            name,
            config: checked(config)?,
        })
    }

    pub(super) fn config(&self) -> &AttentionConfig {
        &self.config
    }

    fn run(
        &self,
        query: &[f32],
        kv_cache: &KvCache,
        metadata: &StepMetadata,
        output: &mut [f32],
        lse: Option<&mut [f32]>,
    ) -> Result<(), ImplError> {
        if metadata.family != Some(self.family) {
            return Err(ImplError::WrongMetadata {
                impl_name: self.name,
                found: metadata
                    .family
                    .map_or("no family (unprepared)", Family::interface),
            });
        }
        self.check(query, kv_cache, metadata, output)?;
        let used = metadata.num_actual_tokens * self.config.num_heads * self.config.head_size;
        let (query, output) = (&query[..used], &mut output[..used]);
        execute::execute(&self.config, metadata, query, kv_cache, output, lse);
        Ok(())
    }

    /// Shapes, and whether the plan was made for a layer like this one.
    fn check(
        &self,
        query: &[f32],
        kv_cache: &KvCache,
        metadata: &StepMetadata,
        output: &[f32],
    ) -> Result<(), ImplError> {
        let config = &self.config;
        let equal = |what, found: usize, expected: usize| {
            if found == expected {
                Ok(())
            } else {
                Err(ImplError::Shape {
                    what,
                    found,
                    expected,
                })
            }
        };
        let at_least = |what, found: usize, expected: usize| {
            if found >= expected {
                Ok(())
            } else {
                Err(ImplError::Shape {
                    what,
                    found,
                    expected,
                })
            }
        };
        equal(
            "the cache's num_kv_heads",
            kv_cache.num_kv_heads(),
            config.num_kv_heads,
        )?;
        equal(
            "the cache's head_size",
            kv_cache.head_size(),
            config.head_size,
        )?;
        equal(
            "the cache's block_size",
            kv_cache.block_size(),
            config.block_size,
        )?;
        equal(
            "the metadata's block_size",
            metadata.block_size,
            config.block_size,
        )?;
        equal(
            "bytes of the cache's dtype",
            kv_cache.dtype().size(),
            config.kv_cache_dtype.size(),
        )?;
        at_least(
            "blocks of the cache",
            kv_cache.num_blocks(),
            metadata.num_blocks_used,
        )?;
        let used = metadata.num_actual_tokens * config.num_heads * config.head_size;
        at_least("elements of query", query.len(), used)?;
        at_least("elements of output", output.len(), used)?;

        for plan in &metadata.hyperparameters {
            let exact = [
                ("num_qo_heads", plan.num_qo_heads, config.num_heads),
                ("num_kv_heads", plan.num_kv_heads, config.num_kv_heads),
                ("head_dim", plan.head_dim, config.head_size),
            ];
            for (what, plan, layer) in exact {
                if plan != layer {
                    return Err(ImplError::Hyperparameter {
                        what,
                        plan: plan as f64,
                        layer: layer as f64,
                    });
                }
            }
            let window_left = config.sliding_window.map_or(-1.0, |w| f64::from(w) - 1.0);
            let cap = config.logits_soft_cap.map_or(0.0, f64::from);
            let close = [
                (
                    "window_left",
                    f64::from(plan.window_left.max(-1)),
                    window_left,
                ),
                ("logits_soft_cap", plan.logits_soft_cap.unwrap_or(0.0), cap),
                ("sm_scale", plan.sm_scale, f64::from(config.scale)),
            ];
            for (what, plan, layer) in close {
                // The plan has f64, the layer f32: one rounding apart is the same value.
                if (plan - layer).abs() > 1e-6 * layer.abs() {
                    return Err(ImplError::Hyperparameter { what, plan, layer });
                }
            }
        }
        Ok(())
    }
}
