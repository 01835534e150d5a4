//! The policy: THIS IS THE PLACE TO CHANGE.

use timetable_guest::flashinfer::{Choice, Part};

/// The most chunks that one request's keys are divided into. It is promised to captured graphs; the host's own bound may be
/// lower, and then holds.
pub const MAX_SPLITS: u32 = 16;

/// How the keys of the step's decodes, or of its prefills, are divided into chunks: each is some worker's, and their results are
/// merged. What this returns must depend on `part` alone.
pub fn choose(part: &Part<'_>) -> Choice {
    // For example, chunks of 2,048 keys for decodes: Choice { kv_chunk_size: 2048, ..Choice::one_chunk() }
    let _ = part;
    Choice::one_chunk()
}
