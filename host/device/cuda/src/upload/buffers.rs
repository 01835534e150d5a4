//! The step's own tensors on the device: persistent buffers at addresses that never change, so that a captured graph reads
//! whatever step was unpacked last. It must never know what a row or a token is used for.

use timetable_types::Input;

use super::pack::Destination;
use crate::driver::{Device, DeviceBuffer, DevicePtr};
use crate::error::CudaError;
use crate::params::SampleRow;

/// What bounds a step. All sizes that a buffer has are made from these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// R: rows, padding included.
    pub max_num_reqs: usize,
    /// T: tokens, padding included.
    pub max_num_tokens: usize,
    /// W: columns of the block table, in kernel blocks.
    pub table_width: usize,
    /// L: rows of logits, one for each row of the step, and for each draft token.
    pub max_num_logits: usize,
}

/// Addresses of the step's tensors. Copied freely; owned by [`StepBuffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepPtrs {
    /// What the sizes below are made from.
    pub limits: StepLimits,
    /// Rows of the step before these: 0, or the first row of a [part](StepPtrs::part).
    pub first_row: usize,
    /// `s32 [T]`
    pub token_ids: DevicePtr,
    /// `s64 [T]`
    pub positions: DevicePtr,
    /// `s64 [T]`: the cache slot of each token; −1: none.
    pub slot_mapping: DevicePtr,
    /// `s32 [R + 1]`
    pub query_start_loc: DevicePtr,
    /// `s32 [R]`
    pub seq_lens: DevicePtr,
    /// `s32 [R, W]`
    pub block_table: DevicePtr,
    /// `s32 [L]`: the token whose logits each row of them is of.
    pub logits_rows: DevicePtr,
    /// [`SampleRow`] `[L]`
    pub sample_rows: DevicePtr,
    /// `s32 [L]`: the tokens that were sampled, in the order of the step's `logits_rows`.
    pub sampled: DevicePtr,
    /// `s32 [R]`: 0 or 1, where `causal` is per request.
    pub causal: DevicePtr,
}

/// Bytes that every tensor begins at a multiple of.
const ALIGN: usize = 256;

impl StepPtrs {
    /// The tensors, one after the other from `base`; and the bytes of all. `base` is a multiple of 256.
    pub fn layout(limits: StepLimits, base: DevicePtr) -> (Self, usize) {
        let StepLimits {
            max_num_reqs: rows,
            max_num_tokens: tokens,
            table_width,
            max_num_logits: logits,
        } = limits;
        let mut end = 0_usize;
        let mut take = |elements: usize, size: usize| {
            let begin = end;
            end = (begin + elements.max(1) * size).next_multiple_of(ALIGN);
            base.offset(begin)
        };
        let ptrs = Self {
            limits,
            first_row: 0,
            token_ids: take(tokens, 4),
            positions: take(tokens, 8),
            slot_mapping: take(tokens, 8),
            query_start_loc: take(rows + 1, 4),
            seq_lens: take(rows, 4),
            block_table: take(rows * table_width, 4),
            logits_rows: take(logits, 4),
            sample_rows: take(logits, size_of::<SampleRow>()),
            sampled: take(logits, 4),
            causal: take(rows, 4),
        };
        (ptrs, end)
    }

    /// The addresses for a part of the step whose rows begin at `first_row` and whose tokens at `first_token`, as if it were a
    /// step of its own. Its query starts begin at 0, which the device's do not: they travel by value, or are rebased.
    #[must_use]
    pub fn part(&self, first_row: usize, first_token: usize) -> Self {
        Self {
            first_row,
            token_ids: self.token_ids.offset(4 * first_token),
            positions: self.positions.offset(8 * first_token),
            slot_mapping: self.slot_mapping.offset(8 * first_token),
            seq_lens: self.seq_lens.offset(4 * first_row),
            block_table: self
                .block_table
                .offset(4 * first_row * self.limits.table_width),
            causal: self.causal.offset(4 * first_row),
            ..*self
        }
    }

    /// Where the first `num_tokens` token ids go; the rest of them becomes 0.
    pub fn token_ids(&self, num_tokens: usize) -> Destination {
        to(self.token_ids, num_tokens, 0)
    }

    /// Where the first `num_tokens` positions go; the rest of them becomes 0.
    pub fn positions(&self, num_tokens: usize) -> Destination {
        to(self.positions, num_tokens, 0)
    }

    /// Where the first `num_tokens` slots go; the rest of them becomes −1: nothing is written to the cache.
    pub fn slot_mapping(&self, num_tokens: usize) -> Destination {
        to(self.slot_mapping, num_tokens, -1)
    }

    /// Where `num_reqs + 1` query starts go; entries that are not given become `last`, so that padded rows have no tokens.
    pub fn query_start_loc(&self, num_reqs: usize, last: i32) -> Destination {
        to(self.query_start_loc, num_reqs + 1, last)
    }

    /// Where `num_reqs` lengths go; the rest of them becomes 0.
    pub fn seq_lens(&self, num_reqs: usize) -> Destination {
        to(self.seq_lens, num_reqs, 0)
    }

    /// Where columns [`column`, `column` + `len`) of a row of the block table go.
    pub fn table_run(&self, row: usize, column: usize, len: usize) -> Destination {
        let at = (row * self.limits.table_width + column) * 4;
        to(
            DevicePtr::from_raw(self.block_table.raw() + at as u64),
            len,
            0,
        )
    }

    /// Where the tokens of `num_rows` rows of logits go; the rest of them becomes 0.
    pub fn logits_rows(&self, num_rows: usize) -> Destination {
        to(self.logits_rows, num_rows, 0)
    }

    /// Where `num_reqs` causal flags go; the rest of them becomes 0.
    pub fn causal(&self, num_reqs: usize) -> Destination {
        to(self.causal, num_reqs, 0)
    }

    /// The device's own tensor of `input`, if it keeps one: its address, and bytes of an element.
    pub(crate) fn of(&self, input: Input) -> Option<(DevicePtr, usize)> {
        match input {
            Input::QueryStartLoc if self.first_row > 0 => None,
            Input::QueryStartLoc => Some((self.query_start_loc, 4)),
            Input::SeqLens => Some((self.seq_lens, 4)),
            Input::BlockTable => Some((self.block_table, 4)),
            Input::SlotMapping => Some((self.slot_mapping, 8)),
            Input::Positions => Some((self.positions, 8)),
            Input::Causal => Some((self.causal, 4)),
            Input::DcpLocalSeqLens
            | Input::EncoderSeqLens
            | Input::LogitsIndicesPadded
            | Input::RswaPrefixLens => None,
        }
    }
}

fn to(ptr: DevicePtr, room: usize, fill: i32) -> Destination {
    Destination { ptr, room, fill }
}

/// The step's tensors, owned: one allocation, zero when new.
#[derive(Debug)]
pub struct StepBuffers {
    memory: DeviceBuffer,
    ptrs: StepPtrs,
}

impl StepBuffers {
    /// Allocates them.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], or what the driver says.
    pub fn new(device: &Device, limits: StepLimits) -> Result<Self, CudaError> {
        let (_, bytes) = StepPtrs::layout(limits, DevicePtr::from_raw(0));
        let memory = DeviceBuffer::alloc_zeroed(device, bytes, "the step's tensors")?;
        let (ptrs, _) = StepPtrs::layout(limits, memory.ptr());
        Ok(Self { memory, ptrs })
    }

    /// Their addresses.
    pub fn ptrs(&self) -> StepPtrs {
        self.ptrs
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_aligned_and_do_not_overlap() {
        let limits = StepLimits {
            max_num_reqs: 5,
            max_num_tokens: 70,
            table_width: 9,
            max_num_logits: 15,
        };
        let (p, bytes) = StepPtrs::layout(limits, DevicePtr::from_raw(1 << 20));
        let mut spans = [
            (p.token_ids, 70 * 4),
            (p.positions, 70 * 8),
            (p.slot_mapping, 70 * 8),
            (p.query_start_loc, 6 * 4),
            (p.seq_lens, 5 * 4),
            (p.block_table, 45 * 4),
            (p.logits_rows, 15 * 4),
            (p.sample_rows, 15 * 24),
            (p.sampled, 15 * 4),
            (p.causal, 5 * 4),
        ];
        spans.sort_by_key(|(ptr, _)| ptr.raw());
        let mut end = 1 << 20;
        for (ptr, len) in spans {
            assert!(
                ptr.raw() >= end && ptr.raw() % ALIGN as u64 == 0,
                "{ptr:?} after {end}"
            );
            end = ptr.raw() + len;
        }
        assert!(end <= (1 << 20) + bytes as u64);
        assert_eq!(
            p.table_run(2, 3, 4).ptr.raw(),
            p.block_table.raw() + (2 * 9 + 3) * 4
        );
        let part = p.part(2, 30);
        assert_eq!(part.block_table, p.table_run(2, 0, 9).ptr);
        assert_eq!(part.seq_lens.raw(), p.seq_lens.raw() + 2 * 4);
        assert_eq!(part.slot_mapping.raw(), p.slot_mapping.raw() + 30 * 8);
        assert_eq!(part.of(Input::QueryStartLoc), None);
        assert_eq!(p.part(0, 0), p);
    }
}
