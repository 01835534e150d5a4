//! Drives an engine to the end of its requests. Knows no test.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use timetable_engine::{
    BuilderSource, Engine, EngineConfig, FinishReason, GenerationRequest, ModelRunner, RequestId,
    model::{LoadOptions, Model, Weights},
    sampling::{SamplingParams, TokenLogprobs},
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
        ..GenerationRequest::default()
    }
}

/// What a request came to.
#[derive(Debug, Default)]
pub struct Answer {
    /// Its output.
    pub tokens: Vec<u32>,
    /// Its text, if the engine has a tokenizer.
    pub text: String,
    /// Of each token, if it asked for them.
    pub logprobs: Vec<TokenLogprobs>,
    /// Why it ended.
    pub finish: Option<FinishReason>,
    /// With `FinishReason::Error`.
    pub error: Option<String>,
}

/// Every row of logits of each request, in the requests' order, none of which failed. The engine has no observer afterwards.
///
/// # Panics
/// If a request fails, or a row is missing.
pub fn logits(engine: &mut Engine, requests: Vec<GenerationRequest>) -> Vec<Vec<Vec<f32>>> {
    let rows = Arc::new(Mutex::new(BTreeMap::new()));
    let seen = rows.clone();
    engine.set_logits_observer(Some(Box::new(move |id, index, logits| {
        seen.lock()
            .expect("no panic while it is held")
            .insert((id.0, index), logits.to_vec());
    })));
    let answers = generate(engine, requests);
    engine.set_logits_observer(None);
    let rows = std::mem::take(&mut *rows.lock().expect("no panic while it is held"));
    // In the order of ids, which is that of the requests.
    let mut rows = rows.into_values();
    answers
        .iter()
        .map(|answer| {
            assert!(answer.error.is_none(), "{:?}", answer.error);
            let of_request: Vec<_> = rows.by_ref().take(answer.tokens.len()).collect();
            assert_eq!(of_request.len(), answer.tokens.len(), "rows of logits");
            of_request
        })
        .collect()
}

/// Rows of logits that are not the same bits, of so many.
pub fn other_bits(found: &[Vec<Vec<f32>>], expected: &[Vec<Vec<f32>>]) -> (usize, usize) {
    assert_eq!(found.len(), expected.len(), "requests");
    let pairs: Vec<_> = found
        .iter()
        .zip(expected)
        .flat_map(|(found, expected)| {
            assert_eq!(found.len(), expected.len(), "rows of a request");
            found.iter().zip(expected)
        })
        .collect();
    let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    let others = pairs.iter().filter(|(a, b)| bits(a) != bits(b));
    (others.count(), pairs.len())
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
            answer.logprobs.extend(update.logprobs.map(|found| *found));
            answer.finish = update.finish;
            answer.error = update.error.map(|error| error.to_string());
        }
    }
    answers
}
