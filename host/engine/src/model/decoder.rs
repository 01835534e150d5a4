//! The decoder: its layers of a mixer and a feed-forward, loading them and computing a step.
//!
//! Must never know what a mixer or a feed-forward does.

use super::config::ModelConfig;
use super::error::ModelError;
use super::experts::ExpertsScratch;
use super::feed_forward::{FeedForward, FeedForwardScratch};
use super::layout::{LayerLayout, Opened};
use super::linear::Projection;
use super::loading::Loading;
use super::mixers::{MIN_PARALLEL_ROWS, MixerScratch, MixerWeights, Ropes, Step};
use super::pool::{Pool, SharedOut};
use super::rope::Rope;
use super::{AttentionLayers, LoadOptions, ops};
use std::path::Path;

struct Layer {
    mixer_norm: Vec<f32>,
    mixer: MixerWeights,
    /// Over what the mixer adds to the residual stream.
    post_mixer_norm: Option<Vec<f32>>,
    feed_forward_norm: Vec<f32>,
    feed_forward: FeedForward,
    /// Over what the feed-forward adds.
    post_feed_forward_norm: Option<Vec<f32>>,
}

/// Buffers of a step; they grow to the largest batch seen and are then reused.
#[derive(Default)]
struct Scratch {
    /// The residual stream, `[tokens, hidden]`.
    hidden: Vec<f32>,
    normed: Vec<f32>,
    /// What a mixer or a feed-forward adds to the residual stream.
    delta: Vec<f32>,
    mixer: MixerScratch,
    feed_forward: FeedForwardScratch,
    experts: ExpertsScratch,
}

/// A loaded decoder with its scratch memory and threads. One step at a time.
pub struct Model {
    config: ModelConfig,
    embedding: Projection,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    /// `None` when tied to the embedding.
    head: Option<Projection>,
    ropes: Ropes,
    pool: Pool,
    scratch: Scratch,
}

impl Model {
    /// Loads a GGUF file, or a Hugging Face directory (`config.json`, safetensors).
    ///
    /// # Errors
    /// Names the file, the key or tensor, its value and what to do; a damaged file never panics.
    pub fn load(path: impl AsRef<Path>, options: LoadOptions) -> Result<Self, ModelError> {
        let opened = Opened::open(path.as_ref())?;
        let Opened {
            config,
            checkpoint,
            layout,
        } = opened;
        let loading = Loading {
            config: &config,
            checkpoint: &*checkpoint,
            weights: options.weights,
        };
        let table = |part| loading.matrix(config.hidden_size, part);
        let embedding = table(&layout.embedding)?;
        let head = layout.head.as_ref().map(table).transpose()?;
        let final_norm = loading.norm(&layout.final_norm)?;
        let layers = layout.layers.iter().enumerate();
        let layers = layers
            .map(|(index, layer)| Layer::load(&loading, layer, index))
            .collect::<Result<_, _>>()?;
        let factors = layout
            .rope_factors
            .as_ref()
            .map(|factors| loading.vector(factors))
            .transpose()?;
        Ok(Self {
            ropes: Ropes {
                global: Rope::new(config.rope, factors.as_deref()),
                local: config.traits.local_rope.map(|rope| Rope::new(rope, None)),
            },
            embedding,
            layers,
            final_norm,
            head,
            pool: Pool::new(options.threads),
            scratch: Scratch::default(),
            config,
        })
    }

    /// The model's sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Runs one step over a flat batch.
    ///
    /// `tokens` and `positions` have one entry per token, the requests' tokens one after another. Only the rows in
    /// `logits_rows` (indices into the batch) go through the output head; `logits` becomes
    /// `[logits_rows.len(), vocab_size]`. A row's numbers do not depend on the other rows, as far as `attn` keeps to that.
    ///
    /// # Errors
    /// `Batch` if lengths differ, a token or row is out of range or a position is negative; `Attention` if `attn` fails.
    pub fn forward(
        &mut self,
        tokens: &[u32],
        positions: &[i64],
        attn: &mut dyn AttentionLayers,
        logits_rows: &[usize],
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        self.check_batch(tokens, positions, logits_rows)?;
        let Self {
            config,
            embedding,
            layers,
            final_norm,
            head,
            ropes,
            pool,
            scratch,
        } = self;
        let eps = config.rms_norm_eps;
        let m = tokens.len();
        ropes.prepare(positions);
        let step = Step {
            config,
            pool,
            ropes,
            positions,
        };
        let s = scratch;
        embed(pool, embedding, config.hidden_size, tokens, &mut s.hidden)?;
        if let Some(scale) = config.traits.embedding_scale {
            s.hidden.iter_mut().for_each(|value| *value *= scale);
        }
        for (index, layer) in layers.iter().enumerate() {
            ops::rms_norm(pool, &s.hidden, &layer.mixer_norm, eps, &mut s.normed);
            layer
                .mixer
                .forward(step, index, &s.normed, attn, &mut s.mixer, &mut s.delta)?;
            add(step, layer.post_mixer_norm.as_deref(), s);
            ops::rms_norm(
                pool,
                &s.hidden,
                &layer.feed_forward_norm,
                eps,
                &mut s.normed,
            );
            match &layer.feed_forward {
                FeedForward::Dense(dense) => {
                    dense.forward(pool, m, &s.normed, &mut s.feed_forward, &mut s.delta)?;
                }
                FeedForward::Experts(experts) => {
                    let scratch = (&mut s.experts, &mut s.feed_forward);
                    experts.forward(pool, config, &s.normed, scratch, &mut s.delta)?;
                }
            }
            add(step, layer.post_feed_forward_norm.as_deref(), s);
        }
        s.delta.clear();
        for row in logits_rows {
            s.delta
                .extend_from_slice(&s.hidden[row * config.hidden_size..][..config.hidden_size]);
        }
        ops::rms_norm(pool, &s.delta, final_norm, eps, &mut s.normed);
        let head = head.as_ref().unwrap_or(embedding);
        head.forward(
            pool,
            logits_rows.len(),
            &s.normed,
            &mut s.feed_forward.projection,
            logits,
        )
    }

    fn check_batch(
        &self,
        tokens: &[u32],
        positions: &[i64],
        logits_rows: &[usize],
    ) -> Result<(), ModelError> {
        let wrong = |what: String| Err(ModelError::Batch(what));
        if tokens.len() != positions.len() {
            return wrong(format!(
                "{} tokens but {} positions; give one position per token",
                tokens.len(),
                positions.len()
            ));
        }
        if let Some(token) = tokens
            .iter()
            .find(|t| **t as usize >= self.config.vocab_size)
        {
            return wrong(format!(
                "token {token} is not in the vocabulary of {}; tokenise with this model's tokenizer",
                self.config.vocab_size
            ));
        }
        if let Some(position) = positions.iter().find(|p| **p < 0) {
            return wrong(format!(
                "position {position} is negative; positions count from 0"
            ));
        }
        if let Some(row) = logits_rows.iter().find(|r| **r >= tokens.len()) {
            return wrong(format!(
                "logits of row {row} asked of a batch of {} tokens",
                tokens.len()
            ));
        }
        Ok(())
    }
}

impl Layer {
    fn load(loading: &Loading<'_>, layout: &LayerLayout, index: usize) -> Result<Self, ModelError> {
        let optional = |norm| Option::map(norm, |norm| loading.norm(norm)).transpose();
        Ok(Self {
            mixer_norm: loading.norm(&layout.mixer_norm)?,
            mixer: MixerWeights::load(loading, &layout.mixer, index)?,
            post_mixer_norm: optional(layout.post_mixer_norm.as_ref())?,
            feed_forward_norm: loading.norm(&layout.feed_forward_norm)?,
            feed_forward: FeedForward::load(loading, &layout.feed_forward, index)?,
            post_feed_forward_norm: optional(layout.post_feed_forward_norm.as_ref())?,
        })
    }
}

/// Adds what a layer's part computed, normed where the family does, to the residual stream.
fn add(step: Step<'_>, norm: Option<&[f32]>, s: &mut Scratch) {
    let delta = match norm {
        Some(norm) => {
            let eps = step.config.rms_norm_eps;
            ops::rms_norm(step.pool, &s.delta, norm, eps, &mut s.normed);
            &s.normed
        }
        None => &s.delta,
    };
    ops::add(&mut s.hidden, delta);
}

/// Gathers the tokens' embeddings into `hidden`.
fn embed(
    pool: &Pool,
    table: &Projection,
    width: usize,
    tokens: &[u32],
    hidden: &mut Vec<f32>,
) -> Result<(), ModelError> {
    hidden.resize(tokens.len() * width, 0.0);
    let shared = SharedOut::new(hidden);
    let failure = std::sync::Mutex::new(None);
    pool.run(tokens.len(), MIN_PARALLEL_ROWS, &|rows| {
        for i in rows {
            // SAFETY: one row each.
            let out = unsafe { shared.slice(i * width..(i + 1) * width) };
            if let Err(e) = table.weight_row(tokens[i] as usize, out) {
                *failure
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner) = Some(e);
            }
        }
    });
    let failure = failure
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    failure.map_or(Ok(()), Err)
}
