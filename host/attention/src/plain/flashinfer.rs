//! FLASHINFER, plainly: one chunk as long as the longest request, work items in request order, equal runs of them for the
//! workers.

use timetable_types::{
    BuildError, BuilderConfig, BuilderInfo, CaptureShape, Causal, CommonAttentionMetadata,
    CudagraphSupport, Dtype, Family, HostInput, Input, LaunchPromise, Metadata, RowRange, Tensor,
    batch::{BatchRows, DecodePrefillSplit, DecodeRule, split_decodes_and_prefills},
    flashinfer::{self, Decode, Plan, PlanFunction, Prefill, WorkList},
};

use super::{declined, invalid, row_vector};
use crate::{
    builder::{BuildFault, MetadataBuilder},
    resolve::Dcp,
};

/// Packed query rows of one tile: small for decodes, whose tiles hold one request's heads.
const DECODE_TILE: u32 = 16;
const PREFILL_TILE: u32 = 64;

pub(super) struct PlainFlashinfer {
    config: BuilderConfig,
    info: BuilderInfo,
}

impl PlainFlashinfer {
    pub(super) fn new(config: BuilderConfig) -> Result<Self, BuildError> {
        let (heads, kv_heads) = (
            config.attention.num_heads,
            config.kv_cache_spec.num_kv_heads,
        );
        if heads % kv_heads != 0 {
            return Err(invalid(format!(
                "num_heads {heads} must be a multiple of num_kv_heads {kv_heads}"
            )));
        }
        let windows = &config.attention.sliding_windows;
        if windows.len() > 1 {
            return Err(invalid(format!(
                "Window left is not the same for all layers ({windows:?}). One potential fix is to set \
                 disable_sliding_window=True"
            )));
        }
        let info = BuilderInfo {
            name: "flashinfer, plain".to_owned(),
            cudagraph_support: CudagraphSupport::UniformSingleTokenDecode,
            reorder_batch_threshold: Some(1),
            varlen_cudagraph_max_query_len: None,
            supports_update_block_table: false,
            supports_draft_decode_metadata_update: false,
            needs: vec![HostInput::QueryStartLocCpu, HostInput::SeqLensCpuUpperBound],
            max_scratch_bytes: 0,
        };
        Ok(PlainFlashinfer { config, info })
    }

    fn plan(
        &self,
        part: RowRange,
        starts: &[i32],
        lens: &[i32],
        decode: bool,
        causal: bool,
    ) -> Plan {
        let (attention, spec) = (&self.config.attention, &self.config.kv_cache_spec);
        let dcp = Dcp::of(&self.config);
        let rows = part.start as usize..part.end as usize;
        let query_of = |row: usize| starts[row + 1] - starts[row];
        let key_lens: Vec<i32> = rows
            .clone()
            .map(|row| match (dcp.world > 1, decode) {
                (false, _) => lens[row],
                (true, true) => dcp.local_len(lens[row]),
                (true, false) => dcp.local_len(lens[row] - query_of(row)),
            })
            .collect();
        let page = spec.block_size;
        let mut paged_kv_indptr = Vec::with_capacity(key_lens.len() + 1);
        let mut pages = 0u32;
        paged_kv_indptr.push(0);
        for &len in &key_lens {
            pages += (len as u32).div_ceil(page);
            paged_kv_indptr.push(pages as i32);
        }
        let num_qo_heads = attention.num_heads * if decode { dcp.world } else { 1 };
        let group = num_qo_heads / spec.num_kv_heads;
        let tile = if decode { DECODE_TILE } else { PREFILL_TILE };
        let work = self.work(rows.clone().map(query_of), &key_lens, group, tile);
        Plan {
            function: match (decode, dcp.world > 1) {
                (true, _) => PlanFunction::BatchDecodePlan,
                (false, false) => PlanFunction::BatchPrefillPlan,
                (false, true) => PlanFunction::BatchDcpPrefillPlan,
            },
            qo_indptr: Tensor::RebasedQueryStartLoc(part.clone()),
            paged_kv_indptr,
            paged_kv_indices: Tensor::GatherPages(part),
            paged_kv_last_page_len: key_lens
                .iter()
                .map(|&len| {
                    if len > 0 {
                        (len - 1) % page as i32 + 1
                    } else {
                        0
                    }
                })
                .collect(),
            seq_lens: key_lens,
            num_qo_heads,
            num_kv_heads: spec.num_kv_heads,
            head_dim: spec.head_size,
            page_size: page,
            causal,
            sm_scale: attention.scale,
            // The spec counts the current token too.
            window_left: spec.sliding_window.map_or(-1, |window| window as i32 - 1),
            logits_soft_cap: attention.logits_soft_cap,
            q_data_type: attention.model_dtype,
            kv_data_type: self.kv_data_type(),
            o_data_type: attention.model_dtype,
            fixed_split_size: -1,
            disable_split_kv: self.config.batch_invariant,
            q_len_per_req: if decode {
                rows.map(query_of).max().unwrap_or(1).max(1) as u32
            } else {
                1
            },
            dcp_world_size: dcp.world,
            cudagraph_batch_size: 0,
            work,
        }
    }

    fn work(
        &self,
        queries: impl Iterator<Item = i32>,
        key_lens: &[i32],
        group: u32,
        tile: u32,
    ) -> WorkList {
        let page = self.config.kv_cache_spec.block_size;
        let longest = key_lens.iter().fold(1, |max, &len| max.max(len)) as u32;
        let (mut request_indices, mut qo_tile_indices) = (Vec::new(), Vec::new());
        for (row, query) in queries.enumerate() {
            let tiles = (u64::from(query as u32) * u64::from(group)).div_ceil(u64::from(tile));
            for index in 0..tiles as i32 {
                request_indices.push(row as i32);
                qo_tile_indices.push(index);
            }
        }
        let items = request_indices.len();
        let device = &self.config.device;
        let workers = (device.num_workers.max(1) as usize)
            .saturating_mul(device.ctas_per_worker.max(1) as usize)
            .clamp(1, items.max(1));
        WorkList {
            kv_chunk_size: longest.div_ceil(page) * page,
            cta_tile_q: tile,
            kv_tile_indices: vec![0; items],
            request_indices,
            qo_tile_indices,
            worker_indptr: (0..=workers)
                .map(|worker| (worker * items / workers) as i32)
                .collect(),
            // One partial result for each tile: nothing to merge.
            merge_indptr: (0..=items as i32).collect(),
            split_kv: false,
        }
    }

    fn kv_data_type(&self) -> Dtype {
        match self.config.attention.kv_cache_dtype.as_str() {
            "fp8" | "fp8_e4m3" => Dtype::Float8E4m3,
            "fp8_e5m2" => Dtype::Float8E5m2,
            _ => self.config.kv_cache_spec.dtype,
        }
    }
}

impl MetadataBuilder for PlainFlashinfer {
    fn family(&self) -> Family {
        Family::Flashinfer
    }

    fn info(&self) -> &BuilderInfo {
        &self.info
    }

    fn launch_promise(&mut self, shape: &CaptureShape) -> Result<LaunchPromise, BuildFault> {
        let dcp = Dcp::of(&self.config);
        let group = u64::from(self.config.attention.num_heads) * u64::from(dcp.world)
            / u64::from(self.config.kv_cache_spec.num_kv_heads);
        let rows = u64::from(shape.num_reqs);
        let tiles = (u64::from(shape.num_tokens) * group).div_ceil(u64::from(DECODE_TILE)) + rows;
        Ok(LaunchPromise {
            max_num_splits: 1,
            max_work_items: u32::try_from(tiles).unwrap_or(u32::MAX),
            scratch_bytes: 0,
            max_query_len: shape.max_query_len,
            uniform_query_len: shape.uniform_query_len,
        })
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildFault> {
        let Causal::All(causal) = common.causal else {
            return Err(declined(
                "causal per request is not supported by FLASHINFER; use FLASH_ATTN".to_owned(),
            ));
        };
        let dcp = Dcp::of(&self.config);
        if !causal && dcp.world > 1 {
            return Err(declined(
                "FlashInfer non-causal prefill is not supported with DCP yet.".to_owned(),
            ));
        }
        let rows = common.num_reqs as usize;
        let starts = row_vector("query_start_loc_cpu", &common.query_start_loc_cpu, rows + 1)?;
        let lens = row_vector(
            "seq_lens_cpu_upper_bound",
            &common.seq_lens_cpu_upper_bound,
            rows,
        )?;
        let split = if rows == 0 {
            DecodePrefillSplit {
                num_decode_tokens: common.num_actual_tokens,
                ..DecodePrefillSplit::default()
            }
        } else if causal {
            split_decodes_and_prefills(&BatchRows::from(common), DecodeRule::default())
                .map_err(|error| BuildFault::Declined(invalid(error.to_string())))?
        } else {
            DecodePrefillSplit {
                num_prefills: common.num_reqs,
                num_prefill_tokens: common.num_actual_tokens,
                ..DecodePrefillSplit::default()
            }
        };
        let (decodes, prefills) = (split.num_decodes, split.num_prefills);
        let range = |start, end| RowRange { start, end };
        Ok(Metadata::Flashinfer(flashinfer::Metadata {
            kv_cache_layout: self.config.attention.kv_cache_layout,
            num_actual_tokens: common.num_actual_tokens,
            slot_mapping: Tensor::Input(Input::SlotMapping),
            q_data_type_prefill: self.config.attention.model_dtype,
            q_data_type_decode: self.config.attention.model_dtype,
            num_decodes: decodes,
            num_decode_tokens: split.num_decode_tokens,
            num_prefills: prefills,
            num_prefill_tokens: split.num_prefill_tokens,
            causal,
            prefill: (prefills > 0).then(|| {
                Prefill::Wrapper(self.plan(
                    range(decodes, common.num_reqs),
                    starts,
                    lens,
                    false,
                    causal,
                ))
            }),
            decode: (decodes > 0)
                .then(|| Decode::Wrapper(self.plan(range(0, decodes), starts, lens, true, causal))),
        }))
    }

    fn update_block_table(
        &mut self,
        _metadata: &Metadata,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        self.build(common, false)
    }
}
