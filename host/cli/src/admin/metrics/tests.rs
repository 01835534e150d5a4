//! The text format, and `docs/metrics.md`.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{metrics, render};

fn latency() -> Value {
    json!({ "count": 3, "sum_ns": 4_000, "p50_ns": 1_000, "p99_ns": 2_000, "at_most": [[1_023, 2], [2_047, 3]] })
}

/// A table with every figure that there may be.
fn table() -> Value {
    json!({
        "model_name": "tiny",
        "builders": [{
            "backend": "FLASH_ATTN", "group": "FLASH_ATTN/0@ac\"me", "layers": 30, "kv_cache_group": 0, "state": "active",
            "plain_steps": 9, "fallbacks": { "fault": 1, "declined": 8 }, "active": { "version": "ab", "name": "flash-attn" },
            "all_faults": { "trap": 3, "fuel": 1 }, "failed_steps": 5, "quarantines": 1, "returns": 1, "reruns": 2,
            "bundles": { "written": 4, "left_out": 7, "failed": 0 }, "watchdog_restarts": 0, "watchdog_stalls": 0,
            "activations": 1, "withdrawals": 2,
            "candidate": {
                "version": { "version": "cd", "name": "new" }, "stage": "canary", "faults": 0,
                "shadow": { "steps": 9, "observed": 8, "differences": 1, "candidate_p50_ns": 2000, "candidate_fuel": 70 },
                "canary": { "steps": 3, "candidate_p50_ns": null },
            },
            "versions": [{
                "version": "ab", "name": "flash-attn", "stage": "active", "steps": 12, "build": latency(), "verify": latency(),
                "splits": { "max": 4 }, "work_items": { "max": 9 }, "faults": { "trap": 2 },
            }],
        }],
        "cudagraph_mode": { "configured": "FULL_AND_PIECEWISE", "survived": "NONE" },
        "engine": {
            "steps": 13, "failed_steps": 1, "fallback_steps": 2, "tokens_sampled": 20, "tokens_computed": 50, "prompt_tokens": 30,
            "speculation": { "num_drafts": 6, "num_draft_tokens": 18, "num_accepted_tokens": 7, "num_accepted_tokens_per_pos": [4, 3] },
            "preemptions": 0, "running": 1, "waiting": 2, "prefix_queries": 5, "prefix_hits": 4, "kv_cache_usage": 0.5,
            "kv_cache_blocks": 255, "finished": { "stop": 1, "length": 2 },
            "step_tokens": { "count": 13, "sum": 50, "at_most": [[1, 0], [8, 13]] },
            "step_ns": { "count": 13, "sum": 26_000_000, "at_most": [[2_500_000, 13]] },
            "total_ns": { "build": 1_500_000 }, "device_total_ns": { "kernel": 2_000_000, "idle": 0 },
            "tenants": [
                { "name": null, "requests": 1, "failed_requests": 0, "steps": 2, "tokens_computed": 3, "tokens_sampled": 4, "running": 5, "waiting": 6 },
            ],
        },
        "http": {
            "requests": [{ "handler": "/health", "method": "GET", "status": "200", "count": 7 }],
            "first_token_ns": { "count": 2, "sum": 3_000_000, "at_most": [[1_000_000, 1]] },
            "inter_token_ns": { "count": 1, "sum": 2_000_000, "at_most": [[2_000_000, 1]] },
            "request_ns": { "count": 1, "sum": 5_000_000, "at_most": [] },
            "running": 3, "connections": 4,
        },
        "memory": { "weights_bytes": 1024, "blocks": 7 },
        "instances": { "ab": 2, "cd": 1 },
    })
}

#[test]
fn the_table_becomes_prometheus_text() {
    let text = render(&table());
    let slot = "backend=\"FLASH_ATTN\",group=\"FLASH_ATTN/0@ac\\\"me\",tenant=\"ac\\\"me\"";
    for line in [
        "# TYPE timetable_builder_steps_total counter",
        "# HELP vllm:num_requests_running Requests that hold KV cache blocks.",
        "vllm:num_requests_waiting{model_name=\"tiny\",engine=\"0\"} 2",
        "vllm:kv_cache_usage_perc{model_name=\"tiny\",engine=\"0\"} 0.5",
        "vllm:request_success_total{model_name=\"tiny\",engine=\"0\",finished_reason=\"length\"} 2",
        "vllm:spec_decode_num_draft_tokens_total{model_name=\"tiny\",engine=\"0\"} 18",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name=\"tiny\",engine=\"0\",position=\"1\"} 3",
        "vllm:iteration_tokens_total_bucket{model_name=\"tiny\",engine=\"0\",le=\"8\"} 13",
        "vllm:iteration_tokens_total_sum{model_name=\"tiny\",engine=\"0\"} 50",
        &format!("timetable_attention_backend_info{{{slot},kv_cache_group=\"0\"}} 30"),
        &format!("timetable_builder_steps_total{{{slot},version=\"ab\"}} 12"),
        &format!(
            "timetable_builder_build_seconds_bucket{{{slot},version=\"ab\",le=\"0.000001023\"}} 2"
        ),
        &format!("timetable_builder_build_seconds_bucket{{{slot},version=\"ab\",le=\"+Inf\"}} 3"),
        &format!("timetable_builder_verify_seconds_sum{{{slot},version=\"ab\"}} 0.000004"),
        &format!("timetable_builder_verify_seconds_count{{{slot},version=\"ab\"}} 3"),
        &format!("timetable_builder_faults_total{{{slot},version=\"ab\",kind=\"trap\"}} 2"),
        &format!("timetable_builder_all_faults_total{{{slot},kind=\"trap\"}} 3"),
        &format!("timetable_builder_fallback_steps_total{{{slot},reason=\"declined\"}} 8"),
        &format!("timetable_builder_failed_steps_total{{{slot}}} 5"),
        &format!("timetable_builder_candidate_steps{{{slot},kind=\"compared\"}} 8"),
        &format!("timetable_builder_shadow_differences{{{slot}}} 1"),
        &format!(
            "timetable_builder_candidate_build_seconds{{{slot},stage=\"shadow\",of=\"candidate\"}} 0.000002"
        ),
        &format!("timetable_builder_withdrawals_total{{{slot}}} 2"),
        "timetable_fault_bundles_total{outcome=\"left_out\"} 7",
        "timetable_cudagraph_mode_info{configured=\"FULL_AND_PIECEWISE\",survived=\"NONE\"} 1",
        "timetable_steps_total 13",
        "timetable_step_duration_seconds_bucket{le=\"0.0025\"} 13",
        "timetable_step_seconds_total{part=\"build\"} 0.0015",
        "timetable_device_seconds_total{part=\"kernel\"} 0.002",
        "timetable_device_memory_bytes{use=\"weights\"} 1024",
        "timetable_builder_generations 2",
        "timetable_builder_instances{version=\"ab\"} 2",
        "vllm:time_to_first_token_seconds_bucket{model_name=\"tiny\",engine=\"0\",le=\"0.001\"} 1",
        "http_requests_total{handler=\"/health\",method=\"GET\",status=\"200\"} 7",
        "timetable_http_requests 3",
        "timetable_tenant_tokens_total{tenant=\"\",kind=\"generated\"} 4",
    ] {
        assert!(
            text.lines().any(|found| found == line),
            "{line} is missing in\n{text}"
        );
    }
}

#[test]
fn a_figure_that_is_not_there_is_not_shown() {
    assert_eq!(render(&json!({})), "");
    let text = render(&json!({ "engine": { "steps": 1 } }));
    assert_eq!(
        text,
        "# HELP timetable_steps_total Steps with at least one row.\n# TYPE timetable_steps_total counter\ntimetable_steps_total 1\n"
    );
}

/// `docs/metrics.md` has a row for each metric and no other: name, type, labels and meaning. And everything that is written has a
/// row, with the labels that the row names.
#[test]
fn the_document_names_every_metric_and_no_other() {
    let document = include_str!("../../../../../docs/metrics.md");
    let found: Vec<&str> = document
        .lines()
        .filter(|line| {
            ["| `vllm:", "| `timetable_", "| `http_"]
                .iter()
                .any(|start| line.starts_with(start))
        })
        .collect();
    let code = |names: Vec<&str>| {
        let quoted = names.iter().map(|name| format!("`{name}`"));
        quoted.collect::<Vec<_>>().join(", ")
    };
    let expected: Vec<String> = metrics()
        .map(|metric| {
            let labels = code([metric.of.labels(), metric.labels].concat());
            let (name, kind, help) = (metric.name, metric.kind.name(), metric.help);
            format!("| `{name}` | {kind} | {labels} | {help} |")
        })
        .collect();
    assert_eq!(
        found,
        expected,
        "the rows should be\n{}",
        expected.join("\n")
    );

    let documented: BTreeMap<&str, Vec<&str>> = metrics()
        .map(|metric| (metric.name, [metric.of.labels(), metric.labels].concat()))
        .collect();
    let text = render(&table());
    let mut seen = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap();
        let family = ["_bucket", "_sum", "_count"]
            .iter()
            .filter_map(|suffix| name.strip_suffix(suffix))
            .chain([name])
            .find(|name| documented.contains_key(name))
            .unwrap_or_else(|| panic!("{name} has no row"));
        seen.push(family);
        let labels = line.split_once('{').map_or("", |(_, labels)| labels);
        for label in labels
            .split(',')
            .filter_map(|label| label.split_once("=\""))
        {
            let (label, _) = label;
            assert!(
                label == "le" || documented[family].contains(&label),
                "{family} has no label {label}: {line}"
            );
        }
    }
    let unseen: Vec<_> = documented
        .keys()
        .filter(|name| !seen.contains(name))
        .collect();
    assert!(
        unseen.is_empty(),
        "{unseen:?} have no sample in the full table"
    );
}
