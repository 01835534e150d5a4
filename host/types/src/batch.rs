//! Arithmetic over a batch's host vectors that builders, the host and the verifier all need: decode/prefill splits, page
//! counts, decode-context-parallel lengths, context chunks, chunks of the Mamba family.
//!
//! Pure functions on slices; a builder calls them inside its sandbox, so they allocate only what they return and keep their
//! loops free of branches and divisions where they can. This module must never know a backend, a device or a block table.
//!
//! Query starts are `s32 [R + 1]`, begin at 0 and never fall (R rows, T tokens). Lengths are `s32 [R]`, at least 0. Functions do
//! not check that: the runner makes these vectors, and the verifier checks what builders make of them.

mod mamba;
mod mla;
mod mla_context;
mod mm_prefix;
mod pages;

use alloc::vec::Vec;
use core::fmt;

pub use mamba::*;
pub use mla::*;
pub use mla_context::*;
pub use mm_prefix::*;
pub use pages::*;

use crate::{BuilderConfig, CommonAttentionMetadata, RowRange};

/// PAD_SLOT_ID of the field, in s32: "no chunk", "no state".
pub const PAD: i32 = -1;

/// Why a batch cannot be split or planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchError {
    /// The split was asked of a batch without rows.
    NoRows,
    /// A prefill is longer than the workspace that chunks of prefills share.
    PrefillExceedsWorkspace {
        /// Index of the prefill, from 0.
        prefill: u32,
        /// Its length in tokens.
        seq_len: i32,
        /// Tokens of the workspace.
        workspace_size: i32,
    },
    /// Not one aligned piece of a context fits an empty workspace.
    ContextDoesNotFit {
        /// Index of the prefill, from 0.
        prefill: u32,
        /// Context tokens that are left.
        remaining: i32,
        /// Rows of the workspace.
        row_budget: i32,
        /// A piece that is not the last is a multiple of this.
        split_alignment: i32,
    },
}

impl fmt::Display for BatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            // The field's text is its tensor library's; the part in brackets is ours.
            BatchError::NoRows => {
                f.write_str("index 0 is out of bounds for dimension 0 with size 0 (a batch without rows has no split: skip the step)")
            }
            BatchError::PrefillExceedsWorkspace { prefill, seq_len, workspace_size } => write!(
                f,
                "prefill {prefill} of {seq_len} tokens exceeds the workspace of {workspace_size} tokens: \
                 enlarge the workspace to the longest prefill"
            ),
            BatchError::ContextDoesNotFit { prefill, remaining, row_budget, split_alignment } => write!(
                f,
                "context of prefill {prefill} ({remaining} tokens left) does not fit a workspace of {row_budget} rows in \
                 pieces of a multiple of {split_alignment} tokens: enlarge the workspace"
            ),
        }
    }
}

impl core::error::Error for BatchError {}

/// The host-side part of a batch that splits look at. Borrowed, so that a builder may replace one vector (the Mamba family
/// relabels `is_prefilling`).
#[derive(Clone, Copy, Debug)]
pub struct BatchRows<'a> {
    /// `s32 [R + 1]`
    pub query_start_loc: &'a [i32],
    /// `s32 [R]`: at least the true lengths; exact for rows that prefill. Only the three-way split reads it.
    pub seq_lens: &'a [i32],
    /// One byte per row, 0 or 1; rows beyond its end are not prefilling.
    pub is_prefilling: &'a [u8],
    /// T, padded for full CUDA graphs: may exceed the last query start.
    pub num_actual_tokens: u32,
    /// At least the longest query.
    pub max_query_len: u32,
}

impl<'a> From<&'a CommonAttentionMetadata> for BatchRows<'a> {
    fn from(cam: &'a CommonAttentionMetadata) -> Self {
        Self {
            query_start_loc: &cam.query_start_loc_cpu,
            seq_lens: &cam.seq_lens_cpu_upper_bound,
            is_prefilling: &cam.is_prefilling,
            num_actual_tokens: cam.num_actual_tokens,
            max_query_len: cam.max_query_len,
        }
    }
}

impl BatchRows<'_> {
    /// R: padded rows count.
    #[inline]
    #[must_use]
    pub fn num_reqs(&self) -> usize {
        self.query_start_loc.len().saturating_sub(1)
    }
}

/// When a row is a decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeRule {
    /// A query of at most this many tokens may be a decode. The builder's reorder threshold.
    pub decode_threshold: u32,
    /// All decodes have one query length (rows of length 0, padding, may stand among them).
    pub require_uniform: bool,
    /// A short query that still prefills counts as a decode. Stateful backends say no: such a row starts a state.
    pub treat_short_extends_as_decodes: bool,
}

impl Default for DecodeRule {
    fn default() -> Self {
        Self {
            decode_threshold: 1,
            require_uniform: false,
            treat_short_extends_as_decodes: true,
        }
    }
}

/// Query length of a decode that verifies all its drafts: 1 + speculative tokens; the first-generation runner adds them once
/// more where drafts are made in parallel. (vLLM 0.33 `max_decode_query_len`.)
#[must_use]
pub fn max_decode_query_len(config: &BuilderConfig) -> u32 {
    let drafts = config.scheduler.num_speculative_tokens;
    let parallel = config.scheduler.parallel_drafting && !config.model_runner_v2;
    1 + drafts + if parallel { drafts } else { 0 }
}

/// A builder's reorder threshold: at least `base`; the verified decode if drafts count as decodes; 1 under decode context
/// parallelism unless the builder takes queries of several tokens there. (vLLM 0.33 `_init_reorder_batch_threshold`.)
#[must_use]
pub fn reorder_batch_threshold(
    config: &BuilderConfig,
    base: u32,
    supports_spec_as_decode: bool,
    supports_dcp_with_varlen: bool,
) -> u32 {
    if config.parallel.dcp_world_size > 1 && !supports_dcp_with_varlen {
        1
    } else if supports_spec_as_decode {
        base.max(max_decode_query_len(config))
    } else {
        base
    }
}

/// The threshold by which the first-generation runner orders its batch: the smallest of the groups that care.
#[must_use]
pub fn effective_reorder_threshold(
    thresholds: impl IntoIterator<Item = Option<u32>>,
) -> Option<u32> {
    thresholds.into_iter().flatten().min()
}

/// Decodes first, then prefills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodePrefillSplit {
    /// Rows [0, num_decodes).
    pub num_decodes: u32,
    /// Rows after them.
    pub num_prefills: u32,
    /// Tokens of the decodes; padding tokens count where there is no prefill.
    pub num_decode_tokens: u32,
    /// Tokens of the prefills, padding tokens included.
    pub num_prefill_tokens: u32,
}

/// Decodes first, then extends (more of a prompt that has context), then prefills (of a prompt without context).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeExtendPrefillSplit {
    /// Rows [0, num_decodes).
    pub num_decodes: u32,
    /// Rows after them.
    pub num_extends: u32,
    /// Rows after those.
    pub num_prefills: u32,
    /// Tokens of the decodes.
    pub num_decode_tokens: u32,
    /// Tokens of the extends.
    pub num_extend_tokens: u32,
    /// Tokens of the prefills, padding tokens included.
    pub num_prefill_tokens: u32,
}

/// First row whose query length (and index) satisfies `hit`. Whole blocks of rows are tested without a branch between them,
/// so that decode-heavy batches vectorise.
#[inline]
fn first_row(query_start_loc: &[i32], hit: impl Fn(usize, i32) -> bool) -> Option<usize> {
    const BLOCK: usize = 16;
    let rows = query_start_loc.len().saturating_sub(1);
    let mut row = 0;
    while row + BLOCK <= rows {
        let starts: &[i32; BLOCK + 1] = query_start_loc[row..=row + BLOCK].try_into().ok()?;
        let mut any = false;
        for i in 0..BLOCK {
            any |= hit(row + i, starts[i + 1] - starts[i]);
        }
        if any {
            break;
        }
        row += BLOCK;
    }
    (row..rows).find(|&i| hit(i, query_start_loc[i + 1] - query_start_loc[i]))
}

/// Splits a decode-first batch in two. Everything from the first row that is not a decode on is a prefill.
///
/// The order of tests is the field's (vLLM 0.33 `split_decodes_and_prefills`), with one difference: a row of length 0 is
/// padding and never a prefill, whatever a stale `is_prefilling` flag says.
/// 1. If `max_query_len` is within the threshold, uniformity is not asked for (or the threshold is at most 1) and short
///    extends count as decodes, all rows and all T tokens are decodes.
/// 2. If the first query is above the threshold, everything is a prefill.
/// 3. A row is a prefill if its length is neither 0 nor the first row's (uniform), or above the threshold (otherwise).
///    Uniformity is relative to the first row, not to the threshold.
/// 4. Unless short extends count as decodes, rows that prefill are prefills.
///
/// # Errors
/// [`BatchError::NoRows`] if there are no rows and rule 1 does not apply.
pub fn split_decodes_and_prefills(
    rows: &BatchRows<'_>,
    rule: DecodeRule,
) -> Result<DecodePrefillSplit, BatchError> {
    let (num_reqs, num_tokens) = (rows.num_reqs(), rows.num_actual_tokens);
    let all_decodes = DecodePrefillSplit {
        num_decodes: num_reqs as u32,
        num_decode_tokens: num_tokens,
        ..Default::default()
    };
    if rows.max_query_len <= rule.decode_threshold
        && (!rule.require_uniform || rule.decode_threshold <= 1)
        && rule.treat_short_extends_as_decodes
    {
        return Ok(all_decodes);
    }
    let starts = rows.query_start_loc;
    let [first_start, second_start, ..] = *starts else {
        return Err(BatchError::NoRows);
    };
    let first_len = second_start - first_start;
    let threshold = i32::try_from(rule.decode_threshold).unwrap_or(i32::MAX);
    if first_len > threshold {
        return Ok(DecodePrefillSplit {
            num_prefills: num_reqs as u32,
            num_prefill_tokens: num_tokens,
            ..Default::default()
        });
    }
    let by_length = if rule.require_uniform {
        first_row(starts, |_, len| (len != first_len) & (len != 0))
    } else if rows.max_query_len <= rule.decode_threshold {
        None
    } else {
        first_row(starts, |_, len| len > threshold)
    };
    let by_flag = if rule.treat_short_extends_as_decodes {
        None
    } else {
        let flagged = rows.is_prefilling.len().min(num_reqs);
        let is_prefilling = &rows.is_prefilling[..flagged];
        first_row(&starts[..=flagged], |row, len| {
            (is_prefilling[row] != 0) & (len != 0)
        })
    };
    let first_prefill = match (by_length, by_flag) {
        (Some(a), Some(b)) => a.min(b),
        (Some(a), None) | (None, Some(a)) => a,
        (None, None) => return Ok(all_decodes),
    };
    let num_decode_tokens = starts[first_prefill] as u32;
    Ok(DecodePrefillSplit {
        num_decodes: first_prefill as u32,
        num_prefills: (num_reqs - first_prefill) as u32,
        num_decode_tokens,
        num_prefill_tokens: num_tokens.saturating_sub(num_decode_tokens),
    })
}

/// Splits a batch whose order is decodes, extends, prefills. An extend is a row above the threshold whose length bound
/// exceeds its query; a prefill one whose length is its query. (vLLM 0.33 `split_decodes_prefills_and_extends`.)
#[must_use]
pub fn split_decodes_prefills_and_extends(
    rows: &BatchRows<'_>,
    decode_threshold: u32,
) -> DecodeExtendPrefillSplit {
    let (num_reqs, num_tokens) = (rows.num_reqs(), rows.num_actual_tokens);
    if rows.max_query_len <= decode_threshold || num_reqs == 0 {
        return DecodeExtendPrefillSplit {
            num_decodes: num_reqs as u32,
            num_decode_tokens: num_tokens,
            ..Default::default()
        };
    }
    let starts = rows.query_start_loc;
    let threshold = i32::try_from(decode_threshold).unwrap_or(i32::MAX);
    // A maximum that promises a longer query than there is: the field's argmax then finds row 0.
    let first_extend = first_row(starts, |_, len| len > threshold).unwrap_or(0);
    let bounded = rows.seq_lens.len().min(num_reqs);
    let seq_lens = &rows.seq_lens[..bounded];
    let first_prefill = first_row(&starts[..=bounded], |row, len| {
        (len > threshold) & (seq_lens[row] == len)
    })
    .unwrap_or(num_reqs);
    let (extend_start, prefill_start) = (starts[first_extend] as u32, starts[first_prefill] as u32);
    // Without a prefill, padding tokens belong to the extends.
    let num_prefill_tokens = if first_prefill == num_reqs {
        0
    } else {
        num_tokens.saturating_sub(prefill_start)
    };
    DecodeExtendPrefillSplit {
        num_decodes: first_extend as u32,
        num_extends: (first_prefill - first_extend) as u32,
        num_prefills: (num_reqs - first_prefill) as u32,
        num_decode_tokens: extend_start,
        num_extend_tokens: num_tokens.saturating_sub(extend_start + num_prefill_tokens),
        num_prefill_tokens,
    }
}

/// Greedy runs of consecutive prefills whose lengths sum to at most `workspace_size` tokens, as rows
/// [start, end) counted from `request_offset`. (vLLM 0.33 `split_prefill_chunks`.)
///
/// # Errors
/// [`BatchError::PrefillExceedsWorkspace`] if one prefill alone is too long.
pub fn split_prefill_chunks(
    seq_lens: &[i32],
    workspace_size: i32,
    request_offset: u32,
) -> Result<Vec<RowRange>, BatchError> {
    let mut chunks = Vec::new();
    let (mut start, mut used) = (0, 0);
    for (row, &seq_len) in seq_lens.iter().enumerate() {
        if seq_len > workspace_size {
            return Err(BatchError::PrefillExceedsWorkspace {
                prefill: row as u32,
                seq_len,
                workspace_size,
            });
        }
        if row > start && seq_len > workspace_size - used {
            chunks.push(RowRange {
                start: request_offset + start as u32,
                end: request_offset + row as u32,
            });
            (start, used) = (row, 0);
        }
        used += seq_len;
    }
    if start < seq_lens.len() {
        chunks.push(RowRange {
            start: request_offset + start as u32,
            end: request_offset + seq_lens.len() as u32,
        });
    }
    Ok(chunks)
}
