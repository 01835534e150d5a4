//! Attention by the textbook: contiguous keys and values per request, one softmax per query, no blocks, no metadata; latent
//! attention and recurrences by their definitions.
//!
//! What the model's tests and benchmarks run on, so that they test the model alone.

mod latent;
mod recurrent;

use latent::Latents;
use recurrent::State;
use timetable_device::cpu::{mamba::MambaInputs, mla::LatentInputs};
use timetable_engine::model::{AttentionError, AttentionLayers, Mixer, Model, ModelConfig};

/// KV storage of several requests, and the rows of the current step.
pub struct NaiveAttention {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    scale: f32,
    mixers: Vec<Mixer>,
    /// `[request][layer]`: keys and values, `[tokens, kv_heads · head_dim]`.
    cache: Vec<Vec<(Vec<f32>, Vec<f32>)>>,
    latents: Vec<Vec<Latents>>,
    states: Vec<Vec<State>>,
    /// Request and token count of each stretch of the batch.
    batch: Vec<(usize, usize)>,
    scores: Vec<f32>,
}

impl NaiveAttention {
    /// Empty caches for `requests` requests.
    pub fn new(config: &ModelConfig, requests: usize) -> Self {
        let layers = config.num_hidden_layers;
        Self {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            scale: config.attention_scale(),
            mixers: (0..layers).map(|layer| config.mixer(layer)).collect(),
            cache: vec![vec![(Vec::new(), Vec::new()); layers]; requests],
            latents: vec![vec![Latents::default(); layers]; requests],
            states: vec![vec![State::default(); layers]; requests],
            batch: Vec::new(),
            scores: Vec::new(),
        }
    }

    /// Says what the next step's rows are: `(request, tokens)` in the order of the batch.
    pub fn schedule(&mut self, batch: &[(usize, usize)]) {
        self.batch.clear();
        self.batch.extend_from_slice(batch);
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_chunks, a_rest) = a.as_chunks::<16>();
    let (b_chunks, b_rest) = b.as_chunks::<16>();
    let mut sums = [0f32; 16];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

impl AttentionLayers for NaiveAttention {
    fn attend(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), AttentionError> {
        let Mixer::Attention {
            sliding_window,
            attention_chunk_size,
        } = self.mixers[layer]
        else {
            return Err(format!("layer {layer} is not one of attention").into());
        };
        let kv_width = self.kv_heads * self.head_dim;
        let mut row = 0;
        for (request, tokens) in &self.batch {
            let (keys, values) = &mut self.cache[*request][layer];
            let past = keys.len() / kv_width;
            keys.extend_from_slice(&k[row * kv_width..(row + tokens) * kv_width]);
            values.extend_from_slice(&v[row * kv_width..(row + tokens) * kv_width]);
            for token in 0..*tokens {
                let seen = past + token + 1;
                let first = sliding_window.map_or(0, |w| seen.saturating_sub(w));
                let chunk = attention_chunk_size.map_or(0, |c| (seen - 1) / c * c);
                let first = first.max(chunk);
                for head in 0..self.heads {
                    let at = ((row + token) * self.heads + head) * self.head_dim;
                    let q = &q[at..at + self.head_dim];
                    let kv = head / (self.heads / self.kv_heads) * self.head_dim;
                    self.scores.clear();
                    let mut max = f32::NEG_INFINITY;
                    for key in first..seen {
                        let k = &keys[key * kv_width + kv..][..self.head_dim];
                        let score = dot(q, k) * self.scale;
                        max = max.max(score);
                        self.scores.push(score);
                    }
                    let mut total = 0.0;
                    for score in &mut self.scores {
                        *score = (*score - max).exp();
                        total += *score;
                    }
                    let out = &mut out[at..at + self.head_dim];
                    out.fill(0.0);
                    for (key, score) in (first..seen).zip(&self.scores) {
                        let v = &values[key * kv_width + kv..][..self.head_dim];
                        let weight = score / total;
                        for (o, v) in out.iter_mut().zip(v) {
                            *o += weight * v;
                        }
                    }
                }
            }
            row += tokens;
        }
        Ok(())
    }

    fn attend_latent(
        &mut self,
        layer: usize,
        inputs: &LatentInputs<'_>,
        out: &mut [f32],
    ) -> Result<(), AttentionError> {
        let Mixer::Latent(sizes) = self.mixers[layer] else {
            return Err(format!("layer {layer} is not one of latent attention").into());
        };
        let mut row = 0;
        for &(request, tokens) in &self.batch {
            self.latents[request][layer].attend(&sizes, inputs, (row, tokens), out);
            row += tokens;
        }
        Ok(())
    }

    fn recur(
        &mut self,
        layer: usize,
        inputs: &MambaInputs<'_>,
        out: &mut [f32],
    ) -> Result<(), AttentionError> {
        let Mixer::Recurrent(config) = self.mixers[layer] else {
            return Err(format!("layer {layer} is not a recurrence").into());
        };
        let mut row = 0;
        for &(request, tokens) in &self.batch {
            self.states[request][layer].recur(&config, inputs, (row, tokens), out);
            row += tokens;
        }
        Ok(())
    }
}

/// Logits of every position of `prompts`, in steps of at most `chunk` tokens of each, all prompts in one batch.
///
/// # Panics
/// If a step fails.
pub fn batched_logits(model: &mut Model, prompts: &[Vec<u32>], chunk: usize) -> Vec<Vec<Vec<f32>>> {
    let mut attention = NaiveAttention::new(model.config(), prompts.len());
    let vocab = model.config().vocab_size;
    let mut out = vec![Vec::new(); prompts.len()];
    let mut logits = Vec::new();
    loop {
        let (mut batch, mut tokens, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        for (request, prompt) in prompts.iter().enumerate() {
            let done: usize = out[request].len();
            // Requests advance by different amounts, so that every step mixes lengths.
            let count = (chunk + request % 3).min(prompt.len() - done);
            if count > 0 {
                batch.push((request, count));
                tokens.extend_from_slice(&prompt[done..done + count]);
                positions.extend((done as i64)..(done + count) as i64);
            }
        }
        if batch.is_empty() {
            return out;
        }
        attention.schedule(&batch);
        let rows: Vec<usize> = (0..tokens.len()).collect();
        model
            .forward(&tokens, &positions, &mut attention, &rows, &mut logits)
            .expect("a step runs");
        let mut rows = logits.chunks_exact(vocab);
        for (request, count) in batch {
            out[request].extend(rows.by_ref().take(count).map(<[f32]>::to_vec));
        }
    }
}
