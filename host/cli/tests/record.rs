//! Recordings of a running host, replayed by other processes; public request traces.

mod support;

use serde_json::Value;
use support::{Ran, file, run, tiny_llama};
use timetable_types::Family;

/// Twelve prompts as one batch, recorded.
fn generate(record: &str, extra: &[&str]) -> Value {
    let model = tiny_llama();
    let prompts: Vec<String> = (0..12)
        .map(|prompt| format!("t{} t{} t7", 40 + prompt, prompt))
        .collect();
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
        "24",
        "--record",
        record,
    ];
    for prompt in &prompts {
        arguments.extend(["--prompt", prompt]);
    }
    arguments.extend(extra);
    run(&arguments).succeeds().json()
}

fn replay(recording: &str, extra: &[&str]) -> Ran {
    let mut arguments = vec!["replay", recording, "--json"];
    arguments.extend(extra);
    run(&arguments)
}

fn path(scratch: &tempfile::TempDir, name: &str) -> String {
    scratch.path().join(name).to_str().unwrap().to_owned()
}

fn chaos(scratch: &tempfile::TempDir) -> String {
    let bytes = timetable_reference::chaos(Family::FlashAttn).unwrap();
    file(scratch, "chaos.wasm", bytes)
}

#[test]
fn recorded_traffic_replays_bit_for_bit_in_other_processes() {
    let scratch = tempfile::tempdir().unwrap();
    for backend in ["FLASH_ATTN", "FLASHINFER"] {
        let recording = path(&scratch, backend);
        let report = generate(&recording, &["--attention-backend", backend]);
        let figures = &report["recording"];
        assert!(figures["written"].as_u64() >= Some(24), "{figures}");
        assert_eq!(figures["stopped"], Value::Null);
        let first = replay(&recording, &[]).succeeds().json();
        assert_eq!(first["steps"], figures["written"]);
        assert_eq!(first["missing"]["left_out"], figures["left_out"]);
        assert_eq!(first["missing"]["not_ended"], 0);
        assert_eq!(first["reproduced"], true);
        assert_eq!(first["digest"], first["recorded_digest"]);
        let second = replay(&recording, &[]).succeeds().json();
        assert_eq!(first["digest"], second["digest"]);
        let text = run(&["replay", &recording]);
        let digest = first["digest"].as_str().unwrap();
        assert!(text.succeeds().stdout.contains(digest), "{}", text.stdout);
    }
}

#[test]
fn another_builder_is_tried_on_recorded_steps() {
    let scratch = tempfile::tempdir().unwrap();
    let recording = path(&scratch, "recording");
    generate(&recording, &[]);
    let report = replay(&recording, &["--builder", "flash-attn-fixed-split"])
        .succeeds()
        .json();
    let candidate = &report["candidate"];
    assert_eq!(candidate["steps"], report["steps"]);
    assert_eq!(
        (&candidate["refused"], &candidate["different"]),
        (&0.into(), &0.into())
    );
    assert!(candidate["cost"]["build_p99_ns"].as_u64() > Some(0));
    assert!(report["recorded"]["cost"]["fuel_p50"].as_u64() > Some(0));

    let chaos = chaos(&scratch);
    let wild = [
        "--builder",
        &chaos,
        "--builder-option",
        "chaos=wild",
        "--builder-option",
        "chaos-field=max_query_len",
    ];
    let ran = replay(&recording, &wild);
    ran.fails(3, &[&chaos, "are refused"]);
    let report = ran.json();
    assert_eq!(report["candidate"]["refused"], report["steps"]);
    assert_eq!(
        report["reproduced"], true,
        "the recorded one is not affected"
    );
    let trap = ["--builder", &chaos, "--builder-option", "chaos=trap"];
    replay(&recording, &trap).fails(1, &["faulted"]);
}

#[test]
fn faults_are_recorded_and_happen_again() {
    let scratch = tempfile::tempdir().unwrap();
    let recording = path(&scratch, "recording");
    let builder = format!("FLASH_ATTN={}", chaos(&scratch));
    let options = [
        "--builder",
        &builder,
        "--builder-option",
        "chaos=trap",
        "--builder-option",
        "chaos-min-rows=9",
    ];
    let report = generate(&recording, &options);
    let recorded = report["builders"][0]["all_faults"]["trap"].as_u64();
    let replayed = replay(&recording, &[]).succeeds().json();
    assert!(recorded > Some(0), "{report}");
    assert_eq!(replayed["recorded_faults"]["trap"].as_u64(), recorded);
    assert_eq!(replayed["faults_again"].as_u64(), recorded);
    assert!(replayed["plain_steps"].as_u64() > Some(0));
    // A good builder serves the steps in which the recorded one faulted.
    let report = replay(&recording, &["--builder", "flash-attn"])
        .succeeds()
        .json();
    assert_eq!(report["candidate"]["faults"], serde_json::json!({}));
}

#[test]
fn something_that_is_no_recording_gets_one_line() {
    let scratch = tempfile::tempdir().unwrap();
    let missing = path(&scratch, "missing");
    replay(&missing, &[]).fails(4, &[&missing, "give a directory that `--record` wrote"]);
    let directory = path(&scratch, "directory");
    std::fs::create_dir(&directory).unwrap();
    replay(&directory, &[]).fails(4, &["has no segments"]);
    std::fs::write(
        format!("{directory}/00000000.ttrec"),
        "timetable-recording 9\n",
    )
    .unwrap();
    replay(&directory, &[]).fails(4, &["has format 9"]);

    let recording = path(&scratch, "recording");
    generate(&recording, &[]);
    replay(&recording, &["--group", "FLASHINFER"]).fails(4, &["no steps of `FLASHINFER`"]);
    replay(&recording, &["--builder", "flashinfer"]).fails(4, &["builds for `flashinfer`"]);
    replay(&recording, &["--builder", "nobody.wasm"]).fails(4, &["nobody.wasm"]);
    let segment = format!("{recording}/00000000.ttrec");
    let mut bytes = std::fs::read(&segment).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&segment, bytes).unwrap();
    replay(&recording, &[]).fails(4, &[&segment, "is damaged at byte"]);
}

/// Requests a tenth of a second apart, in Azure's format.
fn azure(scratch: &tempfile::TempDir) -> String {
    let mut text = "TIMESTAMP,ContextTokens,GeneratedTokens\n".to_owned();
    for request in 0..40 {
        text.push_str(&format!(
            "2024-01-01 00:00:{:02}.{}000000,{},{}\n",
            request / 10,
            request % 10,
            20 + request * 37 % 900,
            5 + request * 11 % 60
        ));
    }
    file(scratch, "azure.csv", text.as_bytes())
}

/// Two conversations that go on, in Mooncake's format: each request begins with the blocks of the one before it.
fn mooncake(scratch: &tempfile::TempDir) -> String {
    let mut text = String::new();
    for request in 0..8_u64 {
        let (conversation, turn) = (request % 2, request / 2 + 1);
        let hash_ids: Vec<u64> = (0..turn).map(|block| conversation * 100 + block).collect();
        text.push_str(&format!(
            "{{\"timestamp\": {}, \"input_length\": {}, \"output_length\": 4, \"hash_ids\": {hash_ids:?}}}\n",
            request * 10_000,
            turn * 512,
        ));
    }
    file(scratch, "mooncake.jsonl", text.as_bytes())
}

fn trace(path: &str, extra: &[&str]) -> Ran {
    let mut arguments = vec!["replay", "--trace", path, "--json"];
    arguments.extend(extra);
    run(&arguments)
}

#[test]
fn a_trace_gives_the_same_metadata_in_every_run_and_a_recording_of_it_replays() {
    let scratch = tempfile::tempdir().unwrap();
    for (file, format) in [(azure(&scratch), "azure"), (mooncake(&scratch), "mooncake")] {
        for backend in ["FLASH_ATTN", "FLASHINFER"] {
            let recording = path(&scratch, &format!("{format}-{backend}"));
            let arguments = ["--backend", backend, "--record", &recording];
            let first = trace(&file, &arguments).succeeds().json();
            let second = trace(&file, &["--backend", backend]).succeeds().json();
            assert_eq!(first["digest"], second["digest"], "{format} {backend}");
            assert_eq!(first["format"], format);
            assert_eq!(first["requests"]["finished"], first["requests"]["read"]);
            assert_eq!(
                (&first["plain_steps"], &first["failed_steps"]),
                (&0.into(), &0.into())
            );
            let figures = &first["recording"];
            assert_eq!(
                (&figures["written"], &figures["left_out"]),
                (&first["steps"], &0.into())
            );
            let replayed = replay(&recording, &[]).succeeds().json();
            assert_eq!(replayed["digest"], first["digest"]);
            assert_eq!(replayed["reproduced"], true);
        }
    }
}

#[test]
fn a_trace_shares_the_prefixes_that_it_names() {
    let scratch = tempfile::tempdir().unwrap();
    let file = mooncake(&scratch);
    let report = trace(&file, &[]).succeeds().json();
    // Each turn after the first finds all blocks of the turn before: 3 turns of 2 conversations, of 1, 2 and 3 blocks.
    let hits = 2 * (1 + 2 + 3) * 512;
    assert_eq!(report["prefix_cache"]["hit_tokens"], hits, "{report}");
    let report = trace(&file, &["--no-enable-prefix-caching"])
        .succeeds()
        .json();
    assert_eq!(report["prefix_cache"]["hit_tokens"], 0);
}

#[test]
fn a_small_cache_and_a_faulty_builder_are_survived() {
    let scratch = tempfile::tempdir().unwrap();
    let file = azure(&scratch);
    let small = ["--num-gpu-blocks-override", "120", "--speed", "50"];
    let report = trace(&file, &small).succeeds().json();
    assert!(report["preemptions"].as_u64() > Some(0), "{report}");
    assert_eq!(report["requests"]["finished"], 40);
    let again = trace(&file, &small).succeeds().json();
    assert_eq!(report["digest"], again["digest"]);

    let chaos = chaos(&scratch);
    let faulty = [
        "--builder",
        &chaos,
        "--builder-option",
        "chaos=trap",
        "--builder-option",
        "chaos-min-rows=9",
        "--speed",
        "50",
    ];
    let report = trace(&file, &faulty).succeeds().json();
    assert!(report["faults"]["trap"].as_u64() > Some(0), "{report}");
    assert!(report["plain_steps"].as_u64() > Some(0));
    assert_eq!(report["requests"]["finished"], 40);
    let text = run(&["replay", "--trace", &file, "--max-requests", "3"]);
    assert!(
        text.succeeds().stdout.contains("3 requests, 3 finished"),
        "{}",
        text.stdout
    );
}

#[test]
fn a_bad_trace_gets_one_line() {
    let scratch = tempfile::tempdir().unwrap();
    let bad = file(
        &scratch,
        "bad",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,x,1\n",
    );
    trace(&bad, &[]).fails(4, &[&bad, "line 2: ContextTokens is `x`", "fix or remove"]);
    let unknown = file(&scratch, "unknown", b"hello\n");
    trace(&unknown, &[]).fails(4, &["neither an Azure CSV header"]);
    let good = azure(&scratch);
    for speed in ["0", "nan", "inf", "1e-300", "1e300"] {
        let ran = trace(&good, &["--speed", speed]);
        ran.fails(2, &["--speed ", "give a number from 0.000001 to 1000000"]);
    }
    trace(&good, &["--max-requests", "0"]).fails(2, &["--max-requests 0: give 1 or more"]);
    let empty = file(&scratch, "empty", b"");
    trace(&empty, &[]).fails(4, &["has no requests; give"]);
    trace(
        &good,
        &["--backend", "FLASHINFER", "--builder", "flash-attn"],
    )
    .fails(
        4,
        &["it builds for FLASH_ATTN, and --backend is FLASHINFER"],
    );
    trace(&good, &["--backend", "NOTHING"]).fails(4, &["backend `NOTHING`"]);
}

#[test]
fn arrivals_as_late_as_a_trace_can_say_are_survived() {
    let scratch = tempfile::tempdir().unwrap();
    let mut text = String::new();
    for timestamp in ["0", "1e22"] {
        text.push_str(&format!(
            "{{\"timestamp\": {timestamp}, \"input_length\": 20, \"output_length\": 4, \"hash_ids\": [1]}}\n"
        ));
    }
    let late = file(&scratch, "late.jsonl", text.as_bytes());
    let report = trace(&late, &["--speed", "1e-6"]).succeeds().json();
    assert_eq!(report["requests"]["finished"], 2, "{report}");
}

#[test]
fn a_trace_whose_requests_are_all_refused_fails() {
    let scratch = tempfile::tempdir().unwrap();
    let ran = trace(&mooncake(&scratch), &["--num-gpu-blocks-override", "2"]);
    ran.fails(1, &["all 8 requests were refused; the first: "]);
    assert_eq!(ran.json()["requests"]["refused"], 8);
}

#[test]
fn a_replay_that_compares_nothing_fails() {
    let scratch = tempfile::tempdir().unwrap();
    let recording = path(&scratch, "recording");
    let (recorder, handle) = timetable_record::record(
        recording.as_ref(),
        &timetable_sandbox::Limits::default(),
        timetable_record::RecorderOptions::default(),
    )
    .unwrap();
    drop(recorder);
    assert_eq!(handle.finish().written, 0);
    let ran = replay(&recording, &[]);
    ran.fails(4, &[&recording, "nothing was compared; record a host"]);
    assert_eq!(ran.json()["steps"], 0);
    replay(&recording, &["--limit", "0"]).fails(2, &["--limit 0: give 1 or more"]);
}

/// A limit on the size of a file stands for a full disk: a write gets a part of its bytes down, and the next one none.
#[test]
fn a_full_disk_ends_a_recording_with_its_last_whole_frame() {
    let scratch = tempfile::tempdir().unwrap();
    let (file, recording) = (azure(&scratch), path(&scratch, "recording"));
    let whole = path(&scratch, "whole");
    let all = trace(&file, &["--record", &whole]).succeeds().json();
    let bytes = all["recording"]["bytes"].as_u64().unwrap();
    // In blocks of 512 bytes.
    let blocks = (bytes * 3 / 4 / 512).to_string();
    let limited = "trap '' XFSZ; ulimit -f \"$1\"; shift; exec \"$@\"";
    let ran: Ran = std::process::Command::new("sh")
        .args(["-c", limited, "sh", &blocks])
        .args([env!("CARGO_BIN_EXE_timetable"), "replay", "--json"])
        .args(["--trace", &file, "--record", &recording])
        .output()
        .unwrap()
        .into();
    let report = ran.succeeds().json();
    let figures = &report["recording"];
    let stopped = figures["stopped"].as_str().unwrap_or_default();
    assert!(stopped.contains("which are whole: "), "{figures}");
    let written = figures["written"].as_u64().unwrap();
    let left_out = figures["left_out"].as_u64().unwrap();
    assert!(left_out > 0, "{figures}");
    assert_eq!(Some(written + left_out), report["steps"].as_u64());
    // What counts as written is there, and nothing after it; a segment without a whole frame is gone.
    let on_disk: u64 = std::fs::read_dir(&recording)
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .sum();
    assert_eq!(figures["bytes"].as_u64(), Some(on_disk));
    let replayed = replay(&recording, &[]);
    let report = replayed.json();
    assert_eq!(report["steps"].as_u64(), Some(written));
    assert_eq!(report["missing"]["unfinished"], serde_json::json!([]));
    assert_eq!(replayed.code, if written > 0 { 0 } else { 4 });
}
