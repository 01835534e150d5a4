//! FLASHMLA and its relatives: one rule for each field.

mod context;
mod tiles;

use timetable_types::{
    Causal, DcpLocal, DcpSource, Dtype, Input, RowRange, Tensor,
    flash_mla::{DecodeSchedule, Metadata, MlaDecode, MlaPrefill, MlaSchedulerMetadataCall},
};

use super::{
    Rules, Scratch, VerifyContext,
    flash_attn::is_fp8,
    lanes, reference,
    refusal::{Refusal, Rule, absent, between, configured, equal, length, present},
    row_reference,
};

impl Rules for Metadata {
    /// Block tables are the host's, row by row, and chunks take a context whole.
    const SELECTS_BLOCKS: bool = false;

    fn verify(&self, ctx: &VerifyContext<'_>, _scratch: &mut Scratch) -> Result<(), Refusal> {
        verify(self, ctx)
    }
}

fn verify(metadata: &Metadata, ctx: &VerifyContext<'_>) -> Result<(), Refusal> {
    let Metadata {
        num_reqs,
        max_query_len,
        max_seq_len,
        num_actual_tokens,
        query_start_loc,
        slot_mapping,
        num_decodes,
        num_decode_tokens,
        num_prefills,
        causal,
        head_dim,
        prefill,
        decode,
    } = metadata;
    let (common, starts) = (ctx.common, ctx.inputs.query_start_loc);
    let rows = common.num_reqs;
    equal("num_reqs", *num_reqs, rows)?;
    // The padded token count: output beyond it stays unwritten, beyond the batch there is none.
    equal(
        "num_actual_tokens",
        *num_actual_tokens,
        common.num_actual_tokens,
    )?;
    let (longest, _) = lanes::steps(starts);
    between(
        "max_query_len",
        *max_query_len,
        longest,
        ctx.max_query_bound(),
    )?;
    // Every row is a decode or a prefill, decodes first; tokens of padding are the last ones'.
    between("num_decodes", *num_decodes, 0, rows)?;
    equal("num_prefills", *num_prefills, rows - num_decodes)?;
    let decode_tokens = match *num_prefills {
        0 => i64::from(common.num_actual_tokens),
        _ => i64::from(starts[*num_decodes as usize]),
    };
    equal("num_decode_tokens", *num_decode_tokens, decode_tokens)?;
    // Of the decodes' keys on this rank, where ranks share them; else of all.
    let of_rank = ctx.dcp().world > 1 && *num_decodes > 0;
    let counted = match of_rank {
        true => *num_decodes as usize,
        false => rows as usize,
    };
    key_bound("max_seq_len", *max_seq_len, counted, of_rank, ctx)?;
    reference("query_start_loc", query_start_loc, Input::QueryStartLoc)?;
    reference("slot_mapping", slot_mapping, Input::SlotMapping)?;
    // A step that is not causal wants a group that is for it, and there is none; rows' own flags cannot be said.
    let is_causal = *causal && common.causal == Causal::All(true);
    configured("causal", is_causal, (*causal).into(), 1)?;
    equal("head_dim", *head_dim, ctx.config.kv_cache_spec.head_size)?;
    if *num_decodes > 0 {
        let decode = present("decode", decode)?;
        verify_decode(decode, *num_decodes, ctx).map_err(|refusal| refusal.within("decode"))?;
    } else {
        absent("decode", decode.is_some())?;
    }
    if *num_prefills > 0 {
        let prefill = present("prefill", prefill)?;
        // No graph holds prefills: it has neither workspace nor chunks.
        absent("prefill", ctx.promise.is_some())?;
        verify_prefill(prefill, *num_decodes, ctx).map_err(|refusal| refusal.within("prefill"))
    } else {
        absent("prefill", prefill.is_some())
    }
}

/// At least the longest keys of the first `rows` rows (less leaves keys out), at most the longest sequence served; on this rank
/// with `of_rank`.
fn key_bound(
    field: &'static str,
    value: u32,
    rows: usize,
    of_rank: bool,
    ctx: &VerifyContext<'_>,
) -> Result<(), Refusal> {
    let lens = &ctx.inputs.seq_lens[..rows];
    let most = ctx.max_len_bound();
    let (longest, most) = if of_rank {
        let dcp = ctx.dcp();
        let longest = lens.iter().map(|&len| dcp.local_len(len)).max();
        let run = i64::from(dcp.world) * i64::from(dcp.interleave);
        let rounds = (most + run - 1) / run;
        (longest.unwrap_or(0), rounds * i64::from(dcp.interleave))
    } else {
        (lanes::max_i32(lens), most)
    };
    between(field, value, longest, most.max(longest.into()))
}

fn verify_decode(decode: &MlaDecode, end: u32, ctx: &VerifyContext<'_>) -> Result<(), Refusal> {
    let MlaDecode {
        block_table,
        seq_lens,
        dcp_tot_seq_lens,
        query_start_loc,
        max_query_len,
        max_seq_len,
        max_num_splits,
        schedule,
    } = decode;
    let rows = ctx.common.num_reqs;
    let sharded = ctx.dcp().world > 1;
    row_reference(
        "block_table",
        block_table,
        Input::BlockTable,
        (0, end),
        rows,
    )?;
    // Under decode context parallelism the rank's own share of the lengths, and the whole ones beside them.
    let local = DcpLocal {
        source: DcpSource::SeqLens,
        rows: RowRange { start: 0, end },
    };
    match seq_lens {
        Tensor::DcpLocal(found) if sharded && *found == local => {}
        found => {
            let input = match sharded {
                true => Input::DcpLocalSeqLens,
                false => Input::SeqLens,
            };
            row_reference("seq_lens", found, input, (0, end), rows)?;
        }
    }
    if sharded {
        let whole = present("dcp_tot_seq_lens", dcp_tot_seq_lens)?;
        row_reference("dcp_tot_seq_lens", whole, Input::SeqLens, (0, end), rows)?;
    } else {
        absent("dcp_tot_seq_lens", dcp_tot_seq_lens.is_some())?;
    }
    let starts = &ctx.inputs.query_start_loc[..=end as usize];
    let (longest, _) = lanes::steps(starts);
    between(
        "max_query_len",
        *max_query_len,
        longest,
        ctx.max_query_bound(),
    )?;
    match query_start_loc {
        Some(tensor) => row_reference(
            "query_start_loc",
            tensor,
            Input::QueryStartLoc,
            (0, end + 1),
            rows + 1,
        )?,
        None => one_length(starts, *max_query_len)?,
    }
    key_bound("max_seq_len", *max_seq_len, end as usize, sharded, ctx)?;
    // Sizes the partial results; 0 leaves it to the kernel. Tiles say it themselves.
    let room = match (schedule, ctx.promise) {
        (DecodeSchedule::Tiles(_), None) => i64::from(i32::MAX),
        (DecodeSchedule::Tiles(_), Some(promise)) => i64::from(promise.max_num_splits),
        _ => ctx.max_splits_bound(),
    };
    between("max_num_splits", *max_num_splits, 0, room)?;
    match schedule {
        DecodeSchedule::Lazy => Ok(()),
        DecodeSchedule::Tiles(schedule) => tiles::verify(schedule, *max_num_splits, end, ctx)
            .map_err(|refusal| refusal.within("schedule")),
        DecodeSchedule::FlashAttn(call) => scheduler_call(call, decode, end, ctx)
            .map_err(|refusal| refusal.within("scheduler_metadata")),
    }
}

/// Without query starts row i's first token is at i · query: all rows have that many, but for rows without any at the end.
fn one_length(starts: &[i32], query: u32) -> Result<(), Refusal> {
    let mut empty = false;
    for (row, pair) in starts.windows(2).enumerate() {
        let found = i64::from(pair[1] - pair[0]);
        let differs = match found {
            0 => false,
            _ => empty || found != i64::from(query),
        };
        empty |= found == 0;
        if differs {
            return Err(Refusal::at(
                "max_query_len",
                row,
                query.into(),
                Rule::Equal,
                found,
            ));
        }
    }
    Ok(())
}

/// The arguments of the field's scheduler: a record of what was asked for. No impl executes it; it must agree with the rest.
fn scheduler_call(
    call: &MlaSchedulerMetadataCall,
    decode: &MlaDecode,
    rows: u32,
    ctx: &VerifyContext<'_>,
) -> Result<(), Refusal> {
    let MlaSchedulerMetadataCall {
        batch_size,
        max_seqlen_q,
        max_seqlen_k,
        num_heads_q,
        num_heads_kv,
        headdim,
        headdim_v,
        cache_seqlens,
        qkv_dtype,
        cu_seqlens_q,
        page_size,
        causal,
        num_splits,
        scheduler_metadata_len,
    } = call;
    let (config, attention) = (ctx.config, &ctx.config.attention);
    equal("batch_size", *batch_size, rows)?;
    equal("max_seqlen_q", *max_seqlen_q, decode.max_query_len)?;
    equal("max_seqlen_k", *max_seqlen_k, decode.max_seq_len)?;
    let heads = attention.num_heads.saturating_mul(ctx.dcp().world);
    equal("num_heads_q", *num_heads_q, heads)?;
    equal("num_heads_kv", *num_heads_kv, 1)?;
    equal("headdim", *headdim, attention.qk_rope_head_dim)?;
    equal("headdim_v", *headdim_v, attention.kv_lora_rank)?;
    if *cache_seqlens != decode.seq_lens {
        return Err(Refusal::reference(
            "cache_seqlens",
            "key lengths, as the record has them",
        ));
    }
    configured(
        "qkv_dtype",
        *qkv_dtype == attention.model_dtype || is_fp8(*qkv_dtype),
        *qkv_dtype as i64,
        attention.model_dtype as i64,
    )?;
    row_reference(
        "cu_seqlens_q",
        cu_seqlens_q,
        Input::QueryStartLoc,
        (0, rows + 1),
        ctx.common.num_reqs + 1,
    )?;
    equal("page_size", *page_size, config.kv_cache_spec.block_size)?;
    configured("causal", *causal, (*causal).into(), 1)?;
    equal("num_splits", *num_splits, decode.max_num_splits)?;
    // One counter, and four entries for each row of the largest batch, rounded up to four rows.
    let most = ctx
        .common
        .num_reqs
        .max(config.scheduler.max_num_seqs)
        .max(config.cudagraph.max_capture_size);
    let room = 1 + i64::from(most).div_euclid(4).saturating_add(1) * 16;
    between("scheduler_metadata_len", *scheduler_metadata_len, 0, room)
}

fn verify_prefill(
    prefill: &MlaPrefill,
    first: u32,
    ctx: &VerifyContext<'_>,
) -> Result<(), Refusal> {
    let MlaPrefill {
        block_table,
        query_start_loc,
        max_query_len,
        chunked_context,
        q_data_type,
        output_dtype,
        query_lens_cpu,
        use_dense_mha,
    } = prefill;
    let rows = ctx.common.num_reqs;
    row_reference(
        "block_table",
        block_table,
        Input::BlockTable,
        (first, rows),
        rows,
    )?;
    let own = RowRange {
        start: first,
        end: rows,
    };
    match query_start_loc {
        Tensor::RebasedQueryStartLoc(found) if *found == own => {}
        // Only the first rows need no rebasing.
        found if first == 0 => reference("query_start_loc", found, Input::QueryStartLoc)?,
        _ => {
            return Err(Refusal::reference(
                "query_start_loc",
                "query_start_loc of its rows, rebased",
            ));
        }
    }
    let starts = &ctx.inputs.query_start_loc[first as usize..];
    let (longest, _) = lanes::steps(starts);
    between(
        "max_query_len",
        *max_query_len,
        longest,
        ctx.max_query_bound(),
    )?;
    let model = ctx.config.attention.model_dtype;
    configured(
        "q_data_type",
        *q_data_type == model || is_fp8(*q_data_type),
        *q_data_type as i64,
        model as i64,
    )?;
    configured(
        "output_dtype",
        *output_dtype == model,
        *output_dtype as i64,
        model as i64,
    )?;
    values(
        "query_lens_cpu",
        query_lens_cpu,
        starts.windows(2).map(|pair| pair[1] - pair[0]),
    )?;
    // Sparse backends' choice; there are none here.
    configured("use_dense_mha", !use_dense_mha, (*use_dense_mha).into(), 0)?;
    let lens = &ctx.lens()[first as usize..];
    let part = context::Prefills { lens, starts };
    match chunked_context {
        Some(context) => context::verify(context, &part, *max_query_len, ctx)
            .map_err(|refusal| refusal.within("chunked_context")),
        None => match part.context_lens().find(|&len| len > 0) {
            Some(len) => Err(Refusal::new(
                "chunked_context",
                len.into(),
                Rule::Present,
                0,
            )),
            None => Ok(()),
        },
    }
}

/// `found` must be exactly `wanted`.
fn values(
    field: &'static str,
    found: &[i32],
    wanted: impl ExactSizeIterator<Item = i32>,
) -> Result<(), Refusal> {
    length(field, found.len(), wanted.len())?;
    for (row, (&found, wanted)) in found.iter().zip(wanted).enumerate() {
        if found != wanted {
            return Err(Refusal::at(
                field,
                row,
                found.into(),
                Rule::Equal,
                wanted.into(),
            ));
        }
    }
    Ok(())
}

/// The dtypes that a workspace's rows may have: the model's, 8 bits of it, or bfloat16 that opaque entries are unpacked to.
fn is_workspace_dtype(dtype: Dtype, ctx: &VerifyContext<'_>) -> bool {
    let opaque = ctx.config.attention.kv_cache_dtype == "fp8_ds_mla";
    dtype == ctx.config.attention.model_dtype
        || is_fp8(dtype)
        || (opaque && dtype == Dtype::Bfloat16)
}
