use super::*;
use crate::model::config::RopeScaling;
use serde_json::json;

fn config(mut json: Value, more: &Value) -> ModelConfig {
    for (field, value) in more.as_object().expect("fields") {
        json[field] = value.clone();
    }
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("config.json"), json.to_string()).expect("written");
    ModelConfig::from_hf_dir(dir.path()).expect("valid")
}

fn base(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
    })
}

fn windows(config: &ModelConfig) -> Vec<Option<usize>> {
    let layers = 0..config.num_hidden_layers;
    layers
        .map(|layer| config.layer_sliding_window(layer))
        .collect()
}

#[test]
fn gemma3s_layers_and_rotations_are_read_in_every_spelling() {
    let gemma = |more: &Value| {
        let mut json = base("gemma3_text");
        json["sliding_window"] = 8.into();
        json["query_pre_attn_scalar"] = 64.into();
        config(json, more)
    };
    let by_default = gemma(&json!({}));
    let mut expected = vec![Some(8); 7];
    expected[5] = None;
    assert_eq!(windows(&by_default), expected, "every sixth sees all");
    assert!(by_default.tie_word_embeddings);
    assert_eq!(by_default.attention_scale(), 0.125);
    let local = |config: &ModelConfig| config.traits.local_rope.expect("one of its own");
    assert_eq!(by_default.rope.theta, 1e6);
    assert_eq!(local(&by_default).theta, 1e4);
    assert_eq!(
        windows(&gemma(&json!({"sliding_window_pattern": 2})))[..3],
        [Some(8), None, Some(8)]
    );
    // transformers 4 and 5.
    for more in [
        json!({"rope_theta": 5e5, "rope_local_base_freq": 2e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        json!({"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
        }}),
    ] {
        let config = gemma(&more);
        assert_eq!(config.rope.theta, 5e5, "{more}");
        assert_eq!(
            config.rope.scaling,
            RopeScaling::Linear { factor: 8.0 },
            "{more}"
        );
        let local = local(&config);
        assert_eq!(
            (local.theta, local.scaling),
            (2e3, RopeScaling::None),
            "{more}"
        );
    }
}

#[test]
fn llama4s_layers_follow_its_lists_or_its_intervals() {
    let llama4 = |more: &Value| {
        let mut json = base("llama4_text");
        json["intermediate_size_mlp"] = 128.into();
        json["num_local_experts"] = 4.into();
        json["num_experts_per_tok"] = 1.into();
        json["attention_chunk_size"] = 32.into();
        config(json, more)
    };
    let rotated = |config: &ModelConfig| -> Vec<bool> {
        config
            .traits
            .unrotated
            .iter()
            .map(|unrotated| !unrotated)
            .collect()
    };
    let chunked = |config: &ModelConfig| -> Vec<bool> {
        let chunked = |mixer: &Mixer| match mixer {
            Mixer::Attention {
                attention_chunk_size,
                ..
            } => *attention_chunk_size == Some(32),
            _ => panic!("all layers have attention"),
        };
        config.mixers.iter().map(chunked).collect()
    };
    let experts = |config: &ModelConfig| -> Vec<bool> {
        let layers = config.traits.feed_forwards.iter();
        layers
            .map(|layer| matches!(layer, FeedForward::Experts(_)))
            .collect()
    };
    let by_default = llama4(&json!({"no_rope_layers": []}));
    let every_fourth = [true, true, true, false, true, true, true];
    assert_eq!(rotated(&by_default), every_fourth);
    assert_eq!(chunked(&by_default), every_fourth);
    assert_eq!(experts(&by_default), [true; 7]);
    assert_eq!(by_default.traits.head_norm, HeadNorm::Unweighted);
    assert_eq!(by_default.rope.theta, 500_000.0);
    let listed = llama4(&json!({
        "no_rope_layers": [0, 1, 1, 0, 1, 1, 1], "interleave_moe_layer_step": 3, "attn_temperature_tuning": 0,
    }));
    assert_eq!(
        rotated(&listed),
        [false, true, true, false, true, true, true]
    );
    assert_eq!(chunked(&listed), rotated(&listed));
    assert_eq!(
        experts(&listed),
        [false, false, true, false, false, true, false]
    );
    assert_eq!(listed.traits.temperature, None);
    let moe = llama4(&json!({"moe_layers": [0, 6]}));
    assert_eq!(
        experts(&moe),
        [true, false, false, false, false, false, true]
    );
}

#[test]
fn hybrids_know_their_recurrent_layers_and_their_sizes() {
    let mut json = base("bamba");
    for (field, value) in [
        ("n_heads", 8),
        ("n_groups", 2),
        ("d_state", 16),
        ("d_conv", 4),
        ("expand", 2),
        ("chunk_size", 8),
    ] {
        json[format!("mamba_{field}")] = value.into();
    }
    let bamba = config(
        json,
        &json!({"mamba_d_head": "auto", "attn_layer_indices": [2]}),
    );
    for (layer, mixer) in bamba.mixers.iter().enumerate() {
        match mixer {
            Mixer::Recurrent(MambaConfig::Mamba2(sizes)) => {
                assert_eq!(
                    (layer == 2, sizes.head_dim, sizes.conv_kernel),
                    (false, 16, 4)
                );
            }
            other => assert_eq!((layer, *other), (2, full_attention())),
        }
    }
    assert_eq!((bamba.rope.dim, bamba.traits.conv_bias), (8, true));

    let mut json = base("qwen3_next");
    for (field, value) in [
        ("linear_num_key_heads", 2),
        ("linear_num_value_heads", 4),
        ("linear_key_head_dim", 16),
        ("linear_value_head_dim", 12),
        ("linear_conv_kernel_dim", 4),
        ("num_experts", 8),
        ("num_experts_per_tok", 2),
        ("moe_intermediate_size", 24),
        ("shared_expert_intermediate_size", 32),
    ] {
        json[field] = value.into();
    }
    let qwen = config(
        json,
        &json!({"decoder_sparse_step": 2, "mlp_only_layers": [5]}),
    );
    let full: Vec<bool> = qwen
        .mixers
        .iter()
        .map(|mixer| *mixer == full_attention())
        .collect();
    assert_eq!(full, [false, false, false, true, false, false, false]);
    let experts: Vec<bool> = (0..7)
        .map(|layer| matches!(qwen.traits.feed_forward(layer, 96), FeedForward::Experts(_)))
        .collect();
    assert_eq!(experts, [false, true, false, true, false, false, false]);
    assert_eq!(qwen.rope.dim, 4);
}
