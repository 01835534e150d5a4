//! Memory of the device, and pinned memory of the host. It must never know what is stored in it.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;

use bytemuck::{AnyBitPattern, NoUninit};
use cudarc::driver::sys::{
    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_WRITECOMBINED, CUdeviceptr, CUresult, CUstream,
};

use super::{Device, MemoryInfo, fallible, log_drop};
use crate::error::{CudaError, Result};

/// An address on the device. It keeps nothing alive.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    bytemuck::Pod,
    bytemuck::Zeroable,
)]
#[repr(transparent)]
pub struct DevicePtr(u64);

impl DevicePtr {
    /// The address that no memory has; kernels take it for "not given".
    pub const NULL: Self = Self(0);

    /// The address `bytes` further.
    #[must_use]
    pub const fn offset(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes as u64))
    }

    /// The number that kernels are given.
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// Whether it is [`DevicePtr::NULL`].
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// An address from its number.
    pub const fn from_raw(address: u64) -> Self {
        Self(address)
    }
}

/// Bytes on the device, aligned to 256 at least; freed on drop. **The owner makes sure that no stream uses them any more
/// before it drops the buffer** (the ownership rule of [the module](super)).
#[derive(Debug)]
pub struct DeviceBuffer {
    device: Device,
    ptr: CUdeviceptr,
    len: usize,
}

impl DeviceBuffer {
    /// `bytes` bytes of unknown content; `what` names them when there is no room. 0 bytes: a buffer at [`DevicePtr::NULL`].
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], or what the driver says.
    pub fn alloc(device: &Device, bytes: usize, what: &'static str) -> Result<Self> {
        device.bind()?;
        let ptr = if bytes == 0 {
            0
        } else {
            // SAFETY: the context is current.
            unsafe { fallible::alloc(bytes) }
                .map_err(|error| out_of_memory(error, device, what, bytes))?
        };
        Ok(Self {
            device: device.clone(),
            ptr,
            len: bytes,
        })
    }

    /// `bytes` bytes of zero.
    ///
    /// # Errors
    /// As [`DeviceBuffer::alloc`].
    pub fn alloc_zeroed(device: &Device, bytes: usize, what: &'static str) -> Result<Self> {
        let mut buffer = Self::alloc(device, bytes, what)?;
        buffer.fill(0)?;
        Ok(buffer)
    }

    /// A copy of `values`; blocks until it is made.
    ///
    /// # Errors
    /// As [`DeviceBuffer::alloc`].
    pub fn from_host<T: NoUninit>(
        device: &Device,
        values: &[T],
        what: &'static str,
    ) -> Result<Self> {
        let mut buffer = Self::alloc(device, size_of_val(values), what)?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// The first byte's address.
    pub fn ptr(&self) -> DevicePtr {
        DevicePtr(self.ptr)
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The buffer's device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Copies `values` to the bytes at `offset`; blocks until it is done. Not ordered with any stream: synchronise those that
    /// use the bytes first.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] when they do not fit; what the driver says.
    pub fn write<T: NoUninit>(&mut self, offset: usize, values: &[T]) -> Result<()> {
        let src: &[u8] = bytemuck::cast_slice(values);
        self.check(offset, src.len())?;
        blocking(&self.device, src.len(), |copies| {
            let dst = self.ptr().offset(offset).raw();
            // SAFETY: the bytes are within the buffer, and `blocking` waits for the copy while `src` lives.
            unsafe { fallible::copy_to_device(dst, src.as_ptr().cast(), src.len(), copies) }
        })
    }

    /// Copies from the bytes at `offset` to `values`; blocks until it is done. Not ordered with any stream: synchronise those
    /// that write the bytes first.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] when the buffer has not as many; what the driver says.
    pub fn read<T: AnyBitPattern + NoUninit>(&self, offset: usize, values: &mut [T]) -> Result<()> {
        let dst: &mut [u8] = bytemuck::cast_slice_mut(values);
        self.check(offset, dst.len())?;
        blocking(&self.device, dst.len(), |copies| {
            let src = self.ptr().offset(offset).raw();
            // SAFETY: the bytes are within the buffer, and `blocking` waits for the copy while `dst` lives.
            unsafe { fallible::copy_to_host(dst.as_mut_ptr().cast(), src, dst.len(), copies) }
        })
    }

    /// The whole content, as values of `T`; for tests and checks. As [`DeviceBuffer::read`].
    ///
    /// # Errors
    /// [`CudaError::Invalid`] when the length is no multiple of `T`'s size; what the driver says.
    pub fn to_host<T: AnyBitPattern + NoUninit>(&self) -> Result<Vec<T>> {
        if size_of::<T>() == 0 || !self.len.is_multiple_of(size_of::<T>()) {
            return Err(CudaError::Invalid {
                what: "a buffer's length in bytes",
                value: format!("{} for values of {} bytes", self.len, size_of::<T>()),
                remedy: "read it as the type it holds",
            });
        }
        let mut values = vec![<T as bytemuck::Zeroable>::zeroed(); self.len / size_of::<T>()];
        self.read(0, &mut values)?;
        Ok(values)
    }

    /// Writes `byte` to the whole buffer; blocks until it is done. Not ordered with any stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn fill(&mut self, byte: u8) -> Result<()> {
        blocking(&self.device, self.len, |copies| {
            // SAFETY: the bytes are the buffer's.
            unsafe { fallible::fill(self.ptr, byte, self.len, copies) }
        })
    }

    fn check(&self, offset: usize, bytes: usize) -> Result<()> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(CudaError::Invalid {
                what: "a range of a device buffer",
                value: format!("{bytes} bytes at {offset} of {}", self.len),
                remedy: "stay within the buffer",
            }),
        }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated by `alloc`, freed once.
            log_drop(
                self.device
                    .bind()
                    .and_then(|()| unsafe { fallible::free(self.ptr) }),
            );
        }
    }
}

/// Page-locked bytes of the host, which the device copies from and to without the host. Zero at first; aligned to a page.
/// **The owner makes sure that no stream uses them any more before it drops the buffer** (the ownership rule of
/// [the module](super)).
#[derive(Debug)]
pub struct PinnedBuffer {
    device: Device,
    ptr: NonNull<u8>,
    len: usize,
    write_combined: bool,
}

// SAFETY: plain memory; nothing of it belongs to a thread.
unsafe impl Send for PinnedBuffer {}
// SAFETY: shared references only read; what a stream writes is the contract of the copy that was begun.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// `bytes` bytes of zero, at least one. `write_combined`: faster for the device to read and very slow for the host to: only
    /// for what the host writes, in rising order, and never reads.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] (of the host's lockable memory), [`CudaError::Invalid`] for 0 bytes, or what the driver says.
    pub fn new(
        device: &Device,
        bytes: usize,
        write_combined: bool,
        what: &'static str,
    ) -> Result<Self> {
        if bytes == 0 {
            return Err(CudaError::Invalid {
                what: "a pinned buffer's length",
                value: "0".to_owned(),
                remedy: "give it at least one byte",
            });
        }
        device.bind()?;
        let flags = CU_MEMHOSTALLOC_PORTABLE
            | if write_combined {
                CU_MEMHOSTALLOC_WRITECOMBINED
            } else {
                0
            };
        // SAFETY: the context is current.
        let ptr = unsafe { fallible::host_alloc(bytes, flags) }.map_err(|error| {
            out_of_memory(error, device, what, bytes)
                .with_remedy("it is page-locked host memory: free host memory, or raise the container's limit of it")
        })?;
        let Some(ptr) = NonNull::new(ptr.cast::<u8>()) else {
            return Err(
                CudaError::of_call("cuMemHostAlloc", CUresult::CUDA_ERROR_OUT_OF_MEMORY)
                    .about(what),
            );
        };
        // SAFETY: `bytes` bytes were allocated.
        unsafe { ptr.write_bytes(0, bytes) };
        Ok(Self {
            device: device.clone(),
            ptr,
            len: bytes,
            write_combined,
        })
    }

    /// The bytes, to read; never those of a write-combined buffer, and never a range that a copy under way writes.
    pub fn as_slice(&self) -> &[u8] {
        debug_assert!(!self.write_combined, "the host reads write-combined memory");
        // SAFETY: allocated and initialised; nobody writes while it is shared but a copy, whose contract forbids reading.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// The bytes, to write (in rising order when write-combined); never a range that a copy under way reads or writes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: allocated and initialised, borrowed exclusively; a copy under way forbids it by its contract.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }

    /// Bytes; at least one.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the host must not read it.
    pub fn is_write_combined(&self) -> bool {
        self.write_combined
    }

    /// Address and length of a range within the buffer.
    pub(super) fn range(&self, range: Range<usize>) -> Result<(*mut c_void, usize)> {
        if range.start > range.end || range.end > self.len {
            return Err(CudaError::Invalid {
                what: "a range of a pinned buffer",
                value: format!("{}..{} of {}", range.start, range.end, self.len),
                remedy: "stay within the buffer",
            });
        }
        // SAFETY: the start is within the allocation or at its end.
        let start = unsafe { self.ptr.as_ptr().add(range.start) };
        Ok((start.cast(), range.end - range.start))
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once.
        log_drop(
            self.device
                .bind()
                .and_then(|()| unsafe { fallible::host_free(self.ptr.as_ptr().cast()) }),
        );
    }
}

/// Begins `work` on the stream of blocking copies and waits for it.
fn blocking(
    device: &Device,
    bytes: usize,
    work: impl FnOnce(CUstream) -> Result<()>,
) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    device.bind()?;
    let begun = work(device.copies());
    // Also after an error, so that nothing is under way when the host's memory is let go.
    // SAFETY: the stream lives as long as the device.
    let ended = unsafe { fallible::stream_synchronize(device.copies()) };
    begun.and(ended)
}

/// The `int` at `ptr`, which the caller knows to be one on the device.
pub(super) fn read_i32(device: &Device, ptr: DevicePtr) -> Result<i32> {
    let mut value = 0_i32;
    blocking(device, size_of::<i32>(), |copies| {
        // SAFETY: the caller's address; `blocking` waits for the copy while `value` lives.
        unsafe {
            fallible::copy_to_host((&raw mut value).cast(), ptr.raw(), size_of::<i32>(), copies)
        }
    })?;
    Ok(value)
}

/// The driver's "out of memory" with what was asked and what there is; other errors with what it was for.
fn out_of_memory(error: CudaError, device: &Device, what: &'static str, asked: usize) -> CudaError {
    if !error.is_code(CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
        return error.about(what);
    }
    let MemoryInfo { free, total } = device.memory().unwrap_or(MemoryInfo { free: 0, total: 0 });
    CudaError::OutOfMemory {
        what,
        asked,
        free,
        total,
        remedy: "end other programs that use this device (`nvidia-smi`), or ask for less",
    }
}
