//! The symbolic vectors that FLASH_ATTN's and FLASHINFER's metadata use, evaluated on the host to count work. It must never
//! know what a vector is for.

use timetable_attention::StepInputs;
use timetable_types::{Input, RowRange, Tensor};

use super::state::{PrepareError, inconsistent};

/// An s32 vector, into `out`: as many elements as the device's, by the host's mirror.
pub(super) fn vector(
    field: &'static str,
    tensor: &Tensor,
    inputs: &StepInputs<'_>,
    out: &mut Vec<i32>,
) -> Result<(), PrepareError> {
    out.clear();
    match tensor {
        Tensor::Input(input) => out.extend_from_slice(host(field, *input, inputs)?),
        Tensor::Slice(slice) => {
            let all = host(field, slice.source, inputs)?;
            let range = slice.start as usize..slice.end as usize;
            out.extend_from_slice(all.get(range).ok_or_else(|| {
                inconsistent(
                    field,
                    format!(
                        "[{}, {}) of a tensor of {}",
                        slice.start,
                        slice.end,
                        all.len()
                    ),
                )
            })?);
        }
        Tensor::Values(values) => out.extend_from_slice(values),
        Tensor::RebasedQueryStartLoc(rows) => {
            let starts = query_starts(field, rows, inputs)?;
            out.extend(starts.iter().map(|&start| start.wrapping_sub(starts[0])));
        }
        Tensor::ContextLens(rows) => {
            let starts = query_starts(field, rows, inputs)?;
            let lens = inputs.seq_lens.get(rows.start as usize..rows.end as usize);
            let lens = lens.ok_or_else(|| out_of_rows(field, rows, inputs.seq_lens.len()))?;
            let pairs = lens.iter().zip(starts.windows(2));
            out.extend(pairs.map(|(&len, pair)| len.wrapping_sub(pair[1].wrapping_sub(pair[0]))));
        }
        _ => {
            return Err(inconsistent(
                field,
                "not an expression that gives a vector here".into(),
            ));
        }
    }
    Ok(())
}

fn host<'a>(
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
        _ => Err(out_of_rows(field, rows, starts.len().saturating_sub(1))),
    }
}

fn out_of_rows(field: &'static str, rows: &RowRange, found: usize) -> PrepareError {
    inconsistent(
        field,
        format!("rows [{}, {}) of {found}", rows.start, rows.end),
    )
}
