//! Metrics of the host, its engine and its tenants. Where the concept is vLLM's, so are name, labels and unit.

use super::{Kind, Metric, Of};

/// Nanoseconds of a second.
const NS: f64 = 1e9;

pub(super) const METRICS: [Metric; 35] = [
    Metric {
        name: "vllm:num_requests_running",
        kind: Kind::Gauge,
        help: "Requests that hold KV cache blocks.",
        labels: &[],
        of: Of::Field(|engine, out| out.number(&[], &engine["running"])),
    },
    Metric {
        name: "vllm:num_requests_waiting",
        kind: Kind::Gauge,
        help: "Requests that wait to be scheduled.",
        labels: &[],
        of: Of::Field(|engine, out| out.number(&[], &engine["waiting"])),
    },
    Metric {
        name: "vllm:kv_cache_usage_perc",
        kind: Kind::Gauge,
        help: "Share of the KV cache's blocks that requests hold; 1 means all of them.",
        labels: &[],
        of: Of::Field(|engine, out| out.number(&[], &engine["kv_cache_usage"])),
    },
    Metric {
        name: "vllm:num_preemptions_total",
        kind: Kind::Counter,
        help: "Times that a request lost its blocks to another.",
        labels: &[],
        of: Of::Field(|engine, out| out.number(&[], &engine["preemptions"])),
    },
    Metric {
        name: "vllm:prefix_cache_queries_total",
        kind: Kind::Counter,
        help: "Prompt tokens that were looked up in the prefix cache.",
        labels: &[],
        of: Of::Field(|engine, out| out.number(&[], &engine["prefix_queries"])),
    },
    Metric {
        name: "vllm:prefix_cache_hits_total",
        kind: Kind::Counter,
        help: "Prompt tokens that were found in the prefix cache.",
        labels: &[],
        of: Of::Field(|engine, out| out.number(&[], &engine["prefix_hits"])),
    },
    Metric {
        name: "vllm:prompt_tokens_total",
        kind: Kind::Counter,
        help: "Prompt tokens of requests that got their first token.",
        labels: &[],
        of: Of::Field(|engine, out| out.number(&[], &engine["prompt_tokens"])),
    },
    Metric {
        name: "vllm:generation_tokens_total",
        kind: Kind::Counter,
        help: "Tokens generated.",
        labels: &[],
        of: Of::Field(|engine, out| out.number(&[], &engine["tokens_sampled"])),
    },
    Metric {
        name: "vllm:request_success_total",
        kind: Kind::Counter,
        help: "Requests that ended, by reason: stop, length, abort, error.",
        labels: &["finished_reason"],
        of: Of::Field(|engine, out| out.each("finished_reason", &engine["finished"], 1.0)),
    },
    Metric {
        name: "vllm:spec_decode_num_drafts_total",
        kind: Kind::Counter,
        help: "Decodes that verified draft tokens.",
        labels: &[],
        of: Of::Field(|engine, out| out.number(&[], &engine["speculation"]["num_drafts"])),
    },
    Metric {
        name: "vllm:spec_decode_num_draft_tokens_total",
        kind: Kind::Counter,
        help: "Draft tokens that were verified.",
        labels: &[],
        of: Of::Field(|engine, out| out.number(&[], &engine["speculation"]["num_draft_tokens"])),
    },
    Metric {
        name: "vllm:spec_decode_num_accepted_tokens_total",
        kind: Kind::Counter,
        help: "Draft tokens that were accepted.",
        labels: &[],
        of: Of::Field(|engine, out| out.number(&[], &engine["speculation"]["num_accepted_tokens"])),
    },
    Metric {
        name: "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        kind: Kind::Counter,
        help: "Draft tokens that were accepted, by their place among a decode's drafts, from 0.",
        labels: &["position"],
        of: Of::Field(|engine, out| {
            let counts = &engine["speculation"]["num_accepted_tokens_per_pos"];
            for (position, count) in counts.as_array().into_iter().flatten().enumerate() {
                out.number(&[("position", &position.to_string())], count);
            }
        }),
    },
    Metric {
        name: "vllm:iteration_tokens_total",
        kind: Kind::Histogram,
        help: "Tokens computed in a step.",
        labels: &[],
        of: Of::Field(|engine, out| out.histogram(&engine["step_tokens"], "sum", 1.0)),
    },
    Metric {
        name: "timetable_steps_total",
        kind: Kind::Counter,
        help: "Steps with at least one row.",
        labels: &[],
        of: Of::Host(|table, out| out.number(&[], &table["engine"]["steps"])),
    },
    Metric {
        name: "timetable_failed_steps_total",
        kind: Kind::Counter,
        help: "Steps in which requests failed.",
        labels: &[],
        of: Of::Host(|table, out| out.number(&[], &table["engine"]["failed_steps"])),
    },
    Metric {
        name: "timetable_fallback_steps_total",
        kind: Kind::Counter,
        help: "Steps in which a component faulted or declined and the plain builder served.",
        labels: &[],
        of: Of::Host(|table, out| out.number(&[], &table["engine"]["fallback_steps"])),
    },
    Metric {
        name: "timetable_tokens_computed_total",
        kind: Kind::Counter,
        help: "Tokens computed, prompts and answers, again after a preemption.",
        labels: &[],
        of: Of::Host(|table, out| out.number(&[], &table["engine"]["tokens_computed"])),
    },
    Metric {
        name: "timetable_step_duration_seconds",
        kind: Kind::Histogram,
        help: "Time of the step thread for a step, waiting for the device included, in seconds.",
        labels: &[],
        of: Of::Host(|table, out| out.histogram(&table["engine"]["step_ns"], "sum", NS)),
    },
    Metric {
        name: "timetable_step_seconds_total",
        kind: Kind::Counter,
        help: "Time of the step thread, by part of a step, in seconds.",
        labels: &["part"],
        of: Of::Host(|table, out| out.each("part", &table["engine"]["total_ns"], NS)),
    },
    Metric {
        name: "timetable_device_seconds_total",
        kind: Kind::Counter,
        help: "Time of the device, in seconds: copies to it, kernels, and idle between two steps. Zeros on the CPU.",
        labels: &["part"],
        of: Of::Host(|table, out| out.each("part", &table["engine"]["device_total_ns"], NS)),
    },
    Metric {
        name: "timetable_device_memory_bytes",
        kind: Kind::Gauge,
        help: "Memory of the device, by use, in bytes. None on the CPU.",
        labels: &["use"],
        of: Of::Host(|table, out| {
            for (part, bytes) in table["memory"].as_object().into_iter().flatten() {
                if let Some(part) = part.strip_suffix("_bytes") {
                    out.number(&[("use", part)], bytes);
                }
            }
        }),
    },
    Metric {
        name: "timetable_kv_cache_blocks",
        kind: Kind::Gauge,
        help: "Blocks of the KV cache that requests can have.",
        labels: &[],
        of: Of::Host(|table, out| out.number(&[], &table["engine"]["kv_cache_blocks"])),
    },
    Metric {
        name: "timetable_cudagraph_mode_info",
        kind: Kind::Gauge,
        help: "1; the labels say the configured CUDA graph mode and the one that survived start-up.",
        labels: &["configured", "survived"],
        of: Of::Host(|table, out| {
            let mode = &table["cudagraph_mode"];
            if let (Some(configured), Some(survived)) =
                (mode["configured"].as_str(), mode["survived"].as_str())
            {
                out.add(&[("configured", configured), ("survived", survived)], 1.0);
            }
        }),
    },
    Metric {
        name: "timetable_builder_generations",
        kind: Kind::Gauge,
        help: "Versions of builders of which an instance lives. One in service, one kept before it and one that is tried are three for each slot; more is a leak.",
        labels: &[],
        of: Of::Host(|table, out| {
            if let Some(versions) = table["instances"].as_object() {
                out.add(&[], versions.len() as f64);
            }
        }),
    },
    Metric {
        name: "timetable_builder_instances",
        kind: Kind::Gauge,
        help: "Instances that live, by version: in service, in reserve, or still to be dropped.",
        labels: &["version"],
        of: Of::Host(|table, out| out.each("version", &table["instances"], 1.0)),
    },
    Metric {
        name: "timetable_watchdog_restarts_total",
        kind: Kind::Counter,
        help: "Ticker threads of the watchdog that were dead or stuck, and replaced.",
        labels: &[],
        of: Of::Host(|table, out| out.number(&[], &table["builders"][0]["watchdog_restarts"])),
    },
    Metric {
        name: "timetable_watchdog_stalls_total",
        kind: Kind::Counter,
        help: "Ticker threads of the watchdog that were stuck.",
        labels: &[],
        of: Of::Host(|table, out| out.number(&[], &table["builders"][0]["watchdog_stalls"])),
    },
    Metric {
        name: "timetable_fault_bundles_total",
        kind: Kind::Counter,
        help: "Fault bundles: written, left_out because they are like others, failed.",
        labels: &["outcome"],
        of: Of::Host(|table, out| out.each("outcome", &table["builders"][0]["bundles"], 1.0)),
    },
    Metric {
        name: "timetable_tenant_requests_total",
        kind: Kind::Counter,
        help: "Requests of a tenant that were taken in.",
        labels: &[],
        of: Of::Tenant(|tenant, out| out.number(&[], &tenant["requests"])),
    },
    Metric {
        name: "timetable_tenant_failed_requests_total",
        kind: Kind::Counter,
        help: "Requests of a tenant that ended with an error.",
        labels: &[],
        of: Of::Tenant(|tenant, out| out.number(&[], &tenant["failed_requests"])),
    },
    Metric {
        name: "timetable_tenant_steps_total",
        kind: Kind::Counter,
        help: "Steps with at least one row of a tenant.",
        labels: &[],
        of: Of::Tenant(|tenant, out| out.number(&[], &tenant["steps"])),
    },
    Metric {
        name: "timetable_tenant_tokens_total",
        kind: Kind::Counter,
        help: "Tokens of a tenant, by what was done: computed, generated.",
        labels: &["kind"],
        of: Of::Tenant(|tenant, out| {
            out.number(&[("kind", "computed")], &tenant["tokens_computed"]);
            out.number(&[("kind", "generated")], &tenant["tokens_sampled"]);
        }),
    },
    Metric {
        name: "timetable_tenant_requests_running",
        kind: Kind::Gauge,
        help: "Requests of a tenant that hold KV cache blocks.",
        labels: &[],
        of: Of::Tenant(|tenant, out| out.number(&[], &tenant["running"])),
    },
    Metric {
        name: "timetable_tenant_requests_waiting",
        kind: Kind::Gauge,
        help: "Requests of a tenant that wait to be scheduled.",
        labels: &[],
        of: Of::Tenant(|tenant, out| out.number(&[], &tenant["waiting"])),
    },
];
