//! The CPU device's column: which contracts its own impls run, and with which dtypes and sizes.
//!
//! Data only: another contract is another entry. Everything else is refused with [`NOT_ON_CPU`].

use std::borrow::Cow;

use timetable_types::Dtype;

use super::{AttentionType, Backend, BackendRow, Configuration, Device, Flags, HeadSizes};
use crate::kernel_block::KernelBlockSize;

/// Why a backend without an entry is refused.
pub const NOT_ON_CPU: &str = "the CPU device has no impl of this backend";

/// One contract that the CPU device runs.
struct CpuEntry {
    backend: Backend,
    dtypes: &'static [Dtype],
    kv_cache_dtypes: &'static [&'static str],
    attn_types: &'static [AttentionType],
    head_multiple: u32,
    max_head: u32,
    block_sizes: &'static [KernelBlockSize],
    sliding_window: bool,
}

/// The impls compute in f32 and keep caches in f32 or bf16, with any block size and head sizes in whole vectors of 8.
const ENTRIES: &[CpuEntry] = &[
    CpuEntry {
        backend: Backend::FlashAttn,
        dtypes: &[Dtype::Float32, Dtype::Bfloat16],
        kv_cache_dtypes: &["auto", "float32", "bfloat16"],
        attn_types: &[AttentionType::Decoder],
        head_multiple: 8,
        max_head: 512,
        block_sizes: &[KernelBlockSize::MultipleOf(1)],
        sliding_window: true,
    },
    CpuEntry {
        backend: Backend::FlashInfer,
        dtypes: &[Dtype::Float32, Dtype::Bfloat16],
        kv_cache_dtypes: &["auto", "float32", "bfloat16"],
        attn_types: &[AttentionType::Decoder],
        head_multiple: 8,
        max_head: 512,
        block_sizes: &[KernelBlockSize::MultipleOf(1)],
        sliding_window: true,
    },
];

fn refuse(_: &Configuration, _: Device) -> Option<String> {
    Some(NOT_ON_CPU.to_owned())
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
        head_sizes: HeadSizes::Multiples {
            multiple: entry.head_multiple,
            max: entry.max_head,
        },
        attn_types: Cow::Borrowed(entry.attn_types),
        flags: Flags {
            supports_sliding_window: entry.sliding_window,
            ..Flags::DEFAULT
        },
        combination: accept,
        ..base
    }
}
