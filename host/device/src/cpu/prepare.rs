//! From a backend's metadata to rows, items and merge slots. One function per family. It must never know heads (but for
//! those that a plan names), dtypes or the cache.

use timetable_attention::StepInputs;
use timetable_types::{Causal, Input, Tensor, flash_attn, flashinfer, triton_attn};

use super::{
    step::{Hyperparameters, Item, NONE, PrepareError, Row, StepMetadata, inconsistent},
    tensors,
};

/// Tokens of one query tile where the metadata names none. It divides work among threads; no result depends on it.
pub(super) const TILE_TOKENS: u32 = 32;

pub(super) fn flash_attn(
    step: &mut StepMetadata,
    metadata: &flash_attn::Metadata,
    inputs: &StepInputs<'_>,
) -> Result<(), PrepareError> {
    if metadata.dcp_context_kv_lens.is_some() || metadata.max_dcp_context_kv_len > 0 {
        return unsupported("dcp_context_kv_lens", ONE_RANK);
    }
    flash_attn_over(step, metadata, &metadata.seq_lens, &metadata.causal, inputs)
}

/// Attention of the schedule's rows to their first `seq_lens` keys in the cache.
pub(super) fn flash_attn_over(
    step: &mut StepMetadata,
    metadata: &flash_attn::Metadata,
    seq_lens: &Tensor,
    causal: &Causal,
    inputs: &StepInputs<'_>,
) -> Result<(), PrepareError> {
    if metadata.mm_prefix_query_range.is_some() {
        return unsupported("mm_prefix_query_range", NO_SPANS);
    }
    if metadata.rswa_prefix_lens.is_some() {
        return unsupported("rswa_prefix_lens", NO_RSWA);
    }
    let schedule = &metadata.schedule;
    let call = Call {
        num_actual_tokens: metadata.num_actual_tokens,
        max_query_len: metadata.max_query_len,
        query_start_loc: &metadata.query_start_loc,
        seq_lens,
        block_table: &metadata.block_table,
        causal,
        splits: match schedule.num_splits.as_slice() {
            [] => Splits::Alike(1),
            splits => Splits::OfRows(splits),
        },
    };
    let num_rows = append_rows(step, &call, inputs)?;
    match &schedule.tile_order {
        flash_attn::TileOrder::Natural => {
            for row in 0..num_rows {
                append_items(step, call.splits, row)?;
            }
        }
        flash_attn::TileOrder::Rows(order) => {
            for &row in order {
                let row = usize::try_from(row).ok().filter(|&row| row < num_rows);
                let row = row.ok_or_else(|| {
                    inconsistent("tile_order", format!("a row outside the {num_rows} rows"))
                })?;
                append_items(step, call.splits, row)?;
            }
        }
    }
    Ok(())
}

/// The 3D form divides a decode's pages as splits do; its scratch is the device's own.
pub(super) fn triton_attn(
    step: &mut StepMetadata,
    metadata: &triton_attn::Metadata,
    inputs: &StepInputs<'_>,
) -> Result<(), PrepareError> {
    if metadata.mm_prefix_range.is_some() {
        return unsupported("mm_prefix_range", NO_SPANS);
    }
    if metadata.rswa_prefix_lens.is_some() {
        return unsupported("rswa_prefix_lens", NO_RSWA);
    }
    let rows = inputs.query_start_loc.len().saturating_sub(1);
    let is_3d = rows <= metadata.seq_threshold_3d as usize && metadata.max_query_len <= 1;
    let call = Call {
        num_actual_tokens: metadata.num_actual_tokens,
        max_query_len: metadata.max_query_len,
        query_start_loc: &metadata.query_start_loc,
        seq_lens: &metadata.seq_lens,
        block_table: &metadata.block_table,
        causal: &metadata.causal,
        splits: Splits::Alike(match is_3d {
            true => metadata.num_par_softmax_segments,
            false => 1,
        }),
    };
    for row in 0..append_rows(step, &call, inputs)? {
        append_items(step, call.splits, row)?;
    }
    Ok(())
}

/// Rows [first, first + n) of query starts `starts` (n + 1), each attending to its own tokens of this step: key j of a row is
/// token start + j, in a cache whose blocks are single tokens.
pub(super) fn own_tokens(
    step: &mut StepMetadata,
    starts: &[i32],
    max_query_len: u32,
    causal: impl Fn(usize) -> Result<bool, PrepareError>,
) -> Result<(), PrepareError> {
    for (row, pair) in starts.windows(2).enumerate() {
        let q_len = append_row(step, "query_start_loc", (pair[0], pair[1]), max_query_len)?;
        let page = step.pages.len() as u32;
        append_checked_pages(step, &(pair[0]..pair[1]).collect::<Vec<i32>>())?;
        let row_of_tokens = Row {
            token: pair[0] as u32,
            q_len,
            kv_len: (pair[1] - pair[0]) as u32,
            causal: causal(row)?,
            page,
            tile: 0,
            tile_units: 0,
        };
        push_tiled(step, row_of_tokens, Splits::Alike(1))?;
        append_items(step, Splits::Alike(1), row)?;
    }
    Ok(())
}

/// Row `row`'s flag.
pub(super) fn causal_of(
    causal: &Causal,
    inputs: &StepInputs<'_>,
    row: usize,
) -> Result<bool, PrepareError> {
    match causal {
        Causal::All(causal) => Ok(*causal),
        Causal::PerRequest => {
            let flag = inputs.causal.and_then(|flags| flags.get(row));
            let flag = flag.ok_or_else(|| {
                inconsistent("causal", format!("per request, but none for row {row}"))
            })?;
            Ok(*flag != 0)
        }
    }
}

const ONE_RANK: &str = "prepare it as the metadata of one rank (cpu::ContextParallelMetadata), or run without decode context parallelism";
const NO_SPANS: &str = "run this model without multimodal prefixes";
const NO_RSWA: &str = "run this model without R-SWA";

fn unsupported(what: &'static str, remedy: &'static str) -> Result<(), PrepareError> {
    Err(PrepareError::Unsupported { what, remedy })
}

/// One call of attention for all rows.
struct Call<'m> {
    num_actual_tokens: u32,
    max_query_len: u32,
    query_start_loc: &'m Tensor,
    seq_lens: &'m Tensor,
    block_table: &'m Tensor,
    causal: &'m Causal,
    splits: Splits<'m>,
}

/// Into how many parts a row's pages are divided.
#[derive(Clone, Copy)]
pub(super) enum Splits<'m> {
    Alike(u32),
    OfRows(&'m [i32]),
}

/// Rows, their pages, tiles and slots; the number of rows.
fn append_rows(
    step: &mut StepMetadata,
    call: &Call<'_>,
    inputs: &StepInputs<'_>,
) -> Result<usize, PrepareError> {
    if *call.block_table != Tensor::Input(Input::BlockTable) {
        return Err(inconsistent(
            "block_table",
            "it must be the step's own block table".into(),
        ));
    }
    let starts = tensors::vector("query_start_loc", call.query_start_loc, inputs)?;
    let lengths = tensors::vector("seq_lens", call.seq_lens, inputs)?;
    let num_rows = starts.len().saturating_sub(1);
    if lengths.len() < num_rows {
        return Err(inconsistent(
            "seq_lens",
            format!("{} of {num_rows} rows", lengths.len()),
        ));
    }
    begin(step, call.num_actual_tokens, inputs);
    let block_size = step.block_size as u32;
    for row in 0..num_rows {
        let causal = causal_of(call.causal, inputs, row)?;
        let query = (starts[row], starts[row + 1]);
        // A kernel's grid has max_query_len rows: tokens beyond it stay zeros.
        let q_len = append_row(step, "query_start_loc", query, call.max_query_len)?;
        let kv_len = length("seq_lens", row, lengths[row])?;
        let page = step.pages.len() as u32;
        if q_len > 0 && kv_len > 0 {
            let count = kv_len.div_ceil(block_size) as usize;
            let table = inputs.block_table;
            if row >= table.rows() || count > table.width {
                return Err(inconsistent(
                    "block_table",
                    format!(
                        "row {row} of {} has {} columns of {block_size} tokens, {kv_len} keys need {count}",
                        table.rows(),
                        table.width
                    ),
                ));
            }
            append_checked_pages(step, &table.row(row)[..count])?;
        }
        let row = Row {
            token: query.0 as u32,
            q_len,
            kv_len,
            causal,
            page,
            tile: 0,
            tile_units: 0,
        };
        push_tiled(step, row, call.splits)?;
    }

    Ok(num_rows)
}

/// Pushes a row in tiles of `TILE_TOKENS`; every tile has as many slots as the row has splits with keys.
fn push_tiled(step: &mut StepMetadata, row: Row, splits: Splits<'_>) -> Result<(), PrepareError> {
    let pages = row.kv_len.div_ceil(step.block_size as u32);
    let (splits, _) = splits_of(splits, step.rows.len(), pages)?;
    step.rows.push(Row {
        tile: step.slot_indptr.len() as u32 - 1,
        tile_units: TILE_TOKENS,
        ..row
    });
    for _ in 0..row.q_len.div_ceil(TILE_TOKENS) {
        let end = step.slot_items.len() + splits as usize;
        step.slot_items.resize(end, NONE);
        step.slot_indptr.push(end as u32);
    }
    Ok(())
}

/// (splits that have keys, pages of a split) of a row with `pages` pages of keys.
pub(super) fn splits_of(
    splits: Splits<'_>,
    row: usize,
    pages: u32,
) -> Result<(u32, u32), PrepareError> {
    let count = match splits {
        Splits::Alike(splits) => i64::from(splits),
        Splits::OfRows(splits) => splits.get(row).copied().map(i64::from).ok_or_else(|| {
            inconsistent(
                "num_splits",
                format!("{} entries, none for row {row}", splits.len()),
            )
        })?,
    };
    let splits = u32::try_from(count)
        .ok()
        .filter(|&splits| splits > 0)
        .ok_or_else(|| inconsistent("num_splits", format!("{count} in row {row}; at least 1")))?;
    let pages_per_split = pages.div_ceil(splits).max(1);
    Ok((pages.div_ceil(pages_per_split), pages_per_split))
}

pub(super) fn append_items(
    step: &mut StepMetadata,
    splits: Splits<'_>,
    row: usize,
) -> Result<(), PrepareError> {
    let Row {
        q_len,
        kv_len,
        tile,
        ..
    } = step.rows[row];
    let block_size = step.block_size as u32;
    let (splits, pages_per_split) = splits_of(splits, row, kv_len.div_ceil(block_size))?;
    let keys_per_split = pages_per_split.saturating_mul(block_size);
    for (index, q0) in (0..q_len).step_by(TILE_TOKENS as usize).enumerate() {
        let slot = step.slot_indptr[tile as usize + index];
        for split in 0..splits {
            step.slot_items[(slot + split) as usize] = step.items.len() as u32;
            step.items.push(Item {
                row: row as u32,
                q0,
                q1: (q0 + TILE_TOKENS).min(q_len),
                k0: split * keys_per_split,
                k1: (split * keys_per_split)
                    .saturating_add(keys_per_split)
                    .min(kv_len),
            });
            step.groups.push(step.items.len() as u32);
        }
    }
    Ok(())
}

pub(super) fn flashinfer(
    step: &mut StepMetadata,
    metadata: &flashinfer::Metadata,
    inputs: &StepInputs<'_>,
) -> Result<(), PrepareError> {
    begin(step, metadata.num_actual_tokens, inputs);
    step.packed = true;
    let (decode, prefill) = plans(metadata)?;
    if let Some(plan) = decode {
        append_plan(step, plan, 0, inputs)?;
    }
    if let Some(plan) = prefill {
        append_plan(step, plan, metadata.num_decode_tokens, inputs)?;
    }
    Ok(())
}

/// The plans of decodes and of prefills.
pub(super) fn plans(
    metadata: &flashinfer::Metadata,
) -> Result<(Option<&flashinfer::Plan>, Option<&flashinfer::Plan>), PrepareError> {
    const TRTLLM: PrepareError = PrepareError::Unsupported {
        what: "a TensorRT-LLM kernel",
        remedy: "set trtllm_attention and xqa to false in the builder's device configuration",
    };
    let decode = match &metadata.decode {
        Some(flashinfer::Decode::Wrapper(plan)) => Some(plan),
        Some(flashinfer::Decode::Trtllm(_)) => return Err(TRTLLM),
        None => None,
    };
    let prefill = match &metadata.prefill {
        Some(flashinfer::Prefill::Wrapper(plan)) => Some(plan),
        Some(flashinfer::Prefill::Trtllm(_)) => return Err(TRTLLM),
        None => None,
    };
    Ok((decode, prefill))
}

/// The tokens that rows may have.
pub(super) fn begin(step: &mut StepMetadata, num_actual_tokens: u32, inputs: &StepInputs<'_>) {
    step.num_actual_tokens = num_actual_tokens as usize;
    step.token_rows.resize(scheduled_tokens(step, inputs), NONE);
}

/// Appends one part (decodes or prefills), whose first token is `first_token`.
pub(super) fn append_plan(
    step: &mut StepMetadata,
    plan: &flashinfer::Plan,
    first_token: u32,
    inputs: &StepInputs<'_>,
) -> Result<(), PrepareError> {
    let PartLayout {
        first_row,
        first_tile,
        heads_per_kv_head,
    } = append_plan_rows(step, plan, first_token, inputs)?;
    let work = &plan.work;
    let tile_units = plan.work.cta_tile_q;
    let num_items = work.request_indices.len();
    if work.qo_tile_indices.len() != num_items || work.kv_tile_indices.len() != num_items {
        return Err(inconsistent(
            "request_indices",
            format!(
                "{num_items} entries, qo_tile_indices {}, kv_tile_indices {}",
                work.qo_tile_indices.len(),
                work.kv_tile_indices.len()
            ),
        ));
    }

    // Merge slots.
    let num_rows = step.rows.len() - first_row;
    let num_tiles = step.rows[first_row..]
        .iter()
        .map(|row| tiles_of(row.q_len, heads_per_kv_head, tile_units) as usize)
        .sum::<usize>();
    if work.merge_indptr.len() != num_tiles + 1 {
        return Err(inconsistent(
            "merge_indptr",
            format!(
                "{} entries for {num_tiles} query tiles",
                work.merge_indptr.len()
            ),
        ));
    }
    let first_slot = step.slot_items.len();
    let mut end = 0;
    for &bound in &work.merge_indptr[1..] {
        if bound < end || bound as usize > num_items {
            return Err(inconsistent(
                "merge_indptr",
                format!("{bound} after {end}, of {num_items} work items"),
            ));
        }
        end = bound;
        step.slot_indptr.push((first_slot + bound as usize) as u32);
    }
    step.slot_items.resize(first_slot + end as usize, NONE);

    // A tile's first chunk takes its first slot: chunks before it lie outside a window.
    let tile_of = |item: usize, rows: &[Row]| -> Option<(usize, u32, u32, u32)> {
        let row = usize::try_from(work.request_indices[item])
            .ok()
            .filter(|&row| row < num_rows)?;
        let q = u32::try_from(work.qo_tile_indices[item]).ok()?;
        let k = u32::try_from(work.kv_tile_indices[item]).ok()?;
        let of = rows[first_row + row];
        let tiles = tiles_of(of.q_len, heads_per_kv_head, tile_units);
        (q < tiles).then_some((first_row + row, of.tile - first_tile + q, q, k))
    };
    let mut first_chunk = vec![u32::MAX; num_tiles];
    for item in 0..num_items {
        if let Some((_, tile, _, k)) = tile_of(item, &step.rows) {
            let first = &mut first_chunk[tile as usize];
            *first = k.min(*first);
        }
    }

    for worker in work.worker_indptr.windows(2) {
        let items = usize::try_from(worker[0])
            .ok()
            .zip(usize::try_from(worker[1]).ok());
        let Some((start, end)) = items.filter(|&(start, end)| start <= end && end <= num_items)
        else {
            return Err(inconsistent(
                "worker_indptr",
                format!("[{}, {}) of {num_items} work items", worker[0], worker[1]),
            ));
        };
        for item in start..end {
            let Some((row, tile, q, k)) = tile_of(item, &step.rows) else {
                continue;
            };
            let of = step.rows[row];
            let k0 = k.saturating_mul(work.kv_chunk_size).min(of.kv_len);
            let k1 = k0.saturating_add(work.kv_chunk_size).min(of.kv_len);
            let slot = step.slot_indptr[first_tile as usize + tile as usize] as usize
                + (k - first_chunk[tile as usize]) as usize;
            if let Some(slot) = step.slot_items.get_mut(slot) {
                *slot = step.items.len() as u32;
            }
            step.items.push(Item {
                row: row as u32,
                q0: q * tile_units,
                q1: (q + 1)
                    .saturating_mul(tile_units)
                    .min(of.q_len * heads_per_kv_head),
                k0,
                k1,
            });
        }
        step.groups.push(step.items.len() as u32);
    }
    Ok(())
}

/// Query tiles of a row.
fn tiles_of(q_len: u32, heads_per_kv_head: u32, tile_units: u32) -> u32 {
    (q_len * heads_per_kv_head).div_ceil(tile_units)
}

/// Tokens that can belong to a row: a builder's number must not make the host allocate more.
fn scheduled_tokens(step: &StepMetadata, inputs: &StepInputs<'_>) -> usize {
    let last = inputs
        .query_start_loc
        .last()
        .map_or(0, |&last| usize::try_from(last).unwrap_or(0));
    last.min(step.num_actual_tokens)
}

struct PartLayout {
    first_row: usize,
    first_tile: u32,
    heads_per_kv_head: u32,
}

/// Appends a part's rows and pages.
fn append_plan_rows(
    step: &mut StepMetadata,
    plan: &flashinfer::Plan,
    first_token: u32,
    inputs: &StepInputs<'_>,
) -> Result<PartLayout, PrepareError> {
    let of_rank = plan.function == flashinfer::PlanFunction::BatchDcpPrefillPlan;
    if plan.dcp_world_size != step.dcp_world_size || (of_rank && plan.dcp_world_size == 1) {
        return Err(PrepareError::Unsupported {
            what: "dcp_world_size",
            remedy: ONE_RANK,
        });
    }
    // The keys of a rank are every query's past: a decode's own token is the last, a prefill's plan covers its context.
    let causal = plan.causal && plan.dcp_world_size == 1;
    if plan.page_size as usize != step.block_size {
        return Err(inconsistent(
            "page_size",
            format!(
                "{}, but the kernel block size is {}",
                plan.page_size, step.block_size
            ),
        ));
    }
    if plan.work.cta_tile_q == 0 || plan.work.kv_chunk_size == 0 {
        return Err(inconsistent(
            "cta_tile_q, kv_chunk_size",
            "0; at least 1".into(),
        ));
    }
    if plan.num_kv_heads == 0 || !plan.num_qo_heads.is_multiple_of(plan.num_kv_heads) {
        return Err(inconsistent(
            "num_qo_heads",
            format!(
                "{} is not a multiple of {} KV heads",
                plan.num_qo_heads, plan.num_kv_heads
            ),
        ));
    }
    let heads_per_kv_head = plan.num_qo_heads / plan.num_kv_heads;
    step.hyperparameters.push(Hyperparameters {
        num_qo_heads: plan.num_qo_heads as usize,
        num_kv_heads: plan.num_kv_heads as usize,
        head_dim: plan.head_dim as usize,
        sm_scale: plan.sm_scale,
        window_left: plan.window_left,
        logits_soft_cap: plan.logits_soft_cap,
    });

    let starts = tensors::vector("qo_indptr", &plan.qo_indptr, inputs)?;
    let num_rows = plan.paged_kv_indptr.len().saturating_sub(1);
    if starts.len() != num_rows + 1 || plan.paged_kv_last_page_len.len() != num_rows {
        return Err(inconsistent(
            "paged_kv_indptr",
            format!(
                "{num_rows} rows, but qo_indptr has {} entries and paged_kv_last_page_len {}",
                starts.len(),
                plan.paged_kv_last_page_len.len()
            ),
        ));
    }
    let first_page = step.pages.len();
    tensors::append_pages(
        "paged_kv_indices",
        &plan.paged_kv_indices,
        &plan.paged_kv_indptr,
        inputs,
        &mut step.pages,
    )?;
    check_pages(step, first_page)?;

    let first_row = step.rows.len();
    let first_tile = step.slot_indptr.len() as u32 - 1;
    let mut tile = first_tile;
    let mut page = first_page as u32;
    for row in 0..num_rows {
        let pages = plan.paged_kv_indptr[row + 1].wrapping_sub(plan.paged_kv_indptr[row]) as u32;
        let last = length(
            "paged_kv_last_page_len",
            row,
            plan.paged_kv_last_page_len[row],
        )?;
        if last > plan.page_size {
            return Err(inconsistent(
                "paged_kv_last_page_len",
                format!("{last} in row {row}, pages have {}", plan.page_size),
            ));
        }
        let kv_len = match pages {
            0 => 0,
            pages => (pages - 1)
                .saturating_mul(plan.page_size)
                .saturating_add(last),
        };
        let query = (
            starts[row].saturating_add_unsigned(first_token),
            starts[row + 1].saturating_add_unsigned(first_token),
        );
        let q_len = append_row(step, "qo_indptr", query, u32::MAX)?;
        if q_len.checked_mul(heads_per_kv_head).is_none() {
            return Err(inconsistent(
                "num_qo_heads",
                format!("{heads_per_kv_head} for each KV head, {q_len} tokens in row {row}"),
            ));
        }
        step.rows.push(Row {
            token: query.0 as u32,
            q_len,
            kv_len,
            causal,
            page,
            tile,
            tile_units: plan.work.cta_tile_q,
        });
        page += pages;
        tile += q_len
            .saturating_mul(heads_per_kv_head)
            .div_ceil(plan.work.cta_tile_q);
    }
    Ok(PartLayout {
        first_row,
        first_tile,
        heads_per_kv_head,
    })
}

/// Gives the tokens [start, end) to the row about to be pushed, at most `max` of them. Its query length.
pub(super) fn append_row(
    step: &mut StepMetadata,
    field: &'static str,
    (start, end): (i32, i32),
    max: u32,
) -> Result<u32, PrepareError> {
    let row = step.rows.len() as u32;
    let tokens = step.token_rows.len();
    let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
    let Some((start, end)) = range.filter(|&(start, end)| start <= end && end <= tokens) else {
        return Err(inconsistent(
            field,
            format!("row {row} has tokens [{start}, {end}) of {tokens}"),
        ));
    };
    let q_len = (end - start).min(max as usize);
    step.token_rows[start..start + q_len].fill(row);
    Ok(q_len as u32)
}

pub(super) fn append_checked_pages(
    step: &mut StepMetadata,
    pages: &[i32],
) -> Result<(), PrepareError> {
    let first = step.pages.len();
    step.pages.extend_from_slice(pages);
    check_pages(step, first)
}

/// Notes the largest block id from `first` on.
fn check_pages(step: &mut StepMetadata, first: usize) -> Result<(), PrepareError> {
    for &page in &step.pages[first..] {
        check_page(page, &mut step.num_blocks_used)?;
    }
    Ok(())
}

pub(super) fn check_page(page: i32, num_blocks_used: &mut usize) -> Result<(), PrepareError> {
    let block = usize::try_from(page)
        .map_err(|_| inconsistent("block_table", format!("block id {page}")))?;
    *num_blocks_used = (*num_blocks_used).max(block + 1);
    Ok(())
}

pub(super) fn length(field: &'static str, row: usize, value: i32) -> Result<u32, PrepareError> {
    u32::try_from(value).map_err(|_| inconsistent(field, format!("{value} in row {row}")))
}
