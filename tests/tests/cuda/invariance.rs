//! Batch invariance on the device: a request alone has the bits that it has among eleven others, in chunks and after preemption.

use serde_json::json;
use timetable_engine::{
    AttentionPlan, CacheSize, EngineConfig, Executor, GenerationRequest, KvCacheDtype, ModelDtype,
    backend_name, cuda::CudaExecutor,
};
use timetable_tests::drive::{self, component, logits, other_bits};
use timetable_types::Family;

use super::support::{self, RandomModel};

/// Tokens of each answer.
const TOKENS: usize = 24;

/// Twelve requests of 3 to 146 tokens, with the tokens to come forced.
fn requests() -> Vec<GenerationRequest> {
    let prompts = support::prompts(12, 512);
    let request = |(request, prompt): (usize, &Vec<u32>)| {
        let token = |index| ((index * 37 + request * 11) % 507 + 5) as u32;
        GenerationRequest {
            forced: (0..TOKENS).map(token).collect(),
            ..drive::greedy(prompt, TOKENS)
        }
    };
    prompts.iter().enumerate().map(request).collect()
}

/// Rows with other bits in a batch than alone, in any of three batches, and how many were compared.
fn compare(config: &EngineConfig, model: &RandomModel, builder: &str) -> (usize, usize) {
    let source = component(builder);
    let mut alone = support::engine(config, model.path(), &source);
    let expected: Vec<_> = requests()
        .into_iter()
        .flat_map(|request| logits(&mut alone, vec![request]))
        .collect();
    drop(alone);
    let (mut others, mut compared) = (0, 0);
    // All prompts in one step; in chunks; in chunks, and in a cache that is too small for all.
    for (tokens, blocks) in [(1024, 513), (96, 513), (96, 41)] {
        let config = EngineConfig {
            max_num_batched_tokens: tokens,
            cache_size: CacheSize::Blocks(blocks),
            ..config.clone()
        };
        let mut engine = support::engine(&config, model.path(), &source);
        let found = logits(&mut engine, requests());
        let stats = engine.stats();
        assert_eq!((stats.failed_steps, stats.fallback_steps), (0, 0));
        assert_eq!(stats.preemptions > 0, blocks == 41, "{stats:?}");
        let (differ, of) = other_bits(&found, &expected);
        println!("{tokens} tokens a step, {blocks} blocks: {differ} of {of} rows have other bits");
        others += differ;
        compared += of;
    }
    (others, compared)
}

#[test]
fn a_request_alone_has_the_bits_that_it_has_in_a_batch() {
    let Some(ordinal) = support::device() else {
        return;
    };
    let plain = RandomModel::new("llama", &json!({}), 41);
    let biased = RandomModel::new("qwen2", &json!({}), 42);
    let windowed = RandomModel::new("mistral", &json!({ "sliding_window": 24 }), 43);
    let (bf16, flash, auto) = (ModelDtype::Bfloat16, Family::FlashAttn, KvCacheDtype::Auto);
    let (f32, fp8) = (ModelDtype::Float32, KvCacheDtype::Fp8E4m3);
    let cases = [
        ("llama", &plain, bf16, flash, "flash-attn", auto),
        ("llama", &plain, bf16, flash, "flash-attn-fixed-split", auto),
        ("llama", &plain, bf16, flash, "flash-attn", fp8),
        (
            "qwen2",
            &biased,
            ModelDtype::Float16,
            flash,
            "flash-attn",
            auto,
        ),
        ("mistral", &windowed, bf16, flash, "flash-attn", auto),
        ("llama", &plain, f32, flash, "flash-attn", auto),
        ("llama", &plain, f32, Family::Flashinfer, "flashinfer", auto),
    ];
    let config = |model_dtype, family| EngineConfig {
        model_dtype,
        attention_backend: Some(backend_name(family).to_owned()),
        ..support::config(ordinal)
    };
    let mut wrong = Vec::new();
    for (name, model, model_dtype, family, builder, kv_cache_dtype) in cases {
        let what = format!("{name}, {builder}, {model_dtype:?}, cache {kv_cache_dtype:?}");
        println!("{what}:");
        let config = EngineConfig {
            kv_cache_dtype,
            batch_invariant: true,
            ..config(model_dtype, family)
        };
        let (others, compared) = compare(&config, model, builder);
        assert_eq!(compared, 3 * 12 * TOKENS);
        if others > 0 {
            wrong.push(format!("{what}: {others} of {compared} rows"));
        }
    }
    for (family, builder) in [
        (Family::FlashAttn, "flash-attn"),
        (Family::Flashinfer, "flashinfer"),
    ] {
        println!("{builder}, without the mode:");
        compare(&config(ModelDtype::Bfloat16, family), &plain, builder);
    }
    assert!(
        wrong.is_empty(),
        "other bits in a batch than alone: {wrong:#?}"
    );
}

#[test]
fn greedy_tokens_are_those_of_a_request_alone_with_steps_prepared_ahead() {
    let Some(ordinal) = support::device() else {
        return;
    };
    let model = RandomModel::new("llama", &json!({}), 44);
    let config = EngineConfig {
        model_dtype: ModelDtype::Bfloat16,
        batch_invariant: true,
        ..support::config(ordinal)
    };
    let source = component("flash-attn");
    let free = || support::requests(&support::prompts(12, 512), 40);
    let mut engine = support::engine(&config, model.path(), &source);
    assert_eq!(engine.depth(), 2);
    let together = support::tokens(&mut engine, free());
    let mut engine = support::engine(&config, model.path(), &source);
    for (index, request) in free().into_iter().enumerate() {
        let alone = support::tokens(&mut engine, vec![request]);
        assert_eq!(alone[0], together[index], "request {index}");
    }
}

#[test]
fn a_backend_that_does_not_support_it_is_refused() {
    let Some(ordinal) = support::device() else {
        return;
    };
    let model = RandomModel::new("llama", &json!({}), 45);
    let config = EngineConfig {
        batch_invariant: true,
        attention_backend: Some("FLASHINFER".to_owned()),
        ..support::config(ordinal)
    };
    let executor = CudaExecutor::new(&config, model.path()).unwrap();
    let facts = executor.facts(&config).unwrap();
    let error = AttentionPlan::for_device(&config, executor.model_config(), facts).unwrap_err();
    assert!(
        error.to_string().contains("batch invariance not supported"),
        "{error}"
    );
}
