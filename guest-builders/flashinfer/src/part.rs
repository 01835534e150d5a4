//! A part of the batch that FlashInfer's own kernels run: the arguments of its plan function, and the plan. It must never
//! know how work is balanced.

use timetable_guest::{
    batch::{
        DecodePrefillSplit, dcp_local_seq_lens_into, last_page_lens_into, paged_kv_indptr_into,
    },
    types::{
        CommonAttentionMetadata, RowRange, Tensor,
        flashinfer::{Plan, PlanFunction},
    },
};

use crate::{
    PlannedWork,
    plan::{Batch, work_list},
};

/// Keys of a split where results must not depend on the batch; the field's constants.
const BATCH_INVARIANT_DECODE_SPLIT: i32 = 2048;
const BATCH_INVARIANT_PREFILL_SPLIT: i32 = 4096;

/// Which part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Rows [0, decodes).
    Decode,
    /// Rows [decodes, R).
    Prefill,
}

impl PlannedWork {
    pub(crate) fn plan(
        &self,
        common: &CommonAttentionMetadata,
        split: &DecodePrefillSplit,
        side: Side,
        causal: bool,
    ) -> Plan {
        let config = &self.config;
        let (attention, spec) = (&config.attention, &config.kv_cache_spec);
        let rows = match side {
            Side::Decode => RowRange {
                start: 0,
                end: split.num_decodes,
            },
            Side::Prefill => RowRange {
                start: split.num_decodes,
                end: common.num_reqs,
            },
        };
        let range = rows.start as usize..rows.end as usize;
        let starts = &common.query_start_loc_cpu[range.start..=range.end];
        let lens = &common.seq_lens_cpu_upper_bound[range];
        let dcp = config.parallel.dcp_world_size;
        let seq_lens = if dcp == 1 {
            lens.to_vec()
        } else {
            self.local_lens(lens, starts, side)
        };
        let mut paged_kv_indptr = Vec::new();
        paged_kv_indptr_into(&seq_lens, spec.block_size, &mut paged_kv_indptr);
        let mut paged_kv_last_page_len = Vec::with_capacity(seq_lens.len());
        last_page_lens_into(&seq_lens, spec.block_size, &mut paged_kv_last_page_len);
        // Under context parallelism a prefill's plan covers its context, which every query sees.
        let sees_all = !causal || (dcp > 1 && side == Side::Prefill);
        let group_size = match side {
            Side::Decode => self.group_size,
            Side::Prefill => self.group_size / dcp,
        };
        let work = work_list(
            &Batch {
                query_start_loc: starts,
                kv_lens: &seq_lens,
                paged_kv_indptr: &paged_kv_indptr,
                group_size,
                head_size: spec.head_size,
                causal: !sees_all,
            },
            self.grid,
        );
        let (q_len_per_req, cudagraph_batch_size) = match side {
            Side::Decode => self.decode_shape(split, common),
            Side::Prefill => (0, 0),
        };
        Plan {
            function: match side {
                Side::Decode if cudagraph_batch_size > 0 => PlanFunction::FastDecodePlan,
                Side::Decode => PlanFunction::BatchDecodePlan,
                Side::Prefill if dcp > 1 => PlanFunction::BatchDcpPrefillPlan,
                Side::Prefill => PlanFunction::BatchPrefillPlan,
            },
            qo_indptr: Tensor::RebasedQueryStartLoc(rows.clone()),
            paged_kv_indptr,
            paged_kv_indices: Tensor::GatherPages(rows),
            paged_kv_last_page_len,
            seq_lens,
            num_qo_heads: group_size * spec.num_kv_heads,
            num_kv_heads: spec.num_kv_heads,
            head_dim: spec.head_size,
            page_size: spec.block_size,
            causal,
            sm_scale: attention.scale,
            window_left: spec.sliding_window.map_or(-1, |window| window as i32 - 1),
            logits_soft_cap: attention.logits_soft_cap,
            q_data_type: attention.model_dtype,
            kv_data_type: spec.dtype,
            o_data_type: attention.model_dtype,
            fixed_split_size: match side {
                _ if !config.batch_invariant => -1,
                Side::Decode => BATCH_INVARIANT_DECODE_SPLIT,
                Side::Prefill => BATCH_INVARIANT_PREFILL_SPLIT,
            },
            disable_split_kv: config.batch_invariant,
            q_len_per_req,
            dcp_world_size: dcp,
            cudagraph_batch_size,
            work,
        }
    }

    /// This rank's share of the keys; of a prefill, of those before this step.
    fn local_lens(&self, lens: &[i32], starts: &[i32], side: Side) -> Vec<i32> {
        let parallel = &self.config.parallel;
        let mut local = Vec::with_capacity(lens.len());
        let context: Vec<i32>;
        let lens = match side {
            Side::Decode => lens,
            Side::Prefill => {
                context = lens
                    .iter()
                    .zip(starts.iter().zip(&starts[1..]))
                    .map(|(len, (start, end))| len - (end - start))
                    .collect();
                &context
            }
        };
        dcp_local_seq_lens_into(
            lens,
            parallel.dcp_world_size,
            parallel.dcp_rank,
            parallel.cp_kv_cache_interleave_size,
            &mut local,
        );
        local
    }

    /// Query tokens per request, and the rows of the captured graph that a pure decode batch replays, 0 for none.
    fn decode_shape(
        &self,
        split: &DecodePrefillSplit,
        common: &CommonAttentionMetadata,
    ) -> (u32, u32) {
        let q_len_per_req = if self.config.device.compute_capability.0 < 9 {
            // Padding that is no whole query a row must make the quotient no other query length.
            let starts = &common.query_start_loc_cpu;
            let query_len = starts[1].abs_diff(starts[0]);
            (split.num_decode_tokens / split.num_decodes.max(1))
                .min(common.max_query_len)
                .max(query_len)
        } else {
            1
        };
        let graph = split.num_prefills == 0
            && self.max_graph_tokens > 0
            && split.num_decode_tokens <= self.max_graph_tokens;
        (q_len_per_req, if graph { split.num_decodes } else { 0 })
    }
}
