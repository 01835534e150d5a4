//! Mamba1's selective scan, some channels of it: with Δ = softplus(dt + bias), h ← e^(Δ a) h + Δ B x and y = C·h + D x, each
//! channel with Δ and a of its own. It must never know states' ids.
//!
//! vLLM `MambaMixer`: `selective_scan_fn` and `selective_state_update`, and the projections between convolution and scan.

use super::{
    Mamba1Config, Mamba1Inputs,
    execute::Convolved,
    numbers::{dot, exp, fma, softplus},
    recurrence::Recurrence,
    step::{Place, Runs},
};
use crate::cpu::kernel::{Simd, Work};

pub(super) struct Channels<'a> {
    pub config: &'a Mamba1Config,
    pub inputs: &'a Mamba1Inputs<'a>,
    pub convolved: Convolved<'a>,
    /// f64 [T, time_step_rank + 2 · state_size]: see `Projection`.
    pub projected: &'a [f64],
    /// The first of them.
    pub first: usize,
    /// f64 [T, width]
    pub output: &'a mut [f64],
    /// `f64 [width]`
    pub delta: &'a mut [f64],
}

/// What dt comes from, then B, then C, of each token that is scanned.
pub(super) struct Projection<'a> {
    pub config: &'a Mamba1Config,
    pub inputs: &'a Mamba1Inputs<'a>,
    pub convolved: Convolved<'a>,
    /// Channels of a unit of the convolution.
    pub unit: usize,
    pub runs: &'a Runs,
    /// Takes one token's channels.
    pub row: &'a mut Vec<f64>,
    /// f64 [T, time_step_rank + 2 · state_size]
    pub projected: &'a mut [f64],
}

impl Work for Projection<'_> {
    #[inline(always)]
    fn run<S: Simd, const FMA: bool>(self) {
        let channels = self.config.intermediate_size;
        let outputs = projected_size(self.config);
        for place in &self.runs.places {
            self.row.clear();
            for first in (0..channels).step_by(self.unit) {
                let width = self.unit.min(channels - first);
                let own = self.convolved.row(first, width, place);
                self.row.extend_from_slice(own);
            }
            let weights = self.inputs.x_proj.chunks_exact(channels);
            let own = &mut self.projected[place.token as usize * outputs..][..outputs];
            for (out, weights) in own.iter_mut().zip(weights) {
                *out = dot::<FMA, f32>(weights, self.row);
            }
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
                let bias = f64::from(self.inputs.dt_bias[channel]);
                *delta = softplus(bias + dot::<FMA, f32>(weights, dt));
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
