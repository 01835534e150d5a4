//! bf16 and f16, teacher-forced with the recorded answers: another token only where the recorded two best were close.

use std::sync::{Arc, Mutex};

use timetable_engine::{EngineConfig, GenerationRequest, KvCacheDtype, ModelDtype, backend_name};
use timetable_tests::{
    candle_reference::argmax,
    drive::{self, component, generate},
};
use timetable_types::Family;

use super::support;

/// Where the recorded two largest logits are closer than this, either is right.
const NEAR_TIE: f32 = 0.25;

/// Rows seen, and the recorded gap at each row whose largest logit is another token.
#[derive(Default)]
struct Seen {
    rows: usize,
    flips: Vec<f32>,
}

#[test]
fn bf16_flips_only_where_the_recorded_tokens_were_close() {
    let (Some(ordinal), Some(path)) = (support::device(), support::default_model()) else {
        return;
    };
    let recorded = Arc::new(support::recorded());
    for (model_dtype, family, builder) in [
        (ModelDtype::Bfloat16, Family::FlashAttn, "flash-attn"),
        (ModelDtype::Bfloat16, Family::Flashinfer, "flashinfer"),
        (ModelDtype::Float16, Family::FlashAttn, "flash-attn"),
    ] {
        let config = EngineConfig {
            model_dtype,
            attention_backend: Some(backend_name(family).to_owned()),
            ..support::config(ordinal)
        };
        let seen = run(&config, &path, builder, &recorded);
        println!(
            "{builder} {model_dtype:?}: {} rows, {} flips at gaps {:?}",
            seen.rows,
            seen.flips.len(),
            seen.flips
        );
        let wrong: Vec<&f32> = seen.flips.iter().filter(|&&gap| gap >= NEAR_TIE).collect();
        assert!(
            wrong.is_empty(),
            "{builder} {model_dtype:?}: another token at gaps {wrong:?}"
        );
    }
    // An fp8 cache is another arithmetic: it runs, and most tokens are the same.
    let config = EngineConfig {
        kv_cache_dtype: KvCacheDtype::Fp8E4m3,
        ..support::config(ordinal)
    };
    let seen = run(&config, &path, "flash-attn", &recorded);
    println!(
        "bf16 over fp8: {} rows, {} flips",
        seen.rows,
        seen.flips.len()
    );
    assert!(
        10 * seen.flips.len() < seen.rows,
        "{} of {} tokens are others",
        seen.flips.len(),
        seen.rows
    );
}

fn run(
    config: &EngineConfig,
    path: &std::path::Path,
    builder: &str,
    recorded: &Arc<support::Recorded>,
) -> Seen {
    let mut engine = support::engine(config, path, &component(builder));
    let seen = Arc::new(Mutex::new(Seen::default()));
    let (shared, cases) = (seen.clone(), recorded.clone());
    // A new engine names its requests from 0 on.
    engine.set_logits_observer(Some(Box::new(move |id, index, logits| {
        let case = &cases.cases[id.0 as usize];
        let mut seen = shared.lock().expect("no panic while it is held");
        seen.rows += 1;
        if argmax(logits) as u32 != case.token_ids[index] {
            seen.flips.push(case.top2_gap[index]);
        }
    })));
    let requests = recorded.cases.iter().map(|case| GenerationRequest {
        forced: case.token_ids.clone(),
        ..drive::greedy(&case.prompt_ids, case.token_ids.len())
    });
    for answer in generate(&mut engine, requests.collect()) {
        assert!(answer.error.is_none(), "{:?}", answer.error);
    }
    let stats = engine.stats();
    assert_eq!((stats.failed_steps, stats.fallback_steps), (0, 0));
    let rows: usize = recorded.cases.iter().map(|case| case.token_ids.len()).sum();
    let seen = std::mem::take(&mut *seen.lock().expect("no panic while it is held"));
    assert_eq!(seen.rows, rows, "every row is compared");
    seen
}
