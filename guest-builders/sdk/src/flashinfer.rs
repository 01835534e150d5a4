//! The part of FLASHINFER's metadata that is the field's and not a policy: the split in decodes and prefills, the page
//! pointers, the plan's arguments, and a work list that covers every key once, whatever a builder chooses.
//!
//! It must never know why a builder chooses: into how long chunks keys are divided and which pages are read is its business.

use core::ops::Range;

use timetable_types::{
    BuildError, BuilderConfig, BuilderInfo, CaptureShape, Causal, CommonAttentionMetadata,
    CudagraphSupport, ErrorKind, HostInput, Input, LaunchPromise, PageSelection, RowRange, Tensor,
    batch::{BatchRows, DecodePrefillSplit, DecodeRule, split_decodes_and_prefills},
    flashinfer::{Decode, Metadata, Plan, PlanFunction, Prefill, WorkList},
};

use crate::decline;

/// Packed query rows of a tile: a decode's are the query heads that share a KV head.
const DECODE_TILE: u32 = 16;
const PREFILL_TILE: u32 = 64;

/// The decodes of a step, or its prefills, as a policy sees them.
#[derive(Clone, Debug)]
pub struct Part<'a> {
    /// Are these the decodes?
    pub decode: bool,
    /// Query tokens of each row.
    pub query_lens: Vec<u32>,
    /// `s32`: keys of each row, this step's included.
    pub seq_lens: &'a [i32],
    /// Keys of a page.
    pub page_size: u32,
    /// Keys before a query that it sees at most, in a group with a sliding window; none: all.
    pub window_left: Option<u32>,
}

impl Part<'_> {
    /// Keys of the longest row; at least 1.
    pub fn longest(&self) -> u32 {
        self.seq_lens.iter().fold(1, |most, len| most.max(*len)) as u32
    }

    /// Pages that hold row `row`'s keys.
    pub fn pages(&self, row: usize) -> u32 {
        (self.seq_lens[row].max(0) as u32).div_ceil(self.page_size)
    }

    /// The first page of row `row` that this step writes to; it and all after it may not be left out.
    pub fn first_own_page(&self, row: usize) -> u32 {
        (self.context(row) / self.page_size).min(self.pages(row).saturating_sub(1))
    }

    /// The first page of row `row` that a query of the step sees. Those before it may be another request's by now.
    pub fn first_seen_page(&self, row: usize) -> u32 {
        self.window_left.map_or(0, |window| {
            self.context(row).saturating_sub(window) / self.page_size
        })
    }

    /// Keys of row `row` before the step.
    fn context(&self, row: usize) -> u32 {
        (self.seq_lens[row].max(0) as u32).saturating_sub(self.query_lens[row])
    }
}

/// What a policy decides for a part.
#[derive(Clone, Debug)]
pub struct Choice {
    /// Keys of one chunk. Made a multiple of the page size, and so long that no row has more chunks than the promise; a chunk as
    /// long as the longest row divides nothing.
    pub kv_chunk_size: u32,
    /// The pages that are read. None: all.
    pub selection: Option<Selection>,
}

impl Choice {
    /// Every page, in one chunk: what decides nothing.
    pub const fn one_chunk() -> Self {
        Self {
            kv_chunk_size: u32::MAX,
            selection: None,
        }
    }
}

/// Some pages of each row, as columns of the host's block table. The operator must have granted `subset`.
#[derive(Clone, Debug)]
pub struct Selection {
    /// `s32 [rows + 1]`: where each row's columns begin.
    indptr: Vec<i32>,
    columns: Vec<u32>,
}

impl Selection {
    /// `columns(row)` for each row of `part`: strictly rising, below `part.pages(row)`, with every one from
    /// `part.first_own_page(row)` on. Those before `part.first_seen_page(row)` are left out.
    pub fn new<I: IntoIterator<Item = u32>>(
        part: &Part<'_>,
        mut columns: impl FnMut(usize) -> I,
    ) -> Self {
        let mut selection = Self {
            indptr: vec![0],
            columns: Vec::new(),
        };
        for row in 0..part.seq_lens.len() {
            let first = part.first_seen_page(row);
            let seen = columns(row).into_iter().filter(|&column| column >= first);
            selection.columns.extend(seen);
            selection.indptr.push(selection.columns.len() as i32);
        }
        selection
    }

    /// As [`Selection::new`], from runs of pages in rising order: a tenth of the fuel where runs are long.
    pub fn of_runs<const N: usize>(
        part: &Part<'_>,
        mut runs: impl FnMut(usize) -> [Range<u32>; N],
    ) -> Self {
        let rows = part.seq_lens.len();
        let mut selection = Self {
            indptr: Vec::with_capacity(rows + 1),
            columns: Vec::new(),
        };
        selection.indptr.push(0);
        for row in 0..rows {
            let first = part.first_seen_page(row);
            for run in runs(row) {
                selection.columns.extend(run.start.max(first)..run.end);
            }
            selection.indptr.push(selection.columns.len() as i32);
        }
        selection
    }
}

/// Everything of the record but the policy.
#[derive(Clone, Debug)]
pub struct Record {
    config: BuilderConfig,
    /// Query heads that share a KV head.
    group_size: u32,
    max_num_splits: u32,
}

impl Record {
    /// The record's constants, for a policy that divides a row's keys into at most `max_num_splits` chunks; fewer where the
    /// configuration allows fewer.
    ///
    /// # Errors
    /// If the heads make no groups, the page size is 0, or the configuration asks for decode context parallelism.
    pub fn new(config: BuilderConfig, max_num_splits: u32) -> Result<Self, BuildError> {
        let (heads, kv_heads) = (
            config.attention.num_heads,
            config.kv_cache_spec.num_kv_heads,
        );
        if config.kv_cache_spec.block_size == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads)
        {
            return Err(decline(
                ErrorKind::InvalidValue,
                format!(
                    "{heads} query heads over {kv_heads} KV heads with pages of {} keys make no groups",
                    config.kv_cache_spec.block_size
                ),
            ));
        }
        if config.parallel.dcp_world_size > 1 {
            return Err(decline(
                ErrorKind::NotImplemented,
                "decode context parallelism is beyond this builder",
            ));
        }
        let most = if config.batch_invariant {
            1
        } else {
            config.max_num_splits.max(1)
        };
        Ok(Self {
            group_size: heads / kv_heads,
            max_num_splits: max_num_splits.clamp(1, most),
            config,
        })
    }

    /// The configuration that the builder was made with.
    pub const fn config(&self) -> &BuilderConfig {
        &self.config
    }

    /// The most chunks of a row.
    pub const fn max_num_splits(&self) -> u32 {
        self.max_num_splits
    }

    /// What a FLASHINFER builder called `name` says of itself.
    pub fn info(&self, name: &str) -> BuilderInfo {
        let scheduler = &self.config.scheduler;
        let largest = CaptureShape {
            num_tokens: scheduler.max_num_batched_tokens,
            num_reqs: scheduler.max_num_seqs,
            max_query_len: scheduler.max_num_batched_tokens,
            uniform_query_len: None,
        };
        BuilderInfo {
            name: name.to_owned(),
            cudagraph_support: CudagraphSupport::UniformSingleTokenDecode,
            reorder_batch_threshold: Some(1),
            varlen_cudagraph_max_query_len: None,
            supports_update_block_table: false,
            supports_draft_decode_metadata_update: false,
            needs: vec![HostInput::QueryStartLocCpu, HostInput::SeqLensCpuUpperBound],
            max_scratch_bytes: self.launch_promise(&largest).scratch_bytes,
        }
    }

    /// What a graph captured with `shape` may rely on.
    pub fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        let splits = u64::from(self.max_num_splits);
        let packed = u64::from(shape.num_tokens) * u64::from(self.group_size);
        let tiles = packed.div_ceil(u64::from(DECODE_TILE)) + u64::from(shape.num_reqs);
        // A partial result is an f32 output row and a log-sum-exp for each packed query row and KV head.
        let spec = &self.config.kv_cache_spec;
        let row_bytes = (u64::from(spec.head_size_v) + 1) * 4 * u64::from(spec.num_kv_heads);
        LaunchPromise {
            max_num_splits: self.max_num_splits,
            max_work_items: u32::try_from(tiles * splits).unwrap_or(u32::MAX),
            scratch_bytes: if splits > 1 {
                packed * splits * row_bytes
            } else {
                0
            },
            max_query_len: shape.max_query_len,
            uniform_query_len: shape.uniform_query_len,
        }
    }

    /// The record of this step; `choose` is asked once for its decodes and once for its prefills.
    ///
    /// # Errors
    /// If causality is per request, or the host's vectors do not fit the number of rows.
    pub fn build(
        &self,
        common: &CommonAttentionMetadata,
        mut choose: impl FnMut(&Part<'_>) -> Choice,
    ) -> Result<Metadata, BuildError> {
        let Causal::All(causal) = common.causal else {
            return Err(decline(
                ErrorKind::NotImplemented,
                "FLASHINFER takes one causal flag for the whole batch",
            ));
        };
        let rows = common.num_reqs as usize;
        let starts = &common.query_start_loc_cpu;
        if starts.len() != rows + 1 || common.seq_lens_cpu_upper_bound.len() != rows {
            return Err(decline(
                ErrorKind::InvalidValue,
                format!(
                    "{rows} rows need {} query starts and {rows} lengths",
                    rows + 1
                ),
            ));
        }
        let split = if causal && rows > 0 {
            split_decodes_and_prefills(&BatchRows::from(common), DecodeRule::default())
                .map_err(|error| decline(ErrorKind::InvalidValue, error.to_string()))?
        } else {
            DecodePrefillSplit {
                num_prefills: common.num_reqs,
                num_prefill_tokens: common.num_actual_tokens,
                ..DecodePrefillSplit::default()
            }
        };
        let mut plan = |start: u32, end: u32, decode: bool| {
            let range = start as usize..end as usize;
            let part = Part {
                decode,
                query_lens: starts[range.start..=range.end]
                    .windows(2)
                    .map(|pair| (pair[1] - pair[0]) as u32)
                    .collect(),
                seq_lens: &common.seq_lens_cpu_upper_bound[range],
                page_size: self.config.kv_cache_spec.block_size,
                window_left: self.config.kv_cache_spec.sliding_window.map(|window| {
                    // The spec counts the current token too; rejected drafts move a query down.
                    window.saturating_sub(1) + self.config.scheduler.num_speculative_tokens
                }),
            };
            self.plan(&part, RowRange { start, end }, causal, choose(&part))
        };
        let decodes = split.num_decodes;
        Ok(Metadata {
            kv_cache_layout: self.config.attention.kv_cache_layout,
            num_actual_tokens: common.num_actual_tokens,
            slot_mapping: Tensor::Input(Input::SlotMapping),
            q_data_type_prefill: self.config.attention.model_dtype,
            q_data_type_decode: self.config.attention.model_dtype,
            num_decodes: decodes,
            num_decode_tokens: split.num_decode_tokens,
            num_prefills: split.num_prefills,
            num_prefill_tokens: split.num_prefill_tokens,
            causal,
            decode: (decodes > 0).then(|| Decode::Wrapper(plan(0, decodes, true))),
            prefill: (split.num_prefills > 0)
                .then(|| Prefill::Wrapper(plan(decodes, common.num_reqs, false))),
        })
    }

    fn plan(&self, part: &Part<'_>, rows: RowRange, causal: bool, choice: Choice) -> Plan {
        let (attention, spec) = (&self.config.attention, &self.config.kv_cache_spec);
        let page = part.page_size;
        let last_page = |len: &i32| match *len {
            0 => 0,
            len => (len - 1) % page as i32 + 1,
        };
        let paged_kv_last_page_len: Vec<i32> = part.seq_lens.iter().map(last_page).collect();
        let (paged_kv_indptr, paged_kv_indices, seq_lens) = match choice.selection {
            None => {
                let pages = (0..part.seq_lens.len()).scan(0, |sum, row| {
                    *sum += part.pages(row) as i32;
                    Some(*sum)
                });
                (
                    core::iter::once(0).chain(pages).collect(),
                    Tensor::GatherPages(rows.clone()),
                    part.seq_lens.to_vec(),
                )
            }
            Some(Selection { indptr, columns }) => {
                // All of the selected pages are full but the last.
                let keys = indptr.windows(2).zip(&paged_kv_last_page_len);
                let keys = keys.map(|(pair, last)| match pair[1] - pair[0] {
                    0 => 0,
                    count => (count - 1) * page as i32 + last,
                });
                let keys = keys.collect();
                let selection = PageSelection {
                    rows: rows.clone(),
                    columns,
                };
                (indptr, Tensor::SelectPages(selection), keys)
            }
        };
        let longest_query = part.query_lens.iter().copied().max().unwrap_or(1);
        Plan {
            function: if part.decode {
                PlanFunction::BatchDecodePlan
            } else {
                PlanFunction::BatchPrefillPlan
            },
            qo_indptr: Tensor::RebasedQueryStartLoc(rows),
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            work: self.work(part, &seq_lens, causal, choice.kv_chunk_size),
            seq_lens,
            num_qo_heads: attention.num_heads,
            num_kv_heads: spec.num_kv_heads,
            head_dim: spec.head_size,
            page_size: page,
            causal,
            sm_scale: attention.scale,
            // The spec counts the current token too.
            window_left: spec.sliding_window.map_or(-1, |window| window as i32 - 1),
            logits_soft_cap: attention.logits_soft_cap,
            q_data_type: attention.model_dtype,
            kv_data_type: spec.dtype,
            o_data_type: attention.model_dtype,
            fixed_split_size: -1,
            disable_split_kv: self.config.batch_invariant,
            q_len_per_req: if part.decode { longest_query.max(1) } else { 1 },
            dcp_world_size: 1,
            cudagraph_batch_size: 0,
        }
    }

    /// Tiles in row order, each with the chunks that hold keys which it sees; equal runs of items for the workers.
    fn work(&self, part: &Part<'_>, key_lens: &[i32], causal: bool, chunk: u32) -> WorkList {
        let tile = if part.decode {
            DECODE_TILE
        } else {
            PREFILL_TILE
        };
        let longest = key_lens.iter().fold(1, |most, len| most.max(*len)) as u32;
        let paged = |keys: u32| keys.div_ceil(part.page_size) * part.page_size;
        let chunk = paged(chunk.clamp(longest.div_ceil(self.max_num_splits), longest));

        let (mut request_indices, mut qo_tile_indices) = (Vec::new(), Vec::new());
        let (mut kv_tile_indices, mut merge_indptr) = (Vec::new(), vec![0]);
        let mut split_kv = false;
        for (row, (&query, &keys)) in part.query_lens.iter().zip(key_lens).enumerate() {
            let tiles = (query * self.group_size).div_ceil(tile);
            for index in 0..tiles {
                // The last tile ends with the last query, which sees every key.
                let seen = if causal && index + 1 < tiles {
                    let last = ((index + 1) * tile - 1) / self.group_size;
                    (keys as u32).min((keys as u32).saturating_sub(query) + last + 1)
                } else {
                    keys as u32
                };
                let chunks = seen.div_ceil(chunk).max(1);
                split_kv |= chunks > 1;
                for index_of_chunk in 0..chunks {
                    request_indices.push(row as i32);
                    qo_tile_indices.push(index as i32);
                    kv_tile_indices.push(index_of_chunk as i32);
                }
                merge_indptr.push(request_indices.len() as i32);
            }
        }
        let items = request_indices.len();
        let device = &self.config.device;
        let workers = (device.num_workers.max(1) as usize)
            .saturating_mul(device.ctas_per_worker.max(1) as usize)
            .clamp(1, items.max(1));
        WorkList {
            kv_chunk_size: chunk,
            cta_tile_q: tile,
            request_indices,
            qo_tile_indices,
            kv_tile_indices,
            worker_indptr: (0..=workers)
                .map(|worker| (worker * items / workers) as i32)
                .collect(),
            merge_indptr,
            split_kv,
        }
    }
}
