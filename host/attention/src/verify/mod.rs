//! The verifier: what is checked before a kernel may use an integer that a builder chose.
//!
//! `verify_step` checks the host's own tensors of a step, `Verifier::verify` a builder's metadata against them. A module
//! per family writes one rule for each field, beside the field's name, and destructures each record, so that a field
//! without a rule does not compile. References are right by construction: the rule only asks that it is the reference that
//! belongs there. A family without rules is refused, never passed.
//!
//! A new family implements `Rules` for its record and has a line in `Verifier::verify` and in [`rules`]; the mutation suites
//! of `host/device/tests/verified` hold that a family with the one has the other, and a suite of its own.
//!
//! Time is linear in rows, tokens, work items and the block ids in use; nothing is allocated once the scratch has grown to
//! the largest batch seen. This module must never know which builder made the metadata, nor a device.

mod flash_attn;
mod flash_mla;
mod flashinfer;
mod lanes;
mod mamba;
mod paged;
mod refusal;
mod step;
mod triton_attn;
mod work_list;

use timetable_types::{
    BuilderConfig, CommonAttentionMetadata, Family, Input, LaunchPromise, Metadata, Tensor,
    flash_attn as fa, flash_mla as fm, flashinfer as fi, mamba as mb, triton_attn as ta,
};

pub use refusal::{Refusal, Rule};
pub use step::verify_step;

use crate::{resolve::Dcp, step::StepInputs};

/// What an operator allows a builder to attend to. Never the future, never another request's blocks, under either.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Grant {
    /// Every key of every request.
    #[default]
    Exact,
    /// Whole context blocks may be left out; the blocks that this step writes may not, and blocks before a sliding window may
    /// not be taken back in. Only a family whose record can say which blocks ([`FamilyRules::selects_blocks`]) gains anything:
    /// FLASHINFER's can; the others' have whole rows of the block table by reference, so for them this is `Exact`.
    Subset,
}

/// What is known of a family that has rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FamilyRules {
    /// Can its record leave blocks out, where the operator grants [`Grant::Subset`]?
    pub selects_blocks: bool,
}

/// The rules of `family`; none: whatever a builder of it returns is refused.
pub const fn rules(family: Family) -> Option<FamilyRules> {
    const fn of<R: Rules>() -> Option<FamilyRules> {
        Some(FamilyRules {
            selects_blocks: R::SELECTS_BLOCKS,
        })
    }
    match family {
        Family::FlashAttn => of::<fa::Metadata>(),
        Family::Flashinfer => of::<fi::Metadata>(),
        Family::TritonAttn => of::<ta::Metadata>(),
        Family::FlashMla => of::<fm::Metadata>(),
        Family::Mamba => of::<mb::Metadata>(),
    }
}

/// The rules of one family, for its record.
trait Rules {
    /// See [`FamilyRules::selects_blocks`].
    const SELECTS_BLOCKS: bool;

    /// One rule for each field.
    fn verify(&self, ctx: &VerifyContext<'_>, scratch: &mut Scratch) -> Result<(), Refusal>;
}

/// What a builder's output is held against.
#[derive(Clone, Copy, Debug)]
pub struct VerifyContext<'a> {
    /// The configuration that the builder was made of.
    pub config: &'a BuilderConfig,
    /// The step, complete: not only the parts that the builder asked for.
    pub common: &'a CommonAttentionMetadata,
    /// The host's tensors of the step.
    pub inputs: &'a StepInputs<'a>,
    /// What the graph that this step replays was captured with; none outside graphs.
    pub promise: Option<&'a LaunchPromise>,
    /// What the operator granted.
    pub grant: Grant,
    /// Kernel blocks in the cache: block ids are below it.
    pub num_blocks: u32,
}

impl VerifyContext<'_> {
    /// R, as the host's row vectors have it.
    fn rows(&self) -> usize {
        self.common.num_reqs as usize
    }

    pub(crate) fn dcp(&self) -> Dcp {
        Dcp::of(self.config)
    }

    /// The lengths that the host vouches for: at least the true ones.
    pub(crate) fn lens(&self) -> &[i32] {
        let bound = &self.common.seq_lens_cpu_upper_bound;
        if bound.len() == self.rows() {
            bound
        } else {
            self.inputs.seq_lens
        }
    }

    /// The largest length that any launch may be told: what the field captures with.
    fn max_len_bound(&self) -> i64 {
        i64::from(
            self.common
                .max_seq_len
                .max(self.config.scheduler.max_model_len),
        )
    }

    /// The largest query length that the launch may be told.
    fn max_query_bound(&self) -> i64 {
        let bound = match self.promise {
            Some(promise) => promise.max_query_len,
            None => self.common.max_query_len,
        };
        i64::from(bound)
    }

    /// The most KV splits that the kernels' scratch, and the captured graph, have room for.
    fn max_splits_bound(&self) -> i64 {
        let room = self.config.max_num_splits.max(1);
        let bound = match self.promise {
            Some(promise) => room.min(promise.max_num_splits.max(1)),
            None => room,
        };
        i64::from(bound)
    }
}

/// Checks builders' metadata. Keep one per attention group: its scratch is reused.
#[derive(Debug, Default)]
pub struct Verifier {
    scratch: Scratch,
}

/// Memory that is reused from step to step.
#[derive(Debug, Default)]
struct Scratch {
    /// One bit for each row or work item.
    seen: Vec<u64>,
    /// One byte for each row.
    marks: Vec<u8>,
    /// For each query tile its lowest KV chunk.
    first_chunk: Vec<i32>,
    /// For each row the running sum of its query tiles; or rows that verify drafts.
    tile_start: Vec<u32>,
    /// For each row its KV chunks, or its spans; or rows that verify no drafts.
    chunks: Vec<u32>,
    /// For each work item its query tile, counted over the rows.
    item_tile: Vec<u32>,
}

impl Verifier {
    /// With empty scratch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Is `metadata` safe to execute for this step, and does it cover what it must? The step itself is taken as checked by
    /// `verify_step`.
    pub fn verify(&mut self, metadata: &Metadata, ctx: &VerifyContext<'_>) -> Result<(), Refusal> {
        match metadata {
            Metadata::FlashAttn(metadata) => metadata.verify(ctx, &mut self.scratch),
            Metadata::Flashinfer(metadata) => metadata.verify(ctx, &mut self.scratch),
            Metadata::TritonAttn(metadata) => metadata.verify(ctx, &mut self.scratch),
            Metadata::FlashMla(metadata) => metadata.verify(ctx, &mut self.scratch),
            Metadata::Mamba(metadata) => metadata.verify(ctx, &mut self.scratch),
        }
    }
}

/// As `Verifier::verify`, with scratch of its own.
pub fn verify(metadata: &Metadata, ctx: &VerifyContext<'_>) -> Result<(), Refusal> {
    Verifier::new().verify(metadata, ctx)
}

/// `tensor` must be exactly the host's `input`, whole.
fn reference(field: &'static str, tensor: &Tensor, input: Input) -> Result<(), Refusal> {
    match tensor {
        Tensor::Input(found) if *found == input => Ok(()),
        _ => Err(Refusal::reference(field, input_name(input))),
    }
}

/// `tensor` must be rows [start, end) of the host's `input`, which has `rows` rows; the whole tensor if those are all.
fn row_reference(
    field: &'static str,
    tensor: &Tensor,
    input: Input,
    (start, end): (u32, u32),
    rows: u32,
) -> Result<(), Refusal> {
    match tensor {
        Tensor::Input(found) if *found == input && start == 0 && end == rows => Ok(()),
        Tensor::Slice(slice)
            if slice.source == input && (slice.start, slice.end) == (start, end) =>
        {
            Ok(())
        }
        _ => Err(Refusal::reference(field, input_name(input))),
    }
}

fn input_name(input: Input) -> &'static str {
    match input {
        Input::QueryStartLoc => "query_start_loc of its rows",
        Input::SeqLens => "seq_lens of its rows",
        Input::BlockTable => "block_table of its rows",
        Input::SlotMapping => "slot_mapping",
        Input::Positions => "positions",
        Input::Causal => "causal",
        Input::DcpLocalSeqLens => "dcp_local_seq_lens of its rows",
        Input::EncoderSeqLens => "encoder_seq_lens",
        Input::LogitsIndicesPadded => "logits_indices_padded",
        Input::RswaPrefixLens => "rswa_prefix_lens",
    }
}
