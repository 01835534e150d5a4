//! The reference builders, in both of their forms: components embedded in the binary, and the same logic natively.
//!
//! The native twin is for benchmarks and comparison, and never a fallback: it has the same bugs. This crate must never know
//! the sandbox.

mod embedded;
mod native;

pub use embedded::{Embedded, chaos, component, components};
pub use native::{Native, native_twin};
