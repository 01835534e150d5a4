//! The CUDA device: the driver's API in three levels that are not mixed (raw: the bindings; fallible: thin `Result`
//! wrappers; safe: the types of [`driver`]), matrix products, ranges for a profiler, the embedded kernels and what
//! launches them. It must never know a builder, a sandbox, a scheduler or a model.
//!
//! The driver is loaded at run time: a machine without one gets [`CudaError::NoDriver`], never a panic.

pub mod attention;
pub mod blas;
pub mod cache;
pub mod driver;
pub mod error;
pub mod images;
pub mod kernels;
mod libraries;
pub mod nvtx;
pub mod ops;
pub mod params;
pub mod upload;

pub use error::CudaError;
pub use kernels::Kernels;
