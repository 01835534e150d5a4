use super::*;
use serde_json::json;

fn hf(change: impl Fn(&mut Value)) -> Result<ModelConfig, String> {
    let mut json = json!({
        "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "eos_token_id": [2, 3],
    });
    change(&mut json);
    let text = serde_json::to_vec(&json).expect("JSON");
    ModelConfig::from_hf_json(&text, Path::new("config.json")).map_err(|e| e.to_string())
}

#[test]
fn llama_defaults() {
    let config = hf(|_| ()).expect("valid");
    assert_eq!(
        (config.head_dim, config.q_size(), config.kv_size()),
        (8, 64, 16)
    );
    assert_eq!(config.rope.theta, 5000.0);
    assert_eq!(config.rope.style, RopeStyle::HalfRotation);
    assert_eq!(config.eos_token_ids, [2, 3]);
    assert_eq!(config.sliding_window, None);
    assert!(!config.attention_bias && !config.tie_word_embeddings);
}

#[test]
fn both_spellings_of_llama3_scaling() {
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024, "rope_theta": 500000.0,
    });
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 1024,
    };
    for key in ["rope_scaling", "rope_parameters"] {
        let config = hf(|j| j[key] = scaling.clone()).expect("valid");
        assert_eq!(
            (config.rope.scaling, config.rope.theta),
            (expected, 500_000.0)
        );
    }
}

#[test]
fn families_differ_where_they_do() {
    let qwen2 = hf(|j| {
        j["model_type"] = "qwen2".into();
        j["sliding_window"] = 512.into();
        j["use_sliding_window"] = false.into();
    });
    let qwen2 = qwen2.expect("valid");
    assert!(qwen2.attention_bias);
    assert_eq!(qwen2.sliding_window, None);
    let windowed = hf(|j| {
        j["model_type"] = "qwen2".into();
        j["sliding_window"] = 512.into();
        j["use_sliding_window"] = true.into();
        j["max_window_layers"] = 1.into();
    });
    let windowed = windowed.expect("valid");
    assert_eq!(
        (
            windowed.layer_sliding_window(0),
            windowed.layer_sliding_window(1)
        ),
        (None, Some(512))
    );
    let mistral = hf(|j| {
        j["model_type"] = "mistral".into();
        j["sliding_window"] = 256.into();
    });
    assert_eq!(mistral.expect("valid").layer_sliding_window(0), Some(256));
    let qwen3 = hf(|j| {
        j["model_type"] = "qwen3".into();
        j["head_dim"] = 16.into();
    });
    assert_eq!(qwen3.expect("valid").q_size(), 128);
}

#[test]
fn bad_values_are_named() {
    let refused = |change: &dyn Fn(&mut Value)| hf(change).expect_err("refused");
    assert!(refused(&|j| j["model_type"] = "gpt_oss".into()).contains("'gpt_oss'"));
    assert!(refused(&|j| j["hidden_size"] = 0.into()).contains("hidden_size is 0"));
    assert!(
        refused(&|j| j["vocab_size"] = (1u64 << 40).into()).contains("vocab_size is 1099511627776")
    );
    assert!(refused(&|j| j["num_key_value_heads"] = 3.into()).contains("multiple of 3"));
    assert!(refused(&|j| j["num_attention_heads"] = 7.into()).contains("7 heads"));
    assert!(refused(&|j| j["head_dim"] = 7.into()).contains("must be even"));
    assert!(refused(&|j| j["hidden_act"] = "gelu".into()).contains("'gelu'"));
    assert!(refused(&|j| j["rope_scaling"] = json!({"type": "yarn"})).contains("'yarn'"));
    assert!(refused(&|j| j["rope_scaling"] = json!({"rope_type": "linear"})).contains("'factor'"));
    assert!(refused(&|j| j["rms_norm_eps"] = (-1.0).into()).contains("-1"));
    assert!(refused(&|j| j["intermediate_size"] = "x".into()).contains("config.json"));
}

const NO_TOKENS: [&str; 9] = [
    "\"94\"", "94.0", "{}", "[[1]]", "[2,null]", "-1", "1e12", "\"x\"", "true",
];

#[test]
fn end_tokens_that_are_none_are_named_and_refused() {
    for text in NO_TOKENS {
        let value: Value = serde_json::from_str(text).expect("JSON");
        for name in ["eos_token_id", "bos_token_id"] {
            let refusal = hf(|j| j[name] = value.clone()).expect_err("refused");
            let expected =
                format!("{name} is {value}; make it a token id, a list of them, or null");
            assert!(refusal.contains(&expected), "{refusal}");
        }
    }
    for (value, expected) in [
        (json!(null), vec![]),
        (json!([]), vec![]),
        (json!(94), vec![94]),
    ] {
        let config = hf(|j| j["eos_token_id"] = value.clone()).expect("valid");
        assert_eq!(config.eos_token_ids, expected, "{value}");
    }
}

#[test]
fn generation_configs_end_tokens_are_added_or_refused() {
    let with = |generation: &str| {
        let dir = tempfile::tempdir().expect("a directory");
        let config = json!({
            "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 8, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
        });
        let write = |name: &str, text: &str| {
            std::fs::write(dir.path().join(name), text).expect("written");
        };
        write("config.json", &config.to_string());
        write("generation_config.json", generation);
        ModelConfig::from_hf_dir(dir.path()).map_err(|e| e.to_string())
    };
    let config = with(r#"{"eos_token_id": [2, 7]}"#).expect("valid");
    assert_eq!(config.eos_token_ids, [2, 7]);
    for none in [r#"{"eos_token_id": null}"#, "{}"] {
        assert_eq!(with(none).expect("valid").eos_token_ids, [2]);
    }
    for text in NO_TOKENS {
        let refusal = with(&format!("{{\"eos_token_id\": {text}}}")).expect_err("refused");
        assert!(
            refusal.contains("generation_config.json is not a usable model: eos_token_id is "),
            "{refusal}"
        );
    }
}

#[test]
fn a_partial_rotation_beside_the_base_comes_first() {
    for key in ["rope_scaling", "rope_parameters"] {
        let with = |partial: Value| {
            hf(|j| {
                j["head_dim"] = 16.into();
                j["partial_rotary_factor"] = 0.25.into();
                j[key] = json!({"rope_type": "default", "partial_rotary_factor": partial});
            })
        };
        assert_eq!(with(json!(0.5)).expect("valid").rope.dim, 8, "{key}");
        assert_eq!(with(json!(null)).expect("valid").rope.dim, 4, "{key}");
        for (partial, named) in [(0.0, "0"), (1.5, "1.5"), (-0.5, "-0.5")] {
            let refusal = with(json!(partial)).expect_err("refused");
            let expected = format!("partial_rotary_factor is {named}, not within (0, 1]");
            assert!(refusal.contains(&expected), "{refusal}");
        }
    }
}
