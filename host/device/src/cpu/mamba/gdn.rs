//! The gated delta rule, one value head: with k and q of length 1, g = −e^A_log · softplus(a + bias) and β = sigmoid(b),
//! S ← e^g S, S ← S + k ⊗ β (v − k·S) and o = q·S / √d. It must never know states' ids.
//!
//! vLLM `chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule` with `use_qk_l2norm_in_kernel`, `fused_gdn_gating`. A
//! chunk is computed token by token.

use super::{
    GdnConfig, GdnInputs,
    execute::Convolved,
    numbers::{add, dot, fma, softplus},
    recurrence::Recurrence,
    step::Place,
};

pub(super) struct Head<'a> {
    pub config: &'a GdnConfig,
    pub inputs: &'a GdnInputs<'a>,
    pub convolved: Convolved<'a>,
    pub head: usize,
    /// f64 [T, head_v_dim]
    pub output: &'a mut [f64],
    /// `f64 [head_v_dim]`
    pub delta: &'a mut [f64],
}

/// 1 over the length, which is of a vector with √10⁻⁶ beside it.
#[inline(always)]
fn inverse_length<const FMA: bool>(x: &[f64]) -> f64 {
    1.0 / (dot::<FMA, f64>(x, x) + 1e-6).sqrt()
}

impl Recurrence for Head<'_> {
    const TILE: usize = 1;

    #[inline(always)]
    fn advance<const FMA: bool>(&mut self, state: &mut [f64], places: &[Place]) {
        let GdnConfig {
            num_k_heads,
            num_v_heads,
            head_k_dim: k_dim,
            head_v_dim: v_dim,
            ..
        } = *self.config;
        for place in places {
            let k_head = self.head / (num_v_heads / num_k_heads);
            let q = self.convolved.row(k_head * k_dim, k_dim, place);
            let k = self
                .convolved
                .row((num_k_heads + k_head) * k_dim, k_dim, place);
            let first = 2 * num_k_heads * k_dim + self.head * v_dim;
            let v = self.convolved.row(first, v_dim, place);
            let gate = place.token as usize * num_v_heads + self.head;
            let a = f64::from(self.inputs.a[gate]) + f64::from(self.inputs.dt_bias[self.head]);
            let rate = f64::from(self.inputs.a_log[self.head]).exp();
            let decay = (-rate * softplus(a)).exp();
            let beta = 1.0 / (1.0 + (-f64::from(self.inputs.b[gate])).exp());
            let k_scale = inverse_length::<FMA>(k);
            let q_scale = inverse_length::<FMA>(q) / (k_dim as f64).sqrt();
            // k·S before the decay, then what is to be added along k.
            let delta = &mut *self.delta;
            delta.fill(0.0);
            for (row, &k) in state.chunks_exact(v_dim).zip(k) {
                add::<FMA>(delta, k * k_scale, row);
            }
            for (delta, &v) in delta.iter_mut().zip(v) {
                *delta = beta * fma::<FMA>(-decay, *delta, v);
            }
            let out = &mut self.output[place.token as usize * v_dim..][..v_dim];
            out.fill(0.0);
            for ((row, &k), &q) in state.chunks_exact_mut(v_dim).zip(k).zip(q) {
                for (s, &delta) in row.iter_mut().zip(&*delta) {
                    *s = fma::<FMA>(k * k_scale, delta, decay * *s);
                }
                add::<FMA>(out, q * q_scale, row);
            }
        }
    }
}
