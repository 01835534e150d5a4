//! Devices: where KV caches live and attention runs.
//!
//! One trait, two implementations. A backend is a contract (its metadata record); each device says which contracts and
//! dtypes it executes. [`cpu`] is the embedded default. `cuda/` will stand beside it: the same per-layer trait over device
//! pointers and a stream, with the step's metadata unpacked once into persistent buffers where `cpu::StepMetadata` is
//! prepared once.
//!
//! How a backend's impl plugs in:
//! 1. its metadata is *prepared* once per attention group and step: symbolic tensors resolved, the schedule or work list
//!    turned into flat vectors that every layer of the group reads (`cpu::StepMetadata::prepare`);
//! 2. its impl, one per layer, scatters the step's keys and values by the host's own slots
//!    (`AttentionImpl::do_kv_cache_update`), then executes the prepared metadata (`AttentionImpl::forward`).
//!
//! A new backend on the CPU adds one `prepare_*` function that yields rows, work items and merge slots, and one line in
//! `cpu::new_impl`; the kernel and the merge are shared.
//!
//! A device must never know a builder, a sandbox, a scheduler or a model.

pub mod cpu;
pub mod reference;
