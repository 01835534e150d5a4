//! Which token counts are captured. It must never know a mode.

use thiserror::Error;

/// What the default capture sizes follow from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureSizeConfig {
    /// `max_num_seqs`
    pub max_num_seqs: u32,
    /// `max_num_batched_tokens`
    pub max_num_batched_tokens: u32,
    /// Query length of a uniform decode: 1 + speculative tokens.
    pub decode_query_len: u32,
    /// Compute capability's major number; 10 doubles the ceiling.
    pub compute_capability_major: u32,
    /// Capture every small size: the field's "interactivity" performance mode.
    pub interactivity: bool,
}

/// Why capture sizes are refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CaptureSizeError {
    /// No size is left for uniform decodes.
    #[error(
        "No valid cudagraph sizes after rounding to multiple of {query_len} (num_speculative_tokens + 1) please adjust \
         num_speculative_tokens ({}) or max_cudagraph_capture_size ({max}) or cudagraph_capture_sizes ({sizes:?})",
        query_len - 1
    )]
    NoneLeft {
        /// Query length of a uniform decode.
        query_len: u32,
        /// The largest size allowed.
        max: u32,
        /// The sizes before rounding.
        sizes: Vec<u32>,
    },
    /// A configured maximum that is not the largest configured size.
    #[error(
        "customized max_cudagraph_capture_size(={max}) should be consistent with the max value of \
         cudagraph_capture_sizes(={largest})"
    )]
    Inconsistent {
        /// The configured maximum.
        max: u32,
        /// The largest configured size.
        largest: u32,
    },
}

/// Counts 1, 2, 4, then every 8 to 255, then every 16, up to `max`.
fn ladder(max: u32, small: impl Iterator<Item = u32>) -> impl Iterator<Item = u32> {
    small
        .chain((8..256).step_by(8))
        .chain((256..=max.max(256)).step_by(16))
        .filter(move |&size| size <= max)
}

/// The sizes that are captured if the user names none, rising.
///
/// With ceiling D = 1024 on compute capability 10, else 512: max = min(2 · max_num_seqs · query length, D,
/// max_num_batched_tokens). Sizes are 1, 2, 4, 8 to 255 by 8, 256 to max by 16, max_num_batched_tokens if not above max, and
/// the uniform decodes n · query length ≤ max for n of the same ladder and max_num_seqs. (vLLM 0.33.)
#[must_use]
pub fn default_capture_sizes(config: &CaptureSizeConfig) -> Vec<u32> {
    let ceiling = if config.compute_capability_major == 10 {
        1024
    } else {
        512
    };
    let query_len = config.decode_query_len.max(1);
    let max = config
        .max_num_seqs
        .saturating_mul(query_len)
        .saturating_mul(2)
        .min(ceiling)
        .min(config.max_num_batched_tokens);
    let mut sizes: Vec<u32> = if config.interactivity {
        ladder(max, 1..=max.min(32)).collect()
    } else {
        ladder(max, [1, 2, 4].into_iter()).collect()
    };
    sizes.extend(Some(config.max_num_batched_tokens).filter(|&tokens| tokens <= max));
    let requests = ladder(config.max_num_seqs, [1, 2, 4].into_iter()).chain([config.max_num_seqs]);
    sizes.extend(
        requests
            .filter_map(|n| n.checked_mul(query_len))
            .filter(|&size| size <= max),
    );
    sizes.sort_unstable();
    sizes.dedup();
    sizes.retain(|&size| size > 0);
    sizes
}

/// The user's sizes, rising, and the maximum they amount to; `true` if a configured maximum was cut to it (the field warns
/// `Truncating max_cudagraph_capture_size to …`).
///
/// # Errors
/// If the configured maximum is not the largest size.
pub fn user_capture_sizes(
    sizes: &[u32],
    configured_max: Option<u32>,
    max_num_batched_tokens: u32,
) -> Result<(Vec<u32>, u32, bool), CaptureSizeError> {
    let mut rising: Vec<u32> = sizes.to_vec();
    rising.sort_unstable();
    rising.dedup();
    let largest = rising.last().copied().unwrap_or(0);
    if let Some(max) = configured_max.filter(|&max| max != largest) {
        return Err(CaptureSizeError::Inconsistent { max, largest });
    }
    rising.retain(|&size| size <= max_num_batched_tokens);
    let max = rising.last().copied().unwrap_or(0);
    Ok((rising, max, max != largest))
}

/// Rounds sizes up to whole uniform decodes, as the first-generation runner does: what exceeds `max` is dropped, duplicates
/// too; if nothing is left, one decode is captured. No sizes stay none. Returns the sizes and their new maximum.
///
/// # Errors
/// If not even one decode fits.
pub fn round_capture_sizes(
    sizes: &[u32],
    query_len: u32,
    max: u32,
) -> Result<(Vec<u32>, u32), CaptureSizeError> {
    if sizes.is_empty() {
        return Ok((Vec::new(), max));
    }
    let mut rounded: Vec<u32> = sizes
        .iter()
        .map(|&size| size.next_multiple_of(query_len))
        .filter(|&size| size <= max)
        .collect();
    rounded.sort_unstable();
    rounded.dedup();
    if rounded.is_empty() && query_len <= max {
        rounded.push(query_len);
    }
    match rounded.last() {
        Some(&largest) => Ok((rounded, largest)),
        None => Err(CaptureSizeError::NoneLeft {
            query_len,
            max,
            sizes: sizes.to_vec(),
        }),
    }
}
