//! FLASHMLA and its relatives, plainly: decodes of one length whose keys the kernel divides, and prefills with the chunks of the
//! field's plan.

use timetable_types::{
    BuildError, BuilderConfig, BuilderInfo, CaptureShape, Causal, CommonAttentionMetadata,
    CudagraphSupport, DcpLocal, DcpSource, Family, HostInput, Input, LaunchPromise, Metadata,
    RowRange, Tensor, TensorSlice,
    batch::{
        BatchRows, ContextWorkspace, DecodeRule, chunked_prefill_workspace_size,
        dcp_local_seq_len_upper_bound, max_decode_query_len, split_decodes_and_prefills,
    },
    flash_mla::{self, DecodeSchedule, MlaDecode, MlaPrefill},
};

use super::{declined, invalid, row_vector};
use crate::{
    builder::{BuildFault, MetadataBuilder},
    resolve::Dcp,
};

pub(super) struct PlainFlashMla {
    config: BuilderConfig,
    info: BuilderInfo,
    workspace: ContextWorkspace,
}

impl PlainFlashMla {
    pub(super) fn new(config: BuilderConfig) -> Result<Self, BuildError> {
        let rows = chunked_prefill_workspace_size(&config);
        let workspace = ContextWorkspace::new(&config, rows).ok_or_else(|| {
            invalid(format!(
                "a workspace of whole blocks of {} tokens on {} ranks has more than 2^30 rows: choose smaller ones",
                config.kv_cache_spec.block_size, config.parallel.dcp_world_size
            ))
        })?;
        let info = BuilderInfo {
            name: "flash-mla, plain".to_owned(),
            cudagraph_support: CudagraphSupport::UniformBatch,
            reorder_batch_threshold: Some(max_decode_query_len(&config)),
            varlen_cudagraph_max_query_len: None,
            supports_update_block_table: false,
            supports_draft_decode_metadata_update: false,
            needs: vec![HostInput::QueryStartLocCpu, HostInput::SeqLensCpuUpperBound],
            max_scratch_bytes: 0,
        };
        Ok(PlainFlashMla {
            config,
            info,
            workspace,
        })
    }

    fn decode(&self, common: &CommonAttentionMetadata, rows: u32, max_seq_len: u32) -> MlaDecode {
        let sharded = Dcp::of(&self.config).world > 1;
        let whole = part(Input::SeqLens, 0, rows, common.num_reqs);
        let starts = &common.query_start_loc_cpu[..=rows as usize];
        MlaDecode {
            block_table: part(Input::BlockTable, 0, rows, common.num_reqs),
            seq_lens: match sharded {
                true => Tensor::DcpLocal(DcpLocal {
                    source: DcpSource::SeqLens,
                    rows: RowRange {
                        start: 0,
                        end: rows,
                    },
                }),
                false => whole.clone(),
            },
            dcp_tot_seq_lens: sharded.then_some(whole),
            query_start_loc: None,
            max_query_len: starts
                .windows(2)
                .fold(0, |longest, pair| longest.max(pair[1] - pair[0]))
                as u32,
            max_seq_len,
            max_num_splits: 0,
            schedule: DecodeSchedule::Lazy,
        }
    }

    fn prefill(
        &self,
        common: &CommonAttentionMetadata,
        first: usize,
    ) -> Result<MlaPrefill, BuildFault> {
        let rows = common.num_reqs;
        let lens = row_vector(
            "seq_lens_cpu_upper_bound",
            &common.seq_lens_cpu_upper_bound,
            rows as usize,
        )?;
        let starts = &common.query_start_loc_cpu[first..];
        let rebased: Vec<i32> = starts.iter().map(|start| start - starts[0]).collect();
        let query_lens: Vec<i32> = rebased.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let context_lens = lens[first..]
            .iter()
            .zip(&query_lens)
            .map(|(len, query)| len - query)
            .collect();
        let dtype = self.config.attention.model_dtype;
        Ok(MlaPrefill {
            block_table: part(Input::BlockTable, first as u32, rows, rows),
            query_start_loc: Tensor::RebasedQueryStartLoc(RowRange {
                start: first as u32,
                end: rows,
            }),
            max_query_len: common.max_query_len,
            chunked_context: self
                .workspace
                .chunked_context(context_lens, &rebased)
                .map_err(|error| BuildFault::Declined(invalid(error.to_string())))?,
            q_data_type: dtype,
            output_dtype: dtype,
            query_lens_cpu: query_lens,
            use_dense_mha: false,
        })
    }
}

/// Rows [start, end) of the host's `input`, which has `rows`; the whole tensor if those are all.
fn part(source: Input, start: u32, end: u32, rows: u32) -> Tensor {
    match (start, end) == (0, rows) {
        true => Tensor::Input(source),
        false => Tensor::Slice(TensorSlice { source, start, end }),
    }
}

impl MetadataBuilder for PlainFlashMla {
    fn family(&self) -> Family {
        Family::FlashMla
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
        if common.causal != Causal::All(true) {
            return Err(declined(
                "Non-causal multi-token MLA requires an explicitly supported attention group. (give causal true for the step)"
                    .to_owned(),
            ));
        }
        let rows = common.num_reqs as usize;
        row_vector("query_start_loc_cpu", &common.query_start_loc_cpu, rows + 1)?;
        let rule = DecodeRule {
            decode_threshold: max_decode_query_len(&self.config),
            require_uniform: true,
            treat_short_extends_as_decodes: true,
        };
        let split = match rows {
            0 => Default::default(),
            _ => split_decodes_and_prefills(&BatchRows::from(common), rule)
                .map_err(|error| BuildFault::Declined(invalid(error.to_string())))?,
        };
        let dcp = Dcp::of(&self.config);
        let max_seq_len = match dcp.world > 1 && split.num_decodes > 0 {
            true => dcp_local_seq_len_upper_bound(common.max_seq_len, dcp.world, dcp.interleave),
            false => common.max_seq_len,
        };
        let decodes = split.num_decodes;
        Ok(Metadata::FlashMla(flash_mla::Metadata {
            num_reqs: common.num_reqs,
            max_query_len: common.max_query_len,
            max_seq_len,
            num_actual_tokens: common.num_actual_tokens,
            query_start_loc: Tensor::Input(Input::QueryStartLoc),
            slot_mapping: Tensor::Input(Input::SlotMapping),
            num_decodes: decodes,
            num_decode_tokens: match split.num_prefills {
                0 => common.num_actual_tokens,
                _ => split.num_decode_tokens,
            },
            num_prefills: split.num_prefills,
            causal: true,
            head_dim: self.config.kv_cache_spec.head_size,
            prefill: match split.num_prefills {
                0 => None,
                _ => Some(self.prefill(common, decodes as usize)?),
            },
            decode: (decodes > 0).then(|| self.decode(common, decodes, max_seq_len)),
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
