//! Writing a builder: `new`, `componentize`, `check`, with the compiler that builds this test and nothing from a registry.

mod support;

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use support::{Ran, file, outside_of_this_build, run};
use timetable_attention::Grant;
use timetable_types::Family;

/// Runs cargo in a crate of one's own, as its author would, without the network.
#[track_caller]
fn cargo(directory: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(directory).args(arguments);
    let output = outside_of_this_build(&mut command)
        .output()
        .expect("cargo starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// Compiles the crate and makes a component of it.
#[track_caller]
fn component(directory: &Path, module: &str, name: &str) -> String {
    cargo(directory, &["wasm"]);
    let output = directory.join(name).to_str().unwrap().to_owned();
    let module = directory
        .join("target/wasm32-unknown-unknown/release")
        .join(module);
    let ran = run(&["componentize", module.to_str().unwrap(), "-o", &output]);
    assert!(ran.succeeds().stdout.starts_with(&output), "{}", ran.stdout);
    output
}

fn check(arguments: &[&str]) -> Ran {
    let mut all = vec!["check", "--json", "--batches", "40"];
    all.extend(arguments);
    run(&all)
}

/// The findings of a check, as (severity, check, what).
fn findings(report: &Value) -> Vec<(&str, &str, &str)> {
    let list = report["findings"].as_array().expect("a list");
    assert!(list.iter().all(|finding| finding["remedy"].is_string()));
    list.iter()
        .map(|finding| {
            (
                finding["severity"].as_str().unwrap(),
                finding["check"].as_str().unwrap(),
                finding["what"].as_str().unwrap(),
            )
        })
        .collect()
}

#[test]
fn a_new_crate_of_flash_attn_compiles_and_passes() {
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().join("mine");
    let path = directory.to_str().unwrap();
    let ran = run(&["new", "my-builder", "--path", path]);
    assert!(
        ran.succeeds().stdout.contains("cargo wasm"),
        "{}",
        ran.stdout
    );
    let text = cargo(&directory, &["test"]);
    assert!(text.contains("1 passed"), "{text}");

    let component = component(&directory, "my_builder.wasm", "my-builder.wasm");
    let report = check(&[&component, "--backend", "FLASH_ATTN"])
        .succeeds()
        .json();
    assert_eq!(report["passes"], true);
    assert_eq!(report["builder"]["name"], "my-builder");
    assert_eq!(report["findings"], serde_json::json!([]));
    // Context parallelism included.
    for tried in report["configurations"].as_array().unwrap() {
        assert_eq!(tried["built"], 40, "{tried}");
    }
    let rows: Vec<&Value> = report["cost"]
        .as_array()
        .unwrap()
        .iter()
        .map(|cost| &cost["rows"])
        .collect();
    assert_eq!(rows, [1, 64, 256, 1024]);
    assert!(report["promises_held"].as_u64() >= Some(24), "{report}");
}

/// A policy that reads the first page and the last ones of a request.
const SELECTING: &str = "
use timetable_guest::flashinfer::{Choice, Part, Selection};

pub const MAX_SPLITS: u32 = 1;

pub fn choose(part: &Part<'_>) -> Choice {
    let keep = |row: usize| {
        let from = part.first_own_page(row).saturating_sub(4);
        (0..from.min(1)).chain(from..part.pages(row))
    };
    Choice { selection: Some(Selection::new(part, keep)), ..Choice::one_chunk() }
}
";

#[test]
fn a_new_crate_of_flashinfer_compiles_and_passes_and_needs_a_grant_to_leave_pages_out() {
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().join("mine");
    let path = directory.to_str().unwrap();
    run(&["new", "mine", "--backend", "FLASHINFER", "--path", path]).succeeds();
    let text = cargo(&directory, &["test"]);
    assert!(text.contains("1 passed"), "{text}");
    let whole = component(&directory, "mine.wasm", "whole.wasm");
    let report = check(&[&whole]).succeeds().json();
    assert_eq!(report["backend"], "FLASHINFER");
    let tried = report["configurations"].as_array().unwrap();
    for (index, tried) in tried.iter().enumerate() {
        // The SDK's record declines context parallelism, the last.
        let built = if index == 6 { 0 } else { 40 };
        assert_eq!(tried["built"], built, "{tried}");
        assert_eq!(tried["same_meaning"], built, "{tried}");
    }

    std::fs::write(directory.join("src/policy.rs"), SELECTING).unwrap();
    let part = component(&directory, "mine.wasm", "part.wasm");
    let ran = check(&[&part]);
    ran.fails(3, &["paged_kv_indices", "grant"]);
    let report = ran.json();
    let remedy = report["findings"][0]["remedy"].as_str().unwrap();
    assert!(remedy.contains("--grant subset"), "{remedy}");
    let granted = check(&[&part, "--grant", "subset"]).succeeds().json();
    let tried = &granted["configurations"][0];
    assert_eq!(tried["built"], 40);
    assert!(tried["same_meaning"].as_u64() < Some(40), "{tried}");

    // The step of a finding is one that `build` reads.
    let step = file(
        &scratch,
        "step.json",
        report["findings"][0]["step"].to_string().as_bytes(),
    );
    run(&["build", "--builder", &part, "--input", &step]).fails(3, &["paged_kv_indices"]);
    run(&["build", "--builder", &whole, "--input", &step]).succeeds();
}

#[test]
fn a_crate_is_not_written_where_it_should_not_be() {
    let scratch = tempfile::tempdir().unwrap();
    let taken = file(&scratch, "taken", b"");
    run(&["new", "mine", "--path", &taken]).fails(4, &[&taken, "something already"]);
    let free = scratch.path().join("free");
    let free = free.to_str().unwrap();
    for (name, says) in [
        ("Mine", "lower-case"),
        ("a/b", "lower-case"),
        ("", "lower-case"),
        ("core", "meaning"),
    ] {
        run(&["new", name, "--path", free]).fails(4, &["name", says]);
    }
    for backend in ["TRITON_ATTN", "flash_attn"] {
        run(&["new", "mine", "--backend", backend, "--path", free])
            .fails(4, &[backend, "FLASH_ATTN, FLASHINFER"]);
    }
    let below = format!("{taken}/below");
    run(&["new", "mine", "--path", &below]).fails(4, &[&below, "cannot be written"]);
    assert!(!Path::new(free).exists());
}

#[test]
fn what_is_no_module_does_not_become_a_component() {
    let scratch = tempfile::tempdir().unwrap();
    let output = scratch.path().join("out.wasm");
    let output = output.to_str().unwrap();
    let good = timetable_reference::components()[0].bytes;
    for (path, says) in [
        (
            file(&scratch, "text.wasm", b"certainly not wasm"),
            "not a WebAssembly module",
        ),
        (
            file(&scratch, "empty.wasm", b"\0asm\x01\0\0\0"),
            "exports none of the contract's interfaces",
        ),
        (
            file(&scratch, "component.wasm", good),
            "already a component",
        ),
        ("/nonexistent.wasm".to_owned(), "cannot be read"),
        ("/".to_owned(), "not a regular file"),
    ] {
        run(&["componentize", &path, "-o", output]).fails(4, &[&path, says]);
    }
    assert!(!Path::new(output).exists());
}

#[test]
fn the_reference_components_pass_and_are_equal_to_themselves() {
    let scratch = tempfile::tempdir().unwrap();
    for known in timetable_reference::components() {
        let path = file(&scratch, known.name, known.bytes);
        let grant = match known.grant {
            Grant::Exact => "exact",
            Grant::Subset => "subset",
        };
        let report = check(&[&path, "--backend", known.backend, "--grant", grant])
            .succeeds()
            .json();
        let found = findings(&report);
        assert_eq!(found, [], "{}", known.name);
        for tried in report["configurations"].as_array().unwrap() {
            let no_ranks = match known.name {
                "triton-attn" => "DCP not supported",
                "flashinfer-window-sink" => "decode context parallelism is beyond this builder",
                _ => "",
            };
            if !no_ranks.is_empty() && tried["configuration"] == "context parallel" {
                let why = tried["no_builder"].as_str().unwrap();
                assert!(why.contains(no_ranks), "{why}");
                continue;
            }
            assert_eq!(tried["built"], 40, "{}: {tried}", known.name);
            if known.grant == Grant::Exact {
                assert_eq!(tried["same_meaning"], 40, "{}: {tried}", known.name);
            }
            if known.default {
                assert_eq!(tried["as_reference"], 40, "{}: {tried}", known.name);
            }
        }
        assert_eq!(report["headroom"]["memory_growth_bytes"], 0);
        // The text says the same.
        let text = run(&["check", &path, "--batches", "8", "--grant", grant]);
        assert!(
            text.succeeds().stdout.ends_with("a host would take it\n"),
            "{}",
            text.stdout
        );
    }
}

#[test]
fn each_kind_of_misbehaviour_is_found() {
    let scratch = tempfile::tempdir().unwrap();
    let chaos = file(
        &scratch,
        "chaos.wasm",
        timetable_reference::chaos(Family::FlashAttn).unwrap(),
    );
    check(&[&chaos]).succeeds();
    for (mischief, options, check_name, says) in [
        ("trap", "", "build", "trap"),
        ("trap-in-create", "", "construction", "trap"),
        (
            "refuse-config",
            "",
            "construction",
            "refuses its configuration",
        ),
        ("spin-divisions", "", "build", "fuel"),
        ("spin-loads", "", "build", "fuel"),
        ("just-under-fuel", "", "build budget", "takes"),
        ("grow", "", "build", "memory"),
        ("recurse", "", "build", "stack"),
        ("huge-list", "", "build", "lift_bound"),
        ("long-list", "", "verifier", "must"),
        (
            "wild",
            "chaos-field=max_query_len",
            "verifier",
            "max_query_len",
        ),
        (
            "off-by-one",
            "chaos-field=schedule.num_splits",
            "verifier",
            "num_splits",
        ),
        ("state", "", "determinism", "is another"),
        ("leak", "", "memory", "memory"),
    ] {
        let mischief = format!("chaos={mischief}");
        let mut arguments = vec![chaos.as_str(), "--builder-option", mischief.as_str()];
        if !options.is_empty() {
            arguments.extend(["--builder-option", options]);
        }
        let ran = check(&arguments);
        ran.fails(3, &["a host would refuse it"]);
        let report = ran.json();
        assert_eq!(report["passes"], false);
        let found = findings(&report);
        assert!(
            found
                .iter()
                .any(|(severity, check, what)| *severity == "refused"
                    && *check == check_name
                    && what.contains(says)),
            "{mischief}: {found:?}"
        );
    }
    // To decline is no fault.
    let report = check(&[&chaos, "--builder-option", "chaos=decline"])
        .succeeds()
        .json();
    assert!(
        findings(&report)
            .iter()
            .all(|(severity, ..)| *severity == "warning")
    );
    assert_eq!(report["configurations"][0]["declined"], 40);
}

#[test]
fn what_no_host_loads_gets_one_line() {
    let scratch = tempfile::tempdir().unwrap();
    let good = timetable_reference::components()[0].bytes;
    for (path, says) in [
        (
            file(&scratch, "text.wasm", b"certainly not wasm"),
            "not a WebAssembly component",
        ),
        (
            file(&scratch, "core.wasm", b"\0asm\x01\0\0\0"),
            "timetable componentize",
        ),
        (
            file(&scratch, "empty.wasm", b"\0asm\x0d\0\x01\0"),
            "no builder interface",
        ),
        (
            file(&scratch, "cut.wasm", &good[..good.len() / 2]),
            "cut.wasm",
        ),
        ("/nonexistent.wasm".to_owned(), "cannot be read"),
    ] {
        run(&["check", &path]).fails(4, &[&path, says]);
    }
    let path = file(&scratch, "good.wasm", good);
    run(&["check", &path, "--backend", "FLASHINFER"]).fails(4, &["FLASH_ATTN", "FLASHINFER"]);
}
