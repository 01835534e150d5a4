//! What the HTTP server costs for each token, beyond the engine's step: 32 requests read by sinks on the step thread, and the
//! same requests by 32 streaming clients over loopback, in turn.
//!
//! The device computes nothing and takes a fixed time for each step, so that every token goes out by itself, as behind a real
//! model. Costs are the CPU time of the threads that serve, as the kernel counts it: the server's thread, its helpers, and what
//! the step thread has more than without a server. The clients' threads are nobody's cost but the machine's.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use timetable_attention::VerifyContext;
use timetable_engine::{
    AttentionPlan, BuilderSource, CacheSize, Engine, EngineConfig, EngineError, EngineHandle,
    Executor, FinishReason, RequestEvent, SimulatedExecutor,
    chat::ChatTemplate,
    executor::{
        DeviceFacts, ExecutorSetup, GraphPlan, SegmentPlace, Step, StepFailure, StepResults,
        Unprepared,
    },
    model::ModelConfig,
    simulated::{StepCost, simulated_model},
    tokenizer::Tokenizer,
};
use timetable_server::{Bounds, Metrics, Options, ServedModel, Server, Service};
use timetable_types::Metadata;

use super::{Row, median};
use crate::drive::{greedy, sandbox, tiny_llama_dir};

const STREAMS: usize = 32;
const TOKENS: usize = 256;
/// A step's time on the device.
const STEP: Duration = Duration::from_millis(4);
const ROUNDS: usize = 5;
/// Microseconds of CPU for each token.
const BAR: f64 = 50.0;

/// The simulated device, with its steps' time made real.
struct Paced(SimulatedExecutor);

impl Executor for Paced {
    fn model_config(&self) -> &ModelConfig {
        self.0.model_config()
    }

    fn facts(&self, config: &EngineConfig) -> Result<DeviceFacts, EngineError> {
        self.0.facts(config)
    }

    fn max_segments(&self) -> usize {
        self.0.max_segments()
    }

    fn setup(&mut self, setup: &ExecutorSetup<'_>) -> Result<(), EngineError> {
        self.0.setup(setup)
    }

    fn start(&mut self, graphs: GraphPlan) -> Result<usize, EngineError> {
        self.0.start(graphs)
    }

    fn prepare(
        &mut self,
        group: usize,
        segment: SegmentPlace,
        metadata: &Metadata,
        context: &VerifyContext<'_>,
    ) -> Result<(), Unprepared> {
        self.0.prepare(group, segment, metadata, context)
    }

    fn leave_out(&mut self, segment: usize) {
        self.0.leave_out(segment);
    }

    fn submit(&mut self, step: Step<'_>) -> Result<(), StepFailure> {
        self.0.submit(step)
    }

    fn collect(&mut self, results: &mut StepResults) -> Result<(), StepFailure> {
        std::thread::sleep(STEP);
        self.0.collect(results)
    }
}

fn engine(tokenizer: &Arc<Tokenizer>) -> Engine {
    let config = EngineConfig {
        max_num_seqs: STREAMS,
        max_num_batched_tokens: 2048,
        max_model_len: Some(1024),
        cache_size: CacheSize::Blocks(STREAMS * 64 + 1),
        cudagraph_mode: timetable_types::CudagraphMode::None,
        ..EngineConfig::default()
    };
    let model = ModelConfig {
        vocab_size: tokenizer.vocab_size(),
        ..simulated_model()
    };
    let executor = Paced(SimulatedExecutor::new(model, StepCost::default()));
    let facts = executor.facts(&config).expect("the simulated device's");
    let plan = AttentionPlan::for_device(&config, executor.model_config(), facts).expect("a plan");
    let executor = Box::new(executor);
    let tokenizer = Some(tokenizer.clone());
    let source = BuilderSource::Plain;
    Engine::with_executor(&config, plan, executor, tokenizer, sandbox(), &source)
        .expect("the engine starts")
}

/// Nanoseconds on a CPU of this process' threads whose name begins so. None where the kernel does not count them.
fn cpu_ns(name: &str) -> Option<u64> {
    let mut total = 0;
    for task in std::fs::read_dir("/proc/self/task").ok()? {
        let task = task.ok()?.path();
        let called = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
        if called.starts_with(name) {
            let counts = std::fs::read_to_string(task.join("schedstat")).ok()?;
            total += counts.split_whitespace().next()?.parse::<u64>().ok()?;
        }
    }
    Some(total)
}

/// What a round took.
struct Round {
    step_ns: u64,
    http_ns: u64,
    wall: Duration,
}

/// Of the server's thread and its helpers.
fn server_ns() -> Option<u64> {
    Some(cpu_ns("timetable-http")? + cpu_ns("tokio")?)
}

fn round(run: impl FnOnce()) -> Option<Round> {
    let before = (cpu_ns("timetable-step")?, server_ns()?);
    let start = Instant::now();
    run();
    let wall = start.elapsed();
    Some(Round {
        step_ns: cpu_ns("timetable-step")? - before.0,
        http_ns: server_ns()? - before.1,
        wall,
    })
}

fn prompt(stream: usize) -> Vec<u32> {
    (0..16).map(|i| (5 + stream * 7 + i) as u32 % 500).collect()
}

/// All requests, read by sinks that count.
fn alone(engine: &EngineHandle) {
    let (sender, ends) = mpsc::channel();
    for stream in 0..STREAMS {
        let sender = sender.clone();
        let mut tokens = 0;
        engine.submit_to(greedy(&prompt(stream), TOKENS), move |event| match event {
            RequestEvent::Token { .. } => {
                tokens += 1;
                true
            }
            RequestEvent::Finished { reason, .. } => sender.send((reason, tokens)).is_ok(),
        });
    }
    for _ in 0..STREAMS {
        let end = ends.recv().expect("every request ends");
        assert_eq!(end, (FinishReason::Length, TOKENS));
    }
}

/// All requests, each by a client of its own.
fn through_http(address: SocketAddr) {
    std::thread::scope(|scope| {
        for stream in 0..STREAMS {
            scope.spawn(move || {
                let body = format!(
                    r#"{{"model":"m","prompt":{:?},"max_tokens":{TOKENS},"ignore_eos":true,"temperature":0,"stream":true}}"#,
                    prompt(stream)
                );
                let request = format!(
                    "POST /v1/completions HTTP/1.1\r\nHost: m\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                    body.len()
                );
                let mut connection = TcpStream::connect(address).expect("the server listens");
                connection.write_all(request.as_bytes()).expect("it reads");
                let mut answer = String::new();
                connection.read_to_string(&mut answer).expect("it answers");
                // Each token has its text, and an event; so has the end.
                assert_eq!(answer.matches("data: {").count(), TOKENS + 1, "{answer}");
                assert!(answer.contains("data: [DONE]"));
            });
        }
    });
}

pub(super) fn measure() -> Vec<Row> {
    let name = |what: &str| format!("serve-overhead/{STREAMS} streams/{what}");
    let tokenizer = Arc::new(Tokenizer::load(tiny_llama_dir()).expect("the tokenizer"));
    let engine = engine(&tokenizer);
    let bounds = Bounds::of(&engine);
    let handle = Arc::new(EngineHandle::spawn(engine).expect("a thread"));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let model = ServedModel {
        name: "m".to_owned(),
        tokenizer,
        template: ChatTemplate::load(tiny_llama_dir()),
        bounds,
    };
    let text = Box::new(|| Ok(String::new()));
    let service = Service::new(handle.clone(), model, text);
    let server = Server::start(
        listener,
        service,
        Options::default(),
        Arc::new(Metrics::default()),
    )
    .expect("the server starts");
    let address = server.address();

    alone(&handle);
    through_http(address);
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let of = (round(|| alone(&handle)), round(|| through_http(address)));
        let (Some(without), Some(with)) = of else {
            return vec![Row::missing(
                name("CPU a token"),
                "µs",
                "the kernel does not count the time of threads (/proc/self/task/*/schedstat)",
            )];
        };
        rounds.push((without, with));
    }
    let tokens = (STREAMS * TOKENS) as f64;
    let of = |what: &dyn Fn(&(Round, Round)) -> f64| {
        let mut values: Vec<f64> = rounds
            .iter()
            .map(|round| what(round) / 1e3 / tokens)
            .collect();
        let middle = median(&mut values);
        (middle, values[0], values[values.len() - 1])
    };
    let http = of(&|round| round.1.http_ns as f64);
    let step = of(&|round| round.1.step_ns as f64 - round.0.step_ns as f64);
    let both = of(&|round| (round.1.http_ns + round.1.step_ns) as f64 - round.0.step_ns as f64);
    let engine = of(&|round| round.0.step_ns as f64);
    let wall = of(&|round| round.1.wall.as_nanos() as f64 - round.0.wall.as_nanos() as f64);
    let spread = |(_, least, most): (f64, f64, f64)| format!("{least:.1} to {most:.1}");
    vec![
        Row::new(name("CPU a token beyond the engine"), both.0, "µs")
            .at_most(Some(BAR))
            .note(format!(
                "{ROUNDS} rounds of {TOKENS} tokens, {}; steps of {} ms; {:.1} on the server's threads, {:.1} more on the step thread, which has {:.1} without a server",
                spread(both),
                STEP.as_millis(),
                http.0,
                step.0,
                engine.0
            )),
        Row::new(name("wall time a token beyond the engine"), wall.0, "µs")
            .at_most(Some(BAR))
            .note(format!("{}; all streams to their ends, with and without clients", spread(wall))),
    ]
}
