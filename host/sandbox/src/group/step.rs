//! What a step gets from its group: metadata, or an error.
//!
//! Must never know: how either came about.

use std::{fmt, time::Duration};

use timetable_attention::BuildFault;
use timetable_types::Metadata;

use crate::{OnFault, VersionHandle};

/// Which of a group's versions is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// The one in service, or the plain builder if there is none.
    Active,
    /// The candidate in canary; the one in service where there is none, or it is left out after a fault.
    Candidate,
}

/// Who built a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuiltBy {
    /// The component in service.
    Component,
    /// The candidate in canary.
    Candidate,
    /// The plain builder.
    Plain,
}

/// A step's metadata, verified.
#[derive(Clone, Debug)]
pub struct StepMetadata {
    /// The metadata.
    pub metadata: Metadata,
    /// Who built it.
    pub built_by: BuiltBy,
    /// What the component did wrong in this very step, if it did.
    pub fault: Option<BuildFault>,
    /// The version that was asked in this step, whether it served or faulted. None: the plain builder was asked alone.
    pub version: Option<VersionHandle>,
    /// How long the call took whose metadata this is.
    pub build_time: Duration,
    /// Fuel of the component's call, where it was asked; 0 elsewhere.
    pub fuel: u64,
}

/// A step without metadata: its requests fail with this error, the process lives.
#[derive(Clone, Debug, thiserror::Error)]
pub struct StepError {
    /// What the component did wrong in this step, or what took it out of service before. None if it was not asked.
    pub component: Option<BuildFault>,
    /// What the plain builder did wrong. None: the policy leaves no step to it.
    pub plain: Option<BuildFault>,
    /// The policy.
    pub policy: OnFault,
}

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "this step has no metadata: ")?;
        match (&self.plain, &self.component) {
            (Some(plain), None) => write!(f, "the plain builder: {plain}"),
            (Some(plain), Some(fault)) => write!(
                f,
                "the plain builder: {plain}; before it, the component: {fault}"
            ),
            (None, Some(fault)) => write!(
                f,
                "the component: {fault}; its policy is {}, which leaves no step to the plain builder",
                self.policy
            ),
            (None, None) => write!(
                f,
                "the component has no instance ready, and its policy is {}",
                self.policy
            ),
        }
    }
}
