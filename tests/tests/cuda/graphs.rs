//! Graphs and steps prepared ahead change no result: logits of every mode against eager launches, tokens against each other.

use std::sync::{Arc, Mutex};

use serde_json::json;
use timetable_engine::{
    EngineConfig, GenerationRequest, KvCacheDtype, ModelDtype, backend_name,
    sampling::SamplingParams,
};
use timetable_tests::{
    candle_reference::compare,
    drive::{self, component, generate},
};
use timetable_types::{CudagraphMode, Family};

use super::support::{self, RandomModel};

/// Tokens of each answer.
const TOKENS: usize = 40;

/// Rows of logits by request and place.
type Rows = Vec<((u64, usize), Vec<f32>)>;

fn bf16(ordinal: usize, mode: CudagraphMode, ahead: bool) -> EngineConfig {
    EngineConfig {
        model_dtype: ModelDtype::Bfloat16,
        cudagraph_mode: mode,
        async_scheduling: Some(ahead),
        ..support::config(ordinal)
    }
}

/// Every row of logits, with the same tokens forced.
fn logits(config: &EngineConfig, model: &RandomModel, builder: &str) -> Rows {
    let mut engine = support::engine(config, model.path(), &component(builder));
    let rows = Arc::new(Mutex::new(Vec::new()));
    let seen = rows.clone();
    engine.set_logits_observer(Some(Box::new(move |id, index, logits| {
        seen.lock()
            .expect("no panic while it is held")
            .push(((id.0, index), logits.to_vec()));
    })));
    let prompts = support::prompts(9, 512);
    let requests = prompts.iter().enumerate().map(|(request, prompt)| {
        let token = |index| ((index * 37 + request * 11) % 507 + 5) as u32;
        GenerationRequest {
            forced: (0..TOKENS).map(token).collect(),
            ..drive::greedy(prompt, TOKENS)
        }
    });
    generate(&mut engine, requests.collect());
    let stats = engine.stats();
    assert_eq!((stats.failed_steps, stats.fallback_steps), (0, 0));
    let mut rows = std::mem::take(&mut *rows.lock().expect("no panic while it is held"));
    rows.sort_by_key(|row| row.0);
    rows
}

#[test]
fn every_graph_mode_gives_the_eager_logits() {
    let Some(ordinal) = support::device() else {
        return;
    };
    let model = RandomModel::new("llama", &json!({}), 5);
    for (family, builder, kv_cache_dtype) in [
        (Family::FlashAttn, "flash-attn", KvCacheDtype::Auto),
        (Family::Flashinfer, "flashinfer", KvCacheDtype::Auto),
        (Family::FlashAttn, "flash-attn", KvCacheDtype::Fp8E4m3),
    ] {
        let of = |mode| EngineConfig {
            attention_backend: Some(backend_name(family).to_owned()),
            kv_cache_dtype,
            ..bf16(ordinal, mode, false)
        };
        let eager = logits(&of(CudagraphMode::None), &model, builder);
        assert_eq!(eager.len(), 9 * TOKENS);
        for mode in [
            CudagraphMode::Piecewise,
            CudagraphMode::Full,
            CudagraphMode::FullDecodeOnly,
            CudagraphMode::FullAndPiecewise,
        ] {
            let rows = logits(&of(mode), &model, builder);
            let (mut same, mut worst, mut largest) = (0, 0f32, 0f32);
            for ((at, want), (got_at, got)) in eager.iter().zip(&rows) {
                assert_eq!(at, got_at);
                same += usize::from(want == got);
                worst = worst.max(compare(want, got).max_difference);
                largest = want.iter().fold(largest, |x, y| x.max(y.abs()));
            }
            println!(
                "{builder} {kv_cache_dtype:?} {mode:?}: {same} of {} rows are the same bits, others within {worst} of {largest}",
                eager.len()
            );
            // Padded products may round otherwise, but not by more than bf16 does.
            assert!(worst <= 0.02 * largest, "{mode:?}: {worst} of {largest}");
        }
    }
}

#[test]
fn steps_prepared_ahead_give_the_same_tokens() {
    let Some(ordinal) = support::device() else {
        return;
    };
    let model = RandomModel::new("llama", &json!({}), 6);
    let prompts = support::prompts(12, 512);
    let sampled = |temperature: f32| -> Vec<GenerationRequest> {
        let requests = prompts.iter().enumerate();
        requests
            .map(|(index, prompt)| GenerationRequest {
                prompt: prompt.clone(),
                params: SamplingParams {
                    temperature,
                    top_k: 40,
                    top_p: 0.95,
                    seed: Some(index as u64),
                    // Ends at other places, so that rows leave and others follow.
                    max_tokens: 10 + 7 * index,
                    ignore_eos: index % 2 == 0,
                    ..SamplingParams::default()
                },
                ..GenerationRequest::default()
            })
            .collect()
    };
    for mode in [CudagraphMode::None, CudagraphMode::FullAndPiecewise] {
        for temperature in [0.0, 0.9] {
            let run = |ahead| {
                let config = EngineConfig {
                    max_num_seqs: 8,
                    ..bf16(ordinal, mode, ahead)
                };
                let mut engine = support::engine(&config, model.path(), &component("flash-attn"));
                let tokens = support::tokens(&mut engine, sampled(temperature));
                assert_eq!(engine.stats().failed_steps, 0);
                tokens
            };
            let (waited, ahead) = (run(false), run(true));
            assert_eq!(ahead, waited, "{mode:?}, temperature {temperature}");
            assert_eq!(
                ahead,
                run(true),
                "{mode:?}, temperature {temperature}: a second run"
            );
        }
    }
}
