//! The context of MLA prefills as records: what each chunk of a plan gathers, and for which queries. It must never know who
//! plans, nor what a workspace row holds.

use alloc::vec::Vec;

use super::{
    BatchError, ContextBudget, ContextChunkPlan, dcp_local_seq_lens_all_ranks,
    plan_mla_context_chunks,
};
use crate::{
    BuilderConfig, Dtype, RowRange, Scratch, Tensor,
    flash_mla::{ChunkedContext, ContextChunk, DcpContextChunk},
};

/// Chunks of contexts through one workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextWorkspace {
    budget: ContextBudget,
    shape: [u32; 2],
    dtype: Dtype,
}

impl ContextWorkspace {
    /// A workspace of `rows` rows, rounded up to whole blocks on every rank. Under decode context parallelism it has the rank's
    /// own share of them once more. None: it would have more than 2^30 rows.
    #[must_use]
    pub fn new(config: &BuilderConfig, rows: u32) -> Option<Self> {
        let (spec, parallel) = (&config.kv_cache_spec, &config.parallel);
        let ranks = parallel.dcp_world_size.max(1);
        let run = parallel.cp_kv_cache_interleave_size.max(1);
        let block = u64::from(spec.block_size.max(1));
        let align = match ranks {
            1 => block,
            _ => lcm(block, u64::from(ranks).checked_mul(run.into())?)?,
        };
        let size = u64::from(rows.max(1)).next_multiple_of(align);
        let size = i32::try_from(size).ok().filter(|&size| size <= 1 << 30)?;
        let own = match ranks {
            1 => 0,
            _ => size as u32 / ranks,
        };
        Some(Self {
            budget: ContextBudget {
                row_budget: size / ranks as i32,
                max_context_chunk: size,
                split_alignment: align as i32,
                rows: super::ContextRows {
                    dcp_world_size: ranks,
                    interleave: run,
                },
            },
            shape: [size as u32 + own, spec.head_size],
            // Entries of 656 bytes are opaque: they are unpacked to bfloat16.
            dtype: match config.attention.kv_cache_dtype.as_str() {
                "fp8_ds_mla" => Dtype::Bfloat16,
                _ => config.attention.model_dtype,
            },
        })
    }

    /// The workspace, as shape.
    #[must_use]
    pub fn scratch(&self) -> Scratch {
        Scratch {
            shape: self.shape.to_vec(),
            dtype: self.dtype,
        }
    }

    /// How contexts are cut.
    #[must_use]
    pub const fn budget(&self) -> &ContextBudget {
        &self.budget
    }

    /// The chunks of prefills with `context_lens` (`s32 [prefills]`) and query starts `s32 [prefills + 1]`, from 0. None where
    /// no prefill has context. (vLLM 0.33 `build_mla_chunked_context_metadata`.)
    ///
    /// # Errors
    /// [`BatchError::ContextDoesNotFit`].
    pub fn chunked_context(
        &self,
        context_lens: Vec<i32>,
        query_start_loc: &[i32],
    ) -> Result<Option<ChunkedContext>, BatchError> {
        if context_lens.iter().all(|&len| len <= 0) {
            return Ok(None);
        }
        let chunks = plan_mla_context_chunks(&context_lens, self.budget)?
            .into_iter()
            .enumerate()
            .map(|(index, plan)| self.chunk(index as u32, plan, &context_lens, query_start_loc))
            .collect();
        let empty_token_slices = context_lens
            .iter()
            .zip(query_start_loc.windows(2))
            .filter(|&(&len, _)| len <= 0)
            .map(|(_, pair)| tokens(pair[0], pair[1]))
            .collect();
        Ok(Some(ChunkedContext {
            workspace: self.scratch(),
            chunks,
            empty_token_slices,
            context_lens,
        }))
    }

    fn chunk(
        &self,
        index: u32,
        plan: ContextChunkPlan,
        context_lens: &[i32],
        query_start_loc: &[i32],
    ) -> ContextChunk {
        let (first, end) = (plan.request_start as usize, plan.request_end as usize);
        let own = &query_start_loc[first..=end];
        let dcp = (self.budget.rows.dcp_world_size > 1)
            .then(|| self.dcp_chunk(&plan, &context_lens[first..end]));
        let cu_seq_lens = running_sum(&plan.seq_lens);
        let num_context_tokens = last(&cu_seq_lens);
        ContextChunk {
            index,
            request_slice: RowRange {
                start: plan.request_start,
                end: plan.request_end,
            },
            token_slice: tokens(own[0], own[own.len() - 1]),
            continuation_token_end: own[1] as u32,
            is_continuation: plan.is_continuation,
            num_context_tokens,
            query_start_loc: own.iter().map(|start| start - own[0]).collect(),
            max_query_len: own
                .windows(2)
                .fold(0, |longest, pair| longest.max(pair[1] - pair[0]))
                as u32,
            cu_seq_lens,
            // Of what this rank holds of the context, where ranks share it.
            starts: match &dcp {
                Some(dcp) => dcp.local_starts.clone(),
                None => plan.starts,
            },
            max_seq_len: plan.seq_lens.iter().fold(0, |max, &len| max.max(len)) as u32,
            all_rows_active: plan.seq_lens.iter().all(|&len| len > 0),
            seq_lens: plan.seq_lens,
            token_to_seq: Tensor::SegmentIds,
            num_local_context_tokens: match &dcp {
                Some(dcp) => last(&dcp.padded_local_cu_seq_lens),
                None => num_context_tokens,
            },
            dcp,
        }
    }

    /// What the ranks hold of a chunk; `context_lens`: of its requests, whole.
    fn dcp_chunk(&self, plan: &ContextChunkPlan, context_lens: &[i32]) -> DcpContextChunk {
        let rows = self.budget.rows;
        let local_starts: Vec<i32> = plan.starts.iter().map(|&at| rows.padded(at)).collect();
        let padded_local_seq_lens: Vec<i32> = plan
            .starts
            .iter()
            .zip(&plan.seq_lens)
            .zip(&local_starts)
            .map(|((start, len), local)| rows.padded(start + len) - local)
            .collect();
        DcpContextChunk {
            local_context_lens_allranks: dcp_local_seq_lens_all_ranks(
                context_lens,
                rows.dcp_world_size,
                rows.interleave,
            ),
            padded_local_cu_seq_lens: running_sum(&padded_local_seq_lens),
            padded_local_seq_lens,
            padded_local_token_to_seq: Tensor::SegmentIds,
            local_starts,
        }
    }
}

/// Rows of the field's workspace before rounding: eight of the longest requests, or four pages for each request if that is more;
/// at most 65,536. (vLLM 0.33 `determine_chunked_prefill_workspace_size`.)
#[must_use]
pub fn chunked_prefill_workspace_size(config: &BuilderConfig) -> u32 {
    let scheduler = &config.scheduler;
    let eight_requests = 8 * u64::from(scheduler.max_model_len);
    let pages = 4 * u64::from(scheduler.max_num_seqs);
    let four_pages = pages.saturating_mul(config.kv_cache_spec.block_size.into());
    eight_requests.max(four_pages).min(65_536) as u32
}

fn tokens(start: i32, end: i32) -> RowRange {
    RowRange {
        start: start as u32,
        end: end as u32,
    }
}

/// 0, then the running sum.
fn running_sum(values: &[i32]) -> Vec<i32> {
    let mut sums = Vec::with_capacity(values.len() + 1);
    let mut sum = 0;
    sums.push(0);
    for value in values {
        sum += value;
        sums.push(sum);
    }
    sums
}

fn last(sums: &[i32]) -> u32 {
    sums.last().map_or(0, |&sum| sum as u32)
}

fn lcm(a: u64, b: u64) -> Option<u64> {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b).filter(|&lcm| lcm <= 1 << 30)
}
