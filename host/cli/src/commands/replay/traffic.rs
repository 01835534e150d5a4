//! `replay --trace FILE`: the engine with builders, on a simulated device, with the requests of a public trace.
//!
//! Time is simulated: requests arrive when the trace says, a step takes what the cost model says, and the program runs as fast as
//! it can. So the batches depend on nothing but the trace and the settings.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;
use timetable_engine::sampling::SamplingParams;
use timetable_engine::simulated::{StepCost, simulated_model};
use timetable_engine::{
    AttentionPlan, BuilderSource, CacheSize, Engine, EngineConfig, Executor, GenerationRequest,
    SimulatedExecutor, backend_name,
};
use timetable_record::trace::{self, Trace};
use timetable_record::{
    Behind, Candidate, MetadataDigest, Recorder, RecorderFigures, RecorderHandle, RecorderOptions,
};
use timetable_sandbox::{
    BuildBudget, BuiltBy, FaultPolicy, LatencyHistogram, Limits, ObservedStep, Sandbox, SeenFault,
    StepObserver,
};
use timetable_types::CudagraphMode;

use super::super::progress::Progress;
use super::super::table::table;
use super::super::{embedded, print, print_json};
use super::recording::by_kind;
use super::{FormatArg, Replay, TraceArgs, count, us};
use crate::exit::{Exit, Failure};

/// Tokens of the KV cache where nobody says how many blocks it has.
const CACHE_TOKENS: usize = 432_000;

/// What the observer of steps saw.
#[derive(Default)]
struct Seen {
    digest: MetadataDigest,
    build_ns: LatencyHistogram,
    fuel: LatencyHistogram,
    faults: BTreeMap<&'static str, u64>,
    plain_steps: u64,
}

/// Watches the steps, and hands them on to a recorder.
struct Watch {
    seen: Arc<Mutex<Seen>>,
    recorder: Option<Recorder>,
}

impl StepObserver for Watch {
    fn observe(&mut self, step: ObservedStep<'_>) {
        {
            let built = &step.built;
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.digest.add(step.slot, &built.metadata);
            match built.built_by {
                BuiltBy::Component | BuiltBy::Candidate => {
                    let time = built.build_time.as_nanos();
                    seen.build_ns
                        .record(u64::try_from(time).unwrap_or(u64::MAX));
                    seen.fuel.record(built.fuel);
                }
                BuiltBy::Plain => seen.plain_steps += 1,
            }
            if let Some(fault) = &built.fault {
                let kind = SeenFault::of(fault).kind.name();
                *seen.faults.entry(kind).or_default() += 1;
            }
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.observe(step);
        }
    }
}

/// Steps of one shape.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Shape {
    /// Of one token a row.
    decode_steps: u64,
    /// With a longer row.
    mixed_steps: u64,
    tokens: u64,
}

/// What the requests came to.
#[derive(Debug, Default)]
struct Traffic {
    finished: u64,
    failed: u64,
    refused: u64,
    first_error: Option<String>,
    steps: u64,
    simulated: Duration,
    /// By the power of two that the rows do not exceed.
    shapes: BTreeMap<usize, Shape>,
}

pub fn run(arguments: &Replay, path: &Path, candidate: Option<Candidate>) -> Result<(), Failure> {
    let of = &arguments.of_trace;
    if !(1e-6..=1e6).contains(&of.speed) {
        return Err(Failure::new(
            Exit::Usage,
            format!(
                "--speed {:?}: give a number from 0.000001 to 1000000",
                of.speed
            ),
        ));
    }
    if of.max_requests == Some(0) {
        return Err(Failure::new(
            Exit::Usage,
            "--max-requests 0: give 1 or more, or leave it out for the whole trace",
        ));
    }
    let format = of.format.map(FormatArg::format);
    let trace = Trace::read(path, format, of.max_requests).map_err(Failure::of(Exit::BadInput))?;
    let sandbox = Sandbox::new(Limits::default()).map_err(Failure::of(Exit::Failure))?;
    let (backend, source) = source(of, candidate, &sandbox)?;
    let mut engine = engine(of, &arguments.builder_option, &backend, &sandbox, &source)?;
    let (recorder, recording) = match &of.record {
        Some(path) => {
            let options = RecorderOptions {
                behind: Behind::Wait,
                ..RecorderOptions::default()
            };
            let (recorder, handle) = timetable_record::record(path, sandbox.limits(), options)
                .map_err(Failure::of(Exit::BadInput))?;
            (Some(recorder), Some(handle))
        }
        None => (None, None),
    };
    let seen = Arc::new(Mutex::new(Seen::default()));
    engine.set_step_observer(Some(Box::new(Watch {
        seen: Arc::clone(&seen),
        recorder,
    })));
    let progress = Progress::start(&format!("replaying {}", path.display()), !arguments.json);
    let verify_ns = LatencyHistogram::default();
    let began = Instant::now();
    let traffic = drive(&mut engine, &trace, of.speed, &verify_ns, &progress);
    let elapsed = began.elapsed();
    progress.finish();
    engine.set_step_observer(None);
    let recorded = recording.map(RecorderHandle::finish);
    let seen = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
    let report = Report {
        path,
        trace: &trace,
        backend: &backend,
        origin: source_origin(&source),
        engine: &engine,
        traffic,
        seen,
        verify_ns: &verify_ns,
        elapsed,
        recorded,
    };
    report.print(arguments.json)
}

/// The builder, and the backend that reads what it builds.
fn source(
    of: &TraceArgs,
    candidate: Option<Candidate>,
    sandbox: &Sandbox,
) -> Result<(String, BuilderSource), Failure> {
    let bad = |origin: &str, error: &dyn std::fmt::Display| {
        Failure::new(Exit::BadInput, format!("component {origin}: {error}"))
    };
    let candidate = match candidate {
        Some(candidate) => candidate,
        None => {
            let backend = of.backend.as_deref().unwrap_or("FLASH_ATTN");
            let embedded = embedded(&backend.to_ascii_uppercase())?;
            Candidate {
                bytes: embedded.bytes.to_vec(),
                origin: format!("embedded {}", embedded.name),
                options: None,
                grant: None,
            }
        }
    };
    let Candidate { bytes, origin, .. } = candidate;
    let component = sandbox.load(&bytes).map_err(|error| bad(&origin, &error))?;
    let backend = backend_name(component.family());
    if let Some(asked) = &of.backend
        && !asked.eq_ignore_ascii_case(backend)
    {
        return Err(bad(
            &origin,
            &format!("it builds for {backend}, and --backend is {asked}; leave that out"),
        ));
    }
    Ok((
        backend.to_owned(),
        BuilderSource::Component { component, origin },
    ))
}

fn source_origin(source: &BuilderSource) -> &str {
    match source {
        BuilderSource::Component { origin, .. } => origin,
        BuilderSource::Plain | BuilderSource::Native(_) | BuilderSource::ByFamily(_) => "",
    }
}

fn engine(
    of: &TraceArgs,
    options: &[(String, String)],
    backend: &str,
    sandbox: &Sandbox,
    source: &BuilderSource,
) -> Result<Engine, Failure> {
    let bad = Failure::of::<timetable_engine::EngineError>;
    let blocks = of
        .num_gpu_blocks_override
        .unwrap_or(CACHE_TOKENS / of.block_size.max(1));
    let config = EngineConfig {
        attention_backend: Some(backend.to_owned()),
        cudagraph_mode: CudagraphMode::None,
        max_num_seqs: of.max_num_seqs,
        max_num_batched_tokens: of.max_num_batched_tokens,
        block_size: of.block_size,
        enable_prefix_caching: !of.no_enable_prefix_caching,
        cache_size: CacheSize::Blocks(blocks),
        builder_options: options.to_vec(),
        ..EngineConfig::default()
    };
    let executor = SimulatedExecutor::new(simulated_model(), StepCost::default());
    let facts = executor.facts(&config).map_err(bad(Exit::BadInput))?;
    let plan = AttentionPlan::for_device(&config, executor.model_config(), facts)
        .map_err(bad(Exit::BadInput))?;
    let engine = Engine::with_executor(&config, plan, Box::new(executor), None, sandbox, source)
        .map_err(bad(Exit::BadInput))?;
    // What is decided by the clock would make two runs differ.
    let policy = FaultPolicy {
        build_budget: BuildBudget {
            per_step: Duration::from_secs(3600),
            reserve: Duration::from_secs(3600),
        },
        ..FaultPolicy::default()
    };
    for handle in engine.reload_handles() {
        handle
            .set_policy(policy)
            .map_err(Failure::of(Exit::Failure))?;
    }
    Ok(engine)
}

/// When a request of a trace arrives, at so many times its speed. What is too late for a clock is never.
fn at_speed(arrival: Duration, speed: f64) -> Duration {
    Duration::try_from_secs_f64(arrival.as_secs_f64() / speed).unwrap_or(Duration::MAX)
}

/// Runs the trace to its end.
fn drive(
    engine: &mut Engine,
    trace: &Trace,
    speed: f64,
    verify_ns: &LatencyHistogram,
    progress: &Progress,
) -> Traffic {
    let vocab_size = simulated_model().vocab_size as u32;
    let arrival = |index: usize| at_speed(trace.requests[index].arrival, speed);
    let mut traffic = Traffic::default();
    let mut now = Duration::ZERO;
    let mut next = 0;
    loop {
        while next < trace.requests.len() && arrival(next) <= now {
            let request = &trace.requests[next];
            let added = engine.add_request(GenerationRequest {
                prompt: trace::prompt(next, request, vocab_size),
                params: SamplingParams {
                    max_tokens: request.output_length,
                    ignore_eos: true,
                    ..SamplingParams::default()
                },
                forced: trace::answer(next, request, vocab_size),
                ..GenerationRequest::default()
            });
            if let Err(error) = added {
                traffic.refused += 1;
                traffic.first_error.get_or_insert(error.to_string());
            }
            next += 1;
        }
        if engine.is_idle() {
            if next == trace.requests.len() {
                break;
            }
            now = now.max(arrival(next));
            continue;
        }
        let output = engine.step();
        for update in &output.updates {
            match (&update.error, update.finish) {
                (Some(error), _) => {
                    traffic.failed += 1;
                    traffic.first_error.get_or_insert(error.to_string());
                }
                (None, Some(_)) => traffic.finished += 1,
                (None, None) => {}
            }
        }
        let (rows, tokens) = (output.num_reqs, output.num_tokens);
        let shape = traffic.shapes.entry(rows.next_power_of_two()).or_default();
        shape.decode_steps += u64::from(rows == tokens);
        shape.mixed_steps += u64::from(rows != tokens);
        shape.tokens += tokens as u64;
        traffic.steps += 1;
        let last = engine.stats().last;
        verify_ns.record(last.verify_ns);
        // A step that failed took no time on the device; the clock goes on all the same.
        now = now.saturating_add(Duration::from_nanos(last.kernel_ns.max(1000)));
        if traffic.steps.is_multiple_of(256) {
            progress.note(format!(
                "{} of {} requests, {} steps, {:.0} s simulated",
                traffic.finished,
                trace.requests.len(),
                traffic.steps,
                now.as_secs_f64()
            ));
        }
    }
    traffic.simulated = now;
    traffic
}

/// Everything that is told in the end.
struct Report<'a> {
    path: &'a Path,
    trace: &'a Trace,
    backend: &'a str,
    origin: &'a str,
    engine: &'a Engine,
    traffic: Traffic,
    seen: Seen,
    verify_ns: &'a LatencyHistogram,
    elapsed: Duration,
    recorded: Option<RecorderFigures>,
}

impl Report<'_> {
    fn print(self, as_json: bool) -> Result<(), Failure> {
        let (failed, refused) = (self.traffic.failed, self.traffic.refused);
        let none_ran = refused == self.trace.requests.len() as u64;
        let error = self.traffic.first_error.clone();
        let path = self.path.display().to_string();
        if as_json {
            print_json(&self.json())?;
        } else {
            print(self.text().as_bytes())?;
        }
        match (failed, error) {
            (1.., Some(error)) => Err(Failure::new(
                Exit::Failure,
                format!("trace {path}: {failed} requests failed; the first: {error}"),
            )),
            (0, Some(error)) if none_ran => Err(Failure::new(
                Exit::Failure,
                format!("trace {path}: all {refused} requests were refused; the first: {error}"),
            )),
            _ => Ok(()),
        }
    }

    fn json(self) -> serde_json::Value {
        let stats = self.engine.stats();
        let quantiles =
            |of: &LatencyHistogram| json!({ "p50": of.quantile(0.5), "p99": of.quantile(0.99) });
        let shapes: Vec<_> = self
            .traffic
            .shapes
            .iter()
            .map(|(rows, shape)| json!({ "max_rows": rows, "steps": shape }))
            .collect();
        json!({
            "trace": self.path,
            "format": self.trace.format,
            "backend": self.backend,
            "builder": self.origin,
            "requests": {
                "read": self.trace.requests.len(),
                "finished": self.traffic.finished,
                "failed": self.traffic.failed,
                "refused": self.traffic.refused,
                "first_error": self.traffic.first_error,
            },
            "steps": self.traffic.steps,
            "tokens_computed": stats.tokens_computed,
            "tokens_sampled": stats.tokens_sampled,
            "preemptions": stats.preemptions,
            "prefix_cache": { "queried_tokens": stats.prefix_queries, "hit_tokens": stats.prefix_hits },
            "build_ns": quantiles(&self.seen.build_ns),
            "fuel": quantiles(&self.seen.fuel),
            "verify_ns": quantiles(self.verify_ns),
            "plain_steps": self.seen.plain_steps,
            "failed_steps": stats.failed_steps,
            "faults": self.seen.faults,
            "batches": shapes,
            "digest": self.seen.digest.finish(),
            "simulated_s": self.traffic.simulated.as_secs_f64(),
            "elapsed_s": self.elapsed.as_secs_f64(),
            "recording": self.recorded,
        })
    }

    fn text(self) -> String {
        let stats = self.engine.stats();
        let traffic = &self.traffic;
        let share = 100.0 * stats.prefix_hits as f64 / stats.prefix_queries.max(1) as f64;
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{}: {} requests, {} finished, {} failed, {} refused; {} by {}",
            self.path.display(),
            self.trace.requests.len(),
            traffic.finished,
            traffic.failed,
            traffic.refused,
            self.backend,
            self.origin,
        );
        if let Some(error) = &traffic.first_error {
            let _ = writeln!(text, "the first that failed or was refused: {error}");
        }
        let _ = writeln!(
            text,
            "{} steps, {} tokens computed, {} sampled, {} preemptions; {share:.1} % of {} prompt tokens were in the prefix cache; \
             {:.1} s simulated in {:.1} s",
            traffic.steps,
            stats.tokens_computed,
            stats.tokens_sampled,
            stats.preemptions,
            stats.prefix_queries,
            traffic.simulated.as_secs_f64(),
            self.elapsed.as_secs_f64(),
        );
        let _ = writeln!(
            text,
            "build p50 {} µs, p99 {} µs; fuel p50 {}, p99 {}; verify p50 {} µs, p99 {} µs",
            us(self.seen.build_ns.quantile(0.5)),
            us(self.seen.build_ns.quantile(0.99)),
            count(self.seen.fuel.quantile(0.5)),
            count(self.seen.fuel.quantile(0.99)),
            us(self.verify_ns.quantile(0.5)),
            us(self.verify_ns.quantile(0.99)),
        );
        let _ = writeln!(
            text,
            "{} steps by the plain builder, {} without metadata; faults: {}",
            self.seen.plain_steps,
            stats.failed_steps,
            match self.seen.faults.is_empty() {
                true => "none".to_owned(),
                false => by_kind(&self.seen.faults),
            }
        );
        let rows: Vec<Vec<String>> = traffic
            .shapes
            .iter()
            .map(|(rows, shape)| {
                let steps = shape.decode_steps + shape.mixed_steps;
                vec![
                    rows.to_string(),
                    shape.decode_steps.to_string(),
                    shape.mixed_steps.to_string(),
                    format!("{:.1}", shape.tokens as f64 / steps.max(1) as f64),
                ]
            })
            .collect();
        text.push_str(&table(
            &["ROWS UP TO", "DECODE STEPS", "MIXED STEPS", "MEAN TOKENS"],
            &rows,
        ));
        if let Some(recorded) = &self.recorded {
            let _ = writeln!(text, "{}", super::recorded(recorded));
        }
        let _ = writeln!(
            text,
            "digest of the metadata: {}",
            self.seen.digest.finish()
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_do_not_overflow() {
        let second = Duration::from_secs(1);
        assert_eq!(at_speed(4 * second, 2.0), 2 * second);
        assert_eq!(at_speed(second, 1e-6), 1_000_000 * second);
        for (arrival, speed) in [
            (Duration::MAX, 1.0),
            (Duration::MAX, 1e-6),
            (second, 1e-300),
        ] {
            assert_eq!(at_speed(arrival, speed), Duration::MAX);
        }
    }
}
