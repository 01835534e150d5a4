//! The part of FLASH_ATTN's metadata that is the field's and not a policy: the record that every builder of the family
//! returns, before it adds its own schedule. After vLLM 0.33 `FlashAttentionMetadataBuilder.build`.
//!
//! It must never know how keys are split among workers; that is a builder's own business.

use timetable_types::{
    BuildError, BuilderConfig, BuilderInfo, Causal, CommonAttentionMetadata, CudagraphMode,
    CudagraphSupport, DcpLocal, DcpSource, Dtype, ErrorKind, HostInput, Input, Matrix, RowRange,
    Tensor,
    batch::{BatchRows, dcp_local_seq_len_upper_bound, split_decodes_prefills_and_extends},
    flash_attn::{Metadata, Schedule, SchedulerMetadataCall, TileOrder},
};

use crate::decline;

/// What the record needs to know of the configuration.
#[derive(Clone, Debug)]
pub struct Record {
    config: BuilderConfig,
    /// Is FlashAttention 3's ahead-of-time schedule in use?
    aot_schedule: bool,
    /// (left, right) in tokens, −1 for unlimited, of the ahead-of-time schedule.
    aot_window: (i32, i32),
    /// Do full CUDA graphs replay this metadata?
    full_graphs: bool,
}

impl Record {
    /// The record's constants.
    ///
    /// # Errors
    /// If a size that the record divides by is 0.
    pub fn new(config: BuilderConfig) -> Result<Self, BuildError> {
        for (name, value) in [
            ("kv_cache_spec.block_size", config.kv_cache_spec.block_size),
            (
                "kv_cache_spec.num_kv_heads",
                config.kv_cache_spec.num_kv_heads,
            ),
            ("attention.num_heads", config.attention.num_heads),
            ("parallel.dcp_world_size", config.parallel.dcp_world_size),
            (
                "parallel.cp_kv_cache_interleave_size",
                config.parallel.cp_kv_cache_interleave_size,
            ),
        ] {
            if value == 0 || value > 1 << 30 {
                return Err(decline(
                    ErrorKind::InvalidValue,
                    format!("{name} is {value}; it must be from 1 to 2^30"),
                ));
            }
        }
        let windows = &config.attention.sliding_windows;
        // Layers with different windows cannot share one schedule: the field then does without.
        let aot_schedule =
            config.device.flash_attn_version == 3 && !config.batch_invariant && windows.len() <= 1;
        let aot_window = match windows.first() {
            Some(&window) if window >= 0 => (window.saturating_sub(1), 0),
            _ => (-1, -1),
        };
        let full_graphs = matches!(
            config.cudagraph.mode,
            CudagraphMode::Full | CudagraphMode::FullDecodeOnly | CudagraphMode::FullAndPiecewise
        );
        Ok(Self {
            config,
            aot_schedule,
            aot_window,
            full_graphs,
        })
    }

    /// The configuration that the builder was made with.
    pub const fn config(&self) -> &BuilderConfig {
        &self.config
    }

    /// The most splits of one request that any schedule may use: the scratch's bound, or 1 where results must not depend on
    /// the batch.
    pub fn max_num_splits(&self) -> u32 {
        if self.config.batch_invariant {
            1
        } else {
            self.config.max_num_splits.max(1)
        }
    }

    /// Bytes that the partial results of `num_tokens` tokens in up to `max_num_splits` splits take: an f32 output row and a
    /// log-sum-exp for each head, token and split. 0 for one split, which is written in place.
    pub fn scratch_bytes(&self, num_tokens: u32, max_num_splits: u32) -> u64 {
        if max_num_splits <= 1 {
            return 0;
        }
        u64::from(num_tokens)
            * u64::from(max_num_splits)
            * u64::from(self.config.attention.num_heads)
            * (u64::from(self.config.kv_cache_spec.head_size_v) + 1)
            * 4
    }

    /// What a FLASH_ATTN builder called `name` says of itself.
    pub fn info(&self, name: &str) -> BuilderInfo {
        let mut needs = vec![HostInput::QueryStartLocCpu, HostInput::SeqLensCpuUpperBound];
        // Ranges of multimodal documents arrive only where the model has them.
        needs.push(HostInput::MmReqDocRanges);
        BuilderInfo {
            name: name.to_owned(),
            // FlashAttention 2's graphs are captured for uniform batches only.
            cudagraph_support: if self.config.device.flash_attn_version == 2 {
                CudagraphSupport::UniformBatch
            } else {
                CudagraphSupport::Always
            },
            reorder_batch_threshold: None,
            varlen_cudagraph_max_query_len: None,
            supports_update_block_table: true,
            supports_draft_decode_metadata_update: self.config.parallel.dcp_world_size == 1,
            needs,
            max_scratch_bytes: self.scratch_bytes(
                self.config.scheduler.max_num_batched_tokens,
                self.max_num_splits(),
            ),
        }
    }

    /// The record of this step, with `schedule`.
    ///
    /// # Errors
    /// Under decode context parallelism, if the batch has no rows.
    pub fn build(
        &self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
        schedule: Schedule,
    ) -> Result<Metadata, BuildError> {
        let parallel = &self.config.parallel;
        let aot = self.aot_schedule && !fast_build;
        let max_num_splits = self.field_max_num_splits(common.num_actual_tokens);
        let mut metadata = Metadata {
            num_actual_tokens: common.num_actual_tokens,
            max_query_len: common.max_query_len,
            query_start_loc: Tensor::Input(Input::QueryStartLoc),
            max_seq_len: common.max_seq_len,
            seq_lens: Tensor::Input(Input::SeqLens),
            block_table: Tensor::Input(Input::BlockTable),
            slot_mapping: Tensor::Input(Input::SlotMapping),
            causal: common.causal.clone(),
            max_dcp_context_kv_len: 0,
            dcp_context_kv_lens: None,
            num_decode_reqs: 0,
            num_prefill_reqs: 0,
            num_decode_tokens: 0,
            num_prefill_tokens: 0,
            max_num_splits,
            scheduler_metadata: None,
            mm_prefix_query_range: self.mm_prefix_query_range(common),
            rswa_prefix_lens: self
                .config
                .attention
                .use_rswa
                .then_some(Tensor::Input(Input::RswaPrefixLens)),
            rswa_window: self.config.attention.rswa_window,
            schedule,
        };
        if parallel.dcp_world_size == 1 {
            // A schedule per row's own causality cannot be made ahead of time.
            if aot && let Causal::All(causal) = common.causal {
                metadata.scheduler_metadata = Some(self.scheduler_call(
                    common,
                    common.max_seq_len,
                    Tensor::Input(Input::SeqLens),
                    causal,
                    max_num_splits,
                ));
            }
            return Ok(metadata);
        }
        let rows = RowRange {
            start: 0,
            end: common.num_reqs,
        };
        let context_lens = Tensor::DcpLocal(DcpLocal {
            source: DcpSource::ContextLens,
            rows,
        });
        metadata.dcp_context_kv_lens = Some(context_lens.clone());
        // From host lengths, so that every rank decides alike.
        let has_context = self.has_context(common)?;
        if common.max_query_len > 1 && has_context {
            if common.seq_lens_cpu_upper_bound.is_empty() {
                // Which rows have context is not known on the host: all are taken to.
                metadata.num_prefill_reqs = common.num_reqs;
                metadata.num_prefill_tokens = common.num_actual_tokens;
            } else {
                let split = split_decodes_prefills_and_extends(&BatchRows::from(common), 1);
                metadata.num_decode_reqs = split.num_decodes;
                metadata.num_decode_tokens = split.num_decode_tokens;
                metadata.num_prefill_reqs = split.num_extends;
                metadata.num_prefill_tokens = split.num_extend_tokens;
            }
        }
        if has_context {
            metadata.max_dcp_context_kv_len = dcp_local_seq_len_upper_bound(
                common.max_seq_len,
                parallel.dcp_world_size,
                parallel.cp_kv_cache_interleave_size,
            );
            if aot {
                metadata.scheduler_metadata = Some(self.scheduler_call(
                    common,
                    metadata.max_dcp_context_kv_len,
                    context_lens,
                    false,
                    max_num_splits,
                ));
            }
        }
        Ok(metadata)
    }

    /// `metadata` for the block table and slots that `common` describes: references stay what they are.
    pub fn update_block_table(
        &self,
        mut metadata: Metadata,
        _common: &CommonAttentionMetadata,
    ) -> Metadata {
        metadata.block_table = Tensor::Input(Input::BlockTable);
        metadata.slot_mapping = Tensor::Input(Input::SlotMapping);
        metadata
    }

    /// The field's `max_num_splits`: a bound where a graph may be captured, 0 (the kernel's heuristic) elsewhere.
    fn field_max_num_splits(&self, num_actual_tokens: u32) -> u32 {
        if self.config.batch_invariant {
            1
        } else if self.full_graphs
            && self.config.device.flash_attn_version == 3
            && num_actual_tokens <= self.config.cudagraph.max_capture_size
        {
            self.config.max_num_splits
        } else {
            0
        }
    }

    /// Does any row have keys before this step's? Without host lengths the answer is yes.
    fn has_context(&self, common: &CommonAttentionMetadata) -> Result<bool, BuildError> {
        if common.num_reqs == 0 {
            return Err(decline(
                ErrorKind::InvalidValue,
                "max(): Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with the \
                 'dim' argument. (a batch without rows has no context lengths: skip the step)",
            ));
        }
        let lens = &common.seq_lens_cpu_upper_bound;
        if lens.is_empty() {
            return Ok(true);
        }
        let starts = &common.query_start_loc_cpu;
        Ok(lens
            .iter()
            .zip(starts.iter().zip(starts.iter().skip(1)))
            .any(|(&len, (&start, &end))| len > end - start))
    }

    fn scheduler_call(
        &self,
        common: &CommonAttentionMetadata,
        max_seqlen_k: u32,
        cache_seqlens: Tensor,
        causal: bool,
        num_splits: u32,
    ) -> SchedulerMetadataCall {
        let (left, right) = self.aot_window;
        SchedulerMetadataCall {
            batch_size: common.num_reqs,
            max_seqlen_q: common.max_query_len,
            max_seqlen_k,
            num_heads_q: self.config.attention.num_heads * self.config.parallel.dcp_world_size,
            num_heads_kv: self.config.kv_cache_spec.num_kv_heads,
            headdim: self.config.kv_cache_spec.head_size,
            cache_seqlens,
            qkv_dtype: self.schedule_dtype(),
            cu_seqlens_q: Tensor::Input(Input::QueryStartLoc),
            page_size: self.config.kv_cache_spec.block_size,
            causal,
            // A window that looks back only, over keys that are all visible, is one to both sides.
            window_size: if causal || left < 0 {
                (left, right)
            } else {
                (left, left)
            },
            num_splits,
            // One semaphore, and four vectors of the rows rounded up to four.
            scheduler_metadata_len: 1 + common.num_reqs.next_multiple_of(4) * 4,
        }
    }

    fn schedule_dtype(&self) -> Dtype {
        match self.config.attention.kv_cache_dtype.as_str() {
            "fp8" | "fp8_e4m3" => Dtype::Float8E4m3,
            "fp8_e5m2" => Dtype::Float8E5m2,
            _ => self.config.kv_cache_spec.dtype,
        }
    }

    /// [start, end] of the bidirectional span that covers each scheduled token, (−1, −1) where none; absent where no token is
    /// covered. Spans of a row never overlap.
    fn mm_prefix_query_range(&self, common: &CommonAttentionMetadata) -> Option<Tensor> {
        if common.mm_req_doc_ranges.is_empty() {
            return None;
        }
        let mut values = vec![-1_i32; 2 * common.num_actual_tokens as usize];
        let mut covered = false;
        for range in &common.mm_req_doc_ranges {
            let row = range.row as usize;
            let starts = &common.query_start_loc_cpu;
            let (Some(&first), Some(&after), Some(&seq_len)) = (
                starts.get(row),
                starts.get(row + 1),
                common.seq_lens_cpu_upper_bound.get(row),
            ) else {
                continue;
            };
            if range.start >= range.end {
                continue;
            }
            let query_len = after - first;
            let context = i64::from(seq_len - query_len);
            let (start, end) = (i64::from(range.start), i64::from(range.end));
            let from = (start - context).max(0);
            let to = (end - context).min(i64::from(query_len) - 1);
            for token in from..=to {
                let at = 2 * (i64::from(first) + token) as usize;
                if let Some(pair) = values.get_mut(at..at + 2) {
                    pair.copy_from_slice(&[start as i32, end as i32]);
                    covered = true;
                }
            }
        }
        covered.then_some(Tensor::Matrix(Matrix {
            rows: common.num_actual_tokens,
            columns: 2,
            values,
        }))
    }
}

/// The schedule that decides nothing: one split per row, in row order.
pub const fn one_split() -> Schedule {
    Schedule {
        max_num_splits: 1,
        num_splits: Vec::new(),
        tile_order: TileOrder::Natural,
    }
}
