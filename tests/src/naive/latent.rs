//! Latent attention by its definition: every head's keys and values are made of the latents anew, in f64.

use timetable_device::cpu::mla::{LatentInputs, LatentSizes};

/// One request's latents and rotated keys.
#[derive(Clone, Default)]
pub(super) struct Latents {
    latents: Vec<f32>,
    keys: Vec<f32>,
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
    products.sum()
}

impl Latents {
    /// The rows from `first`, `tokens` of them, go on where the request's last row ended.
    pub(super) fn attend(
        &mut self,
        sizes: &LatentSizes,
        inputs: &LatentInputs<'_>,
        (first, tokens): (usize, usize),
        out: &mut [f32],
    ) {
        let (rank, rotated) = (sizes.kv_lora_rank, sizes.qk_rope_head_dim);
        let (nope, value) = (sizes.qk_nope_head_dim, sizes.v_head_dim);
        let past = self.latents.len() / rank;
        let rows = first..first + tokens;
        self.latents
            .extend_from_slice(&inputs.kv_c_normed[rows.start * rank..rows.end * rank]);
        self.keys
            .extend_from_slice(&inputs.k_pe[rows.start * rotated..rows.end * rotated]);
        for head in 0..sizes.num_heads {
            let weights = &inputs.kv_b_proj[head * (nope + value) * rank..];
            let made = |token: usize, row: usize| {
                let latent = &self.latents[token * rank..][..rank];
                dot(&weights[row * rank..][..rank], latent)
            };
            for (index, row) in rows.clone().enumerate() {
                let at = row * sizes.num_heads + head;
                let q = &inputs.q[at * sizes.qk_head_dim()..][..sizes.qk_head_dim()];
                let scores = (0..past + index + 1).map(|token| {
                    let key = (0..nope).map(|i| made(token, i) * f64::from(q[i]));
                    let rotary = dot(&q[nope..], &self.keys[token * rotated..][..rotated]);
                    (key.sum::<f64>() + rotary) * f64::from(sizes.scale)
                });
                let scores: Vec<f64> = scores.collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (i, out) in out[at * value..][..value].iter_mut().enumerate() {
                    let values = weights.iter().enumerate();
                    let sum: f64 = values.map(|(token, w)| w * made(token, nope + i)).sum();
                    *out = (sum / total) as f32;
                }
            }
        }
    }
}
