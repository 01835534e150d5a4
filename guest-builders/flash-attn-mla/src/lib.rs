//! FLASH_ATTN_MLA's reference builder: the common record of the MLA backends, and what the field asks FlashAttention 3's scheduler
//! for its decodes. After vLLM 0.33 `FlashAttnMLAMetadataBuilder._build_decode`.
//!
//! It must never know what the common record holds: that is the SDK's.

use timetable_guest::{
    Builder, export_flash_mla,
    flash_mla::{Backend, Choice, Decodes, Record},
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        CudagraphMode, LaunchPromise,
        flash_mla::{DecodeSchedule, Metadata, MlaSchedulerMetadataCall},
    },
};

const FLASH_ATTN_MLA: Backend = Backend {
    name: "FLASH_ATTN_MLA",
    base_threshold: 512,
    varlen: true,
    dcp_with_varlen: true,
    supports_draft_decode_metadata_update: false,
};

/// Decodes of any length to 512 tokens, scheduled ahead of time.
pub struct AheadOfTime {
    record: Record,
    /// Does FlashAttention 3 schedule ahead of time?
    scheduled: bool,
    /// Do full CUDA graphs replay this metadata?
    full_graphs: bool,
}

impl Builder for AheadOfTime {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        let full_graphs = matches!(
            config.cudagraph.mode,
            CudagraphMode::Full | CudagraphMode::FullDecodeOnly | CudagraphMode::FullAndPiecewise
        );
        Ok(Self {
            scheduled: config.device.flash_attn_version == 3,
            full_graphs,
            record: Record::new(config, FLASH_ATTN_MLA)?,
        })
    }

    fn info(&self) -> BuilderInfo {
        self.record.info("flash-attn-mla")
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        let config = self.record.config();
        let most = if config.batch_invariant {
            1
        } else {
            config.max_num_splits.max(1)
        };
        self.record.launch_promise(shape, most)
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        self.record.build(common, |decodes| self.choose(decodes))
    }

    fn build_for_cudagraph_capture(
        &mut self,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildError> {
        self.record
            .build_for_cudagraph_capture(common, |decodes| self.choose(decodes))
    }
}

impl AheadOfTime {
    fn choose(&self, decodes: &Decodes<'_>) -> Choice {
        let config = self.record.config();
        // A bound where a graph may be captured, 0 (the kernel's heuristic) elsewhere.
        let max_num_splits = if config.batch_invariant {
            1
        } else if self.full_graphs && decodes.num_tokens <= config.cudagraph.max_capture_size {
            config.max_num_splits
        } else {
            0
        };
        let batch_size = decodes.query_start_loc.len() as u32 - 1;
        let schedule = if self.scheduled {
            DecodeSchedule::FlashAttn(MlaSchedulerMetadataCall {
                batch_size,
                max_seqlen_q: decodes.max_query_len,
                max_seqlen_k: decodes.max_seq_len,
                num_heads_q: config.attention.num_heads * config.parallel.dcp_world_size,
                num_heads_kv: 1,
                headdim: config.attention.qk_rope_head_dim,
                headdim_v: config.attention.kv_lora_rank,
                cache_seqlens: decodes.seq_lens_tensor.clone(),
                qkv_dtype: config.kv_cache_spec.dtype,
                cu_seqlens_q: decodes.query_start_loc_tensor.clone(),
                page_size: config.kv_cache_spec.block_size,
                causal: true,
                num_splits: max_num_splits,
                // One semaphore, and four vectors of the rows rounded up to four.
                scheduler_metadata_len: 1 + batch_size.next_multiple_of(4) * 4,
            })
        } else {
            DecodeSchedule::Lazy
        };
        Choice {
            schedule,
            max_num_splits,
            with_query_start_loc: true,
        }
    }
}

export_flash_mla!(AheadOfTime);
