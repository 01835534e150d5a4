//! Models whose layers need several backends, families and caches at once: attention, chunked attention, windows, latents and
//! recurrences in one engine, against textbook computation.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use chaos_builder::Mischief;
use timetable_attention::{PAD_SLOT_ID, group::BatchView};
use timetable_engine::{
    AttentionPlan, BuilderSource, Builders, CacheSize, Engine, EngineConfig, EngineError, Executor,
    FamilyBuilder, GenerationRequest, KvCacheDtype, ModelRunner, SimulatedExecutor, SlotConfig,
    SpeculativeConfig, SpeculativeMethod, TenantConfig, backend_name,
    executor::DeviceFacts,
    model::{Mixer, ModelConfig},
    simulated::{StepCost, simulated_model},
};
use timetable_sandbox::{
    BuildBudget, Companions, FaultPolicy, ObservedStep, ReloadPlan, StepObserver, TenantName,
};
use timetable_tests::{
    drive::{self, generate, greedy},
    toy::{self, FULL, GDN, LATENT, MAMBA2, Toy, chunked},
};
use timetable_types::{CudagraphMode, Dtype, Family};

const CHUNK: usize = 8;
/// Every kind of layer, some twice.
const MIXERS: [Mixer; 7] = [
    FULL,
    MAMBA2,
    chunked(CHUNK),
    GDN,
    toy::window(6),
    LATENT,
    MAMBA2,
];
const ATTENTION: [Family; 3] = [Family::FlashAttn, Family::Flashinfer, Family::TritonAttn];
const NEW_TOKENS: usize = 20;

fn config(family: Family) -> EngineConfig {
    EngineConfig {
        attention_backend: Some(backend_name(family).to_owned()),
        max_num_seqs: 4,
        // Prompts are cut, in the middle of a chunk too.
        max_num_batched_tokens: 27,
        max_model_len: Some(128),
        block_size: 4,
        cache_size: CacheSize::Blocks(160),
        num_workers: 4,
        ..EngineConfig::default()
    }
}

/// The embedded component of each family, with its options.
fn components(attention: Family, latent: &str) -> Vec<FamilyBuilder> {
    let of_family = |(family, name): (Family, &str)| FamilyBuilder {
        family,
        source: drive::component(name),
        options: None,
        grant: None,
    };
    let attention = match attention {
        Family::Flashinfer => (attention, "flashinfer"),
        Family::TritonAttn => (attention, "triton-attn"),
        _ => (attention, "flash-attn"),
    };
    [
        attention,
        (Family::FlashMla, latent),
        (Family::Mamba, "mamba"),
    ]
    .map(of_family)
    .into()
}

fn prompts() -> Vec<Vec<u32>> {
    [1, 5, 8, 23, 40, 61, 2]
        .iter()
        .enumerate()
        .map(|(index, &len)| {
            (0..len)
                .map(|at| (at * 31 + index as u32 * 17) % 97)
                .collect()
        })
        .collect()
}

fn requests() -> Vec<GenerationRequest> {
    let requests = prompts();
    requests.iter().map(|p| greedy(p, NEW_TOKENS)).collect()
}

fn expected(mixers: &[Mixer]) -> Vec<Vec<u32>> {
    let mut toy = Toy::new(mixers);
    let prompts = prompts();
    prompts.iter().map(|p| toy.greedy(p, NEW_TOKENS)).collect()
}

fn engine(config: &EngineConfig, mixers: &[Mixer], source: &BuilderSource) -> Engine {
    drive::engine(config, Box::new(Toy::new(mixers)), source)
}

fn check(engine: &mut Engine, expected: &[Vec<u32>], what: &str) {
    for (index, answer) in generate(engine, requests()).iter().enumerate() {
        assert!(answer.error.is_none(), "{what}: {:?}", answer.error);
        assert_eq!(answer.tokens, expected[index], "{what}: prompt {index}");
    }
}

#[test]
fn every_kind_of_layer_at_once_generates_the_textbooks_tokens() {
    let expected = expected(&MIXERS);
    // Each kind matters to what comes out.
    for (place, other) in [(1, FULL), (2, FULL), (3, FULL), (4, FULL), (5, FULL)] {
        let mut mixers = MIXERS;
        mixers[place] = other;
        let others: Vec<_> = self::expected(&mixers);
        assert_ne!(others, expected, "layer {place} changes nothing");
    }
    for family in ATTENTION {
        for source in [
            BuilderSource::ByFamily(components(family, "triton-mla")),
            BuilderSource::Plain,
        ] {
            let mut engine = engine(&config(family), &MIXERS, &source);
            check(&mut engine, &expected, &format!("{family:?}"));
            let stats = engine.stats();
            assert_eq!((stats.fallback_steps, stats.failed_steps), (0, 0));
            let free = engine.scheduler().kv().pool().num_free();
            assert_eq!(free, engine.num_blocks() - 1, "every block came back");
        }
    }
}

#[test]
fn a_request_that_lost_its_blocks_and_its_state_is_computed_again() {
    let expected = expected(&MIXERS);
    let config = EngineConfig {
        cache_size: CacheSize::Blocks(28),
        ..config(Family::FlashAttn)
    };
    let source = BuilderSource::ByFamily(components(Family::FlashAttn, "triton-mla"));
    let mut engine = engine(&config, &MIXERS, &source);
    check(&mut engine, &expected, "preempted");
    assert!(
        engine.stats().preemptions > 0,
        "the cache was meant to be too small"
    );
    assert_eq!(engine.stats().fallback_steps, 0);
}

#[test]
fn a_model_of_recurrent_layers_alone_runs_whatever_the_cache() {
    let mixers = [MAMBA2, GDN];
    let expected = expected(&mixers);
    for cache_size in [CacheSize::Blocks(160), CacheSize::MemoryFraction(0.9)] {
        let config = EngineConfig {
            attention_backend: None,
            cache_size,
            ..config(Family::FlashAttn)
        };
        let plan = AttentionPlan::new(&config, Toy::new(&mixers).config()).unwrap();
        assert_eq!(plan.block_bytes(), 0);
        let mut engine = engine(&config, &mixers, &drive::component("mamba"));
        check(&mut engine, &expected, &format!("{cache_size:?}"));
        assert_eq!(engine.stats().fallback_steps, 0);
    }
    // States that memory has no room for are refused like blocks that it has no room for.
    let config = EngineConfig {
        attention_backend: None,
        max_num_seqs: 1 << 16,
        cache_size: CacheSize::MemoryFraction(1e-6),
        ..config(Family::FlashAttn)
    };
    let text = refused(&config, &mixers, &BuilderSource::Plain);
    assert!(text.contains("no memory for the KV cache"), "{text}");
}

#[test]
fn latents_in_every_backend_and_dtype_the_cpu_has() {
    let mixers = [LATENT, GDN, FULL, LATENT];
    let expected = expected(&mixers);
    for (block_size, backend, name) in [
        (64, "FLASHMLA", "flash-mla"),
        (16, "FLASH_ATTN_MLA", "flash-attn-mla"),
        (4, "TRITON_MLA", "triton-mla"),
    ] {
        let config = EngineConfig {
            attention_backend: Some(backend.to_owned()),
            block_size,
            ..config(Family::FlashAttn)
        };
        let source = BuilderSource::ByFamily(components(Family::FlashAttn, name));
        let mut engine = engine(&config, &mixers, &source);
        let names: Vec<&str> = engine.builders().map(|(name, _)| name).collect();
        // The name was of the latent layers; attention has the device's first.
        assert!(names.contains(&"FLASH_ATTN/1"), "{names:?}");
        assert!(names.contains(&&*format!("{backend}/0")), "{names:?}");
        check(&mut engine, &expected, backend);
        assert_eq!(engine.stats().fallback_steps, 0);
    }
    // Of latents alone a cache can have DeepSeek's form, which rounds.
    let sizes = match LATENT {
        Mixer::Latent(sizes) => sizes,
        _ => unreachable!(),
    };
    let latents = [Mixer::Latent(timetable_device::cpu::mla::LatentSizes {
        kv_lora_rank: 512,
        ..sizes
    })];
    let config = EngineConfig {
        attention_backend: None,
        kv_cache_dtype: KvCacheDtype::Fp8DsMla,
        block_size: 64,
        ..config(Family::FlashAttn)
    };
    let exact = EngineConfig {
        kv_cache_dtype: KvCacheDtype::Auto,
        ..config.clone()
    };
    let plan = AttentionPlan::new(&config, Toy::new(&latents).config()).unwrap();
    assert_eq!(plan.block_bytes(), 64 * 656);
    // The first token's row of logits of each prompt: the same tokens before it in both.
    let rows = |config: &EngineConfig| -> Vec<f32> {
        let mut engine = engine(config, &latents, &BuilderSource::Plain);
        let all = drive::logits(&mut engine, requests());
        all.into_iter()
            .flat_map(|mut rows| rows.remove(0))
            .collect()
    };
    let (exact, rounded) = (rows(&exact), rows(&config));
    let largest = exact.iter().fold(0f32, |max, x| max.max(x.abs()));
    let pairs = exact.iter().zip(&rounded);
    let off = pairs.fold(0f32, |max, (a, b)| max.max((a - b).abs())) / largest;
    // Three bits of mantissa round by up to 1/16 each; sums of many are off by much less.
    assert!(
        (1e-5..0.06).contains(&off),
        "off by {off} of the largest logit"
    );
}

#[test]
fn native_builders_serve_each_its_family() {
    let expected = expected(&MIXERS);
    let native = |(family, name): (Family, &'static str)| FamilyBuilder {
        family,
        source: BuilderSource::Native(Box::new(move |config| {
            timetable_reference::native_twin(name, config)
        })),
        options: None,
        grant: None,
    };
    let builders = [
        (Family::Flashinfer, "flashinfer"),
        (Family::FlashMla, "triton-mla"),
        (Family::Mamba, "mamba"),
    ];
    let source = BuilderSource::ByFamily(builders.map(native).into());
    let mut engine = engine(&config(Family::Flashinfer), &MIXERS, &source);
    check(&mut engine, &expected, "native");
    assert_eq!(engine.stats().fallback_steps, 0);
    assert!(
        engine.reload_handles().is_empty(),
        "nothing can be replaced"
    );
}

#[test]
fn drafts_over_chunks_windows_and_latents_change_no_token() {
    let mixers = [FULL, chunked(CHUNK), toy::window(6), LATENT];
    let expected = expected(&mixers);
    for family in ATTENTION {
        let mut builders = components(family, "triton-mla");
        builders.truncate(2);
        for source in [BuilderSource::ByFamily(builders), BuilderSource::Plain] {
            let config = EngineConfig {
                speculative: Some(SpeculativeConfig {
                    method: SpeculativeMethod::NgramGpu,
                    num_speculative_tokens: 2,
                    prompt_lookup_min: 1,
                    prompt_lookup_max: 2,
                }),
                ..config(family)
            };
            let mut engine = engine(&config, &mixers, &source);
            check(&mut engine, &expected, &format!("{family:?}"));
            let stats = engine.stats();
            assert_eq!((stats.fallback_steps, stats.failed_steps), (0, 0));
            assert!(stats.speculation.num_draft_tokens > 0);
        }
    }
}

#[test]
fn a_chunk_that_holds_every_request_is_no_chunk() {
    let config = config(Family::FlashAttn);
    for (chunk, view) in [
        (124, BatchView::Local { chunk: 124 }),
        (128, BatchView::Plain),
        (1 << 24, BatchView::Plain),
    ] {
        let toy = Toy::new(&[chunked(chunk)]);
        let plan = AttentionPlan::new(&config, toy.config()).unwrap();
        assert_eq!(plan.groups()[0].view(), view, "{chunk}");
    }
}

fn name(name: &str) -> TenantName {
    name.parse().expect("a tenant's name")
}

#[test]
fn tenants_segments_have_views_of_their_own() {
    let expected = expected(&MIXERS);
    let tenants = ["a", "b"].map(name);
    let config = EngineConfig {
        tenants: tenants
            .iter()
            .map(|tenant| TenantConfig {
                slot: Some(SlotConfig::default()),
                ..TenantConfig::new(tenant.clone())
            })
            .collect(),
        ..config(Family::TritonAttn)
    };
    let default = BuilderSource::ByFamily(components(Family::TritonAttn, "triton-mla"));
    let own = [(tenants[1].clone(), drive::component("mamba"))];
    let builders = Builders {
        default: &default,
        tenants: &own,
    };
    let model = Box::new(Toy::new(&MIXERS));
    let mut engine = Engine::new(&config, model, None, drive::sandbox(), builders).unwrap();
    let dealt = requests().into_iter().enumerate().map(|(index, request)| {
        let tenant = (index % 3).checked_sub(1).map(|of| tenants[of].clone());
        GenerationRequest { tenant, ..request }
    });
    for (index, answer) in generate(&mut engine, dealt.collect()).iter().enumerate() {
        assert_eq!(answer.tokens, expected[index], "prompt {index}");
    }
    // A tenant's one component serves the groups of its family; those of others are served plainly.
    let mut serving = BTreeMap::new();
    for (tenant, handle, _) in engine.tenant_handles() {
        let status = handle.status();
        assert!(status.faults.is_empty(), "{:?}", status.faults);
        serving.insert(handle.group().to_owned(), status.active.is_some());
        assert_eq!(handle.group().ends_with("@a"), *tenant == tenants[0]);
    }
    let of_b = serving.iter().filter(|(group, _)| group.ends_with("@b"));
    for (group, is_served) in of_b {
        let is_recurrent = group.starts_with("MAMBA2") || group.starts_with("GDN_ATTN");
        assert_eq!(*is_served, is_recurrent, "{group}");
    }
}

#[test]
fn one_groups_faults_are_its_own() {
    let expected = expected(&MIXERS);
    for mischief in [Mischief::Trap, Mischief::Wild, Mischief::OffByOne] {
        let mut builders = components(Family::Flashinfer, "triton-mla");
        let bytes = timetable_reference::chaos(Family::Mamba).expect("a chaos builder");
        builders[2] = FamilyBuilder {
            source: BuilderSource::Component {
                component: drive::sandbox().load(bytes).expect("it loads"),
                origin: "chaos.wasm".to_owned(),
            },
            options: Some(vec![
                ("chaos".to_owned(), mischief.name().to_owned()),
                ("chaos-min-rows".to_owned(), "9".to_owned()),
            ]),
            ..components(Family::Flashinfer, "triton-mla").remove(2)
        };
        let source = BuilderSource::ByFamily(builders);
        let config = EngineConfig {
            max_num_seqs: 12,
            ..config(Family::Flashinfer)
        };
        let mut engine = engine(&config, &MIXERS, &source);
        // It behaves while it is accepted, and in small steps.
        let twice = [requests(), requests()].concat();
        for (index, answer) in generate(&mut engine, twice).iter().enumerate() {
            let expected = &expected[index % expected.len()];
            assert_eq!(&answer.tokens, expected, "{mischief:?}: prompt {index}");
        }
        let stats = engine.stats();
        assert!(stats.fallback_steps > 0, "{mischief:?} was meant to fault");
        assert_eq!(stats.failed_steps, 0);
        for handle in engine.reload_handles() {
            let (status, is_chaos) = (handle.status(), handle.family() == Family::Mamba);
            assert_eq!(status.faults.is_empty(), !is_chaos, "{}", handle.group());
            assert_eq!(status.plain_steps > 0, is_chaos, "{}", handle.group());
        }
    }
}

/// Each group in turn gets a builder that does something else wrong; what comes out is what comes out without it.
#[test]
fn whichever_groups_builder_misbehaves_the_tokens_stay() {
    let expected = expected(&MIXERS);
    let config = EngineConfig {
        max_num_seqs: 12,
        ..config(Family::FlashAttn)
    };
    let source = BuilderSource::ByFamily(components(Family::FlashAttn, "triton-mla"));
    let policy = FaultPolicy {
        quarantine_faults: 1000,
        max_backoff_steps: 0,
        // How long a spin takes is the machine's matter.
        build_budget: BuildBudget {
            per_step: Duration::from_secs(1),
            reserve: Duration::from_secs(60),
        },
        ..FaultPolicy::default()
    };
    let mut kinds = BTreeSet::new();
    let mischiefs = [
        "trap",
        "spin-divisions",
        "grow",
        "recurse",
        "huge-list",
        "drop",
    ];
    for (group, mischief) in mischiefs.into_iter().enumerate() {
        let mut engine = engine(&config, &MIXERS, &source);
        let handles = engine.reload_handles();
        assert_eq!(handles.len(), 6);
        let handle = &handles[group];
        let bytes = timetable_reference::chaos(handle.family()).expect("a chaos builder");
        let component = drive::sandbox().load(bytes).expect("it loads");
        // It behaves while it is accepted, and in small steps.
        let options = [("chaos", mischief), ("chaos-min-rows", "9")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()));
        let (plan, alone) = (ReloadPlan::default(), Companions::of(1));
        handle
            .submit(
                Some(&component),
                "chaos.wasm",
                Some(options.into()),
                &plan,
                &alone,
            )
            .expect("it is accepted");
        handle.set_policy(policy).expect("a policy");
        // An instance that did wrong is gone, and steps do not wait for the next.
        let mut rounds = 0;
        while engine.stats().fallback_steps < 10 && rounds < 6 {
            rounds += 1;
            let twice = [requests(), requests()].concat();
            for (index, answer) in generate(&mut engine, twice).iter().enumerate() {
                let expected = &expected[index % expected.len()];
                let what = format!("{}: prompt {index}", handle.group());
                assert_eq!(&answer.tokens, expected, "{what}");
            }
        }
        let stats = engine.stats();
        assert_eq!(stats.failed_steps, 0);
        let name = handle.group();
        assert!(stats.fallback_steps > 0, "{name} was meant to fault");
        for (index, other) in handles.iter().enumerate() {
            let faults = other.status().faults;
            assert_eq!(faults.is_empty(), index != group, "{}", other.group());
            kinds.extend(faults.into_keys());
        }
    }
    let expected = [
        "fuel",
        "lift_bound",
        "memory",
        "refused",
        "stack_depth",
        "trap",
    ];
    assert!(kinds.iter().eq(expected.iter()), "{kinds:?}");
}

#[test]
fn one_group_is_reloaded_while_others_serve() {
    let expected = expected(&MIXERS);
    let source = BuilderSource::ByFamily(components(Family::FlashAttn, "triton-mla"));
    let mut engine = engine(&config(Family::FlashAttn), &MIXERS, &source);
    let handles = engine.reload_handles();
    let by_name = |name: &str| handles.iter().find(|handle| handle.group() == name);
    let reloaded = by_name("FLASH_ATTN/1").expect("the chunked layers");
    let recurrent = by_name("MAMBA2/4").expect("the Mamba2 layers");
    let ids: Vec<_> = requests()
        .into_iter()
        .map(|request| engine.add_request(request).unwrap())
        .collect();
    let mut tokens = vec![Vec::new(); ids.len()];
    let mut steps = 0;
    while !engine.is_idle() {
        engine.step();
        for update in engine.take_updates() {
            let index = ids.iter().position(|id| *id == update.id).unwrap();
            tokens[index].extend(update.token);
        }
        steps += 1;
        let name = ["flash-attn-fixed-split", "flash-attn"][steps % 2];
        let component = timetable_reference::component(name).unwrap();
        reloaded.reload(component.bytes, name).unwrap();
    }
    // Another number of splits is another order of sums: tokens that are nearly equal may change places, and none is.
    assert_eq!(tokens, expected);
    assert!(reloaded.status().faults.is_empty());
    assert_eq!(engine.stats().fallback_steps, 0);
    assert_eq!(recurrent.status().steps, steps as u64);
    // What is no builder for a group is refused there and changes nothing.
    let mamba = timetable_reference::component("mamba").unwrap();
    let refused = reloaded.reload(mamba.bytes, "mamba").unwrap_err();
    assert!(refused.to_string().contains("mamba"), "{refused}");
}

/// What a group's builder saw of a step.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    rows: usize,
    tokens: u32,
    lens: Vec<i32>,
    width: usize,
    table: Vec<i32>,
    slots: Vec<i64>,
}

struct Watch(Arc<Mutex<BTreeMap<String, Vec<Seen>>>>);

impl StepObserver for Watch {
    fn observe(&mut self, step: ObservedStep<'_>) {
        let (inputs, common) = (step.context.inputs, step.context.common);
        let seen = Seen {
            rows: common.num_reqs as usize,
            tokens: common.num_actual_tokens,
            lens: inputs.seq_lens.to_vec(),
            width: inputs.block_table.width,
            table: inputs.block_table.data.to_vec(),
            slots: inputs.slot_mapping.to_vec(),
        };
        let mut steps = self.0.lock().unwrap();
        steps.entry(step.slot.to_owned()).or_default().push(seen);
    }
}

#[test]
fn each_group_sees_its_own_view_of_a_step() {
    let mut engine = engine(&config(Family::FlashAttn), &MIXERS, &BuilderSource::Plain);
    let seen = Arc::new(Mutex::new(BTreeMap::new()));
    engine.set_step_observer(Some(Box::new(Watch(seen.clone()))));
    generate(&mut engine, requests());
    let seen = seen.lock().unwrap();
    let names: Vec<&str> = seen.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "FLASH_ATTN/0",
            "FLASH_ATTN/1",
            "FLASH_ATTN/2",
            "GDN_ATTN/5",
            "MAMBA2/4",
            "TRITON_MLA/3"
        ]
    );
    let (plain, chunks, states) = (
        &seen["FLASH_ATTN/0"],
        &seen["FLASH_ATTN/1"],
        &seen["MAMBA2/4"],
    );
    assert_eq!(plain, &seen["FLASH_ATTN/2"]);
    assert_eq!(plain, &seen["TRITON_MLA/3"]);
    assert_eq!(states, &seen["GDN_ATTN/5"]);
    let mut most_rows = 0;
    for ((plain, chunks), states) in plain.iter().zip(chunks).zip(states) {
        assert_eq!((plain.tokens, &plain.slots), (chunks.tokens, &chunks.slots));
        assert_eq!(chunks.width, CHUNK / 4);
        assert!(chunks.lens.iter().all(|&len| len as usize <= CHUNK));
        assert!(chunks.rows >= plain.rows);
        most_rows = most_rows.max(chunks.rows);

        assert_eq!(
            (plain.rows, plain.tokens, &plain.lens),
            (states.rows, states.tokens, &states.lens)
        );
        assert_eq!((states.width, states.table.len()), (1, states.rows));
        let mut own = states.table.clone();
        own.sort_unstable();
        own.dedup();
        assert_eq!(own.len(), states.rows, "two requests have one state");
        assert!(own.iter().all(|state| (1..=4).contains(state)), "{own:?}");
        assert!(states.slots.iter().all(|&slot| slot == PAD_SLOT_ID));
    }
    assert!(most_rows > 4, "a prompt was meant to have several chunks");
}

#[test]
fn the_plan_says_what_each_group_is() {
    let config = config(Family::FlashAttn);
    let toy = Toy::new(&MIXERS);
    let plan = AttentionPlan::new(&config, toy.config()).unwrap();
    assert_eq!(
        plan.backends(),
        [
            ("FLASH_ATTN", Family::FlashAttn),
            ("TRITON_MLA", Family::FlashMla),
            ("MAMBA2", Family::Mamba),
            ("GDN_ATTN", Family::Mamba)
        ]
    );
    let views: Vec<BatchView> = plan.groups().iter().map(|group| group.view()).collect();
    let chunk = CHUNK as u32;
    assert_eq!(
        views,
        [
            BatchView::Plain,
            BatchView::Local { chunk },
            BatchView::Plain,
            BatchView::Plain,
            BatchView::States,
            BatchView::States
        ]
    );
    let homes: Vec<_> = (0..MIXERS.len())
        .map(|layer| plan.group_of(layer).unwrap())
        .collect();
    assert_eq!(homes, [0, 4, 1, 5, 2, 3, 4]);
    // Three layers of keys and values, one of latents; f32.
    let (keys, latents) = (2 * 2 * 16 * 4 * 4, (256 + 64) * 4 * 4);
    assert_eq!(plan.block_bytes(), 3 * keys + latents);
    // A convolution's last inputs and a state, in each of two layers of Mamba2 and one of the gated delta net.
    let mamba2 = ((32 + 2 * 2 * 8) * 3 + 4 * 8 * 8) * 4;
    let gdn = ((2 * 2 * 8 + 4 * 6) * 3 + 4 * 6 * 8) * 4;
    assert_eq!(plan.state_bytes(), 2 * mamba2 + gdn);
    assert_eq!(plan.num_states(4), 5);

    let engine = drive::engine(&config, Box::new(toy), &BuilderSource::Plain);
    let report = engine.startup_report().to_string();
    for line in [
        "model.layers.0.self_attn.attn: FLASH_ATTN (FULL_ATTENTION, metadata of `flash-attn`, 4 query heads, block 4 read as 4, 1024 bytes a page, plain view)".to_owned(),
        "model.layers.2.self_attn.attn: FLASH_ATTN (FULL_ATTENTION, metadata of `flash-attn`, 4 query heads, block 4 read as 4, 1024 bytes a page, chunks of 8 view)".to_owned(),
        "model.layers.5.self_attn.attn: TRITON_MLA (MLA_ATTENTION, metadata of `flash-mla`, 3 query heads, block 4 read as 4, 5120 bytes a page, plain view)".to_owned(),
        format!("model.layers.1.mixer … model.layers.6.mixer (2 layers): MAMBA2 (MAMBA, metadata of `mamba`, one state of {mamba2} bytes a request, states view)"),
        format!("model.layers.3.linear_attn: GDN_ATTN (MAMBA, metadata of `mamba`, one state of {gdn} bytes a request, states view)"),
        "warning: Hybrid or mamba-based model detected without support for prefix caching: disabling.".to_owned(),
    ] {
        assert!(report.lines().any(|found| found == line), "{line} is missing in\n{report}");
    }
    assert!(!engine.scheduler().kv().enables_prefix_caching());
}

fn refused(config: &EngineConfig, mixers: &[Mixer], source: &BuilderSource) -> String {
    let model = Box::new(Toy::new(mixers));
    let made = Engine::new(config, model, None, drive::sandbox(), source);
    made.err().expect("it is refused").to_string()
}

#[test]
fn what_does_not_go_together_is_refused_with_the_remedy() {
    let config = config(Family::FlashAttn);
    let plain = &BuilderSource::Plain;
    let speculative = EngineConfig {
        speculative: Some(SpeculativeConfig {
            method: SpeculativeMethod::Ngram,
            num_speculative_tokens: 2,
            prompt_lookup_min: 1,
            prompt_lookup_max: 2,
        }),
        ..config.clone()
    };
    let text = refused(&speculative, &[FULL, MAMBA2], plain);
    assert!(
        text.contains("recurrent") && text.contains("--speculative-method"),
        "{text}"
    );
    let text = refused(&config, &[FULL, chunked(6)], plain);
    assert!(
        text.contains('6') && text.contains("block_size 4"),
        "{text}"
    );
    let text = refused(&config, &[MAMBA2], plain);
    assert!(
        text.contains("FLASH_ATTN") && text.contains("auto"),
        "{text}"
    );
    let text = refused(&config, &[LATENT], plain);
    assert!(text.contains("FLASH_ATTN is not valid"), "{text}");
    let batch_invariant = EngineConfig {
        batch_invariant: true,
        ..config.clone()
    };
    let text = refused(&batch_invariant, &[FULL, MAMBA2], plain);
    assert!(text.contains("MAMBA2"), "{text}");
    // A component that no group can use.
    let text = refused(&config, &[FULL, GDN], &drive::component("flash-mla"));
    for part in [
        "`flash-mla`",
        "`flash-attn` (FLASH_ATTN)",
        "`mamba` (GDN_ATTN)",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_device_says_which_family_it_lacks_and_what_would_work() {
    let config = EngineConfig {
        attention_backend: None,
        block_size: 64,
        ..config(Family::FlashAttn)
    };
    let gpu = DeviceFacts::cuda(&config, (9, 0), 132, Dtype::Bfloat16, 128);
    let refused = |mixers: &[Mixer]| {
        let model = ModelConfig {
            num_hidden_layers: mixers.len(),
            mixers: mixers.to_vec(),
            ..simulated_model()
        };
        let made = AttentionPlan::for_device(&config, &model, gpu);
        made.expect_err("it is refused").to_string()
    };
    for (mixers, parts) in [
        ([FULL, MAMBA2], ["model.layers.1.mixer", "`mamba` (MAMBA2)"]),
        (
            [FULL, GDN],
            ["model.layers.1.linear_attn", "`mamba` (GDN_ATTN)"],
        ),
        (
            [FULL, chunked(64)],
            ["model.layers.1.self_attn.attn", "chunks of 64"],
        ),
    ] {
        let text = refused(&mixers);
        for part in parts
            .into_iter()
            .chain(["flash-attn, flashinfer", "--device cpu"])
        {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
    }
    let triton = EngineConfig {
        attention_backend: Some("TRITON_ATTN".to_owned()),
        ..config.clone()
    };
    let error = AttentionPlan::for_device(&triton, &simulated_model(), gpu).unwrap_err();
    assert!(matches!(error, EngineError::DeviceLacks { .. }));
    assert!(
        error
            .to_string()
            .ends_with("choose FLASH_ATTN or FLASHINFER (--attention-backend)"),
        "{error}"
    );
}

#[test]
fn a_device_that_computes_nothing_takes_every_familys_metadata() {
    let config = EngineConfig {
        cudagraph_mode: CudagraphMode::None,
        attention_backend: None,
        block_size: 64,
        max_model_len: Some(512),
        ..config(Family::FlashAttn)
    };
    let mixers = [FULL, chunked(64), MAMBA2, GDN];
    let model = ModelConfig {
        num_hidden_layers: mixers.len(),
        mixers: mixers.to_vec(),
        ..simulated_model()
    };
    let executor = SimulatedExecutor::new(model, StepCost::default());
    let facts = executor.facts(&config).unwrap();
    let plan = AttentionPlan::for_device(&config, executor.model_config(), facts).unwrap();
    let source = BuilderSource::ByFamily(components(Family::FlashAttn, "flash-mla"));
    let error = Engine::with_executor(
        &config,
        plan.clone(),
        Box::new(SimulatedExecutor::new(
            executor.model_config().clone(),
            StepCost::default(),
        )),
        None,
        drive::sandbox(),
        &source,
    );
    let error = error.err().expect("no layer has latents").to_string();
    assert!(error.contains("`flash-mla`"), "{error}");
    let mut builders = components(Family::FlashAttn, "flash-mla");
    builders.remove(1);
    let source = BuilderSource::ByFamily(builders);
    let mut engine = Engine::with_executor(
        &config,
        plan,
        Box::new(executor),
        None,
        drive::sandbox(),
        &source,
    )
    .unwrap();
    for answer in generate(&mut engine, requests()) {
        assert_eq!((answer.tokens.len(), answer.error), (NEW_TOKENS, None));
    }
    assert_eq!(engine.stats().fallback_steps, 0);
}
