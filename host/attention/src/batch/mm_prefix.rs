//! Bidirectional spans of multimodal documents (PrefixLM): per token for one kernel, per request for another.
//! It must never know what a document shows.

use timetable_types::MmDocRange;

/// Drops spans that are longer than the layer's sliding window: the window would cut them, so they stay causal.
pub fn retain_ranges_within_window(ranges: &mut Vec<MmDocRange>, sliding_window: u32) {
    ranges.retain(|range| range.end - range.start < sliding_window);
}

/// For each token the span of its request that holds it, `s32 [num_tokens, 2]`, (−1, −1) where none; end inclusive. `None` if no
/// token of this step lies in a span. Token t of row r has position seq_len − query_len + (t − query_start).
/// A span of one token changes nothing and is passed over. (vLLM 0.33 `fill_mm_prefix_query_ranges`.)
#[must_use]
pub fn fill_mm_prefix_query_ranges(
    query_start_loc: &[i32],
    seq_lens: &[i32],
    ranges: &[MmDocRange],
    num_tokens: usize,
) -> Option<Vec<i32>> {
    let mut out = vec![-1; 2 * num_tokens];
    let mut found = false;
    for range in ranges.iter().filter(|range| range.start < range.end) {
        let row = range.row as usize;
        let (start, end) = (
            i64::from(query_start_loc[row]),
            i64::from(query_start_loc[row + 1]),
        );
        let first_position = i64::from(seq_lens[row]) - (end - start);
        let from = (i64::from(range.start) - first_position + start).max(start);
        let to = (i64::from(range.end) + 1 - first_position + start).min(end);
        for token in from..to {
            let at = 2 * token as usize;
            out[at] = range.start as i32;
            out[at + 1] = range.end as i32;
            found = true;
        }
    }
    found.then_some(out)
}
