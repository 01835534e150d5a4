//! The CPU device: paged attention in f32 over an f32 or bf16 cache, executing the metadata that it is given.
//!
//! FLASH_ATTN executes its schedule (splits per request, tile order) and FLASHINFER its work list (key chunks, workers,
//! merge order); both end in the same kernel and the same merge, so wrong metadata gives wrong numbers, and no metadata can
//! make this code touch memory that is not its own.
//!
//! [`mla`] executes the MLA backends' metadata by the same kernel over a cache of latents; [`mamba`] keeps states instead.
//!
//! Results are a function of the metadata alone: not of the number of threads, nor of what else is in the batch. They do
//! depend on splits and chunks (other sums), and on the instruction set.
//!
//! This module must never know how metadata was built.

mod config;
mod dcp;
mod execute;
mod kernel;
mod kv_cache;
pub mod mamba;
mod math;
pub mod mla;
mod prepare;
mod step;
mod tensors;
mod view;

pub use config::{AttentionConfig, AttentionImpl, ImplError, new_impl};
pub use dcp::{ContextParallelImpl, ContextParallelMetadata, Partial};
pub use execute::merge_states;
pub use kernel::instruction_set;
pub use kv_cache::{CacheDtype, KvCache};
pub use step::{PrepareError, StepMetadata};
pub use view::{RequestView, WorkItemView};
