//! Public request traces: when requests arrived, how long they were, and which blocks of their prompts they share.
//!
//! Lengths are the trace's; tokens are made up, as a function of the request (or of the shared block) and the position. Must never
//! know: an engine, or how fast it is.

mod azure;
mod mooncake;

use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Serialize;

/// Tokens of the blocks that a Mooncake trace names.
pub const HASH_BLOCK_TOKENS: usize = 512;
/// Bytes of a line, at most.
const MAX_LINE: u64 = 1 << 20;
/// Tokens of a prompt or an answer, at most.
const MAX_TOKENS: usize = 1 << 24;

/// How a trace is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TraceFormat {
    /// The Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.
    Azure,
    /// The Mooncake traces: a JSON object a line, with timestamp, input_length, output_length, hash_ids.
    Mooncake,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceRequest {
    /// Since the trace's first request.
    pub arrival: Duration,
    /// Tokens of the prompt; at least 1.
    pub input_length: usize,
    /// Tokens of the answer; at least 1.
    pub output_length: usize,
    /// Names of the prompt's blocks of [`HASH_BLOCK_TOKENS`] tokens, the last cut: equal names are equal tokens, after equal
    /// names before them. Empty: it shares nothing.
    pub hash_ids: Vec<u64>,
}

/// A trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// How it was written.
    pub format: TraceFormat,
    /// By arrival.
    pub requests: Vec<TraceRequest>,
}

/// Why a trace is not read. Each message says which file and line, what, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Not there, or not readable.
    #[error("trace `{path}`: {error}; give an Azure CSV file or a Mooncake JSONL file", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// Neither of the known formats.
    #[error(
        "trace `{path}` begins with {found:?}, which is neither an Azure CSV header (TIMESTAMP,ContextTokens,GeneratedTokens) \
         nor a Mooncake JSON object; give one of these, or name its format",
        path = path.display()
    )]
    Unknown {
        /// The file.
        path: PathBuf,
        /// How it begins, cut.
        found: String,
    },
    /// Nothing in it.
    #[error(
        "trace `{path}` has no requests; give an Azure CSV file or a Mooncake JSONL file with one or more",
        path = path.display()
    )]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A line that is no request.
    #[error("trace `{path}` line {line}: {what}", path = path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: u64,
        /// What is wrong, and the remedy.
        what: String,
    },
}

impl Trace {
    /// Reads a file, at most so many requests of it. Without a format, its first line tells.
    ///
    /// # Errors
    /// If it is no trace, or a line is no request.
    pub fn read(
        path: &Path,
        format: Option<TraceFormat>,
        max_requests: Option<usize>,
    ) -> Result<Trace, TraceError> {
        let failed = |error| TraceError::Io {
            path: path.to_owned(),
            error,
        };
        // Asked before it is opened: opening a pipe would wait for its other end.
        if !std::fs::metadata(path).map_err(failed)?.is_file() {
            return Err(failed(io::Error::other("it is not a regular file")));
        }
        let mut file = BufReader::new(File::open(path).map_err(failed)?);
        let format = match format {
            Some(format) => format,
            None => guess(path, file.fill_buf().map_err(failed)?)?,
        };
        let most = max_requests.unwrap_or(usize::MAX);
        let mut requests = match format {
            TraceFormat::Azure => azure::read(path, file, most)?,
            TraceFormat::Mooncake => mooncake::read(path, file, most)?,
        };
        requests.sort_by_key(|request| request.arrival);
        let Some(first) = requests.first().map(|first| first.arrival) else {
            return Err(TraceError::Empty {
                path: path.to_owned(),
            });
        };
        for request in &mut requests {
            request.arrival -= first;
        }
        Ok(Trace { format, requests })
    }
}

fn guess(path: &Path, start: &[u8]) -> Result<TraceFormat, TraceError> {
    let text = String::from_utf8_lossy(&start[..start.len().min(64)]);
    let text = text.trim_start_matches('\u{feff}').trim_start();
    match text.chars().next() {
        Some('{') => Ok(TraceFormat::Mooncake),
        Some(_) if text.starts_with(azure::COLUMNS[0]) => Ok(TraceFormat::Azure),
        None => Err(TraceError::Empty {
            path: path.to_owned(),
        }),
        Some(_) => Err(TraceError::Unknown {
            path: path.to_owned(),
            found: text.chars().take(24).collect(),
        }),
    }
}

/// A number of tokens as a trace may have it; else what is wrong.
fn tokens(name: &str, count: u64) -> Result<usize, String> {
    usize::try_from(count)
        .ok()
        .filter(|count| (1..=MAX_TOKENS).contains(count))
        .ok_or_else(|| {
            format!("{name} is {count}; a request has 1 to {MAX_TOKENS}: fix or remove the line")
        })
}

/// A trace's text in a message: control characters escaped, the rest as it is, cut.
fn shown(text: &str, most: usize) -> String {
    let mut shown = String::new();
    for letter in text.chars().take(most) {
        if letter.is_control() {
            shown.extend(letter.escape_default());
        } else {
            shown.push(letter);
        }
    }
    if text.chars().nth(most).is_some() {
        shown.push('…');
    }
    shown
}

/// Lines with their numbers from 1, none longer than [`MAX_LINE`].
fn lines<R: BufRead>(
    path: &Path,
    mut file: R,
) -> impl Iterator<Item = Result<(u64, String), TraceError>> {
    let path = path.to_owned();
    let mut number = 0;
    std::iter::from_fn(move || {
        let mut line = Vec::new();
        number += 1;
        let failed = |what: String| TraceError::Line {
            path: path.clone(),
            line: number,
            what,
        };
        let read = io::Read::take(&mut file, MAX_LINE + 1).read_until(b'\n', &mut line);
        match read {
            Ok(0) => None,
            Ok(bytes) if bytes as u64 > MAX_LINE => Some(Err(failed(format!(
                "it has more than {MAX_LINE} bytes: fix or remove the line"
            )))),
            Ok(_) => Some(
                String::from_utf8(line)
                    .map(|line| (number, line))
                    .map_err(|_| failed("it is not UTF-8: fix or remove the line".to_owned())),
            ),
            Err(error) => Some(Err(TraceError::Io {
                path: path.clone(),
                error,
            })),
        }
    })
}

/// The prompt of the trace's request `index`, of a vocabulary of `vocab_size`. Blocks with equal names have equal tokens.
pub fn prompt(index: usize, request: &TraceRequest, vocab_size: u32) -> Vec<u32> {
    let of_request = key(1, index as u64);
    (0..request.input_length)
        .map(|position| {
            let block = request.hash_ids.get(position / HASH_BLOCK_TOKENS);
            match block {
                Some(&id) => token(
                    key(0, id),
                    (position % HASH_BLOCK_TOKENS) as u64,
                    vocab_size,
                ),
                None => token(of_request, position as u64, vocab_size),
            }
        })
        .collect()
}

/// The answer of the trace's request `index`.
pub fn answer(index: usize, request: &TraceRequest, vocab_size: u32) -> Vec<u32> {
    let of_answer = key(2, index as u64);
    (0..request.output_length as u64)
        .map(|position| token(of_answer, position, vocab_size))
        .collect()
}

fn token(key: u64, position: u64, vocab_size: u32) -> u32 {
    (mix(key.wrapping_add(position)) % u64::from(vocab_size.max(1))) as u32
}

/// Prompts' blocks, prompts and answers have tokens of their own.
fn key(kind: u64, id: u64) -> u64 {
    mix(mix(kind) ^ id)
}

/// SplitMix64's finaliser: every bit of the result depends on every bit of the number.
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
