//! Rules that no vectors file holds: what groups share, extras, batch invariance, default sizes, configuration overrides, the
//! explanation, the second-generation runner's order and parts.

use timetable_attention::batch::{
    self, GroupAction, GroupReuse, InvarianceFinding, RunnerGeneration, SharingLayer, UbatchConfig,
    UbatchSlice,
};
use timetable_attention::graphs::{
    self, BatchQuery, CaptureSizeConfig, CaptureSizeError, ConfigFacts, CudagraphManager,
    GroupSupport, ManagerConfig, Outcome, ResolveInput, RuntimeMode,
};
use timetable_attention::types::{
    CudagraphMode, CudagraphSupport, Dtype, Extra, ExtraValue, KvCacheSpec, KvCacheSpecKind,
    MmDocRange,
};

fn spec(kind: KvCacheSpecKind, block_size: u32) -> KvCacheSpec {
    KvCacheSpec {
        kind,
        block_size,
        num_kv_heads: 2,
        head_size: 64,
        head_size_v: 64,
        dtype: Dtype::Bfloat16,
        sliding_window: None,
        attention_chunk_size: None,
        dcp_sharded: true,
        mamba: None,
    }
}

#[test]
fn mamba_groups_of_equal_spec_and_builder_reuse_the_first_metadata() {
    let (mamba, other) = (
        spec(KvCacheSpecKind::Mamba, 16),
        spec(KvCacheSpecKind::Mamba, 32),
    );
    let full = spec(KvCacheSpecKind::FullAttention, 16);
    let group = |spec, builder, supports_update_block_table| GroupReuse {
        spec,
        builder,
        supports_update_block_table,
    };
    let groups = [
        group(&mamba, "mamba2", true),
        group(&full, "flash-attn", true),
        group(&mamba, "mamba2", true),
        group(&mamba, "mamba1", true),
        group(&other, "mamba2", true),
        group(&mamba, "mamba2", false),
        group(&full, "flash-attn", true),
        group(&mamba, "mamba2", true),
    ];
    let (build, update) = (GroupAction::Build, |from| GroupAction::UpdateBlockTable {
        from,
    });
    let second = [
        build,
        build,
        update(0),
        build,
        build,
        build,
        build,
        update(0),
    ];
    for capturing in [false, true] {
        assert_eq!(
            batch::plan_group_reuse(&groups, RunnerGeneration::V2, capturing),
            second
        );
    }
    let first = [
        build,
        build,
        update(0),
        build,
        build,
        build,
        update(1),
        update(0),
    ];
    assert_eq!(
        batch::plan_group_reuse(&groups, RunnerGeneration::V1, false),
        first
    );
    assert_eq!(
        batch::plan_group_reuse(&groups, RunnerGeneration::V1, true),
        [build; 8]
    );
}

#[test]
fn extras_are_checked_against_the_batch() {
    let extra = |name: &str, value| Extra {
        name: name.into(),
        value,
    };
    let speculation = batch::speculation_extras(&[2, -1, 3], 4);
    assert_eq!(
        speculation[0],
        extra("num_accepted_tokens", ExtraValue::Device(4))
    );
    assert_eq!(
        speculation[1],
        extra(
            "num_decode_draft_tokens_cpu",
            ExtraValue::Host(vec![2, -1, 3, -1])
        )
    );
    assert_eq!(batch::check_extras(&speculation, 4), Ok(()));
    let text = |extras: &[Extra]| {
        batch::check_extras(extras, 3)
            .expect_err("refused")
            .to_string()
    };
    assert!(text(&speculation).contains("has 4 rows, the batch 3"));
    assert!(text(&[extra("", ExtraValue::Integer(1))]).contains("has no name"));
    let twice = [
        extra("a", ExtraValue::Integer(1)),
        extra("a", ExtraValue::Host(vec![1])),
    ];
    assert!(text(&twice).contains("\"a\" is given twice"));
}

#[test]
fn batch_invariance_is_refused_without_support_and_changes_what_it_must() {
    let refused =
        batch::check_batch_invariance(&[("FLASH_ATTN", true), ("FLASHMLA", false)], true, 8);
    assert_eq!(refused.len(), 1);
    assert!(refused[0].is_refusal());
    assert_eq!(
        refused[0].to_string(),
        "VLLM batch_invariant mode is not supported for FLASHMLA."
    );
    let findings = batch::check_batch_invariance(&[("FLASHINFER", true)], true, 8);
    let disable = InvarianceFinding::DisablePrefixCaching {
        backend: "FLASHINFER".into(),
    };
    assert_eq!(
        findings,
        [disable, InvarianceFinding::OneSplit { configured: 8 }]
    );
    assert_eq!(
        findings[0].to_string(),
        "Disabling prefix caching for FLASHINFER/TRITON_MLA with batch invariance, as it is not yet supported."
    );
    assert_eq!(
        batch::check_batch_invariance(&[("FLASHINFER", true)], false, 1),
        []
    );
    assert_eq!(
        batch::check_batch_invariance(&[("FLASH_ATTN", true)], true, 1),
        []
    );
}

#[test]
fn window_leaves_only_blocks_that_a_query_reaches() {
    // Keys from 100 − 64 = 36 on are reached; blocks 0 and 1 (keys 0 to 31) are not.
    assert_eq!(batch::window_null_blocks(100, 64, 16), 2);
    assert_eq!(batch::window_null_blocks(63, 64, 16), 0);
    let mut ranges = vec![
        MmDocRange {
            row: 0,
            start: 0,
            end: 7,
        },
        MmDocRange {
            row: 1,
            start: 4,
            end: 12,
        },
    ];
    batch::retain_ranges_within_window(&mut ranges, 8);
    assert_eq!(
        ranges,
        [MmDocRange {
            row: 0,
            start: 0,
            end: 7
        }]
    );
}

#[test]
fn second_generation_orders_verifications_decodes_and_the_rest() {
    let requests = [
        (false, 700),
        (false, 1),
        (true, 4),
        (false, 4),
        (false, 9),
        (true, 3),
        (false, 1),
    ];
    assert_eq!(
        batch::order_decodes_first(&requests, 4),
        [2, 5, 3, 1, 6, 4, 0]
    );
}

#[test]
fn a_part_of_padding_alone_keeps_a_row_without_queries() {
    let shape = timetable_attention::types::CaptureShape {
        num_tokens: 4,
        num_reqs: 2,
        max_query_len: 2,
        uniform_query_len: Some(2),
    };
    let live = batch::capture_batch(&shape, 3, 64).expect("whole queries");
    let padded = batch::pad_step(&live, 8, 4, batch::PaddingValues::default()).expect("it fits");
    let part = batch::slice_input_batch(
        &UbatchSlice {
            requests: 4..4,
            tokens: 4..8,
        },
        &padded,
    );
    assert_eq!(
        (part.tensors.query_start_loc.as_slice(), part.batch_size()),
        ([0, 0].as_slice(), 1)
    );
    assert_eq!(part.tensors.slot_mapping, [-1; 4]);
    // Cut inside a row: its first half sees fewer keys, its second all of them.
    let parts = [0..3, 3..8].map(|tokens| {
        let requests = if tokens.start == 0 { 0..2 } else { 1..4 };
        batch::slice_input_batch(&UbatchSlice { requests, tokens }, &padded)
    });
    assert_eq!(parts[0].tensors.query_start_loc, [0, 2, 3]);
    assert_eq!(parts[0].tensors.seq_lens, [2, 1]);
    assert_eq!(parts[1].tensors.query_start_loc, [0, 1, 1, 1]);
    assert_eq!(parts[1].tensors.seq_lens, [2, 0, 0]);
}

#[test]
fn default_capture_sizes() {
    let config = CaptureSizeConfig {
        max_num_seqs: 256,
        max_num_batched_tokens: 8192,
        decode_query_len: 1,
        compute_capability_major: 9,
        interactivity: false,
    };
    let sizes = graphs::default_capture_sizes(&config);
    assert_eq!(
        (sizes.len(), sizes[..5].to_vec(), sizes[50]),
        (51, vec![1, 2, 4, 8, 16], 512)
    );
    assert!(sizes.windows(2).all(|w| w[0] < w[1]));
    let blackwell = CaptureSizeConfig {
        max_num_seqs: 1024,
        compute_capability_major: 10,
        ..config
    };
    assert_eq!(
        graphs::default_capture_sizes(&blackwell).last(),
        Some(&1024)
    );
    // Uniform decodes of 4 tokens have sizes of their own; 5 requests of 4 among them.
    let speculative = CaptureSizeConfig {
        max_num_seqs: 5,
        decode_query_len: 4,
        ..config
    };
    assert_eq!(
        graphs::default_capture_sizes(&speculative),
        [1, 2, 4, 8, 16, 20, 24, 32, 40]
    );
    let small = CaptureSizeConfig {
        max_num_batched_tokens: 13,
        interactivity: true,
        ..config
    };
    assert_eq!(
        graphs::default_capture_sizes(&small),
        (1..=13).collect::<Vec<_>>()
    );
}

#[test]
fn user_capture_sizes_are_consistent_or_refused() {
    assert_eq!(
        graphs::user_capture_sizes(&[8, 4, 4], Some(8), 512),
        Ok((vec![4, 8], 8, false))
    );
    assert_eq!(
        graphs::user_capture_sizes(&[8, 4, 600], None, 512),
        Ok((vec![4, 8], 8, true))
    );
    let refused =
        graphs::user_capture_sizes(&[4, 8], Some(16), 512).expect_err("16 is not the largest");
    assert_eq!(
        refused,
        CaptureSizeError::Inconsistent {
            max: 16,
            largest: 8
        }
    );
    assert_eq!(
        refused.to_string(),
        "customized max_cudagraph_capture_size(=16) should be consistent with the max value of cudagraph_capture_sizes(=8)"
    );
}

fn resolve_input(sizes: &[u32]) -> ResolveInput<'_> {
    ResolveInput {
        mode: None,
        min_support: CudagraphSupport::Always,
        min_backend: None,
        uniform_decode_query_len: 1,
        attention_is_splitting_op: true,
        compiled: true,
        use_inductor_graph_partition: false,
        runner: RunnerGeneration::V2,
        piecewise_capture_available: true,
        capture_sizes: sizes,
        max_capture_size: sizes.last().copied().unwrap_or(0),
        mamba: None,
        is_profiling: false,
    }
}

fn group(backend: &str, support: CudagraphSupport) -> GroupSupport {
    GroupSupport {
        backend: backend.into(),
        support,
    }
}

#[test]
fn explanation_gives_each_change_and_what_survived() {
    let groups = [
        group("TritonAttentionBackend", CudagraphSupport::Always),
        group(
            "FlashInferBackend",
            CudagraphSupport::UniformSingleTokenDecode,
        ),
        group("OtherBackend", CudagraphSupport::UniformSingleTokenDecode),
    ];
    let input = ResolveInput {
        uniform_decode_query_len: 4,
        ..resolve_input(&[4, 8])
    };
    let made = graphs::explain(
        CudagraphMode::FullAndPiecewise,
        &ConfigFacts::default(),
        &groups,
        &input,
    );
    assert_eq!(made.weakest_backend.as_deref(), Some("FlashInferBackend"));
    assert_eq!(made.changes.len(), 1);
    assert_eq!(
        made.changes[0].reason,
        "CUDAGraphMode.FULL_AND_PIECEWISE is not supported with spec-decode for attention backend FlashInferBackend \
         (support: AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE); setting cudagraph_mode=PIECEWISE"
    );
    let survived = Outcome::Survived {
        mode: CudagraphMode::Piecewise,
        decode: RuntimeMode::Piecewise,
        mixed: RuntimeMode::Piecewise,
        capture_sizes: vec![4, 8],
    };
    assert_eq!(made.outcome, survived);
    let text = made.to_string();
    assert!(
        text.starts_with(
            "configured  FULL_AND_PIECEWISE\nsupports    TritonAttentionBackend: ALWAYS\n"
        ),
        "{text}"
    );
    assert!(
        text.contains("\nchanged     FULL_AND_PIECEWISE -> PIECEWISE: CUDAGraphMode."),
        "{text}"
    );
    assert!(text.ends_with("survived    PIECEWISE: decodes PIECEWISE, other batches PIECEWISE; 2 sizes, the largest 8 tokens"));
    let json = serde_json::to_value(&made).expect("serialises");
    assert_eq!(json["changes"][0]["to"], "PIECEWISE");
    assert_eq!(json["outcome"]["survived"]["decode"], "PIECEWISE");
}

#[test]
fn explanation_of_a_refusal_keeps_the_changes_before_it() {
    let groups = [group("CPUAttentionBackend", CudagraphSupport::Never)];
    let input = resolve_input(&[1, 2]);
    let made = graphs::explain(
        CudagraphMode::Full,
        &ConfigFacts::default(),
        &groups,
        &input,
    );
    let Outcome::Refused { error } = &made.outcome else {
        panic!("{:?}", made.outcome)
    };
    assert_eq!(
        error,
        "CUDAGraphMode.FULL is not supported with CPUAttentionBackend backend (support: AttentionCGSupport.NEVER); please \
         try cudagraph_mode=PIECEWISE, and make sure compilation mode is VLLM_COMPILE"
    );
    assert!(made.to_string().contains("refused     CUDAGraphMode.FULL"));
    // A platform that cannot capture never gets that far.
    let facts = ConfigFacts {
        no_static_graphs: true,
        ..ConfigFacts::default()
    };
    let made = graphs::explain(CudagraphMode::Full, &facts, &groups, &input);
    assert_eq!(
        (made.changes.len(), made.changes[0].to),
        (1, CudagraphMode::None)
    );
    assert!(
        made.to_string()
            .ends_with("survived    NONE: decodes NONE, other batches NONE; nothing is captured")
    );
}

#[test]
fn configuration_overrides_come_in_order_and_once() {
    let to = |facts: ConfigFacts, from| {
        let (mode, changes) = graphs::apply_config_overrides(from, &facts);
        (
            mode,
            changes.iter().map(|change| change.to).collect::<Vec<_>>(),
        )
    };
    use CudagraphMode::{Full, FullAndPiecewise, FullDecodeOnly, None, Piecewise};
    let none = ConfigFacts::default();
    for mode in CudagraphMode::ALL {
        assert_eq!(to(none, *mode), (*mode, vec![]));
    }
    assert_eq!(
        to(
            ConfigFacts {
                pooling: true,
                ..none
            },
            Full
        ),
        (Piecewise, vec![Piecewise])
    );
    assert_eq!(
        to(
            ConfigFacts {
                pooling: true,
                ..none
            },
            Piecewise
        ),
        (Piecewise, vec![])
    );
    let encoder_decoder = ConfigFacts {
        encoder_decoder: true,
        ..none
    };
    assert_eq!(
        to(encoder_decoder, FullAndPiecewise),
        (FullDecodeOnly, vec![FullDecodeOnly])
    );
    let connector = ConfigFacts {
        connector_requires_piecewise: true,
        no_piecewise: true,
        ..none
    };
    assert_eq!(
        to(connector, FullAndPiecewise),
        (None, vec![Piecewise, None])
    );
    let speculation = ConfigFacts {
        dynamic_speculation_v1: true,
        ..none
    };
    assert_eq!(
        to(speculation, FullDecodeOnly),
        (Piecewise, vec![Piecewise])
    );
    assert_eq!(
        to(
            ConfigFacts {
                enforce_eager: true,
                ..none
            },
            Full
        ),
        (None, vec![None])
    );
    assert_eq!(
        to(
            ConfigFacts {
                no_piecewise: true,
                ..none
            },
            FullAndPiecewise
        ),
        (FullDecodeOnly, vec![FullDecodeOnly])
    );
}

#[test]
fn weakest_support_is_the_first_strictly_weaker_one() {
    use CudagraphSupport::{Always, Never, UniformBatch};
    let weakest = |supports: &[CudagraphSupport]| {
        let made = graphs::weakest_support(supports.iter().copied());
        (made.support, made.group)
    };
    assert_eq!(weakest(&[]), (Always, None));
    assert_eq!(
        weakest(&[Always, UniformBatch, UniformBatch]),
        (UniformBatch, Some(1))
    );
    assert_eq!(weakest(&[UniformBatch, Never, Always]), (Never, Some(1)));
}

#[test]
fn large_decode_graphs_have_a_twin_of_two_micro_batches() {
    let ubatching = UbatchConfig {
        use_ubatching: true,
        dbo_decode_token_threshold: 32,
        dbo_prefill_token_threshold: 512,
    };
    let manager = CudagraphManager::new(&ManagerConfig {
        mode: CudagraphMode::FullDecodeOnly,
        decode_query_lens: &[1],
        varlen_decode: false,
        max_num_reqs: 64,
        capture_sizes: &[16, 32, 64],
        max_capture_size: 64,
        lora_cases: &[0],
        ubatching: Some(ubatching),
    });
    let batch = |num_reqs, num_ubatches| BatchQuery {
        num_reqs,
        num_tokens: num_reqs,
        uniform_token_count: Some(1),
        num_active_loras: 0,
        max_query_len: Some(1),
        num_ubatches,
    };
    let found = |num_reqs, num_ubatches| {
        let graph = manager.dispatch(&batch(num_reqs, num_ubatches));
        (graph.cg_mode, graph.num_tokens, graph.num_ubatches)
    };
    assert_eq!(found(30, 2), (RuntimeMode::Full, 32, 2));
    assert_eq!(found(30, 1), (RuntimeMode::Full, 32, 1));
    assert_eq!(found(10, 2), (RuntimeMode::Full, 32, 2));
    assert_eq!(manager.capture_order(RuntimeMode::Full).len(), 5);
}

#[test]
fn decode_graphs_take_prefills_of_one_token_with_context() {
    assert!(graphs::decode_graph_eligible(
        &[1, 1],
        &[10, 10],
        &[false, true],
        false
    ));
    assert!(!graphs::decode_graph_eligible(
        &[1, 1],
        &[10, 0],
        &[false, true],
        false
    ));
    assert!(!graphs::decode_graph_eligible(
        &[1, 2],
        &[10, 5],
        &[false, true],
        false
    ));
    assert!(!graphs::decode_graph_eligible(
        &[1, 1],
        &[10, 10],
        &[false, false],
        true
    ));
    assert_eq!(graphs::uniform_token_count(true, 12, 3, 4), Some(4));
    assert_eq!(graphs::uniform_token_count(true, 11, 3, 4), None);
    assert_eq!(graphs::uniform_token_count(false, 12, 3, 4), None);
    // One eager rank makes all ranks eager.
    assert_eq!(
        graphs::agree_across_ranks([RuntimeMode::Full, RuntimeMode::Piecewise]),
        RuntimeMode::Piecewise
    );
    assert_eq!(
        graphs::agree_across_ranks([RuntimeMode::Full, RuntimeMode::None]),
        RuntimeMode::None
    );
}

#[test]
fn fast_prefill_is_for_the_trailing_layers_that_share_a_cache() {
    let layer = |name, shares_kv_cache, is_draft| SharingLayer {
        name,
        shares_kv_cache,
        is_draft,
    };
    let layers = [
        layer("0", false, false),
        layer("1", true, false),
        layer("2", false, false),
        layer("3", true, false),
        layer("draft", false, true),
        layer("4", true, false),
    ];
    assert_eq!(batch::fast_prefill_layers(&layers), ["3", "4"]);
    assert_eq!(batch::fast_prefill_layers(&layers[..3]), Vec::<&str>::new());
}

#[test]
fn fast_prefill_is_armed_with_padded_logits_indices() {
    let arm = |any_prefill, full_or_cut| {
        batch::arm_fast_prefill(
            &[14, 18, 19, 27],
            &[0, 15, 20, 28],
            &[1, 2, 8],
            any_prefill,
            full_or_cut,
        )
    };
    let (padded, armed) = arm(true, false).expect("armed");
    assert_eq!(padded, [14, 18, 19, 27, 27, 27, 27, 27]);
    assert_eq!(
        (
            armed.num_logits_indices,
            armed.max_logits_per_req,
            armed.num_logits_indices_padded
        ),
        (4, 2, 8)
    );
    assert_eq!(arm(false, false), None);
    assert_eq!(arm(true, true), None);
    let (unpadded, _) =
        batch::arm_fast_prefill(&[0, 1, 2], &[0, 3], &[1, 2], true, false).expect("armed");
    assert_eq!(unpadded, [0, 1, 2]);
}

#[test]
fn thresholds_follow_speculation_and_context_parallelism() {
    let config = |json: serde_json::Value| -> timetable_attention::types::BuilderConfig {
        let mut base = serde_json::json!({
            "kv_cache_spec": {
                "kind": "FULL_ATTENTION", "block_size": 16, "num_kv_heads": 1, "head_size": 64, "head_size_v": 64,
                "dtype": "float16", "sliding_window": null, "attention_chunk_size": null, "dcp_sharded": true,
                "mamba": null,
            },
            "layer_names": [],
            "attention": {
                "num_heads": 1, "scale": 1.0, "logits_soft_cap": null, "sliding_windows": [], "model_dtype": "float16",
                "kv_cache_dtype": "auto", "kv_cache_layout": "LBNHC", "has_sinks": false, "use_rswa": false,
                "rswa_window": 0, "kv_lora_rank": 0, "qk_rope_head_dim": 0,
            },
            "scheduler": {
                "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, "max_num_blocks_per_req": 4,
                "num_speculative_tokens": 0, "parallel_drafting": false,
            },
            "cudagraph": {"mode": "NONE", "capture_sizes": [], "max_capture_size": 0},
            "parallel": {
                "dcp_world_size": 1, "dcp_rank": 0, "cp_kv_cache_interleave_size": 1, "prefill_context_parallel": false,
            },
            "device": {
                "compute_capability": [9, 0], "num_workers": 1, "ctas_per_worker": 1, "flash_attn_version": 3,
                "trtllm_attention": false, "xqa": false,
            },
            "batch_invariant": false,
            "max_num_splits": 1,
            "model_runner_v2": true,
            "options": [],
        });
        for (path, value) in json.as_object().expect("changes") {
            *base
                .pointer_mut(path)
                .expect("a field of the configuration") = value.clone();
        }
        serde_json::from_value(base).expect("a configuration")
    };
    use timetable_attention::types::batch::{
        effective_reorder_threshold, max_decode_query_len, reorder_batch_threshold,
    };
    let plain = config(serde_json::json!({}));
    assert_eq!(
        (
            max_decode_query_len(&plain),
            reorder_batch_threshold(&plain, 128, true, false)
        ),
        (1, 128)
    );
    let drafts = config(serde_json::json!({"/scheduler/num_speculative_tokens": 3}));
    assert_eq!(max_decode_query_len(&drafts), 4);
    assert_eq!(reorder_batch_threshold(&drafts, 1, true, false), 4);
    assert_eq!(reorder_batch_threshold(&drafts, 1, false, false), 1);
    let parallel = config(serde_json::json!({
        "/scheduler/num_speculative_tokens": 3, "/scheduler/parallel_drafting": true, "/model_runner_v2": false,
    }));
    assert_eq!(max_decode_query_len(&parallel), 7);
    let dcp = config(
        serde_json::json!({"/scheduler/num_speculative_tokens": 3, "/parallel/dcp_world_size": 2}),
    );
    assert_eq!(reorder_batch_threshold(&dcp, 512, true, false), 1);
    assert_eq!(reorder_batch_threshold(&dcp, 512, true, true), 512);
    assert_eq!(
        effective_reorder_threshold([None, Some(4), Some(1), None]),
        Some(1)
    );
    assert_eq!(effective_reorder_threshold([None, None]), None);
}
