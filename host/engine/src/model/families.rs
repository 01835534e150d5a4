//! The `config.json` of the families beyond Llama's: DeepSeek-V2, Bamba, Qwen3-Next, Gemma 3 and Llama 4 (their text models).
//!
//! Names, defaults and rules are transformers' (4.57). What is not computed is refused; every number is range-checked.
//! Knows no tensors.

use super::config::{
    Architecture, HfRope, MAX_CONTEXT, MAX_LAYERS, MAX_STATE, MAX_WIDTH, Mixer, ModelConfig,
    RopeConfig, RopeStyle, divided_head_dim, in_range, rope_of, rotary_dim, token_list,
    unsupported,
};
use super::error::ModelError;
use super::traits::{
    Activation, ExpertsConfig, FeedForward, HeadNorm, Routing, Temperature, Traits,
};
use serde_json::{Map, Value};
use std::path::Path;
use timetable_device::cpu::{
    mamba::{GdnConfig, Mamba2Config, MambaConfig},
    mla::LatentSizes,
};

const MAX_EXPERTS: u64 = 4096;
const MAX_TAPS: u64 = 64;

/// Reads a `config.json` of `architecture`; `path` is for messages.
pub(super) fn config(
    architecture: Architecture,
    text: &[u8],
    path: &Path,
) -> Result<ModelConfig, ModelError> {
    let json: Map<String, Value> = serde_json::from_slice(text).map_err(|e| {
        ModelError::corrupt(path, format!("it is not a decoder's config.json: {e}"))
    })?;
    let fields = Fields { json: &json, path };
    let config = fields.common(architecture)?;
    let config = match architecture {
        Architecture::DeepseekV2 => deepseek_v2(&fields, config)?,
        Architecture::Bamba => bamba(&fields, config)?,
        Architecture::Qwen3Next => qwen3_next(&fields, config)?,
        Architecture::Gemma3 => gemma3(&fields, config)?,
        _ => llama4(&fields, config)?,
    };
    fields.check_sizes(&config)?;
    Ok(config)
}

/// The fields of a `config.json`. One that is null counts as left out.
struct Fields<'a> {
    json: &'a Map<String, Value>,
    path: &'a Path,
}

impl Fields<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.json.get(name).filter(|value| !value.is_null())
    }

    fn corrupt(&self, what: String) -> ModelError {
        ModelError::corrupt(self.path, what)
    }

    fn of<T>(
        &self,
        name: &str,
        kind: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        self.get(name)
            .map(|value| {
                read(value).ok_or_else(|| self.corrupt(format!("{name} is {value}, not {kind}")))
            })
            .transpose()
    }

    fn missing(&self, name: &str) -> ModelError {
        self.corrupt(format!("{name} is missing"))
    }

    fn optional_size(&self, name: &str, max: u64) -> Result<Option<usize>, ModelError> {
        self.of(name, "a whole number", Value::as_u64)?
            .map(|value| in_range(self.path, name, value, max))
            .transpose()
    }

    fn size(&self, name: &str, max: u64) -> Result<usize, ModelError> {
        self.optional_size(name, max)?
            .ok_or_else(|| self.missing(name))
    }

    fn width(&self, name: &str) -> Result<usize, ModelError> {
        self.size(name, MAX_WIDTH)
    }

    /// `default` where the field is left out; none where it is null.
    fn size_unless_null(
        &self,
        name: &str,
        max: u64,
        default: usize,
    ) -> Result<Option<usize>, ModelError> {
        match self.json.get(name) {
            None => Ok(Some(default)),
            Some(_) => self.optional_size(name, max),
        }
    }

    fn tokens(&self, name: &str) -> Result<Vec<u32>, ModelError> {
        token_list(name, self.get(name), self.path)
    }

    /// A positive number.
    fn positive(&self, name: &str, default: Option<f32>) -> Result<f32, ModelError> {
        let value = self.of(name, "a number", Value::as_f64)?;
        let value = value.map(|value| value as f32).or(default);
        let value = value.ok_or_else(|| self.missing(name))?;
        if value.is_finite() && value > 0.0 {
            Ok(value)
        } else {
            Err(self.corrupt(format!("{name} is {value}, not a positive number")))
        }
    }

    /// A number counts as Python counts it.
    fn flag(&self, name: &str, default: bool) -> Result<bool, ModelError> {
        let read = |value: &Value| {
            let number = value.as_u64().map(|number| number != 0);
            value.as_bool().or(number)
        };
        Ok(self.of(name, "true or false", read)?.unwrap_or(default))
    }

    /// Refuses a field whose value is none of `known`.
    fn only(&self, name: &str, known: &[&str], remedy: &'static str) -> Result<(), ModelError> {
        match self.of(name, "a text", |value| value.as_str().map(str::to_owned))? {
            Some(found) if !known.contains(&&*found) => {
                Err(unsupported(self.path, format!("{name} '{found}'"), remedy))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a field that is set, to false and to nothing aside.
    fn absent(&self, name: &str, remedy: &'static str) -> Result<(), ModelError> {
        match self.get(name) {
            None | Some(Value::Bool(false)) => Ok(()),
            Some(value) => Err(unsupported(self.path, format!("{name} {value}"), remedy)),
        }
    }

    /// A list with one entry for each of `layers`.
    fn by_layer<T>(
        &self,
        name: &str,
        layers: usize,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ModelError> {
        let Some(list) = self.of(name, "a list", |value| value.as_array().cloned())? else {
            return Ok(None);
        };
        if list.len() != layers {
            return Err(self.corrupt(format!(
                "{name} has {} entries, not one for each of {layers} layers",
                list.len()
            )));
        }
        let read = |(layer, value): (usize, &Value)| {
            read(value).ok_or_else(|| {
                let what = format!("{name} with {value} at layer {layer}");
                unsupported(
                    self.path,
                    what,
                    "use a model whose layers transformers' own model of this type has",
                )
            })
        };
        list.iter()
            .enumerate()
            .map(read)
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// Which of a list of layer types is not `other`, but `one`.
    fn layer_types(
        &self,
        layers: usize,
        one: &str,
        other: &str,
    ) -> Result<Option<Vec<bool>>, ModelError> {
        self.by_layer("layer_types", layers, |kind| match kind.as_str()? {
            kind if kind == one => Some(true),
            kind if kind == other => Some(false),
            _ => None,
        })
    }

    /// A list of layers.
    fn layers(&self, name: &str) -> Result<Option<Vec<usize>>, ModelError> {
        self.of(name, "a list of layers", |value| {
            let list = value.as_array()?.iter();
            list.map(|layer| layer.as_u64().map(|layer| layer as usize))
                .collect()
        })
    }

    /// `rope_scaling`, or `kind` of transformers 5's `rope_parameters`.
    fn rope_fields(&self, kind: &str) -> Result<Option<HfRope>, ModelError> {
        let value = match self.get("rope_parameters") {
            Some(value) => Some(value.get(kind).unwrap_or(value)),
            None => self.get("rope_scaling"),
        };
        value
            .map(|value| serde_json::from_value(value.clone()))
            .transpose()
            .map_err(|e| self.corrupt(format!("its RoPE scaling: {e}")))
    }

    fn rope(&self, kind: &str, theta: f32) -> Result<RopeConfig, ModelError> {
        let rope = self.rope_fields(kind)?;
        let theta = self.positive("rope_theta", Some(theta))?;
        let (theta, scaling) = rope_of(rope.as_ref(), Some(theta), self.path)?;
        Ok(RopeConfig {
            theta,
            dim: 0,
            style: RopeStyle::HalfRotation,
            scaling,
        })
    }

    /// Rotated dimensions of a head. transformers 5 keeps their share beside the base.
    fn rotary_dim(&self, head_dim: usize, default: f64) -> Result<usize, ModelError> {
        const NAME: &str = "partial_rotary_factor";
        let rope = self.rope_fields("full_attention")?;
        let partial = match rope.and_then(|rope| rope.partial_rotary_factor) {
            Some(partial) => partial,
            None => self.of(NAME, "a number", Value::as_f64)?.unwrap_or(default),
        };
        rotary_dim(head_dim, partial, self.path)
    }

    /// What every family has; attention with a rotation of whole heads and dense feed-forwards.
    fn common(&self, architecture: Architecture) -> Result<ModelConfig, ModelError> {
        let (deepseek, gemma) = (
            architecture == Architecture::DeepseekV2,
            architecture == Architecture::Gemma3,
        );
        self.absent("mlp_bias", "use a model without feed-forward biases")?;
        self.absent("quantization_config", "use the model's unquantised weights")?;
        if !gemma {
            self.only("hidden_act", &["silu", "swish"], "use a model with silu")?;
        }
        let hidden_size = self.width("hidden_size")?;
        let heads = self.width("num_attention_heads")?;
        let head_dim = match architecture {
            Architecture::DeepseekV2 => {
                self.width("qk_nope_head_dim")? + self.width("qk_rope_head_dim")?
            }
            Architecture::Bamba => match self.optional_size("head_dim", MAX_WIDTH)? {
                Some(dim) => dim,
                None => divided_head_dim(self.path, hidden_size, heads)?,
            },
            _ => self.width("head_dim")?,
        };
        let theta = match architecture {
            Architecture::Gemma3 => 1_000_000.0,
            Architecture::Llama4 => 500_000.0,
            _ => 10_000.0,
        };
        let intermediate = match architecture {
            Architecture::Llama4 => "intermediate_size_mlp",
            _ => "intermediate_size",
        };
        Ok(ModelConfig {
            architecture,
            vocab_size: self.size("vocab_size", MAX_CONTEXT)?,
            hidden_size,
            intermediate_size: self.width(intermediate)?,
            num_hidden_layers: self.size("num_hidden_layers", MAX_LAYERS)?,
            num_attention_heads: heads,
            // Latent attention has as many keys as queries.
            num_key_value_heads: match deepseek {
                true => heads,
                false => self.width("num_key_value_heads")?,
            },
            head_dim,
            max_position_embeddings: self.size("max_position_embeddings", MAX_CONTEXT)?,
            rms_norm_eps: self.positive("rms_norm_eps", None)?,
            rope: RopeConfig {
                dim: head_dim,
                ..self.rope("full_attention", theta)?
            },
            tie_word_embeddings: self.flag("tie_word_embeddings", gemma)?,
            attention_bias: self.flag("attention_bias", false)?,
            sliding_window: None,
            first_window_layer: 0,
            mixers: Vec::new(),
            traits: Traits::default(),
            eos_token_ids: self.tokens("eos_token_id")?,
            bos_token_id: self.tokens("bos_token_id")?.first().copied(),
        })
    }

    /// How many experts there are, and a token's, by the names that the family has for the first.
    fn experts(&self, name: &str) -> Result<(usize, usize), ModelError> {
        self.chosen_experts(self.size(name, MAX_EXPERTS)?)
    }

    /// How many of `experts` a token has, after them.
    fn chosen_experts(&self, experts: usize) -> Result<(usize, usize), ModelError> {
        let chosen = self.size("num_experts_per_tok", MAX_EXPERTS)?;
        if chosen > experts {
            return Err(self.corrupt(format!(
                "num_experts_per_tok is {chosen}, above {experts} experts"
            )));
        }
        Ok((experts, chosen))
    }

    /// Products of the family's sizes.
    fn check_sizes(&self, config: &ModelConfig) -> Result<(), ModelError> {
        let refuse = |what: String| unsupported(self.path, what, "use a smaller model");
        let check = |what: &str, width: usize| match width as u64 {
            0..=MAX_WIDTH => Ok(()),
            _ => Err(refuse(format!("{what}, {width} wide, above {MAX_WIDTH},"))),
        };
        for mixer in &config.mixers {
            match mixer {
                Mixer::Attention { .. } => {}
                Mixer::Latent(sizes) => {
                    check(
                        "the values of all heads",
                        sizes.num_heads * sizes.v_head_dim,
                    )?;
                    // A decode's queries are projected to latents.
                    check(
                        "the latent queries of all heads",
                        sizes.num_heads * sizes.head_size(),
                    )?;
                }
                Mixer::Recurrent(sizes) => {
                    check("a recurrence's inputs", sizes.conv_dim())?;
                    for shape in sizes.state_shapes() {
                        let elements: u64 = shape.iter().map(|&size| u64::from(size)).product();
                        if elements > MAX_STATE {
                            return Err(refuse(format!(
                                "a recurrent state of {shape:?}, {elements} elements, above {MAX_STATE},"
                            )));
                        }
                    }
                }
            }
        }
        for feed_forward in &config.traits.feed_forwards {
            if let FeedForward::Experts(experts) = feed_forward {
                check(
                    "shared experts",
                    experts.shared_intermediate_size.unwrap_or(0),
                )?;
            }
        }
        Ok(())
    }
}

fn deepseek_v2(fields: &Fields<'_>, mut config: ModelConfig) -> Result<ModelConfig, ModelError> {
    let layers = config.num_hidden_layers;
    let sizes = LatentSizes {
        num_heads: config.num_attention_heads,
        kv_lora_rank: fields.width("kv_lora_rank")?,
        qk_nope_head_dim: fields.width("qk_nope_head_dim")?,
        qk_rope_head_dim: fields.width("qk_rope_head_dim")?,
        v_head_dim: fields.width("v_head_dim")?,
        scale: config.attention_scale(),
    };
    config.rope.dim = sizes.qk_rope_head_dim;
    config.rope.style = RopeStyle::Interleaved;
    config.mixers = vec![Mixer::Latent(sizes); layers];
    config.traits.q_lora_rank = fields.size_unless_null("q_lora_rank", MAX_WIDTH, 1536)?;
    let dense = fields.of("first_k_dense_replace", "a whole number", Value::as_u64)?;
    let dense = dense.unwrap_or(0);
    if dense >= layers as u64 {
        return Ok(config);
    }
    fields.only(
        "scoring_func",
        &["softmax"],
        "use a model whose gate is a softmax",
    )?;
    fields.absent(
        "norm_topk_prob",
        "transformers' DeepSeek-V2 does not norm the weights of chosen experts; use a model that does not either",
    )?;
    match fields.get("moe_layer_freq") {
        None => {}
        Some(every) if *every == 1 => {}
        Some(other) => {
            return Err(unsupported(
                fields.path,
                format!("moe_layer_freq {other}"),
                "use a model with experts in every layer from first_k_dense_replace on",
            ));
        }
    }
    let routed = fields.size_unless_null("n_routed_experts", MAX_EXPERTS, 64)?;
    let routed = routed.ok_or_else(|| fields.missing("n_routed_experts"))?;
    let (num_experts, num_experts_per_tok) = fields.chosen_experts(routed)?;
    fields.only(
        "topk_method",
        &["greedy", "group_limited_greedy"],
        "use a model with greedy or group_limited_greedy",
    )?;
    let grouped = fields.get("topk_method").and_then(Value::as_str) == Some("group_limited_greedy");
    let groups = match grouped {
        false => None,
        true => {
            let groups = fields.size("n_group", MAX_EXPERTS)?;
            let chosen = fields.size("topk_group", MAX_EXPERTS)?;
            if chosen > groups
                || !num_experts.is_multiple_of(groups)
                || num_experts_per_tok > chosen * (num_experts / groups)
            {
                return Err(fields.corrupt(format!(
                    "{num_experts_per_tok} of {num_experts} experts in {chosen} of {groups} groups cannot be chosen"
                )));
            }
            Some((groups, chosen))
        }
    };
    let width = fields.size_unless_null("moe_intermediate_size", MAX_WIDTH, 1407)?;
    let width = width.ok_or_else(|| fields.missing("moe_intermediate_size"))?;
    let shared = fields.size_unless_null("n_shared_experts", MAX_EXPERTS, 2)?;
    let experts = FeedForward::Experts(ExpertsConfig {
        num_experts,
        num_experts_per_tok,
        moe_intermediate_size: width,
        shared_intermediate_size: shared.map(|count| count * width),
        shared_gate: false,
        routing: Routing::Softmax {
            norm_topk_prob: false,
            scaling_factor: fields.positive("routed_scaling_factor", Some(1.0))?,
            groups,
        },
    });
    config.traits.feed_forwards = (0..layers as u64)
        .map(|layer| match layer < dense {
            true => FeedForward::Dense {
                intermediate_size: config.intermediate_size,
            },
            false => experts,
        })
        .collect();
    Ok(config)
}

fn bamba(fields: &Fields<'_>, mut config: ModelConfig) -> Result<ModelConfig, ModelError> {
    config.rope.dim = fields.rotary_dim(config.head_dim, 0.5)?;
    let inner = fields.width("mamba_expand")? * config.hidden_size;
    let heads = fields.width("mamba_n_heads")?;
    let head_dim = match fields.get("mamba_d_head") {
        Some(Value::String(auto)) if auto == "auto" => inner / heads,
        _ => fields.width("mamba_d_head")?,
    };
    if heads * head_dim != inner {
        return Err(fields.corrupt(format!(
            "{heads} Mamba heads of {head_dim} are not mamba_expand times the hidden size, {inner}"
        )));
    }
    let n_groups = fields.width("mamba_n_groups")?;
    if !heads.is_multiple_of(n_groups) {
        return Err(fields.corrupt(format!(
            "{heads} Mamba heads are not a multiple of {n_groups} groups"
        )));
    }
    let mamba = Mixer::Recurrent(MambaConfig::Mamba2(Mamba2Config {
        num_heads: heads,
        head_dim,
        n_groups,
        state_size: fields.width("mamba_d_state")?,
        conv_kernel: taps(fields, "mamba_d_conv")?,
        chunk_size: fields.size("mamba_chunk_size", MAX_CONTEXT)?,
        time_step_limit: time_step_limit(fields)?,
    }));
    let attention = fields.layers("attn_layer_indices")?.unwrap_or_default();
    config.mixers = (0..config.num_hidden_layers)
        .map(|layer| match attention.contains(&layer) {
            true => full_attention(),
            false => mamba,
        })
        .collect();
    config.traits.conv_bias = fields.flag("mamba_conv_bias", true)?;
    config.traits.mamba_proj_bias = fields.flag("mamba_proj_bias", false)?;
    Ok(config)
}

fn qwen3_next(fields: &Fields<'_>, mut config: ModelConfig) -> Result<ModelConfig, ModelError> {
    let layers = config.num_hidden_layers;
    config.rope.dim = fields.rotary_dim(config.head_dim, 0.25)?;
    config.traits.norm_offset = 1.0;
    config.traits.head_norm = HeadNorm::Weighted;
    config.traits.output_gate = true;
    let (num_k_heads, num_v_heads) = (
        fields.width("linear_num_key_heads")?,
        fields.width("linear_num_value_heads")?,
    );
    if !num_v_heads.is_multiple_of(num_k_heads) {
        return Err(fields.corrupt(format!(
            "linear_num_value_heads is {num_v_heads}, not a multiple of linear_num_key_heads, {num_k_heads}"
        )));
    }
    let linear = Mixer::Recurrent(MambaConfig::Gdn(GdnConfig {
        num_k_heads,
        num_v_heads,
        head_k_dim: fields.width("linear_key_head_dim")?,
        head_v_dim: fields.width("linear_value_head_dim")?,
        conv_kernel: taps(fields, "linear_conv_kernel_dim")?,
    }));
    let listed = fields.layer_types(layers, "full_attention", "linear_attention")?;
    let every = fields.optional_size("full_attention_interval", MAX_LAYERS)?;
    let every = every.unwrap_or(4);
    config.mixers = (0..layers)
        .map(|layer| {
            let full = listed.as_ref().map(|full| full[layer]);
            match full.unwrap_or((layer + 1).is_multiple_of(every)) {
                true => full_attention(),
                false => linear,
            }
        })
        .collect();
    let dense = fields.layers("mlp_only_layers")?.unwrap_or_default();
    let step = fields.optional_size("decoder_sparse_step", MAX_LAYERS)?;
    let step = step.unwrap_or(1);
    let (num_experts, num_experts_per_tok) = fields.experts("num_experts")?;
    let experts = FeedForward::Experts(ExpertsConfig {
        num_experts,
        num_experts_per_tok,
        moe_intermediate_size: fields.width("moe_intermediate_size")?,
        shared_intermediate_size: Some(fields.width("shared_expert_intermediate_size")?),
        shared_gate: true,
        routing: Routing::Softmax {
            norm_topk_prob: fields.flag("norm_topk_prob", true)?,
            scaling_factor: 1.0,
            groups: None,
        },
    });
    config.traits.feed_forwards = (0..layers)
        .map(
            |layer| match !dense.contains(&layer) && (layer + 1).is_multiple_of(step) {
                true => experts,
                false => FeedForward::Dense {
                    intermediate_size: config.intermediate_size,
                },
            },
        )
        .collect();
    Ok(config)
}

fn gemma3(fields: &Fields<'_>, mut config: ModelConfig) -> Result<ModelConfig, ModelError> {
    for name in ["attn_logit_softcapping", "final_logit_softcapping"] {
        fields.absent(name, "use a model without soft caps (Gemma 3 has none)")?;
    }
    fields.absent("use_bidirectional_attention", "use a causal model")?;
    fields.only(
        "hidden_activation",
        &["gelu_pytorch_tanh"],
        "use a model with gelu_pytorch_tanh",
    )?;
    let layers = config.num_hidden_layers;
    let window = fields.size("sliding_window", MAX_CONTEXT)?;
    let listed = fields.layer_types(layers, "sliding_attention", "full_attention")?;
    let every = fields.optional_size("sliding_window_pattern", MAX_LAYERS)?;
    let every = every.unwrap_or(6);
    config.mixers = (0..layers)
        .map(|layer| {
            let sliding = listed.as_ref().map(|sliding| sliding[layer]);
            let sliding = sliding.unwrap_or(!(layer + 1).is_multiple_of(every));
            Mixer::Attention {
                sliding_window: sliding.then_some(window),
                attention_chunk_size: None,
            }
        })
        .collect();
    config.sliding_window = Some(window);
    // transformers 5 lists the local rotation beside the global one; 4 has its base alone.
    let local = match fields.get("rope_parameters") {
        Some(value) if value.get("sliding_attention").is_some() => {
            fields.rope("sliding_attention", 10_000.0)?
        }
        _ => RopeConfig {
            theta: fields.positive("rope_local_base_freq", Some(10_000.0))?,
            scaling: super::config::RopeScaling::None,
            ..config.rope
        },
    };
    config.traits = Traits {
        embedding_scale: Some((config.hidden_size as f32).sqrt()),
        norm_offset: 1.0,
        post_norms: true,
        activation: Activation::GeluTanh,
        query_pre_attn_scalar: Some(fields.positive("query_pre_attn_scalar", None)?),
        head_norm: HeadNorm::Weighted,
        local_rope: Some(RopeConfig {
            dim: config.head_dim,
            ..local
        }),
        ..Traits::default()
    };
    Ok(config)
}

fn llama4(fields: &Fields<'_>, mut config: ModelConfig) -> Result<ModelConfig, ModelError> {
    let layers = config.num_hidden_layers;
    config.rope.style = RopeStyle::Interleaved;
    // A chunk that holds every context is none.
    let chunk = fields
        .size_unless_null("attention_chunk_size", MAX_CONTEXT, 8192)?
        .filter(|chunk| *chunk < config.max_position_embeddings);
    let every = fields.optional_size("no_rope_layer_interval", MAX_LAYERS)?;
    let every = every.unwrap_or(4);
    let listed = match fields.get("no_rope_layers") {
        Some(Value::Array(list)) if list.is_empty() => None,
        _ => fields.by_layer("no_rope_layers", layers, |layer| {
            layer.as_u64().map(|number| number != 0)
        })?,
    };
    // Its name notwithstanding, the list says which layers rotate.
    let rotates: Vec<bool> = listed.unwrap_or_else(|| {
        (0..layers)
            .map(|i| !(i + 1).is_multiple_of(every))
            .collect()
    });
    let chunked = fields.layer_types(layers, "chunked_attention", "full_attention")?;
    let chunked = chunked.unwrap_or_else(|| rotates.clone());
    config.mixers = chunked
        .iter()
        .map(|chunked| Mixer::Attention {
            sliding_window: None,
            attention_chunk_size: chunk.filter(|_| *chunked),
        })
        .collect();
    let moe_layers = match fields.layers("moe_layers")? {
        Some(layers) => layers,
        None => {
            let step = fields.optional_size("interleave_moe_layer_step", MAX_LAYERS)?;
            let step = step.unwrap_or(1);
            (0..layers)
                .filter(|i| (i + 1).is_multiple_of(step))
                .collect()
        }
    };
    let (num_experts, num_experts_per_tok) = fields.experts("num_local_experts")?;
    let width = fields.width("intermediate_size")?;
    let experts = FeedForward::Experts(ExpertsConfig {
        num_experts,
        num_experts_per_tok,
        moe_intermediate_size: width,
        shared_intermediate_size: Some(width),
        shared_gate: false,
        routing: Routing::SigmoidOfInput,
    });
    config.traits = Traits {
        head_norm: match fields.flag("use_qk_norm", true)? {
            true => HeadNorm::Unweighted,
            false => HeadNorm::None,
        },
        unrotated: rotates.iter().map(|rotates| !rotates).collect(),
        temperature: match fields.flag("attn_temperature_tuning", true)? {
            true => Some(Temperature {
                floor_scale: fields.positive("floor_scale", Some(8192.0))?,
                attn_scale: fields.positive("attn_scale", Some(0.1))?,
            }),
            false => None,
        },
        feed_forwards: (0..layers)
            .map(|layer| match moe_layers.contains(&layer) {
                true => experts,
                false => FeedForward::Dense {
                    intermediate_size: config.intermediate_size,
                },
            })
            .collect(),
        ..Traits::default()
    };
    Ok(config)
}

fn full_attention() -> Mixer {
    Mixer::Attention {
        sliding_window: None,
        attention_chunk_size: None,
    }
}

/// The bounds of a Mamba step. JSON has no infinity: without the field there is no upper bound.
fn time_step_limit(fields: &Fields<'_>) -> Result<(f32, f32), ModelError> {
    const NAME: &str = "time_step_limit";
    let Some(value) = fields.get(NAME) else {
        return Ok((0.0, f32::INFINITY));
    };
    let bounds = match value.as_array().map(Vec::as_slice) {
        Some([low, high]) => low.as_f64().zip(high.as_f64()),
        _ => None,
    };
    match bounds.map(|(low, high)| (low as f32, high as f32)) {
        Some((low, high)) if low.is_finite() && (0.0..=high).contains(&low) => Ok((low, high)),
        _ => Err(ModelError::Corrupt {
            path: fields.path.to_owned(),
            what: format!("{NAME} is {value}"),
            remedy: "make it a list of two numbers, the first at least 0 and at most the second, or null for no limit",
        }),
    }
}

/// Taps of a convolution: the current token's and at least one before it.
fn taps(fields: &Fields<'_>, name: &str) -> Result<usize, ModelError> {
    match fields.size(name, MAX_TAPS)? {
        1 => Err(fields.corrupt(format!("{name} is 1, not within 2 to {MAX_TAPS}"))),
        taps => Ok(taps),
    }
}

#[cfg(test)]
#[path = "families_tests.rs"]
mod tests;
