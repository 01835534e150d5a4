//! Names of the backends: the field's `AttentionBackendEnum`, as far as its answers are recorded.

use std::fmt;

use timetable_types::Family;

use super::MambaBackend;

macro_rules! backends {
    ($($(#[$meta:meta])* $case:ident = $name:literal,)*) => {
        /// A backend that is part of the product. Others are registered under a name of their own.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Backend {
            $($(#[$meta])* $case,)*
        }

        impl Backend {
            /// Every one.
            pub const ALL: &'static [Backend] = &[$(Backend::$case),*];

            /// The field's name, such as `FLASH_ATTN`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Backend::$case => $name,)*
                }
            }
        }
    };
}

backends! {
    /// FlashAttention 2, 3 or 4, by device.
    FlashAttn = "FLASH_ATTN",
    /// FlashAttention with values of another size than keys.
    FlashAttnDiffKv = "FLASH_ATTN_DIFFKV",
    /// FlashInfer.
    FlashInfer = "FLASHINFER",
    /// Triton kernels.
    TritonAttn = "TRITON_ATTN",
    /// PyTorch's flex attention.
    FlexAttention = "FLEX_ATTENTION",
    /// TurboQuant's packed caches.
    TurboQuant = "TURBOQUANT",
    /// B12X paged attention.
    B12x = "B12X",
    /// Triton for multimodal prefixes, FlashAttention for the rest.
    TritonFlashAttn = "TRITON_FLASH_ATTN",
    /// Triton for multimodal prefixes, FlashInfer for the rest.
    TritonFlashInfer = "TRITON_FLASHINFER",
    /// The field's own CPU backend.
    CpuAttn = "CPU_ATTN",
    /// FlashMLA, dense.
    FlashMla = "FLASHMLA",
    /// FlashAttention 3 for MLA.
    FlashAttnMla = "FLASH_ATTN_MLA",
    /// FlashInfer's MLA kernels.
    FlashInferMla = "FLASHINFER_MLA",
    /// CUTLASS MLA.
    CutlassMla = "CUTLASS_MLA",
    /// Triton MLA.
    TritonMla = "TRITON_MLA",
    /// TokenSpeed MLA.
    TokenspeedMla = "TOKENSPEED_MLA",
    /// FlashMLA, sparse.
    FlashMlaSparse = "FLASHMLA_SPARSE",
    /// FlashAttention 3, sparse MLA.
    FlashAttnMlaSparse = "FLASH_ATTN_MLA_SPARSE",
    /// FlashAttention 4, sparse MLA.
    FlashAttnMlaSparseFa4 = "FLASH_ATTN_MLA_SPARSE_FA4",
    /// FlashInfer, sparse MLA on SM100.
    FlashInferMlaSparse = "FLASHINFER_MLA_SPARSE",
    /// FlashInfer, sparse MLA on SM90.
    FlashInferMlaSparseSm90 = "FLASHINFER_MLA_SPARSE_SM90",
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A backend's name that does not exist. The field's text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Unknown attention backend: '{name}'. Valid options are: {valid}")]
pub struct NameError {
    /// What was given.
    pub name: String,
    /// Every name, comma-separated.
    pub valid: String,
}

impl Backend {
    /// The backend called exactly `name`.
    pub fn from_name(name: &str) -> Option<Backend> {
        Self::ALL.iter().copied().find(|b| b.name() == name)
    }

    /// The family whose metadata its layers read; none where no contract has them.
    pub const fn family(self) -> Option<Family> {
        match self {
            Backend::FlashAttn => Some(Family::FlashAttn),
            Backend::FlashInfer => Some(Family::Flashinfer),
            Backend::TritonAttn => Some(Family::TritonAttn),
            Backend::FlashMla | Backend::FlashAttnMla | Backend::TritonMla => {
                Some(Family::FlashMla)
            }
            _ => None,
        }
    }
}

/// The family whose metadata the layers of the backend called `name` read, recurrent ones included.
pub fn family_of(name: &str) -> Option<Family> {
    if MambaBackend::ALL.iter().any(|b| b.name() == name) {
        return Some(Family::Mamba);
    }
    Backend::from_name(name)?.family()
}
