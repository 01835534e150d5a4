//! The ring of upload slots: pinned memory that the host packs, its twin on the device, and the events that say when either
//! may be used again. It must never know what is packed.
//!
//! A slot passes: the host waits until the copy out of its pinned half is done, packs; the copy stream waits until the slot's
//! device half was unpacked, copies; the step's stream waits for the copy, unpacks. So with two slots the next step is packed
//! and copied while the device still runs this one, and a stalled stream delays the host only when all slots are under way.

use super::buffers::StepPtrs;
use super::pack::{OpLists, Packed, Packer, slot_bytes};
use crate::driver::{Device, DeviceBuffer, DevicePtr, Event, PinnedBuffer, Stream};
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::params::UnpackParams;

/// Sizes of a step's upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UploadSize {
    /// Slots: steps that may be under way at once. At least 1; 2 lets the host prepare one step while the device runs another.
    pub num_slots: usize,
    /// Bytes of lists that one step packs at most.
    pub max_bytes: usize,
    /// Operations that one step packs at most.
    pub max_ops: usize,
}

/// What the unpack kernel needs to know of a step besides its operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnpackStep {
    /// Rows, padding included.
    pub num_reqs: usize,
    /// Tokens, padding included.
    pub num_tokens: usize,
    /// Tokens of a kernel block.
    pub block_size: u32,
    /// Ranks of decode context parallelism; 1 without.
    pub dcp_world_size: u32,
    /// This rank.
    pub dcp_rank: u32,
    /// Tokens of a rank's run; 1 without.
    pub dcp_interleave: u32,
}

impl UnpackStep {
    /// Without decode context parallelism.
    pub const fn new(num_reqs: usize, num_tokens: usize, block_size: u32) -> Self {
        Self {
            num_reqs,
            num_tokens,
            block_size,
            dcp_world_size: 1,
            dcp_rank: 0,
            dcp_interleave: 1,
        }
    }
}

/// Marks in the streams around one step's upload, for whoever wants to know how long it took.
#[derive(Debug)]
pub struct StepMarks {
    copy_begin: Event,
    copy_end: Event,
    unpack_begin: Event,
    unpack_end: Event,
}

impl StepMarks {
    /// Four events with timing.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            copy_begin: Event::new(device, true)?,
            copy_end: Event::new(device, true)?,
            unpack_begin: Event::new(device, true)?,
            unpack_end: Event::new(device, true)?,
        })
    }

    /// Microseconds of the copy and of the unpack kernel. The step's stream must have passed the unpack launch.
    ///
    /// # Errors
    /// What the driver says, `CUDA_ERROR_NOT_READY` where the step is not that far.
    pub fn elapsed_us(&self) -> Result<(f32, f32)> {
        Ok((
            self.copy_begin.elapsed_us(&self.copy_end)?,
            self.unpack_begin.elapsed_us(&self.unpack_end)?,
        ))
    }

    /// The mark before the unpack kernel on the step's stream: where a step begins on the device.
    pub fn step_begin(&self) -> &Event {
        &self.unpack_begin
    }
}

#[derive(Debug)]
struct Slot {
    pinned: PinnedBuffer,
    device: DevicePtr,
    /// The copy is done: the host may write the pinned half.
    copied: Event,
    /// The unpack kernel is done: a copy may write the device half.
    unpacked: Event,
}

/// The slots, in turn. Nothing is allocated after [`UploadRing::new`].
#[derive(Debug)]
pub struct UploadRing {
    slots: Vec<Slot>,
    next: usize,
    ops: OpLists,
    copies: Stream,
    memory: DeviceBuffer,
}

impl UploadRing {
    /// Allocates the slots, pinned and on the device.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], [`CudaError::Invalid`] for no slots, or what the driver says.
    pub fn new(device: &Device, size: UploadSize) -> Result<Self> {
        if size.num_slots == 0 {
            return Err(CudaError::Invalid {
                what: "the number of upload slots",
                value: "0".to_owned(),
                remedy: "at least 1; 2 overlap the host with the device",
            });
        }
        let bytes = slot_bytes(size.max_bytes, size.max_ops);
        let memory = DeviceBuffer::alloc(device, bytes * size.num_slots, "the upload ring")?;
        let slots = (0..size.num_slots)
            .map(|index| {
                Ok(Slot {
                    pinned: PinnedBuffer::new(device, bytes, true, "the upload ring")?,
                    device: memory.ptr().offset(index * bytes),
                    copied: Event::new(device, false)?,
                    unpacked: Event::new(device, false)?,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            slots,
            next: 0,
            ops: OpLists::new(size.max_ops),
            copies: Stream::high_priority(device)?,
            memory,
        })
    }

    /// Waits until the next slot may be written, and gives it to pack. What is packed and never submitted is forgotten at
    /// the next call.
    ///
    /// # Errors
    /// What the driver says, and any fault of the work waited for.
    pub fn begin(&mut self) -> Result<Packer<'_>> {
        let slot = &mut self.slots[self.next];
        slot.copied.synchronize()?;
        Ok(Packer::new(slot.pinned.as_mut_slice(), &mut self.ops))
    }

    /// Begins the copy of what was packed into the slot of the last [`UploadRing::begin`], and lets `stream` unpack it: one
    /// copy, one launch. Everything that `stream` is given later sees the step's tensors.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// `packed` is what that packer finished with. Every operation's destination has its `room`, and its source what it reads;
    /// all of it, and `ptrs`, are live until `stream` has passed the launch. Work of `stream` is all that uses them.
    pub unsafe fn submit(
        &mut self,
        stream: &Stream,
        kernels: &Kernels,
        packed: Packed,
        step: UnpackStep,
        ptrs: &StepPtrs,
        marks: Option<&StepMarks>,
    ) -> Result<()> {
        let slot = &self.slots[self.next];
        self.copies.wait(&slot.unpacked)?;
        if let Some(marks) = marks {
            self.copies.record(&marks.copy_begin)?;
        }
        // SAFETY: the device half is as large as the pinned one, and was unpacked; nothing writes the pinned half before
        // `copied` has passed, and `Drop` waits for it.
        unsafe {
            self.copies
                .copy_to_device(slot.device, &slot.pinned, 0..packed.len)
        }?;
        if let Some(marks) = marks {
            self.copies.record(&marks.copy_end)?;
        }
        self.copies.record(&slot.copied)?;
        // From here on the slot is under way, whatever else fails.
        self.next = (self.next + 1) % self.slots.len();
        stream.wait(&slot.copied)?;
        if let Some(marks) = marks {
            stream.record(&marks.unpack_begin)?;
        }
        let params = unpack_params(slot.device, packed, step, ptrs);
        // SAFETY: the caller's; lists lie within the slot, which the packer saw to.
        unsafe { kernels.unpack(stream, &params) }?;
        if let Some(marks) = marks {
            stream.record(&marks.unpack_end)?;
        }
        stream.record(&slot.unpacked)
    }

    /// Bytes on the device; as many are pinned on the host.
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }
}

fn unpack_params(
    slot: DevicePtr,
    packed: Packed,
    step: UnpackStep,
    ptrs: &StepPtrs,
) -> UnpackParams {
    UnpackParams {
        slot,
        ops: slot.offset(packed.ops),
        query_start_loc: ptrs.query_start_loc,
        seq_lens: ptrs.seq_lens,
        block_table: ptrs.block_table,
        block_table_stride: ptrs.limits.table_width as i64,
        num_first_ops: packed.num_first_ops as i32,
        num_ops: packed.num_ops as i32,
        num_reqs: step.num_reqs as i32,
        num_tokens: step.num_tokens as i32,
        table_width: ptrs.limits.table_width as i32,
        block_size: step.block_size as i32,
        dcp_world_size: step.dcp_world_size as i32,
        dcp_rank: step.dcp_rank as i32,
        dcp_interleave: step.dcp_interleave as i32,
        reserved: 0,
    }
}

impl Drop for UploadRing {
    fn drop(&mut self) {
        // Copies and launches under way use the slots.
        for slot in &self.slots {
            for event in [&slot.copied, &slot.unpacked] {
                if let Err(error) = event.synchronize() {
                    tracing::debug!(%error, "an upload slot was under way when the ring was dropped");
                }
            }
        }
    }
}
