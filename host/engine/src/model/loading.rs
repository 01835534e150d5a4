//! What reads a model's tensors into the forms that its layers compute with. Knows no layer.

use super::Weights;
use super::config::ModelConfig;
use super::error::ModelError;
use super::layout::Vector;
use super::linear::{Part, Projection};
use super::weights::Checkpoint;

/// A checkpoint, what it describes, and the form of its weights.
#[derive(Clone, Copy)]
pub(super) struct Loading<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) checkpoint: &'a dyn Checkpoint,
    pub(super) weights: Weights,
}

impl Loading<'_> {
    /// One or several stacked matrices of `k` columns.
    pub(super) fn projection(&self, k: usize, parts: &[Part]) -> Result<Projection, ModelError> {
        Projection::load(self.checkpoint, self.weights, k, parts)
    }

    /// One matrix of `k` columns.
    pub(super) fn matrix(&self, k: usize, part: &Part) -> Result<Projection, ModelError> {
        self.projection(k, std::slice::from_ref(part))
    }

    /// A tensor of any shape, as f32.
    pub(super) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        Ok(self.checkpoint.expect(name, shape)?.to_f32())
    }

    /// A vector as it is.
    pub(super) fn vector(&self, vector: &Vector) -> Result<Vec<f32>, ModelError> {
        self.tensor(&vector.name, &[vector.len])
    }

    /// The weights of a norm, with the family's offset.
    pub(super) fn norm(&self, vector: &Vector) -> Result<Vec<f32>, ModelError> {
        let mut weights = self.vector(vector)?;
        let offset = self.config.traits.norm_offset;
        if offset != 0.0 {
            weights.iter_mut().for_each(|weight| *weight += offset);
        }
        Ok(weights)
    }
}
