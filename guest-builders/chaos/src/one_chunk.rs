//! A good builder of FLASHINFER that decides nothing: one chunk as long as the longest request, work items in row order. It
//! must never know chaos.

use timetable_guest::{
    Builder,
    batch::{BatchRows, DecodePrefillSplit, DecodeRule, split_decodes_and_prefills},
    decline,
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, Causal, CommonAttentionMetadata,
        CudagraphSupport, ErrorKind, HostInput, Input, LaunchPromise, RowRange, Tensor,
        flashinfer::{Decode, Metadata, Plan, PlanFunction, Prefill, WorkList},
    },
};

/// Packed query rows of a tile.
const DECODE_TILE: u32 = 16;
const PREFILL_TILE: u32 = 64;

/// One chunk for every request.
pub struct OneChunk {
    config: BuilderConfig,
    /// Query heads that share a KV head.
    group_size: u32,
}

impl Builder for OneChunk {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        let (heads, kv_heads) = (
            config.attention.num_heads,
            config.kv_cache_spec.num_kv_heads,
        );
        if config.kv_cache_spec.block_size == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads)
        {
            return Err(decline(
                ErrorKind::InvalidValue,
                format!("{heads} query heads over {kv_heads} KV heads make no groups"),
            ));
        }
        if config.parallel.dcp_world_size > 1 {
            return Err(decline(
                ErrorKind::NotImplemented,
                "decode context parallelism is beyond this builder",
            ));
        }
        Ok(Self {
            group_size: heads / kv_heads,
            config,
        })
    }

    fn info(&self) -> BuilderInfo {
        BuilderInfo {
            name: "flashinfer, one chunk".to_owned(),
            cudagraph_support: CudagraphSupport::UniformSingleTokenDecode,
            reorder_batch_threshold: Some(1),
            varlen_cudagraph_max_query_len: None,
            supports_update_block_table: false,
            supports_draft_decode_metadata_update: false,
            needs: vec![HostInput::QueryStartLocCpu, HostInput::SeqLensCpuUpperBound],
            max_scratch_bytes: 0,
        }
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        let rows = u64::from(shape.num_tokens) * u64::from(self.group_size);
        let tiles = rows.div_ceil(u64::from(DECODE_TILE)) + u64::from(shape.num_reqs);
        LaunchPromise {
            max_num_splits: 1,
            max_work_items: u32::try_from(tiles).unwrap_or(u32::MAX),
            scratch_bytes: 0,
            max_query_len: shape.max_query_len,
            uniform_query_len: shape.uniform_query_len,
        }
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        let Causal::All(causal) = common.causal else {
            return Err(decline(
                ErrorKind::NotImplemented,
                "FLASHINFER takes one causal flag for the whole batch",
            ));
        };
        let rows = common.num_reqs as usize;
        let (starts, lens) = (
            &common.query_start_loc_cpu,
            &common.seq_lens_cpu_upper_bound,
        );
        if starts.len() != rows + 1 || lens.len() != rows {
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
        let decodes = split.num_decodes as usize;
        let plan = |rows: std::ops::Range<usize>, decode: bool| {
            self.plan(rows, starts, lens, decode, causal)
        };
        Ok(Metadata {
            kv_cache_layout: self.config.attention.kv_cache_layout,
            num_actual_tokens: common.num_actual_tokens,
            slot_mapping: Tensor::Input(Input::SlotMapping),
            q_data_type_prefill: self.config.attention.model_dtype,
            q_data_type_decode: self.config.attention.model_dtype,
            num_decodes: split.num_decodes,
            num_decode_tokens: split.num_decode_tokens,
            num_prefills: split.num_prefills,
            num_prefill_tokens: split.num_prefill_tokens,
            causal,
            prefill: (split.num_prefills > 0).then(|| Prefill::Wrapper(plan(decodes..rows, false))),
            decode: (decodes > 0).then(|| Decode::Wrapper(plan(0..decodes, true))),
        })
    }
}

impl OneChunk {
    fn plan(
        &self,
        rows: std::ops::Range<usize>,
        starts: &[i32],
        lens: &[i32],
        decode: bool,
        causal: bool,
    ) -> Plan {
        let (attention, spec) = (&self.config.attention, &self.config.kv_cache_spec);
        let page = spec.block_size;
        let part = RowRange {
            start: rows.start as u32,
            end: rows.end as u32,
        };
        let query_of = |row: usize| (starts[row + 1] - starts[row]) as u32;
        let key_lens = &lens[rows.clone()];
        let mut paged_kv_indptr = vec![0];
        let mut pages = 0;
        for len in key_lens {
            pages += (*len as u32).div_ceil(page) as i32;
            paged_kv_indptr.push(pages);
        }
        let last_page = |len: &i32| match *len {
            0 => 0,
            len => (len - 1) % page as i32 + 1,
        };
        let tile = if decode { DECODE_TILE } else { PREFILL_TILE };
        let work = self.work(rows.clone().map(query_of), key_lens, tile);
        Plan {
            function: if decode {
                PlanFunction::BatchDecodePlan
            } else {
                PlanFunction::BatchPrefillPlan
            },
            qo_indptr: Tensor::RebasedQueryStartLoc(part.clone()),
            paged_kv_indptr,
            paged_kv_indices: Tensor::GatherPages(part),
            paged_kv_last_page_len: key_lens.iter().map(last_page).collect(),
            seq_lens: key_lens.to_vec(),
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
            q_len_per_req: if decode {
                rows.map(query_of).max().unwrap_or(1).max(1)
            } else {
                1
            },
            dcp_world_size: 1,
            cudagraph_batch_size: 0,
            work,
        }
    }

    fn work(&self, queries: impl Iterator<Item = u32>, key_lens: &[i32], tile: u32) -> WorkList {
        let page = self.config.kv_cache_spec.block_size;
        let longest = key_lens.iter().fold(1, |most, len| most.max(*len)) as u32;
        let (mut request_indices, mut qo_tile_indices) = (Vec::new(), Vec::new());
        for (row, query) in queries.enumerate() {
            for index in 0..(query * self.group_size).div_ceil(tile) {
                request_indices.push(row as i32);
                qo_tile_indices.push(index as i32);
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
            merge_indptr: (0..=items as i32).collect(),
            split_kv: false,
        }
    }
}
