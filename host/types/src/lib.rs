//! The contract's records, defined once: guests, the host and the verifier all use these definitions.
//!
//! Every record mirrors one of the WIT package `timetable:attention` (`wit/`), field by field and in the same order; a test
//! in `tests/` compares the two. Names are the field's (`query_start_loc`, `seq_lens`, `num_splits`, …).
//!
//! This crate must never know wasmtime's runtime, a device, or a file. Three features add derives and nothing else:
//! `component` (wasmtime's `ComponentType`, `Lift`, `Lower`), `guest` (the canonical ABI, for builders) and `serde`.
#![no_std]
#![forbid(unsafe_op_in_unsafe_fn)]

extern crate alloc;

#[macro_use]
mod macros;

pub mod batch;
mod builder;
#[cfg(feature = "guest")]
pub mod canonical;
mod config;
pub mod flash_attn;
pub mod flash_mla;
pub mod flashinfer;
pub mod mamba;
mod metadata;
mod step;
mod tensor;
pub mod triton_attn;

pub use builder::*;
pub use config::*;
pub use metadata::{Family, Metadata};
pub use step::*;
pub use tensor::*;
