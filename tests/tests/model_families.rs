//! Every family that the engine promises, on tiny random models: Hugging Face directories and GGUF files against
//! candle-transformers' own decoders on the same tensors, textbook attention, f32 unless a test says otherwise.

use candle_core::DType;
use candle_core::quantized::GgmlDType;
use serde_json::{Value, json};
use std::path::Path;
use timetable_engine::model::{LoadOptions, Model, ModelError, Weights};
use timetable_tests::families::{CandleDecoder, TinyModel, tiny_config};
use timetable_tests::naive::batched_logits;

type Logits = Vec<Vec<Vec<f32>>>;

/// Between two f32 computations of one model.
const MAX_DIFFERENCE: f32 = 1e-3;
/// What a feature must change at these sizes, or its test would show nothing.
const MIN_EFFECT: f32 = 0.05;

fn open(path: &Path, weights: Weights) -> Result<Model, ModelError> {
    let options = LoadOptions {
        weights,
        threads: Some(1),
    };
    Model::load(path, options)
}

fn load(path: &Path, weights: Weights) -> Model {
    open(path, weights).expect("the model loads")
}

/// The model, through a directory in f32.
fn through_directory(model: &TinyModel) -> Result<Model, ModelError> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    model
        .write_hf(dir.path(), DType::F32, 1)
        .expect("it is written");
    open(dir.path(), Weights::F32)
}

/// Two requests of different lengths.
fn prompts() -> Vec<Vec<u32>> {
    let prompt = |p: u32| (0..34 + 6 * p).map(move |i| (p * 7919 + i * i * 31 + i * 17 + 5) % 61);
    (0..2).map(|p| prompt(p).collect()).collect()
}

fn candle_logits(model: &TinyModel) -> Logits {
    let mut candle = CandleDecoder::load(model).expect("candle loads it");
    let prompts = prompts();
    let logits = prompts.iter().map(|p| candle.logits(p).expect("it runs"));
    logits.collect()
}

fn max_difference(a: &Logits, b: &Logits) -> f32 {
    let (a, b): (Vec<_>, Vec<_>) = (a.concat().concat(), b.concat().concat());
    assert_eq!(a.len(), b.len(), "rows of one vocabulary");
    let differences = a.iter().zip(&b).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |max, difference| {
        assert!(difference.is_finite(), "a logit is not finite");
        f32::max(max, difference)
    })
}

/// The requests' logits, each alone and at once; the same, bit for bit, as in batches of both with chunks.
fn logits(model: &mut Model) -> Logits {
    let prompts = prompts();
    let alone: Logits = prompts
        .iter()
        .map(|p| batched_logits(model, std::slice::from_ref(p), p.len()).remove(0))
        .collect();
    for chunk in [1, 5, 11] {
        let batched = batched_logits(model, &prompts, chunk);
        assert!(alone == batched, "chunks of {chunk} change the logits");
    }
    alone
}

fn agrees_with_candle(what: &str, model: &TinyModel) -> Logits {
    let ours = logits(&mut through_directory(model).expect("the model loads"));
    let difference = max_difference(&candle_logits(model), &ours);
    eprintln!("{what}: largest logit difference {difference:e}");
    assert!(difference <= MAX_DIFFERENCE, "{what}: {difference:e}");
    ours
}

fn random(family: &str, changes: &Value, seed: u64) -> TinyModel {
    TinyModel::random(tiny_config(family, changes), seed).expect("a small model")
}

/// Fails unless the model computes something else without `field` of its config.
fn matters(model: &TinyModel, logits_with: &Logits, field: &str) {
    let mut without = model.clone();
    without.config[field] = Value::Null;
    let logits_without = logits(&mut through_directory(&without).expect("it loads without"));
    let effect = max_difference(logits_with, &logits_without);
    assert!(effect > MIN_EFFECT, "{field} changes logits by {effect}");
}

/// Wavelengths of heads of 16 at base 10,000 lie on both sides of 16 and of 64, and between.
fn llama3_scaling() -> Value {
    json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    })
}

#[test]
fn llama_with_llama3_scaling_and_tied_embeddings_agrees_with_candle() {
    let changes = json!({"rope_scaling": llama3_scaling(), "tie_word_embeddings": true});
    let model = random("llama", &changes, 1);
    let logits = agrees_with_candle("llama", &model);
    matters(&model, &logits, "rope_scaling");
}

/// What `tests/peers/transformers_logits.py` recorded.
#[derive(serde::Deserialize)]
struct Recorded {
    prompt: Vec<u32>,
    rows: Vec<usize>,
    cases: Vec<RecordedCase>,
}

#[derive(serde::Deserialize)]
struct RecordedCase {
    family: String,
    changes: Value,
    seed: u64,
    /// Of the rows.
    logits: Vec<Vec<f32>>,
}

#[test]
fn every_family_has_transformers_logits() {
    let path = timetable_tests::drive::tests_dir().join("vectors/transformers_logits.json");
    let text = std::fs::read_to_string(path).expect("the record");
    let recorded: Recorded = serde_json::from_str(&text).expect("its form");
    for case in &recorded.cases {
        let what = format!("{} with {}", case.family, case.changes);
        let model = random(&case.family, &case.changes, case.seed);
        let mut model = through_directory(&model).expect("the model loads");
        let prompt = std::slice::from_ref(&recorded.prompt);
        let all = batched_logits(&mut model, prompt, 7).remove(0);
        let ours = recorded.rows.iter().map(|&row| all[row].clone()).collect();
        let difference = max_difference(&vec![case.logits.clone()], &vec![ours]);
        eprintln!("{what}: largest logit difference {difference:e}");
        // The record has five digits after the point.
        assert!(difference <= 1e-4, "{what}: {difference:e}");
    }
    let families = ["llama", "mistral", "qwen2", "qwen3"];
    for family in families {
        let cases = recorded.cases.iter();
        assert!(
            cases.filter(|case| case.family == family).count() >= 2,
            "{family}"
        );
    }
}

/// SmolLM's shape: nine heads, three of keys and values, so that no width is a power of two.
#[test]
fn smollm_agrees_with_candle() {
    let changes = json!({
        "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 190,
        "tie_word_embeddings": true, "rope_theta": 100000,
    });
    agrees_with_candle("smollm", &random("llama", &changes, 2));
}

#[test]
fn qwen2_agrees_with_candle() {
    // A window that is not used must not be applied.
    let changes = json!({"rope_theta": 1e6, "sliding_window": 3, "use_sliding_window": false});
    agrees_with_candle("qwen2", &random("qwen2", &changes, 3));
}

#[test]
fn qwen2_with_a_sliding_window_agrees_with_candle() {
    let changes = json!({"sliding_window": 6, "use_sliding_window": true, "max_window_layers": 0});
    let model = random("qwen2", &changes, 4);
    let logits = agrees_with_candle("qwen2, window of 6", &model);
    matters(&model, &logits, "use_sliding_window");
}

#[test]
fn qwen3_with_heads_wider_than_the_hidden_size_agrees_with_candle() {
    let changes = json!({"head_dim": 32, "rope_theta": 1e6});
    agrees_with_candle("qwen3", &random("qwen3", &changes, 5));
    let changes = json!({"head_dim": 8, "attention_bias": true, "tie_word_embeddings": true});
    agrees_with_candle("qwen3, biases", &random("qwen3", &changes, 6));
}

#[test]
fn mistral_with_a_sliding_window_agrees_with_candle() {
    let changes = json!({"head_dim": 24, "sliding_window": 7});
    let model = random("mistral", &changes, 7);
    let logits = agrees_with_candle("mistral, window of 7", &model);
    matters(&model, &logits, "sliding_window");
}

#[test]
fn sharded_16_bit_weights_are_the_rounded_values_in_f32() {
    for family in ["llama", "qwen2", "qwen3"] {
        let changes = json!({"head_dim": 16, "rope_theta": 1e6});
        let model = random(family, &changes, 8);
        let exact = logits(&mut through_directory(&model).expect("the model loads"));
        for dtype in [DType::BF16, DType::F16] {
            let dir = tempfile::tempdir().expect("a temporary directory");
            model.write_hf(dir.path(), dtype, 2).expect("written");
            assert!(!dir.path().join("model.safetensors").exists());
            let rounded = model.rounded(dtype).expect("rounds");
            let rounded = logits(&mut through_directory(&rounded).expect("the model loads"));
            for weights in [Weights::F32, Weights::Auto] {
                let ours = logits(&mut load(dir.path(), weights));
                assert!(ours == rounded, "{family}, {dtype:?}, {weights:?}");
            }
            assert!(max_difference(&exact, &rounded) > 0.0);
        }
    }
}

/// Rows of 256 values and more, which every block size divides.
fn wide_model(family: &str, seed: u64) -> TinyModel {
    let mut changes = json!({
        "hidden_size": 256, "intermediate_size": 512, "vocab_size": 64, "tie_word_embeddings": family != "qwen2",
    });
    match family {
        "llama" => changes["rope_scaling"] = llama3_scaling(),
        "qwen3" => changes["head_dim"] = 128.into(),
        // llama.cpp's way of saying that there is none.
        "qwen2" => changes["sliding_window"] = 0.into(),
        _ => {}
    }
    random(family, &changes, seed)
}

/// Root mean square difference, relative to the spread of the reference's logits.
fn relative_error(reference: &Logits, ours: &Logits) -> f32 {
    let (reference, ours) = (reference.concat().concat(), ours.concat().concat());
    let square = |v: f32| v * v;
    let error: f32 = reference
        .iter()
        .zip(&ours)
        .map(|(a, b)| square(a - b))
        .sum();
    let spread: f32 = reference.iter().copied().map(square).sum();
    (error / spread).sqrt()
}

/// Writes `model` as GGUF. In f32 it is the dequantised model. With quantised weights, activations are rounded to 8 bits a
/// block of 32 values (of 256 for the K-quants): `max_error` bounds what that does to the logits, as a relative root mean
/// square. It was 0.013 to 0.020 of these models.
fn gguf_is_the_dequantised_model(
    what: &str,
    model: &TinyModel,
    dtype: impl Fn(&str) -> GgmlDType,
    max_error: f32,
) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("model.gguf");
    let dequantised = model.write_gguf(&path, dtype).expect("it is written");
    let reference = candle_logits(&dequantised);
    let in_f32 = logits(&mut load(&path, Weights::F32));
    let difference = max_difference(&reference, &in_f32);
    let quantised = logits(&mut load(&path, Weights::Auto));
    let error = relative_error(&reference, &quantised);
    eprintln!("{what}: f32 {difference:e}, quantised {error:e}");
    assert!(difference <= MAX_DIFFERENCE, "{what}: {difference:e}");
    assert!(error <= max_error, "{what}: {error:e}");
}

#[test]
fn gguf_of_every_family_is_the_dequantised_model() {
    for (family, seed) in [("llama", 9), ("qwen2", 10), ("qwen3", 11)] {
        let model = wide_model(family, seed);
        let mixed = |name: &str| match name {
            _ if name.contains("embed_tokens") || name.contains("v_proj") => GgmlDType::Q6K,
            _ if name.contains("q_proj") => GgmlDType::F16,
            _ if name.contains("k_proj") || name.contains("up_proj") => GgmlDType::Q8_0,
            _ if name.contains("down_proj") => GgmlDType::Q6K,
            _ => GgmlDType::Q4_0,
        };
        gguf_is_the_dequantised_model(family, &model, mixed, 0.03);
    }
}

#[test]
fn gguf_of_every_type_is_the_dequantised_model() {
    let model = wide_model("qwen2", 12);
    for (dtype, max_error) in [
        (GgmlDType::F32, 1e-5),
        (GgmlDType::F16, 1e-5),
        (GgmlDType::BF16, 1e-5),
        (GgmlDType::Q4_0, 0.03),
        (GgmlDType::Q4_1, 0.03),
        (GgmlDType::Q5_0, 0.03),
        (GgmlDType::Q5_1, 0.03),
        (GgmlDType::Q8_0, 0.03),
        (GgmlDType::Q2K, 0.03),
        (GgmlDType::Q3K, 0.03),
        (GgmlDType::Q4K, 0.03),
        (GgmlDType::Q5K, 0.03),
        (GgmlDType::Q6K, 0.03),
    ] {
        gguf_is_the_dequantised_model(&format!("{dtype:?}"), &model, |_| dtype, max_error);
    }
}

/// What transformers does when `config.json` leaves a window's fields out, and when it lists the layers.
#[test]
fn windows_left_out_or_listed_are_transformers() {
    let windows = |family: &str, changes: Value| {
        let model = through_directory(&random(family, &changes, 13)).map_err(|e| e.to_string())?;
        let config = model.config();
        Ok::<_, String>([0, 1].map(|layer| config.layer_sliding_window(layer)))
    };
    assert_eq!(windows("mistral", json!({})), Ok([Some(4096); 2]));
    assert_eq!(
        windows("mistral", json!({"sliding_window": null})),
        Ok([None; 2])
    );
    assert_eq!(
        windows("llama", json!({"sliding_window": 9})),
        Ok([None; 2])
    );
    for family in ["qwen2", "qwen3"] {
        let used = |changes: Value| {
            let mut all = json!({"use_sliding_window": true, "head_dim": 16});
            for (key, value) in changes.as_object().expect("an object") {
                all[key] = value.clone();
            }
            windows(family, all)
        };
        // 28 layers see everything unless the file says otherwise; this model has two.
        assert_eq!(used(json!({"sliding_window": 9})), Ok([None; 2]));
        assert_eq!(used(json!({"max_window_layers": 0})), Ok([Some(4096); 2]));
        let listed = |types: [&str; 2]| {
            used(json!({"sliding_window": 9, "max_window_layers": 2, "layer_types": types}))
        };
        let (full, sliding) = ("full_attention", "sliding_attention");
        assert_eq!(listed([full, full]), Ok([None; 2]));
        assert_eq!(listed([full, sliding]), Ok([None, Some(9)]));
        assert_eq!(listed([sliding, sliding]), Ok([Some(9); 2]));
        let refusal = listed([sliding, full]).expect_err("refused");
        assert!(refusal.contains("layer_types"), "{refusal}");
        let refusal = listed([full, "chunked_attention"]).expect_err("refused");
        assert!(refusal.contains("'chunked_attention'"), "{refusal}");
    }
}
