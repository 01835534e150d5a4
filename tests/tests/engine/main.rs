//! The engine, from its blocks to its answers.

mod batch;
mod blocks;
mod recorded;
mod scheduler;
mod trace;
