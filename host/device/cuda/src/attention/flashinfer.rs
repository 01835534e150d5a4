//! FLASHINFER's metadata to staged lists and counted launches: the decode part and the prefill part, each with its own work
//! list. The plan kernel makes the work items on the device; here the list is counted, and checked to fill every tile's
//! partial results, for which kernels would wait. It must never know device memory.
//!
//! f32 groups run plain attention, which has no lists: it takes the step's query starts, the plan's key lengths and a table of
//! the plan's pages, one row a request. That is what the work list covers, whatever its chunks.

use timetable_attention::Siblings;
use timetable_types::{
    Input, RowRange, Tensor, TensorSlice,
    flashinfer::{Decode, Metadata, Plan, PlanFunction, Prefill, WorkList},
};

use super::launch::{Launch, ListLaunch, items};
use super::state::{
    ListNeed, PrepareError, Prepared, Replay, Step, WorkCounts, inconsistent, of_field,
};
use super::tensors;
use crate::kernels::AttentionKind;
use crate::params::WorkListSizes;
use crate::upload::{Destination, LowerContext, Sink, lower_tensor};

/// Requests and query tiles of one part: the plan kernel keeps 4 bytes for each in shared memory, of which every device that
/// this runs on has 96 KiB.
const MAX_PLAN_ENTRIES: usize = 24_000;

const TRTLLM: PrepareError = PrepareError::Unsupported {
    what: "a TensorRT-LLM kernel",
    remedy: "set trtllm_attention and xqa to false in the builder's device configuration",
};

/// One part on its way.
struct Part<'m> {
    plan: &'m Plan,
    /// 0: decodes, 1: prefills.
    list: usize,
    /// The part's first token.
    first_token: usize,
    /// Its rows of the step.
    rows: RowRange,
    /// Where its pages begin among those of both parts.
    first_page: usize,
}

/// What a part needs.
#[derive(Clone, Copy, Default)]
struct PartNeed {
    list: ListNeed,
    num_tiles: usize,
    num_reqs: usize,
    cta_tile_q: u32,
    /// The most packed rows of a request.
    packed: u64,
}

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
    fn num_rows(&self) -> usize {
        (self.rows.end - self.rows.start) as usize
    }

    /// Pages of the part; `check` has seen that they never fall.
    fn num_pages(&self) -> usize {
        let sums = &self.plan.paged_kv_indptr;
        (sums[sums.len() - 1] - sums[0]) as usize
    }

    fn pages_of(&self, row: usize) -> usize {
        (self.plan.paged_kv_indptr[row + 1] - self.plan.paged_kv_indptr[row]) as usize
    }

    /// Fields against the group, the step and each other. Leaves the part's query starts and key lengths in scratch.
    fn check(
        &self,
        step: &mut Step<'_>,
        num_reqs: usize,
        num_tokens: usize,
    ) -> Result<(), PrepareError> {
        let plan = self.plan;
        let block_size = step.config.block_size;
        if plan.dcp_world_size > 1 || plan.function == PlanFunction::BatchDcpPrefillPlan {
            return Err(PrepareError::Unsupported {
                what: "dcp_world_size",
                remedy: "run without decode context parallelism",
            });
        }
        if plan.page_size != block_size {
            return Err(inconsistent(
                "page_size",
                format!(
                    "{}, but the kernel block size is {block_size}",
                    plan.page_size
                ),
            ));
        }
        let work = &plan.work;
        if work.cta_tile_q == 0
            || work.kv_chunk_size == 0
            || !work.kv_chunk_size.is_multiple_of(block_size)
        {
            return Err(inconsistent(
                "cta_tile_q, kv_chunk_size",
                format!(
                    "{}, {}; at least 1, and whole pages",
                    work.cta_tile_q, work.kv_chunk_size
                ),
            ));
        }
        if work.kv_chunk_size > i32::MAX as u32 {
            return Err(inconsistent(
                "kv_chunk_size",
                format!("{}; below 2^31", work.kv_chunk_size),
            ));
        }
        self.check_hyperparameters(step)?;
        tensors::vector(
            "qo_indptr",
            &plan.qo_indptr,
            step.context.inputs,
            &mut step.scratch.starts,
        )?;
        let n = self.num_rows();
        let starts = &step.scratch.starts;
        if plan.paged_kv_indptr.is_empty()
            || starts.len() != n + 1
            || plan.paged_kv_last_page_len.len() != n
        {
            return Err(inconsistent(
                "paged_kv_indptr",
                format!(
                    "{n} rows, but qo_indptr has {} entries and paged_kv_last_page_len {}",
                    starts.len(),
                    plan.paged_kv_last_page_len.len()
                ),
            ));
        }
        if self.rows.end as usize > num_reqs {
            return Err(inconsistent(
                "paged_kv_indptr",
                format!("rows up to {} of {num_reqs}", self.rows.end),
            ));
        }
        let room = num_tokens.saturating_sub(self.first_token);
        if starts[0] != 0
            || starts[n] as u32 as usize > room
            || starts.windows(2).any(|pair| pair[1] < pair[0])
        {
            return Err(inconsistent(
                "qo_indptr",
                format!(
                    "from {} to {}; it rises from 0 to at most the part's {room} tokens",
                    starts[0], starts[n]
                ),
            ));
        }
        let selected = match &plan.paged_kv_indices {
            Tensor::GatherPages(rows) => rows,
            Tensor::SelectPages(selection) => &selection.rows,
            _ => {
                return Err(inconsistent(
                    "paged_kv_indices",
                    "pages are gather-pages or select-pages of the host's block table".into(),
                ));
            }
        };
        if *selected != self.rows {
            return Err(inconsistent(
                "paged_kv_indices",
                format!(
                    "rows [{}, {}), the part has [{}, {})",
                    selected.start, selected.end, self.rows.start, self.rows.end
                ),
            ));
        }
        self.key_lens(step)
    }

    /// The keys of each row: all pages are full but the last.
    fn key_lens(&self, step: &mut Step<'_>) -> Result<(), PrepareError> {
        let (plan, page_size) = (self.plan, self.plan.page_size);
        let lens = &mut step.scratch.lens;
        lens.clear();
        for (row, pair) in plan.paged_kv_indptr.windows(2).enumerate() {
            let pages = u32::try_from(i64::from(pair[1]) - i64::from(pair[0]))
                .map_err(|_| inconsistent("paged_kv_indptr", format!("falls after row {row}")))?;
            let last = u32::try_from(plan.paged_kv_last_page_len[row])
                .ok()
                .filter(|&last| last <= page_size);
            let Some(last) = last else {
                return Err(inconsistent(
                    "paged_kv_last_page_len",
                    format!(
                        "{} in row {row}, pages have {page_size}",
                        plan.paged_kv_last_page_len[row]
                    ),
                ));
            };
            let len = match pages {
                0 => 0,
                pages => u64::from(pages - 1) * u64::from(page_size) + u64::from(last),
            };
            let len = i32::try_from(len).map_err(|_| {
                inconsistent(
                    "paged_kv_indptr",
                    format!("{len} keys in row {row}; below 2^31"),
                )
            })?;
            lens.push(len);
        }
        Ok(())
    }

    fn check_hyperparameters(&self, step: &Step<'_>) -> Result<(), PrepareError> {
        let (plan, config) = (self.plan, step.config);
        let exact = [
            ("num_qo_heads", plan.num_qo_heads, config.num_heads),
            ("num_kv_heads", plan.num_kv_heads, config.num_kv_heads),
            ("head_dim", plan.head_dim, config.head_size),
        ];
        for (what, plan, layer) in exact {
            if plan != layer {
                return Err(PrepareError::Hyperparameter {
                    what,
                    plan: f64::from(plan),
                    layer: f64::from(layer),
                });
            }
        }
        let window_left = config
            .sliding_window
            .map_or(-1.0, |window| f64::from(window) - 1.0);
        let cap = config.logits_soft_cap.map_or(0.0, f64::from);
        let close = [
            (
                "window_left",
                f64::from(plan.window_left.max(-1)),
                window_left,
            ),
            ("logits_soft_cap", plan.logits_soft_cap.unwrap_or(0.0), cap),
            ("sm_scale", plan.sm_scale, f64::from(config.scale)),
        ];
        for (what, plan, layer) in close {
            // The plan has f64, the layers f32: one rounding apart is the same value. No comparison holds for NaN.
            let is_same = (plan - layer).abs() <= 1e-6 * layer.abs();
            if !is_same {
                return Err(PrepareError::Hyperparameter { what, plan, layer });
            }
        }
        Ok(())
    }

    /// What the list needs, and whether it fills the partial results of every tile.
    fn count(&self, step: &mut Step<'_>) -> Result<PartNeed, PrepareError> {
        let work = &self.plan.work;
        let group = u64::from(step.config.heads_per_kv_head());
        let scratch = &mut *step.scratch;
        let mut need = PartNeed {
            num_reqs: self.num_rows(),
            cta_tile_q: work.cta_tile_q,
            ..PartNeed::default()
        };
        let tiles = &mut scratch.tiles;
        tiles.clear();
        tiles.push(0);
        for pair in scratch.starts.windows(2) {
            let packed = (pair[1] - pair[0]) as u64 * group;
            need.packed = need.packed.max(packed);
            need.num_tiles += packed.div_ceil(u64::from(work.cta_tile_q)) as usize;
            tiles.push(need.num_tiles as u32);
        }
        self.check_lists(need.num_tiles)?;
        let num_items = work.request_indices.len();
        let first_chunk = &mut scratch.first_chunk;
        first_chunk.clear();
        first_chunk.resize(need.num_tiles, i32::MAX);
        let tile_of = |item: usize| {
            let request = usize::try_from(work.request_indices[item]).ok()?;
            let bounds = tiles.get(request..request + 2)?;
            let tile = bounds[0].checked_add_signed(work.qo_tile_indices[item])?;
            (work.qo_tile_indices[item] >= 0 && tile < bounds[1] && work.kv_tile_indices[item] >= 0)
                .then_some(tile as usize)
        };
        for item in 0..num_items {
            let tile = tile_of(item).ok_or_else(|| {
                inconsistent(
                    "request_indices",
                    format!(
                        "item {item} is request {}, tile {}, chunk {}: there is none",
                        work.request_indices[item],
                        work.qo_tile_indices[item],
                        work.kv_tile_indices[item]
                    ),
                )
            })?;
            first_chunk[tile] = first_chunk[tile].min(work.kv_tile_indices[item]);
        }
        let seen = &mut scratch.seen;
        seen.clear();
        seen.resize(num_items.div_ceil(64), 0);
        for item in 0..num_items {
            let Some(tile) = tile_of(item) else { continue };
            let places = work.merge_indptr[tile]..work.merge_indptr[tile + 1];
            let place =
                i64::from(places.start) + i64::from(work.kv_tile_indices[item] - first_chunk[tile]);
            let fresh = place < i64::from(places.end) && {
                let (word, bit) = (&mut seen[place as usize / 64], 1_u64 << (place % 64));
                let clear = *word & bit == 0;
                *word |= bit;
                clear
            };
            if !fresh {
                return Err(inconsistent(
                    "merge_indptr",
                    format!(
                        "item {item} has no place of its own among [{}, {})",
                        places.start, places.end
                    ),
                ));
            }
        }
        need.list.items = num_items as u64;
        for (tile, pair) in work.merge_indptr.windows(2).enumerate() {
            let splits = (pair[1] - pair[0]) as u32;
            if splits == 0 {
                return Err(inconsistent(
                    "merge_indptr",
                    format!("query tile {tile} has no work item: its output would not be written"),
                ));
            }
            need.list.splits = need.list.splits.max(splits);
            if splits > 1 {
                need.list.slots = pair[1] as u64;
                need.list.rows = need.packed.min(u64::from(work.cta_tile_q));
            }
        }
        Ok(need)
    }

    /// Lengths and running sums of the work list.
    fn check_lists(&self, num_tiles: usize) -> Result<(), PrepareError> {
        let work = &self.plan.work;
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
        if work.merge_indptr.len() != num_tiles + 1 {
            return Err(inconsistent(
                "merge_indptr",
                format!(
                    "{} entries for {num_tiles} query tiles",
                    work.merge_indptr.len()
                ),
            ));
        }
        for (field, sums) in [
            ("merge_indptr", &work.merge_indptr),
            ("worker_indptr", &work.worker_indptr),
        ] {
            let rises = sums.windows(2).all(|pair| pair[0] <= pair[1]);
            let ends = sums.first() == Some(&0)
                && sums.last().map(|&last| last as usize) == Some(num_items);
            if !rises || !ends {
                return Err(inconsistent(
                    field,
                    format!(
                        "from {:?} to {:?}; it rises from 0 to {num_items} work items",
                        sums.first(),
                        sums.last()
                    ),
                ));
            }
        }
        Ok(())
    }

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
                size.max_tiles.min(MAX_PLAN_ENTRIES.saturating_sub(n + 1)),
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

    /// The part's rows for plain attention.
    fn stage_plain(&self, step: &mut Step<'_>, num_tokens: usize) -> Result<(), PrepareError> {
        let width = step.config.limits.table_width;
        let (first, n) = (self.rows.start as usize, self.num_rows());
        let to = *step.workspace.ptrs();
        let at = |ptr: crate::driver::DevicePtr, row: usize, columns: usize| {
            ptr.offset(4 * row * columns)
        };
        let context = LowerContext {
            ptrs: step.ptrs,
            inputs: step.context.inputs,
            num_tokens,
            block_size: step.config.block_size,
        };
        // Plain attention reads the step's query starts: the part's are the same, rebased.
        let own = step
            .context
            .inputs
            .query_start_loc
            .get(first..=first + n)
            .unwrap_or(&[]);
        let rebased = step
            .scratch
            .starts
            .iter()
            .map(|&start| i64::from(start) + self.first_token as i64);
        if !rebased.eq(own.iter().map(|&start| i64::from(start))) {
            return Err(inconsistent(
                "qo_indptr",
                "in f32 it must be the step's own, rebased".into(),
            ));
        }
        let lens = Destination {
            ptr: at(to.seq_lens, first, 1),
            room: n,
            fill: 0,
        };
        self.stage_key_lens(step, lens, &context)?;
        let causal = Destination {
            ptr: at(to.causal, first, 1),
            room: n,
            fill: i32::from(self.plan.causal),
        };
        step.stage.fill("causal", causal)?;
        const FIELD: &str = "paged_kv_indices";
        for row in 0..n {
            if self.pages_of(row) > width {
                return Err(inconsistent(
                    FIELD,
                    format!(
                        "{} pages in row {row} of a table of {width} columns",
                        self.pages_of(row)
                    ),
                ));
            }
        }
        let Tensor::SelectPages(selection) = &self.plan.paged_kv_indices else {
            // The first pages of each row: the rows themselves.
            let rows = Tensor::Slice(TensorSlice {
                source: Input::BlockTable,
                start: self.rows.start,
                end: self.rows.end,
            });
            let table = Destination {
                ptr: at(to.plain_table, first, width),
                room: n * width,
                fill: 0,
            };
            return lower_tensor(&rows, Siblings::NONE, table, FIELD, &context, step.stage)
                .map_err(of_field(FIELD));
        };
        let mut columns = selection.columns.as_slice();
        for row in 0..n {
            let count = self.pages_of(row);
            let Some((own, rest)) = columns.split_at_checked(count) else {
                return Err(inconsistent(
                    FIELD,
                    format!("{} columns, row {row} needs more", columns.len()),
                ));
            };
            columns = rest;
            let one = Tensor::SelectPages(timetable_types::PageSelection {
                rows: RowRange {
                    start: self.rows.start + row as u32,
                    end: self.rows.start + row as u32 + 1,
                },
                columns: own.to_vec(),
            });
            let to = Destination {
                ptr: at(to.plain_table, first + row, width),
                room: count,
                fill: 0,
            };
            let sums = [0, count as i32];
            lower_tensor(
                &one,
                Siblings::pages(&sums),
                to,
                FIELD,
                &context,
                step.stage,
            )
            .map_err(of_field(FIELD))?;
        }
        Ok(())
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

/// The step's query starts, of the parts' rows; rows after them have no tokens.
fn stage_query_starts(
    step: &mut Step<'_>,
    covered: usize,
    num_tokens: usize,
) -> Result<(), PrepareError> {
    const FIELD: &str = "query_start_loc";
    let starts = step.context.inputs.query_start_loc;
    let rows = starts.len().saturating_sub(1);
    if covered != rows {
        return Err(inconsistent(
            "num_prefills",
            format!("the parts have {covered} of the step's {rows} rows"),
        ));
    }
    let context = LowerContext {
        ptrs: step.ptrs,
        inputs: step.context.inputs,
        num_tokens,
        block_size: step.config.block_size,
    };
    let to = Destination {
        ptr: step.workspace.ptrs().query_start_loc,
        room: starts.len(),
        fill: 0,
    };
    lower_tensor(
        &Tensor::Input(Input::QueryStartLoc),
        Siblings::NONE,
        to,
        FIELD,
        &context,
        step.stage,
    )
    .map_err(of_field(FIELD))
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
        let kind = AttentionKind::of_tile(need.cta_tile_q.max(1));
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
