//! How the program ends: the documented exit codes, and the error that carries one.

use std::fmt;
use std::process::ExitCode;

/// What the process's exit status says. The README's table is this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Something failed while it ran: a request, the engine, an output that could not be written.
    Failure = 1,
    /// The command line was not understood. clap's own code.
    Usage = 2,
    /// The verifier, or the builder itself, refused a batch; a candidate that was waited for was withdrawn.
    Refused = 3,
    /// An input is not usable: a model, a component, a step description, a directory.
    BadInput = 4,
    /// No running host answers at the admin socket, or another one holds it, or the address to serve at.
    Unreachable = 5,
    /// The GPU cannot be used, has too little memory, or was lost.
    Device = 6,
}

/// An error with the exit status that it ends the process with.
#[derive(Debug)]
pub struct Failure {
    exit: Exit,
    message: String,
}

impl Failure {
    /// `message` says what was wrong, with the value, and what to do about it. One line.
    pub fn new(exit: Exit, message: impl fmt::Display) -> Self {
        // One line, whatever the parts bring along.
        let message = message
            .to_string()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        Failure { exit, message }
    }

    /// As [`Failure::new`], for use with `map_err`.
    pub fn of<E: fmt::Display>(exit: Exit) -> impl FnOnce(E) -> Self {
        move |error| Failure::new(exit, error)
    }

    /// The process's exit status.
    pub fn code(&self) -> ExitCode {
        ExitCode::from(self.exit as u8)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}
