//! The driver's objects as safe types: [`Device`], [`Stream`], [`Event`], [`DeviceBuffer`], [`PinnedBuffer`], [`Module`],
//! [`Function`], [`Graph`], [`GraphExec`]. It must never know what a kernel computes.
//!
//! Three levels, not mixed: the raw bindings are called by `fallible` only; the types here call `fallible` only.
//!
//! **Ownership rule.** Asynchronous work holds no reference to the memory it reads or writes. Whoever frees a
//! [`DeviceBuffer`] or [`PinnedBuffer`] first makes sure that the streams which use it have passed that use
//! ([`Stream::synchronize`], [`Event::synchronize`]), and that no graph which was captured with it is launched again. `Drop`
//! does not synchronise the context: that would break a capture which another thread has begun.
//!
//! **Threads.** Every call that needs the device's context makes it current on the calling thread ([`Device::bind`]), which
//! costs nothing when it already is.

mod device;
mod event;
pub(crate) mod fallible;
mod graph;
mod memory;
mod module;
mod stream;

pub use device::{Device, MemoryInfo};
pub use event::Event;
pub use graph::{Graph, GraphExec};
pub use memory::{DeviceBuffer, DevicePtr, PinnedBuffer};
pub use module::{Function, Launch, Module};
pub use stream::{CaptureMode, Stream};

use std::time::{Duration, Instant};

use crate::error::{CudaError, Result};

/// So long work is asked for without pause.
const EAGER: Duration = Duration::from_millis(20);
/// Then with this pause: whoever waits that long is in no hurry.
const PAUSE: Duration = Duration::from_micros(200);

/// Asks until `done`, at most for `limit`: the driver's own waits have no end when a device hangs.
fn wait_within(limit: Duration, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    while !done()? {
        let waited = began.elapsed();
        if waited >= limit {
            return Err(CudaError::Hung { waited: limit });
        }
        if waited >= EAGER {
            std::thread::sleep(PAUSE);
        } else {
            std::hint::spin_loop();
        }
    }
    Ok(())
}

/// Logs what a `Drop` could not report.
fn log_drop(result: Result<()>) {
    if let Err(error) = result {
        tracing::debug!(%error, "a CUDA object was not released");
    }
}

// Every object may be made on one thread and used on another; those that are only handles, by several at once.
const _: () = {
    const fn send<T: Send>() {}
    const fn shared<T: Send + Sync>() {}
    shared::<Device>();
    shared::<Stream>();
    shared::<Event>();
    shared::<Module>();
    shared::<Function>();
    shared::<DeviceBuffer>();
    shared::<PinnedBuffer>();
    send::<Graph>();
    send::<GraphExec>();
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_does_not_end_is_given_up_on_and_is_fatal() {
        let error = wait_within(Duration::from_millis(30), || Ok(false)).unwrap_err();
        assert!(error.is_fatal());
        assert!(
            error.to_string().starts_with(
                "the CUDA device did not finish its work within 0.03 s: end the process"
            ),
            "{error}"
        );
        let mut asked = 0;
        let done = wait_within(Duration::from_secs(60), || {
            asked += 1;
            Ok(asked == 3)
        });
        assert_eq!((done, asked), (Ok(()), 3));
    }
}
