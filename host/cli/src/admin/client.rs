//! The asking side: one request, one answer.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::{LINE_BYTES_MAX, Request, Response};
use crate::exit::{Exit, Failure};

/// How long a host may take to answer.
const HOST_TIMEOUT: Duration = Duration::from_secs(120);

/// Sends `request` and `payload` to the host at `path` and waits for its answer.
///
/// # Errors
/// No host answers there, it closed the connection, or it answered with an error of its own.
pub fn call(path: &Path, request: &Request, payload: &[u8]) -> Result<serde_json::Value, Failure> {
    let mut stream = UnixStream::connect(path).map_err(|error| {
        let what = match error.kind() {
            ErrorKind::NotFound => "no running host: there is no socket".to_owned(),
            ErrorKind::ConnectionRefused => "no running host: the socket is left over from one that ended".to_owned(),
            _ => format!("cannot be reached ({error})"),
        };
        Failure::new(
            Exit::Unreachable,
            format!(
                "admin socket {}: {what}; start one with `timetable generate …`, or name its socket with --admin PATH",
                path.display()
            ),
        )
    })?;
    // A reload compiles, which may take long on a busy machine; a host that says nothing for so long is gone.
    for set in [UnixStream::set_read_timeout, UnixStream::set_write_timeout] {
        set(&stream, Some(HOST_TIMEOUT)).map_err(Failure::of(Exit::Failure))?;
    }
    let lost = |error: std::io::Error| {
        Failure::new(
            Exit::Unreachable,
            format!(
                "admin socket {}: the host went away ({error}); is it still running?",
                path.display()
            ),
        )
    };
    let mut line = serde_json::to_vec(request).map_err(Failure::of(Exit::Failure))?;
    line.push(b'\n');
    stream.write_all(&line).map_err(lost)?;
    // The host may refuse by the announcement alone and answer before it has read everything.
    let sent = stream.write_all(payload);
    let mut answer = String::new();
    BufReader::new(stream.take(LINE_BYTES_MAX))
        .read_line(&mut answer)
        .map_err(lost)?;
    if answer.is_empty() {
        sent.map_err(lost)?;
    }
    match serde_json::from_str(&answer) {
        Ok(Response::Ok(value)) => Ok(value),
        Ok(Response::Error(message)) => Err(Failure::new(Exit::BadInput, message)),
        Err(error) => Err(Failure::new(
            Exit::Unreachable,
            format!(
                "admin socket {}: the answer is not understood ({error}); is it a timetable host?",
                path.display()
            ),
        )),
    }
}
