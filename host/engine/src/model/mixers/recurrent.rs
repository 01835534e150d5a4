//! Mamba2 and the gated delta net: the projections to what their convolution and recurrence read, and the gated norm of what
//! they give.

use super::{MIN_PARALLEL_ROWS, MixerScratch, Step, failed};
use crate::model::{
    AttentionLayers,
    error::ModelError,
    layout::{Recurrence, RecurrentLayout},
    linear::Projection,
    loading::Loading,
    ops,
    pool::SharedOut,
};
use timetable_device::cpu::mamba::{
    GdnConfig, GdnInputs, Mamba2Config, Mamba2Inputs, MambaConfig, MambaInputs,
};

pub(in crate::model) struct Recurrent {
    recurrence: Recurrence,
    sizes: MambaConfig,
    /// All inputs side by side, in the checkpoint's order.
    inputs: Projection,
    /// `[channels, taps]`
    conv_weight: Vec<f32>,
    conv_bias: Option<Vec<f32>>,
    a_log: Vec<f32>,
    /// `−e^A_log`
    a: Vec<f32>,
    /// Empty for the gated delta net.
    d: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
    output: Projection,
}

impl Recurrent {
    pub(super) fn load(
        loading: &Loading<'_>,
        layout: &RecurrentLayout,
    ) -> Result<Self, ModelError> {
        let recurrence = layout.recurrence;
        let sizes = recurrence.config();
        let taps = match recurrence {
            Recurrence::Mamba2(sizes) => sizes.conv_kernel,
            Recurrence::Gdn(sizes) => sizes.conv_kernel,
        };
        let optional = |vector| Option::map(vector, |vector| loading.vector(vector)).transpose();
        let a_log = loading.vector(&layout.a_log)?;
        Ok(Self {
            recurrence,
            inputs: loading.projection(loading.config.hidden_size, &layout.inputs)?,
            conv_weight: loading.tensor(&layout.conv_weight, &[sizes.conv_dim(), 1, taps])?,
            conv_bias: optional(layout.conv_bias.as_ref())?,
            a: a_log.iter().map(|a| -a.exp()).collect(),
            a_log,
            d: optional(layout.d.as_ref())?.unwrap_or_default(),
            dt_bias: loading.vector(&layout.dt_bias)?,
            // The gated norm is the one that no family keeps around zero.
            norm: loading.vector(&layout.norm)?,
            output: loading.matrix(sizes.output_size(), &layout.output)?,
            sizes,
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
        self.inputs
            .forward(pool, m, x, &mut s.projection, &mut s.projected)?;
        match self.recurrence {
            Recurrence::Mamba2(sizes) => self.split_mamba2(step, &sizes, s),
            Recurrence::Gdn(sizes) => self.split_gdn(step, &sizes, s),
        }
        let inputs = match self.recurrence {
            Recurrence::Mamba2(_) => MambaInputs::Mamba2(Mamba2Inputs {
                hidden_states_b_c: &s.q,
                dt: &s.k,
                conv_weight: &self.conv_weight,
                conv_bias: self.conv_bias.as_deref(),
                a: &self.a,
                d: &self.d,
                dt_bias: &self.dt_bias,
            }),
            Recurrence::Gdn(_) => MambaInputs::Gdn(GdnInputs {
                mixed_qkv: &s.q,
                b: &s.k,
                a: &s.v,
                conv_weight: &self.conv_weight,
                a_log: &self.a_log,
                dt_bias: &self.dt_bias,
            }),
        };
        s.attended.resize(m * self.sizes.output_size(), 0.0);
        attn.recur(layer, &inputs, &mut s.attended)
            .map_err(failed(layer))?;
        self.gated_norm(step, s);
        self.output
            .forward(pool, m, &s.attended, &mut s.projection, out)
    }

    /// Rows of `[gate, x B C, dt]` into their three buffers.
    fn split_mamba2(&self, step: Step<'_>, sizes: &Mamba2Config, s: &mut MixerScratch) {
        let (inner, channels) = (self.sizes.output_size(), self.sizes.conv_dim());
        let widths = [inner, channels, sizes.num_heads, 0];
        split(step, self.inputs.rows(), widths, s, &|row,
                                                     [
            gate,
            conv,
            dt,
            _,
        ]| {
            gate.copy_from_slice(&row[..inner]);
            conv.copy_from_slice(&row[inner..inner + channels]);
            dt.copy_from_slice(&row[inner + channels..]);
        });
    }

    /// Rows of `[q, k, v, gate]` and then `[b, a]`, both by key head, into all queries, keys and values, gates, b and a.
    fn split_gdn(&self, step: Step<'_>, sizes: &GdnConfig, s: &mut MixerScratch) {
        let (heads, key) = (sizes.num_k_heads, sizes.head_k_dim);
        let ratio = sizes.num_v_heads / heads;
        let value = ratio * sizes.head_v_dim;
        let widths = [
            self.sizes.output_size(),
            self.sizes.conv_dim(),
            sizes.num_v_heads,
            sizes.num_v_heads,
        ];
        split(step, self.inputs.rows(), widths, s, &|row,
                                                     [
            gate,
            conv,
            b,
            a,
        ]| {
            let (qkvz, ba) = row.split_at(heads * 2 * (key + value));
            let (q, rest) = conv.split_at_mut(heads * key);
            let (k, v) = rest.split_at_mut(heads * key);
            for (head, qkvz) in qkvz.chunks_exact(2 * (key + value)).enumerate() {
                let keys = head * key..(head + 1) * key;
                let values = head * value..(head + 1) * value;
                q[keys.clone()].copy_from_slice(&qkvz[..key]);
                k[keys].copy_from_slice(&qkvz[key..2 * key]);
                v[values.clone()].copy_from_slice(&qkvz[2 * key..2 * key + value]);
                gate[values].copy_from_slice(&qkvz[2 * key + value..]);
            }
            for (head, ba) in ba.chunks_exact(2 * ratio).enumerate() {
                let values = head * ratio..(head + 1) * ratio;
                b[values.clone()].copy_from_slice(&ba[..ratio]);
                a[values].copy_from_slice(&ba[ratio..]);
            }
        });
    }

    /// Mamba2: gate, then norm over the whole output. Gated delta net: norm over each head, then gate.
    fn gated_norm(&self, step: Step<'_>, s: &mut MixerScratch) {
        let width = self.sizes.output_size();
        let gate_first = matches!(self.recurrence, Recurrence::Mamba2(_));
        let attended = SharedOut::new(&mut s.attended);
        let gates = &s.gate;
        let eps = step.config.rms_norm_eps;
        step.pool
            .run(step.positions.len(), MIN_PARALLEL_ROWS, &|rows| {
                for i in rows {
                    let range = i * width..(i + 1) * width;
                    // SAFETY: one row each.
                    let out = unsafe { attended.slice(range.clone()) };
                    let gate = &gates[range];
                    if gate_first {
                        ops::silu_gate(out, gate);
                    }
                    for part in out.chunks_exact_mut(self.norm.len()) {
                        ops::rms_norm_head(part, &self.norm, eps);
                    }
                    if !gate_first {
                        ops::silu_gate(out, gate);
                    }
                }
            });
    }
}

/// Takes a row of the projection, and that row of the gate, `q`, `k` and `v`.
type TakeRow<'a> = dyn Fn(&[f32], [&mut [f32]; 4]) + Sync + 'a;

/// Calls `take` with each row of the projection, `width` wide, and that row of the gate, `q`, `k` and `v`, which are resized
/// to rows of `widths`.
fn split(
    step: Step<'_>,
    width: usize,
    widths: [usize; 4],
    s: &mut MixerScratch,
    take: &TakeRow<'_>,
) {
    let m = step.positions.len();
    let mut buffers = [&mut s.gate, &mut s.q, &mut s.k, &mut s.v];
    for (buffer, width) in buffers.iter_mut().zip(widths) {
        buffer.resize(m * width, 0.0);
    }
    let buffers = buffers.map(|buffer| SharedOut::new(buffer));
    let projected = &s.projected;
    step.pool.run(m, MIN_PARALLEL_ROWS, &|rows| {
        for i in rows {
            let parts = std::array::from_fn(|part| {
                let width = widths[part];
                // SAFETY: one row each of four buffers.
                unsafe { buffers[part].slice(i * width..(i + 1) * width) }
            });
            take(&projected[i * width..(i + 1) * width], parts);
        }
    });
}
