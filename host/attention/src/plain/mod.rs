//! The plain builders: what serves a step when a component's metadata was refused or never came.
//!
//! No splits, nothing clever, no state: each metadata is a function of the batch alone. They know the contract's records
//! and nothing of components. Their output passes the verifier for every batch that `verify_step` accepts; a property test
//! holds that.

mod flash_attn;
mod flash_mla;
mod flashinfer;
mod mamba;
mod triton_attn;

use timetable_types::{BuildError, BuilderConfig, ErrorKind, Family};

use crate::builder::{BuildFault, MetadataBuilder};

/// The plain builder of a family, or why there is none: the configuration makes no sense.
pub fn plain_builder(
    family: Family,
    config: &BuilderConfig,
) -> Result<Box<dyn MetadataBuilder>, BuildError> {
    let spec = &config.kv_cache_spec;
    if spec.block_size == 0 || spec.num_kv_heads == 0 || config.attention.num_heads == 0 {
        return Err(invalid(format!(
            "block_size {}, num_kv_heads {} and num_heads {} must all be at least 1",
            spec.block_size, spec.num_kv_heads, config.attention.num_heads
        )));
    }
    match family {
        Family::FlashAttn => Ok(Box::new(flash_attn::PlainFlashAttn::new(config.clone()))),
        Family::Flashinfer => Ok(Box::new(flashinfer::PlainFlashinfer::new(config.clone())?)),
        Family::TritonAttn => Ok(Box::new(triton_attn::PlainTritonAttn::new(config.clone())?)),
        Family::FlashMla => Ok(Box::new(flash_mla::PlainFlashMla::new(config.clone())?)),
        Family::Mamba => Ok(Box::new(mamba::PlainMamba::new(config.clone())?)),
    }
}

fn invalid(message: String) -> BuildError {
    BuildError {
        kind: ErrorKind::InvalidValue,
        message,
    }
}

fn declined(message: String) -> BuildFault {
    BuildFault::Declined(BuildError {
        kind: ErrorKind::NotImplemented,
        message,
    })
}

/// `values` if it has an entry for each of `rows` rows.
fn row_vector<'v>(name: &str, values: &'v [i32], rows: usize) -> Result<&'v [i32], BuildFault> {
    if values.len() == rows {
        Ok(values)
    } else {
        Err(BuildFault::Declined(invalid(format!(
            "{name} has {} entries, needed {rows}: the host must give it",
            values.len()
        ))))
    }
}
