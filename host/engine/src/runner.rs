//! What the step loop asks of a model: its sizes, and one forward pass.

use crate::model::{AttentionLayers, Model, ModelConfig, ModelError};

/// A model that the engine can drive.
pub trait ModelRunner: Send {
    /// Its sizes.
    fn config(&self) -> &ModelConfig;

    /// As [`Model::forward`].
    fn forward(
        &mut self,
        tokens: &[u32],
        positions: &[i64],
        attn: &mut dyn AttentionLayers,
        logits_rows: &[usize],
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError>;
}

impl ModelRunner for Model {
    fn config(&self) -> &ModelConfig {
        Model::config(self)
    }

    fn forward(
        &mut self,
        tokens: &[u32],
        positions: &[i64],
        attn: &mut dyn AttentionLayers,
        logits_rows: &[usize],
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        Model::forward(self, tokens, positions, attn, logits_rows, logits)
    }
}

/// A model whose every next token is 0 and that computes nothing, attention included: what remains of a step is the host's
/// work. For benchmarks.
pub struct NullModel {
    config: ModelConfig,
}

impl NullModel {
    /// With the sizes of `config`. Its vocabulary should be small: logits are written.
    pub fn new(config: ModelConfig) -> Self {
        Self { config }
    }
}

impl ModelRunner for NullModel {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn forward(
        &mut self,
        _tokens: &[u32],
        _positions: &[i64],
        _attn: &mut dyn AttentionLayers,
        logits_rows: &[usize],
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        logits.clear();
        logits.resize(logits_rows.len() * self.config.vocab_size, 0.0);
        Ok(())
    }
}
