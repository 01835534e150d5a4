//! A host-side machine that runs unpack operations as `kernels/src/unpack.cu` does: what lowering is tested with. For tests
//! only; it must never know what a tensor is for.

use bytemuck::{AnyBitPattern, cast_slice, pod_read_unaligned};

use super::buffers::{StepLimits, StepPtrs};
use super::pack::{OpLists, Packed, Packer, slot_bytes};
use crate::driver::DevicePtr;
use crate::params::{UnpackKind, UnpackOp};

/// Bytes of free memory behind the step's tensors.
const FREE: usize = 4 << 20;
/// Addresses begin here, so that 0 is none.
const BASE: u64 = 1 << 16;

/// A device's memory: the step's tensors, then free memory.
pub(crate) struct Machine {
    memory: Vec<u8>,
    pub(crate) ptrs: StepPtrs,
    /// Free memory for destinations.
    pub(crate) free: DevicePtr,
    block_size: i32,
    /// World size, rank, interleave.
    pub(crate) dcp: [i32; 3],
}

/// One operation and what it reads beside its own fields.
struct Run<'m> {
    machine: &'m mut Machine,
    slot: &'m [u8],
    op: UnpackOp,
    num_reqs: i32,
    num_tokens: i32,
}

impl Machine {
    pub(crate) fn new(limits: StepLimits, block_size: u32) -> Self {
        let (ptrs, bytes) = StepPtrs::layout(limits, DevicePtr::from_raw(BASE));
        let bytes = bytes.next_multiple_of(256);
        Self {
            // Poison: what nobody wrote must not be read.
            memory: vec![0xEE; bytes + FREE],
            ptrs,
            free: DevicePtr::from_raw(BASE + bytes as u64),
            block_size: block_size as i32,
            dcp: [1, 0, 1],
        }
    }

    fn at(&self, ptr: u64) -> usize {
        usize::try_from(ptr - BASE).expect("an address of this machine")
    }

    fn load<T: AnyBitPattern>(&self, ptr: u64, index: i64) -> T {
        assert!(index >= 0, "index {index} at {ptr:#x}");
        let at = self.at(ptr) + index as usize * size_of::<T>();
        pod_read_unaligned(&self.memory[at..at + size_of::<T>()])
    }

    fn store<T: bytemuck::NoUninit>(&mut self, ptr: u64, index: i64, value: T) {
        assert!(index >= 0 && ptr.is_multiple_of(align_of::<T>() as u64));
        let at = self.at(ptr) + index as usize * size_of::<T>();
        self.memory[at..at + size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&value));
    }

    pub(crate) fn write<T: bytemuck::Pod>(&mut self, ptr: DevicePtr, values: &[T]) {
        let at = self.at(ptr.raw());
        let bytes: &[u8] = cast_slice(values);
        self.memory[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn read<T: AnyBitPattern>(&self, ptr: DevicePtr, index: usize) -> T {
        self.load(ptr.raw(), index as i64)
    }

    pub(crate) fn read_i32(&self, ptr: DevicePtr, len: usize) -> Vec<i32> {
        (0..len as i64).map(|i| self.load(ptr.raw(), i)).collect()
    }

    pub(crate) fn read_i64(&self, ptr: DevicePtr, len: usize) -> Vec<i64> {
        (0..len as i64).map(|i| self.load(ptr.raw(), i)).collect()
    }

    /// Packs with `pack` into a slot of `bytes` bytes and `ops` operations, and runs it.
    pub(crate) fn pack_and_run(
        &mut self,
        bytes: usize,
        ops: usize,
        num_reqs: usize,
        num_tokens: usize,
        pack: impl FnOnce(&mut Packer<'_>),
    ) {
        let mut slot = vec![0; slot_bytes(bytes, ops)];
        let mut lists = OpLists::new(ops);
        let mut packer = Packer::new(&mut slot, &mut lists);
        pack(&mut packer);
        let packed = packer.finish();
        self.run(&slot, packed, num_reqs, num_tokens);
    }

    /// Runs a packed slot: the first round, then the second.
    pub(crate) fn run(&mut self, slot: &[u8], packed: Packed, num_reqs: usize, num_tokens: usize) {
        let ops: Vec<UnpackOp> = slot
            [packed.ops..packed.ops + packed.num_ops * size_of::<UnpackOp>()]
            .chunks(size_of::<UnpackOp>())
            .map(pod_read_unaligned)
            .collect();
        let (first, second) = ops.split_at(packed.num_first_ops);
        // Operations of a round do not depend on each other: any order gives the same.
        for op in first.iter().rev().chain(second.iter().rev()) {
            Run {
                machine: self,
                slot,
                op: *op,
                num_reqs: num_reqs as i32,
                num_tokens: num_tokens as i32,
            }
            .run();
        }
    }
}

impl Run<'_> {
    fn list<T: AnyBitPattern>(&self, offset: i64, index: i64) -> T {
        assert!(offset.unsigned_abs().is_multiple_of(align_of::<T>() as u64));
        let at = offset as usize + index as usize * size_of::<T>();
        pod_read_unaligned(&self.slot[at..at + size_of::<T>()])
    }

    fn row_exists(&self, row: i32) -> bool {
        row >= 0 && row < self.num_reqs
    }

    fn start(&self, row: i32) -> i32 {
        self.machine
            .load(self.machine.ptrs.query_start_loc.raw(), row.into())
    }

    fn query_len(&self, row: i32) -> i32 {
        if self.row_exists(row) {
            self.start(row + 1) - self.start(row)
        } else {
            0
        }
    }

    fn seq_len(&self, row: i32) -> i32 {
        if self.row_exists(row) {
            self.machine
                .load(self.machine.ptrs.seq_lens.raw(), row.into())
        } else {
            0
        }
    }

    fn page(&self, row: i32, column: i32) -> i32 {
        let width = self.machine.ptrs.limits.table_width as i64;
        if self.row_exists(row) && column >= 0 && i64::from(column) < width {
            let at = i64::from(row) * width + i64::from(column);
            self.machine.load(self.machine.ptrs.block_table.raw(), at)
        } else {
            self.op.fill
        }
    }

    fn local_len(&self, len: i32) -> i32 {
        let [ranks, rank, interleave] = self.machine.dcp;
        let base = len / interleave / ranks * interleave;
        base + (len - base * ranks - rank * interleave).clamp(0, interleave)
    }

    /// The last index whose element of the list is at most `at`.
    fn last_at_most(&self, count: i32, at: i32, element: impl Fn(i64) -> i32) -> i32 {
        (0..count)
            .rev()
            .find(|&i| element(i.into()) <= at)
            .unwrap_or(0)
    }

    fn write(&mut self, count: i32, value: impl Fn(&Self, i32) -> i32) {
        for i in 0..self.op.room {
            let value = if i < count {
                value(self, i)
            } else {
                self.op.fill
            };
            self.machine
                .store(self.op.destination.raw(), i.into(), value);
        }
    }

    fn write64(&mut self, count: i32, value: impl Fn(&Self, i32) -> i64) {
        for i in 0..self.op.room {
            let value = if i < count {
                value(self, i)
            } else {
                self.op.fill.into()
            };
            self.machine
                .store(self.op.destination.raw(), i.into(), value);
        }
    }

    fn write_runs(
        &mut self,
        count: impl Fn(&Self, i32) -> i32,
        value: impl Fn(&Self, i32, i32) -> i32,
    ) {
        let mut values = Vec::new();
        for run in 0..self.op.rows {
            for i in 0..count(self, run).max(0) {
                values.push(value(self, run, i));
            }
        }
        let len = values.len() as i32;
        self.write(len, |_, i| values[i as usize]);
    }

    fn run(&mut self) {
        let op = self.op;
        let row_at = |run: &Self, i: i32| run.list::<i32>(op.list, i.into());
        let kind = ALL.iter().find(|&&kind| kind as i32 == op.kind);
        match *kind.expect("a kind that the kernel has") {
            UnpackKind::Values => self.write(op.rows, |run, i| run.list(op.list, i.into())),
            UnpackKind::Values64 => self.write64(op.rows, |run, i| run.list(op.list, i.into())),
            UnpackKind::TableUpdates => {
                let width = self.machine.ptrs.limits.table_width as i32;
                for i in 0..i64::from(op.rows) {
                    let [row, column, block] =
                        [0, 1, 2].map(|k| self.list::<i32>(op.list, 3 * i + k));
                    if self.row_exists(row) && (0..width).contains(&column) {
                        let table = self.machine.ptrs.block_table.raw();
                        self.machine
                            .store(table, i64::from(row * width + column), block);
                    }
                }
            }
            UnpackKind::Copy => self.write(op.rows, |run, i| {
                run.machine.load(op.source.raw(), i.into())
            }),
            UnpackKind::Copy64 => self.write64(op.rows, |run, i| {
                run.machine.load(op.source.raw(), i.into())
            }),
            UnpackKind::Rebase => {
                let count = op.rows.min(self.num_reqs - op.first_row) + 1;
                self.write(count, |run, i| {
                    run.start(op.first_row + i) - run.start(op.first_row)
                });
            }
            UnpackKind::ContextLens => self.write(op.rows, |run, i| {
                run.seq_len(op.first_row + i) - run.query_len(op.first_row + i)
            }),
            UnpackKind::HasContext => self.write(op.rows, |run, i| {
                i32::from(run.seq_len(op.first_row + i) > run.query_len(op.first_row + i))
            }),
            UnpackKind::DcpLocal => self.write(op.rows, |run, i| {
                let row = op.first_row + i;
                let query = if op.option != 0 {
                    run.query_len(row)
                } else {
                    0
                };
                run.local_len(run.seq_len(row) - query)
            }),
            UnpackKind::CuPageCounts => self.write(op.rows + 1, |run, i| {
                let page = run.machine.block_size;
                let rows = (0..i).map(|row| run.seq_len(op.first_row + row).max(0));
                rows.map(|len| (len + page - 1) / page).sum()
            }),
            UnpackKind::GatherPages => {
                let total = row_at(self, op.rows);
                self.write(total, |run, i| {
                    let row = run.last_at_most(op.rows, i, |at| row_at(run, at as i32));
                    run.page(op.first_row + row, i - row_at(run, row))
                });
            }
            UnpackKind::SelectPages => {
                let total = row_at(self, op.rows);
                self.write(total, |run, i| {
                    let row = run.last_at_most(op.rows, i, |at| row_at(run, at as i32));
                    run.page(op.first_row + row, run.list(op.list2, i.into()))
                });
            }
            UnpackKind::StateIndices => self.write(op.rows * op.width, |run, i| {
                let row = row_at(run, i / op.width);
                let last = (run.seq_len(row) - 1).max(0) / run.machine.block_size;
                run.page(row, if op.option != 0 { last } else { 0 } + i % op.width)
            }),
            UnpackKind::Rows => self.write(op.rows * op.width, |run, i| {
                let row = i64::from(row_at(run, i / op.width));
                run.machine.load(
                    op.source.raw(),
                    row * i64::from(op.width) + i64::from(i % op.width),
                )
            }),
            UnpackKind::Rows64 => self.write64(op.rows * op.width, |run, i| {
                let row = i64::from(row_at(run, i / op.width));
                run.machine.load(
                    op.source.raw(),
                    row * i64::from(op.width) + i64::from(i % op.width),
                )
            }),
            UnpackKind::RowMask => {
                let rows: Vec<i32> = (0..op.rows).map(|i| row_at(self, i)).collect();
                self.write(self.num_reqs, |_, i| i32::from(rows.contains(&i)));
            }
            UnpackKind::RowTokens => self.write_runs(
                |run, i| run.query_len(row_at(run, i)),
                |run, i, token| run.start(row_at(run, i)) + token,
            ),
            UnpackKind::TokenToRow => {
                let (rows, last) = (self.num_reqs, self.start(self.num_reqs));
                self.write(self.num_tokens, |run, i| {
                    if i < last {
                        run.last_at_most(rows, i, |row| run.start(row as i32))
                    } else {
                        0
                    }
                });
            }
            UnpackKind::SegmentIds => {
                let total = row_at(self, op.rows);
                self.write(total, |run, i| {
                    run.last_at_most(op.rows, i, |at| row_at(run, at as i32))
                });
            }
            UnpackKind::ConvRows | UnpackKind::ConvOffsets => self.write_runs(
                |run, i| (run.query_len(op.first_row + i) + op.width - 1) / op.width,
                |_, i, chunk| {
                    if op.kind == UnpackKind::ConvRows as i32 {
                        i
                    } else {
                        chunk
                    }
                },
            ),
            UnpackKind::FeedTokens => self.write(op.rows, |run, i| match row_at(run, i) {
                id if id >= 0 => id,
                from if -1 - from < op.width => {
                    run.machine.load(op.source.raw(), i64::from(-1 - from))
                }
                _ => op.fill,
            }),
        }
    }
}

const ALL: [UnpackKind; 22] = [
    UnpackKind::Values,
    UnpackKind::Values64,
    UnpackKind::TableUpdates,
    UnpackKind::Copy,
    UnpackKind::Copy64,
    UnpackKind::Rebase,
    UnpackKind::ContextLens,
    UnpackKind::HasContext,
    UnpackKind::DcpLocal,
    UnpackKind::CuPageCounts,
    UnpackKind::GatherPages,
    UnpackKind::SelectPages,
    UnpackKind::StateIndices,
    UnpackKind::Rows,
    UnpackKind::Rows64,
    UnpackKind::RowMask,
    UnpackKind::RowTokens,
    UnpackKind::TokenToRow,
    UnpackKind::SegmentIds,
    UnpackKind::ConvRows,
    UnpackKind::ConvOffsets,
    UnpackKind::FeedTokens,
];
