//! Evaluates symbolic tensors (`types::Tensor`) from the host's own tensors of the step.
//!
//! The CPU device and `timetable build` resolve through this module; a GPU device has a kernel for each case and is tested
//! against it. Every case is bounds-checked: a row, a column or a length that the step does not have is an error with its
//! value, never a panic. It must never know a device, nor which builder made the tensor.

use std::borrow::Cow;

use timetable_types::{
    BuilderConfig, CommonAttentionMetadata, ConvChunks, DcpSource, Input, PaddedTensor, RowRange,
    StateColumn, Tensor,
};

use crate::step::StepInputs;

/// Fields beside a tensor in its record that some cases need.
#[derive(Clone, Copy, Debug, Default)]
pub struct Siblings<'a> {
    /// s32 [n + 1]: row boundaries of `gather-pages` and `select-pages`.
    pub paged_kv_indptr: Option<&'a [i32]>,
    /// s32 [n + 1]: segment boundaries of `segment-ids`.
    pub cu_seq_lens: Option<&'a [i32]>,
}

impl<'a> Siblings<'a> {
    /// No sibling fields.
    pub const NONE: Siblings<'static> = Siblings {
        paged_kv_indptr: None,
        cu_seq_lens: None,
    };

    /// Of a FLASHINFER plan.
    pub fn pages(paged_kv_indptr: &'a [i32]) -> Self {
        Siblings {
            paged_kv_indptr: Some(paged_kv_indptr),
            cu_seq_lens: None,
        }
    }

    /// Of an MLA context chunk.
    pub fn segments(cu_seq_lens: &'a [i32]) -> Self {
        Siblings {
            paged_kv_indptr: None,
            cu_seq_lens: Some(cu_seq_lens),
        }
    }
}

/// Why a symbolic tensor has no value for this step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// The step does not bring that input.
    #[error("the step has no {0}; ask for it only where the step's description names it")]
    MissingInput(&'static str),
    /// No extra of that name.
    #[error("the step has no extra named {0:?}")]
    MissingExtra(String),
    /// Rows outside the step.
    #[error("{what}: rows [{start}, {end}) are outside [0, {rows})")]
    Rows {
        /// Which tensor.
        what: &'static str,
        /// First row.
        start: u64,
        /// Row after the last.
        end: u64,
        /// Rows that there are.
        rows: u64,
    },
    /// Columns outside a row of the block table.
    #[error("block_table row {row}: columns up to {end} are outside [0, {width})")]
    Columns {
        /// The row.
        row: u64,
        /// Column after the last.
        end: u64,
        /// Columns of the table.
        width: u64,
    },
    /// A sibling field that is missing or does not fit.
    #[error("{name}: {value} where {expected} was needed")]
    Sibling {
        /// The sibling field.
        name: &'static str,
        /// What it held (its length, or the value).
        value: i64,
        /// What was needed.
        expected: i64,
    },
    /// A by-value matrix whose value count is not rows × columns.
    #[error("matrix: {values} values for {rows} rows of {columns}")]
    Matrix {
        /// Rows.
        rows: u32,
        /// Columns.
        columns: u32,
        /// Values given.
        values: usize,
    },
    /// A value that the host's tensors make nonsense of, such as a length below its query.
    #[error("{what}: row {row} has the value {value}")]
    Value {
        /// What was computed.
        what: &'static str,
        /// The row.
        row: u64,
        /// The value.
        value: i64,
    },
    /// More elements than a tensor of this step may have.
    #[error("{what}: {len} elements exceed the room for {room}")]
    Room {
        /// Which tensor.
        what: &'static str,
        /// Elements needed.
        len: u64,
        /// Elements allowed.
        room: u64,
    },
    /// Scratch memory has no value.
    #[error("scratch memory has no value; allocate it by its shape")]
    Scratch,
    /// The other element width was asked for.
    #[error("{0}: asked for as the wrong element type; slots and positions are s64, the rest s32")]
    ElementType(&'static str),
}

/// Evaluates symbolic tensors against one step.
#[derive(Clone, Copy, Debug)]
pub struct Resolver<'a> {
    inputs: StepInputs<'a>,
    num_actual_tokens: usize,
    block_size: u32,
    dcp: Dcp,
    /// No tensor of this step needs more elements: a builder's numbers must not make the host allocate more.
    room: u64,
}

/// Decode context parallelism's constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dcp {
    pub(crate) world: u32,
    pub(crate) rank: u32,
    pub(crate) interleave: u32,
}

impl Dcp {
    pub(crate) fn of(config: &BuilderConfig) -> Self {
        Dcp {
            world: config.parallel.dcp_world_size.max(1),
            rank: config.parallel.dcp_rank,
            interleave: config.parallel.cp_kv_cache_interleave_size.max(1),
        }
    }

    /// This rank's share of `len` tokens that lie round robin over the ranks in runs of `interleave`.
    /// base = L // I // N · I; share = base + clamp(L − base · N − rank · I, 0, I). Negative lengths have no share.
    pub(crate) fn local_len(self, len: i32) -> i32 {
        if self.world <= 1 {
            return len.max(0);
        }
        let (len, world) = (i64::from(len.max(0)), i64::from(self.world));
        let (rank, interleave) = (i64::from(self.rank), i64::from(self.interleave));
        let base = len / interleave / world * interleave;
        let rest = (len - base * world - rank * interleave).clamp(0, interleave);
        (base + rest) as i32
    }
}

/// `value`'s name in the contract.
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

impl<'a> Resolver<'a> {
    /// For the step that `common` and `inputs` describe, in a group that `config` describes.
    pub fn new(
        config: &BuilderConfig,
        common: &CommonAttentionMetadata,
        inputs: StepInputs<'a>,
    ) -> Self {
        let tokens = common.num_actual_tokens as usize;
        Resolver {
            dcp: Dcp::of(config),
            ..Self::of_step(inputs, tokens, config.kv_cache_spec.block_size)
        }
    }

    /// For a step of `num_actual_tokens` tokens in a group whose blocks have `block_size`, without context parallelism.
    pub fn of_step(inputs: StepInputs<'a>, num_actual_tokens: usize, block_size: u32) -> Self {
        let keys: u64 = inputs.seq_lens.iter().map(|&len| len.max(0) as u64).sum();
        let room = keys
            + num_actual_tokens as u64
            + inputs.slot_mapping.len() as u64
            + 2 * inputs.block_table.data.len() as u64
            + 65_536;
        Resolver {
            inputs,
            room,
            num_actual_tokens,
            block_size: block_size.max(1),
            dcp: Dcp {
                world: 1,
                rank: 0,
                interleave: 1,
            },
        }
    }

    /// The tensor's elements, row-major; borrowed where it is the host's own or was given by value. Booleans are 0 and 1.
    pub fn resolve_i32<'t>(
        &self,
        tensor: &'t Tensor,
        siblings: Siblings<'_>,
    ) -> Result<Cow<'t, [i32]>, ResolveError>
    where
        'a: 't,
    {
        if let Some(borrowed) = self.borrow(tensor)? {
            return Ok(Cow::Borrowed(borrowed));
        }
        let mut out = Vec::new();
        self.append(tensor, siblings, &mut out)?;
        Ok(Cow::Owned(out))
    }

    /// As `resolve_i32`, into `out`, which is cleared first. Allocates only if `out` is too small.
    pub fn resolve_into(
        &self,
        tensor: &Tensor,
        siblings: Siblings<'_>,
        out: &mut Vec<i32>,
    ) -> Result<(), ResolveError> {
        out.clear();
        match self.borrow(tensor)? {
            Some(borrowed) => out.extend_from_slice(borrowed),
            None => self.append(tensor, siblings, out)?,
        }
        Ok(())
    }

    /// A padded tensor: its own rows, then `fill` up to `padded.rows` rows. Its own may not be more.
    pub fn resolve_padded_into(
        &self,
        padded: &PaddedTensor,
        siblings: Siblings<'_>,
        out: &mut Vec<i32>,
    ) -> Result<(), ResolveError> {
        self.resolve_into(&padded.tensor, siblings, out)?;
        let room = (padded.rows as usize).saturating_mul(self.row_width(&padded.tensor).max(1));
        self.check_room("padded tensor", room)?;
        if out.len() > room {
            return Err(ResolveError::Room {
                what: "padded tensor",
                len: out.len() as u64,
                room: room as u64,
            });
        }
        out.resize(room, padded.fill);
        Ok(())
    }

    /// An s64 tensor: slots or positions, whole, in part, or by rows.
    pub fn resolve_i64(&self, tensor: &Tensor) -> Result<Cow<'a, [i64]>, ResolveError> {
        let source = |input| match input {
            Input::SlotMapping => Ok(self.inputs.slot_mapping),
            Input::Positions => Ok(self.inputs.positions),
            other => Err(ResolveError::ElementType(name(other))),
        };
        match tensor {
            Tensor::Input(input) => Ok(Cow::Borrowed(source(*input)?)),
            Tensor::Slice(slice) => {
                let data = source(slice.source)?;
                let range = check_range(name(slice.source), slice.start, slice.end, data.len())?;
                Ok(Cow::Borrowed(&data[range]))
            }
            Tensor::Rows(gather) => {
                let data = source(gather.source)?;
                gather
                    .rows
                    .iter()
                    .map(|&row| {
                        data.get(row as usize)
                            .copied()
                            .ok_or_else(|| outside(name(gather.source), row, data.len()))
                    })
                    .collect::<Result<Vec<i64>, _>>()
                    .map(Cow::Owned)
            }
            _ => Err(ResolveError::ElementType("tensor")),
        }
    }

    /// Are the tensor's elements s64?
    pub fn is_i64(tensor: &Tensor) -> bool {
        let source = match tensor {
            Tensor::Input(input) => *input,
            Tensor::Slice(slice) => slice.source,
            Tensor::Rows(gather) => gather.source,
            _ => return false,
        };
        matches!(source, Input::SlotMapping | Input::Positions)
    }

    /// Elements of one row; 1 for vectors.
    pub fn row_width(&self, tensor: &Tensor) -> usize {
        match tensor {
            Tensor::Input(input) => self.input_width(*input),
            Tensor::Slice(slice) => self.input_width(slice.source),
            Tensor::Rows(gather) => self.input_width(gather.source),
            Tensor::Matrix(matrix) => matrix.columns as usize,
            Tensor::StateIndices(gather) => gather.width as usize,
            _ => 1,
        }
    }

    /// Has the tensor rows of more than one element by its kind?
    pub fn is_matrix(tensor: &Tensor) -> bool {
        match tensor {
            Tensor::Input(input) => *input == Input::BlockTable,
            Tensor::Slice(slice) => slice.source == Input::BlockTable,
            Tensor::Rows(gather) => gather.source == Input::BlockTable,
            Tensor::Matrix(_) => true,
            Tensor::StateIndices(gather) => gather.width > 1,
            _ => false,
        }
    }

    fn input_width(&self, input: Input) -> usize {
        match input {
            Input::BlockTable => self.inputs.block_table.width,
            _ => 1,
        }
    }

    fn input(&self, input: Input) -> Result<&'a [i32], ResolveError> {
        let found = match input {
            Input::QueryStartLoc => Some(self.inputs.query_start_loc),
            Input::SeqLens => Some(self.inputs.seq_lens),
            Input::BlockTable => Some(self.inputs.block_table.data),
            Input::SlotMapping | Input::Positions => {
                return Err(ResolveError::ElementType(name(input)));
            }
            Input::Causal => self.inputs.causal,
            Input::DcpLocalSeqLens => self.inputs.dcp_local_seq_lens,
            Input::EncoderSeqLens => self.inputs.encoder_seq_lens,
            Input::LogitsIndicesPadded => self.inputs.logits_indices_padded,
            Input::RswaPrefixLens => self.inputs.rswa_prefix_lens,
        };
        found.ok_or(ResolveError::MissingInput(name(input)))
    }

    fn extra(&self, wanted: &str) -> Result<&'a [i32], ResolveError> {
        self.inputs
            .extras
            .iter()
            .find(|(name, _)| *name == wanted)
            .map(|(_, data)| *data)
            .ok_or_else(|| ResolveError::MissingExtra(wanted.to_owned()))
    }

    /// The cases that need no evaluation.
    fn borrow<'t>(&self, tensor: &'t Tensor) -> Result<Option<&'t [i32]>, ResolveError>
    where
        'a: 't,
    {
        Ok(Some(match tensor {
            Tensor::Input(input) => self.input(*input)?,
            Tensor::Slice(slice) => {
                let (data, width) = (self.input(slice.source)?, self.input_width(slice.source));
                let rows = data.len().checked_div(width).unwrap_or(0);
                let range = check_range(name(slice.source), slice.start, slice.end, rows)?;
                &data[range.start * width..range.end * width]
            }
            Tensor::Extra(name) => self.extra(name)?,
            Tensor::Values(values) => values,
            Tensor::Matrix(matrix) => {
                if u64::from(matrix.rows) * u64::from(matrix.columns) != matrix.values.len() as u64
                {
                    return Err(ResolveError::Matrix {
                        rows: matrix.rows,
                        columns: matrix.columns,
                        values: matrix.values.len(),
                    });
                }
                &matrix.values
            }
            Tensor::Scratch(_) => return Err(ResolveError::Scratch),
            _ => return Ok(None),
        }))
    }

    /// The cases that are evaluated; `out` arrives empty.
    fn append(
        &self,
        tensor: &Tensor,
        siblings: Siblings<'_>,
        out: &mut Vec<i32>,
    ) -> Result<(), ResolveError> {
        match tensor {
            // Handled by `borrow`.
            Tensor::Input(_)
            | Tensor::Slice(_)
            | Tensor::Extra(_)
            | Tensor::Values(_)
            | Tensor::Matrix(_)
            | Tensor::Scratch(_) => {
                if let Some(borrowed) = self.borrow(tensor)? {
                    out.extend_from_slice(borrowed);
                }
            }
            Tensor::RebasedQueryStartLoc(rows) => {
                let starts = self.query_starts(rows)?;
                let base = starts.first().copied().unwrap_or(0);
                out.extend(starts.iter().map(|&start| start.wrapping_sub(base)));
            }
            Tensor::ContextLens(rows) => {
                for row in self.rows(rows)? {
                    out.push(self.context_len(row)?);
                }
            }
            Tensor::HasContext(rows) => {
                for row in self.rows(rows)? {
                    out.push(i32::from(self.context_len(row)? > 0));
                }
            }
            Tensor::DcpLocal(local) => {
                for row in self.rows(&local.rows)? {
                    let len = match local.source {
                        DcpSource::SeqLens => self.inputs.seq_lens[row],
                        DcpSource::ContextLens => self.context_len(row)?,
                    };
                    out.push(self.dcp.local_len(len));
                }
            }
            Tensor::CuPageCounts(rows) => {
                let mut total = 0i64;
                out.push(0);
                for row in self.rows(rows)? {
                    let len = i64::from(self.inputs.seq_lens[row].max(0)) as u64;
                    total += len.div_ceil(u64::from(self.block_size)) as i64;
                    out.push(i32::try_from(total).map_err(|_| ResolveError::Value {
                        what: "page count",
                        row: row as u64,
                        value: total,
                    })?);
                }
            }
            Tensor::GatherPages(rows) => {
                let range = self.rows(rows)?;
                let indptr = sibling("paged_kv_indptr", siblings.paged_kv_indptr, range.len() + 1)?;
                for (row, bounds) in range.zip(indptr.windows(2)) {
                    let count = segment("paged_kv_indptr", bounds)?;
                    let table = self.table_row(row)?;
                    out.extend_from_slice(table.get(..count).ok_or(ResolveError::Columns {
                        row: row as u64,
                        end: count as u64,
                        width: table.len() as u64,
                    })?);
                }
            }
            Tensor::SelectPages(selection) => {
                let range = self.rows(&selection.rows)?;
                let indptr = sibling("paged_kv_indptr", siblings.paged_kv_indptr, range.len() + 1)?;
                let mut columns = selection.columns.as_slice();
                for (row, bounds) in range.zip(indptr.windows(2)) {
                    let count = segment("paged_kv_indptr", bounds)?;
                    let Some((own, rest)) = columns.split_at_checked(count) else {
                        return Err(ResolveError::Sibling {
                            name: "columns",
                            value: columns.len() as i64,
                            expected: count as i64,
                        });
                    };
                    columns = rest;
                    let table = self.table_row(row)?;
                    for &column in own {
                        out.push(*table.get(column as usize).ok_or(ResolveError::Columns {
                            row: row as u64,
                            end: u64::from(column) + 1,
                            width: table.len() as u64,
                        })?);
                    }
                }
                if !columns.is_empty() {
                    return Err(ResolveError::Sibling {
                        name: "columns",
                        value: columns.len() as i64,
                        expected: 0,
                    });
                }
            }
            Tensor::StateIndices(gather) => {
                self.check_room(
                    "state indices",
                    gather.rows.len().saturating_mul(gather.width as usize),
                )?;
                for &row in &gather.rows {
                    let row = self.row("block_table", row)?;
                    let table = self.table_row(row)?;
                    let first = match gather.column {
                        StateColumn::First => 0,
                        StateColumn::LastToken => {
                            (self.inputs.seq_lens[row] - 1).max(0) as usize
                                / self.block_size as usize
                        }
                    };
                    let end = first + gather.width as usize;
                    out.extend_from_slice(table.get(first..end).ok_or(ResolveError::Columns {
                        row: row as u64,
                        end: end as u64,
                        width: table.len() as u64,
                    })?);
                }
            }
            Tensor::Rows(gather) => {
                let (data, width) = (self.input(gather.source)?, self.input_width(gather.source));
                append_rows(name(gather.source), data, width, &gather.rows, out)?;
            }
            Tensor::ExtraRows(gather) => {
                append_rows("extra", self.extra(&gather.name)?, 1, &gather.rows, out)?;
            }
            Tensor::RowMask(rows) => {
                out.resize(self.num_rows(), 0);
                for &row in rows {
                    let len = out.len();
                    *out.get_mut(row as usize)
                        .ok_or_else(|| outside("row mask", row, len))? = 1;
                }
            }
            Tensor::RowTokens(rows) => {
                for &row in rows {
                    let row = self.row("query_start_loc", row)?;
                    let (start, end) = self.token_range(row)?;
                    self.check_room("row tokens", out.len() + (end - start) as usize)?;
                    out.extend(start..end);
                }
            }
            Tensor::TokenToRow => {
                for row in 0..self.num_rows() {
                    let (_, end) = self.token_range(row)?;
                    self.check_room("token to row", end as usize)?;
                    out.resize((end as usize).max(out.len()), row as i32);
                }
                // Tokens beyond the last query start are padding; the field gives them row 0.
                out.resize(self.num_actual_tokens.max(out.len()), 0);
            }
            Tensor::SegmentIds => {
                let bounds = siblings.cu_seq_lens.ok_or(ResolveError::Sibling {
                    name: "cu_seq_lens",
                    value: 0,
                    expected: 1,
                })?;
                let mut end = 0i64;
                for (index, bounds) in bounds.windows(2).enumerate() {
                    let count = segment("cu_seq_lens", bounds)?;
                    end += count as i64;
                    self.check_room("segment ids", end as usize)?;
                    out.resize(end as usize, index as i32);
                }
            }
            Tensor::ConvChunkRows(chunks) => {
                self.conv_chunks(chunks, out, |row, _| row)?;
            }
            Tensor::ConvChunkOffsets(chunks) => {
                self.conv_chunks(chunks, out, |_, offset| offset)?;
            }
        }
        Ok(())
    }

    fn num_rows(&self) -> usize {
        self.inputs
            .seq_lens
            .len()
            .min(self.inputs.query_start_loc.len().saturating_sub(1))
    }

    fn check_room(&self, what: &'static str, len: usize) -> Result<(), ResolveError> {
        if len as u64 > self.room {
            return Err(ResolveError::Room {
                what,
                len: len as u64,
                room: self.room,
            });
        }
        Ok(())
    }

    /// Row `row` of the block table, which may have fewer rows than the step.
    fn table_row(&self, row: usize) -> Result<&'a [i32], ResolveError> {
        let table = &self.inputs.block_table;
        if row < table.rows() {
            Ok(table.row(row))
        } else if table.width == 0 {
            Ok(&[])
        } else {
            Err(outside("block_table", row as u32, table.rows()))
        }
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

    fn query_starts(&self, rows: &RowRange) -> Result<&'a [i32], ResolveError> {
        let range = self.rows(rows)?;
        Ok(&self.inputs.query_start_loc[range.start..=range.end])
    }

    fn token_range(&self, row: usize) -> Result<(i32, i32), ResolveError> {
        let (start, end) = (
            self.inputs.query_start_loc[row],
            self.inputs.query_start_loc[row + 1],
        );
        if start < 0 || end < start {
            return Err(ResolveError::Value {
                what: "query_start_loc",
                row: row as u64,
                value: i64::from(end),
            });
        }
        Ok((start, end))
    }

    fn context_len(&self, row: usize) -> Result<i32, ResolveError> {
        let (start, end) = self.token_range(row)?;
        let len = i64::from(self.inputs.seq_lens[row]) - i64::from(end - start);
        i32::try_from(len)
            .ok()
            .filter(|len| *len >= 0)
            .ok_or(ResolveError::Value {
                what: "context length",
                row: row as u64,
                value: len,
            })
    }

    fn conv_chunks(
        &self,
        chunks: &ConvChunks,
        out: &mut Vec<i32>,
        value: impl Fn(i32, i32) -> i32,
    ) -> Result<(), ResolveError> {
        self.check_room("conv chunks", chunks.length as usize)?;
        if chunks.block_m == 0 {
            return Err(ResolveError::Value {
                what: "block_m",
                row: 0,
                value: 0,
            });
        }
        for (index, row) in self.rows(&chunks.rows)?.enumerate() {
            let (start, end) = self.token_range(row)?;
            let count = ((end - start) as u32).div_ceil(chunks.block_m);
            let len = out.len() as u64 + u64::from(count);
            if len > u64::from(chunks.length) {
                return Err(ResolveError::Room {
                    what: "conv chunks",
                    len,
                    room: u64::from(chunks.length),
                });
            }
            out.extend((0..count as i32).map(|offset| value(index as i32, offset)));
        }
        out.resize(chunks.length as usize, -1);
        Ok(())
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

fn sibling<'s>(
    name: &'static str,
    found: Option<&'s [i32]>,
    len: usize,
) -> Result<&'s [i32], ResolveError> {
    match found {
        Some(values) if values.len() == len => Ok(values),
        found => Err(ResolveError::Sibling {
            name,
            value: found.map_or(0, <[i32]>::len) as i64,
            expected: len as i64,
        }),
    }
}

/// The length of one segment of a running sum.
fn segment(name: &'static str, bounds: &[i32]) -> Result<usize, ResolveError> {
    let len = i64::from(bounds[1]) - i64::from(bounds[0]);
    usize::try_from(len).map_err(|_| ResolveError::Sibling {
        name,
        value: i64::from(bounds[1]),
        expected: i64::from(bounds[0]),
    })
}

fn append_rows(
    what: &'static str,
    data: &[i32],
    width: usize,
    rows: &[u32],
    out: &mut Vec<i32>,
) -> Result<(), ResolveError> {
    let count = data.len().checked_div(width).unwrap_or(0);
    for &row in rows {
        let index = row as usize;
        if index >= count {
            return Err(outside(what, row, count));
        }
        out.extend_from_slice(&data[index * width..(index + 1) * width]);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
