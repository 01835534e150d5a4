//! The OpenAI-compatible HTTP API in front of an engine.
//!
//! - [`Server`] is one thread, `timetable-http`, with a single-threaded runtime: it accepts, answers, drains.
//! - A request's body is read field by field (`fields`) into a `generation::Generation`, whichever endpoint it came by;
//!   `running::Running` are its requests in the engine; `answer` writes what comes back.
//! - `admission` bounds who may wait, `keys` says whose a request is, `metrics` counts.
//!
//! What takes long (tokenising, rendering a conversation, metrics) runs on a few threads beside it. Must never know: builders,
//! devices, the command line.

mod admission;
mod answer;
mod chat;
mod completions;
mod connections;
mod error;
mod fields;
mod generation;
mod json;
mod keys;
mod logprobs;
mod metrics;
mod model;
mod options;
mod patient;
#[cfg(test)]
mod read_tests;
mod routes;
mod running;
mod server;
mod tokens;

pub use keys::{Keys, KeysError};
pub use metrics::Metrics;
pub use model::{Bounds, ServedModel};
pub use options::Options;
pub use server::{Control, Ended, MetricsText, Server, Service};
