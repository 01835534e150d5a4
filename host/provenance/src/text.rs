//! Bytes that people and tools write as text, and small files that are read whole but never more than a bound.
//!
//! Must never know: what the bytes mean.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// The bytes of hexadecimal digits. None if it has anything else, or an odd number.
pub(crate) fn hex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    text.as_bytes()
        .chunks_exact(2)
        .map(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok())
        .collect()
}

/// The bytes of standard base64, padded.
pub(crate) fn base64(text: &str) -> Option<Vec<u8>> {
    STANDARD.decode(text).ok()
}

/// A text for an error: one line of it, 200 characters at most.
pub(crate) fn shown(text: &str) -> String {
    let line: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(200)
        .collect();
    if line.len() < text.len() {
        return format!("{line}…");
    }
    line
}

/// The content of a regular file of at most `max` bytes.
///
/// # Errors
/// It cannot be read, is no regular file (a pipe would be waited for), or is larger.
pub(crate) fn read_bounded(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    // Asked before it is opened: opening a pipe would wait for its other end.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max {
        return Err(io::Error::other(format!(
            "it has more than {max} bytes, the most that are read"
        )));
    }
    Ok(bytes)
}
