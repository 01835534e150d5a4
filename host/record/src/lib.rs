//! Recordings of steps, and public request traces.
//!
//! Must never know: a device, a model, or the command line.
