//! The Mamba family in f64, one request from its first token on, token by token: what every device's layers are compared with. It
//! must never share code with what it judges.
//!
//! Convolution, where the layer has one: u_t = act(bias + Σ_j w_j · x_(t − K + 1 + j)), inputs before the first token being 0. Then
//!
//! - Mamba2, each head: Δ = clamp(ln(1 + e^(dt + bias))), h ← e^(aΔ) h + Δ x ⊗ B, y = h·C + D x;
//! - GDN, each value head: q and k over √(|·|² + 10⁻⁶), S ← e^g S, S ← S + β (v − S k) ⊗ k, o = S q / √d, where
//!   g = −e^A_log · ln(1 + e^(a + bias)) and β = 1 / (1 + e^−b);
//! - Mamba1, each channel: Δ from x by two projections, h ← e^(Δa) h + Δ B x, y = C·h + D x;
//! - lightning attention, each head: o_t = Σ_(s ≤ t) e^(−slope (t − s)) (q_t · k_s) v_s.

use crate::cpu::mamba::{
    GdnConfig, GdnInputs, LinearConfig, LinearInputs, Mamba1Config, Mamba1Inputs, Mamba2Config,
    Mamba2Inputs, MambaConfig, MambaInputs,
};

/// What a request's tokens give.
#[derive(Clone, Debug, PartialEq)]
pub struct Recurrence {
    /// f64 [T, output_size]
    pub output: Vec<f64>,
    /// f64 [conv_dim, conv_kernel − 1]: the last inputs of the convolution.
    pub window: Vec<f64>,
    /// The state behind the last token, in the shape of `MambaConfig::state_shapes`.
    pub state: Vec<f64>,
}

/// Runs `tokens` tokens of one request. `inputs` begin at its first.
///
/// # Panics
/// If the inputs are another type's or too short.
pub fn recur(config: &MambaConfig, inputs: &MambaInputs<'_>, tokens: usize) -> Recurrence {
    match (config, inputs) {
        (MambaConfig::Mamba2(c), MambaInputs::Mamba2(i)) => {
            let (u, window) = convolution(
                config,
                i.hidden_states_b_c,
                i.conv_weight,
                i.conv_bias,
                tokens,
            );
            let (output, state) = mamba2(c, i, &u, tokens);
            Recurrence {
                output,
                window,
                state,
            }
        }
        (MambaConfig::Gdn(c), MambaInputs::Gdn(i)) => {
            let (u, window) = convolution(config, i.mixed_qkv, i.conv_weight, None, tokens);
            let (output, state) = gdn(c, i, &u, tokens);
            Recurrence {
                output,
                window,
                state,
            }
        }
        (MambaConfig::Mamba1(c), MambaInputs::Mamba1(i)) => {
            let (u, window) =
                convolution(config, i.hidden_states, i.conv_weight, i.conv_bias, tokens);
            let (output, state) = mamba1(c, i, &u, tokens);
            Recurrence {
                output,
                window,
                state,
            }
        }
        (MambaConfig::ShortConv(_), MambaInputs::ShortConv(i)) => {
            let (output, window) = convolution(config, i.b_x, i.conv_weight, i.conv_bias, tokens);
            Recurrence {
                output,
                window,
                state: Vec::new(),
            }
        }
        (MambaConfig::Linear(c), MambaInputs::Linear(i)) => {
            let (output, state) = linear(c, i, tokens);
            Recurrence {
                output,
                window: Vec::new(),
                state,
            }
        }
        _ => panic!(
            "a {:?} layer with another type's inputs",
            config.mamba_type()
        ),
    }
}

/// ln(1 + e^x), by the smaller exponential.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Outputs [T, channels] and the last inputs [channels, K − 1].
fn convolution(
    config: &MambaConfig,
    input: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    tokens: usize,
) -> (Vec<f64>, Vec<f64>) {
    let (channels, taps) = (config.conv_dim(), config.conv_kernel());
    let has_activation = !matches!(config, MambaConfig::ShortConv(_));
    let at = |token: i64, channel: usize| match token < 0 {
        true => 0.0,
        false => f64::from(input[token as usize * channels + channel]),
    };
    let mut output = Vec::new();
    for token in 0..tokens as i64 {
        for channel in 0..channels {
            let mut u = bias.map_or(0.0, |bias| f64::from(bias[channel]));
            for tap in 0..taps {
                let from = token + 1 + tap as i64 - taps as i64;
                u += f64::from(weight[channel * taps + tap]) * at(from, channel);
            }
            output.push(if has_activation {
                u / (1.0 + (-u).exp())
            } else {
                u
            });
        }
    }
    let mut window = Vec::new();
    for channel in 0..channels {
        let last = 1 + tokens as i64 - taps as i64..tokens as i64;
        window.extend(last.map(|token| at(token, channel)));
    }
    (output, window)
}

fn mamba2(
    c: &Mamba2Config,
    i: &Mamba2Inputs<'_>,
    u: &[f64],
    tokens: usize,
) -> (Vec<f64>, Vec<f64>) {
    let (heads, dim, size) = (c.num_heads, c.head_dim, c.state_size);
    let channels = heads * dim + 2 * c.n_groups * size;
    let mut state = vec![0.0; heads * dim * size];
    let mut output = Vec::new();
    for token in 0..tokens {
        let u = &u[token * channels..(token + 1) * channels];
        for head in 0..heads {
            let group = head * c.n_groups / heads;
            let delta =
                softplus(f64::from(i.dt[token * heads + head]) + f64::from(i.dt_bias[head]))
                    .clamp(c.time_step_limit.0.into(), c.time_step_limit.1.into());
            let decay = (f64::from(i.a[head]) * delta).exp();
            for element in 0..dim {
                let x = u[head * dim + element];
                let mut y = f64::from(i.d[head]) * x;
                for n in 0..size {
                    let b = u[heads * dim + group * size + n];
                    let c = u[heads * dim + (c.n_groups + group) * size + n];
                    let h = &mut state[(head * dim + element) * size + n];
                    *h = decay * *h + delta * x * b;
                    y += *h * c;
                }
                output.push(y);
            }
        }
    }
    (output, state)
}

fn gdn(c: &GdnConfig, i: &GdnInputs<'_>, u: &[f64], tokens: usize) -> (Vec<f64>, Vec<f64>) {
    let (k_dim, v_dim) = (c.head_k_dim, c.head_v_dim);
    let keys = c.num_k_heads * k_dim;
    let channels = 2 * keys + c.num_v_heads * v_dim;
    let unit = |x: &[f64]| -> Vec<f64> {
        let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
        x.iter().map(|x| x / length).collect()
    };
    let mut state = vec![0.0; c.num_v_heads * v_dim * k_dim];
    let mut output = Vec::new();
    for token in 0..tokens {
        let u = &u[token * channels..(token + 1) * channels];
        for head in 0..c.num_v_heads {
            let k_head = head * c.num_k_heads / c.num_v_heads;
            let q = unit(&u[k_head * k_dim..(k_head + 1) * k_dim]);
            let k = unit(&u[keys + k_head * k_dim..keys + (k_head + 1) * k_dim]);
            let gate = token * c.num_v_heads + head;
            let rate = f64::from(i.a_log[head]).exp();
            let g = -rate * softplus(f64::from(i.a[gate]) + f64::from(i.dt_bias[head]));
            let beta = 1.0 / (1.0 + (-f64::from(i.b[gate])).exp());
            for element in 0..v_dim {
                let v = u[2 * keys + head * v_dim + element];
                let row = &mut state[(head * v_dim + element) * k_dim..][..k_dim];
                row.iter_mut().for_each(|s| *s *= g.exp());
                let known: f64 = row.iter().zip(&k).map(|(s, k)| s * k).sum();
                let learned = beta * (v - known);
                row.iter_mut().zip(&k).for_each(|(s, k)| *s += learned * k);
                let o: f64 = row.iter().zip(&q).map(|(s, q)| s * q).sum();
                output.push(o / (k_dim as f64).sqrt());
            }
        }
    }
    (output, state)
}

fn mamba1(
    c: &Mamba1Config,
    i: &Mamba1Inputs<'_>,
    u: &[f64],
    tokens: usize,
) -> (Vec<f64>, Vec<f64>) {
    let (channels, size, rank) = (c.intermediate_size, c.state_size, c.time_step_rank);
    let mut state = vec![0.0; channels * size];
    let mut output = Vec::new();
    for token in 0..tokens {
        let x = &u[token * channels..(token + 1) * channels];
        let projected: Vec<f64> = (0..rank + 2 * size)
            .map(|row| {
                let weights = &i.x_proj[row * channels..(row + 1) * channels];
                weights.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()
            })
            .collect();
        for channel in 0..channels {
            let mut dt = f64::from(i.dt_bias[channel]);
            let weights = &i.dt_proj[channel * rank..(channel + 1) * rank];
            for (&weight, from) in weights.iter().zip(&projected) {
                dt += f64::from(weight) * from;
            }
            let delta = softplus(dt);
            let mut y = f64::from(i.d[channel]) * x[channel];
            for n in 0..size {
                let h = &mut state[channel * size + n];
                let a = f64::from(i.a[channel * size + n]);
                *h = (delta * a).exp() * *h + delta * projected[rank + n] * x[channel];
                y += projected[rank + size + n] * *h;
            }
            output.push(y);
        }
    }
    (output, state)
}

fn linear(c: &LinearConfig, i: &LinearInputs<'_>, tokens: usize) -> (Vec<f64>, Vec<f64>) {
    let (heads, dim) = (c.num_heads, c.head_dim);
    let at = |of: &[f32], token: usize, head: usize, d: usize| {
        f64::from(of[(token * heads + head) * dim + d])
    };
    let mut output = vec![0.0; tokens * heads * dim];
    let mut state = vec![0.0; heads * dim * dim];
    for head in 0..heads {
        let weight = |distance: usize| (-f64::from(i.slopes[head]) * distance as f64).exp();
        for token in 0..tokens {
            for earlier in 0..=token {
                let score: f64 = (0..dim)
                    .map(|d| at(i.query, token, head, d) * at(i.key, earlier, head, d))
                    .sum();
                for d in 0..dim {
                    output[(token * heads + head) * dim + d] +=
                        weight(token - earlier) * score * at(i.value, earlier, head, d);
                }
            }
            for v in 0..dim {
                for k in 0..dim {
                    state[(head * dim + v) * dim + k] += weight(tokens - 1 - token)
                        * at(i.key, token, head, k)
                        * at(i.value, token, head, v);
                }
            }
        }
    }
    (output, state)
}
