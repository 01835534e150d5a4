//! What a host answered at one moment, as far as it is shown.
//!
//! Lenient: what is missing, as from a host of another version, is nothing. Must never know: how it is drawn.

use std::time::Duration;

use serde_json::Value;

/// A host at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// When, since some fixed moment.
    pub at: Duration,
    pub model: String,
    pub steps: u64,
    pub failed_steps: u64,
    pub fallback_steps: u64,
    pub tokens_sampled: u64,
    pub tokens_computed: u64,
    pub preemptions: u64,
    pub running: u64,
    pub waiting: u64,
    /// Share of the KV cache's blocks in use, 0 to 1.
    pub kv_cache_usage: Option<f64>,
    pub builders: Vec<Builder>,
    pub tenants: Vec<Tenant>,
}

/// One slot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Builder {
    pub slot: String,
    pub state: String,
    /// None: the plain builder serves.
    pub active: Option<Version>,
    pub previous: Option<Version>,
    pub candidate: Option<Candidate>,
    pub steps: u64,
    pub plain_steps: u64,
    pub failed_steps: u64,
    pub build_p50_ns: Option<u64>,
    pub build_p99_ns: Option<u64>,
    pub verify_p50_ns: Option<u64>,
    /// Of all versions.
    pub faults: u64,
    /// Kind, count, version and message of the last ones, oldest first.
    pub fault_records: Vec<(String, u64, String, String)>,
    pub on_fault: String,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Version {
    pub version: String,
    pub name: String,
    pub origin: String,
}

/// A version that is being tried.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Candidate {
    pub version: Version,
    pub stage: String,
    /// Steps that it was shown and compared in shadow, and those in which it differed.
    pub observed: u64,
    pub differences: u64,
    /// Steps that it served in canary.
    pub served: u64,
    pub faults: u64,
    pub build_p50_ns: Option<u64>,
}

/// One tenant's requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tenant {
    /// Empty: of nobody in particular.
    pub name: String,
    pub running: u64,
    pub waiting: u64,
    pub requests: u64,
    pub failed_requests: u64,
    pub steps: u64,
    pub tokens_sampled: u64,
}

impl Sample {
    /// Of the table of builders that the host answered with.
    pub fn read(table: &Value, at: Duration) -> Sample {
        let engine = &table["engine"];
        Sample {
            at,
            model: text(&table["model_name"]),
            steps: count(&engine["steps"]),
            failed_steps: count(&engine["failed_steps"]),
            fallback_steps: count(&engine["fallback_steps"]),
            tokens_sampled: count(&engine["tokens_sampled"]),
            tokens_computed: count(&engine["tokens_computed"]),
            preemptions: count(&engine["preemptions"]),
            running: count(&engine["running"]),
            waiting: count(&engine["waiting"]),
            kv_cache_usage: engine["kv_cache_usage"].as_f64(),
            builders: list(&table["builders"]).map(builder).collect(),
            tenants: list(&engine["tenants"]).map(tenant).collect(),
        }
    }
}

fn builder(value: &Value) -> Builder {
    let records = list(&value["fault_records"]).map(|record| {
        (
            text(&record["kind"]),
            count(&record["count"]),
            text(&record["version"]),
            text(&record["message"]),
        )
    });
    Builder {
        slot: text(&value["group"]),
        state: text(&value["state"]),
        active: version(&value["active"]),
        previous: version(&value["previous"]),
        candidate: candidate(&value["candidate"]),
        steps: count(&value["steps"]),
        plain_steps: count(&value["plain_steps"]),
        failed_steps: count(&value["failed_steps"]),
        build_p50_ns: value["build_p50_ns"].as_u64(),
        build_p99_ns: value["build_p99_ns"].as_u64(),
        verify_p50_ns: value["verify_p50_ns"].as_u64(),
        faults: value["all_faults"]
            .as_object()
            .map_or(0, |kinds| kinds.values().map(count).sum()),
        fault_records: records.collect(),
        on_fault: text(&value["policy"]["on_fault"]),
    }
}

fn version(value: &Value) -> Option<Version> {
    value.is_object().then(|| Version {
        version: text(&value["version"]),
        name: text(&value["name"]),
        origin: text(&value["origin"]),
    })
}

fn candidate(value: &Value) -> Option<Candidate> {
    let (shadow, canary) = (&value["shadow"], &value["canary"]);
    let p50 = |stage: &Value| stage["candidate_p50_ns"].as_u64();
    Some(Candidate {
        version: version(&value["version"])?,
        stage: text(&value["stage"]),
        observed: count(&shadow["observed"]),
        differences: count(&shadow["differences"]),
        served: count(&canary["steps"]),
        faults: count(&value["faults"]),
        build_p50_ns: p50(canary).or_else(|| p50(shadow)),
    })
}

fn tenant(value: &Value) -> Tenant {
    Tenant {
        name: text(&value["name"]),
        running: count(&value["running"]),
        waiting: count(&value["waiting"]),
        requests: count(&value["requests"]),
        failed_requests: count(&value["failed_requests"]),
        steps: count(&value["steps"]),
        tokens_sampled: count(&value["tokens_sampled"]),
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

/// One line, without what a terminal would obey: names and messages come from guests.
fn text(value: &Value) -> String {
    let text = value.as_str().unwrap_or("");
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}
