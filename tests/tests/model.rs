//! The model alone, on textbook attention: tiny-llama, and the default model against candle-transformers.

use std::path::{Path, PathBuf};
use timetable_engine::model::{LoadOptions, Model, Weights};
use timetable_engine::tokenizer::Tokenizer;
use timetable_tests::candle_reference::{
    CandleLlama, CandleWeights, argmax, compare, default_model,
};
use timetable_tests::naive::{NaiveAttention, batched_logits};

fn load(path: &Path, weights: Weights) -> Model {
    let options = LoadOptions {
        weights,
        threads: None,
    };
    Model::load(path, options).expect("the model loads")
}

fn tiny_llama() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tiny-llama")
}

fn prompts(vocab: u32, count: u32, length: u32) -> Vec<Vec<u32>> {
    (0..count)
        .map(|p| {
            (0..length + p * 3)
                .map(|i| (p * 7919 + i * i * 31 + i * 17 + 5) % vocab)
                .collect()
        })
        .collect()
}

#[test]
fn a_request_has_the_same_logits_alone_and_in_any_batch() {
    let mut model = load(&tiny_llama(), Weights::F32);
    let prompts = prompts(512, 5, 20);
    let reference: Vec<_> = prompts
        .iter()
        .map(|p| batched_logits(&mut model, std::slice::from_ref(p), 1).remove(0))
        .collect();
    for chunk in [1, 3, 8, 100] {
        for (alone, batched) in reference
            .iter()
            .zip(batched_logits(&mut model, &prompts, chunk))
        {
            // Not only close: the model's part is bit for bit the same, and so is this attention.
            assert_eq!(*alone, batched, "chunks of {chunk}");
        }
    }
}

#[test]
fn only_the_asked_rows_get_logits() {
    let mut model = load(&tiny_llama(), Weights::F32);
    let tokens = prompts(512, 1, 12).remove(0);
    let positions: Vec<i64> = (0..12).collect();
    let all = batched_logits(&mut model, std::slice::from_ref(&tokens), 100).remove(0);
    let mut attention = NaiveAttention::new(model.config(), 1);
    attention.schedule(&[(0, 12)]);
    let mut logits = vec![1.0; 7];
    model
        .forward(&tokens, &positions, &mut attention, &[11, 3], &mut logits)
        .expect("a step runs");
    assert_eq!(logits, [all[11].clone(), all[3].clone()].concat());
}

#[test]
fn a_bad_batch_is_named() {
    let mut model = load(&tiny_llama(), Weights::F32);
    let mut refused = |tokens: &[u32], positions: &[i64], rows: &[usize]| {
        let mut attention = NaiveAttention::new(model.config(), 1);
        attention.schedule(&[(0, tokens.len())]);
        let outcome = model.forward(tokens, positions, &mut attention, rows, &mut Vec::new());
        outcome.expect_err("refused").to_string()
    };
    assert!(refused(&[512], &[0], &[]).contains("token 512"));
    assert!(refused(&[1, 2], &[0], &[]).contains("2 tokens but 1 positions"));
    assert!(refused(&[1], &[-1], &[]).contains("position -1"));
    assert!(refused(&[1], &[0], &[1]).contains("row 1"));
}

/// Needs the default model, which `cargo xtask test` fetches first; says so where it is absent.
#[test]
fn default_model_agrees_with_candle() {
    let Some(path) = default_model() else {
        eprintln!("skipped: the default model is not fetched");
        return;
    };
    let tokenizer = Tokenizer::load(&path).expect("the GGUF holds a tokenizer");
    let texts = [
        "The capital of France is",
        "def fibonacci(n):\n    if n < 2:",
    ];
    let expected = [vec![504, 3575, 282, 4649, 314], Vec::new()];
    let mut prompts = Vec::new();
    for (text, expected) in texts.iter().zip(expected) {
        let ids = tokenizer.encode(text, true).expect("encodes");
        assert_eq!(tokenizer.decode(&ids, true), *text);
        assert!(expected.is_empty() || ids == expected, "{ids:?}");
        prompts.push(ids);
    }
    let mut candle = CandleLlama::load(&path, CandleWeights::F32).expect("candle loads it");
    let reference: Vec<_> = prompts
        .iter()
        .map(|p| candle.teacher_forced(p).expect("candle runs"))
        .collect();
    drop(candle);
    for weights in [Weights::F32, Weights::Auto] {
        let mut model = load(&path, weights);
        let (mut flips, mut worst) = (0, 0f32);
        for (reference, ours) in reference
            .iter()
            .zip(batched_logits(&mut model, &prompts, 4))
        {
            for (position, (reference, ours)) in reference.iter().zip(&ours).enumerate() {
                let row = compare(reference, ours);
                worst = worst.max(row.max_difference);
                flips += usize::from(!row.same_argmax);
                if weights == Weights::F32 {
                    assert!(row.max_difference <= 1e-3, "position {position}: {row:?}");
                    assert!(
                        row.same_argmax || row.reference_gap < 1e-3,
                        "position {position}: {row:?}"
                    );
                } else {
                    assert!(row.max_difference < 3.0, "position {position}: {row:?}");
                }
            }
        }
        eprintln!("{weights:?}: largest logit difference {worst:e}, {flips} flips");
    }
}

/// The recorded greedy tokens of the float reference.
#[test]
fn default_model_repeats_the_recorded_greedy_tokens() {
    let Some(path) = default_model() else {
        eprintln!("skipped: the default model is not fetched");
        return;
    };
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors/smollm2-135m-q4_1-greedy.json");
    let text = std::fs::read(file).expect("the vectors are in the repository");
    let vectors: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    let tokenizer = Tokenizer::load(&path).expect("the GGUF holds a tokenizer");
    let mut model = load(&path, Weights::F32);
    let vocab = model.config().vocab_size;
    let cases = vectors["cases"].as_array().expect("a list");
    let ids = |case: &serde_json::Value, key: &str| -> Vec<u32> {
        let list = case[key].as_array().expect("a list").iter();
        list.map(|v| v.as_u64().expect("an id") as u32).collect()
    };
    let mut attention = NaiveAttention::new(model.config(), cases.len());
    let prompts: Vec<Vec<u32>> = cases.iter().map(|c| ids(c, "prompt_ids")).collect();
    let expected: Vec<Vec<u32>> = cases.iter().map(|c| ids(c, "token_ids")).collect();
    for (case, prompt) in cases.iter().zip(&prompts) {
        let text = case["prompt"].as_str().expect("a text");
        assert_eq!(tokenizer.encode(text, true).expect("encodes"), *prompt);
    }
    let mut generated: Vec<Vec<u32>> = vec![Vec::new(); cases.len()];
    let mut next = prompts.clone();
    let mut logits = Vec::new();
    for step in 0..expected.iter().map(Vec::len).max().unwrap_or(0) {
        let batch: Vec<(usize, usize)> = next.iter().map(Vec::len).enumerate().collect();
        attention.schedule(&batch);
        let tokens = next.concat();
        let mut positions = Vec::new();
        let mut rows = Vec::new();
        for (request, count) in &batch {
            let start = if step == 0 {
                0
            } else {
                prompts[*request].len() + step - 1
            };
            positions.extend((start as i64)..(start + count) as i64);
            rows.push(positions.len() - 1);
        }
        model
            .forward(&tokens, &positions, &mut attention, &rows, &mut logits)
            .expect("a step runs");
        for (request, row) in logits.chunks_exact(vocab).enumerate() {
            let token = argmax(row) as u32;
            generated[request].push(token);
            next[request] = vec![token];
        }
    }
    for ((generated, expected), case) in generated.iter().zip(&expected).zip(cases) {
        assert_eq!(&generated[..expected.len()], expected, "{}", case["prompt"]);
    }
}
