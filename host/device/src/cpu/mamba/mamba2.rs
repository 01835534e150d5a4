//! Mamba2's recurrence, one head: with Δ = softplus(dt + bias), h ← e^(aΔ) h + Δ B ⊗ x and y = C·h + D x. It must never know
//! states' ids.
//!
//! A chunk is computed in tiles, and a tile as structured state space duality has it (Dao and Gu 2024): what its tokens get from
//! the state before it, and from each other as if by attention, with the decay between them as mask; then the state after it.
//! vLLM `mamba_chunk_scan_combined_varlen` and `selective_state_update`.

use super::{
    Mamba2Config, Mamba2Inputs,
    execute::Convolved,
    numbers::{add, dot, softplus},
    recurrence::Recurrence,
    step::Place,
};

const TILE: usize = 32;

pub(super) struct Head<'a> {
    pub config: &'a Mamba2Config,
    pub inputs: &'a Mamba2Inputs<'a>,
    pub convolved: Convolved<'a>,
    pub head: usize,
    /// f64 [T, head_dim]
    pub output: &'a mut [f64],
}

impl<'a> Head<'a> {
    /// `f64 [head_dim]`
    fn x(&self, place: &Place) -> &'a [f64] {
        let size = self.config.head_dim;
        self.convolved.row(self.head * size, size, place)
    }

    /// f64 [state_size]: B (0) or C (1).
    fn shared(&self, which: usize, place: &Place) -> &'a [f64] {
        let Mamba2Config {
            num_heads,
            head_dim,
            n_groups,
            state_size,
            ..
        } = *self.config;
        let group = self.head / (num_heads / n_groups);
        let first = num_heads * head_dim + (which * n_groups + group) * state_size;
        self.convolved.row(first, state_size, place)
    }

    fn delta(&self, place: &Place) -> f64 {
        let (low, high) = self.config.time_step_limit;
        let dt = self.inputs.dt[place.token as usize * self.config.num_heads + self.head];
        let delta = softplus(f64::from(dt) + f64::from(self.inputs.dt_bias[self.head]));
        delta.max(low.into()).min(high.into())
    }
}

impl Recurrence for Head<'_> {
    const TILE: usize = TILE;

    #[inline(always)]
    fn advance<const FMA: bool>(&mut self, state: &mut [f64], places: &[Place]) {
        let size = self.config.head_dim;
        let a = f64::from(self.inputs.a[self.head]);
        let d = f64::from(self.inputs.d[self.head]);
        let (mut x, mut b, mut c) = (
            [[].as_slice(); TILE],
            [[].as_slice(); TILE],
            [[].as_slice(); TILE],
        );
        // Δ of each token, its decay, and the decay from before the tile to behind it.
        let (mut delta, mut decay, mut through) = ([0.0; TILE], [0.0; TILE], [0.0; TILE]);
        let mut whole = 1.0;
        for (index, place) in places.iter().enumerate() {
            x[index] = self.x(place);
            (b[index], c[index]) = (self.shared(0, place), self.shared(1, place));
            delta[index] = self.delta(place);
            decay[index] = (a * delta[index]).exp();
            whole *= decay[index];
            through[index] = whole;
        }
        let own = |place: &Place| place.token as usize * size..(place.token as usize + 1) * size;
        for (place, x) in places.iter().zip(x) {
            let output = &mut self.output[own(place)];
            output.iter_mut().zip(x).for_each(|(y, x)| *y = d * x);
        }
        for (n, h) in state.chunks_exact(size).enumerate() {
            for (index, place) in places.iter().enumerate() {
                add::<FMA>(
                    &mut self.output[own(place)],
                    c[index][n] * through[index],
                    h,
                );
            }
        }
        // Of each token so far, Δ and the decay since.
        let mut weight = [0.0; TILE];
        for (index, place) in places.iter().enumerate() {
            for weight in &mut weight[..index] {
                *weight *= decay[index];
            }
            weight[index] = delta[index];
            for earlier in 0..=index {
                let score = dot::<FMA, f64>(c[index], b[earlier]) * weight[earlier];
                add::<FMA>(&mut self.output[own(place)], score, x[earlier]);
            }
        }
        for (n, h) in state.chunks_exact_mut(size).enumerate() {
            h.iter_mut().for_each(|h| *h *= whole);
            for index in 0..places.len() {
                add::<FMA>(h, b[index][n] * weight[index], x[index]);
            }
        }
    }
}
