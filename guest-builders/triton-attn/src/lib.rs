//! TRITON_ATTN's reference builder: small decode batches, whose rows alone would leave a GPU idle, may run the kernel's 3D form,
//! which divides each row's keys into softmax segments. After vLLM 0.33 `TritonAttentionMetadataBuilder.__init__`.
//!
//! It must never know the kernels: whatever executes the record looks at threshold, segments and scratch.

use timetable_guest::{
    Builder, decline, export_triton_attn,
    triton_attn::{Record, Segments},
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        CudagraphMode, ErrorKind, LaunchPromise, triton_attn::Metadata,
    },
};

/// Programs that the 2D form's grid should have to fill a GPU: with fewer, the 3D form is faster.
const MIN_LAUNCH_GRID_SIZE_2D: u32 = 128;
/// Softmax segments of the 3D form.
const NUM_PAR_SOFTMAX_SEGMENTS: u32 = 16;
/// The same for the smallest batches on compute capability 12, whose segments should be shorter.
const MANY_SEGMENTS: u32 = 64;
/// Query tokens of a decode that the 3D form may take at most.
const MAX_QUERY_LEN_3D: u32 = 8;

/// Chooses threshold and segments once; a step then only says which of two views of the scratch it uses.
pub struct SoftmaxSegments {
    record: Record,
    usual: Segments,
    /// For steps of at most `max_seqs_64_segments` rows, where the device gains by it.
    many: Option<Segments>,
    max_seqs_64_segments: u32,
}

impl Builder for SoftmaxSegments {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        let record = Record::new(config)?;
        let config = record.config();
        if config.batch_invariant {
            // How a row's keys are divided would depend on the number of rows.
            return Ok(Self {
                record,
                usual: Segments::NONE,
                many: None,
                max_seqs_64_segments: 0,
            });
        }
        let threshold = seq_threshold_3d(config)?;
        let rows = threshold
            .min(config.scheduler.max_num_seqs)
            .saturating_mul(tokens_of_a_decode(config));
        let usual = Segments {
            seq_threshold_3d: threshold,
            num_par_softmax_segments: NUM_PAR_SOFTMAX_SEGMENTS,
            scratch_rows: rows,
        };
        let max_seqs_64_segments = max_seqs_64_segments(config);
        if max_seqs_64_segments == 0 {
            return Ok(Self {
                record,
                usual,
                many: None,
                max_seqs_64_segments,
            });
        }
        // One memory, seen as few rows of many segments or as four times the rows with a quarter of them.
        let quarter = MANY_SEGMENTS / NUM_PAR_SOFTMAX_SEGMENTS;
        let rows_of_many = max_seqs_64_segments.min(rows).max(rows.div_ceil(quarter));
        Ok(Self {
            record,
            usual: Segments {
                scratch_rows: rows_of_many.saturating_mul(quarter),
                ..usual
            },
            many: Some(Segments {
                num_par_softmax_segments: MANY_SEGMENTS,
                scratch_rows: rows_of_many,
                ..usual
            }),
            max_seqs_64_segments,
        })
    }

    fn info(&self) -> BuilderInfo {
        let largest = self.many.unwrap_or(self.usual);
        self.record.info("triton-attn, softmax segments", largest)
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        let segments = self.segments(shape.num_reqs, shape.num_tokens);
        self.record.launch_promise(shape, segments)
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        let segments = self.segments(common.num_reqs, common.num_actual_tokens);
        self.record.build(common, segments)
    }
}

impl SoftmaxSegments {
    /// For a step of `rows` rows and `tokens` tokens. A graph's steps have its shape, so that capture and replay agree.
    fn segments(&self, rows: u32, tokens: u32) -> Segments {
        match self.many {
            Some(many) if rows <= self.max_seqs_64_segments && tokens <= many.scratch_rows => many,
            _ => self.usual,
        }
    }
}

/// Rows up to which the 3D form runs. Where decodes are replayed from graphs it is a captured size, the closest (the first of
/// two that are as close), so that no graph holds both forms.
fn seq_threshold_3d(config: &BuilderConfig) -> Result<u32, BuildError> {
    let threshold = MIN_LAUNCH_GRID_SIZE_2D / config.kv_cache_spec.num_kv_heads;
    let decode_graphs = matches!(
        config.cudagraph.mode,
        CudagraphMode::Full | CudagraphMode::FullDecodeOnly | CudagraphMode::FullAndPiecewise
    );
    if !decode_graphs {
        return Ok(threshold);
    }
    let sizes = &config.cudagraph.capture_sizes;
    let closest = sizes
        .iter()
        .copied()
        .min_by_key(|size| size.abs_diff(threshold));
    closest.ok_or_else(|| {
        decline(
            ErrorKind::Assertion,
            "CUDA Graphs enabled but no capture sizes specified. (cudagraph.capture_sizes is empty: name sizes, or set the mode to NONE)",
        )
    })
}

/// Tokens of a decode that verifies its drafts, as far as the 3D form takes them.
fn tokens_of_a_decode(config: &BuilderConfig) -> u32 {
    let scheduler = &config.scheduler;
    let drafts = scheduler.num_speculative_tokens;
    let drafts = if scheduler.parallel_drafting {
        drafts.saturating_mul(2)
    } else {
        drafts
    };
    drafts.saturating_add(1).min(MAX_QUERY_LEN_3D)
}

/// Rows up to which 64 segments leave no multiprocessor of compute capability 12 with two programs; 0 elsewhere.
fn max_seqs_64_segments(config: &BuilderConfig) -> u32 {
    if config.device.compute_capability.0 != 12 {
        return 0;
    }
    let programs = NUM_PAR_SOFTMAX_SEGMENTS.saturating_mul(config.kv_cache_spec.num_kv_heads);
    config.device.num_workers.saturating_sub(1) / programs
}

export_triton_attn!(SoftmaxSegments);
