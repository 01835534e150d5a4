//! Numbers that the step thread writes and anybody reads: counters, a histogram of nanoseconds, running summaries.
//!
//! Atomics only; nothing is allocated, locked or formatted when a number is recorded. Must never know what is counted.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use serde::Serialize;
use timetable_attention::FaultKind;
use timetable_types::{Metadata, flashinfer};

/// Linear steps within each power of two: quantiles are right within 1/16.
const STEPS: u64 = 16;
/// Largest power of two told apart; 2^40 ns is 18 minutes.
const TOP: u64 = 40;
const BUCKETS: usize = ((TOP - 2) * STEPS) as usize;

/// The bounds of a histogram that is read: powers of two less one, from 0.5 µs to 67 ms, in nanoseconds. They are ends of its own
/// buckets, so that what is counted below one is exact.
const BOUNDS: std::ops::RangeInclusive<u32> = 9..=26;

/// A histogram of nanoseconds as it is read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LatencyFigures {
    /// Durations.
    pub count: u64,
    /// Their sum, in nanoseconds.
    pub sum_ns: u64,
    /// The duration that half of them do not exceed. None before the first.
    pub p50_ns: Option<u64>,
    /// The duration that 99 of 100 do not exceed.
    pub p99_ns: Option<u64>,
    /// Bounds in nanoseconds, and how many durations do not exceed each.
    pub at_most: Vec<(u64, u64)>,
}

/// A histogram of nanoseconds with logarithmic buckets of relative width 1/16.
pub struct LatencyHistogram {
    buckets: Box<[AtomicU64; BUCKETS]>,
    sum: AtomicU64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        LatencyHistogram {
            buckets: Box::new([const { AtomicU64::new(0) }; BUCKETS]),
            sum: AtomicU64::new(0),
        }
    }
}

impl LatencyHistogram {
    /// Counts one duration.
    pub fn record(&self, nanoseconds: u64) {
        self.buckets[bucket(nanoseconds)].fetch_add(1, Relaxed);
        self.sum.fetch_add(nanoseconds, Relaxed);
    }

    /// What was counted so far.
    pub fn figures(&self) -> LatencyFigures {
        let mut count = 0;
        let mut next = 0;
        let mut through = |end: usize| {
            let buckets = &self.buckets[next..=end];
            next = end + 1;
            count += buckets
                .iter()
                .map(|bucket| bucket.load(Relaxed))
                .sum::<u64>();
            count
        };
        let at_most = BOUNDS
            .map(|power| (1_u64 << power) - 1)
            .map(|bound| (bound, through(bucket(bound))))
            .collect();
        LatencyFigures {
            count: through(BUCKETS - 1),
            sum_ns: self.sum.load(Relaxed),
            p50_ns: self.quantile(0.5),
            p99_ns: self.quantile(0.99),
            at_most,
        }
    }

    /// The duration that a share `q` (0 to 1) of all durations does not exceed, in nanoseconds, rounded up to a bucket's end.
    /// None before the first.
    pub fn quantile(&self, q: f64) -> Option<u64> {
        let total: u64 = self.buckets.iter().map(|bucket| bucket.load(Relaxed)).sum();
        if total == 0 {
            return None;
        }
        let rank = ((q * total as f64).ceil() as u64).clamp(1, total);
        let mut seen = 0;
        for (index, bucket) in self.buckets.iter().enumerate() {
            seen += bucket.load(Relaxed);
            if seen >= rank {
                return Some(bucket_end(index as u64));
            }
        }
        None
    }
}

fn bucket(nanoseconds: u64) -> usize {
    if nanoseconds < STEPS {
        return nanoseconds as usize;
    }
    let power = u64::from(nanoseconds.ilog2());
    let step = (nanoseconds >> (power - 4)) & (STEPS - 1);
    (((power - 3) * STEPS + step) as usize).min(BUCKETS - 1)
}

/// The largest duration of a bucket.
fn bucket_end(index: u64) -> u64 {
    if index < STEPS {
        return index;
    }
    let power = index / STEPS + 3;
    let step = index % STEPS;
    ((STEPS + step + 1) << (power - 4)) - 1
}

/// A running summary of whole numbers.
#[derive(Default)]
pub struct RunningSummary {
    count: AtomicU64,
    sum: AtomicU64,
    max: AtomicU64,
    last: AtomicU64,
}

/// What a running summary says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// How many numbers.
    pub count: u64,
    /// The last one.
    pub last: u64,
    /// The largest one.
    pub max: u64,
    /// Their mean; 0 if there are none.
    pub mean: f64,
}

impl RunningSummary {
    /// Adds one number.
    pub fn record(&self, value: u64) {
        self.count.fetch_add(1, Relaxed);
        self.sum.fetch_add(value, Relaxed);
        self.max.fetch_max(value, Relaxed);
        self.last.store(value, Relaxed);
    }

    /// The summary so far.
    pub fn get(&self) -> Summary {
        let count = self.count.load(Relaxed);
        Summary {
            count,
            last: self.last.load(Relaxed),
            max: self.max.load(Relaxed),
            mean: if count == 0 {
                0.0
            } else {
                self.sum.load(Relaxed) as f64 / count as f64
            },
        }
    }
}

/// What one version did so far.
#[derive(Default)]
pub(crate) struct VersionMetrics {
    pub(crate) steps: AtomicU64,
    pub(crate) build_ns: LatencyHistogram,
    pub(crate) verify_ns: LatencyHistogram,
    pub(crate) splits: RunningSummary,
    pub(crate) work_items: RunningSummary,
    pub(crate) faults: FaultCounts,
}

/// Why the plain builder served a step although there is a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Fallback {
    /// The component faulted in this very step.
    Fault,
    /// It declined the batch.
    Declined,
    /// It is left out for some steps after faults.
    BackingOff,
    /// It is out of service.
    Quarantined,
    /// Its next instance is being prepared.
    Recovering,
}

/// Steps that the plain builder served although there is a component, by reason.
#[derive(Default)]
pub(crate) struct FallbackCounts([AtomicU64; 5]);

impl FallbackCounts {
    pub(crate) fn add(&self, reason: Fallback) {
        self.0[reason as usize].fetch_add(1, Relaxed);
    }

    /// Every reason, with its count.
    pub(crate) fn by_name(&self) -> BTreeMap<&'static str, u64> {
        [
            "fault",
            "declined",
            "backing_off",
            "quarantined",
            "recovering",
        ]
        .into_iter()
        .zip(&self.0)
        .map(|(name, count)| (name, count.load(Relaxed)))
        .collect()
    }
}

/// Faults by kind.
#[derive(Default)]
pub(crate) struct FaultCounts([AtomicU64; FaultKind::ALL.len()]);

impl FaultCounts {
    pub(crate) fn add(&self, kind: FaultKind) {
        self.0[kind as usize].fetch_add(1, Relaxed);
    }

    /// Kinds that occurred, with their counts.
    pub(crate) fn by_name(&self) -> BTreeMap<&'static str, u64> {
        FaultKind::ALL
            .into_iter()
            .map(|kind| (kind.name(), self.0[kind as usize].load(Relaxed)))
            .filter(|(_, count)| *count > 0)
            .collect()
    }
}

impl VersionMetrics {
    pub(crate) fn step(&self, nanoseconds: u64, metadata: &Metadata, rows: u32) {
        self.steps.fetch_add(1, Relaxed);
        self.build_ns.record(nanoseconds);
        if let Some((splits, work_items)) = chosen(metadata, rows) {
            self.splits.record(splits);
            self.work_items.record(work_items);
        }
    }
}

/// What a builder chose for a step of `rows` rows: the largest number of parts that one request's keys are divided into, and the number of work items.
/// None for families that schedule nothing themselves.
pub fn chosen(metadata: &Metadata, rows: u32) -> Option<(u64, u64)> {
    match metadata {
        Metadata::FlashAttn(metadata) => {
            let schedule = &metadata.schedule;
            let items = if schedule.num_splits.is_empty() {
                u64::from(rows)
            } else {
                schedule
                    .num_splits
                    .iter()
                    .map(|splits| u64::from(splits.unsigned_abs()))
                    .sum()
            };
            Some((u64::from(schedule.max_num_splits), items))
        }
        Metadata::Flashinfer(metadata) => {
            let decode = match &metadata.decode {
                Some(flashinfer::Decode::Wrapper(plan)) => Some(&plan.work),
                _ => None,
            };
            let prefill = match &metadata.prefill {
                Some(flashinfer::Prefill::Wrapper(plan)) => Some(&plan.work),
                _ => None,
            };
            let works = || decode.into_iter().chain(prefill);
            let splits = works()
                .flat_map(|work| work.merge_indptr.windows(2))
                .map(|pair| i64::from(pair[1]) - i64::from(pair[0]))
                .max();
            let items = works().map(|work| work.request_indices.len() as u64).sum();
            Some((splits.unwrap_or(0).max(0) as u64, items))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_is_in_a_bucket_that_ends_at_most_a_sixteenth_later() {
        for exponent in 0..TOP {
            for value in [
                1_u64 << exponent,
                (1 << exponent) + 1,
                (1 << exponent) * 2 - 1,
            ] {
                let end = bucket_end(bucket(value) as u64);
                assert!(end >= value, "{value} {end}");
                assert!(end - value <= value / 16, "{value} {end}");
            }
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles() {
        let histogram = LatencyHistogram::default();
        assert_eq!(histogram.quantile(0.5), None);
        (1..=1000).for_each(|ns| histogram.record(ns));
        let p50 = histogram.quantile(0.5).unwrap();
        let p99 = histogram.quantile(0.99).unwrap();
        assert!((500..=531).contains(&p50), "{p50}");
        assert!((990..=1051).contains(&p99), "{p99}");
    }

    #[test]
    fn figures_count_what_no_bound_is_exceeded_by() {
        let histogram = LatencyHistogram::default();
        let durations = [0, 511, 512, 1_000, 1_023, 1_024, 70_000_000, 1 << 50];
        durations.into_iter().for_each(|ns| histogram.record(ns));
        let figures = histogram.figures();
        assert_eq!(figures.count, durations.len() as u64);
        assert_eq!(figures.sum_ns, durations.into_iter().sum::<u64>());
        for (bound, count) in &figures.at_most {
            let expected = durations.iter().filter(|ns| *ns <= bound).count();
            assert_eq!(*count, expected as u64, "{bound}");
        }
        assert_eq!(figures.at_most[0], (511, 2));
        assert_eq!(figures.at_most.last(), Some(&((1 << 26) - 1, 6)));
    }

    #[test]
    fn summaries() {
        let summary = RunningSummary::default();
        assert_eq!(summary.get(), Summary::default());
        [3, 9, 6]
            .into_iter()
            .for_each(|value| summary.record(value));
        assert_eq!(
            summary.get(),
            Summary {
                count: 3,
                last: 6,
                max: 9,
                mean: 6.0
            }
        );
    }
}
