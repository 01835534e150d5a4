//! Counts of values below fixed bounds, as the step loop keeps them: numbers that are copied, nothing allocated.
//!
//! Must never know: what is counted.

/// How many values do not exceed each of `N` bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Histogram<const N: usize> {
    /// Values above the bound before and not above this one.
    pub counts: [u64; N],
    /// Values above every bound.
    pub above: u64,
    /// The sum of all values.
    pub sum: u64,
}

impl<const N: usize> Default for Histogram<N> {
    fn default() -> Self {
        Self {
            counts: [0; N],
            above: 0,
            sum: 0,
        }
    }
}

impl<const N: usize> Histogram<N> {
    /// Counts one value. `bounds` ascend.
    pub fn record(&mut self, bounds: &[u64; N], value: u64) {
        match self
            .counts
            .get_mut(bounds.partition_point(|bound| *bound < value))
        {
            Some(count) => *count += 1,
            None => self.above += 1,
        }
        self.sum += value;
    }

    /// All values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum::<u64>() + self.above
    }

    /// Each bound, with the number of values that do not exceed it.
    pub fn at_most(&self, bounds: &[u64; N]) -> Vec<(u64, u64)> {
        let mut total = 0;
        bounds
            .iter()
            .zip(&self.counts)
            .map(|(bound, count)| {
                total += count;
                (*bound, total)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::Histogram;

    #[test]
    fn values_are_counted_at_their_bound() {
        let bounds = [1, 10, 100];
        let mut histogram = Histogram::default();
        [0, 1, 2, 10, 11, 101, 1000]
            .into_iter()
            .for_each(|value| histogram.record(&bounds, value));
        assert_eq!(histogram.at_most(&bounds), [(1, 2), (10, 4), (100, 5)]);
        assert_eq!(
            (histogram.count(), histogram.above, histogram.sum),
            (7, 2, 1125)
        );
    }
}
