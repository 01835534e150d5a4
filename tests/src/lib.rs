//! What the tests that cross crates share. Knows no test.

pub mod candle_reference;
pub mod drive;
pub mod families;
pub mod naive;
pub mod step_host;
