//! Feed-forwards: one for all tokens, or a mixture of experts. Knows no attention.

use super::error::ModelError;
use super::experts::Experts;
use super::layout::{DenseLayout, FeedForwardLayout};
use super::linear::{Projection, ProjectionScratch};
use super::loading::Loading;
use super::ops;
use super::pool::Pool;
use super::traits::Activation;

/// A layer's feed-forward.
pub(super) enum FeedForward {
    Dense(Dense),
    Experts(Box<Experts>),
}

/// Buffers that feed-forwards share, reused from step to step.
#[derive(Default)]
pub(super) struct FeedForwardScratch {
    pub(super) gate_up: Vec<f32>,
    pub(super) activated: Vec<f32>,
    pub(super) projection: ProjectionScratch,
}

impl FeedForward {
    pub(super) fn load(
        loading: &Loading<'_>,
        layout: &FeedForwardLayout,
        layer: usize,
    ) -> Result<Self, ModelError> {
        Ok(match layout {
            FeedForwardLayout::Dense(dense) => Self::Dense(Dense::load(loading, dense)?),
            FeedForwardLayout::Experts(experts) => {
                Self::Experts(Box::new(Experts::load(loading, experts, layer)?))
            }
        })
    }
}

/// `down(act(gate(x)) · up(x))`.
pub(super) struct Dense {
    /// Gate and up side by side.
    gate_up: Projection,
    down: Projection,
    width: usize,
    activation: Activation,
}

impl Dense {
    pub(super) fn load(loading: &Loading<'_>, layout: &DenseLayout) -> Result<Self, ModelError> {
        let width = layout.gate_up[0].n;
        Ok(Self::new(
            loading.projection(loading.config.hidden_size, &layout.gate_up)?,
            loading.projection(width, &layout.down)?,
            loading.config.traits.activation,
        ))
    }

    pub(super) fn new(gate_up: Projection, down: Projection, activation: Activation) -> Self {
        Self {
            width: gate_up.rows() / 2,
            gate_up,
            down,
            activation,
        }
    }

    /// `out[m, hidden]` of `x[m, hidden]`; `out` is resized.
    pub(super) fn forward(
        &self,
        pool: &Pool,
        m: usize,
        x: &[f32],
        scratch: &mut FeedForwardScratch,
        out: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let FeedForwardScratch {
            gate_up,
            activated,
            projection,
        } = scratch;
        self.gate_up.forward(pool, m, x, projection, gate_up)?;
        match self.activation {
            Activation::Silu => ops::silu_mul(pool, gate_up, self.width, activated),
            Activation::GeluTanh => ops::gelu_mul(pool, gate_up, self.width, activated),
        }
        self.down.forward(pool, m, activated, projection, out)
    }
}
