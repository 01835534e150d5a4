//! The part of TRITON_ATTN's metadata that is the field's and not a policy: the record that every builder of the family returns
//! for the kernel form that it chose. After vLLM 0.33 `TritonAttentionMetadataBuilder.build`.
//!
//! It must never know when which form pays; that is a builder's own business.

use timetable_types::{
    BuildError, BuilderConfig, BuilderInfo, CommonAttentionMetadata, CudagraphSupport, Dtype,
    ErrorKind, HostInput, Input, KvCacheSpecKind, LaunchPromise, Matrix, Scratch, Tensor,
    batch::compute_mm_prefix_ranges, triton_attn::Metadata,
};

use crate::decline;

/// How the kernel's 3D form divides keys, and when it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segments {
    /// Steps of at most this many rows may use the 3D form; 0: every step uses the 2D form.
    pub seq_threshold_3d: u32,
    /// Softmax segments that each query's keys are divided into: a power of two.
    pub num_par_softmax_segments: u32,
    /// Tokens that the scratch of partial results has room for.
    pub scratch_rows: u32,
}

impl Segments {
    /// The 2D form for every step: nothing is divided, and no scratch.
    pub const NONE: Self = Self {
        seq_threshold_3d: 0,
        num_par_softmax_segments: 1,
        scratch_rows: 0,
    };
}

/// What the record needs to know of the configuration.
#[derive(Clone, Debug)]
pub struct Record {
    config: BuilderConfig,
    /// Elements of a row of partial results: the next power of two of a value's head size.
    padded_head_size: u32,
}

impl Record {
    /// The record's constants.
    ///
    /// # Errors
    /// If a size is 0 or makes no sense, or under decode context parallelism, which the backend does not have.
    pub fn new(config: BuilderConfig) -> Result<Self, BuildError> {
        let spec = &config.kv_cache_spec;
        for (name, value) in [
            ("kv_cache_spec.block_size", spec.block_size),
            ("kv_cache_spec.num_kv_heads", spec.num_kv_heads),
            ("kv_cache_spec.head_size_v", spec.head_size_v),
            ("attention.num_heads", config.attention.num_heads),
        ] {
            if value == 0 || value > 1 << 30 {
                return Err(decline(
                    ErrorKind::InvalidValue,
                    format!("{name} is {value}; it must be from 1 to 2^30"),
                ));
            }
        }
        let world = config.parallel.dcp_world_size;
        if world > 1 {
            return Err(decline(
                ErrorKind::NotImplemented,
                format!(
                    "DCP not supported: parallel.dcp_world_size is {world}; run TRITON_ATTN with 1, or choose FLASH_ATTN or FLASHINFER"
                ),
            ));
        }
        Ok(Self {
            padded_head_size: spec.head_size_v.next_power_of_two(),
            config,
        })
    }

    /// The configuration that the builder was made with.
    pub const fn config(&self) -> &BuilderConfig {
        &self.config
    }

    /// Bytes of the three scratch tensors: for each token, head and segment an f32 output row, a maximum and a sum.
    pub fn scratch_bytes(&self, segments: Segments) -> u64 {
        [
            segments.scratch_rows,
            self.config.attention.num_heads,
            segments.num_par_softmax_segments,
            self.padded_head_size + 2,
            4,
        ]
        .into_iter()
        .fold(1, |bytes, size| bytes.saturating_mul(u64::from(size)))
    }

    /// What a TRITON_ATTN builder called `name`, whose scratch is never larger than that of `largest`, says of itself.
    pub fn info(&self, name: &str, largest: Segments) -> BuilderInfo {
        let mut needs = vec![HostInput::MmReqDocRanges];
        if self.config.kv_cache_spec.kind == KvCacheSpecKind::CrossAttention {
            needs.push(HostInput::EncoderSeqLensCpu);
        }
        BuilderInfo {
            name: name.to_owned(),
            cudagraph_support: CudagraphSupport::Always,
            reorder_batch_threshold: None,
            varlen_cudagraph_max_query_len: None,
            supports_update_block_table: false,
            // What a step decides lies in the host's tensors, which a drafter's step updates in place.
            supports_draft_decode_metadata_update: true,
            needs,
            max_scratch_bytes: self.scratch_bytes(largest),
        }
    }

    /// A promise for graphs that are captured with at most `largest`.
    pub fn launch_promise(
        &self,
        shape: &timetable_types::CaptureShape,
        largest: Segments,
    ) -> LaunchPromise {
        LaunchPromise {
            max_num_splits: largest.num_par_softmax_segments,
            // The grid follows from the shape and the segments: there is no list of work.
            max_work_items: 0,
            scratch_bytes: self.scratch_bytes(largest),
            max_query_len: shape.max_query_len,
            uniform_query_len: shape.uniform_query_len,
        }
    }

    /// The record of this step.
    ///
    /// # Errors
    /// If a multimodal document names a row that the step does not have.
    pub fn build(
        &self,
        common: &CommonAttentionMetadata,
        segments: Segments,
    ) -> Result<Metadata, BuildError> {
        let attention = &self.config.attention;
        let scratch = |last: &[u32]| {
            let mut shape = vec![
                segments.scratch_rows,
                attention.num_heads,
                segments.num_par_softmax_segments,
            ];
            shape.extend_from_slice(last);
            Scratch {
                shape,
                dtype: Dtype::Float32,
            }
        };
        // Keys of another sequence, whose lengths are not the step's own.
        let encoder = match self.config.kv_cache_spec.kind {
            KvCacheSpecKind::CrossAttention => common.encoder.as_ref(),
            _ => None,
        };
        let longest_encoder = encoder.map_or(0, |encoder| {
            let lens = encoder.encoder_seq_lens_cpu.iter();
            lens.fold(0, |longest, &len| longest.max(len)) as u32
        });
        Ok(Metadata {
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
            seq_threshold_3d: segments.seq_threshold_3d,
            num_par_softmax_segments: segments.num_par_softmax_segments,
            softmax_segm_output: scratch(&[self.padded_head_size]),
            softmax_segm_max: scratch(&[]),
            softmax_segm_expsum: scratch(&[]),
            mm_prefix_range: mm_prefix_range(common)?,
            rswa_prefix_lens: attention
                .use_rswa
                .then_some(Tensor::Input(Input::RswaPrefixLens)),
            rswa_window: attention.rswa_window,
        })
    }
}

/// The bidirectional spans of each row, (start, end) pairs side by side, zeros behind them; absent where the step has none.
fn mm_prefix_range(common: &CommonAttentionMetadata) -> Result<Option<Tensor>, BuildError> {
    let (rows, ranges) = (common.num_reqs, &common.mm_req_doc_ranges);
    if let Some(range) = ranges.iter().find(|range| range.row >= rows) {
        return Err(decline(
            ErrorKind::InvalidValue,
            format!(
                "mm_req_doc_ranges names row {} of {rows}: ranges must be of the step's rows",
                range.row
            ),
        ));
    }
    Ok(
        compute_mm_prefix_ranges(rows as usize, ranges).map(|padded| {
            Tensor::Matrix(Matrix {
                rows,
                columns: 2 * padded.max_ranges as u32,
                values: padded.data,
            })
        }),
    )
}
