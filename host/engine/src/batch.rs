//! The persistent batch: a step's host tensors, kept between steps and changed only where the step differs.
//!
//! Owns every buffer that a step's `CommonAttentionMetadata` and `StepInputs` refer to. On the CPU device the host-side
//! vectors and the "device" tensors of the step are the same memory; another device mirrors the block table from the changes
//! that are recorded here. Block-table rows stay in place: a row whose occupant is the same as in the step before gets only
//! its new blocks.
//!
//! The batch must never know which backend reads it, nor choose a token.

use timetable_attention::{
    BlockTable, PAD_SLOT_ID, StepInputs,
    batch::{PaddingError, PaddingValues},
    graphs::{BatchQuery, decode_graph_eligible, uniform_token_count},
    kernel_block::block_table_width,
};
use timetable_types::{Causal, CommonAttentionMetadata};

use crate::{
    kv::BlockId,
    request::Request,
    scheduler::{ScheduledRow, SegmentKey},
};

/// The token id that stands for "the token that was chosen at `index` of the step before": of that step's logits rows.
pub const fn feed_reference(index: usize) -> i32 {
    -1 - index as i32
}

/// Sizes of the persistent buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// Rows at most.
    pub max_num_seqs: usize,
    /// Tokens at most.
    pub max_num_batched_tokens: usize,
    /// Tokens of a request at most.
    pub max_model_len: usize,
    /// Tokens of a block of the KV manager.
    pub block_size: usize,
    /// Tokens of a block of the table that kernels read; divides `block_size`.
    pub kernel_block_size: usize,
}

/// A batch cannot be made of these sizes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "KV cache blocks of {block_size} tokens cannot be split into kernel blocks of {kernel_block_size}: choose a --block-size \
     that is a multiple of {kernel_block_size}"
)]
pub struct BlockSizeError {
    /// Tokens of a block of the KV manager.
    pub block_size: usize,
    /// Tokens of a kernel block.
    pub kernel_block_size: usize,
}

/// No rows, and memory for `rows`.
pub(crate) fn empty_common(rows: usize, width: usize) -> CommonAttentionMetadata {
    CommonAttentionMetadata {
        num_reqs: 0,
        num_actual_tokens: 0,
        max_query_len: 0,
        max_seq_len: 0,
        causal: Causal::All(true),
        block_table_width: width as u32,
        slot_mapping_len: 0,
        query_start_loc_cpu: Vec::with_capacity(rows + 1),
        seq_lens_cpu_upper_bound: Vec::with_capacity(rows),
        is_prefilling: Vec::with_capacity(rows),
        dcp: None,
        encoder: None,
        fast_prefill: None,
        req_idx: Vec::with_capacity(rows),
        mm_req_doc_ranges: Vec::new(),
        replayssm_decode_base_cpu: Vec::new(),
        extras: Vec::new(),
    }
}

/// Makes `part` what a step of the rows `rows` of `whole` alone would be.
pub(crate) fn copy_rows(
    whole: &CommonAttentionMetadata,
    rows: std::ops::Range<usize>,
    part: &mut CommonAttentionMetadata,
) {
    let starts = &whole.query_start_loc_cpu[rows.start..=rows.end];
    let (first, last) = (starts[0], starts[starts.len() - 1]);
    let lens = &whole.seq_lens_cpu_upper_bound[rows.clone()];
    let query_lens = starts.windows(2).map(|pair| pair[1] - pair[0]);
    part.num_reqs = rows.len() as u32;
    part.num_actual_tokens = (last - first) as u32;
    part.slot_mapping_len = part.num_actual_tokens;
    part.max_query_len = query_lens.max().unwrap_or(0) as u32;
    part.max_seq_len = lens.iter().copied().max().unwrap_or(0) as u32;
    part.query_start_loc_cpu.clear();
    part.query_start_loc_cpu
        .extend(starts.iter().map(|start| start - first));
    part.seq_lens_cpu_upper_bound.clear();
    part.seq_lens_cpu_upper_bound.extend_from_slice(lens);
    part.is_prefilling.clear();
    part.is_prefilling
        .extend_from_slice(&whole.is_prefilling[rows.clone()]);
    part.req_idx.clear();
    part.req_idx.extend_from_slice(&whole.req_idx[rows]);
}

/// A row's blocks do not reach its length: some of its tokens have no slot. Such a step must not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "row {row} has {num_blocks} blocks of {block_size} tokens and position {position} has no slot: the row needs more blocks"
)]
pub struct NoSlot {
    /// The row.
    pub row: usize,
    /// Blocks that it has.
    pub num_blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Its first position without a slot.
    pub position: usize,
}

/// What one row brings to a step.
#[derive(Clone, Copy, Debug)]
pub struct BatchRow<'a> {
    /// Index in the table of running requests.
    pub req_idx: u32,
    /// The request's recurrent state, for models that have such: an index of the pool, 0 for none.
    pub state: u32,
    /// Names the occupant: a row with the same epoch as in the step before has the same blocks, or those and more.
    pub epoch: u64,
    /// Tokens whose keys and values are in the cache already.
    pub num_computed: usize,
    /// The tokens of this step, but for `feed`.
    pub tokens: &'a [u32],
    /// One more token after them: an id, or a [`feed_reference`] where the host does not know it yet.
    pub feed: Option<i32>,
    /// Drafts after those.
    pub drafts: &'a [u32],
    /// The row's blocks in the manager's sizes. Tokens beyond them get no slot.
    pub blocks: &'a [BlockId],
    /// The field's `is_prefilling`.
    pub is_prefilling: bool,
    /// Does the model's output at the last token matter, and at each draft?
    pub wants_logits: bool,
}

/// Which blocks a table row shows.
#[derive(Clone, Copy, Debug, Default)]
struct RowState {
    epoch: u64,
    num_blocks: usize,
}

/// Columns of a table row that changed and that nobody has taken yet; empty: none.
#[derive(Clone, Copy, Debug, Default)]
struct Dirty {
    start: usize,
    end: usize,
}

/// Entries of the block table that changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableUpdate<'a> {
    /// The table's row.
    pub row: usize,
    /// The first column that changed.
    pub first_column: usize,
    /// What stands there now.
    pub entries: &'a [i32],
}

/// Where a segment begins.
#[derive(Clone, Copy, Debug)]
struct SegmentStart {
    key: SegmentKey,
    row: usize,
    token: usize,
}

/// The rows of a step that one slot serves: all that its builder sees, and all that their attention reads. Row and token
/// numbers begin at 0, and nothing here tells whether the step has other rows.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// Who builds.
    pub key: SegmentKey,
    /// Its first row in the step.
    pub first_row: usize,
    /// Its first token in the step.
    pub first_token: usize,
    /// The host-side part, for the builder.
    pub common: &'a CommonAttentionMetadata,
    /// The tensors.
    pub inputs: StepInputs<'a>,
    /// `s32 [R]`: each row's recurrent state.
    pub states: &'a [i32],
}

impl Segment<'_> {
    /// Its tokens in the step.
    pub fn tokens(&self) -> std::ops::Range<usize> {
        self.first_token..self.first_token + self.common.num_actual_tokens as usize
    }
}

/// The persistent batch of one KV cache group.
#[derive(Debug)]
pub struct InputBatch {
    shape: BatchShape,
    ratio: usize,
    width: usize,
    common: CommonAttentionMetadata,
    table: Vec<i32>,
    rows: Vec<RowState>,
    segments: Vec<SegmentStart>,
    /// Each segment's part of `common`, where there are several. Memory is kept.
    parts: Vec<CommonAttentionMetadata>,
    dirty: Vec<Dirty>,
    /// Rows whose `dirty` is not empty.
    dirty_rows: Vec<usize>,
    token_ids: Vec<i32>,
    positions: Vec<i64>,
    slot_mapping: Vec<i64>,
    /// Each row's recurrent state.
    states: Vec<i32>,
    logits_rows: Vec<usize>,
    no_slot: Option<NoSlot>,
    /// May every row replay a decode graph?
    decodes: bool,
    /// Rows and tokens without padding.
    num_actual_reqs: usize,
    num_actual_tokens: usize,
}

impl InputBatch {
    /// Allocates everything that steps use.
    pub fn new(shape: BatchShape) -> Result<Self, BlockSizeError> {
        let BatchShape {
            block_size,
            kernel_block_size,
            ..
        } = shape;
        if kernel_block_size == 0
            || block_size == 0
            || !block_size.is_multiple_of(kernel_block_size)
        {
            return Err(BlockSizeError {
                block_size,
                kernel_block_size,
            });
        }
        let ratio = block_size / kernel_block_size;
        let max_num_blocks = shape.max_model_len.div_ceil(block_size);
        let width = block_table_width(max_num_blocks as u32, block_size as u32) as usize * ratio;
        let (max_rows, max_tokens) = (shape.max_num_seqs, shape.max_num_batched_tokens);
        Ok(Self {
            ratio,
            width,
            common: empty_common(max_rows, width),
            segments: Vec::new(),
            parts: Vec::new(),
            table: vec![0; max_rows * width],
            rows: vec![RowState::default(); max_rows],
            dirty: vec![Dirty::default(); max_rows],
            dirty_rows: Vec::with_capacity(max_rows),
            token_ids: Vec::with_capacity(max_tokens),
            positions: Vec::with_capacity(max_tokens),
            slot_mapping: Vec::with_capacity(max_tokens),
            states: Vec::with_capacity(max_rows),
            logits_rows: Vec::with_capacity(max_rows),
            no_slot: None,
            decodes: true,
            num_actual_reqs: 0,
            num_actual_tokens: 0,
            shape,
        })
    }

    /// Starts a step: no rows.
    pub fn begin(&mut self) {
        let common = &mut self.common;
        common.num_reqs = 0;
        common.num_actual_tokens = 0;
        common.max_query_len = 0;
        common.max_seq_len = 0;
        common.slot_mapping_len = 0;
        common.query_start_loc_cpu.clear();
        common.query_start_loc_cpu.push(0);
        common.seq_lens_cpu_upper_bound.clear();
        common.is_prefilling.clear();
        common.req_idx.clear();
        self.token_ids.clear();
        self.positions.clear();
        self.slot_mapping.clear();
        self.states.clear();
        self.logits_rows.clear();
        self.segments.clear();
        self.no_slot = None;
        self.decodes = true;
        self.num_actual_reqs = 0;
        self.num_actual_tokens = 0;
    }

    /// The rows that follow are `key`'s, if those before were another's. Without this all rows are the first slot's.
    pub fn begin_segment(&mut self, key: SegmentKey) {
        if self.segments.last().is_none_or(|last| last.key != key) {
            self.segments.push(SegmentStart {
                key,
                row: self.common.num_reqs as usize,
                token: self.token_ids.len(),
            });
        }
    }

    /// After the last row, before segments are looked at: gives each its own numbers. Nothing to do for a step of one segment.
    pub fn divide(&mut self) {
        let count = self.segments.len();
        if count < 2 {
            return;
        }
        let (rows, width) = (self.shape.max_num_seqs, self.width);
        while self.parts.len() < count {
            self.parts.push(empty_common(rows, width));
        }
        for (index, part) in self.parts[..count].iter_mut().enumerate() {
            let first = self.segments[index].row;
            let end = self
                .segments
                .get(index + 1)
                .map_or(self.num_actual_reqs, |next| next.row);
            copy_rows(&self.common, first..end, part);
        }
    }

    /// Segments of the step; 1 for a step without rows.
    pub fn num_segments(&self) -> usize {
        self.segments.len().max(1)
    }

    /// A segment, in the order of rows. A step's only one is the whole step, padding included.
    pub fn segment(&self, index: usize) -> Segment<'_> {
        let whole = self.inputs();
        if self.segments.len() < 2 {
            return Segment {
                key: self
                    .segments
                    .first()
                    .map(|only| only.key)
                    .unwrap_or_default(),
                first_row: 0,
                first_token: 0,
                common: &self.common,
                inputs: whole,
                states: &self.states,
            };
        }
        let SegmentStart { key, row, token } = self.segments[index];
        let common = &self.parts[index];
        let rows = row..row + common.num_reqs as usize;
        let tokens = token..token + common.num_actual_tokens as usize;
        Segment {
            key,
            first_row: row,
            first_token: token,
            common,
            states: &self.states[rows.clone()],
            inputs: StepInputs {
                query_start_loc: &common.query_start_loc_cpu,
                seq_lens: &common.seq_lens_cpu_upper_bound,
                block_table: BlockTable {
                    data: &self.table[rows.start * self.width..rows.end * self.width],
                    width: self.width,
                },
                slot_mapping: &self.slot_mapping[tokens.clone()],
                positions: &self.positions[tokens],
                ..whole
            },
        }
    }

    /// Adds a row.
    ///
    /// # Panics
    /// If there are more rows or tokens than the batch was made for.
    pub fn push(&mut self, row: &BatchRow<'_>) {
        let index = self.common.num_reqs as usize;
        let known = row.tokens.len() + usize::from(row.feed.is_some());
        let num_tokens = known + row.drafts.len();
        assert!(index < self.shape.max_num_seqs, "a row beyond max_num_seqs");
        assert!(
            self.token_ids.len() + num_tokens <= self.shape.max_num_batched_tokens,
            "tokens beyond max_num_batched_tokens"
        );
        let seq_len = row.num_computed + num_tokens;
        self.write_table_row(index, row.epoch, row.blocks);
        self.token_ids
            .extend(row.tokens.iter().map(|&token| token as i32));
        self.token_ids.extend(row.feed);
        self.token_ids
            .extend(row.drafts.iter().map(|&token| token as i32));
        self.write_positions(row.num_computed, seq_len, row.blocks);
        if row.wants_logits {
            let end = self.token_ids.len();
            self.logits_rows.extend(end - 1 - row.drafts.len()..end);
        }
        let common = &mut self.common;
        common.num_reqs += 1;
        common.num_actual_tokens = self.token_ids.len() as u32;
        common.slot_mapping_len = common.num_actual_tokens;
        common.max_query_len = common.max_query_len.max(num_tokens as u32);
        common.max_seq_len = common.max_seq_len.max(seq_len as u32);
        common
            .query_start_loc_cpu
            .push(common.num_actual_tokens as i32);
        common.seq_lens_cpu_upper_bound.push(seq_len as i32);
        common.is_prefilling.push(u8::from(row.is_prefilling));
        common.req_idx.push(row.req_idx);
        self.states.push(row.state as i32);
        self.num_actual_reqs = common.num_reqs as usize;
        self.num_actual_tokens = self.token_ids.len();
        self.decodes &= decode_graph_eligible(
            &[num_tokens as u32],
            &[row.num_computed as u32],
            &[row.is_prefilling],
            false,
        );
    }

    /// Adds the row of a scheduled request: its next tokens, of which at most the last is not known yet, and its drafts.
    ///
    /// # Panics
    /// If the request is not running, or as [`InputBatch::push`].
    pub fn push_scheduled(&mut self, request: &Request, row: &ScheduledRow) {
        let end = request.num_computed + row.num_tokens - row.num_drafts;
        let known = request.tokens.len();
        self.push(&BatchRow {
            req_idx: request.slot.expect("a scheduled request has a slot"),
            state: request.state,
            epoch: request.epoch,
            num_computed: request.num_computed,
            tokens: &request.tokens[request.num_computed.min(known)..end.min(known)],
            feed: (end > known).then_some(request.feed),
            drafts: &request.drafts[..row.num_drafts],
            blocks: &request.blocks.ids,
            is_prefilling: request.is_prefilling(),
            wants_logits: end == request.num_tokens_with_pending(),
        });
    }

    /// Makes the batch as large as a captured graph, by the rule book's rules for padded rows: query starts repeat, lengths
    /// are 0, table rows are the null block, tokens have no slot, id and position 0; maxima stay. Without `num_reqs` (a
    /// piecewise graph) only the vectors per token grow: attention sees the batch as it is. Do this after the last row.
    ///
    /// # Errors
    /// If the batch is larger than that; it stays as it is.
    pub fn pad(&mut self, num_tokens: usize, num_reqs: Option<usize>) -> Result<(), PaddingError> {
        let rows = num_reqs.unwrap_or(self.num_actual_reqs);
        let fits = (self.num_actual_tokens..=self.shape.max_num_batched_tokens)
            .contains(&num_tokens)
            && (self.num_actual_reqs..=self.shape.max_num_seqs).contains(&rows);
        if !fits {
            return Err(PaddingError::TooSmall {
                num_reqs: self.num_actual_reqs as u32,
                num_tokens: self.num_actual_tokens as u32,
                to_reqs: rows as u32,
                to_tokens: num_tokens as u32,
            });
        }
        for row in self.num_actual_reqs..rows {
            self.write_table_row(row, 0, &[]);
        }
        self.token_ids.resize(num_tokens, 0);
        self.positions.resize(num_tokens, 0);
        self.slot_mapping.resize(num_tokens, PAD_SLOT_ID);
        let common = &mut self.common;
        common.slot_mapping_len = num_tokens as u32;
        if num_reqs.is_some() {
            let end = common.query_start_loc_cpu.last().copied().unwrap_or(0);
            let padding = PaddingValues::default();
            common.num_reqs = rows as u32;
            common.num_actual_tokens = num_tokens as u32;
            common.query_start_loc_cpu.resize(rows + 1, end);
            common
                .seq_lens_cpu_upper_bound
                .resize(rows, padding.seq_len);
            common.is_prefilling.resize(rows, 0);
            common.req_idx.resize(rows, 0);
            self.states.resize(rows, 0);
        }
        Ok(())
    }

    /// What the batch looks for a graph with.
    pub fn query(&self) -> BatchQuery {
        let (num_reqs, num_tokens) = (self.num_actual_reqs as u32, self.num_actual_tokens as u32);
        let longest = self.common.max_query_len;
        BatchQuery {
            num_reqs,
            num_tokens,
            uniform_token_count: uniform_token_count(self.decodes, num_tokens, num_reqs, longest),
            num_active_loras: 0,
            max_query_len: self.decodes.then_some(longest),
            num_ubatches: 1,
        }
    }

    /// Block b of the manager is blocks b·ratio .. (b + 1)·ratio of the kernels' table.
    fn write_table_row(&mut self, index: usize, epoch: u64, blocks: &[BlockId]) {
        let most = self.width / self.ratio;
        let num_blocks = blocks.len().min(most);
        let state = &mut self.rows[index];
        let first = if state.epoch == epoch {
            state.num_blocks.min(num_blocks)
        } else {
            0
        };
        let dirty = state.num_blocks;
        *state = RowState { epoch, num_blocks };
        self.mark_dirty(
            index,
            first * self.ratio,
            dirty.max(num_blocks) * self.ratio,
        );
        let table = &mut self.table[index * self.width..(index + 1) * self.width];
        let ratio = self.ratio as i32;
        let columns = table[first * self.ratio..].chunks_exact_mut(self.ratio);
        for (entries, &block) in columns.zip(&blocks[first..num_blocks]) {
            for (offset, entry) in entries.iter_mut().enumerate() {
                *entry = block as i32 * ratio + offset as i32;
            }
        }
        if dirty > num_blocks {
            table[num_blocks * self.ratio..dirty * self.ratio].fill(0);
        }
    }

    fn mark_dirty(&mut self, row: usize, start: usize, end: usize) {
        if start >= end {
            return;
        }
        let dirty = &mut self.dirty[row];
        if dirty.start == dirty.end {
            *dirty = Dirty { start, end };
            self.dirty_rows.push(row);
        } else {
            dirty.start = dirty.start.min(start);
            dirty.end = dirty.end.max(end);
        }
    }

    /// The block table's changes since [`InputBatch::clear_table_updates`]: one range of columns for each row that changed.
    /// A device's table that starts as zeros and applies them in order equals the host's.
    pub fn table_updates(&self) -> impl Iterator<Item = TableUpdate<'_>> {
        self.dirty_rows.iter().map(|&row| {
            let Dirty { start, end } = self.dirty[row];
            TableUpdate {
                row,
                first_column: start,
                entries: &self.table[row * self.width + start..row * self.width + end],
            }
        })
    }

    /// The changes were taken. Until then they gather, over steps that failed too.
    pub fn clear_table_updates(&mut self) {
        for row in self.dirty_rows.drain(..) {
            self.dirty[row] = Dirty::default();
        }
    }

    /// slot = block · block_size + offset, with the manager's sizes: the same linear slot as with the kernels' (attention
    /// facts, 7.7). A token beyond the row's blocks has no slot.
    fn write_positions(&mut self, start: usize, end: usize, blocks: &[BlockId]) {
        let block_size = self.shape.block_size;
        self.positions.extend(start as i64..end as i64);
        let mut position = start;
        while position < end {
            let column = position / block_size;
            let stop = ((column + 1) * block_size).min(end);
            match blocks.get(column) {
                Some(&block) => {
                    let first = block as usize * block_size + position % block_size;
                    let slots = first as i64..(first + stop - position) as i64;
                    self.slot_mapping.extend(slots);
                }
                None => {
                    self.no_slot.get_or_insert(NoSlot {
                        row: self.common.num_reqs as usize,
                        num_blocks: blocks.len(),
                        block_size,
                        position,
                    });
                    self.slot_mapping
                        .extend(std::iter::repeat_n(PAD_SLOT_ID, stop - position));
                }
            }
            position = stop;
        }
    }

    /// The host-side part of the step, for builders.
    pub fn common(&self) -> &CommonAttentionMetadata {
        &self.common
    }

    /// The step's tensors.
    pub fn inputs(&self) -> StepInputs<'_> {
        let rows = self.common.num_reqs as usize;
        StepInputs {
            query_start_loc: &self.common.query_start_loc_cpu,
            seq_lens: &self.common.seq_lens_cpu_upper_bound,
            block_table: BlockTable {
                data: &self.table[..rows * self.width],
                width: self.width,
            },
            slot_mapping: &self.slot_mapping,
            positions: &self.positions,
            causal: None,
            dcp_local_seq_lens: None,
            encoder_seq_lens: None,
            logits_indices_padded: None,
            rswa_prefix_lens: None,
            extras: &[],
        }
    }

    /// `s32 [T]`: the step's token ids; below 0 a [`feed_reference`].
    pub fn token_ids(&self) -> &[i32] {
        &self.token_ids
    }

    /// Rows without padding.
    pub fn num_actual_reqs(&self) -> usize {
        self.num_actual_reqs
    }

    /// Tokens without padding.
    pub fn num_actual_tokens(&self) -> usize {
        self.num_actual_tokens
    }

    /// `s64 [T]`: the step's positions.
    pub fn positions(&self) -> &[i64] {
        &self.positions
    }

    /// Indexes of the tokens whose logits are wanted, in row order.
    pub fn logits_rows(&self) -> &[usize] {
        &self.logits_rows
    }

    /// Has every token a slot? Checked before a step runs; the verifier lets tokens without a slot pass, since padding has
    /// none.
    pub fn check(&self) -> Result<(), NoSlot> {
        self.no_slot.map_or(Ok(()), Err)
    }

    /// Tokens of a block of the kernels' table.
    pub fn kernel_block_size(&self) -> usize {
        self.shape.kernel_block_size
    }

    /// Columns of the kernels' table.
    pub fn table_width(&self) -> usize {
        self.width
    }
}
