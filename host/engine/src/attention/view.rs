//! What a group's builder, verifier and kernels see of a segment: the batch as it is, its virtual rows, or a state for each row.
//!
//! Memory is kept from step to step. This module must never know a builder, a layer or a device.

use timetable_attention::{
    BlockTable, PAD_SLOT_ID, StepInputs,
    batch::{LocalAttentionError, VirtualRows, max_virtual_rows},
    group::BatchView,
};
use timetable_types::CommonAttentionMetadata;

use crate::batch::{BatchShape, Segment, copy_rows, empty_common};

/// Makes one view of a segment at a time.
#[derive(Debug)]
pub(super) enum View {
    Plain,
    Local(Box<LocalView>),
    States(Box<StatesView>),
}

/// Virtual rows. Tokens, positions and slots stay as they are.
#[derive(Debug)]
pub(super) struct LocalView {
    rows: VirtualRows,
    table: Vec<i32>,
    common: CommonAttentionMetadata,
}

/// A table of one column, each row's state; no token has a slot.
#[derive(Debug)]
pub(super) struct StatesView {
    common: CommonAttentionMetadata,
    no_slots: Vec<i64>,
}

impl View {
    /// With memory for the largest step.
    ///
    /// # Errors
    /// A chunk that kernel blocks do not divide.
    pub(super) fn new(view: BatchView, shape: &BatchShape) -> Result<Self, LocalAttentionError> {
        let (rows, tokens) = (shape.max_num_seqs, shape.max_num_batched_tokens);
        Ok(match view {
            BatchView::Plain => View::Plain,
            BatchView::Local { chunk } => {
                let capacity = max_virtual_rows(rows, tokens, chunk);
                let rows = VirtualRows::new(chunk, shape.kernel_block_size as u32, capacity)?;
                let width = rows.columns.blocks_per_chunk;
                View::Local(Box::new(LocalView {
                    rows,
                    table: Vec::with_capacity(capacity * width),
                    common: empty_common(capacity, width),
                }))
            }
            BatchView::States => View::States(Box::new(StatesView {
                common: empty_common(rows, 1),
                no_slots: vec![PAD_SLOT_ID; tokens],
            })),
        })
    }

    /// The view of `segment`.
    pub(super) fn of<'v>(
        &'v mut self,
        segment: &'v Segment<'v>,
    ) -> (&'v CommonAttentionMetadata, StepInputs<'v>) {
        match self {
            View::Plain => (segment.common, segment.inputs),
            View::Local(view) => view.of(segment),
            View::States(view) => view.of(segment),
        }
    }
}

impl LocalView {
    fn of<'v>(
        &'v mut self,
        segment: &Segment<'v>,
    ) -> (&'v CommonAttentionMetadata, StepInputs<'v>) {
        let Self {
            rows,
            table,
            common,
        } = self;
        let whole = segment.inputs;
        rows.cut(
            whole.query_start_loc,
            whole.seq_lens,
            whole.block_table.width,
        );
        rows.columns.gather_into(whole.block_table, table);
        common.num_reqs = rows.seq_lens.len() as u32;
        common.num_actual_tokens = segment.common.num_actual_tokens;
        common.slot_mapping_len = segment.common.slot_mapping_len;
        common.max_query_len = rows.max_query_len;
        common.max_seq_len = rows.max_seq_len;
        common.query_start_loc_cpu.clear();
        common
            .query_start_loc_cpu
            .extend_from_slice(&rows.query_start_loc);
        common.seq_lens_cpu_upper_bound.clear();
        common
            .seq_lens_cpu_upper_bound
            .extend_from_slice(&rows.seq_lens);
        let inputs = StepInputs {
            query_start_loc: &rows.query_start_loc,
            seq_lens: &rows.seq_lens,
            block_table: BlockTable {
                data: table,
                width: rows.columns.blocks_per_chunk,
            },
            ..whole
        };
        (common, inputs)
    }
}

impl StatesView {
    fn of<'v>(
        &'v mut self,
        segment: &Segment<'v>,
    ) -> (&'v CommonAttentionMetadata, StepInputs<'v>) {
        let rows = segment.common.num_reqs as usize;
        copy_rows(segment.common, 0..rows, &mut self.common);
        let inputs = StepInputs {
            block_table: BlockTable {
                data: segment.states,
                width: 1,
            },
            slot_mapping: &self.no_slots[..self.common.num_actual_tokens as usize],
            ..segment.inputs
        };
        (&self.common, inputs)
    }
}
