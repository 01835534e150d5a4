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
    is_mla: bool,
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
        is_mla: false,
    }
}

/// What the latent kernel takes: it computes in f32, keeps latents in f32, bf16 or DeepSeek's fp8 form, and has neither windows
/// nor keys after the query. `block_sizes` are what the contract's schedule counts in.
const fn latent(backend: Backend, block_sizes: &'static [KernelBlockSize]) -> CpuEntry {
    CpuEntry {
        backend,
        dtypes: &[Dtype::Float32, Dtype::Bfloat16],
        kv_cache_dtypes: &["auto", "float32", "bfloat16", "fp8_ds_mla"],
        attn_types: &[AttentionType::Decoder],
        head_sizes: HeadSizes::AtLeast(1),
        block_sizes,
        layouts: &[KvCacheLayout::Lbhnc],
        sliding_window: false,
        non_causal: false,
        batch_invariance: false,
        is_mla: true,
    }
}

/// The column: one entry per contract, most preferred first of those that a layer can have.
const ENTRIES: &[CpuEntry] = &[
    paged(Backend::FlashAttn),
    paged(Backend::FlashInfer),
    paged(Backend::TritonAttn),
    latent(Backend::FlashMla, &[KernelBlockSize::Exact(64)]),
    latent(Backend::FlashAttnMla, &[KernelBlockSize::MultipleOf(16)]),
    latent(Backend::TritonMla, &[KernelBlockSize::MultipleOf(1)]),
];

/// Why a backend without an entry is refused, with the remedy.
fn refuse(config: &Configuration, _: Device) -> Option<String> {
    let names: Vec<&str> = priority(config).iter().map(|b| b.name()).collect();
    let (last, others) = names.split_last()?;
    Some(format!(
        "not run by the CPU device: choose {} or {last} (--attention-backend)",
        others.join(", ")
    ))
}

fn accept(_: &Configuration, _: Device) -> Option<String> {
    None
}

/// Backends that the CPU device runs for such a layer, most preferred first.
pub(crate) fn priority(config: &Configuration) -> Vec<Backend> {
    ENTRIES
        .iter()
        .filter(|entry| entry.is_mla == config.use_mla)
        .map(|entry| entry.backend)
        .collect()
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
            is_mla: entry.is_mla,
            ..Flags::DEFAULT
        },
        combination: accept,
        ..base
    }
}
