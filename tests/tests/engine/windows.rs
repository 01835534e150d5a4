//! A model of which one layer has a sliding window: two attention groups, each with a builder of its own, over one table.

use timetable_attention::{
    graphs::Outcome,
    spec::{CacheSpec, FullAttentionSpec},
};
use timetable_engine::{
    AttentionPlan, BuilderSource, CacheSize, EngineConfig, ModelRunner, backend_name,
    model::{AttentionLayers, Model, ModelConfig, ModelError},
};
use timetable_tests::{
    candle_reference::argmax,
    drive::{self, generate, greedy},
    naive::NaiveAttention,
};
use timetable_types::{CudagraphMode, Family};

use timetable_tests::trace;

const WINDOW: usize = 24;

/// tiny-llama, as if its second layer had been trained with a window.
struct Windowed {
    model: Box<Model>,
    config: ModelConfig,
}

impl Windowed {
    fn new() -> Self {
        let model = drive::tiny_llama();
        let mut config = model.config().clone();
        config.sliding_window = Some(WINDOW);
        config.first_window_layer = 1;
        Self { model, config }
    }
}

impl ModelRunner for Windowed {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn forward(
        &mut self,
        tokens: &[u32],
        positions: &[i64],
        attn: &mut dyn AttentionLayers,
        logits_rows: &[usize],
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        self.model
            .forward(tokens, positions, attn, logits_rows, logits)
    }
}

/// Greedy tokens by textbook attention.
fn expected(prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let mut model = Windowed::new();
    let mut attention = NaiveAttention::new(&model.config, 1);
    let mut tokens = prompt.to_vec();
    let mut logits = Vec::new();
    let mut done = 0;
    while tokens.len() < prompt.len() + max_tokens {
        let count = tokens.len() - done;
        attention.schedule(&[(0, count)]);
        let positions: Vec<i64> = (done as i64..tokens.len() as i64).collect();
        model
            .forward(
                &tokens[done..],
                &positions,
                &mut attention,
                &[count - 1],
                &mut logits,
            )
            .unwrap();
        done = tokens.len();
        tokens.push(argmax(&logits) as u32);
    }
    tokens.split_off(prompt.len())
}

#[test]
fn layers_with_and_without_a_window_have_groups_of_their_own() {
    let trace = trace::load("llama_mrv2_f32");
    let expected: Vec<Vec<u32>> = trace
        .prompts
        .iter()
        .map(|prompt| expected(prompt, 12))
        .collect();
    let differs = expected.iter().zip(&trace.outputs).any(|(ours, full)| {
        let len = full.len().min(12);
        ours[..len] != full[..len]
    });
    assert!(differs, "the window changes nothing");
    for (family, source) in [
        (Family::FlashAttn, drive::component("flash-attn")),
        (Family::Flashinfer, drive::component("flashinfer")),
        (Family::TritonAttn, drive::component("triton-attn")),
        (Family::FlashAttn, BuilderSource::Plain),
        (Family::Flashinfer, BuilderSource::Plain),
    ] {
        let config = EngineConfig {
            attention_backend: Some(backend_name(family).to_owned()),
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
            max_model_len: Some(512),
            cache_size: CacheSize::Blocks(256),
            ..EngineConfig::default()
        };
        let mut engine = drive::engine(&config, Box::new(Windowed::new()), &source);
        assert_eq!(engine.builders().count(), 2);
        let requests = trace.prompts.iter().map(|prompt| greedy(prompt, 12));
        for (index, answer) in generate(&mut engine, requests.collect()).iter().enumerate() {
            assert_eq!(answer.tokens, expected[index], "prompt {index}, {family:?}");
        }
        assert_eq!(engine.stats().fallback_steps, 0);
    }
}

#[test]
fn two_attention_groups_stand_in_one_kv_cache_group() {
    let config = EngineConfig {
        max_model_len: Some(512),
        ..EngineConfig::default()
    };
    let model = Windowed::new();
    let plan = AttentionPlan::new(&config, model.config()).unwrap();
    assert_eq!(plan.backends(), [("FLASH_ATTN", Family::FlashAttn)]);
    let [full, windowed] = plan.groups() else {
        panic!("{:?}", plan.groups());
    };
    assert_eq!(full.layer_names, ["model.layers.0.self_attn.attn"]);
    assert_eq!(windowed.layer_names, ["model.layers.1.self_attn.attn"]);
    let window = |spec: &CacheSpec| match spec {
        CacheSpec::FullAttention(FullAttentionSpec { sliding_window, .. }) => *sliding_window,
        other => panic!("every key is kept, not {other:?}"),
    };
    assert_eq!(window(&full.spec), None);
    assert_eq!(window(&windowed.spec), Some(WINDOW as u32));
    assert_eq!((full.kv_cache_group_id, windowed.kv_cache_group_id), (0, 0));
    // Keys and values of two layers: heads x tokens x elements x 4 bytes.
    let sizes = model.config();
    let page = 2 * sizes.num_key_value_heads * config.block_size * sizes.head_dim * 4;
    assert_eq!(plan.block_bytes(), 2 * page as u64);
}

#[test]
fn start_up_says_which_backend_each_layer_got_and_which_graph_mode_survived() {
    let config = EngineConfig {
        attention_backend: Some("FLASHINFER".to_owned()),
        cudagraph_mode: CudagraphMode::FullDecodeOnly,
        max_model_len: Some(512),
        cache_size: CacheSize::Blocks(64),
        ..EngineConfig::default()
    };
    let source = drive::component("flashinfer");
    let engine = drive::engine(&config, Box::new(Windowed::new()), &source);
    let report = engine.startup_report();
    let layers: Vec<_> = report
        .layers
        .iter()
        .map(|layer| {
            (
                layer.layer.as_str(),
                layer.backend.as_str(),
                layer.kv_cache_group,
                layer.attention_group,
            )
        })
        .collect();
    assert_eq!(
        layers,
        [
            ("model.layers.0.self_attn.attn", "FLASHINFER", 0, 0),
            ("model.layers.1.self_attn.attn", "FLASHINFER", 0, 1),
        ]
    );
    let graphs = engine.cudagraph_mode();
    assert_eq!(graphs.configured, CudagraphMode::FullDecodeOnly);
    let supports = engine.builders().map(|(_, info)| info.cudagraph_support);
    assert!(supports.eq(graphs.groups.iter().map(|group| group.support)));
    assert!(
        matches!(
            graphs.outcome,
            Outcome::Survived {
                mode: CudagraphMode::None,
                ..
            }
        ),
        "{graphs}"
    );
    let [change] = graphs.changes.as_slice() else {
        panic!("{graphs}");
    };
    assert_eq!(
        change.reason,
        "CUDAGraphMode.FULL_DECODE_ONLY is not used with a platform that cannot capture graphs; setting cudagraph_mode=NONE"
    );
    let [hazard] = report.hazards.as_slice() else {
        panic!("{report}");
    };
    assert_eq!(hazard.code, "cudagraph_mode_changed");
    assert_eq!(hazard.message, change.reason);
}

#[test]
fn an_explicit_choice_that_does_not_fit_is_refused_with_its_reason() {
    let config = EngineConfig {
        attention_backend: Some("FLEX_ATTENTION".to_owned()),
        max_model_len: Some(512),
        ..EngineConfig::default()
    };
    let refused = AttentionPlan::new(&config, Windowed::new().config()).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "Selected backend AttentionBackendEnum.FLEX_ATTENTION is not valid for this configuration. Reason: ['not run by the CPU \
         device: choose FLASH_ATTN, FLASHINFER or TRITON_ATTN (--attention-backend)']"
    );
}
