//! Measuring a call: what the benchmarks use, so that the wasm builder and its native twin are measured alike, in one process,
//! in turn.
//!
//! Must never know: what is measured, or what a good figure is.

use std::{hint::black_box, time::Instant};

/// Percentiles of one call's time, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct CallTime {
    /// 10th percentile.
    pub p10_ns: f64,
    /// Median.
    pub median_ns: f64,
    /// 99th percentile.
    pub p99_ns: f64,
}

/// Times several variants in turn, so that a change of the machine's speed meets them all: `rounds` samples of each, every
/// sample the mean of `calls` calls. One sample of each is thrown away first.
///
/// # Panics
/// If `rounds` or `calls` is 0.
pub fn interleaved(rounds: usize, calls: u32, variants: &mut [&mut dyn FnMut()]) -> Vec<CallTime> {
    assert!(
        rounds > 0 && calls > 0,
        "nothing to measure: {rounds} rounds of {calls} calls"
    );
    let mut samples = vec![Vec::with_capacity(rounds); variants.len()];
    for round in 0..=rounds {
        for (variant, samples) in variants.iter_mut().zip(&mut samples) {
            let start = Instant::now();
            for _ in 0..calls {
                black_box(&mut *variant)();
            }
            let nanoseconds = start.elapsed().as_nanos() as f64 / f64::from(calls);
            if round > 0 {
                samples.push(nanoseconds);
            }
        }
    }
    samples
        .into_iter()
        .map(|mut samples| {
            samples.sort_by(f64::total_cmp);
            let at = |q: f64| samples[((samples.len() - 1) as f64 * q).round() as usize];
            CallTime {
                p10_ns: at(0.1),
                median_ns: at(0.5),
                p99_ns: at(0.99),
            }
        })
        .collect()
}
