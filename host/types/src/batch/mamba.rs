//! Chunks of the Mamba family: causal convolution blocks and chunks of the chunked scan. It must never know a kernel.

use alloc::vec::Vec;

use super::{
    BatchError, BatchRows, DecodePrefillSplit, DecodeRule, PAD, split_decodes_and_prefills,
};
use crate::{CommonAttentionMetadata, ExtraValue};

/// Tokens of one block of the causal convolution's kernel: the field's BLOCK_M.
pub const CAUSAL_CONV1D_BLOCK_M: i32 = 8;

/// The convolution's program list: which prefill, and which block of it, each program works on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CausalConv1dPlan {
    /// `s32 [prefills]`: blocks of each, ⌈query length / 8⌉.
    pub nums: Vec<i32>,
    /// Sum of `nums`.
    pub total: u32,
    /// `s32 [total]`: the prefill of each program (the head of the field's `batch_ptr`).
    pub prefill_of_program: Vec<i32>,
    /// `s32 [total]`: the block within that prefill (the head of `token_chunk_offset_ptr`).
    pub block_of_program: Vec<i32>,
    /// Length of the field's two buffers, which are filled with −1 behind `total`: 2 · max(1024, total).
    pub padded_len: u32,
}

/// Plans the causal convolution over prefills with query starts `s32 [prefills + 1]`, from 0.
/// (vLLM 0.33 `compute_causal_conv1d_metadata`.)
#[must_use]
pub fn compute_causal_conv1d_metadata(query_start_loc_p: &[i32]) -> CausalConv1dPlan {
    let prefills = query_start_loc_p.len().saturating_sub(1);
    let mut nums = Vec::with_capacity(prefills);
    nums.extend(
        query_start_loc_p
            .windows(2)
            .map(|w| ((w[1] - w[0]).max(0) + CAUSAL_CONV1D_BLOCK_M - 1) / CAUSAL_CONV1D_BLOCK_M),
    );
    let total: usize = nums.iter().map(|&n| n as usize).sum();
    let mut prefill_of_program = Vec::with_capacity(total);
    let mut block_of_program = Vec::with_capacity(total);
    for (prefill, &num) in nums.iter().enumerate() {
        prefill_of_program.resize(prefill_of_program.len() + num as usize, prefill as i32);
        block_of_program.extend(0..num);
    }
    let padded_len = 2 * total.max(1024) as u32;
    CausalConv1dPlan {
        nums,
        total: total as u32,
        prefill_of_program,
        block_of_program,
        padded_len,
    }
}

/// Chunks of a chunked scan over prefills.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScanChunks {
    /// `s32 [chunks + 1]`: running sum of chunk lengths, from 0.
    pub cu_chunk_seqlen: Vec<i32>,
    /// `s32 [chunks]`: the prefill of each chunk.
    pub seq_idx: Vec<i32>,
    /// `s32 [prefills]`: the last chunk of each.
    pub last_chunk_indices: Vec<i32>,
    /// `s32 [prefills]`: the chunk at whose end the state is kept as a checkpoint, or −1.
    pub checkpoint_chunk_indices: Vec<i32>,
}

/// Chunks that end on multiples of `chunk_size` *of the sequence* (so that states at chunk ends can be kept): a prefill that
/// begins inside a chunk first completes it, then come whole chunks, then the rest. A checkpoint offset inside a prefill
/// ends a chunk too. (vLLM 0.33 `BaseMambaAttentionMetadataBuilder._compute_chunk_metadata`.)
///
/// `num_computed_tokens_p` is `s32 [prefills]`, `query_start_loc_p` `s32 [prefills + 1]` from 0, `checkpoint_offsets_p`
/// `s32 [prefills]` (tokens from the prefill's first; 0: none) or empty.
///
/// # Panics
/// If `chunk_size` is not above 0.
#[must_use]
pub fn mamba_compute_chunk_metadata(
    chunk_size: i32,
    num_computed_tokens_p: &[i32],
    query_start_loc_p: &[i32],
    checkpoint_offsets_p: &[i32],
) -> ScanChunks {
    assert!(chunk_size > 0, "chunk size {chunk_size} is not above 0");
    let prefills = num_computed_tokens_p
        .len()
        .min(query_start_loc_p.len().saturating_sub(1));
    let tokens = query_start_loc_p
        .get(prefills)
        .map_or(0, |&end| end.max(0) as usize);
    let chunks_bound = tokens / chunk_size as usize + 3 * prefills;
    let mut out = ScanChunks {
        cu_chunk_seqlen: Vec::with_capacity(chunks_bound + 1),
        seq_idx: Vec::with_capacity(chunks_bound),
        last_chunk_indices: Vec::with_capacity(prefills),
        checkpoint_chunk_indices: Vec::with_capacity(prefills),
    };
    out.cu_chunk_seqlen.push(0);
    for prefill in 0..prefills {
        let (start, end) = (query_start_loc_p[prefill], query_start_loc_p[prefill + 1]);
        let checkpoint = checkpoint_offsets_p.get(prefill).copied().unwrap_or(0);
        // One remainder for the row; after that chunk ends are found by addition.
        let mut into_chunk = num_computed_tokens_p[prefill] % chunk_size;
        let mut at = start;
        let mut checkpoint_chunk = PAD;
        for segment_end in [start + checkpoint.clamp(0, end - start), end] {
            while at < segment_end {
                let len = (chunk_size - into_chunk).min(segment_end - at);
                at += len;
                into_chunk += len;
                if into_chunk == chunk_size {
                    into_chunk = 0;
                }
                out.cu_chunk_seqlen.push(at);
                out.seq_idx.push(prefill as i32);
            }
            if checkpoint > 0 && checkpoint_chunk == PAD {
                checkpoint_chunk = out.seq_idx.len() as i32 - 1;
            }
        }
        out.last_chunk_indices.push(out.seq_idx.len() as i32 - 1);
        out.checkpoint_chunk_indices.push(checkpoint_chunk);
    }
    out
}

/// Chunks that end on multiples of `chunk_size` *of the flattened tokens*, and at every sequence end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VarlenChunks {
    /// `s32 [chunks + 1]`: running sum of chunk lengths, from 0.
    pub cu_chunk_seqlens: Vec<i32>,
    /// `s32 [R]`: the last chunk of each row; −1 for a row without tokens.
    pub last_chunk_indices: Vec<i32>,
    /// `s32 [chunks]`: the row of each chunk.
    pub seq_idx_chunks: Vec<i32>,
}

/// Cuts rows with query starts `s32 [R + 1]` into chunks on the grid of flattened token positions.
/// (vLLM 0.33 `mamba2_attn.compute_varlen_chunk_metadata`.)
///
/// # Panics
/// If `chunk_size` is not above 0.
#[must_use]
pub fn mamba2_compute_varlen_chunk_metadata(
    query_start_loc: &[i32],
    chunk_size: i32,
) -> VarlenChunks {
    assert!(chunk_size > 0, "chunk size {chunk_size} is not above 0");
    let rows = query_start_loc.len().saturating_sub(1);
    let tokens = query_start_loc.last().map_or(0, |&end| end.max(0) as usize);
    let chunks_bound = tokens / chunk_size as usize + rows + 1;
    let mut out = VarlenChunks {
        cu_chunk_seqlens: Vec::with_capacity(chunks_bound + 1),
        last_chunk_indices: Vec::with_capacity(rows),
        seq_idx_chunks: Vec::with_capacity(chunks_bound),
    };
    out.cu_chunk_seqlens.push(0);
    let mut grid = chunk_size;
    for row in 0..rows {
        let (mut at, end) = (query_start_loc[row], query_start_loc[row + 1]);
        if at >= end {
            out.last_chunk_indices.push(PAD);
            continue;
        }
        while at < end {
            at = end.min(grid);
            if at == grid {
                grid += chunk_size;
            }
            out.cu_chunk_seqlens.push(at);
            out.seq_idx_chunks.push(row as i32);
        }
        out.last_chunk_indices
            .push(out.seq_idx_chunks.len() as i32 - 1);
    }
    out
}

/// Name of the extra with the tokens accepted in each row's last verification: device `s32 [R]`, 1 in padded rows. Builders of
/// Mamba2, GDN and ShortConv take it.
pub const NUM_ACCEPTED_TOKENS: &str = "num_accepted_tokens";
/// Name of the extra with the draft tokens of each row: host `s32 [R]`, −1 where the row is no verification. The same builders
/// take it.
pub const NUM_DECODE_DRAFT_TOKENS_CPU: &str = "num_decode_draft_tokens_cpu";

/// The step's device field `name`, if it brings one: its rows.
#[must_use]
pub fn device_extra(common: &CommonAttentionMetadata, name: &str) -> Option<u32> {
    common.extras.iter().find_map(|extra| match extra.value {
        ExtraValue::Device(rows) if extra.name == name => Some(rows),
        _ => None,
    })
}

/// The step's host vector `name`, if it brings one.
#[must_use]
pub fn host_extra<'a>(common: &'a CommonAttentionMetadata, name: &str) -> Option<&'a [i32]> {
    common.extras.iter().find_map(|extra| match &extra.value {
        ExtraValue::Host(values) if extra.name == name => Some(values.as_slice()),
        _ => None,
    })
}

/// Splits a decode-first batch of a group that keeps states. A row that still prefills is a decode all the same if it has a
/// state and one token, or the tail of its prompt padded like a verification: `drafts` is `s32 [R]`, the draft tokens of each
/// row, −1 for none, or empty. (vLLM 0.33 `BaseMambaAttentionMetadataBuilder._compute_common_metadata`.)
///
/// # Errors
/// [`BatchError::NoRows`] if there are no rows.
pub fn split_stateful(
    rows: &BatchRows<'_>,
    drafts: &[i32],
    decode_threshold: u32,
) -> Result<DecodePrefillSplit, BatchError> {
    let mut is_prefilling = rows.is_prefilling.to_vec();
    let lens = rows.seq_lens.iter();
    let starts = rows.query_start_loc;
    for ((flag, &len), pair) in is_prefilling.iter_mut().zip(lens).zip(starts.windows(2)) {
        let query = pair[1] - pair[0];
        *flag &= u8::from(!((len > query) & (query == 1)));
    }
    for (row, &drafts) in drafts.iter().enumerate() {
        if let (Some(flag), Some(&len), Some(pair)) = (
            is_prefilling.get_mut(row),
            rows.seq_lens.get(row),
            starts.get(row..row + 2),
        ) {
            let query = pair[1] - pair[0];
            *flag &= u8::from(!(drafts >= 0 && query == drafts + 1 && len > query));
        }
    }
    split_decodes_and_prefills(
        &BatchRows {
            is_prefilling: &is_prefilling,
            ..*rows
        },
        DecodeRule {
            decode_threshold,
            require_uniform: false,
            treat_short_extends_as_decodes: false,
        },
    )
}
