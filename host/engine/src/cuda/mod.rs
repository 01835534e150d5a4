//! The model on a CUDA device: weights, the forward pass, its graphs, and the executor of the engine's steps.
//!
//! - `spans` and `tensors` lay the weights out and convert them, on the host; `weights` brings them to the device.
//! - `forward` enqueues the layers between attentions, over the buffers of `activations`.
//! - `core` is everything at fixed addresses, and a whole step over it; `graphs` captures that; `recapture` does so on a reload.
//! - `pack` fills a step's upload; `executor` runs the engine's steps, and `setup` makes it.
//! - `memory` divides the device's memory, `promises` compares what graphs were captured for, `flights` keeps steps in flight.
//!
//! This module must never know how a builder makes metadata, nor choose which requests run.

mod activations;
mod core;
mod error;
mod executor;
mod flights;
mod forward;
mod graphs;
mod memory;
mod pack;
mod promises;
mod recapture;
mod setup;
mod spans;
mod tensors;
mod weights;

pub use error::CudaStartError;
pub use executor::CudaExecutor;
pub use memory::{MemoryReport, NoCacheMemory};
