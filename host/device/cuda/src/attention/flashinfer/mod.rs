//! FLASHINFER's metadata to staged lists and counted launches: the decode part and the prefill part, each with its own work
//! list. The plan kernel makes the work items on the device; here the list is counted, and checked to fill every tile's
//! partial results, for which kernels would wait. It must never know device memory.
//!
//! f32 groups run plain attention, which has no lists: it takes the step's query starts, the plan's key lengths and a table of
//! the plan's pages. That is what the work list covers, whatever its chunks.

mod part;
mod plain;

use timetable_attention::Siblings;
use timetable_types::{
    Input, RowRange, Tensor, TensorSlice,
    flashinfer::{Decode, Metadata, Prefill, WorkList},
};

use super::launch::{Launch, ListLaunch, items, max_plan_tiles};
use super::state::{ListNeed, PrepareError, Prepared, Replay, Step, WorkCounts, of_field};
use crate::kernels::AttentionKind;
use crate::params::WorkListSizes;
use crate::upload::{Destination, LowerContext, Sink, lower_tensor};
use part::{Part, PartNeed};
use plain::stage_query_starts;

const TRTLLM: PrepareError = PrepareError::Unsupported {
    what: "a TensorRT-LLM kernel",
    remedy: "set trtllm_attention and xqa to false in the builder's device configuration",
};

pub(super) fn prepare(step: &mut Step<'_>, metadata: &Metadata) -> Result<Prepared, PrepareError> {
    let decode = match &metadata.decode {
        Some(Decode::Wrapper(plan)) => Some(plan),
        Some(Decode::Trtllm(_)) => return Err(TRTLLM),
        None => None,
    };
    let prefill = match &metadata.prefill {
        Some(Prefill::Wrapper(plan)) => Some(plan),
        Some(Prefill::Trtllm(_)) => return Err(TRTLLM),
        None => None,
    };
    let num_reqs = step.context.inputs.query_start_loc.len().saturating_sub(1);
    let num_tokens = metadata.num_actual_tokens as usize;
    step.check_sizes(num_reqs, num_tokens)?;
    let covered = step
        .context
        .inputs
        .query_start_loc
        .last()
        .copied()
        .unwrap_or(0);
    let tail = (covered.clamp(0, num_tokens as i32), num_tokens as i32);

    let (mut needs, mut row, mut page) = ([PartNeed::default(); 2], 0, 0);
    for (list, plan) in [decode, prefill].into_iter().enumerate() {
        let Some(plan) = plan else {
            stage_none(step, list, tail)?;
            continue;
        };
        let rows = plan.paged_kv_indptr.len().saturating_sub(1) as u32;
        let part = Part {
            plan,
            list,
            first_token: if list == 0 {
                0
            } else {
                metadata.num_decode_tokens as usize
            },
            rows: RowRange {
                start: row,
                end: row + rows,
            },
            first_page: page,
        };
        part.check(step, num_reqs, num_tokens)?;
        let need = part.count(step)?;
        if step.config.is_plain() {
            part.stage_plain(step, num_tokens)?;
        } else {
            part.stage(step, &need, tail)?;
        }
        needs[list] = need;
        row += rows;
        page += part.num_pages();
    }
    if step.config.is_plain() {
        stage_query_starts(step, row as usize, num_tokens)?;
    }
    let launch = Launch {
        num_reqs: num_reqs as u32,
        num_tokens: num_tokens as u32,
        max_num_splits: needs[0].list.splits.max(needs[1].list.splits).max(1),
        lists: eager_lists(step, &needs)?,
    };
    let replay = match step.captured {
        None => Replay::Fits,
        Some(captured) => replay(step, captured, &launch, &needs),
    };
    if step.captured.is_none() || replay != Replay::Fits {
        for (index, need) in needs.iter().enumerate() {
            if launch.lists[index].is_some() {
                step.check_room(index, &need.list)?;
            }
        }
    }
    Ok(Prepared {
        launch,
        counts: WorkCounts {
            work_items: needs[0].list.items + needs[1].list.items,
            max_splits: launch.max_num_splits,
        },
        replay,
    })
}

impl Part<'_> {
    /// The part's lists for the plan kernel.
    fn stage(
        &self,
        step: &mut Step<'_>,
        need: &PartNeed,
        tail: (i32, i32),
    ) -> Result<(), PrepareError> {
        let (plan, work, n) = (self.plan, &self.plan.work, self.num_rows());
        let size = step.workspace.size();
        let rooms = [
            (
                "work items",
                work.request_indices.len(),
                size.max_work_items[self.list],
            ),
            (
                "query tiles",
                need.num_tiles,
                size.max_tiles.min(max_plan_tiles(n as u64) as usize),
            ),
            ("pages", self.first_page + self.num_pages(), size.max_pages),
        ];
        for (what, needed, room) in rooms {
            if needed > room {
                return Err(PrepareError::Room {
                    what,
                    needed: needed as u64,
                    room: room as u64,
                    remedy: "let the builder use larger tiles and split less",
                });
            }
        }
        let to = step.workspace.ptrs().lists[self.list];
        let pages = step.workspace.ptrs().pages.offset(4 * self.first_page);
        let room = |ptr, room| Destination { ptr, room, fill: 0 };
        let context = LowerContext {
            ptrs: step.ptrs,
            inputs: step.context.inputs,
            num_tokens: step.context.common.num_actual_tokens as usize,
            block_size: step.config.block_size,
        };
        stage_sizes(step, self.list, &sizes(self, need, work, tail))?;
        lower_tensor(
            &plan.qo_indptr,
            Siblings::NONE,
            room(to.qo_indptr, n + 1),
            "qo_indptr",
            &context,
            step.stage,
        )
        .map_err(of_field("qo_indptr"))?;
        // Items name their first page among those of both parts.
        let offsets = &mut step.scratch.values;
        offsets.clear();
        let shift = self.first_page as i32 - plan.paged_kv_indptr[0];
        offsets.extend(plan.paged_kv_indptr.iter().map(|&sum| sum + shift));
        step.stage
            .values("paged_kv_indptr", room(to.paged_kv_indptr, n + 1), offsets)?;
        self.stage_key_lens(step, room(to.seq_lens, n), &context)?;
        let num_items = work.request_indices.len();
        for (field, ptr, values) in [
            ("request_indices", to.request_indices, &work.request_indices),
            ("qo_tile_indices", to.qo_tile_indices, &work.qo_tile_indices),
            ("kv_tile_indices", to.kv_tile_indices, &work.kv_tile_indices),
        ] {
            step.stage.values(field, room(ptr, num_items), values)?;
        }
        step.stage.values(
            "merge_indptr",
            room(to.merge_indptr, need.num_tiles + 1),
            &work.merge_indptr,
        )?;
        lower_tensor(
            &plan.paged_kv_indices,
            Siblings::pages(&plan.paged_kv_indptr),
            room(pages, self.num_pages()),
            "paged_kv_indices",
            &context,
            step.stage,
        )
        .map_err(of_field("paged_kv_indices"))
    }

    /// The keys of each row: the device's own lengths where the plan has just those, so that kernels stop where the device
    /// does, and the plan's where it chose pages.
    fn stage_key_lens(
        &self,
        step: &mut Step<'_>,
        to: Destination,
        context: &LowerContext<'_>,
    ) -> Result<(), PrepareError> {
        const FIELD: &str = "seq_lens";
        let rows = self.rows.start as usize..self.rows.end as usize;
        if context.inputs.seq_lens.get(rows) == Some(step.scratch.lens.as_slice()) {
            let own = Tensor::Slice(TensorSlice {
                source: Input::SeqLens,
                start: self.rows.start,
                end: self.rows.end,
            });
            return lower_tensor(&own, Siblings::NONE, to, FIELD, context, step.stage)
                .map_err(of_field(FIELD));
        }
        Ok(step.stage.values(FIELD, to, &step.scratch.lens)?)
    }
}

fn sizes(part: &Part<'_>, need: &PartNeed, work: &WorkList, tail: (i32, i32)) -> WorkListSizes {
    WorkListSizes {
        num_items: need.list.items as i32,
        num_reqs: need.num_reqs as i32,
        num_tiles: need.num_tiles as i32,
        first_token: part.first_token as i32,
        cta_tile_q: work.cta_tile_q.min(i32::MAX as u32) as i32,
        kv_chunk_size: work.kv_chunk_size as i32,
        causal: i32::from(part.plan.causal),
        tail_begin: tail.0,
        tail_end: tail.1,
        reserved: 0,
    }
}

/// A part that the step does not have: no items. Its list, where a graph has one, still clears the tail.
fn stage_none(step: &mut Step<'_>, list: usize, tail: (i32, i32)) -> Result<(), PrepareError> {
    if step.config.is_plain() {
        return Ok(());
    }
    let sizes = WorkListSizes {
        cta_tile_q: 16,
        kv_chunk_size: step.config.block_size as i32,
        tail_begin: tail.0,
        tail_end: tail.1,
        ..WorkListSizes::default()
    };
    stage_sizes(step, list, &sizes)
}

fn stage_sizes(
    step: &mut Step<'_>,
    list: usize,
    sizes: &WorkListSizes,
) -> Result<(), PrepareError> {
    let words: &[i32] = bytemuck::cast_slice(bytemuck::bytes_of(sizes));
    let to = Destination {
        ptr: step.workspace.ptrs().lists[list].sizes,
        room: words.len(),
        fill: 0,
    };
    Ok(step.stage.values("sizes of a work list", to, words)?)
}

/// Lists with items; the first with none where there is no item at all, for the tokens that no request covers.
fn eager_lists(
    step: &Step<'_>,
    needs: &[PartNeed; 2],
) -> Result<[Option<ListLaunch>; 2], PrepareError> {
    let config = step.config;
    if config.is_plain() {
        return Ok([None, None]);
    }
    let list = |need: &PartNeed| -> Result<ListLaunch, PrepareError> {
        let tile = u64::from(need.cta_tile_q).min(need.packed.max(1));
        let kind = config.kind(AttentionKind::of_tile(need.cta_tile_q.max(1)));
        let rows = config.tile_rows(kind);
        if need.cta_tile_q > rows {
            return Err(PrepareError::Unsupported {
                what: "cta_tile_q",
                remedy: "kernels take tiles of at most 128 packed rows, and 64 with heads of 256",
            });
        }
        Ok(ListLaunch {
            kind,
            tile_rows: rows,
            max_work_items: items(need.list.items),
            min_packed_rows: 1,
            max_packed_rows: i32::MAX as u32,
            partial_rows: tile as u32,
            max_reqs: need.num_reqs as u32,
            max_tiles: need.num_tiles as u32,
            max_blocks: None,
        })
    };
    let has_prefill = needs[1].list.items > 0;
    let has_decode = needs[0].list.items > 0 || !has_prefill;
    Ok([
        has_decode.then(|| list(&needs[0])).transpose()?,
        has_prefill.then(|| list(&needs[1])).transpose()?,
    ])
}

/// May the graph that `captured` says replay the step?
fn replay(step: &Step<'_>, captured: &Launch, launch: &Launch, needs: &[PartNeed; 2]) -> Replay {
    if (captured.num_reqs, captured.num_tokens) != (launch.num_reqs, launch.num_tokens) {
        return Replay::Eager("the step has other sizes than the graph");
    }
    if step.config.is_plain() {
        return Replay::Fits;
    }
    for (index, need) in needs.iter().enumerate() {
        let Some(list) = &captured.lists[index] else {
            if need.list.items > 0 {
                return Replay::Eager("prefills in a graph that was captured for decodes");
            }
            continue;
        };
        if need.cta_tile_q > list.tile_rows {
            return Replay::Eager("a larger tile than the graph's kernel takes");
        }
        if need.list.items > u64::from(list.max_work_items)
            || need.num_tiles > list.max_tiles as usize
            || need.num_reqs > list.max_reqs as usize
            || need.list.rows > u64::from(list.partial_rows)
        {
            return Replay::Eager("more work items than the graph's promise");
        }
        let need = ListNeed {
            rows: u64::from(list.partial_rows),
            ..need.list
        };
        if step.check_room(index, &need).is_err() {
            return Replay::Eager("more partial results than the workspace holds in a graph");
        }
    }
    Replay::Fits
}
