//! Tiny random models of the hybrid and latent families, and what transformers computes with them:
//! `tests/peers/tiny_models.py` records both. Knows no test.

use crate::families::{Noise, TinyModel};
use candle_core::{DType, Device, Tensor};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// What the script recorded.
#[derive(Debug, Deserialize)]
pub struct Recorded {
    /// transformers' version.
    pub transformers: String,
    /// Tokens of several requests, shorter and longer than every window and chunk.
    pub prompts: Vec<Vec<u32>>,
    /// Rows of the last prompt whose logits were kept.
    pub rows: Vec<usize>,
    /// The models.
    pub cases: Vec<Case>,
}

/// One model, and what transformers computes with it.
#[derive(Debug, Deserialize)]
pub struct Case {
    /// Family, and what is special.
    pub name: String,
    /// Its `config.json`.
    pub config: Value,
    /// Of its weights.
    pub seed: u64,
    /// Shapes by transformers' names: all tensors of the model.
    pub tensors: BTreeMap<String, Vec<usize>>,
    /// `[rows, vocabulary]`.
    pub logits: Vec<Vec<f32>>,
    /// Greedy tokens after each prompt.
    pub greedy: Vec<Vec<u32>>,
}

impl Recorded {
    /// Reads the record in `tests/vectors`, or the file that `TIMETABLE_TINY_MODELS` names: a fresh one
    /// (`cargo xtask transformers`).
    ///
    /// # Panics
    /// If there is none.
    pub fn load() -> Self {
        let kept = crate::drive::tests_dir().join("vectors/tiny_models.json");
        let path = std::env::var_os("TIMETABLE_TINY_MODELS").map_or(kept, Into::into);
        let text = std::fs::read_to_string(path).expect("the record");
        serde_json::from_str(&text).expect("its form")
    }
}

impl Case {
    /// transformers' `model_type`.
    ///
    /// # Panics
    /// If the configuration has none.
    pub fn family(&self) -> &str {
        self.config["model_type"].as_str().expect("a model type")
    }

    /// Its weights.
    ///
    /// # Panics
    /// If a shape is not a tensor's.
    pub fn model(&self) -> TinyModel {
        let tensors = self.tensors.iter().map(|(name, shape)| {
            let (middle, width) = self.spread(name, shape);
            let mut noise = Noise(fnv1a(&format!("{}/{name}", self.seed)));
            let values = std::iter::repeat_with(|| middle + width * noise.next());
            let values: Vec<f32> = values.take(shape.iter().product()).collect();
            let tensor = Tensor::from_vec(values, shape.as_slice(), &Device::Cpu);
            (name.clone(), tensor.expect("a tensor"))
        });
        TinyModel {
            config: self.config.clone(),
            tensors: tensors.collect(),
        }
    }

    /// Writes the model's directory, without a tokenizer.
    ///
    /// # Panics
    /// If it cannot.
    pub fn write(&self, dir: &Path) {
        self.model()
            .write_hf(dir, DType::F32, 1)
            .expect("the model is written");
    }

    /// As [`Case::write`], with tiny-llama's tokenizer of words, `t0` and on, as far as the vocabulary goes.
    ///
    /// # Panics
    /// If it cannot.
    pub fn write_with_tokenizer(&self, dir: &Path) {
        self.write(dir);
        let words = crate::drive::tiny_llama_dir().join("tokenizer.json");
        let text = std::fs::read_to_string(words).expect("a tokenizer");
        let mut tokenizer: Value = serde_json::from_str(&text).expect("JSON");
        let size = self.config["vocab_size"].as_u64().expect("a size");
        let known = |id: &Value| id.as_u64().is_some_and(|id| id < size);
        let vocabulary = tokenizer["model"]["vocab"].as_object_mut();
        vocabulary.expect("words").retain(|_, id| known(id));
        // Its special ones would be found in other words: `t3` in `t36`.
        tokenizer["added_tokens"] = Value::Array(Vec::new());
        std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).expect("written");
    }

    /// Middle and half width of a tensor's values: activations stay near unit variance.
    fn spread(&self, name: &str, shape: &[usize]) -> (f32, f32) {
        let zero_centred = matches!(self.family(), "gemma3_text" | "qwen3_next")
            && !name.ends_with("linear_attn.norm.weight");
        match shape {
            _ if name.ends_with("norm.weight") => (if zero_centred { 0.0 } else { 1.0 }, 0.5),
            _ if name.ends_with(".A_log") => (0.5, 1.0),
            _ if name.ends_with(".D") => (1.0, 0.5),
            [_] => (0.0, 0.5),
            // Gemma multiplies them by the root of the hidden size.
            _ if name.contains("embed_tokens") => match self.family() {
                "gemma3_text" => (0.0, 0.125),
                _ => (0.0, 1.0),
            },
            // Experts in one tensor are transposed; all others are [outputs, inputs], a convolution's [channels, 1, taps].
            [_, inputs, _] if name.contains(".experts.") => (0.0, (3.0 / *inputs as f32).sqrt()),
            [.., inputs] => (0.0, (3.0 / *inputs as f32).sqrt()),
            [] => panic!("{name} has no shape"),
        }
    }
}

/// Fowler, Noll and Vo's hash.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}
