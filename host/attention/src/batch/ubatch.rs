//! Micro-batches (dual batch overlap): a step cut by tokens, each part with metadata of its own. It must
//! never know how the parts overlap on the device.

use core::ops::Range;

use thiserror::Error;

use super::step::{GroupStep, StepTensors};

/// When a step is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UbatchConfig {
    /// Is it cut at all?
    pub use_ubatching: bool,
    /// Tokens from which a step of uniform decodes is cut; the field's default is 32.
    pub dbo_decode_token_threshold: u32,
    /// Tokens from which another step is cut; the field's default is 512.
    pub dbo_prefill_token_threshold: u32,
}

/// Is a step of `num_tokens` tokens cut? (vLLM 0.33 `check_ubatch_thresholds`.)
#[must_use]
pub fn check_ubatch_thresholds(
    config: &UbatchConfig,
    num_tokens: u32,
    uniform_decode: bool,
) -> bool {
    let threshold = if uniform_decode {
        config.dbo_decode_token_threshold
    } else {
        config.dbo_prefill_token_threshold
    };
    config.use_ubatching && num_tokens >= threshold
}

/// Would the last part of the padded step hold nothing but padding? (vLLM 0.33 `is_last_ubatch_empty`.)
///
/// # Panics
/// If `num_ubatches` is 0.
#[must_use]
pub fn is_last_ubatch_empty(
    orig_num_tokens: u32,
    padded_num_tokens: u32,
    num_ubatches: u32,
) -> bool {
    padded_num_tokens / num_ubatches * (num_ubatches - 1) >= orig_num_tokens
}

/// Rows and tokens of one part. A row may be in two parts, with some of its tokens in each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UbatchSlice {
    /// Rows.
    pub requests: Range<usize>,
    /// Tokens.
    pub tokens: Range<usize>,
}

/// Why a step is not cut like that.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum UbatchError {
    /// A part without rows or tokens.
    #[error(
        "Ubatch slice UBatchSlice(request_slice=slice({}, {}, None), token_slice=slice({}, {}, None)) is empty",
        .0.requests.start, .0.requests.end, .0.tokens.start, .0.tokens.end
    )]
    Empty(UbatchSlice),
    /// A part begins or ends behind the last row.
    #[error("index {index} is out of bounds for dimension 0 with size {size}")]
    NoSuchRow {
        /// The query start that was asked for.
        index: usize,
        /// Query starts there are.
        size: usize,
    },
    /// The first token of a part is not one of its first row's: the part holds nothing but padding.
    #[error("Token slice start outside of first request")]
    StartOutsideFirstRequest(UbatchSlice),
}

/// Cuts a step of these query lengths at every `split_point` tokens (by default `num_tokens_padded / num_ubatches`), the last
/// part taking the rest of the real tokens. (vLLM 0.33 `maybe_create_ubatch_slices`, its first result.)
///
/// # Panics
/// If `num_ubatches` is 0.
#[must_use]
pub fn maybe_create_ubatch_slices(
    num_scheduled_tokens: &[u32],
    num_tokens_padded: usize,
    num_ubatches: usize,
    split_point: Option<usize>,
) -> Vec<UbatchSlice> {
    let split_point = split_point.unwrap_or(num_tokens_padded / num_ubatches);
    let mut starts = Vec::with_capacity(num_scheduled_tokens.len() + 1);
    starts.push(0usize);
    for (row, &tokens) in num_scheduled_tokens.iter().enumerate() {
        starts.push(starts[row] + tokens as usize);
    }
    let total = starts[starts.len() - 1];
    (0..num_ubatches)
        .map(|part| {
            let first = part * split_point;
            let end = if part + 1 == num_ubatches {
                total
            } else {
                first + split_point
            };
            // The row that holds the first token, and the row behind the one that holds the last.
            let first_request = starts.partition_point(|&start| start <= first) - 1;
            let end_request = starts.partition_point(|&start| start < end);
            UbatchSlice {
                requests: first_request..end_request,
                tokens: first..end,
            }
        })
        .collect()
}

/// Lets the last part reach to the padded rows and tokens. (The second result of `maybe_create_ubatch_slices`.)
#[must_use]
pub fn pad_ubatch_slices(
    slices: &[UbatchSlice],
    num_tokens_padded: usize,
    num_reqs_padded: usize,
) -> Vec<UbatchSlice> {
    let mut padded = slices.to_vec();
    if let Some(last) = padded.last_mut() {
        last.requests.end = num_reqs_padded;
        last.tokens.end = num_tokens_padded;
    }
    padded
}

/// The metadata of each part.
///
/// Query starts begin at 0 again. If a part begins inside its first row, the tokens before it are context already written
/// and only the query shortens; if it ends inside its last row, that row's length (and bound) shortens as well. Else only rows,
/// tokens, table, slots, lengths and maxima survive; `max_seq_len` is the step's; so is `causal`, which the field drops. (vLLM 0.33 `split_attn_metadata`.)
///
/// # Errors
/// If a part is empty, reaches behind the last row or begins in padding.
pub fn split_attn_metadata(
    slices: &[UbatchSlice],
    step: &GroupStep,
) -> Result<Vec<GroupStep>, UbatchError> {
    slices.iter().map(|slice| slice_step(slice, step)).collect()
}

fn slice_step(slice: &UbatchSlice, step: &GroupStep) -> Result<GroupStep, UbatchError> {
    if slice.requests.is_empty() || slice.tokens.is_empty() {
        return Err(UbatchError::Empty(slice.clone()));
    }
    let starts = &step.tensors.query_start_loc;
    let first = slice.requests.start;
    let Some(&first_row_end) = starts.get(first + 1) else {
        return Err(UbatchError::NoSuchRow {
            index: first + 1,
            size: starts.len(),
        });
    };
    let (first_start, end) = (starts[first], slice.requests.end);
    let (first_token, end_token) = (slice.tokens.start as i32, slice.tokens.end as i32);
    if first_token < first_start || first_token >= first_row_end {
        return Err(UbatchError::StartOutsideFirstRequest(slice.clone()));
    }
    let Some(&last_end) = starts.get(end) else {
        return Err(UbatchError::NoSuchRow {
            index: end,
            size: starts.len(),
        });
    };
    // Tokens of the last row that later parts take.
    let cut = (last_end - end_token).max(0);
    let query_start_loc: Vec<i32> = starts[first..=end]
        .iter()
        .map(|&start| (start.min(last_end - cut) - first_token).max(0))
        .collect();
    let shortened = |lens: &[i32]| {
        let mut lens = lens[first..end].to_vec();
        if let Some(last) = lens.last_mut() {
            *last -= cut;
        }
        lens
    };
    let bounds = shortened(&step.cam.seq_lens_cpu_upper_bound);
    let longest_query = query_start_loc
        .windows(2)
        .map(|w| w[1] - w[0])
        .max()
        .unwrap_or(0) as u32;
    // A dummy step has no queries: then the promise stands.
    let max_query_len = if longest_query == 0 {
        step.cam.max_query_len
    } else {
        longest_query
    };
    let longest = bounds.iter().copied().max().unwrap_or(0) as u32;
    let width = step.tensors.block_table_width;
    let tokens = slice.tokens.start..slice.tokens.end.min(step.tensors.slot_mapping.len());
    let tensors = StepTensors {
        query_start_loc,
        seq_lens: shortened(&step.tensors.seq_lens),
        block_table: step.tensors.block_table[first * width..end * width].to_vec(),
        block_table_width: width,
        slot_mapping: step.tensors.slot_mapping[tokens].to_vec(),
        ..StepTensors::default()
    };
    let causal = step
        .tensors
        .causal
        .as_ref()
        .map(|causal| causal[first..end].to_vec());
    let tensors = StepTensors { causal, ..tensors };
    let max_seq_len = step.cam.max_seq_len.max(longest);
    let mut made = GroupStep::new(
        tensors,
        bounds,
        slice.tokens.len() as u32,
        max_query_len,
        max_seq_len,
    );
    // The field lets this fall back to causal; a bidirectional step would then be masked without a word.
    made.cam.causal = step.cam.causal.clone();
    Ok(made)
}

/// One part of a step as the second-generation runner cuts it: with device arithmetic only, so it never fails. Query starts are
/// clamp(start − first token, 0, tokens of the part); the last row loses the tokens that later parts take. A part of padding
/// alone keeps one row without queries, so that its kernels have something to be launched on. Whether a row prefills survives, as
/// builders of layers that keep states ask it of a first token that stands alone. (vLLM 0.33 `_slice_input_batch`.)
///
/// # Panics
/// If the step has no rows, or the part's tokens lie outside the slots.
#[must_use]
pub fn slice_input_batch(slice: &UbatchSlice, step: &GroupStep) -> GroupStep {
    let num_reqs = step.batch_size();
    assert!(num_reqs > 0, "a step without rows has no parts");
    let first = slice.requests.start.min(num_reqs - 1);
    let end = slice.requests.end.clamp(first + 1, num_reqs);
    let (first_token, end_token) = (slice.tokens.start as i32, slice.tokens.end as i32);
    let starts = &step.tensors.query_start_loc;
    let query_start_loc: Vec<i32> = starts[first..=end]
        .iter()
        .map(|&start| (start - first_token).clamp(0, end_token - first_token))
        .collect();
    let shortened = |lens: &[i32]| {
        let mut lens = lens[first..end].to_vec();
        if let Some(last) = lens.last_mut() {
            *last -= (starts[end] - end_token).max(0);
        }
        lens
    };
    let width = step.tensors.block_table_width;
    let tensors = StepTensors {
        query_start_loc,
        seq_lens: shortened(&step.tensors.seq_lens),
        block_table: step.tensors.block_table[first * width..end * width].to_vec(),
        block_table_width: width,
        slot_mapping: step.tensors.slot_mapping[slice.tokens.clone()].to_vec(),
        causal: step
            .tensors
            .causal
            .as_ref()
            .map(|causal| causal[first..end].to_vec()),
        ..StepTensors::default()
    };
    let bounds = shortened(&step.cam.seq_lens_cpu_upper_bound);
    let flags = &step.cam.is_prefilling;
    let flags = flags[first.min(flags.len())..end.min(flags.len())].to_vec();
    let (max_query_len, max_seq_len) = (step.cam.max_query_len, step.cam.max_seq_len);
    let mut made = GroupStep::new(
        tensors,
        bounds,
        slice.tokens.len() as u32,
        max_query_len,
        max_seq_len,
    );
    made.cam.causal = step.cam.causal.clone();
    made.cam.is_prefilling = flags;
    made
}
