//! The admin socket: how `reload`, `rollback` and `builders` reach a running host.
//!
//! A unix stream socket, mode 0600, in a directory of the user's own. One request a connection: a line of JSON, followed by
//! as many bytes as it announces; the answer is a line of JSON. `GET /metrics` is answered too, as HTTP, for scrapers. The
//! server runs on a thread of its own and never touches the step loop: it hands work to the reload handles, which publish for
//! the next step boundary. The admin page ([`PageListener`]) is the same over HTTP, for people with a browser.

mod client;
mod host;
mod http;
mod metrics;
mod path;
mod server;

pub use client::call;
pub use host::{Group, Host, engine};
pub use http::PageListener;
pub use metrics::render;
pub use path::{default_path, prepare};
pub use server::{Control, Server, Submission};

use serde::{Deserialize, Serialize};
use timetable_sandbox::{ReloadPlan, TenantName};

/// The largest component that a reload may bring, in bytes: the largest that the sandbox may be told to look at.
pub fn component_bytes_max() -> u64 {
    crate::config::COMPONENT_BYTES_MAX
}

/// The longest line of JSON either side accepts, in bytes.
const LINE_BYTES_MAX: u64 = 4 << 20;

/// What a client asks.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Replace the builder of a backend by the component that follows the line, or give the one in service other options.
    Reload {
        /// FLASH_ATTN, FLASHINFER, …
        backend: String,
        /// Whose builder. None: everybody's.
        #[serde(default)]
        tenant: Option<TenantName>,
        /// Where the component came from, for people.
        origin: String,
        /// Bytes that follow. 0: the component in service.
        component_bytes: u64,
        /// Bytes of its detached signature, which follow the component's; 0: it is not signed.
        #[serde(default)]
        signature_bytes: u64,
        /// The builder's own options. None: those of the version before.
        #[serde(default)]
        options: Option<Vec<(String, String)>>,
        /// The stages that it goes through. None: the host's own.
        #[serde(default)]
        plan: Option<ReloadPlan>,
    },
    /// Withdraw the candidate that is being tried, or return to the previous version.
    Rollback {
        /// FLASH_ATTN, FLASHINFER, …
        backend: String,
        /// Whose builder. None: everybody's.
        #[serde(default)]
        tenant: Option<TenantName>,
    },
    /// The table of builders.
    Builders,
    /// Apply a configuration.
    Configure {
        /// Where the file lies, absolute.
        path: String,
        /// What it says.
        text: String,
    },
}

/// What the host answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// It was done; what came of it.
    Ok(serde_json::Value),
    /// It was not done; why, in one line. What ran before still runs.
    Error(String),
}
