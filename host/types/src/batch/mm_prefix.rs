//! Bidirectional spans of multimodal documents, per request and padded, as one kernel reads them. It must never know what a
//! document shows.

use alloc::{vec, vec::Vec};

use crate::MmDocRange;

/// Ranges per request, padded to the longest list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MmPrefixRanges {
    /// `s32 [R, max_ranges, 2]`: (start, end), end inclusive; (0, 0) where a row has fewer.
    pub data: Vec<i32>,
    /// The longest list.
    pub max_ranges: usize,
}

/// The spans of each request, padded. `None` if the batch has none. (vLLM 0.33 `compute_mm_prefix_range_tensor`.)
#[must_use]
pub fn compute_mm_prefix_ranges(num_reqs: usize, ranges: &[MmDocRange]) -> Option<MmPrefixRanges> {
    if ranges.is_empty() {
        return None;
    }
    let mut counts = vec![0usize; num_reqs];
    for range in ranges {
        counts[range.row as usize] += 1;
    }
    let max_ranges = counts.iter().copied().max().unwrap_or(0);
    let mut data = vec![0; num_reqs * max_ranges * 2];
    counts.fill(0);
    for range in ranges {
        let row = range.row as usize;
        let at = 2 * (row * max_ranges + counts[row]);
        data[at] = range.start as i32;
        data[at + 1] = range.end as i32;
        counts[row] += 1;
    }
    Some(MmPrefixRanges { data, max_ranges })
}
