use super::*;
use crate::model::config::RopeScaling;
use serde_json::json;

fn read(mut json: Value, more: &Value) -> Result<ModelConfig, ModelError> {
    for (field, value) in more.as_object().expect("fields") {
        json[field] = value.clone();
    }
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("config.json"), json.to_string()).expect("written");
    ModelConfig::from_hf_dir(dir.path())
}

fn config(json: Value, more: &Value) -> ModelConfig {
    read(json, more).expect("valid")
}

fn base(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
    })
}

/// `base` with the fields that its family needs.
fn valid(model_type: &str) -> Value {
    let own = match model_type {
        "deepseek_v2" => json!({
            "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
            "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
            "moe_intermediate_size": 24, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        }),
        "bamba" => json!({
            "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
            "mamba_chunk_size": 8, "mamba_d_head": "auto", "attn_layer_indices": [2],
        }),
        "qwen3_next" => json!({
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
            "linear_conv_kernel_dim": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
        }),
        "gemma3_text" => json!({"sliding_window": 8, "query_pre_attn_scalar": 64}),
        _ => json!({
            "intermediate_size_mlp": 128, "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 32,
        }),
    };
    let mut json = base(model_type);
    for (field, value) in own.as_object().expect("fields") {
        json[field] = value.clone();
    }
    json
}

fn windows(config: &ModelConfig) -> Vec<Option<usize>> {
    let layers = 0..config.num_hidden_layers;
    layers
        .map(|layer| config.layer_sliding_window(layer))
        .collect()
}

#[test]
fn gemma3s_layers_and_rotations_are_read_in_every_spelling() {
    let gemma = |more: &Value| config(valid("gemma3_text"), more);
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
    let llama4 = |more: &Value| config(valid("llama4_text"), more);
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
    let bamba = config(valid("bamba"), &json!({}));
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

    let qwen = config(
        valid("qwen3_next"),
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

#[test]
fn a_chunk_that_holds_every_context_is_none() {
    for (chunk, expected) in [(255, Some(255)), (256, None), (1 << 24, None)] {
        let llama4 = config(
            valid("llama4_text"),
            &json!({"attention_chunk_size": chunk}),
        );
        let Mixer::Attention {
            attention_chunk_size,
            ..
        } = llama4.mixer(0)
        else {
            panic!("attention everywhere");
        };
        assert_eq!(attention_chunk_size, expected, "{chunk}");
    }
}

/// `valid` without a field.
fn without(model_type: &str, name: &str) -> Value {
    let mut json = valid(model_type);
    json.as_object_mut().expect("fields").remove(name);
    json
}

#[test]
fn bambas_time_steps_are_limited_as_it_says() {
    let limit = |more: &Value| -> Result<(f32, f32), ModelError> {
        let bamba = read(valid("bamba"), more)?;
        match bamba.mixer(0) {
            Mixer::Recurrent(MambaConfig::Mamba2(sizes)) => Ok(sizes.time_step_limit),
            other => panic!("{other:?}"),
        }
    };
    for (more, expected) in [
        (json!({}), (0.0, f32::INFINITY)),
        (json!({"time_step_limit": null}), (0.0, f32::INFINITY)),
        (json!({"time_step_limit": [0, 1e300]}), (0.0, f32::INFINITY)),
        (json!({"time_step_limit": [0.25, 8]}), (0.25, 8.0)),
        (json!({"time_step_limit": [2, 2]}), (2.0, 2.0)),
    ] {
        assert_eq!(limit(&more).expect("valid"), expected, "{more}");
    }
    for value in [
        json!([2, 1]),
        json!([-1, 1]),
        json!([1]),
        json!([0, 1, 2]),
        json!([0, null]),
        json!(["0", "inf"]),
        json!([1e300, 1e300]),
        json!([]),
        json!(1),
        json!("x"),
        json!({}),
    ] {
        let refusal = limit(&json!({"time_step_limit": value})).expect_err("refused");
        let expected = format!("time_step_limit is {value}; make it a list of two numbers");
        assert!(refusal.to_string().contains(&expected), "{refusal}");
    }
}

#[test]
fn a_partial_rotation_beside_the_base_comes_first() {
    for (model_type, default) in [("bamba", 8), ("qwen3_next", 4)] {
        for key in ["rope_parameters", "rope_scaling"] {
            let with = |partial: Value, top: Value| {
                let rope = json!({"rope_type": "default", "partial_rotary_factor": partial});
                read(
                    valid(model_type),
                    &json!({key: rope, "partial_rotary_factor": top}),
                )
            };
            let dim = |partial, top| with(partial, top).expect("valid").rope.dim;
            assert_eq!(dim(json!(0.75), json!(0.125)), 12, "{model_type}, {key}");
            assert_eq!(dim(json!(1), json!(null)), 16, "{model_type}, {key}");
            assert_eq!(dim(json!(null), json!(0.125)), 2, "{model_type}, {key}");
            assert_eq!(
                dim(json!(null), json!(null)),
                default,
                "{model_type}, {key}"
            );
            for (partial, expected) in [
                (
                    json!(1.5),
                    "partial_rotary_factor is 1.5, not within (0, 1]",
                ),
                (json!(-0.5), "partial_rotary_factor is -0.5"),
                (json!(0), "partial_rotary_factor is 0"),
                (json!("x"), "its RoPE scaling: "),
            ] {
                let refusal = with(partial, json!(0.5)).expect_err("refused").to_string();
                assert!(refusal.contains(expected), "{refusal}");
            }
        }
    }
}

#[test]
fn a_field_left_out_has_transformers_default_and_null_is_none() {
    let experts = |json: Value, more: Value| match config(json, &more).traits.feed_forwards[6] {
        FeedForward::Experts(experts) => experts,
        FeedForward::Dense { .. } => panic!("experts from the second layer on"),
    };
    let shared = |json: Value, more: Value| experts(json, more).shared_intermediate_size;
    let name = "n_shared_experts";
    assert_eq!(
        shared(without("deepseek_v2", name), json!({})),
        Some(2 * 24)
    );
    assert_eq!(shared(valid("deepseek_v2"), json!({name: 1})), Some(24));
    assert_eq!(shared(valid("deepseek_v2"), json!({name: null})), None);
    let name = "n_routed_experts";
    assert_eq!(
        experts(without("deepseek_v2", name), json!({})).num_experts,
        64
    );
    let name = "moe_intermediate_size";
    let width = experts(without("deepseek_v2", name), json!({})).moe_intermediate_size;
    assert_eq!(width, 1407);
    for name in [
        "n_routed_experts",
        "moe_intermediate_size",
        "num_experts_per_tok",
    ] {
        let refusal = read(valid("deepseek_v2"), &json!({name: null})).expect_err("refused");
        assert!(
            refusal.to_string().contains(&format!("{name} is missing")),
            "{refusal}"
        );
    }
    let rank = |json: Value, more: Value| config(json, &more).traits.q_lora_rank;
    assert_eq!(
        rank(without("deepseek_v2", "q_lora_rank"), json!({})),
        Some(1536)
    );
    assert_eq!(
        rank(valid("deepseek_v2"), json!({"q_lora_rank": null})),
        None
    );

    let chunk = |json: Value, more: Value| {
        let mut json = json;
        json["max_position_embeddings"] = 10_000.into();
        match config(json, &more).mixer(0) {
            Mixer::Attention {
                attention_chunk_size,
                ..
            } => attention_chunk_size,
            other => panic!("{other:?}"),
        }
    };
    let name = "attention_chunk_size";
    assert_eq!(chunk(without("llama4_text", name), json!({})), Some(8192));
    assert_eq!(chunk(valid("llama4_text"), json!({name: null})), None);
}

#[test]
fn end_tokens_that_are_none_are_named_and_refused() {
    for model_type in [
        "deepseek_v2",
        "bamba",
        "qwen3_next",
        "gemma3_text",
        "llama4_text",
    ] {
        for value in [json!("94"), json!(94.0), json!([[1]]), json!(-1)] {
            let refusal = read(valid(model_type), &json!({"eos_token_id": value}));
            let refusal = refusal.expect_err("refused").to_string();
            let expected = format!("eos_token_id is {value}; make it a token id");
            assert!(refusal.contains(&expected), "{refusal}");
        }
        let both = config(valid(model_type), &json!({"eos_token_id": [1, 94]}));
        assert_eq!(both.eos_token_ids, [1, 94]);
    }
}

/// No number of a `config.json` leads to a panic, to a state or a width without bound, or to angles that are no numbers.
#[test]
fn bad_numbers_are_named_and_refused() {
    const BIG: u64 = 1 << 20;
    let families = [
        "deepseek_v2",
        "bamba",
        "qwen3_next",
        "gemma3_text",
        "llama4_text",
    ];
    let refused = |model_type: &str, changes: &Value, expected: &str| {
        let refusal = match read(valid(model_type), changes) {
            Err(refusal) => refusal.to_string(),
            Ok(_) => panic!("{model_type} with {changes} is accepted"),
        };
        assert!(
            refusal.contains(expected),
            "{model_type}, {changes}: {refusal}"
        );
        assert!(refusal.contains("; "), "no remedy in: {refusal}");
    };
    let sizes = |model_type: &str| -> Vec<String> {
        let json = valid(model_type);
        let sizes = json.as_object().expect("fields").iter();
        sizes
            .filter(|(name, value)| value.is_u64() && *name != "first_k_dense_replace")
            .map(|(name, _)| name.clone())
            .collect()
    };
    for model_type in families {
        read(valid(model_type), &json!({})).unwrap_or_else(|e| panic!("{model_type}: {e}"));
        for name in sizes(model_type) {
            // Latent attention has neither.
            if model_type == "deepseek_v2" && ["num_key_value_heads", "head_dim"].contains(&&*name)
            {
                continue;
            }
            for value in [
                json!(0),
                json!(-1),
                json!(u64::MAX),
                json!(1e30),
                json!("1"),
                json!([]),
            ] {
                // Scalars, not sizes: any positive number will do.
                if name == "query_pre_attn_scalar"
                    && value.as_f64().is_some_and(|value| value > 0.0)
                {
                    continue;
                }
                let expected = format!("{name} is ");
                refused(model_type, &json!({ &name: value }), &expected);
            }
        }
        for (changes, expected) in [
            (
                json!({"rms_norm_eps": 0}),
                "rms_norm_eps is 0, not a positive number",
            ),
            (json!({"rms_norm_eps": 1e300}), "rms_norm_eps is inf"),
            (json!({"rms_norm_eps": null}), "rms_norm_eps is missing"),
            (json!({"rope_theta": 0}), "rope_theta is 0"),
            (json!({"rope_theta": -1}), "rope_theta is -1"),
            (
                json!({"rope_parameters": {"rope_type": "default", "rope_theta": -2}}),
                "the RoPE base is -2",
            ),
            (
                json!({"rope_scaling": {"rope_type": "linear", "factor": 0}}),
                "Linear { factor: 0.0 } is out of range",
            ),
            (
                json!({"rope_scaling": {"rope_type": "linear", "factor": 1e-44}}),
                "out of range",
            ),
            (
                json!({"rope_scaling": {"rope_type": "linear", "factor": "8"}}),
                "its RoPE scaling: ",
            ),
            (
                json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0,
                    "original_max_position_embeddings": 64}}),
                "is out of range",
            ),
            (
                json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
                "original_max_position_embeddings is 0",
            ),
        ] {
            refused(model_type, &changes, expected);
        }
    }
    for (model_type, changes, expected) in [
        (
            "deepseek_v2",
            json!({"num_attention_heads": BIG}),
            "the values of all heads, 12582912 wide",
        ),
        (
            "deepseek_v2",
            json!({"num_attention_heads": 1024, "v_head_dim": 2048}),
            "the values of all heads, 2097152 wide, above 1048576,",
        ),
        (
            "deepseek_v2",
            json!({"num_attention_heads": 1024, "kv_lora_rank": 1024}),
            "the latent queries of all heads, 1056768 wide",
        ),
        (
            "deepseek_v2",
            json!({"n_shared_experts": 4096, "moe_intermediate_size": 512}),
            "shared experts, 2097152 wide",
        ),
        (
            "deepseek_v2",
            json!({"num_experts_per_tok": 9}),
            "num_experts_per_tok is 9, above 8",
        ),
        // Two groups have four experts.
        (
            "deepseek_v2",
            json!({"num_experts_per_tok": 5}),
            "5 of 8 experts in 2 of 4 groups cannot be chosen",
        ),
        (
            "deepseek_v2",
            json!({"n_group": 3}),
            "3 of 8 experts in 2 of 3 groups",
        ),
        (
            "deepseek_v2",
            json!({"n_group": 16}),
            "3 of 8 experts in 2 of 16 groups",
        ),
        (
            "deepseek_v2",
            json!({"topk_group": 5}),
            "3 of 8 experts in 5 of 4 groups",
        ),
        (
            "deepseek_v2",
            json!({"n_group": null}),
            "n_group is missing",
        ),
        (
            "deepseek_v2",
            json!({"first_k_dense_replace": -1}),
            "first_k_dense_replace is -1",
        ),
        (
            "deepseek_v2",
            json!({"qk_rope_head_dim": 7}),
            "7 rotated dimensions",
        ),
        (
            "deepseek_v2",
            json!({"routed_scaling_factor": 0}),
            "routed_scaling_factor is 0",
        ),
        (
            "deepseek_v2",
            json!({"routed_scaling_factor": 1e39}),
            "routed_scaling_factor is inf",
        ),
        (
            "bamba",
            json!({"num_attention_heads": 5}),
            "5 query heads are not a multiple of 2",
        ),
        ("bamba", json!({"mamba_n_heads": 7}), "7 Mamba heads of 18"),
        (
            "bamba",
            json!({"mamba_n_heads": 256}),
            "256 Mamba heads of 0",
        ),
        ("bamba", json!({"mamba_d_head": 15}), "8 Mamba heads of 15"),
        (
            "bamba",
            json!({"mamba_n_groups": 3}),
            "not a multiple of 3 groups",
        ),
        ("bamba", json!({"mamba_d_conv": 1}), "mamba_d_conv is 1"),
        ("bamba", json!({"mamba_d_conv": 65}), "mamba_d_conv is 65"),
        (
            "bamba",
            json!({"mamba_expand": BIG, "hidden_size": BIG}),
            "a recurrence's inputs, 1099511627840 wide",
        ),
        (
            "bamba",
            json!({"hidden_size": 1, "mamba_expand": 1 << 19, "mamba_n_heads": 1, "mamba_n_groups": 1, "mamba_d_state": 1 << 18,
                "head_dim": 16}),
            "a recurrent state of [1, 524288, 262144], 137438953472 elements, above 16777216,",
        ),
        (
            "bamba",
            json!({"mamba_d_state": 1 << 18, "mamba_n_groups": 1, "mamba_d_conv": 64}),
            "a recurrent state of [524416, 63]",
        ),
        (
            "bamba",
            json!({"attn_layer_indices": [-1]}),
            "attn_layer_indices is [-1]",
        ),
        (
            "bamba",
            json!({"partial_rotary_factor": 1e-9}),
            "0 rotated dimensions",
        ),
        (
            "bamba",
            json!({"partial_rotary_factor": 1.01}),
            "partial_rotary_factor is 1.01",
        ),
        (
            "qwen3_next",
            json!({"partial_rotary_factor": -0.5}),
            "partial_rotary_factor is -0.5",
        ),
        (
            "qwen3_next",
            json!({"head_dim": 20}),
            "5 rotated dimensions of a head of 20",
        ),
        (
            "qwen3_next",
            json!({"num_key_value_heads": 3}),
            "4 query heads are not a multiple of 3",
        ),
        (
            "qwen3_next",
            json!({"head_dim": BIG}),
            "4 heads of size 1048576 are too wide",
        ),
        (
            "qwen3_next",
            json!({"linear_num_value_heads": 3}),
            "linear_num_value_heads is 3, not a multiple of linear_num_key_heads, 2",
        ),
        (
            "qwen3_next",
            json!({"linear_num_value_heads": BIG}),
            "a recurrence's inputs, 12582976 wide",
        ),
        (
            "qwen3_next",
            json!({"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 1 << 18,
                "linear_value_head_dim": 1 << 18}),
            "a recurrent state of [1, 262144, 262144], 68719476736 elements",
        ),
        (
            "qwen3_next",
            json!({"linear_conv_kernel_dim": 1}),
            "linear_conv_kernel_dim is 1",
        ),
        (
            "qwen3_next",
            json!({"num_experts_per_tok": 9}),
            "above 8 experts",
        ),
        (
            "qwen3_next",
            json!({"decoder_sparse_step": 0}),
            "decoder_sparse_step is 0",
        ),
        (
            "qwen3_next",
            json!({"full_attention_interval": 0}),
            "full_attention_interval is 0",
        ),
        (
            "qwen3_next",
            json!({"mlp_only_layers": [0.5]}),
            "mlp_only_layers is [0.5]",
        ),
        (
            "gemma3_text",
            json!({"sliding_window_pattern": 0}),
            "sliding_window_pattern is 0",
        ),
        (
            "gemma3_text",
            json!({"query_pre_attn_scalar": 1e-60}),
            "query_pre_attn_scalar is 0",
        ),
        (
            "gemma3_text",
            json!({"rope_local_base_freq": -1}),
            "rope_local_base_freq is -1",
        ),
        (
            "gemma3_text",
            json!({"rope_local_base_freq": 1e-44}),
            "in the layers with a window, the RoPE base 0.000",
        ),
        (
            "gemma3_text",
            json!({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": -1}}}),
            "in the layers with a window, the RoPE base is -1",
        ),
        (
            "gemma3_text",
            json!({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "linear", "factor": 0, "rope_theta": 1e4}}}),
            "in the layers with a window, the RoPE base 10000 with the scaling Linear { factor: 0.0 } is out of range",
        ),
        (
            "llama4_text",
            json!({"no_rope_layer_interval": 0}),
            "no_rope_layer_interval is 0",
        ),
        (
            "llama4_text",
            json!({"interleave_moe_layer_step": 0}),
            "interleave_moe_layer_step is 0",
        ),
        (
            "llama4_text",
            json!({"num_experts_per_tok": 5}),
            "above 4 experts",
        ),
        (
            "llama4_text",
            json!({"floor_scale": -8}),
            "floor_scale is -8",
        ),
        (
            "llama4_text",
            json!({"attn_scale": 1e39}),
            "attn_scale is inf",
        ),
        (
            "llama4_text",
            json!({"head_dim": 7}),
            "7 rotated dimensions",
        ),
        (
            "llama4_text",
            json!({"no_rope_layers": [1, 1, 1, 1, 1, 1, -1]}),
            "no_rope_layers with -1 at layer 6",
        ),
        (
            "llama4_text",
            json!({"moe_layers": "all"}),
            "moe_layers is \"all\"",
        ),
    ] {
        refused(model_type, &changes, expected);
    }
}
