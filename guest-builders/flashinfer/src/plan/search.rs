//! The smallest chunk that keeps the number of items within a budget. It must never know what an item is for.

/// Division of page counts by one chunk size, rounding up, without dividing.
#[derive(Clone, Copy, Debug)]
pub enum Chunk {
    /// Exact for counts below 2^15: 32-bit lanes, which vectorise.
    Small { pages: u32, factor: u32, shift: u32 },
    /// Exact for counts below 2^31.
    Large { pages: u32, factor: u64, shift: u32 },
}

impl Chunk {
    /// Chunks of `pages` pages, at least 1, for counts up to `largest`.
    pub fn new(pages: u32, largest: u32) -> Self {
        let log2 = 32 - (pages - 1).leading_zeros();
        // With k = ceil(log2 d) + b, ceil(2^k / d) · x >> k = floor(x / d) for every x < 2^b.
        if largest.saturating_add(pages) < 1 << 15 {
            let shift = log2 + 15;
            Self::Small {
                pages,
                factor: (1_u64 << shift).div_ceil(u64::from(pages)) as u32,
                shift,
            }
        } else {
            let shift = log2 + 31;
            Self::Large {
                pages,
                factor: (1_u64 << shift).div_ceil(u64::from(pages)),
                shift,
            }
        }
    }

    pub const fn pages(self) -> u32 {
        match self {
            Self::Small { pages, .. } | Self::Large { pages, .. } => pages,
        }
    }

    /// Chunks of every request, from the running sum of their pages: ceil(pages / chunk). s32 [n]
    pub fn counts(self, indptr: &[i32]) -> Vec<i32> {
        let mut counts = vec![0; indptr.len() - 1];
        self.visit(indptr, |row, count| counts[row] = count as i32);
        counts
    }

    /// The sum of `counts`.
    pub fn total(self, indptr: &[i32]) -> u64 {
        match self {
            Self::Small {
                pages,
                factor,
                shift,
            } => {
                let round_up = pages - 1;
                let mut total = 0_u32;
                for (start, end) in indptr.iter().zip(&indptr[1..]) {
                    let count = (end - start) as u32;
                    total += (count + round_up).wrapping_mul(factor) >> shift;
                }
                u64::from(total)
            }
            Self::Large { .. } => {
                let mut total = 0;
                self.visit(indptr, |_, count| total += u64::from(count));
                total
            }
        }
    }

    #[inline(always)]
    fn visit(self, indptr: &[i32], mut take: impl FnMut(usize, u32)) {
        match self {
            Self::Small {
                pages,
                factor,
                shift,
            } => {
                let round_up = pages - 1;
                for (row, (start, end)) in indptr.iter().zip(&indptr[1..]).enumerate() {
                    let count = (end - start) as u32;
                    take(row, (count + round_up).wrapping_mul(factor) >> shift);
                }
            }
            Self::Large {
                pages,
                factor,
                shift,
            } => {
                let round_up = u64::from(pages) - 1;
                for (row, (start, end)) in indptr.iter().zip(&indptr[1..]).enumerate() {
                    let count = (end - start) as u32 as u64;
                    take(
                        row,
                        ((u128::from(count + round_up) * u128::from(factor)) >> shift) as u32,
                    );
                }
            }
        }
    }
}

/// The smallest chunk in pages, at least `least`, to about a sixteenth, with at most `budget` chunks in all. `largest` is
/// the longest request's pages, at which there is one chunk per request: `budget` must allow that.
///
/// Starts where the chunks would be if every request's last one were half full, which is right to a few per cent for varied
/// lengths; so two or three passes are enough.
pub fn smallest_chunk(indptr: &[i32], largest: u32, least: u32, budget: u64) -> u32 {
    let rows = (indptr.len() - 1) as u64;
    let total = indptr[indptr.len() - 1] as u64;
    let mut high = largest.max(1);
    let mut low = (total.div_ceil(budget.max(1)) as u32).max(least).min(high);
    let mut guess = (total / (budget - budget.min(rows) / 2).max(1)) as u32;
    while low < high - high / 16 {
        guess = guess.clamp(low, high - 1);
        if Chunk::new(guess, largest).total(indptr) <= budget {
            high = guess;
        } else {
            low = guess + 1;
        }
        guess = low + (high - low) / 2;
    }
    high
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn indptr(pages: &[i32]) -> Vec<i32> {
        let mut sums = vec![0];
        for count in pages {
            sums.push(sums[sums.len() - 1] + count);
        }
        sums
    }

    proptest! {
        #[test]
        fn counts_are_divisions(
            pages in proptest::collection::vec(0_i32..40_000, 1..50),
            chunk in 1_u32..45_000,
        ) {
            let indptr = indptr(&pages);
            let largest = *pages.iter().max().unwrap() as u32;
            let chunk = Chunk::new(chunk, largest);
            let expected: Vec<i32> = pages.iter().map(|&p| (p as u32).div_ceil(chunk.pages()) as i32).collect();
            prop_assert_eq!(chunk.total(&indptr), expected.iter().map(|&c| c as u64).sum::<u64>());
            prop_assert_eq!(chunk.counts(&indptr), expected);
        }

        #[test]
        fn the_chunk_fits_the_budget_and_little_less_does_not(
            pages in proptest::collection::vec(1_i32..3_000, 1..200),
            extra in 0_u64..2000,
        ) {
            let indptr = indptr(&pages);
            let largest = *pages.iter().max().unwrap() as u32;
            let budget = pages.len() as u64 + extra;
            let total = |chunk: u32| pages.iter().map(|&p| u64::from((p as u32).div_ceil(chunk))).sum::<u64>();
            let chunk = smallest_chunk(&indptr, largest, 1, budget);
            prop_assert!(total(chunk) <= budget);
            let less = chunk - chunk / 16 - 1;
            prop_assert!(less == 0 || total(less) > budget || chunk == 1);
        }
    }
}
