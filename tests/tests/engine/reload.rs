//! The engine on its own thread: streams, aborts, shutdown, and builders replaced while requests run.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use timetable_engine::{
    BuilderSource, CacheSize, EngineConfig, EngineHandle, FinishReason, GenerationRequest,
    RequestEvent, RequestStream,
};
use timetable_tests::drive::{self, generate, greedy};

fn config() -> EngineConfig {
    EngineConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: Some(512),
        cache_size: CacheSize::Blocks(512),
        // One split per request, whatever the policy: equal merge order.
        max_num_splits: 1,
        ..EngineConfig::default()
    }
}

fn spawn(source: &BuilderSource) -> EngineHandle {
    EngineHandle::spawn(drive::engine(&config(), drive::tiny_llama(), source)).unwrap()
}

/// Eight prompts of different lengths.
fn prompts() -> Vec<GenerationRequest> {
    (0..8u32)
        .map(|request| {
            let prompt: Vec<u32> = (0..3 + request * 13)
                .map(|i| 5 + (i * 31 + request * 97) % 500)
                .collect();
            greedy(&prompt, 120)
        })
        .collect()
}

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
fn streams_aborts_and_a_clean_shutdown() {
    let handle = spawn(&BuilderSource::Plain);
    let mut refused = handle.submit(greedy(&[], 3));
    let Some(RequestEvent::Finished {
        reason: FinishReason::Error,
        error: Some(error),
    }) = refused.next()
    else {
        panic!("an empty prompt is refused");
    };
    assert!(error.to_string().contains("no tokens"), "{error}");
    assert!(refused.next().is_none());

    let (tokens, reason) = collect(handle.submit(greedy(&[5, 6], 10)));
    assert_eq!((tokens.len(), reason), (10, FinishReason::Length));

    let mut long = handle.submit(greedy(&[7; 20], 400));
    assert!(matches!(long.next(), Some(RequestEvent::Token { .. })));
    long.abort();
    let last = long.by_ref().last();
    assert!(
        matches!(
            last,
            Some(RequestEvent::Finished {
                reason: FinishReason::Abort,
                ..
            })
        ),
        "{last:?}"
    );

    drop(handle.submit(greedy(&[8; 20], 400)));
    let running = handle.submit(greedy(&[9; 20], 480));
    let waiting = std::thread::spawn(move || collect(running));
    while handle.stats().running == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    handle.shutdown();
    let (_, reason) = waiting.join().unwrap();
    assert_eq!(reason, FinishReason::Abort);
}

#[test]
fn a_stopped_engine_says_so() {
    let handle = spawn(&BuilderSource::Plain);
    let stream = handle.submit(greedy(&[5; 10], 3));
    drop(handle);
    let events: Vec<_> = stream.collect();
    assert!(
        matches!(events.last(), Some(RequestEvent::Finished { .. })),
        "{events:?}"
    );
}

/// Threads share a handle; each request's events reach its own sink, and one that says that nobody reads ends its request.
#[test]
fn sinks_of_several_threads_get_their_events_and_a_reader_that_left_frees_its_request() {
    let handle = Arc::new(spawn(&BuilderSource::Plain));
    let expected: Vec<Vec<u32>> = (0..4)
        .map(|i| collect(handle.submit(greedy(&[5 + i; 9], 20))).0)
        .collect();
    std::thread::scope(|scope| {
        for i in 0..4 {
            let (handle, expected) = (handle.clone(), &expected);
            scope.spawn(move || {
                let (sender, receiver) = std::sync::mpsc::channel();
                handle.submit_to(greedy(&[5 + i; 9], 20), move |event| {
                    sender.send(event).is_ok()
                });
                let mut tokens = Vec::new();
                // The sink is dropped after its last event, and the channel closes.
                while let Ok(event) = receiver.recv_timeout(Duration::from_secs(60)) {
                    match event {
                        RequestEvent::Token { token, .. } => tokens.push(token),
                        RequestEvent::Finished { reason, .. } => {
                            assert_eq!(reason, FinishReason::Length);
                        }
                    }
                }
                assert_eq!(tokens, expected[i as usize]);
            });
        }
    });
    let calls = Arc::new(AtomicUsize::new(0));
    let seen = calls.clone();
    handle.submit_to(greedy(&[7; 20], 400), move |_| {
        seen.fetch_add(1, Ordering::Relaxed) < 2
    });
    let deadline = Instant::now() + Duration::from_secs(60);
    while handle.num_unfinished() > 0 || handle.stats().kv_blocks_used > 0 {
        assert!(Instant::now() < deadline, "the request was not ended");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(calls.load(Ordering::Relaxed), 3, "no event after the third");
    assert_eq!(collect(handle.submit(greedy(&[5; 9], 20))).0, expected[0]);
    assert!(handle.fatal_error().is_none());
}

const RELOADS: usize = 100;

#[test]
fn a_hundred_reloads_while_eight_prompts_stream() {
    let mut quiet = drive::engine(
        &config(),
        drive::tiny_llama(),
        &drive::component("flash-attn"),
    );
    let expected: Vec<Vec<u32>> = generate(&mut quiet, prompts())
        .into_iter()
        .map(|answer| answer.tokens)
        .collect();

    let handle = spawn(&drive::component("flash-attn"));
    let done = AtomicBool::new(false);
    let requests = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for (index, request) in prompts().into_iter().enumerate() {
            let (handle, done, requests, expected) = (&handle, &done, &requests, &expected);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    let (tokens, reason) = collect(handle.submit(request.clone()));
                    assert_eq!(reason, FinishReason::Length, "prompt {index} failed");
                    assert_eq!(tokens, expected[index], "prompt {index}");
                    requests.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let reload = &handle.reload_handles()[0];
        for round in 0..RELOADS {
            let name = ["flash-attn-fixed-split", "flash-attn"][round % 2];
            let component = timetable_reference::component(name).unwrap();
            let version = reload.reload(component.bytes, name).unwrap();
            // It takes over at a step boundary: wait until it has served.
            let mut status = reload.status();
            while status.active.as_ref().map(|active| active.version) != Some(version.version)
                || status.steps == 0
            {
                std::thread::sleep(Duration::from_millis(1));
                status = reload.status();
            }
            assert!(status.faults.is_empty(), "{:?}", status.faults);
        }
        done.store(true, Ordering::Relaxed);
    });
    let stats = handle.stats();
    println!(
        "{RELOADS} reloads, {} requests, {} steps, {} failed, {} fell back",
        requests.load(Ordering::Relaxed),
        stats.steps,
        stats.failed_steps,
        stats.fallback_steps
    );
    assert_eq!((stats.failed_steps, stats.fallback_steps), (0, 0));
    assert!(requests.load(Ordering::Relaxed) >= 8);
}
