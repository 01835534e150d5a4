//! The default model through the whole engine, one stream, greedy: against llama.cpp and against candle's own loop, the same
//! file, as many threads, runs in turn, medians.
//!
//! Tokens per second count the tokens after the first: the prompt is not in them, on any side.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use timetable_engine::{
    CacheSize, Engine, EngineConfig, EngineHandle, RequestEvent,
    model::{LoadOptions, Model, Weights},
    tokenizer::Tokenizer,
};

use super::{Row, compiled_for, median, peer::Peer, threads};
use crate::{
    candle_reference::{CandleLlama, CandleWeights, argmax, default_model},
    drive,
};

const PROMPT: [u32; 5] = [504, 3575, 282, 4649, 314];
/// Tokens in the measured time.
const TOKENS: usize = 128;
const PREFILL: usize = 512;
const ROUNDS: usize = 7;
/// candle's loop is for orientation and slow on a busy machine.
const CANDLE_ROUNDS: usize = 3;
const LEAST: f64 = 0.4;
const UNIT: &str = "token/s";

pub(super) fn measure() -> Vec<Row> {
    let path = std::env::var_os("TIMETABLE_MODEL")
        .map(PathBuf::from)
        .or_else(default_model);
    let Some(path) = path else {
        let why = "the default model is not there; `cargo xtask model` fetches it";
        return vec![Row::missing("decode/as in the file", UNIT, why)];
    };
    let mut rows = quantised(&path);
    let mut engine = OneStream::start(&path, Weights::F32);
    let mut samples: Vec<f64> = (0..3).map(|_| engine.decode().0).collect();
    rows.push(Row::new("decode/weights f32", median(&mut samples), UNIT));
    rows.push(engine.prefill("decode/prefill of 512, weights f32"));
    rows
}

fn quantised(path: &Path) -> Vec<Row> {
    let mut ours = OneStream::start(path, Weights::Auto);
    let mut candle =
        CandleLlama::load(path, CandleWeights::Quantised).expect("candle loads the default model");
    let mut peer = Peer::start(path, threads(), TOKENS, &PROMPT);
    let (mut our_samples, mut peer_samples, mut candle_samples) =
        (Vec::new(), Vec::new(), Vec::new());
    let mut same = 0;
    // The first round warms caches, clocks and branch predictors on all sides.
    for round in 0..=ROUNDS {
        let (speed, tokens) = ours.decode();
        if round > 0 {
            our_samples.push(speed);
        }
        if round < CANDLE_ROUNDS {
            candle_samples.push(candle_decode(&mut candle));
        }
        let outcome = match &mut peer {
            Ok(peer) => Some(peer.decode()),
            Err(_) => None,
        };
        match outcome {
            Some(Ok(run)) => {
                let equal = tokens.iter().zip(&run.tokens).take_while(|(a, b)| a == b);
                same = equal.count();
                if round > 0 {
                    peer_samples.push(run.tokens_per_second);
                }
            }
            Some(Err(why)) => peer = Err(why),
            None => {}
        }
    }
    let (ours_median, candle) = (median(&mut our_samples), median(&mut candle_samples));
    let row = Row::new("decode/as in the file", ours_median, UNIT);
    let how = format!(
        "bar: at least {LEAST}; {ROUNDS} runs in turn, {:.1} to {:.1}, {} threads, {}",
        our_samples[0],
        our_samples[ROUNDS - 1],
        threads(),
        compiled_for()
    );
    let against_peer = match peer {
        Ok(peer) => {
            let median = median(&mut peer_samples);
            let (low, high) = (peer_samples[0], peer_samples[peer_samples.len() - 1]);
            row.clone()
                .against(median, format!("{}, {median:.1} {UNIT}", peer.name()))
                .note(format!(
                    "{how}; the peer's {low:.1} to {high:.1}, best to best {:.2}, the first {same} of {} tokens equal",
                    our_samples[ROUNDS - 1] / high,
                    TOKENS + 1
                ))
        }
        Err(why) => row
            .clone()
            .note(format!("{how}; not compared with llama.cpp: {why}")),
    };
    vec![
        against_peer,
        Row {
            name: format!("{}, against candle", row.name),
            ..row.against(candle, format!("candle-transformers, {candle:.1} {UNIT}"))
        },
        ours.prefill("decode/prefill of 512, as in the file"),
    ]
}

/// The engine as a server runs it: a thread of its own, a component in the sandbox, text made.
struct OneStream(EngineHandle);

impl OneStream {
    fn start(path: &Path, weights: Weights) -> Self {
        let options = LoadOptions {
            weights,
            threads: Some(threads()),
        };
        let model = Model::load(path, options).expect("the default model loads");
        let tokenizer = Tokenizer::load(path).expect("the default model has a tokenizer");
        let config = EngineConfig {
            attention_backend: Some("FLASH_ATTN".to_owned()),
            cache_size: CacheSize::Blocks(256),
            // Every run computes the same.
            enable_prefix_caching: false,
            ..EngineConfig::default()
        };
        let engine = Engine::new(
            &config,
            Box::new(model),
            Some(Arc::new(tokenizer)),
            drive::sandbox(),
            &drive::component("flash-attn"),
        )
        .expect("the engine starts");
        Self(EngineHandle::spawn(engine).expect("a thread for the engine"))
    }

    /// Tokens per second, and the tokens.
    fn decode(&mut self) -> (f64, Vec<u32>) {
        let stream = self.0.submit(drive::greedy(&PROMPT, TOKENS + 1));
        let mut tokens = Vec::with_capacity(TOKENS + 1);
        let mut first = None;
        let mut last = Instant::now();
        for event in stream.events() {
            match event {
                RequestEvent::Token { token, .. } => {
                    last = Instant::now();
                    first.get_or_insert(last);
                    tokens.push(token);
                }
                RequestEvent::Finished { error, .. } => {
                    assert!(error.is_none(), "the request failed: {error:?}");
                    break;
                }
            }
        }
        assert_eq!(tokens.len(), TOKENS + 1, "greedy, end of text ignored");
        assert_eq!(
            self.0.stats().fallback_steps,
            0,
            "the component served every step"
        );
        let seconds = first.map_or(f64::NAN, |first| (last - first).as_secs_f64());
        (TOKENS as f64 / seconds, tokens)
    }

    /// Prompt tokens per second, from the request to its first token.
    fn prefill(&mut self, name: &str) -> Row {
        let prompt: Vec<u32> = (0..PREFILL as u32).map(|i| 1000 + i * 7).collect();
        let mut samples: Vec<f64> = (0..3)
            .map(|_| {
                let start = Instant::now();
                let stream = self.0.submit(drive::greedy(&prompt, 1));
                let event = stream.events().recv();
                assert!(matches!(event, Ok(RequestEvent::Token { .. })), "{event:?}");
                PREFILL as f64 / start.elapsed().as_secs_f64()
            })
            .collect();
        Row::new(name, median(&mut samples), UNIT).note("prompt tokens".to_owned())
    }
}

fn candle_decode(model: &mut CandleLlama) -> f64 {
    let mut logits = model.prefill(&PROMPT).expect("the prompt runs");
    let mut token = argmax(&logits) as u32;
    let start = Instant::now();
    for i in 0..TOKENS {
        logits = model.step(token, PROMPT.len() + i).expect("a step runs");
        token = argmax(&logits) as u32;
    }
    TOKENS as f64 / start.elapsed().as_secs_f64()
}
