//! Multi-head latent attention: the projections to queries and latents, their norms, and the rotation of the parts that have
//! a position.

use super::{MIN_PARALLEL_ROWS, MixerScratch, Step, failed};
use crate::model::{
    AttentionLayers, error::ModelError, layout::LatentLayout, linear::Projection, loading::Loading,
    ops, pool::SharedOut,
};
use timetable_device::cpu::mla::{LatentInputs, LatentSizes};

/// transformers' `DeepseekV2RMSNorm` of the two low ranks, whatever the model's own epsilon.
const LOW_RANK_EPS: f32 = 1e-6;

pub(in crate::model) struct Latent {
    sizes: LatentSizes,
    /// What makes the queries' low rank, and its norm.
    low_rank: Option<(Projection, Vec<f32>)>,
    query: Projection,
    /// The latent, then the key's rotated part.
    kv_a: Projection,
    kv_a_norm: Vec<f32>,
    /// `[heads, nope + value, latent]`: the executor's, which absorbs it or applies it.
    kv_b: Vec<f32>,
    output: Projection,
}

impl Latent {
    pub(super) fn load(
        loading: &Loading<'_>,
        layout: &LatentLayout,
        sizes: LatentSizes,
    ) -> Result<Self, ModelError> {
        let hidden = loading.config.hidden_size;
        let low_rank = match &layout.low_rank {
            Some((part, norm)) => Some((loading.matrix(hidden, part)?, loading.norm(norm)?)),
            None => None,
        };
        let query_in = low_rank.as_ref().map_or(hidden, |(a, _)| a.rows());
        let kv_b = &layout.kv_b;
        Ok(Self {
            sizes,
            low_rank,
            query: loading.matrix(query_in, &layout.query)?,
            kv_a: loading.matrix(hidden, &layout.kv_a)?,
            kv_a_norm: loading.norm(&layout.kv_a_norm)?,
            kv_b: loading.tensor(&kv_b.weight, &[kv_b.n, sizes.kv_lora_rank])?,
            output: loading.matrix(sizes.num_heads * sizes.v_head_dim, &layout.output)?,
        })
    }

    pub(super) fn forward(
        &self,
        step: Step<'_>,
        layer: usize,
        x: &[f32],
        attn: &mut dyn AttentionLayers,
        s: &mut MixerScratch,
        out: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let (pool, m) = (step.pool, step.positions.len());
        match &self.low_rank {
            Some((a, norm)) => {
                a.forward(pool, m, x, &mut s.projection, &mut s.projected)?;
                ops::rms_norm(pool, &s.projected, norm, LOW_RANK_EPS, &mut s.gate);
                self.query
                    .forward(pool, m, &s.gate, &mut s.projection, &mut s.q)?;
            }
            None => self
                .query
                .forward(pool, m, x, &mut s.projection, &mut s.q)?,
        }
        self.kv_a
            .forward(pool, m, x, &mut s.projection, &mut s.projected)?;
        self.split_latents(step, s);
        let width = self.sizes.num_heads * self.sizes.v_head_dim;
        s.attended.resize(m * width, 0.0);
        let inputs = LatentInputs {
            q: &s.q,
            kv_c_normed: &s.k,
            k_pe: &s.v,
            kv_b_proj: &self.kv_b,
        };
        attn.attend_latent(layer, &inputs, &mut s.attended)
            .map_err(failed(layer))?;
        self.output
            .forward(pool, m, &s.attended, &mut s.projection, out)
    }

    /// Takes the latents apart from the rotated keys, norms the former, and rotates the latter and the queries' last part.
    fn split_latents(&self, step: Step<'_>, s: &mut MixerScratch) {
        let sizes = &self.sizes;
        let (rank, rotated) = (sizes.kv_lora_rank, sizes.qk_rope_head_dim);
        let q_width = sizes.num_heads * sizes.qk_head_dim();
        let width = sizes.head_size();
        let m = step.positions.len();
        s.k.resize(m * rank, 0.0);
        s.v.resize(m * rotated, 0.0);
        let (q, latents, keys) = (
            SharedOut::new(&mut s.q),
            SharedOut::new(&mut s.k),
            SharedOut::new(&mut s.v),
        );
        let projected = &s.projected;
        let rope = &step.ropes.global;
        step.pool.run(m, MIN_PARALLEL_ROWS, &|rows| {
            for i in rows {
                // SAFETY: one row each of three buffers.
                let (q, latent, key) = unsafe {
                    (
                        q.slice(i * q_width..(i + 1) * q_width),
                        latents.slice(i * rank..(i + 1) * rank),
                        keys.slice(i * rotated..(i + 1) * rotated),
                    )
                };
                let row = &projected[i * width..(i + 1) * width];
                latent.copy_from_slice(&row[..rank]);
                ops::rms_norm_head(latent, &self.kv_a_norm, LOW_RANK_EPS);
                key.copy_from_slice(&row[rank..]);
                rope.rotate(i, key);
                for head in q.chunks_exact_mut(sizes.qk_head_dim()) {
                    rope.rotate(i, &mut head[sizes.qk_nope_head_dim..]);
                }
            }
        });
    }
}
