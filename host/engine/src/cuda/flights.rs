//! Steps between submission and collection: where each one's tokens arrive on the host, and what the device says of its time.
//!
//! A place is reused only after its step was collected, and everything is made at the start: no step allocates. Logits that a
//! test or an evaluation asks for are the exception. This module must never know what a step computes.

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
    /// f32 `[rows, vocab]`; made when logits are asked for, for so many rows.
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
    observed: bool,
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

    /// Has the step's `num_rows` tokens, and logits if they are wanted, copied to the host, and puts it in flight.
    ///
    /// # Safety
    /// `tokens` is s32 `[num_rows]` and `logits` f32 `[num_rows, vocab]`, live until the stream has passed.
    pub(super) unsafe fn end(
        &mut self,
        stream: &Stream,
        num_rows: usize,
        tokens: DevicePtr,
        logits: Option<DevicePtr>,
    ) -> Result<(), CudaError> {
        let place = &mut self.places[self.next];
        if num_rows > 0 {
            let bytes = num_rows * size_of::<i32>();
            // SAFETY: the caller's; the place belongs to no step in flight, and is read only once `done` has passed.
            unsafe { stream.copy_to_host(&place.tokens, 0..bytes, tokens) }?;
        }
        if let (Some(logits), true) = (logits, num_rows > 0) {
            let bytes = num_rows * self.vocab_size * size_of::<f32>();
            let room = place.logits.as_ref().map_or(0, PinnedBuffer::len);
            if room < bytes {
                // The old one goes: its step was collected.
                let what = "the logits of a step, for an observer";
                place.logits = Some(PinnedBuffer::new(&self.device, bytes, false, what)?);
            }
            if let Some(buffer) = &place.logits {
                // SAFETY: as above.
                unsafe { stream.copy_to_host(buffer, 0..bytes, logits) }?;
            }
        }
        stream.record(&place.done)?;
        self.in_flight.push_back(Flight {
            place: self.next,
            before: self.last,
            num_rows,
            observed: logits.is_some(),
        });
        self.last = Some(self.next);
        self.next = (self.next + 1) % self.places.len();
        Ok(())
    }

    /// Waits for the oldest step in flight; `take` gets its tokens (s32, in row order) and its logits (f32 `[rows, vocab]`, empty
    /// where none were asked for). Adds the device's times to `timings`. Nothing in flight: no tokens.
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
            Some(buffer) if flight.observed => {
                let bytes = flight.num_rows * self.vocab_size * size_of::<f32>();
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
