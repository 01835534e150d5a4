//! Devices: where KV caches live and attention runs.
//!
//! A backend is a contract (its metadata record); each device says which contracts and dtypes it executes. [`cpu`] is the
//! embedded default. The CUDA device is a crate of its own, in `cuda/`: there the step's metadata is unpacked once into
//! persistent buffers where `cpu::StepMetadata` is prepared once, and an impl is what launches a layer's kernels.
//!
//! How a backend's impl plugs in:
//! 1. its metadata is *prepared* once per attention group and step: symbolic tensors resolved, the schedule or work list
//!    turned into flat vectors that every layer of the group reads (`cpu::StepMetadata::prepare`);
//! 2. its impl, one per layer, scatters the step's keys and values by the host's own slots
//!    (`AttentionImpl::do_kv_cache_update`), then executes the prepared metadata (`AttentionImpl::forward`).
//!
//! Latent attention and recurrent layers do so by traits of their own (`cpu::mla`, `cpu::mamba`): what a layer brings differs.
//!
//! A new backend on the CPU adds one `prepare_*` function that yields rows, work items and merge slots, and one line in
//! `cpu::new_impl`; the kernel and the merge are shared.
//!
//! A device must never know a builder, a sandbox, a scheduler or a model.

pub mod cpu;
pub mod reference;
