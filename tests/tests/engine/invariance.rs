//! Batch invariance: a request's logits, bit for bit, whatever else is in the batch; and what is refused or switched off for it.

use timetable_engine::{
    AttentionPlan, BuilderSource, CacheSize, EngineConfig, GenerationRequest, backend_name,
    executor::DeviceFacts,
};
use timetable_tests::{
    drive::{self, greedy, logits, other_bits},
    trace,
};
use timetable_types::{CudagraphMode, Dtype, Family};

fn config(family: Family, tokens: usize, rows: usize) -> EngineConfig {
    EngineConfig {
        attention_backend: Some(backend_name(family).to_owned()),
        batch_invariant: true,
        cudagraph_mode: CudagraphMode::None,
        max_num_seqs: rows,
        max_num_batched_tokens: tokens,
        max_model_len: Some(512),
        cache_size: CacheSize::Blocks(256),
        num_workers: 4,
        ..EngineConfig::default()
    }
}

/// The recorded prompts, each with 12 tokens to come.
fn requests() -> Vec<GenerationRequest> {
    let trace = trace::load("llama_mrv2_f32");
    trace
        .prompts
        .iter()
        .map(|prompt| greedy(prompt, 12))
        .collect()
}

#[test]
fn a_request_alone_has_the_bits_that_it_has_in_a_batch_in_any_chunks_and_after_preemption() {
    for (family, source) in [
        (Family::FlashAttn, drive::component("flash-attn")),
        (Family::Flashinfer, drive::component("flashinfer")),
        (Family::FlashAttn, BuilderSource::Plain),
    ] {
        let mut alone = drive::engine(&config(family, 512, 1), drive::tiny_llama(), &source);
        let expected: Vec<_> = requests()
            .into_iter()
            .flat_map(|request| logits(&mut alone, vec![request]))
            .collect();
        for (tokens, rows, blocks) in [(512, 12, 256), (37, 5, 256), (64, 8, 16)] {
            let config = EngineConfig {
                cache_size: CacheSize::Blocks(blocks),
                ..config(family, tokens, rows)
            };
            let mut engine = drive::engine(&config, drive::tiny_llama(), &source);
            let found = logits(&mut engine, requests());
            let (others, compared) = other_bits(&found, &expected);
            assert_eq!(others, 0, "{family:?}, {tokens} tokens: of {compared} rows");
            assert!(compared >= 12);
            let stats = engine.stats();
            assert_eq!((stats.failed_steps, stats.fallback_steps), (0, 0));
            assert_eq!(stats.preemptions > 0, blocks == 16, "{stats:?}");
        }
    }
}

/// What builders are told, and what the start says.
#[test]
fn builders_are_told_and_the_report_says_what_is_off() {
    let model = drive::tiny_llama();
    let codes = |config: &EngineConfig, builder: &str| {
        let engine = drive::engine(config, drive::tiny_llama(), &drive::component(builder));
        let report = engine.startup_report();
        let codes = report.hazards.iter().map(|hazard| hazard.code);
        let cached = engine.scheduler().kv().enables_prefix_caching();
        (codes.collect::<Vec<_>>(), cached)
    };
    for (family, builder, expected, cached) in [
        (Family::FlashAttn, "flash-attn", vec!["one_split"], true),
        (
            Family::Flashinfer,
            "flashinfer",
            vec!["prefix_caching_disabled", "one_split"],
            false,
        ),
    ] {
        let on = config(family, 64, 8);
        assert_eq!(codes(&on, builder), (expected, cached), "{family:?}");
        let off = EngineConfig {
            batch_invariant: false,
            ..on.clone()
        };
        assert_eq!(codes(&off, builder), (vec![], true), "{family:?}");
        for (config, splits) in [(&on, 1), (&off, off.max_num_splits)] {
            let plan = AttentionPlan::new(config, model.config()).unwrap();
            let group = &plan.groups()[0];
            let builder = plan
                .builder_config(group, config, model.config(), 32)
                .unwrap();
            assert_eq!(builder.batch_invariant, config.batch_invariant);
            assert_eq!(builder.max_num_splits, splits);
        }
    }
}

#[test]
fn a_backend_that_does_not_support_it_is_refused_on_a_gpu() {
    let mut sizes = drive::tiny_llama().config().clone();
    sizes.head_dim = 128;
    let plan = |backend: Option<&str>, capability, dtype| {
        let config = EngineConfig {
            attention_backend: backend.map(str::to_owned),
            batch_invariant: true,
            ..EngineConfig::default()
        };
        let facts = DeviceFacts::cuda(&config, capability, 132, dtype, 128);
        AttentionPlan::for_device(&config, &sizes, facts)
    };
    let error = plan(Some("FLASHINFER"), (9, 0), Dtype::Bfloat16).unwrap_err();
    assert!(
        error.to_string().contains("batch invariance not supported"),
        "{error}"
    );
    // The device's first choice is one that does: FLASHINFER would come first on Blackwell.
    for capability in [(9, 0), (10, 0)] {
        let chosen = plan(None, capability, Dtype::Bfloat16).unwrap();
        assert_eq!(chosen.backends()[0].0, "FLASH_ATTN");
        assert_eq!(chosen.supports_batch_invariance(), [true]);
    }
    // In f32 a GPU is its own reference, and has the CPU device's contracts.
    let exact = plan(Some("FLASHINFER"), (9, 0), Dtype::Float32).unwrap();
    assert_eq!(exact.supports_batch_invariance(), [true]);
}
