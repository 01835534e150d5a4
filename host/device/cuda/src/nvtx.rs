//! Named ranges that a profiler shows (NVTX), behind a flag. It must never know what is profiled.
//!
//! Off, a range costs one load. Without the library ranges stay off, silently.

use std::ffi::{c_char, c_int};
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::libraries::Library;

/// The library: CUDA 13's (the bindings that this crate uses elsewhere know only the older one), else the older one.
const LIBRARIES: [&str; 2] = ["libnvtx3interop.so.1", "libnvToolsExt.so.1"];

/// Whether ranges are shown; set once, after the library was found.
static ENABLED: AtomicBool = AtomicBool::new(false);

static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();

#[derive(Clone, Copy)]
struct Functions {
    push: unsafe extern "C" fn(*const c_char) -> c_int,
    pop: unsafe extern "C" fn() -> c_int,
}

impl Functions {
    fn load() -> Option<Self> {
        LIBRARIES.into_iter().find_map(|file| {
            let library = Library::load(file)?;
            let push = library.symbol(c"nvtxRangePushA")?;
            let pop = library.symbol(c"nvtxRangePop")?;
            // SAFETY: the functions have these types in every version of the library.
            Some(unsafe {
                Self {
                    push: std::mem::transmute::<
                        *mut std::ffi::c_void,
                        unsafe extern "C" fn(*const c_char) -> c_int,
                    >(push.as_ptr()),
                    pop: std::mem::transmute::<
                        *mut std::ffi::c_void,
                        unsafe extern "C" fn() -> c_int,
                    >(pop.as_ptr()),
                }
            })
        })
    }
}

/// Switches ranges on, if the library is there; whether it is. Called once, at start.
pub fn enable() -> bool {
    let present = FUNCTIONS.get_or_init(Functions::load).is_some();
    if !present {
        tracing::debug!("none of {LIBRARIES:?} was found: no NVTX ranges");
    }
    ENABLED.store(present, Ordering::Relaxed);
    present
}

/// Whether ranges are shown.
#[inline]
pub fn is_enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
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
        Self {
            pushed: is_enabled() && push(name),
            thread: PhantomData,
        }
    }
}

impl Drop for Range {
    #[inline]
    fn drop(&mut self) {
        if self.pushed {
            pop();
        }
    }
}

/// Whether a range was begun.
#[cold]
fn push(name: &str) -> bool {
    let Some(Some(functions)) = FUNCTIONS.get() else {
        return false;
    };
    let text = terminated(name);
    // SAFETY: the text ends in zero and is copied.
    unsafe { (functions.push)(text.as_ptr().cast::<c_char>()) };
    true
}

#[cold]
fn pop() {
    if let Some(Some(functions)) = FUNCTIONS.get() {
        // SAFETY: this thread has pushed the range that ends.
        unsafe { (functions.pop)() };
    }
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
