//! Reloads without end: what a thousand of them do to requests, ten thousand to memory, and any of them to the steps meanwhile.
//!
//! Every reload here goes through the stages.

use std::{
    convert::Infallible,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use timetable_attention::{Grant, VerifyContext, plain_builder};
use timetable_engine::{
    CacheSize, Engine, EngineConfig, EngineHandle, FinishReason, GenerationRequest, RequestEvent,
};
use timetable_reference::component;
use timetable_sandbox::{
    Canary, CodeCache, Companions, Component, Gates, GroupBuilder, GroupSetup, Limits,
    ReloadHandle, ReloadPlan, Sandbox, Stage,
};
use timetable_types::{Family, Metadata};

use super::{
    Row,
    batches::{NUM_BLOCKS, PAGE, batch, config},
};
use crate::drive::{self, generate, greedy};

const NAMES: [&str; 2] = ["flash-attn-fixed-split", "flash-attn"];
const RELOADS: usize = 1_000;
const FROM_CACHE: usize = 10_000;
const COMPILING: usize = 1_000;
const LONGEST: u32 = 2_048;

pub(super) fn measure() -> Vec<Row> {
    let mut rows = under_load();
    rows.extend(memory());
    rows
}

/// Shadow and canary, a few steps each. A busy machine is no reason to withdraw: how long builds take is another benchmark's.
fn plan(steps: u32) -> ReloadPlan {
    ReloadPlan {
        shadow_steps: steps,
        canary: Some(Canary {
            per_mille: 500,
            steps,
            ..Canary::default()
        }),
        gates: Gates {
            max_build_ratio: f64::INFINITY,
            max_extra_build_us: u32::MAX,
            min_observed_per_mille: 0,
            ..Gates::default()
        },
    }
}

fn engine_config() -> EngineConfig {
    EngineConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: Some(512),
        cache_size: CacheSize::Blocks(512),
        // One split per request, whatever the version: an equal order of sums, so that tokens can be compared.
        max_num_splits: 1,
        ..EngineConfig::default()
    }
}

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

/// Submits, and waits for the end. False if the candidate was withdrawn.
fn reload(handle: &ReloadHandle, component: &Component, plan: &ReloadPlan) -> bool {
    let info = handle
        .submit(Some(component), "soak", None, plan, &Companions::of(1))
        .expect("a version that is checked");
    loop {
        let status = handle.status();
        let candidate = status.candidate.expect("a candidate");
        assert_eq!(candidate.version, info);
        match candidate.stage {
            Stage::Active if status.active.as_ref() == Some(&info) => return true,
            Stage::Withdrawn => return false,
            _ => std::thread::sleep(Duration::from_micros(200)),
        }
    }
}

/// A thousand reloads while eight prompts are answered again and again.
fn under_load() -> Vec<Row> {
    let source = drive::component("flash-attn");
    let mut quiet = drive::engine(&engine_config(), drive::tiny_llama(), &source);
    let expected: Vec<Vec<u32>> = generate(&mut quiet, prompts())
        .into_iter()
        .map(|answer| answer.tokens)
        .collect();
    let engine = drive::engine(&engine_config(), drive::tiny_llama(), &source);
    let handle = EngineHandle::spawn(engine).expect("a thread");
    let done = AtomicBool::new(false);
    let (answered, failed, changed) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let (mut active, mut withdrawn) = (0, 0);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (request, expected) in prompts().into_iter().zip(&expected) {
            let (handle, done) = (&handle, &done);
            let (answered, failed, changed) = (&answered, &failed, &changed);
            scope.spawn(move || {
                while !done.load(Relaxed) {
                    let (mut tokens, mut good) = (Vec::new(), false);
                    for event in handle.submit(request.clone()) {
                        match event {
                            RequestEvent::Token { token, .. } => tokens.push(token),
                            RequestEvent::Finished { reason, .. } => {
                                good = reason == FinishReason::Length;
                            }
                        }
                    }
                    answered.fetch_add(1, Relaxed);
                    failed.fetch_add(u64::from(!good), Relaxed);
                    changed.fetch_add(u64::from(good && tokens != *expected), Relaxed);
                }
            });
        }
        let components = NAMES.map(|name| load(drive::sandbox(), name));
        let reloads = &handle.reload_handles()[0];
        for round in 0..RELOADS {
            match reload(reloads, &components[round % 2], &plan(4)) {
                true => active += 1,
                false => withdrawn += 1,
            }
        }
        done.store(true, Relaxed);
    });
    let (seconds, stats) = (start.elapsed().as_secs_f64(), handle.stats());
    let bad = failed.load(Relaxed) + changed.load(Relaxed);
    vec![
        Row::new(
            format!("soak/requests failed or changed by {RELOADS} staged reloads"),
            bad as f64,
            "requests",
        )
        .at_most_none()
        .note(format!(
            "of {}; {active} versions got into service, {withdrawn} were withdrawn; {} steps, {} failed, {} built plainly, in \
             {seconds:.0} s",
            answered.load(Relaxed),
            stats.steps,
            stats.failed_steps,
            stats.fallback_steps
        )),
    ]
}

/// Resident memory over reloads of a group without an engine: components from the cache, then compiled each time.
fn memory() -> Vec<Row> {
    let directory = tempfile::tempdir().expect("a directory");
    let cache = CodeCache::open(&directory.path().join("cache")).expect("a cache");
    let cached = Sandbox::with_cache(Limits::default(), cache).expect("a sandbox");
    let compiling = Sandbox::new(Limits::default()).expect("a sandbox");
    [
        ("from the cache", &cached, FROM_CACHE),
        ("compiling", &compiling, COMPILING),
    ]
    .into_iter()
    .map(|(how, sandbox, reloads)| {
        let config = config(LONGEST);
        let setup = GroupSetup {
            name: "soak".to_owned(),
            plain: plain_builder(Family::FlashAttn, &config).expect("a plain builder"),
            config: config.clone(),
            acceptance: None,
        };
        let first = load(sandbox, NAMES[1]);
        let mut group = GroupBuilder::new(sandbox, setup, &first, NAMES[1]).expect("a group");
        let handle = group.handle();
        let step = batch(16, 0, LONGEST, LONGEST / PAGE);
        let mut after = [0; 2];
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let marks = scope.spawn(|| {
                let mut at_hundred = 0;
                for round in 1..=reloads {
                    let component = load(sandbox, NAMES[round % 2]);
                    assert!(reload(&handle, &component, &plan(2)), "it serves");
                    if round == 100 {
                        at_hundred = resident_kib();
                    }
                }
                done.store(true, Relaxed);
                [at_hundred, resident_kib()]
            });
            let inputs = step.tensors.inputs();
            let context = VerifyContext {
                config: &config,
                common: &step.cam,
                inputs: &inputs,
                promise: None,
                grant: Grant::Exact,
                num_blocks: NUM_BLOCKS,
            };
            while !done.load(Relaxed) && !marks.is_finished() {
                group.step_boundary();
                let accept = |_: &Metadata| Ok::<(), Infallible>(());
                let built = group.build_in_context(&context, false, accept);
                assert!(built.expect("a step").fault.is_none());
                std::thread::sleep(Duration::from_micros(50));
            }
            after = marks.join().expect("every reload serves");
        });
        let [hundred, last] = after;
        Row::new(
            format!("soak/resident memory after {reloads} reloads {how}"),
            last as f64 / 1024.0,
            "MiB",
        )
        .against(
            hundred as f64 / 1024.0,
            format!(
                "after 100: {:.1} MiB; bar: at most 1.05 ×",
                hundred as f64 / 1024.0
            ),
        )
    })
    .collect()
}

/// Steps of eight decodes of the small model, in windows with reloads that compile and windows without.
pub(super) fn latency() -> Vec<Row> {
    const WINDOW: Duration = Duration::from_millis(250);
    const WINDOWS: usize = 120;
    let source = drive::component("flash-attn");
    let mut engine = drive::engine(&engine_config(), drive::tiny_llama(), &source);
    let handle = engine.reload_handles().remove(0);
    let (busy, done) = (AtomicBool::new(false), AtomicBool::new(false));
    let reloads = AtomicU64::new(0);
    let mut samples = [Vec::new(), Vec::new()];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut round = 0;
            while !done.load(Relaxed) {
                if busy.load(Relaxed) {
                    let embedded = component(NAMES[round % 2]).expect("an embedded component");
                    // As a host does it.
                    let loaded = drive::sandbox().load_aside(embedded.bytes);
                    let component = loaded.expect("the component loads");
                    round += 1;
                    if !done.load(Relaxed) && busy.load(Relaxed) {
                        let info = handle.submit(
                            Some(&component),
                            "soak",
                            None,
                            &plan(8),
                            &Companions::of(1),
                        );
                        reloads.fetch_add(u64::from(info.is_ok()), Relaxed);
                    }
                } else {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        for window in 0..=WINDOWS {
            let storm = window % 2;
            busy.store(storm == 1, Relaxed);
            let start = Instant::now();
            while start.elapsed() < WINDOW {
                keep_busy(&mut engine);
                let before = Instant::now();
                let step = engine.step();
                let elapsed = before.elapsed().as_nanos() as f64;
                let decodes = step.num_reqs == 8 && step.num_tokens == 8;
                drop(engine.take_updates());
                // Whole batches of decodes only: prefills take as long as they are. The first window warms up.
                if window > 0 && decodes {
                    samples[storm].push(elapsed);
                }
            }
        }
        done.store(true, Relaxed);
    });
    let counts = [samples[0].len(), samples[1].len()];
    let [quiet, storm] = samples.map(|mut samples| {
        samples.sort_by(f64::total_cmp);
        let at = |q: f64| samples[((samples.len() - 1) as f64 * q) as usize] / 1e3;
        [at(0.5), at(0.99), at(0.999)]
    });
    let note = format!(
        "{} and {} steps in turn, {} reloads, each compiled; median {:.0} and {:.0} µs, p99 {:.0} and {:.0} µs",
        counts[1],
        counts[0],
        reloads.load(Relaxed),
        storm[0],
        quiet[0],
        storm[1],
        quiet[1]
    );
    let text = format!("without reloads: {:.0} µs; bar: at most 1.2 ×", quiet[2]);
    vec![
        Row::new(
            "soak/p99.9 of a step while versions compile and are tried",
            storm[2],
            "µs",
        )
        .against(quiet[2], text)
        .note(note),
    ]
}

/// Eight requests run at any time.
fn keep_busy(engine: &mut Engine) {
    let stats = engine.stats();
    for request in stats.running + stats.waiting..8 {
        let prompt: Vec<u32> = (0..8)
            .map(|i| 5 + (i * 31 + request as u32 * 97) % 500)
            .collect();
        engine
            .add_request(greedy(&prompt, 400))
            .expect("the request is taken");
    }
}

fn load(sandbox: &Sandbox, name: &str) -> Component {
    let embedded = component(name).expect("an embedded component");
    sandbox.load(embedded.bytes).expect("the component loads")
}

/// Resident memory of this process.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}
