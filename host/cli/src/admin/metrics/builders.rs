//! Metrics of slots and of the versions in them.

use serde_json::Value;

use super::{Kind, Metric, Of};

/// Nanoseconds of a second.
const NS: f64 = 1e9;

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("")
}

pub(super) const METRICS: [Metric; 24] = [
    Metric {
        name: "timetable_attention_backend_info",
        kind: Kind::Gauge,
        help: "Layers that a slot's attention group has.",
        labels: &["kv_cache_group"],
        of: Of::Slot(|slot, out| {
            let kv_cache_group = slot["kv_cache_group"].to_string();
            out.number(&[("kv_cache_group", &kv_cache_group)], &slot["layers"]);
        }),
    },
    Metric {
        name: "timetable_builder_info",
        kind: Kind::Gauge,
        help: "1; the labels say the version that serves a slot, its name and the slot's state: plain, active, recovering, quarantined, backing_off, closed.",
        labels: &["version", "name", "state"],
        of: Of::Slot(|slot, out| {
            let active = &slot["active"];
            let labels = [
                ("version", text(&active["version"])),
                ("name", text(&active["name"])),
                ("state", text(&slot["state"])),
            ];
            out.add(&labels, 1.0);
        }),
    },
    Metric {
        name: "timetable_builder_version_info",
        kind: Kind::Gauge,
        help: "1; the labels say a version's name and stage: active, previous, or shadow and canary of one that is tried.",
        labels: &["name", "stage"],
        of: Of::Version(|version, out| {
            let labels = [
                ("name", text(&version["name"])),
                ("stage", text(&version["stage"])),
            ];
            out.add(&labels, 1.0);
        }),
    },
    Metric {
        name: "timetable_builder_steps_total",
        kind: Kind::Counter,
        help: "Steps that a version built and that were served so.",
        labels: &[],
        of: Of::Version(|version, out| out.number(&[], &version["steps"])),
    },
    Metric {
        name: "timetable_builder_build_seconds",
        kind: Kind::Histogram,
        help: "Time of a version's build for a step that was served so, verification not included, in seconds.",
        labels: &[],
        of: Of::Version(|version, out| out.histogram(&version["build"], "sum_ns", NS)),
    },
    Metric {
        name: "timetable_builder_verify_seconds",
        kind: Kind::Histogram,
        help: "Time of verifying what a version built for a step that was served so, in seconds.",
        labels: &[],
        of: Of::Version(|version, out| out.histogram(&version["verify"], "sum_ns", NS)),
    },
    Metric {
        name: "timetable_builder_splits_max",
        kind: Kind::Gauge,
        help: "The largest split count that a version chose.",
        labels: &[],
        of: Of::Version(|version, out| out.number(&[], &version["splits"]["max"])),
    },
    Metric {
        name: "timetable_builder_work_items_max",
        kind: Kind::Gauge,
        help: "The most work items of a step that a version chose.",
        labels: &[],
        of: Of::Version(|version, out| out.number(&[], &version["work_items"]["max"])),
    },
    Metric {
        name: "timetable_builder_faults_total",
        kind: Kind::Counter,
        help: "Faults of a version, by kind.",
        labels: &["kind"],
        of: Of::Version(|version, out| out.each("kind", &version["faults"], 1.0)),
    },
    Metric {
        name: "timetable_builder_all_faults_total",
        kind: Kind::Counter,
        help: "Faults of all versions that a slot had, by kind.",
        labels: &["kind"],
        of: Of::Slot(|slot, out| out.each("kind", &slot["all_faults"], 1.0)),
    },
    Metric {
        name: "timetable_builder_plain_steps_total",
        kind: Kind::Counter,
        help: "Steps that the plain builder built, because there is no component or as a fallback.",
        labels: &[],
        of: Of::Slot(|slot, out| out.number(&[], &slot["plain_steps"])),
    },
    Metric {
        name: "timetable_builder_fallback_steps_total",
        kind: Kind::Counter,
        help: "Steps that the plain builder built although there is a component, by reason: fault (in that step), declined, backing_off, quarantined, recovering.",
        labels: &["reason"],
        of: Of::Slot(|slot, out| out.each("reason", &slot["fallbacks"], 1.0)),
    },
    Metric {
        name: "timetable_builder_failed_steps_total",
        kind: Kind::Counter,
        help: "Steps that failed: nobody had acceptable metadata, or the fault policy left none to the plain builder.",
        labels: &[],
        of: Of::Slot(|slot, out| out.number(&[], &slot["failed_steps"])),
    },
    Metric {
        name: "timetable_builder_quarantines_total",
        kind: Kind::Counter,
        help: "Versions that were taken out of service after faults.",
        labels: &[],
        of: Of::Slot(|slot, out| out.number(&[], &slot["quarantines"])),
    },
    Metric {
        name: "timetable_builder_returns_total",
        kind: Kind::Counter,
        help: "Times that the last good version took over by itself.",
        labels: &[],
        of: Of::Slot(|slot, out| out.number(&[], &slot["returns"])),
    },
    Metric {
        name: "timetable_builder_reruns_total",
        kind: Kind::Counter,
        help: "Sampled steps that a fresh instance built again, to be compared.",
        labels: &[],
        of: Of::Slot(|slot, out| out.number(&[], &slot["reruns"])),
    },
    Metric {
        name: "timetable_builder_candidate_info",
        kind: Kind::Gauge,
        help: "1; the labels say the version that is being tried, or was tried last, and its stage.",
        labels: &["version", "name", "stage"],
        of: Of::Slot(|slot, out| {
            let candidate = &slot["candidate"];
            if let Some(stage) = candidate["stage"].as_str() {
                let version = text(&candidate["version"]["version"]);
                let name = text(&candidate["version"]["name"]);
                out.add(
                    &[("version", version), ("name", name), ("stage", stage)],
                    1.0,
                );
            }
        }),
    },
    Metric {
        name: "timetable_builder_candidate_steps",
        kind: Kind::Gauge,
        help: "Steps of the candidate: shown to it in shadow, compared, skipped, declined, and served by it in canary.",
        labels: &["kind"],
        of: Of::Slot(|slot, out| {
            let candidate = &slot["candidate"];
            let shadow = &candidate["shadow"];
            for (kind, count) in [
                ("shown", &shadow["steps"]),
                ("compared", &shadow["observed"]),
                ("skipped", &shadow["skipped"]),
                ("declined", &shadow["declined"]),
                ("served", &candidate["canary"]["steps"]),
            ] {
                out.number(&[("kind", kind)], count);
            }
        }),
    },
    Metric {
        name: "timetable_builder_shadow_differences",
        kind: Kind::Gauge,
        help: "Shadow steps in which the candidate's metadata meant something else than what was served.",
        labels: &[],
        of: Of::Slot(|slot, out| out.number(&[], &slot["candidate"]["shadow"]["differences"])),
    },
    Metric {
        name: "timetable_builder_candidate_faults",
        kind: Kind::Gauge,
        help: "Faults of the candidate in shadow and canary.",
        labels: &[],
        of: Of::Slot(|slot, out| out.number(&[], &slot["candidate"]["faults"])),
    },
    Metric {
        name: "timetable_builder_candidate_build_seconds",
        kind: Kind::Gauge,
        help: "Median time of a build, of the candidate and of the version in service beside it, by stage, in seconds.",
        labels: &["stage", "of"],
        of: Of::Slot(|slot, out| {
            for stage in ["shadow", "canary"] {
                for (of, key) in [
                    ("candidate", "candidate_p50_ns"),
                    ("active", "active_p50_ns"),
                ] {
                    if let Some(ns) = slot["candidate"][stage][key].as_f64() {
                        out.add(&[("stage", stage), ("of", of)], ns / NS);
                    }
                }
            }
        }),
    },
    Metric {
        name: "timetable_builder_candidate_fuel",
        kind: Kind::Gauge,
        help: "Fuel of all shadow builds, of the candidate and of the version in service beside it.",
        labels: &["of"],
        of: Of::Slot(|slot, out| {
            for (of, key) in [("candidate", "candidate_fuel"), ("active", "active_fuel")] {
                out.number(&[("of", of)], &slot["candidate"]["shadow"][key]);
            }
        }),
    },
    Metric {
        name: "timetable_builder_activations_total",
        kind: Kind::Counter,
        help: "Candidates that got into service.",
        labels: &[],
        of: Of::Slot(|slot, out| out.number(&[], &slot["activations"])),
    },
    Metric {
        name: "timetable_builder_withdrawals_total",
        kind: Kind::Counter,
        help: "Candidates that were withdrawn.",
        labels: &[],
        of: Of::Slot(|slot, out| out.number(&[], &slot["withdrawals"])),
    },
];
