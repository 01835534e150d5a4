//! The last steps and where their time went, for whoever looks on from another thread.
//!
//! A ring of fixed size. The step thread writes numbers over the oldest and never waits; a reader whom it overtakes leaves that
//! step out. Must never know: who looks.

use std::{
    sync::atomic::{
        AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
        fence,
    },
    time::{Duration, Instant},
};

use crate::timings::{StepTimings, nanoseconds};

/// One step that has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepRecord {
    /// Counted from 1 since the engine's start.
    pub step: u64,
    /// Requests with rows in it.
    pub requests: u64,
    /// Tokens computed.
    pub tokens: u64,
    /// Some group was served by its plain builder after a fault in it.
    pub fell_back: bool,
    /// Requests of it ended with an error.
    pub failed: bool,
    /// Where its time went.
    pub timings: StepTimings,
}

const PARTS: usize = StepTimings::NAMES.len();
/// When it ended, requests, tokens, flags, parts.
const WORDS: usize = 4 + PARTS;

/// A record as the step thread writes it. `turn` is odd while it does, and says of which step the words are.
struct Slot {
    turn: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// The last steps of an engine.
pub struct Timeline {
    started: Instant,
    /// The last step's number; 0: none so far.
    last: AtomicU64,
    slots: Box<[Slot]>,
}

impl Timeline {
    /// Of the last `capacity` steps, at least one: 144 bytes each.
    pub fn new(capacity: usize) -> Self {
        let slot = || Slot {
            turn: AtomicU64::new(0),
            words: [const { AtomicU64::new(0) }; WORDS],
        };
        Self {
            started: Instant::now(),
            last: AtomicU64::new(0),
            slots: (0..capacity.max(1)).map(|_| slot()).collect(),
        }
    }

    /// How many steps it keeps.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// A step has ended. From one thread only, with ascending step numbers.
    pub fn record(&self, record: &StepRecord) {
        let slot = &self.slots[record.step as usize % self.slots.len()];
        let flags = u64::from(record.fell_back) | u64::from(record.failed) << 1;
        let ended = nanoseconds(self.started.elapsed());
        let parts = record.timings.parts();
        slot.turn.store(record.step * 2 + 1, Relaxed);
        // Whoever sees a word of this step sees that it is being written.
        fence(Release);
        let head = [ended, record.requests, record.tokens, flags];
        for (word, value) in slot.words.iter().zip(head.iter().chain(&parts)) {
            word.store(*value, Relaxed);
        }
        slot.turn.store(record.step * 2 + 2, Release);
        self.last.store(record.step, Release);
    }

    /// The last `count` steps, oldest first, each with the time from the timeline's start to its end.
    pub fn last(&self, count: usize) -> Vec<(Duration, StepRecord)> {
        let last = self.last.load(Acquire);
        let count = count.min(self.slots.len()) as u64;
        (last.saturating_sub(count) + 1..=last)
            .filter_map(|step| self.read(step))
            .collect()
    }

    /// None if it was overtaken.
    fn read(&self, step: u64) -> Option<(Duration, StepRecord)> {
        let slot = &self.slots[step as usize % self.slots.len()];
        let turn = slot.turn.load(Acquire);
        let words = slot.words.each_ref().map(|word| word.load(Relaxed));
        fence(Acquire);
        if turn != step * 2 + 2 || slot.turn.load(Relaxed) != turn {
            return None;
        }
        let [ended, requests, tokens, flags, parts @ ..] = words;
        let record = StepRecord {
            step,
            requests,
            tokens,
            fell_back: flags & 1 > 0,
            failed: flags & 2 > 0,
            timings: StepTimings::of_parts(parts),
        };
        Some((Duration::from_nanos(ended), record))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// A record in which every number says which step it is.
    fn record(step: u64) -> StepRecord {
        StepRecord {
            step,
            requests: step,
            tokens: step,
            fell_back: step.is_multiple_of(2),
            failed: step.is_multiple_of(3),
            timings: StepTimings::of_parts(std::array::from_fn(|part| step * 100 + part as u64)),
        }
    }

    #[test]
    fn the_last_steps_are_kept_in_order_and_the_oldest_go() {
        let timeline = Timeline::new(4);
        assert_eq!(timeline.last(9), []);
        (1..=3).for_each(|step| timeline.record(&record(step)));
        let steps = |count| -> Vec<StepRecord> {
            let kept = timeline.last(count);
            assert!(kept.is_sorted_by_key(|(ended, _)| *ended));
            kept.into_iter().map(|(_, record)| record).collect()
        };
        assert_eq!(steps(9), [record(1), record(2), record(3)]);
        (4..=11).for_each(|step| timeline.record(&record(step)));
        assert_eq!(steps(9), [record(8), record(9), record(10), record(11)]);
        assert_eq!(steps(2), [record(10), record(11)]);
    }

    #[test]
    fn a_reader_beside_the_step_thread_sees_whole_steps_only() {
        let timeline = Arc::new(Timeline::new(2));
        let writer = std::thread::spawn({
            let timeline = Arc::clone(&timeline);
            move || (1..=200_000).for_each(|step| timeline.record(&record(step)))
        });
        let mut seen = 0_u64;
        while !writer.is_finished() {
            for (_, found) in timeline.last(2) {
                assert_eq!(found, record(found.step));
                seen += 1;
            }
        }
        writer.join().unwrap();
        assert_eq!(timeline.last(2).len(), 2);
        println!("{seen} steps were read while they were written");
    }
}
