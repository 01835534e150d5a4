//! The `MetadataBuilder` trait: implemented by the sandbox (a component) and natively (a builder's own logic, or the plain
//! builders). Callers never know which.

use timetable_types::{
    BuildError, BuilderInfo, CaptureShape, CommonAttentionMetadata, Family, LaunchPromise, Metadata,
};

/// Turns each step's `CommonAttentionMetadata` into one backend's metadata. One per attention group and micro-batch.
///
/// What `build` returns is not trusted: the caller passes it through the verifier before anything executes it.
pub trait MetadataBuilder: Send {
    /// The family whose metadata this builder returns, always.
    fn family(&self) -> Family;

    /// What the builder said of itself after construction. Constant.
    fn info(&self) -> &BuilderInfo;

    /// What a graph captured with `shape` may rely on.
    fn launch_promise(&mut self, shape: &CaptureShape) -> Result<LaunchPromise, BuildFault>;

    /// This step's metadata. `fast_build` asks for a cheap build rather than the best schedule.
    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
    ) -> Result<Metadata, BuildFault>;

    /// Metadata for capturing a CUDA graph with this batch's shape.
    fn build_for_cudagraph_capture(
        &mut self,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        self.build(common, false)
    }

    /// Metadata for step `draft_index` of a drafter.
    fn build_for_drafting(
        &mut self,
        common: &CommonAttentionMetadata,
        _draft_index: u32,
    ) -> Result<Metadata, BuildFault> {
        self.build(common, true)
    }

    /// `metadata`, of an equal group, for the block table and slots that `common` describes. Only for builders whose
    /// `info().supports_update_block_table` holds.
    fn update_block_table(
        &mut self,
        metadata: &Metadata,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault>;
}

/// Why there is no metadata.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BuildFault {
    /// The builder returned an error of its own: it does not serve this batch. The instance stays good.
    #[error("the builder declined the batch: {}", .0.message)]
    Declined(BuildError),
    /// The builder misbehaved; its instance is gone.
    #[error("{kind}: {message}")]
    Fault {
        /// What kind of misbehaviour.
        kind: FaultKind,
        /// What the sandbox saw.
        message: String,
    },
}

/// Kinds of misbehaviour. The names appear in metrics and fault records.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// A wasm trap: a panic, an out-of-bounds access, a division by zero.
    Trap,
    /// The wasm stack's cap was reached. How deep calls may go depends on the machine's compiled code.
    StackDepth,
    /// The call's fuel ran out.
    Fuel,
    /// The coarse wall-clock watchdog interrupted the call.
    Watchdog,
    /// The memory cap was reached.
    Memory,
    /// The result was larger than may be lifted, or not well formed.
    LiftBound,
    /// The constructor failed.
    Constructor,
    /// The verifier refused the result.
    Refused,
    /// The builder declined the batch.
    Declined,
    /// A fresh instance built other metadata for the same call: what it builds depends on its own past.
    NonDeterminism,
    /// The builder's calls took more time than its budget.
    BuildBudget,
}

impl FaultKind {
    /// Every kind.
    pub const ALL: [FaultKind; 11] = [
        FaultKind::Trap,
        FaultKind::StackDepth,
        FaultKind::Fuel,
        FaultKind::Watchdog,
        FaultKind::Memory,
        FaultKind::LiftBound,
        FaultKind::Constructor,
        FaultKind::Refused,
        FaultKind::Declined,
        FaultKind::NonDeterminism,
        FaultKind::BuildBudget,
    ];

    /// The name used in metrics, records and messages.
    pub const fn name(self) -> &'static str {
        match self {
            FaultKind::Trap => "trap",
            FaultKind::StackDepth => "stack_depth",
            FaultKind::Fuel => "fuel",
            FaultKind::Watchdog => "watchdog",
            FaultKind::Memory => "memory",
            FaultKind::LiftBound => "lift_bound",
            FaultKind::Constructor => "constructor",
            FaultKind::Refused => "refused",
            FaultKind::Declined => "declined",
            FaultKind::NonDeterminism => "non_determinism",
            FaultKind::BuildBudget => "build_budget",
        }
    }

    /// Is a fault of this kind a function of component, configuration and call, so that it can be made to happen again? What
    /// depends on wall-clock time, or on how deep the machine's own code can call, is not.
    pub const fn replays(self) -> bool {
        !matches!(
            self,
            FaultKind::Watchdog | FaultKind::StackDepth | FaultKind::BuildBudget
        )
    }
}

impl std::fmt::Display for FaultKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
