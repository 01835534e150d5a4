//! Checks and measures the CUDA kernels on the machine at hand: `timetable selftest` and `timetable bench`.
//!
//! Every kernel runs through the wrappers that the engine uses, on fresh random inputs, and every element of its result is
//! held against a reference in f64 on the CPU that shares no code with it. Outputs are poisoned first. It must never know an
//! engine, a model or a command line.

pub mod batch;
pub mod bench;
pub mod builders;
mod checks;
pub mod compare;
pub mod element;
pub mod gpu;
pub mod paged;
pub mod pipeline;
pub mod random;
pub mod report;

use std::time::Instant;

use timetable_device_cuda::CudaError;

use crate::{
    checks::{CheckError, Context, SETS},
    gpu::Gpu,
    random::Random,
    report::{Group, Report},
};

/// What to check.
#[derive(Clone, Debug)]
pub struct Options {
    /// CUDA device.
    pub ordinal: u32,
    /// Fewer and smaller inputs.
    pub quick: bool,
    /// Only sets or groups whose names begin with one of these; empty: all.
    pub only: Vec<String>,
    /// Batches of the soak.
    pub soak: u32,
    /// Of all inputs.
    pub seed: u64,
}

/// The sets of checks, by the names that select them.
pub fn sets() -> impl Iterator<Item = &'static str> {
    SETS.iter().map(|(name, _)| *name)
}

/// Why a run ended before its end.
#[derive(Debug, thiserror::Error)]
pub enum SelftestError {
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] CudaError),
    /// A set of checks could not go on.
    #[error("{set}, seed {seed}: {error}")]
    Set {
        /// Which.
        set: &'static str,
        /// Of the run.
        seed: u64,
        /// What failed.
        error: CudaError,
    },
    /// A component cannot be run.
    #[error("the sandbox: {0}")]
    Sandbox(String),
    /// No set is called so.
    #[error("there is no set of checks `{0}`: give {1}")]
    Unknown(String, String),
}

/// Runs the checks; `shown` sees each group as it ends.
///
/// # Errors
/// The device cannot be used or fails. Wrong results are no error: they are in the report.
pub fn run(options: &Options, mut shown: impl FnMut(&Group)) -> Result<Report, SelftestError> {
    if let Some(unknown) = options
        .only
        .iter()
        .find(|name| !sets().any(|set| set == *name))
    {
        let known: Vec<&str> = sets().collect();
        return Err(SelftestError::Unknown(unknown.clone(), known.join(", ")));
    }
    let start = Instant::now();
    let gpu = Gpu::open(options.ordinal)?;
    let (major, minor) = gpu.device.capability();
    let mut groups = Vec::new();
    for (index, &(name, check)) in SETS.iter().enumerate() {
        if !options.only.is_empty() && !options.only.iter().any(|only| only == name) {
            continue;
        }
        // A set's inputs depend on the seed and on itself, so that it can be repeated alone.
        let mut context = Context {
            gpu: &gpu,
            random: Random::new(options.seed.wrapping_add(index as u64)),
            quick: options.quick,
            soak: options.soak,
        };
        let made = check(&mut context).map_err(|error| match error {
            CheckError::Device(error) => SelftestError::Set {
                set: name,
                seed: options.seed,
                error,
            },
            CheckError::Sandbox(message) => SelftestError::Sandbox(message),
        })?;
        for group in made {
            shown(&group);
            groups.push(group);
        }
    }
    Ok(Report {
        device: gpu.device.name().to_owned(),
        capability: format!("{major}.{minor}"),
        seed: options.seed,
        seconds: start.elapsed().as_secs_f64(),
        groups,
    })
}
