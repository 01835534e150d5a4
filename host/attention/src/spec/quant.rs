//! How a cache is quantised, from its dtype string.

/// The field's KVQuantMode. Source: vLLM `vllm/v1/kv_cache_interface.py` @0.32 (members up to NVFP4_DS_MLA and
/// ULTRAQUANT_4BIT).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KvQuantMode {
    /// Not quantised.
    None,
    /// fp8 with one scale per tensor.
    Fp8PerTensor,
    /// int8 with one scale per token and head.
    Int8PerTokenHead,
    /// fp8 with one scale per token and head.
    Fp8PerTokenHead,
    /// int4 with one scale per token and head.
    Int4PerTokenHead,
    /// NVFP4: 4-bit floats, one fp8 scale per 16.
    Nvfp4,
    /// The TurboQuant family.
    TurboQuant,
    /// NVFP4 latent vectors, packed.
    Nvfp4DsMla,
    /// UltraQuant at 4 bits.
    UltraQuant4Bit,
}

impl KvQuantMode {
    /// From the configured cache dtype: exact `*_per_token_head`, `nvfp4_ds_mla`, prefix `nvfp4`, prefix `turboquant_`,
    /// `ultraquant_4bit`, prefix `fp8`, else none — in this order.
    pub fn from_cache_dtype(name: &str) -> KvQuantMode {
        match name {
            "int8_per_token_head" => KvQuantMode::Int8PerTokenHead,
            "fp8_per_token_head" => KvQuantMode::Fp8PerTokenHead,
            "int4_per_token_head" => KvQuantMode::Int4PerTokenHead,
            "nvfp4_ds_mla" => KvQuantMode::Nvfp4DsMla,
            "ultraquant_4bit" => KvQuantMode::UltraQuant4Bit,
            _ if name.starts_with("nvfp4") => KvQuantMode::Nvfp4,
            _ if name.starts_with("turboquant_") => KvQuantMode::TurboQuant,
            _ if name.starts_with("fp8") => KvQuantMode::Fp8PerTensor,
            _ => KvQuantMode::None,
        }
    }

    /// Is there one scale per token and head?
    pub const fn is_per_token_head(self) -> bool {
        matches!(
            self,
            KvQuantMode::Int8PerTokenHead
                | KvQuantMode::Fp8PerTokenHead
                | KvQuantMode::Int4PerTokenHead
        )
    }
}
