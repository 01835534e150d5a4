//! A builder in C: compiled, made a component, checked, and asked.

#[path = "../../../guest-builders/c/compile.rs"]
mod compile;
mod support;

use std::path::Path;

use compile::Compiler;
use serde_json::json;
use support::{file, run};

/// The compiler; none where there is none and nobody insists.
fn compiler() -> Option<Compiler> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .parent()
        .expect("the target directory");
    let found = Compiler::find(target);
    if found.is_none() {
        let missing = "no C compiler for wasm32: install clang and lld, or zig (pip install ziglang), or run `cargo xtask test`";
        assert!(std::env::var("CI").is_err(), "{missing}");
        eprintln!("SKIPPED: the builder in C is neither compiled nor tested: {missing}");
    }
    found
}

#[test]
fn a_builder_in_c_is_a_component_that_a_host_takes() {
    let Some(compiler) = compiler() else { return };
    let scratch = tempfile::tempdir().unwrap();
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest-builders/c/keys_per_split.c");
    let path = |name: &str| scratch.path().join(name).to_str().unwrap().to_owned();
    let (module, component) = (path("core.wasm"), path("c.wasm"));
    compiler
        .compile(&source, Path::new(&module))
        .unwrap_or_else(|error| panic!("{}: {error}", compiler.name()));
    run(&["componentize", &module, "-o", &component]).succeeds();

    let report = run(&["check", &component, "--json", "--batches", "100"])
        .succeeds()
        .json();
    assert_eq!(report["findings"], json!([]));
    assert_eq!(report["builder"]["name"], "flash-attn in C, keys per split");
    for tried in report["configurations"].as_array().unwrap() {
        let declines = tried["configuration"] == "context parallel";
        assert_eq!(tried["built"], if declines { 0 } else { 100 }, "{tried}");
    }
    assert_eq!(report["headroom"]["memory_growth_bytes"], 0);

    // Its own policy, by its own option: 40 keys a split, at most 8.
    let step = json!({
        "query_start_loc": [0, 1, 2], "seq_lens": [41, 640], "num_reqs": 2, "num_actual_tokens": 2,
        "max_query_len": 1, "max_seq_len": 640,
        "block_table": [(0..40).collect::<Vec<i32>>(), (40..80).collect::<Vec<i32>>()],
        "slot_mapping": [40, 1279],
        "kv_cache_spec": { "block_size": 16, "num_kv_heads": 2, "head_size": 64 },
        "config": { "max_num_splits": 8, "options": [["keys-per-split", "40"]] },
    });
    let step_path = file(&scratch, "step.json", step.to_string().as_bytes());
    let answer = run(&[
        "build",
        "--builder",
        &component,
        "--input",
        &step_path,
        "--json",
    ]);
    let schedule = &answer.succeeds().json()["metadata"]["schedule"];
    assert_eq!(schedule["num_splits"], json!([2, 8]));
    assert_eq!(schedule["max_num_splits"], 8);

    let mut wrong = step;
    wrong["config"]["options"] = json!([["keys-per-split", "0"]]);
    let wrong = file(&scratch, "wrong.json", wrong.to_string().as_bytes());
    run(&["build", "--builder", &component, "--input", &wrong])
        .fails(3, &["keys-per-split is 0", "give a number"]);
}
