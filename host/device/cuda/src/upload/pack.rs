//! What one step's upload is made of: bytes and the operations that read them. It must never know what a tensor is for, nor a
//! stream.
//!
//! A [`Stage`] is filled by whoever prepares ahead of the step (an attention group) and copied into the slot as it is; a
//! [`Packer`] fills the slot itself. Both append only: the slot is write-combined memory, which is slow to read. Neither
//! allocates after it was made: what does not fit is refused with the numbers.

use bytemuck::{Pod, bytes_of, cast_slice};

use crate::driver::DevicePtr;
use crate::params::{SampleRow, UnpackKind, UnpackOp};

/// Why something does not fit into a step's upload.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// More bytes than the slot (or the stage) has.
    #[error(
        "{what}: {needed} bytes, but {used} of the upload's {capacity} are taken: lower max_num_seqs or max_num_batched_tokens for a step, or raise the upload's size"
    )]
    Full {
        /// What was to be appended.
        what: &'static str,
        /// Its bytes, with alignment.
        needed: usize,
        /// Bytes before it.
        used: usize,
        /// Bytes there are.
        capacity: usize,
    },
    /// More operations than the slot has room for.
    #[error("{what}: the upload has room for {capacity} operations and all are taken")]
    TooManyOps {
        /// What was to be appended.
        what: &'static str,
        /// Operations there are.
        capacity: usize,
    },
    /// More elements than an operation, or the buffer that it writes, can hold.
    #[error("{what}: {len} elements for a buffer of {room}")]
    Room {
        /// What was to be written.
        what: &'static str,
        /// Its elements.
        len: usize,
        /// The buffer's.
        room: usize,
    },
}

/// Where an operation writes: a persistent buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Its first element.
    pub ptr: DevicePtr,
    /// Elements that this step reads: all are written, and none beyond.
    pub room: usize,
    /// What elements after the tensor's own become.
    pub fill: i32,
}

/// Bytes and operations, appended; byte offsets count from the first byte.
pub(crate) trait Sink {
    /// Appends `bytes` at a multiple of `align` (4 or 8); their offset.
    fn append(&mut self, what: &'static str, bytes: &[u8], align: usize) -> Result<i64, PackError>;

    /// Appends an operation.
    fn push(&mut self, what: &'static str, op: UnpackOp) -> Result<(), PackError>;

    /// Appends `list`: s32 or s64 values.
    fn list<T: Pod>(&mut self, what: &'static str, list: &[T]) -> Result<i64, PackError> {
        self.append(what, cast_slice(list), align_of::<T>().max(4))
    }

    /// Writes `values` (s32), and the fill after them.
    fn values(
        &mut self,
        what: &'static str,
        to: Destination,
        values: &[i32],
    ) -> Result<(), PackError> {
        fits(what, values.len(), to.room)?;
        let list = self.list(what, values)?;
        self.push(what, op(UnpackKind::Values, to, values.len(), list))
    }

    /// Writes `values` (s64), and the fill after them.
    fn values64(
        &mut self,
        what: &'static str,
        to: Destination,
        values: &[i64],
    ) -> Result<(), PackError> {
        fits(what, values.len(), to.room)?;
        let list = self.list(what, values)?;
        self.push(what, op(UnpackKind::Values64, to, values.len(), list))
    }

    /// Writes the fill everywhere (s32).
    fn fill(&mut self, what: &'static str, to: Destination) -> Result<(), PackError> {
        self.push(what, op(UnpackKind::Values, to, 0, 0))
    }
}

/// An operation of `rows` rows whose list begins at `list`.
pub(crate) fn op(kind: UnpackKind, to: Destination, rows: usize, list: i64) -> UnpackOp {
    UnpackOp {
        kind: kind as i32,
        // Callers have checked against the room, which fits.
        rows: rows as i32,
        room: to.room.min(i32::MAX as usize) as i32,
        fill: to.fill,
        destination: to.ptr,
        list,
        ..UnpackOp::default()
    }
}

pub(crate) fn fits(what: &'static str, len: usize, room: usize) -> Result<(), PackError> {
    if len > room || room > i32::MAX as usize {
        return Err(PackError::Room {
            what,
            len,
            room: room.min(i32::MAX as usize),
        });
    }
    Ok(())
}

fn padding(len: usize, align: usize) -> usize {
    len.next_multiple_of(align) - len
}

/// Bytes and second-phase operations that were prepared ahead of the slot.
#[derive(Debug)]
pub struct Stage {
    bytes: Vec<u8>,
    ops: Vec<UnpackOp>,
    max_bytes: usize,
    max_ops: usize,
}

impl Stage {
    /// Empty, with room for `max_bytes` bytes of lists and `max_ops` operations.
    pub fn new(max_bytes: usize, max_ops: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(max_bytes),
            ops: Vec::with_capacity(max_ops),
            max_bytes,
            max_ops,
        }
    }

    /// Empty again.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.ops.clear();
    }

    /// Bytes of lists.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Is there no operation?
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// The operations, their lists counted from the stage's first byte.
    pub fn ops(&self) -> &[UnpackOp] {
        &self.ops
    }

    /// The lists.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl Sink for Stage {
    fn append(&mut self, what: &'static str, bytes: &[u8], align: usize) -> Result<i64, PackError> {
        let padding = padding(self.bytes.len(), align);
        let needed = padding + bytes.len();
        if needed > self.max_bytes - self.bytes.len() {
            return Err(PackError::Full {
                what,
                needed,
                used: self.bytes.len(),
                capacity: self.max_bytes,
            });
        }
        self.bytes.resize(self.bytes.len() + padding, 0);
        let offset = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        Ok(offset as i64)
    }

    fn push(&mut self, what: &'static str, op: UnpackOp) -> Result<(), PackError> {
        if self.ops.len() == self.max_ops {
            return Err(PackError::TooManyOps {
                what,
                capacity: self.max_ops,
            });
        }
        self.ops.push(op);
        Ok(())
    }
}

/// In which of the two rounds of the unpack launch an operation runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// What writes the step's own tensors: query starts, lengths, block table, token ids.
    First,
    /// What reads them.
    Second,
}

/// The operations of both rounds; kept from step to step.
#[derive(Debug)]
pub(crate) struct OpLists {
    first: Vec<UnpackOp>,
    second: Vec<UnpackOp>,
    max_ops: usize,
}

impl OpLists {
    pub(crate) fn new(max_ops: usize) -> Self {
        Self {
            first: Vec::with_capacity(max_ops),
            second: Vec::with_capacity(max_ops),
            max_ops,
        }
    }
}

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Bytes to copy.
    pub len: usize,
    /// Byte offset of the operations.
    pub ops: usize,
    /// Operations of the first round.
    pub num_first_ops: usize,
    /// Operations of both.
    pub num_ops: usize,
}

/// Fills one slot: appends lists, collects operations, and leaves the operations behind the lists.
#[derive(Debug)]
pub struct Packer<'s> {
    slot: &'s mut [u8],
    len: usize,
    ops: &'s mut OpLists,
    phase: Phase,
}

impl<'s> Packer<'s> {
    /// Into `slot`, from its first byte on.
    pub(crate) fn new(slot: &'s mut [u8], ops: &'s mut OpLists) -> Self {
        ops.first.clear();
        ops.second.clear();
        Self {
            slot,
            len: 0,
            ops,
            phase: Phase::First,
        }
    }

    /// Bytes taken by lists.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Is nothing packed yet?
    pub fn is_empty(&self) -> bool {
        self.ops.first.is_empty() && self.ops.second.is_empty()
    }

    /// Bytes that lists may still take: what is left when every operation so far has its place.
    pub fn free(&self) -> usize {
        self.capacity().saturating_sub(self.len)
    }

    /// The round that the following operations run in; the first at the start.
    pub fn phase(&mut self, phase: Phase) {
        self.phase = phase;
    }

    /// Writes `values` (s32) to `to`, and its fill after them.
    ///
    /// # Errors
    /// If the slot is full, or the destination smaller than the values.
    pub fn values_i32(
        &mut self,
        what: &'static str,
        to: Destination,
        values: &[i32],
    ) -> Result<(), PackError> {
        self.values(what, to, values)
    }

    /// Writes `values` (s64) to `to`, and its fill after them.
    ///
    /// # Errors
    /// If the slot is full, or the destination smaller than the values.
    pub fn values_i64(
        &mut self,
        what: &'static str,
        to: Destination,
        values: &[i64],
    ) -> Result<(), PackError> {
        self.values64(what, to, values)
    }

    /// Writes token ids (s32): `v` ≥ 0 is an id, `v` < 0 stands for `source[-1 - v]`, of `num_sources` ids on the device.
    ///
    /// # Errors
    /// If the slot is full, or the destination smaller than the ids.
    pub fn feed_tokens(
        &mut self,
        to: Destination,
        ids: &[i32],
        source: DevicePtr,
        num_sources: usize,
    ) -> Result<(), PackError> {
        const WHAT: &str = "token ids";
        fits(WHAT, ids.len(), to.room)?;
        let list = self.list(WHAT, ids)?;
        self.push(
            WHAT,
            UnpackOp {
                source,
                width: num_sources.min(i32::MAX as usize) as i32,
                ..op(UnpackKind::FeedTokens, to, ids.len(), list)
            },
        )
    }

    /// Writes how each row is sampled.
    ///
    /// # Errors
    /// If the slot is full, or the destination has fewer than `rows.len()` rows.
    pub fn sample_rows(
        &mut self,
        to: DevicePtr,
        room: usize,
        rows: &[SampleRow],
    ) -> Result<(), PackError> {
        const WHAT: &str = "sampling rows";
        const WORDS: usize = size_of::<SampleRow>() / size_of::<i32>();
        fits(WHAT, rows.len(), room)?;
        let list = self.append(WHAT, cast_slice(rows), 8)?;
        let to = Destination {
            ptr: to,
            room: rows.len() * WORDS,
            fill: 0,
        };
        self.push(WHAT, op(UnpackKind::Values, to, rows.len() * WORDS, list))
    }

    /// Updates of the block table: triples (row, column, block). Rows and columns that the table lacks are skipped.
    ///
    /// # Errors
    /// If the slot is full.
    pub fn table_updates(&mut self, triples: &[[i32; 3]]) -> Result<(), PackError> {
        const WHAT: &str = "block table updates";
        if triples.is_empty() {
            return Ok(());
        }
        fits(WHAT, triples.len(), i32::MAX as usize)?;
        let list = self.append(WHAT, cast_slice(triples), 4)?;
        self.push(
            WHAT,
            UnpackOp {
                kind: UnpackKind::TableUpdates as i32,
                rows: triples.len() as i32,
                list,
                ..UnpackOp::default()
            },
        )
    }

    /// All of a stage: its lists, and its operations in the second round.
    ///
    /// # Errors
    /// If the slot is full.
    pub fn stage(&mut self, what: &'static str, stage: &Stage) -> Result<(), PackError> {
        let phase = self.phase;
        self.phase = Phase::Second;
        let done = self.append(what, &stage.bytes, 8).and_then(|base| {
            stage.ops.iter().try_for_each(|op| {
                self.push(
                    what,
                    UnpackOp {
                        list: op.list + base,
                        list2: op.list2 + base,
                        ..*op
                    },
                )
            })
        });
        self.phase = phase;
        done
    }

    /// Writes the operations behind the lists.
    pub fn finish(self) -> Packed {
        let Self { slot, len, ops, .. } = self;
        // `append` and `push` have kept this much free.
        let at = len.next_multiple_of(OP_ALIGN);
        let mut end = at;
        for op in ops.first.iter().chain(&ops.second) {
            slot[end..end + OP_BYTES].copy_from_slice(bytes_of(op));
            end += OP_BYTES;
        }
        Packed {
            len: end,
            ops: at,
            num_first_ops: ops.first.len(),
            num_ops: ops.first.len() + ops.second.len(),
        }
    }

    fn num_ops(&self) -> usize {
        self.ops.first.len() + self.ops.second.len()
    }

    /// Bytes that lists may take with the operations so far, one more, and their alignment.
    fn capacity(&self) -> usize {
        let ops = (self.num_ops() + 1) * OP_BYTES + OP_ALIGN;
        self.slot.len().saturating_sub(ops)
    }
}

const OP_BYTES: usize = size_of::<UnpackOp>();
const OP_ALIGN: usize = 64;

/// Bytes of a slot for `lists` bytes of lists and `max_ops` operations.
pub(crate) fn slot_bytes(lists: usize, max_ops: usize) -> usize {
    (lists + (max_ops + 1) * OP_BYTES + OP_ALIGN).next_multiple_of(256)
}

impl Sink for Packer<'_> {
    fn append(&mut self, what: &'static str, bytes: &[u8], align: usize) -> Result<i64, PackError> {
        let padding = padding(self.len, align);
        let needed = padding + bytes.len();
        if needed > self.free() {
            return Err(PackError::Full {
                what,
                needed,
                used: self.len,
                capacity: self.capacity(),
            });
        }
        self.slot[self.len..self.len + padding].fill(0);
        let offset = self.len + padding;
        self.slot[offset..offset + bytes.len()].copy_from_slice(bytes);
        self.len = offset + bytes.len();
        Ok(offset as i64)
    }

    fn push(&mut self, what: &'static str, op: UnpackOp) -> Result<(), PackError> {
        if self.num_ops() == self.ops.max_ops || self.len > self.capacity() {
            return Err(PackError::TooManyOps {
                what,
                capacity: self.ops.max_ops,
            });
        }
        match self.phase {
            Phase::First => self.ops.first.push(op),
            Phase::Second => self.ops.second.push(op),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(room: usize) -> Destination {
        Destination {
            ptr: DevicePtr::from_raw(4096),
            room,
            fill: -1,
        }
    }

    #[test]
    fn lists_are_aligned_and_ops_follow_them_in_two_rounds() {
        let mut slot = vec![0xAA; 4096];
        let mut ops = OpLists::new(8);
        let mut packer = Packer::new(&mut slot, &mut ops);
        packer.phase(Phase::Second);
        packer.values_i32("three", to(3), &[1, 2, 3]).unwrap();
        packer.phase(Phase::First);
        packer.values_i64("one", to(2), &[7]).unwrap();
        let mut stage = Stage::new(64, 2);
        stage.values("stage", to(1), &[9]).unwrap();
        packer.stage("stage", &stage).unwrap();
        let packed = packer.finish();
        assert_eq!((packed.num_first_ops, packed.num_ops), (1, 3));
        assert_eq!(packed.ops % OP_ALIGN, 0);
        assert_eq!(packed.len, packed.ops + 3 * OP_BYTES);
        let found: Vec<UnpackOp> = slot[packed.ops..packed.len]
            .chunks(OP_BYTES)
            .map(bytemuck::pod_read_unaligned)
            .collect();
        assert_eq!(found[0].kind, UnpackKind::Values64 as i32);
        assert_eq!((found[0].list, found[0].room, found[0].fill), (16, 2, -1));
        assert_eq!(slot[16..24], 7_i64.to_le_bytes());
        assert_eq!((found[1].kind, found[1].list, found[1].rows), (0, 0, 3));
        assert_eq!(
            (found[2].list, found[2].destination),
            (24, DevicePtr::from_raw(4096))
        );
        assert_eq!(slot[24..28], 9_i32.to_le_bytes());
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_numbers_and_nothing_is_overrun() {
        let mut slot = vec![0; slot_bytes(16, 1)];
        let mut ops = OpLists::new(1);
        let mut packer = Packer::new(&mut slot, &mut ops);
        let values = vec![1; 4096];
        assert!(matches!(
            packer.values_i32("many", to(4096), &values),
            Err(PackError::Full {
                needed: 16384,
                used: 0,
                ..
            })
        ));
        assert_eq!(
            packer.values_i32("long", to(1), &[1, 2]),
            Err(PackError::Room {
                what: "long",
                len: 2,
                room: 1
            })
        );
        packer.values_i32("four", to(4), &[1, 2, 3, 4]).unwrap();
        assert_eq!(
            packer.values_i32("more", to(4), &[1]),
            Err(PackError::TooManyOps {
                what: "more",
                capacity: 1
            })
        );
        let packed = packer.finish();
        assert_eq!(packed.num_ops, 1);
        let mut stage = Stage::new(8, 1);
        assert!(matches!(
            stage.values("many", to(4), &[1, 2, 3]),
            Err(PackError::Full {
                needed: 12,
                capacity: 8,
                ..
            })
        ));
    }
}
