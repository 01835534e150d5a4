//! FLASH_ATTN's metadata to staged vectors and counted launches. The plan kernel makes the work items on the device, from
//! `num_splits`, the order of rows and the device's own lengths; here they are only counted. It must never know device memory.

use timetable_attention::Siblings;
use timetable_types::{
    Causal, Input, Tensor,
    flash_attn::{Metadata, Schedule, TileOrder},
};

use super::config::GroupConfig;
use super::launch::{DECODE_ROWS, Launch, ListLaunch, items};
use super::state::{
    ListNeed, PrepareError, Prepared, Replay, Step, WorkCounts, inconsistent, of_field,
};
use super::tensors;
use crate::kernels::AttentionKind;
use crate::upload::{Destination, LowerContext, Sink, lower_tensor};

pub(super) fn prepare(step: &mut Step<'_>, metadata: &Metadata) -> Result<Prepared, PrepareError> {
    refuse_unsupported(metadata)?;
    let inputs = step.context.inputs;
    tensors::vector(
        "query_start_loc",
        &metadata.query_start_loc,
        inputs,
        &mut step.scratch.starts,
    )?;
    tensors::vector(
        "seq_lens",
        &metadata.seq_lens,
        inputs,
        &mut step.scratch.lens,
    )?;
    let num_reqs = step.scratch.starts.len().saturating_sub(1);
    let num_tokens = metadata.num_actual_tokens as usize;
    step.check_sizes(num_reqs, num_tokens)?;
    check_rows(step, metadata, num_reqs)?;
    check_order(step, &metadata.schedule.tile_order, num_reqs)?;
    stage(step, metadata, num_reqs, num_tokens)?;

    let config = step.config;
    let starts = &step.scratch.starts;
    let group = u64::from(config.heads_per_kv_head());
    let longest = starts
        .windows(2)
        .map(|pair| (pair[1] - pair[0]) as u64)
        .max()
        .unwrap_or(0);
    let kind = config.prefill_kind(longest * group);
    let rows = Rows {
        starts,
        lens: &step.scratch.lens,
        schedule: &metadata.schedule,
        block_size: config.block_size,
        group,
    };
    let needs = rows.count(u64::from(config.tile_rows(kind)));
    let launch = Launch {
        num_reqs: num_reqs as u32,
        num_tokens: num_tokens as u32,
        max_num_splits: needs[0].splits.max(needs[1].splits).max(1),
        lists: eager_lists(config, &needs, kind, longest * group),
    };
    let replay = match step.captured {
        None => Replay::Fits,
        Some(captured) => replay(step, captured, &launch, &rows),
    };
    if step.captured.is_none() || replay != Replay::Fits {
        for (index, need) in needs.iter().enumerate() {
            if launch.lists[index].is_some() {
                step.check_room(index, need)?;
            }
        }
    }
    Ok(Prepared {
        launch,
        counts: WorkCounts {
            work_items: needs[0].items + needs[1].items,
            max_splits: launch.max_num_splits,
        },
        replay,
    })
}

/// What the CPU device refuses too.
fn refuse_unsupported(metadata: &Metadata) -> Result<(), PrepareError> {
    let unsupported = |what, remedy| Err(PrepareError::Unsupported { what, remedy });
    if metadata.dcp_context_kv_lens.is_some() || metadata.max_dcp_context_kv_len > 0 {
        return unsupported(
            "dcp_context_kv_lens",
            "run without decode context parallelism",
        );
    }
    if metadata.mm_prefix_query_range.is_some() {
        return unsupported(
            "mm_prefix_query_range",
            "run this model without multimodal prefixes",
        );
    }
    if metadata.rswa_prefix_lens.is_some() {
        return unsupported("rswa_prefix_lens", "run this model without R-SWA");
    }
    if metadata.block_table != Tensor::Input(Input::BlockTable) {
        return Err(inconsistent(
            "block_table",
            "it must be the step's own block table".into(),
        ));
    }
    Ok(())
}

/// Query starts, lengths and splits of every row.
fn check_rows(step: &Step<'_>, metadata: &Metadata, num_reqs: usize) -> Result<(), PrepareError> {
    let (starts, lens) = (&step.scratch.starts, &step.scratch.lens);
    let num_tokens = i64::from(metadata.num_actual_tokens);
    if starts.is_empty() || starts[0] != 0 {
        return Err(inconsistent(
            "query_start_loc",
            format!("{:?} first; it begins at 0", starts.first()),
        ));
    }
    if lens.len() < num_reqs || lens.len() > step.config.limits.max_num_reqs {
        return Err(inconsistent(
            "seq_lens",
            format!("{} entries for {num_reqs} rows", lens.len()),
        ));
    }
    let splits = &metadata.schedule.num_splits;
    if !splits.is_empty() && splits.len() != num_reqs {
        return Err(inconsistent(
            "num_splits",
            format!("{} entries for {num_reqs} rows", splits.len()),
        ));
    }
    let width = step
        .config
        .limits
        .table_width
        .min(step.context.inputs.block_table.width) as u64;
    for row in 0..num_reqs {
        let (start, end) = (i64::from(starts[row]), i64::from(starts[row + 1]));
        if end < start || end > num_tokens {
            return Err(inconsistent(
                "query_start_loc",
                format!("row {row} has tokens [{start}, {end}) of {num_tokens}"),
            ));
        }
        // The field's grid has that many rows; this device's kernels run all of them.
        if end - start > i64::from(metadata.max_query_len) {
            return Err(inconsistent(
                "max_query_len",
                format!(
                    "{}, but row {row} has {} query tokens",
                    metadata.max_query_len,
                    end - start
                ),
            ));
        }
        let len = u32::try_from(lens[row])
            .map_err(|_| inconsistent("seq_lens", format!("{} in row {row}", lens[row])))?;
        let pages = u64::from(len.div_ceil(step.config.block_size));
        if end > start && pages > width {
            return Err(inconsistent(
                "block_table",
                format!("row {row} has {width} columns, {len} keys need {pages}"),
            ));
        }
        if let Some(&splits) = splits.get(row)
            && splits < 1
        {
            return Err(inconsistent(
                "num_splits",
                format!("{splits} in row {row}; at least 1"),
            ));
        }
    }
    if metadata.causal == Causal::PerRequest
        && step
            .context
            .inputs
            .causal
            .is_none_or(|flags| flags.len() < num_reqs)
    {
        return Err(inconsistent(
            "causal",
            format!("per request, but not for all of {num_reqs} rows"),
        ));
    }
    Ok(())
}

/// A row that the order leaves out would never be run.
fn check_order(
    step: &mut Step<'_>,
    order: &TileOrder,
    num_reqs: usize,
) -> Result<(), PrepareError> {
    let TileOrder::Rows(order) = order else {
        return Ok(());
    };
    if order.len() != num_reqs {
        return Err(inconsistent(
            "tile_order",
            format!("{} entries for {num_reqs} rows", order.len()),
        ));
    }
    step.scratch.clear_bits(num_reqs);
    for &row in order {
        let fresh = usize::try_from(row)
            .ok()
            .filter(|&row| row < num_reqs)
            .is_some_and(|row| step.scratch.insert(row));
        if !fresh {
            return Err(inconsistent(
                "tile_order",
                format!("row {row}, which is twice or not among the {num_reqs} rows"),
            ));
        }
    }
    Ok(())
}

/// Everything that the plan kernel reads, always: a graph then replays any schedule within its promise.
fn stage(
    step: &mut Step<'_>,
    metadata: &Metadata,
    num_reqs: usize,
    num_tokens: usize,
) -> Result<(), PrepareError> {
    let to = *step.workspace.ptrs();
    let context = LowerContext {
        ptrs: step.ptrs,
        inputs: step.context.inputs,
        num_tokens,
        block_size: step.config.block_size,
    };
    let room = |ptr, room, fill| Destination { ptr, room, fill };
    let last = step.scratch.starts[num_reqs];
    let vectors = [
        (
            "query_start_loc",
            &metadata.query_start_loc,
            room(to.query_start_loc, num_reqs + 1, last),
        ),
        (
            "seq_lens",
            &metadata.seq_lens,
            room(to.seq_lens, num_reqs.max(step.scratch.lens.len()), 0),
        ),
    ];
    for (field, tensor, to) in vectors {
        lower_tensor(tensor, Siblings::NONE, to, field, &context, step.stage)
            .map_err(of_field(field))?;
    }
    if step.config.is_plain() {
        return stage_causal(step, &metadata.causal, &context, num_reqs);
    }
    step.stage.values(
        "num_splits",
        room(to.num_splits, num_reqs, 1),
        &metadata.schedule.num_splits,
    )?;
    let order = room(to.row_order, num_reqs, 0);
    match &metadata.schedule.tile_order {
        TileOrder::Rows(rows) => step.stage.values("tile_order", order, rows)?,
        TileOrder::Natural => {
            let natural = &mut step.scratch.values;
            natural.clear();
            natural.extend(0..num_reqs as i32);
            step.stage.values("tile_order", order, natural)?;
        }
    }
    stage_causal(step, &metadata.causal, &context, num_reqs)
}

fn stage_causal(
    step: &mut Step<'_>,
    causal: &Causal,
    context: &LowerContext<'_>,
    num_reqs: usize,
) -> Result<(), PrepareError> {
    let to = Destination {
        ptr: step.workspace.ptrs().causal,
        room: num_reqs,
        fill: i32::from(*causal == Causal::All(true)),
    };
    match causal {
        Causal::All(_) => Ok(step.stage.fill("causal", to)?),
        Causal::PerRequest => {
            let flags = context.inputs.causal.unwrap_or(&[]);
            // Flags beyond the rows belong to nobody.
            let tensor = Tensor::Slice(timetable_types::TensorSlice {
                source: Input::Causal,
                start: 0,
                end: flags.len().min(num_reqs) as u32,
            });
            lower_tensor(&tensor, Siblings::NONE, to, "causal", context, step.stage)
                .map_err(of_field("causal"))
        }
    }
}

/// The rows of a step, to count.
struct Rows<'s> {
    starts: &'s [i32],
    lens: &'s [i32],
    schedule: &'s Schedule,
    block_size: u32,
    group: u64,
}

impl Rows<'_> {
    /// Work items of both lists, the second in tiles of `tile` packed rows. As the plan kernel counts them, but that a row's
    /// splits are at most its pages: the device's lengths may be less than the host's, and fewer pages may make more splits of
    /// the same `num_splits`, never more than these.
    fn count(&self, tile: u64) -> [ListNeed; 2] {
        let mut needs = [ListNeed::default(); 2];
        let num_reqs = self.starts.len() - 1;
        match &self.schedule.tile_order {
            TileOrder::Natural => {
                (0..num_reqs).for_each(|row| self.count_row(row, tile, &mut needs));
            }
            TileOrder::Rows(order) => {
                order
                    .iter()
                    .for_each(|&row| self.count_row(row as usize, tile, &mut needs));
            }
        }
        needs
    }

    fn count_row(&self, row: usize, tile: u64, needs: &mut [ListNeed; 2]) {
        let packed = (self.starts[row + 1] - self.starts[row]) as u64 * self.group;
        if packed == 0 {
            return;
        }
        let (need, tile) = if packed <= DECODE_ROWS {
            (&mut needs[0], DECODE_ROWS)
        } else {
            (&mut needs[1], tile)
        };
        let pages = (self.lens[row] as u32).div_ceil(self.block_size);
        let splits = self
            .schedule
            .num_splits
            .get(row)
            .map_or(1, |&splits| splits as u32);
        let splits = splits.min(pages).max(1);
        need.items += packed.div_ceil(tile) * u64::from(splits);
        need.splits = need.splits.max(splits);
        if splits > 1 {
            need.slots = need.items;
            need.rows = need.rows.max(packed.min(tile));
        }
    }
}

/// Lists with items; the first with none where there is no item at all, for the tokens that no request covers.
fn eager_lists(
    config: &GroupConfig,
    needs: &[ListNeed; 2],
    prefill: AttentionKind,
    max_packed: u64,
) -> [Option<ListLaunch>; 2] {
    if config.is_plain() {
        return [None, None];
    }
    let list = |need: &ListNeed, kind, (least, most): (u64, u64)| ListLaunch {
        kind,
        tile_rows: config.tile_rows(kind),
        max_work_items: items(need.items),
        min_packed_rows: least as u32,
        max_packed_rows: most as u32,
        partial_rows: need.rows.max(1) as u32,
        max_reqs: 0,
        max_tiles: 0,
        max_blocks: None,
    };
    let has_prefill = needs[1].items > 0;
    let has_decode = needs[0].items > 0 || !has_prefill;
    let beyond = (DECODE_ROWS + 1, max_packed.max(DECODE_ROWS + 1));
    [
        has_decode.then(|| {
            list(
                &needs[0],
                config.kind(AttentionKind::Decode),
                (1, DECODE_ROWS),
            )
        }),
        has_prefill.then(|| list(&needs[1], prefill, beyond)),
    ]
}

/// May the graph that `captured` says replay the step?
fn replay(step: &Step<'_>, captured: &Launch, launch: &Launch, rows: &Rows<'_>) -> Replay {
    if (captured.num_reqs, captured.num_tokens) != (launch.num_reqs, launch.num_tokens) {
        return Replay::Eager("the step has other sizes than the graph");
    }
    if step.config.is_plain() {
        return Replay::Fits;
    }
    if launch.max_num_splits > captured.max_num_splits {
        return Replay::Eager("more splits than the graph's promise");
    }
    let tile = captured.lists[1].map_or(
        u64::from(step.config.tile_rows(AttentionKind::Prefill)),
        |list| u64::from(list.tile_rows),
    );
    let needs = rows.count(tile);
    for (index, need) in needs.iter().enumerate() {
        match &captured.lists[index] {
            None if need.items > 0 => {
                return Replay::Eager("queries of a length that the graph was not captured for");
            }
            None => {}
            Some(list) => {
                if need.items > u64::from(list.max_work_items)
                    || need.rows > u64::from(list.partial_rows)
                {
                    return Replay::Eager("more work items than the graph's promise");
                }
                let need = ListNeed {
                    rows: u64::from(list.partial_rows),
                    ..*need
                };
                if step.check_room(index, &need).is_err() {
                    return Replay::Eager(
                        "more partial results than the workspace holds in a graph",
                    );
                }
            }
        }
    }
    Replay::Fits
}
