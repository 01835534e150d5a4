//! Single-stream decode of the default model, tokens per second: ours (quantised and f32) and candle's own loop.
//!
//! `cargo bench -p timetable-tests --bench model_decode [-- ours|f32|candle …]`; needs the default model.

use std::path::Path;
use std::time::Instant;
use timetable_engine::model::{LoadOptions, Model, Weights};
use timetable_tests::candle_reference::{CandleLlama, CandleWeights, argmax, default_model};
use timetable_tests::naive::NaiveAttention;

const PROMPT: [u32; 5] = [504, 3575, 282, 4649, 314];
const TOKENS: usize = 128;

fn ours(path: &Path, weights: Weights) -> f64 {
    let options = LoadOptions {
        weights,
        threads: None,
    };
    let start = Instant::now();
    let mut model = Model::load(path, options).expect("the default model loads");
    println!(
        "load {weights:?}: {:.0} ms",
        start.elapsed().as_secs_f64() * 1e3
    );
    let mut attention = NaiveAttention::new(model.config(), 1);
    let mut logits = Vec::new();
    attention.schedule(&[(0, PROMPT.len())]);
    let positions: Vec<i64> = (0..PROMPT.len() as i64).collect();
    let last = PROMPT.len() - 1;
    model
        .forward(&PROMPT, &positions, &mut attention, &[last], &mut logits)
        .expect("the prompt runs");
    attention.schedule(&[(0, 1)]);
    let start = Instant::now();
    for i in 0..TOKENS {
        let token = argmax(&logits) as u32;
        let position = (PROMPT.len() + i) as i64;
        model
            .forward(&[token], &[position], &mut attention, &[0], &mut logits)
            .expect("a step runs");
    }
    TOKENS as f64 / start.elapsed().as_secs_f64()
}

/// Prompt tokens per second of one 512-token prompt.
fn prefill(path: &Path, weights: Weights) -> f64 {
    let mut model = Model::load(
        path,
        LoadOptions {
            weights,
            threads: None,
        },
    )
    .expect("the default model loads");
    let tokens: Vec<u32> = (0..512).map(|i| 1000 + i * 7).collect();
    let positions: Vec<i64> = (0..512).collect();
    let mut logits = Vec::new();
    let mut best = f64::MAX;
    for _ in 0..3 {
        let mut attention = NaiveAttention::new(model.config(), 1);
        attention.schedule(&[(0, tokens.len())]);
        let start = Instant::now();
        model
            .forward(&tokens, &positions, &mut attention, &[511], &mut logits)
            .expect("the prompt runs");
        best = best.min(start.elapsed().as_secs_f64());
    }
    tokens.len() as f64 / best
}

fn candle(path: &Path) -> f64 {
    let mut model =
        CandleLlama::load(path, CandleWeights::Quantised).expect("candle loads the default model");
    let mut logits = model
        .teacher_forced(&PROMPT)
        .expect("the prompt runs")
        .pop()
        .unwrap_or_default();
    let start = Instant::now();
    for i in 0..TOKENS {
        let token = argmax(&logits) as u32;
        logits = model.step(token, PROMPT.len() + i).expect("a step runs");
    }
    TOKENS as f64 / start.elapsed().as_secs_f64()
}

fn main() {
    let Some(path) = default_model() else {
        eprintln!("the default model is not fetched");
        std::process::exit(1);
    };
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let asked = |name: &str| wanted.is_empty() || wanted.iter().any(|w| w == name);
    for _ in 0..3 {
        if asked("ours") {
            println!("ours, quantised: {:.1} tok/s", ours(&path, Weights::Auto));
        }
        if asked("candle") {
            println!("candle's loop:   {:.1} tok/s", candle(&path));
        }
    }
    if asked("f32") {
        println!("ours, f32:       {:.1} tok/s", ours(&path, Weights::F32));
    }
    if asked("prefill") {
        println!(
            "ours, quantised, prefill of 512: {:.0} tok/s",
            prefill(&path, Weights::Auto)
        );
        println!(
            "ours, f32, prefill of 512: {:.0} tok/s",
            prefill(&path, Weights::F32)
        );
    }
}
