//! Events: marks in a stream's order. It must never know what work they guard.

use std::time::Duration;

use cudarc::driver::sys::{CUevent, CUevent_flags, CUresult};

use super::{Device, fallible, log_drop, wait_within};
use crate::error::Result;

/// A mark that a stream passes ([`super::Stream::record`]) and that others wait for. One that no stream has recorded counts as passed.
#[derive(Debug)]
pub struct Event {
    device: Device,
    handle: CUevent,
}

// SAFETY: an event is a handle that the driver lets any thread use.
unsafe impl Send for Event {}
// SAFETY: as above; the struct is never changed.
unsafe impl Sync for Event {}

impl Event {
    /// An event; with `timing` it can be asked for the time between two, and recording it costs a little more.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Device, timing: bool) -> Result<Self> {
        device.bind()?;
        let flags = if timing {
            CUevent_flags::CU_EVENT_DEFAULT
        } else {
            CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        // SAFETY: the context is current.
        let handle = unsafe { fallible::event_create(flags as u32) }?;
        Ok(Self {
            device: device.clone(),
            handle,
        })
    }

    /// Waits until the stream has passed the last record of this event.
    ///
    /// # Errors
    /// What the driver says, and any fault of the work before it.
    pub fn synchronize(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the event is live.
        unsafe { fallible::event_synchronize(self.handle) }
    }

    /// As [`Event::synchronize`], but gives up after `limit`.
    ///
    /// # Errors
    /// [`CudaError::Hung`](crate::CudaError::Hung) after `limit`; else as [`Event::synchronize`].
    pub fn synchronize_within(&self, limit: Duration) -> Result<()> {
        wait_within(limit, || self.query())
    }

    /// Whether the stream has passed the last record of this event.
    ///
    /// # Errors
    /// What the driver says, and any fault of the work before it.
    pub fn query(&self) -> Result<bool> {
        self.device.bind()?;
        // SAFETY: the event is live.
        ready(unsafe { fallible::event_query(self.handle) })
    }

    /// Microseconds from this event's record to `later`'s. Both have timing, were recorded, and have passed.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_READY` when one has not passed, `CUDA_ERROR_INVALID_HANDLE` when one has no timing or was never recorded.
    pub fn elapsed_us(&self, later: &Self) -> Result<f32> {
        self.device.bind()?;
        // SAFETY: both events are live.
        Ok(unsafe { fallible::event_elapsed(self.handle, later.handle) }? * 1000.0)
    }

    pub(super) fn handle(&self) -> CUevent {
        self.handle
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is live and ours; the driver keeps one that a stream still waits for.
        log_drop(
            self.device
                .bind()
                .and_then(|()| unsafe { fallible::event_destroy(self.handle) }),
        );
    }
}

/// "Not ready" is an answer, not an error.
pub(super) fn ready(result: Result<()>) -> Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.is_code(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
        Err(error) => Err(error),
    }
}
