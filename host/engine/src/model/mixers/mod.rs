//! What mixes a layer's tokens, up to and from what the executor keeps: projections, norms, rotations and gates. Caches and
//! states are the caller's; this module must never know requests, blocks or states.

mod attention;
mod latent;
mod recurrent;

use super::AttentionLayers;
use super::config::{Mixer, ModelConfig};
use super::error::ModelError;
use super::layout::MixerLayout;
use super::linear::ProjectionScratch;
use super::loading::Loading;
use super::pool::Pool;
use super::rope::Rope;
use attention::Attention;
use latent::Latent;
use recurrent::Recurrent;

/// Rows from which taking projections apart is shared among threads.
pub(super) const MIN_PARALLEL_ROWS: usize = 16;

/// A layer's mixer.
pub(super) enum MixerWeights {
    Attention(Attention),
    Latent(Latent),
    Recurrent(Recurrent),
}

/// Rotations of a batch.
pub(super) struct Ropes {
    pub(super) global: Rope,
    /// Of the layers with a window, where it is another.
    pub(super) local: Option<Rope>,
}

impl Ropes {
    /// Computes the angles of a batch.
    pub(super) fn prepare(&mut self, positions: &[i64]) {
        self.global.prepare(positions);
        if let Some(local) = &mut self.local {
            local.prepare(positions);
        }
    }
}

/// What the layers of a step share.
#[derive(Clone, Copy)]
pub(super) struct Step<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) pool: &'a Pool,
    pub(super) ropes: &'a Ropes,
    pub(super) positions: &'a [i64],
}

/// Buffers that mixers share, reused from step to step.
#[derive(Default)]
pub(super) struct MixerScratch {
    /// What the first projection makes, before it is taken apart.
    projected: Vec<f32>,
    /// Queries; a recurrence's inputs of its convolution.
    q: Vec<f32>,
    /// Keys; latents; a recurrence's dt, or b.
    k: Vec<f32>,
    /// Values; the latents' rotated keys; a recurrence's a.
    v: Vec<f32>,
    /// What the output is gated with.
    gate: Vec<f32>,
    attended: Vec<f32>,
    projection: ProjectionScratch,
}

impl MixerWeights {
    pub(super) fn load(
        loading: &Loading<'_>,
        layout: &MixerLayout,
        layer: usize,
    ) -> Result<Self, ModelError> {
        Ok(match (layout, loading.config.mixer(layer)) {
            (MixerLayout::Attention(layout), Mixer::Attention { sliding_window, .. }) => {
                Self::Attention(Attention::load(loading, layout, layer, sliding_window)?)
            }
            (MixerLayout::Latent(layout), Mixer::Latent(sizes)) => {
                Self::Latent(Latent::load(loading, layout, sizes)?)
            }
            (MixerLayout::Recurrent(layout), Mixer::Recurrent(_)) => {
                Self::Recurrent(Recurrent::load(loading, layout)?)
            }
            _ => unreachable!("the layout follows the configuration"),
        })
    }

    /// `out[tokens, hidden]` of `x[tokens, hidden]`; `out` is resized.
    ///
    /// # Errors
    /// What `attn` cannot do.
    pub(super) fn forward(
        &self,
        step: Step<'_>,
        layer: usize,
        x: &[f32],
        attn: &mut dyn AttentionLayers,
        s: &mut MixerScratch,
        out: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        match self {
            Self::Attention(mixer) => mixer.forward(step, layer, x, attn, s, out),
            Self::Latent(mixer) => mixer.forward(step, layer, x, attn, s, out),
            Self::Recurrent(mixer) => mixer.forward(step, layer, x, attn, s, out),
        }
    }
}

/// Says which layer's attention failed.
fn failed(layer: usize) -> impl FnOnce(super::AttentionError) -> ModelError {
    move |source| ModelError::Attention { layer, source }
}
