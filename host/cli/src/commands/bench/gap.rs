//! How long the device waits for the host between two steps: 256 decodes in full graphs, with steps prepared ahead. A model so
//! small that the host is the bound, and the operator's, if one is named.

use std::path::Path;

use timetable_engine::cuda::{CudaExecutor, CudaStartError};
use timetable_engine::sampling::SamplingParams;
use timetable_engine::{
    AttentionPlan, BuilderSource, CacheSize, DeviceChoice, Engine, EngineConfig, Executor,
    GenerationRequest,
};
use timetable_sandbox::{Limits, Sandbox};
use timetable_selftest::bench::Row;
use timetable_selftest::bench::timing::median;
use timetable_types::CudagraphMode;

use super::small_model;
use crate::commands::embedded;
use crate::exit::{Exit, Failure};

/// Decodes of a step.
const DECODES: usize = 256;
/// Tokens of the longest prompt.
const PROMPT: usize = 512;
/// Steps that are not counted, and those that are.
const WARM_UP: usize = 50;
const STEPS: usize = 500;
/// The device waits at most so long, in µs.
const BAR_US: f64 = 60.0;

/// Measures both backends with the small model, and with the one at `model`.
pub fn measure(ordinal: u32, model: Option<&Path>) -> Result<Vec<Row>, Failure> {
    let small = small_model::write()?;
    let mut rows = Vec::new();
    for (name, path) in [("a small model", Some(small.path())), ("--model", model)] {
        let Some(path) = path else { continue };
        for backend in ["FLASH_ATTN", "FLASHINFER"] {
            rows.push(run(ordinal, path, backend, name)?);
        }
    }
    Ok(rows)
}

fn run(ordinal: u32, path: &Path, backend: &str, name: &str) -> Result<Row, Failure> {
    let config = EngineConfig {
        device: DeviceChoice::Cuda {
            ordinal: ordinal as usize,
        },
        attention_backend: Some(backend.to_owned()),
        cudagraph_mode: CudagraphMode::FullAndPiecewise,
        cudagraph_capture_sizes: Some(vec![DECODES as u32]),
        async_scheduling: Some(true),
        max_num_seqs: DECODES,
        max_num_batched_tokens: 8_192,
        max_model_len: Some(2_048),
        cache_size: CacheSize::Blocks(DECODES * (PROMPT + WARM_UP + STEPS + 64) / 16),
        enable_prefix_caching: false,
        ..EngineConfig::default()
    };
    let mut engine = engine(&config, path, backend)?;
    for request in 0..DECODES {
        let length = 16 + request * (PROMPT - 16) / DECODES;
        let prompt = (0..length)
            .map(|i| ((i * 7 + request) % 500) as u32)
            .collect();
        let request = GenerationRequest {
            prompt,
            params: SamplingParams {
                max_tokens: 2 * (WARM_UP + STEPS),
                ignore_eos: true,
                ..SamplingParams::default()
            },
            ..GenerationRequest::default()
        };
        engine
            .add_request(request)
            .map_err(Failure::of(Exit::Failure))?;
    }
    let mut count = 0;
    let (mut gaps, mut kernels, mut host) = (Vec::new(), Vec::new(), Vec::new());
    while gaps.len() < STEPS {
        let output = engine.step();
        let (tokens, requests) = (output.num_tokens, output.num_reqs);
        if requests == 0 || engine.stats().failed_steps > 0 {
            let message = engine.fatal_error().unwrap_or("a step failed");
            return Err(Failure::new(Exit::Device, format!("{backend}: {message}")));
        }
        // Prompts first, then decodes that settle.
        count = if tokens == DECODES && requests == DECODES {
            count + 1
        } else {
            0
        };
        if count > WARM_UP {
            let last = engine.stats().last;
            let us = |ns: u64| ns as f64 / 1e3;
            gaps.push(us(last.idle_ns));
            kernels.push(us(last.kernel_ns));
            host.push(us(last.host_ns()));
        }
    }
    gaps.sort_by(f64::total_cmp);
    let p99 = gaps[gaps.len() * 99 / 100];
    let note = format!(
        "{name}, {backend}: p99 {p99:.1} µs; kernels {:.1} µs, host {:.1} µs a step",
        median(kernels),
        median(host)
    );
    let row = Row::new("gap", DECODES, PROMPT, median(gaps)).note(note);
    Ok(row.at_most(BAR_US))
}

fn engine(config: &EngineConfig, path: &Path, backend: &str) -> Result<Engine, Failure> {
    let sandbox = Sandbox::new(Limits::default()).map_err(Failure::of(Exit::Failure))?;
    let component = sandbox
        .load(embedded(backend)?.bytes)
        .map_err(Failure::of(Exit::Failure))?;
    let executor = CudaExecutor::new(config, path).map_err(|error| {
        let exit = match error {
            CudaStartError::Cuda(_) | CudaStartError::NoCacheMemory(_) => Exit::Device,
            _ => Exit::BadInput,
        };
        Failure::new(exit, error)
    })?;
    let failed = Failure::of(Exit::Device);
    let facts = executor.facts(config).map_err(failed)?;
    let plan = AttentionPlan::for_device(config, executor.model_config(), facts)
        .map_err(Failure::of(Exit::BadInput))?;
    let source = BuilderSource::Component {
        component,
        origin: format!("embedded {backend}"),
    };
    Engine::with_executor(config, plan, Box::new(executor), None, &sandbox, &source)
        .map_err(Failure::of(Exit::Device))
}
