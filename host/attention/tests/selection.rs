//! Choosing a backend: texts, explicit choices, third parties' backends, the CPU device's column, the start-up report.

use proptest::prelude::*;
use timetable_attention::backend::{
    Backend, BackendRegistry, BackendRow, Capability, Configuration, Device, FlashAttnQuery, Hook,
    MambaBackend, ModelFacts, RegisterError, RegisteredBackend, check_kv_cache_dtype,
    flash_attn_version, row,
};
use timetable_attention::group::{
    AttentionLayer, attention_groups, choose_kernel_blocks, kv_cache_groups,
};
use timetable_attention::kernel_block::{KernelBlockError, KernelBlockSize};
use timetable_attention::report::{LseBases, RunFacts, Severity, StartupReport};
use timetable_attention::select::{
    Request, check_kind, explain, kind_of, priority, requested_for, select,
};
use timetable_attention::spec::{
    CacheSpec, FullAttentionSpec, KvQuantMode, MlaAttentionSpec, SlidingWindowSpec,
};
use timetable_attention::types::{Dtype, Family, MambaType};

fn cuda(major: u32, minor: u32) -> Device {
    Device::Cuda {
        capability: Capability::new(major, minor),
    }
}

fn ask<'a>(config: &'a Configuration, device: Device, requested: Option<&'a str>) -> Request<'a> {
    Request {
        config,
        num_heads: 8,
        device,
        requested,
    }
}

#[test]
fn an_explicit_choice_never_falls_back() {
    let registry = BackendRegistry::new();
    let config = Configuration::new(80, Dtype::Bfloat16);
    let error = select(&registry, &ask(&config, cuda(9, 0), Some("FLASHINFER"))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "Selected backend AttentionBackendEnum.FLASHINFER is not valid for this configuration. Reason: ['head_size not supported']"
    );
    let chosen = select(&registry, &ask(&config, cuda(9, 0), None)).unwrap();
    assert_eq!(chosen.row.name, "FLASH_ATTN");
    assert_eq!(
        chosen.log,
        "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'TRITON_ATTN', 'FLEX_ATTENTION']."
    );
    let chosen = select(&registry, &ask(&config, cuda(9, 0), Some("TRITON_ATTN"))).unwrap();
    assert_eq!(chosen.log, "Using TRITON_ATTN backend.");
}

#[test]
fn a_block_size_that_costs_a_better_backend_is_a_warning() {
    let registry = BackendRegistry::new();
    let mla = Configuration {
        use_mla: true,
        block_size: Some(16),
        model: ModelFacts::DEEPSEEK_R1,
        ..Configuration::new(576, Dtype::Bfloat16)
    };
    // On 10.0 every MLA backend before TRITON_MLA wants 32 or more; FLASHINFER_MLA fails for the block size alone.
    let chosen = select(&registry, &ask(&mla, cuda(10, 0), None)).unwrap();
    assert_eq!(chosen.row.name, "TRITON_MLA");
    assert_eq!(
        chosen.warning.as_deref(),
        Some(
            "--block-size 16 precluded higher-priority backend(s) FLASHINFER_MLA, CUTLASS_MLA. Using TRITON_MLA instead, which may result in reduced performance. Consider removing --block-size to auto-select the optimal block size."
        )
    );
    let unset = Configuration {
        block_size: None,
        ..mla
    };
    let chosen = select(&registry, &ask(&unset, cuda(10, 0), None)).unwrap();
    assert_eq!(
        (&*chosen.row.name, chosen.warning),
        ("FLASHINFER_MLA", None)
    );
}

#[test]
fn no_valid_backend_names_every_reason() {
    let registry = BackendRegistry::new();
    let config = Configuration {
        has_sink: true,
        ..Configuration::new(128, Dtype::Bfloat16)
    };
    let error = select(&registry, &ask(&config, Device::Cpu, None))
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "No valid attention backend found for cpu with AttentionSelectorConfig(head_size=128, dtype=torch.bfloat16, kv_cache_dtype=auto, block_size=None, use_mla=False, has_sink=True, use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False, attn_type=decoder, has_sliding_window=False, use_non_causal=False, use_batch_invariant=False, use_kv_connector=False, use_adaptive_verification=False, use_pcp=False, use_dcp=False, use_rswa=False). Reasons: {FLASH_ATTN: [attention sinks not supported], FLASHINFER: [attention sinks not supported], \
         TRITON_ATTN: [attention sinks not supported]}."
    );
}

#[test]
fn explain_says_why_not_for_each() {
    let registry = BackendRegistry::new();
    let config = Configuration::new(128, Dtype::Bfloat16);
    let answers = explain(&registry, &ask(&config, cuda(9, 0), None));
    assert_eq!(answers.len(), Backend::ALL.len());
    let chosen: Vec<&str> = answers
        .iter()
        .filter(|a| a.chosen)
        .map(|a| a.name.as_str())
        .collect();
    assert_eq!(chosen, ["FLASH_ATTN"]);
    let of = |name: &str| answers.iter().find(|a| a.name == name).unwrap();
    assert_eq!(of("FLASH_ATTN").why_not, None);
    assert_eq!(
        of("FLASHINFER").why_not.as_deref(),
        Some("valid, but FLASH_ATTN comes first")
    );
    assert_eq!(
        of("FLASHMLA").why_not.as_deref(),
        Some("head_size not supported; non-MLA not supported"),
    );
    assert_eq!(
        of("FLASH_ATTN_DIFFKV").why_not.as_deref(),
        Some("valid, but never chosen automatically: ask for it by name")
    );
    assert_eq!(
        of("CPU_ATTN").why_not.as_deref(),
        Some("CPU_ATTN runs on CPUs only")
    );
    assert!(answers.iter().all(|a| a.valid == a.reasons.is_empty()));
    assert!(answers.iter().all(|a| a.chosen != a.why_not.is_some()));

    let answers = explain(&registry, &ask(&config, cuda(9, 0), Some("FLASHMLA")));
    assert!(answers.iter().all(|a| !a.chosen));
    assert_eq!(
        answers[0].why_not.as_deref(),
        Some("valid, but FLASHMLA was asked for, and an explicit choice never falls back")
    );
}

#[test]
fn the_cpu_device_runs_its_own_column() {
    let registry = BackendRegistry::new();
    for (dtype, head_size) in [
        (Dtype::Float32, 64),
        (Dtype::Bfloat16, 80),
        (Dtype::Float32, 7),
    ] {
        let config = Configuration {
            block_size: Some(4),
            ..Configuration::new(head_size, dtype)
        };
        let chosen = select(&registry, &ask(&config, Device::Cpu, None)).unwrap();
        assert_eq!(chosen.row.name, "FLASH_ATTN");
        for name in ["FLASHINFER", "TRITON_ATTN"] {
            let chosen = select(&registry, &ask(&config, Device::Cpu, Some(name))).unwrap();
            assert_eq!(chosen.row.name, name);
        }
    }
    let config = Configuration::new(64, Dtype::Float32);
    let refused = |config: &Configuration, name| {
        let error = select(&registry, &ask(config, Device::Cpu, Some(name))).unwrap_err();
        error.to_string()
    };
    let remedy = "not run by the CPU device: choose FLASH_ATTN, FLASHINFER or TRITON_ATTN (--attention-backend)";
    assert!(refused(&config, "FLEX_ATTENTION").contains(remedy));
    assert!(refused(&config, "FLASHMLA").contains("non-MLA not supported"));
    let latent = Configuration {
        use_mla: true,
        ..Configuration::new(576, Dtype::Float32)
    };
    let remedy = "not run by the CPU device: choose FLASHMLA, FLASH_ATTN_MLA or TRITON_MLA (--attention-backend)";
    assert!(refused(&latent, "CUTLASS_MLA").contains(remedy));
    assert!(refused(&latent, "FLASH_ATTN").contains("MLA not supported"));
    // FLASHMLA's schedule counts blocks of 64 tokens.
    for (block_size, name) in [(64, "FLASHMLA"), (16, "FLASH_ATTN_MLA"), (4, "TRITON_MLA")] {
        let config = Configuration {
            block_size: Some(block_size),
            ..latent.clone()
        };
        let chosen = select(&registry, &ask(&config, Device::Cpu, None)).unwrap();
        assert_eq!(chosen.row.name, name);
    }
    let fp8 = Configuration {
        kv_cache_dtype: Some("fp8".to_owned()),
        ..Configuration::new(64, Dtype::Float32)
    };
    let answers = explain(&registry, &ask(&fp8, Device::Cpu, None));
    assert_eq!(answers[0].reasons, ["kv_cache_dtype not supported"]);
}

fn ring() -> RegisteredBackend {
    RegisteredBackend {
        row: BackendRow {
            name: "RING_ATTN".into(),
            full_cls_name: ("acme".into(), "RingBackend".into()),
            ..row(Backend::FlashAttn, Device::Cpu)
        },
        interface: "acme:attention/ring@0.1.0".to_owned(),
        family: Family::FlashAttn,
        verifier: Hook::new(3_u32),
        make_impl: Hook::new("an impl"),
    }
}

#[test]
fn a_third_party_registers_a_backend() {
    let mut registry = BackendRegistry::new();
    registry.register(ring()).unwrap();
    let config = Configuration::new(64, Dtype::Float32);
    let name = registry.parse("ring_attn").unwrap();
    assert_eq!(name.as_deref(), Some("RING_ATTN"));
    let chosen = select(&registry, &ask(&config, Device::Cpu, name.as_deref())).unwrap();
    assert_eq!(chosen.row.class_path(), "acme.RingBackend");
    let registered = registry.registered("RING_ATTN").unwrap();
    assert_eq!(registered.verifier.get::<u32>(), Some(&3));
    assert_eq!(registered.make_impl.get::<&str>(), Some(&"an impl"));
    assert_eq!(registered.make_impl.get::<u32>(), None);
    // It is never chosen automatically.
    let automatic = select(&registry, &ask(&config, Device::Cpu, None)).unwrap();
    assert_eq!(automatic.row.name, "FLASH_ATTN");
    let answers = explain(&registry, &ask(&config, Device::Cpu, None));
    assert!(
        answers
            .iter()
            .any(|a| a.name == "RING_ATTN" && a.valid && a.priority.is_none())
    );
    assert_eq!(registry.parse("auto"), Ok(None));
}

#[test]
fn registration_errors_are_the_fields() {
    let mut registry = BackendRegistry::new();
    let named = |name: &str| {
        let mut backend = ring();
        backend.row.name = name.to_owned().into();
        backend
    };
    assert_eq!(
        registry
            .register(named("FLASH_ATTN"))
            .unwrap_err()
            .to_string(),
        "Backend FLASH_ATTN already exists in AttentionBackendEnum. Use register_backend(AttentionBackendEnum.FLASH_ATTN, 'acme.RingBackend') to override."
    );
    for bad in ["ring", "1RING", "RING-ATTN", "", "AUTO"] {
        assert_eq!(
            registry.register(named(bad)).unwrap_err().to_string(),
            format!("Invalid or reserved backend name: {bad}")
        );
    }
    assert_eq!(
        registry.row("CUSTOM", Device::Cpu).unwrap_err(),
        RegisterError::CustomNotRegistered
    );
    assert_eq!(
        registry.row("CUSTOM", Device::Cpu).unwrap_err().to_string(),
        "Backend CUSTOM must be registered before use. Use register_backend(Backend.CUSTOM, 'your.module.YourClass')"
    );
    registry.register(named("CUSTOM")).unwrap();
    assert_eq!(registry.row("CUSTOM", Device::Cpu).unwrap().name, "CUSTOM");
    let unknown = registry.parse("flash").unwrap_err().to_string();
    assert!(
        unknown.starts_with("Unknown attention backend: 'flash'. Valid options are: FLASH_ATTN, ")
    );
    assert!(unknown.contains("CUSTOM"));

    // An override replaces the product's own, in automatic selection too, until it is cleared.
    registry.replace(named("FLASH_ATTN")).unwrap();
    assert!(registry.is_overridden("FLASH_ATTN"));
    let config = Configuration::new(64, Dtype::Float32);
    let chosen = select(&registry, &ask(&config, Device::Cpu, None)).unwrap();
    assert_eq!(chosen.row.class_path(), "acme.RingBackend");
    assert!(registry.clear_override("FLASH_ATTN"));
    let chosen = select(&registry, &ask(&config, Device::Cpu, None)).unwrap();
    assert_eq!(
        chosen.row.class_path(),
        "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    );
    assert!(registry.replace(named("NOBODY")).is_err());
}

#[test]
fn names_and_kinds_are_checked() {
    assert!(check_kv_cache_dtype("fp8_e4m3").is_ok());
    let error = check_kv_cache_dtype("fp9").unwrap_err().to_string();
    assert!(
        error.starts_with("Invalid kv_cache_dtype: fp9. Valid values are: ('auto', 'float16', ")
    );
    use timetable_attention::backend::AttentionType::{Decoder, EncoderDecoder, EncoderOnly};
    assert_eq!(kind_of(Decoder, false, true), "sliding_window");
    assert_eq!(kind_of(Decoder, true, true), "sliding_window_mla");
    assert_eq!(kind_of(EncoderOnly, false, false), "encoder_only_attention");
    assert_eq!(kind_of(EncoderDecoder, false, false), "cross_attention");
    assert_eq!(
        check_kind("mla").unwrap_err().to_string(),
        "Unknown KV cache group kind 'mla' in backend_per_kind. Valid kinds are: full_attention, sliding_window, mla_attention, sliding_window_mla, cross_attention, encoder_only_attention"
    );
    let registry = BackendRegistry::new();
    let per_kind = [("sliding_window".to_owned(), "triton_attn".to_owned())];
    let of = |kind| requested_for(&registry, Some("flashinfer"), &per_kind, kind).unwrap();
    assert_eq!(of("sliding_window").as_deref(), Some("TRITON_ATTN"));
    assert_eq!(of("full_attention").as_deref(), Some("FLASHINFER"));
    assert_eq!(MambaBackend::of(MambaType::Gdn).name(), "GDN_ATTN");
}

#[test]
fn flash_attention_versions() {
    let version = |major, head_size, block_size, has_sink| {
        flash_attn_version(&FlashAttnQuery {
            capability: Capability::new(major, 0),
            head_size,
            block_size,
            has_sink,
            use_mm_prefix: false,
        })
    };
    assert_eq!(version(8, 128, None, false), 2);
    assert_eq!(version(9, 256, None, false), 3);
    assert_eq!(version(9, 320, None, false), 4);
    assert_eq!(version(10, 128, Some(16), true), 4);
    assert_eq!(version(10, 192, None, false), 2);
    assert_eq!(version(10, 256, None, false), 4);
    assert_eq!(version(10, 256, Some(64), false), 2);
    assert_eq!(version(10, 256, Some(128), true), 2);
    assert_eq!(version(12, 64, None, false), 2);
}

fn layer(name: &str, backend: Backend, device: Device, spec: &CacheSpec) -> AttentionLayer {
    let row = row(backend, device);
    AttentionLayer {
        name: name.to_owned(),
        backend: row.class(),
        num_heads: 8,
        spec: row.customize_spec(spec),
        kv_sharing_target: None,
    }
}

#[test]
fn kernel_blocks_are_chosen_per_cache_group_then_per_attention_group() {
    let device = cuda(9, 0);
    let mla = || MlaAttentionSpec::new(256, 576, Dtype::Bfloat16).into();
    let layers = [
        layer("a", Backend::FlashMla, device, &mla()),
        layer("b", Backend::TritonMla, device, &mla()),
        layer(
            "c",
            Backend::FlashAttn,
            device,
            &SlidingWindowSpec::new(256, 2, 64, Dtype::Bfloat16, 100).into(),
        ),
    ];
    let kv_groups = kv_cache_groups(&layers).unwrap();
    let mut groups = attention_groups(&layers, &kv_groups).unwrap();
    let registry = BackendRegistry::new();
    let sizes = |g: &timetable_attention::group::AttentionGroup| {
        registry
            .row(&g.backend.name, device)
            .unwrap()
            .kernel_block_sizes_for(Some(&g.spec), device)
    };
    choose_kernel_blocks(&mut groups, &kv_groups, sizes, |_| false).unwrap();
    let chosen: Vec<Option<u32>> = groups.iter().map(|g| g.kernel_block_size).collect();
    assert_eq!(chosen, [Some(64), Some(64), None]);
    assert_eq!(groups[0].builder_spec().block_size(), 64);
    assert_eq!(groups[0].kernel_block_map(100).unwrap().ratio(), 4);
    assert_eq!(groups[2].builder_spec(), groups[2].spec);
    let error = choose_kernel_blocks(&mut groups, &kv_groups, sizes, |id| id == 0).unwrap_err();
    assert_eq!(
        error,
        KernelBlockError::PackedSplit {
            backend: "FLASHMLA".to_owned(),
            kernel_block_size: 64,
            block_size: 256
        }
    );
}

#[test]
fn two_flash_attention_kernels_fix_their_block_size() {
    let sizes = |device, head_size, block_size, quant| {
        let mut spec = FullAttentionSpec::new(block_size, 2, head_size, Dtype::Bfloat16);
        spec.attention.kv_quant_mode = quant;
        row(Backend::FlashAttn, device)
            .kernel_block_sizes_for(Some(&spec.into()), device)
            .into_owned()
    };
    let fp8 = KvQuantMode::Fp8PerTensor;
    assert_eq!(
        sizes(cuda(9, 0), 512, 256, fp8),
        [KernelBlockSize::Exact(64)]
    );
    assert_eq!(
        sizes(cuda(9, 0), 512, 256, KvQuantMode::None),
        [KernelBlockSize::MultipleOf(16)]
    );
    assert_eq!(
        sizes(cuda(10, 0), 256, 256, KvQuantMode::None),
        [KernelBlockSize::Exact(128)]
    );
    assert_eq!(
        sizes(cuda(10, 0), 256, 64, KvQuantMode::None),
        [KernelBlockSize::MultipleOf(16)]
    );
}

fn facts(device: Device) -> RunFacts<'static> {
    RunFacts {
        device,
        batch_invariant: false,
        supports_batch_invariance: &[],
        prefix_caching: true,
        max_num_splits: 32,
        dcp_world_size: 1,
        cp_kv_cache_interleave_size: 1,
        num_speculative_tokens: 0,
        selection_warnings: &[],
        graph_mode_changes: &[],
        lse_bases: &[],
        per_request_causal: None,
        unsplit_model: None,
    }
}

#[test]
fn the_report_names_each_layer_and_each_hazard() {
    let device = cuda(8, 0);
    let full = || FullAttentionSpec::new(16, 2, 64, Dtype::Bfloat16).into();
    let mut fp8 = FullAttentionSpec::new(16, 2, 64, Dtype::Uint8);
    fp8.attention.kv_quant_mode = KvQuantMode::Fp8PerTensor;
    let layers = [
        layer("l.0", Backend::FlashInfer, device, &full()),
        layer("l.1", Backend::FlashInfer, device, &full()),
        layer("l.2", Backend::TritonAttn, device, &fp8.into()),
    ];
    let groups = attention_groups(&layers, &kv_cache_groups(&layers).unwrap()).unwrap();
    let quiet = StartupReport::new(&groups[..1], &facts(device));
    assert_eq!(quiet.hazards, []);
    assert_eq!(quiet.refusal(), None);
    assert_eq!(
        quiet.to_string(),
        "l.0 … l.1 (2 layers): FLASHINFER (FULL_ATTENTION, metadata of `flashinfer`, 8 query heads, block 16 read as 16, 8192 bytes a page, plain view)\n"
    );
    let changes = ["CUDAGraphMode.FULL is not supported".to_owned()];
    let bases = [(
        0,
        LseBases {
            impl_on_e: false,
            merge_on_e: true,
        },
    )];
    let report = StartupReport::new(
        &groups,
        &RunFacts {
            num_speculative_tokens: 3,
            graph_mode_changes: &changes,
            lse_bases: &bases,
            ..facts(device)
        },
    );
    assert_eq!(report.layers.len(), 3);
    let codes: Vec<&str> = report.hazards.iter().map(|h| h.code).collect();
    assert_eq!(
        codes,
        [
            "lse_base",
            "fp8_before_sm89",
            "cudagraph_mode_changed",
            "flashinfer_plan_waits"
        ]
    );
    assert_eq!(report.refusal().unwrap().severity, Severity::Refusal);
    assert!(
        report.hazards[0]
            .message
            .contains("attention group 0 (FLASHINFER)")
    );
    assert!(report.hazards[1].message.starts_with(
        "FP8 KV cache is not supported by the Triton attention backend on cuda (compute capability 8.0); native FP8 (fp8e4nv) requires SM89+."
    ));

    let report = StartupReport::new(
        &groups[..1],
        &RunFacts {
            batch_invariant: true,
            supports_batch_invariance: &[false],
            ..facts(device)
        },
    );
    assert_eq!(
        report.refusal().unwrap().message,
        "VLLM batch_invariant mode is not supported for FLASHINFER."
    );
}

#[test]
fn an_fp8_cache_that_a_device_cannot_read_is_refused() {
    let refusal = |backend, device| {
        let mut fp8 = FullAttentionSpec::new(16, 2, 64, Dtype::Uint8);
        fp8.attention.kv_quant_mode = KvQuantMode::Fp8PerTensor;
        let layers = [layer("l.0", backend, device, &fp8.into())];
        let groups = attention_groups(&layers, &kv_cache_groups(&layers).unwrap()).unwrap();
        let report = StartupReport::new(&groups, &facts(device));
        report.refusal().map(|hazard| hazard.message.clone())
    };
    for device in [cuda(8, 0), cuda(8, 9), cuda(12, 0)] {
        assert_eq!(
            refusal(Backend::FlashAttn, device).as_deref(),
            Some("FlashAttention does not support fp8 kv-cache on this device.")
        );
    }
    for device in [cuda(9, 0), cuda(10, 0)] {
        assert_eq!(refusal(Backend::FlashAttn, device), None);
    }
    assert!(
        refusal(Backend::TritonAttn, cuda(8, 0))
            .is_some_and(|text| text.ends_with("Re-run with --kv-cache-dtype auto"))
    );
    assert_eq!(refusal(Backend::TritonAttn, cuda(8, 9)), None);
}

#[test]
fn flags_per_request_and_graphs_in_pieces_need_what_reads_them() {
    let refusals = |device, facts: &RunFacts<'_>| {
        let spec = FullAttentionSpec::new(16, 2, 64, Dtype::Bfloat16).into();
        let layers = [layer("l.0", Backend::FlashAttn, device, &spec)];
        let groups = attention_groups(&layers, &kv_cache_groups(&layers).unwrap()).unwrap();
        let hazards = StartupReport::new(&groups, facts).hazards;
        assert!(hazards.iter().all(|h| h.severity == Severity::Refusal));
        hazards.into_iter().map(|h| h.message).collect::<Vec<_>>()
    };
    let (hopper, cpu) = (cuda(9, 0), Device::Cpu);
    for (device, version, refused) in [
        (hopper, Some(3), true),
        (hopper, Some(4), false),
        (hopper, None, false),
        // The CPU device reads the flags itself.
        (cpu, Some(0), false),
    ] {
        let asked = RunFacts {
            per_request_causal: version,
            ..facts(device)
        };
        let expected: &[&str] = match refused {
            true => &["Per-sequence causal requires FA4. Current version: FA3"],
            false => &[],
        };
        assert_eq!(refusals(device, &asked), expected);
    }
    let unsplit = RunFacts {
        unsplit_model: Some(("LlamaForCausalLM", "PIECEWISE")),
        ..facts(hopper)
    };
    assert_eq!(
        refusals(hopper, &unsplit),
        [
            "LlamaForCausalLM: piecewise CUDA graphs (cudagraph_mode=PIECEWISE) unavailable, model is not torch-compiled and breakable CUDA graph is off. Set VLLM_USE_BREAKABLE_CUDAGRAPH=1 or cudagraph_mode=NONE/FULL."
        ]
    );
}

#[test]
fn a_dcp_interleave_that_flashinfer_mla_cannot_read_is_refused() {
    let device = cuda(10, 0);
    let spec = MlaAttentionSpec::new(64, 576, Dtype::Bfloat16).into();
    let layers = [layer("l", Backend::FlashInferMla, device, &spec)];
    let groups = attention_groups(&layers, &kv_cache_groups(&layers).unwrap()).unwrap();
    let report = StartupReport::new(
        &groups,
        &RunFacts {
            dcp_world_size: 2,
            cp_kv_cache_interleave_size: 64,
            ..facts(device)
        },
    );
    assert_eq!(
        report.refusal().unwrap().message,
        "FlashInfer MLA native DCP requires cp_kv_cache_interleave_size=1; got 64."
    );
}

fn any_configuration() -> impl Strategy<Value = Configuration> {
    let sizes = prop::sample::select(vec![7_u32, 64, 80, 128, 256, 512, 576]);
    let dtypes = prop::sample::select(vec![Dtype::Float16, Dtype::Bfloat16, Dtype::Float32]);
    let caches = prop::sample::select(vec![None, Some("auto"), Some("fp8"), Some("nvfp4")]);
    let blocks = prop::sample::select(vec![None, Some(16), Some(64), Some(24), Some(256)]);
    // Sparse choices, so that something is often valid.
    let flags = prop::collection::vec(prop::bool::weighted(0.15), 10);
    (sizes, dtypes, caches, blocks, flags).prop_map(|(head_size, dtype, cache, block_size, f)| {
        Configuration {
            kv_cache_dtype: cache.map(str::to_owned),
            block_size,
            use_mla: f[0],
            use_sparse: f[0] && f[1],
            has_sink: f[2],
            use_mm_prefix: f[3],
            has_sliding_window: f[4],
            use_non_causal: f[5],
            use_batch_invariant: f[6],
            use_pcp: f[7],
            use_dcp: f[8],
            use_rswa: f[9],
            model: ModelFacts::DEEPSEEK_R1,
            ..Configuration::new(head_size, dtype)
        }
    })
}

fn any_device() -> impl Strategy<Value = Device> {
    prop::sample::select(vec![
        Device::Cpu,
        cuda(7, 5),
        cuda(8, 0),
        cuda(9, 0),
        cuda(10, 0),
        cuda(12, 0),
    ])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    /// The choice is the first of the priority list without reasons, or an error; a choice by name is that name or an error;
    /// and what is explained agrees with what is chosen.
    #[test]
    fn a_choice_is_the_first_valid_one_or_the_one_asked_for(
        config in any_configuration(),
        device in any_device(),
        num_heads in prop::sample::select(vec![8_u32, 16, 128]),
        asked in prop::option::of(prop::sample::select(Backend::ALL.to_vec())),
    ) {
        let registry = BackendRegistry::new();
        let valid = |b: &Backend| row(*b, device).validate_configuration(&config, device).is_empty();
        let expected = match asked {
            Some(backend) => Some(backend).filter(valid),
            None => priority(&config, num_heads, device).into_iter().find(valid),
        };
        let request = Request { config: &config, num_heads, device, requested: asked.map(Backend::name) };
        let chosen = select(&registry, &request).ok().map(|s| s.row.name.to_string());
        prop_assert_eq!(chosen.as_deref(), expected.map(Backend::name));
        let answers = explain(&registry, &request);
        prop_assert_eq!(answers.len(), Backend::ALL.len());
        let explained: Vec<&str> =
            answers.iter().filter(|a| a.chosen).map(|a| a.name.as_str()).collect();
        prop_assert_eq!(explained, chosen.as_deref().into_iter().collect::<Vec<_>>());
        prop_assert!(answers.iter().all(|a| a.chosen != a.why_not.is_some()));
    }
}
