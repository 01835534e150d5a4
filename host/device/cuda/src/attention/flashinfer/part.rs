//! One part of FLASHINFER's metadata, held against the group and the step, and counted. It must never know device memory.

use timetable_types::{
    RowRange, Tensor,
    flashinfer::{Plan, PlanFunction},
};

use crate::attention::state::{ListNeed, PrepareError, Step, inconsistent};
use crate::attention::tensors;

/// One part on its way.
pub(super) struct Part<'m> {
    pub(super) plan: &'m Plan,
    /// 0: decodes, 1: prefills.
    pub(super) list: usize,
    /// The part's first token.
    pub(super) first_token: usize,
    /// Its rows of the step.
    pub(super) rows: RowRange,
    /// Where its pages begin among those of both parts.
    pub(super) first_page: usize,
}

/// What a part needs.
#[derive(Clone, Copy, Default)]
pub(super) struct PartNeed {
    pub(super) list: ListNeed,
    pub(super) num_tiles: usize,
    pub(super) num_reqs: usize,
    pub(super) cta_tile_q: u32,
    /// The most packed rows of a request.
    pub(super) packed: u64,
}

impl Part<'_> {
    pub(super) fn num_rows(&self) -> usize {
        (self.rows.end - self.rows.start) as usize
    }

    /// Pages of the part; `check` has seen that they never fall.
    pub(super) fn num_pages(&self) -> usize {
        let sums = &self.plan.paged_kv_indptr;
        (sums[sums.len() - 1] - sums[0]) as usize
    }

    pub(super) fn pages_of(&self, row: usize) -> usize {
        (self.plan.paged_kv_indptr[row + 1] - self.plan.paged_kv_indptr[row]) as usize
    }

    /// Fields against the group, the step and each other. Leaves the part's query starts and key lengths in scratch.
    pub(super) fn check(
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
    pub(super) fn count(&self, step: &mut Step<'_>) -> Result<PartNeed, PrepareError> {
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
}
