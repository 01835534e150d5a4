//! Tenants on a device: steps of several segments, each with lists, launches and tensors of its own, give what each tenant gets
//! alone; one that is left out changes nobody else's tokens.

use timetable_engine::{
    Builders, EngineConfig, GenerationRequest, ModelDtype, SlotConfig, TenantConfig, backend_name,
};
use timetable_sandbox::{FaultPolicy, OnFault, TenantName};
use timetable_tests::drive::{self, component};
use timetable_types::{CudagraphMode, Family};

use super::support;

const TOKENS: usize = 40;

fn name(name: &str) -> TenantName {
    name.parse().expect("a tenant's name")
}

/// Eight requests of `of`, short and longer than a tile.
fn requests(of: Option<&str>) -> Vec<GenerationRequest> {
    let salt = of.map_or(0, |of| u32::from(of.as_bytes()[0]));
    let prompt = |index: u32| -> Vec<u32> {
        let len = 3 + index * 13 + salt % 5;
        (0..len)
            .map(|at| 5 + (at * 31 + index * 97 + salt * 7) % 500)
            .collect()
    };
    (0..8)
        .map(|index| GenerationRequest {
            tenant: of.map(name),
            ..drive::greedy(&prompt(index), TOKENS)
        })
        .collect()
}

/// Everybody's requests, dealt one after the other.
fn mixed(who: &[Option<&str>]) -> Vec<GenerationRequest> {
    let each: Vec<_> = who.iter().map(|of| requests(*of)).collect();
    (0..8)
        .flat_map(|index| each.iter().map(move |of| of[index].clone()))
        .collect()
}

fn config(ordinal: usize, family: Family, mode: CudagraphMode) -> EngineConfig {
    let tenant = |of| TenantConfig {
        slot: Some(SlotConfig::default()),
        ..TenantConfig::new(name(of))
    };
    EngineConfig {
        model_dtype: ModelDtype::Float32,
        attention_backend: Some(backend_name(family).to_owned()),
        cudagraph_mode: mode,
        cudagraph_capture_sizes: Some(vec![1, 2, 4, 8, 16, 24]),
        max_num_seqs: 24,
        tenants: vec![tenant("a"), tenant("b")],
        ..support::config(ordinal)
    }
}

const EVERYBODY: [Option<&str>; 3] = [None, Some("a"), Some("b")];

#[test]
fn each_tenants_tokens_are_those_that_it_gets_alone() {
    let Some(ordinal) = support::device() else {
        return;
    };
    let path = drive::tiny_llama_dir();
    for (family, builder) in [
        (Family::FlashAttn, "flash-attn-fixed-split"),
        (Family::Flashinfer, "flashinfer"),
    ] {
        for mode in [CudagraphMode::None, CudagraphMode::FullAndPiecewise] {
            let config = config(ordinal, family, mode);
            let source = component(builder);
            let tenants = ["a", "b"].map(|of| (name(of), component(builder)));
            let builders = Builders {
                default: &source,
                tenants: &tenants,
            };
            let alone = EVERYBODY.map(|of| {
                let mut engine = support::engine(&config, &path, builders);
                support::tokens(&mut engine, requests(of))
            });
            for max_tenant_segments in [1, 2, 4] {
                let config = EngineConfig {
                    max_tenant_segments,
                    ..config.clone()
                };
                let mut engine = support::engine(&config, &path, builders);
                let found = support::tokens(&mut engine, mixed(&EVERYBODY));
                for (index, tokens) in found.iter().enumerate() {
                    let (of, request) = (index % EVERYBODY.len(), index / EVERYBODY.len());
                    assert_eq!(
                        *tokens, alone[of][request],
                        "{family:?} {mode:?} {max_tenant_segments} {:?} {request}",
                        EVERYBODY[of]
                    );
                }
                let stats = engine.stats();
                assert_eq!((stats.failed_steps, stats.fallback_steps), (0, 0));
                let free = engine.scheduler().kv().pool().num_free();
                assert_eq!(free, engine.num_blocks() - 1);
            }
        }
    }
}

/// In bfloat16, whose kernels make work items on the device: no step fails or falls back, and a step's rows do not disturb each
/// other's lists, whichever tenant is left out of it.
#[test]
fn a_tenant_that_is_left_out_of_a_step_changes_no_other_tokens() {
    let Some(ordinal) = support::device() else {
        return;
    };
    let model = support::RandomModel::new("llama", &serde_json::json!({}), 7);
    for family in [Family::FlashAttn, Family::Flashinfer] {
        for dtype in [ModelDtype::Float32, ModelDtype::Bfloat16] {
            let mut config = EngineConfig {
                model_dtype: dtype,
                // A row's bits then do not depend on what else is in the batch.
                batch_invariant: family == Family::FlashAttn || dtype == ModelDtype::Float32,
                ..config(ordinal, family, CudagraphMode::FullAndPiecewise)
            };
            let builder = match family {
                Family::FlashAttn => "flash-attn",
                _ => "flashinfer",
            };
            let (source, good) = (component(builder), component(builder));
            let chaos = timetable_reference::chaos(family).expect("a chaos builder");
            let chaos = timetable_engine::BuilderSource::Component {
                component: drive::sandbox().load(chaos).expect("it loads"),
                origin: "chaos".to_owned(),
            };
            let tenants = [(name("a"), chaos), (name("b"), good)];
            let builders = Builders {
                default: &source,
                tenants: &tenants,
            };
            let mut engine = support::engine(&config, model.path(), builders);
            let alone = support::tokens(&mut engine, requests(Some("b")));
            drop(engine);
            config.tenants[0].slot = Some(SlotConfig {
                policy: FaultPolicy {
                    on_fault: OnFault::FailStep,
                    ..FaultPolicy::default()
                },
                options: vec![
                    ("chaos".to_owned(), "trap".to_owned()),
                    ("chaos-min-rows".to_owned(), "8".to_owned()),
                    ("chaos-from-call".to_owned(), "12".to_owned()),
                ],
                ..SlotConfig::default()
            });
            let mut engine = support::engine(&config, model.path(), builders);
            let answers = drive::generate(&mut engine, mixed(&[Some("a"), Some("b")]));
            let (of_a, of_b): (Vec<_>, Vec<_>) = answers
                .iter()
                .enumerate()
                .partition(|(index, _)| index % 2 == 0);
            assert!(of_a.iter().all(|(_, answer)| answer.error.is_some()));
            assert_eq!(engine.stats().failed_steps, 1);
            for ((_, answer), alone) in of_b.iter().zip(&alone) {
                assert!(answer.error.is_none(), "{:?}", answer.error);
                assert_eq!(answer.tokens.len(), TOKENS);
                if config.batch_invariant {
                    assert_eq!(answer.tokens, *alone, "{family:?} {dtype:?}");
                }
            }
        }
    }
}
