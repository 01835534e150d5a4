//! The Mooncake traces, as JSON lines. Must never know: what a request is used for.

use std::{io::BufRead, path::Path, time::Duration};

use serde::Deserialize;

use super::{HASH_BLOCK_TOKENS, TraceError, TraceRequest, lines, shown, tokens};

/// A line. Other fields are no concern of ours.
#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Line {
    /// Milliseconds.
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

pub(super) fn read(
    path: &Path,
    file: impl BufRead,
    most: usize,
) -> Result<Vec<TraceRequest>, TraceError> {
    let mut requests = Vec::new();
    for line in lines(path, file) {
        let (number, text) = line?;
        if requests.len() == most {
            break;
        }
        if text.trim().is_empty() {
            continue;
        }
        requests.push(request(text.trim_end()).map_err(|what| TraceError::Line {
            path: path.to_owned(),
            line: number,
            what,
        })?);
    }
    Ok(requests)
}

fn request(text: &str) -> Result<TraceRequest, String> {
    let line: Line = serde_json::from_str(text).map_err(|error| {
        // Its own line is always the first, and the value that it quotes may be long.
        let text = error.to_string();
        let what = text
            .rsplit_once(" at line ")
            .map_or(text.as_str(), |(what, _)| what);
        format!(
            "{} at column {}; a line is an object with timestamp, input_length, output_length, hash_ids: fix or remove it",
            shown(what, 80),
            error.column()
        )
    })?;
    let input_length = tokens("input_length", line.input_length)?;
    let blocks = input_length.div_ceil(HASH_BLOCK_TOKENS);
    if line.hash_ids.len() != blocks {
        return Err(format!(
            "it has {} hash_ids, and {input_length} tokens are {blocks} blocks of {HASH_BLOCK_TOKENS}: fix or remove the line",
            line.hash_ids.len()
        ));
    }
    let arrival = Duration::try_from_secs_f64(line.timestamp / 1e3).map_err(|_| {
        format!(
            "timestamp is {:?}, not milliseconds from 0 on: fix or remove the line",
            line.timestamp
        )
    })?;
    Ok(TraceRequest {
        arrival,
        input_length,
        output_length: tokens("output_length", line.output_length)?,
        hash_ids: line.hash_ids,
    })
}
