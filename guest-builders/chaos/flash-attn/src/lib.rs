//! The chaos builder of FLASH_ATTN. It must never know what it does wrong: that is `chaos-builder`'s.

use chaos_builder::{Chaos, OneSplit};
use timetable_guest::export_flash_attn;

/// The chaos builder of FLASH_ATTN.
pub type Builder = Chaos<OneSplit>;

export_flash_attn!(Builder);
