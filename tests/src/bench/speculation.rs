//! Speculation by prompt lookup with the default model, greedy: tokens of a step with it over those without, on prompts whose
//! answers repeat them and on prompts whose answers do not; and what a proposal costs the step thread.
//!
//! Both sides are one engine each, run in turn, with weights in f32; the rows say how many answers are the same.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use timetable_engine::{
    CacheSize, Engine, EngineConfig, GenerationRequest, SpeculativeConfig, SpeculativeMethod,
    model::{LoadOptions, Model, Weights},
    speculation::TokenIndex,
    timings::SpeculationStats,
    tokenizer::Tokenizer,
};

use super::{Row, median, threads};
use crate::{candle_reference::default_model, drive};

/// Tokens of each answer.
const TOKENS: usize = 96;
/// Tokens of a step over those without speculation, on prompts that answers repeat.
const LEAST: f64 = 1.3;
const ROUNDS: usize = 3;
const LOOKUP: SpeculativeConfig = SpeculativeConfig {
    method: SpeculativeMethod::Ngram,
    num_speculative_tokens: 4,
    prompt_lookup_min: 2,
    prompt_lookup_max: 4,
};

/// Tasks whose answers hold much of what was asked.
const REPETITIVE: [&str; 4] = [
    "Repeat this text word for word.\n\nText: The harbour opens at six in the morning. Boats that arrive before six wait outside the \
     harbour. The harbour master writes the name of each boat and the hour of its arrival into the book.\n\nText: The harbour opens \
     at six in the morning. Boats that",
    "name: Anna, city: Oslo, age: 31\nname: Bert, city: Rome, age: 45\nname: Cleo, city: Oslo, age: 31\nname: Dora, city: Rome, age: \
     45\nname: Emil, city: Oslo, age: 31\nname: Fred, city: Rome, age: 45\nname:",
    "for i in range(10):\n    print(\"line\", i)\nfor i in range(20):\n    print(\"line\", i)\nfor i in range(30):\n    print(\"line\", \
     i)\nfor i in range(40):\n",
    "one two three four five six seven eight one two three four five six seven eight one two three four five six seven eight one",
];

/// Questions whose answers have to be found.
const OTHERS: [&str; 4] = [
    "Write a short story about a dog who learns to swim in the sea.",
    "Why is the sky blue? Explain it to a child.",
    "Give three reasons to take the train instead of the plane.",
    "Describe the taste of an orange to somebody who never had one.",
];

pub(super) fn measure() -> Vec<Row> {
    let mut rows = vec![propose("text", 997), propose("two words", 2)];
    let path = std::env::var_os("TIMETABLE_MODEL")
        .map(PathBuf::from)
        .or_else(default_model);
    let Some(path) = path else {
        let why = "the default model is not there; `cargo xtask model` fetches it";
        rows.push(Row::missing(
            "speculation/repetitive prompts",
            "token/step",
            why,
        ));
        return rows;
    };
    for (name, prompts) in [
        ("repetitive prompts", REPETITIVE),
        ("other prompts", OTHERS),
    ] {
        rows.extend(compare(&path, name, &prompts));
    }
    rows
}

/// What one side came to.
struct Side {
    tokens: Vec<Vec<u32>>,
    tokens_per_step: f64,
    tokens_per_second: Vec<f64>,
    drafts: SpeculationStats,
}

fn compare(path: &Path, name: &str, prompts: &[&str]) -> [Row; 2] {
    let tokenizer = Tokenizer::load(path).expect("the default model has a tokenizer");
    let requests: Vec<GenerationRequest> = prompts
        .iter()
        .map(|prompt| {
            let ids = tokenizer.encode(prompt, true).expect("a prompt of tokens");
            drive::greedy(&ids, TOKENS)
        })
        .collect();
    let mut engines = [None, Some(LOOKUP)].map(|speculative| engine(path, speculative));
    let [without, with] = run(&mut engines, &requests);
    let pairs = without.tokens.iter().zip(&with.tokens);
    let equal = pairs.filter(|(without, with)| without == with).count();
    let accepted = with.drafts.num_accepted_tokens;
    let drafted = with.drafts.num_draft_tokens;
    let bar = match name {
        "repetitive prompts" => format!("bar: at least {LEAST}; "),
        _ => String::new(),
    };
    let figure = |value: f64, before: f64, what: &str, unit, note: String| {
        Row::new(format!("speculation/{name}, {what}"), value, unit)
            .against(before, format!("without speculation, {before:.2} {unit}"))
            .note(note)
    };
    let (mut fast, mut slow) = (with.tokens_per_second, without.tokens_per_second);
    [
        figure(
            with.tokens_per_step,
            without.tokens_per_step,
            "tokens of a step",
            "token/step",
            format!(
                "{bar}{accepted} of {drafted} drafts accepted ({:.0} %), {} drafts, n-grams of {} to {}; {} answers of {TOKENS} tokens, \
                 one at a time, {equal} of them equal",
                100.0 * accepted as f64 / drafted.max(1) as f64,
                LOOKUP.num_speculative_tokens,
                LOOKUP.prompt_lookup_min,
                LOOKUP.prompt_lookup_max,
                prompts.len(),
            ),
        ),
        figure(
            median(&mut fast),
            median(&mut slow),
            "speed",
            "token/s",
            format!("{ROUNDS} runs in turn, on the CPU, {} threads", threads()),
        ),
    ]
}

fn engine(path: &Path, speculative: Option<SpeculativeConfig>) -> Engine {
    let options = LoadOptions {
        // Products of quantised weights round by the number of rows; those in f32 hardly do.
        weights: Weights::F32,
        threads: Some(threads()),
    };
    let model = Model::load(path, options).expect("the default model loads");
    let config = EngineConfig {
        speculative,
        attention_backend: Some("FLASH_ATTN".to_owned()),
        max_model_len: Some(1024),
        cache_size: CacheSize::Blocks(512),
        // Every run computes the same.
        enable_prefix_caching: false,
        ..EngineConfig::default()
    };
    drive::engine(&config, Box::new(model), &drive::component("flash-attn"))
}

/// One request after the other, on each engine in turn: in a batch the longest answer alone would say how many steps there are.
fn run(engines: &mut [Engine; 2], requests: &[GenerationRequest]) -> [Side; 2] {
    let mut sides = [(), ()].map(|()| Side {
        tokens: Vec::new(),
        tokens_per_step: 0.0,
        tokens_per_second: Vec::new(),
        drafts: SpeculationStats::default(),
    });
    // The first round warms caches and clocks.
    for round in 0..=ROUNDS {
        for (engine, side) in engines.iter_mut().zip(&mut sides) {
            let steps = engine.stats().steps;
            let start = Instant::now();
            side.tokens = requests
                .iter()
                .map(|request| {
                    drive::generate(engine, vec![request.clone()])
                        .remove(0)
                        .tokens
                })
                .collect();
            let seconds = start.elapsed().as_secs_f64();
            let tokens = side.tokens.iter().map(Vec::len).sum::<usize>() as f64;
            side.tokens_per_step = tokens / (engine.stats().steps - steps) as f64;
            if round == 0 {
                side.drafts = engine.stats().speculation;
            } else {
                side.tokens_per_second.push(tokens / seconds);
            }
        }
    }
    sides
}

/// Proposals while a request grows from 7,000 to 8,000 tokens of a vocabulary of so many.
fn propose(of: &str, vocabulary: u64) -> Row {
    let mut state = 1_u64;
    let tokens: Vec<u32> = (0..8000)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            ((state >> 33) % vocabulary) as u32
        })
        .collect();
    let config = SpeculativeConfig {
        prompt_lookup_min: 1,
        ..LOOKUP
    };
    let mut index = TokenIndex::new(&config, tokens.len());
    let mut drafts = Vec::new();
    index.extend(&tokens[..7000]);
    let mut samples: Vec<f64> = (7001..=tokens.len())
        .map(|len| {
            let start = Instant::now();
            config.propose(&mut index, &tokens[..len], usize::MAX, &mut drafts);
            start.elapsed().as_nanos() as f64 / 1e3
        })
        .collect();
    let middle = median(&mut samples);
    let worst = samples[samples.len() - 1];
    Row::new(
        format!("speculation/propose, 7,000 tokens of {of}"),
        middle,
        "µs",
    )
    .note(format!(
        "for each decode and step; the longest of 1,000 {worst:.1} µs"
    ))
}
