//! The Llama family's decoder: loading its weights and computing a step.

use super::config::ModelConfig;
use super::error::ModelError;
use super::layout::{DecoderLayout, LayerLayout, Opened, Vector};
use super::linear::{Part, Projection, ProjectionScratch};
use super::pool::{Pool, SharedOut};
use super::rope::Rope;
use super::weights::Checkpoint;
use super::{AttentionLayers, LoadOptions, Weights, ops};
use std::path::Path;

/// Rows from which gathering embeddings and splitting heads is shared among threads.
const MIN_PARALLEL_ROWS: usize = 16;

struct Layer {
    attention_norm: Vec<f32>,
    /// Queries, keys and values side by side.
    qkv: Projection,
    /// Norms over each head of the queries and keys (Qwen3).
    head_norms: Option<(Vec<f32>, Vec<f32>)>,
    output: Projection,
    feed_forward_norm: Vec<f32>,
    /// Gate and up side by side.
    gate_up: Projection,
    down: Projection,
}

/// Buffers of a step; they grow to the largest batch seen and are then reused.
#[derive(Default)]
struct Scratch {
    /// The residual stream, `[tokens, hidden]`.
    hidden: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Vec<f32>,
    gate_up: Vec<f32>,
    activated: Vec<f32>,
    /// What a projection adds to the residual stream.
    delta: Vec<f32>,
    projection: ProjectionScratch,
}

/// A loaded decoder with its scratch memory and threads. One step at a time.
pub struct Model {
    config: ModelConfig,
    embedding: Projection,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    /// `None` when tied to the embedding.
    head: Option<Projection>,
    rope: Rope,
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
        Self::from_checkpoint(opened.config, &*opened.checkpoint, &opened.layout, options)
    }

    fn from_checkpoint(
        config: ModelConfig,
        checkpoint: &dyn Checkpoint,
        layout: &DecoderLayout,
        options: LoadOptions,
    ) -> Result<Self, ModelError> {
        let weights = options.weights;
        let table = |part: &Part| {
            Projection::load(
                checkpoint,
                weights,
                config.hidden_size,
                std::slice::from_ref(part),
            )
        };
        let embedding = table(&layout.embedding)?;
        let head = layout.head.as_ref().map(table).transpose()?;
        let final_norm = vector(checkpoint, &layout.final_norm)?;
        let layers = layout
            .layers
            .iter()
            .map(|layer| Layer::load(&config, checkpoint, weights, layer))
            .collect::<Result<_, _>>()?;
        let factors = layout
            .rope_factors
            .as_ref()
            .map(|factors| vector(checkpoint, factors))
            .transpose()?;
        Ok(Self {
            rope: Rope::new(config.rope, factors.as_deref()),
            config,
            embedding,
            layers,
            final_norm,
            head,
            pool: Pool::new(options.threads),
            scratch: Scratch::default(),
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
            rope,
            pool,
            scratch,
        } = self;
        let eps = config.rms_norm_eps;
        let m = tokens.len();
        rope.prepare(positions);
        embed(
            pool,
            embedding,
            config.hidden_size,
            tokens,
            &mut scratch.hidden,
        )?;
        for (index, layer) in layers.iter().enumerate() {
            let s = &mut *scratch;
            ops::rms_norm(pool, &s.hidden, &layer.attention_norm, eps, &mut s.normed);
            layer
                .qkv
                .forward(pool, m, &s.normed, &mut s.projection, &mut s.qkv)?;
            split_heads(pool, config, layer, rope, s);
            s.attended.resize(m * config.q_size(), 0.0);
            attn.attend(index, &s.q, &s.k, &s.v, &mut s.attended)
                .map_err(|source| ModelError::Attention {
                    layer: index,
                    source,
                })?;
            layer
                .output
                .forward(pool, m, &s.attended, &mut s.projection, &mut s.delta)?;
            ops::add(&mut s.hidden, &s.delta);
            ops::rms_norm(
                pool,
                &s.hidden,
                &layer.feed_forward_norm,
                eps,
                &mut s.normed,
            );
            layer
                .gate_up
                .forward(pool, m, &s.normed, &mut s.projection, &mut s.gate_up)?;
            ops::silu_mul(pool, &s.gate_up, config.intermediate_size, &mut s.activated);
            layer
                .down
                .forward(pool, m, &s.activated, &mut s.projection, &mut s.delta)?;
            ops::add(&mut s.hidden, &s.delta);
        }
        let s = &mut *scratch;
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
            &mut s.projection,
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

/// A norm's weights, or another vector.
fn vector(checkpoint: &dyn Checkpoint, vector: &Vector) -> Result<Vec<f32>, ModelError> {
    Ok(checkpoint.expect(&vector.name, &[vector.len])?.to_f32())
}

impl Layer {
    fn load(
        config: &ModelConfig,
        checkpoint: &dyn Checkpoint,
        weights: Weights,
        layout: &LayerLayout,
    ) -> Result<Self, ModelError> {
        let hidden = config.hidden_size;
        let load = |k: usize, parts: &[Part]| Projection::load(checkpoint, weights, k, parts);
        let head_norms = layout.head_norms.as_ref();
        Ok(Self {
            attention_norm: vector(checkpoint, &layout.attention_norm)?,
            qkv: load(hidden, &layout.qkv)?,
            head_norms: head_norms
                .map(|(q, k)| Ok::<_, ModelError>((vector(checkpoint, q)?, vector(checkpoint, k)?)))
                .transpose()?,
            output: load(config.q_size(), &layout.output)?,
            feed_forward_norm: vector(checkpoint, &layout.feed_forward_norm)?,
            gate_up: load(hidden, &layout.gate_up)?,
            down: load(config.intermediate_size, &layout.down)?,
        })
    }
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

/// Takes the merged projection apart into `q`, `k` and `v`, norms the heads where the model does, and rotates them.
fn split_heads(pool: &Pool, config: &ModelConfig, layer: &Layer, rope: &Rope, s: &mut Scratch) {
    let (q_size, kv_size) = (config.q_size(), config.kv_size());
    let width = layer.qkv.rows();
    let m = s.qkv.len() / width;
    s.q.resize(m * q_size, 0.0);
    s.k.resize(m * kv_size, 0.0);
    s.v.resize(m * kv_size, 0.0);
    let (q, k, v) = (
        SharedOut::new(&mut s.q),
        SharedOut::new(&mut s.k),
        SharedOut::new(&mut s.v),
    );
    let qkv = &s.qkv;
    pool.run(m, MIN_PARALLEL_ROWS, &|rows| {
        for i in rows {
            // SAFETY: one row each of three buffers.
            let (q, k, v) = unsafe {
                (
                    q.slice(i * q_size..(i + 1) * q_size),
                    k.slice(i * kv_size..(i + 1) * kv_size),
                    v.slice(i * kv_size..(i + 1) * kv_size),
                )
            };
            let row = &qkv[i * width..(i + 1) * width];
            q.copy_from_slice(&row[..q_size]);
            k.copy_from_slice(&row[q_size..q_size + kv_size]);
            v.copy_from_slice(&row[q_size + kv_size..]);
            let norms = layer.head_norms.as_ref();
            for (heads, norm) in [(q, norms.map(|n| &n.0)), (k, norms.map(|n| &n.1))] {
                for head in heads.chunks_exact_mut(config.head_dim) {
                    if let Some(weight) = norm {
                        ops::rms_norm_head(head, weight, config.rms_norm_eps);
                    }
                    rope.rotate(i, head);
                }
            }
        }
    });
}
