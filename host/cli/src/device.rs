//! `--device`: which device runs the model, and what its errors mean for the process's exit status.

use std::fmt;
use std::str::FromStr;

/// The CPU, or a CUDA device by its ordinal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceArg::Cpu => f.write_str("cpu"),
            DeviceArg::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
