//! One step's MLA metadata in the form that every layer of the group executes. It must never know heads, dtypes or the cache:
//! those are the layer's.

use timetable_attention::{StepInputs, batch::ContextParallel};
use timetable_types::Metadata;

use super::prepare;
use crate::cpu::{PrepareError, StepMetadata, step::inconsistent};

/// One request that prefills.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefill {
    /// Its first token, of the prefill part.
    pub token: u32,
    pub q_len: u32,
    /// Its first segment; the next request's follow its own.
    pub segment: u32,
    /// Query tokens × keys of all requests before.
    pub cost: u64,
}

/// A run of context keys of one request, from one chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    /// Does it begin the context's sum anew?
    pub resets: bool,
    /// First key, counted from the request's first on this rank.
    pub start: u32,
    pub len: u32,
    /// Index of the request's first page in `pages`.
    pub page: u32,
}

/// One group's metadata of one step for latent attention, prepared once from verified metadata and then valid for every layer
/// of the group. Owned by the step loop; its buffers are reused from step to step.
///
/// Under decode context parallelism it is one rank's: its keys are those that the rank's cache holds, and results are the
/// rank's part of the whole, to be merged by their log-sum-exps ([`merge_states`](crate::cpu::merge_states)).
#[derive(Debug, Default)]
pub struct MlaStepMetadata {
    pub(super) rank: Option<ContextParallel>,
    /// False until prepared, and after a failure.
    pub(super) is_prepared: bool,
    pub(super) block_size: usize,
    /// Elements of a token in the cache, as the metadata says.
    pub(super) head_dim: usize,
    pub(super) num_actual_tokens: usize,
    pub(super) num_decode_tokens: usize,
    /// One more than the largest page.
    pub(super) num_blocks_used: usize,
    /// The rows that decode.
    pub(super) decode: StepMetadata,
    pub(super) prefills: Vec<Prefill>,
    /// Query tokens × keys of all of them.
    pub(super) prefills_cost: u64,
    pub(super) segments: Vec<Segment>,
    /// Pages of contexts, each below `num_blocks_used`.
    pub(super) pages: Vec<i32>,
    /// First tokens of the decodes, while they are prepared.
    pub(super) starts: Vec<i32>,
}

impl MlaStepMetadata {
    /// Unprepared: `forward` refuses it.
    pub fn new() -> Self {
        MlaStepMetadata::default()
    }

    /// As `new`, for one rank of decode context parallelism.
    pub fn of_rank(rank: ContextParallel) -> Self {
        MlaStepMetadata {
            rank: (rank.size > 1).then_some(rank),
            ..MlaStepMetadata::default()
        }
    }

    /// Replaces the contents by `metadata`, resolved against `inputs`. `block_size`: tokens of one kernel block.
    ///
    /// The metadata should have passed the verifier. What contradicts the step's tensors, or itself, is refused here; a tile
    /// schedule or a chunk plan that does not cover the keys is executed as it stands. After an error the contents are
    /// unprepared.
    pub fn prepare(
        &mut self,
        metadata: &Metadata,
        inputs: &StepInputs<'_>,
        block_size: u32,
    ) -> Result<(), PrepareError> {
        self.is_prepared = false;
        let Metadata::FlashMla(record) = metadata else {
            return Err(PrepareError::Unsupported {
                what: metadata.family().interface(),
                remedy: "a layer of latent attention executes flash-mla: choose FLASHMLA, FLASH_ATTN_MLA or TRITON_MLA",
            });
        };
        if block_size == 0 {
            return Err(inconsistent(
                "block_size",
                "0 tokens; it must be at least 1".into(),
            ));
        }
        self.block_size = block_size as usize;
        self.num_blocks_used = 0;
        self.prefills.clear();
        self.segments.clear();
        self.pages.clear();
        prepare::step(self, record, inputs)?;
        self.num_blocks_used = self.num_blocks_used.max(self.decode.num_blocks_used);
        self.is_prepared = true;
        Ok(())
    }

    /// Tokens that `forward` writes, padding included.
    pub fn num_actual_tokens(&self) -> usize {
        self.num_actual_tokens
    }

    /// Of them, those of rows that decode: `forward_mqa` is for these, `forward_mha` for the rest.
    pub fn num_decode_tokens(&self) -> usize {
        self.num_decode_tokens
    }

    /// Partial results of the decodes.
    pub fn num_work_items(&self) -> usize {
        self.decode.num_work_items()
    }

    /// The most partial results that any decode merges; at least 1.
    pub fn max_splits(&self) -> usize {
        self.decode.max_splits()
    }

    /// Runs of context keys that the prefills attend to, over all chunks.
    pub fn num_context_segments(&self) -> usize {
        self.segments.len()
    }
}
