//! Extra arguments of a model state: fields that some builders take beside the common ones. It must never
//! know a model.

use thiserror::Error;
use timetable_types::batch::{NUM_ACCEPTED_TOKENS, NUM_DECODE_DRAFT_TOKENS_CPU};
use timetable_types::{Extra, ExtraValue};

/// Why extras are refused before any builder sees them.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ExtrasError {
    /// A name is empty.
    #[error("extra {index} has no name")]
    NoName {
        /// Its place in the list.
        index: usize,
    },
    /// Two extras of one name.
    #[error("extra {name:?} is given twice")]
    Twice {
        /// The name.
        name: String,
    },
    /// A vector with more rows than the batch.
    #[error("extra {name:?} has {rows} rows, the batch {num_reqs}: cut it to the batch")]
    TooManyRows {
        /// The name.
        name: String,
        /// Its rows.
        rows: usize,
        /// The batch's rows.
        num_reqs: usize,
    },
}

/// Checks a model state's extras against a batch of `num_reqs` rows.
///
/// # Errors
/// If a name is missing or given twice, or a vector has more rows than the batch.
pub fn check_extras(extras: &[Extra], num_reqs: usize) -> Result<(), ExtrasError> {
    for (index, extra) in extras.iter().enumerate() {
        if extra.name.is_empty() {
            return Err(ExtrasError::NoName { index });
        }
        if extras[..index].iter().any(|other| other.name == extra.name) {
            return Err(ExtrasError::Twice {
                name: extra.name.clone(),
            });
        }
        let rows = match &extra.value {
            ExtraValue::Integer(_) => 0,
            ExtraValue::Host(values) => values.len(),
            ExtraValue::Device(rows) => *rows as usize,
        };
        if rows > num_reqs {
            return Err(ExtrasError::TooManyRows {
                name: extra.name.clone(),
                rows,
                num_reqs,
            });
        }
    }
    Ok(())
}

/// What a hybrid Mamba model's state adds under speculation: accepted tokens on the device, draft tokens on the host (padded
/// rows −1).
#[must_use]
pub fn speculation_extras(
    num_decode_draft_tokens_cpu: &[i32],
    num_reqs_padded: usize,
) -> Vec<Extra> {
    let mut drafts = num_decode_draft_tokens_cpu.to_vec();
    drafts.resize(num_reqs_padded, -1);
    vec![
        Extra {
            name: NUM_ACCEPTED_TOKENS.into(),
            value: ExtraValue::Device(num_reqs_padded as u32),
        },
        Extra {
            name: NUM_DECODE_DRAFT_TOKENS_CPU.into(),
            value: ExtraValue::Host(drafts),
        },
    ]
}

/// `is_prefilling` of the padded batch: rows behind the real ones do not prefill, whatever an earlier step left there.
#[must_use]
pub fn padded_is_prefilling(
    is_prefilling: &[u8],
    num_reqs: usize,
    num_reqs_padded: usize,
) -> Vec<u8> {
    let mut flags = super::step::first(is_prefilling, num_reqs);
    flags.resize(num_reqs_padded, 0);
    flags
}
