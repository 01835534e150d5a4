//! `--device`: which device a command is for; and what is shown of a GPU's memory.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use timetable_engine::cuda::MemoryReport;

/// The CPU, or a CUDA device by its ordinal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceArg {
    /// This machine's processor.
    #[default]
    Cpu,
    /// `cuda` is `cuda:0`.
    Cuda(u32),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(DeviceArg::Cpu),
            None if text == "cuda" => Ok(DeviceArg::Cuda(0)),
            Some(("cuda", ordinal)) if ordinal.bytes().all(|digit| digit.is_ascii_digit()) => {
                ordinal
                    .parse()
                    .map(DeviceArg::Cuda)
                    .map_err(|error| format!("`{ordinal}` is no device ordinal ({error})"))
            }
            _ => Err(format!(
                "`{text}` is no device: give cpu, cuda, or cuda:N with N the device's ordinal"
            )),
        }
    }
}

impl TryFrom<String> for DeviceArg {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DeviceArg> for String {
    fn from(device: DeviceArg) -> String {
        device.to_string()
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceArg::Cpu => f.write_str("cpu"),
            DeviceArg::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// Where the GPU's memory went, in one line, with the tokens that its KV cache holds.
pub fn summary(report: &MemoryReport, block_size: usize) -> String {
    format!("{report} ({} tokens)", tokens(report, block_size))
}

/// The same as data, in bytes.
pub fn table(report: &MemoryReport, block_size: usize) -> Value {
    json!({
        "total_bytes": report.total,
        "budget_bytes": report.budget,
        "weights_bytes": report.weights,
        "activations_bytes": report.activations,
        "workspace_bytes": report.workspace,
        "graphs_bytes": report.graphs,
        "kv_cache_bytes": report.kv_cache,
        "outside_bytes": report.outside,
        "num_blocks": report.num_blocks,
        "num_tokens": tokens(report, block_size),
    })
}

/// Tokens that fit: the null block holds none.
fn tokens(report: &MemoryReport, block_size: usize) -> u64 {
    report.num_blocks.saturating_sub(1) * block_size as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_report_says_how_many_tokens_fit() {
        let report = MemoryReport {
            total: 8 << 30,
            weights: 1 << 30,
            kv_cache: 2 << 30,
            num_blocks: 101,
            ..MemoryReport::default()
        };
        let line = summary(&report, 16);
        assert!(
            line.contains("weights 1.00") && line.ends_with("(1600 tokens)"),
            "{line}"
        );
        assert_eq!(table(&report, 16)["num_tokens"], 1600);
        assert_eq!(table(&report, 16)["kv_cache_bytes"], 2u64 << 30);
    }

    #[test]
    fn devices_are_named_as_the_field_names_them() {
        for (text, device) in [
            ("cpu", DeviceArg::Cpu),
            ("cuda", DeviceArg::Cuda(0)),
            ("cuda:3", DeviceArg::Cuda(3)),
        ] {
            assert_eq!(text.parse(), Ok(device));
        }
        assert_eq!(DeviceArg::Cuda(3).to_string(), "cuda:3");
        for bad in [
            "",
            "gpu",
            "cuda:",
            "cuda:-1",
            "cuda:x",
            "cpu:0",
            "cuda:99999999999",
        ] {
            assert!(bad.parse::<DeviceArg>().is_err(), "{bad}");
        }
    }
}
