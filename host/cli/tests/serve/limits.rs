//! What clients may take: keys, queue, time, size; what happens when they go away; and how a server ends.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::Instant;

use serde_json::json;

use super::support::serving::{PATIENCE, Serving, signal};
use super::support::{Running as Started, file, run, timetable, tiny_llama};
use super::{greedy, joined, with};

/// A stream that takes a while.
fn long(answers: usize) -> serde_json::Value {
    with(
        &greedy(&json!("t40 t41"), 1000),
        &json!({ "stream": true, "n": answers }),
    )
}

/// Nothing runs or waits, in the engine or in the server.
fn idle(table: &serde_json::Value) -> bool {
    let engine = &table["engine"];
    engine["running"] == 0 && engine["waiting"] == 0 && table["http"]["running"] == 0
}

fn configured(text: &str, further: &[&str]) -> (Serving, tempfile::TempDir) {
    let scratch = tempfile::tempdir().unwrap();
    let path = file(&scratch, "timetable.toml", text.as_bytes());
    let mut arguments = vec!["--config", &path];
    arguments.extend(further);
    (Serving::start(&arguments), scratch)
}

#[test]
fn a_key_says_whose_a_request_is_and_without_one_nothing_is_answered() {
    let scratch = tempfile::tempdir().unwrap();
    let keys = file(&scratch, "keys", b"sk-acme acme\nsk-free\n");
    let (host, _scratch) = configured("[tenants.acme]\nshare = 2.0\n", &["--api-keys", &keys]);
    let request = greedy(&json!("t40"), 3).to_string();
    let ask = |header: Option<&str>| {
        let headers: Vec<(&str, &str)> = header
            .iter()
            .map(|value| ("Authorization", *value))
            .collect();
        host.ask("POST", "/v1/completions", &headers, &request)
    };
    for wrong in [
        None,
        Some("Bearer sk-wrong"),
        Some("Bearer"),
        Some("sk-acme"),
        Some("Basic sk-acme"),
    ] {
        let refused = ask(wrong);
        let error = refused.refused(401, "API key");
        assert_eq!(error["code"], "invalid_api_key");
        assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
    }
    host.get("/v1/models").refused(401, "API key");
    for open in ["/health", "/version", "/metrics", "/openapi.json"] {
        assert_eq!(host.get(open).status, 200, "{open}");
    }
    ask(Some("Bearer sk-acme")).ok();
    ask(Some("bearer sk-acme")).ok();
    ask(Some("Bearer sk-free")).ok();
    let table = host.wait_until("counted", |table| table["engine"]["running"] == 0);
    let requests = |name: serde_json::Value| {
        let tenants = table["engine"]["tenants"].as_array().unwrap();
        tenants
            .iter()
            .find(|tenant| tenant["name"] == name)
            .unwrap()["requests"]
            .clone()
    };
    assert_eq!(requests(json!("acme")), 2);
    assert_eq!(requests(json!(null)), 1);
}

#[test]
fn one_request_too_many_is_sent_away_until_there_is_room() {
    let (host, _scratch) = configured(
        "[server]\nmax_waiting_requests = 99\n",
        &["--max-num-seqs", "1"],
    );
    let mut first = host.send("POST", "/v1/completions", &[], &long(60).to_string());
    first.read_until("data: ");
    let second = host.send("POST", "/v1/completions", &[], &long(40).to_string());
    host.wait_until("waiting", |table| table["http"]["running"] == 2);
    let third = host.post("/v1/completions", &greedy(&json!("t40"), 1));
    let error = third.refused(429, "try again");
    assert_eq!(error["code"], "queue_full");
    assert_eq!(third.header("retry-after"), Some("1"));
    host.post("/v1/completions", &long(101))
        .refused(400, "101 answers");
    drop(first);
    drop(second);
    host.wait_until("empty", |table| table["http"]["running"] == 0);
    host.post("/v1/completions", &greedy(&json!("t40"), 1)).ok();
}

#[test]
fn what_takes_too_long_is_ended_and_gives_its_blocks_back() {
    let (host, _scratch) = configured(
        "[server]\nrequest_timeout = \"100ms\"\nheader_timeout = \"2s\"\n",
        &["--max-num-seqs", "4"],
    );
    let whole = with(&long(128), &json!({ "stream": false }));
    let error = host
        .post("/v1/completions", &whole)
        .refused(408, "within 0.1 s");
    assert_eq!(error["code"], "timeout");
    let stream = host.post("/v1/completions", &long(128));
    if stream.status == 200 {
        let events = stream.events();
        assert_eq!(events.last().unwrap()["error"]["code"], "timeout");
    } else {
        stream.refused(408, "within 0.1 s");
    }
    let table = host.wait_until("idle", idle);
    assert_eq!(table["engine"]["kv_cache_usage"], 0.0);

    // A head that does not end, and a body that does not come.
    let mut slow = TcpStream::connect(&host.address).unwrap();
    slow.set_read_timeout(Some(PATIENCE)).unwrap();
    slow.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        .unwrap();
    let mut rest = Vec::new();
    let _ = slow.read_to_end(&mut rest);
    let body = host.send("POST", "/v1/completions", &[("Content-Length", "10")], "");
    body.answer().refused(408, "did not arrive in time");
}

#[test]
fn a_client_that_hangs_up_frees_its_blocks() {
    let host = Serving::start(&["--max-num-seqs", "4"]);
    for stream in [true, false] {
        let request = with(&long(128), &json!({ "stream": stream }));
        let mut connection = host.send("POST", "/v1/completions", &[], &request.to_string());
        if stream {
            connection.read_until("data: ");
        }
        host.wait_until("running", |table| table["engine"]["running"] != 0);
        drop(connection);
        let table = host.wait_until("idle", idle);
        assert_eq!(table["engine"]["kv_cache_usage"], 0.0);
    }
    let table = host.table();
    assert_ne!(
        table["engine"]["finished"]["abort"], 0,
        "it was ended before its end"
    );
}

#[test]
fn a_body_that_is_too_large_is_refused_unread() {
    let (host, _scratch) = configured("[server]\nmax_body_bytes = \"4KiB\"\n", &[]);
    let request = greedy(&json!("t40 ".repeat(2000)), 1);
    host.post("/v1/completions", &request)
        .refused(413, "4096 bytes");
    let chunk = "x".repeat(5000);
    let chunked = format!("{:x}\r\n{chunk}\r\n0\r\n\r\n", chunk.len());
    let mut stream = TcpStream::connect(&host.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream
        .write_all(format!("{head}{chunked}").as_bytes())
        .unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
}

#[test]
fn a_signal_lets_running_requests_end_and_refuses_new_ones() {
    let mut host = Serving::start(&["--max-num-seqs", "4"]);
    let mut running = host.send("POST", "/v1/completions", &[], &long(64).to_string());
    let begun = running.read_until("data: ");
    host.signal("TERM");
    host.wait_for_line("running requests end");
    let late = host.post("/v1/completions", &greedy(&json!("t40"), 1));
    late.refused(503, "shutting down");
    assert_eq!(late.header("retry-after"), Some("1"));
    host.get("/health").refused(503, "shutting down");
    let answer = running.answer_after(begun);
    let (texts, reasons, _) = joined(&answer);
    assert_eq!((texts.len(), reasons), (64, vec!["length".to_owned(); 64]));
    let ended = host.end();
    ended.succeeds();
}

#[test]
fn a_second_signal_ends_at_once_and_says_what_was_cut_off() {
    let mut host = Serving::start(&["--max-num-seqs", "4"]);
    let mut running = host.send("POST", "/v1/completions", &[], &long(128).to_string());
    let begun = running.read_until("data: ");
    // Behind all of those: nothing of it has been said.
    let whole = with(&long(8), &json!({ "stream": false }));
    let whole = host.send("POST", "/v1/completions", &[], &whole.to_string());
    host.wait_until("two requests", |table| table["http"]["running"] == 2);
    host.signal("INT");
    host.wait_for_line("running requests end");
    host.signal("INT");
    let streamed = running.answer_after(begun).body;
    assert!(
        streamed.contains("this server ended before the answer did"),
        "{streamed}"
    );
    let whole = whole.answer();
    whole.refused(503, "this server ended before the answer did");
    assert_eq!(whole.header("retry-after"), Some("1"));
    let ended = host.end();
    assert_eq!(ended.code, 1, "{}", ended.stderr);
    assert!(ended.stderr.contains("cut off: 2"), "{}", ended.stderr);
}

#[test]
fn an_interrupted_generate_says_what_it_has() {
    let scratch = tempfile::tempdir().unwrap();
    let socket = scratch.path().join("admin.sock");
    let socket = socket.to_str().unwrap();
    let mut command = timetable();
    command
        .args([
            "generate",
            "--model",
            tiny_llama().to_str().unwrap(),
            "--admin",
            socket,
            "--json",
        ])
        .args([
            "--max-num-seqs",
            "2",
            "--max-tokens",
            "1000",
            "--ignore-eos",
        ])
        .args((0..200).flat_map(|at| ["--prompt".to_owned(), format!("t{}", 40 + at)]));
    let piped = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let host = Started::of(piped.spawn().unwrap());
    let ask = || run(&["builders", "--admin", socket, "--json"]);
    let deadline = Instant::now() + PATIENCE;
    while ask().code != 0 || ask().json()["engine"]["steps"].as_u64() < Some(3) {
        assert!(Instant::now() < deadline, "it does not begin");
    }
    signal(host.id(), "INT");
    let ended = host.finish(&"generate");
    assert_eq!(ended.code, 1, "{}", ended.stderr);
    ended.fails(1, &["interrupted"]);
    let outputs = ended.json()["outputs"].clone();
    let outputs = outputs.as_array().unwrap();
    assert_eq!(outputs.len(), 200);
    assert!(
        outputs
            .iter()
            .any(|output| output["finish_reason"] == "abort")
    );
    assert!(!scratch.path().join("admin.sock").exists());
}

#[test]
fn a_server_that_cannot_start_says_why_in_one_line() {
    let scratch = tempfile::tempdir().unwrap();
    let model = tiny_llama();
    let model = model.to_str().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let odd = file(&scratch, "odd.toml", b"[server]\nlistn = \"x\"\n");
    let keys = file(&scratch, "keys", b"sk-secret one two\n");
    let swapped = file(&scratch, "swapped", b"acme sk-secret\n");
    let tenants = file(&scratch, "tenants.toml", b"[tenants.acme]\n");
    let template = file(&scratch, "template", b"{% for %}");
    let start = |further: &[&str]| {
        let mut arguments = vec!["serve", "--model", model, "--admin", "none"];
        arguments.extend(further);
        run(&arguments)
    };
    start(&["--listen", &taken]).fails(5, &[&taken, "cannot be listened at"]);
    start(&["--listen", "nowhere"]).fails(2, &["--listen nowhere", "HOST:PORT"]);
    start(&["--config", &odd]).fails(4, &["listn", "listen"]);
    start(&["--config", "/nowhere.toml"]).fails(4, &["/nowhere.toml"]);
    start(&["--listen", "127.0.0.1:0", "--api-keys", &keys]).fails(4, &["API keys", "line 1"]);
    let refused = start(&[
        "--listen",
        "127.0.0.1:0",
        "--api-keys",
        &swapped,
        "--config",
        &tenants,
    ]);
    refused.fails(4, &["not configured", "acme"]);
    assert!(!refused.stderr.contains("sk-secret"));
    start(&["--listen", "127.0.0.1:0", "--chat-template", &template]).fails(4, &["chat template"]);
    let model_missing = run(&[
        "serve",
        "--model",
        "/nowhere",
        "--admin",
        "none",
        "--listen",
        "127.0.0.1:0",
    ]);
    model_missing.fails(4, &["/nowhere"]);
    // A cache that the memory has no room for.
    start(&["--listen", "127.0.0.1:0", "--memory-fraction", "0.000001"]).fails(4, &["memory"]);
}
