//! The chaos builder of FLASHINFER. It must never know what it does wrong: that is `chaos-builder`'s.

use chaos_builder::{Chaos, OneChunk};
use timetable_guest::export_flashinfer;

/// The chaos builder of FLASHINFER.
pub type Builder = Chaos<OneChunk>;

export_flashinfer!(Builder);
