//! Measures the kernels beside the GPU's ceilings and FlashInfer, all in one run. It must never know an engine.

mod attention;
pub mod cases;
mod ceilings;
mod host;
pub mod peer;
mod scatter;
pub mod timing;

use std::path::PathBuf;

use serde::Serialize;
use timetable_device_cuda::CudaError;

pub use ceilings::Ceilings;
use peer::Peer;

use crate::{gpu::Gpu, random::Random};

/// What can be measured here, by name.
pub const NAMES: [&str; 5] = ["ceilings", "decode", "prefill", "scatter", "host"];

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// CUDA device.
    pub ordinal: u32,
    /// Of [`NAMES`]; empty: all.
    pub only: Vec<String>,
    /// The Python that has the peer; none: it is not measured.
    pub python: Option<PathBuf>,
    /// Of all inputs.
    pub seed: u64,
}

impl Options {
    /// Is this wanted?
    pub fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The device cannot be used, or failed.
    #[error(transparent)]
    Device(#[from] CudaError),
    /// There is no schedule to measure with.
    #[error("no schedule: {0}")]
    Builder(String),
    /// A step did not get to the device.
    #[error(transparent)]
    Step(#[from] crate::pipeline::StepError),
}

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `decode`, `prefill`, `append`, `plan`, `unpack`, …
    pub kind: &'static str,
    /// Requests.
    pub batch: usize,
    /// Keys of a request, or tokens.
    pub context: usize,
    /// Median microseconds.
    pub us: f64,
    /// Achieved, in `unit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub achieved: Option<f64>,
    /// TB/s or TFLOP/s.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub unit: &'static str,
    /// Of the ceiling of this run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub of_ceiling: Option<f64>,
    /// The peer's median, by its best kernel for the case; for a prefill by one of the same class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_us: Option<f64>,
    /// Which of the peer's kernels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_kernel: Option<String>,
    /// The peer's time over ours: above 1, ours is faster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// What it must show; none: only reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bar: Option<Bar>,
    /// Whether it shows that; none: there is no bar, or no peer to compare with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub met: Option<bool>,
    /// How it was run.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub note: String,
}

/// What a figure must show.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bar {
    /// Microseconds at most.
    AtMostUs(f64),
    /// Achieved at least.
    Achieved(f64),
    /// The peer's time over ours at least.
    PeerRatio(f64),
}

impl std::fmt::Display for Bar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Bar::AtMostUs(us) => write!(f, "≤ {us} µs"),
            Bar::Achieved(least) => write!(f, "≥ {least} TFLOP/s"),
            Bar::PeerRatio(least) => write!(f, "≥ {least} × the peer"),
        }
    }
}

impl Row {
    /// A time without more.
    pub fn new(kind: &'static str, batch: usize, context: usize, us: f64) -> Self {
        Row {
            kind,
            batch,
            context,
            us,
            achieved: None,
            unit: "",
            of_ceiling: None,
            peer_us: None,
            peer_kernel: None,
            ratio: None,
            bar: None,
            met: None,
            note: String::new(),
        }
    }

    fn bandwidth(mut self, bytes: f64) -> Self {
        self.achieved = Some(bytes / self.us / 1e6);
        self.unit = "TB/s";
        self
    }

    fn arithmetic(mut self, flop: f64) -> Self {
        self.achieved = Some(flop / self.us / 1e6);
        self.unit = "TFLOP/s";
        self
    }

    /// How it was run.
    #[must_use]
    pub fn note(mut self, note: String) -> Self {
        self.note = note;
        self
    }

    /// Must take at most so many microseconds.
    #[must_use]
    pub fn at_most(mut self, us: f64) -> Self {
        self.bar = Some(Bar::AtMostUs(us));
        self.judged()
    }

    fn achieved_at_least(mut self, least: f64) -> Self {
        self.bar = Some(Bar::Achieved(least));
        self.judged()
    }

    fn peer_ratio_at_least(mut self, least: f64) -> Self {
        self.bar = Some(Bar::PeerRatio(least));
        self.judged()
    }

    fn against(mut self, ceilings: Option<&Ceilings>, peer: &Peer) -> Self {
        let ceiling = ceilings.and_then(|ceilings| match self.unit {
            "TB/s" => Some(ceilings.copy_tb_s),
            "TFLOP/s" => Some(ceilings.matmul_tflop_s),
            _ => None,
        });
        self.of_ceiling = self
            .achieved
            .zip(ceiling)
            .map(|(achieved, ceiling)| achieved / ceiling);
        // A prefill on mma.sync is of the class of FlashInfer's FA2 kernels; its FA3 kernels are rows of their own.
        let backend = (self.kind == "prefill").then_some("fa2");
        if let Some((us, kernel)) = peer.best(self.kind, self.batch, self.context, backend) {
            self.peer_us = Some(us);
            self.peer_kernel = Some(kernel.to_owned());
            self.ratio = Some(us / self.us);
        }
        self.judged()
    }

    fn judged(mut self) -> Self {
        self.met = match self.bar {
            None => None,
            Some(Bar::AtMostUs(most)) => Some(self.us <= most),
            Some(Bar::Achieved(least)) => self.achieved.map(|achieved| achieved >= least),
            Some(Bar::PeerRatio(least)) => self.ratio.map(|ratio| ratio >= least),
        };
        self
    }
}

/// Everything that one run measured.
#[derive(Clone, Debug, Serialize)]
pub struct Bench {
    /// The device's name.
    pub device: String,
    /// Its multiprocessors.
    pub multiprocessors: u32,
    /// The CUDA version of its driver: 1000 · major + 10 · minor.
    pub driver: i32,
    /// The GPU's limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ceilings: Option<Ceilings>,
    /// FlashInfer, or why it is not there.
    pub peer: Peer,
    /// The figures.
    pub rows: Vec<Row>,
}

/// Measures; `progress` is told what begins.
///
/// # Errors
/// The device cannot be used, or fails.
pub fn run(options: &Options, mut progress: impl FnMut(&str)) -> Result<Bench, BenchError> {
    let gpu = Gpu::open(options.ordinal)?;
    let mut random = Random::new(options.seed);
    let ceilings = if options.wants("ceilings") {
        progress("ceilings");
        Some(ceilings::measure(&gpu, &mut random)?)
    } else {
        None
    };
    let mut rows = Vec::new();
    let mut shown = |row: Row| rows.push(row);
    if options.wants("decode") {
        progress("decode");
        attention::decode(&gpu, &mut random, &mut shown)?;
    }
    if options.wants("prefill") {
        progress("prefill");
        attention::prefill(&gpu, &mut random, &mut shown)?;
    }
    if options.wants("scatter") {
        progress("scatter");
        scatter::run(&gpu, &mut random, &mut shown)?;
    }
    if options.wants("host") {
        progress("host");
        host::run(&gpu, &mut random, &mut shown)?;
    }
    let compared = ["decode", "prefill", "scatter"];
    let peer = match &options.python {
        Some(python) if compared.iter().any(|name| options.wants(name)) => {
            progress("FlashInfer");
            peer::measure(python, options.ordinal, &|name| options.wants(name))
        }
        _ => Peer::absent("it was not asked for"),
    };
    let rows = rows
        .into_iter()
        .map(|row| row.against(ceilings.as_ref(), &peer))
        .collect();
    Ok(Bench {
        device: gpu.device.name().to_owned(),
        multiprocessors: gpu.device.num_multiprocessors(),
        driver: gpu.device.driver_version(),
        ceilings,
        peer,
        rows,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_judged_by_its_bar() {
        let peer = Peer {
            rows: vec![peer::PeerRow {
                kind: "decode".into(),
                batch: 1,
                context: 8_192,
                backend: "fa2".into(),
                us: Some(25.0),
                plan_us: None,
                error: None,
            }],
            ..Peer::default()
        };
        let ceilings = Ceilings {
            copy_tb_s: 4.0,
            matmul_tflop_s: 800.0,
            empty_us: 3.0,
        };
        let row = Row::new("decode", 1, 8_192, 20.0)
            .bandwidth(40e6)
            .peer_ratio_at_least(0.95);
        assert_eq!(row.met, None, "nothing to compare with yet");
        let row = row.against(Some(&ceilings), &peer);
        assert_eq!((row.ratio, row.met), (Some(1.25), Some(true)));
        assert_eq!((row.achieved, row.of_ceiling), (Some(2.0), Some(0.5)));
        assert_eq!(
            Row::new("append", 1, 8_192, 25.0).at_most(24.0).met,
            Some(false)
        );
    }
}
