//! Drafts on the device: rows of logits for each, decodes of several tokens eagerly, in pieces and as full graphs. The tokens are
//! those without speculation.

use serde_json::json;
use timetable_engine::{
    EngineConfig, GenerationRequest, ModelDtype, SpeculativeConfig, SpeculativeMethod,
    backend_name, sampling::SamplingParams,
};
use timetable_tests::{
    drive::{self, component},
    trace,
};
use timetable_types::{CudagraphMode, Family};

use super::support::{self, RandomModel};

const MODES: [CudagraphMode; 4] = [
    CudagraphMode::None,
    CudagraphMode::Piecewise,
    CudagraphMode::Full,
    CudagraphMode::FullAndPiecewise,
];

const BACKENDS: [(Family, &str); 2] = [
    (Family::FlashAttn, "flash-attn"),
    (Family::Flashinfer, "flashinfer"),
];

const METHODS: [SpeculativeMethod; 2] = [SpeculativeMethod::Ngram, SpeculativeMethod::NgramGpu];

fn config(ordinal: usize, family: Family, mode: CudagraphMode) -> EngineConfig {
    EngineConfig {
        model_dtype: ModelDtype::Float32,
        attention_backend: Some(backend_name(family).to_owned()),
        cudagraph_mode: mode,
        cudagraph_capture_sizes: Some(vec![1, 4, 8, 16, 32, 64]),
        ..support::config(ordinal)
    }
}

fn with(base: &EngineConfig, method: SpeculativeMethod, drafts: usize) -> EngineConfig {
    EngineConfig {
        speculative: Some(SpeculativeConfig {
            method,
            num_speculative_tokens: drafts,
            prompt_lookup_min: 1,
            prompt_lookup_max: 3,
        }),
        ..base.clone()
    }
}

/// Answers that repeat a pattern, with a break here and there, whatever the model would say.
fn repetitive() -> Vec<GenerationRequest> {
    let request = |request: usize| {
        let token = move |index: usize| match (index + request) % 41 {
            0 => 400 + request as u32,
            _ => 30 + (index % (3 + request)) as u32,
        };
        let prompt: Vec<u32> = (0..10 + 9 * request).map(token).collect();
        let forced = (prompt.len()..).map(token).take(60).collect();
        GenerationRequest {
            forced,
            ..drive::greedy(&prompt, 60)
        }
    };
    (0..12).map(request).collect()
}

#[test]
fn the_recorded_tokens_with_drafts_in_every_mode() {
    let Some(ordinal) = support::device() else {
        return;
    };
    let mut runs = 0;
    for name in ["llama_mrv2_f32", "llama_mrv2_f32_spec3"] {
        let trace = trace::load(name);
        for (family, builder) in BACKENDS {
            for mode in MODES {
                for method in METHODS {
                    for drafts in [3, 7] {
                        let config = with(&config(ordinal, family, mode), method, drafts);
                        let dir = drive::tiny_llama_dir();
                        let mut engine = support::engine(&config, &dir, &component(builder));
                        assert_eq!(engine.depth(), 1);
                        let pairs = trace.prompts.iter().zip(&trace.outputs);
                        let requests =
                            pairs.map(|(prompt, output)| drive::greedy(prompt, output.len()));
                        let got = support::tokens(&mut engine, requests.collect());
                        let what = format!("{name}, {builder}, {mode:?}, {method:?}, {drafts}");
                        assert_eq!(got, trace.outputs, "{what}");
                        let stats = engine.stats();
                        assert_eq!((stats.failed_steps, stats.fallback_steps), (0, 0), "{what}");
                        assert!(stats.speculation.num_accepted_tokens > 0, "{what}");
                        let free = engine.scheduler().kv().pool().num_free();
                        assert_eq!(free, engine.num_blocks() - 1, "{what}");
                        runs += 1;
                    }
                }
            }
        }
    }
    println!("the recorded tokens in each of {runs} runs");
}

#[test]
fn logits_are_those_without_speculation() {
    let Some(ordinal) = support::device() else {
        return;
    };
    let model = RandomModel::new("llama", &json!({}), 8);
    for (dtype, tolerance) in [(ModelDtype::Float32, 1e-4), (ModelDtype::Bfloat16, 0.02)] {
        for (family, builder) in BACKENDS {
            for mode in [CudagraphMode::None, CudagraphMode::FullAndPiecewise] {
                let base = EngineConfig {
                    model_dtype: dtype,
                    ..config(ordinal, family, mode)
                };
                let mut without = support::engine(&base, model.path(), &component(builder));
                let expected = drive::logits(&mut without, repetitive());
                for method in METHODS {
                    let config = with(&base, method, 3);
                    let mut engine = support::engine(&config, model.path(), &component(builder));
                    let found = drive::logits(&mut engine, repetitive());
                    let all = found.iter().flatten().flatten();
                    let pairs = all.zip(expected.iter().flatten().flatten());
                    let (worst, largest) = pairs.fold((0f32, 0f32), |(worst, largest), (a, b)| {
                        (worst.max((a - b).abs()), largest.max(b.abs()))
                    });
                    let what = format!("{dtype:?}, {builder}, {mode:?}, {method:?}");
                    let (steps, before) = (engine.stats().steps, without.stats().steps);
                    println!(
                        "{what}: within {worst} of {largest}; {steps} steps, {before} without"
                    );
                    assert!(worst <= tolerance * largest, "{what}: {worst} of {largest}");
                    assert!(
                        steps * 2 < before,
                        "{what}: {steps} steps, {before} without"
                    );
                }
            }
        }
    }
}

#[test]
fn a_seed_gives_the_same_tokens_with_speculation() {
    let Some(ordinal) = support::device() else {
        return;
    };
    let trace = trace::load("llama_mrv2_f32");
    let sampled = || -> Vec<GenerationRequest> {
        let prompts = trace.prompts.iter().enumerate();
        prompts
            .map(|(index, prompt)| GenerationRequest {
                prompt: prompt.clone(),
                params: SamplingParams {
                    temperature: 0.05 + 0.4 * (index % 3) as f32,
                    top_k: 40,
                    top_p: 0.95,
                    seed: Some(index as u64),
                    max_tokens: 50,
                    ignore_eos: true,
                    ..SamplingParams::default()
                },
                ..GenerationRequest::default()
            })
            .collect()
    };
    let base = config(ordinal, Family::FlashAttn, CudagraphMode::FullAndPiecewise);
    let dir = drive::tiny_llama_dir();
    let mut without = support::engine(&base, &dir, &component("flash-attn"));
    let expected = support::tokens(&mut without, sampled());
    for method in METHODS {
        let config = with(&base, method, 3);
        let mut engine = support::engine(&config, &dir, &component("flash-attn"));
        assert_eq!(
            support::tokens(&mut engine, sampled()),
            expected,
            "{method:?}"
        );
    }
}
