//! FLASHINFER: one rule for each field.

use timetable_types::{
    Causal, DcpLocal, DcpSource, Input, RowRange, Tensor,
    flashinfer::{
        Decode, Metadata, Plan, PlanFunction, Prefill, TrtllmDecode, TrtllmKernel, TrtllmPrefill,
    },
};

use super::{
    Grant, Rules, Scratch, VerifyContext,
    flash_attn::{group_window, is_fp8},
    lanes, reference,
    refusal::{Refusal, Rule, absent, between, configured, equal, length, present},
    row_reference,
    work_list::{self, Demand},
};

/// Rows [start, end) of the step: the decodes, or the prefills.
#[derive(Clone, Copy)]
struct Part {
    start: u32,
    end: u32,
    decode: bool,
}

impl Part {
    fn rows(self) -> std::ops::Range<usize> {
        self.start as usize..self.end as usize
    }

    fn range(self) -> RowRange {
        RowRange {
            start: self.start,
            end: self.end,
        }
    }

    /// s32 [n + 1]: the part's query starts, not rebased.
    fn query_starts<'c>(self, ctx: &'c VerifyContext<'_>) -> &'c [i32] {
        &ctx.inputs.query_start_loc[self.start as usize..=self.end as usize]
    }
}

impl Rules for Metadata {
    /// `paged_kv_indices` may name columns.
    const SELECTS_BLOCKS: bool = true;

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
        kv_cache_layout,
        num_actual_tokens,
        slot_mapping,
        q_data_type_prefill,
        q_data_type_decode,
        num_decodes,
        num_decode_tokens,
        num_prefills,
        num_prefill_tokens,
        causal,
        prefill,
        decode,
    } = metadata;
    let (common, attention) = (ctx.common, &ctx.config.attention);
    // As the cache is laid out: another layout reads other requests' keys.
    let layout = attention.kv_cache_layout;
    configured(
        "kv_cache_layout",
        *kv_cache_layout == layout,
        *kv_cache_layout as i64,
        layout as i64,
    )?;
    equal(
        "num_actual_tokens",
        *num_actual_tokens,
        common.num_actual_tokens,
    )?;
    reference("slot_mapping", slot_mapping, Input::SlotMapping)?;
    // The model's dtype, or fp8 over an fp8 cache.
    for (field, dtype) in [
        ("q_data_type_prefill", *q_data_type_prefill),
        ("q_data_type_decode", *q_data_type_decode),
    ] {
        let allowed = dtype == attention.model_dtype || (is_fp8(dtype) && cache_is_fp8(ctx));
        configured(field, allowed, dtype as i64, attention.model_dtype as i64)?;
    }
    // Decodes first; both parts together are all rows and all tokens, and part where the query starts say so.
    between("num_decodes", *num_decodes, 0, common.num_reqs)?;
    equal("num_prefills", *num_prefills, common.num_reqs - num_decodes)?;
    let tokens = if *num_prefills == 0 {
        common.num_actual_tokens
    } else {
        ctx.inputs.query_start_loc[*num_decodes as usize] as u32
    };
    equal("num_decode_tokens", *num_decode_tokens, tokens)?;
    equal(
        "num_prefill_tokens",
        *num_prefill_tokens,
        common.num_actual_tokens - tokens,
    )?;
    // One flag for the batch; this backend has no flags per request.
    let flag = matches!(common.causal, Causal::All(true));
    let holds = common.causal == Causal::All(*causal);
    configured("causal", holds, i64::from(*causal), i64::from(flag))?;

    let part = Part {
        start: 0,
        end: *num_decodes,
        decode: true,
    };
    match decode {
        None if *num_decodes == 0 => {}
        None => {
            return Err(Refusal::new(
                "decode",
                0,
                Rule::Present,
                (*num_decodes).into(),
            ));
        }
        Some(_) if *num_decodes == 0 => return absent("decode", true),
        Some(Decode::Wrapper(plan)) => {
            verify_plan(plan, part, *causal, *num_decode_tokens, ctx, scratch)
                .map_err(|refusal| refusal.within("decode"))?;
        }
        Some(Decode::Trtllm(record)) => {
            trtllm_decode(record, part, *num_decode_tokens, *causal, ctx)
                .map_err(|refusal| refusal.within("decode"))?;
        }
    }
    let part = Part {
        start: *num_decodes,
        end: common.num_reqs,
        decode: false,
    };
    match prefill {
        None if *num_prefills == 0 => {}
        None => {
            return Err(Refusal::new(
                "prefill",
                0,
                Rule::Present,
                (*num_prefills).into(),
            ));
        }
        Some(_) if *num_prefills == 0 => return absent("prefill", true),
        Some(Prefill::Wrapper(plan)) => {
            verify_plan(plan, part, *causal, *num_prefill_tokens, ctx, scratch)
                .map_err(|refusal| refusal.within("prefill"))?;
        }
        Some(Prefill::Trtllm(record)) => {
            trtllm_prefill(record, part, *causal, ctx)
                .map_err(|refusal| refusal.within("prefill"))?;
        }
    }
    Ok(())
}

fn cache_is_fp8(ctx: &VerifyContext<'_>) -> bool {
    ctx.config.attention.kv_cache_dtype.starts_with("fp8") || is_fp8(ctx.config.kv_cache_spec.dtype)
}

fn verify_plan(
    plan: &Plan,
    part: Part,
    batch_causal: bool,
    part_tokens: u32,
    ctx: &VerifyContext<'_>,
    scratch: &mut Scratch,
) -> Result<(), Refusal> {
    let Plan {
        function,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        seq_lens,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        causal,
        sm_scale,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
        o_data_type,
        fixed_split_size,
        disable_split_kv,
        q_len_per_req,
        dcp_world_size,
        cudagraph_batch_size,
        work,
    } = plan;
    let (config, attention, spec) = (ctx.config, &ctx.config.attention, &ctx.config.kv_cache_spec);
    let (dcp, rows) = (ctx.dcp(), part.rows().len());
    let sharded = dcp.world > 1;
    // Decodes are planned by a decode function, prefills by a prefill function: over the context alone under DCP.
    let fits = match function {
        PlanFunction::BatchDecodePlan | PlanFunction::FastDecodePlan => part.decode,
        PlanFunction::BatchPrefillPlan => !part.decode && !sharded,
        PlanFunction::BatchDcpPrefillPlan => !part.decode && sharded,
    };
    configured(
        "function",
        fits,
        *function as i64,
        i64::from(!part.decode) * 2,
    )?;
    // The part's query starts, rebased; without a base to take off, the host's own.
    match qo_indptr {
        Tensor::RebasedQueryStartLoc(range) if *range == part.range() => {}
        Tensor::Slice(slice)
            if part.start == 0
                && slice.source == Input::QueryStartLoc
                && (slice.start, slice.end) == (0, part.end + 1) => {}
        Tensor::Input(Input::QueryStartLoc)
            if part.start == 0 && part.end == ctx.common.num_reqs => {}
        _ => {
            return Err(Refusal::reference(
                "qo_indptr",
                "query_start_loc of its rows, rebased",
            ));
        }
    }
    let page = spec.block_size.max(1);
    equal("page_size", *page_size, spec.block_size)?;
    keys(plan, part, page, ctx)?;
    let heads = if part.decode {
        attention.num_heads.saturating_mul(dcp.world)
    } else {
        attention.num_heads
    };
    equal("num_qo_heads", *num_qo_heads, heads)?;
    equal("num_kv_heads", *num_kv_heads, spec.num_kv_heads)?;
    equal("head_dim", *head_dim, spec.head_size)?;
    // As the batch; the context that a DCP prefill reads lies before every query.
    configured(
        "causal",
        *causal == batch_causal,
        i64::from(*causal),
        i64::from(batch_causal),
    )?;
    configured(
        "sm_scale",
        *sm_scale == attention.scale,
        *sm_scale as i64,
        attention.scale as i64,
    )?;
    let window = group_window(ctx);
    configured(
        "window_left",
        *window_left == window,
        (*window_left).into(),
        window.into(),
    )?;
    let cap = *logits_soft_cap == attention.logits_soft_cap;
    configured(
        "logits_soft_cap",
        cap,
        logits_soft_cap.unwrap_or(0.0) as i64,
        attention.logits_soft_cap.unwrap_or(0.0) as i64,
    )?;
    let q = *q_data_type == attention.model_dtype || (is_fp8(*q_data_type) && cache_is_fp8(ctx));
    configured(
        "q_data_type",
        q,
        *q_data_type as i64,
        attention.model_dtype as i64,
    )?;
    let kv = *kv_data_type == spec.dtype || (is_fp8(*kv_data_type) && cache_is_fp8(ctx));
    configured("kv_data_type", kv, *kv_data_type as i64, spec.dtype as i64)?;
    let o = *o_data_type == attention.model_dtype;
    configured(
        "o_data_type",
        o,
        *o_data_type as i64,
        attention.model_dtype as i64,
    )?;
    // Tokens of a fixed split, or −1.
    if *fixed_split_size != -1 {
        between("fixed_split_size", *fixed_split_size, 1, i32::MAX)?;
    }
    // The longest query of a decode, or the launch skips tokens. Prefills do not use it.
    let (longest, _) = lanes::steps(part.query_starts(ctx));
    let least = if part.decode { longest } else { 0 };
    between(
        "q_len_per_req",
        *q_len_per_req,
        least,
        ctx.max_query_bound().max(1),
    )?;
    equal("dcp_world_size", *dcp_world_size, dcp.world)?;
    // Prefills belong to no decode graph; a decode graph has as many rows as this part, or as its tokens.
    if *cudagraph_batch_size != 0 {
        let most = if part.decode {
            rows.max(part_tokens as usize)
        } else {
            0
        };
        between(
            "cudagraph_batch_size",
            *cudagraph_batch_size,
            rows as i64,
            most as i64,
        )?;
    }
    // Selected pages are not where the window counts them to be: every selected key is needed then.
    let whole = matches!(paged_kv_indices, Tensor::GatherPages(_));
    let by_window = whole && !sharded;
    let demand = Demand {
        query_starts: part.query_starts(ctx),
        key_lens: seq_lens,
        group_size: num_qo_heads / (*num_kv_heads).max(1),
        head_size: *head_dim,
        page_size: page,
        causal: *causal && !sharded,
        window_left: if by_window { *window_left } else { -1 },
        inexact_by: config.scheduler.num_speculative_tokens.into(),
        max_splits: ctx.max_splits_bound(),
        max_items: ctx.promise.map(|promise| promise.max_work_items),
        max_workers: i64::from(config.device.num_workers.max(1))
            * i64::from(config.device.ctas_per_worker.max(1)),
        disable_split_kv: *disable_split_kv,
    };
    // paged_kv_indptr and paged_kv_last_page_len were checked with the keys.
    let _ = (paged_kv_indptr, paged_kv_last_page_len);
    work_list::verify(work, &demand, scratch).map_err(|refusal| {
        refusal.within(if part.decode {
            "decode.work"
        } else {
            "prefill.work"
        })
    })
}

/// `paged_kv_indptr`, `paged_kv_indices`, `paged_kv_last_page_len` and `seq_lens`: which keys each row attends to.
fn keys(plan: &Plan, part: Part, page: u32, ctx: &VerifyContext<'_>) -> Result<(), Refusal> {
    let (rows, dcp) = (part.rows(), ctx.dcp());
    let n = rows.len();
    length("paged_kv_indptr", plan.paged_kv_indptr.len(), n + 1)?;
    length(
        "paged_kv_last_page_len",
        plan.paged_kv_last_page_len.len(),
        n,
    )?;
    length("seq_lens", plan.seq_lens.len(), n)?;
    let columns = match &plan.paged_kv_indices {
        Tensor::GatherPages(range) if *range == part.range() => None,
        Tensor::SelectPages(selection) if selection.rows == part.range() => {
            if ctx.grant != Grant::Subset {
                return Err(Refusal::new("paged_kv_indices", 1, Rule::Granted, 0));
            }
            Some(selection.columns.as_slice())
        }
        _ => {
            return Err(Refusal::reference(
                "paged_kv_indices",
                "block_table of its rows, by pages",
            ));
        }
    };
    if plan.paged_kv_indptr[0] != 0 {
        let first = plan.paged_kv_indptr[0].into();
        return Err(Refusal::at("paged_kv_indptr", 0, first, Rule::Equal, 0));
    }
    let (lens, starts) = (&ctx.lens()[rows], part.query_starts(ctx));
    let window = group_window(ctx);
    let reach = i64::from(window) + i64::from(ctx.config.scheduler.num_speculative_tokens);
    let (by_page, page_i, mut taken) = (lanes::Divisor::new(page), i64::from(page), 0usize);
    for row in 0..n {
        let query = starts[row + 1] - starts[row];
        // What this rank holds of the keys; a DCP prefill plans over the context only.
        let len = match (dcp.world > 1, part.decode) {
            (false, _) => lens[row],
            (true, true) => dcp.local_len(lens[row]),
            (true, false) => dcp.local_len(lens[row] - query),
        };
        let pages = by_page.ceil(len.max(0) as u64) as u32;
        let last = if len > 0 {
            len as u32 - (pages - 1) * page
        } else {
            0
        };
        let count = i64::from(plan.paged_kv_indptr[row + 1]) - i64::from(plan.paged_kv_indptr[row]);
        let end = i64::from(plan.paged_kv_indptr[row + 1]);
        let key_len = match columns {
            None => {
                if count != i64::from(pages) {
                    let wanted = i64::from(plan.paged_kv_indptr[row]) + i64::from(pages);
                    return Err(Refusal::at(
                        "paged_kv_indptr",
                        row + 1,
                        end,
                        Rule::Equal,
                        wanted,
                    ));
                }
                i64::from(len)
            }
            Some(columns) => {
                if count < 0 || count > i64::from(pages) {
                    let wanted = i64::from(plan.paged_kv_indptr[row]) + i64::from(pages);
                    let rule = if count < 0 {
                        Rule::AtLeast
                    } else {
                        Rule::AtMost
                    };
                    return Err(Refusal::at("paged_kv_indptr", row + 1, end, rule, wanted));
                }
                // Blocks that this step writes, and the last one whatever happens.
                let context = if dcp.world > 1 {
                    dcp.local_len(lens[row] - query)
                } else {
                    len - query
                };
                let first_own = (context.max(0) as u32 / page).min(pages.saturating_sub(1));
                let own = columns.get(taken..taken + count as usize);
                let Some(own) = own else {
                    return Err(Refusal::new(
                        "paged_kv_indices",
                        columns.len() as i64,
                        Rule::AtLeast,
                        end,
                    ));
                };
                // Blocks before the window may be somebody else's by now.
                let first_seen = if window < 0 || dcp.world > 1 {
                    0
                } else {
                    by_page.floor((i64::from(context) - reach).max(0) as u64) as u32
                };
                selected(own, first_seen, first_own, pages, row)?;
                taken += count as usize;
                if count == 0 {
                    0
                } else {
                    (count - 1) * page_i + i64::from(last)
                }
            }
        };
        let found = plan.paged_kv_last_page_len[row];
        if i64::from(found) != i64::from(last) {
            return Err(Refusal::at(
                "paged_kv_last_page_len",
                row,
                found.into(),
                Rule::Equal,
                last.into(),
            ));
        }
        let found = plan.seq_lens[row];
        if i64::from(found) != key_len {
            return Err(Refusal::at(
                "seq_lens",
                row,
                found.into(),
                Rule::Equal,
                key_len,
            ));
        }
    }
    if let Some(columns) = columns {
        length("paged_kv_indices", columns.len(), taken)?;
    }
    Ok(())
}

/// Strictly rising columns of one row in `first_seen..pages`, with every column from `first_own` on.
fn selected(
    columns: &[u32],
    first_seen: u32,
    first_own: u32,
    pages: u32,
    row: usize,
) -> Result<(), Refusal> {
    const FIELD: &str = "paged_kv_indices";
    let mut previous = columns.last().map_or(-1, |&last| i64::from(last));
    let bounded = columns.first().is_none_or(|&first| first >= first_seen)
        && previous < i64::from(pages)
        && lanes::all_rise(columns);
    if !bounded {
        previous = i64::from(first_seen) - 1;
        for &column in columns {
            if i64::from(column) <= previous {
                return Err(Refusal::at(
                    FIELD,
                    row,
                    column.into(),
                    Rule::AtLeast,
                    previous + 1,
                ));
            }
            if column >= pages {
                return Err(Refusal::at(
                    FIELD,
                    row,
                    column.into(),
                    Rule::Below,
                    pages.into(),
                ));
            }
            previous = column.into();
        }
    }
    // Rising and below `pages`, so the blocks of this step are all there if as many stand at the end.
    let wanted = (pages - first_own.min(pages)) as usize;
    let tail = columns
        .len()
        .checked_sub(wanted)
        .map(|start| &columns[start..]);
    match tail {
        Some(tail) if tail.first().is_none_or(|&first| first == first_own) => Ok(()),
        _ => Err(Refusal::at(
            FIELD,
            row,
            previous,
            Rule::Equal,
            i64::from(pages) - 1,
        )),
    }
}

fn trtllm_decode(
    record: &TrtllmDecode,
    part: Part,
    part_tokens: u32,
    causal: bool,
    ctx: &VerifyContext<'_>,
) -> Result<(), Refusal> {
    let TrtllmDecode {
        kernel,
        block_tables,
        seq_lens,
        max_seq_len,
        q_len_per_req,
        q_cu_seq_lens,
        mask,
        dcp_query_start_loc,
    } = record;
    let (device, rows) = (&ctx.config.device, ctx.common.num_reqs);
    let sharded = ctx.dcp().world > 1;
    let usable = match kernel {
        TrtllmKernel::Xqa => device.xqa && !sharded,
        TrtllmKernel::TrtllmGen => device.trtllm_attention,
    };
    configured(
        "kernel",
        usable,
        *kernel as i64,
        i64::from(device.trtllm_attention),
    )?;
    row_reference(
        "block_tables",
        block_tables,
        Input::BlockTable,
        (0, part.end),
        rows,
    )?;
    // Under decode context parallelism the rank's own share of the lengths.
    let local = DcpLocal {
        source: DcpSource::SeqLens,
        rows: part.range(),
    };
    match seq_lens {
        Tensor::DcpLocal(found) if sharded && *found == local => {}
        found => {
            let input = if sharded {
                Input::DcpLocalSeqLens
            } else {
                Input::SeqLens
            };
            row_reference("seq_lens", found, input, (0, part.end), rows)?;
        }
    }
    let lens = &ctx.inputs.seq_lens[part.rows()];
    let longest = if sharded {
        lens.iter()
            .map(|&len| ctx.dcp().local_len(len))
            .max()
            .unwrap_or(0)
    } else {
        lanes::max_i32(lens)
    };
    between(
        "max_seq_len",
        *max_seq_len,
        longest,
        ctx.max_len_bound().max(longest.into()),
    )?;
    let starts = part.query_starts(ctx);
    let (longest_query, _) = lanes::steps(starts);
    between(
        "q_len_per_req",
        *q_len_per_req,
        longest_query,
        ctx.max_query_bound().max(1),
    )?;
    // Queries of one length need no starts; else these must be the rows' own.
    match q_cu_seq_lens {
        Some(tensor) => query_starts_of("q_cu_seq_lens", tensor, part, rows)?,
        None => {
            // Rows without queries may follow: the kernel finds row i's first token at i · query.
            let (query, mut empty) = (*q_len_per_req as i32, None);
            for (row, pair) in starts.windows(2).enumerate() {
                let found = pair[1] - pair[0];
                let differs = match empty {
                    _ if found == 0 => {
                        empty = empty.or(Some(row));
                        continue;
                    }
                    Some(empty) => Some((empty, 0)),
                    None if found != query => Some((row, found)),
                    None => None,
                };
                if let Some((row, found)) = differs {
                    return Err(Refusal::at(
                        "q_len_per_req",
                        row,
                        query.into(),
                        Rule::Equal,
                        found.into(),
                    ));
                }
            }
        }
    }
    if let Some(mask) = mask {
        if *kernel != TrtllmKernel::Xqa {
            return absent("mask", true);
        }
        draft_mask(mask, starts, part_tokens, causal)?;
    } else if *kernel == TrtllmKernel::Xqa && longest_query > 1 && causal {
        // Without it a draft token would see those after it.
        return present("mask", mask).map(|_| ());
    }
    match dcp_query_start_loc {
        Some(tensor) if sharded => query_starts_of("dcp_query_start_loc", tensor, part, rows),
        other => absent("dcp_query_start_loc", other.is_some()),
    }
}

fn query_starts_of(
    field: &'static str,
    tensor: &Tensor,
    part: Part,
    rows: u32,
) -> Result<(), Refusal> {
    match tensor {
        Tensor::RebasedQueryStartLoc(range) if *range == part.range() => Ok(()),
        // Only the first rows need no rebasing.
        other if part.start == 0 => row_reference(
            field,
            other,
            Input::QueryStartLoc,
            (0, part.end + 1),
            rows + 1,
        ),
        _ => Err(Refusal::reference(
            field,
            "query_start_loc of its rows, rebased",
        )),
    }
}

/// XQA's packed mask: for each query token a row of u16 words, bit k of which lets it see the row's k-th query token.
fn draft_mask(
    mask: &timetable_types::Matrix,
    starts: &[i32],
    part_tokens: u32,
    causal: bool,
) -> Result<(), Refusal> {
    let owned = starts.last().copied().unwrap_or(0) as usize;
    between(
        "mask",
        mask.rows,
        owned as i64,
        part_tokens.max(owned as u32),
    )?;
    let (_, columns) = (mask.rows as usize, mask.columns as usize);
    length("mask", mask.values.len(), mask.rows as usize * columns)?;
    let (longest, _) = lanes::steps(starts);
    between("mask", (columns * 16) as i64, longest, i64::from(u32::MAX))?;
    if columns == 0 {
        return Ok(());
    }
    let mut rows = mask.values.chunks_exact(columns);
    for pair in starts.windows(2) {
        let query = (pair[1] - pair[0]) as usize;
        for token in 0..query {
            let Some(words) = rows.next() else {
                return Ok(());
            };
            let visible = if causal { token + 1 } else { query };
            for (word, &found) in words.iter().enumerate() {
                let bits = visible.saturating_sub(16 * word).min(16);
                let wanted = (1i64 << bits) - 1;
                if i64::from(found) != wanted {
                    let row = pair[0] as usize + token;
                    return Err(Refusal::at("mask", row, found.into(), Rule::Equal, wanted));
                }
            }
        }
    }
    Ok(())
}

fn trtllm_prefill(
    record: &TrtllmPrefill,
    part: Part,
    causal: bool,
    ctx: &VerifyContext<'_>,
) -> Result<(), Refusal> {
    let TrtllmPrefill {
        block_tables,
        seq_lens,
        cum_seq_lens_q,
        cum_seq_lens_kv,
        max_q_len,
        max_seq_len,
    } = record;
    let rows = ctx.common.num_reqs;
    // The kernels are for causal attention over a whole cache.
    let usable = ctx.config.device.trtllm_attention && causal && ctx.dcp().world == 1;
    configured(
        "kernel",
        usable,
        1,
        i64::from(ctx.config.device.trtllm_attention),
    )?;
    row_reference(
        "block_tables",
        block_tables,
        Input::BlockTable,
        (part.start, part.end),
        rows,
    )?;
    row_reference(
        "seq_lens",
        seq_lens,
        Input::SeqLens,
        (part.start, part.end),
        rows,
    )?;
    query_starts_of("cum_seq_lens_q", cum_seq_lens_q, part, rows)?;
    // Despite its name the running sum of pages.
    if *cum_seq_lens_kv != Tensor::CuPageCounts(part.range()) {
        return Err(Refusal::reference(
            "cum_seq_lens_kv",
            "cu-page-counts of its rows",
        ));
    }
    let (longest, _) = lanes::steps(part.query_starts(ctx));
    between("max_q_len", *max_q_len, longest, ctx.max_query_bound())?;
    let longest = lanes::max_i32(&ctx.inputs.seq_lens[part.rows()]);
    between(
        "max_seq_len",
        *max_seq_len,
        longest,
        ctx.max_len_bound().max(longest.into()),
    )?;
    Ok(())
}
