//! Runs a recurrence over prepared runs: states are read, carried in f64 and kept here. It must never know which recurrence.

use super::step::{From, Place, Runs};
use crate::cpu::kernel::{Simd, Work, on_best};

/// One unit's recurrence.
pub(super) trait Recurrence {
    /// The most tokens of one `advance`.
    const TILE: usize;

    /// Writes the outputs of `places` (1..=TILE) and makes `state` (f64 [rows, width]) what it is after the last of them.
    fn advance<const FMA: bool>(&mut self, state: &mut [f64], places: &[Place]);
}

/// What a unit's recurrence goes through, and what it carries along.
pub(super) struct Carried<'a> {
    pub runs: &'a Runs,
    /// f32 [states, rows, width]
    pub states: &'a mut [f32],
    /// f64 [rows, width]
    pub state: &'a mut [f64],
}

impl Carried<'_> {
    pub(super) fn run<R: Recurrence>(self, recurrence: R) {
        on_best(Unit {
            carried: self,
            recurrence,
        });
    }
}

struct Unit<'a, R> {
    carried: Carried<'a>,
    recurrence: R,
}

impl<R: Recurrence> Work for Unit<'_, R> {
    #[inline(always)]
    fn run<S: Simd, const FMA: bool>(mut self) {
        let Carried {
            runs,
            states,
            state,
        } = self.carried;
        let size = state.len();
        state.fill(0.0);
        for (from, mut places) in runs.iter() {
            match from {
                From::State(from) => {
                    let kept = &states[from as usize * size..][..size];
                    for (state, &kept) in state.iter_mut().zip(kept) {
                        *state = kept.into();
                    }
                }
                From::Zeros => state.fill(0.0),
                From::Before => {}
            }
            while !places.is_empty() {
                let most = places.len().min(R::TILE);
                let kept = places[..most].iter().position(|place| place.keep != 0);
                let (now, later) = places.split_at(kept.map_or(most, |last| last + 1));
                self.recurrence.advance::<FMA>(state, now);
                let keep = now[now.len() - 1].keep as usize;
                if keep != 0 {
                    let kept = &mut states[keep * size..][..size];
                    for (kept, &state) in kept.iter_mut().zip(&*state) {
                        *kept = state as f32;
                    }
                }
                places = later;
            }
        }
    }
}
