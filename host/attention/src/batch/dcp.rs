//! Decode context parallelism: which queries attend to context that other ranks hold. It must never know this
//! rank's own lengths: what it decides, all ranks decide alike.

use timetable_types::batch::{BatchRows, split_decodes_prefills_and_extends};

/// Decodes and extends of a batch whose order is decodes, extends, prefills: the rows that have context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextQuerySplit {
    /// Rows of one token.
    pub num_decodes: u32,
    /// Rows of more tokens that have context.
    pub num_extends: u32,
    /// Tokens of the decodes.
    pub num_decode_tokens: u32,
    /// Tokens of the extends.
    pub num_extend_tokens: u32,
}

/// Splits the queries of the context pass, threshold 1. (vLLM 0.33 `split_dcp_context_queries`.)
#[must_use]
pub fn split_dcp_context_queries(rows: &BatchRows<'_>) -> ContextQuerySplit {
    let split = split_decodes_prefills_and_extends(rows, 1);
    ContextQuerySplit {
        num_decodes: split.num_decodes,
        num_extends: split.num_extends,
        num_decode_tokens: split.num_decode_tokens,
        num_extend_tokens: split.num_extend_tokens,
    }
}

/// Is there no row with context? Decided from the host's length bounds and nothing that differs between ranks: all ranks
/// enter the context pass's collectives, or none does. (vLLM 0.33 `should_skip_dcp_context_attention`.)
#[must_use]
pub fn should_skip_dcp_context_attention(rows: &BatchRows<'_>) -> bool {
    rows.query_start_loc
        .windows(2)
        .zip(rows.seq_lens)
        .all(|(w, &bound)| bound <= w[1] - w[0])
}
