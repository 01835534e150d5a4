//! The hybrid and latent families, whole: transformers' logits and greedy tokens through the engine, whatever the batching, with
//! builders as components and natively.

use timetable_engine::{
    BuilderSource, CacheSize, Engine, EngineConfig, FamilyBuilder, FinishReason, GenerationRequest,
    model::{LoadOptions, Mixer, Model, Weights},
};
use timetable_tests::{
    drive::{self, generate, greedy},
    tiny_models::{Case, Recorded},
};
use timetable_types::Family;

fn model(case: &Case) -> Box<Model> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    case.write(dir.path());
    let options = LoadOptions {
        weights: Weights::F32,
        threads: Some(1),
    };
    Box::new(Model::load(dir.path(), options).expect("the model loads"))
}

/// Between the engine's logits and transformers', both in f32; the record has six digits after the point.
const MAX_DIFFERENCE: f32 = 1e-4;

/// `tokens` of a step and `rows` of it at most.
fn config(tokens: usize, rows: usize, blocks: usize) -> EngineConfig {
    EngineConfig {
        max_num_seqs: rows,
        max_num_batched_tokens: tokens,
        max_model_len: Some(128),
        // It divides every chunk.
        block_size: 8,
        cache_size: CacheSize::Blocks(blocks),
        num_workers: 2,
        ..EngineConfig::default()
    }
}

/// A backend, its block size, and the embedded component of its family.
type Backend = (&'static str, usize, (Family, &'static str));
const ATTENTION: [Backend; 3] = [
    ("FLASH_ATTN", 8, (Family::FlashAttn, "flash-attn")),
    ("FLASHINFER", 8, (Family::Flashinfer, "flashinfer")),
    ("TRITON_ATTN", 8, (Family::TritonAttn, "triton-attn")),
];
const LATENT: [Backend; 3] = [
    ("TRITON_MLA", 8, (Family::FlashMla, "triton-mla")),
    ("FLASH_ATTN_MLA", 16, (Family::FlashMla, "flash-attn-mla")),
    ("FLASHMLA", 64, (Family::FlashMla, "flash-mla")),
];

/// The backends that run a model, and for each its components and their native twins.
fn backends(case: &Case) -> Vec<(&'static str, usize, BuilderSource)> {
    let model = model(case);
    let has = |kind: fn(&Mixer) -> bool| {
        let config = model.config();
        (0..config.num_hidden_layers).any(|layer| kind(&config.mixer(layer)))
    };
    let backends = match has(|mixer| matches!(mixer, Mixer::Latent(_))) {
        true => LATENT,
        false => ATTENTION,
    };
    let recurs = has(|mixer| matches!(mixer, Mixer::Recurrent(_)));
    let with_builders = |(name, block_size, component): Backend| {
        let mamba = recurs.then_some((Family::Mamba, "mamba"));
        let builders: Vec<_> = [component].into_iter().chain(mamba).collect();
        let sources: [fn(&'static str) -> BuilderSource; 2] =
            [|name| drive::component(name), native];
        sources.map(|source| {
            let of_family = |&(family, name): &(Family, &'static str)| FamilyBuilder {
                family,
                source: source(name),
                options: None,
                grant: None,
            };
            let builders = builders.iter().map(of_family).collect();
            (name, block_size, BuilderSource::ByFamily(builders))
        })
    };
    backends.into_iter().flat_map(with_builders).collect()
}

fn native(name: &'static str) -> BuilderSource {
    BuilderSource::Native(Box::new(move |config| {
        timetable_reference::native_twin(name, config)
    }))
}

/// The largest difference between the engine's logits and transformers' recorded rows of the longest prompt. Each row is
/// computed as the last of a prefill, and by a decode after each shorter prefill: the prompt's own tokens are forced.
fn largest_difference(
    recorded: &Recorded,
    case: &Case,
    config: &EngineConfig,
    source: &BuilderSource,
) -> f32 {
    let config = EngineConfig {
        // No request may leave the prefill to another.
        enable_prefix_caching: false,
        ..config.clone()
    };
    let mut engine = drive::engine(&config, model(case), source);
    let prompt = recorded.prompts.last().expect("a prompt");
    let requests = recorded.rows.iter().map(|&row| {
        let (prompt, forced) = prompt.split_at(row + 1);
        GenerationRequest {
            forced: forced.to_vec(),
            ..greedy(prompt, forced.len() + 1)
        }
    });
    let logits = drive::logits(&mut engine, requests.collect());
    let mut largest: f32 = 0.0;
    for (&first, logits) in recorded.rows.iter().zip(&logits) {
        for (&row, expected) in recorded.rows.iter().zip(&case.logits) {
            let Some(index) = row.checked_sub(first) else {
                continue;
            };
            assert_eq!(logits[index].len(), expected.len(), "{}", case.name);
            for (a, b) in logits[index].iter().zip(expected) {
                let difference = (a - b).abs();
                assert!(
                    difference <= MAX_DIFFERENCE,
                    "{}: row {row} after a prefill of {}: {a} and {b} with {config:?}",
                    case.name,
                    first + 1
                );
                largest = largest.max(difference);
            }
        }
    }
    let stats = engine.stats();
    let unserved = (stats.fallback_steps, stats.failed_steps);
    assert_eq!(unserved, (0, 0), "{}", case.name);
    largest
}

fn check(
    recorded: &Recorded,
    case: &Case,
    config: &EngineConfig,
    source: &BuilderSource,
) -> Engine {
    let mut engine = drive::engine(config, model(case), source);
    let requests = recorded.prompts.iter().zip(&case.greedy);
    let requests = requests.map(|(prompt, tokens)| greedy(prompt, tokens.len()));
    let answers = generate(&mut engine, requests.collect());
    for (answer, tokens) in answers.iter().zip(&case.greedy) {
        assert_eq!(answer.error, None, "{} with {config:?}", case.name);
        assert_eq!(&answer.tokens, tokens, "{} with {config:?}", case.name);
        assert_eq!(answer.finish, Some(FinishReason::Length));
    }
    let stats = engine.stats();
    assert_eq!(
        (stats.fallback_steps, stats.failed_steps),
        (0, 0),
        "{}",
        case.name
    );
    let free = engine.scheduler().kv().pool().num_free();
    assert_eq!(
        free,
        engine.num_blocks() - 1,
        "{}: every block came back",
        case.name
    );
    engine
}

fn every_case_has_transformers_logits_and_tokens(family: &str) {
    let recorded = Recorded::load();
    let cases: Vec<&Case> = recorded
        .cases
        .iter()
        .filter(|case| case.family() == family)
        .collect();
    assert!(cases.len() >= 2, "{} cases of {family}", cases.len());
    let (mut runs, mut largest) = (0, 0f32);
    for case in cases {
        let mut run = |config: &EngineConfig, source: &BuilderSource| {
            check(&recorded, case, config, source);
            largest = largest.max(largest_difference(&recorded, case, config, source));
            runs += 1;
        };
        // All at once; a request at a time; prefills in chunks beside decodes; a few tokens at a time.
        for (tokens, rows) in [(256, 4), (256, 1), (13, 3), (3, 2)] {
            run(&config(tokens, rows, 96), &BuilderSource::Plain);
        }
        for (backend, block_size, source) in backends(case) {
            let config = EngineConfig {
                attention_backend: Some(backend.to_owned()),
                block_size,
                ..config(21, 3, 96)
            };
            run(&config, &source);
        }
    }
    println!("{family}: largest logit difference {largest:e} in {runs} runs of the engine");
}

#[test]
fn a_native_builder_of_another_family_is_refused() {
    let recorded = Recorded::load();
    let bamba = recorded
        .cases
        .iter()
        .find(|case| case.family() == "bamba")
        .expect("a hybrid");
    let made = Engine::new(
        &config(256, 4, 96),
        model(bamba),
        None,
        drive::sandbox(),
        // Of every group, and Mamba2's need another.
        &native("flash-attn"),
    );
    let refusal = made.err().expect("refused").to_string();
    for part in ["flash-attn", "mamba", "give a builder for each family"] {
        assert!(refusal.contains(part), "{refusal}");
    }
}

#[test]
fn deepseek_v2_has_transformers_logits_and_tokens_whatever_the_batching() {
    every_case_has_transformers_logits_and_tokens("deepseek_v2");
}

#[test]
fn bamba_has_transformers_logits_and_tokens_whatever_the_batching() {
    every_case_has_transformers_logits_and_tokens("bamba");
}

#[test]
fn qwen3_next_has_transformers_logits_and_tokens_whatever_the_batching() {
    every_case_has_transformers_logits_and_tokens("qwen3_next");
}

#[test]
fn gemma3_has_transformers_logits_and_tokens_whatever_the_batching() {
    every_case_has_transformers_logits_and_tokens("gemma3_text");
}

#[test]
fn llama4_has_transformers_logits_and_tokens_whatever_the_batching() {
    every_case_has_transformers_logits_and_tokens("llama4_text");
}

#[test]
fn a_cache_that_is_too_small_for_all_gives_every_family_the_same_tokens() {
    let recorded = Recorded::load();
    for case in &recorded.cases {
        // Thirteen blocks of eight tokens would hold all three requests; seven hold the longest.
        let (_, _, source) = backends(case).remove(0);
        let engine = check(&recorded, case, &config(21, 3, 10), &source);
        let preemptions = engine.stats().preemptions;
        println!("{}: {preemptions} preemptions", case.name);
        assert!(
            preemptions > 0,
            "{}: the cache was meant to be too small",
            case.name
        );
    }
}
