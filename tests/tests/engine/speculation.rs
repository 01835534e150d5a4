//! Speculation by prompt lookup: the same tokens as without it, in fewer steps; and the recorded run with drafts, step by step.

use std::sync::{Arc, Mutex, atomic::Ordering::Relaxed};

use timetable_attention::{BuildFault, MetadataBuilder, plain_builder};
use timetable_engine::{
    BuilderSource, CacheSize, Engine, EngineConfig, FinishReason, GenerationRequest, SlotConfig,
    SpeculativeConfig, SpeculativeMethod, TenantConfig, backend_name, sampling::SamplingParams,
    tokenizer::Tokenizer,
};
use timetable_tests::{
    drive::{self, generate, greedy},
    trace,
    two_in_flight::{self, Behaviour, TwoInFlight},
};
use timetable_types::{
    BuilderInfo, CaptureShape, CommonAttentionMetadata, CudagraphMode, Family, LaunchPromise,
    Metadata,
};

const FAMILIES: [Family; 2] = [Family::FlashAttn, Family::Flashinfer];
const METHODS: [SpeculativeMethod; 2] = [SpeculativeMethod::Ngram, SpeculativeMethod::NgramGpu];

fn lookup(method: SpeculativeMethod, num_speculative_tokens: usize) -> SpeculativeConfig {
    SpeculativeConfig {
        method,
        num_speculative_tokens,
        prompt_lookup_min: 1,
        prompt_lookup_max: 3,
    }
}

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

fn with(base: &EngineConfig, speculative: Option<SpeculativeConfig>) -> EngineConfig {
    EngineConfig {
        speculative,
        ..base.clone()
    }
}

fn of_family(family: Family, base: &EngineConfig) -> EngineConfig {
    EngineConfig {
        attention_backend: Some(backend_name(family).to_owned()),
        ..base.clone()
    }
}

fn reference(family: Family) -> BuilderSource {
    drive::component(match family {
        Family::FlashAttn => "flash-attn",
        _ => "flashinfer",
    })
}

/// Prompts of the recorded runs, and one that repeats itself, with answers long enough to repeat themselves too.
fn requests() -> Vec<GenerationRequest> {
    let plain = trace::load("llama_mrv2_f32").prompts;
    let shared = trace::load("llama_mrv2_f32_prefix").prompts;
    let repeats: Vec<u32> = (0..90).map(|index| 20 + index % 7).collect();
    let prompts = plain.into_iter().chain(shared).chain([repeats]);
    let lengths = [60, 9, 31, 1].into_iter().cycle();
    prompts
        .zip(lengths)
        .map(|(prompt, length)| greedy(&prompt, length))
        .collect()
}

/// Answers that repeat a pattern, with a break here and there, whatever the model would say: most drafts are accepted.
fn repetitive() -> Vec<GenerationRequest> {
    let request = |request: usize| {
        let token = move |index: usize| match (index + request) % 41 {
            0 => 400 + request as u32,
            _ => 30 + (index % (3 + request)) as u32,
        };
        let prompt: Vec<u32> = (0..10 + 9 * request).map(token).collect();
        let forced = (prompt.len()..).map(token).take(70 + request).collect();
        GenerationRequest {
            forced,
            ..greedy(&prompt, 70 + request)
        }
    };
    (0..9).map(request).collect()
}

fn tokens(engine: &mut Engine, requests: Vec<GenerationRequest>) -> Vec<Vec<u32>> {
    let answers = generate(engine, requests);
    let free = engine.scheduler().kv().pool().num_free();
    assert_eq!(free, engine.num_blocks() - 1, "every block came back");
    let tokens = answers.into_iter().map(|answer| {
        assert!(answer.error.is_none(), "{:?}", answer.error);
        answer.tokens
    });
    tokens.collect()
}

fn plain(config: &EngineConfig) -> Engine {
    drive::engine(config, drive::tiny_llama(), &BuilderSource::Plain)
}

#[test]
fn speculation_changes_no_greedy_token() {
    let mut expected = None;
    for family in FAMILIES {
        for (budget, rows, block_size) in [(64, 8, 32), (512, 30, 16), (37, 5, 8), (9, 3, 4)] {
            let base = of_family(family, &config(budget, rows, block_size));
            let expected = expected.get_or_insert_with(|| tokens(&mut plain(&base), requests()));
            for method in METHODS {
                for (drafts, source) in [
                    (1, BuilderSource::Plain),
                    (3, reference(family)),
                    (7, reference(family)),
                ] {
                    let config = with(&base, Some(lookup(method, drafts)));
                    let mut engine = drive::engine(&config, drive::tiny_llama(), &source);
                    let got = tokens(&mut engine, requests());
                    let stats = engine.stats();
                    let what = format!("{family:?} {method:?} {drafts} drafts, {budget} tokens");
                    assert_eq!(&got, expected, "{what}");
                    assert_eq!((stats.failed_steps, stats.fallback_steps), (0, 0), "{what}");
                    let of = stats.speculation;
                    println!(
                        "{what}: {} of {} drafts accepted",
                        of.num_accepted_tokens, of.num_draft_tokens
                    );
                    assert!(of.num_accepted_tokens > 0, "{what}");
                }
            }
        }
    }
}

/// Where rejected drafts stood the cache holds what was accepted later: each row of logits is what it is without speculation.
#[test]
fn logits_are_those_without_speculation_in_fewer_steps() {
    for family in FAMILIES {
        let base = of_family(family, &config(128, 6, 8));
        let mut without = drive::engine(&base, drive::tiny_llama(), &reference(family));
        let expected = drive::logits(&mut without, repetitive());
        for method in METHODS {
            let config = with(&base, Some(lookup(method, 4)));
            let mut engine = drive::engine(&config, drive::tiny_llama(), &reference(family));
            let found = drive::logits(&mut engine, repetitive());
            let pairs = found.iter().flatten().flatten();
            let differences = pairs.zip(expected.iter().flatten().flatten());
            let worst = differences.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-4, "{family:?} {method:?}: {worst}");
            let (steps, before) = (engine.stats().steps, without.stats().steps);
            let of = engine.stats().speculation;
            println!(
                "{family:?} {method:?}: {before} steps without, {steps} with; {} of {} drafts accepted; logits within {worst}",
                of.num_accepted_tokens, of.num_draft_tokens
            );
            assert!(steps * 2 < before, "{steps} steps, {before} without");
            assert!(of.num_accepted_tokens * 10 > of.num_draft_tokens * 6);
            let by_place = of.num_accepted_tokens_per_pos;
            assert!(by_place.is_sorted_by(|a, b| a >= b), "{by_place:?}");
            assert_eq!(by_place.iter().sum::<u64>(), of.num_accepted_tokens);
            assert_eq!(by_place[4..], [0; 12]);
            let stats = engine.stats();
            let sampled: usize = expected.iter().map(Vec::len).sum();
            assert_eq!(stats.tokens_sampled, sampled as u64);
        }
    }
}

#[test]
fn a_seed_gives_the_same_tokens_with_speculation() {
    let sampled = || {
        let requests = requests().into_iter().enumerate();
        requests
            .map(|(index, request)| GenerationRequest {
                params: SamplingParams {
                    // Not far from greedy, so that some drafts are accepted.
                    temperature: 0.05 + 0.3 * (index % 3) as f32,
                    top_k: 40,
                    top_p: 0.95,
                    seed: Some(index as u64),
                    ..request.params
                },
                ..request
            })
            .collect::<Vec<_>>()
    };
    let base = config(64, 8, 16);
    let expected = tokens(&mut plain(&base), sampled());
    for method in METHODS {
        let mut engine = plain(&with(&base, Some(lookup(method, 3))));
        assert_eq!(tokens(&mut engine, sampled()), expected, "{method:?}");
        let of = engine.stats().speculation;
        assert!(of.num_accepted_tokens > 0 && of.num_accepted_tokens < of.num_draft_tokens);
    }
}

/// The host chooses these tokens, from logits that the tokens before them change: accepted drafts count among those.
#[test]
fn penalties_and_log_probabilities_are_those_without_speculation() {
    let adjusted = || {
        let requests = requests().into_iter().enumerate();
        requests.map(|(index, request)| GenerationRequest {
            params: SamplingParams {
                temperature: 0.4 * (index % 2) as f32,
                min_p: 0.05,
                repetition_penalty: 0.9 + 0.05 * (index % 3) as f32,
                presence_penalty: 0.01 * (index % 2) as f32,
                logit_bias: vec![(7, -1.0)],
                logprobs: Some(2),
                seed: Some(index as u64),
                ..request.params
            },
            ..request
        })
    };
    let run = |engine: &mut Engine| {
        let ids: Vec<_> = adjusted()
            .map(|request| engine.add_request(request).unwrap())
            .collect();
        let mut answers = vec![Vec::new(); ids.len()];
        while !engine.is_idle() {
            engine.step();
            for update in engine.take_updates() {
                assert!(update.error.is_none(), "{:?}", update.error);
                let request = ids.iter().position(|id| *id == update.id).unwrap();
                let logprobs = update.logprobs.expect("they were asked for");
                answers[request].push((update.token.unwrap(), logprobs));
            }
        }
        answers
    };
    let base = config(64, 8, 16);
    let expected = run(&mut plain(&base));
    for method in METHODS {
        let mut engine = plain(&with(&base, Some(lookup(method, 3))));
        let found = run(&mut engine);
        for (found, expected) in found.iter().zip(&expected) {
            let tokens = |of: &[(u32, _)]| of.iter().map(|pair| pair.0).collect::<Vec<_>>();
            assert_eq!(tokens(found), tokens(expected), "{method:?}");
            for ((_, found), (_, expected)) in found.iter().zip(expected) {
                assert!((found.logprob - expected.logprob).abs() < 1e-3);
            }
        }
        assert!(
            engine.stats().speculation.num_accepted_tokens > 0,
            "{method:?}"
        );
    }
}

/// Records what the plain builder is given.
struct Listening {
    plain: Box<dyn MetadataBuilder>,
    heard: Arc<Mutex<Vec<CommonAttentionMetadata>>>,
}

impl MetadataBuilder for Listening {
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
        self.heard.lock().unwrap().push(common.clone());
        self.plain.build(common, fast_build)
    }

    fn update_block_table(
        &mut self,
        metadata: &Metadata,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        self.plain.update_block_table(metadata, common)
    }
}

fn listening(
    family: Family,
    drafts: u32,
) -> (BuilderSource, Arc<Mutex<Vec<CommonAttentionMetadata>>>) {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let ears = heard.clone();
    let source = BuilderSource::Native(Box::new(move |config| {
        assert_eq!(config.scheduler.num_speculative_tokens, drafts);
        let plain = plain_builder(family, config).map_err(BuildFault::Declined)?;
        let heard = ears.clone();
        Ok(Box::new(Listening { plain, heard }))
    }));
    (source, heard)
}

/// The whole engine, its own drafts included, against the run of the recorded one: what builders get in each step, and the tokens.
#[test]
fn the_recorded_run_with_drafts_is_reproduced() {
    let trace = trace::load("llama_mrv2_f32_spec3");
    for family in FAMILIES {
        let base = EngineConfig {
            max_num_seqs: trace.config.max_num_seqs,
            max_num_batched_tokens: trace.config.max_num_batched_tokens,
            max_model_len: Some(trace.config.max_model_len),
            block_size: trace.config.block_size,
            cache_size: CacheSize::Blocks(trace.config.num_gpu_blocks),
            enable_prefix_caching: trace.args.prefix,
            ..of_family(family, &EngineConfig::default())
        };
        let config = with(
            &base,
            Some(lookup(SpeculativeMethod::NgramGpu, trace.args.spec)),
        );
        let (source, heard) = listening(family, trace.args.spec as u32);
        let mut engine = drive::engine(&config, drive::tiny_llama(), &source);
        let pairs = trace.prompts.iter().zip(&trace.outputs);
        let requests = pairs.map(|(prompt, output)| greedy(prompt, output.len()));
        assert_eq!(tokens(&mut engine, requests.collect()), trace.outputs);
        let heard = heard.lock().unwrap();
        assert_eq!(heard.len(), trace.steps.len(), "steps");
        for (number, (common, step)) in heard.iter().zip(&trace.steps).enumerate() {
            let at = format!("{family:?} step {number}");
            assert_eq!(common.query_start_loc_cpu, step.query_start_loc, "{at}");
            let bounds = &step.seq_lens_cpu_upper_bound;
            assert_eq!(&common.seq_lens_cpu_upper_bound, bounds, "{at}");
            assert_eq!(common.max_query_len, step.max_query_len, "{at}");
            assert_eq!(common.max_seq_len, step.max_seq_len, "{at}");
            assert_eq!(common.num_actual_tokens, step.num_actual_tokens, "{at}");
            assert_eq!(Some(&common.req_idx), step.req_idx.as_ref(), "{at}");
            let flags = step.is_prefilling.iter().map(|&flag| u8::from(flag));
            assert_eq!(common.is_prefilling, flags.collect::<Vec<_>>(), "{at}");
        }
        let of = engine.stats().speculation;
        println!(
            "{family:?}: {} steps, {} tokens, {} of {} drafts accepted",
            trace.steps.len(),
            trace.outputs.iter().map(Vec::len).sum::<usize>(),
            of.num_accepted_tokens,
            of.num_draft_tokens
        );
    }
}

#[test]
fn ends_in_the_middle_of_accepted_drafts_are_ends() {
    let tokenizer = Arc::new(Tokenizer::load(drive::tiny_llama_dir()).unwrap());
    let engine = |speculative| {
        let config = with(&config(64, 8, 8), speculative);
        let tokenizer = Some(tokenizer.clone());
        let sandbox = drive::sandbox();
        Engine::new(
            &config,
            drive::tiny_llama(),
            tokenizer,
            sandbox,
            &BuilderSource::Plain,
        )
        .unwrap()
    };
    // By a token, a string, max_tokens and the context, at every place of a row's tokens.
    let ends = || {
        let mut all = Vec::new();
        for place in 20..29_usize {
            let of = |request: GenerationRequest| GenerationRequest {
                forced: (0..60).map(|index| 40 + index % 9).collect(),
                ..request
            };
            let prompt: Vec<u32> = (0..36).map(|index| 40 + index % 9).collect();
            let mut by_token = of(greedy(&prompt, 60));
            by_token.forced[place] = 333;
            by_token.params.stop_token_ids = vec![333];
            let mut by_text = of(greedy(&prompt, 60));
            by_text.params.stop = vec![format!("t{}", by_text.forced[place])];
            let long: Vec<u32> = (0..512 - place as u32)
                .map(|index| 40 + index % 9)
                .collect();
            all.extend([
                by_token,
                by_text,
                of(greedy(&prompt, place)),
                of(greedy(&long, 60)),
            ]);
        }
        all
    };
    let expected = generate(&mut engine(None), ends());
    for method in METHODS {
        let mut engine = engine(Some(lookup(method, 5)));
        let found = generate(&mut engine, ends());
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let what = format!("{method:?}, request {index}");
            assert_eq!(found.error, None, "{what}");
            assert_eq!(found.tokens, expected.tokens, "{what}");
            assert_eq!(found.text, expected.text, "{what}");
            assert_eq!(found.finish, expected.finish, "{what}");
        }
        let pool = engine.scheduler().kv().pool();
        assert_eq!(pool.num_free(), engine.num_blocks() - 1);
        assert!(engine.stats().speculation.num_accepted_tokens > 300);
    }
    let reasons = |of| {
        expected
            .iter()
            .filter(|answer| answer.finish == Some(of))
            .count()
    };
    assert_eq!(reasons(FinishReason::Stop), 18);
    assert_eq!(reasons(FinishReason::Length), 18);
}

#[test]
fn a_cache_that_is_too_small_for_all_gives_the_same_tokens() {
    for enable_prefix_caching in [true, false] {
        let base = EngineConfig {
            cache_size: CacheSize::Blocks(20),
            enable_prefix_caching,
            max_model_len: Some(300),
            ..config(64, 8, 16)
        };
        let all = || {
            requests()
                .into_iter()
                .chain(repetitive())
                .collect::<Vec<_>>()
        };
        let expected = tokens(&mut plain(&base), all());
        for method in METHODS {
            let mut engine = plain(&with(&base, Some(lookup(method, 6))));
            assert_eq!(tokens(&mut engine, all()), expected, "{method:?}");
            assert!(engine.stats().preemptions > 0, "meant to be too small");
        }
    }
}

/// Names in the prefix cache are of accepted tokens alone: who continues another's answer finds what it would compute.
#[test]
fn what_was_accepted_is_found_again_and_what_was_refused_is_not() {
    let base = config(128, 6, 4);
    for method in METHODS {
        let mut engine = plain(&with(&base, Some(lookup(method, 7))));
        let first = requests();
        let answers = tokens(&mut engine, first.clone());
        let hits = engine.stats().prefix_hits;
        let again: Vec<_> = first
            .iter()
            .zip(&answers)
            .map(|(request, answer)| greedy(&[&request.prompt[..], answer].concat(), 20))
            .collect();
        let expected = tokens(&mut plain(&base), again.clone());
        assert_eq!(tokens(&mut engine, again), expected, "{method:?}");
        let found = engine.stats().prefix_hits - hits;
        let answered: usize = answers.iter().map(Vec::len).sum();
        assert!(
            found > answered as u64,
            "{found} found, of {answered} answered alone"
        );
    }
}

#[test]
fn tenants_rows_have_drafts_too() {
    let slot = |of: &str, slot| TenantConfig {
        slot,
        ..TenantConfig::new(of.parse().unwrap())
    };
    for family in FAMILIES {
        let base = EngineConfig {
            tenants: vec![slot("a", Some(SlotConfig::default())), slot("b", None)],
            max_tenant_segments: 2,
            ..of_family(family, &config(48, 9, 8))
        };
        let mixed = || {
            let owners = [None, Some("a"), Some("b")].into_iter().cycle();
            let requests = repetitive().into_iter().chain(requests()).zip(owners);
            requests
                .map(|(request, owner)| GenerationRequest {
                    tenant: owner.map(|name| name.parse().unwrap()),
                    ..request
                })
                .collect::<Vec<_>>()
        };
        let mut without = plain(&base);
        let expected = tokens(&mut without, mixed());
        for method in METHODS {
            let mut engine = plain(&with(&base, Some(lookup(method, 3))));
            assert_eq!(
                tokens(&mut engine, mixed()),
                expected,
                "{family:?} {method:?}"
            );
            assert!(engine.stats().steps < without.stats().steps);
        }
    }
}

#[test]
fn an_abort_between_drafts_gives_everything_back() {
    let mut engine = plain(&with(
        &config(64, 4, 8),
        Some(lookup(SpeculativeMethod::NgramGpu, 3)),
    ));
    let ids: Vec<_> = repetitive()
        .into_iter()
        .map(|request| engine.add_request(request).unwrap())
        .collect();
    for id in ids {
        for _ in 0..3 {
            engine.step();
        }
        engine.abort(id);
    }
    assert!(engine.is_idle());
    let pool = engine.scheduler().kv().pool();
    assert_eq!(pool.num_free(), engine.num_blocks() - 1);
}

/// As a GPU runs them: decodes that all have their drafts replay the graphs of their length, where the backend's do.
#[test]
fn uniform_decodes_replay_full_graphs() {
    for (family, replays) in [(Family::FlashAttn, true), (Family::Flashinfer, false)] {
        for method in METHODS {
            let base = EngineConfig {
                cudagraph_mode: CudagraphMode::FullAndPiecewise,
                ..of_family(family, &config(128, 8, 16))
            };
            let expected = tokens(&mut plain(&base), requests());
            let config = with(&base, Some(lookup(method, 3)));
            let behaviour = Behaviour {
                graphs: true,
                ..Behaviour::default()
            };
            let executor = TwoInFlight::new(drive::tiny_llama(), behaviour);
            let dispatched = executor.dispatched();
            let mut engine = two_in_flight::start(&config, executor, None, &reference(family));
            assert_eq!(engine.depth(), 1, "drafts need tokens");
            assert_eq!(tokens(&mut engine, requests()), expected);
            let full = dispatched.full.load(Relaxed);
            let others = dispatched.piecewise.load(Relaxed) + dispatched.none.load(Relaxed);
            println!("{family:?} {method:?}: {full} steps in full graphs, {others} others");
            assert_eq!(
                full > 0,
                replays,
                "{family:?} {method:?}: {full}, {others} others"
            );
        }
    }
}

#[test]
fn settings_that_do_not_go_together_are_refused() {
    let refused = |config: EngineConfig| {
        let sandbox = drive::sandbox();
        let made = Engine::new(
            &config,
            drive::tiny_llama(),
            None,
            sandbox,
            &BuilderSource::Plain,
        );
        made.err().expect("refused").to_string()
    };
    let base = with(
        &config(64, 8, 16),
        Some(lookup(SpeculativeMethod::Ngram, 3)),
    );
    let ahead = refused(EngineConfig {
        async_scheduling: Some(true),
        ..base.clone()
    });
    assert!(
        ahead.contains("leave it out, or speculative_method"),
        "{ahead}"
    );
    let none = refused(with(&base, Some(lookup(SpeculativeMethod::Ngram, 0))));
    assert!(none.contains("num_speculative_tokens is 0"), "{none}");
}
