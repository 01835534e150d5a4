//! What the engine counts beside its answers.

use timetable_engine::{BuilderSource, CacheSize, EngineConfig, FinishReason};
use timetable_tests::drive;

#[test]
fn requests_tokens_and_steps_are_counted() {
    let config = EngineConfig {
        cache_size: CacheSize::Blocks(64),
        ..EngineConfig::default()
    };
    let mut engine = drive::engine(&config, drive::tiny_llama(), &BuilderSource::Plain);
    for prompt in [&[40, 41, 42][..], &[50; 20]] {
        let request = drive::greedy(prompt, 4);
        engine.add_request(request).expect("the request is taken");
    }
    let aborted = drive::greedy(&[60; 5], 100);
    let aborted = engine.add_request(aborted).expect("the request is taken");
    engine.step();
    let stats = engine.stats();
    assert_eq!(
        stats.prompt_tokens, 28,
        "three requests have their first token"
    );
    // Blocks of 16 tokens: one, two and one.
    assert_eq!((stats.kv_blocks, stats.kv_blocks_used), (63, 4));
    assert!(engine.abort(aborted));
    while !engine.is_idle() {
        engine.step();
    }
    let stats = engine.stats();
    assert_eq!(stats.kv_blocks_used, 0);
    assert_eq!(stats.prompt_tokens, 28);
    let finished = |reason: FinishReason| stats.finished[reason as usize];
    assert_eq!(
        finished(FinishReason::Length) + finished(FinishReason::Stop),
        2
    );
    assert_eq!(
        (finished(FinishReason::Abort), finished(FinishReason::Error)),
        (1, 0)
    );
    assert_eq!(stats.step_tokens.count(), stats.steps);
    assert_eq!(stats.step_tokens.sum, stats.tokens_computed);
    assert_eq!(stats.step_ns.count(), stats.steps);
    assert_eq!(stats.step_ns.sum, stats.total.total_ns());
}
