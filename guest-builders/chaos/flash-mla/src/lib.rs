//! The chaos builder of the MLA backends. It must never know what it does wrong: that is `chaos-builder`'s.

use chaos_builder::{Chaos, LazyDecodes};
use timetable_guest::export_flash_mla;

/// The chaos builder of the MLA backends.
pub type Builder = Chaos<LazyDecodes>;

export_flash_mla!(Builder);
