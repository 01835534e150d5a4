//! The components. Built by `build.rs` from `guest-builders/`. It must never know what they contain.

use timetable_attention::Grant;
use timetable_types::Family;

/// A reference component.
#[derive(Clone, Copy, Debug)]
pub struct Embedded {
    /// The builder's name, as operators give it: "flash-attn".
    pub name: &'static str,
    /// The family whose metadata it returns.
    pub family: Family,
    /// The attention backend that it serves: "FLASH_ATTN".
    pub backend: &'static str,
    /// Is it the backend's default builder?
    pub default: bool,
    /// What an operator has to grant it; without, its metadata are refused and the plain builder serves.
    pub grant: Grant,
    /// The component.
    pub bytes: &'static [u8],
}

const COMPONENTS: [Embedded; 9] = [
    Embedded {
        name: "flash-attn",
        family: Family::FlashAttn,
        backend: "FLASH_ATTN",
        default: true,
        grant: Grant::Exact,
        bytes: include_bytes!(concat!(env!("OUT_DIR"), "/flash-attn-builder.wasm")),
    },
    Embedded {
        name: "flash-attn-fixed-split",
        family: Family::FlashAttn,
        backend: "FLASH_ATTN",
        default: false,
        grant: Grant::Exact,
        bytes: include_bytes!(concat!(
            env!("OUT_DIR"),
            "/flash-attn-fixed-split-builder.wasm"
        )),
    },
    Embedded {
        name: "flashinfer",
        family: Family::Flashinfer,
        backend: "FLASHINFER",
        default: true,
        grant: Grant::Exact,
        bytes: include_bytes!(concat!(env!("OUT_DIR"), "/flashinfer-builder.wasm")),
    },
    Embedded {
        name: "flashinfer-window-sink",
        family: Family::Flashinfer,
        backend: "FLASHINFER",
        default: false,
        grant: Grant::Subset,
        bytes: include_bytes!(concat!(
            env!("OUT_DIR"),
            "/flashinfer-window-sink-builder.wasm"
        )),
    },
    Embedded {
        name: "triton-attn",
        family: Family::TritonAttn,
        backend: "TRITON_ATTN",
        default: true,
        grant: Grant::Exact,
        bytes: include_bytes!(concat!(env!("OUT_DIR"), "/triton-attn-builder.wasm")),
    },
    Embedded {
        name: "flash-mla",
        family: Family::FlashMla,
        backend: "FLASHMLA",
        default: true,
        grant: Grant::Exact,
        bytes: include_bytes!(concat!(env!("OUT_DIR"), "/flash-mla-builder.wasm")),
    },
    Embedded {
        name: "flash-attn-mla",
        family: Family::FlashMla,
        backend: "FLASH_ATTN_MLA",
        default: true,
        grant: Grant::Exact,
        bytes: include_bytes!(concat!(env!("OUT_DIR"), "/flash-attn-mla-builder.wasm")),
    },
    Embedded {
        name: "triton-mla",
        family: Family::FlashMla,
        backend: "TRITON_MLA",
        default: true,
        grant: Grant::Exact,
        bytes: include_bytes!(concat!(env!("OUT_DIR"), "/triton-mla-builder.wasm")),
    },
    Embedded {
        name: "mamba",
        family: Family::Mamba,
        backend: "MAMBA",
        default: true,
        grant: Grant::Exact,
        bytes: include_bytes!(concat!(env!("OUT_DIR"), "/mamba-builder.wasm")),
    },
];

/// Every embedded component.
pub fn components() -> &'static [Embedded] {
    &COMPONENTS
}

/// The embedded component called `name`.
pub fn component(name: &str) -> Option<&'static Embedded> {
    COMPONENTS.iter().find(|component| component.name == name)
}

/// The chaos builder of a family, which misbehaves on command: for trying a host, not for serving. It is not among the
/// components, and a program that does not ask for it does not contain it.
pub fn chaos(family: Family) -> Option<&'static [u8]> {
    match family {
        Family::FlashAttn => Some(include_bytes!(concat!(
            env!("OUT_DIR"),
            "/chaos-flash-attn.wasm"
        ))),
        Family::Flashinfer => Some(include_bytes!(concat!(
            env!("OUT_DIR"),
            "/chaos-flashinfer.wasm"
        ))),
        Family::TritonAttn => Some(include_bytes!(concat!(
            env!("OUT_DIR"),
            "/chaos-triton-attn.wasm"
        ))),
        Family::FlashMla => Some(include_bytes!(concat!(
            env!("OUT_DIR"),
            "/chaos-flash-mla.wasm"
        ))),
        Family::Mamba => Some(include_bytes!(concat!(
            env!("OUT_DIR"),
            "/chaos-mamba.wasm"
        ))),
    }
}
