//! Specs and attention groups: sizes, keys, order, sharing, errors; and that grouping partitions the layers.

use proptest::prelude::*;
use timetable_attention::group::{
    AttentionLayer, BackendClass, GroupBuilders, GroupError, KvCacheGroup, LayerMap,
    attention_groups, kv_cache_groups,
};
use timetable_attention::spec::{
    CacheSpec, ChunkedLocalAttentionSpec, CrossAttentionSpec, FullAttentionSpec, MambaSpec,
    MlaAttentionSpec, SlidingWindowSpec, SpecError, UniformTypeKvCacheSpecs,
};
use timetable_attention::types::{Dtype, KvCacheSpecKind, MambaCacheMode, MambaType};

fn full(head_size: u32) -> CacheSpec {
    FullAttentionSpec::new(16, 2, head_size, Dtype::Bfloat16).into()
}

fn window(tokens: u32) -> CacheSpec {
    SlidingWindowSpec::new(16, 2, 64, Dtype::Bfloat16, tokens).into()
}

fn layer(name: &str, backend: &str, num_heads: u32, spec: CacheSpec) -> AttentionLayer {
    AttentionLayer {
        name: name.to_owned(),
        backend: BackendClass::new(backend, backend),
        num_heads,
        spec,
        kv_sharing_target: None,
    }
}

#[test]
fn page_sizes_follow_the_formula() {
    assert_eq!(full(64).page_size_bytes(), 2 * 16 * (64 + 64) * 2);
    assert_eq!(window(128).page_size_bytes(), full(64).page_size_bytes());
    let mut padded = FullAttentionSpec::new(16, 2, 64, Dtype::Float32);
    padded.attention.page_size_padded = Some(20_000);
    assert_eq!(padded.page_size_bytes(), 20_000);
    assert_eq!(CacheSpec::from(padded.clone()).validate(), Ok(()));
    padded.attention.page_size_padded = Some(10);
    assert_eq!(
        CacheSpec::from(padded).validate(),
        Err(SpecError::PaddedTooSmall {
            padded: 10,
            real: 16_384
        })
    );
    let mut mla = MlaAttentionSpec::new(64, 576, Dtype::Bfloat16);
    assert_eq!(mla.page_size_bytes(), 64 * 576 * 2);
    mla.cache_dtype_str = Some("fp8_ds_mla".to_owned());
    assert_eq!(mla.page_size_bytes(), 64 * 656);
    mla.alignment = Some(576);
    assert_eq!(mla.page_size_bytes(), (64_u64 * 656).div_ceil(576) * 576);
    let mamba = MambaSpec::new(
        64,
        MambaType::Mamba2,
        vec![vec![3, 128], vec![8, 16, 64]],
        vec![Dtype::Bfloat16, Dtype::Float32],
    );
    assert_eq!(
        CacheSpec::from(mamba).page_size_bytes(),
        3 * 128 * 2 + 8 * 16 * 64 * 4
    );
}

#[test]
fn blocks_per_request() {
    let spec = full(64);
    assert_eq!(spec.max_num_blocks_per_req(1000, 1), 63);
    assert_eq!(spec.max_num_blocks_per_req(1000, 4), 16);
    // A window bounds what a request holds at once, not the width of its row.
    let spec = window(100);
    assert_eq!(spec.max_num_blocks_per_req(1000, 1), 63);
    assert_eq!(
        spec.max_admission_blocks(1000, 21, 1),
        120_u32.div_ceil(16) + 1
    );
    assert_eq!(
        spec.max_admission_blocks(50, 21, 1),
        50_u32.div_ceil(16) + 1
    );
    let chunked: CacheSpec = ChunkedLocalAttentionSpec::new(16, 2, 64, Dtype::Bfloat16, 100).into();
    assert_eq!(
        chunked.max_admission_blocks(1000, 21, 1),
        121_u32.div_ceil(16)
    );
    let mut mamba = MambaSpec::new(64, MambaType::Mamba1, vec![vec![4]], vec![Dtype::Float32]);
    mamba.num_speculative_blocks = 3;
    assert_eq!(mamba.max_num_blocks_per_req(1000), 4);
    mamba.mamba_cache_mode = MambaCacheMode::Align;
    assert_eq!(mamba.max_num_blocks_per_req(1000), 16 + 3);
    let FullAttentionSpec { attention, .. } = FullAttentionSpec::new(16, 2, 64, Dtype::Bfloat16);
    assert_eq!(
        CrossAttentionSpec { attention }.max_memory_usage_bytes(33),
        3 * 8192
    );
}

#[test]
fn the_contract_sees_the_kernel_block() {
    let record = window(100).to_contract(8).unwrap();
    assert_eq!(record.kind, KvCacheSpecKind::SlidingWindow);
    assert_eq!((record.block_size, record.sliding_window), (8, Some(100)));
    assert_eq!(
        (record.num_kv_heads, record.head_size, record.head_size_v),
        (2, 64, 64)
    );
    let uniform = UniformTypeKvCacheSpecs::new(vec![("a".into(), full(64))]).unwrap();
    assert_eq!(
        CacheSpec::from(uniform).to_contract(16),
        Err(SpecError::UniformHasNoSingleForm)
    );
}

#[test]
fn merging_gives_the_fields_texts() {
    let with = |window, chunk| {
        let mut spec = FullAttentionSpec::new(16, 2, 64, Dtype::Bfloat16);
        (spec.sliding_window, spec.attention_chunk_size) = (window, chunk);
        CacheSpec::from(spec)
    };
    assert_eq!(
        CacheSpec::merge(&[with(None, None), with(Some(9), None)]),
        Ok(with(Some(9), None))
    );
    let text = |specs: &[CacheSpec]| CacheSpec::merge(specs).unwrap_err().to_string();
    assert_eq!(
        text(&[with(Some(8), None), with(Some(9), None)]),
        "All attention layers in the same KV cache group must have the same window size."
    );
    assert_eq!(
        text(&[with(Some(8), None), with(None, Some(9))]),
        "Model with both sliding window layers and chunked local attention layers is not supported."
    );
    assert_eq!(
        text(&[full(64), full(128)]),
        "All attention layers in the same KV cache group must be the same."
    );
    assert_eq!(text(&[window(8), window(9)]), text(&[full(64), window(8)]));
}

#[test]
fn a_uniform_type_sums_pages_and_names_what_differs() {
    let uniform =
        UniformTypeKvCacheSpecs::new(vec![("a".into(), full(64)), ("b".into(), full(128))])
            .unwrap();
    assert_eq!(
        uniform.page_size_bytes(),
        full(64).page_size_bytes() + full(128).page_size_bytes()
    );
    let error =
        UniformTypeKvCacheSpecs::new(vec![("a".into(), window(8)), ("b".into(), window(9))])
            .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("layer b: sliding_window differs from layer a's")
    );
}

#[test]
fn groups_are_keyed_by_backend_spec_and_heads_in_first_seen_order() {
    let mut shared = layer("f", "FLASH_ATTN", 4, full(64));
    shared.kv_sharing_target = Some("a".to_owned());
    let layers = [
        layer("a", "FLASH_ATTN", 4, full(64)),
        layer("b", "FLASH_ATTN", 4, window(8)),
        layer("c", "FLASH_ATTN", 4, full(64)),
        layer("d", "FLASHINFER", 4, full(64)),
        layer("e", "FLASH_ATTN", 8, full(64)),
        shared,
    ];
    let kv_groups = kv_cache_groups(&layers).unwrap();
    assert_eq!(kv_groups.len(), 2);
    assert_eq!(kv_groups[0].layer_names, ["a", "c", "d", "e"]);
    let groups = attention_groups(&layers, &kv_groups).unwrap();
    let names: Vec<&[String]> = groups.iter().map(|g| g.layer_names.as_slice()).collect();
    assert_eq!(names, [&["a", "c", "f"][..], &["d"], &["e"], &["b"]]);
    let ids: Vec<usize> = groups.iter().map(|g| g.kv_cache_group_id).collect();
    assert_eq!(ids, [0, 0, 0, 1]);

    let map = LayerMap::new(&groups).unwrap();
    assert_eq!(map.len(), 6);
    let metadata = ["full", "flashinfer", "heads", "window"];
    assert_eq!(map.get(&metadata, "f"), Some(&"full"));
    assert_eq!(map.get(&metadata, "b"), Some(&"window"));
    assert_eq!(map.get(&metadata, "g"), None);

    let mut builders = GroupBuilders::create(&groups, 2, |g, u| {
        Ok::<_, ()>((g.layer_names[0].clone(), u))
    })
    .unwrap();
    assert_eq!(builders.iter_mut().count(), 8);
    assert_eq!(builders.get_mut(3, 1), Some(&mut ("b".to_owned(), 1)));
    assert_eq!(builders.get_mut(3, 2), None);
}

/// In a UniformType group the key has each layer's own spec, so layers of different sizes get builders of their own while
/// they share one block table.
#[test]
fn a_uniform_type_group_is_keyed_by_each_layers_spec() {
    let mut shared = layer("d", "FLASH_ATTN", 4, full(64));
    shared.kv_sharing_target = Some("b".to_owned());
    let layers = [
        layer("a", "FLASH_ATTN", 4, full(64)),
        layer("b", "FLASH_ATTN", 4, full(128)),
        layer("c", "FLASH_ATTN", 4, full(64)),
        shared,
    ];
    let members = layers[..3]
        .iter()
        .map(|l| (l.name.clone(), l.spec.clone()))
        .collect();
    let uniform = UniformTypeKvCacheSpecs::new(members).unwrap();
    let kv_groups = [KvCacheGroup {
        layer_names: vec!["a".into(), "b".into(), "c".into()],
        spec: uniform.into(),
    }];
    let groups = attention_groups(&layers, &kv_groups).unwrap();
    let names: Vec<&[String]> = groups.iter().map(|g| g.layer_names.as_slice()).collect();
    assert_eq!(names, [&["a", "c"][..], &["b", "d"]]);
    assert_eq!(groups[1].spec, full(128));
}

#[test]
fn a_wrapped_backend_is_another_group_of_the_same_name() {
    let mut wrapped = layer("b", "FLASH_ATTN", 4, full(64));
    wrapped.backend = wrapped.backend.wrapped("FastPrefill");
    let layers = [layer("a", "FLASH_ATTN", 4, full(64)), wrapped];
    let groups = attention_groups(&layers, &kv_cache_groups(&layers).unwrap()).unwrap();
    assert_eq!(groups.len(), 2);
    assert_eq!(groups[0].backend.name, groups[1].backend.name);
}

#[test]
fn bad_layers_give_the_fields_texts() {
    let sharing = |name: &str, target: &str| {
        let mut l = layer(name, "FLASH_ATTN", 4, full(64));
        l.kv_sharing_target = Some(target.to_owned());
        l
    };
    let text = |layers: &[AttentionLayer]| kv_cache_groups(layers).unwrap_err().to_string();
    assert_eq!(
        text(&[layer("a", "X", 1, full(8)), layer("a", "X", 1, full(8))]),
        "Duplicate layer name: a"
    );
    assert_eq!(
        text(&[sharing("a", "a")]),
        "Specified KV sharing target layer for a is not valid: target layer a cannot be the same as the current layer."
    );
    assert_eq!(
        text(&[sharing("a", "b"), layer("b", "X", 1, full(8))]),
        "Specified KV sharing target layer for a is not valid: target layer b must come before the current layer."
    );
    assert_eq!(
        text(&[sharing("a", "z")]),
        "Specified KV sharing target layer for a is not valid: target layer z is not a valid Attention layer in the model."
    );
    let layers = [layer("a", "X", 1, full(8)), layer("b", "X", 1, full(16))];
    let one = [KvCacheGroup {
        layer_names: vec!["a".into()],
        spec: full(8),
    }];
    assert_eq!(
        attention_groups(&layers, &one),
        Err(GroupError::Ungrouped { name: "b".into() })
    );
    let both = [KvCacheGroup {
        layer_names: vec!["a".into(), "b".into()],
        spec: full(8),
    }];
    assert_eq!(
        attention_groups(&layers, &both),
        Err(GroupError::SpecDiffers {
            name: "b".into(),
            group: 0
        })
    );
}

fn any_layers() -> impl Strategy<Value = Vec<AttentionLayer>> {
    let one = (
        0..3_usize,
        0..3_u32,
        0..4_usize,
        proptest::option::of(any::<proptest::sample::Index>()),
    );
    proptest::collection::vec(one, 1..12).prop_map(|choices| {
        let mut layers: Vec<AttentionLayer> = Vec::new();
        for (i, (backend, heads, spec, target)) in choices.into_iter().enumerate() {
            let spec = [full(64), full(128), window(8), window(9)][spec].clone();
            let name = ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"][backend];
            let mut l = layer(&format!("layer.{i}"), name, heads, spec);
            // Sharing one's predecessor's cache, itself perhaps shared.
            if let (Some(index), false) = (target, layers.is_empty()) {
                let target = index.get(&layers);
                l.spec = target.spec.clone();
                l.kv_sharing_target = Some(target.name.clone());
            }
            layers.push(l);
        }
        layers
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    /// Every layer stands in exactly one group, with its own backend, head count and spec; no two groups have one key.
    #[test]
    fn grouping_partitions_layers(layers in any_layers()) {
        let kv_groups = kv_cache_groups(&layers).unwrap();
        let groups = attention_groups(&layers, &kv_groups).unwrap();
        let map = LayerMap::new(&groups).unwrap();
        prop_assert_eq!(map.len(), layers.len());
        let total: usize = groups.iter().map(|g| g.layer_names.len()).sum();
        prop_assert_eq!(total, layers.len());
        for l in &layers {
            let group = &groups[map.group_of(&l.name).unwrap()];
            prop_assert_eq!(&group.backend, &l.backend);
            prop_assert_eq!(group.num_heads, l.num_heads);
            prop_assert_eq!(&group.spec, &l.spec);
            prop_assert_eq!(&kv_groups[group.kv_cache_group_id].spec, &l.spec);
        }
        for (i, a) in groups.iter().enumerate() {
            for b in &groups[i + 1..] {
                prop_assert!(
                    (&a.backend, &a.spec, a.num_heads, a.kv_cache_group_id)
                        != (&b.backend, &b.spec, b.num_heads, b.kv_cache_group_id)
                );
            }
        }
    }
}
