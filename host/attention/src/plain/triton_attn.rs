//! TRITON_ATTN, plainly: the batch's own tensors, the kernel's 2D form for every step.

use timetable_types::{
    BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
    CudagraphSupport, Dtype, ErrorKind, Family, HostInput, Input, KvCacheSpecKind, LaunchPromise,
    Matrix, Metadata, Scratch, Tensor, batch::compute_mm_prefix_ranges, triton_attn,
};

use super::invalid;
use crate::{
    builder::{BuildFault, MetadataBuilder},
    resolve::Dcp,
};

pub(super) struct PlainTritonAttn {
    config: BuilderConfig,
    info: BuilderInfo,
}

impl PlainTritonAttn {
    pub(super) fn new(config: BuilderConfig) -> Result<Self, BuildError> {
        let world = Dcp::of(&config).world;
        if world > 1 {
            return Err(BuildError {
                kind: ErrorKind::NotImplemented,
                message: format!(
                    "DCP not supported: dcp_world_size is {world}; run TRITON_ATTN with 1, or choose FLASH_ATTN or FLASHINFER"
                ),
            });
        }
        let info = BuilderInfo {
            name: "triton-attn, plain".to_owned(),
            cudagraph_support: CudagraphSupport::Always,
            reorder_batch_threshold: None,
            varlen_cudagraph_max_query_len: None,
            supports_update_block_table: false,
            supports_draft_decode_metadata_update: true,
            needs: vec![HostInput::MmReqDocRanges, HostInput::EncoderSeqLensCpu],
            max_scratch_bytes: 0,
        };
        Ok(PlainTritonAttn { config, info })
    }
}

impl MetadataBuilder for PlainTritonAttn {
    fn family(&self) -> Family {
        Family::TritonAttn
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
        let (spec, attention) = (&self.config.kv_cache_spec, &self.config.attention);
        let rows = common.num_reqs;
        let ranges = &common.mm_req_doc_ranges;
        if let Some(range) = ranges.iter().find(|range| range.row >= rows) {
            return Err(BuildFault::Declined(invalid(format!(
                "mm_req_doc_ranges names row {} of {rows}",
                range.row
            ))));
        }
        let encoder = match spec.kind {
            KvCacheSpecKind::CrossAttention => common.encoder.as_ref(),
            _ => None,
        };
        let longest_encoder = encoder.map_or(0, |encoder| {
            let lens = encoder.encoder_seq_lens_cpu.iter();
            lens.fold(0, |max, &len| max.max(len)) as u32
        });
        let padded = spec
            .head_size_v
            .checked_next_power_of_two()
            .unwrap_or(u32::MAX);
        let scratch = |shape: &[u32]| Scratch {
            shape: shape.to_vec(),
            dtype: Dtype::Float32,
        };
        let heads = attention.num_heads;
        Ok(Metadata::TritonAttn(triton_attn::Metadata {
            num_actual_tokens: common.num_actual_tokens,
            max_query_len: common.max_query_len,
            query_start_loc: Tensor::Input(Input::QueryStartLoc),
            max_seq_len: common.max_seq_len.max(longest_encoder),
            seq_lens: Tensor::Input(match encoder {
                Some(_) => Input::EncoderSeqLens,
                None => Input::SeqLens,
            }),
            block_table: Tensor::Input(Input::BlockTable),
            slot_mapping: Tensor::Input(Input::SlotMapping),
            causal: common.causal.clone(),
            seq_threshold_3d: 0,
            num_par_softmax_segments: 1,
            softmax_segm_output: scratch(&[0, heads, 1, padded]),
            softmax_segm_max: scratch(&[0, heads, 1]),
            softmax_segm_expsum: scratch(&[0, heads, 1]),
            mm_prefix_range: compute_mm_prefix_ranges(rows as usize, ranges).map(|spans| {
                Tensor::Matrix(Matrix {
                    rows,
                    columns: 2 * spans.max_ranges as u32,
                    values: spans.data,
                })
            }),
            rswa_prefix_lens: attention
                .use_rswa
                .then_some(Tensor::Input(Input::RswaPrefixLens)),
            rswa_window: if attention.use_rswa {
                attention.rswa_window
            } else {
                0
            },
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
