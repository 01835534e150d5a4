//! One step's metadata in the form that every layer of the group executes: runs of tokens, from which state they go on and where
//! states are kept. It must never know heads, channels or weights: those are the layer's.

mod gdn;
mod prepare;

use timetable_attention::StepInputs;
use timetable_types::{KvCacheSpec, MambaType, Metadata, mamba};

use crate::cpu::PrepareError;
use prepare::{Buffers, Preparation};

/// What a run begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum From {
    /// Nothing.
    Zeros,
    /// This state.
    State(u32),
    /// What the run before it ended with: the next chunk.
    Before,
}

/// One token of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub token: u32,
    /// The state that is kept behind it; 0: none.
    pub keep: u32,
    /// Has it an output? Otherwise it is only what later tokens look back on.
    pub computed: bool,
}

/// Tokens that follow each other.
#[derive(Clone, Copy, Debug)]
struct Run {
    start: u32,
    end: u32,
    from: From,
}

/// Runs, in order of execution.
#[derive(Debug, Default)]
pub(super) struct Runs {
    runs: Vec<Run>,
    pub(super) places: Vec<Place>,
}

impl Runs {
    #[inline(always)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (From, &[Place])> {
        let of = |run: &Run| &self.places[run.start as usize..run.end as usize];
        self.runs.iter().map(move |run| (run.from, of(run)))
    }

    fn clear(&mut self) {
        self.runs.clear();
        self.places.clear();
    }

    /// A run of what `places` gives; its places, if it has any.
    fn push(&mut self, from: From, places: impl Iterator<Item = Place>) -> &mut [Place] {
        let start = self.places.len();
        self.places.extend(places);
        if self.places.len() > start {
            self.runs.push(Run {
                start: start as u32,
                end: self.places.len() as u32,
                from,
            });
        }
        &mut self.places[start..]
    }
}

/// One group's metadata of one step, prepared once from verified metadata and then valid for every layer of the group. Owned by
/// the step loop; its buffers are reused from step to step.
#[derive(Debug, Default)]
pub struct MambaStepMetadata {
    /// None until prepared, and after a failure.
    mamba_type: Option<MambaType>,
    pub(super) conv: Runs,
    pub(super) scan: Runs,
    /// One more than the last token that has a run.
    pub(super) num_tokens: usize,
    /// One more than the largest state.
    pub(super) num_states: usize,
    buffers: Buffers,
}

impl MambaStepMetadata {
    /// Unprepared: `forward` refuses it.
    pub fn new() -> Self {
        MambaStepMetadata::default()
    }

    /// Replaces the contents by `metadata`, resolved against `inputs`. `spec`: of the group, whose block size and chunk size count.
    ///
    /// The metadata should have passed the verifier. What contradicts the step's tensors is refused here; chunks that do not cover
    /// the tokens are executed as they stand, and rows at the null state are left out. After an error the contents are
    /// unprepared.
    ///
    /// # Errors
    /// [`PrepareError`], which names the field.
    pub fn prepare(
        &mut self,
        metadata: &Metadata,
        inputs: &StepInputs<'_>,
        spec: &KvCacheSpec,
    ) -> Result<(), PrepareError> {
        self.mamba_type = None;
        self.conv.clear();
        self.scan.clear();
        let Metadata::Mamba(metadata) = metadata else {
            return Err(PrepareError::Unsupported {
                what: metadata.family().interface(),
                remedy: "give a layer that keeps states the metadata of its own group",
            });
        };
        let mut buffers = std::mem::take(&mut self.buffers);
        let mut preparation = Preparation::new(inputs, spec, &mut self.conv, &mut self.scan);
        let (mamba_type, prepared) = match metadata {
            mamba::Metadata::Mamba1(base) => (
                MambaType::Mamba1,
                preparation.base(base, None, &mut buffers),
            ),
            mamba::Metadata::ShortConv(base) => (
                MambaType::ShortConv,
                preparation.base(base, None, &mut buffers),
            ),
            mamba::Metadata::Mamba2(metadata) => (
                MambaType::Mamba2,
                preparation.base(&metadata.base, Some(metadata), &mut buffers),
            ),
            mamba::Metadata::Linear(metadata) => (
                MambaType::Linear,
                preparation.linear(metadata, &mut buffers),
            ),
            mamba::Metadata::Gdn(metadata) => {
                (MambaType::Gdn, preparation.gdn(metadata, &mut buffers))
            }
        };
        self.buffers = buffers;
        prepared?;
        let places = || self.conv.places.iter().chain(&self.scan.places);
        let runs = self.conv.runs.iter().chain(&self.scan.runs);
        let read = runs.map(|run| match run.from {
            From::State(state) => state as usize + 1,
            _ => 0,
        });
        let kept = places().map(|place| place.keep as usize + 1);
        self.num_states = read.chain(kept).max().unwrap_or(0);
        self.num_tokens = places()
            .map(|place| place.token as usize + 1)
            .max()
            .unwrap_or(0);
        self.mamba_type = Some(mamba_type);
        Ok(())
    }

    /// The type whose metadata this is; none while unprepared.
    pub fn mamba_type(&self) -> Option<MambaType> {
        self.mamba_type
    }
}
