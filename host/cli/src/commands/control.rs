//! `rollback`, `builders`: asks the running host.

use std::path::PathBuf;

use serde_json::Value;

use super::reload::progress;
use super::table::table;
use super::{print, print_json};
use crate::admin::{self, Request};
use crate::cli::{AdminArgs, Builders, Rollback};
use crate::exit::Failure;

/// Returns to the version before.
pub fn rollback(arguments: &Rollback) -> Result<(), Failure> {
    let request = Request::Rollback {
        backend: arguments.backend.clone(),
        tenant: arguments.tenant.clone(),
    };
    let answer = admin::call(&socket(&arguments.admin), &request, &[])?;
    if arguments.admin.json {
        return print_json(&answer);
    }
    print(rolled_back(&arguments.backend, &answer).as_bytes())
}

fn rolled_back(backend: &str, answer: &Value) -> String {
    let text = |info: &Value, key: &str| info[key].as_str().unwrap_or("?").to_owned();
    let withdrawn = &answer["withdrawn"];
    if withdrawn.is_object() {
        return format!(
            "{backend}: the candidate {} ({}) is withdrawn; what serves goes on\n",
            short(&text(withdrawn, "version")),
            text(withdrawn, "name")
        );
    }
    format!(
        "{backend}: {} ({}) takes over at the next step, from {}\n",
        short(&text(answer, "version")),
        text(answer, "name"),
        text(answer, "origin")
    )
}

/// Shows the table of builders.
pub fn builders(arguments: &Builders) -> Result<(), Failure> {
    let answer = admin::call(&socket(&arguments.admin), &Request::Builders, &[])?;
    if arguments.admin.json {
        return print_json(&answer);
    }
    print(render(&answer).as_bytes())
}

/// Where the host is asked.
pub(super) fn socket(arguments: &AdminArgs) -> PathBuf {
    arguments.admin.clone().unwrap_or_else(admin::default_path)
}

/// The table for people, and below it candidates, the last faults and the CUDA graph mode.
fn render(answer: &Value) -> String {
    let empty = Vec::new();
    let builders = answer["builders"].as_array().unwrap_or(&empty);
    let rows: Vec<Vec<String>> = builders.iter().map(row).collect();
    let mut text = table(
        &[
            "BACKEND",
            "LAYERS",
            "VERSION",
            "NAME",
            "STATE",
            "STEPS",
            "PLAIN",
            "BUILD p50",
            "p99",
            "SPLITS mean",
            "max",
            "ITEMS mean",
            "max",
            "FAULTS",
            "PREVIOUS",
        ],
        &rows,
    );
    for builder in builders {
        if builder["candidate"].is_object() {
            text.push_str(&progress(builder));
            text.push('\n');
        }
        for fault in builder["fault_records"].as_array().unwrap_or(&empty) {
            text.push_str(&format!(
                "{}: {} × {} in {}: {}\n",
                slot(builder),
                fault["count"],
                fault["kind"].as_str().unwrap_or("?"),
                short(fault["version"].as_str().unwrap_or("?")),
                fault["message"].as_str().unwrap_or("?"),
            ));
        }
    }
    text.push_str(&graph_mode(&answer["cudagraph_mode"]));
    text
}

/// The CUDA graph mode that survived start-up, and why it is not the configured one.
fn graph_mode(mode: &Value) -> String {
    let Some(survived) = mode["survived"].as_str() else {
        return String::new();
    };
    let mut line = format!(
        "CUDA graph mode: {survived} (configured: {})",
        mode["configured"].as_str().unwrap_or("?")
    );
    for change in mode["changes"].as_array().into_iter().flatten() {
        line.push_str("; ");
        line.push_str(change["reason"].as_str().unwrap_or("?"));
    }
    line.push('\n');
    line
}

fn row(builder: &Value) -> Vec<String> {
    let count = |value: &Value| {
        value
            .as_u64()
            .map_or_else(String::new, |count| count.to_string())
    };
    let time = |value: &Value| {
        value
            .as_u64()
            .map_or_else(String::new, |ns| format!("{:.1} µs", ns as f64 / 1e3))
    };
    let mean = |value: &Value| {
        value
            .as_f64()
            .map_or_else(String::new, |mean| format!("{mean:.1}"))
    };
    let faults: u64 = builder["faults"]
        .as_object()
        .map_or(0, |kinds| kinds.values().filter_map(Value::as_u64).sum());
    vec![
        slot(builder),
        count(&builder["layers"]),
        builder["active"]["version"]
            .as_str()
            .map_or_else(String::new, short),
        builder["active"]["name"]
            .as_str()
            .unwrap_or("plain")
            .to_owned(),
        builder["state"].as_str().unwrap_or("?").to_owned(),
        count(&builder["steps"]),
        count(&builder["plain_steps"]),
        time(&builder["build_p50_ns"]),
        time(&builder["build_p99_ns"]),
        mean(&builder["splits"]["mean"]),
        count(&builder["splits"]["max"]),
        mean(&builder["work_items"]["mean"]),
        count(&builder["work_items"]["max"]),
        faults.to_string(),
        builder["previous"]["version"]
            .as_str()
            .map_or_else(String::new, short),
    ]
}

/// What a builder's slot is called: its backend, with the tenant whose it is.
fn slot(builder: &Value) -> String {
    let backend = builder["backend"].as_str().unwrap_or("?");
    match builder["tenant"].as_str() {
        Some(tenant) => format!("{backend}@{tenant}"),
        None => backend.to_owned(),
    }
}

/// The first digits of a hash: enough to tell versions apart.
pub(super) fn short(hash: &str) -> String {
    hash.chars().take(12).collect()
}

#[cfg(test)]
mod tests {
    use super::render;
    use serde_json::json;

    #[test]
    fn the_table_shows_versions_choices_and_faults() {
        let answer = json!({ "builders": [{
            "backend": "FLASH_ATTN", "layers": 30, "state": "active", "steps": 1200, "plain_steps": 1,
            "active": { "version": "0123456789abcdef0123", "name": "flash-attn" }, "previous": null,
            "build_p50_ns": 1480, "build_p99_ns": 2100,
            "splits": { "mean": 2.5, "max": 4 }, "work_items": { "mean": 10.0, "max": 16 },
            "faults": { "trap": 1 },
            "fault_records": [{ "kind": "trap", "message": "unreachable", "version": "0123456789abcdef0123", "count": 1 }],
        }], "cudagraph_mode": {
            "configured": "FULL", "survived": "NONE",
            "changes": [{ "from": "FULL", "to": "NONE", "reason": "no graphs here" }],
        }});
        let text = render(&answer);
        for expected in [
            "FLASH_ATTN",
            "0123456789ab ",
            "1.5 µs",
            "2.1 µs",
            "2.5",
            "1 × trap in 0123456789ab: unreachable",
            "\nCUDA graph mode: NONE (configured: FULL); no graphs here\n",
        ] {
            assert!(text.contains(expected), "{expected} is missing in\n{text}");
        }
    }
}
