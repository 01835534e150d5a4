//! Engines on a CUDA device, and models for them. It must never know a test.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use tempfile::TempDir;
use timetable_device_cuda::{CudaError, Kernels, driver::Device};
use timetable_engine::{
    AttentionPlan, Builders, CacheSize, DeviceChoice, Engine, EngineConfig, Executor,
    GenerationRequest, cuda::CudaExecutor,
};
use timetable_tests::{
    candle_reference,
    drive::{self, greedy, sandbox},
    families::{TinyModel, tiny_config},
};

/// The device to test on; none, with the reason printed, where there is none that this program has kernels for.
pub fn device() -> Option<usize> {
    let ordinal = std::env::var("TIMETABLE_CUDA_DEVICE").map_or(0, |text| {
        text.parse().expect("TIMETABLE_CUDA_DEVICE is an ordinal")
    });
    let opened = Device::open(ordinal).and_then(|device| Kernels::load(&device));
    match opened {
        Ok(_) => Some(ordinal as usize),
        Err(
            error @ (CudaError::NoDriver
            | CudaError::DriverTooOld { .. }
            | CudaError::NoDevice { .. }
            | CudaError::NoKernelImage { .. }),
        ) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The default model; none, with the reason printed, where it was not fetched.
pub fn default_model() -> Option<PathBuf> {
    let path = candle_reference::default_model();
    if path.is_none() {
        println!(
            "skipped: the default model is not there; TIMETABLE_MODEL_DIR names its directory"
        );
    }
    path
}

/// Settings for a device: room for 16 requests of 512 tokens.
pub fn config(ordinal: usize) -> EngineConfig {
    EngineConfig {
        device: DeviceChoice::Cuda { ordinal },
        max_num_seqs: 16,
        max_num_batched_tokens: 128,
        max_model_len: Some(512),
        cache_size: CacheSize::Blocks(16 * 32 + 1),
        cudagraph_capture_sizes: Some(vec![1, 2, 4, 8, 16]),
        ..EngineConfig::default()
    }
}

/// An engine without a tokenizer, its model at `path`.
pub fn engine<'a>(config: &EngineConfig, path: &Path, builders: impl Into<Builders<'a>>) -> Engine {
    let executor = CudaExecutor::new(config, path).unwrap_or_else(|error| panic!("{error}"));
    let facts = executor
        .facts(config)
        .unwrap_or_else(|error| panic!("{error}"));
    let plan = AttentionPlan::for_device(config, executor.model_config(), facts)
        .unwrap_or_else(|error| panic!("{error}"));
    Engine::with_executor(config, plan, Box::new(executor), None, sandbox(), builders)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// A model of random weights, written to a directory that goes with it.
pub struct RandomModel {
    dir: TempDir,
}

impl RandomModel {
    /// Of a family, two layers with heads of 64 elements; `changes` replaces fields of its configuration.
    pub fn new(family: &str, changes: &serde_json::Value, seed: u64) -> Self {
        let mut config = tiny_config(
            family,
            &serde_json::json!({
                "hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1024,
            }),
        );
        for (key, value) in changes.as_object().expect("an object of fields") {
            config[key] = value.clone();
        }
        let dir = tempfile::tempdir().expect("a temporary directory");
        TinyModel::random(config, seed)
            .and_then(|model| model.write_hf(dir.path(), candle_core::DType::F32, 1))
            .expect("the model is written");
        RandomModel { dir }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Prompts of different lengths, longer together than a step.
pub fn prompts(count: u32, vocabulary: u32) -> Vec<Vec<u32>> {
    (0..count)
        .map(|request| {
            (0..3 + request * 13)
                .map(|i| 5 + (i * 31 + request * 97) % (vocabulary - 5))
                .collect()
        })
        .collect()
}

/// Greedy requests for `tokens` tokens each.
pub fn requests(prompts: &[Vec<u32>], tokens: usize) -> Vec<GenerationRequest> {
    prompts
        .iter()
        .map(|prompt| greedy(prompt, tokens))
        .collect()
}

/// The tokens of all requests, none of which failed.
pub fn tokens(engine: &mut Engine, requests: Vec<GenerationRequest>) -> Vec<Vec<u32>> {
    let answers = drive::generate(engine, requests);
    answers
        .into_iter()
        .map(|answer| {
            assert!(answer.error.is_none(), "{:?}", answer.error);
            answer.tokens
        })
        .collect()
}

/// The recorded answers of the default model: transformers in f32 on the same file, greedy.
#[derive(Deserialize)]
pub struct Recorded {
    pub cases: Vec<RecordedCase>,
}

/// One prompt.
#[derive(Deserialize)]
pub struct RecordedCase {
    pub prompt_ids: Vec<u32>,
    pub token_ids: Vec<u32>,
    /// Distance of the two largest logits at each token.
    pub top2_gap: Vec<f32>,
}

/// Reads them.
pub fn recorded() -> Recorded {
    let path = drive::tests_dir().join("vectors/smollm2-135m-q4_1-greedy.json");
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).expect("the recorded answers are JSON")
}
