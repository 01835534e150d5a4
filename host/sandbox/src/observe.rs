//! Whoever watches steps as they are served: a recorder, a trace's figures.
//!
//! Must never know: what the observer does with a step.

use std::sync::Arc;

use timetable_attention::VerifyContext;
use timetable_types::BuilderConfig;

use crate::{Component, StepMetadata, TenantName, VersionInfo, shared::Version};

/// A slot's step that was served: accepted metadata, and everything it was made of.
#[derive(Debug)]
pub struct ObservedStep<'a> {
    /// The slot's name.
    pub slot: &'a str,
    /// Whose slot it is. None: everybody's.
    pub tenant: Option<&'a TenantName>,
    /// The step, and what its metadata was verified against.
    pub context: &'a VerifyContext<'a>,
    /// The metadata, who built it, how long that took, and the component's fault if it had one.
    pub built: StepMetadata,
}

/// Is told of every served step of every sandboxed slot, in order, on the step thread: it must not wait, and neither compile,
/// instantiate nor format anything there.
pub trait StepObserver: Send {
    /// A step was served.
    fn observe(&mut self, step: ObservedStep<'_>);
}

/// A version in service, to look at. Cheap to clone; keeps the component.
#[derive(Clone)]
pub struct VersionHandle(pub(crate) Arc<Version>);

impl VersionHandle {
    /// What identifies it, and where it came from.
    pub fn info(&self) -> &VersionInfo {
        &self.0.info
    }

    /// Counts the time that verifying a step's metadata of this version took. For the caller that verifies, on the step thread.
    pub fn verified(&self, nanoseconds: u64) {
        self.0.metrics.verify_ns.record(nanoseconds);
    }

    /// The component.
    pub fn component(&self) -> &Component {
        &self.0.component
    }

    /// What it is constructed with.
    pub fn config(&self) -> &Arc<BuilderConfig> {
        &self.0.config
    }
}

impl std::fmt::Debug for VersionHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "VersionHandle({})", self.0.info.version)
    }
}
