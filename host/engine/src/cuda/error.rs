//! Why a CUDA executor was not made. It must never know a step.

use timetable_device_cuda::CudaError;

use super::memory::NoCacheMemory;
use crate::{config::EngineError, model::ModelError};

/// Why the model does not run on this device.
#[derive(Debug, thiserror::Error)]
pub enum CudaStartError {
    /// The device.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The model's file.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A family whose layers the device does not run.
    #[error(
        "the model is of the family {architecture}, which needs {lacks}: the CUDA device has no kernels for them yet; run it on the CPU device (--device cpu)"
    )]
    Family {
        /// Its name.
        architecture: String,
        /// What its layers need.
        lacks: &'static str,
    },
    /// A width that kernels cannot move in vectors.
    #[error(
        "{what} is {width}: the CUDA device takes multiples of {multiple} in {element}; choose another model, or run on the CPU device"
    )]
    Width {
        /// Which.
        what: &'static str,
        /// Its value.
        width: usize,
        /// The elements' name.
        element: &'static str,
        /// What it must be a multiple of.
        multiple: usize,
    },
    /// A row of a weight that the loader's buffer does not hold.
    #[error(
        "a weight's row of {bytes} bytes is above the {room} that the loader copies at once; choose another model"
    )]
    Row {
        /// Bytes of the row.
        bytes: usize,
        /// Bytes of the buffer.
        room: usize,
    },
    /// A layer that no attention group has.
    #[error("layer {layer} has no attention group: this is a defect of the engine's plan")]
    NoGroup {
        /// Its index.
        layer: usize,
    },
    /// No room for the KV cache.
    #[error(transparent)]
    NoCacheMemory(#[from] NoCacheMemory),
}

impl From<CudaStartError> for EngineError {
    fn from(error: CudaStartError) -> Self {
        match error {
            CudaStartError::Model(error) => EngineError::Profile(error),
            other => EngineError::Device(other.to_string()),
        }
    }
}
