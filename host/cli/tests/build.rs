//! `timetable build`: one build outside the engine, and what bad input gets.

mod support;

use serde_json::{Value, json};
use support::{file, run, run_with_input};

/// Two decodes and a prefill in blocks of 16.
fn step() -> Value {
    json!({
        "query_start_loc": [0, 1, 2, 7],
        "seq_lens": [17, 33, 5],
        "num_reqs": 3,
        "num_actual_tokens": 7,
        "max_query_len": 5,
        "max_seq_len": 33,
        "block_table": [[1, 2, 0], [3, 4, 5], [6, 0, 0]],
        "slot_mapping": [32, 80, 96, 97, 98, 99, 100],
        "positions": [16, 32, 0, 1, 2, 3, 4],
        "is_prefilling": [false, false, true],
        "kv_cache_spec": { "block_size": 16, "num_kv_heads": 2, "head_size": 64 },
    })
}

fn build(backend: &str, step: &Value) -> support::Ran {
    run_with_input(
        &["build", "--backend", backend, "--input", "-", "--json"],
        &step.to_string(),
    )
}

#[test]
fn flash_attn_metadata_is_printed_with_its_tensors_resolved() {
    let answer = build("FLASH_ATTN", &step()).succeeds().json();
    let metadata = &answer["metadata"];
    assert_eq!(metadata["query_start_loc"], json!([0, 1, 2, 7]));
    assert_eq!(metadata["seq_lens"], json!([17, 33, 5]));
    assert_eq!(
        metadata["block_table"],
        json!([[1, 2, 0], [3, 4, 5], [6, 0, 0]])
    );
    assert_eq!(metadata["num_actual_tokens"], 7);
    assert_eq!(metadata["max_query_len"], 5);
    let splits = metadata["schedule"]["num_splits"]
        .as_array()
        .expect("a schedule");
    assert!(splits.is_empty() || splits.len() == 3);
}

#[test]
fn flashinfer_metadata_has_pages_and_a_plan() {
    let answer = build("FLASHINFER", &step()).succeeds().json();
    let text = answer["metadata"].to_string();
    assert_eq!(answer["metadata"]["num_decodes"], 2);
    assert_eq!(answer["metadata"]["num_prefills"], 1);
    // Pages of the two decodes, then of the prefill, and what fills the last of each.
    for part in [
        "\"paged_kv_indptr\":[0,2,5]",
        "\"paged_kv_indices\":[1,2,3,4,5]",
        "\"paged_kv_last_page_len\":[1,1]",
    ] {
        assert!(text.contains(part), "{part} is missing in {text}");
    }
}

#[test]
fn a_step_with_a_bad_field_gets_one_line() {
    let with = |key: &str, value: Value| {
        let mut step = step();
        step[key] = value;
        step
    };
    let without = |key: &str| {
        let mut step = step();
        step.as_object_mut().unwrap().remove(key);
        step
    };
    // A table row of 3 pages of 16 tokens for 49 keys.
    let mut too_long = with("seq_lens", json!([17, 49, 5]));
    too_long["max_seq_len"] = json!(49);
    for (step, parts) in [
        (without("seq_lens"), ["seq_lens", "missing"]),
        (without("block_table"), ["block_table", "missing"]),
        (with("seq_lens", json!([17, -33, 5])), ["seq_lens", "-33"]),
        (
            with("seq_lens", json!([17, 33, 5_000_000_000u64])),
            ["seq_lens", "5000000000"],
        ),
        (with("num_reqs", json!(4)), ["num_reqs", "4"]),
        (
            with("query_start_loc", json!([0, 2, 1, 7])),
            ["query_start_loc", "1"],
        ),
        (
            with("max_query_len", json!("five")),
            ["max_query_len", "five"],
        ),
        (
            with("block_table", json!([[1, 2, 0], [3, 4], [6, 0, 0]])),
            ["block_table", "2"],
        ),
        (with("seq_lens", json!([17, 49, 5])), ["seq_lens[1]", "49"]),
        (too_long, ["block_table_width[1]", "at least 4"]),
        (with("speed", json!(9)), ["speed", "not a field"]),
    ] {
        build("FLASH_ATTN", &step).fails(4, &parts);
    }
    run_with_input(&["build", "--input", "-"], "{\"seq_lens\": [1,").fails(4, &["not JSON"]);
    run(&["build", "--input", "/nonexistent/step.json"])
        .fails(4, &["/nonexistent/step.json", "cannot be read"]);
}

#[test]
fn something_that_is_no_builder_gets_one_line() {
    let scratch = tempfile::tempdir().unwrap();
    let step = file(&scratch, "step.json", step().to_string().as_bytes());
    // An empty core module: magic and version 1.
    let module = file(&scratch, "module.wasm", b"\0asm\x01\0\0\0");
    // An empty component: magic and the component layer's version.
    let empty = file(&scratch, "empty.wasm", b"\0asm\x0d\0\x01\0");
    let text = file(&scratch, "text.wasm", b"certainly not wasm");
    let good = timetable_reference::components()[0].bytes;
    let truncated = file(&scratch, "truncated.wasm", &good[..good.len() / 2]);
    for (path, part) in [
        (module.as_str(), "core module"),
        (empty.as_str(), "timetable:attention"),
        (text.as_str(), "not"),
        (truncated.as_str(), "truncated.wasm"),
        ("/nonexistent.wasm", "cannot be read"),
    ] {
        run(&["build", "--builder", path, "--input", &step]).fails(4, &[path, part]);
    }
    run(&["build", "--backend", "MAGIC", "--input", &step]).fails(4, &["MAGIC", "FLASH_ATTN"]);
}
