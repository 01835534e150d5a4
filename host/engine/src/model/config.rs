//! What a decoder looks like: sizes, heads, position encoding. Read from GGUF metadata or a Hugging Face `config.json`.
//!
//! Knows no weights. Every number is range-checked here, so that later arithmetic on sizes cannot overflow.

use super::error::ModelError;
use super::families;
use super::files;
use super::gguf::GgufFile;
use super::rope::frequencies;
use super::traits::{HeadNorm, Traits};
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;
use timetable_device::cpu::{mamba::MambaConfig, mla::LatentSizes};

/// The families that the decoder computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama, SmolLM, and Mistral in GGUF files.
    Llama,
    /// Llama with a sliding window.
    Mistral,
    /// Llama with biases on the query, key and value projections.
    Qwen2,
    /// Llama with a norm over each query and key head.
    Qwen3,
    /// Latent attention, and experts from some layer on.
    DeepseekV2,
    /// Mamba2 and attention.
    Bamba,
    /// Gated delta net and gated attention, experts.
    Qwen3Next,
    /// Sliding windows and full attention, with different rotations; the text model.
    Gemma3,
    /// Chunks and full attention without rotation, experts; the text model.
    Llama4,
}

impl Architecture {
    /// The names accepted in model files, for messages.
    pub const NAMES: &'static str = "llama, mistral, qwen2, qwen3, and from a Hugging Face directory deepseek_v2, bamba, qwen3_next, gemma3_text, llama4_text";

    /// By GGUF's name.
    fn of_gguf(name: &str, path: &Path) -> Result<Self, ModelError> {
        match name {
            "deepseek2" | "bamba" | "qwen3next" | "gemma3" | "llama4" => Err(unsupported(
                path,
                format!("'{name}' in a GGUF file"),
                "use the model's Hugging Face directory (config.json, safetensors)",
            )),
            name => Self::parse(name, path),
        }
    }

    /// What the layers need that a device for Llama's lacks.
    pub(crate) fn beyond_llama(self) -> Option<&'static str> {
        match self {
            Self::Llama | Self::Mistral | Self::Qwen2 | Self::Qwen3 => None,
            Self::DeepseekV2 => Some("latent attention (MLA) and experts"),
            Self::Bamba => Some("Mamba2 layers"),
            Self::Qwen3Next => Some("gated delta net layers and experts"),
            Self::Gemma3 => Some("norms after each layer and rotations that differ by layer"),
            Self::Llama4 => Some("chunked attention and experts"),
        }
    }

    fn parse(name: &str, path: &Path) -> Result<Self, ModelError> {
        match name {
            "llama" | "smollm" => Ok(Self::Llama),
            "mistral" => Ok(Self::Mistral),
            "qwen2" => Ok(Self::Qwen2),
            "qwen3" => Ok(Self::Qwen3),
            "deepseek_v2" => Ok(Self::DeepseekV2),
            "bamba" => Ok(Self::Bamba),
            "qwen3_next" => Ok(Self::Qwen3Next),
            "gemma3_text" => Ok(Self::Gemma3),
            "llama4_text" => Ok(Self::Llama4),
            "gemma3" | "llama4" => Err(unsupported(
                path,
                format!("the model '{name}', which sees pictures,"),
                "use its text model alone (model_type gemma3_text or llama4_text)",
            )),
            other => Err(ModelError::UnknownArchitecture {
                path: path.to_owned(),
                found: other.to_owned(),
            }),
        }
    }
}

/// Which dimensions of a head are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Pairs (i, i + d/2): transformers' layout, and every Qwen.
    HalfRotation,
    /// Pairs (2i, 2i + 1): GGUF files of the llama architecture, whose query and key rows are permuted to match.
    Interleaved,
}

/// How frequencies are stretched beyond the trained context.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// Llama 3.1's rule: long wavelengths divided by `factor`, short ones kept, blended between.
    Llama3 {
        /// The divisor of long wavelengths.
        factor: f32,
        /// Wavelengths above `original_context / low_freq_factor` are divided.
        low_freq_factor: f32,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f32,
        /// Context length of the original training, in tokens.
        original_context: usize,
    },
}

/// Rotary position encoding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeConfig {
    /// The base of the frequencies.
    pub theta: f32,
    /// Leading dimensions of each head that are rotated; even, at most the head size.
    pub dim: usize,
    /// Pairing of dimensions.
    pub style: RopeStyle,
    /// Context extension.
    pub scaling: RopeScaling,
}

impl RopeConfig {
    /// What is wrong with it for heads of `head_dim`, with the value.
    fn validate(&self, head_dim: usize) -> Result<(), String> {
        if self.dim == 0 || self.dim > head_dim || !self.dim.is_multiple_of(2) {
            return Err(format!(
                "{} rotated dimensions of a head of {head_dim}: must be even and at most the head size",
                self.dim
            ));
        }
        if !(self.theta.is_finite() && self.theta > 0.0) {
            return Err(format!(
                "the RoPE base is {}, not a positive number",
                self.theta
            ));
        }
        let positive = |factor: f32| factor.is_finite() && factor > 0.0;
        let ok = match self.scaling {
            RopeScaling::None => true,
            RopeScaling::Linear { factor } => positive(factor),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                positive(factor)
                    && positive(low_freq_factor)
                    && positive(high_freq_factor)
                    && high_freq_factor > low_freq_factor
                    && original_context > 0
            }
        };
        // A base or a factor near zero: no angle is a number.
        let finite = |frequency: &f32| (frequency * MAX_CONTEXT as f32).is_finite();
        if !ok || !frequencies(self).iter().all(finite) {
            return Err(format!(
                "the RoPE base {} with the scaling {:?} is out of range",
                self.theta, self.scaling
            ));
        }
        Ok(())
    }
}

/// What mixes a layer's tokens, and with what sizes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mixer {
    /// Softmax attention over keys and values, with the model's heads.
    Attention {
        /// Keys that a query sees, itself included.
        sliding_window: Option<usize>,
        /// Tokens of a chunk: a query sees the keys of its own chunk.
        attention_chunk_size: Option<usize>,
    },
    /// Attention over cached latents.
    Latent(LatentSizes),
    /// A recurrence with one state per request.
    Recurrent(MambaConfig),
}

/// A decoder's hyperparameters, in transformers' names.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Longest context that the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f32,
    /// Position encoding.
    pub rope: RopeConfig,
    /// Whether the output head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Whether the projections carry biases (query, key and value; for Llama the output too).
    pub attention_bias: bool,
    /// Keys that a query sees, itself included, in the layers that have a window.
    pub sliding_window: Option<usize>,
    /// First layer that has the window; earlier ones see everything.
    pub first_window_layer: usize,
    /// What mixes the tokens of each layer; empty: attention everywhere, with the window from `first_window_layer` on.
    pub mixers: Vec<Mixer>,
    /// What the layers have that Llama's have not.
    pub traits: Traits,
    /// Tokens that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// The token that begins a text, where the model has one.
    pub bos_token_id: Option<u32>,
}

/// Bounds that no real model reaches and no product of which overflows.
pub(super) const MAX_WIDTH: u64 = 1 << 20;
pub(super) const MAX_LAYERS: u64 = 4096;
pub(super) const MAX_CONTEXT: u64 = 1 << 24;
/// Elements of one of a recurrent layer's two states: 64 MiB. The largest known models' have a sixteenth.
pub(super) const MAX_STATE: u64 = 1 << 24;
/// transformers' `sliding_window` of Mistral, Qwen2 and Qwen3 where a file has none.
const DEFAULT_SLIDING_WINDOW: u64 = 4096;
/// transformers' `max_window_layers` of Qwen2 and Qwen3 where a file has none.
const DEFAULT_MAX_WINDOW_LAYERS: usize = 28;

impl ModelConfig {
    /// The scale of attention scores: `1 / √head_dim`, or of what the family has instead of the head size.
    pub fn attention_scale(&self) -> f32 {
        let size = self.traits.query_pre_attn_scalar;
        1.0 / size.unwrap_or(self.head_dim as f32).sqrt()
    }

    /// The sliding window of one layer, in keys.
    pub fn layer_sliding_window(&self, layer: usize) -> Option<usize> {
        match self.mixer(layer) {
            Mixer::Attention { sliding_window, .. } => sliding_window,
            Mixer::Latent(_) | Mixer::Recurrent(_) => None,
        }
    }

    /// What mixes the tokens of one layer.
    pub fn mixer(&self, layer: usize) -> Mixer {
        self.mixers
            .get(layer)
            .copied()
            .unwrap_or_else(|| Mixer::Attention {
                sliding_window: self
                    .sliding_window
                    .filter(|_| layer >= self.first_window_layer),
                attention_chunk_size: None,
            })
    }

    /// Width of a token's queries: heads × head size.
    pub fn q_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of a token's keys or values: KV heads × head size.
    pub fn kv_size(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Reads GGUF metadata.
    ///
    /// # Errors
    /// A missing or out-of-range key, an unknown architecture, or a feature that is not run (experts, YaRN).
    pub(crate) fn from_gguf(file: &GgufFile) -> Result<Self, ModelError> {
        let path = file.path();
        let name = file.text("general.architecture").ok_or_else(|| {
            ModelError::corrupt(path, "metadata 'general.architecture' is missing")
        })?;
        let architecture = Architecture::of_gguf(&name, path)?;
        let key = |suffix: &str| format!("{name}.{suffix}");
        let optional = |suffix: &str, max: u64| -> Result<Option<usize>, ModelError> {
            file.uint(&key(suffix))
                .map(|v| in_range(path, &key(suffix), v, max))
                .transpose()
        };
        let required = |suffix: &str, max: u64| -> Result<usize, ModelError> {
            optional(suffix, max)?.ok_or_else(|| {
                ModelError::corrupt(
                    path,
                    format!("metadata '{}' is missing or not an integer", key(suffix)),
                )
            })
        };

        if let Some(parts) = file.uint("split.count").filter(|n| *n > 1) {
            return Err(unsupported(
                path,
                format!("one of {parts} parts of a model"),
                "merge the parts into one file (llama-gguf-split --merge)",
            ));
        }
        if let Some(experts) = file.uint(&key("expert_count")).filter(|n| *n > 0) {
            return Err(unsupported(
                path,
                format!("a mixture of {experts} experts"),
                "use a dense model",
            ));
        }
        let hidden_size = required("embedding_length", MAX_WIDTH)?;
        let heads = required("attention.head_count", MAX_WIDTH)?;
        let head_dim = match optional("attention.key_length", MAX_WIDTH)? {
            Some(dim) => dim,
            None => divided_head_dim(path, hidden_size, heads)?,
        };
        let eps = file
            .float(&key("attention.layer_norm_rms_epsilon"))
            .ok_or_else(|| {
                let what = format!(
                    "metadata '{}' is missing",
                    key("attention.layer_norm_rms_epsilon")
                );
                ModelError::corrupt(path, what)
            })?;
        let scaling = match file.text(&key("rope.scaling.type")).as_deref() {
            None | Some("none") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear {
                factor: file.float(&key("rope.scaling.factor")).unwrap_or(1.0) as f32,
            },
            Some(other) => {
                return Err(unsupported(
                    path,
                    format!("RoPE scaling '{other}'"),
                    "use a model without it, or with linear scaling",
                ));
            }
        };
        let embedding = super::weights::Naming::Gguf.embedding();
        let vocab_size = super::weights::Checkpoint::tensor(file, embedding)
            .filter(|t| t.shape.len() == 2)
            .map(|t| t.shape[0])
            .ok_or_else(|| ModelError::MissingTensor {
                path: path.to_owned(),
                name: embedding.to_owned(),
            })?;
        let token = |key: &str| file.uint(key).and_then(|v| u32::try_from(v).ok());
        let mut eos_token_ids: Vec<u32> = ["eos_token_id", "eot_token_id", "eom_token_id"]
            .iter()
            .filter_map(|k| token(&format!("tokenizer.ggml.{k}")))
            .collect();
        eos_token_ids.dedup();
        let config = Self {
            architecture,
            vocab_size: in_range(path, "vocabulary size", vocab_size as u64, MAX_CONTEXT)?,
            hidden_size,
            intermediate_size: required("feed_forward_length", MAX_WIDTH)?,
            num_hidden_layers: required("block_count", MAX_LAYERS)?,
            num_attention_heads: heads,
            num_key_value_heads: optional("attention.head_count_kv", MAX_WIDTH)?.unwrap_or(heads),
            head_dim,
            max_position_embeddings: required("context_length", MAX_CONTEXT)?,
            rms_norm_eps: eps as f32,
            rope: RopeConfig {
                theta: file.float(&key("rope.freq_base")).unwrap_or(10_000.0) as f32,
                dim: optional("rope.dimension_count", MAX_WIDTH)?.unwrap_or(head_dim),
                style: match architecture {
                    Architecture::Llama | Architecture::Mistral => RopeStyle::Interleaved,
                    _ => RopeStyle::HalfRotation,
                },
                scaling,
            },
            tie_word_embeddings: super::weights::Checkpoint::tensor(
                file,
                super::weights::Naming::Gguf.head(),
            )
            .is_none(),
            attention_bias: architecture == Architecture::Qwen2
                || super::weights::Checkpoint::tensor(file, "blk.0.attn_q.bias").is_some(),
            // llama.cpp's 0 is no window.
            sliding_window: file
                .uint(&key("attention.sliding_window"))
                .filter(|window| *window > 0)
                .map(|w| in_range(path, &key("attention.sliding_window"), w, MAX_CONTEXT))
                .transpose()?,
            first_window_layer: 0,
            mixers: Vec::new(),
            traits: llama_traits(architecture),
            eos_token_ids,
            bos_token_id: token("tokenizer.ggml.bos_token_id"),
        };
        config.validated(path)
    }

    /// Reads `config.json`, and the end tokens of `generation_config.json`, from a model directory.
    ///
    /// # Errors
    /// As for GGUF.
    pub(crate) fn from_hf_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let text = files::read(&path, files::MAX_CONFIG)?;
        let mut config = Self::from_hf_json(&text, &path)?;
        let generation = dir.join("generation_config.json");
        if let Some(text) = files::read_if_there(&generation, files::MAX_CONFIG)? {
            let json: Value = serde_json::from_slice(&text)
                .map_err(|e| ModelError::corrupt(&generation, format!("it is not JSON: {e}")))?;
            for id in token_list("eos_token_id", json.get("eos_token_id"), &generation)? {
                if !config.eos_token_ids.contains(&id) {
                    config.eos_token_ids.push(id);
                }
            }
        }
        Ok(config)
    }

    /// Parses the text of a `config.json`; `path` is for messages.
    fn from_hf_json(text: &[u8], path: &Path) -> Result<Self, ModelError> {
        let corrupt = |what: String| ModelError::corrupt(path, what);
        let not_a_config = |e| corrupt(format!("it is not a decoder's config.json: {e}"));
        // Other architectures need not have these fields: what the model is comes first.
        let kind: HfModelType = serde_json::from_slice(text).map_err(not_a_config)?;
        let architecture = Architecture::parse(&kind.model_type, path)?;
        if architecture.beyond_llama().is_some() {
            return families::config(architecture, text, path)?.validated(path);
        }
        let json: HfConfig = serde_json::from_slice(text).map_err(not_a_config)?;
        if json
            .hidden_act
            .as_deref()
            .is_some_and(|act| act != "silu" && act != "swish")
        {
            let what = format!("hidden_act '{}'", json.hidden_act.unwrap_or_default());
            return Err(unsupported(path, what, "use a model with silu"));
        }
        if json.mlp_bias.unwrap_or(false) {
            return Err(unsupported(
                path,
                "mlp_bias true".to_owned(),
                "use a model without feed-forward biases",
            ));
        }
        let field = |name: &str, value: u64, max: u64| in_range(path, name, value, max);
        let hidden_size = field("hidden_size", json.hidden_size, MAX_WIDTH)?;
        let heads = field("num_attention_heads", json.num_attention_heads, MAX_WIDTH)?;
        let head_dim = match json.head_dim {
            Some(dim) => field("head_dim", dim, MAX_WIDTH)?,
            None => divided_head_dim(path, hidden_size, heads)?,
        };
        let (theta, scaling) = json.rope(path)?;
        let windowed = match architecture {
            Architecture::Mistral => true,
            Architecture::Qwen2 | Architecture::Qwen3 => json.use_sliding_window.unwrap_or(false),
            _ => false,
        };
        // transformers' configurations of Mistral and Qwen have a window where the file leaves it out; null is none.
        let sliding_window = json
            .sliding_window
            .unwrap_or(Some(DEFAULT_SLIDING_WINDOW))
            .filter(|_| windowed)
            .map(|w| field("sliding_window", w, MAX_CONTEXT))
            .transpose()?;
        let first_window_layer = match (architecture, &json.layer_types) {
            (Architecture::Llama | Architecture::Mistral, _) => 0,
            (_, Some(types)) if windowed => listed_first_window_layer(types, path)?,
            _ => json
                .max_window_layers
                .map_or(DEFAULT_MAX_WINDOW_LAYERS, |n| n as usize),
        };
        let config = Self {
            architecture,
            vocab_size: field("vocab_size", json.vocab_size, MAX_CONTEXT)?,
            hidden_size,
            intermediate_size: field("intermediate_size", json.intermediate_size, MAX_WIDTH)?,
            num_hidden_layers: field("num_hidden_layers", json.num_hidden_layers, MAX_LAYERS)?,
            num_attention_heads: heads,
            num_key_value_heads: match json.num_key_value_heads {
                Some(n) => field("num_key_value_heads", n, MAX_WIDTH)?,
                None => heads,
            },
            head_dim,
            max_position_embeddings: field(
                "max_position_embeddings",
                json.max_position_embeddings,
                MAX_CONTEXT,
            )?,
            rms_norm_eps: json.rms_norm_eps,
            rope: RopeConfig {
                theta,
                dim: rotary_dim(head_dim, json.partial_rotary_factor(), path)?,
                style: RopeStyle::HalfRotation,
                scaling,
            },
            tie_word_embeddings: json.tie_word_embeddings.unwrap_or(false),
            attention_bias: architecture == Architecture::Qwen2
                || json.attention_bias.unwrap_or(false),
            sliding_window,
            first_window_layer,
            mixers: Vec::new(),
            traits: llama_traits(architecture),
            eos_token_ids: token_list("eos_token_id", json.eos_token_id.as_ref(), path)?,
            bos_token_id: token_list("bos_token_id", json.bos_token_id.as_ref(), path)?
                .first()
                .copied(),
        };
        config.validated(path)
    }

    /// Relations between fields, which hold for every source.
    fn validated(self, path: &Path) -> Result<Self, ModelError> {
        let wrong = |what: String| Err(ModelError::corrupt(path, what));
        if !self
            .num_attention_heads
            .is_multiple_of(self.num_key_value_heads)
        {
            return wrong(format!(
                "{} query heads are not a multiple of {} key-value heads",
                self.num_attention_heads, self.num_key_value_heads
            ));
        }
        if self.q_size() as u64 > MAX_WIDTH {
            return wrong(format!(
                "{} heads of size {} are too wide",
                self.num_attention_heads, self.head_dim
            ));
        }
        let corrupt = |what: String| ModelError::corrupt(path, what);
        self.rope.validate(self.head_dim).map_err(corrupt)?;
        if let Some(local) = &self.traits.local_rope {
            local
                .validate(self.head_dim)
                .map_err(|what| corrupt(format!("in the layers with a window, {what}")))?;
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps > 0.0) {
            return wrong(format!(
                "the norm's epsilon is {}, not a positive number",
                self.rms_norm_eps
            ));
        }
        Ok(self)
    }
}

/// Of the families that differ from Llama's in norms of heads only.
fn llama_traits(architecture: Architecture) -> Traits {
    Traits {
        head_norm: match architecture {
            Architecture::Qwen3 => HeadNorm::Weighted,
            _ => HeadNorm::None,
        },
        ..Traits::default()
    }
}

pub(super) fn in_range(path: &Path, name: &str, value: u64, max: u64) -> Result<usize, ModelError> {
    if value == 0 || value > max {
        return Err(ModelError::corrupt(
            path,
            format!("{name} is {value}, not within 1 to {max}"),
        ));
    }
    Ok(value as usize)
}

pub(super) fn divided_head_dim(
    path: &Path,
    hidden: usize,
    heads: usize,
) -> Result<usize, ModelError> {
    if !hidden.is_multiple_of(heads) {
        let what = format!(
            "a hidden size of {hidden} is not divisible by {heads} heads, and no head size is given"
        );
        return Err(ModelError::corrupt(path, what));
    }
    Ok(hidden / heads)
}

pub(super) fn unsupported(path: &Path, what: String, remedy: &'static str) -> ModelError {
    ModelError::Unsupported {
        path: path.to_owned(),
        what,
        remedy,
    }
}

/// The first layer with a window, where `layer_types` has full attention before it and windows from it on.
fn listed_first_window_layer(types: &[String], path: &Path) -> Result<usize, ModelError> {
    const FULL: &str = "full_attention";
    const SLIDING: &str = "sliding_attention";
    let first = types.iter().position(|t| t != FULL).unwrap_or(types.len());
    match types[first..].iter().position(|t| t != SLIDING) {
        None => Ok(first),
        Some(offset) => {
            let (layer, found) = (first + offset, &types[first + offset]);
            Err(unsupported(
                path,
                format!("layer_types with '{found}' at layer {layer}"),
                "use a model whose layers are 'full_attention' and then 'sliding_attention'",
            ))
        }
    }
}

/// Tells a field that is null from one that is left out.
fn present<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Option<u64>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// A token id, or a list of them; none where `value` is left out or null.
pub(super) fn token_list(
    name: &str,
    value: Option<&Value>,
    path: &Path,
) -> Result<Vec<u32>, ModelError> {
    let id = |v: &Value| v.as_u64().and_then(|v| u32::try_from(v).ok());
    let Some(value) = value.filter(|value| !value.is_null()) else {
        return Ok(Vec::new());
    };
    let ids = match value {
        Value::Array(list) => list.iter().map(id).collect(),
        one => id(one).map(|id| vec![id]),
    };
    ids.ok_or_else(|| ModelError::Corrupt {
        path: path.to_owned(),
        what: format!("{name} is {value}"),
        remedy: "make it a token id, a list of them, or null",
    })
}

/// Rotated dimensions of a head of `head_dim`, where `partial` of them are.
pub(super) fn rotary_dim(head_dim: usize, partial: f64, path: &Path) -> Result<usize, ModelError> {
    if partial > 0.0 && partial <= 1.0 {
        return Ok((head_dim as f64 * partial) as usize);
    }
    Err(ModelError::corrupt(
        path,
        format!("partial_rotary_factor is {partial}, not within (0, 1]"),
    ))
}

#[derive(Deserialize)]
struct HfModelType {
    model_type: String,
}

#[derive(Deserialize)]
struct HfConfig {
    vocab_size: u64,
    hidden_size: u64,
    intermediate_size: u64,
    num_hidden_layers: u64,
    num_attention_heads: u64,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    max_position_embeddings: u64,
    rms_norm_eps: f32,
    rope_theta: Option<f32>,
    rope_scaling: Option<HfRope>,
    rope_parameters: Option<HfRope>,
    partial_rotary_factor: Option<f64>,
    hidden_act: Option<String>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    /// Left out, null, or a number.
    #[serde(default, deserialize_with = "present")]
    sliding_window: Option<Option<u64>>,
    layer_types: Option<Vec<String>>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<u64>,
    eos_token_id: Option<Value>,
    bos_token_id: Option<Value>,
}

/// `rope_scaling`, and `rope_parameters` of transformers 5, which holds the base as well.
#[derive(Deserialize)]
pub(super) struct HfRope {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f32>,
    pub(super) partial_rotary_factor: Option<f64>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<u64>,
}

impl HfConfig {
    fn rope(&self, path: &Path) -> Result<(f32, RopeScaling), ModelError> {
        rope_of(self.rope_fields(), self.rope_theta, path)
    }

    fn rope_fields(&self) -> Option<&HfRope> {
        self.rope_parameters.as_ref().or(self.rope_scaling.as_ref())
    }

    /// The share of a head that is rotated. transformers 5 keeps it beside the base.
    fn partial_rotary_factor(&self) -> f64 {
        self.rope_fields()
            .and_then(|rope| rope.partial_rotary_factor)
            .or(self.partial_rotary_factor)
            .unwrap_or(1.0)
    }
}

/// Base and scaling; `theta` is the base where `rope` has none.
pub(super) fn rope_of(
    rope: Option<&HfRope>,
    theta: Option<f32>,
    path: &Path,
) -> Result<(f32, RopeScaling), ModelError> {
    let theta = rope
        .and_then(|r| r.rope_theta)
        .or(theta)
        .unwrap_or(10_000.0);
    let Some(rope) = rope else {
        return Ok((theta, RopeScaling::None));
    };
    let need = |name: &str, value: Option<f32>| {
        value.ok_or_else(|| ModelError::corrupt(path, format!("RoPE scaling lacks '{name}'")))
    };
    let scaling = match rope.rope_type.as_deref() {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear {
            factor: need("factor", rope.factor)?,
        },
        Some("llama3") => RopeScaling::Llama3 {
            factor: need("factor", rope.factor)?,
            low_freq_factor: need("low_freq_factor", rope.low_freq_factor)?,
            high_freq_factor: need("high_freq_factor", rope.high_freq_factor)?,
            original_context: in_range(
                path,
                "original_max_position_embeddings",
                rope.original_max_position_embeddings.unwrap_or(0),
                MAX_CONTEXT,
            )?,
        },
        Some(other) => {
            return Err(unsupported(
                path,
                format!("RoPE scaling '{other}'"),
                "use a model with the default, linear or llama3 scaling",
            ));
        }
    };
    Ok((theta, scaling))
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
