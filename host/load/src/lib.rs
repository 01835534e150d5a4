//! Load for an OpenAI-compatible server: clients, arrivals, and what they measured.
//!
//! - [`Client`] sends one streaming request to a server and says what came of it: an [`Outcome`], a failure included.
//! - [`Traffic`] makes requests: of a public request trace, scaled to a machine, or all of one length.
//! - [`open_loop`] sends them when they arrive, [`closed_loop`] by so many clients of which each waits for its answer.
//! - [`ChildServer`] is a server in a process of its own, for as long as it is measured.
//! - [`Recorder`] adds outcomes up to a [`Report`]: rates, latencies, failures by kind.
//!
//! Must never know: an engine, what is inside a server, or the command line.

mod child;
mod client;
mod latency;
mod outcome;
mod report;
mod run;
mod sse;
mod traffic;

pub use child::{ChildError, ChildServer};
pub use client::{Client, ClientError, ClientOptions, Request, ServedModel};
pub use latency::{Latency, Quantiles};
pub use outcome::{End, Failure, FailureKind, Outcome};
pub use report::{Recorder, Report};
pub use run::{Limits, closed_loop, open_loop};
pub use sse::{SseError, SseReader};
pub use traffic::{Scale, Traffic, TrafficError};
