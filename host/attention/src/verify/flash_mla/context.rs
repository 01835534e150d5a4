//! Chunks of context: each prefill's context once, in order, in pieces that the workspace holds.

use timetable_types::{
    RowRange, Scratch as ScratchTensor, Tensor,
    batch::ContextWorkspace,
    flash_mla::{ChunkedContext, ContextChunk, DcpContextChunk},
};

use super::{VerifyContext, is_workspace_dtype, values};
use crate::verify::refusal::{Refusal, Rule, absent, between, configured, equal, length, present};

/// Rows of the largest workspace.
const MAX_WORKSPACE: i64 = 1 << 25;

/// The rows that prefill: their lengths and query starts as the host vouches for them.
pub(super) struct Prefills<'s> {
    /// `s32 [n]`
    pub lens: &'s [i32],
    /// `s32 [n + 1]`, not rebased.
    pub starts: &'s [i32],
}

impl Prefills<'_> {
    fn query_len(&self, row: usize) -> i32 {
        self.starts[row + 1] - self.starts[row]
    }

    fn context_len(&self, row: usize) -> i32 {
        self.lens[row] - self.query_len(row)
    }

    pub(super) fn context_lens(&self) -> impl ExactSizeIterator<Item = i32> {
        (0..self.lens.len()).map(|row| self.context_len(row))
    }

    /// First query token of a row, of the prefill part.
    fn token(&self, row: usize) -> u32 {
        (self.starts[row] - self.starts[0]) as u32
    }

    /// The first row from `row` on that has context; the number of rows if none has.
    fn next(&self, row: usize) -> usize {
        let rows = self.lens.len();
        (row..rows)
            .find(|&row| self.context_len(row) > 0)
            .unwrap_or(rows)
    }
}

/// What of the context is covered: all before `row`, and of `row` the first `done` tokens.
struct Progress {
    row: usize,
    done: i32,
}

pub(super) fn verify(
    context: &ChunkedContext,
    part: &Prefills<'_>,
    max_query_len: u32,
    ctx: &VerifyContext<'_>,
) -> Result<(), Refusal> {
    let ChunkedContext {
        context_lens,
        workspace,
        chunks,
        empty_token_slices,
    } = context;
    values("context_lens", context_lens, part.context_lens())?;
    let ScratchTensor { shape, dtype } = workspace;
    length("workspace", shape.len(), 2)?;
    let entry = ctx.config.kv_cache_spec.head_size;
    if shape[1] != entry {
        return Err(Refusal::at(
            "workspace",
            1,
            shape[1].into(),
            Rule::Equal,
            entry.into(),
        ));
    }
    between("workspace", shape[0], 0, MAX_WORKSPACE)?;
    configured(
        "workspace",
        is_workspace_dtype(*dtype, ctx),
        *dtype as i64,
        ctx.config.attention.model_dtype as i64,
    )?;
    // How pieces of context become rows is the configuration's; the size of the workspace is not.
    let Some(rows) = ContextWorkspace::new(ctx.config, 1) else {
        return Err(Refusal::new("workspace", shape[0].into(), Rule::AtMost, 0));
    };
    let mut progress = Progress {
        row: part.next(0),
        done: 0,
    };
    for (index, chunk) in chunks.iter().enumerate() {
        equal("chunks.index", chunk.index, index as i64)?;
        Chunk { chunk, part, ctx }
            .verify(&mut progress, &rows, shape[0], max_query_len)
            .map_err(|refusal| refusal.within("chunks"))?;
    }
    // A context that no chunk has.
    if progress.row < part.lens.len() {
        return Err(Refusal::new(
            "chunks",
            progress.row as i64,
            Rule::AtLeast,
            part.lens.len() as i64,
        ));
    }
    // The queries that no chunk is for, row by row.
    let mut slices = empty_token_slices.iter();
    let mut wanted = 0;
    for row in (0..part.lens.len()).filter(|&row| part.context_len(row) <= 0) {
        wanted += 1;
        let Some(found) = slices.next() else {
            continue;
        };
        range(
            "empty_token_slices",
            found,
            (part.token(row), part.token(row + 1)),
        )?;
    }
    length("empty_token_slices", empty_token_slices.len(), wanted)
}

/// `found` must be exactly [start, end).
fn range(field: &'static str, found: &RowRange, (start, end): (u32, u32)) -> Result<(), Refusal> {
    equal(field, found.start, start)?;
    equal(field, found.end, end)
}

struct Chunk<'c> {
    chunk: &'c ContextChunk,
    part: &'c Prefills<'c>,
    ctx: &'c VerifyContext<'c>,
}

impl Chunk<'_> {
    fn verify(
        &self,
        progress: &mut Progress,
        workspace: &ContextWorkspace,
        room: u32,
        prefill_max_query_len: u32,
    ) -> Result<(), Refusal> {
        let ContextChunk {
            // Counted by the caller.
            index: _,
            request_slice,
            token_slice,
            continuation_token_end,
            is_continuation,
            num_context_tokens,
            query_start_loc,
            max_query_len,
            cu_seq_lens,
            starts,
            max_seq_len,
            seq_lens,
            token_to_seq,
            all_rows_active,
            num_local_context_tokens,
            dcp,
        } = self.chunk;
        let (part, rows) = (self.part, workspace.budget().rows);
        // It goes on where the chunk before ended, with rows that all have context.
        let first = progress.row;
        if first == part.lens.len() {
            return Err(Refusal::new(
                "request_slice",
                request_slice.start.into(),
                Rule::Absent,
                0,
            ));
        }
        equal("request_slice", request_slice.start, first as i64)?;
        between(
            "request_slice",
            request_slice.end,
            first as i64 + 1,
            part.lens.len() as i64,
        )?;
        let end = request_slice.end as usize;
        range(
            "token_slice",
            token_slice,
            (part.token(first), part.token(end)),
        )?;
        equal(
            "continuation_token_end",
            *continuation_token_end,
            part.token(first + 1),
        )?;
        configured(
            "is_continuation",
            *is_continuation == (progress.done > 0),
            (*is_continuation).into(),
            (progress.done > 0).into(),
        )?;
        values(
            "query_start_loc",
            query_start_loc,
            (0..end - first + 1).map(|row| part.starts[first + row] - part.starts[first]),
        )?;
        let longest = (first..end).map(|row| part.query_len(row)).max();
        between(
            "max_query_len",
            *max_query_len,
            longest.unwrap_or(0),
            prefill_max_query_len,
        )?;
        // Each row's context: all that is left of it, but for the last row, of which it may be an aligned piece.
        length("seq_lens", seq_lens.len(), end - first)?;
        length("starts", starts.len(), end - first)?;
        length("cu_seq_lens", cu_seq_lens.len(), end - first + 1)?;
        equal("cu_seq_lens", cu_seq_lens[0], 0)?;
        let start_of_chunk = progress.done;
        let mut sum = 0_i64;
        let at = |field, row: usize, value: i32, wanted: i64| {
            Err(Refusal::at(field, row, value.into(), Rule::Equal, wanted))
        };
        for (index, row) in (first..end).enumerate() {
            let context = part.context_len(row);
            let (done, len) = (progress.done, seq_lens[index]);
            let left = context - done;
            if left <= 0 {
                // A row without context is in no chunk.
                return Err(Refusal::at(
                    "request_slice",
                    index,
                    row as i64,
                    Rule::Absent,
                    0,
                ));
            }
            let is_last = row + 1 == end;
            let align = workspace.budget().split_alignment;
            if !is_last && len != left {
                return at("seq_lens", index, len, left.into());
            }
            if len < 1 || len > left {
                let (rule, bound) = match len < 1 {
                    true => (Rule::AtLeast, 1),
                    false => (Rule::AtMost, left),
                };
                return Err(Refusal::at(
                    "seq_lens",
                    index,
                    len.into(),
                    rule,
                    bound.into(),
                ));
            }
            if len < left && len % align != 0 {
                return Err(Refusal::at(
                    "seq_lens",
                    index,
                    len.into(),
                    Rule::MultipleOf,
                    align.into(),
                ));
            }
            // Of what this rank holds of the context, where ranks share it.
            let start = rows.padded(done);
            if starts[index] != start {
                return at("starts", index, starts[index], start.into());
            }
            sum += i64::from(len);
            if i64::from(cu_seq_lens[index + 1]) != sum {
                return at("cu_seq_lens", index + 1, cu_seq_lens[index + 1], sum);
            }
            *progress = match len == left {
                true => Progress {
                    row: row + 1,
                    done: 0,
                },
                false => Progress {
                    row,
                    done: done + len,
                },
            };
        }
        if progress.done == 0 {
            progress.row = part.next(progress.row);
        }
        equal("num_context_tokens", *num_context_tokens, sum)?;
        let longest = seq_lens.iter().copied().max().unwrap_or(0);
        between(
            "max_seq_len",
            *max_seq_len,
            longest,
            self.ctx.max_len_bound().max(longest.into()),
        )?;
        segments("token_to_seq", token_to_seq)?;
        // Every row has context in the chunk, as above.
        configured(
            "all_rows_active",
            *all_rows_active,
            (*all_rows_active).into(),
            1,
        )?;
        let local = match dcp {
            Some(dcp) if rows.dcp_world_size > 1 => {
                self.ranks(dcp, start_of_chunk, first, workspace)?
            }
            other => {
                absent("dcp", other.is_some())?;
                if rows.dcp_world_size > 1 {
                    present("dcp", dcp)?;
                }
                sum
            }
        };
        equal("num_local_context_tokens", *num_local_context_tokens, local)?;
        // A rank's own rows, and those of all ranks gathered; one rank has only the latter.
        let needed = match rows.dcp_world_size {
            1 => local,
            ranks => local * (i64::from(ranks) + 1),
        };
        between("num_context_tokens", needed, 0, room)
    }

    /// Every rank's share of the chunk; the sum of what each holds, padded alike.
    fn ranks(
        &self,
        dcp: &DcpContextChunk,
        start_of_chunk: i32,
        first: usize,
        workspace: &ContextWorkspace,
    ) -> Result<i64, Refusal> {
        let DcpContextChunk {
            padded_local_seq_lens,
            local_context_lens_allranks,
            padded_local_cu_seq_lens,
            padded_local_token_to_seq,
            local_starts,
        } = dcp;
        let (rows, seq_lens) = (workspace.budget().rows, &self.chunk.seq_lens);
        let begin = |index: usize| if index == 0 { start_of_chunk } else { 0 };
        let padded =
            |index: usize| rows.padded(begin(index) + seq_lens[index]) - rows.padded(begin(index));
        values(
            "padded_local_seq_lens",
            padded_local_seq_lens,
            (0..seq_lens.len()).map(padded),
        )?;
        values(
            "local_starts",
            local_starts,
            (0..seq_lens.len()).map(|index| rows.padded(begin(index))),
        )?;
        let mut sum = 0_i64;
        length(
            "padded_local_cu_seq_lens",
            padded_local_cu_seq_lens.len(),
            seq_lens.len() + 1,
        )?;
        for (index, &found) in padded_local_cu_seq_lens.iter().enumerate() {
            if i64::from(found) != sum {
                return Err(Refusal::at(
                    "padded_local_cu_seq_lens",
                    index,
                    found.into(),
                    Rule::Equal,
                    sum,
                ));
            }
            if index < seq_lens.len() {
                sum += i64::from(padded(index));
            }
        }
        segments("padded_local_token_to_seq", padded_local_token_to_seq)?;
        // Of the whole contexts, row by row.
        let world = self.ctx.dcp().world as usize;
        values(
            "local_context_lens_allranks",
            local_context_lens_allranks,
            (0..seq_lens.len() * world).map(|at| {
                let mut dcp = self.ctx.dcp();
                dcp.rank = (at % world) as u32;
                dcp.local_len(self.part.context_len(first + at / world))
            }),
        )?;
        Ok(sum)
    }
}

/// The index of its segment for each element: there is one way to say that.
fn segments(field: &'static str, tensor: &Tensor) -> Result<(), Refusal> {
    match tensor {
        Tensor::SegmentIds => Ok(()),
        _ => Err(Refusal::reference(field, "segment ids")),
    }
}
