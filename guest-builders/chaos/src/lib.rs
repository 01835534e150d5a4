//! The chaos builder: a builder that does what it is told to do wrong.
//!
//! Options, all optional: `chaos` (what: see [`Mischief`]), `chaos-from-call` (the first call of an instance that misbehaves,
//! counted from 1), `chaos-min-rows` (only batches with at least so many rows), `chaos-seed` (chooses where there is a choice;
//! with `chaos=random`, the mischief too), `chaos-field` (which field `off-by-one`, `wild`, `drop` and `duplicate` hit; chosen by
//! seed without it). What it does to a call depends on the options and on the batch alone, but for `chaos-from-call` and for
//! what is wrong precisely because it depends on the past (`state`, `leak`).
//!
//! It behaves where it is not told otherwise, and its metadata is then right. It must never know the host's limits beyond
//! their defaults, nor what the host does about it.

mod command;
mod damage;
mod deeds;
mod lazy_decodes;
mod one_chunk;
mod one_segment;
mod one_split;
mod states;

pub use command::{Command, Mischief};
pub use damage::{Damage, Place};
pub use lazy_decodes::LazyDecodes;
pub use one_chunk::OneChunk;
pub use one_segment::OneSegment;
pub use one_split::OneSplit;
pub use states::States;

use timetable_guest::{
    Builder, FamilyMetadata, decline,
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata, ErrorKind,
        LaunchPromise,
    },
};

/// Wraps a good builder.
pub struct Chaos<B> {
    good: B,
    command: Command,
    calls: u64,
    /// What `leak` never gives back.
    leaked: Vec<Vec<u8>>,
    /// What `spin-loads` walks through.
    ring: Vec<u32>,
}

impl<B> Builder for Chaos<B>
where
    B: Builder,
    B::Metadata: Damage + FamilyMetadata,
{
    type Metadata = B::Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        let command = Command::of(&config, <B::Metadata as Damage>::FIELDS)?;
        match command.mischief {
            Mischief::RefuseConfig => {
                return Err(decline(
                    ErrorKind::NotImplemented,
                    "no configuration is good enough for this builder (it was told so)",
                ));
            }
            Mischief::TrapInCreate => deeds::trap(),
            _ => {}
        }
        let ring = match command.mischief {
            Mischief::SpinLoads => deeds::ring(),
            _ => Vec::new(),
        };
        Ok(Self {
            good: B::create(config)?,
            command,
            calls: 0,
            leaked: Vec::new(),
            ring,
        })
    }

    fn info(&self) -> BuilderInfo {
        BuilderInfo {
            name: format!("chaos ({})", self.command.mischief.name()),
            ..self.good.info()
        }
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        self.good.launch_promise(shape)
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
    ) -> Result<Self::Metadata, BuildError> {
        self.calls += 1;
        let mut metadata = self.good.build(common, fast_build)?;
        if self.calls < self.command.from_call || common.num_reqs < self.command.min_rows {
            return Ok(metadata);
        }
        let command = self.command.of_batch(common);
        match command.mischief {
            // The first two have done their work when the builder was made.
            Mischief::RefuseConfig | Mischief::TrapInCreate | Mischief::Behave => {}
            Mischief::Random => {}
            Mischief::Trap => deeds::trap(),
            Mischief::SpinLoads => deeds::spin_loads(&self.ring),
            Mischief::SpinDivisions => deeds::spin_divisions(u64::MAX),
            Mischief::SpinPages => deeds::spin_pages(),
            Mischief::Grow => deeds::grow(),
            Mischief::Recurse => deeds::recurse(u64::MAX),
            Mischief::HugeList => metadata.alias_lists(deeds::HUGE_LIST),
            Mischief::LongList => metadata.put_long_list(deeds::LONG_LIST),
            Mischief::OffByOne | Mischief::Wild | Mischief::Drop | Mischief::Duplicate => {
                metadata.damage(&command);
            }
            Mischief::JustUnderFuel => {
                deeds::spin_divisions(deeds::iterations_within(
                    common.num_reqs,
                    common.num_actual_tokens,
                ));
            }
            Mischief::JustUnderMemory => deeds::fill_memory(),
            Mischief::JustUnderStack => deeds::recurse(deeds::DEEP),
            Mischief::State => metadata.vary(self.calls),
            Mischief::Leak => self.leaked.push(deeds::leak()),
            Mischief::Decline => {
                return Err(decline(
                    ErrorKind::InvalidValue,
                    "this batch is declined (it was told so)",
                ));
            }
        }
        Ok(metadata)
    }
}
