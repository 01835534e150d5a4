//! Faults of a running host: kept as bundles, made to happen again by the command, and what the policy makes of them.

mod support;

use serde_json::Value;
use support::{Ran, file, run, tiny_llama};
use timetable_types::Family;

/// Twelve prompts as one batch, so that its steps have more rows than a new version is tried with.
fn generate(extra: &[&str]) -> Ran {
    let model = tiny_llama();
    let prompts: Vec<String> = (0..12).map(|prompt| format!("t{}", 40 + prompt)).collect();
    let mut arguments = vec![
        "generate",
        "--model",
        model.to_str().unwrap(),
        "--admin",
        "none",
        "--json",
        "--num-gpu-blocks-override",
        "64",
        "--weights",
        "f32",
        "--ignore-eos",
        "--max-tokens",
        "12",
    ];
    for prompt in &prompts {
        arguments.extend(["--prompt", prompt]);
    }
    arguments.extend(extra);
    run(&arguments)
}

/// The chaos builder, told to misbehave in steps with nine rows or more.
fn chaos(scratch: &tempfile::TempDir, mischief: &str) -> Vec<String> {
    let bytes = timetable_reference::chaos(Family::FlashAttn).unwrap();
    let component = file(scratch, "chaos.wasm", bytes);
    [
        "--builder",
        &format!("FLASH_ATTN={component}"),
        "--builder-option",
        &format!("chaos={mischief}"),
        "--builder-option",
        "chaos-min-rows=9",
    ]
    .map(str::to_owned)
    .to_vec()
}

fn tokens(report: &Value) -> Vec<&Value> {
    let outputs = report["outputs"].as_array().expect("outputs");
    outputs
        .iter()
        .map(|output| &output["output_token_ids"])
        .collect()
}

fn bundles(faults: &std::path::Path) -> Vec<String> {
    let mut found: Vec<String> = std::fs::read_dir(faults)
        .unwrap()
        .map(|entry| entry.unwrap().path().to_str().unwrap().to_owned())
        .collect();
    found.sort();
    found
}

#[test]
fn a_fault_of_a_running_host_is_kept_and_replays() {
    let good = generate(&[]).succeeds().json();
    for (mischief, kind, outcome) in [
        ("trap", "trap", "reproduced"),
        ("wild", "refused", "reproduced"),
        ("recurse", "stack_depth", "does_not_replay"),
    ] {
        let scratch = tempfile::tempdir().unwrap();
        let faults = scratch.path().join("faults");
        let mut arguments = chaos(&scratch, mischief);
        if mischief == "wild" {
            arguments.extend(["--builder-option", "chaos-field=max_query_len"].map(str::to_owned));
        }
        arguments.extend(["--fault-dir", faults.to_str().unwrap()].map(str::to_owned));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let ran = generate(&arguments);
        let report = ran.succeeds().json();
        assert_eq!(tokens(&report), tokens(&good), "{mischief} costs no token");
        let group = &report["builders"][0];
        assert!(group["all_faults"][kind].as_u64() > Some(0), "{group}");
        assert!(group["plain_steps"].as_u64() > Some(0), "{group}");

        let found = bundles(&faults);
        assert!(!found.is_empty(), "no bundle of {mischief}");
        for path in &found {
            let ran = run(&["replay-bundle", path, "--json"]);
            let answer = ran.succeeds().json();
            assert_eq!(answer["bundle"]["fault"]["kind"], kind, "{answer}");
            assert_eq!(answer["replay"]["outcome"], outcome, "{answer}");
            if outcome == "reproduced" {
                assert_eq!(answer["replay"]["here"], answer["bundle"]["fault"]);
            }
        }
        let ran = run(&["replay-bundle", &found[0]]);
        let text = &ran.succeeds().stdout;
        assert!(
            text.contains("there: ") && text.contains("here:  "),
            "{text}"
        );
        assert!(text.contains(&outcome.replace('_', " ")), "{text}");
    }
}

#[test]
fn a_policy_that_fails_steps_ends_the_requests_with_the_fault() {
    let scratch = tempfile::tempdir().unwrap();
    for policy in ["fail-step", "fail-closed"] {
        let mut arguments = chaos(&scratch, "trap");
        arguments.extend(["--on-builder-fault", policy].map(str::to_owned));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let says = format!("its policy is {policy}");
        generate(&arguments).fails(3, &["trap", &says]);
    }
}

#[test]
fn something_that_is_no_bundle_gets_one_line() {
    let scratch = tempfile::tempdir().unwrap();
    let missing = scratch.path().join("missing");
    let directory = scratch.path().to_str().unwrap().to_owned();
    let cases = [
        (missing.to_str().unwrap().to_owned(), "cannot be read"),
        (directory, "not a regular file"),
        (file(&scratch, "empty", b""), "is no fault bundle"),
        (
            file(&scratch, "wasm", b"\0asm\x01\0\0\0"),
            "is no fault bundle",
        ),
        (
            file(
                &scratch,
                "cut",
                format!("timetable-fault-bundle 1 9 9 {}\n{{}}", "0".repeat(64)).as_bytes(),
            ),
            "announces 19 bytes",
        ),
        (
            file(
                &scratch,
                "changed",
                format!("timetable-fault-bundle 1 2 1 {}\n{{}}\n0", "0".repeat(64)).as_bytes(),
            ),
            "SHA-256",
        ),
    ];
    for (path, says) in cases {
        run(&["replay-bundle", &path]).fails(4, &[&path, says]);
    }
}

#[test]
fn a_fault_directory_of_someone_else_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = tempfile::tempdir().unwrap();
    let faults = scratch.path().join("faults");
    std::fs::create_dir(&faults).unwrap();
    std::fs::set_permissions(&faults, std::fs::Permissions::from_mode(0o755)).unwrap();
    generate(&["--fault-dir", faults.to_str().unwrap()]).fails(4, &["the fault directory", "0755"]);
}
