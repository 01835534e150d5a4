//! Graphs on a reload: what a new builder version promises is compared with what graphs were captured for, and where it exceeds
//! that they are captured again, on the thread that reloads, before the version is published.
//!
//! A set that was captured again fits every version before it too ([`Promises`]), so the step thread takes it whenever it comes;
//! a version is published after its set, and so never served without it. This module must never know a step.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use timetable_attention::MetadataBuilder;
use timetable_device_cuda::{
    CudaError,
    attention::Workspace,
    driver::{Device, Event, Stream},
    upload::{UploadRing, UploadSize},
};
use timetable_types::CaptureShape;

use super::{
    core::Core,
    graphs::{GraphSet, SetPlan},
    pack::{holds, upload_ring, upload_size},
    promises::Promises,
};

/// A set that was replaced, and the mark on the step's stream after which nothing uses it.
pub(super) struct Retired {
    pub(super) set: GraphSet,
    pub(super) ring: Option<UploadRing>,
    pub(super) last_use: Event,
}

/// What captures sets again; made when the engine starts.
pub(super) struct Recapture {
    pub(super) device: Device,
    pub(super) core: Arc<Core>,
    /// A stream of its own: what is captured on it is launched on the step's.
    pub(super) stream: Stream,
    /// The largest step outside graphs.
    pub(super) eager: CaptureShape,
    /// Segments of a step at most.
    pub(super) max_segments: usize,
    /// Of the set that was captured last, taken by the step thread or not.
    pub(super) promises: Promises,
    pub(super) workspaces: Vec<Arc<Workspace>>,
    /// Of the ring in service, or of the one that is to be taken.
    pub(super) upload: UploadSize,
}

/// Where step thread and reload thread meet. Neither waits for the other's work: the step thread locks only what is held for a
/// moment.
#[derive(Default)]
pub(super) struct Exchange {
    recapture: Mutex<Option<Recapture>>,
    /// Is there a set to take?
    ready: AtomicBool,
    next: Mutex<Option<GraphSet>>,
    retired: Mutex<Vec<Retired>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No invariant spans a panic while one of these is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Exchange {
    /// The engine has started: from here on new versions are compared.
    pub(super) fn start(&self, recapture: Recapture) {
        *lock(&self.recapture) = Some(recapture);
    }

    /// The engine ends: no capture is under way after this, and none begins. What is held goes, once the step's stream is idle.
    pub(super) fn stop(&self) {
        drop(lock(&self.recapture).take());
        drop(lock(&self.next).take());
        lock(&self.retired).clear();
    }

    /// For the step thread: the set that was captured since the last call.
    pub(super) fn take(&self) -> Option<GraphSet> {
        if !self.ready.load(Ordering::Acquire) {
            return None;
        }
        self.ready.store(false, Ordering::Relaxed);
        lock(&self.next).take()
    }

    /// For the step thread: a set that it replaced. Freed by the next capture, not here: freeing waits for the device.
    pub(super) fn retire(&self, retired: Retired) {
        lock(&self.retired).push(retired);
    }

    /// For the reload thread: makes everything ready for a version of `group` that passed every other check.
    ///
    /// # Errors
    /// A builder that fails when it is asked for its promises; a capture that fails, for want of memory as a rule. The version is
    /// refused, and what serves stays as it is.
    pub(super) fn accept(
        &self,
        group: usize,
        builder: &mut dyn MetadataBuilder,
    ) -> Result<(), String> {
        let mut recapture = lock(&self.recapture);
        // Before the start graphs are still to be captured, with this version's own promises; after the end nothing serves.
        let Some(recapture) = recapture.as_mut() else {
            return Ok(());
        };
        let grown = recapture
            .promises
            .grown_for(group, builder, &recapture.eager)
            .map_err(|fault| format!("it fails when it is asked for launch promises: {fault}"))?;
        let Some((promises, reason)) = grown else {
            tracing::info!(
                group,
                "the new version keeps to the captured graphs' promises"
            );
            return Ok(());
        };
        let begun = Instant::now();
        let (mut set, upload) = self.capture(recapture, promises).map_err(|error| {
            format!("CUDA graphs could not be captured again for its larger launch promise ({reason}): {error}")
        })?;
        tracing::info!(
            group,
            reason,
            milliseconds = begun.elapsed().as_millis() as u64,
            "captured the CUDA graphs again for the new version"
        );
        recapture.promises = set.promises.clone();
        recapture.workspaces.clone_from(&set.workspaces);
        recapture.upload = upload;
        let mut next = lock(&self.next);
        // One that was not taken goes, but for a larger ring that this one counts on.
        if let Some(untaken) = next.take() {
            set.ring = set.ring.or(untaken.ring);
        }
        *next = Some(set);
        self.ready.store(true, Ordering::Release);
        Ok(())
    }

    fn capture(
        &self,
        recapture: &Recapture,
        promises: Promises,
    ) -> Result<(GraphSet, UploadSize), CudaError> {
        // Sets of earlier reloads: their last step is long over.
        let retired = std::mem::take(&mut *lock(&self.retired));
        for Retired {
            set,
            ring,
            last_use,
        } in retired
        {
            last_use.synchronize()?;
            drop((set, ring));
        }
        let core = &*recapture.core;
        let plan = SetPlan::new(
            &core.groups,
            promises,
            &recapture.eager,
            recapture.max_segments,
        );
        let workspaces = plan.workspaces(&recapture.device, &core.groups, &recapture.workspaces)?;
        let needed = upload_size(&core.ptrs(), &core.groups, &workspaces);
        let (ring, upload) = if holds(&recapture.upload, &needed) {
            (None, recapture.upload)
        } else {
            (Some(upload_ring(&recapture.device, needed)?), needed)
        };
        let set = plan.capture(core, workspaces, &recapture.stream)?;
        Ok((GraphSet { ring, ..set }, upload))
    }
}
