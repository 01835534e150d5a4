//! The builders' table as Prometheus text: `curl --unix-socket PATH http://timetable/metrics`.
//!
//! Written from the same data as `timetable builders --json`, so that the two cannot disagree.

use std::fmt::Write;

use serde_json::Value;

/// One metric: name, type, help, and its samples of one group (labels and value).
struct Metric {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    samples: fn(&Value, &mut Vec<(String, f64)>),
}

const METRICS: [Metric; 25] = [
    Metric {
        name: "timetable_attention_backend_info",
        kind: "gauge",
        help: "Layers that each attention backend serves.",
        samples: |group, out| {
            let kv_cache_group = &group["kv_cache_group"];
            out.push((
                format!(",kv_cache_group=\"{kv_cache_group}\""),
                number(&group["layers"]),
            ));
        },
    },
    Metric {
        name: "timetable_builder_info",
        kind: "gauge",
        help: "The version that serves a group, and its state.",
        samples: |group, out| {
            let text = |value: &Value| escape(value.as_str().unwrap_or(""));
            out.push((
                format!(
                    ",version=\"{}\",name=\"{}\",state=\"{}\"",
                    text(&group["active"]["version"]),
                    text(&group["active"]["name"]),
                    text(&group["state"])
                ),
                1.0,
            ));
        },
    },
    Metric {
        name: "timetable_builder_steps_total",
        kind: "counter",
        help: "Steps that the version in service built.",
        samples: |group, out| out.push((String::new(), number(&group["steps"]))),
    },
    Metric {
        name: "timetable_builder_plain_steps_total",
        kind: "counter",
        help: "Steps that the plain builder built.",
        samples: |group, out| out.push((String::new(), number(&group["plain_steps"]))),
    },
    Metric {
        name: "timetable_builder_build_seconds",
        kind: "summary",
        help: "Time of a build, verification not included.",
        samples: |group, out| {
            for (quantile, key) in [("0.5", "build_p50_ns"), ("0.99", "build_p99_ns")] {
                if let Some(ns) = group[key].as_f64() {
                    out.push((format!(",quantile=\"{quantile}\""), ns / 1e9));
                }
            }
        },
    },
    Metric {
        name: "timetable_builder_splits_max",
        kind: "gauge",
        help: "The largest split count that the version in service chose.",
        samples: |group, out| out.push((String::new(), number(&group["splits"]["max"]))),
    },
    Metric {
        name: "timetable_builder_work_items_max",
        kind: "gauge",
        help: "The most work items of a step that the version in service chose.",
        samples: |group, out| out.push((String::new(), number(&group["work_items"]["max"]))),
    },
    Metric {
        name: "timetable_builder_failed_steps_total",
        kind: "counter",
        help: "Steps that failed: nobody had acceptable metadata, or the fault policy left none to the plain builder.",
        samples: |group, out| out.push((String::new(), number(&group["failed_steps"]))),
    },
    Metric {
        name: "timetable_builder_backoff_steps_total",
        kind: "counter",
        help: "Steps in which the component was left out after faults.",
        samples: |group, out| out.push((String::new(), number(&group["backoff_steps"]))),
    },
    Metric {
        name: "timetable_builder_quarantines_total",
        kind: "counter",
        help: "Versions that were taken out of service after faults.",
        samples: |group, out| out.push((String::new(), number(&group["quarantines"]))),
    },
    Metric {
        name: "timetable_builder_returns_total",
        kind: "counter",
        help: "Times that the last good version took over by itself.",
        samples: |group, out| out.push((String::new(), number(&group["returns"]))),
    },
    Metric {
        name: "timetable_builder_reruns_total",
        kind: "counter",
        help: "Sampled steps that a fresh instance built again.",
        samples: |group, out| out.push((String::new(), number(&group["reruns"]))),
    },
    Metric {
        name: "timetable_builder_all_faults_total",
        kind: "counter",
        help: "Faults of all versions, by kind.",
        samples: |group, out| {
            for (kind, count) in group["all_faults"].as_object().into_iter().flatten() {
                out.push((format!(",kind=\"{}\"", escape(kind)), number(count)));
            }
        },
    },
    Metric {
        name: "timetable_builder_fault_bundles_total",
        kind: "counter",
        help: "Fault bundles of the host: written, left out because they are like others, failed.",
        samples: |group, out| {
            for (outcome, count) in group["bundles"].as_object().into_iter().flatten() {
                out.push((format!(",outcome=\"{}\"", escape(outcome)), number(count)));
            }
        },
    },
    Metric {
        name: "timetable_watchdog_restarts_total",
        kind: "counter",
        help: "Ticker threads of the host's watchdog that were dead or stuck, and replaced.",
        samples: |group, out| out.push((String::new(), number(&group["watchdog_restarts"]))),
    },
    Metric {
        name: "timetable_watchdog_stalls_total",
        kind: "counter",
        help: "How many of them were stuck.",
        samples: |group, out| out.push((String::new(), number(&group["watchdog_stalls"]))),
    },
    Metric {
        name: "timetable_builder_faults_total",
        kind: "counter",
        help: "Faults of the version in service, by kind.",
        samples: |group, out| {
            for (kind, count) in group["faults"].as_object().into_iter().flatten() {
                out.push((format!(",kind=\"{}\"", escape(kind)), number(count)));
            }
        },
    },
    Metric {
        name: "timetable_builder_candidate_info",
        kind: "gauge",
        help: "The version that is being tried, or was tried last, and its stage.",
        samples: |group, out| {
            let candidate = &group["candidate"];
            if let Some(stage) = candidate["stage"].as_str() {
                let text = |key: &str| escape(candidate["version"][key].as_str().unwrap_or(""));
                out.push((
                    format!(
                        ",version=\"{}\",name=\"{}\",stage=\"{}\"",
                        text("version"),
                        text("name"),
                        escape(stage)
                    ),
                    1.0,
                ));
            }
        },
    },
    Metric {
        name: "timetable_builder_candidate_steps",
        kind: "gauge",
        help: "Steps of the candidate: shown to it in shadow, compared, skipped, declined, and served by it in canary.",
        samples: |group, out| {
            let candidate = &group["candidate"];
            let shadow = &candidate["shadow"];
            for (kind, count) in [
                ("shown", &shadow["steps"]),
                ("compared", &shadow["observed"]),
                ("skipped", &shadow["skipped"]),
                ("declined", &shadow["declined"]),
                ("served", &candidate["canary"]["steps"]),
            ] {
                if let Some(count) = count.as_f64() {
                    out.push((format!(",kind=\"{kind}\""), count));
                }
            }
        },
    },
    Metric {
        name: "timetable_builder_shadow_differences",
        kind: "gauge",
        help: "Shadow steps in which the candidate's metadata meant something else than what was served.",
        samples: |group, out| {
            if let Some(count) = group["candidate"]["shadow"]["differences"].as_f64() {
                out.push((String::new(), count));
            }
        },
    },
    Metric {
        name: "timetable_builder_candidate_faults",
        kind: "gauge",
        help: "Faults of the candidate in shadow and canary.",
        samples: |group, out| {
            if let Some(count) = group["candidate"]["faults"].as_f64() {
                out.push((String::new(), count));
            }
        },
    },
    Metric {
        name: "timetable_builder_candidate_build_seconds",
        kind: "gauge",
        help: "Median time of a build, of the candidate and of the version in service beside it, by stage.",
        samples: |group, out| {
            for stage in ["shadow", "canary"] {
                for (of, key) in [
                    ("candidate", "candidate_p50_ns"),
                    ("active", "active_p50_ns"),
                ] {
                    if let Some(ns) = group["candidate"][stage][key].as_f64() {
                        out.push((format!(",stage=\"{stage}\",of=\"{of}\""), ns / 1e9));
                    }
                }
            }
        },
    },
    Metric {
        name: "timetable_builder_candidate_fuel",
        kind: "gauge",
        help: "Fuel of all shadow builds, of the candidate and of the version in service beside it.",
        samples: |group, out| {
            for (of, key) in [("candidate", "candidate_fuel"), ("active", "active_fuel")] {
                if let Some(fuel) = group["candidate"]["shadow"][key].as_f64() {
                    out.push((format!(",of=\"{of}\""), fuel));
                }
            }
        },
    },
    Metric {
        name: "timetable_builder_activations_total",
        kind: "counter",
        help: "Candidates that got into service.",
        samples: |group, out| out.push((String::new(), number(&group["activations"]))),
    },
    Metric {
        name: "timetable_builder_withdrawals_total",
        kind: "counter",
        help: "Candidates that were withdrawn.",
        samples: |group, out| out.push((String::new(), number(&group["withdrawals"]))),
    },
];

/// All metrics of the table that `Control::builders` returns.
pub fn render(table: &Value) -> String {
    let groups = table["builders"].as_array().map_or(&[][..], Vec::as_slice);
    let mut text = String::new();
    let mut samples = Vec::new();
    for metric in &METRICS {
        let Metric {
            name, kind, help, ..
        } = metric;
        // Writing to a string does not fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for group in groups {
            (metric.samples)(group, &mut samples);
            let backend = escape(group["backend"].as_str().unwrap_or(""));
            let name_of_group = escape(group["group"].as_str().unwrap_or(""));
            for (labels, value) in samples.drain(..) {
                let _ = writeln!(
                    text,
                    "{name}{{backend=\"{backend}\",group=\"{name_of_group}\"{labels}}} {value}"
                );
            }
        }
    }
    if let (Some(configured), Some(survived)) = (
        table["cudagraph_mode"]["configured"].as_str(),
        table["cudagraph_mode"]["survived"].as_str(),
    ) {
        let _ = writeln!(
            text,
            "# HELP timetable_cudagraph_mode_info The configured CUDA graph mode and the one that survived start-up.\n\
             # TYPE timetable_cudagraph_mode_info gauge\n\
             timetable_cudagraph_mode_info{{configured=\"{}\",survived=\"{}\"}} 1",
            escape(configured),
            escape(survived)
        );
    }
    engine(&table["engine"], &mut text);
    memory(&table["memory"], &mut text);
    text
}

/// Counts of the engine, and where its steps' time went.
fn engine(engine: &Value, text: &mut String) {
    let Some(steps) = engine["steps"].as_f64() else {
        return;
    };
    let mut counter = |name: &str, help: &str, value: f64| {
        let _ = writeln!(
            text,
            "# HELP {name} {help}\n# TYPE {name} counter\n{name} {value}"
        );
    };
    counter(
        "timetable_steps_total",
        "Steps with at least one row.",
        steps,
    );
    counter(
        "timetable_failed_steps_total",
        "Steps whose requests failed.",
        number(&engine["failed_steps"]),
    );
    counter(
        "timetable_tokens_sampled_total",
        "Tokens sampled.",
        number(&engine["tokens_sampled"]),
    );
    for (name, help, parts) in [
        (
            "timetable_step_seconds_total",
            "Time of the step thread, by part of a step.",
            &engine["total_ns"],
        ),
        (
            "timetable_device_seconds_total",
            "Time of the device: copies to it, kernels, and idle between two steps.",
            &engine["device_total_ns"],
        ),
    ] {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
        for (part, ns) in parts.as_object().into_iter().flatten() {
            let seconds = number(ns) / 1e9;
            let _ = writeln!(text, "{name}{{part=\"{}\"}} {seconds}", escape(part));
        }
    }
}

/// What the device's memory is used for; nothing on the CPU.
fn memory(memory: &Value, text: &mut String) {
    let Some(parts) = memory.as_object() else {
        return;
    };
    let name = "timetable_device_memory_bytes";
    let _ = writeln!(
        text,
        "# HELP {name} Memory of the device, by use.\n# TYPE {name} gauge"
    );
    for (part, bytes) in parts.iter().filter(|(part, _)| part.ends_with("_bytes")) {
        let part = escape(part.trim_end_matches("_bytes"));
        let _ = writeln!(text, "{name}{{use=\"{part}\"}} {}", number(bytes));
    }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

/// A label's value, as the text format asks.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::render;
    use serde_json::json;

    #[test]
    fn the_table_becomes_prometheus_text() {
        let text = render(&json!({
            "builders": [{
                "backend": "FLASH_ATTN", "group": "full \"0\"", "layers": 30, "kv_cache_group": 0, "state": "active", "steps": 12,
                "plain_steps": 1, "active": { "version": "ab", "name": "flash-attn" },
                "build_p50_ns": 1500, "build_p99_ns": null,
                "splits": { "max": 4 }, "work_items": { "max": 9 }, "faults": { "trap": 2 }, "all_faults": { "trap": 3, "fuel": 1 }, "failed_steps": 5, "quarantines": 1,
                "bundles": { "written": 4, "left_out": 7, "failed": 0 }, "withdrawals": 2,
                "candidate": {
                    "version": { "version": "cd", "name": "new" }, "stage": "canary", "faults": 0,
                    "shadow": { "steps": 9, "observed": 8, "differences": 1, "candidate_p50_ns": 2000, "candidate_fuel": 70 },
                    "canary": { "steps": 3, "candidate_p50_ns": null },
                },
            }],
            "cudagraph_mode": { "configured": "FULL_AND_PIECEWISE", "survived": "NONE" },
            "engine": {
                "steps": 13, "failed_steps": 1, "tokens_sampled": 20,
                "total_ns": { "build": 1_500_000 }, "device_total_ns": { "kernel": 2_000_000, "idle": 0 },
            },
            "memory": { "weights_bytes": 1024, "blocks": 7 },
        }));
        for line in [
            "# TYPE timetable_builder_steps_total counter",
            "timetable_attention_backend_info{backend=\"FLASH_ATTN\",group=\"full \\\"0\\\"\",kv_cache_group=\"0\"} 30",
            "timetable_builder_steps_total{backend=\"FLASH_ATTN\",group=\"full \\\"0\\\"\"} 12",
            "timetable_builder_build_seconds{backend=\"FLASH_ATTN\",group=\"full \\\"0\\\"\",quantile=\"0.5\"} 0.0000015",
            "timetable_builder_faults_total{backend=\"FLASH_ATTN\",group=\"full \\\"0\\\"\",kind=\"trap\"} 2",
            "timetable_builder_all_faults_total{backend=\"FLASH_ATTN\",group=\"full \\\"0\\\"\",kind=\"trap\"} 3",
            "timetable_builder_failed_steps_total{backend=\"FLASH_ATTN\",group=\"full \\\"0\\\"\"} 5",
            "timetable_builder_fault_bundles_total{backend=\"FLASH_ATTN\",group=\"full \\\"0\\\"\",outcome=\"left_out\"} 7",
            "timetable_cudagraph_mode_info{configured=\"FULL_AND_PIECEWISE\",survived=\"NONE\"} 1",
            "timetable_builder_candidate_info{backend=\"FLASH_ATTN\",group=\"full \\\"0\\\"\",version=\"cd\",name=\"new\",stage=\"canary\"} 1",
            "timetable_builder_candidate_steps{backend=\"FLASH_ATTN\",group=\"full \\\"0\\\"\",kind=\"compared\"} 8",
            "timetable_builder_candidate_steps{backend=\"FLASH_ATTN\",group=\"full \\\"0\\\"\",kind=\"served\"} 3",
            "timetable_builder_shadow_differences{backend=\"FLASH_ATTN\",group=\"full \\\"0\\\"\"} 1",
            "timetable_builder_candidate_build_seconds{backend=\"FLASH_ATTN\",group=\"full \\\"0\\\"\",stage=\"shadow\",of=\"candidate\"} 0.000002",
            "timetable_builder_candidate_fuel{backend=\"FLASH_ATTN\",group=\"full \\\"0\\\"\",of=\"candidate\"} 70",
            "timetable_builder_withdrawals_total{backend=\"FLASH_ATTN\",group=\"full \\\"0\\\"\"} 2",
            "timetable_steps_total 13",
            "timetable_step_seconds_total{part=\"build\"} 0.0015",
            "timetable_device_seconds_total{part=\"kernel\"} 0.002",
            "timetable_device_memory_bytes{use=\"weights\"} 1024",
        ] {
            assert!(
                text.lines().any(|found| found == line),
                "{line} is missing in\n{text}"
            );
        }
        assert!(
            !text.contains("quantile=\"0.99\""),
            "a figure that is not there is not shown"
        );
    }
}
