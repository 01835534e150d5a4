//! What the graphs and the attention workspace in service were made for, and what a new builder version asks beyond it.
//!
//! Promises only grow: a set that is made again fits every version that was served before, so it may be taken before the
//! version that asked for it, and a rollback needs nothing. This module must never know a device.

use timetable_attention::{
    BuildFault, MetadataBuilder,
    graphs::{BatchExecutionDescriptor, covering, promise_fits},
};
use timetable_types::{CaptureShape, LaunchPromise};

use crate::executor::{FullGraph, GraphPlan, capture_shape};

/// Promises of every full graph and of the largest step outside graphs, for each attention group.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Promises {
    /// Full graphs, the largest first.
    pub(super) full: Vec<FullGraph>,
    /// For each attention group.
    pub(super) eager: Vec<LaunchPromise>,
}

impl Promises {
    /// Those of the start.
    pub(super) fn of(plan: &GraphPlan) -> Self {
        Self {
            full: plan.full.clone(),
            eager: plan.eager.clone(),
        }
    }

    /// What a full graph was captured with for a group.
    pub(super) fn of_graph(
        &self,
        group: usize,
        graph: &BatchExecutionDescriptor,
    ) -> Option<&LaunchPromise> {
        let found = self.full.iter().find(|full| full.descriptor == *graph)?;
        found.promises.get(group)
    }

    /// Asks a new version of a group what it promises. `None` if everything that serves now stays valid for it; else what
    /// covers it as well, with the first number that did not fit.
    ///
    /// # Errors
    /// If the builder misbehaves when it is asked. One that declines a shape is served by its plain builder there, whose
    /// promises were covered from the start.
    pub(super) fn grown_for(
        &self,
        group: usize,
        builder: &mut dyn MetadataBuilder,
        eager: &CaptureShape,
    ) -> Result<Option<(Self, String)>, BuildFault> {
        let mut grown = self.clone();
        let mut reason = None;
        let mut ask = |captured: &mut LaunchPromise, shape: &CaptureShape| {
            let offered = match builder.launch_promise(shape) {
                Ok(offered) => offered,
                Err(BuildFault::Declined(_)) => return Ok(()),
                Err(fault) => return Err(fault),
            };
            if let Err(error) = promise_fits(captured, &offered) {
                reason.get_or_insert_with(|| format!("{} tokens: {error}", shape.num_tokens));
                *captured = covering(captured, &offered);
            }
            Ok(())
        };
        for graph in &mut grown.full {
            let shape = capture_shape(&graph.descriptor);
            if let Some(captured) = graph.promises.get_mut(group) {
                ask(captured, &shape)?;
            }
        }
        if let Some(captured) = grown.eager.get_mut(group) {
            ask(captured, eager)?;
        }
        Ok(reason.map(|reason| (grown, reason)))
    }
}

#[cfg(test)]
#[path = "promises_tests.rs"]
mod tests;
