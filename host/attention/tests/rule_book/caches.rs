//! Cache shapes, layouts, kernel block sizes and block-table rewriting.

use serde_json::{Map, Value, json};
use timetable_attention::backend::{BackendRow, Capability, Device, row};
use timetable_attention::kernel_block::{
    BlockSizes, KernelBlockMap, select_common_block_size as select,
};
use timetable_attention::layout::{
    self, kv_cache_shape_bytes, layout_strides_bytes, supported_layouts,
};
use timetable_attention::spec::{CacheSpec, FullAttentionSpec, KvQuantMode, MlaAttentionSpec};
use timetable_attention::types::KvCacheLayout;

use crate::backends::{backend, dtype};
use crate::harness::{Tally, cases, error_text, text, uint};

const SM90: Device = Device::Cuda {
    capability: Capability::new(9, 0),
};

/// The spec that the recorder built before `customize_spec`.
fn spec(row: &BackendRow, input: &Value) -> CacheSpec {
    let block_size = uint(&input["block_size"]);
    let head_size = uint(&input["head_size"]);
    let dtype = dtype(text(&input["spec_dtype"]));
    let mut spec: CacheSpec = if row.flags.is_mla {
        MlaAttentionSpec::new(block_size, head_size, dtype).into()
    } else {
        FullAttentionSpec::new(block_size, uint(&input["num_kv_heads"]), head_size, dtype).into()
    };
    let mode = KvQuantMode::from_cache_dtype(text(&input["kv_cache_dtype"]));
    spec.attention_mut()
        .expect("an attention spec")
        .kv_quant_mode = mode;
    spec
}

pub fn kv_cache_shape() -> Tally {
    let mut tally = Tally::new("kv_cache_shape");
    for case in cases("kv_cache_shape") {
        let input = &case["input"];
        let row = row(backend(&input["backend"]), SM90);
        let spec = row.customize_spec(&spec(&row, input));
        let num_blocks = uint(&input["num_blocks"]);
        let shape = kv_cache_shape_bytes(&spec, num_blocks, spec.block_size());
        let strides: Map<String, Value> = KvCacheLayout::ALL
            .iter()
            .map(|l| {
                (
                    layout::name(*l).to_owned(),
                    json!(layout_strides_bytes(*l, 2, shape)),
                )
            })
            .collect();
        let got = json!({
            "num_head_slots": spec.num_heads(),
            "state_content_size_bytes": spec.state_content_size_bytes(),
            "page_size_bytes": spec.page_size_bytes(),
            "shape_bytes": shape,
            "shape_bytes_kernel16": kv_cache_shape_bytes(&spec, num_blocks, 16),
            "strides_2_layers": strides,
        });
        tally.case(&case, &got, &case["output"]);
    }
    tally
}

pub fn get_supported_kv_cache_layouts() -> Tally {
    let mut tally = Tally::new("get_supported_kv_cache_layouts");
    for case in cases("get_supported_kv_cache_layouts") {
        let input = &case["input"];
        let capability = &input["compute_capability"];
        let capability = Capability::new(uint(&capability[0]), uint(&capability[1]));
        let rows: Vec<BackendRow> = names(input)
            .map(|name| row(backend(name), Device::Cuda { capability }))
            .collect();
        let declared: Vec<Option<&[KvCacheLayout]>> =
            rows.iter().map(|r| r.kv_cache_layouts.as_deref()).collect();
        let (got, wanted) = match supported_layouts(&declared) {
            Ok(layouts) => {
                let layouts: Vec<&str> = layouts.into_iter().map(layout::name).collect();
                (json!(layouts), case["output"].clone())
            }
            Err(error) => (json!(error.to_string()), json!(error_text(&case["output"]))),
        };
        tally.case(&case, &got, &wanted);
    }
    tally
}

fn names(input: &Value) -> impl Iterator<Item = &Value> {
    input["backends"]
        .as_array()
        .expect("a list of backends")
        .iter()
}

pub fn select_common_block_size() -> Tally {
    let mut tally = Tally::new("select_common_block_size");
    for case in cases("select_common_block_size") {
        let input = &case["input"];
        let rows: Vec<BackendRow> = names(input).map(|name| row(backend(name), SM90)).collect();
        let sizes: Vec<BlockSizes<'_>> = rows.iter().map(BackendRow::block_sizes).collect();
        let (got, wanted) = match select(uint(&input["kv_manager_block_size"]), &sizes) {
            Ok(size) => (json!(size), case["output"].clone()),
            Err(error) => (json!(error.to_string()), json!(error_text(&case["output"]))),
        };
        tally.case(&case, &got, &wanted);
    }
    tally
}

pub fn map_to_kernel_block_table() -> Tally {
    let mut tally = Tally::new("map_to_kernel_block_table");
    for case in cases("map_to_kernel_block_table") {
        let input = &case["input"];
        let map = KernelBlockMap::new(
            uint(&input["block_size"]),
            uint(&input["kernel_block_size"]),
            uint(&input["kernel_block_stride"]),
            1 << 16,
        )
        .expect("a split that the recorder made");
        let rows: Vec<Vec<i32>> =
            serde_json::from_value(input["block_table"].clone()).expect("a table");
        let got: Vec<Vec<i32>> = rows
            .iter()
            .map(|row| {
                let mut out = vec![0; row.len() * map.ratio() as usize];
                map.rewrite(row, &mut out);
                out
            })
            .collect();
        tally.case(&case, &json!(got), &case["output"]);
    }
    tally
}

#[test]
fn kv_cache_shape_conforms() {
    kv_cache_shape().check();
}

#[test]
fn get_supported_kv_cache_layouts_conforms() {
    get_supported_kv_cache_layouts().check();
}

#[test]
fn select_common_block_size_conforms() {
    select_common_block_size().check();
}

#[test]
fn map_to_kernel_block_table_conforms() {
    map_to_kernel_block_table().check();
}
