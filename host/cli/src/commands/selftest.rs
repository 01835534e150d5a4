//! `selftest`: every CUDA kernel on this machine's GPU against references on the CPU.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;
use timetable_selftest::report::{Report, line};
use timetable_selftest::{Options, SelftestError};

use super::{print, print_json};
use crate::cli::Selftest;
use crate::device::DeviceArg;
use crate::exit::{Exit, Failure};

/// Batches of the soak where no number is given.
const SOAK: u32 = 500;
/// As `SOAK`, with `--quick`.
const QUICK_SOAK: u32 = 20;

pub fn run(arguments: &Selftest) -> Result<(), Failure> {
    let options = Options {
        ordinal: ordinal(arguments.device, "selftest")?,
        quick: arguments.quick,
        only: arguments.only.clone(),
        soak: arguments
            .soak
            .unwrap_or(if arguments.quick { QUICK_SOAK } else { SOAK }),
        seed: arguments.seed.unwrap_or_else(fresh_seed),
    };
    let mut unprinted = None;
    if !arguments.json {
        print(format!("seed {}\n", options.seed).as_bytes())?;
    }
    let report = timetable_selftest::run(&options, |group| {
        if !arguments.json
            && let Err(failure) = print(format!("{}\n", line(group)).as_bytes())
        {
            unprinted.get_or_insert(failure);
        }
    })
    .map_err(|error| match &error {
        SelftestError::Unknown(..) => Failure::new(Exit::Usage, &error),
        SelftestError::Device(_) | SelftestError::Set { .. } => Failure::new(Exit::Device, &error),
        SelftestError::Sandbox(_) => Failure::new(Exit::Failure, &error),
    })?;
    if let Some(failure) = unprinted {
        return Err(failure);
    }
    show(arguments, &report)?;
    if report.failed() == 0 {
        return Ok(());
    }
    Err(Failure::new(
        Exit::Failure,
        format!(
            "{} of {} checks failed on {}: `--seed {}` repeats the inputs",
            report.failed(),
            report.checks(),
            report.device,
            report.seed
        ),
    ))
}

fn show(arguments: &Selftest, report: &Report) -> Result<(), Failure> {
    let (checks, failed) = (report.checks(), report.failed());
    if arguments.json {
        return print_json(&json!({
            "device": report.device,
            "capability": report.capability,
            "seed": report.seed,
            "seconds": report.seconds,
            "checks": checks,
            "failed": failed,
            "groups": report.groups,
        }));
    }
    print(
        format!(
            "{} (compute capability {}): {checks} checks, {failed} failed, {:.1} s, seed {}\n",
            report.device, report.capability, report.seconds, report.seed
        )
        .as_bytes(),
    )
}

/// The GPU that a command is for.
///
/// # Errors
/// It was given another device.
pub fn ordinal(device: DeviceArg, command: &str) -> Result<u32, Failure> {
    match device {
        DeviceArg::Cuda(ordinal) => Ok(ordinal),
        DeviceArg::Cpu => Err(Failure::new(
            Exit::Usage,
            format!("--device cpu: {command} is for GPUs; give cuda or cuda:N"),
        )),
    }
}

/// A seed that no run had.
pub fn fresh_seed() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(1, |time| time.as_nanos() as u64)
}
