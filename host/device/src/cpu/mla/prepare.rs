//! From MLA metadata to the rows and items of decodes, and to the context segments of prefills. It must never know heads,
//! dtypes or the cache.

use std::{borrow::Cow, ops::Range};

use timetable_attention::{StepInputs, batch::ContextParallel};
use timetable_types::{
    DcpSource, Input, Tensor,
    flash_mla::{
        ChunkedContext, ContextChunk, DecodeSchedule, Metadata, MlaDecode, MlaPrefill, TileSchedule,
    },
};

use super::step::{MlaStepMetadata, Prefill, Segment};
use crate::cpu::{
    PrepareError, StepMetadata,
    prepare::{
        Splits, TILE_TOKENS, append_checked_pages, append_items, append_row, check_page, length,
        splits_of,
    },
    step::{Item, NONE, Row, inconsistent},
    tensors,
};

pub(super) fn step(
    step: &mut MlaStepMetadata,
    metadata: &Metadata,
    inputs: &StepInputs<'_>,
) -> Result<(), PrepareError> {
    if !metadata.causal {
        return Err(PrepareError::Unsupported {
            what: "causal: false",
            remedy: "latent attention has causal groups only",
        });
    }
    let scheduled = inputs.query_start_loc.last().copied().unwrap_or(0);
    let scheduled = length("query_start_loc", 0, scheduled)?;
    step.num_actual_tokens = metadata.num_actual_tokens as usize;
    step.num_decode_tokens = metadata.num_decode_tokens as usize;
    step.head_dim = metadata.head_dim as usize;
    if metadata.num_decode_tokens > metadata.num_actual_tokens {
        return Err(inconsistent(
            "num_decode_tokens",
            format!(
                "{} of {} tokens",
                metadata.num_decode_tokens, metadata.num_actual_tokens
            ),
        ));
    }
    step.prefills_cost = 0;
    step.decode.clear();
    step.decode.family = Some(timetable_types::Family::FlashMla);
    step.decode.block_size = step.block_size;
    step.decode.num_actual_tokens = step.num_decode_tokens;
    let decode_tokens = scheduled.min(metadata.num_decode_tokens);
    step.decode.token_rows.resize(decode_tokens as usize, NONE);
    if let Some(decode) = &metadata.decode {
        decodes(step, decode, metadata.num_decodes as usize, inputs)?;
    }
    step.decode.sum_groups();
    if let Some(prefill) = &metadata.prefill {
        let tokens = scheduled
            .min(metadata.num_actual_tokens)
            .saturating_sub(metadata.num_decode_tokens);
        prefills(step, prefill, tokens, inputs)?;
    }
    Ok(())
}

/// The rows that `tensor` takes of the host's block table.
fn table_rows(tensor: &Tensor, inputs: &StepInputs<'_>) -> Result<Range<usize>, PrepareError> {
    let rows = inputs.block_table.rows();
    match tensor {
        Tensor::Input(Input::BlockTable) => Ok(0..rows),
        Tensor::Slice(slice)
            if slice.source == Input::BlockTable
                && slice.start <= slice.end
                && slice.end as usize <= rows =>
        {
            Ok(slice.start as usize..slice.end as usize)
        }
        _ => Err(inconsistent(
            "block_table",
            format!("it must be rows of the step's own block table, which has {rows}"),
        )),
    }
}

/// Key lengths: under decode context parallelism those of this rank.
fn seq_lens<'a>(
    tensor: &'a Tensor,
    inputs: &StepInputs<'a>,
) -> Result<Cow<'a, [i32]>, PrepareError> {
    let Tensor::DcpLocal(local) = tensor else {
        return tensors::vector("seq_lens", tensor, inputs);
    };
    let range = local.rows.start as usize..local.rows.end as usize;
    let lens = inputs
        .dcp_local_seq_lens
        .filter(|_| local.source == DcpSource::SeqLens);
    let lens = lens.and_then(|lens| lens.get(range));
    lens.map(Cow::Borrowed).ok_or_else(|| {
        inconsistent(
            "seq_lens",
            format!(
                "a rank's share of rows [{}, {}), which the step does not have",
                local.rows.start, local.rows.end
            ),
        )
    })
}

fn decodes(
    step: &mut MlaStepMetadata,
    decode: &MlaDecode,
    rows: usize,
    inputs: &StepInputs<'_>,
) -> Result<(), PrepareError> {
    let table = table_rows(&decode.block_table, inputs)?;
    let lens = seq_lens(&decode.seq_lens, inputs)?;
    if table.len() < rows || lens.len() < rows {
        return Err(inconsistent(
            "num_decodes",
            format!(
                "{rows}, but there are {} lengths and {} rows of pages",
                lens.len(),
                table.len()
            ),
        ));
    }
    let whole = match (&decode.dcp_tot_seq_lens, step.rank) {
        (None, None) => None,
        (Some(whole), Some(rank)) => {
            let whole = tensors::vector("dcp_tot_seq_lens", whole, inputs)?;
            if whole.len() < rows {
                return Err(inconsistent(
                    "dcp_tot_seq_lens",
                    format!("{} of {rows} rows", whole.len()),
                ));
            }
            Some((whole, rank))
        }
        (found, _) => {
            return Err(inconsistent(
                "dcp_tot_seq_lens",
                format!(
                    "{}, but the metadata is prepared {} decode context parallelism",
                    if found.is_some() { "given" } else { "absent" },
                    if step.rank.is_some() {
                        "under"
                    } else {
                        "without"
                    },
                ),
            ));
        }
    };
    decode_starts(&mut step.starts, decode, rows, inputs)?;
    let splits = match &decode.schedule {
        DecodeSchedule::Lazy => Splits::Alike(1),
        // 0 leaves it to the kernel; this one takes all keys in one pass.
        DecodeSchedule::FlashAttn(call) => Splits::Alike(call.num_splits.max(1)),
        DecodeSchedule::Tiles(tiles) if step.rank.is_none() => {
            return tile_schedule(step, decode, tiles, &lens[..rows], table.start, inputs);
        }
        DecodeSchedule::Tiles(_) => {
            return Err(inconsistent(
                "tile_scheduler_metadata",
                "a rank's pages are not the host's to schedule under decode context parallelism"
                    .into(),
            ));
        }
    };
    let MlaStepMetadata {
        decode: to, starts, ..
    } = step;
    let block_size = to.block_size as u32;
    let append = |to: &mut StepMetadata, query, max_query_len, kv_len: u32, page| {
        let index = to.rows.len();
        let (slots, _) = splits_of(splits, index, kv_len.div_ceil(block_size))?;
        append_decode(to, query, max_query_len, kv_len, page, slots)?;
        append_items(to, splits, index)
    };
    for row in 0..rows {
        let query = (starts[row], starts[row + 1]);
        let held = length("seq_lens", row, lens[row])?;
        let page = append_pages_of(to, table.start + row, held, inputs)?;
        let Some((whole, rank)) = &whole else {
            append(to, query, decode.max_query_len, held, page)?;
            continue;
        };
        // A rank's keys are not the last ones: each token sees as many of them as its share of what stands before it.
        let total = i64::from(length("dcp_tot_seq_lens", row, whole[row])?);
        let most = i32::try_from(decode.max_query_len).unwrap_or(i32::MAX);
        let q_len = query.1.saturating_sub(query.0);
        for token in 0..q_len.min(most) {
            let seen = (total - i64::from(q_len - token - 1)).max(0);
            let own = (query.0 + token, query.0 + token + 1);
            append(to, own, 1, share(*rank, seen as u32).min(held), page)?;
        }
    }
    Ok(())
}

/// First tokens of the rows: as the metadata has them, or all of one length.
fn decode_starts(
    to: &mut Vec<i32>,
    decode: &MlaDecode,
    rows: usize,
    inputs: &StepInputs<'_>,
) -> Result<(), PrepareError> {
    to.clear();
    let needs = |found: usize| {
        inconsistent(
            "query_start_loc",
            format!("{found} entries for {rows} rows"),
        )
    };
    match &decode.query_start_loc {
        Some(tensor) => {
            let starts = tensors::vector("query_start_loc", tensor, inputs)?;
            to.extend_from_slice(starts.get(..=rows).ok_or_else(|| needs(starts.len()))?);
        }
        None => {
            let starts = inputs.query_start_loc;
            let end = *starts.get(rows).ok_or_else(|| needs(starts.len()))?;
            let query = i64::from(decode.max_query_len);
            to.extend((0..=rows as i64).map(|row| (row * query).min(i64::from(end)) as i32));
        }
    }
    Ok(())
}

/// Keys of the first `tokens` of a request that lie on the rank: they are dealt out in runs.
fn share(rank: ContextParallel, tokens: u32) -> u32 {
    let run = rank.interleave.max(1);
    let round = u64::from(run) * u64::from(rank.size.max(1));
    let full = (u64::from(tokens) / round) as u32 * run;
    let rest = (u64::from(tokens) % round) as u32;
    full + rest.saturating_sub(rank.rank.saturating_mul(run)).min(run)
}

/// The pages of `kv_len` keys of a row of the host's table; the index of the first.
fn append_pages_of(
    to: &mut StepMetadata,
    row: usize,
    kv_len: u32,
    inputs: &StepInputs<'_>,
) -> Result<u32, PrepareError> {
    let page = to.pages.len() as u32;
    let count = kv_len.div_ceil(to.block_size as u32) as usize;
    append_checked_pages(to, pages_of(row, count, kv_len, inputs)?)?;
    Ok(page)
}

/// The first `count` pages of a row, which hold `keys` keys.
fn pages_of<'a>(
    row: usize,
    count: usize,
    keys: u32,
    inputs: &StepInputs<'a>,
) -> Result<&'a [i32], PrepareError> {
    let width = inputs.block_table.width;
    if count == 0 {
        return Ok(&[]);
    }
    inputs.block_table.row(row).get(..count).ok_or_else(|| {
        inconsistent(
            "block_table",
            format!("row {row} has {width} columns, {keys} keys need {count}"),
        )
    })
}

/// One decode with its query tiles, each with `slots` merge slots.
fn append_decode(
    to: &mut StepMetadata,
    query: (i32, i32),
    max_query_len: u32,
    kv_len: u32,
    page: u32,
    slots: u32,
) -> Result<(), PrepareError> {
    let q_len = append_row(to, "query_start_loc", query, max_query_len)?;
    let tile = to.slot_indptr.len() as u32 - 1;
    to.rows.push(Row {
        token: query.0 as u32,
        q_len,
        kv_len,
        causal: true,
        page,
        tile,
        tile_units: TILE_TOKENS,
    });
    for _ in 0..q_len.div_ceil(TILE_TOKENS) {
        let end = to.slot_items.len() + slots as usize;
        to.slot_items.resize(end, NONE);
        to.slot_indptr.push(end as u32);
    }
    Ok(())
}

/// Parts take pages of requests in order, each a run; a request's partial results stand one behind the other.
fn tile_schedule(
    step: &mut MlaStepMetadata,
    decode: &MlaDecode,
    tiles: &TileSchedule,
    lens: &[i32],
    first_row: usize,
    inputs: &StepInputs<'_>,
) -> Result<(), PrepareError> {
    const COLUMNS: usize = 8;
    const PARTS: &str = "tile_scheduler_metadata";
    let block_size = step.block_size as u32;
    let (Tensor::Matrix(parts), Tensor::Values(sums)) =
        (&tiles.tile_scheduler_metadata, &tiles.num_splits)
    else {
        return Err(inconsistent(PARTS, "parts and splits go by value".into()));
    };
    let rows = lens.len();
    if sums.len() != rows + 1 || parts.columns as usize != COLUMNS {
        return Err(inconsistent(
            "num_splits",
            format!(
                "{} entries for {rows} rows, parts of {} columns",
                sums.len(),
                parts.columns
            ),
        ));
    }
    let to = &mut step.decode;
    for row in 0..rows {
        let kv_len = length("seq_lens", row, lens[row])?;
        let splits = sums[row + 1].wrapping_sub(sums[row]);
        // A builder splits pages of a bound of the length; where the length is less, the last splits are empty.
        let columns = inputs.block_table.width;
        if splits < 0 || splits as usize > columns {
            return Err(inconsistent(
                "num_splits",
                format!("{splits} of row {row}, which has {columns} columns of pages"),
            ));
        }
        // At most one for each page has keys: a builder's number must not make the host allocate more.
        let slots = kv_len.div_ceil(block_size).min(splits as u32);
        let page = append_pages_of(to, first_row + row, kv_len, inputs)?;
        let query = (step.starts[row], step.starts[row + 1]);
        let max = decode.max_query_len;
        append_decode(to, query, max, kv_len, page, slots)?;
    }
    for part in parts.values.chunks_exact(COLUMNS) {
        let [first, from, last, until, split] = *part.first_chunk().expect("eight columns");
        for row in first.max(0)..=last.min(rows as i32 - 1) {
            let of = to.rows[row as usize];
            let pages = of.kv_len.div_ceil(block_size);
            let k0 = if row == first { from.max(0) as u32 } else { 0 };
            let k1 = if row == last {
                until.max(0) as u32
            } else {
                pages
            };
            let (k0, k1) = (
                k0.saturating_mul(block_size).min(of.kv_len),
                k1.saturating_mul(block_size).min(of.kv_len),
            );
            // Beyond the keys there is no work.
            if k0 >= k1 {
                continue;
            }
            let split = if row == first { split } else { 0 };
            append_part(to, row as usize, split, k0..k1)?;
        }
    }
    Ok(())
}

/// A part's keys of one row, for each query tile.
fn append_part(
    to: &mut StepMetadata,
    row: usize,
    split: i32,
    keys: Range<u32>,
) -> Result<(), PrepareError> {
    let of = to.rows[row];
    for (index, q0) in (0..of.q_len).step_by(TILE_TOKENS as usize).enumerate() {
        let tile = of.tile as usize + index;
        let slots = to.slot_indptr[tile] as usize..to.slot_indptr[tile + 1] as usize;
        let slot = usize::try_from(split).ok().map(|split| slots.start + split);
        // One partial result to a slot: so there are no more of them than splits.
        let Some(slot) = slot.filter(|slot| slots.contains(slot) && to.slot_items[*slot] == NONE)
        else {
            return Err(inconsistent(
                "tile_scheduler_metadata",
                format!(
                    "split {split} of row {row}, which has {} and each once",
                    slots.len()
                ),
            ));
        };
        to.slot_items[slot] = to.items.len() as u32;
        to.items.push(Item {
            row: row as u32,
            q0,
            q1: (q0 + TILE_TOKENS).min(of.q_len),
            k0: keys.start,
            k1: keys.end,
        });
        to.groups.push(to.items.len() as u32);
    }
    Ok(())
}

/// `tokens`: of the prefill part, padding left out.
fn prefills(
    step: &mut MlaStepMetadata,
    prefill: &MlaPrefill,
    tokens: u32,
    inputs: &StepInputs<'_>,
) -> Result<(), PrepareError> {
    const STARTS: &str = "prefill.query_start_loc";
    let table = table_rows(&prefill.block_table, inputs)?;
    let starts = tensors::vector(STARTS, &prefill.query_start_loc, inputs)?;
    let rows = starts.len().saturating_sub(1);
    if table.len() < rows {
        return Err(inconsistent(
            "prefill.block_table",
            format!("{} of {rows} rows", table.len()),
        ));
    }
    let mut end = 0;
    for (row, pair) in starts.windows(2).enumerate() {
        let query = (length(STARTS, row, pair[0])?, length(STARTS, row, pair[1])?);
        if query.0 != end || query.1 < query.0 || query.1 > tokens {
            return Err(inconsistent(
                STARTS,
                format!(
                    "row {row} has tokens [{}, {}) of {tokens}",
                    query.0, query.1
                ),
            ));
        }
        end = query.1;
        step.prefills.push(Prefill {
            token: query.0,
            // A kernel's grid has max_query_len rows: tokens beyond it stay zeros.
            q_len: (query.1 - query.0).min(prefill.max_query_len),
            segment: 0,
            cost: 0,
        });
    }
    if let Some(context) = &prefill.chunked_context {
        contexts(step, context, &starts, table.start, inputs)?;
    }
    close_prefills(step, rows);
    Ok(())
}

/// Where each prefill's segments begin, and what the prefills before it cost.
fn close_prefills(step: &mut MlaStepMetadata, rows: usize) {
    let mut cost = 0u64;
    for row in 0..rows {
        let first = step.prefills[row].segment as usize;
        let next = step.prefills.get(row + 1);
        let end = next.map_or(step.segments.len(), |next| next.segment as usize);
        let context: u64 = step.segments[first..end]
            .iter()
            .map(|segment| u64::from(segment.len))
            .sum();
        let prefill = &mut step.prefills[row];
        prefill.cost = cost;
        cost += u64::from(prefill.q_len) * (context + u64::from(prefill.q_len));
    }
    step.prefills_cost = cost;
}

/// Segments of all chunks, request by request.
fn contexts(
    step: &mut MlaStepMetadata,
    context: &ChunkedContext,
    starts: &[i32],
    first_row: usize,
    inputs: &StepInputs<'_>,
) -> Result<(), PrepareError> {
    // The request that segments are appended to, and how many of its pages there are.
    let (mut row, mut pages) = (0, 0);
    for chunk in &context.chunks {
        let (keys, begin) = gathered(chunk, step.rank)?;
        let requests = chunk.request_slice.start as usize..chunk.request_slice.end as usize;
        if requests.start > requests.end
            || requests.end > step.prefills.len()
            || chunk.query_start_loc.len() != requests.len() + 1
            || keys.len() < requests.len()
            || begin.len() != requests.len()
        {
            return Err(inconsistent(
                "request_slice",
                format!(
                    "prefills [{}, {}) of {} with {} query starts and {} lengths",
                    requests.start,
                    requests.end,
                    step.prefills.len(),
                    chunk.query_start_loc.len(),
                    keys.len()
                ),
            ));
        }
        for (index, request) in requests.enumerate() {
            if request < row {
                return Err(inconsistent(
                    "request_slice",
                    format!("prefill {request} after prefill {row}: requests come in order"),
                ));
            }
            if request > row {
                for of in &mut step.prefills[row + 1..=request] {
                    of.segment = step.segments.len() as u32;
                }
                (row, pages) = (request, 0);
            }
            let query = (starts[request], starts[request + 1]);
            let from = i64::from(chunk.token_slice.start);
            let own = (
                from + i64::from(chunk.query_start_loc[index]),
                from + i64::from(chunk.query_start_loc[index + 1]),
            );
            let length_of = query.1.wrapping_sub(query.0);
            if own != (query.0.into(), query.1.into()) || length_of > chunk.max_query_len as i32 {
                return Err(inconsistent(
                    "token_slice",
                    format!(
                        "prefill {request} has tokens [{}, {}), the chunk's are [{}, {}) and at most {}",
                        query.0, query.1, own.0, own.1, chunk.max_query_len
                    ),
                ));
            }
            let start = length("starts", index, begin[index])?;
            let len = keys.get(index)?;
            let end = start.saturating_add(len);
            let needed = end.div_ceil(step.block_size as u32) as usize;
            if len > 0 && needed > pages {
                let own = pages_of(first_row + request, needed, end, inputs)?;
                let at = step.pages.len();
                step.pages.extend_from_slice(&own[pages..]);
                for &page in &step.pages[at..] {
                    check_page(page, &mut step.num_blocks_used)?;
                }
                pages = needed;
            }
            // What goes on from the chunk before is merged; all else begins.
            let continues = chunk.is_continuation && query.0 < chunk.continuation_token_end as i32;
            step.segments.push(Segment {
                resets: !continues,
                start,
                len,
                page: (step.pages.len() - pages) as u32,
            });
        }
    }
    for of in step.prefills.iter_mut().skip(row + 1) {
        of.segment = step.segments.len() as u32;
    }
    Ok(())
}

/// How many keys a chunk gathers of each request.
enum Gathered<'c> {
    /// Running sum over the workspace's rows, checked against the lengths.
    Rows(&'c [i32]),
    /// This rank's: of padded rows those that it holds.
    OfRank {
        padded: &'c [i32],
        held: &'c [i32],
        starts: &'c [i32],
        rank: ContextParallel,
    },
}

impl Gathered<'_> {
    fn len(&self) -> usize {
        match self {
            Gathered::Rows(sums) => sums.len() - 1,
            Gathered::OfRank { padded, .. } => padded.len(),
        }
    }

    fn get(&self, index: usize) -> Result<u32, PrepareError> {
        match self {
            Gathered::Rows(sums) => {
                let len = sums[index + 1].wrapping_sub(sums[index]);
                length("cu_seq_lens", index, len)
            }
            Gathered::OfRank {
                padded,
                held,
                starts,
                rank,
            } => {
                // Rows of padding are nobody's keys.
                let held = held[index * rank.size as usize + rank.rank as usize];
                let len = padded[index].min(held.saturating_sub(starts[index]));
                Ok(len.max(0) as u32)
            }
        }
    }
}

/// What a chunk gathers and from which keys on. Numbers that say one thing twice must agree.
fn gathered(
    chunk: &ContextChunk,
    rank: Option<ContextParallel>,
) -> Result<(Gathered<'_>, &[i32]), PrepareError> {
    let disagree = |field, found: usize, wanted: usize| {
        Err(inconsistent(field, format!("{found}, expected {wanted}")))
    };
    match (&chunk.dcp, rank) {
        (None, None) => {
            let (sums, lens) = (&chunk.cu_seq_lens, &chunk.seq_lens);
            if sums.len() != lens.len() + 1 {
                return disagree("cu_seq_lens", sums.len(), lens.len() + 1);
            }
            let steps = sums.windows(2).map(|pair| pair[1].wrapping_sub(pair[0]));
            if sums[0] != 0 || !steps.eq(lens.iter().copied()) {
                return Err(inconsistent(
                    "cu_seq_lens",
                    "not the running sum of seq_lens".into(),
                ));
            }
            let total = sums[sums.len() - 1] as u32;
            if chunk.num_context_tokens != total {
                let found = chunk.num_context_tokens as usize;
                return disagree("num_context_tokens", found, total as usize);
            }
            Ok((Gathered::Rows(sums), &chunk.starts))
        }
        (Some(dcp), Some(rank)) => {
            let (padded, held) = (&dcp.padded_local_seq_lens, &dcp.local_context_lens_allranks);
            let wanted = padded.len() * rank.size as usize;
            if held.len() != wanted || rank.rank >= rank.size {
                return disagree("local_context_lens_allranks", held.len(), wanted);
            }
            if dcp.local_starts.len() != padded.len() {
                return disagree("local_starts", dcp.local_starts.len(), padded.len());
            }
            let keys = Gathered::OfRank {
                padded,
                held,
                starts: &dcp.local_starts,
                rank,
            };
            Ok((keys, &dcp.local_starts))
        }
        (found, _) => Err(inconsistent(
            "chunks.dcp",
            format!(
                "{}, but the metadata is prepared {} decode context parallelism",
                if found.is_some() { "given" } else { "absent" },
                if rank.is_some() { "under" } else { "without" },
            ),
        )),
    }
}
