//! The tensors of the families beyond Llama's, by transformers' names. Knows no weights.

use super::{
    AttentionLayout, DenseLayout, ExpertTensors, ExpertsLayout, FeedForwardLayout, LatentLayout,
    LayerLayout, MixerLayout, Recurrence, RecurrentLayout, Vector,
};
use crate::model::{
    config::{Architecture, Mixer, ModelConfig},
    linear::Part,
    traits::{ExpertsConfig, FeedForward, HeadNorm},
};
use timetable_device::cpu::{
    mamba::{GdnConfig, Mamba2Config, MambaConfig},
    mla::LatentSizes,
};

/// Names of one layer's tensors.
struct Names {
    layer: usize,
}

impl Names {
    fn name(&self, rest: &str) -> String {
        format!("model.layers.{}.{rest}", self.layer)
    }

    fn vector(&self, name: &str, len: usize) -> Vector {
        Vector {
            name: self.name(name),
            len,
        }
    }

    fn norm(&self, name: &str, len: usize) -> Vector {
        self.vector(&format!("{name}.weight"), len)
    }

    fn part(&self, name: &str, n: usize, bias: bool) -> Part {
        part(&self.name(name), n, bias)
    }
}

fn part(name: &str, n: usize, bias: bool) -> Part {
    Part {
        weight: format!("{name}.weight"),
        bias: bias.then(|| format!("{name}.bias")),
        n,
    }
}

/// A feed-forward's matrices below `prefix`.
pub(crate) fn dense(prefix: &str, hidden: usize, width: usize) -> DenseLayout {
    let part = |name: &str, n: usize| part(&format!("{prefix}.{name}"), n, false);
    DenseLayout {
        gate_up: [part("gate_proj", width), part("up_proj", width)],
        down: [part("down_proj", hidden)],
    }
}

/// One layer of a family beyond Llama's.
pub(super) fn layer(config: &ModelConfig, layer: usize) -> LayerLayout {
    let names = Names { layer };
    let norm = |name: &str| names.norm(name, config.hidden_size);
    let (feed_forward_norm, feed_forward) = match config.architecture {
        Architecture::Bamba => ("pre_ff_layernorm", "feed_forward"),
        Architecture::Gemma3 => ("pre_feedforward_layernorm", "mlp"),
        Architecture::Llama4 => ("post_attention_layernorm", "feed_forward"),
        _ => ("post_attention_layernorm", "mlp"),
    };
    let post = config.traits.post_norms;
    LayerLayout {
        mixer_norm: norm("input_layernorm"),
        mixer: match config.mixer(layer) {
            Mixer::Attention { .. } => MixerLayout::Attention(attention(config, &names)),
            Mixer::Latent(sizes) => MixerLayout::Latent(latent(config, &names, &sizes)),
            Mixer::Recurrent(MambaConfig::Mamba2(sizes)) => {
                MixerLayout::Recurrent(mamba2(config, &names, &sizes))
            }
            Mixer::Recurrent(MambaConfig::Gdn(sizes)) => {
                MixerLayout::Recurrent(gdn(config, &names, &sizes))
            }
            Mixer::Recurrent(other) => unreachable!("no family has layers of {other:?}"),
        },
        post_mixer_norm: post.then(|| norm("post_attention_layernorm")),
        feed_forward_norm: norm(feed_forward_norm),
        feed_forward: match config.traits.feed_forward(layer, config.intermediate_size) {
            FeedForward::Dense { intermediate_size } => FeedForwardLayout::Dense(dense(
                &names.name(feed_forward),
                config.hidden_size,
                intermediate_size,
            )),
            FeedForward::Experts(experts) => {
                FeedForwardLayout::Experts(mixture(config, &names.name(feed_forward), &experts))
            }
        },
        post_feed_forward_norm: post.then(|| norm("post_feedforward_layernorm")),
    }
}

fn attention(config: &ModelConfig, names: &Names) -> AttentionLayout {
    let bias = config.attention_bias;
    let gates = 1 + usize::from(config.traits.output_gate);
    AttentionLayout {
        qkv: [
            names.part("self_attn.q_proj", gates * config.q_size(), bias),
            names.part("self_attn.k_proj", config.kv_size(), bias),
            names.part("self_attn.v_proj", config.kv_size(), bias),
        ],
        head_norms: (config.traits.head_norm == HeadNorm::Weighted).then(|| {
            (
                names.norm("self_attn.q_norm", config.head_dim),
                names.norm("self_attn.k_norm", config.head_dim),
            )
        }),
        output: [names.part("self_attn.o_proj", config.hidden_size, bias)],
    }
}

fn latent(config: &ModelConfig, names: &Names, sizes: &LatentSizes) -> LatentLayout {
    let bias = config.attention_bias;
    let low_rank = config.traits.q_lora_rank.map(|rank| {
        (
            names.part("self_attn.q_a_proj", rank, bias),
            names.norm("self_attn.q_a_layernorm", rank),
        )
    });
    let query = match low_rank {
        Some(_) => "self_attn.q_b_proj",
        None => "self_attn.q_proj",
    };
    let kv_b = sizes.num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim);
    LatentLayout {
        query: names.part(query, sizes.num_heads * sizes.qk_head_dim(), false),
        low_rank,
        kv_a: names.part("self_attn.kv_a_proj_with_mqa", sizes.head_size(), bias),
        kv_a_norm: names.norm("self_attn.kv_a_layernorm", sizes.kv_lora_rank),
        kv_b: names.part("self_attn.kv_b_proj", kv_b, false),
        output: names.part("self_attn.o_proj", config.hidden_size, bias),
    }
}

fn mamba2(config: &ModelConfig, names: &Names, sizes: &Mamba2Config) -> RecurrentLayout {
    let mixer = MambaConfig::Mamba2(*sizes);
    let (inner, channels) = (mixer.output_size(), mixer.conv_dim());
    let bias = config.traits.mamba_proj_bias;
    let heads = sizes.num_heads;
    RecurrentLayout {
        recurrence: Recurrence::Mamba2(*sizes),
        inputs: vec![names.part("mamba.in_proj", inner + channels + heads, bias)],
        conv_weight: names.name("mamba.conv1d.weight"),
        conv_bias: (config.traits.conv_bias).then(|| names.vector("mamba.conv1d.bias", channels)),
        a_log: names.vector("mamba.A_log", heads),
        dt_bias: names.vector("mamba.dt_bias", heads),
        d: Some(names.vector("mamba.D", heads)),
        norm: names.norm("mamba.norm", inner),
        output: names.part("mamba.out_proj", config.hidden_size, bias),
    }
}

fn gdn(config: &ModelConfig, names: &Names, sizes: &GdnConfig) -> RecurrentLayout {
    let mixer = MambaConfig::Gdn(*sizes);
    let heads = sizes.num_v_heads;
    let qkvz = mixer.conv_dim() + mixer.output_size();
    RecurrentLayout {
        recurrence: Recurrence::Gdn(*sizes),
        inputs: vec![
            names.part("linear_attn.in_proj_qkvz", qkvz, false),
            names.part("linear_attn.in_proj_ba", 2 * heads, false),
        ],
        conv_weight: names.name("linear_attn.conv1d.weight"),
        conv_bias: None,
        a_log: names.vector("linear_attn.A_log", heads),
        dt_bias: names.vector("linear_attn.dt_bias", heads),
        d: None,
        norm: names.norm("linear_attn.norm", sizes.head_v_dim),
        output: names.part("linear_attn.out_proj", config.hidden_size, false),
    }
}

fn mixture(config: &ModelConfig, prefix: &str, experts: &ExpertsConfig) -> ExpertsLayout {
    let hidden = config.hidden_size;
    let (router, shared) = match config.architecture {
        Architecture::Llama4 => ("router", "shared_expert"),
        Architecture::DeepseekV2 => ("gate", "shared_experts"),
        _ => ("gate", "shared_expert"),
    };
    let below = |name: &str| format!("{prefix}.{name}");
    ExpertsLayout {
        router: part(&below(router), experts.num_experts, false),
        experts: match config.architecture {
            Architecture::Llama4 => ExpertTensors::Stacked {
                gate_up: below("experts.gate_up_proj"),
                down: below("experts.down_proj"),
            },
            _ => ExpertTensors::Single {
                prefix: below("experts"),
            },
        },
        shared: experts
            .shared_intermediate_size
            .map(|width| dense(&below(shared), hidden, width)),
        shared_gate: experts
            .shared_gate
            .then(|| part(&below("shared_expert_gate"), 1, false)),
    }
}
