//! Mamba1's selective scan, some channels of it: with Δ = softplus(dt + bias), h ← e^(Δ a) h + Δ B x and y = C·h + D x, each
//! channel with Δ and a of its own. It must never know states' ids.
//!
//! vLLM `MambaMixer`: `selective_scan_fn` and `selective_state_update`, and the projections between convolution and scan.

use super::{
    Mamba1Config, Mamba1Inputs,
    execute::Convolved,
    numbers::{exp, fma, softplus},
    recurrence::Recurrence,
    step::{Place, Runs},
};

pub(super) struct Channels<'a> {
    pub config: &'a Mamba1Config,
    pub inputs: &'a Mamba1Inputs<'a>,
    pub convolved: Convolved<'a>,
    /// f64 [T, time_step_rank + 2 · state_size]: see `project`.
    pub projected: &'a [f64],
    /// The first of them.
    pub first: usize,
    /// f64 [T, width]
    pub output: &'a mut [f64],
    /// f64 [width]
    pub delta: &'a mut [f64],
}

/// What dt comes from, then B, then C, of each token that is scanned. `row`: space for one token's channels.
pub(super) fn project(
    config: &Mamba1Config,
    inputs: &Mamba1Inputs<'_>,
    convolved: Convolved<'_>,
    (unit, runs): (usize, &Runs),
    row: &mut Vec<f64>,
    projected: &mut [f64],
) {
    let (channels, outputs) = (config.intermediate_size, projected_size(config));
    for place in &runs.places {
        row.clear();
        for first in (0..channels).step_by(unit) {
            let width = unit.min(channels - first);
            row.extend_from_slice(convolved.row(first, width, place));
        }
        let weights = inputs.x_proj.chunks_exact(channels);
        let own = &mut projected[place.token as usize * outputs..][..outputs];
        for (out, weights) in own.iter_mut().zip(weights) {
            let products = weights.iter().zip(&*row);
            *out = products.map(|(&weight, x)| f64::from(weight) * x).sum();
        }
    }
}

pub(super) fn projected_size(config: &Mamba1Config) -> usize {
    config.time_step_rank + 2 * config.state_size
}

impl Recurrence for Channels<'_> {
    const TILE: usize = 1;

    #[inline(always)]
    fn advance<const FMA: bool>(&mut self, state: &mut [f64], places: &[Place]) {
        let (rank, size) = (self.config.time_step_rank, self.config.state_size);
        let width = self.delta.len();
        for place in places {
            let token = place.token as usize;
            let x = self.convolved.row(self.first, width, place);
            let outputs = rank + 2 * size;
            let own = &self.projected[token * outputs..][..outputs];
            let (dt, b_c) = own.split_at(rank);
            for (channel, delta) in self.delta.iter_mut().enumerate() {
                let channel = self.first + channel;
                let weights = &self.inputs.dt_proj[channel * rank..][..rank];
                let products = weights.iter().zip(dt).map(|(&w, &dt)| f64::from(w) * dt);
                let bias = f64::from(self.inputs.dt_bias[channel]);
                *delta = softplus(bias + products.sum::<f64>());
            }
            let out = &mut self.output[token * width..][..width];
            let d = &self.inputs.d[self.first..][..width];
            for ((out, &d), &x) in out.iter_mut().zip(d).zip(x) {
                *out = f64::from(d) * x;
            }
            for (n, h) in state.chunks_exact_mut(width).enumerate() {
                let (b, c) = (b_c[n], b_c[size + n]);
                for channel in 0..width {
                    let a = f64::from(self.inputs.a[(self.first + channel) * size + n]);
                    let delta = self.delta[channel];
                    let decay = exp::<FMA>(delta * a);
                    h[channel] = fma::<FMA>(decay, h[channel], delta * b * x[channel]);
                    out[channel] = fma::<FMA>(c, h[channel], out[channel]);
                }
            }
        }
    }
}
