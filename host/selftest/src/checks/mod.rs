//! The checks, in groups: what a kernel computed against a reference on the CPU. It must never know how results are shown.

mod attention;
mod gemm;
mod layers;
mod replay;
mod sampling;
mod scatter;
mod soak;
mod steps;
mod unpack;

use timetable_device_cuda::{CudaError, kernels::Element, ops::Rows};
use timetable_types::Dtype;

use crate::{gpu::Gpu, random::Random, report::Group};

/// What a check works with.
pub struct Context<'a> {
    /// The device.
    pub gpu: &'a Gpu,
    /// Its own inputs.
    pub random: Random,
    /// Fewer and smaller inputs.
    pub quick: bool,
    /// Batches of the soak.
    pub soak: u32,
}

/// Why a set of checks did not go on.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The device failed.
    #[error(transparent)]
    Device(#[from] CudaError),
    /// A component cannot be run.
    #[error("{0}")]
    Sandbox(String),
}

/// Runs one set of checks.
pub type Run = fn(&mut Context<'_>) -> Result<Vec<Group>, CheckError>;

/// Every set, by the name that selects it, in the order of a run.
pub const SETS: &[(&str, Run)] = &[
    ("scatter", scatter::run),
    ("layers", layers::run),
    ("gemm", gemm::run),
    ("sampling", sampling::run),
    ("attention", attention::run),
    ("unpack", unpack::run),
    ("steps", steps::run),
    ("soak", soak::run),
];

/// The element types of activations.
const ELEMENTS: [(Element, Dtype); 3] = [
    (Element::Bf16, Dtype::Bfloat16),
    (Element::F16, Dtype::Float16),
    (Element::F32, Dtype::Float32),
];

/// Rows of `stride` elements.
fn rows(buffer: &timetable_device_cuda::driver::DeviceBuffer, stride: usize) -> Rows {
    Rows {
        ptr: buffer.ptr(),
        stride: stride as i64,
    }
}
