//! The families of backends, and a value of any family's metadata.

use crate::{flash_attn, flash_mla, flashinfer, mamba, triton_attn};

/// A family of attention backends: one WIT interface, one metadata record, one set of verifier rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
pub enum Family {
    /// `timetable:attention/flash-attn`
    FlashAttn,
    /// `timetable:attention/flashinfer`
    Flashinfer,
    /// `timetable:attention/triton-attn`
    TritonAttn,
    /// `timetable:attention/flash-mla`
    FlashMla,
    /// `timetable:attention/mamba`
    Mamba,
}

impl Family {
    /// Every family.
    pub const ALL: [Family; 5] = [
        Family::FlashAttn,
        Family::Flashinfer,
        Family::TritonAttn,
        Family::FlashMla,
        Family::Mamba,
    ];

    /// The WIT interface that a builder of this family exports, without package and version.
    pub const fn interface(self) -> &'static str {
        match self {
            Family::FlashAttn => "flash-attn",
            Family::Flashinfer => "flashinfer",
            Family::TritonAttn => "triton-attn",
            Family::FlashMla => "flash-mla",
            Family::Mamba => "mamba",
        }
    }
}

/// One step's metadata of any family: what a builder returns, what the verifier checks, what an impl executes.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(tag = "family", rename_all = "kebab-case")
)]
#[allow(
    clippy::large_enum_variant,
    reason = "one value per group and step, never in a collection"
)]
pub enum Metadata {
    /// FLASH_ATTN.
    FlashAttn(flash_attn::Metadata),
    /// FLASHINFER.
    Flashinfer(flashinfer::Metadata),
    /// TRITON_ATTN.
    TritonAttn(triton_attn::Metadata),
    /// FLASHMLA and its relatives.
    FlashMla(flash_mla::Metadata),
    /// MAMBA1, MAMBA2, GDN, SHORT_CONV, LINEAR.
    Mamba(mamba::Metadata),
}

impl Metadata {
    /// Which family this is.
    pub const fn family(&self) -> Family {
        match self {
            Metadata::FlashAttn(_) => Family::FlashAttn,
            Metadata::Flashinfer(_) => Family::Flashinfer,
            Metadata::TritonAttn(_) => Family::TritonAttn,
            Metadata::FlashMla(_) => Family::FlashMla,
            Metadata::Mamba(_) => Family::Mamba,
        }
    }
}
