//! TRITON_ATTN: one rule for each field.

use timetable_types::{Dtype, MmDocRange, Scratch as ScratchTensor, Tensor, triton_attn::Metadata};

use super::{
    Rules, Scratch, VerifyContext, lanes,
    paged::{Call, rswa},
    refusal::{Refusal, Rule, absent, between, configured, equal, length},
};

/// The most softmax segments: kernels reduce all of a row at once.
const MAX_SEGMENTS: u32 = 64;
/// Tokens of a decode that the 3D form takes at most.
const MAX_QUERY_LEN_3D: i64 = 8;

impl Rules for Metadata {
    /// The block table is the host's, whole.
    const SELECTS_BLOCKS: bool = false;

    fn verify(&self, ctx: &VerifyContext<'_>, scratch: &mut Scratch) -> Result<(), Refusal> {
        verify(self, ctx, scratch)
    }
}

fn verify(
    metadata: &Metadata,
    ctx: &VerifyContext<'_>,
    scratch: &mut Scratch,
) -> Result<(), Refusal> {
    let Metadata {
        num_actual_tokens,
        max_query_len,
        query_start_loc,
        max_seq_len,
        seq_lens,
        block_table,
        slot_mapping,
        causal,
        seq_threshold_3d,
        num_par_softmax_segments,
        softmax_segm_output,
        softmax_segm_max,
        softmax_segm_expsum,
        mm_prefix_range,
        rswa_prefix_lens,
        rswa_window,
    } = metadata;
    // A rank's share of the keys cannot be said.
    equal("dcp_world_size", ctx.dcp().world, 1)?;
    Call {
        num_actual_tokens: *num_actual_tokens,
        max_query_len: *max_query_len,
        query_start_loc,
        max_seq_len: *max_seq_len,
        seq_lens,
        block_table,
        slot_mapping,
        causal,
    }
    .verify(ctx)?;
    // A power of two that kernels exist for, and within what a captured graph divides by.
    let segments = *num_par_softmax_segments;
    if !segments.is_power_of_two() || segments > MAX_SEGMENTS {
        return Err(Refusal::new(
            "num_par_softmax_segments",
            segments.into(),
            Rule::OneOf("1, 2, 4, 8, 16, 32, 64"),
            MAX_SEGMENTS.into(),
        ));
    }
    if let Some(promise) = ctx.promise {
        let most = promise.max_num_splits.max(1);
        between("num_par_softmax_segments", segments, 1, most)?;
    }
    // Whatever the threshold, a step with few enough rows of one token finds a place for each of its tokens.
    let starts = ctx.inputs.query_start_loc;
    let (longest, _) = lanes::steps(starts);
    let is_3d = ctx.common.num_reqs <= *seq_threshold_3d && longest <= 1;
    let needed = match starts.last() {
        Some(&tokens) if is_3d => tokens,
        _ => 0,
    };
    let rows = partial_results(
        [softmax_segm_output, softmax_segm_max, softmax_segm_expsum],
        segments,
        ctx,
    )?;
    // At most what all decodes take with the most segments, or the largest step.
    let scheduler = &ctx.config.scheduler;
    let decodes = i64::from(scheduler.max_num_seqs) * MAX_QUERY_LEN_3D;
    let tokens = decodes.max(scheduler.max_num_batched_tokens.into());
    let room = tokens * i64::from(MAX_SEGMENTS / segments);
    between("softmax_segm_output", rows, needed, room.max(needed.into())).map_err(|refusal| {
        Refusal {
            row: Some(0),
            ..refusal
        }
    })?;
    mm_prefix(ctx, mm_prefix_range.as_ref(), scratch)?;
    rswa(ctx, rswa_prefix_lens.as_ref(), *rswa_window)
}

/// The places for tokens in the three scratch tensors, which must agree: f32 [places, heads, segments, the next power of two of
/// the head size], and the same without the last for maxima and sums.
fn partial_results(
    [output, max, expsum]: [&ScratchTensor; 3],
    segments: u32,
    ctx: &VerifyContext<'_>,
) -> Result<u32, Refusal> {
    let head_size = ctx.config.kv_cache_spec.head_size_v;
    let padded = head_size.checked_next_power_of_two().unwrap_or(u32::MAX);
    let places = output.shape.first().copied().unwrap_or(0);
    let wanted = [places, ctx.config.attention.num_heads, segments, padded];
    let mut bytes = 0_u64;
    for (field, scratch, dims) in [
        ("softmax_segm_output", output, 4),
        ("softmax_segm_max", max, 3),
        ("softmax_segm_expsum", expsum, 3),
    ] {
        let ScratchTensor { shape, dtype } = scratch;
        length(field, shape.len(), dims)?;
        for (dim, (&size, &wanted)) in shape.iter().zip(&wanted).enumerate() {
            if size != wanted {
                return Err(Refusal::at(
                    field,
                    dim,
                    size.into(),
                    Rule::Equal,
                    wanted.into(),
                ));
            }
        }
        configured(
            field,
            *dtype == Dtype::Float32,
            *dtype as i64,
            Dtype::Float32 as i64,
        )?;
        let elements = shape
            .iter()
            .fold(4, |bytes: u64, &size| bytes.saturating_mul(size.into()));
        bytes = bytes.saturating_add(elements);
    }
    // A captured graph has the memory that was promised.
    if let Some(promise) = ctx.promise {
        let clamped = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        between(
            "scratch_bytes",
            clamped(bytes),
            0,
            clamped(promise.scratch_bytes),
        )?;
    }
    Ok(places)
}

/// For each row its bidirectional spans in the host's order, (start, end) side by side, zeros behind them.
fn mm_prefix(
    ctx: &VerifyContext<'_>,
    tensor: Option<&Tensor>,
    scratch: &mut Scratch,
) -> Result<(), Refusal> {
    const FIELD: &str = "mm_prefix_range";
    let ranges = &ctx.common.mm_req_doc_ranges;
    let matrix = match tensor {
        None if ranges.is_empty() => return Ok(()),
        None => return Err(Refusal::missing(FIELD)),
        Some(_) if ranges.is_empty() => return absent(FIELD, true),
        Some(Tensor::Matrix(matrix)) => matrix,
        Some(_) => return Err(Refusal::reference(FIELD, "spans, as a matrix by value")),
    };
    let rows = ctx.rows();
    let counts = &mut scratch.chunks;
    counts.clear();
    counts.resize(rows, 0);
    let known = || ranges.iter().filter(|range| (range.row as usize) < rows);
    for range in known() {
        counts[range.row as usize] += 1;
    }
    let most = counts.iter().copied().max().unwrap_or(0) as usize;
    equal(FIELD, matrix.columns, 2 * most as i64)?;
    length(FIELD, matrix.rows as usize, rows)?;
    length(FIELD, matrix.values.len(), 2 * most * rows)?;
    let wrong = |row: usize, value: i32, wanted: i64| {
        Refusal::at(FIELD, row, value.into(), Rule::Equal, wanted)
    };
    let spans = |row: usize| &matrix.values[2 * most * row..2 * most * (row + 1)];
    for (row, &count) in counts.iter().enumerate() {
        if let Some(&value) = spans(row)[2 * count as usize..]
            .iter()
            .find(|value| **value != 0)
        {
            return Err(wrong(row, value, 0));
        }
    }
    counts.fill(0);
    for MmDocRange { row, start, end } in known() {
        let row = *row as usize;
        let at = 2 * counts[row] as usize;
        counts[row] += 1;
        for (&value, &wanted) in spans(row)[at..at + 2].iter().zip([start, end]) {
            if i64::from(value) != i64::from(wanted) {
                return Err(wrong(row, value, wanted.into()));
            }
        }
    }
    Ok(())
}
