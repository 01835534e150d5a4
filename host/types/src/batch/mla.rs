//! The chunk planner of MLA prefills: contexts are decompressed through a workspace, a chunk at a time. It
//! must never know what a workspace row holds.

use alloc::vec::Vec;

use super::BatchError;

/// How context tokens become workspace rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextRows {
    /// Ranks of decode context parallelism; 1: every context token takes one row.
    pub dcp_world_size: u32,
    /// `cp_kv_cache_interleave_size`
    pub interleave: u32,
}

impl ContextRows {
    /// Rows that `tokens` context tokens take on every rank, padded alike: ⌈tokens / (ranks · interleave)⌉ · interleave.
    #[inline]
    #[must_use]
    pub fn padded(self, tokens: i32) -> i32 {
        if self.dcp_world_size == 1 {
            return tokens;
        }
        let round = (self.dcp_world_size * self.interleave) as i32;
        (tokens + round - 1) / round * self.interleave as i32
    }
}

/// The workspace's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextBudget {
    /// Rows of the workspace on one rank.
    pub row_budget: i32,
    /// The largest number of context tokens of one request in one chunk.
    pub max_context_chunk: i32,
    /// A piece of a context that is not its last is a multiple of this: block size, or lcm(block size, ranks · interleave).
    pub split_alignment: i32,
    /// Tokens to rows.
    pub rows: ContextRows,
}

/// One chunk: consecutive prefills, each with a run of its context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextChunkPlan {
    /// First prefill.
    pub request_start: u32,
    /// One past the last prefill.
    pub request_end: u32,
    /// `s32 [n]`: first context token of each.
    pub starts: Vec<i32>,
    /// `s32 [n]`: context tokens of each.
    pub seq_lens: Vec<i32>,
    /// Does the first prefill go on from the chunk before? Only the first can.
    pub is_continuation: bool,
}

/// Plans the chunks of prefills' contexts (`context_lens`, `s32 [prefills]`) through a workspace.
///
/// Requests are walked in order. A request's remaining context joins the chunk whole if its rows fit; otherwise the largest
/// aligned piece that fits joins, and the chunk closes. A request without context ends a run. Each context is covered once,
/// in order. (vLLM 0.33 `plan_mla_context_chunks`.)
///
/// # Errors
/// [`BatchError::ContextDoesNotFit`] if an empty workspace cannot take one aligned piece.
pub fn plan_mla_context_chunks(
    context_lens: &[i32],
    budget: ContextBudget,
) -> Result<Vec<ContextChunkPlan>, BatchError> {
    let mut chunks: Vec<ContextChunkPlan> = Vec::new();
    let mut open: Option<(ContextChunkPlan, i32)> = None;
    let whole_limit = budget.max_context_chunk;
    for (request, &context_len) in context_lens.iter().enumerate() {
        let request = request as u32;
        if context_len <= 0 {
            chunks.extend(open.take().map(|(chunk, _)| chunk));
            continue;
        }
        let mut start = 0;
        while start < context_len {
            let (mut chunk, used) = open.take().unwrap_or_else(|| {
                let chunk = ContextChunkPlan {
                    request_start: request,
                    request_end: request,
                    starts: Vec::new(),
                    seq_lens: Vec::new(),
                    is_continuation: start > 0,
                };
                (chunk, 0)
            });
            let remaining = context_len - start;
            let free = budget.row_budget - used;
            let needed = budget.rows.padded(start + remaining) - budget.rows.padded(start);
            let taken = if needed <= free {
                remaining
            } else {
                aligned_piece(start, remaining, free, whole_limit, &budget)
            };
            if taken > 0 {
                chunk.request_end = request + 1;
                chunk.starts.push(start);
                chunk.seq_lens.push(taken);
                start += taken;
            } else if chunk.starts.is_empty() {
                return Err(BatchError::ContextDoesNotFit {
                    prefill: request,
                    remaining,
                    row_budget: budget.row_budget,
                    split_alignment: budget.split_alignment,
                });
            }
            if taken == remaining {
                open = Some((chunk, used + needed));
            } else {
                chunks.push(chunk);
            }
        }
    }
    chunks.extend(open.map(|(chunk, _)| chunk));
    Ok(chunks)
}

/// The largest multiple of the alignment that is shorter than `remaining`, at most `limit`, and whose rows fit `free`.
fn aligned_piece(start: i32, remaining: i32, free: i32, limit: i32, budget: &ContextBudget) -> i32 {
    let align = budget.split_alignment.max(1);
    let rows = |tokens: i32| budget.rows.padded(start + tokens) - budget.rows.padded(start);
    // In units of the alignment: `low` fits, `high` is the first that is out of the question.
    let (mut low, mut high) = (0, limit.min(remaining - 1) / align + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if rows(middle * align) <= free {
            low = middle;
        } else {
            high = middle;
        }
    }
    low * align
}
