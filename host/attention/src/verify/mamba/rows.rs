//! Rules for what is said of some rows of a step: their query starts, whether they have a state, their chunks of the
//! convolution. By reference, or by the values that the references have.

use timetable_types::{
    Input, Tensor,
    batch::{CAUSAL_CONV1D_BLOCK_M, PAD},
    mamba::CausalConv1d,
};

use super::Group;
use crate::verify::refusal::{Refusal, Rule, between, equal, length};

/// Rows of the step, rising.
pub(super) enum Rows<'r> {
    /// [start, end)
    Range(u32, u32),
    /// These.
    List(&'r [u32]),
}

impl<'r> Rows<'r> {
    /// `list`, as a range if it is one.
    pub(super) fn of(list: &'r [u32]) -> Self {
        match (list.first(), list.last()) {
            (Some(&first), Some(&last)) if (last - first) as usize == list.len() - 1 => {
                Rows::Range(first, last + 1)
            }
            _ => Rows::List(list),
        }
    }

    pub(super) fn len(&self) -> usize {
        match *self {
            Rows::Range(start, end) => (end - start) as usize,
            Rows::List(list) => list.len(),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        let (range, list) = match *self {
            Rows::Range(start, end) => (start..end, &[][..]),
            Rows::List(list) => (0..0, list),
        };
        range.chain(list.iter().copied())
    }

    pub(super) fn is_range(&self, start: u32, end: u32) -> bool {
        matches!(*self, Rows::Range(a, b) if (a, b) == (start, end))
    }

    /// `found` names these rows, in order.
    pub(super) fn equal(&self, field: &'static str, found: &[u32]) -> Result<(), Refusal> {
        length(field, found.len(), self.len())?;
        for (index, (&found, row)) in found.iter().zip(self.iter()).enumerate() {
            if found != row {
                return Err(Refusal::at(
                    field,
                    index,
                    found.into(),
                    Rule::Equal,
                    row.into(),
                ));
            }
        }
        Ok(())
    }
}

/// `found` has the values of `wanted`, which are `len`.
fn values(
    field: &'static str,
    found: &[i32],
    wanted: impl Iterator<Item = i32>,
    len: usize,
) -> Result<(), Refusal> {
    length(field, found.len(), len)?;
    for (index, (&found, wanted)) in found.iter().zip(wanted).enumerate() {
        if found != wanted {
            return Err(Refusal::at(
                field,
                index,
                found.into(),
                Rule::Equal,
                wanted.into(),
            ));
        }
    }
    Ok(())
}

impl Group<'_> {
    /// The running sum of the rows' query tokens, from 0.
    pub(super) fn query_starts(
        &self,
        field: &'static str,
        tensor: &Tensor,
        rows: &Rows<'_>,
    ) -> Result<(), Refusal> {
        let is_from_0 = |end: u32| rows.is_range(0, end);
        match tensor {
            Tensor::Input(Input::QueryStartLoc) if is_from_0(self.num_reqs()) => Ok(()),
            Tensor::Slice(slice)
                if slice.source == Input::QueryStartLoc
                    && slice.start == 0
                    && slice.end > 0
                    && is_from_0(slice.end - 1) =>
            {
                Ok(())
            }
            Tensor::RebasedQueryStartLoc(range) if rows.is_range(range.start, range.end) => Ok(()),
            Tensor::Values(found) => {
                let sums = rows.iter().scan(0, |sum, row| {
                    *sum += self.query_len(row);
                    Some(*sum)
                });
                values(field, found, std::iter::once(0).chain(sums), rows.len() + 1)
            }
            _ => Err(Refusal::reference(field, "query_start_loc of its rows")),
        }
    }

    /// Which rows have a state from before.
    pub(super) fn context(
        &self,
        field: &'static str,
        tensor: &Tensor,
        rows: &Rows<'_>,
    ) -> Result<(), Refusal> {
        match tensor {
            Tensor::HasContext(range) if rows.is_range(range.start, range.end) => Ok(()),
            Tensor::Values(found) => {
                let wanted = rows.iter().map(|row| i32::from(self.has_context(row)));
                values(field, found, wanted, rows.len())
            }
            _ => Err(Refusal::reference(field, "context of its rows")),
        }
    }

    /// Blocks of 8 tokens that cover each row once. The two buffers may be longer, then filled with −1, but not longer than the
    /// field's.
    pub(super) fn conv(&self, conv: &CausalConv1d, rows: &Rows<'_>) -> Result<(), Refusal> {
        let CausalConv1d {
            block_m,
            nums,
            total,
            batch_ptr,
            token_chunk_offset_ptr,
        } = conv;
        let block = CAUSAL_CONV1D_BLOCK_M;
        equal("block_m", *block_m, block)?;
        let blocks = || {
            rows.iter()
                .map(|row| (self.query_len(row) as u32).div_ceil(block as u32) as i32)
        };
        values("nums", nums, blocks(), rows.len())?;
        let sum: i64 = nums.iter().map(|&num| i64::from(num)).sum();
        equal("total", *total, sum)?;
        let most = 2 * sum.max(1024);
        let buffer = |field: &'static str, tensor: &Tensor, is_offset: bool| {
            match tensor {
                Tensor::ConvChunkRows(chunks) if !is_offset => Some(chunks),
                Tensor::ConvChunkOffsets(chunks) if is_offset => Some(chunks),
                Tensor::Values(found) => {
                    between(field, found.len() as i64, sum, most)?;
                    let of_row = blocks().enumerate().flat_map(|(row, blocks)| {
                        (0..blocks).map(move |block| match is_offset {
                            true => block,
                            false => row as i32,
                        })
                    });
                    let wanted = of_row.chain(std::iter::repeat(PAD));
                    return values(field, found, wanted, found.len());
                }
                _ => None,
            }
            .filter(|chunks| rows.is_range(chunks.rows.start, chunks.rows.end))
            .ok_or(Refusal::reference(
                field,
                "blocks of the convolution of its rows",
            ))
            .and_then(|chunks| {
                let within = |r: Refusal| r.within(field);
                equal("block_m", chunks.block_m, block).map_err(within)?;
                between("length", chunks.length, sum, most).map_err(within)
            })
        };
        buffer("batch_ptr", batch_ptr, false)?;
        buffer("token_chunk_offset_ptr", token_chunk_offset_ptr, true)
    }
}
