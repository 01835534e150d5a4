//! What recording costs the step thread, and how many bytes a step takes.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use timetable_engine::{BuilderSource, CacheSize, EngineConfig, backend_name, runner::NullModel};
use timetable_record::{Recorder, RecorderOptions, record};
use timetable_sandbox::{Limits, ObservedStep, StepObserver};
use timetable_types::Family;

use super::Row;
use crate::drive;

const STEPS: usize = 2000;
const LONGEST: usize = 8192;

/// Nanoseconds that the recorder took of each step, and that the build before it took.
type Times = Arc<Mutex<(Vec<u64>, Vec<u64>)>>;

struct Timed {
    recorder: Recorder,
    times: Times,
}

impl StepObserver for Timed {
    fn observe(&mut self, step: ObservedStep<'_>) {
        let build = step.built.build_time.as_nanos() as u64;
        let start = Instant::now();
        self.recorder.observe(step);
        let elapsed = start.elapsed().as_nanos() as u64;
        let mut times = self.times.lock().expect("nobody panicked");
        times.0.push(elapsed);
        times.1.push(build);
    }
}

pub(super) fn measure() -> Vec<Row> {
    let cases = [
        (Family::FlashAttn, "flash-attn", 256, 1000),
        (Family::Flashinfer, "flashinfer", 256, 1000),
        (Family::FlashAttn, "flash-attn", 256, 4000),
        (Family::FlashAttn, "flash-attn", 1, 1000),
    ];
    cases
        .iter()
        .map(|&(family, component, requests, length)| {
            case(family, &drive::component(component), requests, length)
        })
        .collect()
}

/// `requests` decodes of up to about `length` tokens.
fn case(family: Family, source: &BuilderSource, requests: usize, length: usize) -> Row {
    let scratch = tempfile::tempdir().expect("a temporary directory");
    let config = EngineConfig {
        attention_backend: Some(backend_name(family).to_owned()),
        max_num_seqs: requests,
        max_num_batched_tokens: 8192,
        max_model_len: Some(LONGEST),
        cache_size: CacheSize::Blocks(requests * LONGEST / 16),
        ..EngineConfig::default()
    };
    let mut sizes = drive::tiny_llama().config().clone();
    sizes.max_position_embeddings = LONGEST;
    sizes.num_hidden_layers = 1;
    // The cache is never read: as small as it can be.
    (
        sizes.num_attention_heads,
        sizes.num_key_value_heads,
        sizes.head_dim,
    ) = (1, 1, 16);
    sizes.vocab_size = 32;
    let mut engine = drive::engine(&config, Box::new(NullModel::new(sizes)), source);
    for request in 0..requests {
        let prompt: Vec<u32> = (0..100 + request * length / requests)
            .map(|index| ((index * 7 + request) % 32) as u32)
            .collect();
        let request = drive::greedy(&prompt, STEPS + 500);
        engine.add_request(request).expect("the request is taken");
    }
    while engine.step().num_tokens != requests {}
    let path = scratch.path().join("recording");
    let (recorder, handle) =
        record(&path, &Limits::default(), RecorderOptions::default()).expect("a recording");
    let times = Times::default();
    engine.set_step_observer(Some(Box::new(Timed {
        recorder,
        times: Arc::clone(&times),
    })));
    for _ in 0..STEPS {
        engine.step();
        // As fast as the writer: real steps have a model, and are slower.
        loop {
            let figures = handle.figures();
            if figures.written + figures.left_out + 8 > figures.steps {
                break;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    engine.set_step_observer(None);
    let figures = handle.finish();
    let (mut observe, mut build) = std::mem::take(&mut *times.lock().expect("nobody panicked"));
    let mut at = |q: f64| quantile(&mut observe, q);
    let name = format!(
        "record/{}/{requests} decodes of 100 to {} tokens",
        backend_name(family),
        100 + length
    );
    Row::new(name, at(0.5), "µs").note(format!(
        "99th percentile {:.1}; the build beside it {:.1}; {:.0} bytes a step on disk, {} of {} steps left out",
        at(0.99),
        quantile(&mut build, 0.5),
        figures.bytes as f64 / figures.written.max(1) as f64,
        figures.left_out,
        figures.steps
    ))
}

/// In microseconds.
fn quantile(nanoseconds: &mut [u64], q: f64) -> f64 {
    nanoseconds.sort_unstable();
    nanoseconds[((nanoseconds.len() - 1) as f64 * q) as usize] as f64 / 1e3
}
