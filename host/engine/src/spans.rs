//! `tracing` spans of a step and its parts, target `timetable::step`, level TRACE.
//!
//! A span `step` (its number, requests, tokens), within it `schedule`, `batch`, `build` (segment, group), `verify`, `prepare` and
//! `submit`, and `collect` when its tokens are awaited, which may be a step later. Fields are numbers: nothing is formatted here,
//! only by a subscriber that asks for these spans. Without one a span costs a look at a static, about a relaxed load: that is asked
//! here first, because a span that is off is more than that where another crate has turned on `tracing`'s bridge to `log`. This
//! module must never know what a part does.

use tracing::{Span, field::Empty, level_filters::LevelFilter, span::EnteredSpan, trace_span};

/// Could anybody want these spans?
#[inline]
fn is_listened_to() -> bool {
    LevelFilter::current() == LevelFilter::TRACE
}

macro_rules! part {
    ($(#[$doc:meta])* $name:ident $(, $field:ident)*) => {
        $(#[$doc])*
        #[inline]
        pub fn $name($($field: usize),*) -> EnteredSpan {
            if !is_listened_to() {
                return Span::none().entered();
            }
            trace_span!(target: "timetable::step", stringify!($name) $(, $field)*).entered()
        }
    };
}

/// Step `step` since the start, from 0.
#[inline]
pub fn step(step: u64) -> Span {
    if !is_listened_to() {
        return Span::none();
    }
    trace_span!(target: "timetable::step", "step", step, num_reqs = Empty, num_tokens = Empty)
}

/// What was scheduled for it.
#[inline]
pub fn scheduled(step: &Span, num_reqs: usize, num_tokens: usize) {
    step.record("num_reqs", num_reqs);
    step.record("num_tokens", num_tokens);
}

part!(
    /// Choosing rows and blocks.
    schedule
);
part!(
    /// Tables, slots, positions.
    batch
);
part!(
    /// A slot's metadata, for its segment of the step; verifying and preparing within.
    build,
    segment,
    group
);
part!(
    /// The verifier.
    verify
);
part!(
    /// The device takes the metadata.
    prepare
);
part!(
    /// The step goes to the device.
    submit
);
part!(
    /// Its tokens are awaited and given to its requests.
    collect
);
