//! What the tests that cross crates share, and the benchmarks. Knows no test.

pub mod bench;
pub mod candle_reference;
pub mod drive;
pub mod families;
pub mod naive;
pub mod step_host;
pub mod tiny_models;
pub mod toy;
pub mod trace;
pub mod two_in_flight;
