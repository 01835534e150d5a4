//! Softmax attention over keys and values: its projections, the norms and rotations of its heads, and its gate.

use super::{MIN_PARALLEL_ROWS, MixerScratch, Step, failed};
use crate::model::{
    AttentionLayers,
    error::ModelError,
    layout::AttentionLayout,
    linear::Projection,
    loading::Loading,
    ops,
    pool::SharedOut,
    rope::Rope,
    traits::{HeadNorm, Temperature},
};

/// Which rotation the heads get.
#[derive(Clone, Copy)]
enum Rotation {
    Global,
    Local,
    /// None; queries are multiplied by the temperature, where the model has one.
    Absent(Option<Temperature>),
}

pub(in crate::model) struct Attention {
    /// Queries, keys and values side by side.
    qkv: Projection,
    /// Over each head of the queries and keys.
    head_norms: Option<(Vec<f32>, Vec<f32>)>,
    /// Whether the norms come after the rotation.
    norms_last: bool,
    output: Projection,
    rotation: Rotation,
}

impl Attention {
    pub(super) fn load(
        loading: &Loading<'_>,
        layout: &AttentionLayout,
        layer: usize,
        sliding_window: Option<usize>,
    ) -> Result<Self, ModelError> {
        let config = loading.config;
        let traits = &config.traits;
        let rotation = match traits.unrotated.get(layer) {
            Some(true) => Rotation::Absent(traits.temperature),
            _ if traits.local_rope.is_some() && sliding_window.is_some() => Rotation::Local,
            _ => Rotation::Global,
        };
        let norms_last = traits.head_norm == HeadNorm::Unweighted;
        let head_norms = match &layout.head_norms {
            Some((q, k)) => Some((loading.norm(q)?, loading.norm(k)?)),
            None if norms_last && !matches!(rotation, Rotation::Absent(_)) => {
                let ones = vec![1.0; config.head_dim];
                Some((ones.clone(), ones))
            }
            None => None,
        };
        Ok(Self {
            qkv: loading.projection(config.hidden_size, &layout.qkv)?,
            head_norms,
            norms_last,
            output: loading.projection(config.q_size(), &layout.output)?,
            rotation,
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
        self.qkv
            .forward(pool, m, x, &mut s.projection, &mut s.projected)?;
        self.split_heads(step, s);
        s.attended.resize(m * step.config.q_size(), 0.0);
        attn.attend(layer, &s.q, &s.k, &s.v, &mut s.attended)
            .map_err(failed(layer))?;
        if step.config.traits.output_gate {
            ops::sigmoid_mul(&mut s.attended, &s.gate);
        }
        self.output
            .forward(pool, m, &s.attended, &mut s.projection, out)
    }

    /// Takes the merged projection apart into `q`, `k`, `v` and the gate, norms the heads where the model does, and rotates
    /// them.
    fn split_heads(&self, step: Step<'_>, s: &mut MixerScratch) {
        let config = step.config;
        let (q_size, kv_size, head_dim) = (config.q_size(), config.kv_size(), config.head_dim);
        let width = self.qkv.rows();
        let m = s.projected.len() / width;
        let gated = config.traits.output_gate;
        s.q.resize(m * q_size, 0.0);
        s.k.resize(m * kv_size, 0.0);
        s.v.resize(m * kv_size, 0.0);
        s.gate.resize(if gated { m * q_size } else { 0 }, 0.0);
        let (q, k, v, gate) = (
            SharedOut::new(&mut s.q),
            SharedOut::new(&mut s.k),
            SharedOut::new(&mut s.v),
            SharedOut::new(&mut s.gate),
        );
        let projected = &s.projected;
        let rope: Option<&Rope> = match self.rotation {
            Rotation::Global => Some(&step.ropes.global),
            Rotation::Local => step.ropes.local.as_ref(),
            Rotation::Absent(_) => None,
        };
        step.pool.run(m, MIN_PARALLEL_ROWS, &|rows| {
            for i in rows {
                // SAFETY: one row each of three buffers.
                let (q, k, v) = unsafe {
                    (
                        q.slice(i * q_size..(i + 1) * q_size),
                        k.slice(i * kv_size..(i + 1) * kv_size),
                        v.slice(i * kv_size..(i + 1) * kv_size),
                    )
                };
                let row = &projected[i * width..(i + 1) * width];
                let (queries, keys_values) = row.split_at(width - 2 * kv_size);
                if gated {
                    // SAFETY: one row of a fourth.
                    let gate = unsafe { gate.slice(i * q_size..(i + 1) * q_size) };
                    let heads = queries.chunks_exact(2 * head_dim);
                    let both = q
                        .chunks_exact_mut(head_dim)
                        .zip(gate.chunks_exact_mut(head_dim));
                    for (head, (q, gate)) in heads.zip(both) {
                        q.copy_from_slice(&head[..head_dim]);
                        gate.copy_from_slice(&head[head_dim..]);
                    }
                } else {
                    q.copy_from_slice(queries);
                }
                k.copy_from_slice(&keys_values[..kv_size]);
                v.copy_from_slice(&keys_values[kv_size..]);
                if let Rotation::Absent(Some(temperature)) = self.rotation {
                    let factor = temperature.factor(step.positions[i]);
                    q.iter_mut().for_each(|value| *value *= factor);
                }
                let norms = self.head_norms.as_ref();
                for (heads, norm) in [(q, norms.map(|n| &n.0)), (k, norms.map(|n| &n.1))] {
                    for head in heads.chunks_exact_mut(head_dim) {
                        let rotate = |head: &mut [f32]| {
                            if let Some(rope) = rope {
                                rope.rotate(i, head);
                            }
                        };
                        if self.norms_last {
                            rotate(head);
                        }
                        if let Some(weight) = norm {
                            ops::rms_norm_head(head, weight, config.rms_norm_eps);
                        }
                        if !self.norms_last {
                            rotate(head);
                        }
                    }
                }
            }
        });
    }
}
