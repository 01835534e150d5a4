//! FLASH_ATTN: one rule for each field.

use timetable_types::{
    Causal, DcpLocal, DcpSource, Dtype, Input, MmDocRange, RowRange, Tensor,
    flash_attn::{Metadata, Schedule, SchedulerMetadataCall, TileOrder},
};

use super::{
    Rules, Scratch, VerifyContext, lanes,
    paged::{Call, rswa},
    reference,
    refusal::{Refusal, Rule, absent, between, configured, equal, length},
};

impl Rules for Metadata {
    /// The block table is the host's, whole: a schedule divides all keys of a row among splits.
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
        max_dcp_context_kv_len,
        dcp_context_kv_lens,
        num_decode_reqs,
        num_prefill_reqs,
        num_decode_tokens,
        num_prefill_tokens,
        max_num_splits,
        scheduler_metadata,
        mm_prefix_query_range,
        rswa_prefix_lens,
        rswa_window,
        schedule,
    } = metadata;

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
    dcp_context(ctx, *max_dcp_context_kv_len, dcp_context_kv_lens.as_ref())?;
    let counts = [
        *num_decode_reqs,
        *num_decode_tokens,
        *num_prefill_reqs,
        *num_prefill_tokens,
    ];
    dcp_counts(ctx, counts)?;
    // 0: the kernel's heuristic; else as configured at most. No impl here executes it: a captured graph is bound by the schedule's.
    let configured_splits = ctx.config.max_num_splits.max(1);
    between("max_num_splits", *max_num_splits, 0, configured_splits)?;
    if let Some(call) = scheduler_metadata {
        scheduler_call(call, metadata, ctx).map_err(|r| r.within("scheduler_metadata"))?;
    }
    mm_prefix(ctx, mm_prefix_query_range.as_ref(), scratch)?;
    rswa(ctx, rswa_prefix_lens.as_ref(), *rswa_window)?;
    executed(schedule, ctx, scratch).map_err(|r| r.within("schedule"))
}

/// Timetable's schedule, which impls execute: splits within scratch and promise, every row's tiles started once.
fn executed(
    schedule: &Schedule,
    ctx: &VerifyContext<'_>,
    scratch: &mut Scratch,
) -> Result<(), Refusal> {
    let Schedule {
        max_num_splits,
        num_splits,
        tile_order,
    } = schedule;
    let rows = ctx.rows();
    // Sizes the scratch of partial results, so at least 1 and no more than there is room for.
    between("max_num_splits", *max_num_splits, 1, ctx.max_splits_bound())?;
    // One count for each row, or none at all; each within the maximum. Rows of padding have no keys: any count is inert.
    if !num_splits.is_empty() {
        length("num_splits", num_splits.len(), rows)?;
        let max = *max_num_splits as i32;
        let signs = num_splits.iter().fold(0, |signs, &splits| {
            signs | splits.wrapping_sub(1) | max.wrapping_sub(splits)
        });
        if signs < 0 {
            for (row, &splits) in num_splits.iter().enumerate() {
                between("num_splits", splits, 1, max).map_err(|refusal| Refusal {
                    row: Some(row as u32),
                    ..refusal
                })?;
            }
        }
    }
    // What a captured grid has room for. Without counts every row has one.
    if let Some(promise) = ctx.promise
        && !num_splits.is_empty()
    {
        let sum: i64 = num_splits.iter().map(|&splits| i64::from(splits)).sum();
        let most = i64::from(promise.max_work_items).max(rows as i64);
        between("work_items", sum, 0, most)?;
    }
    // A permutation of the rows.
    if let TileOrder::Rows(order) = tile_order {
        length("tile_order", order.len(), rows)?;
        if !lanes::is_permutation(order, &mut scratch.marks) {
            return not_a_permutation(order, scratch);
        }
    }
    Ok(())
}

/// The first row of the order that is none, or that occurred before.
fn not_a_permutation(order: &[i32], scratch: &mut Scratch) -> Result<(), Refusal> {
    let rows = order.len();
    let mut seen = lanes::Bits::clear(&mut scratch.seen, rows);
    for (position, &row) in order.iter().enumerate() {
        let (rule, bound) = if row < 0 {
            (Rule::AtLeast, 0)
        } else if row as usize >= rows {
            (Rule::Below, rows as i64)
        } else if !seen.insert(row as usize) {
            (Rule::Once, 1)
        } else {
            continue;
        };
        return Err(Refusal::at("tile_order", position, row.into(), rule, bound));
    }
    Ok(())
}

/// Lengths of the context that this rank holds, and their maximum.
fn dcp_context(ctx: &VerifyContext<'_>, max: u32, lens: Option<&Tensor>) -> Result<(), Refusal> {
    let dcp = ctx.dcp();
    if dcp.world <= 1 {
        equal("max_dcp_context_kv_len", max, 0)?;
        return absent("dcp_context_kv_lens", lens.is_some());
    }
    let (mut longest, mut any) = (0, false);
    let starts = ctx.inputs.query_start_loc;
    for (&len, pair) in ctx.inputs.seq_lens.iter().zip(starts.windows(2)) {
        let context = len - (pair[1] - pair[0]);
        any |= context > 0;
        longest = longest.max(dcp.local_len(context));
    }
    let run = i64::from(dcp.world) * i64::from(dcp.interleave);
    let bound = ctx.max_len_bound().div_euclid(run).saturating_add(1) * i64::from(dcp.interleave);
    // 0 skips the pass over the context on every rank, which only a batch without context allows.
    let least = if any { longest.max(1) } else { 0 };
    between(
        "max_dcp_context_kv_len",
        max,
        least,
        bound.max(least.into()),
    )?;
    let wanted = DcpLocal {
        source: DcpSource::ContextLens,
        rows: RowRange {
            start: 0,
            end: ctx.common.num_reqs,
        },
    };
    match lens {
        Some(Tensor::DcpLocal(local)) if *local == wanted => Ok(()),
        None => Err(Refusal::new("dcp_context_kv_lens", 0, Rule::Present, 1)),
        Some(_) => Err(Refusal::reference(
            "dcp_context_kv_lens",
            "dcp-local context lengths of all rows",
        )),
    }
}

/// Under decode context parallelism: the leading rows that decode, then those that extend a context.
fn dcp_counts(ctx: &VerifyContext<'_>, counts: [u32; 4]) -> Result<(), Refusal> {
    let [decodes, decode_tokens, prefills, prefill_tokens] = counts;
    let rows = ctx.common.num_reqs;
    if ctx.dcp().world <= 1 {
        equal("num_decode_reqs", decodes, 0)?;
        equal("num_decode_tokens", decode_tokens, 0)?;
        equal("num_prefill_reqs", prefills, 0)?;
        return equal("num_prefill_tokens", prefill_tokens, 0);
    }
    if counts == [0; 4] {
        return Ok(());
    }
    between("num_decode_reqs", decodes, 0, rows)?;
    between("num_prefill_reqs", prefills, 0, rows - decodes)?;
    let starts = ctx.inputs.query_start_loc;
    // Tokens up to a row; after the last row those of the padding too.
    let tokens_before = |row: u32| {
        if row == rows {
            i64::from(ctx.common.num_actual_tokens)
        } else {
            i64::from(starts[row as usize])
        }
    };
    let end = decodes + prefills;
    equal("num_decode_tokens", decode_tokens, tokens_before(decodes))?;
    equal(
        "num_prefill_tokens",
        prefill_tokens,
        tokens_before(end) - tokens_before(decodes),
    )?;
    // Rows after both have no context, or the pass over it would miss them.
    for row in end as usize..rows as usize {
        let context = ctx.inputs.seq_lens[row] - (starts[row + 1] - starts[row]);
        if context > 0 {
            return Err(Refusal::at(
                "num_prefill_reqs",
                row,
                context.into(),
                Rule::Equal,
                0,
            ));
        }
    }
    Ok(())
}

/// The arguments of the field's scheduler: a record of what was asked for. No impl executes it; it must agree with the rest.
fn scheduler_call(
    call: &SchedulerMetadataCall,
    metadata: &Metadata,
    ctx: &VerifyContext<'_>,
) -> Result<(), Refusal> {
    let SchedulerMetadataCall {
        batch_size,
        max_seqlen_q,
        max_seqlen_k,
        num_heads_q,
        num_heads_kv,
        headdim,
        cache_seqlens,
        qkv_dtype,
        cu_seqlens_q,
        page_size,
        causal,
        window_size,
        num_splits,
        scheduler_metadata_len,
    } = call;
    let (config, spec) = (ctx.config, &ctx.config.kv_cache_spec);
    let sharded = ctx.dcp().world > 1;
    equal("batch_size", *batch_size, ctx.common.num_reqs)?;
    equal("max_seqlen_q", *max_seqlen_q, metadata.max_query_len)?;
    let (keys, lens) = match &metadata.dcp_context_kv_lens {
        Some(lens) if sharded => (metadata.max_dcp_context_kv_len, lens),
        _ => (metadata.max_seq_len, &metadata.seq_lens),
    };
    equal("max_seqlen_k", *max_seqlen_k, keys)?;
    let heads = config.attention.num_heads.saturating_mul(ctx.dcp().world);
    equal("num_heads_q", *num_heads_q, heads)?;
    equal("num_heads_kv", *num_heads_kv, spec.num_kv_heads)?;
    equal("headdim", *headdim, spec.head_size)?;
    if cache_seqlens != lens {
        return Err(Refusal::reference(
            "cache_seqlens",
            "key lengths, as the record has them",
        ));
    }
    let dtype = *qkv_dtype == config.attention.model_dtype || is_fp8(*qkv_dtype);
    configured(
        "qkv_dtype",
        dtype,
        *qkv_dtype as i64,
        config.attention.model_dtype as i64,
    )?;
    reference("cu_seqlens_q", cu_seqlens_q, Input::QueryStartLoc)?;
    equal("page_size", *page_size, spec.block_size)?;
    let flag = !sharded && metadata.causal == Causal::All(true);
    let holds = *causal == flag || metadata.causal == Causal::PerRequest;
    configured("causal", holds, i64::from(*causal), i64::from(flag))?;
    let (left, right) = *window_size;
    let configured_window =
        is_window_of_model(ctx, left) && (right == -1 || right == 0 || right == left);
    configured("window_size", configured_window, left.into(), -1)?;
    equal("num_splits", *num_splits, metadata.max_num_splits)?;
    // The field's buffer: one counter, and four entries for each row of the largest batch, rounded up to four rows.
    let most = ctx
        .common
        .num_reqs
        .max(config.scheduler.max_num_seqs)
        .max(config.cudagraph.max_capture_size);
    let room = 1 + i64::from(most).div_euclid(4).saturating_add(1) * 16;
    between("scheduler_metadata_len", *scheduler_metadata_len, 0, room)
}

/// The group's window as kernels count it: keys before the current one, −1 for all. The spec counts the current token too.
pub(super) fn group_window(ctx: &VerifyContext<'_>) -> i32 {
    match ctx.config.kv_cache_spec.sliding_window {
        Some(window) => i32::try_from(window).unwrap_or(i32::MAX) - 1,
        None => -1,
    }
}

/// Is `left` the group's window, or one of the model's? Configured windows count the current token, −1 is none.
fn is_window_of_model(ctx: &VerifyContext<'_>, left: i32) -> bool {
    let windows = &ctx.config.attention.sliding_windows;
    left == group_window(ctx)
        || (left == -1 && windows.contains(&-1))
        || (left >= 0 && windows.contains(&left.saturating_add(1)))
}

pub(super) fn is_fp8(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Float8E4m3 | Dtype::Float8E5m2)
}

/// For each token the bidirectional span that covers it, absolute, or (−1, −1).
fn mm_prefix(
    ctx: &VerifyContext<'_>,
    tensor: Option<&Tensor>,
    scratch: &mut Scratch,
) -> Result<(), Refusal> {
    const FIELD: &str = "mm_prefix_query_range";
    let ranges = &ctx.common.mm_req_doc_ranges;
    let matrix = match tensor {
        // Nothing is bidirectional then, which the field also does when no scheduled token is covered.
        None => {
            return match covered_tokens(ctx).next() {
                Some(_) => Err(Refusal::new(FIELD, 0, Rule::Present, 1)),
                None => Ok(()),
            };
        }
        Some(_) if ranges.is_empty() => return absent(FIELD, true),
        Some(Tensor::Matrix(matrix)) => matrix,
        Some(_) => return Err(Refusal::reference(FIELD, "spans, as a matrix by value")),
    };
    equal(FIELD, matrix.columns, 2)?;
    length(
        FIELD,
        matrix.rows as usize,
        ctx.common.num_actual_tokens as usize,
    )?;
    length(FIELD, matrix.values.len(), 2 * matrix.rows as usize)?;
    if spans_in_order(ctx, &matrix.values) {
        return Ok(());
    }
    // Spans out of order, or something is wrong: token by token.
    let mut covered = lanes::Bits::clear(&mut scratch.seen, matrix.rows as usize);
    for (token, start, end) in covered_tokens(ctx) {
        covered.insert(token);
        for (value, wanted) in [
            (matrix.values[2 * token], start),
            (matrix.values[2 * token + 1], end),
        ] {
            if i64::from(value) != wanted {
                return Err(Refusal::at(FIELD, token, value.into(), Rule::Equal, wanted));
            }
        }
    }
    // A token that no span covers has none.
    for (token, pair) in matrix.values.chunks_exact(2).enumerate() {
        for &value in pair {
            if value != -1 && covered.insert(token) {
                return Err(Refusal::at(FIELD, token, value.into(), Rule::Equal, -1));
            }
        }
    }
    Ok(())
}

/// Does each token have the pair that it should, where the host's spans follow one another?
fn spans_in_order(ctx: &VerifyContext<'_>, values: &[i32]) -> bool {
    let mut after = 0;
    for range in &ctx.common.mm_req_doc_ranges {
        let tokens = tokens_of(ctx, range);
        if tokens.is_empty() {
            continue;
        }
        let (Ok(start), Ok(end)) = (i32::try_from(range.start), i32::try_from(range.end)) else {
            return false;
        };
        let (Some(gap), Some(span)) = (
            values.get(2 * after..2 * tokens.start),
            values.get(2 * tokens.start..2 * tokens.end),
        ) else {
            return false;
        };
        if !lanes::all_pairs(gap, [-1, -1]) || !lanes::all_pairs(span, [start, end]) {
            return false;
        }
        after = tokens.end;
    }
    lanes::all_pairs(&values[2 * after..], [-1, -1])
}

/// The scheduled tokens that a span of at least two covers.
fn tokens_of(ctx: &VerifyContext<'_>, range: &MmDocRange) -> std::ops::Range<usize> {
    let starts = ctx.inputs.query_start_loc;
    let (start, end) = (i64::from(range.start), i64::from(range.end));
    let row = range.row as usize;
    match (starts.get(row), starts.get(row + 1), ctx.lens().get(row)) {
        (Some(&q0), Some(&q1), Some(&len)) if start < end => {
            let (q0, query) = (i64::from(q0), i64::from(q1 - q0));
            let context = i64::from(len) - query;
            let first = q0 + (start - context).max(0);
            let last = q0 + (end - context).min(query - 1);
            first as usize..(last + 1).max(first) as usize
        }
        _ => 0..0,
    }
}

/// (token, span start, span end) for each scheduled token within a span of at least two tokens.
fn covered_tokens<'c>(ctx: &'c VerifyContext<'_>) -> impl Iterator<Item = (usize, i64, i64)> + 'c {
    ctx.common.mm_req_doc_ranges.iter().flat_map(move |range| {
        tokens_of(ctx, range).map(move |token| (token, range.start.into(), range.end.into()))
    })
}
