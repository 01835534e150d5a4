//! In f32 the device gives the recorded tokens, in every graph mode, with steps prepared ahead and without; and every family
//! gives what the CPU gives.

use serde_json::json;
use timetable_engine::{
    CacheSize, DeviceChoice, EngineConfig, ModelDtype, backend_name,
    model::{LoadOptions, Model, Weights},
};
use timetable_tests::{
    drive::{self, component},
    trace,
};
use timetable_types::{CudagraphMode, Family};

use super::support;

const MODES: [CudagraphMode; 5] = [
    CudagraphMode::None,
    CudagraphMode::Piecewise,
    CudagraphMode::Full,
    CudagraphMode::FullDecodeOnly,
    CudagraphMode::FullAndPiecewise,
];

const BACKENDS: [(Family, &str); 3] = [
    (Family::FlashAttn, "flash-attn"),
    (Family::FlashAttn, "flash-attn-fixed-split"),
    (Family::Flashinfer, "flashinfer"),
];

#[test]
fn tiny_llama_gives_the_recorded_tokens_in_every_mode() {
    let Some(ordinal) = support::device() else {
        return;
    };
    let mut runs = 0;
    for name in ["llama_mrv2_f32", "llama_mrv2_f32_prefix"] {
        let trace = trace::load(name);
        for (family, builder) in BACKENDS {
            for mode in MODES {
                for ahead in [true, false] {
                    let config = EngineConfig {
                        model_dtype: ModelDtype::Float32,
                        attention_backend: Some(backend_name(family).to_owned()),
                        cudagraph_mode: mode,
                        async_scheduling: Some(ahead),
                        ..support::config(ordinal)
                    };
                    let mut engine =
                        support::engine(&config, &drive::tiny_llama_dir(), &component(builder));
                    assert_eq!(engine.depth(), if ahead { 2 } else { 1 });
                    let pairs = trace.prompts.iter().zip(&trace.outputs);
                    let requests = pairs
                        .map(|(prompt, output)| drive::greedy(prompt, output.len()))
                        .collect();
                    let got = support::tokens(&mut engine, requests);
                    let what = format!("{name}, {builder}, {mode:?}, ahead {ahead}");
                    assert_eq!(got, trace.outputs, "{what}");
                    let stats = engine.stats();
                    assert_eq!((stats.failed_steps, stats.fallback_steps), (0, 0), "{what}");
                    let free = engine.scheduler().kv().pool().num_free();
                    assert_eq!(
                        free,
                        engine.num_blocks() - 1,
                        "{what}: every block came back"
                    );
                    runs += 1;
                }
            }
        }
    }
    println!("the recorded tokens in each of {runs} runs");
}

#[test]
fn a_cache_that_is_too_small_for_all_gives_the_same_tokens() {
    let Some(ordinal) = support::device() else {
        return;
    };
    let trace = trace::load("llama_mrv2_f32");
    for ahead in [true, false] {
        let config = EngineConfig {
            model_dtype: ModelDtype::Float32,
            async_scheduling: Some(ahead),
            cache_size: CacheSize::Blocks(16),
            ..support::config(ordinal)
        };
        let mut engine =
            support::engine(&config, &drive::tiny_llama_dir(), &component("flash-attn"));
        let pairs = trace.prompts.iter().zip(&trace.outputs);
        let requests = pairs
            .map(|(prompt, output)| drive::greedy(prompt, output.len()))
            .collect();
        assert_eq!(support::tokens(&mut engine, requests), trace.outputs);
        assert!(
            engine.stats().preemptions > 0,
            "the cache was meant to be too small"
        );
    }
}

#[test]
fn the_default_model_gives_the_recorded_tokens() {
    let (Some(ordinal), Some(path)) = (support::device(), support::default_model()) else {
        return;
    };
    let recorded = support::recorded();
    for (family, builder) in [BACKENDS[0], BACKENDS[2]] {
        let config = EngineConfig {
            model_dtype: ModelDtype::Float32,
            attention_backend: Some(backend_name(family).to_owned()),
            ..support::config(ordinal)
        };
        let mut engine = support::engine(&config, &path, &component(builder));
        let cases = recorded.cases.iter();
        let requests = cases
            .map(|case| drive::greedy(&case.prompt_ids, case.token_ids.len()))
            .collect();
        let got = support::tokens(&mut engine, requests);
        let mut equal = 0;
        for (index, (got, case)) in got.iter().zip(&recorded.cases).enumerate() {
            let at = got.iter().zip(&case.token_ids).position(|(a, b)| a != b);
            assert!(
                at.is_none(),
                "{builder}, prompt {index}: another token at {at:?}, where the gap is {:?}",
                at.map(|at| case.top2_gap[at])
            );
            equal += got.len();
        }
        println!("{builder}: {equal} tokens equal");
    }
}

#[test]
fn every_family_gives_the_cpus_tokens() {
    let Some(ordinal) = support::device() else {
        return;
    };
    for (family, changes) in [
        ("llama", json!({})),
        ("llama", json!({ "tie_word_embeddings": true })),
        ("qwen2", json!({})),
        ("qwen3", json!({})),
        ("mistral", json!({ "sliding_window": 24 })),
    ] {
        let model = support::RandomModel::new(family, &changes, 11);
        let prompts = support::prompts(6, 512);
        let on_device = EngineConfig {
            model_dtype: ModelDtype::Float32,
            ..support::config(ordinal)
        };
        let mut engine = support::engine(&on_device, model.path(), &component("flash-attn"));
        let got = support::tokens(&mut engine, support::requests(&prompts, 24));
        let on_host = EngineConfig {
            device: DeviceChoice::Cpu,
            cudagraph_mode: CudagraphMode::None,
            cudagraph_capture_sizes: None,
            ..on_device
        };
        let options = LoadOptions {
            weights: Weights::F32,
            threads: None,
        };
        let host_model = Model::load(model.path(), options).expect("the model loads");
        let mut host = drive::engine(&on_host, Box::new(host_model), &component("flash-attn"));
        let want = support::tokens(&mut host, support::requests(&prompts, 24));
        assert_eq!(got, want, "{family} {changes}");
    }
}
