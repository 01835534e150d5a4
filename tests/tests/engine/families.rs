//! The hybrid and latent families, whole: transformers' greedy tokens through the engine, whatever the batching, with builders
//! as components and natively.

use timetable_engine::{
    BuilderSource, CacheSize, Engine, EngineConfig, FamilyBuilder, FinishReason,
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

/// The backends that run a model, and for each its components.
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
    let with_components = |(name, block_size, component): Backend| {
        let mamba = recurs.then_some((Family::Mamba, "mamba"));
        let builders = [component].into_iter().chain(mamba);
        let builders = builders.map(|(family, name)| FamilyBuilder {
            family,
            source: drive::component(name),
            options: None,
            grant: None,
        });
        (
            name,
            block_size,
            BuilderSource::ByFamily(builders.collect()),
        )
    };
    backends.into_iter().map(with_components).collect()
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

fn every_case_has_transformers_tokens(family: &str) {
    let recorded = Recorded::load();
    let cases: Vec<&Case> = recorded
        .cases
        .iter()
        .filter(|case| case.family() == family)
        .collect();
    assert!(cases.len() >= 2, "{} cases of {family}", cases.len());
    for case in cases {
        // All at once; a request at a time; prefills in chunks beside decodes; a few tokens at a time.
        for (tokens, rows) in [(256, 4), (256, 1), (13, 3), (3, 2)] {
            check(
                &recorded,
                case,
                &config(tokens, rows, 96),
                &BuilderSource::Plain,
            );
        }
        for (backend, block_size, source) in backends(case) {
            let config = EngineConfig {
                attention_backend: Some(backend.to_owned()),
                block_size,
                ..config(21, 3, 96)
            };
            check(&recorded, case, &config, &source);
        }
    }
}

#[test]
fn deepseek_v2_has_transformers_tokens_whatever_the_batching() {
    every_case_has_transformers_tokens("deepseek_v2");
}

#[test]
fn bamba_has_transformers_tokens_whatever_the_batching() {
    every_case_has_transformers_tokens("bamba");
}

#[test]
fn qwen3_next_has_transformers_tokens_whatever_the_batching() {
    every_case_has_transformers_tokens("qwen3_next");
}

#[test]
fn gemma3_has_transformers_tokens_whatever_the_batching() {
    every_case_has_transformers_tokens("gemma3_text");
}

#[test]
fn llama4_has_transformers_tokens_whatever_the_batching() {
    every_case_has_transformers_tokens("llama4_text");
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
