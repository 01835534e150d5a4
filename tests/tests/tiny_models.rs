//! The hybrid and latent families on tiny random models: our decoders on textbook attention and recurrences, against
//! transformers' logits and greedy tokens.

use serde_json::{Value, json};
use timetable_engine::model::{LoadOptions, Model, ModelError, Weights};
use timetable_tests::candle_reference::argmax;
use timetable_tests::naive::{NaiveAttention, batched_logits};
use timetable_tests::tiny_models::{Case, Recorded};

/// Between our logits and transformers', both in f32; the record has six digits after the point.
const MAX_DIFFERENCE: f32 = 1e-4;
/// What a feature must change at these sizes, or its test would show nothing.
const MIN_EFFECT: f32 = 0.02;

fn load(case: &Case) -> Result<Model, ModelError> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    case.write(dir.path());
    let options = LoadOptions {
        weights: Weights::F32,
        threads: Some(1),
    };
    Model::load(dir.path(), options)
}

/// The recorded rows of the longest prompt's logits.
fn logits(recorded: &Recorded, model: &mut Model) -> Vec<Vec<f32>> {
    let prompt = recorded.prompts.last().expect("a prompt");
    let all = batched_logits(model, std::slice::from_ref(prompt), prompt.len()).remove(0);
    recorded.rows.iter().map(|&row| all[row].clone()).collect()
}

fn max_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let (a, b) = (a.concat(), b.concat());
    assert_eq!(a.len(), b.len(), "rows of one vocabulary");
    a.iter().zip(&b).fold(0.0, |max, (a, b)| {
        assert!(a.is_finite() && b.is_finite(), "a logit is not finite");
        f32::max(max, (a - b).abs())
    })
}

#[test]
fn every_family_has_transformers_logits_and_greedy_tokens() {
    let recorded = Recorded::load();
    for case in &recorded.cases {
        let mut model = load(case).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        let difference = max_difference(&case.logits, &logits(&recorded, &mut model));
        eprintln!("{}: largest logit difference {difference:e}", case.name);
        assert!(
            difference <= MAX_DIFFERENCE,
            "{}: {difference:e}",
            case.name
        );
        let tokens = greedy(&mut model, &recorded.prompts, case.greedy[0].len());
        assert_eq!(tokens, case.greedy, "{}", case.name);
    }
    for family in [
        "deepseek_v2",
        "bamba",
        "qwen3_next",
        "gemma3_text",
        "llama4_text",
    ] {
        let of_family = recorded.cases.iter().filter(|case| case.family() == family);
        assert!(of_family.count() >= 2, "{family}");
    }
}

/// Greedy tokens of all prompts at once: one prefill of all, then steps of one token each.
fn greedy(model: &mut Model, prompts: &[Vec<u32>], count: usize) -> Vec<Vec<u32>> {
    let mut attention = NaiveAttention::new(model.config(), prompts.len());
    let vocab = model.config().vocab_size;
    let mut generated = vec![Vec::new(); prompts.len()];
    let mut next = prompts.to_vec();
    let mut done = vec![0; prompts.len()];
    let mut logits = Vec::new();
    for _ in 0..count {
        let batch: Vec<(usize, usize)> = next.iter().map(Vec::len).enumerate().collect();
        attention.schedule(&batch);
        let (mut positions, mut rows) = (Vec::new(), Vec::new());
        for &(request, tokens) in &batch {
            positions.extend((done[request]..done[request] + tokens).map(|at| at as i64));
            done[request] += tokens;
            rows.push(positions.len() - 1);
        }
        model
            .forward(
                &next.concat(),
                &positions,
                &mut attention,
                &rows,
                &mut logits,
            )
            .expect("a step runs");
        for (request, row) in logits.chunks_exact(vocab).enumerate() {
            let token = argmax(row) as u32;
            generated[request].push(token);
            next[request] = vec![token];
        }
    }
    generated
}

#[test]
fn every_family_has_the_same_logits_alone_and_in_any_batch() {
    let recorded = Recorded::load();
    for case in &recorded.cases {
        let mut model = load(case).expect("the model loads");
        let prompts = &recorded.prompts;
        let alone: Vec<_> = prompts
            .iter()
            .map(|p| batched_logits(&mut model, std::slice::from_ref(p), p.len()).remove(0))
            .collect();
        for chunk in [1, 5, 11] {
            let batched = batched_logits(&mut model, prompts, chunk);
            assert!(alone == batched, "{}: chunks of {chunk}", case.name);
        }
    }
}

/// Every field that a family is special by changes the logits when it is changed: nothing is read and then left out.
#[test]
fn every_field_of_the_families_matters() {
    let recorded = Recorded::load();
    for (family, index, changes) in [
        (
            "deepseek_v2",
            0,
            json!({"rope_theta": 500.0, "num_experts_per_tok": 1, "routed_scaling_factor": 3.0}),
        ),
        (
            "deepseek_v2",
            1,
            json!({"topk_group": 4, "topk_method": "greedy"}),
        ),
        (
            "bamba",
            0,
            json!({"partial_rotary_factor": 1.0, "rope_theta": 500.0}),
        ),
        (
            "qwen3_next",
            0,
            json!({"partial_rotary_factor": 1.0, "norm_topk_prob": false, "num_experts_per_tok": 1}),
        ),
        (
            "gemma3_text",
            0,
            json!({"sliding_window": 5, "rope_local_base_freq": 100.0, "rope_theta": 100.0,
            "query_pre_attn_scalar": 50, "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention"]}),
        ),
        ("gemma3_text", 1, json!({"rope_scaling": null})),
        (
            "llama4_text",
            0,
            json!({"attention_chunk_size": 5, "attn_scale": 2.0, "floor_scale": 1000.0, "use_qk_norm": false,
            "attn_temperature_tuning": false, "num_experts_per_tok": 2, "no_rope_layers": [1, 1, 1, 1],
            "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention"]}),
        ),
        ("llama4_text", 1, json!({"rope_scaling": null})),
    ] {
        let mut cases = recorded.cases.iter().filter(|case| case.family() == family);
        let case = cases.nth(index).expect("a case");
        for (field, value) in changes.as_object().expect("fields") {
            let mut model =
                load(&with(case, field, value)).expect("it loads with the field changed");
            let effect = max_difference(&case.logits, &logits(&recorded, &mut model));
            assert!(
                effect > MIN_EFFECT,
                "{family}: {field} {value} changes logits by {effect}"
            );
        }
    }
}

fn with(case: &Case, field: &str, value: &Value) -> Case {
    let mut config = case.config.clone();
    config[field] = value.clone();
    Case {
        name: case.name.clone(),
        config,
        tensors: case.tensors.clone(),
        logits: Vec::new(),
        greedy: Vec::new(),
        seed: case.seed,
    }
}

/// What is not computed is refused at the load, with the value and what to do.
#[test]
fn what_is_not_computed_is_refused() {
    let recorded = Recorded::load();
    for (family, field, value, expected) in [
        (
            "deepseek_v2",
            "rope_scaling",
            json!({"type": "yarn", "factor": 40}),
            "RoPE scaling 'yarn'",
        ),
        (
            "deepseek_v2",
            "scoring_func",
            json!("sigmoid"),
            "scoring_func 'sigmoid'",
        ),
        (
            "deepseek_v2",
            "norm_topk_prob",
            json!(true),
            "norm_topk_prob true",
        ),
        (
            "deepseek_v2",
            "topk_method",
            json!("noaux_tc"),
            "topk_method 'noaux_tc'",
        ),
        (
            "deepseek_v2",
            "quantization_config",
            json!({"quant_method": "fp8"}),
            "quantization_config",
        ),
        (
            "deepseek_v2",
            "num_experts_per_tok",
            json!(9),
            "num_experts_per_tok is 9, above 8 experts",
        ),
        ("deepseek_v2", "kv_lora_rank", json!(0), "kv_lora_rank is 0"),
        (
            "deepseek_v2",
            "kv_lora_rank",
            json!(31),
            "kv_a_proj_with_mqa",
        ),
        (
            "deepseek_v2",
            "v_head_dim",
            json!(1u64 << 40),
            "v_head_dim is 1099511627776",
        ),
        ("deepseek_v2", "qk_rope_head_dim", json!(7), "must be even"),
        ("bamba", "hidden_act", json!("gelu"), "hidden_act 'gelu'"),
        ("bamba", "mamba_n_heads", json!(7), "7 Mamba heads of 16"),
        (
            "bamba",
            "mamba_n_groups",
            json!(3),
            "not a multiple of 3 groups",
        ),
        ("bamba", "mamba_d_conv", json!(1), "mamba_d_conv is 1"),
        (
            "bamba",
            "mamba_d_state",
            json!("16"),
            "mamba_d_state is \"16\", not a whole number",
        ),
        (
            "qwen3_next",
            "linear_num_value_heads",
            json!(5),
            "not a multiple of linear_num_key_heads, 2",
        ),
        (
            "qwen3_next",
            "layer_types",
            json!(["full_attention"]),
            "layer_types has 1 entries",
        ),
        (
            "qwen3_next",
            "partial_rotary_factor",
            json!(1.5),
            "partial_rotary_factor is 1.5",
        ),
        ("qwen3_next", "head_dim", json!(null), "head_dim is missing"),
        (
            "gemma3_text",
            "final_logit_softcapping",
            json!(30.0),
            "final_logit_softcapping 30.0",
        ),
        (
            "gemma3_text",
            "attn_logit_softcapping",
            json!(50.0),
            "attn_logit_softcapping 50.0",
        ),
        (
            "gemma3_text",
            "use_bidirectional_attention",
            json!(true),
            "use_bidirectional_attention true",
        ),
        (
            "gemma3_text",
            "hidden_activation",
            json!("gelu"),
            "hidden_activation 'gelu'",
        ),
        (
            "gemma3_text",
            "layer_types",
            json!([
                "sinks",
                "full_attention",
                "full_attention",
                "full_attention"
            ]),
            "\"sinks\" at layer 0",
        ),
        (
            "gemma3_text",
            "query_pre_attn_scalar",
            json!(-1),
            "query_pre_attn_scalar is -1",
        ),
        (
            "llama4_text",
            "model_type",
            json!("llama4"),
            "'llama4', which sees pictures",
        ),
        (
            "gemma3_text",
            "model_type",
            json!("gemma3"),
            "'gemma3', which sees pictures",
        ),
        (
            "llama4_text",
            "model_type",
            json!("gpt_oss"),
            "unknown architecture 'gpt_oss'",
        ),
        ("llama4_text", "floor_scale", json!(0), "floor_scale is 0"),
        (
            "llama4_text",
            "no_rope_layers",
            json!([1, 0]),
            "no_rope_layers has 2 entries",
        ),
    ] {
        let mut cases = recorded.cases.iter().filter(|case| case.family() == family);
        let case = with(cases.next().expect("a case"), field, &value);
        let Err(refusal) = load(&case) else {
            panic!("{family} with {field} {value} loads");
        };
        let refusal = refusal.to_string();
        assert!(refusal.contains(expected), "{refusal}");
        assert!(refusal.contains("; "), "no remedy in: {refusal}");
    }
}
