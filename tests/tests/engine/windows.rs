//! A model of which one layer has a sliding window: two attention groups, each with a builder of its own, over one table.

use timetable_engine::{
    BuilderSource, CacheSize, EngineConfig, ModelRunner,
    model::{AttentionLayers, Model, ModelConfig, ModelError},
};
use timetable_tests::{
    candle_reference::argmax,
    drive::{self, generate, greedy},
    naive::NaiveAttention,
};
use timetable_types::Family;

use super::trace;

const WINDOW: usize = 24;

/// tiny-llama, as if its second layer had been trained with a window.
struct Windowed {
    model: Box<Model>,
    config: ModelConfig,
}

impl Windowed {
    fn new() -> Self {
        let model = drive::tiny_llama();
        let mut config = model.config().clone();
        config.sliding_window = Some(WINDOW);
        config.first_window_layer = 1;
        Self { model, config }
    }
}

impl ModelRunner for Windowed {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn forward(
        &mut self,
        tokens: &[u32],
        positions: &[i64],
        attn: &mut dyn AttentionLayers,
        logits_rows: &[usize],
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        self.model
            .forward(tokens, positions, attn, logits_rows, logits)
    }
}

/// Greedy tokens by textbook attention.
fn expected(prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let mut model = Windowed::new();
    let mut attention = NaiveAttention::new(&model.config, 1);
    let mut tokens = prompt.to_vec();
    let mut logits = Vec::new();
    let mut done = 0;
    while tokens.len() < prompt.len() + max_tokens {
        let count = tokens.len() - done;
        attention.schedule(&[(0, count)]);
        let positions: Vec<i64> = (done as i64..tokens.len() as i64).collect();
        model
            .forward(
                &tokens[done..],
                &positions,
                &mut attention,
                &[count - 1],
                &mut logits,
            )
            .unwrap();
        done = tokens.len();
        tokens.push(argmax(&logits) as u32);
    }
    tokens.split_off(prompt.len())
}

#[test]
fn layers_with_and_without_a_window_have_groups_of_their_own() {
    let trace = trace::load("llama_mrv2_f32");
    let expected: Vec<Vec<u32>> = trace
        .prompts
        .iter()
        .map(|prompt| expected(prompt, 12))
        .collect();
    let differs = expected.iter().zip(&trace.outputs).any(|(ours, full)| {
        let len = full.len().min(12);
        ours[..len] != full[..len]
    });
    assert!(differs, "the window changes nothing");
    for (family, source) in [
        (Family::FlashAttn, drive::component("flash-attn")),
        (Family::Flashinfer, drive::component("flashinfer")),
        (Family::FlashAttn, BuilderSource::Plain),
        (Family::Flashinfer, BuilderSource::Plain),
    ] {
        let config = EngineConfig {
            attention_backend: family,
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
            max_model_len: Some(512),
            cache_size: CacheSize::Blocks(256),
            ..EngineConfig::default()
        };
        let mut engine = drive::engine(&config, Box::new(Windowed::new()), &source);
        assert_eq!(engine.builders().count(), 2);
        let requests = trace.prompts.iter().map(|prompt| greedy(prompt, 12));
        for (index, answer) in generate(&mut engine, requests.collect()).iter().enumerate() {
            assert_eq!(answer.tokens, expected[index], "prompt {index}, {family:?}");
        }
        assert_eq!(engine.stats().fallback_steps, 0);
    }
}
