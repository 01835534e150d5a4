//! Metadata builders as WebAssembly components: limits, versions, reload, same-step fallback.
//!
//! - [`Sandbox`] holds the engine and the [`Limits`]; [`Sandbox::load`] turns bytes into a [`Component`] or says why not.
//! - [`WasmBuilder`] is one instance of a component: a `MetadataBuilder`.
//! - [`GroupBuilder`] is what an engine holds for each attention group: the version in service, a warmed spare, and the plain
//!   builder that serves whenever the component does not. Its [`ReloadHandle`] replaces the version while requests run.
//! - [`FaultPolicy`] says what is done about faults; a [`FaultDir`] keeps each as a [`FaultBundle`] that another machine replays.
//! - [`StateDir`] keeps components by content, and what is active, across restarts; [`CodeCache`] keeps compiled code.
//! - A [`StepObserver`] is told of every served step.
//!
//! The crate is useful without Timetable's engine; `examples/02_embed_sandbox.rs` shows how. It must never know what a
//! family's metadata means (that is `timetable-attention`'s), and never a device.

// A test spells a whole record out in one `json!`.
#![cfg_attr(test, recursion_limit = "256")]

mod abi;
mod alive;
mod builder;
mod bundle;
mod cache;
mod call;
mod candidate;
mod fault;
mod group;
mod limits;
mod load;
mod mailbox;
pub mod measure;
mod metrics;
mod observe;
mod owned_dir;
mod policy;
mod probe;
mod reload;
mod rerun;
mod sandbox;
mod shadow;
mod shared;
mod stage;
mod state_dir;
mod status;
mod tenant;
mod version;
mod watchdog;
mod workshop;

pub use builder::WasmBuilder;
pub use bundle::{
    Again, BundleError, BundleFigures, BundleLimits, FaultBundle, FaultDir, FaultHeader,
    MAX_BUNDLE_BYTES, Outcome, Replay, ReplayError, SeenFault, StepRecord, WrittenBy,
    limits_for_replay,
};
pub use cache::CodeCache;
pub use call::BuilderCall;
pub use candidate::{CanaryStatus, CandidateStatus, Companions, ShadowStatus};
pub use group::{Acceptance, Arm, BuiltBy, GroupBuilder, GroupSetup, StepError, StepMetadata};
pub use limits::{CallLimits, Limits};
pub use load::{Component, LoadError};
pub use metrics::{LatencyFigures, LatencyHistogram, RunningSummary, Summary, chosen};
pub use observe::{ObservedStep, StepObserver, VersionHandle};
pub use owned_dir::{Access, DirError, OwnedDir};
pub use policy::{BuildBudget, FaultPolicy, OnFault};
pub use probe::probe_steps;
pub use reload::{ReloadError, ReloadHandle, version_of};
pub use sandbox::{Sandbox, SandboxError};
pub use stage::{Canary, Gates, ReloadPlan, Stage, Withdrawal};
pub use state_dir::{KeptCandidate, KeptVersion, SlotState, StateDir, StateError};
pub use status::{BuilderStatus, FaultRecord, GroupState, VersionFigures};
pub use tenant::{TenantName, TenantNameError};
pub use version::{ContentHash, VersionInfo};
pub use watchdog::Watchdog;
