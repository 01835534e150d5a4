//! Metrics of the server in front of the engine. Where the concept is vLLM's, so are name, labels and unit.

use super::{Kind, Metric, Of};

/// Nanoseconds of a second.
const NS: f64 = 1e9;

pub(super) const METRICS: [Metric; 6] = [
    Metric {
        name: "vllm:time_to_first_token_seconds",
        kind: Kind::Histogram,
        help: "From a request's arrival to the first token of each of its answers, in seconds.",
        labels: &[],
        of: Of::Http(|http, out| out.histogram(&http["first_token_ns"], "sum", NS)),
    },
    Metric {
        name: "vllm:inter_token_latency_seconds",
        kind: Kind::Histogram,
        help: "From a token of an answer to the next, in seconds.",
        labels: &[],
        of: Of::Http(|http, out| out.histogram(&http["inter_token_ns"], "sum", NS)),
    },
    Metric {
        name: "vllm:e2e_request_latency_seconds",
        kind: Kind::Histogram,
        help: "From a request's arrival to the end of each of its answers, in seconds.",
        labels: &[],
        of: Of::Http(|http, out| out.histogram(&http["request_ns"], "sum", NS)),
    },
    Metric {
        name: "http_requests_total",
        kind: Kind::Counter,
        help: "Requests that were answered, by path and status. A stream counts when it begins.",
        labels: &["handler", "method", "status"],
        of: Of::Host(|table, out| {
            for request in table["http"]["requests"].as_array().into_iter().flatten() {
                let text = |name: &str| request[name].as_str().unwrap_or("");
                let labels = ["handler", "method", "status"].map(|name| (name, text(name)));
                out.number(&labels, &request["count"]);
            }
        }),
    },
    Metric {
        name: "timetable_http_requests",
        kind: Kind::Gauge,
        help: "Requests for answers that run or wait, until the last of the answer is handed to the connection.",
        labels: &[],
        of: Of::Host(|table, out| out.number(&[], &table["http"]["running"])),
    },
    Metric {
        name: "timetable_http_connections",
        kind: Kind::Gauge,
        help: "Connections that are open.",
        labels: &[],
        of: Of::Host(|table, out| out.number(&[], &table["http"]["connections"])),
    },
];
