//! A small model, whole: the recorded engine's tokens whatever the batching, and what the step loop does at its edges.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use timetable_attention::{BuildFault, MetadataBuilder, plain_builder};
use timetable_engine::{
    BuilderSource, CacheSize, Engine, EngineConfig, FinishReason, GenerationRequest, KvCacheDtype,
    ModelRunner, RequestError, backend_name,
    model::{AttentionLayers, Model, ModelConfig, ModelError},
    sampling::SamplingParams,
    tokenizer::Tokenizer,
};
use timetable_tests::drive::{self, generate, greedy};
use timetable_types::{
    BuilderInfo, CaptureShape, CommonAttentionMetadata, Family, LaunchPromise, Metadata,
};

use timetable_tests::trace;

fn config(tokens: usize, rows: usize, block_size: usize) -> EngineConfig {
    EngineConfig {
        max_num_seqs: rows,
        max_num_batched_tokens: tokens,
        max_model_len: Some(512),
        block_size,
        cache_size: CacheSize::Blocks(4096 / block_size),
        num_workers: 4,
        ..EngineConfig::default()
    }
}

fn requests(trace: &trace::Trace) -> Vec<GenerationRequest> {
    let pairs = trace.prompts.iter().zip(&trace.outputs);
    pairs
        .map(|(prompt, output)| greedy(prompt, output.len()))
        .collect()
}

fn check_tokens(trace: &trace::Trace, config: &EngineConfig, source: &BuilderSource) -> Engine {
    let mut engine = drive::engine(config, drive::tiny_llama(), source);
    let answers = generate(&mut engine, requests(trace));
    for (index, (answer, output)) in answers.iter().zip(&trace.outputs).enumerate() {
        assert_eq!(&answer.tokens, output, "prompt {index} with {config:?}");
        assert_eq!(answer.finish, Some(FinishReason::Length));
    }
    let free = engine.scheduler().kv().pool().num_free();
    assert_eq!(free, engine.num_blocks() - 1, "every block came back");
    engine
}

fn sources(family: Family) -> Vec<BuilderSource> {
    let names: &[&str] = match family {
        Family::FlashAttn => &["flash-attn", "flash-attn-fixed-split"],
        Family::TritonAttn => &["triton-attn"],
        _ => &["flashinfer"],
    };
    let components = names.iter().map(|name| drive::component(name));
    components.chain([BuilderSource::Plain]).collect()
}

#[test]
fn the_recorded_engines_tokens_whatever_the_batching() {
    for name in trace::NAMES {
        let trace = trace::load(name);
        let mut runs = 0;
        for family in [Family::FlashAttn, Family::Flashinfer, Family::TritonAttn] {
            for source in sources(family) {
                for (tokens, rows, block_size) in [(64, 8, 32), (512, 12, 16), (37, 5, 8)] {
                    for enable_prefix_caching in [true, false] {
                        let config = EngineConfig {
                            attention_backend: Some(backend_name(family).to_owned()),
                            enable_prefix_caching,
                            ..config(tokens, rows, block_size)
                        };
                        let engine = check_tokens(&trace, &config, &source);
                        assert_eq!(engine.stats().fallback_steps, 0);
                        assert_eq!(engine.stats().failed_steps, 0);
                        runs += 1;
                    }
                }
            }
        }
        let tokens: usize = trace.outputs.iter().map(Vec::len).sum();
        println!("{name}: {tokens}/{tokens} tokens equal in each of {runs} runs");
    }
}

#[test]
fn one_at_a_time_and_one_token_at_a_time() {
    let trace = trace::load("llama_mrv2_f32");
    check_tokens(&trace, &config(512, 1, 32), &BuilderSource::Plain);
    check_tokens(&trace, &config(3, 2, 4), &BuilderSource::Plain);
}

#[test]
fn kernel_blocks_smaller_than_the_managers_change_nothing() {
    let trace = trace::load("llama_mrv2_f32_prefix");
    let config = EngineConfig {
        kernel_block_size: Some(8),
        ..config(64, 8, 32)
    };
    for family in [Family::FlashAttn, Family::Flashinfer] {
        let config = EngineConfig {
            attention_backend: Some(backend_name(family).to_owned()),
            ..config.clone()
        };
        check_tokens(&trace, &config, &BuilderSource::Plain);
    }
}

#[test]
fn a_cache_that_is_too_small_for_all_gives_the_same_tokens() {
    let trace = trace::load("llama_mrv2_f32");
    for enable_prefix_caching in [true, false] {
        let config = EngineConfig {
            cache_size: CacheSize::Blocks(16),
            enable_prefix_caching,
            ..config(64, 8, 16)
        };
        let engine = check_tokens(&trace, &config, &BuilderSource::Plain);
        let stats = engine.stats();
        assert!(stats.preemptions > 0, "the cache was meant to be too small");
        println!(
            "{} preemptions, prefix caching {enable_prefix_caching}",
            stats.preemptions
        );
    }
}

#[test]
fn equal_prefixes_are_computed_once() {
    let trace = trace::load("llama_mrv2_f32_prefix");
    let computed = |enable_prefix_caching| {
        let config = EngineConfig {
            enable_prefix_caching,
            ..config(128, 8, 32)
        };
        check_tokens(&trace, &config, &BuilderSource::Plain)
            .stats()
            .tokens_computed
    };
    // Eleven prompts share the first 64 tokens of the first.
    assert_eq!(computed(false) - computed(true), 11 * 64);
}

#[test]
fn a_bf16_cache_runs_and_stays_close() {
    let trace = trace::load("llama_mrv2_f32");
    let run = |kv_cache_dtype| {
        let config = EngineConfig {
            kv_cache_dtype,
            ..config(64, 8, 32)
        };
        let mut engine = drive::engine(&config, drive::tiny_llama(), &BuilderSource::Plain);
        let rows = Arc::new(Mutex::new(Vec::new()));
        let seen = rows.clone();
        engine.set_logits_observer(Some(Box::new(move |id, index, logits| {
            seen.lock().unwrap().push((id, index, logits.to_vec()));
        })));
        let forced = requests(&trace)
            .into_iter()
            .zip(&trace.outputs)
            .map(|(request, output)| GenerationRequest {
                forced: output.clone(),
                ..request
            });
        generate(&mut engine, forced.collect());
        let mut rows = std::mem::take(&mut *rows.lock().unwrap());
        rows.sort_by_key(|row| (row.0, row.1));
        rows
    };
    let (exact, rounded) = (run(KvCacheDtype::Auto), run(KvCacheDtype::Bfloat16));
    assert_eq!(exact.len(), rounded.len());
    let mut largest: f32 = 0.0;
    let mut scale: f32 = 0.0;
    for (a, b) in exact.iter().zip(&rounded) {
        assert_eq!((a.0, a.1), (b.0, b.1));
        for (a, b) in a.2.iter().zip(&b.2) {
            largest = largest.max((a - b).abs());
            scale = scale.max(a.abs());
        }
    }
    println!("bf16 cache: logits differ by at most {largest} of {scale}");
    assert!(largest > 0.0, "the cache was not rounded");
    assert!(largest < 0.05 * scale, "{largest} of {scale}");
}

#[test]
fn sampling_depends_on_the_seed_and_not_on_the_batch() {
    let trace = trace::load("llama_mrv2_f32");
    let request = |index: usize| GenerationRequest {
        params: SamplingParams {
            temperature: 0.8,
            top_k: 50,
            top_p: 0.95,
            seed: Some(index as u64),
            ignore_eos: true,
            max_tokens: 12,
            ..SamplingParams::default()
        },
        ..greedy(&trace.prompts[index], 12)
    };
    let mut engine = drive::engine(
        &config(64, 8, 32),
        drive::tiny_llama(),
        &BuilderSource::Plain,
    );
    let together = generate(&mut engine, (0..12).map(request).collect());
    for (index, answer) in together.iter().enumerate() {
        let alone = generate(&mut engine, vec![request(index)]);
        assert_eq!(alone[0].tokens, answer.tokens, "request {index}");
    }
}

fn with_tokenizer() -> Engine {
    let tokenizer = Tokenizer::load(drive::tiny_llama_dir()).unwrap();
    let config = config(64, 8, 32);
    let tokenizer = Some(Arc::new(tokenizer));
    Engine::new(
        &config,
        drive::tiny_llama(),
        tokenizer,
        drive::sandbox(),
        &BuilderSource::Plain,
    )
    .unwrap()
}

#[test]
fn stop_tokens_stop_strings_and_text() {
    let trace = trace::load("llama_mrv2_f32");
    let (prompt, output) = (&trace.prompts[0], &trace.outputs[0]);
    let mut engine = with_tokenizer();
    let whole = generate(&mut engine, vec![greedy(prompt, 6)]).remove(0);
    println!("text {:?}", whole.text);
    assert!(
        whole.text.contains(&format!("t{}", output[0]))
            && whole.text.contains(&format!("t{}", output[5]))
    );

    let mut by_token = greedy(prompt, 24);
    by_token.params.stop_token_ids = vec![output[3]];
    let mut by_text = greedy(prompt, 24);
    by_text.params.stop = vec![format!("t{}", output[3])];
    let answers = generate(&mut engine, vec![by_token, by_text]);
    for answer in &answers {
        assert_eq!(answer.finish, Some(FinishReason::Stop));
        assert_eq!(answer.tokens, output[..4]);
        assert!(
            !answer.text.contains(&format!("t{}", output[3])),
            "{:?}",
            answer.text
        );
        assert!(
            answer.text.contains(&format!("t{}", output[2])),
            "{:?}",
            answer.text
        );
    }

    let mut needs_text = greedy(prompt, 4);
    needs_text.params.stop = vec!["t1".into()];
    let mut silent = drive::engine(
        &config(64, 8, 32),
        drive::tiny_llama(),
        &BuilderSource::Plain,
    );
    let error = silent.add_request(needs_text).unwrap_err();
    assert!(matches!(error, RequestError::NoTokenizer), "{error}");
}

#[test]
fn an_end_of_text_token_ends_a_request_unless_ignored() {
    let mut engine = drive::engine(
        &config(64, 8, 32),
        drive::tiny_llama(),
        &BuilderSource::Plain,
    );
    let eos = drive::tiny_llama().config().eos_token_ids[0];
    let forced = |ignore_eos| {
        let mut request = greedy(&[5, 6, 7], 5);
        request.params.ignore_eos = ignore_eos;
        request.forced = vec![9, eos, 10, 11, 12];
        request
    };
    let answers = generate(&mut engine, vec![forced(false), forced(true)]);
    assert_eq!(
        (&answers[0].tokens[..], answers[0].finish),
        (&[9, eos][..], Some(FinishReason::Stop))
    );
    assert_eq!(
        (answers[1].tokens.len(), answers[1].finish),
        (5, Some(FinishReason::Length))
    );
}

#[test]
fn what_cannot_run_is_refused_and_an_abort_gives_everything_back() {
    let mut engine = drive::engine(
        &config(64, 8, 32),
        drive::tiny_llama(),
        &BuilderSource::Plain,
    );
    let long = engine
        .add_request(greedy(&vec![1; 512], 1))
        .unwrap_err()
        .to_string();
    assert!(long.contains("512") && long.contains("shorten"), "{long}");
    let unknown = engine
        .add_request(greedy(&[1, 512], 1))
        .unwrap_err()
        .to_string();
    assert!(unknown.contains("512 at 1"), "{unknown}");
    let empty = engine.add_request(greedy(&[], 1)).unwrap_err().to_string();
    assert!(empty.contains("no tokens"), "{empty}");

    let id = engine.add_request(greedy(&[1; 100], 50)).unwrap();
    let other = engine.add_request(greedy(&[2; 10], 5)).unwrap();
    engine.step();
    assert!(engine.abort(id) && !engine.abort(id));
    while !engine.is_idle() {
        engine.step();
        assert!(engine.take_updates().all(|update| update.id == other));
    }
    assert_eq!(
        engine.scheduler().kv().pool().num_free(),
        engine.num_blocks() - 1
    );
}

#[test]
fn a_prompt_that_the_context_cannot_continue_stops_at_its_end() {
    let mut engine = drive::engine(
        &config(64, 8, 32),
        drive::tiny_llama(),
        &BuilderSource::Plain,
    );
    let answer = generate(&mut engine, vec![greedy(&[3; 500], 100)]).remove(0);
    assert_eq!(
        (answer.tokens.len(), answer.finish),
        (12, Some(FinishReason::Length))
    );
}

/// Fails in one forward pass.
struct FailsOnce {
    model: Box<Model>,
    calls: usize,
    failing_call: usize,
}

impl ModelRunner for FailsOnce {
    fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    fn forward(
        &mut self,
        tokens: &[u32],
        positions: &[i64],
        attn: &mut dyn AttentionLayers,
        logits_rows: &[usize],
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        self.calls += 1;
        if self.calls == self.failing_call {
            return Err(ModelError::Batch("made to fail".into()));
        }
        self.model
            .forward(tokens, positions, attn, logits_rows, logits)
    }
}

#[test]
fn a_failed_step_ends_its_requests_and_nothing_else() {
    let trace = trace::load("llama_mrv2_f32_prefix");
    let model = FailsOnce {
        model: drive::tiny_llama(),
        calls: 0,
        failing_call: 2,
    };
    let mut engine = drive::engine(&config(128, 4, 32), Box::new(model), &BuilderSource::Plain);
    let answers = generate(&mut engine, requests(&trace));
    let failed = answers
        .iter()
        .filter(|answer| answer.finish == Some(FinishReason::Error))
        .count();
    assert!((1..=4).contains(&failed), "{failed} failed");
    for (answer, output) in answers.iter().zip(&trace.outputs) {
        match &answer.error {
            Some(error) => assert!(error.contains("made to fail"), "{error}"),
            None => assert_eq!(&answer.tokens, output),
        }
    }
    assert_eq!(engine.stats().failed_steps, 1);
    // What the failed step did not write must not be found: the same prompts again, now all right.
    for (answer, output) in generate(&mut engine, requests(&trace))
        .iter()
        .zip(&trace.outputs)
    {
        assert_eq!(&answer.tokens, output);
    }
}

/// Builds what the plain builder builds, wrong in every third step: its maximum is too small, or it says nothing.
struct Unreliable {
    plain: Box<dyn MetadataBuilder>,
    steps: Arc<AtomicUsize>,
}

impl MetadataBuilder for Unreliable {
    fn family(&self) -> Family {
        self.plain.family()
    }

    fn info(&self) -> &BuilderInfo {
        self.plain.info()
    }

    fn launch_promise(&mut self, shape: &CaptureShape) -> Result<LaunchPromise, BuildFault> {
        self.plain.launch_promise(shape)
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
    ) -> Result<Metadata, BuildFault> {
        let mut metadata = self.plain.build(common, fast_build)?;
        if self.steps.fetch_add(1, Ordering::Relaxed) % 3 == 2
            && let Metadata::FlashAttn(record) = &mut metadata
        {
            record.max_seq_len -= 1;
        }
        Ok(metadata)
    }

    fn update_block_table(
        &mut self,
        metadata: &Metadata,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        self.plain.update_block_table(metadata, common)
    }
}

#[test]
fn a_refused_build_costs_no_step() {
    let trace = trace::load("llama_mrv2_f32");
    let steps = Arc::new(AtomicUsize::new(0));
    let counter = steps.clone();
    let source = BuilderSource::Native(Box::new(move |config| {
        let plain = plain_builder(Family::FlashAttn, config).map_err(BuildFault::Declined)?;
        Ok(Box::new(Unreliable {
            plain,
            steps: counter.clone(),
        }))
    }));
    let engine = check_tokens(&trace, &config(64, 8, 32), &source);
    let stats = engine.stats();
    assert_eq!(stats.failed_steps, 0);
    assert_eq!(stats.fallback_steps, (stats.steps) / 3);
    assert_eq!(steps.load(Ordering::Relaxed) as u64, stats.steps);
}

#[test]
fn the_cache_is_sized_by_a_profile_run() {
    let sized = |fraction| {
        let config = EngineConfig {
            cache_size: CacheSize::MemoryFraction(fraction),
            ..config(64, 2, 16)
        };
        Engine::new(
            &config,
            drive::tiny_llama(),
            None,
            drive::sandbox(),
            &BuilderSource::Plain,
        )
    };
    // Two requests of 512 tokens need no more than 64 blocks and the null block, however much memory there is.
    assert_eq!(sized(0.9).unwrap().num_blocks(), 65);
    let error = sized(1e-9).err().unwrap().to_string();
    assert!(error.contains("raise the fraction"), "{error}");
}
