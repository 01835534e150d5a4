//! Rules for the host's own tensors of a step: the ground that references stand on.
//!
//! A builder cannot name a foreign block, but a wrong entry in the host's table would reach a kernel through any builder.
//! These rules run once per KV cache group and step.

use timetable_types::{
    Causal, CommonAttentionMetadata, DcpInputs, EncoderInputs, ExtraValue, FastPrefillInputs,
    KvCacheSpecKind,
    batch::{NUM_ACCEPTED_TOKENS, NUM_DECODE_DRAFT_TOKENS_CPU},
};

use super::{
    VerifyContext, lanes,
    refusal::{Refusal, Rule, between, equal, length, present},
};
use crate::step::{BlockTable, PAD_SLOT_ID, StepInputs};

/// Checks `ctx.common` and `ctx.inputs`. One rule per field, in the order of the records.
pub fn verify_step(ctx: &VerifyContext<'_>) -> Result<(), Refusal> {
    let StepInputs {
        query_start_loc,
        seq_lens,
        block_table,
        slot_mapping,
        positions,
        causal: causal_rows,
        dcp_local_seq_lens,
        encoder_seq_lens,
        logits_indices_padded,
        rswa_prefix_lens,
        extras: device_extras,
    } = ctx.inputs;
    let CommonAttentionMetadata {
        num_reqs,
        num_actual_tokens,
        max_query_len,
        max_seq_len,
        causal,
        block_table_width,
        slot_mapping_len,
        query_start_loc_cpu,
        seq_lens_cpu_upper_bound,
        is_prefilling,
        dcp,
        encoder,
        fast_prefill,
        req_idx,
        mm_req_doc_ranges,
        replayssm_decode_base_cpu,
        extras,
    } = ctx.common;
    let kind = ctx.config.kv_cache_spec.kind;
    let rows = *num_reqs as usize;
    between("num_reqs", *num_reqs, 0, i32::MAX)?;
    between("num_actual_tokens", *num_actual_tokens, 0, i32::MAX)?;

    // query_start_loc: R + 1 entries, from 0, never falling, within the tokens; max_query_len: the largest of its steps or more.
    let longest = query_starts("query_start_loc", query_start_loc, rows, *num_actual_tokens)?;
    between("max_query_len", *max_query_len, longest, i32::MAX)?;
    // A graph replays only the query lengths that it was captured for.
    if let Some(promise) = ctx.promise {
        between("max_query_len", longest, 0, promise.max_query_len)?;
        if let Some(uniform) = promise.uniform_query_len {
            for (row, pair) in query_start_loc.windows(2).enumerate() {
                let query = i64::from(pair[1] - pair[0]);
                if query != i64::from(uniform) && query != 0 {
                    return Err(Refusal::at(
                        "query_start_loc",
                        row + 1,
                        query,
                        Rule::Equal,
                        uniform.into(),
                    ));
                }
            }
        }
    }
    // query_start_loc_cpu: the same rule. Its values differ from the device's only under adaptive verification.
    if !query_start_loc_cpu.is_empty() && query_start_loc_cpu != query_start_loc {
        let longest = query_starts(
            "query_start_loc_cpu",
            query_start_loc_cpu,
            rows,
            *num_actual_tokens,
        )?;
        between("max_query_len", *max_query_len, longest, i32::MAX)?;
    }
    // max_seq_len: fits an index.
    between("max_seq_len", *max_seq_len, 0, i32::MAX)?;
    // seq_lens: R entries, each at least its query length, at most max_seq_len.
    length("seq_lens", seq_lens.len(), rows)?;
    seq_lens_rule(seq_lens, query_start_loc, *max_seq_len, kind)?;
    // seq_lens_cpu_upper_bound: at least seq_lens, at most max_seq_len.
    if !seq_lens_cpu_upper_bound.is_empty() && seq_lens_cpu_upper_bound != seq_lens {
        upper_bounds(
            "seq_lens_cpu_upper_bound",
            seq_lens_cpu_upper_bound,
            seq_lens,
            *max_seq_len,
        )?;
    }
    // block_table: R rows as wide as `common` says; every column that a length reaches holds a block of the cache.
    equal(
        "block_table_width",
        *block_table_width,
        block_table.width as i64,
    )?;
    block_table_rule(ctx, block_table, encoder_seq_lens.as_deref())?;
    // slot_mapping: a slot of the cache or −1 for each token; −1 for those that no row owns.
    equal(
        "slot_mapping_len",
        *slot_mapping_len,
        slot_mapping.len() as i64,
    )?;
    let owned = query_start_loc.last().copied().unwrap_or(0) as usize;
    if kind != KvCacheSpecKind::EncoderOnlyAttention || !slot_mapping.is_empty() {
        slots_rule(ctx, slot_mapping, owned)?;
    }
    // positions: below the longest sequence that the model serves. Absent where the batch was cut (micro-batches).
    if !positions.is_empty() {
        if positions.len() < owned {
            return Err(Refusal::new(
                "positions",
                positions.len() as i64,
                Rule::Length,
                owned as i64,
            ));
        }
        let last = i64::from(ctx.config.scheduler.max_model_len.max(*max_seq_len)) - 1;
        if !lanes::all_within_i64(&positions[..owned], 0, last.max(0)) {
            for (token, &position) in positions[..owned].iter().enumerate() {
                element("positions", token, position, 0, last.max(0))?;
            }
        }
    }
    // causal: per request only with a flag, 0 or 1, for each row.
    match causal {
        Causal::All(_) => {}
        Causal::PerRequest => row_values("causal", present("causal", causal_rows)?, rows, 1)?,
    }
    // is_prefilling: 0 or 1, for the first rows or all.
    if is_prefilling.len() > rows {
        return Err(Refusal::new(
            "is_prefilling",
            is_prefilling.len() as i64,
            Rule::Length,
            rows as i64,
        ));
    }
    if let Some(row) = is_prefilling.iter().position(|&flag| flag > 1) {
        element("is_prefilling", row, i64::from(is_prefilling[row]), 0, 1)?;
    }
    // dcp: this rank's share of each length, and an upper bound of it.
    if let Some(DcpInputs {
        dcp_local_seq_lens_cpu_upper_bound,
    }) = dcp
    {
        let exact = present("dcp_local_seq_lens", dcp_local_seq_lens)?;
        length("dcp_local_seq_lens", exact.len(), rows)?;
        for (row, (&local, &len)) in exact.iter().zip(*seq_lens).enumerate() {
            if local != ctx.dcp().local_len(len) {
                let share = i64::from(ctx.dcp().local_len(len));
                return Err(Refusal::at(
                    "dcp_local_seq_lens",
                    row,
                    local.into(),
                    Rule::Equal,
                    share,
                ));
            }
        }
        if !dcp_local_seq_lens_cpu_upper_bound.is_empty() {
            upper_bounds(
                "dcp_local_seq_lens_cpu_upper_bound",
                dcp_local_seq_lens_cpu_upper_bound,
                exact,
                *max_seq_len,
            )?;
        }
    }
    // encoder: lengths of the encoder's keys, for each row.
    if let Some(EncoderInputs {
        encoder_seq_lens_cpu,
    }) = encoder
    {
        let lens = present("encoder_seq_lens", encoder_seq_lens)?;
        row_values("encoder_seq_lens", lens, rows, i32::MAX)?;
        row_values("encoder_seq_lens_cpu", encoder_seq_lens_cpu, rows, i32::MAX)?;
    }
    // fast_prefill: token indices within the batch.
    if let Some(FastPrefillInputs {
        num_logits_indices,
        max_logits_per_req,
        num_logits_indices_padded,
    }) = fast_prefill
    {
        let indices = present("logits_indices_padded", logits_indices_padded)?;
        length(
            "logits_indices_padded",
            indices.len(),
            *num_logits_indices_padded as usize,
        )?;
        between(
            "num_logits_indices",
            *num_logits_indices,
            0,
            *num_logits_indices_padded,
        )?;
        between(
            "max_logits_per_req",
            *max_logits_per_req,
            0,
            *num_logits_indices,
        )?;
        let last = (*num_actual_tokens as i32 - 1).max(0);
        row_values("logits_indices_padded", indices, indices.len(), last)?;
    }
    // rswa_prefix_lens: a length for each row, always there where the model uses them.
    if ctx.config.attention.use_rswa {
        present("rswa_prefix_lens", rswa_prefix_lens)?;
    }
    if let Some(lens) = rswa_prefix_lens {
        row_values("rswa_prefix_lens", lens, rows, i32::MAX)?;
    }
    // req_idx, mm_req_doc_ranges, replayssm_decode_base_cpu: host-side; what a builder makes of them is checked there.
    if !req_idx.is_empty() {
        length("req_idx", req_idx.len(), rows)?;
    }
    for range in mm_req_doc_ranges {
        between("mm_req_doc_ranges", range.row, 0, *num_reqs as i64 - 1)?;
    }
    if !replayssm_decode_base_cpu.is_empty() {
        length(
            "replayssm_decode_base_cpu",
            replayssm_decode_base_cpu.len(),
            rows,
        )?;
    }
    // extras: a device field that is announced is there, with as many rows.
    for extra in extras {
        if let ExtraValue::Device(announced) = extra.value {
            let found = device_extras.iter().find(|(name, _)| *name == extra.name);
            let found = found.map_or(0, |(_, data)| data.len());
            if found < announced as usize {
                return Err(Refusal::new(
                    "extras",
                    found as i64,
                    Rule::AtLeast,
                    announced.into(),
                ));
            }
        }
    }
    if kind == KvCacheSpecKind::Mamba {
        states_rule(ctx)?;
    }
    Ok(())
}

/// Of a group that keeps states: a row without tokens is padding; accepted and draft tokens are for every row, and no more than
/// there are states for.
fn states_rule(ctx: &VerifyContext<'_>) -> Result<(), Refusal> {
    let rows = ctx.rows();
    let (starts, lens) = (ctx.inputs.query_start_loc, ctx.inputs.seq_lens);
    for (row, (&len, pair)) in lens.iter().zip(starts.windows(2)).enumerate() {
        if pair[0] == pair[1] && len != 0 {
            return Err(Refusal::at("seq_lens", row, len.into(), Rule::Equal, 0));
        }
    }
    let drafts = i64::from(ctx.config.scheduler.num_speculative_tokens);
    let device = ctx.inputs.extras.iter();
    let device = device.filter(|(name, _)| *name == NUM_ACCEPTED_TOKENS);
    for (_, accepted) in device {
        for (row, &accepted) in accepted.iter().take(rows).enumerate() {
            element(NUM_ACCEPTED_TOKENS, row, accepted.into(), 1, 1 + drafts)?;
        }
    }
    for extra in &ctx.common.extras {
        if let ExtraValue::Host(values) = &extra.value
            && extra.name == NUM_DECODE_DRAFT_TOKENS_CPU
        {
            length(NUM_DECODE_DRAFT_TOKENS_CPU, values.len(), rows)?;
            for (row, &value) in values.iter().enumerate() {
                element(NUM_DECODE_DRAFT_TOKENS_CPU, row, value.into(), -1, drafts)?;
            }
        }
    }
    Ok(())
}

/// R + 1 query starts: 0 first, never falling, the last at most `tokens`. Gives the longest query.
fn query_starts(
    field: &'static str,
    starts: &[i32],
    rows: usize,
    tokens: u32,
) -> Result<i32, Refusal> {
    length(field, starts.len(), rows + 1)?;
    if starts[0] != 0 {
        return Err(Refusal::at(field, 0, starts[0].into(), Rule::Equal, 0));
    }
    let (longest, rising) = lanes::steps(starts);
    if !rising {
        for (row, pair) in starts.windows(2).enumerate() {
            if pair[1] < pair[0] {
                return Err(Refusal::at(
                    field,
                    row + 1,
                    pair[1].into(),
                    Rule::AtLeast,
                    pair[0].into(),
                ));
            }
        }
    }
    let end = i64::from(starts[rows]);
    if end > i64::from(tokens) {
        return Err(Refusal::at(field, rows, end, Rule::AtMost, tokens.into()));
    }
    Ok(longest)
}

fn seq_lens_rule(
    lens: &[i32],
    starts: &[i32],
    max_seq_len: u32,
    kind: KvCacheSpecKind,
) -> Result<(), Refusal> {
    let max = max_seq_len as i32;
    // Cross attention reads the encoder's keys: the decoder's queries are not among them.
    let own_keys = kind != KvCacheSpecKind::CrossAttention;
    let mut signs = 0i32;
    for (&len, (&start, &end)) in lens.iter().zip(starts.iter().zip(&starts[1..])) {
        let query = if own_keys { end - start } else { 0 };
        signs |= len | max.wrapping_sub(len) | len.wrapping_sub(query);
    }
    if signs >= 0 {
        return Ok(());
    }
    for (row, &len) in lens.iter().enumerate() {
        let query = if own_keys {
            starts[row + 1] - starts[row]
        } else {
            0
        };
        let max = if kind == KvCacheSpecKind::CrossAttention {
            i32::MAX
        } else {
            max
        };
        element("seq_lens", row, len.into(), query.into(), max.into())?;
    }
    Ok(())
}

fn upper_bounds(
    field: &'static str,
    bounds: &[i32],
    values: &[i32],
    max: u32,
) -> Result<(), Refusal> {
    length(field, bounds.len(), values.len())?;
    for (row, (&bound, &value)) in bounds.iter().zip(values).enumerate() {
        element(field, row, bound.into(), value.into(), max.into())?;
    }
    Ok(())
}

fn element(
    field: &'static str,
    row: usize,
    value: i64,
    low: i64,
    high: i64,
) -> Result<(), Refusal> {
    if value < low {
        Err(Refusal::at(field, row, value, Rule::AtLeast, low))
    } else if value > high {
        Err(Refusal::at(field, row, value, Rule::AtMost, high))
    } else {
        Ok(())
    }
}

fn row_values(field: &'static str, values: &[i32], rows: usize, last: i32) -> Result<(), Refusal> {
    length(field, values.len(), rows)?;
    if !lanes::all_within_i32(values, last) {
        for (row, &value) in values.iter().enumerate() {
            element(field, row, value.into(), 0, last.into())?;
        }
    }
    Ok(())
}

fn slots_rule(ctx: &VerifyContext<'_>, slots: &[i64], owned: usize) -> Result<(), Refusal> {
    let tokens = ctx.common.num_actual_tokens as usize;
    if slots.len() < tokens {
        return Err(Refusal::new(
            "slot_mapping",
            slots.len() as i64,
            Rule::Length,
            tokens as i64,
        ));
    }
    let block_size = i64::from(ctx.config.kv_cache_spec.block_size);
    let end = i64::from(ctx.num_blocks) * block_size;
    let (own, padding) = slots.split_at(owned);
    if !lanes::all_within_i64(own, PAD_SLOT_ID, end - 1) {
        for (token, &slot) in own.iter().enumerate() {
            if slot >= end {
                return Err(Refusal::at("slot_mapping", token, slot, Rule::Below, end));
            }
            element("slot_mapping", token, slot, PAD_SLOT_ID, end - 1)?;
        }
    }
    if !lanes::all_equal_i64(padding, PAD_SLOT_ID) {
        for (token, &slot) in padding.iter().enumerate() {
            if slot != PAD_SLOT_ID {
                return Err(Refusal::at(
                    "slot_mapping",
                    owned + token,
                    slot,
                    Rule::Equal,
                    PAD_SLOT_ID,
                ));
            }
        }
    }
    Ok(())
}

fn block_table_rule(
    ctx: &VerifyContext<'_>,
    table: &BlockTable<'_>,
    encoder_lens: Option<&[i32]>,
) -> Result<(), Refusal> {
    let spec = &ctx.config.kv_cache_spec;
    let (rows, width) = (ctx.rows(), table.width);
    if spec.kind == KvCacheSpecKind::EncoderOnlyAttention {
        // Keys of this step only: there is no cache.
        return Ok(());
    }
    between("block_size", spec.block_size, 1, i32::MAX)?;
    between("num_blocks", ctx.num_blocks, 0, i32::MAX)?;
    let last = ctx.num_blocks as i32 - 1;
    if width > 0 && table.rows() < rows {
        return Err(Refusal::new(
            "block_table",
            table.rows() as i64,
            Rule::Length,
            rows as i64,
        ));
    }
    if spec.kind == KvCacheSpecKind::Mamba {
        // A row names states, not keys: every column counts.
        return check_ids(table, rows, |_| width, last);
    }
    let lens = match encoder_lens {
        Some(lens) if spec.kind == KvCacheSpecKind::CrossAttention => lens,
        _ => ctx.lens(),
    };
    let block_size = spec.block_size;
    let dcp = ctx.dcp();
    if spec.dcp_sharded && dcp.world > 1 {
        let pages = |row: usize| (dcp.local_len(lens[row]) as u32).div_ceil(block_size) as usize;
        check_ids(table, rows, pages, last)
    } else if block_size.is_power_of_two() {
        let (shift, mask) = (block_size.trailing_zeros(), block_size - 1);
        let pages = |row: usize| {
            let len = lens[row].max(0) as u32;
            ((len >> shift) + u32::from(len & mask != 0)) as usize
        };
        check_ids(table, rows, pages, last)
    } else {
        let pages = |row: usize| (lens[row].max(0) as u32).div_ceil(block_size) as usize;
        check_ids(table, rows, pages, last)
    }
}

/// The first `pages(row)` columns of each row: they exist, and hold ids in 0..=last.
fn check_ids(
    table: &BlockTable<'_>,
    rows: usize,
    pages: impl Fn(usize) -> usize,
    last: i32,
) -> Result<(), Refusal> {
    let width = table.width;
    let mut fine = true;
    for row in 0..rows {
        let needed = pages(row);
        if needed > width {
            return Err(Refusal::at(
                "block_table_width",
                row,
                width as i64,
                Rule::AtLeast,
                needed as i64,
            ));
        }
        let start = row * width;
        fine &= lanes::all_within_i32(&table.data[start..start + needed], last);
    }
    if fine {
        return Ok(());
    }
    for row in 0..rows {
        for &id in &table.row(row)[..pages(row)] {
            if id > last {
                return Err(Refusal::at(
                    "block_table",
                    row,
                    id.into(),
                    Rule::Below,
                    i64::from(last) + 1,
                ));
            }
            element("block_table", row, id.into(), 0, last.into())?;
        }
    }
    Ok(())
}
