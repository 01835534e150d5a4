//! The rule book: what an attention backend is asked, how layers are grouped, what a metadata builder is, and what the host
//! checks before a kernel may use an integer that a builder chose.
//!
//! Pure: no I/O, no `unsafe`, no wasm, no device. Time and allocation are bounded by the step's rows and tokens.
#![forbid(unsafe_code)]

pub mod backend;
pub mod batch;
mod builder;
pub mod describe;
pub mod graphs;
pub mod group;
pub mod kernel_block;
pub mod layout;
pub mod meaning;
mod plain;
pub mod report;
mod resolve;
pub mod select;
pub mod spec;
mod step;
pub mod verify;

pub use builder::{BuildFault, FaultKind, MetadataBuilder};
pub use plain::plain_builder;
pub use resolve::{ResolveError, Resolver, Siblings};
pub use step::{BlockTable, PAD_SLOT_ID, StepInputs};
pub use timetable_types as types;
pub use verify::{
    FamilyRules, Grant, Refusal, Verifier, VerifyContext, rules, verify, verify_step,
};
