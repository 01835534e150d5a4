//! Steps that a rule of the batch has changed, through the builders' own logic and the CPU device, against attention in float64:
//! chunked-local virtual rows, tables without what a window has passed, micro-batches, fast prefill, causality by group and
//! request, the ranks of decode context parallelism. (Schedules made at random: `reference.rs`; broken ones: `verified`.)

#[path = "../support/mod.rs"]
mod support;

mod causal;
mod dcp;
mod fast_prefill;
mod graphs;
mod local;
mod padding;
mod scenario;
mod speculation;
mod subset;
mod triton;
mod ubatch;
mod windows;
