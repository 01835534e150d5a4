//! Layouts: names, properties, resolution and its errors.

use timetable_attention::layout::{
    DEFAULT_LAYOUTS, LayoutCell, LayoutError, LayoutRequest, block_compact, block_contiguous,
    block_outermost, flashinfer_layout, layer_compact, layout_strides_bytes, list, name, parse,
    resolve_layout,
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
