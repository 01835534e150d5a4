//! The engine on a CUDA device, end to end. Without one, or without embedded kernels for it, each test says why it is skipped.
//!
//! The program runs without cargo too, on a machine that it was carried to. `TIMETABLE_TESTS_DIR` names the directory with the
//! small model and the vectors, `TIMETABLE_MODEL_DIR` that of the default model, `TIMETABLE_CUDA_DEVICE` the device.

mod fatal;
mod graphs;
mod invariance;
mod precision;
mod reload;
mod sampling;
mod speculation;
mod support;
mod tenants;
mod tokens;
