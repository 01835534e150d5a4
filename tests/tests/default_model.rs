//! The default model, teacher-forced, against candle-transformers on the same GGUF: f32 on both sides, each prompt alone and
//! all prompts as one batch with chunked prefill, both backends. The reference is computed once: candle's own greedy answers.
//!
//! One process has one form of candle's weights, so this file has f32 only.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use timetable_engine::{
    BuilderSource, CacheSize, Engine, EngineConfig, GenerationRequest, backend_name,
    model::{LoadOptions, Model, Weights},
    tokenizer::Tokenizer,
};
use timetable_tests::{
    candle_reference::{CandleLlama, CandleWeights, argmax, compare, default_model},
    drive::{self, generate, greedy},
};
use timetable_types::Family;

const NUM_TOKENS: usize = 64;
/// Where the reference's two largest logits are closer than this, either is right.
const NEAR_TIE: f32 = 1e-3;
const MAX_DIFFERENCE: f32 = 1e-3;

const PROMPTS: [&str; 20] = [
    "The capital of France is",
    "Water boils at",
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics state that energy",
    "A list of the planets of the solar system, from the sun outwards: Mercury,",
    "Translate to German: Good morning, my friend.\n",
    "2, 4, 8, 16, 32,",
    "The most important thing about writing tests is",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "In 1969, the first humans",
    "SELECT name, age FROM users WHERE",
    "Photosynthesis is the process by which plants",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "It was a bright cold day, and the clocks were striking. Along the harbour the fishermen mended their nets, and above \
     them, on the wall, an old woman sold oranges from a basket lined with newspaper. Nobody bought any. The ferry was late \
     again, and when it came at last, the only passenger was",
    "Question: If a train travels 60 miles in an hour and a half, what is its average speed in miles per hour?\nAnswer:",
    "The recipe needs flour, sugar, butter, two eggs and a pinch of salt. First, mix the flour with the sugar. Then cut the \
     butter into small cubes and rub it into the mixture until it looks like breadcrumbs. Next,",
    "fn main() {\n    let numbers = vec![1, 2, 3];\n    for number in &numbers {\n",
    "Rivers shape the land they cross. Over thousands of years a stream cuts a valley, carries the soil away, and lays it down \
     again where the current slows. Deltas, flood plains and terraces are all made in this way. The people who live beside a \
     river know this well: they build on high ground, plant on low ground, and keep boats. Geographers distinguish young, \
     mature and old rivers by the slope of their beds. A young river",
];

/// One prompt, candle's greedy answer, and the logits of each of its tokens.
struct Case {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    rows: Vec<Vec<f32>>,
}

fn model_path() -> PathBuf {
    default_model().unwrap_or_else(|| {
        panic!(
            "the default model is not there: run `cargo xtask test`, which fetches it, or set TIMETABLE_MODEL_DIR to the \
             directory of SmolLM2-135M-Instruct.Q4_1.gguf"
        )
    })
}

fn reference(path: &Path) -> Vec<Case> {
    let tokenizer = Tokenizer::load(path).expect("the GGUF has a tokenizer");
    let mut candle = CandleLlama::load(path, CandleWeights::F32).expect("candle loads the GGUF");
    let case = |text: &&str| {
        let prompt = tokenizer.encode(text, false).expect("the prompt is text");
        let mut logits = candle.prefill(&prompt).expect("candle runs");
        let (mut tokens, mut rows) = (Vec::new(), Vec::new());
        loop {
            tokens.push(argmax(&logits) as u32);
            rows.push(logits);
            if tokens.len() == NUM_TOKENS {
                return Case {
                    prompt,
                    tokens,
                    rows,
                };
            }
            let position = prompt.len() + tokens.len() - 1;
            logits = candle
                .step(tokens[tokens.len() - 1], position)
                .expect("candle runs");
        }
    };
    PROMPTS.iter().map(case).collect()
}

/// How a run's logits compare with the reference's.
#[derive(Default)]
struct Report {
    rows: usize,
    max_difference: f32,
    /// The reference's top-2 gap at each row whose largest logit is another.
    flips: Vec<f32>,
}

impl Report {
    fn print(&self, name: &str) {
        println!(
            "{name}: {} rows, max logit difference {:.2e}, {} flips, at gaps {:?}",
            self.rows,
            self.max_difference,
            self.flips.len(),
            self.flips
        );
    }

    fn check(&self, name: &str) {
        self.print(name);
        assert_eq!(
            self.rows,
            PROMPTS.len() * NUM_TOKENS,
            "{name}: every row is compared"
        );
        assert!(
            self.max_difference <= MAX_DIFFERENCE,
            "{name}: logits differ by {}",
            self.max_difference
        );
        let wrong = self.flips.iter().find(|&&gap| gap >= NEAR_TIE);
        assert!(
            wrong.is_none(),
            "{name}: another token where the gap is {wrong:?}"
        );
    }
}

fn engine(weights: Weights, family: Family, path: &Path) -> Engine {
    let config = EngineConfig {
        attention_backend: Some(backend_name(family).to_owned()),
        max_num_seqs: PROMPTS.len(),
        // Less than the prompts together, so that prompts are cut and steps mix prefills and decodes.
        max_num_batched_tokens: 96,
        max_model_len: Some(512),
        cache_size: CacheSize::Blocks(20 * 16),
        ..EngineConfig::default()
    };
    let options = LoadOptions {
        weights,
        threads: None,
    };
    let model = Model::load(path, options).expect("the model loads");
    drive::engine(&config, Box::new(model), &source(family))
}

fn source(family: Family) -> BuilderSource {
    drive::component(match family {
        Family::FlashAttn => "flash-attn",
        _ => "flashinfer",
    })
}

/// Runs `batches` one after the other, the reference's tokens forced.
fn run(engine: &mut Engine, cases: &Arc<Vec<Case>>, batches: &[Vec<usize>]) -> Report {
    let report = Arc::new(Mutex::new(Report::default()));
    // A new engine names its requests from 0 on.
    let mut first = 0;
    for batch in batches {
        let (seen, cases_seen, batch_seen) = (report.clone(), cases.clone(), batch.clone());
        engine.set_logits_observer(Some(Box::new(move |id, index, logits| {
            let case = &cases_seen[batch_seen[id.0 as usize - first]];
            let comparison = compare(&case.rows[index], logits);
            let mut report = seen.lock().expect("no panic while it is held");
            report.rows += 1;
            report.max_difference = report.max_difference.max(comparison.max_difference);
            if !comparison.same_argmax {
                report.flips.push(comparison.reference_gap);
            }
        })));
        let requests = batch.iter().map(|&index| GenerationRequest {
            forced: cases[index].tokens.clone(),
            ..greedy(&cases[index].prompt, NUM_TOKENS)
        });
        generate(engine, requests.collect());
        engine.set_logits_observer(None);
        first += batch.len();
    }
    assert_eq!(
        engine.stats().fallback_steps,
        0,
        "the component served every step"
    );
    std::mem::take(&mut *report.lock().expect("no panic while it is held"))
}

#[test]
fn teacher_forced_logits_are_candles() {
    let path = model_path();
    let cases = Arc::new(reference(&path));
    let alone: Vec<Vec<usize>> = (0..PROMPTS.len()).map(|index| vec![index]).collect();
    let together = vec![(0..PROMPTS.len()).collect::<Vec<_>>()];
    for (name, family) in [
        ("FLASH_ATTN", Family::FlashAttn),
        ("FLASHINFER", Family::Flashinfer),
    ] {
        run(&mut engine(Weights::F32, family, &path), &cases, &together)
            .check(&format!("{name}, one batch"));
        run(&mut engine(Weights::F32, family, &path), &cases, &alone)
            .check(&format!("{name}, alone"));
    }
    // Quantised activations are another arithmetic: reported, without a bar.
    let quantised = run(
        &mut engine(Weights::Auto, Family::FlashAttn, &path),
        &cases,
        &together,
    );
    quantised.print("FLASH_ATTN, quantised weights, one batch");
    assert_eq!(quantised.rows, PROMPTS.len() * NUM_TOKENS);
}
