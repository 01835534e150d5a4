//! What an operator says of the server.

use std::time::Duration;

use crate::keys::Keys;

/// Bounds and keys. Each bound is there so that no client can take what others need.
#[derive(Clone, Debug)]
pub struct Options {
    /// Who may ask; empty: everybody.
    pub keys: Keys,
    /// Requests of one tenant that may wait beyond those that the engine runs at once; further ones get 429.
    pub max_waiting_requests: usize,
    /// From a request's arrival to its last token.
    pub request_timeout: Duration,
    /// Within which a request's head, and then its body, must arrive; also how long an idle connection is kept, and how long a client
    /// may take nothing of its answer.
    pub header_timeout: Duration,
    /// From the first signal to the end of requests that still run.
    pub drain_timeout: Duration,
    /// Bytes of a request's body.
    pub max_body_bytes: usize,
    /// Connections at once; further ones wait to be accepted.
    pub max_connections: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            keys: Keys::default(),
            max_waiting_requests: 256,
            request_timeout: Duration::from_secs(600),
            header_timeout: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(300),
            max_body_bytes: 4 << 20,
            max_connections: 1024,
        }
    }
}
