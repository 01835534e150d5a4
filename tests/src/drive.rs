//! Drives an engine to the end of its requests. Knows no test.

use std::{collections::HashMap, path::PathBuf, sync::OnceLock, time::Duration};

use timetable_engine::{
    BuilderSource, Engine, EngineConfig, FinishReason, GenerationRequest, ModelRunner, RequestId,
    model::{LoadOptions, Model, Weights},
    sampling::SamplingParams,
};
use timetable_sandbox::{Limits, Sandbox};

/// One sandbox for the process. Its watchdog is long: wall-clock time on a busy machine is not what these tests are about.
pub fn sandbox() -> &'static Sandbox {
    static SANDBOX: OnceLock<Sandbox> = OnceLock::new();
    SANDBOX.get_or_init(|| {
        let limits = Limits {
            watchdog: Duration::from_secs(60),
            ..Limits::default()
        };
        Sandbox::new(limits).expect("wasmtime starts")
    })
}

/// Where models and vectors of the tests are: `TIMETABLE_TESTS_DIR`, or the directory that this was built in, or `tests` of the
/// working directory, for a test program that was carried to another machine.
pub fn tests_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("TIMETABLE_TESTS_DIR") {
        return PathBuf::from(dir);
    }
    let built = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    if built.join("vectors").is_dir() {
        built
    } else {
        PathBuf::from("tests")
    }
}

/// The repository's copy of the small model.
pub fn tiny_llama_dir() -> PathBuf {
    tests_dir().join("models/tiny-llama")
}

/// The small model in f32.
pub fn tiny_llama() -> Box<Model> {
    let options = LoadOptions {
        weights: Weights::F32,
        threads: Some(1),
    };
    Box::new(Model::load(tiny_llama_dir(), options).expect("tiny-llama loads"))
}

/// An engine without a tokenizer.
pub fn engine(
    config: &EngineConfig,
    model: Box<dyn ModelRunner>,
    source: &BuilderSource,
) -> Engine {
    Engine::new(config, model, None, sandbox(), source).expect("the engine starts")
}

/// The embedded component called `name`, as a source.
pub fn component(name: &str) -> BuilderSource {
    let embedded = timetable_reference::component(name).expect("an embedded component");
    BuilderSource::Component {
        component: sandbox().load(embedded.bytes).expect("it loads"),
        origin: format!("embedded:{name}"),
    }
}

/// A greedy request for exactly `max_tokens` tokens.
pub fn greedy(prompt: &[u32], max_tokens: usize) -> GenerationRequest {
    GenerationRequest {
        prompt: prompt.to_vec(),
        params: SamplingParams {
            max_tokens,
            ignore_eos: true,
            ..SamplingParams::default()
        },
        forced: Vec::new(),
    }
}

/// What a request came to.
#[derive(Debug, Default)]
pub struct Answer {
    /// Its output.
    pub tokens: Vec<u32>,
    /// Its text, if the engine has a tokenizer.
    pub text: String,
    /// Why it ended.
    pub finish: Option<FinishReason>,
    /// With `FinishReason::Error`.
    pub error: Option<String>,
}

/// Steps until every request has ended. Answers are in the order of `requests`.
///
/// # Panics
/// If a request is refused at once, or if a step with requests does nothing.
pub fn generate(engine: &mut Engine, requests: Vec<GenerationRequest>) -> Vec<Answer> {
    let mut answers = Vec::new();
    let mut index_of: HashMap<RequestId, usize> = HashMap::new();
    for request in requests {
        let id = engine.add_request(request).expect("the request is taken");
        index_of.insert(id, answers.len());
        answers.push(Answer::default());
    }
    while !engine.is_idle() {
        assert!(
            engine.step().num_reqs > 0,
            "a step with requests does something"
        );
        for update in engine.take_updates() {
            let answer = &mut answers[index_of[&update.id]];
            answer.tokens.extend(update.token);
            answer.text.push_str(&update.text);
            answer.finish = update.finish;
            answer.error = update.error.map(|error| error.to_string());
        }
    }
    answers
}
