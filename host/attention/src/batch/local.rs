//! Chunked local attention as plain attention: every chunk that a query touches becomes a row of its own.
//! It must never know a backend: any that attends to a window of whole blocks can run the result.

use thiserror::Error;
use timetable_types::Causal;

use super::step::{GroupStep, StepTensors};
use crate::step::BlockTable;

/// Why a batch has no virtual batches.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LocalAttentionError {
    /// Chunks would begin inside a block.
    #[error(
        "attn_chunk_size {chunk} is not divisible by block_size {block_size}: choose a block size that divides the chunk"
    )]
    ChunkNotDivisible {
        /// Tokens of a chunk.
        chunk: u32,
        /// Tokens of a block.
        block_size: u32,
    },
    /// A chunk or block of no tokens, or a table without columns.
    #[error(
        "local attention needs a chunk, a block and a table of at least 1, got chunk {chunk}, block {block_size}, {width} columns"
    )]
    Empty {
        /// Tokens of a chunk.
        chunk: u32,
        /// Tokens of a block.
        block_size: u32,
        /// Columns of the table.
        width: usize,
    },
}

/// Which entries of the host's table each virtual row reads: kept, so that another group's table (or a later step of the same
/// shape) is rewritten without planning again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalBlockColumns {
    /// Source row of each virtual row, `s32 [R']`.
    pub rows: Vec<u32>,
    /// First column of each virtual row, `s32 [R']`.
    pub first_columns: Vec<u32>,
    /// Columns of a virtual row: chunk / block size.
    pub blocks_per_chunk: usize,
}

impl LocalBlockColumns {
    /// The virtual rows of a table, `s32 [R', chunk / block size]`; columns beyond the table's last read the last one.
    #[must_use]
    pub fn gather(&self, table: BlockTable<'_>) -> Vec<i32> {
        let mut out = Vec::with_capacity(self.rows.len() * self.blocks_per_chunk);
        self.gather_into(table, &mut out);
        out
    }

    /// As [`gather`](Self::gather), in place of what `out` held.
    pub fn gather_into(&self, table: BlockTable<'_>, out: &mut Vec<i32>) {
        out.clear();
        for (&row, &first) in self.rows.iter().zip(&self.first_columns) {
            let row = table.row(row as usize);
            let last = row.len() - 1;
            let first = first as usize;
            let inside = row.len().saturating_sub(first).min(self.blocks_per_chunk);
            out.extend_from_slice(&row[first.min(last + 1)..][..inside]);
            out.resize(out.len() + self.blocks_per_chunk - inside, row[last]);
        }
    }
}

/// The largest number of virtual rows of any batch of at most `max_num_reqs` rows and `max_num_tokens` tokens. Buffers are
/// sized by this, not by the request count: a row of q tokens makes up to ⌈(q − 1) / chunk⌉ + 1 rows.
#[must_use]
pub fn max_virtual_rows(max_num_reqs: usize, max_num_tokens: usize, chunk: u32) -> usize {
    // 1 + ⌈(q − 1) / C⌉ ≤ 2 + q / C; and a row never makes more rows than it has tokens, or one.
    (2 * max_num_reqs + max_num_tokens / chunk.max(1) as usize).min(max_num_reqs + max_num_tokens)
}

/// How a step is cut, in memory that is reused from step to step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualRows {
    chunk: u32,
    block_size: u32,
    /// `s32 [R' + 1]`
    pub query_start_loc: Vec<i32>,
    /// `s32 [R']`: at most the chunk.
    pub seq_lens: Vec<i32>,
    /// Where each row's blocks are.
    pub columns: LocalBlockColumns,
    /// The longest row's queries.
    pub max_query_len: u32,
    /// The longest row's keys.
    pub max_seq_len: u32,
}

impl VirtualRows {
    /// None yet, with memory for `capacity` of them; see [`max_virtual_rows`].
    ///
    /// # Errors
    /// If the block size does not divide the chunk, or one of them is 0.
    pub fn new(chunk: u32, block_size: u32, capacity: usize) -> Result<Self, LocalAttentionError> {
        if chunk == 0 || block_size == 0 {
            return Err(LocalAttentionError::Empty {
                chunk,
                block_size,
                width: 1,
            });
        }
        if !chunk.is_multiple_of(block_size) {
            return Err(LocalAttentionError::ChunkNotDivisible { chunk, block_size });
        }
        Ok(Self {
            chunk,
            block_size,
            query_start_loc: Vec::with_capacity(capacity + 1),
            seq_lens: Vec::with_capacity(capacity),
            columns: LocalBlockColumns {
                rows: Vec::with_capacity(capacity),
                first_columns: Vec::with_capacity(capacity),
                blocks_per_chunk: (chunk / block_size) as usize,
            },
            max_query_len: 0,
            max_seq_len: 0,
        })
    }

    /// Cuts the rows that have these query starts and lengths, and a table of `width` columns, at least 1.
    ///
    /// For a row of q queries and s keys, C the chunk: the first piece is min(C − (s − q) mod C, q) queries, pieces after it
    /// are C, the last what is left; every piece has C keys except the last, which has (s − 1) mod C + 1. A row without keys
    /// (padding) gives one row of 0 queries and 0 keys. (vLLM 0.33 `make_local_attention_virtual_batches`.)
    pub fn cut(&mut self, query_start_loc: &[i32], seq_lens: &[i32], width: usize) {
        let c = self.chunk as i32;
        let columns = &mut self.columns;
        self.query_start_loc.clear();
        self.query_start_loc.push(0);
        self.seq_lens.clear();
        columns.rows.clear();
        columns.first_columns.clear();
        let (mut at, mut max_query_len, mut max_seq_len) = (0, 0, 0);
        for (row, (starts, &s)) in query_start_loc.windows(2).zip(seq_lens).enumerate() {
            let q = starts[1] - starts[0];
            let mut chunk_start = (s - q).max(0) / c * c;
            let mut done = s - q;
            loop {
                let chunk_end = (chunk_start + c).min(s);
                let (queries, keys) = (chunk_end - done, chunk_end - chunk_start);
                at += queries;
                self.query_start_loc.push(at);
                self.seq_lens.push(keys);
                columns.rows.push(row as u32);
                columns
                    .first_columns
                    .push((chunk_start as u32 / self.block_size).min(width as u32 - 1));
                max_query_len = max_query_len.max(queries);
                max_seq_len = max_seq_len.max(keys);
                done = chunk_end;
                chunk_start += c;
                if done >= s {
                    break;
                }
            }
        }
        (self.max_query_len, self.max_seq_len) = (max_query_len as u32, max_seq_len as u32);
    }
}

/// Cuts a step into virtual rows, each inside one chunk of `chunk` tokens: its queries, and that chunk's keys up to them; see
/// [`VirtualRows::cut`]. Tokens and slots stay as they are; the result is causal.
///
/// # Errors
/// If the block size does not divide the chunk, or one of them is 0.
pub fn make_local_attention_virtual_batches(
    chunk: u32,
    step: &GroupStep,
    block_size: u32,
) -> Result<(GroupStep, LocalBlockColumns), LocalAttentionError> {
    let width = step.tensors.block_table_width;
    if width == 0 || chunk == 0 || block_size == 0 {
        return Err(LocalAttentionError::Empty {
            chunk,
            block_size,
            width,
        });
    }
    let tokens = step.cam.num_actual_tokens;
    let capacity = max_virtual_rows(step.batch_size(), tokens as usize, chunk);
    let mut rows = VirtualRows::new(chunk, block_size, capacity)?;
    rows.cut(&step.tensors.query_start_loc, &step.tensors.seq_lens, width);
    let VirtualRows {
        query_start_loc,
        seq_lens,
        columns,
        max_query_len,
        max_seq_len,
        ..
    } = rows;
    let bounds = seq_lens.clone();
    let tensors = StepTensors {
        query_start_loc,
        seq_lens,
        block_table: columns.gather(step.tensors.table()),
        block_table_width: columns.blocks_per_chunk,
        slot_mapping: step.tensors.slot_mapping.clone(),
        positions: step.tensors.positions.clone(),
        ..StepTensors::default()
    };
    let mut made = GroupStep::new(tensors, bounds, tokens, max_query_len, max_seq_len);
    made.cam.causal = Causal::All(true);
    Ok((made, columns))
}
