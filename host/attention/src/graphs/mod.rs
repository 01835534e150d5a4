//! CUDA graph modes: what backends support, which mode survives, which sizes are captured, and which captured graph a batch
//! replays. Only decisions: this module must never know a device, a stream or a graph.

mod explain;
mod modes;
mod promise;
mod resolve;
mod sizes;
mod v1;
mod v2;

pub use explain::{
    ConfigFacts, Explanation, GroupSupport, Outcome, apply_config_overrides, explain,
};
pub use modes::{GraphModes, WeakestSupport, support_name, weakest_support};
pub use promise::{CapturedGraph, PromiseError, covering, promise_fits};
pub use resolve::{
    ChangeLevel, MambaBlocks, ModeChange, ResolveError, ResolveFailure, ResolveInput, Resolved,
    resolve_cudagraph_mode_and_sizes,
};
pub use sizes::{
    CaptureSizeConfig, CaptureSizeError, default_capture_sizes, round_capture_sizes,
    user_capture_sizes,
};
pub use v1::{BatchDescriptor, CudagraphDispatcher, DispatcherError};
pub use v2::{
    BatchExecutionDescriptor, BatchQuery, CudagraphManager, ManagerConfig, agree_across_ranks,
    decode_graph_eligible, uniform_token_count,
};

/// The mode in which one batch runs: none, piecewise or full. A mode for a whole run ([`types::CudagraphMode`]) has one for
/// uniform decodes and one for other batches.
///
/// [`types::CudagraphMode`]: timetable_types::CudagraphMode
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum RuntimeMode {
    /// Eager.
    None,
    /// Everything but attention is captured.
    Piecewise,
    /// All of the forward pass is one graph.
    Full,
}

impl RuntimeMode {
    /// The field's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RuntimeMode::None => "NONE",
            RuntimeMode::Piecewise => "PIECEWISE",
            RuntimeMode::Full => "FULL",
        }
    }
}
