//! Which tensors of a checkpoint make up a decoder, and in which order they are stacked: the one place that every device's
//! loader reads. It must never know in which form weights are kept.

pub(crate) mod families;

use std::path::Path;

use timetable_device::cpu::mamba::{GdnConfig, Mamba2Config, MambaConfig};

use super::{
    Source,
    config::{Architecture, ModelConfig, RopeScaling},
    error::ModelError,
    linear::Part,
    safetensors::SafetensorsDir,
    traits::HeadNorm,
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
    /// `[hidden]`, before the mixer.
    pub(crate) mixer_norm: Vector,
    pub(crate) mixer: MixerLayout,
    /// `[hidden]`, over what the mixer adds.
    pub(crate) post_mixer_norm: Option<Vector>,
    /// `[hidden]`
    pub(crate) feed_forward_norm: Vector,
    pub(crate) feed_forward: FeedForwardLayout,
    /// `[hidden]`, over what the feed-forward adds.
    pub(crate) post_feed_forward_norm: Option<Vector>,
}

/// The tensors of what mixes a layer's tokens.
#[derive(Clone, Debug)]
pub(crate) enum MixerLayout {
    Attention(AttentionLayout),
    Latent(LatentLayout),
    Recurrent(RecurrentLayout),
}

/// Attention over keys and values.
#[derive(Clone, Debug)]
pub(crate) struct AttentionLayout {
    /// Queries (with a gate beside each head, where the family has it), keys, values; k = hidden.
    pub(crate) qkv: [Part; 3],
    /// Norms over each head of the queries and of the keys, `[head_dim]`.
    pub(crate) head_norms: Option<(Vector, Vector)>,
    /// k = heads * head size.
    pub(crate) output: [Part; 1],
}

/// Attention over latents.
#[derive(Clone, Debug)]
pub(crate) struct LatentLayout {
    /// k = hidden, or the low rank.
    pub(crate) query: Part,
    /// What makes the low rank of the hidden state, and its norm.
    pub(crate) low_rank: Option<(Part, Vector)>,
    /// The latent, then the key's rotated part; k = hidden.
    pub(crate) kv_a: Part,
    pub(crate) kv_a_norm: Vector,
    /// Of each head its key without rotation, then its value; k = the latent's width.
    pub(crate) kv_b: Part,
    /// k = heads * value size.
    pub(crate) output: Part,
}

/// The recurrences that a family has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Recurrence {
    Mamba2(Mamba2Config),
    Gdn(GdnConfig),
}

impl Recurrence {
    /// What the executor knows it by.
    pub(crate) fn config(self) -> MambaConfig {
        match self {
            Self::Mamba2(sizes) => MambaConfig::Mamba2(sizes),
            Self::Gdn(sizes) => MambaConfig::Gdn(sizes),
        }
    }
}

/// Mamba2, or a gated delta net.
#[derive(Clone, Debug)]
pub(crate) struct RecurrentLayout {
    pub(crate) recurrence: Recurrence,
    /// All inputs, in the checkpoint's order; k = hidden.
    pub(crate) inputs: Vec<Part>,
    /// `[channels, 1, taps]`
    pub(crate) conv_weight: String,
    /// `[channels]`
    pub(crate) conv_bias: Option<Vector>,
    /// `[heads]`
    pub(crate) a_log: Vector,
    /// `[heads]`
    pub(crate) dt_bias: Vector,
    /// `[heads]` (Mamba2)
    pub(crate) d: Option<Vector>,
    /// Of the output, or of each of its heads.
    pub(crate) norm: Vector,
    /// k = the recurrence's output.
    pub(crate) output: Part,
}

/// The tensors of a feed-forward.
#[derive(Clone, Debug)]
pub(crate) enum FeedForwardLayout {
    Dense(DenseLayout),
    Experts(ExpertsLayout),
}

/// One feed-forward for all tokens.
#[derive(Clone, Debug)]
pub(crate) struct DenseLayout {
    /// Gate, up; k = hidden.
    pub(crate) gate_up: [Part; 2],
    /// k = intermediate.
    pub(crate) down: [Part; 1],
}

/// A mixture of experts.
#[derive(Clone, Debug)]
pub(crate) struct ExpertsLayout {
    /// `[experts, hidden]`
    pub(crate) router: Part,
    pub(crate) experts: ExpertTensors,
    pub(crate) shared: Option<DenseLayout>,
    /// `[1, hidden]`
    pub(crate) shared_gate: Option<Part>,
}

/// How the experts' weights lie.
#[derive(Clone, Debug)]
pub(crate) enum ExpertTensors {
    /// As dense feed-forwards below `{prefix}.{index}`.
    Single {
        /// Of their names.
        prefix: String,
    },
    /// All in two tensors, transposed: `[experts, hidden, 2 * intermediate]` (gate, up) and
    /// `[experts, intermediate, hidden]`.
    Stacked {
        /// The first's name.
        gate_up: String,
        /// The second's.
        down: String,
    },
}

/// A layer of attention and a dense feed-forward with a norm before each: what every device runs.
pub(crate) struct LlamaLayer<'a> {
    pub(crate) attention_norm: &'a Vector,
    pub(crate) attention: &'a AttentionLayout,
    pub(crate) feed_forward_norm: &'a Vector,
    pub(crate) feed_forward: &'a DenseLayout,
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
                name: match config.architecture {
                    Architecture::Bamba => "model.final_layernorm.weight".to_owned(),
                    _ => naming.final_norm().to_owned(),
                },
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
    /// The layer, if it is like Llama's: those of every [`Architecture`] with nothing beyond Llama are.
    pub(crate) fn llama(&self) -> Option<LlamaLayer<'_>> {
        match (&self.mixer, &self.feed_forward) {
            (MixerLayout::Attention(attention), FeedForwardLayout::Dense(feed_forward)) => {
                Some(LlamaLayer {
                    attention_norm: &self.mixer_norm,
                    attention,
                    feed_forward_norm: &self.feed_forward_norm,
                    feed_forward,
                })
            }
            _ => None,
        }
    }

    fn new(
        config: &ModelConfig,
        checkpoint: &dyn Checkpoint,
        naming: Naming,
        layer: usize,
    ) -> Self {
        if config.architecture.beyond_llama().is_some() {
            return families::layer(config, layer);
        }
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
            mixer_norm: vector(Role::AttentionNorm, hidden),
            mixer: MixerLayout::Attention(AttentionLayout {
                qkv: [
                    part(Role::Query, config.q_size(), bias),
                    part(Role::Key, config.kv_size(), bias),
                    part(Role::Value, config.kv_size(), bias),
                ],
                head_norms: (config.traits.head_norm == HeadNorm::Weighted).then(|| {
                    (
                        vector(Role::QueryNorm, config.head_dim),
                        vector(Role::KeyNorm, config.head_dim),
                    )
                }),
                output: [part(Role::Output, hidden, output_bias)],
            }),
            post_mixer_norm: None,
            feed_forward_norm: vector(Role::FeedForwardNorm, hidden),
            feed_forward: FeedForwardLayout::Dense(DenseLayout {
                gate_up: [
                    part(Role::Gate, config.intermediate_size, false),
                    part(Role::Up, config.intermediate_size, false),
                ],
                down: [part(Role::Down, hidden, false)],
            }),
            post_feed_forward_norm: None,
        }
    }
}
