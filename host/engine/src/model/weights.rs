//! Where weights come from: the view of a checkpoint that the loader needs, whatever its file format.
//!
//! Knows names and shapes of tensors, not what they are multiplied with.

use super::error::ModelError;
use candle_core::CpuStorage;
use candle_core::quantized::GgmlDType;
use std::borrow::Cow;
use std::path::Path;

/// One tensor as it lies in its file.
#[derive(Clone, Copy)]
pub(crate) struct RawTensor<'a> {
    pub(crate) dtype: GgmlDType,
    /// Slowest dimension first.
    pub(crate) shape: &'a [usize],
    /// `shape` elements in `dtype`'s blocks; the length was checked when the file was opened.
    pub(crate) bytes: &'a [u8],
}

impl<'a> RawTensor<'a> {
    /// Element `index` of the slowest dimension, which must exist; of a dtype without blocks.
    pub(crate) fn row(self, index: usize) -> Self {
        let bytes = self.bytes.len() / self.shape[0];
        Self {
            dtype: self.dtype,
            shape: &self.shape[1..],
            bytes: &self.bytes[index * bytes..][..bytes],
        }
    }

    /// All elements as f32.
    pub(crate) fn to_f32(self) -> Vec<f32> {
        let elements = self.shape.iter().product();
        match self.dtype {
            GgmlDType::F32 => {
                let chunks = self.bytes.chunks_exact(4);
                chunks
                    .map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]]))
                    .collect()
            }
            GgmlDType::F16 => {
                let chunks = self.bytes.chunks_exact(2);
                chunks
                    .map(|c| half::f16::from_le_bytes([c[0], c[1]]).to_f32())
                    .collect()
            }
            GgmlDType::BF16 => {
                let chunks = self.bytes.chunks_exact(2);
                chunks
                    .map(|c| half::bf16::from_le_bytes([c[0], c[1]]).to_f32())
                    .collect()
            }
            quantised => match quantised
                .from_data(Cow::Borrowed(self.bytes))
                .dequantize(elements)
            {
                Ok(CpuStorage::F32(values)) => values,
                // candle dequantises block types on the CPU to f32, and the sizes were checked at open.
                _ => unreachable!("candle dequantises {quantised:?} to f32"),
            },
        }
    }
}

/// A set of named tensors.
pub(crate) trait Checkpoint {
    /// What an error message calls it.
    fn path(&self) -> &Path;

    /// The tensor of that name.
    fn tensor(&self, name: &str) -> Option<RawTensor<'_>>;

    /// The tensor, which must be there with exactly this shape.
    fn expect(&self, name: &str, shape: &[usize]) -> Result<RawTensor<'_>, ModelError> {
        let tensor = self.tensor(name).ok_or_else(|| ModelError::MissingTensor {
            path: self.path().to_owned(),
            name: name.to_owned(),
        })?;
        if tensor.shape != shape {
            return Err(ModelError::WrongShape {
                path: self.path().to_owned(),
                name: name.to_owned(),
                found: tensor.shape.to_vec(),
                expected: shape.to_vec(),
            });
        }
        Ok(tensor)
    }
}

/// The two ways in which the field names a decoder's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    /// `blk.0.attn_q.weight`, llama.cpp's.
    Gguf,
    /// `model.layers.0.self_attn.q_proj.weight`, transformers'.
    HuggingFace,
}

/// A tensor's role, independent of naming.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    AttentionNorm,
    Query,
    Key,
    Value,
    Output,
    QueryNorm,
    KeyNorm,
    FeedForwardNorm,
    Gate,
    Up,
    Down,
}

impl Naming {
    /// Name of a layer's tensor; `kind` is `weight` or `bias`.
    pub(crate) fn layer(self, layer: usize, role: Role, kind: &str) -> String {
        let (gguf, hf) = match role {
            Role::AttentionNorm => ("attn_norm", "input_layernorm"),
            Role::Query => ("attn_q", "self_attn.q_proj"),
            Role::Key => ("attn_k", "self_attn.k_proj"),
            Role::Value => ("attn_v", "self_attn.v_proj"),
            Role::Output => ("attn_output", "self_attn.o_proj"),
            Role::QueryNorm => ("attn_q_norm", "self_attn.q_norm"),
            Role::KeyNorm => ("attn_k_norm", "self_attn.k_norm"),
            Role::FeedForwardNorm => ("ffn_norm", "post_attention_layernorm"),
            Role::Gate => ("ffn_gate", "mlp.gate_proj"),
            Role::Up => ("ffn_up", "mlp.up_proj"),
            Role::Down => ("ffn_down", "mlp.down_proj"),
        };
        match self {
            Self::Gguf => format!("blk.{layer}.{gguf}.{kind}"),
            Self::HuggingFace => format!("model.layers.{layer}.{hf}.{kind}"),
        }
    }

    /// The embedding table `[vocab, hidden]`.
    pub(crate) fn embedding(self) -> &'static str {
        match self {
            Self::Gguf => "token_embd.weight",
            Self::HuggingFace => "model.embed_tokens.weight",
        }
    }

    /// The norm before the output head.
    pub(crate) fn final_norm(self) -> &'static str {
        match self {
            Self::Gguf => "output_norm.weight",
            Self::HuggingFace => "model.norm.weight",
        }
    }

    /// The output head `[vocab, hidden]`; absent when it is tied to the embedding.
    pub(crate) fn head(self) -> &'static str {
        match self {
            Self::Gguf => "output.weight",
            Self::HuggingFace => "lm_head.weight",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        gguf::GgufFile,
        testing::{GgufBuilder, repository_file},
    };
    use super::*;

    /// What `tests/peers/gguf_types.py` recorded: the values that another reader of the format finds in the same bytes.
    #[test]
    fn every_tensor_type_has_the_values_that_gguf_says() {
        let path = repository_file("tests/vectors/gguf_types.json");
        let recorded = std::fs::read(path).expect("it is there");
        let recorded: serde_json::Value = serde_json::from_slice(&recorded).expect("it is JSON");
        let types = recorded["types"].as_array().expect("types");
        assert!(types.len() >= 12);
        for kind in types {
            let hex = kind["bytes"].as_str().expect("hexadecimal");
            let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal");
            let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
            let expected = kind["values"].as_array().expect("values");
            let number = kind["type"].as_u64().expect("a type") as u32;
            let file = GgufBuilder::new()
                .tensor("t", &[1, expected.len()], number, bytes)
                .write();
            let file = GgufFile::open(file.path()).expect("it opens");
            let found = file
                .expect("t", &[1, expected.len()])
                .expect("the tensor")
                .to_f32();
            for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
                let expected = expected.as_f64().expect("a number") as f32;
                let bound = 1e-6 * expected.abs().max(1e-3);
                assert!(
                    (found - expected).abs() <= bound,
                    "{}, value {index}: {found}, not {expected}",
                    kind["name"]
                );
            }
        }
    }
}
