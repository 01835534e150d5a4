//! The chaos builder of the Mamba family. It must never know what it does wrong: that is `chaos-builder`'s.

use chaos_builder::{Chaos, States};
use timetable_guest::export_mamba;

/// The chaos builder of the Mamba family.
pub type Builder = Chaos<States>;

export_mamba!(Builder);
