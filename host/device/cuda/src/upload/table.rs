//! What the device's block table holds, as far as it was packed: so that only changed entries travel. It must never know
//! requests, nor how blocks are chosen.

use super::buffers::StepPtrs;
use super::pack::{PackError, Packer};

/// From this many neighbouring entries on, they travel as a run of their own (4 bytes each, 64 for the run) rather than as
/// triples (12 bytes each).
const MIN_RUN: usize = 12;

/// The host's copy of the device's block table. What it says is true once everything packed so far was submitted; after a
/// step that was packed and not submitted, [`TableMirror::forget`] it.
#[derive(Debug)]
pub struct TableMirror {
    /// `s32 [R, W]`; −1 where unknown.
    entries: Vec<i32>,
    width: usize,
    /// Triples (row, column, block) of this step.
    triples: Vec<[i32; 3]>,
    max_triples: usize,
}

impl TableMirror {
    /// Of a table whose contents are unknown. At most `max_triples` scattered entries change in one step; more travel as
    /// whole rows.
    pub fn new(num_rows: usize, width: usize, max_triples: usize) -> Self {
        Self {
            entries: vec![-1; num_rows * width],
            width,
            triples: Vec::with_capacity(max_triples),
            max_triples,
        }
    }

    /// Everything is unknown: the next step packs every entry it uses.
    pub fn forget(&mut self) {
        self.entries.fill(-1);
    }

    /// Packs what differs from the device in the first `blocks(row).len()` columns of rows [0, `num_rows`), into the
    /// packer's first round. Entries behind those are never read and stay as they are.
    ///
    /// # Errors
    /// If the upload is full, or a row has more blocks than the table has columns. What was packed before the error counts as
    /// packed: [`TableMirror::forget`] if the upload is not submitted.
    pub fn pack<'b>(
        &mut self,
        num_rows: usize,
        blocks: impl Fn(usize) -> &'b [i32],
        ptrs: &StepPtrs,
        packer: &mut Packer<'_>,
    ) -> Result<(), PackError> {
        const WHAT: &str = "block table";
        self.triples.clear();
        for row in 0..num_rows {
            let blocks = blocks(row);
            let begin = row * self.width;
            if blocks.len() > self.width || begin + self.width > self.entries.len() {
                return Err(PackError::Room {
                    what: WHAT,
                    len: blocks.len(),
                    room: self.width,
                });
            }
            let known = &mut self.entries[begin..begin + blocks.len()];
            let mut column = 0;
            while column < blocks.len() {
                // Whole rows are equal in almost every step: one comparison of memory.
                if known[column..] == blocks[column..] {
                    break;
                }
                let Some(skip) = known[column..]
                    .iter()
                    .zip(&blocks[column..])
                    .position(|(a, b)| a != b)
                else {
                    break;
                };
                column += skip;
                let changed = known[column..]
                    .iter()
                    .zip(&blocks[column..])
                    .take_while(|(a, b)| a != b);
                let end = column + changed.count();
                if end - column >= MIN_RUN || self.triples.len() + (end - column) > self.max_triples
                {
                    let to = ptrs.table_run(row, column, end - column);
                    packer.values_i32(WHAT, to, &blocks[column..end])?;
                } else {
                    let changed = blocks[column..end].iter().enumerate();
                    self.triples.extend(
                        changed.map(|(i, &block)| [row as i32, (column + i) as i32, block]),
                    );
                }
                known[column..end].copy_from_slice(&blocks[column..end]);
                column = end;
            }
        }
        packer.table_updates(&self.triples)
    }

    /// The most operations that one step packs for `num_rows` rows, as long as no more than `max_triples` entries change
    /// apart from runs.
    pub const fn max_ops(num_rows: usize) -> usize {
        // A run for each row (a row that was filled anew), and one operation for all triples.
        num_rows + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::DevicePtr;
    use crate::upload::StepLimits;
    use crate::upload::interpret::Machine;
    use crate::upload::pack::{OpLists, slot_bytes};

    #[test]
    fn the_device_ends_up_with_the_hosts_table_and_equal_entries_do_not_travel() {
        let limits = StepLimits {
            max_num_reqs: 3,
            max_num_tokens: 4,
            table_width: 40,
            max_num_logits: 3,
        };
        let mut machine = Machine::new(limits, 16);
        let mut mirror = TableMirror::new(3, 40, 8);
        let steps: [[Vec<i32>; 3]; 4] = [
            [(10..45).collect(), vec![7], vec![]],
            [(10..46).collect(), vec![7, 8], vec![1, 2, 3]],
            [vec![99], (20..60).collect(), vec![1, 5, 3]],
            [vec![99], (20..60).collect(), vec![1, 5, 3]],
        ];
        let mut packed_ops = Vec::new();
        for rows in &steps {
            let mut slot = vec![0; slot_bytes(4096, 16)];
            let mut ops = OpLists::new(16);
            let mut packer = Packer::new(&mut slot, &mut ops);
            mirror
                .pack(3, |row| &rows[row], &machine.ptrs, &mut packer)
                .unwrap();
            let packed = packer.finish();
            packed_ops.push(packed.num_ops);
            machine.run(&slot, packed, 3, 4);
            for (row, blocks) in rows.iter().enumerate() {
                let at =
                    DevicePtr::from_raw(machine.ptrs.block_table.raw() + (row * 40 * 4) as u64);
                assert_eq!(machine.read_i32(at, blocks.len()), *blocks);
            }
        }
        // A run and a triple; triples; a run and triples; nothing.
        assert_eq!(packed_ops, [2, 1, 2, 0]);
        mirror.forget();
        let mut slot = vec![0; slot_bytes(4096, 16)];
        let mut ops = OpLists::new(16);
        let mut packer = Packer::new(&mut slot, &mut ops);
        mirror
            .pack(3, |row| &steps[3][row], &machine.ptrs, &mut packer)
            .unwrap();
        assert_eq!(packer.finish().num_ops, 2);
    }
}
