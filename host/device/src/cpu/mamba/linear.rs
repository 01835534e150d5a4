//! Lightning attention, one head: S ← e^(−slope) S + k ⊗ v and o = q·S. It must never know states' ids.
//!
//! vLLM `lightning_attention` and `linear_decode_forward_triton`.

use super::{
    LinearConfig, LinearInputs,
    numbers::{add, fma},
    recurrence::Recurrence,
    step::Place,
};

pub(super) struct Head<'a> {
    pub config: &'a LinearConfig,
    pub inputs: &'a LinearInputs<'a>,
    pub head: usize,
    /// f64 [T, head_dim]
    pub output: &'a mut [f64],
}

impl Recurrence for Head<'_> {
    const TILE: usize = 1;

    #[inline(always)]
    fn advance<const FMA: bool>(&mut self, state: &mut [f64], places: &[Place]) {
        let LinearConfig {
            num_heads,
            head_dim,
        } = *self.config;
        let decay = (-f64::from(self.inputs.slopes[self.head])).exp();
        for place in places {
            let token = place.token as usize;
            let first = (token * num_heads + self.head) * head_dim;
            let LinearInputs {
                query, key, value, ..
            } = self.inputs;
            let (q, k) = (&query[first..][..head_dim], &key[first..][..head_dim]);
            let v = &value[first..][..head_dim];
            let out = &mut self.output[token * head_dim..][..head_dim];
            out.fill(0.0);
            for ((row, &k), &q) in state.chunks_exact_mut(head_dim).zip(k).zip(q) {
                for (s, &v) in row.iter_mut().zip(v) {
                    *s = fma::<FMA>(k.into(), v.into(), decay * *s);
                }
                add::<FMA>(out, q.into(), row);
            }
        }
    }
}
