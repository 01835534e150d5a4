//! What the tests that cross crates share. Knows no test.

pub mod candle_reference;
pub mod naive;
