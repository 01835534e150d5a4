//! The embedded components do what their native twins do, through the sandbox.

mod support;

use support::{batch, config, config_of};
use timetable_attention::{BuildFault, MetadataBuilder};
use timetable_reference::{Embedded, component, components, native_twin};
use timetable_sandbox::{Component, Limits, Sandbox, WasmBuilder};
use timetable_types::{
    BuilderConfig, CaptureShape, ErrorKind, Family, KvCacheSpecKind, MambaCacheMode, MambaSpec,
    MambaType,
};

/// Configurations that a component serves: one, or of a family that keeps states each type of layer, and drafts.
fn configs(embedded: &Embedded) -> Vec<BuilderConfig> {
    if embedded.family != Family::Mamba {
        return vec![config_of(embedded.family)];
    }
    let of_type = |mamba_type, drafts| {
        let mut config = config();
        config.kv_cache_spec.kind = KvCacheSpecKind::Mamba;
        config.kv_cache_spec.mamba = Some(MambaSpec {
            mamba_type,
            cache_mode: MambaCacheMode::None,
            num_speculative_blocks: drafts,
            chunk_size: 64,
        });
        config.scheduler.num_speculative_tokens = drafts;
        config
    };
    let mut configs: Vec<_> = MambaType::ALL
        .iter()
        .map(|mamba_type| of_type(*mamba_type, 0))
        .collect();
    configs.extend([of_type(MambaType::Mamba2, 3), of_type(MambaType::Gdn, 3)]);
    configs
}

fn sandboxed(
    sandbox: &Sandbox,
    embedded: &Embedded,
    config: &BuilderConfig,
) -> Result<WasmBuilder, BuildFault> {
    let component = sandbox
        .load(embedded.bytes)
        .expect("a reference component loads");
    assert_eq!(component.family(), embedded.family);
    WasmBuilder::new(&component, config)
}

#[test]
fn every_component_agrees_with_its_native_twin() {
    let sandbox = Sandbox::new(Limits::default()).expect("the sandbox starts");
    for embedded in components() {
        let component = sandbox
            .load(embedded.bytes)
            .expect("a reference component loads");
        for config in configs(embedded) {
            agrees(&component, embedded.name, &config);
        }
    }
}

fn agrees(component: &Component, name: &str, config: &BuilderConfig) {
    let mut guest = WasmBuilder::new(component, config).expect("a reference component starts");
    let mut twin = native_twin(name, config).expect("the twin starts");
    assert_eq!(guest.info(), twin.info());
    for (num_reqs, query_len) in [(64, 1), (3, 700)] {
        let shape = CaptureShape {
            num_tokens: num_reqs * query_len,
            num_reqs,
            max_query_len: query_len,
            uniform_query_len: Some(query_len),
        };
        assert_eq!(
            guest.launch_promise(&shape),
            twin.launch_promise(&shape),
            "{name}"
        );
    }
    for (decodes, prefills, seed) in [
        (1, 0, 1),
        (256, 0, 2),
        (1024, 0, 3),
        (100, 7, 4),
        (0, 3, 5),
        (0, 0, 6),
        (1, 0, 7),
    ] {
        let common = batch(decodes, prefills, seed);
        let batch = format!("{name}, {decodes} decodes and {prefills} prefills");
        for fast in [false, true] {
            let built = guest.build(&common, fast);
            assert_eq!(built, twin.build(&common, fast), "{batch}");
            if let (Ok(metadata), true) = (built, guest.info().supports_update_block_table) {
                assert_eq!(
                    guest.update_block_table(&metadata, &common),
                    twin.update_block_table(&metadata, &common),
                    "{batch}"
                );
            }
        }
        assert_eq!(
            guest.build_for_drafting(&common, 1),
            twin.build_for_drafting(&common, 1),
            "{batch}"
        );
        assert_eq!(
            guest.build_for_cudagraph_capture(&common),
            twin.build_for_cudagraph_capture(&common),
            "{batch}"
        );
    }
}

/// The arena is rewound after every call: no memory cap is reached, however many calls.
#[test]
fn many_calls_stay_within_the_memory_cap() {
    let sandbox = Sandbox::new(Limits::default()).expect("the sandbox starts");
    for embedded in components() {
        let config = &configs(embedded)[0];
        let mut guest =
            sandboxed(&sandbox, embedded, config).expect("a reference component starts");
        let batches = [batch(256, 0, 9), batch(1024, 0, 10), batch(40, 5, 11)];
        let first: Vec<_> = batches
            .iter()
            .map(|common| guest.build(common, false))
            .collect();
        for _ in 0..1000 {
            for (common, first) in batches.iter().zip(&first) {
                assert_eq!(&guest.build(common, false), first, "{}", embedded.name);
            }
        }
    }
}

#[test]
fn a_configuration_that_a_builder_cannot_serve_is_declined_alike() {
    let sandbox = Sandbox::new(Limits::default()).expect("the sandbox starts");
    let mut bad_option = config();
    bad_option.options = vec![("splits".to_owned(), "many".to_owned())];
    let mut no_pages = config();
    no_pages.kv_cache_spec.block_size = 0;
    let mut sinks = config();
    sinks.attention.has_sinks = true;
    let mut ranks = config();
    ranks.parallel.dcp_world_size = 2;
    for (name, config, text) in [
        (
            "flash-attn-fixed-split",
            &bad_option,
            "option splits=\"many\" is not a whole number from 1 to 65536",
        ),
        ("flash-attn", &no_pages, "kv_cache_spec.block_size is 0"),
        ("flashinfer", &sinks, "does not support attention sinks"),
        ("triton-attn", &ranks, "DCP not supported"),
        (
            "flash-mla",
            &ranks,
            "Head dimension 64 is not supported by MLA.",
        ),
        ("mamba", &ranks, "kv_cache_spec.mamba is missing"),
    ] {
        let embedded = component(name).expect("a reference component");
        let twin = native_twin(name, config).err().expect("the twin declines");
        let guest = sandboxed(&sandbox, embedded, config)
            .err()
            .expect("the component declines");
        for error in [&twin, &guest] {
            assert!(error.to_string().contains(text), "{name}: {error}");
        }
    }
}

#[test]
fn an_empty_batch_under_context_parallelism_is_declined_and_the_instance_lives() {
    let sandbox = Sandbox::new(Limits::default()).expect("the sandbox starts");
    let mut config = config();
    config.parallel.dcp_world_size = 2;
    let embedded = component("flash-attn").expect("a reference component");
    let mut guest = sandboxed(&sandbox, embedded, &config).expect("a reference component starts");
    for _ in 0..3 {
        match guest.build(&batch(0, 0, 1), false) {
            Err(BuildFault::Declined(error)) => assert_eq!(error.kind, ErrorKind::InvalidValue),
            other => panic!("not declined: {other:?}"),
        }
        assert!(guest.build(&batch(5, 1, 1), false).is_ok());
    }
}

#[test]
fn an_unknown_builder_is_named_with_those_that_exist() {
    let error = native_twin("flash-attn-2", &config())
        .err()
        .expect("no such builder");
    assert!(
        error
            .to_string()
            .contains("flash-attn, flash-attn-fixed-split, flashinfer, flashinfer-window-sink, triton-attn, flash-mla, flash-attn-mla, triton-mla, mamba"),
        "{error}"
    );
}

/// A plan's cost follows its tiles, not its rows: one long prefill has hundreds.
#[test]
fn a_long_prefill_stays_within_its_fuel() {
    let sandbox = Sandbox::new(Limits::default()).expect("the sandbox starts");
    for embedded in components() {
        let config = &configs(embedded)[0];
        let mut guest =
            sandboxed(&sandbox, embedded, config).expect("a reference component starts");
        let mut twin = native_twin(embedded.name, config).expect("the twin starts");
        for context in [0, 500, 24_000] {
            let mut common = batch(0, 1, 1);
            common.query_start_loc_cpu = vec![0, 8192];
            common.seq_lens_cpu_upper_bound = vec![8192 + context];
            common.num_actual_tokens = 8192;
            common.max_query_len = 8192;
            common.max_seq_len = 8192 + context as u32;
            let built = guest.build(&common, false);
            let used = sandbox.limits().fuel_for_batch(1, 8192) - guest.fuel_left();
            println!(
                "{}: {used} fuel for 8,192 tokens after {context}",
                embedded.name
            );
            assert!(
                built == twin.build(&common, false),
                "{}: {:?}",
                embedded.name,
                built.err()
            );
        }
    }
}
