//! Builders replaced while requests run on the device: a hundred times under load, and once with a promise that the captured
//! graphs do not hold, which are then captured again beside the steps.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use serde_json::json;
use timetable_engine::{
    CacheSize, Engine, EngineConfig, EngineHandle, FinishReason, ModelDtype, RequestEvent,
    RequestStream,
};
use timetable_tests::drive::{component, greedy};

use super::support::{self, RandomModel};

const RELOADS: usize = 100;
/// Steps whose times are compared.
const STEPS: usize = 400;

/// Requests that decode while the graphs are captured again.
const DECODES: usize = 256;

fn collect(stream: RequestStream) -> (Vec<u32>, FinishReason) {
    let mut tokens = Vec::new();
    for event in stream {
        match event {
            RequestEvent::Token { token, .. } => tokens.push(token),
            RequestEvent::Finished { reason, error } => {
                assert!(error.is_none(), "{error:?}");
                return (tokens, reason);
            }
        }
    }
    panic!("a stream ends with Finished");
}

#[test]
fn a_hundred_reloads_under_load() {
    let Some(ordinal) = support::device() else {
        return;
    };
    let config = support::config(ordinal);
    let model = RandomModel::new("llama", &json!({}), 7);
    let requests = support::requests(&support::prompts(8, 512), 120);
    let mut quiet = support::engine(&config, model.path(), &component("flash-attn"));
    // Lengths, not tokens: in bf16 a product's rounding may depend on the rows beside it.
    let expected: Vec<usize> = support::tokens(&mut quiet, requests.clone())
        .iter()
        .map(Vec::len)
        .collect();
    drop(quiet);

    let engine = support::engine(&config, model.path(), &component("flash-attn"));
    let handle = EngineHandle::spawn(engine).expect("a thread");
    let (done, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for (index, request) in requests.iter().enumerate() {
            let (handle, done, answered, expected) = (&handle, &done, &answered, &expected);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    let (tokens, reason) = collect(handle.submit(request.clone()));
                    assert_eq!(reason, FinishReason::Length, "prompt {index} failed");
                    assert_eq!(tokens.len(), expected[index], "prompt {index}");
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let reload = &handle.reload_handles()[0];
        for round in 0..RELOADS {
            let name = ["flash-attn-fixed-split", "flash-attn"][round % 2];
            let embedded = timetable_reference::component(name).expect("an embedded component");
            let version = reload
                .reload(embedded.bytes, name)
                .unwrap_or_else(|error| panic!("reload {round}: {error}"));
            let started = Instant::now();
            loop {
                let status = reload.status();
                let active = status.active.as_ref().map(|active| active.version);
                if active == Some(version.version) && status.steps > 0 {
                    assert!(status.faults.is_empty(), "{:?}", status.faults);
                    break;
                }
                assert!(
                    started.elapsed() < Duration::from_secs(30),
                    "reload {round} never served"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    let stats = handle.stats();
    println!(
        "{RELOADS} reloads, {} answers, {} steps, {} failed, {} fell back",
        answered.load(Ordering::Relaxed),
        stats.steps,
        stats.failed_steps,
        stats.fallback_steps
    );
    assert_eq!((stats.failed_steps, stats.fallback_steps), (0, 0));
    assert!(answered.load(Ordering::Relaxed) >= 8);
}

#[test]
fn a_larger_promise_is_captured_beside_the_steps() {
    let Some(ordinal) = support::device() else {
        return;
    };
    let random;
    // Steps of the default model are long enough to be told from the machine's own hiccups.
    let path = match support::default_model() {
        Some(path) => path,
        None => {
            let size = json!({ "num_hidden_layers": 24 });
            random = RandomModel::new("llama", &size, 8);
            random.path().to_owned()
        }
    };
    let config = EngineConfig {
        model_dtype: ModelDtype::Bfloat16,
        max_num_seqs: DECODES,
        max_num_batched_tokens: 2048,
        max_model_len: Some(1024),
        cache_size: CacheSize::Blocks(DECODES * 64 + 1),
        cudagraph_capture_sizes: Some(vec![1, 16, 64, DECODES as u32]),
        // One split to two: twice the work items for a captured graph, and steps that take about as long as before.
        builder_options: vec![("splits".to_owned(), "1".to_owned())],
        ..support::config(ordinal)
    };
    let mut engine = support::engine(&config, &path, &component("flash-attn-fixed-split"));
    for prompt in support::prompts(16, 500).iter().cycle().take(DECODES) {
        engine
            .add_request(greedy(prompt, 1000 - prompt.len()))
            .expect("the request is taken");
    }
    // One step, in milliseconds.
    let one = |engine: &mut Engine| {
        let start = Instant::now();
        assert!(engine.step().num_reqs > 0, "requests run");
        start.elapsed().as_secs_f64() * 1e3
    };
    for _ in 0..60 {
        one(&mut engine);
    }
    let quiet: Vec<f64> = (0..STEPS / 2).map(|_| one(&mut engine)).collect();
    let mut during = Vec::new();
    let reload = engine.reload_handles().remove(0);
    let changed = std::thread::spawn(move || {
        let started = Instant::now();
        let version = reload.reconfigure(vec![("splits".to_owned(), "2".to_owned())]);
        (reload, version, started.elapsed())
    });
    while !changed.is_finished() && during.len() < STEPS {
        during.push(one(&mut engine));
    }
    let (reload, version, took) = changed.join().expect("the reload's thread");
    let version = version.unwrap_or_else(|error| panic!("the larger promise: {error}"));
    // The new version is taken at the next boundaries.
    for _ in 0..40 {
        during.push(one(&mut engine));
    }
    let status = reload.status();
    assert_eq!(
        status.active.map(|active| active.version),
        Some(version.version),
        "the new version serves"
    );
    assert!(status.faults.is_empty(), "{:?}", status.faults);
    let stats = engine.stats();
    assert_eq!((stats.failed_steps, stats.fallback_steps), (0, 0));
    let median = sorted(&quiet)[quiet.len() / 2];
    let slow: Vec<(usize, f64)> = during
        .iter()
        .copied()
        .enumerate()
        .filter(|(_, ms)| *ms > 1.25 * median)
        .collect();
    println!(
        "slow steps, the new version's first is about {}: {slow:.3?}",
        during.len() - 40
    );
    let longest = |times: &[f64]| times.iter().copied().fold(0.0, f64::max);
    println!(
        "recaptured in {took:?}: a step takes {median:.3} ms (longest {:.3}), during the reload {:.3} ms (longest {:.3} of {})",
        longest(&quiet),
        sorted(&during)[during.len() / 2],
        longest(&during),
        during.len()
    );
    // A hiccup of the machine, which the quiet steps show too, is none of the reload's.
    assert!(
        longest(&during) <= 2.0 * median.max(longest(&quiet) / 2.0),
        "a step took {:.3} ms while graphs were captured, the median is {median:.3} ms",
        longest(&during)
    );
}

fn sorted(times: &[f64]) -> Vec<f64> {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}
