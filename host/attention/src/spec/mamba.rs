//! The spec of layers that keep a recurrent state per request.
//!
//! Formulas: vLLM `MambaSpec` (`vllm/v1/kv_cache_interface.py`) @0.32/0.33, as [`super`] says.

use super::{Dtype, MambaCacheMode, MambaParameters, MambaType, SpecError, dtype_size, non_zero};

/// A recurrent state: one page per request, or per block boundary too.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MambaSpec {
    /// Tokens between kept states in `align` mode; the group's nominal block otherwise.
    pub block_size: u32,
    /// Shape of each state tensor of the layer.
    pub shapes: Vec<Vec<u32>>,
    /// Element type of each, in the same order.
    pub dtypes: Vec<Dtype>,
    /// Bytes of a page, if it is padded.
    pub page_size_padded: Option<u64>,
    /// Which recurrence.
    pub mamba_type: MambaType,
    /// How states are kept.
    pub mamba_cache_mode: MambaCacheMode,
    /// Extra states for draft tokens.
    pub num_speculative_blocks: u32,
    /// Extra states for prefill checkpoints.
    pub num_prefill_checkpoint_blocks: u32,
    /// Tokens that prefill checkpoints are aligned to.
    pub prefill_checkpoint_alignment: u32,
    /// Is the state replicated over tensor-parallel ranks?
    pub tp_replicated: bool,
    /// Tokens of one chunk of the chunked scan; 0 where there is none.
    pub chunk_size: u32,
}

impl MambaSpec {
    /// A spec in mode `none` without speculation.
    pub fn new(
        block_size: u32,
        mamba_type: MambaType,
        shapes: Vec<Vec<u32>>,
        dtypes: Vec<Dtype>,
    ) -> Self {
        MambaSpec {
            block_size,
            shapes,
            dtypes,
            page_size_padded: None,
            mamba_type,
            mamba_cache_mode: MambaCacheMode::None,
            num_speculative_blocks: 0,
            num_prefill_checkpoint_blocks: 0,
            prefill_checkpoint_alignment: 0,
            tp_replicated: false,
            chunk_size: 0,
        }
    }

    /// Bytes of the states: Σ product(shape) · dtype_size.
    pub fn real_page_size_bytes(&self) -> u64 {
        self.shapes
            .iter()
            .zip(&self.dtypes)
            .map(|(shape, dtype)| {
                shape
                    .iter()
                    .fold(dtype_size(*dtype), |n, d| n.saturating_mul(u64::from(*d)))
            })
            .fold(0, u64::saturating_add)
    }

    /// Bytes of a page: `page_size_padded` or the states' bytes.
    pub fn page_size_bytes(&self) -> u64 {
        self.page_size_padded
            .unwrap_or_else(|| self.real_page_size_bytes())
    }

    /// Columns of a request's row: `ceil(max_len / block_size) + num_speculative_blocks` in `align` mode, else
    /// `1 + num_speculative_blocks`.
    pub fn max_num_blocks_per_req(&self, max_model_len: u32) -> u32 {
        let states = match self.mamba_cache_mode {
            MambaCacheMode::Align => max_model_len.div_ceil(self.block_size.max(1)),
            MambaCacheMode::None => 1,
        };
        states.saturating_add(self.num_speculative_blocks)
    }

    /// What a builder sees.
    pub fn to_contract(&self) -> MambaParameters {
        MambaParameters {
            mamba_type: self.mamba_type,
            cache_mode: self.mamba_cache_mode,
            num_speculative_blocks: self.num_speculative_blocks,
            chunk_size: self.chunk_size,
        }
    }

    /// May layers of this and `other` share a UniformType group? Equal speculative blocks, checkpoint parameters, page
    /// size and replication.
    pub fn uniform_with(&self, other: &MambaSpec) -> bool {
        self.num_speculative_blocks == other.num_speculative_blocks
            && self.num_prefill_checkpoint_blocks == other.num_prefill_checkpoint_blocks
            && self.prefill_checkpoint_alignment == other.prefill_checkpoint_alignment
            && self.page_size_bytes() == other.page_size_bytes()
            && self.tp_replicated == other.tp_replicated
    }

    pub(super) fn validate(&self) -> Result<(), SpecError> {
        non_zero("block_size", self.block_size)?;
        if self.shapes.len() != self.dtypes.len() {
            return Err(SpecError::ShapesAndDtypes {
                shapes: self.shapes.len(),
                dtypes: self.dtypes.len(),
            });
        }
        let real = self.real_page_size_bytes();
        if real == 0 {
            return Err(SpecError::Zero {
                field: "page_size_bytes",
                value: 0,
            });
        }
        match self.page_size_padded {
            Some(padded) if padded < real => Err(SpecError::PaddedTooSmall { padded, real }),
            _ => Ok(()),
        }
    }
}
