//! What a family's layers have that Llama's have not. Knows no weights and no tensor's name.

use super::config::RopeConfig;

/// Nonlinearity of a feed-forward's gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activation {
    /// x · sigmoid(x).
    #[default]
    Silu,
    /// GELU by its tanh formula: `gelu_pytorch_tanh`.
    GeluTanh,
}

/// Norm over each head of the queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HeadNorm {
    /// None.
    #[default]
    None,
    /// RMS norm with weights, before the rotation.
    Weighted,
    /// RMS norm without weights, after the rotation; of the layers that rotate.
    Unweighted,
}

/// Queries of the layers without rotation are multiplied by `1 + attn_scale · ln(1 + ⌊(position + 1) / floor_scale⌋)`:
/// transformers' `attn_temperature_tuning`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Temperature {
    /// Positions up to which nothing changes.
    pub floor_scale: f32,
    /// Growth.
    pub attn_scale: f32,
}

impl Temperature {
    /// The factor of a position's queries.
    pub fn factor(&self, position: i64) -> f32 {
        ((position as f32 + 1.0) / self.floor_scale).floor().ln_1p() * self.attn_scale + 1.0
    }
}

/// How a token's experts are chosen and weighed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Routing {
    /// The highest of a softmax over all experts; their outputs are weighed by it.
    Softmax {
        /// Whether the chosen weights are made to sum to one.
        norm_topk_prob: bool,
        /// Multiplies every weight.
        scaling_factor: f32,
        /// Groups of experts, and how many of them a token may choose from: those with the highest best expert.
        groups: Option<(usize, usize)>,
    },
    /// The highest of the router; the sigmoid of that multiplies each expert's input.
    SigmoidOfInput,
}

/// A mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsConfig {
    /// Experts to choose from.
    pub num_experts: usize,
    /// Experts of a token.
    pub num_experts_per_tok: usize,
    /// Width of one expert.
    pub moe_intermediate_size: usize,
    /// Width of the expert that every token has.
    pub shared_intermediate_size: Option<usize>,
    /// Whether the shared expert's output is gated by one number of each token.
    pub shared_gate: bool,
    /// How the others are chosen.
    pub routing: Routing,
}

/// A layer's feed-forward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FeedForward {
    /// One for all tokens.
    Dense {
        /// Its width.
        intermediate_size: usize,
    },
    /// A mixture of experts.
    Experts(ExpertsConfig),
}

/// What a family's layers have that Llama's have not; the default is Llama.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Traits {
    /// Multiplies the embeddings.
    pub embedding_scale: Option<f32>,
    /// Added to the weights of every norm of the residual stream and of heads: 1 where a family keeps them around zero.
    pub norm_offset: f32,
    /// Whether what a mixer and a feed-forward add to the residual stream is normed first.
    pub post_norms: bool,
    /// Of every feed-forward.
    pub activation: Activation,
    /// Instead of the head size in the scale of scores.
    pub query_pre_attn_scalar: Option<f32>,
    /// Over each head of the queries and keys.
    pub head_norm: HeadNorm,
    /// Whether attention's output is multiplied by the sigmoid of a gate that the query projection makes beside each head.
    pub output_gate: bool,
    /// Rotation of the layers with a window, where it is another.
    pub local_rope: Option<RopeConfig>,
    /// Layers whose heads are not rotated; empty: none.
    pub unrotated: Vec<bool>,
    /// Of the layers without rotation.
    pub temperature: Option<Temperature>,
    /// Width between the two query projections of latent attention; `None`: there is one projection.
    pub q_lora_rank: Option<usize>,
    /// Whether Mamba2's convolution has a bias.
    pub conv_bias: bool,
    /// Whether Mamba2's projections have biases.
    pub mamba_proj_bias: bool,
    /// Of each layer; empty: dense everywhere.
    pub feed_forwards: Vec<FeedForward>,
}

impl Traits {
    /// The feed-forward of a layer; `intermediate_size` is the model's.
    pub fn feed_forward(&self, layer: usize, intermediate_size: usize) -> FeedForward {
        let own = self.feed_forwards.get(layer).copied();
        own.unwrap_or(FeedForward::Dense { intermediate_size })
    }
}
