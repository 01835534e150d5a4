//! Padding: a batch made as large as a captured graph, and the dummy batch that a graph is captured with. It must
//! never know which graph.
//!
//! Source: what vLLM 0.33's second-generation runner writes into its buffers for FULL graphs, and its dummy batch.

use thiserror::Error;
use timetable_types::CaptureShape;

use super::mamba::NULL_BLOCK_ID;
use super::step::{GroupStep, StepTensors};
use crate::step::PAD_SLOT_ID;

/// What a backend wants in padded rows. Where several backends share a buffer, the larger of each value is used: both know
/// how to pass over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddingValues {
    /// In `seq_lens`: 0, or 1 for kernels that would divide by an empty sum.
    pub seq_len: i32,
    /// In index vectors (state indices, page indices): −1, or 0 for the null block.
    pub index: i32,
}

impl PaddingValues {
    /// Element-wise maximum over backends; `None` for none.
    #[must_use]
    pub fn merge(values: impl IntoIterator<Item = PaddingValues>) -> Option<PaddingValues> {
        values.into_iter().reduce(|a, b| PaddingValues {
            seq_len: a.seq_len.max(b.seq_len),
            index: a.index.max(b.index),
        })
    }
}

impl Default for PaddingValues {
    /// The runner's own: length 0, no index.
    fn default() -> Self {
        Self {
            seq_len: 0,
            index: PAD_SLOT_ID as i32,
        }
    }
}

/// Why a step cannot be padded.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PaddingError {
    /// The target has fewer rows or tokens than the step.
    #[error(
        "a batch of {num_reqs} requests and {num_tokens} tokens does not fit a graph of {to_reqs} requests and {to_tokens} \
         tokens: dispatch it to a larger one"
    )]
    TooSmall {
        /// Rows of the step.
        num_reqs: u32,
        /// Tokens of the step.
        num_tokens: u32,
        /// Rows of the target.
        to_reqs: u32,
        /// Tokens of the target.
        to_tokens: u32,
    },
}

/// Query starts `s32 [num_reqs_padded + 1]`: entries behind the real rows repeat the last start, so that padded rows have no
/// queries and the vector never falls (it is never −1).
#[must_use]
pub fn pad_query_start_loc(query_start_loc: &[i32], num_reqs_padded: usize) -> Vec<i32> {
    let mut padded = query_start_loc.to_vec();
    let last = padded.last().copied().unwrap_or(0);
    padded.resize((num_reqs_padded + 1).max(padded.len()), last);
    padded
}

/// Pads a step to a full CUDA graph's rows and tokens. Every vector per request then has `num_reqs` rows, every vector per
/// token `num_tokens` entries: query starts repeat, lengths are `padding.seq_len` (the bounds too), block table rows are the
/// null block, slots `PAD_SLOT_ID`, positions 0, flags 0. Maxima stay; the caller sets them to what the graph promises.
///
/// # Errors
/// If the step is larger than that.
pub fn pad_step(
    step: &GroupStep,
    num_tokens: u32,
    num_reqs: u32,
    padding: PaddingValues,
) -> Result<GroupStep, PaddingError> {
    if num_reqs < step.cam.num_reqs || num_tokens < step.cam.num_actual_tokens {
        return Err(PaddingError::TooSmall {
            num_reqs: step.cam.num_reqs,
            num_tokens: step.cam.num_actual_tokens,
            to_reqs: num_reqs,
            to_tokens: num_tokens,
        });
    }
    let (rows, tokens) = (num_reqs as usize, num_tokens as usize);
    let mut made = step.clone();
    let tensors = &mut made.tensors;
    tensors.query_start_loc = pad_query_start_loc(&tensors.query_start_loc, rows);
    tensors.seq_lens.resize(rows, padding.seq_len);
    tensors
        .block_table
        .resize(rows * tensors.block_table_width, NULL_BLOCK_ID);
    // The runner's slot buffer may already be longer than the batch; behind the real tokens it holds no slot.
    let real_tokens = (step.cam.num_actual_tokens as usize).min(tensors.slot_mapping.len());
    tensors.slot_mapping.truncate(real_tokens);
    tensors.slot_mapping.resize(tokens, PAD_SLOT_ID);
    if !tensors.positions.is_empty() {
        tensors.positions.resize(tokens, 0);
    }
    let per_row = [
        &mut tensors.causal,
        &mut tensors.dcp_local_seq_lens,
        &mut tensors.encoder_seq_lens,
        &mut tensors.rswa_prefix_lens,
    ];
    for values in per_row.into_iter().flatten() {
        values.resize(rows, 0);
    }
    let cam = &mut made.cam;
    cam.num_reqs = num_reqs;
    cam.num_actual_tokens = num_tokens;
    cam.slot_mapping_len = num_tokens;
    cam.query_start_loc_cpu = pad_query_start_loc(&cam.query_start_loc_cpu, rows);
    cam.seq_lens_cpu_upper_bound.resize(rows, padding.seq_len);
    if !cam.is_prefilling.is_empty() {
        cam.is_prefilling = super::extras::padded_is_prefilling(
            &cam.is_prefilling,
            step.cam.num_reqs as usize,
            rows,
        );
    }
    if let Some(dcp) = &mut cam.dcp {
        dcp.dcp_local_seq_lens_cpu_upper_bound.resize(rows, 0);
    }
    if let Some(encoder) = &mut cam.encoder {
        encoder.encoder_seq_lens_cpu.resize(rows, 0);
    }
    if !cam.replayssm_decode_base_cpu.is_empty() {
        cam.replayssm_decode_base_cpu.resize(rows, 0);
    }
    Ok(made)
}

/// Why a graph is not captured with that shape.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CaptureBatchError {
    /// A uniform graph whose tokens are not whole queries would hold a shorter row, and so a prefill branch.
    #[error(
        "a graph of {num_tokens} tokens and {num_reqs} requests cannot have uniform queries of {query_len} tokens: capture \
         {rounded} tokens in {rounded_reqs} requests"
    )]
    NotUniform {
        /// Tokens of the shape.
        num_tokens: u32,
        /// Rows of the shape.
        num_reqs: u32,
        /// The uniform query length.
        query_len: u32,
        /// The next multiple of it.
        rounded: u32,
        /// Rows of that multiple.
        rounded_reqs: u32,
    },
    /// A row's share of the tokens exceeds the promised maximum.
    #[error(
        "a graph of {num_tokens} tokens over {num_reqs} requests has a query of {query_len} tokens, above the promised {max_query_len}"
    )]
    QueryTooLong {
        /// Tokens of the shape.
        num_tokens: u32,
        /// Rows of the shape.
        num_reqs: u32,
        /// The longest query.
        query_len: u32,
        /// The promise.
        max_query_len: u32,
    },
    /// No rows for tokens.
    #[error("a graph of {num_tokens} tokens needs at least one request")]
    NoRows {
        /// Tokens of the shape.
        num_tokens: u32,
    },
}

/// The dummy step that a full graph is captured with: T tokens split evenly over R rows, the remainder to the last rows;
/// lengths are the query lengths, positions 0, tables the null block, slots `PAD_SLOT_ID`, nothing prefills. `max_query_len`
/// is what the shape promises, `max_seq_len` the model's maximum: host integers are frozen into the graph.
///
/// # Errors
/// If the shape is uniform but its tokens are not rows times the query length, or a query exceeds the promise.
pub fn capture_batch(
    shape: &CaptureShape,
    block_table_width: usize,
    max_model_len: u32,
) -> Result<GroupStep, CaptureBatchError> {
    let (num_tokens, num_reqs) = (shape.num_tokens, shape.num_reqs);
    if num_reqs == 0 {
        return Err(CaptureBatchError::NoRows { num_tokens });
    }
    if let Some(query_len) = shape.uniform_query_len
        && query_len * num_reqs != num_tokens
    {
        let rounded_reqs = num_tokens.div_ceil(query_len.max(1));
        let rounded = rounded_reqs * query_len;
        return Err(CaptureBatchError::NotUniform {
            num_tokens,
            num_reqs,
            query_len,
            rounded,
            rounded_reqs,
        });
    }
    let longest = num_tokens.div_ceil(num_reqs);
    if longest > shape.max_query_len {
        let max_query_len = shape.max_query_len;
        return Err(CaptureBatchError::QueryTooLong {
            num_tokens,
            num_reqs,
            query_len: longest,
            max_query_len,
        });
    }
    let rows = num_reqs as usize;
    let (even, longer) = (num_tokens / num_reqs, num_tokens % num_reqs);
    let seq_lens: Vec<i32> = (0..num_reqs)
        .map(|row| (even + u32::from(row >= num_reqs - longer)) as i32)
        .collect();
    let mut query_start_loc = Vec::with_capacity(rows + 1);
    query_start_loc.push(0);
    for (row, &len) in seq_lens.iter().enumerate() {
        query_start_loc.push(query_start_loc[row] + len);
    }
    let bounds = seq_lens.clone();
    let tensors = StepTensors {
        query_start_loc,
        seq_lens,
        block_table: vec![NULL_BLOCK_ID; rows * block_table_width],
        block_table_width,
        slot_mapping: vec![PAD_SLOT_ID; num_tokens as usize],
        positions: vec![0; num_tokens as usize],
        ..StepTensors::default()
    };
    let mut step = GroupStep::new(
        tensors,
        bounds,
        num_tokens,
        shape.max_query_len,
        max_model_len,
    );
    step.cam.is_prefilling = vec![0; rows];
    Ok(step)
}
