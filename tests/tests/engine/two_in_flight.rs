//! Asynchronous scheduling: with two steps in flight every request gets what it gets with one, whatever ends when.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, atomic::Ordering},
};

use proptest::prelude::*;
use timetable_attention::graphs::Outcome;
use timetable_engine::{
    AttentionPlan, BuilderSource, CacheSize, DeviceChoice, Engine, EngineConfig, EngineHandle,
    FinishReason, GenerationRequest, KvCacheDtype, ModelDtype, RequestError, RequestEvent,
    RequestId, backend_name, executor::DeviceFacts, tokenizer::Tokenizer,
};
use timetable_tests::{
    drive::{self, Answer, generate, greedy},
    two_in_flight::{self, Behaviour, Fault, TwoInFlight},
};
use timetable_types::{CudagraphMode, Dtype, Family};

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

fn two(config: &EngineConfig, behaviour: Behaviour, source: &BuilderSource) -> Engine {
    let engine = two_in_flight::engine(config, drive::tiny_llama(), behaviour, None, source);
    assert_eq!(engine.depth(), 2);
    engine
}

fn requests(trace: &trace::Trace) -> Vec<GenerationRequest> {
    let pairs = trace.prompts.iter().zip(&trace.outputs);
    pairs
        .map(|(prompt, output)| greedy(prompt, output.len()))
        .collect()
}

fn all_blocks_are_free(engine: &Engine) {
    let free = engine.scheduler().kv().pool().num_free();
    assert_eq!(free, engine.num_blocks() - 1, "every block came back");
}

fn check_tokens(trace: &trace::Trace, engine: &mut Engine) {
    let answers = generate(engine, requests(trace));
    for (index, (answer, output)) in answers.iter().zip(&trace.outputs).enumerate() {
        assert_eq!(&answer.tokens, output, "prompt {index}");
        assert_eq!(answer.finish, Some(FinishReason::Length));
    }
    let sampled: usize = trace.outputs.iter().map(Vec::len).sum();
    assert_eq!(engine.stats().tokens_sampled, sampled as u64);
    assert_eq!(engine.stats().failed_steps, 0);
    assert_eq!(engine.stats().fallback_steps, 0);
    all_blocks_are_free(engine);
}

#[test]
fn the_recorded_engines_tokens() {
    for name in trace::NAMES {
        let trace = trace::load(name);
        for family in [Family::FlashAttn, Family::Flashinfer] {
            let component = match family {
                Family::FlashAttn => "flash-attn",
                _ => "flashinfer",
            };
            for (tokens, rows, block_size) in [(64, 8, 32), (512, 12, 16), (37, 5, 8)] {
                for enable_prefix_caching in [true, false] {
                    let config = EngineConfig {
                        attention_backend: Some(backend_name(family).to_owned()),
                        enable_prefix_caching,
                        ..config(tokens, rows, block_size)
                    };
                    let behaviour = Behaviour::default();
                    let mut engine = two(&config, behaviour, &drive::component(component));
                    check_tokens(&trace, &mut engine);
                }
            }
        }
    }
}

/// Padded rows and tokens are inert, and the changes of the block table make the device's (the executor asserts it).
#[test]
fn padded_batches_give_the_same_tokens() {
    let trace = trace::load("llama_mrv2_f32_prefix");
    for (family, pad_only_decodes) in [(Family::FlashAttn, false), (Family::Flashinfer, true)] {
        let config = EngineConfig {
            attention_backend: Some(backend_name(family).to_owned()),
            ..config(64, 8, 16)
        };
        let behaviour = Behaviour {
            pad_to: (4, 16),
            pad_only_decodes,
            ..Behaviour::default()
        };
        let mut engine = two(&config, behaviour, &BuilderSource::Plain);
        check_tokens(&trace, &mut engine);
        check_tokens_again(&trace, &mut engine);
    }
}

/// Every graph mode, as the rule book resolves and dispatches it for a GPU: batches are padded to the captured shapes, the
/// builders keep to what they promised for each, and the tokens are the recorded ones.
#[test]
fn every_graph_mode_gives_the_same_tokens() {
    use CudagraphMode as Mode;
    let trace = trace::load("llama_mrv2_f32_prefix");
    for (family, name) in [
        (Family::FlashAttn, "flash-attn"),
        // Splits every request, within a promise below the configured most.
        (Family::FlashAttn, "flash-attn-fixed-split"),
        (Family::Flashinfer, "flashinfer"),
    ] {
        for configured in [
            Mode::None,
            Mode::Piecewise,
            Mode::Full,
            Mode::FullDecodeOnly,
            Mode::FullAndPiecewise,
        ] {
            let config = EngineConfig {
                attention_backend: Some(backend_name(family).to_owned()),
                cudagraph_mode: configured,
                cudagraph_capture_sizes: Some(vec![32, 1, 4, 8, 16]),
                ..config(64, 8, 16)
            };
            let behaviour = Behaviour {
                graphs: true,
                ..Behaviour::default()
            };
            let executor = TwoInFlight::new(drive::tiny_llama(), behaviour);
            let dispatched = executor.dispatched();
            let mut engine = two_in_flight::start(&config, executor, None, &drive::component(name));
            // FlashInfer's builder keeps to single-token decodes: what else is one graph elsewhere is in pieces.
            let survived = match (configured, family) {
                (Mode::Full, Family::Flashinfer) => Mode::FullAndPiecewise,
                (mode, _) => mode,
            };
            let outcome = &engine.cudagraph_mode().outcome;
            assert!(
                matches!(
                    outcome,
                    Outcome::Survived { mode, .. } if *mode == survived
                ),
                "{configured:?}: {outcome:?}"
            );
            check_tokens(&trace, &mut engine);
            let status = engine.reload_handles().remove(0).status();
            assert!(status.faults.is_empty(), "{:?}", status.fault_records);
            let [none, piecewise, full] =
                [&dispatched.none, &dispatched.piecewise, &dispatched.full]
                    .map(|count| count.load(Ordering::Relaxed) > 0);
            // Batches above 32 tokens have no graph.
            let expected = match survived {
                Mode::None => [true, false, false],
                Mode::Piecewise => [true, true, false],
                Mode::Full | Mode::FullDecodeOnly => [true, false, true],
                Mode::FullAndPiecewise => [true, true, true],
            };
            assert_eq!([none, piecewise, full], expected, "{survived:?}");
        }
    }
}

/// What the rule book and the builders are told of a GPU.
#[test]
fn a_gpu_is_planned_for_as_the_rule_book_says() {
    let model = drive::tiny_llama();
    let mut sizes = model.config().clone();
    sizes.head_dim = 128;
    let plan = |config: &EngineConfig, capability, dtype| {
        let facts = DeviceFacts::cuda(config, capability, 132, dtype, 128);
        AttentionPlan::for_device(config, &sizes, facts)
    };
    let config = EngineConfig {
        kv_cache_dtype: KvCacheDtype::Fp8E4m3,
        max_num_seqs: 4,
        max_num_batched_tokens: 512,
        ..EngineConfig::default()
    };
    let hopper = plan(&config, (9, 0), Dtype::Bfloat16).unwrap();
    assert_eq!(hopper.backends()[0].0, "FLASH_ATTN");
    assert_eq!(hopper.capture_sizes(), [1, 2, 4, 8]);
    let group = &hopper.groups()[0];
    let builder = hopper.builder_config(group, &config, &sizes, 40).unwrap();
    assert_eq!(builder.device.compute_capability, (9, 0));
    assert_eq!(builder.device.num_workers, 132);
    assert_eq!(builder.device.flash_attn_version, 3);
    assert_eq!(builder.attention.model_dtype, Dtype::Bfloat16);
    assert_eq!(builder.attention.kv_cache_dtype, "fp8_e4m3");
    assert_eq!(builder.kv_cache_spec.dtype, Dtype::Float8E4m3);
    assert_eq!(builder.cudagraph.mode, CudagraphMode::FullAndPiecewise);
    assert_eq!(builder.cudagraph.capture_sizes, [1, 2, 4, 8]);
    assert_eq!(builder.cudagraph.max_capture_size, 8);
    // One byte for each element of keys and values of two heads, on two layers.
    assert_eq!(hopper.block_bytes(), 16 * 2 * 2 * 128 * 2);

    let blackwell = plan(&EngineConfig::default(), (10, 0), Dtype::Bfloat16).unwrap();
    assert_eq!(blackwell.backends()[0].0, "FLASHINFER");
    let largest = blackwell.capture_sizes().last().copied();
    assert_eq!(largest, Some(512), "twice the requests");
    // What no kernel of the field does on such a GPU is refused by name.
    let ampere = plan(
        &EngineConfig {
            attention_backend: Some("FLASH_ATTN".to_owned()),
            ..config
        },
        (8, 0),
        Dtype::Bfloat16,
    );
    let error = ampere.unwrap_err().to_string();
    assert!(error.contains("FP8 KV cache requires"), "{error}");
    // In f32 it is the device's own reference, whatever the capability.
    let exact = plan(&EngineConfig::default(), (8, 0), Dtype::Float32).unwrap();
    assert_eq!(exact.backends()[0].0, "FLASH_ATTN");

    // The executor on the host refuses what only a GPU runs.
    for (config, expected) in [
        (
            EngineConfig {
                device: DeviceChoice::Cuda { ordinal: 1 },
                ..EngineConfig::default()
            },
            "device is cuda:1",
        ),
        (
            EngineConfig {
                model_dtype: ModelDtype::Float16,
                ..EngineConfig::default()
            },
            "dtype is float16",
        ),
        (
            EngineConfig {
                kv_cache_dtype: KvCacheDtype::Fp8E4m3,
                ..EngineConfig::default()
            },
            "fp8_e4m3",
        ),
    ] {
        let source = BuilderSource::Plain;
        let refused = Engine::new(
            &config,
            drive::tiny_llama(),
            None,
            drive::sandbox(),
            &source,
        );
        let error = refused.err().expect("refused").to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// With the prefix cache warm.
fn check_tokens_again(trace: &trace::Trace, engine: &mut Engine) {
    for (answer, output) in generate(engine, requests(trace)).iter().zip(&trace.outputs) {
        assert_eq!(&answer.tokens, output);
    }
    all_blocks_are_free(engine);
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
        let mut engine = two(&config, Behaviour::default(), &BuilderSource::Plain);
        check_tokens(&trace, &mut engine);
        assert!(
            engine.stats().preemptions > 0,
            "the cache was meant to be too small"
        );
    }
}

#[test]
fn prefixes_are_found_as_with_one_step_in_flight() {
    let trace = trace::load("llama_mrv2_f32_prefix");
    let config = config(128, 8, 32);
    let mut one = drive::engine(&config, drive::tiny_llama(), &BuilderSource::Plain);
    let mut two = two(&config, Behaviour::default(), &BuilderSource::Plain);
    for engine in [&mut one, &mut two] {
        check_tokens_again(&trace, engine);
        check_tokens_again(&trace, engine);
    }
    let hits = |engine: &Engine| engine.stats().prefix_hits;
    assert!(hits(&one) > 0);
    assert_eq!(hits(&one), hits(&two));
}

#[test]
fn one_step_at_a_time_can_be_asked_for_and_two_cannot_everywhere() {
    let config = EngineConfig {
        async_scheduling: Some(false),
        ..config(64, 8, 16)
    };
    let behaviour = Behaviour::default();
    let source = BuilderSource::Plain;
    let mut engine = two_in_flight::engine(&config, drive::tiny_llama(), behaviour, None, &source);
    assert_eq!(engine.depth(), 1);
    check_tokens(&trace::load("llama_mrv2_f32"), &mut engine);
    let config = EngineConfig {
        async_scheduling: Some(true),
        ..config
    };
    let refused = Engine::new(
        &config,
        drive::tiny_llama(),
        None,
        drive::sandbox(),
        &source,
    );
    let error = refused.err().expect("the CPU has one step in flight");
    assert!(
        error.to_string().contains("async_scheduling is true"),
        "{error}"
    );
}

/// Texts, stop strings, stop tokens and end-of-text tokens end where they end with one step in flight, and nothing that was
/// computed after the end is shown or counted.
#[test]
fn ends_are_learned_late_and_change_nothing() {
    let trace = trace::load("llama_mrv2_f32");
    let eos = drive::tiny_llama().config().eos_token_ids[0];
    let (prompt, output) = (&trace.prompts[0], &trace.outputs[0]);
    let mut by_token = greedy(prompt, 24);
    by_token.params.stop_token_ids = vec![output[3]];
    let mut by_text = greedy(prompt, 24);
    by_text.params.stop = vec![format!("t{}", output[5])];
    let mut by_eos = greedy(&[5, 6, 7], 9);
    by_eos.params.ignore_eos = false;
    by_eos.forced = vec![9, 11, eos, 12, 13];
    let mut all_forced = greedy(&[5, 6, 7], 5);
    all_forced.forced = vec![9, 11, eos, 12, 13];
    let requests = vec![by_token, by_text, by_eos, all_forced, greedy(prompt, 24)];
    let tokenizer = || Some(Arc::new(Tokenizer::load(drive::tiny_llama_dir()).unwrap()));
    let (config, source) = (config(64, 8, 16), BuilderSource::Plain);
    let model = drive::tiny_llama();
    let mut one = Engine::new(&config, model, tokenizer(), drive::sandbox(), &source).unwrap();
    let mut two = two_in_flight::engine(
        &config,
        drive::tiny_llama(),
        Behaviour::default(),
        tokenizer(),
        &source,
    );
    let expected = generate(&mut one, requests.clone());
    let found = generate(&mut two, requests);
    for (index, (expected, found)) in expected.iter().zip(&found).enumerate() {
        assert_eq!(expected.tokens, found.tokens, "request {index}");
        assert_eq!(expected.text, found.text, "request {index}");
        assert_eq!(expected.finish, found.finish, "request {index}");
    }
    assert_eq!(found[0].tokens, output[..4]);
    assert_eq!(found[2].tokens, [9, 11, eos]);
    assert_eq!(one.stats().tokens_sampled, two.stats().tokens_sampled);
    // Three requests ended early: the row of each that was in flight was computed for nothing.
    assert_eq!(two.stats().tokens_computed - one.stats().tokens_computed, 3);
    all_blocks_are_free(&two);
}

#[test]
fn an_observer_sees_the_rows_that_it_sees_with_one_step_in_flight() {
    let trace = trace::load("llama_mrv2_f32");
    let observe = |mut engine: Engine| {
        let rows = Arc::new(Mutex::new(Vec::new()));
        let seen = rows.clone();
        // Two steps may be in flight when it comes and when it goes.
        let id = engine.add_request(greedy(&[3; 20], 60)).unwrap();
        engine.step();
        engine.abort(id);
        engine.set_logits_observer(Some(Box::new(move |id, index, logits| {
            seen.lock().unwrap().push((id, index, logits.to_vec()));
        })));
        generate(&mut engine, requests(&trace));
        engine.set_logits_observer(None);
        check_tokens_again(&trace, &mut engine);
        let mut rows = std::mem::take(&mut *rows.lock().unwrap());
        rows.sort_by_key(|row| (row.0, row.1));
        rows
    };
    let config = config(512, 12, 16);
    let source = BuilderSource::Plain;
    let one = observe(drive::engine(&config, drive::tiny_llama(), &source));
    let two = observe(two(&config, Behaviour::default(), &source));
    assert_eq!(one.len(), trace.outputs.iter().map(Vec::len).sum::<usize>());
    assert!(one == two, "the rows of logits differ");
}

/// One request of a random mix.
#[derive(Clone, Debug)]
struct Ask {
    /// Tokens of the prompt; the first half is the same for all that share.
    len: usize,
    shares: bool,
    seed: u64,
    max_tokens: usize,
    /// In tenths.
    temperature: u8,
    top_p: u8,
    top_k: usize,
    /// Stops at this token of its own output.
    stop: Option<usize>,
    /// Iterations before it is added.
    arrives: usize,
    /// Iterations after that, before somebody aborts it.
    abort: Option<usize>,
}

impl Ask {
    fn request(&self, stop_token: Option<u32>) -> GenerationRequest {
        let shared = if self.shares { self.len / 2 } else { 0 };
        let token = |index: usize| {
            let salt = if index < shared {
                1
            } else {
                self.seed as usize * 97 + 5
            };
            (5 + (index * 31 + salt * 13) % 500) as u32
        };
        let mut request = greedy(
            &(0..self.len).map(token).collect::<Vec<_>>(),
            self.max_tokens,
        );
        request.params.temperature = f32::from(self.temperature) / 10.0;
        request.params.top_p = f32::from(self.top_p) / 10.0;
        request.params.top_k = self.top_k;
        request.params.seed = Some(self.seed);
        request.params.stop_token_ids = stop_token.into_iter().collect();
        request
    }
}

fn ask() -> impl Strategy<Value = Ask> {
    let sizes = (1..60usize, any::<bool>(), 0..1000u64, 1..30usize);
    let sampling = (prop_oneof![Just(0u8), 1..15u8], 1..=10u8, 0..40usize);
    let ends = (
        prop::option::of(0..20usize),
        0..12usize,
        prop::option::weighted(0.25, 0..20usize),
    );
    (sizes, sampling, ends).prop_map(
        |((len, shares, seed, max_tokens), (temperature, top_p, top_k), (stop, arrives, abort))| {
            Ask {
                len,
                shares,
                seed,
                max_tokens,
                temperature,
                top_p,
                top_k,
                stop,
                arrives,
                abort,
            }
        },
    )
}

/// Drives a mix to its end: requests come and are aborted while others run.
fn run_mix(engine: &mut Engine, asks: &[Ask], stops: &[Option<u32>], aborts: bool) -> Vec<Answer> {
    let mut answers: Vec<Answer> = asks.iter().map(|_| Answer::default()).collect();
    let mut ids: HashMap<RequestId, usize> = HashMap::new();
    let mut added: Vec<Option<RequestId>> = vec![None; asks.len()];
    for iteration in 0.. {
        assert!(iteration < 10_000, "the requests never end");
        for (index, ask) in asks.iter().enumerate() {
            if ask.arrives == iteration {
                let id = engine
                    .add_request(ask.request(stops[index]))
                    .expect("it is taken");
                ids.insert(id, index);
                added[index] = Some(id);
            }
            if let (true, Some(id), Some(after)) = (aborts, added[index], ask.abort)
                && iteration == ask.arrives + after
                && engine.abort(id)
            {
                answers[index].finish = Some(FinishReason::Abort);
            }
        }
        if iteration > 12 && engine.is_idle() {
            return answers;
        }
        engine.step();
        for update in engine.take_updates() {
            let answer = &mut answers[ids[&update.id]];
            assert!(answer.finish.is_none(), "an update after the end");
            answer.tokens.extend(update.token);
            answer.finish = update.finish;
            answer.error = update.error.map(|error| error.to_string());
        }
    }
    unreachable!("the loop returns or panics")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Requests of all kinds, with a cache so small that they push each other out.
    #[test]
    fn random_mixes_give_every_request_its_own_tokens(
        asks in prop::collection::vec(ask(), 1..14),
        (rows, budget, blocks) in (1..7usize, 1..70usize, 12..40usize),
        enable_prefix_caching in any::<bool>(),
        pad in any::<bool>(),
    ) {
        let config = EngineConfig {
            cache_size: CacheSize::Blocks(blocks),
            enable_prefix_caching,
            max_model_len: Some(96),
            ..config(budget, rows, 8)
        };
        let roomy = EngineConfig {
            cache_size: CacheSize::Blocks(400),
            ..config.clone()
        };
        let mut one = drive::engine(&roomy, drive::tiny_llama(), &BuilderSource::Plain);
        let none = vec![None; asks.len()];
        let whole = run_mix(&mut one, &asks, &none, false);
        let stops: Vec<Option<u32>> = asks
            .iter()
            .zip(&whole)
            .map(|(ask, answer)| ask.stop.and_then(|at| answer.tokens.get(at).copied()))
            .collect();
        let behaviour = Behaviour {
            pad_to: if pad { (3, 8) } else { (0, 0) },
            ..Behaviour::default()
        };
        let mut engine = two(&config, behaviour, &BuilderSource::Plain);
        let answers = run_mix(&mut engine, &asks, &stops, true);
        for (index, (answer, whole)) in answers.iter().zip(&whole).enumerate() {
            prop_assert_eq!(&answer.error, &None);
            let end = stops[index].and_then(|stop| whole.tokens.iter().position(|&t| t == stop));
            let expected = &whole.tokens[..end.map_or(whole.tokens.len(), |end| end + 1)];
            match answer.finish {
                Some(FinishReason::Stop) => {
                    prop_assert!(end.is_some());
                    prop_assert_eq!(&answer.tokens[..], expected, "request {}", index);
                }
                Some(FinishReason::Length) => {
                    prop_assert_eq!(end, None);
                    prop_assert_eq!(&answer.tokens[..], expected, "request {}", index);
                }
                Some(FinishReason::Abort) => {
                    prop_assert!(expected.starts_with(&answer.tokens), "request {}", index);
                }
                other => prop_assert!(false, "request {} ended as {:?}", index, other),
            }
        }
        prop_assert!(engine.is_idle());
        prop_assert_eq!(engine.stats().failed_steps, 0);
        let free = engine.scheduler().kv().pool().num_free();
        prop_assert_eq!(free, engine.num_blocks() - 1);
    }
}

/// A step fails when it is submitted or when its tokens are awaited: its requests end with an error (with the second, those
/// of the step on top of it too), the others go on, and nothing that was not written is found afterwards.
#[test]
fn a_failed_step_ends_its_requests_and_nothing_else() {
    let trace = trace::load("llama_mrv2_f32_prefix");
    for step in [0, 1, 2, 5] {
        for fault in [
            Fault::Submit { step, fatal: false },
            Fault::Collect { step, fatal: false },
        ] {
            let behaviour = Behaviour {
                fault: Some(fault),
                ..Behaviour::default()
            };
            let mut engine = two(&config(64, 4, 16), behaviour, &BuilderSource::Plain);
            let answers = generate(&mut engine, requests(&trace));
            let mut failed = 0;
            for (answer, output) in answers.iter().zip(&trace.outputs) {
                match &answer.error {
                    Some(error) => {
                        assert!(error.contains("made to fail"), "{error}");
                        assert_eq!(answer.finish, Some(FinishReason::Error));
                        assert!(output.starts_with(&answer.tokens));
                        failed += 1;
                    }
                    None => assert_eq!(&answer.tokens, output, "{fault:?}"),
                }
            }
            assert!((1..=8).contains(&failed), "{failed} failed with {fault:?}");
            assert_eq!(engine.stats().failed_steps, 1);
            assert_eq!(engine.fatal_error(), None);
            all_blocks_are_free(&engine);
            check_tokens_again(&trace, &mut engine);
        }
    }
}

/// Whoever loses its blocks, or is aborted, while the step that should have written them is in flight: if that step then
/// fails, its blocks are not found by their names.
#[test]
fn blocks_that_were_left_behind_unwritten_are_not_found() {
    let prompt: Vec<u32> = (0..130).map(|index| 5 + index * 7 % 500).collect();
    let behaviour = Behaviour {
        fault: Some(Fault::Collect {
            step: 1,
            fatal: false,
        }),
        ..Behaviour::default()
    };
    let config = config(64, 4, 16);
    let mut engine = two(&config, behaviour, &BuilderSource::Plain);
    engine.add_request(greedy(&[9; 10], 8)).unwrap();
    let late = engine.add_request(greedy(&prompt, 8)).unwrap();
    // Submits steps 0 and 1, collects 0. Step 1 holds 63 tokens of the prompt, and names the blocks that they fill.
    engine.step();
    assert!(engine.abort(late));
    while !engine.is_idle() {
        engine.step();
    }
    assert_eq!(engine.stats().failed_steps, 1);
    let hits = engine.stats().prefix_hits;
    let mut sound = drive::engine(&config, drive::tiny_llama(), &BuilderSource::Plain);
    let expected = generate(&mut sound, vec![greedy(&prompt, 8)]);
    let found = generate(&mut engine, vec![greedy(&prompt, 8)]);
    assert_eq!(found[0].error, None);
    assert_eq!(found[0].tokens, expected[0].tokens);
    assert_eq!(engine.stats().prefix_hits, hits);
}

/// A device that goes away: every request ends with an error, running or waiting, and no further one is taken.
#[test]
fn a_device_that_is_gone_ends_every_request() {
    let trace = trace::load("llama_mrv2_f32_prefix");
    for step in [0, 1, 4] {
        for fault in [
            Fault::Submit { step, fatal: true },
            Fault::Collect { step, fatal: true },
            Fault::Boundary { step },
        ] {
            let behaviour = Behaviour {
                fault: Some(fault),
                ..Behaviour::default()
            };
            let mut engine = two(&config(64, 4, 16), behaviour, &BuilderSource::Plain);
            let answers = generate(&mut engine, requests(&trace));
            for answer in &answers {
                match answer.finish {
                    Some(FinishReason::Length) => {}
                    Some(FinishReason::Error) => {
                        let error = answer.error.as_deref().unwrap_or_default();
                        assert!(error.contains("made to fail"), "{error}");
                    }
                    other => panic!("{other:?} with {fault:?}"),
                }
            }
            assert!(
                answers
                    .iter()
                    .any(|a| a.finish == Some(FinishReason::Error))
            );
            assert_eq!(engine.fatal_error(), Some("made to fail"));
            all_blocks_are_free(&engine);
            let refused = engine.add_request(greedy(&[5, 6], 3)).unwrap_err();
            assert!(matches!(refused, RequestError::Device(_)), "{refused}");
            assert_eq!(engine.step().num_reqs, 0);
        }
    }
}

/// The same through the handle: streams end, later ones end at once, and shutting down does not wait for the device.
#[test]
fn streams_end_when_the_device_is_gone() {
    let behaviour = Behaviour {
        fault: Some(Fault::Collect {
            step: 6,
            fatal: true,
        }),
        ..Behaviour::default()
    };
    let engine = two(&config(64, 4, 16), behaviour, &BuilderSource::Plain);
    let handle = EngineHandle::spawn(engine).unwrap();
    assert_eq!(handle.fatal_error(), None);
    let streams: Vec<_> = (0..9)
        .map(|index| handle.submit(greedy(&[5 + index; 30], 400)))
        .collect();
    for stream in streams {
        let last = stream.last();
        assert!(
            matches!(
                &last,
                Some(RequestEvent::Finished {
                    reason: FinishReason::Error,
                    error: Some(RequestError::Device(message)),
                }) if message == "made to fail"
            ),
            "{last:?}"
        );
    }
    assert_eq!(handle.fatal_error().as_deref(), Some("made to fail"));
    let events: Vec<_> = handle.submit(greedy(&[5], 3)).collect();
    assert!(
        matches!(
            &events[..],
            [RequestEvent::Finished {
                error: Some(RequestError::Device(_)),
                ..
            }]
        ),
        "{events:?}"
    );
    handle.shutdown();
}
