//! Checks and measures the CUDA kernels on the machine at hand: `timetable selftest` and `timetable bench`.
//!
//! Every kernel runs through the wrappers that the engine uses, on fresh random inputs, and every element of its result is
//! held against a reference in f64 on the CPU that shares no code with it. Outputs are poisoned first. It must never know an
//! engine, a model or a command line.

pub mod batch;
pub mod compare;
pub mod element;
pub mod random;
pub mod report;
