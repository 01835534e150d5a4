//! FLASHINFER's reference builder: decodes and prefills apart, their pages by reference, and for each part that FlashInfer's
//! own kernels would run, a work list balanced over the workers. After vLLM 0.33 `FlashInferMetadataBuilder.build`; the work
//! list is our own.
//!
//! It must never know the kernels, nor a block id: pages are a prefix of the host's own rows.

mod part;
mod plan;
mod trtllm;

pub use plan::{Batch, Grid, most_items, most_tiles, work_list};

use part::Side;
use timetable_guest::{
    Builder,
    batch::{BatchRows, DecodePrefillSplit, DecodeRule, split_decodes_and_prefills},
    decline, export_flashinfer,
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, Causal, CommonAttentionMetadata,
        CudagraphMode, CudagraphSupport, Dtype, ErrorKind, HostInput, Input, LaunchPromise, Tensor,
        flashinfer::{Decode, Metadata, Prefill},
    },
};

/// The reference builder.
pub struct PlannedWork {
    config: BuilderConfig,
    grid: Grid,
    /// Query heads that share a KV head.
    group_size: u32,
    decode_threshold: u32,
    /// Do TensorRT-LLM's or XQA's kernels run the decodes?
    trtllm_decode: bool,
    /// Do TensorRT-LLM's kernels run causal prefills?
    trtllm_prefill: bool,
    /// Most decode tokens of a captured graph; 0 without full graphs.
    max_graph_tokens: u32,
}

impl Builder for PlannedWork {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        let (device, attention, spec) = (&config.device, &config.attention, &config.kv_cache_spec);
        for (name, value) in [
            ("kv_cache_spec.block_size", spec.block_size),
            ("kv_cache_spec.num_kv_heads", spec.num_kv_heads),
            ("attention.num_heads", attention.num_heads),
            ("parallel.dcp_world_size", config.parallel.dcp_world_size),
            (
                "parallel.cp_kv_cache_interleave_size",
                config.parallel.cp_kv_cache_interleave_size,
            ),
        ] {
            if value == 0 || value > 1 << 20 {
                return Err(decline(
                    ErrorKind::InvalidValue,
                    format!("{name} is {value}; it must be from 1 to 2^20"),
                ));
            }
        }
        if !attention.num_heads.is_multiple_of(spec.num_kv_heads) {
            return Err(decline(
                ErrorKind::InvalidValue,
                format!(
                    "attention.num_heads {} is not a multiple of kv_cache_spec.num_kv_heads {}",
                    attention.num_heads, spec.num_kv_heads
                ),
            ));
        }
        let has_dcp = config.parallel.dcp_world_size > 1;
        let trtllm_decode = device.trtllm_attention && !has_dcp;
        let trtllm_prefill = trtllm_decode && !device.xqa;
        if attention.has_sinks && !trtllm_prefill {
            return Err(decline(
                ErrorKind::NotImplemented,
                "FlashInfer backend currently does not support attention sinks, please use trtllm on blackwell or flash \
                 attention on earlier GPUs.",
            ));
        }
        if attention.kv_cache_dtype == "nvfp4" && !trtllm_prefill {
            return Err(decline(
                ErrorKind::NotImplemented,
                format!(
                    "--kv-cache-dtype {} requires the SM100 trtllm-gen FlashInfer path.",
                    attention.kv_cache_dtype
                ),
            ));
        }
        let speculative = config.scheduler.num_speculative_tokens;
        // Before compute capability 9 FlashInfer's own decode takes several query tokens.
        let decode_threshold = if has_dcp || !(trtllm_decode || Self::is_old(&config)) {
            1
        } else {
            1 + speculative
        };
        let full_graphs = matches!(
            config.cudagraph.mode,
            CudagraphMode::Full | CudagraphMode::FullDecodeOnly | CudagraphMode::FullAndPiecewise
        );
        let max_graph_tokens = if full_graphs {
            (config
                .scheduler
                .max_num_seqs
                .saturating_mul(1 + speculative))
            .min(config.cudagraph.max_capture_size)
        } else {
            0
        };
        let is_gpu = device.compute_capability.0 > 0;
        let workers = (device.num_workers.max(1)).saturating_mul(device.ctas_per_worker.max(1));
        Ok(Self {
            grid: Grid {
                workers: if is_gpu {
                    workers.div_ceil(spec.num_kv_heads)
                } else {
                    workers
                },
                is_gpu,
                page_size: spec.block_size,
                max_splits: if config.batch_invariant {
                    1
                } else {
                    config.max_num_splits.max(1)
                },
            },
            group_size: attention.num_heads / spec.num_kv_heads * config.parallel.dcp_world_size,
            decode_threshold,
            trtllm_decode,
            trtllm_prefill,
            max_graph_tokens,
            config,
        })
    }

    fn info(&self) -> BuilderInfo {
        let has_dcp = self.config.parallel.dcp_world_size > 1;
        let uniform_batch = !has_dcp && (self.trtllm_decode || Self::is_old(&self.config));
        let largest = CaptureShape {
            num_tokens: self.config.scheduler.max_num_batched_tokens,
            num_reqs: self.config.scheduler.max_num_seqs,
            max_query_len: self.config.scheduler.max_num_batched_tokens,
            uniform_query_len: None,
        };
        BuilderInfo {
            name: "flashinfer, balanced work list".to_owned(),
            cudagraph_support: if uniform_batch {
                CudagraphSupport::UniformBatch
            } else {
                CudagraphSupport::UniformSingleTokenDecode
            },
            reorder_batch_threshold: Some(self.decode_threshold),
            varlen_cudagraph_max_query_len: None,
            supports_update_block_table: false,
            supports_draft_decode_metadata_update: self.trtllm_prefill,
            needs: vec![HostInput::QueryStartLocCpu, HostInput::SeqLensCpuUpperBound],
            max_scratch_bytes: self.launch_promise(&largest).scratch_bytes,
        }
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        let tiles = most_tiles(shape, self.group_size);
        let items = most_items(tiles, self.grid);
        let spec = &self.config.kv_cache_spec;
        // A partial result is an f32 output row and a log-sum-exp for each packed query row and KV head. A tile of many rows
        // is made of tokens, so the rows of all items are at most the tokens' times the chunks that a tile can have.
        let row_bytes = (u64::from(spec.head_size_v) + 1) * 4 * u64::from(spec.num_kv_heads);
        let tile = u64::from(plan::tile_rows(
            u64::from(shape.max_query_len) * u64::from(self.group_size),
            spec.head_size,
        ));
        LaunchPromise {
            max_num_splits: self.grid.max_splits,
            max_work_items: u32::try_from(items).unwrap_or(u32::MAX),
            scratch_bytes: items * tile * row_bytes,
            max_query_len: shape.max_query_len,
            uniform_query_len: shape.uniform_query_len,
        }
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        let causal = match common.causal {
            Causal::All(causal) => causal,
            Causal::PerRequest => {
                return Err(decline(
                    ErrorKind::NotImplemented,
                    "FLASHINFER takes one causal flag for the whole batch; route layers with per-request causality to \
                     FLASH_ATTN",
                ));
            }
        };
        if !causal && self.config.parallel.dcp_world_size > 1 {
            return Err(decline(
                ErrorKind::NotImplemented,
                "FlashInfer non-causal prefill is not supported with DCP yet.",
            ));
        }
        let rows = common.num_reqs as usize;
        if common.query_start_loc_cpu.len() != rows + 1 {
            return Err(decline(
                ErrorKind::InvalidValue,
                format!(
                    "query_start_loc_cpu has {} entries for {rows} requests; it must have one more than requests",
                    common.query_start_loc_cpu.len()
                ),
            ));
        }
        let split = self.split(common, causal)?;
        let decode_by_trtllm = self.trtllm_decode && (causal || self.config.device.xqa);
        let prefill_by_trtllm = self.trtllm_prefill && causal;
        let has_plan = (split.num_decodes > 0 && !decode_by_trtllm)
            || (split.num_prefills > 0 && !prefill_by_trtllm);
        if has_plan && common.seq_lens_cpu_upper_bound.len() != rows {
            return Err(decline(
                ErrorKind::InvalidValue,
                format!(
                    "seq_lens_cpu_upper_bound has {} entries for {rows} requests; FLASHINFER plans from host lengths",
                    common.seq_lens_cpu_upper_bound.len()
                ),
            ));
        }
        let decode = (split.num_decodes > 0).then(|| {
            if decode_by_trtllm {
                Decode::Trtllm(self.trtllm_decode(common, &split, causal))
            } else {
                Decode::Wrapper(self.plan(common, &split, Side::Decode, causal))
            }
        });
        let prefill = (split.num_prefills > 0).then(|| {
            if prefill_by_trtllm {
                Prefill::Trtllm(trtllm::prefill(common, &split))
            } else {
                Prefill::Wrapper(self.plan(common, &split, Side::Prefill, causal))
            }
        });
        Ok(Metadata {
            kv_cache_layout: self.config.attention.kv_cache_layout,
            num_actual_tokens: common.num_actual_tokens,
            slot_mapping: Tensor::Input(Input::SlotMapping),
            q_data_type_prefill: self.query_dtype(self.trtllm_prefill),
            q_data_type_decode: self.query_dtype(self.trtllm_decode),
            num_decodes: split.num_decodes,
            num_decode_tokens: split.num_decode_tokens,
            num_prefills: split.num_prefills,
            num_prefill_tokens: split.num_prefill_tokens,
            causal,
            prefill,
            decode,
        })
    }
}

impl PlannedWork {
    fn is_old(config: &BuilderConfig) -> bool {
        config.device.compute_capability.0 < 9
    }

    /// Decodes first; without causality only XQA has decodes at all.
    fn split(
        &self,
        common: &CommonAttentionMetadata,
        causal: bool,
    ) -> Result<DecodePrefillSplit, BuildError> {
        if !causal && !self.config.device.xqa {
            return Ok(DecodePrefillSplit {
                num_prefills: common.num_reqs,
                num_prefill_tokens: common.num_actual_tokens,
                ..DecodePrefillSplit::default()
            });
        }
        let rule = DecodeRule {
            decode_threshold: self.decode_threshold,
            require_uniform: !(self.trtllm_decode && self.config.device.xqa),
            treat_short_extends_as_decodes: true,
        };
        split_decodes_and_prefills(&BatchRows::from(common), rule)
            .map_err(|error| decline(ErrorKind::InvalidValue, error.to_string()))
    }

    /// Queries are quantised where the kernels of an fp8 cache want them so.
    fn query_dtype(&self, by_trtllm: bool) -> Dtype {
        let cache = self.config.kv_cache_spec.dtype;
        if by_trtllm && matches!(cache, Dtype::Float8E4m3 | Dtype::Float8E5m2) {
            cache
        } else {
            self.config.attention.model_dtype
        }
    }
}

export_flashinfer!(PlannedWork);
