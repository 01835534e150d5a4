//! What the engine counts beside its answers.

use std::sync::Arc;

use timetable_engine::{
    BuilderSource, CacheSize, EngineConfig, FinishReason, StepRecord, StepTimings, Timeline,
};
use timetable_sandbox::{FaultPolicy, OnFault};
use timetable_tests::drive;
use timetable_types::Family;

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

/// What the timeline says of each step is what the counts say of all of them.
#[test]
fn each_step_is_recorded_with_its_times_and_what_became_of_it() {
    for (on_fault, name) in [
        (OnFault::Fallback, "fell back"),
        (OnFault::FailStep, "failed"),
    ] {
        let bytes = timetable_reference::chaos(Family::FlashAttn).expect("a chaos builder");
        let chaos = BuilderSource::Component {
            component: drive::sandbox().load(bytes).expect("it loads"),
            origin: "chaos.wasm".to_owned(),
        };
        let config = EngineConfig {
            cache_size: CacheSize::Blocks(64),
            builder_options: [("chaos", "trap"), ("chaos-min-rows", "9")]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .to_vec(),
            ..EngineConfig::default()
        };
        let mut engine = drive::engine(&config, drive::tiny_llama(), &chaos);
        for handle in engine.reload_handles() {
            let policy = FaultPolicy {
                on_fault,
                ..FaultPolicy::default()
            };
            handle.set_policy(policy).expect("a good policy");
        }
        let timeline = Arc::new(Timeline::new(64));
        engine.set_timeline(Some(timeline.clone()));
        // Two rows are built well, as the eight of the test build at the start are; nine are too many.
        let (two, nine) = (drive::greedy(&[40; 5], 2), drive::greedy(&[50; 7], 2));
        drive::generate(&mut engine, vec![two.clone(), two]);
        drive::generate(&mut engine, vec![nine; 9]);
        let stats = engine.stats();
        let kept = timeline.last(64);
        let records: Vec<StepRecord> = kept.into_iter().map(|(_, record)| record).collect();
        assert_eq!(records.len() as u64, stats.steps, "{name}");
        assert!(records.iter().map(|record| record.step).eq(1..=stats.steps));
        let tokens: u64 = records.iter().map(|record| record.tokens).sum();
        assert_eq!(tokens, stats.tokens_computed);
        assert_eq!((records[0].requests, records[0].tokens), (2, 10));
        let mut total = StepTimings::default();
        records.iter().for_each(|record| total += record.timings);
        assert_eq!(total, stats.total);
        let steps = |is: fn(&StepRecord) -> bool| records.iter().filter(|r| is(r)).count() as u64;
        assert_eq!(steps(|record| record.fell_back), stats.fallback_steps);
        assert_eq!(steps(|record| record.failed), stats.failed_steps);
        let (fell_back, failed) = (stats.fallback_steps > 0, stats.failed_steps > 0);
        let expected = (on_fault == OnFault::Fallback, on_fault == OnFault::FailStep);
        assert_eq!((fell_back, failed), expected);
    }
}
