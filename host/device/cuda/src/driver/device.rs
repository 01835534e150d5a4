//! A device and its primary context. It must never know a stream's work or a buffer's use.

use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute as Attribute, CUresult, CUstream, CUstream_flags,
};

use super::{fallible, log_drop};
use crate::error::{CudaError, NEEDED_DRIVER, Result};

/// Bytes of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free now, for this process and any other.
    pub free: usize,
    /// All of it.
    pub total: usize,
}

/// One CUDA device, by its primary context. Clones share it; every other object of this module holds one, so the context
/// lives as long as they do. Any thread may use it.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    /// Unique in the process, so that a thread knows which device it has bound last.
    id: u64,
    ordinal: u32,
    handle: CUdevice,
    context: CUcontext,
    /// The stream of blocking copies; non-blocking towards all others, so that a copy disturbs no capture.
    copies: CUstream,
    name: String,
    capability: (u32, u32),
    num_multiprocessors: u32,
    max_shared_per_block: u32,
    driver_version: i32,
}

// SAFETY: contexts and streams are handles that the driver lets any thread use; the struct is never changed.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

thread_local! {
    /// The id of the device whose context this thread made current last; 0: none.
    static BOUND: Cell<u64> = const { Cell::new(0) };
}

impl Device {
    /// Opens the device `ordinal` (0 is the first that CUDA_VISIBLE_DEVICES shows) and retains its primary context.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::DriverTooOld`], [`CudaError::NoDevice`], or what the driver says.
    pub fn open(ordinal: u32) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let driver_version = initialize()?;
        let count = num_devices()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        // SAFETY: the driver is initialised and the ordinal is below the count.
        let handle = unsafe { fallible::device(ordinal as c_int) }?;
        let attribute = |attribute| {
            // SAFETY: the handle is the driver's.
            unsafe { fallible::device_attribute(attribute, handle) }
                .map(|value| u32::try_from(value).unwrap_or(0))
        };
        let name = name(handle)?;
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let num_multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let max_shared_per_block =
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        // SAFETY: the handle is the driver's; released in `Drop`, or below.
        let context = unsafe { fallible::primary_retain(handle) }.map_err(|error| {
            if error.is_code(CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
                CudaError::OutOfMemory {
                    what: "the device's context",
                    asked: 0,
                    free: 0,
                    total: 0,
                    remedy: "end other programs that use this device (`nvidia-smi`)",
                }
            } else {
                error.about(&format!("device {ordinal}"))
            }
        })?;
        let copies = bind_context(context).and_then(|()| {
            // SAFETY: the context is current.
            unsafe { fallible::stream_create(CUstream_flags::CU_STREAM_NON_BLOCKING as u32, 0) }
        });
        let copies = match copies {
            Ok(copies) => copies,
            Err(error) => {
                // SAFETY: retained above, used by nobody.
                log_drop(unsafe { fallible::primary_release(handle) });
                return Err(error);
            }
        };
        let device = Self(Arc::new(Inner {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            ordinal,
            handle,
            context,
            copies,
            name,
            capability,
            num_multiprocessors,
            max_shared_per_block,
            driver_version,
        }));
        BOUND.set(device.0.id);
        Ok(device)
    }

    /// How many devices the driver shows.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`] and [`CudaError::DriverTooOld`] as [`Device::open`].
    pub fn count() -> Result<u32> {
        initialize()?;
        num_devices()
    }

    /// The ordinal it was opened by.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// The device's name, such as "NVIDIA H200".
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The compute capability: major, minor.
    pub fn capability(&self) -> (u32, u32) {
        self.0.capability
    }

    /// Multiprocessors.
    pub fn num_multiprocessors(&self) -> u32 {
        self.0.num_multiprocessors
    }

    /// Bytes of shared memory that one block may have at most ([`super::Function::set_max_shared`]).
    pub fn max_shared_per_block(&self) -> u32 {
        self.0.max_shared_per_block
    }

    /// The CUDA version that the driver serves: 1000 · major + 10 · minor.
    pub fn driver_version(&self) -> i32 {
        self.0.driver_version
    }

    /// Bytes of the level-2 cache.
    ///
    /// # Errors
    /// What the driver says.
    pub fn l2_bytes(&self) -> Result<usize> {
        // SAFETY: the handle is the driver's.
        let bytes = unsafe {
            fallible::device_attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, self.0.handle)
        }?;
        Ok(usize::try_from(bytes).unwrap_or(0))
    }

    /// Free and total memory now.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory(&self) -> Result<MemoryInfo> {
        self.bind()?;
        let mut info = MemoryInfo { free: 0, total: 0 };
        // SAFETY: both are writable.
        unsafe { fallible::memory_info(&mut info.free, &mut info.total) }?;
        Ok(info)
    }

    /// Makes the device's context current on this thread; free when this thread bound this device last. Nothing else in the
    /// process may change the current context behind it.
    ///
    /// # Errors
    /// What the driver says.
    #[inline]
    pub fn bind(&self) -> Result<()> {
        if BOUND.get() == self.0.id {
            return Ok(());
        }
        bind_context(self.0.context)?;
        BOUND.set(self.0.id);
        Ok(())
    }

    /// Waits for all work of the device. It fails, and breaks the capture, while any stream of the device is captured.
    ///
    /// # Errors
    /// What the driver says, and any fault of the work waited for.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the context is current.
        unsafe { fallible::synchronize_context() }
    }

    /// Whether the device still serves; does not wait, and disturbs no capture.
    ///
    /// # Errors
    /// [`CudaError::Lost`] once it is lost.
    pub fn check(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream lives as long as the device, and is never captured.
        super::event::ready(unsafe { fallible::stream_query(self.0.copies) }).map(|_| ())
    }

    /// The stream of blocking copies.
    pub(super) fn copies(&self) -> CUstream {
        self.0.copies
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (major, minor) = self.capability();
        write!(
            f,
            "cuda:{} ({}, {major}.{minor})",
            self.ordinal(),
            self.name()
        )
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if bind_context(self.context).is_ok() {
            // SAFETY: made by `open`, used by nobody any more.
            log_drop(unsafe { fallible::stream_destroy(self.copies) });
        }
        BOUND.set(0);
        // SAFETY: retained once by `open`; every object that needs the context held a clone of the device.
        log_drop(unsafe { fallible::primary_release(self.handle) });
    }
}

fn bind_context(context: CUcontext) -> Result<()> {
    // SAFETY: a context that `open` retained.
    unsafe { fallible::set_current(context) }
}

/// Loads and initialises the driver once; its version.
fn initialize() -> Result<i32> {
    static STATE: OnceLock<Result<i32>> = OnceLock::new();
    STATE
        .get_or_init(|| {
            // The bindings panic at first use when the library is missing, so this comes before everything.
            if !fallible::is_present() {
                return Err(CudaError::NoDriver);
            }
            // SAFETY: allowed before initialisation.
            let found = unsafe { fallible::driver_version() }.map_err(no_driver)?;
            // Before anything else: an older driver may lack functions that the bindings look up.
            if found < NEEDED_DRIVER {
                return Err(CudaError::DriverTooOld {
                    found,
                    needed: NEEDED_DRIVER,
                });
            }
            // SAFETY: no precondition.
            match unsafe { fallible::init() } {
                Err(error) if error.is_code(CUresult::CUDA_ERROR_NO_DEVICE) => Ok(found),
                Err(error) => Err(no_driver(error)),
                Ok(()) => Ok(found),
            }
        })
        .clone()
}

/// A stub of the library, which toolkits ship for linking, is no driver.
fn no_driver(error: CudaError) -> CudaError {
    if error.is_code(CUresult::CUDA_ERROR_STUB_LIBRARY) {
        CudaError::NoDriver
    } else {
        error
    }
}

/// Devices that the driver shows; none is not an error here.
fn num_devices() -> Result<u32> {
    // SAFETY: `initialize` has run.
    match unsafe { fallible::device_count() } {
        Ok(count) => Ok(u32::try_from(count).unwrap_or(0)),
        Err(error)
            if error.is_code(CUresult::CUDA_ERROR_NO_DEVICE)
                || error.is_code(CUresult::CUDA_ERROR_NOT_INITIALIZED) =>
        {
            Ok(0)
        }
        Err(error) => Err(error),
    }
}

fn name(handle: CUdevice) -> Result<String> {
    let mut buffer = [0_u8; 256];
    // SAFETY: the driver writes at most the given bytes, with a terminator.
    unsafe { fallible::device_name(buffer.as_mut_ptr().cast(), buffer.len() as c_int, handle) }?;
    Ok(CStr::from_bytes_until_nul(&buffer).map_or_else(
        |_| "unnamed".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_says_so_and_does_not_panic() {
        if fallible::is_present() {
            return;
        }
        assert_eq!(Device::open(0).unwrap_err(), CudaError::NoDriver);
        assert_eq!(Device::open(7).unwrap_err(), CudaError::NoDriver);
        assert_eq!(Device::count().unwrap_err(), CudaError::NoDriver);
    }

    #[test]
    fn a_device_that_is_not_there_is_named_with_the_number_of_those_that_are() {
        match Device::open(1000) {
            Err(CudaError::NoDevice { ordinal, count }) => {
                assert_eq!(ordinal, 1000);
                assert!(count < 1000);
            }
            Err(CudaError::NoDriver | CudaError::DriverTooOld { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
}
