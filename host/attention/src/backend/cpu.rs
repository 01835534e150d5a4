//! The CPU device's column: which contracts its own impls run, and with which dtypes and sizes.
//!
//! Data only: another contract is another entry. Every other backend is refused, with the remedy.

use std::borrow::Cow;

use timetable_types::{Dtype, KvCacheLayout};

use super::{AttentionType, Backend, BackendRow, Configuration, Device, Flags, HeadSizes};
use crate::kernel_block::KernelBlockSize;

/// One contract that the CPU device runs.
struct CpuEntry {
    backend: Backend,
    dtypes: &'static [Dtype],
    kv_cache_dtypes: &'static [&'static str],
    attn_types: &'static [AttentionType],
    head_sizes: HeadSizes,
    block_sizes: &'static [KernelBlockSize],
    layouts: &'static [KvCacheLayout],
    sliding_window: bool,
    non_causal: bool,
    batch_invariance: bool,
}

/// What the paged kernel takes for every contract it executes: it computes in f32, keeps caches in f32 or bf16, pads any
/// head size to whole vectors, and walks blocks of any size. Each layer owns its cache. A query's result depends on its own keys
/// and splits alone.
const fn paged(backend: Backend) -> CpuEntry {
    CpuEntry {
        backend,
        dtypes: &[Dtype::Float32, Dtype::Bfloat16],
        kv_cache_dtypes: &["auto", "float32", "bfloat16"],
        attn_types: &[AttentionType::Decoder],
        head_sizes: HeadSizes::AtLeast(1),
        block_sizes: &[KernelBlockSize::MultipleOf(1)],
        layouts: &[KvCacheLayout::Lbhnc],
        sliding_window: true,
        non_causal: true,
        batch_invariance: true,
    }
}

/// The column: one entry per contract, most preferred first.
const ENTRIES: &[CpuEntry] = &[paged(Backend::FlashAttn), paged(Backend::FlashInfer)];

/// Why a backend without an entry is refused, with the remedy.
fn refuse(_: &Configuration, _: Device) -> Option<String> {
    let names: Vec<&str> = ENTRIES.iter().map(|e| e.backend.name()).collect();
    Some(format!(
        "not run by the CPU device: choose {} (--attention-backend)",
        names.join(" or ")
    ))
}

fn accept(_: &Configuration, _: Device) -> Option<String> {
    None
}

/// Backends that the CPU device runs, most preferred first.
pub(crate) fn priority() -> Vec<Backend> {
    ENTRIES.iter().map(|e| e.backend).collect()
}

/// `base` as the CPU device runs it. Names, classes, layouts and what the builder declares stay the field's.
pub(super) fn on_cpu(backend: Backend, base: BackendRow) -> BackendRow {
    let Some(entry) = ENTRIES.iter().find(|e| e.backend == backend) else {
        return BackendRow {
            combination: refuse,
            ..base
        };
    };
    BackendRow {
        supported_dtypes: Cow::Borrowed(entry.dtypes),
        supported_kv_cache_dtypes: Cow::Borrowed(entry.kv_cache_dtypes),
        usable_kv_cache_dtypes: None,
        kernel_block_sizes: Cow::Borrowed(entry.block_sizes),
        head_sizes: entry.head_sizes.clone(),
        kv_cache_layouts: Some(Cow::Borrowed(entry.layouts)),
        attn_types: Cow::Borrowed(entry.attn_types),
        flags: Flags {
            supports_sliding_window: entry.sliding_window,
            supports_non_causal: entry.non_causal,
            supports_batch_invariance: entry.batch_invariance,
            ..Flags::DEFAULT
        },
        combination: accept,
        ..base
    }
}
