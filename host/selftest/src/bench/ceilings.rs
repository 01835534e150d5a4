//! What the GPU gives at most, measured in the same run: a copy within its memory, and a bf16 matrix product. It must never
//! know attention.

use timetable_device_cuda::{
    CudaError,
    blas::{GemmDtype, GemmOperands, GemmShape},
    driver::DeviceBuffer,
};
use timetable_types::Dtype;

use super::timing::{graph_us, stream_us};
use crate::{gpu::Gpu, random::Random};

/// Bytes that are copied.
const COPY_BYTES: usize = 4 << 30;
/// Rows and columns of the product.
const MATMUL: usize = 8_192;

/// The GPU's own limits.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Ceilings {
    /// Bytes read and written by a copy, in TB/s.
    pub copy_tb_s: f64,
    /// A product of two matrices of 8,192 × 8,192 in bf16, in TFLOP/s.
    pub matmul_tflop_s: f64,
    /// A graph of one tiny copy, in µs: what is in every figure below.
    pub empty_us: f64,
}

/// Measures all.
///
/// # Errors
/// No memory, or what the driver says.
pub fn measure(gpu: &Gpu, random: &mut Random) -> Result<Ceilings, CudaError> {
    Ok(Ceilings {
        copy_tb_s: copy(gpu)?,
        matmul_tflop_s: matmul(gpu, random)?,
        empty_us: empty(gpu)?,
    })
}

fn copy(gpu: &Gpu) -> Result<f64, CudaError> {
    // As much as fits, on a small GPU.
    let bytes = COPY_BYTES.min(gpu.device.memory()?.free / 4) & !0xff;
    let alloc = || DeviceBuffer::alloc(&gpu.device, bytes, "the copy that is measured");
    let (mut from, to) = (alloc()?, alloc()?);
    from.fill(0x3c)?;
    // Not in a graph: there the driver's copy runs at two thirds of its speed.
    let us = stream_us(&gpu.stream, 4, 20, |_| {
        // SAFETY: both have as many bytes, and live until the stream is idle.
        unsafe { gpu.stream.copy_device(to.ptr(), from.ptr(), bytes) }
    })?;
    Ok(2.0 * bytes as f64 / us / 1e6)
}

fn matmul(gpu: &Gpu, random: &mut Random) -> Result<f64, CudaError> {
    // Random values: zeros draw less power, and run faster than anything real.
    let mut input = || gpu.upload_as(Dtype::Bfloat16, &random.normal(MATMUL * MATMUL, 1.0));
    let (x, weight) = (input()?, input()?);
    let out = gpu.poisoned(Dtype::Bfloat16, MATMUL * MATMUL)?;
    let shape = GemmShape::new(MATMUL, MATMUL, MATMUL, GemmDtype::Bf16);
    let operands = GemmOperands {
        x: x.ptr(),
        weight: weight.ptr(),
        bias: None,
        out: out.buffer.ptr(),
    };
    let us = graph_us(&gpu.stream, 1, 20, |stream, _| {
        // SAFETY: the operands have what the shape says, and live until the replays have ended.
        unsafe { gpu.gemm.gemm(stream, shape, operands) }
    })?;
    Ok(2.0 * (MATMUL as f64).powi(3) / us / 1e6)
}

fn empty(gpu: &Gpu) -> Result<f64, CudaError> {
    let buffer = DeviceBuffer::alloc_zeroed(&gpu.device, 512, "a tiny copy")?;
    graph_us(&gpu.stream, 1, 60, |stream, _| {
        // SAFETY: within the buffer, which lives until the replays have ended.
        unsafe { stream.copy_device(buffer.ptr().offset(256), buffer.ptr(), 4) }
    })
}
