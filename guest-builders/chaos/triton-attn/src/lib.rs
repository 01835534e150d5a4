//! The chaos builder of TRITON_ATTN. It must never know what it does wrong: that is `chaos-builder`'s.

use chaos_builder::{Chaos, OneSegment};
use timetable_guest::export_triton_attn;

/// The chaos builder of TRITON_ATTN.
pub type Builder = Chaos<OneSegment>;

export_triton_attn!(Builder);
