//! Tenants: each one's tokens, blocks, builder and faults are its own.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, atomic::Ordering::Relaxed},
};

use chaos_builder::Mischief;
use timetable_attention::{BuildFault, MetadataBuilder, plain_builder};
use timetable_engine::{
    AttentionPlan, BuilderSource, Builders, CacheSize, Engine, EngineConfig, EngineError, Executor,
    FinishReason, GenerationRequest, RequestError, SlotConfig, TenantConfig, backend_name,
};
use timetable_sandbox::{
    BuiltBy, CallLimits, Canary, Companions, FaultPolicy, Gates, ObservedStep, OnFault, ReloadPlan,
    Stage, StepObserver, TenantName,
};
use timetable_tests::{
    drive::{self, Answer, generate, greedy},
    two_in_flight::{Behaviour, TwoInFlight},
};
use timetable_types::{
    BuilderInfo, CaptureShape, CommonAttentionMetadata, CudagraphMode, Family, LaunchPromise,
    Metadata,
};

const FAMILIES: [Family; 2] = [Family::FlashAttn, Family::Flashinfer];

fn name(name: &str) -> TenantName {
    name.parse().expect("a tenant's name")
}

fn tenant(of: &str, slot: Option<SlotConfig>) -> TenantConfig {
    TenantConfig {
        slot,
        ..TenantConfig::new(name(of))
    }
}

/// Tenants `a` and `b` with slots of their own, and `c` without.
fn config(family: Family, a: SlotConfig) -> EngineConfig {
    EngineConfig {
        attention_backend: Some(backend_name(family).to_owned()),
        max_num_seqs: 40,
        // All of a test's prompts in one step.
        max_num_batched_tokens: 4096,
        max_model_len: Some(512),
        cache_size: CacheSize::Blocks(1024),
        num_workers: 4,
        tenants: vec![
            tenant("a", Some(a)),
            tenant("b", Some(SlotConfig::default())),
            tenant("c", None),
        ],
        ..EngineConfig::default()
    }
}

fn reference(family: Family) -> BuilderSource {
    drive::component(match family {
        Family::FlashAttn => "flash-attn",
        _ => "flashinfer",
    })
}

fn chaos(family: Family) -> BuilderSource {
    let bytes = timetable_reference::chaos(family).expect("a chaos builder");
    BuilderSource::Component {
        component: drive::sandbox().load(bytes).expect("it loads"),
        origin: "chaos.wasm".to_owned(),
    }
}

fn engine(
    config: &EngineConfig,
    default: &BuilderSource,
    tenants: &[(TenantName, BuilderSource)],
) -> Engine {
    let builders = Builders { default, tenants };
    let model = drive::tiny_llama();
    Engine::new(config, model, None, drive::sandbox(), builders).expect("the engine starts")
}

/// Ten prompts of a tenant, of different lengths.
fn requests(of: Option<&str>) -> Vec<GenerationRequest> {
    let salt = of.map_or(0, |of| u32::from(of.as_bytes()[0]));
    let request = |index: u32| {
        let len = 3 + (index * 11 + salt) % 40;
        let prompt: Vec<u32> = (0..len)
            .map(|token| 5 + (token * 31 + index * 97 + salt * 13) % 500)
            .collect();
        GenerationRequest {
            tenant: of.map(name),
            ..greedy(&prompt, 24)
        }
    };
    (0..10).map(request).collect()
}

const EVERYBODY: [Option<&str>; 4] = [None, Some("a"), Some("b"), Some("c")];

fn tokens(answers: &[Answer]) -> Vec<Vec<u32>> {
    let tokens = |answer: &Answer| {
        assert!(answer.error.is_none(), "{:?}", answer.error);
        answer.tokens.clone()
    };
    answers.iter().map(tokens).collect()
}

/// What each tenant's requests come to when nobody else is there.
fn alone(family: Family, of: Option<&str>) -> Vec<Vec<u32>> {
    let config = EngineConfig {
        tenants: Vec::new(),
        ..config(family, SlotConfig::default())
    };
    let mut engine = engine(&config, &reference(family), &[]);
    tokens(&generate(&mut engine, requests(of)))
}

/// The requests of `who`, dealt one after the other, so that their rows are mixed; the answers by tenant.
fn together(engine: &mut Engine, who: &[Option<&str>]) -> Vec<Vec<Answer>> {
    let each: Vec<_> = who.iter().map(|of| requests(*of)).collect();
    let mixed = (0..10).flat_map(|index| each.iter().map(move |of| of[index].clone()));
    let mut answers: Vec<Vec<Answer>> = who.iter().map(|_| Vec::new()).collect();
    let all = generate(engine, mixed.collect());
    for (index, answer) in all.into_iter().enumerate() {
        answers[index % who.len()].push(answer);
    }
    answers
}

#[test]
fn each_tenants_tokens_are_those_that_it_gets_alone() {
    for family in FAMILIES {
        for max_tenant_segments in [1, 2, 4] {
            let config = EngineConfig {
                max_num_batched_tokens: 512,
                max_tenant_segments,
                ..config(family, SlotConfig::default())
            };
            let builders = [
                (name("a"), reference(family)),
                (name("b"), reference(family)),
            ];
            let mut engine = engine(&config, &reference(family), &builders);
            let answers = together(&mut engine, &EVERYBODY);
            for (of, answers) in EVERYBODY.iter().zip(&answers) {
                assert_eq!(tokens(answers), alone(family, *of), "{family:?} {of:?}");
            }
            assert_eq!(engine.stats().fallback_steps, 0);
            let pool = engine.scheduler().kv().pool();
            assert_eq!(pool.num_free(), engine.num_blocks() - 1);
            let handles = engine.tenant_handles();
            let groups: Vec<_> = handles
                .iter()
                .map(|(_, handle, _)| handle.group())
                .collect();
            let backend = backend_name(family);
            assert_eq!(groups, [format!("{backend}/0@a"), format!("{backend}/0@b")]);
            let steps = handles.iter().map(|(_, handle, _)| handle.status().steps);
            assert!(steps.min() > Some(20), "each slot built for its tenant");
        }
    }
}

/// A GPU's way: two steps in flight, batches padded to graphs. A step of several segments never runs as a full graph.
#[test]
fn steps_of_several_segments_run_in_pieces() {
    for family in FAMILIES {
        let config = EngineConfig {
            cudagraph_mode: CudagraphMode::FullAndPiecewise,
            cudagraph_capture_sizes: Some(vec![8, 16, 32, 64]),
            ..config(family, SlotConfig::default())
        };
        let executor = TwoInFlight::new(
            drive::tiny_llama(),
            Behaviour {
                graphs: true,
                ..Behaviour::default()
            },
        );
        let dispatched = executor.dispatched();
        let source = reference(family);
        let builders = [
            (name("a"), reference(family)),
            (name("b"), reference(family)),
        ];
        let builders = Builders {
            default: &source,
            tenants: &builders,
        };
        let facts = executor.facts(&config).unwrap();
        let sizes = executor.model_config();
        let plan = AttentionPlan::for_device(&config, sizes, facts).unwrap();
        let sandbox = drive::sandbox();
        let executor = Box::new(executor);
        let mut engine =
            Engine::with_executor(&config, plan, executor, None, sandbox, builders).unwrap();
        let answers = together(&mut engine, &EVERYBODY);
        for (of, answers) in EVERYBODY.iter().zip(&answers) {
            assert_eq!(tokens(answers), alone(family, *of), "{family:?} {of:?}");
        }
        assert!(dispatched.piecewise.load(Relaxed) > 10);
        assert_eq!(
            dispatched.full.load(Relaxed),
            0,
            "all ten of each run to the end together"
        );
        // One tenant alone replays full graphs.
        generate(&mut engine, requests(Some("b")));
        assert!(dispatched.full.load(Relaxed) > 10);
        let stats = engine.stats();
        assert_eq!((stats.failed_steps, stats.fallback_steps), (0, 0));
    }
}

type Seen = Arc<Mutex<Vec<CommonAttentionMetadata>>>;

/// The plain builder, and what it was given.
struct Recording {
    plain: Box<dyn MetadataBuilder>,
    seen: Seen,
}

impl MetadataBuilder for Recording {
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
        self.seen.lock().unwrap().push(common.clone());
        self.plain.build(common, fast_build)
    }

    fn build_for_cudagraph_capture(
        &mut self,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        self.plain.build_for_cudagraph_capture(common)
    }

    fn build_for_drafting(
        &mut self,
        common: &CommonAttentionMetadata,
        draft_index: u32,
    ) -> Result<Metadata, BuildFault> {
        self.plain.build_for_drafting(common, draft_index)
    }

    fn update_block_table(
        &mut self,
        metadata: &Metadata,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        self.plain.update_block_table(metadata, common)
    }
}

fn recording() -> (BuilderSource, Seen) {
    let seen = Seen::default();
    let shared = seen.clone();
    let source = BuilderSource::Native(Box::new(move |config| {
        Ok(Box::new(Recording {
            plain: plain_builder(Family::FlashAttn, config).expect("a plain builder"),
            seen: shared.clone(),
        }))
    }));
    (source, seen)
}

/// Whatever others do, a tenant's builder is shown, step by step, what it is shown when the tenant is alone: rows, counts,
/// maxima, indexes.
#[test]
fn a_tenants_builder_sees_its_own_rows_only() {
    let config = config(Family::FlashAttn, SlotConfig::default());
    let run = |who: &[Option<&str>]| {
        let (default, of_default) = recording();
        let (a, of_a) = recording();
        let (b, of_b) = recording();
        let builders = [(name("a"), a), (name("b"), b)];
        let mut engine = engine(&config, &default, &builders);
        together(&mut engine, who);
        [of_default, of_a, of_b].map(|seen| std::mem::take(&mut *seen.lock().unwrap()))
    };
    let all = run(&EVERYBODY);
    let only = [&[None, Some("c")][..], &[Some("a")], &[Some("b")]].map(run);
    for (index, all) in all.iter().enumerate() {
        assert!(all.len() >= 24);
        assert_eq!(*all, only[index][index]);
        assert!(
            all.iter()
                .all(|common| common.num_reqs <= if index == 0 { 20 } else { 10 })
        );
    }
}

/// Everything that the chaos builder does, in one tenant's slot: the others' tokens stay what they are alone, and where its policy
/// is to fall back, so do its own.
#[test]
fn a_chaotic_tenant_changes_no_other_tenants_tokens() {
    for family in FAMILIES {
        let expected: HashMap<_, _> = EVERYBODY.map(|of| (of, alone(family, of))).into();
        for mischief in Mischief::ALL {
            let refused = matches!(mischief, Mischief::RefuseConfig | Mischief::TrapInCreate);
            if refused {
                continue;
            }
            let slot = SlotConfig {
                options: vec![
                    ("chaos".to_owned(), mischief.name().to_owned()),
                    ("chaos-min-rows".to_owned(), "9".to_owned()),
                ],
                ..SlotConfig::default()
            };
            let builders = [(name("a"), chaos(family)), (name("b"), reference(family))];
            let mut engine = engine(&config(family, slot), &reference(family), &builders);
            let answers = together(&mut engine, &EVERYBODY);
            for (of, answers) in EVERYBODY.iter().zip(&answers) {
                assert_eq!(
                    tokens(answers),
                    expected[of],
                    "{mischief:?} {family:?} {of:?}"
                );
            }
            let handles = engine.tenant_handles();
            let of_b = handles[1].1.status();
            assert!(of_b.faults.is_empty() && of_b.plain_steps == 0, "{of_b:?}");
        }
    }
}

#[test]
fn a_tenants_failing_step_fails_its_own_requests_only() {
    for family in FAMILIES {
        for on_fault in [OnFault::FailStep, OnFault::FailClosed] {
            let slot = SlotConfig {
                policy: FaultPolicy {
                    on_fault,
                    ..FaultPolicy::default()
                },
                options: vec![
                    ("chaos".to_owned(), "trap".to_owned()),
                    ("chaos-min-rows".to_owned(), "10".to_owned()),
                ],
                ..SlotConfig::default()
            };
            let builders = [(name("a"), chaos(family)), (name("b"), reference(family))];
            let mut engine = engine(&config(family, slot), &reference(family), &builders);
            let answers = together(&mut engine, &EVERYBODY);
            for (of, answers) in EVERYBODY.iter().zip(&answers) {
                if *of != Some("a") {
                    assert_eq!(tokens(answers), alone(family, *of), "{family:?} {of:?}");
                    continue;
                }
                for answer in answers {
                    assert_eq!(answer.finish, Some(FinishReason::Error));
                    let error = answer.error.as_deref().unwrap();
                    assert!(error.contains("/0@a: "), "{error}");
                }
            }
            assert_eq!(engine.stats().failed_steps, 1);
            assert_eq!(engine.stats().fallback_steps, 0);
            // What the failed step was to write is not found: its prompts are computed anew.
            let hits = engine.stats().prefix_hits;
            generate(&mut engine, requests(Some("a"))[..3].to_vec());
            assert_eq!(engine.stats().prefix_hits, hits);
            let stats = engine.tenant_stats().to_vec();
            assert_eq!(stats[1].name, Some(name("a")));
            let closed = on_fault == OnFault::FailClosed;
            assert_eq!(stats[1].failed_requests, if closed { 13 } else { 10 });
            assert_eq!(stats[2].failed_requests, 0);
            let pool = engine.scheduler().kv().pool();
            assert_eq!(pool.num_free(), engine.num_blocks() - 1);
        }
    }
}

#[test]
fn equal_prompts_of_two_tenants_are_computed_twice() {
    for tenants in [
        config(Family::FlashAttn, SlotConfig::default()).tenants,
        Vec::new(),
    ] {
        let config = EngineConfig {
            tenants,
            ..config(Family::FlashAttn, SlotConfig::default())
        };
        let mut engine = engine(&config, &BuilderSource::Plain, &[]);
        let prompt: Vec<u32> = (0..100).map(|token| 5 + token * 3 % 500).collect();
        let mut hits = |of: Option<&str>| {
            let before = engine.stats().prefix_hits;
            let request = GenerationRequest {
                tenant: of.map(name),
                ..greedy(&prompt, 3)
            };
            generate(&mut engine, vec![request]);
            engine.stats().prefix_hits - before
        };
        for of in EVERYBODY {
            assert_eq!(hits(of), 0, "{of:?}");
        }
        for of in EVERYBODY {
            assert_eq!(hits(of), 96, "{of:?}");
        }
    }
}

/// A tenant's limits bind its own builder, however it got there; the same component serves others under the sandbox's.
#[test]
fn a_tenants_limits_bind_its_builder_alone() {
    let family = Family::Flashinfer;
    let least = CallLimits {
        fuel_per_call: 2_000,
        fuel_per_row: 10,
        fuel_per_token: 1,
        ..CallLimits::default()
    };
    let slot = SlotConfig {
        limits: Some(CallLimits {
            fuel_per_call: 40_000,
            fuel_per_row: 10,
            fuel_per_token: 1,
            ..CallLimits::default()
        }),
        options: vec![
            ("chaos".to_owned(), "just-under-fuel".to_owned()),
            ("chaos-min-rows".to_owned(), "9".to_owned()),
        ],
        ..SlotConfig::default()
    };
    let mut config = config(family, slot);
    let builders = [(name("a"), chaos(family)), (name("b"), chaos(family))];
    config.tenants[1].slot = Some(SlotConfig {
        limits: None,
        ..config.tenants[0].slot.clone().unwrap()
    });
    let mut engine = engine(&config, &reference(family), &builders);
    let answers = together(&mut engine, &EVERYBODY);
    for (of, answers) in EVERYBODY.iter().zip(&answers) {
        assert_eq!(tokens(answers), alone(family, *of), "{of:?}");
    }
    let handles = engine.tenant_handles();
    let faults = |index: usize| handles[index].1.status().faults;
    assert!(faults(0).contains_key("fuel"), "{:?}", faults(0));
    assert!(!faults(1).contains_key("fuel"), "{:?}", faults(1));
    // What cannot even build the steps that it is tried with is refused, and says whose it is.
    config.tenants[0].slot.as_mut().unwrap().limits = Some(least);
    let builders = Builders {
        default: &BuilderSource::Plain,
        tenants: &[(name("a"), reference(family))],
    };
    let refused = |config: &EngineConfig, builders| {
        let model = drive::tiny_llama();
        let made = Engine::new(config, model, None, drive::sandbox(), builders);
        made.err().expect("refused").to_string()
    };
    let error = refused(&config, builders);
    assert!(error.contains("FLASHINFER/0@a"), "{error}");
    config.tenants[0].slot.as_mut().unwrap().limits = Some(CallLimits {
        fuel_per_call: u64::MAX,
        ..least
    });
    let error = refused(&config, builders);
    assert!(
        error.contains("tenant `a`: sandbox limit fuel_per_call"),
        "{error}"
    );
}

#[test]
fn unknown_tenants_and_bad_settings_are_refused() {
    let good = config(Family::FlashAttn, SlotConfig::default());
    let mut engine = engine(&good, &BuilderSource::Plain, &[]);
    let request = GenerationRequest {
        tenant: Some(name("d")),
        ..greedy(&[1, 2], 3)
    };
    let error = engine.add_request(request).expect_err("refused");
    assert!(matches!(error, RequestError::UnknownTenant { .. }));
    assert_eq!(
        error.to_string(),
        "tenant `d` is not configured here; there are a, b, c: use one of them, or add it to the configuration"
    );
    let refused = |change: &dyn Fn(&mut EngineConfig), builders: Builders<'_>| -> EngineError {
        let mut config = good.clone();
        change(&mut config);
        let model = drive::tiny_llama();
        Engine::new(&config, model, None, drive::sandbox(), builders)
            .err()
            .expect("refused")
    };
    let plain = Builders::from(&BuilderSource::Plain);
    type Change = fn(&mut EngineConfig);
    let cases: [(Change, &str); 5] = [
        (
            |config| config.tenants[0].share = 0.0,
            "share is 0 of tenant a",
        ),
        (
            |config| config.tenants[0].share = f64::NAN,
            "share is NaN of tenant a",
        ),
        (
            |config| config.tenants.push(config.tenants[1].clone()),
            "tenants is b",
        ),
        (|config| config.default_share = -1.0, "default_share is -1"),
        (
            |config| config.max_tenant_segments = 0,
            "max_tenant_segments is 0",
        ),
    ];
    for (change, expected) in cases {
        let error = refused(&change, plain).to_string();
        assert!(error.contains(expected), "{error}");
    }
    let stray = [(name("c"), BuilderSource::Plain)];
    let builders = Builders {
        tenants: &stray,
        ..plain
    };
    let error = refused(&|_| {}, builders).to_string();
    assert!(
        error.contains("tenants is c: a builder was given"),
        "{error}"
    );
}

/// Who built how many rows, step by step.
struct Watching(Arc<Mutex<Vec<(BuiltBy, u32)>>>);

impl StepObserver for Watching {
    fn observe(&mut self, step: ObservedStep<'_>) {
        let built = (step.built.built_by, step.context.common.num_reqs);
        self.0.lock().unwrap().push(built);
    }
}

/// A candidate that is tried on a tenant builds that tenant's rows, in a segment of its own, and no others', until it serves all.
#[test]
fn a_candidate_is_tried_on_the_tenants_that_are_named() {
    let family = Family::FlashAttn;
    let config = config(family, SlotConfig::default());
    let mut engine = engine(&config, &reference(family), &[]);
    let seen = Arc::new(Mutex::new(Vec::new()));
    engine.set_step_observer(Some(Box::new(Watching(seen.clone()))));
    let BuilderSource::Component { component, .. } = chaos(family) else {
        unreachable!("it is a component")
    };
    let plan = ReloadPlan {
        canary: Some(Canary {
            tenants: vec![name("c")],
            steps: 60,
            ..Canary::default()
        }),
        gates: Gates {
            max_build_ratio: f64::INFINITY,
            max_extra_build_us: u32::MAX,
            ..Gates::default()
        },
        ..ReloadPlan::default()
    };
    let handle = engine.reload_handles().remove(0);
    let companions = Companions::of(1);
    handle
        .submit(Some(&component), "candidate", None, &plan, &companions)
        .unwrap();
    let stage = || handle.status().candidate.map(|candidate| candidate.stage);
    let mut waves = 0;
    while stage() != Some(Stage::Active) {
        let answers = together(&mut engine, &[None, Some("c")]);
        assert_eq!(tokens(&answers[0]), alone(family, None));
        assert_eq!(tokens(&answers[1]), alone(family, Some("c")));
        waves += 1;
        assert!(waves < 50, "{:?}", handle.status().candidate);
    }
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    let rows = |of: BuiltBy| {
        seen.iter()
            .filter(move |(by, _)| *by == of)
            .map(|(_, rows)| *rows)
    };
    assert!(rows(BuiltBy::Candidate).count() >= 60);
    assert!(
        rows(BuiltBy::Candidate).all(|rows| rows <= 10),
        "the other ten are not its"
    );
    assert!(
        rows(BuiltBy::Component).any(|rows| rows == 10),
        "the same step's other segment"
    );
    assert_eq!(rows(BuiltBy::Plain).count(), 0);
    let stats = engine.stats();
    assert_eq!((stats.failed_steps, stats.fallback_steps), (0, 0));
    // Now it serves everybody, in one segment.
    together(&mut engine, &[None, Some("c")]);
    assert_eq!(handle.status().active.unwrap().origin, "candidate");
}

#[test]
fn what_each_tenant_costs_is_counted() {
    let config = config(Family::FlashAttn, SlotConfig::default());
    let mut engine = engine(&config, &BuilderSource::Plain, &[]);
    together(&mut engine, &[None, Some("b")]);
    let total = engine.stats();
    let stats = engine.tenant_stats().to_vec();
    let names: Vec<_> = stats
        .iter()
        .map(|stats| stats.name.as_ref().map(TenantName::as_str))
        .collect();
    assert_eq!(names, EVERYBODY);
    for index in [0, 2] {
        assert_eq!(stats[index].requests, 10);
        assert_eq!(stats[index].tokens_sampled, 240);
        assert!(stats[index].steps >= 24);
    }
    assert_eq!((stats[1].requests, stats[3].steps), (0, 0));
    let computed: u64 = stats.iter().map(|stats| stats.tokens_computed).sum();
    assert_eq!(computed, total.tokens_computed);
    engine.add_request(requests(Some("b")).remove(0)).unwrap();
    assert_eq!(
        (
            engine.tenant_stats()[2].waiting,
            engine.tenant_stats()[2].running
        ),
        (1, 0)
    );
    engine.step();
    assert_eq!(
        (
            engine.tenant_stats()[2].waiting,
            engine.tenant_stats()[2].running
        ),
        (0, 1)
    );
}
