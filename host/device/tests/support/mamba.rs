//! Layers of the Mamba family with random weights, and tokens for them. They must never know metadata.
#![allow(dead_code, reason = "each test binary uses its own part")]

use timetable_device::{
    cpu::mamba::{
        GdnConfig, GdnInputs, LinearConfig, LinearInputs, Mamba1Config, Mamba1Inputs, Mamba2Config,
        Mamba2Inputs, MambaConfig, MambaInputs, ShortConvConfig, ShortConvInputs,
    },
    reference::mamba::{Recurrence, recur},
};
use timetable_types::MambaType;

/// What one token brings: all its inputs, one behind the other.
pub type Token = Vec<f32>;

/// A layer with its weights, in the order in which `inputs` takes them.
pub struct Layer {
    pub config: MambaConfig,
    weights: Vec<Vec<f32>>,
}

/// A layer's sizes; `pick` chooses one of some numbers.
pub fn random_config(
    mamba_type: MambaType,
    pick: &mut dyn FnMut(&[usize]) -> usize,
) -> MambaConfig {
    let conv_kernel = pick(&[2, 3, 4, 4]);
    match mamba_type {
        MambaType::Mamba2 => {
            let n_groups = pick(&[1, 1, 2]);
            MambaConfig::Mamba2(Mamba2Config {
                num_heads: n_groups * pick(&[1, 2, 4]),
                head_dim: pick(&[8, 12, 16, 32]),
                n_groups,
                state_size: pick(&[4, 16, 17, 32]),
                conv_kernel,
                chunk_size: 64,
                time_step_limit: match pick(&[0, 0, 1]) {
                    0 => (0.0, f32::INFINITY),
                    _ => (0.01, 0.5),
                },
            })
        }
        MambaType::Gdn => {
            let num_k_heads = pick(&[1, 2]);
            MambaConfig::Gdn(GdnConfig {
                num_k_heads,
                num_v_heads: num_k_heads * pick(&[1, 2, 3]),
                head_k_dim: pick(&[8, 16, 20]),
                head_v_dim: pick(&[8, 16, 24]),
                conv_kernel,
            })
        }
        MambaType::Mamba1 => MambaConfig::Mamba1(Mamba1Config {
            intermediate_size: pick(&[16, 24, 40]),
            state_size: pick(&[4, 16]),
            conv_kernel,
            time_step_rank: pick(&[1, 3]),
        }),
        MambaType::ShortConv => MambaConfig::ShortConv(ShortConvConfig {
            conv_dim: pick(&[7, 16, 40]),
            conv_kernel,
        }),
        MambaType::Linear => MambaConfig::Linear(LinearConfig {
            num_heads: pick(&[1, 2, 3]),
            head_dim: pick(&[8, 12, 16]),
        }),
    }
}

impl Layer {
    /// `draw` gives numbers around 0, of about 1 in size.
    pub fn new(config: MambaConfig, draw: &mut dyn FnMut() -> f32) -> Self {
        let mut some = |count: usize, of: &dyn Fn(f32) -> f32| -> Vec<f32> {
            (0..count).map(|_| of(draw())).collect()
        };
        let (channels, taps) = (config.conv_dim(), config.conv_kernel());
        // −1 to −16 by and large, so that some heads forget at once and others remember.
        let rate = |x: f32| -(1.4 * x + 0.5).exp();
        let step = |x: f32| 2.0 * x - 3.0;
        let half = |x: f32| 0.5 * x;
        let mut weights = vec![some(channels * taps, &half)];
        match &config {
            MambaConfig::Mamba2(c) => {
                weights.push(some(channels, &half));
                weights.push(some(c.num_heads, &rate));
                weights.push(some(c.num_heads, &|x| x));
                weights.push(some(c.num_heads, &step));
            }
            MambaConfig::Gdn(c) => {
                weights.push(some(c.num_v_heads, &|x| x));
                weights.push(some(c.num_v_heads, &step));
            }
            MambaConfig::Mamba1(c) => {
                let scale = 1.0 / (channels as f32).sqrt();
                let projected = c.time_step_rank + 2 * c.state_size;
                weights.push(some(channels, &half));
                weights.push(some(projected * channels, &|x| 2.0 * scale * x));
                weights.push(some(channels * c.time_step_rank, &|x| x));
                weights.push(some(channels, &step));
                weights.push(some(channels * c.state_size, &rate));
                weights.push(some(channels, &|x| x));
            }
            MambaConfig::ShortConv(_) => weights.push(some(channels, &half)),
            MambaConfig::Linear(c) => weights.push(some(c.num_heads, &|x| (x - 2.0).exp())),
        }
        Layer { config, weights }
    }

    /// Elements of each of a token's inputs.
    fn widths(&self) -> Vec<usize> {
        let channels = self.config.conv_dim();
        match &self.config {
            MambaConfig::Mamba2(c) => vec![channels, c.num_heads],
            MambaConfig::Gdn(c) => vec![channels, c.num_v_heads, c.num_v_heads],
            MambaConfig::Mamba1(_) | MambaConfig::ShortConv(_) => vec![channels],
            MambaConfig::Linear(c) => vec![c.num_heads * c.head_dim; 3],
        }
    }

    /// A random token.
    pub fn token(&self, draw: &mut dyn FnMut() -> f32) -> Token {
        (0..self.widths().iter().sum()).map(|_| draw()).collect()
    }

    /// A token of no request.
    pub fn poison(&self) -> Token {
        vec![f32::NAN; self.widths().iter().sum()]
    }

    /// The tokens' inputs, each kind by itself.
    pub fn tensors<'t>(&self, tokens: impl IntoIterator<Item = &'t Token>) -> Vec<Vec<f32>> {
        let widths = self.widths();
        let mut tensors = vec![Vec::new(); widths.len()];
        for token in tokens {
            let mut rest = token.as_slice();
            for (tensor, &width) in tensors.iter_mut().zip(&widths) {
                tensor.extend_from_slice(&rest[..width]);
                rest = &rest[width..];
            }
        }
        tensors
    }

    pub fn inputs<'a>(&'a self, tensors: &'a [Vec<f32>]) -> MambaInputs<'a> {
        let w = |index: usize| self.weights[index].as_slice();
        match &self.config {
            MambaConfig::Mamba2(_) => MambaInputs::Mamba2(Mamba2Inputs {
                hidden_states_b_c: &tensors[0],
                dt: &tensors[1],
                conv_weight: w(0),
                conv_bias: Some(w(1)),
                a: w(2),
                d: w(3),
                dt_bias: w(4),
            }),
            MambaConfig::Gdn(_) => MambaInputs::Gdn(GdnInputs {
                mixed_qkv: &tensors[0],
                b: &tensors[1],
                a: &tensors[2],
                conv_weight: w(0),
                a_log: w(1),
                dt_bias: w(2),
            }),
            MambaConfig::Mamba1(_) => MambaInputs::Mamba1(Mamba1Inputs {
                hidden_states: &tensors[0],
                conv_weight: w(0),
                conv_bias: Some(w(1)),
                x_proj: w(2),
                dt_proj: w(3),
                dt_bias: w(4),
                a: w(5),
                d: w(6),
            }),
            MambaConfig::ShortConv(_) => MambaInputs::ShortConv(ShortConvInputs {
                b_x: &tensors[0],
                conv_weight: w(0),
                conv_bias: Some(w(1)),
            }),
            MambaConfig::Linear(_) => MambaInputs::Linear(LinearInputs {
                query: &tensors[0],
                key: &tensors[1],
                value: &tensors[2],
                slopes: w(1),
            }),
        }
    }

    /// What one request's tokens, from its first on, give.
    pub fn reference<'t>(&self, tokens: impl IntoIterator<Item = &'t Token>) -> Recurrence {
        let tokens: Vec<&Token> = tokens.into_iter().collect();
        let tensors = self.tensors(tokens.iter().copied());
        recur(&self.config, &self.inputs(&tensors), tokens.len())
    }
}
