//! Streams: work in order. It must never know what a kernel computes, nor keep the memory that work uses alive.

use std::ffi::c_void;
use std::ops::Range;
use std::time::Duration;

use cudarc::driver::sys::{
    CUresult, CUstream, CUstream_flags, CUstreamCaptureMode, CUstreamCaptureStatus,
};

use super::event::ready;
use super::{
    Device, DevicePtr, Event, Function, Graph, GraphExec, Launch, PinnedBuffer, fallible, log_drop,
    wait_within,
};
use crate::error::{CudaError, Result};

/// What a capture forbids while it lasts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CaptureMode {
    /// Calls that could disturb a capture are refused on the capturing thread only: other threads keep serving.
    #[default]
    ThreadLocal,
    /// They are refused on every thread.
    Global,
    /// Nothing is refused.
    Relaxed,
}

/// A queue of work on a device, in order; it does not wait for the legacy default stream, nor that for it.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    handle: CUstream,
}

// SAFETY: a stream is a handle that the driver lets any thread use.
unsafe impl Send for Stream {}
// SAFETY: as above; the struct is never changed. (A capture belongs to the thread that began it; the driver refuses others.)
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of ordinary priority.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Device) -> Result<Self> {
        Self::create(device, 0)
    }

    /// A stream whose kernels wait behind those of every other: for work off the critical path, such as captures and warm-ups
    /// of a reload.
    ///
    /// # Errors
    /// What the driver says.
    pub fn low_priority(device: &Device) -> Result<Self> {
        device.bind()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the context is current and both are writable.
        unsafe { fallible::stream_priorities(&mut least, &mut greatest) }?;
        Self::create(device, least)
    }

    /// A stream whose kernels go before those of ordinary ones: for the step.
    ///
    /// # Errors
    /// What the driver says.
    pub fn high_priority(device: &Device) -> Result<Self> {
        device.bind()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the context is current and both are writable.
        unsafe { fallible::stream_priorities(&mut least, &mut greatest) }?;
        Self::create(device, greatest)
    }

    fn create(device: &Device, priority: i32) -> Result<Self> {
        device.bind()?;
        // SAFETY: the context is current.
        let handle = unsafe {
            fallible::stream_create(CUstream_flags::CU_STREAM_NON_BLOCKING as u32, priority)
        }?;
        Ok(Self {
            device: device.clone(),
            handle,
        })
    }

    /// The stream's device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits for all work of the stream.
    ///
    /// # Errors
    /// What the driver says, and any fault of the work waited for.
    pub fn synchronize(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the stream is live.
        unsafe { fallible::stream_synchronize(self.handle) }
    }

    /// As [`Stream::synchronize`], but gives up after `limit`.
    ///
    /// # Errors
    /// [`CudaError::Hung`](crate::CudaError::Hung) after `limit`; else as [`Stream::synchronize`].
    pub fn synchronize_within(&self, limit: Duration) -> Result<()> {
        wait_within(limit, || self.query())
    }

    /// Whether all work of the stream is done.
    ///
    /// # Errors
    /// What the driver says, and any fault of that work.
    pub fn query(&self) -> Result<bool> {
        self.device.bind()?;
        // SAFETY: the stream is live.
        ready(unsafe { fallible::stream_query(self.handle) })
    }

    /// Marks the present end of the stream's work in `event`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both are live.
        unsafe { fallible::event_record(event.handle(), self.handle) }
    }

    /// Lets all later work of this stream wait, on the device, for the last record of `event`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both are live.
        unsafe { fallible::stream_wait(self.handle, event.handle()) }
    }

    /// Copies `src[range]` (bytes) to `dst`, in stream order.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] when the range is not within `src`; what the driver says.
    ///
    /// # Safety
    /// Until the stream has passed the copy: `dst` has as many bytes, `src` lives, and nothing writes that range of it. In a
    /// capture: at every launch of the graph.
    pub unsafe fn copy_to_device(
        &self,
        dst: DevicePtr,
        src: &PinnedBuffer,
        range: Range<usize>,
    ) -> Result<()> {
        let (from, bytes) = src.range(range)?;
        self.device.bind()?;
        // SAFETY: the range is within the buffer; the rest is the caller's.
        unsafe { fallible::copy_to_device(dst.raw(), from.cast_const(), bytes, self.handle) }
    }

    /// Copies as many bytes as `range` has from `src` to `dst[range]`, in stream order.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] when the range is not within `dst`; what the driver says.
    ///
    /// # Safety
    /// Until the stream has passed the copy: `src` has as many bytes, `dst` lives, and nothing reads or writes that range of
    /// it. In a capture: at every launch of the graph.
    pub unsafe fn copy_to_host(
        &self,
        dst: &PinnedBuffer,
        range: Range<usize>,
        src: DevicePtr,
    ) -> Result<()> {
        let (to, bytes) = dst.range(range)?;
        self.device.bind()?;
        // SAFETY: the range is within the buffer; the rest is the caller's.
        unsafe { fallible::copy_to_host(to, src.raw(), bytes, self.handle) }
    }

    /// Copies `bytes` on the device, in stream order. The two do not overlap.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// Until the stream has passed the copy, both have as many bytes. In a capture: at every launch of the graph.
    pub unsafe fn copy_device(&self, dst: DevicePtr, src: DevicePtr, bytes: usize) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the caller's.
        unsafe { fallible::copy_device(dst.raw(), src.raw(), bytes, self.handle) }
    }

    /// Writes `byte` to `bytes` bytes at `dst`, in stream order.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// Until the stream has passed the fill, `dst` has as many bytes. In a capture: at every launch of the graph.
    pub unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the caller's.
        unsafe { fallible::fill(dst.raw(), byte, bytes, self.handle) }
    }

    /// Launches a kernel. `args` holds a pointer to each argument's value, in order; the driver copies the values before it returns.
    ///
    /// # Errors
    /// The refusal with the kernel's name and the launch; faults of the kernel come later, from whoever waits for it.
    ///
    /// # Safety
    /// `args` matches the kernel's parameters in number, size and type, and what the kernel reads and writes is live until the
    /// stream has passed it. In a capture: at every launch of the graph.
    pub unsafe fn launch(
        &self,
        function: &Function,
        launch: Launch,
        args: &mut [*mut c_void],
    ) -> Result<()> {
        self.device.bind()?;
        let call = if launch.cooperative {
            fallible::launch_cooperative
        } else {
            fallible::launch
        };
        // SAFETY: function and stream are live; the rest is the caller's.
        unsafe {
            call(
                function.handle(),
                launch.grid,
                launch.block,
                launch.shared,
                self.handle,
                args.as_mut_ptr(),
            )
        }
        .map_err(|error| error.about(&format!("{} {launch}", function.name())))
    }

    /// Launches a runnable graph.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// What was captured with it is live, with the contract of each captured call, until the stream has passed it.
    pub unsafe fn launch_graph(&self, graph: &GraphExec) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both are live; the rest is the caller's.
        unsafe { fallible::graph_launch(graph.handle(), self.handle) }
    }

    /// Uploads a runnable graph to the device, so that its first launch costs what later ones cost.
    ///
    /// # Errors
    /// What the driver says.
    pub fn upload_graph(&self, graph: &GraphExec) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both are live.
        unsafe { fallible::graph_upload(graph.handle(), self.handle) }
    }

    /// Begins a capture: until [`Stream::end_capture`], on the same thread, work is recorded instead of run. Prefer
    /// [`Stream::capture`], which ends it on every path.
    ///
    /// # Errors
    /// What the driver says.
    pub fn begin_capture(&self, mode: CaptureMode) -> Result<()> {
        self.device.bind()?;
        let mode = match mode {
            CaptureMode::ThreadLocal => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CaptureMode::Global => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            CaptureMode::Relaxed => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
        };
        // SAFETY: the stream is live.
        unsafe { fallible::begin_capture(self.handle, mode) }
    }

    /// Ends the capture; what was recorded. On an error the capture has ended too.
    ///
    /// # Errors
    /// What the driver says, such as a capture that a forbidden call has broken.
    pub fn end_capture(&self) -> Result<Graph> {
        self.device.bind()?;
        // SAFETY: the stream is live.
        let handle = unsafe { fallible::end_capture(self.handle) }?;
        if handle.is_null() {
            return Err(CudaError::of_call(
                "cuStreamEndCapture",
                CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            ));
        }
        Ok(Graph::from_handle(&self.device, handle))
    }

    /// Captures what `record` does on this stream; whatever happens in it, the capture has ended afterwards.
    ///
    /// # Errors
    /// `record`'s error, else what the driver says.
    pub fn capture<E: From<CudaError>>(
        &self,
        mode: CaptureMode,
        record: impl FnOnce(&Self) -> std::result::Result<(), E>,
    ) -> std::result::Result<Graph, E> {
        self.begin_capture(mode)?;
        let end = EndCapture(self);
        let recorded = record(self);
        std::mem::forget(end);
        let graph = self.end_capture();
        recorded?;
        Ok(graph?)
    }

    /// Whether the stream is being captured.
    ///
    /// # Errors
    /// What the driver says.
    pub fn is_capturing(&self) -> Result<bool> {
        self.device.bind()?;
        // SAFETY: the stream is live.
        let status = unsafe { fallible::capture_status(self.handle) }?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    pub(crate) fn handle(&self) -> CUstream {
        self.handle
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream is live and ours; the driver lets its work end.
        log_drop(
            self.device
                .bind()
                .and_then(|()| unsafe { fallible::stream_destroy(self.handle) }),
        );
    }
}

/// Ends a capture when what is captured panics.
struct EndCapture<'a>(&'a Stream);

impl Drop for EndCapture<'_> {
    fn drop(&mut self) {
        log_drop(self.0.end_capture().map(drop));
    }
}
