//! `bench serve` with a server of its own, and what it does not take.

mod support;

use support::{file, run, tiny_llama};

/// Against a server of the tiny model that it starts.
fn bench<'a>(model: &'a str, arguments: &[&'a str], serve: &[&'a str]) -> support::Ran {
    let mut all = vec!["bench", "serve", "--model", model];
    all.extend(arguments);
    all.extend(["--", "--weights", "f32", "--num-gpu-blocks-override", "256"]);
    all.extend(serve);
    run(&all)
}

#[test]
fn clients_are_counted_and_timed() {
    let model = tiny_llama();
    let model = model.to_str().unwrap();
    let requests = [
        "--clients",
        "4",
        "--max-requests",
        "20",
        "--random-output-len",
        "9",
    ];
    let ran = bench(model, &[&requests[..], &["--json"]].concat(), &[]);
    let report = ran.succeeds().json();
    assert_eq!(
        (&report["completed"], &report["failed"]),
        (&20.into(), &0.into()),
        "{report}"
    );
    assert_eq!(report["total_input_tokens"], 20 * 128);
    assert_eq!(report["total_output_tokens"], 20 * 9);
    let rate = report["request_throughput"].as_f64().unwrap();
    let seconds = report["duration"].as_f64().unwrap();
    assert!((rate * seconds - 20.0).abs() < 1e-6, "{report}");
    for (latency, count) in [("ttft_ms", 20), ("tpot_ms", 20), ("e2e_ms", 20)] {
        let of = &report[latency];
        assert_eq!(of["count"], count, "{latency}: {of}");
        let at = |quantile: &str| of[quantile].as_f64().unwrap();
        assert!(
            at("p50") > 0.0 && at("p50") <= at("p99") && at("p99") <= at("max"),
            "{of}"
        );
    }
    assert!(
        report["ttft_ms"]["max"].as_f64() <= report["e2e_ms"]["max"].as_f64(),
        "{report}"
    );

    // A server with keys, and the same for people.
    let scratch = tempfile::tempdir().unwrap();
    let keys = file(&scratch, "keys", b"secret\n");
    let ran = bench(
        model,
        &[&requests[..], &["--api-key", "secret"]].concat(),
        &["--api-keys", &keys],
    );
    let text = &ran.succeeds().stdout;
    for part in [
        "20 answered, 0 failed",
        "requests/s",
        "TTFT",
        "TPOT",
        "ITL",
        "E2E",
        "P99",
    ] {
        assert!(text.contains(part), "`{part}` is missing in\n{text}");
    }
    let ran = bench(model, &requests, &["--api-keys", &keys]);
    ran.fails(5, &["/v1/models", "401"]);
}

#[test]
fn traces_are_scaled_to_the_model_and_sent_when_they_arrive() {
    let (scratch, model) = (tempfile::tempdir().unwrap(), tiny_llama());
    let model = model.to_str().unwrap();
    let mooncake = (0..6).map(|number| {
        format!(
            "{{\"timestamp\": {}, \"input_length\": 1000, \"output_length\": 80, \"hash_ids\": [0, {number}]}}\n",
            number * 1000
        )
    });
    let mooncake = file(
        &scratch,
        "mooncake.jsonl",
        mooncake.collect::<String>().as_bytes(),
    );
    let ran = bench(
        model,
        &[
            "--trace",
            &mooncake,
            "--rate-scale",
            "20",
            "--length-scale",
            "0.25",
            "--json",
        ],
        &[],
    );
    let report = ran.succeeds().json();
    assert_eq!(
        (&report["completed"], &report["failed"]),
        (&6.into(), &0.into()),
        "{report}"
    );
    assert_eq!(report["total_input_tokens"], 6 * 250);
    assert_eq!(report["total_output_tokens"], 6 * 20);
    assert_eq!(report["cut_requests"], 0);
    // The last arrives after five seconds of the trace.
    assert!(report["duration"].as_f64() > Some(0.25), "{report}");

    let azure = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,4000,44\n\
        2023-11-16 18:15:46.6905900,396,2000\n";
    let azure = file(&scratch, "azure.csv", azure);
    let ran = bench(
        model,
        &[
            "--trace",
            &azure,
            "--clients",
            "2",
            "--max-requests",
            "2",
            "--max-output-len",
            "30",
            "--json",
        ],
        &["--max-model-len", "512"],
    );
    let report = ran.succeeds().json();
    assert_eq!(
        (&report["completed"], &report["cut_requests"]),
        (&2.into(), &2.into()),
        "{report}"
    );
    assert_eq!(report["total_input_tokens"], 512 - 30 + 396);
    assert_eq!(report["total_output_tokens"], 60);
}

#[test]
fn what_cannot_be_measured_is_refused_in_one_line() {
    let scratch = tempfile::tempdir().unwrap();
    let none = scratch.path().join("none").to_str().unwrap().to_owned();
    let empty = file(&scratch, "empty.csv", b"");
    let url = ["--url", "http://127.0.0.1:9"];
    let with_url = |arguments: &[&str]| run(&[&["bench", "serve"], &url[..], arguments].concat());
    with_url(&["--clients", "1"]).fails(
        5,
        &[
            "127.0.0.1:9",
            "is an OpenAI-compatible server running there?",
        ],
    );
    with_url(&["--trace", &none]).fails(4, &["none", "No such file"]);
    with_url(&["--trace", &empty]).fails(4, &["has no requests"]);
    with_url(&["--clients", "0"]).fails(2, &["--clients 0"]);
    with_url(&["--clients", "1", "--random-input-len", "0"]).fails(2, &["length is 0"]);
    run(&["bench", "serve", "--url", "nowhere", "--clients", "1"]).fails(2, &["`nowhere`"]);
    run(&["bench", "serve", "--model", &none, "--clients", "1"]).fails(4, &["none"]);
    for usage in [
        &["--clients", "1"][..],
        &url,
        &["--url", "http://a", "--model", "m", "--clients", "1"],
    ] {
        assert_eq!(
            run(&[&["bench", "serve"], usage].concat()).code,
            2,
            "{usage:?}"
        );
    }
}
