//! Loaded kernel images, and their functions. It must never know what a kernel computes.

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute as Attribute, CUjit_option, CUmodule, CUresult,
};

use super::memory::read_i32;
use super::{Device, DevicePtr, fallible, log_drop};
use crate::error::{CudaError, Result};

/// A loaded image: a fat binary, a cubin or PTX. Its functions keep it loaded.
#[derive(Clone, Debug)]
pub struct Module(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: Device,
    handle: CUmodule,
}

// SAFETY: a module is a handle that the driver lets any thread use.
unsafe impl Send for Inner {}
// SAFETY: as above; the struct is never changed.
unsafe impl Sync for Inner {}

impl Module {
    /// Loads an image that a CUDA compiler has made; PTX ends in a zero byte.
    ///
    /// # Errors
    /// [`CudaError::NoKernelImage`] (with no list: [`CudaError::with_embedded`]) when the image has nothing for this device,
    /// [`CudaError::Invalid`] when it is no image or is cut off, or what the driver says.
    pub fn load(device: &Device, image: &[u8]) -> Result<Self> {
        check_image(image)?;
        device.bind()?;
        let mut log = vec![0_u8; 4096];
        let mut options = [
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
        // SAFETY: the image is whole (`check_image`), and the log outlives the call.
        let loaded = unsafe {
            fallible::module_load(
                image.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        let handle = loaded.map_err(|error| {
            let text =
                String::from_utf8_lossy(log.split(|byte| *byte == 0).next().unwrap_or_default());
            if is_no_image(&error) {
                tracing::debug!(%error, log = %text.trim(), "a kernel image was refused");
                CudaError::NoKernelImage {
                    capability: device.capability(),
                    embedded: Vec::new(),
                }
            } else if text.trim().is_empty() {
                error
            } else {
                error.about(text.trim())
            }
        })?;
        Ok(Self(Arc::new(Inner {
            device: device.clone(),
            handle,
        })))
    }

    /// The function of this name (unmangled), loaded on the device now rather than at its first launch.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_FOUND` with the name, or what the driver says.
    pub fn function(&self, name: &str) -> Result<Function> {
        self.0.device.bind()?;
        let symbol = symbol(name)?;
        // SAFETY: the module is live, the name ends in zero; then the function is the module's.
        let handle = unsafe {
            fallible::module_function(self.0.handle, symbol.as_ptr())
                .and_then(|handle| fallible::function_load(handle).map(|()| handle))
        }
        .map_err(|error| error.about(name))?;
        Ok(Function {
            module: self.clone(),
            handle,
            name: name.into(),
        })
    }

    /// The value of a global `int` of the image.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_FOUND` with the name, [`CudaError::Invalid`] when it has not four bytes, or what the driver says.
    pub fn global_i32(&self, name: &str) -> Result<i32> {
        self.0.device.bind()?;
        let symbol = symbol(name)?;
        let mut bytes = 0;
        // SAFETY: the module is live, the name ends in zero, the size is writable.
        let ptr = unsafe { fallible::module_global(self.0.handle, symbol.as_ptr(), &mut bytes) }
            .map_err(|error| error.about(name))?;
        if bytes != size_of::<i32>() {
            return Err(CudaError::Invalid {
                what: "the size of a global of the kernel image",
                value: format!("{bytes} bytes ({name})"),
                remedy: "an int has four",
            });
        }
        read_i32(&self.0.device, DevicePtr::from_raw(ptr))
    }

    /// The module's device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the module is live and ours, and no function holds it any more.
        log_drop(
            self.device
                .bind()
                .and_then(|()| unsafe { fallible::module_unload(self.handle) }),
        );
    }
}

/// A kernel of a loaded image, which stays loaded as long as this lives. **The owner drops it, and with it the image, when
/// no stream and no graph runs it any more.**
#[derive(Clone, Debug)]
pub struct Function {
    module: Module,
    handle: CUfunction,
    name: Arc<str>,
}

// SAFETY: a function is a handle that the driver lets any thread use.
unsafe impl Send for Function {}
// SAFETY: as above; the struct is never changed.
unsafe impl Sync for Function {}

impl Function {
    /// Its symbol.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Allows launches with up to `bytes` of dynamic shared memory; without it 48 KiB less what is static.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] when a block of this device cannot have as much; what the driver says.
    pub fn set_max_shared(&self, bytes: u32) -> Result<()> {
        let device = &self.module.0.device;
        device.bind()?;
        let room = device
            .max_shared_per_block()
            .saturating_sub(self.static_shared()?);
        if bytes > room {
            tracing::debug!(kernel = %self.name, bytes, room, "too much shared memory");
            return Err(CudaError::Unsupported {
                what: "that much shared memory in one block",
                device: format!(
                    "{} ({}: {bytes} bytes, room for {room})",
                    device.name(),
                    self.name
                ),
                remedy: "choose a smaller tile or another kernel",
            });
        }
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is live.
        unsafe { fallible::function_set_attribute(self.handle, attribute, bytes as c_int) }
            .map_err(|error| error.about(&self.name))
    }

    /// Registers of one thread.
    ///
    /// # Errors
    /// What the driver says.
    pub fn registers(&self) -> Result<u32> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)
    }

    /// Bytes of local memory of one thread; not 0 when registers spill.
    ///
    /// # Errors
    /// What the driver says.
    pub fn local_bytes(&self) -> Result<u32> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
    }

    /// Bytes of static shared memory of one block.
    ///
    /// # Errors
    /// What the driver says.
    pub fn static_shared(&self) -> Result<u32> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
    }

    /// Threads that one block may have at most.
    ///
    /// # Errors
    /// What the driver says.
    pub fn max_threads(&self) -> Result<u32> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
    }

    /// Blocks of `threads` threads and `shared` bytes of dynamic shared memory that one multiprocessor holds at once. A cooperative
    /// grid has at most this many times [`Device::num_multiprocessors`].
    ///
    /// # Errors
    /// What the driver says.
    pub fn max_blocks_per_multiprocessor(&self, threads: u32, shared: u32) -> Result<u32> {
        self.module.0.device.bind()?;
        // SAFETY: the function is live.
        let blocks =
            unsafe { fallible::function_occupancy(self.handle, threads as c_int, shared as usize) }
                .map_err(|error| error.about(&self.name))?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32> {
        self.module.0.device.bind()?;
        // SAFETY: the function is live.
        let value = unsafe { fallible::function_attribute(attribute, self.handle) }
            .map_err(|error| error.about(&self.name))?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    pub(super) fn handle(&self) -> CUfunction {
        self.handle
    }
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks: x, y, z.
    pub grid: (u32, u32, u32),
    /// Threads of a block: x, y, z.
    pub block: (u32, u32, u32),
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
    /// Whether all blocks run at once, so that they may wait for each other.
    pub cooperative: bool,
}

impl std::fmt::Display for Launch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            grid,
            block,
            shared,
            cooperative,
        } = self;
        write!(
            f,
            "grid {}x{}x{}, block {}x{}x{}, {shared} bytes shared{}",
            grid.0,
            grid.1,
            grid.2,
            block.0,
            block.1,
            block.2,
            if *cooperative { ", cooperative" } else { "" }
        )
    }
}

fn symbol(name: &str) -> Result<CString> {
    CString::new(name).map_err(|_| CudaError::Invalid {
        what: "a kernel's name",
        value: format!("{name:?}"),
        remedy: "names have no zero byte",
    })
}

/// Whether the driver says that the image has nothing that this device or this driver runs.
fn is_no_image(error: &CudaError) -> bool {
    [
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
        CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED,
    ]
    .into_iter()
    .any(|code| error.is_code(code))
}

/// The driver takes an address without a length, so what tells it where the image ends is looked at first.
fn check_image(image: &[u8]) -> Result<()> {
    const FATBIN: [u8; 4] = 0xBA55_ED50_u32.to_le_bytes();
    let whole = if image.starts_with(&FATBIN) {
        // Magic (4 bytes), version (2), size of the header (2), size of what follows it (8); little-endian.
        let header = image
            .get(6..8)
            .map(|bytes| u64::from(u16::from_le_bytes([bytes[0], bytes[1]])));
        let body = image
            .get(8..16)
            .and_then(|bytes| bytes.try_into().ok())
            .map(u64::from_le_bytes);
        header
            .zip(body)
            .and_then(|(header, body)| header.checked_add(body))
            .is_some_and(|end| end <= image.len() as u64)
    } else if image.starts_with(b"\x7fELF") {
        // The header's table of sections, which is what the driver walks: offset at 40, size of an entry at 58, entries at 60.
        let offset = image
            .get(40..48)
            .and_then(|bytes| bytes.try_into().ok())
            .map(u64::from_le_bytes);
        let number = |at: usize| {
            image
                .get(at..at + 2)
                .map(|bytes| u64::from(u16::from_le_bytes([bytes[0], bytes[1]])))
        };
        match (offset, number(58), number(60)) {
            (Some(offset), Some(size), Some(entries)) => offset
                .checked_add(size * entries)
                .is_some_and(|end| end <= image.len() as u64),
            _ => false,
        }
    } else {
        // PTX is text: it says its version, and ends in zero.
        image.last() == Some(&0) && image.windows(8).any(|window| window == b".version")
    };
    if whole {
        return Ok(());
    }
    Err(CudaError::Invalid {
        what: "a kernel image",
        value: format!(
            "{} bytes that are no whole fat binary, cubin or zero-ended PTX",
            image.len()
        ),
        remedy: "build the kernels again (cargo xtask kernels)",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_is_cut_off_is_refused() {
        let mut image = 0xBA55_ED50_u32.to_le_bytes().to_vec();
        image.extend_from_slice(&[1, 0, 16, 0]);
        image.extend_from_slice(&8_u64.to_le_bytes());
        image.extend_from_slice(&[0; 8]);
        assert_eq!(check_image(&image), Ok(()));
        for len in 0..image.len() {
            assert!(check_image(&image[..len]).is_err(), "{len} bytes");
        }
        image[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(check_image(&image).is_err());
    }

    #[test]
    fn every_embedded_image_is_whole_and_is_refused_without_its_end() {
        for image in crate::images::embedded() {
            assert_eq!(check_image(image.bytes), Ok(()), "{image:?}");
            let cut = &image.bytes[..image.bytes.len() - 1];
            assert!(check_image(cut).is_err(), "{image:?}");
        }
    }

    #[test]
    fn a_cubin_and_ptx_are_checked_for_their_ends() {
        let mut elf = vec![0_u8; 64 + 2 * 64];
        elf[..4].copy_from_slice(b"\x7fELF");
        elf[40..48].copy_from_slice(&64_u64.to_le_bytes());
        elf[58..60].copy_from_slice(&64_u16.to_le_bytes());
        elf[60..62].copy_from_slice(&2_u16.to_le_bytes());
        assert_eq!(check_image(&elf), Ok(()));
        assert!(check_image(&elf[..elf.len() - 1]).is_err());
        assert!(check_image(&elf[..20]).is_err());
        assert_eq!(check_image(b".version 9.0\n.target sm_80\n\0"), Ok(()));
        assert!(check_image(b".version 9.0\n.target sm_80\n").is_err());
        assert!(check_image(b"hello\0").is_err());
    }
}
