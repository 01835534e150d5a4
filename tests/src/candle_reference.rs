//! The default model as candle-transformers computes it: the reference for logits.

use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Result, Tensor};
use candle_transformers::models::quantized_llama::ModelWeights;
use std::path::Path;
use std::sync::Once;

/// Whether candle multiplies the file's quantised blocks or the weights dequantised to f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CandleWeights {
    /// As in the file.
    Quantised,
    /// Dequantised. Candle reads this from the environment once per thread, so a process uses one form only.
    F32,
}

/// candle's llama, with its own KV cache of one request.
pub struct CandleLlama(ModelWeights);

impl CandleLlama {
    /// Loads a GGUF file.
    pub fn load(path: &Path, weights: CandleWeights) -> Result<Self> {
        static DEQUANTISE: Once = Once::new();
        if weights == CandleWeights::F32 {
            // SAFETY: written once, before candle is used; nothing in these processes reads the environment through C.
            DEQUANTISE.call_once(|| unsafe { std::env::set_var("CANDLE_DEQUANTIZE_ALL", "1") });
        }
        let mut file = std::fs::File::open(path)?;
        let content = Content::read(&mut file)?;
        ModelWeights::from_gguf(content, &mut file, &Device::Cpu).map(Self)
    }

    /// Feeds one token at a position (0 starts a new request) and returns its logits.
    pub fn step(&mut self, token: u32, position: usize) -> Result<Vec<f32>> {
        let input = Tensor::new(&[token], &Device::Cpu)?.unsqueeze(0)?;
        self.0.forward(&input, position)?.squeeze(0)?.to_vec1()
    }

    /// Starts a new request with `tokens`, fed at once, and returns the logits after the last.
    pub fn prefill(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let input = Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?;
        self.0.forward(&input, 0)?.squeeze(0)?.to_vec1()
    }

    /// Logits after each of `tokens`, fed one by one.
    pub fn teacher_forced(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
        tokens
            .iter()
            .enumerate()
            .map(|(i, t)| self.step(*t, i))
            .collect()
    }
}

/// How two rows of logits compare.
#[derive(Debug, Clone, Copy)]
pub struct RowComparison {
    /// Largest absolute difference.
    pub max_difference: f32,
    /// Whether both have their maximum at the same token.
    pub same_argmax: bool,
    /// Distance of the reference's two largest logits: a tie is near if it is small.
    pub reference_gap: f32,
}

/// Compares a row with the reference's.
pub fn compare(reference: &[f32], row: &[f32]) -> RowComparison {
    assert_eq!(reference.len(), row.len(), "rows of one vocabulary");
    let max_difference = reference
        .iter()
        .zip(row)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    let best = argmax(reference);
    let second = reference
        .iter()
        .enumerate()
        .filter(|(i, _)| *i != best)
        .map(|(_, v)| *v)
        .fold(f32::MIN, f32::max);
    RowComparison {
        max_difference,
        same_argmax: best == argmax(row),
        reference_gap: reference[best] - second,
    }
}

/// Index of the largest value, the lowest on ties.
pub fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in row.iter().enumerate() {
        if *v > row[best] {
            best = i;
        }
    }
    best
}

/// Where `cargo xtask` puts the default model, if it has been fetched; `TIMETABLE_MODEL_DIR` overrides the directory.
pub fn default_model() -> Option<std::path::PathBuf> {
    let name = "SmolLM2-135M-Instruct.Q4_1.gguf";
    let dir = std::env::var_os("TIMETABLE_MODEL_DIR").map_or_else(
        || crate::drive::tests_dir().join("../target/models"),
        std::path::PathBuf::from,
    );
    let path = dir.join(name);
    path.exists().then_some(path)
}
