//! Attention on the device: per attention group, from verified metadata to staged lists, launches and scratch. It must never
//! know a builder, nor anything of the model but its attention.
//!
//! A step: [`GroupState::prepare`] counts and stages, [`GroupState::pack`] appends to the upload; after the unpack launch
//! [`GroupLaunch::plan`] once, then [`GroupLaunch::update_cache`] and [`GroupLaunch::attend`] for each layer. Eager launches have
//! the step's exact counts ([`GroupState::eager`]); a captured graph has the bounds of the builder's launch promise
//! ([`Launch::captured`]), and every number that changes from step to step lies in device memory, so that it replays any step
//! within them.
//!
//! Results do not depend on the batch as long as splits, tiles and kernels do not. Splits and tiles are the builder's choice, which
//! `BuilderConfig::batch_invariant` binds; one kernel, whose sums do not depend on a query's tile, serves all where
//! [`GroupConfig::batch_invariant`] is set.

mod config;
mod flash_attn;
mod flashinfer;
mod launch;
#[cfg(test)]
mod plan_on_host;
mod run;
mod state;
mod tensors;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod workspace;

pub use config::{DEFAULT_MAX_PARTIAL_BYTES, GroupConfig};
pub use launch::{Launch, ListLaunch};
pub use run::{AttentionIo, GroupLaunch};
pub use state::{GroupState, PrepareError, Replay, WorkCounts};
pub use workspace::{ListPtrs, Workspace, WorkspacePtrs, WorkspaceSize};
