//! Symbolic tensors, lowered to unpack operations: one rule for each case of `types::Tensor`. It must never know which
//! record a tensor stands in.
//!
//! What the device keeps itself is copied or computed there, from its own values; what it does not keep (encoder lengths,
//! extras, …) travels by value. Every index is checked here against the host's tensors of the step, as `Resolver` does: an
//! operation that was lowered names rows and columns that exist.

use timetable_attention::{ResolveError, Siblings, StepInputs};
use timetable_types::{ConvChunks, DcpSource, Input, RowRange, StateColumn, Tensor};

use super::buffers::StepPtrs;
use super::pack::{Destination, PackError, Sink, Stage, fits, op};
use crate::driver::DevicePtr;
use crate::params::{UnpackKind, UnpackOp};

/// Why a symbolic tensor was not lowered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LowerError {
    /// It has no value for this step.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// It does not fit the upload, or the buffer that it is for.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// The host's block table is not as wide as the device's.
    #[error("block_table: {found} columns, the device's table has {expected}")]
    TableWidth {
        /// The host's.
        found: usize,
        /// The device's.
        expected: usize,
    },
    /// An expression that is evaluated for whole steps only, of families that this device does not run.
    #[error("{what} is not evaluated for a part of a step, which begins at row {first_row}")]
    Part {
        /// The expression.
        what: &'static str,
        /// The part's first row.
        first_row: usize,
    },
}

/// What tensors of one step are evaluated from.
#[derive(Clone, Copy, Debug)]
pub struct LowerContext<'a> {
    /// The device's tensors.
    pub ptrs: &'a StepPtrs,
    /// The host's mirror of them.
    pub inputs: &'a StepInputs<'a>,
    /// Tokens of the padded batch.
    pub num_tokens: usize,
    /// Tokens of a kernel block.
    pub block_size: u32,
}

/// Writes `tensor` to `to`, in the second round, by way of a stage: for whoever checks the device's evaluation of tensors.
///
/// # Errors
/// As the step's own tensors are lowered: if the step has no such tensor, an index lies outside it, or it does not fit the
/// destination or the stage.
pub fn stage_tensor(
    tensor: &Tensor,
    siblings: Siblings<'_>,
    to: Destination,
    context: &LowerContext<'_>,
    stage: &mut Stage,
) -> Result<(), LowerError> {
    lower_tensor(tensor, siblings, to, "a tensor", context, stage)
}

/// Writes `tensor` to `to`, in the second round: its own elements, then the fill.
///
/// # Errors
/// If the step has no such tensor, an index lies outside it, or it does not fit the destination or the upload.
pub(crate) fn lower_tensor(
    tensor: &Tensor,
    siblings: Siblings<'_>,
    to: Destination,
    what: &'static str,
    context: &LowerContext<'_>,
    sink: &mut impl Sink,
) -> Result<(), LowerError> {
    let lower = Lower { context, to, what };
    match tensor {
        Tensor::Input(input) => lower.input(*input, None, sink),
        Tensor::Slice(slice) => lower.input(slice.source, Some((slice.start, slice.end)), sink),
        Tensor::Extra(name) => Ok(sink.values(what, to, context.extra(name)?)?),
        Tensor::Values(values) => Ok(sink.values(what, to, values)?),
        Tensor::Matrix(matrix) => {
            if u64::from(matrix.rows) * u64::from(matrix.columns) != matrix.values.len() as u64 {
                return Err(ResolveError::Matrix {
                    rows: matrix.rows,
                    columns: matrix.columns,
                    values: matrix.values.len(),
                }
                .into());
            }
            Ok(sink.values(what, to, &matrix.values)?)
        }
        Tensor::Scratch(_) => Err(ResolveError::Scratch.into()),
        Tensor::RebasedQueryStartLoc(rows) => {
            let range = context.rows(rows)?;
            lower.rows(UnpackKind::Rebase, &range, range.len() + 1, 0, sink)
        }
        Tensor::ContextLens(rows) => {
            let range = context.with_context(rows)?;
            lower.rows(UnpackKind::ContextLens, &range, range.len(), 0, sink)
        }
        Tensor::HasContext(rows) => {
            let range = context.with_context(rows)?;
            lower.rows(UnpackKind::HasContext, &range, range.len(), 0, sink)
        }
        Tensor::DcpLocal(local) => {
            let (range, option) = match local.source {
                DcpSource::SeqLens => (context.rows(&local.rows)?, 0),
                DcpSource::ContextLens => (context.with_context(&local.rows)?, 1),
            };
            lower.rows(UnpackKind::DcpLocal, &range, range.len(), option, sink)
        }
        Tensor::CuPageCounts(rows) => {
            let range = context.rows(rows)?;
            context.count_pages(range.clone())?;
            lower.rows(UnpackKind::CuPageCounts, &range, range.len() + 1, 0, sink)
        }
        Tensor::GatherPages(rows) => lower.pages(rows, None, siblings, sink),
        Tensor::SelectPages(selection) => {
            lower.pages(&selection.rows, Some(&selection.columns), siblings, sink)
        }
        Tensor::StateIndices(gather) => {
            context.whole("state indices")?;
            context.check_width()?;
            for &row in &gather.rows {
                let first = match gather.column {
                    StateColumn::First => 0,
                    StateColumn::LastToken => {
                        let row = context.row("block_table", row)?;
                        let last = (context.inputs.seq_lens[row] - 1).max(0);
                        last as usize / context.block_size.max(1) as usize
                    }
                };
                context.columns(row, first + gather.width as usize)?;
            }
            let option = i32::from(gather.column == StateColumn::LastToken);
            lower.by_row(
                UnpackKind::StateIndices,
                &gather.rows,
                gather.width,
                option,
                None,
                sink,
            )
        }
        Tensor::Rows(gather) => lower.gather(gather.source, &gather.rows, sink),
        Tensor::ExtraRows(gather) => {
            let data = context.extra(&gather.name)?;
            lower.host_rows("extra", data, &gather.rows, sink)
        }
        Tensor::RowMask(rows) => {
            context.whole("a row mask")?;
            for &row in rows {
                context.row("row mask", row)?;
            }
            fits(what, context.num_rows(), to.room)?;
            lower.by_row(
                UnpackKind::RowMask,
                rows,
                1,
                0,
                Some(context.num_rows()),
                sink,
            )
        }
        Tensor::RowTokens(rows) => {
            context.whole("rows' tokens")?;
            let mut tokens = 0;
            for &row in rows {
                let row = context.row("query_start_loc", row)?;
                tokens += context.query_len(row)?;
            }
            lower.by_row(UnpackKind::RowTokens, rows, 1, 0, Some(tokens), sink)
        }
        Tensor::TokenToRow => {
            context.whole("tokens' rows")?;
            for row in 0..context.num_rows() {
                context.query_len(row)?;
            }
            fits(what, context.num_tokens, to.room)?;
            Ok(sink.push(what, op(UnpackKind::TokenToRow, to, context.num_tokens, 0))?)
        }
        Tensor::SegmentIds => {
            let bounds = siblings.cu_seq_lens.ok_or(ResolveError::Sibling {
                name: "cu_seq_lens",
                value: 0,
                expected: 1,
            })?;
            let total = check_sums("cu_seq_lens", bounds)?;
            fits(what, total, to.room)?;
            let list = lower.sums(bounds, sink)?;
            let rows = bounds.len().saturating_sub(1);
            Ok(sink.push(what, op(UnpackKind::SegmentIds, to, rows, list))?)
        }
        Tensor::ConvChunkRows(chunks) => lower.chunks(UnpackKind::ConvRows, chunks, sink),
        Tensor::ConvChunkOffsets(chunks) => lower.chunks(UnpackKind::ConvOffsets, chunks, sink),
    }
}

/// One tensor on its way to one destination.
struct Lower<'c> {
    context: &'c LowerContext<'c>,
    to: Destination,
    what: &'static str,
}

impl Lower<'_> {
    /// The whole of an input, or rows of it.
    fn input(
        &self,
        input: Input,
        rows: Option<(u32, u32)>,
        sink: &mut impl Sink,
    ) -> Result<(), LowerError> {
        let context = self.context;
        let width = context.width(input);
        let len = context.len(input)?;
        let count = len.checked_div(width).unwrap_or(0);
        let (start, end) = match rows {
            Some((start, end)) => {
                let range = check_range(name(input), start, end, count)?;
                (range.start * width, range.end * width)
            }
            None => (0, len),
        };
        fits(self.what, end - start, self.to.room)?;
        match context.ptrs.of(input) {
            Some((ptr, size)) => {
                if input == Input::BlockTable {
                    context.check_width()?;
                }
                let kind = match size {
                    8 => UnpackKind::Copy64,
                    _ => UnpackKind::Copy,
                };
                Ok(sink.push(
                    self.what,
                    UnpackOp {
                        source: ptr.offset(start * size),
                        ..op(kind, self.to, end - start, 0)
                    },
                )?)
            }
            None => {
                let data = context.host(input)?;
                Ok(sink.values(self.what, self.to, &data[start..end])?)
            }
        }
    }

    /// Chosen rows of an input.
    fn gather(&self, input: Input, rows: &[u32], sink: &mut impl Sink) -> Result<(), LowerError> {
        let context = self.context;
        let Some((ptr, size)) = context.ptrs.of(input) else {
            return self.host_rows(name(input), context.host(input)?, rows, sink);
        };
        if input == Input::BlockTable {
            context.check_width()?;
        }
        let width = context.width(input);
        let count = context.len(input)?.checked_div(width).unwrap_or(0);
        for &row in rows {
            if row as usize >= count {
                return Err(outside(name(input), row, count).into());
            }
        }
        let kind = match size {
            8 => UnpackKind::Rows64,
            _ => UnpackKind::Rows,
        };
        fits(self.what, rows.len() * width, self.to.room)?;
        let list = sink.list(self.what, rows)?;
        Ok(sink.push(
            self.what,
            UnpackOp {
                source: ptr,
                width: width as i32,
                ..op(kind, self.to, rows.len(), list)
            },
        )?)
    }

    /// Chosen elements of a vector that the device does not keep.
    fn host_rows(
        &self,
        name: &'static str,
        data: &[i32],
        rows: &[u32],
        sink: &mut impl Sink,
    ) -> Result<(), LowerError> {
        let values = rows
            .iter()
            .map(|&row| {
                data.get(row as usize)
                    .copied()
                    .ok_or_else(|| outside(name, row, data.len()))
            })
            .collect::<Result<Vec<i32>, _>>()?;
        Ok(sink.values(self.what, self.to, &values)?)
    }

    /// The first of a range of rows among the device's.
    fn first_row(&self, range: &std::ops::Range<usize>) -> i32 {
        (self.context.ptrs.first_row + range.start) as i32
    }

    /// An operation on rows [start, end) that gives `len` elements.
    fn rows(
        &self,
        kind: UnpackKind,
        range: &std::ops::Range<usize>,
        len: usize,
        option: i32,
        sink: &mut impl Sink,
    ) -> Result<(), LowerError> {
        fits(self.what, len, self.to.room)?;
        Ok(sink.push(
            self.what,
            UnpackOp {
                first_row: self.first_row(range),
                option,
                ..op(kind, self.to, range.len(), 0)
            },
        )?)
    }

    /// An operation on listed rows; `len` elements, or `width` for each row.
    fn by_row(
        &self,
        kind: UnpackKind,
        rows: &[u32],
        width: u32,
        option: i32,
        len: Option<usize>,
        sink: &mut impl Sink,
    ) -> Result<(), LowerError> {
        let len = len.unwrap_or_else(|| rows.len().saturating_mul(width as usize));
        fits(self.what, len, self.to.room)?;
        let list = sink.list(self.what, rows)?;
        Ok(sink.push(
            self.what,
            UnpackOp {
                width: width as i32,
                option,
                ..op(kind, self.to, rows.len(), list)
            },
        )?)
    }

    fn pages(
        &self,
        rows: &RowRange,
        columns: Option<&[u32]>,
        siblings: Siblings<'_>,
        sink: &mut impl Sink,
    ) -> Result<(), LowerError> {
        let context = self.context;
        context.check_width()?;
        let range = context.rows(rows)?;
        let indptr = siblings.paged_kv_indptr.unwrap_or(&[]);
        if indptr.len() != range.len() + 1 {
            return Err(ResolveError::Sibling {
                name: "paged_kv_indptr",
                value: indptr.len() as i64,
                expected: range.len() as i64 + 1,
            }
            .into());
        }
        let total = check_sums("paged_kv_indptr", indptr)?;
        fits(self.what, total, self.to.room)?;
        let mut left = columns.unwrap_or(&[]);
        for (row, bounds) in range.clone().zip(indptr.windows(2)) {
            let count = (bounds[1] - bounds[0]) as usize;
            if columns.is_none() {
                context.columns(row as u32, count)?;
                continue;
            }
            let Some((own, rest)) = left.split_at_checked(count) else {
                return Err(ResolveError::Sibling {
                    name: "columns",
                    value: left.len() as i64,
                    expected: count as i64,
                }
                .into());
            };
            left = rest;
            let end = own.iter().map(|&column| column as usize + 1).max();
            context.columns(row as u32, end.unwrap_or(0))?;
        }
        if !left.is_empty() {
            return Err(ResolveError::Sibling {
                name: "columns",
                value: left.len() as i64,
                expected: 0,
            }
            .into());
        }
        let list = self.sums(indptr, sink)?;
        let (kind, list2) = match columns {
            None => (UnpackKind::GatherPages, 0),
            Some(columns) => (UnpackKind::SelectPages, sink.list(self.what, columns)?),
        };
        Ok(sink.push(
            self.what,
            UnpackOp {
                first_row: self.first_row(&range),
                list2,
                ..op(kind, self.to, range.len(), list)
            },
        )?)
    }

    /// A running sum as the kernel wants it: from 0.
    fn sums(&self, sums: &[i32], sink: &mut impl Sink) -> Result<i64, LowerError> {
        match sums.first() {
            Some(&0) => Ok(sink.list(self.what, sums)?),
            Some(&first) => {
                let rebased: Vec<i32> = sums.iter().map(|&sum| sum - first).collect();
                Ok(sink.list(self.what, &rebased)?)
            }
            None => Ok(sink.list(self.what, &[0_i32])?),
        }
    }

    fn chunks(
        &self,
        kind: UnpackKind,
        chunks: &ConvChunks,
        sink: &mut impl Sink,
    ) -> Result<(), LowerError> {
        let length = chunks.length as usize;
        fits(self.what, length, self.to.room)?;
        if chunks.block_m == 0 {
            return Err(ResolveError::Value {
                what: "block_m",
                row: 0,
                value: 0,
            }
            .into());
        }
        let range = self.context.rows(&chunks.rows)?;
        let mut len = 0;
        for row in range.clone() {
            len += self
                .context
                .query_len(row)?
                .div_ceil(chunks.block_m as usize);
        }
        if len > length {
            return Err(ResolveError::Room {
                what: "conv chunks",
                len: len as u64,
                room: u64::from(chunks.length),
            }
            .into());
        }
        // The tensor's own padding is −1; what lies beyond it is the destination's.
        let own = Destination {
            room: length,
            fill: -1,
            ..self.to
        };
        sink.push(
            self.what,
            UnpackOp {
                first_row: self.first_row(&range),
                width: chunks.block_m.min(i32::MAX as u32) as i32,
                ..op(kind, own, range.len(), 0)
            },
        )?;
        if length < self.to.room {
            let rest = Destination {
                ptr: DevicePtr::from_raw(self.to.ptr.raw() + 4 * length as u64),
                room: self.to.room - length,
                ..self.to
            };
            sink.fill(self.what, rest)?;
        }
        Ok(())
    }
}

impl<'a> LowerContext<'a> {
    /// Is it the whole step?
    fn whole(&self, what: &'static str) -> Result<(), LowerError> {
        match self.ptrs.first_row {
            0 => Ok(()),
            first_row => Err(LowerError::Part { what, first_row }),
        }
    }

    /// An s32 input on the host.
    fn host(&self, input: Input) -> Result<&'a [i32], ResolveError> {
        let inputs = self.inputs;
        let found = match input {
            Input::QueryStartLoc => Some(inputs.query_start_loc),
            Input::SeqLens => Some(inputs.seq_lens),
            Input::BlockTable => Some(inputs.block_table.data),
            Input::SlotMapping | Input::Positions => {
                return Err(ResolveError::ElementType(name(input)));
            }
            Input::Causal => inputs.causal,
            Input::DcpLocalSeqLens => inputs.dcp_local_seq_lens,
            Input::EncoderSeqLens => inputs.encoder_seq_lens,
            Input::LogitsIndicesPadded => inputs.logits_indices_padded,
            Input::RswaPrefixLens => inputs.rswa_prefix_lens,
        };
        found.ok_or(ResolveError::MissingInput(name(input)))
    }

    /// Elements of an input.
    fn len(&self, input: Input) -> Result<usize, ResolveError> {
        match input {
            Input::SlotMapping => Ok(self.inputs.slot_mapping.len()),
            Input::Positions => Ok(self.inputs.positions.len()),
            _ => Ok(self.host(input)?.len()),
        }
    }

    /// Elements of one of its rows.
    fn width(&self, input: Input) -> usize {
        match input {
            Input::BlockTable => self.inputs.block_table.width,
            _ => 1,
        }
    }

    fn extra(&self, wanted: &str) -> Result<&'a [i32], ResolveError> {
        let extras = self.inputs.extras.iter();
        let found = extras
            .map(|(name, data)| (*name, *data))
            .find(|(name, _)| *name == wanted);
        found
            .map(|(_, data)| data)
            .ok_or_else(|| ResolveError::MissingExtra(wanted.to_owned()))
    }

    fn num_rows(&self) -> usize {
        let rows = self.inputs.query_start_loc.len().saturating_sub(1);
        self.inputs.seq_lens.len().min(rows)
    }

    fn rows(&self, rows: &RowRange) -> Result<std::ops::Range<usize>, ResolveError> {
        check_range("rows", rows.start, rows.end, self.num_rows())
    }

    fn row(&self, what: &'static str, row: u32) -> Result<usize, ResolveError> {
        let rows = self.num_rows();
        if (row as usize) < rows {
            Ok(row as usize)
        } else {
            Err(outside(what, row, rows))
        }
    }

    fn query_len(&self, row: usize) -> Result<usize, ResolveError> {
        let starts = self.inputs.query_start_loc;
        let (start, end) = (starts[row], starts[row + 1]);
        if start < 0 || end < start {
            return Err(ResolveError::Value {
                what: "query_start_loc",
                row: row as u64,
                value: i64::from(end),
            });
        }
        Ok((end - start) as usize)
    }

    /// Rows whose lengths are at least their queries.
    fn with_context(&self, rows: &RowRange) -> Result<std::ops::Range<usize>, ResolveError> {
        let range = self.rows(rows)?;
        for row in range.clone() {
            let len = i64::from(self.inputs.seq_lens[row]) - self.query_len(row)? as i64;
            if len < 0 {
                return Err(ResolveError::Value {
                    what: "context length",
                    row: row as u64,
                    value: len,
                });
            }
        }
        Ok(range)
    }

    /// The pages of those rows, as long as they can be counted in s32.
    fn count_pages(&self, range: std::ops::Range<usize>) -> Result<(), ResolveError> {
        let mut total = 0_i64;
        for row in range {
            let len = self.inputs.seq_lens[row].max(0) as u32;
            total += i64::from(len.div_ceil(self.block_size.max(1)));
            if total > i64::from(i32::MAX) {
                return Err(ResolveError::Value {
                    what: "page count",
                    row: row as u64,
                    value: total,
                });
            }
        }
        Ok(())
    }

    fn check_width(&self) -> Result<(), LowerError> {
        let (found, expected) = (self.inputs.block_table.width, self.ptrs.limits.table_width);
        // A table without rows has no width to speak of.
        if found == expected || self.inputs.block_table.data.is_empty() {
            Ok(())
        } else {
            Err(LowerError::TableWidth { found, expected })
        }
    }

    /// Columns [0, end) of a row of the block table.
    fn columns(&self, row: u32, end: usize) -> Result<(), ResolveError> {
        let at = self.row("block_table", row)?;
        let table = &self.inputs.block_table;
        if table.width > 0 && at >= table.rows() {
            return Err(outside("block_table", row, table.rows()));
        }
        if end > table.width {
            return Err(ResolveError::Columns {
                row: u64::from(row),
                end: end as u64,
                width: table.width as u64,
            });
        }
        Ok(())
    }
}

/// `input`'s name in the contract.
fn name(input: Input) -> &'static str {
    match input {
        Input::QueryStartLoc => "query_start_loc",
        Input::SeqLens => "seq_lens",
        Input::BlockTable => "block_table",
        Input::SlotMapping => "slot_mapping",
        Input::Positions => "positions",
        Input::Causal => "causal",
        Input::DcpLocalSeqLens => "dcp_local_seq_lens",
        Input::EncoderSeqLens => "encoder_seq_lens",
        Input::LogitsIndicesPadded => "logits_indices_padded",
        Input::RswaPrefixLens => "rswa_prefix_lens",
    }
}

fn outside(what: &'static str, row: u32, rows: usize) -> ResolveError {
    ResolveError::Rows {
        what,
        start: u64::from(row),
        end: u64::from(row) + 1,
        rows: rows as u64,
    }
}

fn check_range(
    what: &'static str,
    start: u32,
    end: u32,
    rows: usize,
) -> Result<std::ops::Range<usize>, ResolveError> {
    if start <= end && end as usize <= rows {
        Ok(start as usize..end as usize)
    } else {
        Err(ResolveError::Rows {
            what,
            start: u64::from(start),
            end: u64::from(end),
            rows: rows as u64,
        })
    }
}

/// A running sum that never falls: its total.
fn check_sums(name: &'static str, sums: &[i32]) -> Result<usize, ResolveError> {
    for bounds in sums.windows(2) {
        if bounds[1] < bounds[0] {
            return Err(ResolveError::Sibling {
                name,
                value: i64::from(bounds[1]),
                expected: i64::from(bounds[0]),
            });
        }
    }
    match (sums.first(), sums.last()) {
        (Some(&first), Some(&last)) => Ok((i64::from(last) - i64::from(first)) as usize),
        _ => Ok(0),
    }
}
