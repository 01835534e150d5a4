//! What backends answer, and which one is chosen.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use timetable_attention::backend::{
    AttentionType, Backend, BackendRegistry, BackendRow, Capability, Configuration, Device,
    ModelFacts, QueryLenSupport, row, torch_name,
};
use timetable_attention::kernel_block::KernelBlockSize;
use timetable_attention::layout;
use timetable_attention::select::{Request, priority, select};
use timetable_attention::types::Dtype;

use crate::harness::{Tally, cases, error_text, text, uint};

pub fn device(capability: &Value) -> Device {
    let capability = Capability::parse(text(capability)).expect("a capability");
    Device::Cuda { capability }
}

pub fn backend(name: &Value) -> Backend {
    Backend::from_name(text(name)).unwrap_or_else(|| panic!("backend {name}"))
}

pub fn dtype(name: &str) -> Dtype {
    *Dtype::ALL
        .iter()
        .find(|d| torch_name(**d) == name)
        .unwrap_or_else(|| panic!("dtype {name}"))
}

/// The recorder's model had DeepSeek's dimensions where MLA was asked for, and none where it was not.
fn configuration(input: &Value) -> Configuration {
    let flag = |name: &str| input.get(name).and_then(Value::as_bool).unwrap_or(false);
    let use_mla = flag("use_mla");
    Configuration {
        head_size: uint(&input["head_size"]),
        dtype: dtype(text(&input["dtype"])),
        kv_cache_dtype: input["kv_cache_dtype"].as_str().map(str::to_owned),
        block_size: (!input["block_size"].is_null()).then(|| uint(&input["block_size"])),
        use_mla,
        has_sink: flag("has_sink"),
        use_sparse: flag("use_sparse"),
        use_mm_prefix: flag("use_mm_prefix"),
        use_per_head_quant_scales: flag("use_per_head_quant_scales"),
        attn_type: AttentionType::parse(text(&input["attn_type"])).expect("an attention type"),
        has_sliding_window: flag("has_sliding_window"),
        use_non_causal: flag("use_non_causal"),
        use_batch_invariant: flag("use_batch_invariant"),
        use_kv_connector: flag("use_kv_connector"),
        use_adaptive_verification: flag("use_adaptive_verification"),
        use_pcp: flag("use_pcp"),
        use_dcp: flag("use_dcp"),
        use_rswa: flag("use_rswa"),
        model: if use_mla {
            ModelFacts::DEEPSEEK_R1
        } else {
            ModelFacts::default()
        },
    }
}

/// Every question of a recorded table, asked of the row; keys are the recorded ones.
fn table(row: &BackendRow, recorded: &Map<String, Value>) -> Value {
    let each = |question: &str, answer: &dyn Fn(&str) -> Value| -> Value {
        let keys = recorded[question].as_object().expect("a table").keys();
        keys.map(|k| (k.clone(), answer(k)))
            .collect::<Map<_, _>>()
            .into()
    };
    let sizes: Vec<Value> = row
        .kernel_block_sizes
        .iter()
        .map(|s| match s {
            KernelBlockSize::Exact(n) => json!(n),
            KernelBlockSize::MultipleOf(n) => json!({ "multiple_of": n }),
        })
        .collect();
    let layouts = row
        .kv_cache_layouts
        .as_ref()
        .map(|l| l.iter().map(|l| layout::name(*l)).collect::<Vec<_>>());
    let number = |k: &str| k.parse::<u32>().expect("a number");
    let dtypes: Vec<&str> = row
        .supported_dtypes
        .iter()
        .map(|d| torch_name(*d))
        .collect();
    let b = &row.builder;
    let query_len_support = b.query_len_support.map(|q| match q {
        QueryLenSupport::SingleOnly => "SINGLE_ONLY",
        QueryLenSupport::Uniform => "UNIFORM",
        QueryLenSupport::Varlen => "VARLEN",
    });
    json!({
        "name": row.name,
        "full_cls_name": [row.full_cls_name.0, row.full_cls_name.1],
        "forward_includes_kv_cache_update": row.forward_includes_kv_cache_update,
        "supported_dtypes": dtypes,
        "supported_kv_cache_dtypes": row.supported_kv_cache_dtypes.to_vec(),
        "kernel_block_sizes": sizes,
        "head_sizes_declared": row.head_sizes.declared(),
        "kv_cache_layouts": layouts,
        "supports_head_size": each("supports_head_size", &|k| row.supports_head_size(number(k)).into()),
        "supports_block_size": each("supports_block_size", &|k| row.supports_block_size(k.parse().ok()).into()),
        "preferred_block_size": each("preferred_block_size", &|k| row.preferred_block_size(number(k)).into()),
        "supports_dtype": each("supports_dtype", &|k| row.supports_dtype(dtype(k)).into()),
        "supports_kv_cache_dtype": each("supports_kv_cache_dtype", &|k| {
            row.supports_kv_cache_dtype((k != "None").then_some(k)).into()
        }),
        "supports_attn_type": each("supports_attn_type", &|k| {
            row.supports_attn_type(AttentionType::parse(k).expect("a type")).into()
        }),
        "supports_compute_capability": each("supports_compute_capability", &|k| {
            row.supports_compute_capability(Capability::parse(k).expect("a capability")).into()
        }),
        "flags": flags(row),
        "builder": {
            "class": b.class,
            "reorder_batch_threshold": b.reorder_batch_threshold,
            "supports_update_block_table": b.supports_update_block_table,
            "cudagraph_support_attr": b.cudagraph_support,
            "supports_draft_decode_metadata_update": b.supports_draft_decode_metadata_update,
            "requires_block_table_width": b.requires_block_table_width,
            "query_len_support": query_len_support,
        },
    })
}

fn flags(row: &BackendRow) -> Value {
    let f = &row.flags;
    json!({
        "supports_sink": f.supports_sink,
        "supports_mm_prefix": f.supports_mm_prefix,
        "supports_sliding_window": f.supports_sliding_window,
        "supports_rswa": f.supports_rswa,
        "supports_non_causal": f.supports_non_causal,
        "supports_batch_invariance": f.supports_batch_invariance,
        "supports_kv_connector": f.supports_kv_connector,
        "supports_pcp": f.supports_pcp,
        "supports_dcp": f.supports_dcp,
        "supports_per_head_quant_scales": f.supports_per_head_quant_scales,
        "supports_device_cpu_query_lens_mismatch": f.supports_device_cpu_query_lens_mismatch,
        "is_mla": f.is_mla,
        "is_sparse": f.is_sparse,
        "is_ssm": false,
        "supports_alibi_sqrt": f.supports_alibi_sqrt,
        "supports_non_causal_dcp": f.supports_non_causal_dcp,
    })
}

pub fn backend_supports_tables() -> Tally {
    let mut tally = Tally::new("backend_supports_tables");
    for case in cases("backend_supports_tables") {
        let input = &case["input"];
        let row = row(
            backend(&input["backend"]),
            device(&input["compute_capability"]),
        );
        let recorded = case["output"].as_object().expect("a table");
        let got = table(&row, recorded);
        // One line per differing question, so that a failure names it.
        let differing: BTreeMap<&String, (&Value, &Value)> = recorded
            .iter()
            .filter(|(k, v)| got[k.as_str()] != **v)
            .map(|(k, v)| (k, (&got[k.as_str()], v)))
            .collect();
        tally.case(&case, &differing, &BTreeMap::new());
    }
    tally
}

pub fn validate_configuration() -> Tally {
    const FILES: [&str; 10] = [
        "CUTLASS_MLA",
        "FLASHINFER",
        "FLASHINFER_MLA",
        "FLASHMLA",
        "FLASH_ATTN",
        "FLASH_ATTN_MLA",
        "FLEX_ATTENTION",
        "TOKENSPEED_MLA",
        "TRITON_ATTN",
        "TRITON_MLA",
    ];
    let mut tally = Tally::new("validate_configuration");
    for file in FILES {
        for case in cases(&format!("validate_configuration/{file}")) {
            let input = &case["input"];
            let device = device(&input["device_capability"]);
            let row = row(backend(&input["backend"]), device);
            let got = row.validate_configuration(&configuration(input), device);
            let wanted: Vec<String> = case["output"]
                .as_array()
                .expect("reasons")
                .iter()
                .map(|r| text(r).to_owned())
                .collect();
            tally.case(&case, &got, &wanted);
        }
    }
    tally
}

/// The recorder cut error texts at this many characters.
const RECORDED_TEXT: usize = 400;

pub fn backend_selection() -> Tally {
    let registry = BackendRegistry::new();
    let mut tally = Tally::new("backend_selection");
    for case in cases("backend_selection") {
        let (input, output) = (&case["input"], &case["output"]);
        let device = device(&input["compute_capability"]);
        let config = configuration(input);
        let num_heads = uint(&input["num_heads"]);
        let request = Request {
            config: &config,
            num_heads,
            device,
            requested: input["selected_backend"].as_str(),
        };
        let mut valid = Vec::new();
        let mut invalid = Map::new();
        for (i, backend) in priority(&config, num_heads, device).into_iter().enumerate() {
            let reasons = row(backend, device).validate_configuration(&config, device);
            if reasons.is_empty() {
                valid.push(backend.name());
            } else {
                invalid.insert(backend.name().to_owned(), json!([i, reasons]));
            }
        }
        let selected = match select(&registry, &request) {
            Ok(selection) => selection.row.class_path(),
            Err(error) => error.to_string().chars().take(RECORDED_TEXT).collect(),
        };
        let wanted = error_text(&output["selected"]).unwrap_or_else(|| text(&output["selected"]));
        tally.case(
            &case,
            &json!({ "valid": valid, "invalid": invalid, "selected": selected }),
            &json!({ "valid": output["valid"], "invalid": output["invalid"], "selected": wanted }),
        );
    }
    tally
}

#[test]
fn backend_supports_tables_conforms() {
    backend_supports_tables().check();
}

#[test]
fn validate_configuration_conforms() {
    validate_configuration().check();
}

#[test]
fn backend_selection_conforms() {
    backend_selection().check();
}
