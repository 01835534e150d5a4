//! Steps between submission and collection: where each one's tokens arrive on the host, and what the device says of its time.
//!
//! A place is reused only after its step was collected, and everything is made at the start: no step allocates. Rows of logits
//! that are wanted on the host are the exception: the first steps that want so many make room for them. This module must never know what a step computes.

use std::{collections::VecDeque, time::Duration};

use timetable_device_cuda::{
    CudaError,
    driver::{Device, DevicePtr, Event, PinnedBuffer, Stream},
    upload::StepMarks,
};

use crate::timings::StepTimings;

/// No step takes so long: a device that has not finished one by then hangs.
pub(super) const STEP_LIMIT: Duration = Duration::from_secs(120);

/// A step's place: its tokens' pinned memory, and its marks on the stream.
struct Place {
    /// s32 `[rows]`
    tokens: PinnedBuffer,
    /// f32 `[rows, vocab]`; made when so many rows are wanted.
    logits: Option<PinnedBuffer>,
    /// Around the copy of the step's inputs, and their unpacking.
    marks: StepMarks,
    /// After the copy of the tokens to the host.
    done: Event,
}

/// A step that was submitted.
struct Flight {
    place: usize,
    /// The place of the step before, if its marks are still its own.
    before: Option<usize>,
    num_rows: usize,
    /// Rows of logits that come to the host.
    num_logits: usize,
}

/// All places, and the steps in flight.
pub(super) struct Flights {
    device: Device,
    places: Vec<Place>,
    in_flight: VecDeque<Flight>,
    /// The place of the step that is begun next.
    next: usize,
    /// The place of the step that was submitted last.
    last: Option<usize>,
    vocab_size: usize,
}

impl Flights {
    /// For `depth` steps in flight, of `max_rows` tokens each. One more place than that keeps the marks of the step before.
    pub(super) fn new(
        device: &Device,
        depth: usize,
        max_rows: usize,
        vocab_size: usize,
    ) -> Result<Self, CudaError> {
        let place = |_| {
            Ok(Place {
                tokens: PinnedBuffer::new(
                    device,
                    max_rows.max(1) * size_of::<i32>(),
                    false,
                    "the tokens of a step",
                )?,
                logits: None,
                marks: StepMarks::new(device)?,
                done: Event::new(device, true)?,
            })
        };
        Ok(Self {
            device: device.clone(),
            places: (0..=depth).map(place).collect::<Result<_, CudaError>>()?,
            in_flight: VecDeque::with_capacity(depth + 1),
            next: 0,
            last: None,
            vocab_size,
        })
    }

    /// Steps in flight.
    pub(super) fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// The marks of the step that is begun next.
    pub(super) fn marks(&self) -> &StepMarks {
        &self.places[self.next].marks
    }

    /// Has the step's `num_rows` tokens, and the rows of logits that are `wanted`, copied to the host, and puts it in flight.
    ///
    /// # Safety
    /// `tokens` is s32 `[num_rows]` and `logits` f32 `[num_rows, vocab]`, live until the stream has passed; `wanted` names rows
    /// below `num_rows`.
    pub(super) unsafe fn end(
        &mut self,
        stream: &Stream,
        num_rows: usize,
        tokens: DevicePtr,
        logits: DevicePtr,
        wanted: impl Iterator<Item = usize> + Clone,
    ) -> Result<(), CudaError> {
        let place = &mut self.places[self.next];
        if num_rows > 0 {
            let bytes = num_rows * size_of::<i32>();
            // SAFETY: the caller's; the place belongs to no step in flight, and is read only once `done` has passed.
            unsafe { stream.copy_to_host(&place.tokens, 0..bytes, tokens) }?;
        }
        let num_logits = wanted.clone().count();
        let row_bytes = self.vocab_size * size_of::<f32>();
        let room = place.logits.as_ref().map_or(0, PinnedBuffer::len);
        if room < num_logits * row_bytes {
            // The old one goes: its step was collected. The next power of two, so that it seldom comes to this.
            let bytes = num_logits.next_power_of_two() * row_bytes;
            let what = "rows of logits of a step";
            place.logits = Some(PinnedBuffer::new(&self.device, bytes, false, what)?);
        }
        if let Some(buffer) = &place.logits {
            for (to, row) in wanted.enumerate() {
                let bytes = to * row_bytes..(to + 1) * row_bytes;
                // SAFETY: as above.
                unsafe { stream.copy_to_host(buffer, bytes, logits.offset(row * row_bytes)) }?;
            }
        }
        stream.record(&place.done)?;
        self.in_flight.push_back(Flight {
            place: self.next,
            before: self.last,
            num_rows,
            num_logits,
        });
        self.last = Some(self.next);
        self.next = (self.next + 1) % self.places.len();
        Ok(())
    }

    /// Waits for the oldest step in flight; `take` gets its tokens (s32, in row order) and the logits that were
    /// wanted (f32 `[rows, vocab]`). Adds the device's times to `timings`. Nothing in flight: no tokens.
    ///
    /// # Errors
    /// What the device says of any work up to there; the step is no longer in flight.
    pub(super) fn collect(
        &mut self,
        timings: &mut StepTimings,
        take: impl FnOnce(&[i32], &[f32]),
    ) -> Result<(), CudaError> {
        let Some(flight) = self.in_flight.pop_front() else {
            take(&[], &[]);
            return Ok(());
        };
        let place = &self.places[flight.place];
        place.done.synchronize_within(STEP_LIMIT)?;
        let ns = |us: f32| (f64::from(us.max(0.0)) * 1e3) as u64;
        let begun = place.marks.step_begin();
        timings.copy_ns += ns(place.marks.elapsed_us()?.0);
        timings.kernel_ns += ns(begun.elapsed_us(&place.done)?);
        if let Some(before) = flight.before {
            timings.idle_ns += ns(self.places[before].done.elapsed_us(begun)?);
        }
        let tokens = &place.tokens.as_slice()[..flight.num_rows * size_of::<i32>()];
        // An empty slice of bytes need not be aligned for floats, so it is never cast.
        let logits: &[f32] = match &place.logits {
            Some(buffer) if flight.num_logits > 0 => {
                let bytes = flight.num_logits * self.vocab_size * size_of::<f32>();
                bytemuck::cast_slice(&buffer.as_slice()[..bytes])
            }
            _ => &[],
        };
        take(bytemuck::cast_slice(tokens), logits);
        Ok(())
    }

    /// After a step that did not begin whole: the next one has no step before it to measure from.
    pub(super) fn forget_last(&mut self) {
        self.last = None;
    }
}
