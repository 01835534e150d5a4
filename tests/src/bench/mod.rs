//! Benchmarks: what is measured, against which bar or peer, and how a row is written.
//!
//! A missed bar is a row that says so, never a failure: timings are not tests. What must hold whatever the machine is a claim: a row
//! that says that one does not hold is `broken`, and fails the program.

mod attention;
mod batches;
mod build;
mod decode;
mod host_step;
mod peer;
mod record;
mod reload;
pub mod serve;
mod soak;
mod tenants;
mod verify;

use std::fmt::Write as _;

/// One figure. `ratio` is `value` over what it is compared with.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Row {
    /// Benchmark, then case: "build/FLASH_ATTN/256 decodes".
    pub name: String,
    /// None if it could not be measured; the note says why.
    pub value: Option<f64>,
    /// Of the value.
    pub unit: &'static str,
    /// Value over the bar or the peer's figure.
    pub ratio: Option<f64>,
    /// What the ratio is to, with its figure.
    pub to: Option<String>,
    /// How it was measured, spread, what else is worth knowing.
    pub note: Option<String>,
    /// It says that a claim does not hold.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub broken: bool,
}

impl Row {
    fn new(name: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self {
            name: name.into(),
            value: Some(value),
            unit,
            ratio: None,
            to: None,
            note: None,
            broken: false,
        }
    }

    fn missing(name: impl Into<String>, unit: &'static str, why: &str) -> Self {
        Self {
            value: None,
            note: Some(format!("not measured: {why}")),
            ..Self::new(name, 0.0, unit)
        }
    }

    /// Compared with the most that it should be.
    fn at_most(self, bar: Option<f64>) -> Self {
        let Some(bar) = bar else { return self };
        let text = format!("bar: at most {bar} {}", self.unit);
        self.against(bar, text)
    }

    /// Of what there should be none.
    fn at_most_none(self) -> Self {
        Self {
            to: Some(format!("bar: 0 {}", self.unit)),
            ..self
        }
    }

    fn broken(self, broken: bool) -> Self {
        Self { broken, ..self }
    }

    /// Compared with another figure of the same unit.
    fn against(self, figure: f64, text: String) -> Self {
        Self {
            ratio: self.value.map(|value| value / figure),
            to: Some(text),
            ..self
        }
    }

    fn note(self, note: String) -> Self {
        Self {
            note: Some(note),
            ..self
        }
    }
}

/// A benchmark.
pub struct Benchmark {
    /// What it is asked for by.
    pub name: &'static str,
    /// What it measures.
    pub what: &'static str,
    /// Measures; takes seconds to a minute.
    pub measure: fn() -> Vec<Row>,
}

/// All of them, in the order in which they run.
pub static BENCHMARKS: [Benchmark; 11] = [
    Benchmark {
        name: "build",
        what: "a component's `build` of decode steps, and its native twin's in turn",
        measure: build::measure,
    },
    Benchmark {
        name: "verify",
        what: "the verifier: metadata by reference, the step's tensors, a plan's work list",
        measure: verify::measure,
    },
    Benchmark {
        name: "host-step",
        what: "a step's host work that is neither model nor sampling, 256 decodes",
        measure: host_step::measure,
    },
    Benchmark {
        name: "attention",
        what: "the CPU device's attention: time per head and key, cache read against a memcpy",
        measure: attention::measure,
    },
    Benchmark {
        name: "decode",
        what: "the default model through the whole engine, one stream, against llama.cpp and candle",
        measure: decode::measure,
    },
    Benchmark {
        name: "reload",
        what: "what replacing a builder costs the step thread",
        measure: reload::measure,
    },
    Benchmark {
        name: "record",
        what: "what recording costs the step thread, and bytes of a step",
        measure: record::measure,
    },
    Benchmark {
        name: "soak",
        what: "staged reloads without end, and what they do to requests and to memory; two minutes",
        measure: soak::measure,
    },
    Benchmark {
        name: "reload-latency",
        what: "steps while versions compile and are tried, beside steps without; half a minute",
        measure: soak::latency,
    },
    Benchmark {
        name: "tenants",
        what: "the steps of a tenant beside one whose builder misbehaves",
        measure: tenants::measure,
    },
    Benchmark {
        name: "serve",
        what: "200 streaming clients of a server whose builders are replaced every second; fails if an answer is wrong or lost",
        measure: serve::measure,
    },
];

/// The benchmarks called `names`, all if there are none.
///
/// # Errors
/// A name that no benchmark has; the message lists those there are.
pub fn choose(names: &[String]) -> Result<Vec<&'static Benchmark>, String> {
    if let Some(unknown) = names
        .iter()
        .find(|name| BENCHMARKS.iter().all(|known| known.name != **name))
    {
        let known: Vec<&str> = BENCHMARKS.iter().map(|known| known.name).collect();
        return Err(format!(
            "no benchmark is called `{unknown}`; there are {}",
            known.join(", ")
        ));
    }
    Ok(BENCHMARKS
        .iter()
        .filter(|known| names.is_empty() || names.iter().any(|name| name == known.name))
        .collect())
}

/// One line on the machine and how busy it is: what to know before believing a figure.
pub fn machine() -> String {
    let load = std::fs::read_to_string("/proc/loadavg")
        .ok()
        .and_then(|text| text.split_whitespace().next().map(str::to_owned))
        .unwrap_or_else(|| "unknown".to_owned());
    format!(
        "{} threads, {}, load average {load}",
        threads(),
        compiled_for()
    )
}

/// Threads of the measured side and of its peers.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// What the compiler could assume of the CPU. Kernels that choose at run time are not limited by it.
fn compiled_for() -> &'static str {
    if cfg!(target_feature = "avx512f") {
        "compiled for a CPU with AVX-512"
    } else if cfg!(target_feature = "avx2") {
        "compiled for a CPU with AVX2"
    } else if cfg!(target_arch = "x86_64") {
        "compiled for any x86-64 (use `cargo xtask bench` for this machine's own CPU)"
    } else {
        "compiled for the target's defaults"
    }
}

/// Rows as aligned columns.
pub fn table(rows: &[Row]) -> String {
    let mut text = String::new();
    let names = rows.iter().map(|row| row.name.chars().count());
    let width = names.max().unwrap_or(0).max(48);
    for row in rows {
        let value = row.value.map_or_else(|| "-".to_owned(), figure);
        let ratio = row
            .ratio
            .map_or_else(String::new, |ratio| format!("{ratio:.2} ×"));
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "{:width$} {value:>8} {:12} {ratio:>9}  {}",
            row.name,
            row.unit,
            row.to.as_deref().unwrap_or("")
        );
        if let Some(note) = &row.note {
            let gap = if row.to.is_some() { "; " } else { "" };
            let _ = write!(text, "{gap}{note}");
        }
        text.push('\n');
    }
    text
}

/// Three digits, or as many as the whole part has.
fn figure(value: f64) -> String {
    let decimals = match value.abs() {
        value if value >= 100.0 => 0,
        value if value >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.decimals$}")
}

/// Median; of an even number, the upper of the two.
///
/// # Panics
/// Without samples.
fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::{BENCHMARKS, Row, choose, median, table};

    #[test]
    fn an_unknown_name_is_answered_with_those_there_are() {
        let message = choose(&["biuld".to_owned()]).err().expect("refused");
        assert!(message.contains("`biuld`"), "{message}");
        for benchmark in &BENCHMARKS {
            assert!(message.contains(benchmark.name), "{message}");
        }
    }

    #[test]
    fn no_name_means_all_and_order_is_ours() {
        let all = choose(&[]).expect("all");
        assert_eq!(all.len(), BENCHMARKS.len());
        let some = choose(&["reload".to_owned(), "build".to_owned()]).expect("both are known");
        let names: Vec<&str> = some.iter().map(|benchmark| benchmark.name).collect();
        assert_eq!(names, ["build", "reload"]);
    }

    #[test]
    fn a_ratio_is_the_value_over_its_bar() {
        let row = Row::new("a", 3.0, "µs").at_most(Some(2.0));
        assert_eq!(row.ratio, Some(1.5));
        assert!(table(&[row]).contains("1.50 ×  bar: at most 2 µs"));
        let row = Row::missing("b", "token/s", "no model");
        assert_eq!((row.value, row.ratio), (None, None));
        assert!(table(&[row]).contains("not measured: no model"));
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
    }
}
