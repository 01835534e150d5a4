//! The model's layers other than attention: loading, and the forward pass of a flat batch of tokens.
//!
//! A step's tokens, of however many requests, arrive concatenated; each projection is one product over all of them.
//! Attention is the caller's: once per layer the model hands over queries, keys and values and takes the output. This
//! module must never know requests, block tables, slots or backends, and never samples.

mod config;
mod decoder;
mod dense;
mod error;
mod experts;
mod families;
mod feed_forward;
pub(crate) mod files;
pub(crate) mod gguf;
pub(crate) mod layout;
pub(crate) mod linear;
mod loading;
mod mixers;
mod ops;
mod pool;
pub(crate) mod rope;
mod safetensors;
#[cfg(test)]
pub(crate) mod testing;
mod tiles;
mod tiles_x86;
mod traits;
pub(crate) mod weights;

pub use config::{Architecture, Mixer, ModelConfig, RopeConfig, RopeScaling, RopeStyle};
pub use decoder::Model;
pub use error::{AttentionError, ModelError};
pub use traits::{Activation, ExpertsConfig, FeedForward, HeadNorm, Routing, Temperature, Traits};

use std::path::Path;

use timetable_device::cpu::{mamba::MambaInputs, mla::LatentInputs};

/// The form in which weights are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Weights {
    /// As in the file: quantised blocks stay quantised and activations are quantised to meet them; 16-bit floats are
    /// widened to f32.
    #[default]
    Auto,
    /// Everything dequantised to f32: larger, slower, and comparable with a float reference.
    F32,
}

/// How to load a model.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadOptions {
    /// The form of the weights.
    pub weights: Weights,
    /// Threads of the forward pass, the caller's included; `None`: one per available core.
    pub threads: Option<usize>,
}

/// Attention over the caller's KV cache.
pub trait AttentionLayers {
    /// Called once per layer, in order: stores this step's keys and values and attends.
    ///
    /// All slices are row-major over the step's tokens: `q` and `out` are `[num_tokens, heads · head_dim]`, `k` and `v`
    /// `[num_tokens, kv_heads · head_dim]`, f32, rotated already. `out` arrives with unspecified contents and must be
    /// written whole.
    ///
    /// # Errors
    /// Whatever the implementation cannot do; the step fails with it.
    fn attend(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), AttentionError>;

    /// As [`AttentionLayers::attend`], for a layer of latent attention: `out` is `[num_tokens, heads · v_head_dim]`.
    ///
    /// # Errors
    /// [`NotHere`] unless overridden; as `attend`.
    fn attend_latent(
        &mut self,
        _layer: usize,
        _inputs: &LatentInputs<'_>,
        _out: &mut [f32],
    ) -> Result<(), AttentionError> {
        Err(Box::new(NotHere("latent attention")))
    }

    /// As [`AttentionLayers::attend`], for a recurrent layer: each request's state goes on from where its last token left it.
    /// `out` is `[num_tokens, output size]`.
    ///
    /// # Errors
    /// [`NotHere`] unless overridden; as `attend`.
    fn recur(
        &mut self,
        _layer: usize,
        _inputs: &MambaInputs<'_>,
        _out: &mut [f32],
    ) -> Result<(), AttentionError> {
        Err(Box::new(NotHere("a recurrence")))
    }
}

/// A layer needs what its executor does not compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the layer needs {0}, which this executor does not compute; run the model on the CPU device (--device cpu)"
)]
pub struct NotHere(pub &'static str);

/// What a model path points to.
pub(crate) enum Source {
    /// A GGUF file.
    Gguf(gguf::GgufFile),
    /// A Hugging Face directory; holds nothing, each part is read when needed.
    HuggingFace,
}

impl Source {
    /// Decides by content: a directory with a `config.json`, or a file with GGUF's magic.
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let metadata = std::fs::metadata(path).map_err(|e| ModelError::io(path, e))?;
        if metadata.is_dir() {
            if path.join("config.json").exists() {
                return Ok(Self::HuggingFace);
            }
            return Err(ModelError::Corrupt {
                path: path.to_owned(),
                what: "the directory has no config.json".to_owned(),
                remedy: "give a Hugging Face model directory (config.json, safetensors, tokenizer.json) or a GGUF file",
            });
        }
        gguf::GgufFile::open(path).map(Self::Gguf)
    }
}
