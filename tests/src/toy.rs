//! A toy model with any mixers in any order: random weights of a fixed seed, one projection in and one out around each mixer. What
//! engines are tried on that serve several families at once. Knows no test.

use timetable_device::cpu::{
    mamba::{GdnConfig, GdnInputs, Mamba2Config, Mamba2Inputs, MambaConfig, MambaInputs},
    mla::{LatentInputs, LatentSizes},
};
use timetable_engine::{
    ModelRunner,
    model::{AttentionLayers, Mixer, ModelConfig, ModelError},
    simulated::simulated_model,
};

use crate::{candle_reference::argmax, naive::NaiveAttention};

const HIDDEN: usize = 48;
const VOCABULARY: usize = 97;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;

/// Softmax attention.
pub const FULL: Mixer = Mixer::Attention {
    sliding_window: None,
    attention_chunk_size: None,
};

/// Attention to the last `window` keys.
pub const fn window(window: usize) -> Mixer {
    Mixer::Attention {
        sliding_window: Some(window),
        attention_chunk_size: None,
    }
}

/// Attention within chunks of `chunk` tokens.
pub const fn chunked(chunk: usize) -> Mixer {
    Mixer::Attention {
        sliding_window: None,
        attention_chunk_size: Some(chunk),
    }
}

/// Latent attention, of the smallest size that the field's builders take.
pub const LATENT: Mixer = Mixer::Latent(LatentSizes {
    num_heads: 3,
    kv_lora_rank: 256,
    qk_nope_head_dim: 12,
    qk_rope_head_dim: 64,
    v_head_dim: 10,
    scale: 0.1,
});

/// Mamba2.
pub const MAMBA2: Mixer = Mixer::Recurrent(MambaConfig::Mamba2(Mamba2Config {
    num_heads: 4,
    head_dim: 8,
    n_groups: 2,
    state_size: 8,
    conv_kernel: 4,
    chunk_size: 16,
    time_step_limit: (0.0, f32::INFINITY),
}));

/// The gated delta net.
pub const GDN: Mixer = Mixer::Recurrent(MambaConfig::Gdn(GdnConfig {
    num_k_heads: 2,
    num_v_heads: 4,
    head_k_dim: 8,
    head_v_dim: 6,
    conv_kernel: 4,
}));

/// `f32 [outputs, inputs]`
struct Matrix {
    inputs: usize,
    weights: Vec<f32>,
}

impl Matrix {
    /// Each row of `x` times this.
    fn of(&self, x: &[f32]) -> Vec<f32> {
        let rows = x.chunks_exact(self.inputs);
        rows.flat_map(|x| {
            let columns = self.weights.chunks_exact(self.inputs);
            columns.map(move |w| w.iter().zip(x).map(|(w, x)| w * x).sum())
        })
        .collect()
    }
}

/// Numbers of a seed.
struct Noise(u64);

impl Noise {
    /// Within [−1, 1).
    fn next(&mut self) -> f32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    fn vector(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.next() * scale).collect()
    }

    fn matrix(&mut self, outputs: usize, inputs: usize) -> Matrix {
        Matrix {
            inputs,
            weights: self.vector(outputs * inputs, (3.0 / inputs as f32).sqrt()),
        }
    }
}

struct Layer {
    mixer: Mixer,
    /// Of the hidden state, in the order of the mixer's inputs.
    projections: Vec<Matrix>,
    /// Weights that the mixer itself takes.
    weights: Vec<Vec<f32>>,
    out: Matrix,
}

/// The model.
pub struct Toy {
    config: ModelConfig,
    embedding: Matrix,
    layers: Vec<Layer>,
}

impl Toy {
    /// One layer for each of `mixers`; equal mixers in equal places have equal weights.
    pub fn new(mixers: &[Mixer]) -> Self {
        let mut noise = Noise(7);
        let embedding = noise.matrix(VOCABULARY, HIDDEN);
        let layer = |(index, mixer): (usize, &Mixer)| Layer::new(mixer, Noise(100 + index as u64));
        Self {
            config: ModelConfig {
                vocab_size: VOCABULARY,
                hidden_size: HIDDEN,
                num_hidden_layers: mixers.len(),
                num_attention_heads: HEADS,
                num_key_value_heads: KV_HEADS,
                head_dim: HEAD_DIM,
                max_position_embeddings: 512,
                mixers: mixers.to_vec(),
                ..simulated_model()
            },
            embedding,
            layers: mixers.iter().enumerate().map(layer).collect(),
        }
    }

    /// Greedy tokens after `prompt`, with textbook attention and recurrences.
    ///
    /// # Panics
    /// If a step fails.
    pub fn greedy(&mut self, prompt: &[u32], count: usize) -> Vec<u32> {
        let mut attention = NaiveAttention::new(&self.config, 1);
        let mut tokens = prompt.to_vec();
        let (mut done, mut logits) = (0, Vec::new());
        while tokens.len() < prompt.len() + count {
            let new = tokens.len() - done;
            attention.schedule(&[(0, new)]);
            let positions: Vec<i64> = (done as i64..tokens.len() as i64).collect();
            let rows = [new - 1];
            self.forward(
                &tokens[done..],
                &positions,
                &mut attention,
                &rows,
                &mut logits,
            )
            .expect("a step runs");
            done = tokens.len();
            tokens.push(argmax(&logits) as u32);
        }
        tokens.split_off(prompt.len())
    }
}

impl Layer {
    fn new(mixer: &Mixer, mut noise: Noise) -> Self {
        let (projections, weights, width): (Vec<usize>, Vec<Vec<f32>>, usize) = match mixer {
            Mixer::Attention { .. } => {
                let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
                (vec![q, kv, kv], Vec::new(), q)
            }
            Mixer::Latent(s) => {
                let per_head = s.qk_nope_head_dim + s.v_head_dim;
                let kv_b = noise.vector(s.num_heads * per_head * s.kv_lora_rank, 0.1);
                let q = s.num_heads * s.qk_head_dim();
                let sizes = vec![q, s.kv_lora_rank, s.qk_rope_head_dim];
                (sizes, vec![kv_b], s.num_heads * s.v_head_dim)
            }
            Mixer::Recurrent(config) => {
                let conv = config.conv_dim();
                let taps = noise.vector(conv * 4, 0.5);
                match config {
                    MambaConfig::Mamba2(c) => {
                        let decays = noise.vector(c.num_heads, 0.5);
                        let weights = vec![
                            taps,
                            noise.vector(conv, 0.5),
                            decays.iter().map(|x| -1.0 - x).collect(),
                            noise.vector(c.num_heads, 1.0),
                            noise.vector(c.num_heads, 0.5),
                        ];
                        (vec![conv, c.num_heads], weights, config.output_size())
                    }
                    MambaConfig::Gdn(c) => {
                        let heads = c.num_v_heads;
                        let weights =
                            vec![taps, noise.vector(heads, 0.5), noise.vector(heads, 0.5)];
                        (vec![conv, heads, heads], weights, config.output_size())
                    }
                    _ => panic!("the toy has no such layer"),
                }
            }
        };
        Self {
            mixer: *mixer,
            projections: projections
                .iter()
                .map(|&size| noise.matrix(size, HIDDEN))
                .collect(),
            weights,
            out: noise.matrix(HIDDEN, width),
        }
    }

    /// Mixes the tokens of `x`, f32 [T, HIDDEN].
    fn mix(
        &self,
        index: usize,
        x: &[f32],
        attn: &mut dyn AttentionLayers,
    ) -> Result<Vec<f32>, ModelError> {
        let inputs: Vec<Vec<f32>> = self.projections.iter().map(|p| p.of(x)).collect();
        let w = &self.weights;
        let mut out = vec![f32::NAN; x.len() / HIDDEN * self.out.inputs];
        let mixed = match &self.mixer {
            Mixer::Attention { .. } => {
                attn.attend(index, &inputs[0], &inputs[1], &inputs[2], &mut out)
            }
            Mixer::Latent(_) => {
                let inputs = LatentInputs {
                    q: &inputs[0],
                    kv_c_normed: &inputs[1],
                    k_pe: &inputs[2],
                    kv_b_proj: &w[0],
                };
                attn.attend_latent(index, &inputs, &mut out)
            }
            Mixer::Recurrent(MambaConfig::Mamba2(_)) => {
                let inputs = MambaInputs::Mamba2(Mamba2Inputs {
                    hidden_states_b_c: &inputs[0],
                    dt: &inputs[1],
                    conv_weight: &w[0],
                    conv_bias: Some(&w[1]),
                    a: &w[2],
                    d: &w[3],
                    dt_bias: &w[4],
                });
                attn.recur(index, &inputs, &mut out)
            }
            Mixer::Recurrent(_) => {
                let inputs = MambaInputs::Gdn(GdnInputs {
                    mixed_qkv: &inputs[0],
                    b: &inputs[1],
                    a: &inputs[2],
                    conv_weight: &w[0],
                    a_log: &w[1],
                    dt_bias: &w[2],
                });
                attn.recur(index, &inputs, &mut out)
            }
        };
        mixed.map_err(|source| ModelError::Attention {
            layer: index,
            source,
        })?;
        Ok(self.out.of(&out))
    }
}

/// Each row divided by its root mean square.
fn normed(x: &[f32]) -> Vec<f32> {
    let rows = x.chunks_exact(HIDDEN);
    rows.flat_map(|row| {
        let square: f32 = row.iter().map(|x| x * x).sum();
        let scale = 1.0 / (square / HIDDEN as f32 + 1e-6).sqrt();
        row.iter().map(move |x| x * scale)
    })
    .collect()
}

impl ModelRunner for Toy {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn forward(
        &mut self,
        tokens: &[u32],
        positions: &[i64],
        attn: &mut dyn AttentionLayers,
        logits_rows: &[usize],
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let embedded = tokens.iter().zip(positions).flat_map(|(&token, &at)| {
            let row = &self.embedding.weights[token as usize * HIDDEN..][..HIDDEN];
            let wave = move |i: usize| (at as f32 / (1.0 + i as f32)).sin();
            row.iter().enumerate().map(move |(i, x)| x + 0.5 * wave(i))
        });
        let mut x: Vec<f32> = embedded.collect();
        for (index, layer) in self.layers.iter().enumerate() {
            let mixed = layer.mix(index, &normed(&x), attn)?;
            x.iter_mut().zip(mixed).for_each(|(x, mixed)| *x += mixed);
        }
        let x = normed(&x);
        logits.clear();
        for &row in logits_rows {
            logits.extend(self.embedding.of(&x[row * HIDDEN..][..HIDDEN]));
        }
        Ok(())
    }
}
