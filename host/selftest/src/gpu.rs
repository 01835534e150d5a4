//! What every check needs of the device: one stream, the kernels, products, and buffers that are poisoned before a kernel
//! writes them. It must never know a check.

use bytemuck::NoUninit;
use timetable_device_cuda::{
    CudaError,
    blas::{Gemm, USUAL_WORKSPACE},
    driver::{Device, DeviceBuffer, Stream},
    kernels::Kernels,
};
use timetable_types::Dtype;

use crate::element;

/// The byte that poison consists of: NaN as bf16, f16, f32 and e4m3, −1 as an integer.
pub const POISON: u8 = 0xff;

/// Elements after a result that no kernel may touch.
pub const GUARD: usize = 64;

/// The device under test.
pub struct Gpu {
    /// Open.
    pub device: Device,
    /// What the checks run on.
    pub stream: Stream,
    /// Loaded.
    pub kernels: Kernels,
    /// Products, on `stream` alone.
    pub gemm: Gemm,
}

impl Gpu {
    /// Opens CUDA device `ordinal` and loads everything.
    ///
    /// # Errors
    /// No driver, too old a driver, no such device, no kernel image for it, no cuBLASLt, no memory.
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        let device = Device::open(ordinal)?;
        Ok(Gpu {
            stream: Stream::new(&device)?,
            kernels: Kernels::load(&device)?,
            gemm: Gemm::new(&device, USUAL_WORKSPACE)?,
            device,
        })
    }

    /// `values` on the device.
    ///
    /// # Errors
    /// No memory, or what the driver says.
    pub fn upload<T: NoUninit>(&self, values: &[T]) -> Result<DeviceBuffer, CudaError> {
        DeviceBuffer::from_host(&self.device, values, "a check's input")
    }

    /// `values` as `dtype` on the device.
    ///
    /// # Errors
    /// No memory, or what the driver says.
    pub fn upload_as(&self, dtype: Dtype, values: &[f32]) -> Result<DeviceBuffer, CudaError> {
        self.upload(&element::encode(dtype, values))
    }

    /// Room for `count` elements of `dtype` and the guard behind them, all poisoned.
    ///
    /// # Errors
    /// No memory, or what the driver says.
    pub fn poisoned(&self, dtype: Dtype, count: usize) -> Result<Poisoned, CudaError> {
        let element_bytes = element::bytes(dtype);
        let mut buffer = DeviceBuffer::alloc(
            &self.device,
            (count + GUARD) * element_bytes,
            "a check's output",
        )?;
        buffer.fill(POISON)?;
        Ok(Poisoned {
            buffer,
            dtype,
            count,
        })
    }
}

/// A result's buffer.
pub struct Poisoned {
    /// On the device.
    pub buffer: DeviceBuffer,
    dtype: Dtype,
    count: usize,
}

impl Poisoned {
    /// The bytes of the result, without the guard, and whether the guard is untouched. The stream that wrote it has been
    /// waited for.
    ///
    /// # Errors
    /// What the driver says.
    pub fn bytes(&self) -> Result<(Vec<u8>, bool), CudaError> {
        let mut bytes: Vec<u8> = self.buffer.to_host()?;
        let guard = bytes.split_off(self.count * element::bytes(self.dtype));
        Ok((bytes, guard.iter().all(|&byte| byte == POISON)))
    }

    /// The result's values, and whether the guard is untouched.
    ///
    /// # Errors
    /// What the driver says.
    pub fn values(&self) -> Result<(Vec<f32>, bool), CudaError> {
        let (bytes, guarded) = self.bytes()?;
        Ok((element::decode(self.dtype, &bytes), guarded))
    }

    /// The result as s32, and whether the guard is untouched.
    ///
    /// # Errors
    /// What the driver says.
    pub fn ints(&self) -> Result<(Vec<i32>, bool), CudaError> {
        let (bytes, guarded) = self.bytes()?;
        let ints = bytes
            .chunks_exact(4)
            .map(|x| i32::from_le_bytes([x[0], x[1], x[2], x[3]]))
            .collect();
        Ok((ints, guarded))
    }

    /// Poisons it again.
    ///
    /// # Errors
    /// What the driver says.
    pub fn poison(&mut self) -> Result<(), CudaError> {
        self.buffer.fill(POISON)
    }
}

/// `values` widened.
pub fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}
