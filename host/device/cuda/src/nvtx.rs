//! Named ranges that a profiler shows (NVTX), behind a flag. It must never know what is profiled.
//!
//! Off, a range costs one relaxed load. Without the library (libnvToolsExt.so.1) ranges stay off, silently.

use std::ffi::c_char;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::nvtx::sys;

/// Whether ranges are shown; set once, after the library was found.
static ENABLED: AtomicBool = AtomicBool::new(false);

/// Switches ranges on, if the library is there; whether it is. Called once, at start.
pub fn enable() -> bool {
    // The bindings panic at first use when the library is missing.
    let present = crate::libraries::preload("libnvToolsExt.so.1") && is_present();
    if !present {
        tracing::debug!("libnvToolsExt.so.1 was not found: no NVTX ranges");
    }
    ENABLED.store(present, Ordering::Relaxed);
    present
}

/// Whether ranges are shown.
#[inline]
pub fn is_enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

fn is_present() -> bool {
    // SAFETY: loads and unloads a library by name; its initialisers have no preconditions.
    unsafe { sys::is_culib_present() }
}

/// A range from its making to its drop, on this thread; ranges nest.
#[must_use = "the range ends where it is dropped"]
#[derive(Debug)]
pub struct Range {
    pushed: bool,
    /// Ranges belong to the thread that pushed them.
    thread: PhantomData<*const ()>,
}

impl Range {
    /// Begins a range; of a longer name the first 63 bytes are shown.
    #[inline]
    pub fn new(name: &str) -> Self {
        let pushed = is_enabled();
        if pushed {
            push(name);
        }
        Self {
            pushed,
            thread: PhantomData,
        }
    }
}

impl Drop for Range {
    #[inline]
    fn drop(&mut self) {
        if self.pushed {
            // SAFETY: the library is present, and this thread has pushed a range.
            unsafe { sys::nvtxRangePop() };
        }
    }
}

#[cold]
fn push(name: &str) {
    let text = terminated(name);
    // SAFETY: the library is present; the text ends in zero and is copied.
    unsafe { sys::nvtxRangePushA(text.as_ptr().cast::<c_char>()) };
}

/// The name's first bytes, up to any zero, with a zero behind them.
fn terminated(name: &str) -> [u8; 64] {
    let mut text = [0_u8; 64];
    let len = name.len().min(text.len() - 1);
    text[..len].copy_from_slice(&name.as_bytes()[..len]);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cut_and_end_in_zero() {
        assert_eq!(&terminated("step")[..5], b"step\0");
        let long = terminated(&"x".repeat(200));
        assert_eq!((long[62], long[63]), (b'x', 0));
    }

    #[test]
    fn ranges_without_the_library_do_nothing() {
        let range = Range::new("off");
        assert!(!range.pushed);
        drop(range);
        if enable() {
            drop(Range::new("on"));
        } else {
            assert!(!Range::new("still off").pushed);
        }
        ENABLED.store(false, Ordering::Relaxed);
    }
}
