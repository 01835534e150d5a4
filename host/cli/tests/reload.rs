//! Replacing builders of a running host through its admin socket.

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use serde_json::Value;
use support::{Host, answered_as_undisturbed, file, run, tiny_llama};
use timetable_tests::tiny_models::Recorded;

fn fixed_split(scratch: &tempfile::TempDir) -> String {
    let component = timetable_reference::component("flash-attn-fixed-split").unwrap();
    file(scratch, "fixed.wasm", component.bytes)
}

#[test]
fn a_builder_is_replaced_and_rolled_back_while_answers_stream() {
    let host = Host::start(&[]);
    let before = host.wait_for(|_| true)["builders"][0]["active"]["version"].clone();
    let path = fixed_split(&host.scratch);
    let reloaded = host.ask(&["reload", "FLASH_ATTN", &path]).succeeds().json();
    assert_ne!(reloaded["version"], before);
    let table =
        host.wait_for(|table| table["builders"][0]["active"]["version"] == reloaded["version"]);
    assert_eq!(table["builders"][0]["previous"]["version"], before);
    assert_eq!(table["builders"][0]["active"]["origin"], path.as_str());

    // A bad component changes nothing.
    let bad = file(&host.scratch, "bad.wasm", b"\0asm\x01\0\0\0");
    host.ask(&["reload", "FLASH_ATTN", &bad])
        .fails(4, &["bad.wasm", "core module", "stays"]);
    host.ask(&["reload", "FLASHINFER", &path])
        .fails(4, &["FLASHINFER", "FLASH_ATTN"]);
    let table = host.wait_for(|_| true);
    assert_eq!(
        table["builders"][0]["active"]["version"],
        reloaded["version"]
    );

    host.ask(&["rollback", "FLASH_ATTN"]).succeeds();
    host.wait_for(|table| table["builders"][0]["active"]["version"] == before);

    let disturbed = host.finish();
    assert_eq!(disturbed["failed_steps"], 0);
    assert_eq!(disturbed["fallback_steps"], 0);
    answered_as_undisturbed(&disturbed);
}

/// Gemma 3's layers with a window and those without are two groups of one backend, with a version each.
#[test]
fn a_version_of_several_groups_is_waited_for_in_all() {
    let recorded = Recorded::load();
    let gemma = recorded
        .cases
        .iter()
        .find(|case| case.name == "gemma3_text");
    let model = tempfile::tempdir().unwrap();
    gemma.unwrap().write_with_tokenizer(model.path());
    let host = Host::with_model(model.path(), &[]);
    let path = fixed_split(&host.scratch);
    let gates = ["--min-observed", "0%", "--max-build-ratio", "inf"];
    let slow = ["--max-extra-build-us", "1000000", "--max-fuel-ratio", "inf"];
    let mut staged = vec!["reload", "FLASH_ATTN", &path, "--wait", "--shadow", "2"];
    staged.extend(gates.iter().chain(&slow));
    for command in [
        staged,
        vec![
            "reload",
            "FLASH_ATTN",
            "--builder-option",
            "splits=2",
            "--wait",
        ],
    ] {
        let staged = command.contains(&"--shadow");
        let answer = host.ask(&command).succeeds().json();
        assert_eq!(answer["stage"] != "checked", staged, "{answer}");
        let versions = answer["versions"].as_array().unwrap();
        assert_eq!(versions.len(), 2, "{answer}");
        let table = host.wait_for(|_| true);
        for group in [0, 1] {
            let active = &table["builders"][group]["active"]["version"];
            assert_eq!(*active, versions[group]);
        }
    }
    let rolled_back = host.ask(&["rollback", "FLASH_ATTN"]).succeeds().json();
    assert_eq!(rolled_back["versions"].as_array().map(Vec::len), Some(2));
    assert_eq!(host.finish()["failed_steps"], 0);
}

#[test]
fn a_host_says_which_layers_each_backend_serves_and_which_graph_mode_survived() {
    let host = Host::start(&[]);
    let table = host.wait_for(|_| true);
    assert_eq!(
        table["builders"][0]["layer_names"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    assert_eq!(table["cudagraph_mode"]["configured"], "FULL_AND_PIECEWISE");
    assert_eq!(table["cudagraph_mode"]["survived"], "NONE");
    let reason = table["cudagraph_mode"]["changes"][0]["reason"]
        .as_str()
        .unwrap();
    assert_eq!(table["hazards"][0]["message"], reason);
    let text = run(&["builders", "--admin", &host.socket]);
    let line = format!("CUDA graph mode: NONE (configured: FULL_AND_PIECEWISE); {reason}");
    assert!(
        text.succeeds().stdout.lines().any(|found| found == line),
        "{}",
        text.stdout
    );

    let mut stream = UnixStream::connect(&host.socket).unwrap();
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: timetable\r\n\r\n")
        .unwrap();
    let mut metrics = String::new();
    stream.read_to_string(&mut metrics).unwrap();
    for line in [
        "timetable_cudagraph_mode_info{configured=\"FULL_AND_PIECEWISE\",survived=\"NONE\"} 1",
        "timetable_attention_backend_info{backend=\"FLASH_ATTN\",group=\"FLASH_ATTN/0\",tenant=\"\",kv_cache_group=\"0\"} 2",
    ] {
        assert!(
            metrics.lines().any(|found| found == line),
            "{line} is missing in\n{metrics}"
        );
    }
}

#[test]
fn what_is_active_survives_a_restart() {
    let scratch = tempfile::tempdir().unwrap();
    let state: PathBuf = scratch.path().join("state");
    let state = state.to_str().unwrap();
    let path = fixed_split(&scratch);

    let host = Host::start(&["--state-dir", state]);
    let reloaded = host.ask(&["reload", "FLASH_ATTN", &path]).succeeds().json();
    host.finish();
    // A file that changes on disk changes nothing: components are kept by content.
    std::fs::write(&path, "gone").unwrap();

    let host = Host::start(&["--state-dir", state]);
    let table = host.wait_for(|_| true);
    assert_eq!(
        table["builders"][0]["active"]["version"],
        reloaded["version"]
    );
    assert_eq!(table["builders"][0]["active"]["origin"], path.as_str());
}

/// Eight faults within the window quarantine a version; the one before takes over by itself, and after a restart too.
#[test]
fn a_return_to_the_last_good_version_survives_a_restart() {
    let scratch = tempfile::tempdir().unwrap();
    let state: PathBuf = scratch.path().join("state");
    let state = state.to_str().unwrap();
    let good = fixed_split(&scratch);
    let bytes = timetable_reference::chaos(timetable_types::Family::FlashAttn).unwrap();
    let bad = file(&scratch, "chaos.wasm", bytes);
    // Good enough to be taken: each instance traps in its seventh call, after those that it is tried with.
    let options = [
        "--state-dir",
        state,
        "--builder-option",
        "chaos=trap",
        "--builder-option",
        "chaos-from-call=7",
    ];

    let host = Host::start(&options);
    let reloaded = host.ask(&["reload", "FLASH_ATTN", &good]).succeeds().json();
    host.wait_for(|table| table["builders"][0]["active"]["version"] == reloaded["version"]);
    host.ask(&["reload", "FLASH_ATTN", &bad]).succeeds();
    let table = host.wait_for(|table| {
        let group = &table["builders"][0];
        group["returns"] == 1 && group["active"]["version"] == reloaded["version"]
    });
    assert_eq!(table["builders"][0]["quarantines"], 1, "{table}");
    assert_eq!(table["builders"][0]["all_faults"]["trap"], 8, "{table}");
    let report = host.finish();
    assert_eq!(report["failed_steps"], 0);

    let host = Host::start(&options);
    let table = host.wait_for(|_| true);
    assert_eq!(
        table["builders"][0]["active"]["version"],
        reloaded["version"]
    );
}

#[test]
fn a_second_host_at_the_same_socket_is_refused_and_the_first_goes_on() {
    let host = Host::start(&[]);
    run(&[
        "generate",
        "--model",
        tiny_llama().to_str().unwrap(),
        "--prompt",
        "t1",
        "--admin",
        &host.socket,
    ])
    .fails(
        5,
        &[&host.socket, "another host answers there", "--admin PATH"],
    );
    host.ask(&["builders"]).succeeds();
}

#[test]
fn without_a_host_the_error_says_how_to_start_one() {
    let scratch = tempfile::tempdir().unwrap();
    let socket = scratch.path().join("admin.sock");
    let socket = socket.to_str().unwrap();
    run(&["builders", "--admin", socket]).fails(5, &["no running host", "timetable generate"]);
    run(&[
        "reload",
        "FLASH_ATTN",
        "/nonexistent.wasm",
        "--admin",
        socket,
    ])
    .fails(4, &["/nonexistent.wasm"]);
}

/// Gates that a busy machine does not fail.
const OPEN: [&str; 6] = [
    "--max-build-ratio",
    "inf",
    "--max-extra-build-us",
    "1000000000",
    "--min-observed",
    "0%",
];

#[test]
fn a_version_goes_through_its_stages_and_a_bad_one_is_withdrawn() {
    let scratch = tempfile::tempdir().unwrap();
    let state: PathBuf = scratch.path().join("state");
    let host = Host::start(&["--state-dir", state.to_str().unwrap()]);
    let manifest = || -> Value {
        let text = std::fs::read_to_string(state.join("active.json")).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["slots"]["flash-attn"].clone()
    };
    let before = host.wait_for(|_| true)["builders"][0]["active"]["version"].clone();
    let path = fixed_split(&scratch);
    let reload = |path: &str, more: &[&str]| {
        let mut command = vec!["reload", "FLASH_ATTN", path, "--wait"];
        command.extend(OPEN);
        command.extend(more);
        host.ask(&command)
    };

    let stages = ["--shadow", "20", "--canary", "25%", "--canary-steps", "10"];
    let answer = reload(&path, &stages);
    let answer = answer.succeeds().json();
    let candidate = &answer["candidates"][0];
    assert_eq!(candidate["stage"], "active", "{answer}");
    assert_eq!(candidate["shadow"]["steps"], 20, "{answer}");
    assert_eq!(candidate["shadow"]["differences"], 0, "{answer}");
    assert!(
        candidate["canary"]["steps"].as_u64() >= Some(10),
        "{answer}"
    );
    let table = host.wait_for(|_| true);
    let group = &table["builders"][0];
    assert_eq!(group["active"]["version"], answer["version"]);
    assert_eq!(group["previous"]["version"], before);

    // It traps in its first live step: a shadow's, and nobody is served by it.
    let bytes = timetable_reference::chaos(timetable_types::Family::FlashAttn).unwrap();
    let chaos = file(&scratch, "chaos.wasm", bytes);
    let trap = [
        "--builder-option",
        "chaos=trap",
        "--builder-option",
        "chaos-from-call=7",
    ];
    reload(&chaos, &[&["--shadow", "1000"][..], &trap].concat()).fails(
        3,
        &[
            "will not serve",
            "1 faults by the end of shadow, the last one trap",
        ],
    );
    // The component in service with other options, while nobody waits; a rollback withdraws it.
    let options = [
        "--builder-option",
        "splits=1",
        "--canary",
        "0.1%",
        "--canary-steps",
        "9999",
    ];
    let trying = host.ask(&[&["reload", "FLASH_ATTN"][..], &options].concat());
    let trying = trying.succeeds().json();
    assert_eq!(
        (&trying["stage"], &trying["origin"]),
        (&"canary".into(), &path.as_str().into())
    );
    assert_eq!(trying["options"], serde_json::json!([["splits", "1"]]));
    assert_eq!(
        manifest()["candidate"]["version"]["options"],
        trying["options"]
    );
    let text = run(&["builders", "--admin", &host.socket]);
    assert!(
        text.succeeds()
            .stdout
            .contains("(flash-attn, fixed splits): canary; canary"),
        "{}",
        text.stdout
    );
    let answer = host.ask(&["rollback", "FLASH_ATTN"]).succeeds().json();
    assert_eq!(answer["withdrawn"]["version"], trying["version"]);

    let table = host.wait_for(|_| true);
    let group = &table["builders"][0];
    assert_eq!(group["active"]["origin"], path.as_str());
    assert_eq!(
        (&group["withdrawals"], &group["activations"]),
        (&2.into(), &1.into())
    );
    let kept = manifest();
    assert_eq!(kept["active"]["origin"], path.as_str());
    assert_eq!(kept["candidate"], Value::Null);
    // A plan that makes no sense, and a backend that is not there.
    host.ask(&[
        "reload",
        "FLASH_ATTN",
        &path,
        "--shadow",
        "5",
        "--max-build-ratio",
        "0",
    ])
    .fails(4, &["max_build_ratio is 0", "stays"]);
    // What served before is known after a restart as well.
    host.ask(&["reload", "FLASH_ATTN", "--builder-option", "splits=1"])
        .succeeds();
    let disturbed = host.finish();
    let again = Host::start(&["--state-dir", state.to_str().unwrap()]);
    let options = |table: &Value| table["builders"][0]["active"]["options"].clone();
    assert_eq!(options(&again.wait_for(|_| true)), trying["options"]);
    again.ask(&["rollback", "FLASH_ATTN"]).succeeds();
    again.wait_for(|table| options(table) == serde_json::json!([]));
    drop(again);
    assert_eq!(
        (&disturbed["failed_steps"], &disturbed["fallback_steps"]),
        (&0.into(), &0.into())
    );
    answered_as_undisturbed(&disturbed);
}
