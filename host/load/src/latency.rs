//! Times, counted so that quantiles of any number of them take the same memory. Must never know: what the times are of.

use std::time::Duration;

use serde::Serialize;

/// The width of a bucket over its lower bound, so that a quantile is within half of that of a true one.
const WIDTH: f64 = 0.01;
/// Microseconds up to the last bucket's: twelve days.
const LONGEST_US: f64 = 1e12;

/// Times from a microsecond on.
#[derive(Clone, Debug)]
pub struct Latency {
    buckets: Vec<u64>,
    count: u64,
    sum_us: f64,
    max_us: f64,
}

/// What is said of times. Unit: milliseconds. Quantiles are within half a per cent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// How many there are; 0: the others say nothing.
    pub count: u64,
    /// Exact.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// Of ten, nine are not longer.
    pub p90: f64,
    /// Of a hundred, ninety-nine are not longer.
    pub p99: f64,
    /// Exact.
    pub max: f64,
}

impl Default for Latency {
    fn default() -> Self {
        Self {
            buckets: vec![0; bucket(LONGEST_US) + 1],
            count: 0,
            sum_us: 0.0,
            max_us: 0.0,
        }
    }
}

fn bucket(us: f64) -> usize {
    (us.clamp(1.0, LONGEST_US).ln() / WIDTH.ln_1p()) as usize
}

impl Latency {
    /// Counts one.
    pub fn add(&mut self, time: Duration) {
        let us = time.as_secs_f64() * 1e6;
        self.buckets[bucket(us)] += 1;
        self.count += 1;
        self.sum_us += us;
        self.max_us = self.max_us.max(us);
    }

    /// The quantiles of all so far.
    pub fn quantiles(&self) -> Quantiles {
        if self.count == 0 {
            return Quantiles::default();
        }
        Quantiles {
            count: self.count,
            mean: self.sum_us / self.count as f64 / 1e3,
            p50: self.quantile(0.5),
            p90: self.quantile(0.9),
            p99: self.quantile(0.99),
            max: self.max_us / 1e3,
        }
    }

    /// The least time, in milliseconds, that so large a share is not longer than: the middle of its bucket.
    fn quantile(&self, share: f64) -> f64 {
        let rank = ((self.count as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let place = self.buckets.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        let middle = (place.unwrap_or(0) as f64 + 0.5) * WIDTH.ln_1p();
        (middle.exp()).min(self.max_us) / 1e3
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Latency, Quantiles};

    #[test]
    fn quantiles_are_within_half_a_per_cent() {
        let mut latency = Latency::default();
        assert_eq!(latency.quantiles(), Quantiles::default());
        let mut times: Vec<u64> = (0..10_000).map(|i| 5 + i * i * 7 % 900_001).collect();
        for &us in &times {
            latency.add(Duration::from_micros(us));
        }
        times.sort_unstable();
        let found = latency.quantiles();
        let exact = |share: f64| times[(times.len() as f64 * share) as usize - 1] as f64 / 1e3;
        for (found, share) in [(found.p50, 0.5), (found.p90, 0.9), (found.p99, 0.99)] {
            let exact = exact(share);
            assert!(
                (found / exact - 1.0).abs() < 0.006,
                "{share}: {found} {exact}"
            );
        }
        assert_eq!(found.count, 10_000);
        assert_eq!(found.max, times[times.len() - 1] as f64 / 1e3);
    }

    #[test]
    fn one_time_is_all_of_them() {
        for time in [Duration::ZERO, Duration::from_millis(3), Duration::MAX / 2] {
            let mut latency = Latency::default();
            latency.add(time);
            let found = latency.quantiles();
            assert!(
                found.p50 <= found.max && found.p99 <= found.max,
                "{found:?}"
            );
            assert_eq!((found.count, found.mean), (1, found.max));
        }
    }
}
