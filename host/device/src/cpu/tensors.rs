//! The symbolic tensors that FLASH_ATTN's and FLASHINFER's metadata use, evaluated from the step's tensors. It must never
//! know what a tensor is for.

use std::borrow::Cow;

use timetable_attention::StepInputs;
use timetable_types::{Input, RowRange, Tensor};

use super::step::{PrepareError, inconsistent};

/// An s32 vector.
pub(super) fn vector<'a>(
    field: &'static str,
    tensor: &'a Tensor,
    inputs: &StepInputs<'a>,
) -> Result<Cow<'a, [i32]>, PrepareError> {
    match tensor {
        Tensor::Input(input) => input_vector(field, *input, inputs).map(Cow::Borrowed),
        Tensor::Slice(slice) => {
            let all = input_vector(field, slice.source, inputs)?;
            let range = slice.start as usize..slice.end as usize;
            all.get(range).map(Cow::Borrowed).ok_or_else(|| {
                inconsistent(
                    field,
                    format!(
                        "[{}, {}) of a tensor of {}",
                        slice.start,
                        slice.end,
                        all.len()
                    ),
                )
            })
        }
        Tensor::Values(values) => Ok(Cow::Borrowed(values)),
        Tensor::RebasedQueryStartLoc(rows) => {
            let starts = query_starts(field, rows, inputs)?;
            Ok(starts
                .iter()
                .map(|&start| start.wrapping_sub(starts[0]))
                .collect())
        }
        Tensor::ContextLens(rows) => {
            let starts = query_starts(field, rows, inputs)?;
            let lengths = range(field, rows, inputs.seq_lens)?;
            let contexts = lengths.iter().zip(starts.windows(2));
            Ok(contexts
                .map(|(&len, pair)| len.wrapping_sub(pair[1].wrapping_sub(pair[0])))
                .collect())
        }
        _ => Err(inconsistent(
            field,
            "not an expression that gives a vector here".into(),
        )),
    }
}

/// Appends the pages of `tensor`; row i has `indptr[i + 1] − indptr[i]` of them.
pub(super) fn append_pages(
    field: &'static str,
    tensor: &Tensor,
    indptr: &[i32],
    inputs: &StepInputs<'_>,
    pages: &mut Vec<i32>,
) -> Result<(), PrepareError> {
    let (rows, columns) = match tensor {
        Tensor::GatherPages(rows) => (rows, None),
        Tensor::SelectPages(selection) => (&selection.rows, Some(&selection.columns)),
        _ => {
            return Err(inconsistent(
                field,
                "pages are gather-pages or select-pages of the host's block table".into(),
            ));
        }
    };
    let n = rows.end.saturating_sub(rows.start) as usize;
    if rows.end as usize > inputs.block_table.rows() && n > 0 {
        return Err(inconsistent(
            field,
            format!(
                "rows up to {} of a table of {}",
                rows.end,
                inputs.block_table.rows()
            ),
        ));
    }
    if indptr.len() != n + 1 {
        return Err(inconsistent(
            field,
            format!("{n} rows, but paged_kv_indptr has {} entries", indptr.len()),
        ));
    }
    let mut taken = 0;
    for (row, pair) in indptr.windows(2).enumerate() {
        let count = usize::try_from(pair[1].wrapping_sub(pair[0]))
            .map_err(|_| inconsistent("paged_kv_indptr", format!("falls after row {row}")))?;
        let table = inputs.block_table.row(rows.start as usize + row);
        match columns {
            None => pages.extend_from_slice(table.get(..count).ok_or_else(|| {
                inconsistent(
                    field,
                    format!(
                        "row {row} takes {count} pages of a table of {} columns",
                        table.len()
                    ),
                )
            })?),
            Some(columns) => {
                let chosen = columns.get(taken..taken + count).ok_or_else(|| {
                    inconsistent(
                        field,
                        format!("{} columns, row {row} needs more", columns.len()),
                    )
                })?;
                taken += count;
                for &column in chosen {
                    pages.push(*table.get(column as usize).ok_or_else(|| {
                        inconsistent(
                            field,
                            format!("column {column} of a table of {} columns", table.len()),
                        )
                    })?);
                }
            }
        }
    }
    Ok(())
}

fn input_vector<'a>(
    field: &'static str,
    input: Input,
    inputs: &StepInputs<'a>,
) -> Result<&'a [i32], PrepareError> {
    let found = match input {
        Input::QueryStartLoc => Some(inputs.query_start_loc),
        Input::SeqLens => Some(inputs.seq_lens),
        Input::Causal => inputs.causal,
        Input::DcpLocalSeqLens => inputs.dcp_local_seq_lens,
        Input::EncoderSeqLens => inputs.encoder_seq_lens,
        Input::LogitsIndicesPadded => inputs.logits_indices_padded,
        Input::RswaPrefixLens => inputs.rswa_prefix_lens,
        Input::BlockTable | Input::SlotMapping | Input::Positions => None,
    };
    found.ok_or_else(|| inconsistent(field, format!("the step has no s32 vector {input:?}")))
}

/// Entries [start, end] of query_start_loc: never empty.
fn query_starts<'a>(
    field: &'static str,
    rows: &RowRange,
    inputs: &StepInputs<'a>,
) -> Result<&'a [i32], PrepareError> {
    let starts = inputs.query_start_loc;
    match starts.get(rows.start as usize..(rows.end as usize).saturating_add(1)) {
        Some(range) if !range.is_empty() => Ok(range),
        _ => Err(inconsistent(
            field,
            format!(
                "rows [{}, {}) of {}",
                rows.start,
                rows.end,
                starts.len().saturating_sub(1)
            ),
        )),
    }
}

fn range<'a>(
    field: &'static str,
    rows: &RowRange,
    values: &'a [i32],
) -> Result<&'a [i32], PrepareError> {
    values
        .get(rows.start as usize..rows.end as usize)
        .ok_or_else(|| {
            inconsistent(
                field,
                format!("rows [{}, {}) of {}", rows.start, rows.end, values.len()),
            )
        })
}
