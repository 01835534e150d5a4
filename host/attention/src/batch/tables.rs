//! Block tables as a runner keeps them: one persistent table per KV cache group, indexed by request slot, gathered into batch
//! order each step. It must never know who allocates blocks.
//!
//! Source: vLLM 0.33 `vllm/v1/worker/gpu/block_table.py` (`BlockTables`), recorded in `tests/vectors/mrv2_block_tables.json`.

use thiserror::Error;

use super::mamba::NULL_BLOCK_ID;
use super::slots::{ContextParallel, SlotRule, slot_mapping_into};
use crate::step::{BlockTable, PAD_SLOT_ID};

/// One KV cache group's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupTableConfig {
    /// Tokens of a block on one rank.
    pub block_size: u32,
    /// Capacity of a row.
    pub max_num_blocks_per_req: usize,
    /// Groups without slots (states, not keys) get `PAD_SLOT_ID` everywhere.
    pub slot_mapping_enabled: bool,
    /// Is this group's cache sharded over the context-parallel ranks?
    pub dcp_sharded: bool,
}

/// Why blocks were not written.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TableError {
    /// A row is full.
    #[error(
        "Block table write for request {request}, group {group} exceeds row capacity ({end} > {capacity})"
    )]
    RowCapacity {
        /// Request slot.
        request: usize,
        /// KV cache group.
        group: usize,
        /// Blocks that the row would have.
        end: usize,
        /// Blocks that it can have.
        capacity: usize,
    },
    /// There is no such request slot.
    #[error("request slot {request} is not below max_num_reqs {max_num_reqs}")]
    NoSuchRequest {
        /// Request slot.
        request: usize,
        /// Slots there are.
        max_num_reqs: usize,
    },
    /// One list of blocks per group was expected.
    #[error("{got} lists of block ids for {groups} KV cache groups: give one list per group")]
    GroupCount {
        /// Lists given.
        got: usize,
        /// Groups there are.
        groups: usize,
    },
}

#[derive(Clone, Debug)]
struct Group {
    config: GroupTableConfig,
    data: Vec<i32>,
    lens: Vec<usize>,
}

impl Group {
    fn row(&self, request: usize) -> &[i32] {
        let start = request * self.config.max_num_blocks_per_req;
        &self.data[start..start + self.lens[request]]
    }
}

/// The tables of all groups.
#[derive(Clone, Debug)]
pub struct BlockTables {
    max_num_reqs: usize,
    context_parallel: Option<ContextParallel>,
    groups: Vec<Group>,
}

impl BlockTables {
    /// Empty tables for `max_num_reqs` request slots.
    #[must_use]
    pub fn new(
        max_num_reqs: usize,
        groups: &[GroupTableConfig],
        context_parallel: Option<ContextParallel>,
    ) -> Self {
        let groups = groups
            .iter()
            .map(|&config| Group {
                config,
                data: vec![NULL_BLOCK_ID; max_num_reqs * config.max_num_blocks_per_req],
                lens: vec![0; max_num_reqs],
            })
            .collect();
        Self {
            max_num_reqs,
            context_parallel,
            groups,
        }
    }

    /// Appends blocks to a request's row of every group; `overwrite` begins the rows anew. Nothing is written on an error.
    ///
    /// # Errors
    /// If a row would exceed its capacity, or there is no such request slot or number of groups.
    pub fn append_block_ids(
        &mut self,
        request: usize,
        new_block_ids: &[&[i32]],
        overwrite: bool,
    ) -> Result<(), TableError> {
        if request >= self.max_num_reqs {
            return Err(TableError::NoSuchRequest {
                request,
                max_num_reqs: self.max_num_reqs,
            });
        }
        if new_block_ids.len() != self.groups.len() {
            return Err(TableError::GroupCount {
                got: new_block_ids.len(),
                groups: self.groups.len(),
            });
        }
        for (index, (group, ids)) in self.groups.iter().zip(new_block_ids).enumerate() {
            let end = if overwrite { 0 } else { group.lens[request] } + ids.len();
            let capacity = group.config.max_num_blocks_per_req;
            if end > capacity {
                return Err(TableError::RowCapacity {
                    request,
                    group: index,
                    end,
                    capacity,
                });
            }
        }
        for (group, ids) in self.groups.iter_mut().zip(new_block_ids) {
            let at = if overwrite { 0 } else { group.lens[request] };
            let start = request * group.config.max_num_blocks_per_req + at;
            group.data[start..start + ids.len()].copy_from_slice(ids);
            group.lens[request] = at + ids.len();
        }
        Ok(())
    }

    /// Forgets a request's blocks.
    pub fn clear(&mut self, request: usize) {
        for group in &mut self.groups {
            group.lens[request] = 0;
        }
    }

    /// Exchanges two rows in every group: what the first-generation runner does as it reorders its batch.
    pub fn swap(&mut self, a: usize, b: usize) {
        for group in &mut self.groups {
            let width = group.config.max_num_blocks_per_req;
            let used = group.lens[a].max(group.lens[b]);
            for column in 0..used {
                group.data.swap(a * width + column, b * width + column);
            }
            group.lens.swap(a, b);
        }
    }

    /// The blocks of a request in a group.
    #[must_use]
    pub fn row(&self, group: usize, request: usize) -> &[i32] {
        self.groups[group].row(request)
    }

    /// Gathers a group's rows into batch order: `idx_mapping` gives the request slot of each batch row, negative for a row
    /// without request. Rows behind it, up to `num_reqs_padded`, are all null block.
    ///
    /// Of a real row only what it has is written, and what an earlier step left behind it is set to the null block: a destination never
    /// shows another request's blocks.
    ///
    /// # Panics
    /// If the destination has fewer rows or columns than are written.
    pub fn gather(
        &self,
        group: usize,
        idx_mapping: &[i32],
        num_reqs_padded: usize,
        destination: &mut GatheredTable,
    ) {
        let group = &self.groups[group];
        for batch_row in 0..num_reqs_padded.max(idx_mapping.len()) {
            let request = idx_mapping
                .get(batch_row)
                .and_then(|&request| usize::try_from(request).ok());
            match request {
                Some(request) => destination.write(batch_row, group.row(request)),
                None => destination.clear(batch_row),
            }
        }
    }

    /// Slots of a group's tokens, `s64 [out.len()]`; see [`slot_mapping_into`]. Returns how many tokens lie beyond their row.
    ///
    /// # Panics
    /// If query starts fall, or end beyond `positions` or `out`.
    pub fn compute_slot_mapping(
        &self,
        group: usize,
        idx_mapping: &[i32],
        query_start_loc: &[i32],
        positions: &[i64],
        out: &mut [i64],
    ) -> usize {
        let group = &self.groups[group];
        if !group.config.slot_mapping_enabled {
            out.fill(PAD_SLOT_ID);
            return 0;
        }
        let rule = SlotRule {
            block_size: group.config.block_size,
            context_parallel: self.context_parallel.filter(|_| group.config.dcp_sharded),
        };
        let row = |batch_row: usize| {
            let request = idx_mapping
                .get(batch_row)
                .and_then(|&request| usize::try_from(request).ok())?;
            Some(group.row(request))
        };
        slot_mapping_into(rule, row, query_start_loc, positions, out)
    }
}

/// A group's table in batch order: persistent, because captured graphs read it.
#[derive(Clone, Debug)]
pub struct GatheredTable {
    data: Vec<i32>,
    width: usize,
    written: Vec<usize>,
}

impl GatheredTable {
    /// A table of null blocks.
    #[must_use]
    pub fn new(rows: usize, width: usize) -> Self {
        Self::filled_with(NULL_BLOCK_ID, rows, width)
    }

    /// A table of one value. For tests that show which entries a gather leaves alone.
    #[must_use]
    pub fn filled_with(value: i32, rows: usize, width: usize) -> Self {
        Self {
            data: vec![value; rows * width],
            width,
            written: vec![0; rows],
        }
    }

    fn write(&mut self, row: usize, blocks: &[i32]) {
        let start = row * self.width;
        let target = &mut self.data[start..start + self.width];
        target[..blocks.len()].copy_from_slice(blocks);
        if self.written[row] > blocks.len() {
            target[blocks.len()..self.written[row]].fill(NULL_BLOCK_ID);
        }
        self.written[row] = blocks.len();
    }

    fn clear(&mut self, row: usize) {
        self.data[row * self.width..(row + 1) * self.width].fill(NULL_BLOCK_ID);
        self.written[row] = 0;
    }

    /// The table, borrowed.
    #[must_use]
    pub fn table(&self) -> BlockTable<'_> {
        BlockTable {
            data: &self.data,
            width: self.width,
        }
    }
}

/// Leading blocks of a row that lie wholly below the sliding window of the step's first scheduled token, and may be the null
/// block: max(first_position − reach, 0) / block_size, where `reach` is the keys that a query looks back. (vLLM 0.33.)
#[must_use]
pub fn window_null_blocks(first_position: u32, reach: u32, block_size: u32) -> u32 {
    first_position.saturating_sub(reach) / block_size.max(1)
}
