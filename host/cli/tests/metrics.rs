//! A running host's metrics and live view, as a scraper and a person see them.

mod support;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use support::{Host, file, run};

/// Every sample by its name with labels, and the type of every family.
fn scrape(host: &Host) -> (BTreeMap<String, f64>, BTreeMap<String, String>) {
    let mut stream = UnixStream::connect(&host.socket).unwrap();
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: timetable\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    let (mut samples, mut types) = (BTreeMap::new(), BTreeMap::new());
    for line in body.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert_eq!(
                types.insert(name.to_owned(), kind.to_owned()),
                None,
                "{name} twice"
            );
        } else if !line.starts_with('#') {
            let (name, value) = line.rsplit_once(' ').unwrap();
            let value = value.parse().unwrap();
            assert_eq!(samples.insert(name.to_owned(), value), None, "{name} twice");
        }
    }
    (samples, types)
}

#[test]
fn a_hosts_metrics_count_what_it_did() {
    let host = Host::start(&[]);
    let path = file(
        &host.scratch,
        "fixed.wasm",
        timetable_reference::component("flash-attn-fixed-split")
            .unwrap()
            .bytes,
    );
    let reloaded = host.ask(&["reload", "FLASH_ATTN", &path]).succeeds().json();
    let version = reloaded["version"].as_str().unwrap();
    let table = host.wait_for(|table| {
        table["builders"][0]["versions"][0]["verify"]["count"].as_u64() > Some(10)
            && table["builders"][0]["active"]["version"] == reloaded["version"]
    });
    let (samples, types) = scrape(&host);

    // Every family is documented with its type.
    let document = include_str!("../../../docs/metrics.md");
    for (name, kind) in &types {
        let row = format!("| `{name}` | {kind} |");
        assert!(
            document.contains(&row),
            "`{row}` is missing in docs/metrics.md"
        );
    }
    // Histograms never fall, and end with all.
    for (name, kind) in &types {
        if kind != "histogram" {
            continue;
        }
        let mut count = 0;
        for (sample, all) in samples.range(format!("{name}_count")..) {
            let Some(labels) = sample.strip_prefix(&format!("{name}_count")) else {
                break;
            };
            let inner = labels.trim_matches(['{', '}']);
            let mut below: Vec<(f64, f64)> = samples
                .iter()
                .filter(|(bucket, _)| {
                    bucket.starts_with(&format!("{name}_bucket")) && bucket.contains(inner)
                })
                .map(|(bucket, below)| {
                    let (_, bound) = bucket.rsplit_once("le=\"").unwrap();
                    let bound = bound.trim_end_matches("\"}").replace("+Inf", "inf");
                    (bound.parse().unwrap(), *below)
                })
                .collect();
            below.sort_by(|one, other| one.0.total_cmp(&other.0));
            assert!(
                below.is_sorted_by(|one, other| one.1 <= other.1),
                "{name} {below:?}"
            );
            assert_eq!(below.last().unwrap(), &(f64::INFINITY, *all), "{name}");
            assert!(
                samples.contains_key(&format!("{name}_sum{labels}")),
                "{name}"
            );
            count += 1;
        }
        assert!(count > 0, "{name} has no histogram");
    }
    let slot = "backend=\"FLASH_ATTN\",group=\"FLASH_ATTN/0\",tenant=\"\"";
    let old = table["builders"][0]["previous"]["version"]
        .as_str()
        .unwrap();
    for version in [version, old] {
        for what in ["build_seconds_count", "verify_seconds_count", "steps_total"] {
            let name = format!("timetable_builder_{what}{{{slot},version=\"{version}\"}}");
            assert!(samples[&name] > 0.0, "{name}");
        }
        assert!(samples[&format!("timetable_builder_instances{{version=\"{version}\"}}")] >= 1.0);
    }
    let name = table["builders"][0]["previous"]["name"].as_str().unwrap();
    let stage = format!(
        "timetable_builder_version_info{{{slot},version=\"{old}\",name=\"{name}\",stage=\"previous\"}}"
    );
    assert_eq!(samples.get(&stage), Some(&1.0));
    assert_eq!(samples["timetable_builder_generations"], 2.0);
    assert_eq!(
        samples[&format!("timetable_builder_fallback_steps_total{{{slot},reason=\"fault\"}}")],
        0.0
    );
    let model = table["model_name"].as_str().unwrap();
    let field =
        |name: &str| samples[&format!("vllm:{name}{{model_name=\"{model}\",engine=\"0\"}}")];
    assert_eq!(field("num_requests_running"), 4.0);
    assert!(field("generation_tokens_total") > field("prompt_tokens_total"));
    assert!(field("prompt_tokens_total") >= 4.0);
    let usage = field("kv_cache_usage_perc");
    assert!(usage > 0.0 && usage < 1.0, "{usage}");
    assert_eq!(host.finish()["failed_steps"], 0);
}

#[test]
fn one_picture_of_a_host_is_plain_text() {
    let host = Host::start(&[]);
    let ran = run(&[
        "top",
        "--once",
        "--interval",
        "0.2",
        "--admin",
        &host.socket,
    ]);
    let text = &ran.succeeds().stdout;
    for part in [
        "timetable top",
        "tokens/s",
        "running 4",
        "FLASH_ATTN/0",
        "flash-attn",
        "embedded",
    ] {
        assert!(text.contains(part), "`{part}` is missing in\n{text}");
    }
    assert!(!text.contains('\u{1b}'), "no colours: {text:?}");
    assert!(!text.contains("– tokens/s"), "two samples: {text}");
    run(&["top", "--admin", &host.socket]).fails(2, &["not a terminal", "--once"]);
    let ran = run(&["top", "--once", "--interval", "0"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    drop(host);
    run(&["top", "--once", "--admin", "/nonexistent/admin.sock"]).fails(5, &["no running host"]);
}
