//! A recorded CommonAttentionMetadata as a `GroupStep`, and back.

use serde_json::{Map, Value, json};
use timetable_attention::batch::{GroupStep, StepTensors};
use timetable_attention::types::FastPrefillInputs;
use timetable_attention::types::batch::BatchRows;

use crate::harness::{flag, int, ints, list, uint};

/// The length bounds of a recorded metadata.
fn bounds(cam: &Value) -> Vec<i32> {
    match cam.get("seq_lens_cpu_upper_bound") {
        None => ints(&cam["seq_lens"]),
        Some(same) if same == "=seq_lens" => ints(&cam["seq_lens"]),
        Some(list) => ints(list),
    }
}

/// Reads the fields that are there.
pub fn parse(cam: &Value) -> GroupStep {
    let rows = cam
        .get("block_table_tensor")
        .map(|table| list(table, ints))
        .unwrap_or_default();
    let tensors = StepTensors {
        query_start_loc: ints(&cam["query_start_loc"]),
        seq_lens: ints(&cam["seq_lens"]),
        block_table_width: rows.first().map_or(0, Vec::len),
        block_table: rows.concat(),
        slot_mapping: cam
            .get("slot_mapping")
            .map(|slots| list(slots, int))
            .unwrap_or_default(),
        logits_indices_padded: cam.get("logits_indices_padded").map(ints),
        ..StepTensors::default()
    };
    let max_seq_len = cam.get("max_seq_len").map_or(0, uint);
    let tokens = uint(&cam["num_actual_tokens"]);
    let mut step = GroupStep::new(
        tensors,
        bounds(cam),
        tokens,
        uint(&cam["max_query_len"]),
        max_seq_len,
    );
    assert_eq!(step.cam.num_reqs, uint(&cam["num_reqs"]));
    if let Some(flags) = cam.get("is_prefilling") {
        step.cam.is_prefilling = list(flags, |v| u8::from(flag(v)));
    }
    if let Some(num_logits_indices) = cam.get("num_logits_indices").filter(|v| !v.is_null()) {
        step.cam.fast_prefill = Some(FastPrefillInputs {
            num_logits_indices: uint(num_logits_indices),
            max_logits_per_req: uint(&cam["max_logits_per_req"]),
            num_logits_indices_padded: step
                .tensors
                .logits_indices_padded
                .as_ref()
                .map_or(0, |v| v.len() as u32),
        });
    }
    step
}

/// The vectors that splits look at.
pub fn rows(step: &GroupStep) -> BatchRows<'_> {
    (&step.cam).into()
}

/// Writes the fields that a step has, as the vectors write them.
pub fn render(step: &GroupStep) -> Value {
    let tensors = &step.tensors;
    assert_eq!(
        step.cam.query_start_loc_cpu, tensors.query_start_loc,
        "host and device query starts"
    );
    let mut out = Map::new();
    let mut put = |name: &str, value: Value| out.insert(name.into(), value);
    put("query_start_loc", json!(tensors.query_start_loc));
    put("seq_lens", json!(tensors.seq_lens));
    put("num_reqs", json!(step.cam.num_reqs));
    put("num_actual_tokens", json!(step.cam.num_actual_tokens));
    put("max_query_len", json!(step.cam.max_query_len));
    put("max_seq_len", json!(step.cam.max_seq_len));
    if tensors.block_table_width > 0 {
        put(
            "block_table_tensor",
            tensors
                .block_table
                .chunks(tensors.block_table_width)
                .map(|row| json!(row))
                .collect(),
        );
        put("slot_mapping", json!(tensors.slot_mapping));
    }
    if !step.cam.is_prefilling.is_empty() {
        put(
            "is_prefilling",
            step.cam
                .is_prefilling
                .iter()
                .map(|&byte| json!(byte != 0))
                .collect(),
        );
    }
    let bounds = &step.cam.seq_lens_cpu_upper_bound;
    put(
        "seq_lens_cpu_upper_bound",
        if *bounds == tensors.seq_lens {
            json!("=seq_lens")
        } else {
            json!(bounds)
        },
    );
    Value::Object(out)
}
