//! What came of a request. Must never know: how it was sent.

use std::{fmt, time::Duration};

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The whole answer was there.
    Complete,
    /// The client went away, as it was told to.
    HungUp,
    /// There was no whole answer.
    Failed(Failure),
}

/// Why there was no whole answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What it is counted as.
    pub kind: FailureKind,
    /// What was wrong.
    pub message: String,
}

/// Kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureKind {
    /// No connection was made.
    Connect,
    /// The connection was lost before an answer began.
    NoAnswer,
    /// There was no end within the time that a request may take.
    Timeout,
    /// Another HTTP status than 200.
    Status(u16),
    /// The answer broke off.
    BrokenStream,
    /// The answer is not what an OpenAI-compatible server sends.
    Malformed,
    /// An error that the server reported within the answer.
    ErrorEvent,
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FailureKind::Connect => f.write_str("connect"),
            FailureKind::NoAnswer => f.write_str("no_answer"),
            FailureKind::Timeout => f.write_str("timeout"),
            FailureKind::Status(status) => write!(f, "http_{status}"),
            FailureKind::BrokenStream => f.write_str("broken_stream"),
            FailureKind::Malformed => f.write_str("malformed"),
            FailureKind::ErrorEvent => f.write_str("error_event"),
        }
    }
}

/// What came of a request, and when.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// How it ended.
    pub end: End,
    /// The answer, as far as it got.
    pub text: String,
    /// Why the answer ended, by the server: `length`, `stop`.
    pub finish_reason: Option<String>,
    /// Tokens of the prompt, by the server; 0 if it did not say.
    pub prompt_tokens: u64,
    /// Tokens of the answer, by the server; the pieces that came, if it did not say.
    pub output_tokens: u64,
    /// From when it was sent until the first piece of the answer.
    pub first_token: Option<Duration>,
    /// Between one piece and the next.
    pub gaps: Vec<Duration>,
    /// From when it was sent until its end, waiting between attempts included.
    pub elapsed: Duration,
    /// Attempts after the first, each because the server was busy.
    pub retries: u32,
}

impl Outcome {
    pub(crate) fn begin() -> Self {
        Self {
            end: End::Complete,
            text: String::new(),
            finish_reason: None,
            prompt_tokens: 0,
            output_tokens: 0,
            first_token: None,
            gaps: Vec::new(),
            elapsed: Duration::ZERO,
            retries: 0,
        }
    }

    /// Mean time of a token after the first.
    pub fn time_per_output_token(&self) -> Option<Duration> {
        let after_first = u32::try_from(self.output_tokens.checked_sub(1)?).ok()?;
        self.gaps.iter().sum::<Duration>().checked_div(after_first)
    }
}
