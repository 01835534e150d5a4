//! A step's host work: everything of a step but the model's forward pass and sampling, with a model that computes nothing.

use timetable_engine::{
    Builders, CacheSize, Engine, EngineConfig, GenerationRequest, SlotConfig, StepTimings,
    TenantConfig, backend_name, runner::NullModel,
};
use timetable_sandbox::TenantName;
use timetable_types::Family;

use crate::drive;

/// Medians over steps of `requests` decodes each.
#[derive(Clone, Copy, Debug)]
pub struct StepHostWork {
    /// Decodes of a step.
    pub requests: usize,
    /// Steps measured.
    pub steps: usize,
    /// Median of the host's work, in ns.
    pub median_ns: u64,
    /// Median of each part, in ns.
    pub parts: StepTimings,
}

/// Measures `steps` steps of `requests` decodes with lengths between 100 and 1,100 tokens, after a warm-up. Where tenants have builders,
/// the requests are theirs, dealt in turn: each step has a segment for each.
pub fn measure(
    family: Family,
    builders: Builders<'_>,
    requests: usize,
    steps: usize,
) -> StepHostWork {
    let names = builders.tenants.iter().map(|(name, _)| name.clone());
    let names: Vec<TenantName> = names.collect();
    let config = EngineConfig {
        attention_backend: Some(backend_name(family).to_owned()),
        max_num_seqs: requests,
        max_num_batched_tokens: 8192,
        max_model_len: Some(8192),
        cache_size: CacheSize::Blocks(requests * 200),
        tenants: names
            .iter()
            .map(|name| TenantConfig {
                slot: Some(SlotConfig::default()),
                ..TenantConfig::new(name.clone())
            })
            .collect(),
        ..EngineConfig::default()
    };
    let mut sizes = drive::tiny_llama().config().clone();
    sizes.max_position_embeddings = 8192;
    sizes.num_hidden_layers = 1;
    (
        sizes.num_attention_heads,
        sizes.num_key_value_heads,
        sizes.head_dim,
    ) = (9, 3, 64);
    sizes.vocab_size = 32;
    let model = Box::new(NullModel::new(sizes));
    let mut engine =
        Engine::new(&config, model, None, drive::sandbox(), builders).expect("the engine starts");
    for request in 0..requests {
        let prompt: Vec<u32> = (0..100 + request * 1000 / requests)
            .map(|index| ((index * 7 + request) % 32) as u32)
            .collect();
        let request = GenerationRequest {
            tenant: names.get(request % names.len().max(1)).cloned(),
            ..drive::greedy(&prompt, steps + 200)
        };
        engine.add_request(request).expect("the request is taken");
    }
    while engine.step().num_tokens != requests {}
    for _ in 0..50 {
        engine.step();
    }
    let samples: Vec<StepTimings> = (0..steps)
        .map(|_| {
            assert_eq!(engine.step().num_tokens, requests, "decodes only");
            engine.stats().last
        })
        .collect();
    assert_eq!(
        engine.stats().fallback_steps,
        0,
        "the builder served every step"
    );
    let median = |part: fn(&StepTimings) -> u64| {
        let mut values: Vec<u64> = samples.iter().map(part).collect();
        values.sort_unstable();
        values[values.len() / 2]
    };
    StepHostWork {
        requests,
        steps,
        median_ns: median(StepTimings::host_ns),
        parts: StepTimings {
            schedule_ns: median(|t| t.schedule_ns),
            batch_ns: median(|t| t.batch_ns),
            build_ns: median(|t| t.build_ns),
            verify_ns: median(|t| t.verify_ns),
            prepare_ns: median(|t| t.prepare_ns),
            model_ns: median(|t| t.model_ns),
            sample_ns: median(|t| t.sample_ns),
            output_ns: median(|t| t.output_ns),
            ..StepTimings::default()
        },
    }
}
