//! Which tensors of a checkpoint make up a decoder, and in which order they are stacked: the one place that every device's
//! loader reads. It must never know in which form weights are kept.

use std::path::Path;

use super::{
    Source,
    config::{Architecture, ModelConfig, RopeScaling},
    error::ModelError,
    linear::Part,
    safetensors::SafetensorsDir,
    weights::{Checkpoint, Naming, Role},
};

/// A tensor of one dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Vector {
    /// Its name in the checkpoint.
    pub(crate) name: String,
    /// Its elements.
    pub(crate) len: usize,
}

/// The tensors of one layer. Matrices are `[n, k]`; those of a list are stacked in its order.
#[derive(Clone, Debug)]
pub(crate) struct LayerLayout {
    /// `[hidden]`
    pub(crate) attention_norm: Vector,
    /// Queries, keys, values; k = hidden.
    pub(crate) qkv: [Part; 3],
    /// Norms over each head of the queries and of the keys, `[head_dim]` (Qwen3).
    pub(crate) head_norms: Option<(Vector, Vector)>,
    /// k = heads * head size.
    pub(crate) output: [Part; 1],
    /// `[hidden]`
    pub(crate) feed_forward_norm: Vector,
    /// Gate, up; k = hidden.
    pub(crate) gate_up: [Part; 2],
    /// k = intermediate.
    pub(crate) down: [Part; 1],
}

/// The tensors of a decoder.
#[derive(Clone, Debug)]
pub(crate) struct DecoderLayout {
    /// `[vocab, hidden]`
    pub(crate) embedding: Part,
    /// In the model's order.
    pub(crate) layers: Vec<LayerLayout>,
    /// `[hidden]`
    pub(crate) final_norm: Vector,
    /// `[vocab, hidden]`; `None` when tied to the embedding.
    pub(crate) head: Option<Part>,
    /// Divisors of the rotary frequencies, one per pair: GGUF's `rope_freqs.weight`.
    pub(crate) rope_factors: Option<Vector>,
}

/// A checkpoint that was opened, with what it describes.
pub(crate) struct Opened {
    /// The decoder's sizes.
    pub(crate) config: ModelConfig,
    /// Its tensors.
    pub(crate) checkpoint: Box<dyn Checkpoint>,
    /// Which of them go where.
    pub(crate) layout: DecoderLayout,
}

impl Opened {
    /// Opens a GGUF file, or a Hugging Face directory (`config.json`, safetensors). Reads no weights.
    ///
    /// # Errors
    /// Names the file, the key, its value and what to do.
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let (config, checkpoint, naming): (_, Box<dyn Checkpoint>, _) = match Source::open(path)? {
            Source::Gguf(file) => (ModelConfig::from_gguf(&file)?, Box::new(file), Naming::Gguf),
            Source::HuggingFace => (
                ModelConfig::from_hf_dir(path)?,
                Box::new(SafetensorsDir::open(path)?),
                Naming::HuggingFace,
            ),
        };
        let layout = DecoderLayout::new(&config, &*checkpoint, naming);
        Ok(Self {
            config,
            checkpoint,
            layout,
        })
    }
}

impl DecoderLayout {
    /// Asks the checkpoint only for what may be absent. Whether the rest is there, and of the right shape, shows when it is
    /// read.
    pub(crate) fn new(config: &ModelConfig, checkpoint: &dyn Checkpoint, naming: Naming) -> Self {
        let table = |name: &str| Part {
            weight: name.to_owned(),
            bias: None,
            n: config.vocab_size,
        };
        let factors = "rope_freqs.weight";
        let has_factors = naming == Naming::Gguf
            && config.rope.scaling == RopeScaling::None
            && checkpoint.tensor(factors).is_some();
        Self {
            embedding: table(naming.embedding()),
            layers: (0..config.num_hidden_layers)
                .map(|layer| LayerLayout::new(config, checkpoint, naming, layer))
                .collect(),
            final_norm: Vector {
                name: naming.final_norm().to_owned(),
                len: config.hidden_size,
            },
            head: (!config.tie_word_embeddings).then(|| table(naming.head())),
            rope_factors: has_factors.then(|| Vector {
                name: factors.to_owned(),
                len: config.rope.dim / 2,
            }),
        }
    }
}

impl LayerLayout {
    fn new(
        config: &ModelConfig,
        checkpoint: &dyn Checkpoint,
        naming: Naming,
        layer: usize,
    ) -> Self {
        let vector = |role: Role, len: usize| Vector {
            name: naming.layer(layer, role, "weight"),
            len,
        };
        let part = |role: Role, n: usize, bias: bool| Part {
            weight: naming.layer(layer, role, "weight"),
            bias: bias.then(|| naming.layer(layer, role, "bias")),
            n,
        };
        let hidden = config.hidden_size;
        let bias = config.attention_bias;
        // Qwen2 has no bias on the output; Llama's `attention_bias` covers it, where the file has it.
        let output_bias = bias
            && checkpoint
                .tensor(&naming.layer(layer, Role::Output, "bias"))
                .is_some();
        Self {
            attention_norm: vector(Role::AttentionNorm, hidden),
            qkv: [
                part(Role::Query, config.q_size(), bias),
                part(Role::Key, config.kv_size(), bias),
                part(Role::Value, config.kv_size(), bias),
            ],
            head_norms: (config.architecture == Architecture::Qwen3).then(|| {
                (
                    vector(Role::QueryNorm, config.head_dim),
                    vector(Role::KeyNorm, config.head_dim),
                )
            }),
            output: [part(Role::Output, hidden, output_bias)],
            feed_forward_norm: vector(Role::FeedForwardNorm, hidden),
            gate_up: [
                part(Role::Gate, config.intermediate_size, false),
                part(Role::Up, config.intermediate_size, false),
            ],
            down: [part(Role::Down, hidden, false)],
        }
    }
}
