//! Which columns of a Mamba group's table hold a request's states. It must never know what a state is.

use thiserror::Error;
use timetable_types::MambaCacheMode;

use crate::step::BlockTable;

/// The block that padding points to. The field's NULL_BLOCK_ID.
pub const NULL_BLOCK_ID: i32 = 0;

/// A row's state columns lie outside its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "row {row}: state columns [{first}, {end}) exceed the table's {width} columns (length {seq_len}): widen the table"
)]
pub struct StateColumnError {
    /// Row of the batch.
    pub row: usize,
    /// Length of the row.
    pub seq_len: i32,
    /// First state column.
    pub first: usize,
    /// One past the last state column.
    pub end: usize,
    /// Columns of the table.
    pub width: usize,
}

/// State blocks of each row, `s32 [R, columns]`, row-major, with the number of columns.
///
/// Mode `none` keeps one row of states per request: the table as it is. Mode `align` keeps states at block boundaries too:
/// the block of the last token, max(len − 1, 0) / block_size, and the `num_speculative_blocks` after it.
/// (vLLM 0.33 `mamba_get_block_table_tensor`.)
///
/// # Errors
/// If a row's columns lie outside the table.
pub fn mamba_get_block_table_tensor(
    table: BlockTable<'_>,
    seq_lens: &[i32],
    block_size: u32,
    num_speculative_blocks: u32,
    mode: MambaCacheMode,
) -> Result<(Vec<i32>, usize), StateColumnError> {
    if mode == MambaCacheMode::None {
        return Ok((table.data.to_vec(), table.width));
    }
    let columns = 1 + num_speculative_blocks as usize;
    let mut out = Vec::with_capacity(seq_lens.len() * columns);
    for (row, &seq_len) in seq_lens.iter().enumerate() {
        let first = (seq_len.max(1) - 1) as usize / block_size.max(1) as usize;
        let end = first + columns;
        match table.row(row).get(first..end) {
            Some(states) => out.extend_from_slice(states),
            None => {
                return Err(StateColumnError {
                    row,
                    seq_len,
                    first,
                    end,
                    width: table.width,
                });
            }
        }
    }
    Ok((out, columns))
}
