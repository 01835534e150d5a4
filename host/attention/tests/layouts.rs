//! Layouts: names, properties, resolution and its errors.

use proptest::prelude::*;
use timetable_attention::kernel_block::KernelBlockMap;
use timetable_attention::layout::{
    DEFAULT_LAYOUTS, LayoutCell, LayoutError, LayoutRequest, block_compact, block_contiguous,
    block_outermost, flashinfer_layout, kernel_block_stride, kv_cache_shape_bytes, layer_compact,
    layout_strides_bytes, list, name, parse, resolve_layout, supported_layouts,
};
use timetable_attention::spec::{
    CacheSpec, FullAttentionSpec, MlaAttentionSpec, UniformTypeKvCacheSpecs,
};
use timetable_attention::types::{Dtype, KvCacheLayout as L};

fn full(head_size: u32) -> CacheSpec {
    FullAttentionSpec::new(16, 2, head_size, Dtype::Bfloat16).into()
}

fn request<'a>(workers: &'a [Vec<L>], specs: &'a [CacheSpec]) -> LayoutRequest<'a> {
    LayoutRequest {
        configured: None,
        workers,
        specs,
        environment: None,
        connector_prefers: None,
    }
}

#[test]
fn names_aliases_and_properties() {
    for layout in L::ALL {
        assert_eq!(parse(name(*layout)), Ok(*layout));
    }
    assert_eq!((parse("NHD"), parse("HND")), (Ok(L::Lbnhc), Ok(L::Lbhnc)));
    assert_eq!(
        parse("XYZ").unwrap_err().to_string(),
        "Unknown KV cache layout 'XYZ'. Valid layouts: ['LBHNC', 'LBNHC', 'LHBNC', 'BLHNC', 'BLNHC', 'BHLNC']."
    );
    let of = |f: fn(L) -> bool| L::ALL.iter().copied().filter(|l| f(*l)).collect::<Vec<_>>();
    assert_eq!(of(layer_compact), [L::Lbnhc, L::Lbhnc, L::Lhbnc]);
    assert_eq!(of(block_compact), [L::Lbnhc, L::Lbhnc, L::Blhnc, L::Blnhc]);
    assert_eq!(of(block_outermost), [L::Blhnc, L::Blnhc, L::Bhlnc]);
    assert_eq!(of(block_contiguous), [L::Lbhnc, L::Blhnc]);
    assert_eq!(flashinfer_layout(L::Blnhc), Some("NHD"));
    assert_eq!(flashinfer_layout(L::Bhlnc), Some("HND"));
    assert_eq!(flashinfer_layout(L::Lhbnc), None);
}

#[test]
fn strides_cover_the_allocation_once() {
    let shape = [3, 2, 4, 8];
    for layout in L::ALL {
        let strides = layout_strides_bytes(*layout, 5, shape);
        let mut axes: Vec<(u64, u64)> = strides.into_iter().zip([5, 3, 2, 4, 8]).collect();
        axes.sort_unstable();
        let mut expected = 1;
        for (stride, size) in axes {
            assert_eq!(stride, expected, "{layout:?}");
            expected *= size;
        }
        assert_eq!(expected, 5 * 3 * 2 * 4 * 8);
    }
}

#[test]
fn resolution_in_the_fields_order() {
    let workers = vec![DEFAULT_LAYOUTS.to_vec(); 2];
    let same = [full(64), full(64)];
    let base = request(&workers, &same);
    let layout = |r: LayoutRequest<'_>| resolve_layout(&r).unwrap().layout;
    assert_eq!(layout(base), L::Lbnhc);
    assert_eq!(
        layout(LayoutRequest {
            configured: Some(L::Lhbnc),
            ..base
        }),
        L::Lhbnc
    );
    assert_eq!(
        layout(LayoutRequest {
            environment: Some(L::Bhlnc),
            ..base
        }),
        L::Bhlnc
    );
    assert_eq!(
        layout(LayoutRequest {
            connector_prefers: Some(L::Blhnc),
            ..base
        }),
        L::Blhnc
    );

    let mixed = [full(64), full(128)];
    let base = request(&workers, &mixed);
    let asked = LayoutRequest {
        environment: Some(L::Bhlnc),
        ..base
    };
    assert_eq!(
        resolve_layout(&asked).unwrap_err().to_string(),
        "VLLM_KV_CACHE_LAYOUT=BHLNC does not satisfy every supported set; valid layouts: ['LBNHC', 'LBHNC', 'BLNHC', 'BLHNC']."
    );
    let preferred = LayoutRequest {
        connector_prefers: Some(L::Bhlnc),
        ..base
    };
    assert_eq!(
        resolve_layout(&preferred).unwrap().warning.unwrap(),
        "KV connector cache layout BHLNC does not satisfy every supported set; valid layouts: ['LBNHC', 'LBHNC', 'BLNHC', 'BLHNC']. Using LBNHC instead."
    );
    // Members of a UniformType count one by one.
    let uniform =
        UniformTypeKvCacheSpecs::new(vec![("a".into(), full(64)), ("b".into(), full(128))])
            .unwrap();
    let uniform = [uniform.into()];
    let narrow = vec![vec![L::Lhbnc, L::Bhlnc]];
    assert_eq!(
        resolve_layout(&request(&narrow, &uniform))
            .unwrap_err()
            .to_string(),
        "Specs with mixed HNC shapes need a block-compact layout, but none is in every supported set: [['LHBNC', 'BHLNC']]"
    );
    let mut replicated = MlaAttentionSpec::new(16, 576, Dtype::Bfloat16);
    replicated.attention.dcp_sharded = false;
    let specs = [full(64), replicated.into()];
    assert_eq!(
        resolve_layout(&request(&workers, &specs)).unwrap().layout,
        L::Blnhc
    );
    let narrow = vec![vec![L::Lbhnc]];
    assert_eq!(
        resolve_layout(&request(&narrow, &specs))
            .unwrap_err()
            .to_string(),
        "DCP with a replicated draft and mixed KV page sizes requires a block-outer KV cache layout; supported sets: [['LBHNC']]"
    );
}

#[test]
fn workers_must_report_and_agree() {
    let specs = [full(64)];
    assert_eq!(
        resolve_layout(&request(&[], &specs)),
        Err(LayoutError::NoWorker)
    );
    let differ = vec![vec![L::Lbhnc], vec![L::Lbnhc]];
    assert_eq!(
        resolve_layout(&request(&differ, &specs))
            .unwrap_err()
            .to_string(),
        "Workers disagree on supported KV cache layouts: [['LBHNC'], ['LBNHC']]."
    );
    assert_eq!(list(&[]), "[]");
}

#[test]
fn a_layout_is_set_once() {
    let mut cell = LayoutCell::default();
    assert_eq!(
        cell.get().unwrap_err().to_string(),
        "KV cache layout has not been resolved yet; it is resolved once by the engine core (resolve_kv_cache_layout) unless explicitly set by the user."
    );
    cell.set(L::Lbhnc).unwrap();
    cell.set(L::Lbhnc).unwrap();
    assert_eq!(
        cell.set(L::Blhnc).unwrap_err().to_string(),
        "KV cache layout is already resolved to LBHNC; cannot change it to BLHNC."
    );
    assert_eq!(cell.get(), Ok(L::Lbhnc));
}

#[test]
fn only_dense_blocks_are_split() {
    let spec: CacheSpec = FullAttentionSpec::new(256, 2, 64, Dtype::Bfloat16).into();
    let stride = |layout| kernel_block_stride(layout, 2, &spec, 64);
    assert_eq!(stride(L::Lbnhc), Ok(0));
    assert_eq!(stride(L::Lbhnc), Ok(0));
    assert_eq!(stride(L::Blhnc), Ok(8));
    assert_eq!(stride(L::Blnhc), Ok(8));
    // Unsplit blocks may lie anywhere.
    assert_eq!(kernel_block_stride(L::Bhlnc, 2, &spec, 256), Ok(0));
    let page = 2 * 256 * 128 * 2;
    assert_eq!(
        stride(L::Bhlnc).unwrap_err().to_string(),
        format!(
            "The resolved KV cache layout (BHLNC) does not store blocks as dense, unpadded pages (block stride {} != page {page}), so a manager block cannot be split into 4 kernel blocks of 64 tokens. Reduce --block-size to 64 or choose a layout whose blocks are dense (e.g. LBNHC) without page padding.",
            2 * page
        )
    );
    assert!(stride(L::Lhbnc).is_err());
    let mut padded = FullAttentionSpec::new(256, 2, 64, Dtype::Bfloat16);
    padded.attention.page_size_padded = Some(page + 4096);
    let error = kernel_block_stride(L::Lbnhc, 2, &padded.into(), 64).unwrap_err();
    assert!(
        error
            .to_string()
            .contains(&format!("block stride {} != page {page}", page + 4096))
    );
    assert!(kernel_block_stride(L::Lbnhc, 2, &spec, 96).is_err());
}

fn any_set() -> impl Strategy<Value = Option<Vec<L>>> {
    let layouts = proptest::sample::subsequence(L::ALL.to_vec(), 1..=6).prop_shuffle();
    proptest::option::of(layouts)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    /// What is supported is in every declared set; nothing is supported only if the sets share nothing.
    #[test]
    fn supported_layouts_satisfy_every_backend(sets in proptest::collection::vec(any_set(), 0..5)) {
        let declared: Vec<Option<&[L]>> = sets.iter().map(Option::as_deref).collect();
        let shared: Vec<L> = L::ALL
            .iter()
            .copied()
            .filter(|l| sets.iter().flatten().all(|s| s.contains(l)))
            .collect();
        match supported_layouts(&declared) {
            Ok(mut layouts) => {
                prop_assert!(!layouts.is_empty());
                layouts.sort_unstable();
                prop_assert_eq!(layouts, shared);
            }
            Err(_) => prop_assert!(shared.is_empty()),
        }
    }

    /// A token's bytes are the same, seen through manager blocks of a dense layout or through kernel blocks with the stride
    /// that the layout asks for: pages of one layer, other layers' pages stepped over.
    #[test]
    fn kernel_pages_tile_the_layers_own_pages(
        layers in 1..5_u32,
        ratio in 2..6_u32,
        block in 0..50_i32,
        packed in any::<bool>(),
    ) {
        let layout = if packed { L::Blnhc } else { L::Lbnhc };
        let spec: CacheSpec =
            FullAttentionSpec::new(16 * ratio, 2, 8, Dtype::Bfloat16).into();
        let shape = kv_cache_shape_bytes(&spec, 50, 16 * ratio);
        let page = shape[1] * shape[2] * shape[3];
        let stride = kernel_block_stride(layout, layers, &spec, 16).unwrap();
        let map = KernelBlockMap::new(16 * ratio, 16, stride, 50).unwrap();
        let mut out = vec![0; ratio as usize];
        map.rewrite(&[block], &mut out);
        let block_stride = layout_strides_bytes(layout, layers, shape)[1];
        for (j, kernel_block) in out.iter().enumerate() {
            let through_kernel = *kernel_block as u64 * (page / u64::from(ratio));
            let through_manager = block as u64 * block_stride + j as u64 * (page / u64::from(ratio));
            prop_assert_eq!(through_kernel, through_manager);
        }
    }
}
