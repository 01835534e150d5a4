//! One step's way to the device: packed into a pinned slot, one asynchronous copy, one unpack launch that writes persistent
//! buffers at fixed addresses and evaluates symbolic tensors there. It must never know who chose the values, nor what
//! attention or the model make of them.

mod buffers;
#[cfg(test)]
pub(crate) mod interpret;
mod lower;
#[cfg(test)]
mod lower_tests;
mod pack;
mod ring;
mod table;
#[cfg(test)]
pub(crate) mod testing;

pub use buffers::{StepBuffers, StepLimits, StepPtrs};
pub(crate) use lower::lower_tensor;
pub use lower::{LowerContext, LowerError, stage_tensor};
pub(crate) use pack::Sink;
pub use pack::{Destination, PackError, Packed, Packer, Phase, Stage};
pub use ring::{StepMarks, UnpackStep, UploadRing, UploadSize};
pub use table::TableMirror;
