//! Mamba2 and the gated delta net token by token, as their papers state the recurrences, in f64.

use timetable_device::cpu::mamba::{
    GdnConfig, GdnInputs, Mamba2Config, Mamba2Inputs, MambaConfig, MambaInputs,
};

/// What the gated delta net's L2 norm adds to the sum of squares.
const L2_EPS: f64 = 1e-6;

/// One request's state.
#[derive(Clone, Default)]
pub(super) struct State {
    /// Every input of the convolution so far, `[tokens, channels]`.
    inputs: Vec<f32>,
    /// `[heads, head, state]`, or `[value heads, value, key]`; empty before the first token.
    state: Vec<f64>,
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

impl State {
    /// The rows from `first`, `tokens` of them, go on where the request's last row ended.
    pub(super) fn recur(
        &mut self,
        config: &MambaConfig,
        inputs: &MambaInputs<'_>,
        (first, tokens): (usize, usize),
        out: &mut [f32],
    ) {
        let width = config.output_size();
        for row in first..first + tokens {
            let out = &mut out[row * width..][..width];
            match (config, inputs) {
                (MambaConfig::Mamba2(sizes), MambaInputs::Mamba2(inputs)) => {
                    self.mamba2(sizes, inputs, row, out);
                }
                (MambaConfig::Gdn(sizes), MambaInputs::Gdn(inputs)) => {
                    self.gdn(sizes, inputs, row, out);
                }
                _ => panic!("inputs of another recurrence"),
            }
        }
    }

    /// Takes a token's channels and gives them convolved and activated.
    fn convolved(&mut self, token: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f64> {
        let channels = token.len();
        let taps = weight.len() / channels;
        self.inputs.extend_from_slice(token);
        let seen = self.inputs.len() / channels;
        let channel = |c: usize| {
            let products = (0..taps.min(seen)).map(|back| {
                let input = self.inputs[(seen - 1 - back) * channels + c];
                f64::from(input) * f64::from(weight[(c + 1) * taps - 1 - back])
            });
            let bias = bias.map_or(0.0, |bias| f64::from(bias[c]));
            silu(products.sum::<f64>() + bias)
        };
        (0..channels).map(channel).collect()
    }

    fn mamba2(
        &mut self,
        sizes: &Mamba2Config,
        inputs: &Mamba2Inputs<'_>,
        row: usize,
        out: &mut [f32],
    ) {
        let Mamba2Config {
            num_heads,
            head_dim,
            n_groups,
            state_size,
            time_step_limit: (low, high),
            ..
        } = *sizes;
        let channels = num_heads * head_dim + 2 * n_groups * state_size;
        let token = &inputs.hidden_states_b_c[row * channels..][..channels];
        let convolved = self.convolved(token, inputs.conv_weight, inputs.conv_bias);
        let (x, bc) = convolved.split_at(num_heads * head_dim);
        let (b, c) = bc.split_at(n_groups * state_size);
        self.state.resize(num_heads * head_dim * state_size, 0.0);
        for head in 0..num_heads {
            let dt = f64::from(inputs.dt[row * num_heads + head]) + f64::from(inputs.dt_bias[head]);
            let dt = softplus(dt).clamp(f64::from(low), f64::from(high));
            let decay = (dt * f64::from(inputs.a[head])).exp();
            let group = head / (num_heads / n_groups) * state_size;
            for i in 0..head_dim {
                let at = head * head_dim + i;
                let state = &mut self.state[at * state_size..][..state_size];
                let mut y = f64::from(inputs.d[head]) * x[at];
                for (n, state) in state.iter_mut().enumerate() {
                    *state = *state * decay + dt * b[group + n] * x[at];
                    y += *state * c[group + n];
                }
                out[at] = y as f32;
            }
        }
    }

    fn gdn(&mut self, sizes: &GdnConfig, inputs: &GdnInputs<'_>, row: usize, out: &mut [f32]) {
        let GdnConfig {
            num_k_heads,
            num_v_heads,
            head_k_dim,
            head_v_dim,
            ..
        } = *sizes;
        let keys = num_k_heads * head_k_dim;
        let channels = 2 * keys + num_v_heads * head_v_dim;
        let token = &inputs.mixed_qkv[row * channels..][..channels];
        let convolved = self.convolved(token, inputs.conv_weight, None);
        let unit = |x: &[f64]| -> Vec<f64> {
            let length = (x.iter().map(|x| x * x).sum::<f64>() + L2_EPS).sqrt();
            x.iter().map(|x| x / length).collect()
        };
        self.state
            .resize(num_v_heads * head_v_dim * head_k_dim, 0.0);
        for head in 0..num_v_heads {
            let number = |values: &[f32]| f64::from(values[row * num_v_heads + head]);
            let beta = 1.0 / (1.0 + (-number(inputs.b)).exp());
            let dt = softplus(number(inputs.a) + f64::from(inputs.dt_bias[head]));
            let decay = (-f64::from(inputs.a_log[head]).exp() * dt).exp();
            let of_key = head / (num_v_heads / num_k_heads) * head_k_dim;
            let q = unit(&convolved[of_key..][..head_k_dim]);
            let k = unit(&convolved[keys + of_key..][..head_k_dim]);
            for i in 0..head_v_dim {
                let at = head * head_v_dim + i;
                let v = convolved[2 * keys + at];
                let state = &mut self.state[at * head_k_dim..][..head_k_dim];
                state.iter_mut().for_each(|state| *state *= decay);
                let remembered: f64 = state.iter().zip(&k).map(|(s, k)| s * k).sum();
                let change = (v - remembered) * beta;
                for (state, k) in state.iter_mut().zip(&k) {
                    *state += change * k;
                }
                let y: f64 = state.iter().zip(&q).map(|(s, q)| s * q).sum();
                out[at] = (y / (head_k_dim as f64).sqrt()) as f32;
            }
        }
    }
}
