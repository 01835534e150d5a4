//! What a check found, as text and as JSON. It must never know how it was found.

use std::fmt::Write;

use serde::Serialize;
use serde_json::Value;

use crate::commands::table::table;

/// How grave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// A host would not take the component, or it would fault in service.
    Refused,
    /// A host takes it; its author may want to know.
    Warning,
}

/// One finding, however often it was made.
#[derive(Debug, Serialize)]
pub struct Finding {
    pub severity: Severity,
    /// What was checked: "verifier", "determinism", …
    pub check: &'static str,
    /// In which configurations.
    pub configurations: Vec<&'static str>,
    /// How often.
    pub times: u32,
    /// The first time: what was wrong.
    pub what: String,
    pub remedy: &'static str,
    /// The first time: the step, as `timetable build --input` reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<Value>,
    /// Findings with the same key are one.
    #[serde(skip)]
    pub key: String,
}

/// What became of a configuration's batches.
#[derive(Debug, Serialize)]
pub struct Tried {
    pub configuration: &'static str,
    pub batches: u32,
    pub built: u32,
    pub declined: u32,
    pub refused: u32,
    /// Batches with the very metadata of the reference builder. For information: a builder has ideas of its own.
    pub as_reference: u32,
    /// Batches whose metadata mean what the reference's do: the same keys, by the same numbers, however the work is divided.
    pub same_meaning: u32,
    /// Why there is no builder for this configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_builder: Option<String>,
}

/// What a build of decodes costs.
#[derive(Debug, Serialize)]
pub struct Cost {
    pub rows: u32,
    pub fuel: u64,
    /// Of the fuel that a call of so many rows may use.
    pub fuel_percent: f64,
    pub p50_ns: f64,
    pub p99_ns: f64,
    /// The reference component's median in the same run, in turn.
    pub reference_p50_ns: f64,
}

/// How near the component comes to the limits.
#[derive(Debug, Default, Serialize)]
pub struct Headroom {
    /// The largest share of its fuel that any call used, and in which kind of step.
    pub fuel_percent: f64,
    pub fuel_of: String,
    pub memory_bytes: usize,
    pub memory_percent: f64,
    /// Growth over `builds` builds of equal steps, after a warm-up.
    pub memory_growth_bytes: usize,
    pub builds: u32,
}

/// The whole report.
#[derive(Debug, Serialize)]
pub struct Report {
    pub path: String,
    pub bytes: usize,
    pub component: String,
    pub contract: &'static str,
    pub interface: &'static str,
    pub backend: &'static str,
    pub grant: &'static str,
    pub seed: u64,
    /// What the builder says of itself in the configuration "gpu"; absent if there is none.
    pub builder: Option<Value>,
    pub configurations: Vec<Tried>,
    pub promises_held: u32,
    pub compared_calls: u32,
    pub cost: Vec<Cost>,
    pub headroom: Headroom,
    pub findings: Vec<Finding>,
}

impl Report {
    /// Would a host take it?
    pub fn passes(&self) -> bool {
        self.findings
            .iter()
            .all(|finding| finding.severity != Severity::Refused)
    }

    /// Adds a finding, or counts it once more.
    pub fn find(&mut self, finding: Finding) {
        let same = |known: &&mut Finding| {
            (known.severity, known.check, &known.key)
                == (finding.severity, finding.check, &finding.key)
        };
        let Some(known) = self.findings.iter_mut().find(same) else {
            self.findings.push(finding);
            return;
        };
        known.times += finding.times;
        for configuration in finding.configurations {
            if !known.configurations.contains(&configuration) {
                known.configurations.push(configuration);
            }
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{}: {} bytes, component {}\ncontract         {}, exports {}, imports nothing but its types",
            self.path,
            self.bytes,
            &self.component[..12],
            self.contract,
            self.interface,
        );
        if let Some(builder) = &self.builder {
            let of = |key: &str| builder[key].to_string().replace('"', "");
            let _ = writeln!(
                text,
                "builder          {}, of {}; graphs {}; needs {}; update-block-table {}",
                builder["name"],
                self.backend,
                of("cudagraph_support"),
                of("needs").trim_matches(['[', ']']).replace(',', ", "),
                of("supports_update_block_table"),
            );
        }
        let _ = writeln!(
            text,
            "determinism      {} builds compared with those of other instances, in other orders\n\
             launch promise   {} steps within what was promised\n\
             verifier         grant {}, batches of seed {}:\n",
            self.compared_calls, self.promises_held, self.grant, self.seed
        );
        let rows: Vec<Vec<String>> = self
            .configurations
            .iter()
            .map(|tried| {
                let mut row = vec![tried.configuration.to_owned()];
                row.extend(
                    [
                        tried.batches,
                        tried.built,
                        tried.declined,
                        tried.refused,
                        tried.as_reference,
                        tried.same_meaning,
                    ]
                    .map(|count| count.to_string()),
                );
                row
            })
            .collect();
        text += &table(
            &[
                "CONFIGURATION",
                "BATCHES",
                "BUILT",
                "DECLINED",
                "REFUSED",
                "AS REFERENCE",
                "SAME MEANING",
            ],
            &rows,
        );
        for tried in &self.configurations {
            if let Some(why) = &tried.no_builder {
                let _ = writeln!(text, "  {}: {why}", tried.configuration);
            }
        }
        let micros = |ns: f64| format!("{:.1} µs", ns / 1e3);
        let rows: Vec<Vec<String>> = self
            .cost
            .iter()
            .map(|cost| {
                vec![
                    cost.rows.to_string(),
                    cost.fuel.to_string(),
                    format!("{:.1} %", cost.fuel_percent),
                    micros(cost.p50_ns),
                    micros(cost.p99_ns),
                    micros(cost.reference_p50_ns),
                    format!("{:.2}", cost.p50_ns / cost.reference_p50_ns),
                ]
            })
            .collect();
        if !rows.is_empty() {
            let _ = writeln!(text, "\ncost of a build, decodes of up to 32 k keys:\n");
            text += &table(
                &[
                    "ROWS",
                    "FUEL",
                    "OF LIMIT",
                    "P50",
                    "P99",
                    "REFERENCE P50",
                    "RATIO",
                ],
                &rows,
            );
        }
        let room = &self.headroom;
        let _ = writeln!(
            text,
            "\nfuel             at most {:.0} % of a call's ({})\n\
             memory           {} KiB, {:.0} % of the cap; {} bytes more after {} builds\n",
            room.fuel_percent,
            room.fuel_of,
            room.memory_bytes / 1024,
            room.memory_percent,
            room.memory_growth_bytes,
            room.builds,
        );
        for finding in &self.findings {
            let severity = match finding.severity {
                Severity::Refused => "REFUSED",
                Severity::Warning => "warning",
            };
            let times = match finding.times {
                1 => String::new(),
                times => format!(", {times} times"),
            };
            let _ = writeln!(
                text,
                "{severity}: {} ({}{times}): {}; {}",
                finding.check,
                finding.configurations.join(", "),
                finding.what,
                finding.remedy
            );
        }
        text += if self.passes() {
            "a host would take it\n"
        } else {
            "a host would refuse it, or serve its steps with the plain builder\n"
        };
        text
    }
}
