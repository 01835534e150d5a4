//! The builders' table as Prometheus text: `curl --unix-socket PATH http://timetable/metrics`.
//!
//! Written from the same data as `timetable builders --json`, so that the two cannot disagree. `METRICS` is the list of what
//! there is; `docs/metrics.md` is held to it by a test. Must never know: where a figure comes from.

mod builders;
mod engine;
mod http;

use std::fmt::Write;

use serde_json::Value;

/// What a metric is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Only grows, until the host ends.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts below fixed bounds.
    Histogram,
}

impl Kind {
    /// As the text format writes it.
    const fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// What a metric is of, and how its samples are taken from the table.
enum Of {
    /// The host.
    Host(fn(&Value, &mut Samples<'_>)),
    /// The engine, by the field's name, with the field's labels `model_name` and `engine`.
    Field(fn(&Value, &mut Samples<'_>)),
    /// The server in front of the engine, by the field's name and with the same labels.
    Http(fn(&Value, &mut Samples<'_>)),
    /// Each slot: labels `backend`, `group`, `tenant` (empty: everybody's).
    Slot(fn(&Value, &mut Samples<'_>)),
    /// Each version that is in a slot, or is tried or kept there: the slot's labels and `version`.
    Version(fn(&Value, &mut Samples<'_>)),
    /// Each tenant: label `tenant` (empty: nobody in particular).
    Tenant(fn(&Value, &mut Samples<'_>)),
}

impl Of {
    /// The labels that every sample has.
    #[cfg(test)]
    fn labels(&self) -> &'static [&'static str] {
        match self {
            Of::Host(_) => &[],
            Of::Field(_) | Of::Http(_) => &["model_name", "engine"],
            Of::Slot(_) => &["backend", "group", "tenant"],
            Of::Version(_) => &["backend", "group", "tenant", "version"],
            Of::Tenant(_) => &["tenant"],
        }
    }
}

/// One metric.
struct Metric {
    name: &'static str,
    kind: Kind,
    /// Meaning and unit.
    help: &'static str,
    /// Labels beside those of what it is of.
    #[cfg_attr(not(test), allow(dead_code, reason = "the document is held to it"))]
    labels: &'static [&'static str],
    of: Of,
}

/// Every metric there is, in the order in which they are written.
fn metrics() -> impl Iterator<Item = &'static Metric> {
    engine::METRICS
        .iter()
        .chain(&http::METRICS)
        .chain(&builders::METRICS)
}

/// Where a metric's samples are written.
struct Samples<'a> {
    text: &'a mut String,
    name: &'static str,
    /// Of what the metric is of: `key="value",…`.
    base: String,
}

impl Samples<'_> {
    /// A sample with further labels.
    fn add(&mut self, labels: &[(&str, &str)], value: f64) {
        self.write("", labels, value);
    }

    /// A sample, if there is such a figure.
    fn number(&mut self, labels: &[(&str, &str)], value: &Value) {
        if let Some(value) = value.as_f64() {
            self.add(labels, value);
        }
    }

    /// A sample for each member of an object, by the label `label`, divided by `unit`.
    fn each(&mut self, label: &str, members: &Value, unit: f64) {
        for (member, value) in members.as_object().into_iter().flatten() {
            self.add(&[(label, member)], value.as_f64().unwrap_or(0.0) / unit);
        }
    }

    /// A histogram: `at_most` (pairs of bound and count), `count`, and the sum under `sum`; bounds and sum divided by `unit`.
    fn histogram(&mut self, figures: &Value, sum: &str, unit: f64) {
        let Some(count) = figures["count"].as_f64() else {
            return;
        };
        for pair in figures["at_most"].as_array().into_iter().flatten() {
            let bound = pair[0].as_f64().unwrap_or(0.0) / unit;
            let below = pair[1].as_f64().unwrap_or(0.0);
            self.write("_bucket", &[("le", &bound.to_string())], below);
        }
        self.write("_bucket", &[("le", "+Inf")], count);
        self.write("_sum", &[], figures[sum].as_f64().unwrap_or(0.0) / unit);
        self.write("_count", &[], count);
    }

    fn write(&mut self, suffix: &str, labels: &[(&str, &str)], value: f64) {
        let mut all = self.base.clone();
        for (key, value) in labels {
            push_label(&mut all, key, value);
        }
        let name = self.name;
        // Writing to a string does not fail.
        let _ = match all.is_empty() {
            true => writeln!(self.text, "{name}{suffix} {value}"),
            false => writeln!(self.text, "{name}{suffix}{{{all}}} {value}"),
        };
    }
}

/// All metrics of the table that `Control::builders` returns.
pub fn render(table: &Value) -> String {
    let mut text = String::new();
    for metric in metrics() {
        let mut body = String::new();
        let mut of =
            |labels: &[(&str, &str)], samples: fn(&Value, &mut Samples<'_>), data: &Value| {
                let mut base = String::new();
                for (key, value) in labels {
                    push_label(&mut base, key, value);
                }
                let mut out = Samples {
                    text: &mut body,
                    name: metric.name,
                    base,
                };
                samples(data, &mut out);
            };
        match metric.of {
            Of::Host(samples) => of(&[], samples, table),
            Of::Field(samples) | Of::Http(samples) => {
                let model = table["model_name"].as_str().unwrap_or("");
                let member = match metric.of {
                    Of::Http(_) => "http",
                    _ => "engine",
                };
                let labels = [("model_name", model), ("engine", "0")];
                of(&labels, samples, &table[member]);
            }
            Of::Slot(samples) => {
                for slot in list(&table["builders"]) {
                    of(&slot_labels(slot), samples, slot);
                }
            }
            Of::Version(samples) => {
                for slot in list(&table["builders"]) {
                    for version in list(&slot["versions"]) {
                        let mut labels = slot_labels(slot).to_vec();
                        labels.push(("version", version["version"].as_str().unwrap_or("")));
                        of(&labels, samples, version);
                    }
                }
            }
            Of::Tenant(samples) => {
                for tenant in list(&table["engine"]["tenants"]) {
                    let name = tenant["name"].as_str().unwrap_or("");
                    of(&[("tenant", name)], samples, tenant);
                }
            }
        }
        if !body.is_empty() {
            let Metric { name, help, .. } = metric;
            let kind = metric.kind.name();
            let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{body}");
        }
    }
    text
}

/// A slot's name says whose it is: `FLASH_ATTN/0`, `FLASH_ATTN/0@tenant`.
fn slot_labels(slot: &Value) -> [(&'static str, &str); 3] {
    let group = slot["group"].as_str().unwrap_or("");
    let tenant = group.split_once('@').map_or("", |(_, tenant)| tenant);
    let backend = slot["backend"].as_str().unwrap_or("");
    [("backend", backend), ("group", group), ("tenant", tenant)]
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Adds a label, its value as the text format asks.
fn push_label(labels: &mut String, key: &str, value: &str) {
    let value = value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    let comma = if labels.is_empty() { "" } else { "," };
    let _ = write!(labels, "{comma}{key}=\"{value}\"");
}

#[cfg(test)]
mod tests;
