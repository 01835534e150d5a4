//! Backends of layers that keep a recurrent state. The layer's type decides; there is no priority list.

use timetable_types::MambaType;

use crate::group::BackendClass;

/// The field's `MambaAttentionBackendEnum`, without CUSTOM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MambaBackend {
    /// `MAMBA1`
    Mamba1,
    /// `MAMBA2`
    Mamba2,
    /// `SHORT_CONV`
    ShortConv,
    /// `LINEAR`
    Linear,
    /// `GDN_ATTN`
    GdnAttn,
}

impl MambaBackend {
    /// All five.
    pub const ALL: [MambaBackend; 5] = [
        MambaBackend::Mamba1,
        MambaBackend::Mamba2,
        MambaBackend::ShortConv,
        MambaBackend::Linear,
        MambaBackend::GdnAttn,
    ];

    /// The field's name.
    pub const fn name(self) -> &'static str {
        match self {
            MambaBackend::Mamba1 => "MAMBA1",
            MambaBackend::Mamba2 => "MAMBA2",
            MambaBackend::ShortConv => "SHORT_CONV",
            MambaBackend::Linear => "LINEAR",
            MambaBackend::GdnAttn => "GDN_ATTN",
        }
    }

    /// The backend of layers of type `mamba_type`.
    pub const fn of(mamba_type: MambaType) -> MambaBackend {
        match mamba_type {
            MambaType::Mamba1 => MambaBackend::Mamba1,
            MambaType::Mamba2 => MambaBackend::Mamba2,
            MambaType::Gdn => MambaBackend::GdnAttn,
            MambaType::ShortConv => MambaBackend::ShortConv,
            MambaType::Linear => MambaBackend::Linear,
        }
    }

    /// Its name and class, as grouping has them.
    pub fn class(self) -> BackendClass {
        let class = match self {
            MambaBackend::Mamba1 => "mamba1_attn.Mamba1AttentionBackend",
            MambaBackend::Mamba2 => "mamba2_attn.Mamba2AttentionBackend",
            MambaBackend::ShortConv => "short_conv_attn.ShortConvAttentionBackend",
            MambaBackend::Linear => "linear_attn.LinearAttentionBackend",
            MambaBackend::GdnAttn => "gdn_attn.GDNAttentionBackend",
        };
        BackendClass::new(self.name(), &format!("vllm.v1.attention.backends.{class}"))
    }

    /// `is_ssm`: always, so none allows the device's query lengths to differ from the host's.
    pub const fn is_ssm(self) -> bool {
        true
    }

    /// `supports_batch_invariance`: none does.
    pub const fn supports_batch_invariance(self) -> bool {
        false
    }
}
