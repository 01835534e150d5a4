//! FLASH_ATTN, plainly: the batch's own tensors, one split for each request, rows in their order.

use timetable_types::{
    BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata, CudagraphSupport, DcpLocal,
    DcpSource, Family, HostInput, Input, KvCacheSpecKind, LaunchPromise, Matrix, Metadata,
    RowRange, Tensor,
    flash_attn::{self, Schedule, TileOrder},
};

use super::{invalid, row_vector};
use crate::{
    batch::fill_mm_prefix_query_ranges,
    builder::{BuildFault, MetadataBuilder},
    resolve::Dcp,
};

pub(super) struct PlainFlashAttn {
    config: BuilderConfig,
    info: BuilderInfo,
}

impl PlainFlashAttn {
    pub(super) fn new(config: BuilderConfig) -> Self {
        let info = BuilderInfo {
            name: "flash-attn, plain".to_owned(),
            cudagraph_support: match config.device.flash_attn_version {
                3 | 4 => CudagraphSupport::Always,
                2 => CudagraphSupport::UniformBatch,
                _ => CudagraphSupport::Never,
            },
            reorder_batch_threshold: None,
            varlen_cudagraph_max_query_len: None,
            supports_update_block_table: true,
            supports_draft_decode_metadata_update: false,
            needs: vec![
                HostInput::QueryStartLocCpu,
                HostInput::SeqLensCpuUpperBound,
                HostInput::MmReqDocRanges,
                HostInput::EncoderSeqLensCpu,
            ],
            max_scratch_bytes: 0,
        };
        PlainFlashAttn { config, info }
    }

    /// (max_dcp_context_kv_len, dcp_context_kv_lens): this rank's share of the context.
    fn dcp_context(
        &self,
        common: &CommonAttentionMetadata,
    ) -> Result<(u32, Option<Tensor>), BuildFault> {
        let dcp = Dcp::of(&self.config);
        if dcp.world <= 1 {
            return Ok((0, None));
        }
        let rows = common.num_reqs as usize;
        let starts = row_vector("query_start_loc_cpu", &common.query_start_loc_cpu, rows + 1)?;
        // Without host lengths nobody knows that there is no context: the pass over it is kept.
        let lens = &common.seq_lens_cpu_upper_bound;
        let skip = lens.len() == rows
            && lens
                .iter()
                .zip(starts.windows(2))
                .all(|(&len, pair)| len <= pair[1] - pair[0]);
        let run = dcp.world.saturating_mul(dcp.interleave);
        let max = common
            .max_seq_len
            .div_ceil(run)
            .saturating_mul(dcp.interleave);
        let local = DcpLocal {
            source: DcpSource::ContextLens,
            rows: RowRange {
                start: 0,
                end: common.num_reqs,
            },
        };
        Ok((if skip { 0 } else { max }, Some(Tensor::DcpLocal(local))))
    }

    /// s32 [T, 2]: the span of a multimodal document that covers each scheduled token.
    fn mm_prefix(&self, common: &CommonAttentionMetadata) -> Result<Option<Tensor>, BuildFault> {
        if common.mm_req_doc_ranges.is_empty() {
            return Ok(None);
        }
        let rows = common.num_reqs as usize;
        let starts = row_vector("query_start_loc_cpu", &common.query_start_loc_cpu, rows + 1)?;
        let lens = row_vector(
            "seq_lens_cpu_upper_bound",
            &common.seq_lens_cpu_upper_bound,
            rows,
        )?;
        if let Some(range) = common
            .mm_req_doc_ranges
            .iter()
            .find(|range| range.row as usize >= rows)
        {
            return Err(BuildFault::Declined(invalid(format!(
                "mm_req_doc_ranges names row {} of {rows}",
                range.row
            ))));
        }
        let tokens = common.num_actual_tokens;
        let ranges = &common.mm_req_doc_ranges;
        let spans = fill_mm_prefix_query_ranges(starts, lens, ranges, tokens as usize);
        Ok(spans.map(|values| {
            Tensor::Matrix(Matrix {
                rows: tokens,
                columns: 2,
                values,
            })
        }))
    }
}

impl MetadataBuilder for PlainFlashAttn {
    fn family(&self) -> Family {
        Family::FlashAttn
    }

    fn info(&self) -> &BuilderInfo {
        &self.info
    }

    fn launch_promise(&mut self, shape: &CaptureShape) -> Result<LaunchPromise, BuildFault> {
        Ok(LaunchPromise {
            max_num_splits: 1,
            max_work_items: 0,
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
        let attention = &self.config.attention;
        let cross = self.config.kv_cache_spec.kind == KvCacheSpecKind::CrossAttention
            && common.encoder.is_some();
        let longest_encoder = common
            .encoder
            .iter()
            .flat_map(|encoder| &encoder.encoder_seq_lens_cpu)
            .fold(0, |max, &len| max.max(len)) as u32;
        let (max_dcp_context_kv_len, dcp_context_kv_lens) = self.dcp_context(common)?;
        Ok(Metadata::FlashAttn(flash_attn::Metadata {
            num_actual_tokens: common.num_actual_tokens,
            max_query_len: common.max_query_len,
            query_start_loc: Tensor::Input(Input::QueryStartLoc),
            max_seq_len: if cross {
                longest_encoder.max(common.max_seq_len)
            } else {
                common.max_seq_len
            },
            seq_lens: Tensor::Input(if cross {
                Input::EncoderSeqLens
            } else {
                Input::SeqLens
            }),
            block_table: Tensor::Input(Input::BlockTable),
            slot_mapping: Tensor::Input(Input::SlotMapping),
            causal: common.causal.clone(),
            max_dcp_context_kv_len,
            dcp_context_kv_lens,
            num_decode_reqs: 0,
            num_prefill_reqs: 0,
            num_decode_tokens: 0,
            num_prefill_tokens: 0,
            max_num_splits: 1,
            scheduler_metadata: None,
            mm_prefix_query_range: self.mm_prefix(common)?,
            rswa_prefix_lens: attention
                .use_rswa
                .then_some(Tensor::Input(Input::RswaPrefixLens)),
            rswa_window: if attention.use_rswa {
                attention.rswa_window
            } else {
                0
            },
            schedule: Schedule {
                max_num_splits: 1,
                num_splits: Vec::new(),
                tile_order: TileOrder::Natural,
            },
        }))
    }

    fn update_block_table(
        &mut self,
        metadata: &Metadata,
        _common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        // Table and slots are references: they resolve to the other group's tensors.
        Ok(metadata.clone())
    }
}
