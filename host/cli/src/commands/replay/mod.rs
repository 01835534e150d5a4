//! `replay`: a builder on recorded steps, or on a public request trace.

mod recording;
mod traffic;

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum, ValueHint};
use timetable_attention::Grant;
use timetable_record::trace::TraceFormat;
use timetable_record::{Candidate, RecorderFigures};

use super::read_component;
use crate::exit::{Exit, Failure};

#[derive(Debug, Args)]
pub struct Replay {
    /// The recording: a directory that --record wrote
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath, required_unless_present = "trace", conflicts_with = "trace")]
    pub recording: Option<PathBuf>,

    /// A public request trace: Azure's CSV, or Mooncake's JSON lines
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub trace: Option<PathBuf>,

    /// The builder to try: a component's path, or the name of one in this binary (`timetable components`)
    #[arg(long, value_name = "PATH|NAME", value_hint = ValueHint::FilePath)]
    pub builder: Option<String>,

    /// An option of the builder's own, as KEY=VALUE [default: on a recording, those of the recorded builder]
    #[arg(long, value_name = "KEY=VALUE", value_parser = crate::cli::key_value, requires = "builder")]
    pub builder_option: Vec<(String, String)>,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,

    #[command(flatten, next_help_heading = "Of a recording")]
    pub of_recording: RecordingArgs,

    #[command(flatten, next_help_heading = "Of a trace")]
    pub of_trace: TraceArgs,
}

#[derive(Debug, Args)]
pub struct RecordingArgs {
    /// Only the steps of this slot: FLASH_ATTN, FLASH_ATTN/0, FLASH_ATTN/0@tenant
    #[arg(long, value_name = "NAME", conflicts_with = "trace")]
    pub group: Option<String>,

    /// What the new builder is granted [default: what the recorded one was]
    #[arg(long, value_enum, conflicts_with = "trace", requires = "builder")]
    pub grant: Option<GrantArg>,

    /// Steps to replay, at most
    #[arg(long, value_name = "N", conflicts_with = "trace")]
    pub limit: Option<u64>,

    /// Differences to show, at most; all are counted
    #[arg(long, value_name = "N", default_value_t = 10, conflicts_with = "trace")]
    pub differences: usize,
}

/// What a builder may attend to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GrantArg {
    /// Every key
    Exact,
    /// Part of the context, by whole blocks
    Subset,
}

/// How a trace is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    /// CSV with TIMESTAMP, ContextTokens, GeneratedTokens
    Azure,
    /// JSON lines with timestamp, input_length, output_length, hash_ids
    Mooncake,
}

impl FormatArg {
    /// As the reader of traces calls it.
    pub fn format(self) -> TraceFormat {
        match self {
            FormatArg::Azure => TraceFormat::Azure,
            FormatArg::Mooncake => TraceFormat::Mooncake,
        }
    }
}

#[derive(Debug, Args)]
pub struct TraceArgs {
    /// How the trace is written [default: its first line tells]
    #[arg(long, value_enum, requires = "trace")]
    pub format: Option<FormatArg>,

    /// The attention backend of every layer [default: the builder's, or FLASH_ATTN]
    #[arg(long, value_name = "NAME", requires = "trace")]
    pub backend: Option<String>,

    /// How much faster than in the trace requests arrive: 0.000001 to 1000000
    #[arg(long, value_name = "X", default_value_t = 1.0, requires = "trace")]
    pub speed: f64,

    /// Requests of the trace, at most
    #[arg(long, value_name = "N", requires = "trace")]
    pub max_requests: Option<usize>,

    /// Tokens of one KV cache block
    #[arg(long, value_name = "N", default_value_t = 16, requires = "trace")]
    pub block_size: usize,

    /// Requests that run at the same time, at most
    #[arg(long, value_name = "N", default_value_t = 256, requires = "trace")]
    pub max_num_seqs: usize,

    /// Tokens of one step, at most
    #[arg(long, value_name = "N", default_value_t = 8192, requires = "trace")]
    pub max_num_batched_tokens: usize,

    /// KV cache blocks [default: room for 432,000 tokens, what an H100 has beside an 8-billion-parameter model]
    #[arg(long, value_name = "N", requires = "trace")]
    pub num_gpu_blocks_override: Option<usize>,

    /// Do not reuse the blocks of equal prefixes
    #[arg(long, requires = "trace")]
    pub no_enable_prefix_caching: bool,

    /// Record the steps in this directory, as `generate --record` does
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, requires = "trace")]
    pub record: Option<PathBuf>,
}

pub fn run(arguments: &Replay) -> Result<(), Failure> {
    let candidate = arguments
        .builder
        .as_deref()
        .map(|name| candidate(name, arguments))
        .transpose()?;
    match (&arguments.recording, &arguments.trace) {
        (_, Some(trace)) => traffic::run(arguments, trace, candidate),
        (Some(recording), None) => recording::run(arguments, recording, candidate.as_ref()),
        // clap asks for one of them.
        (None, None) => Err(Failure::new(
            Exit::Usage,
            "give a recording, or a trace with --trace",
        )),
    }
}

/// A component by its name in this binary, or by its path.
fn candidate(name: &str, arguments: &Replay) -> Result<Candidate, Failure> {
    let options = &arguments.builder_option;
    let (bytes, origin) = match timetable_reference::component(name) {
        Some(component) => (component.bytes.to_vec(), format!("embedded {name}")),
        None => (read_component(Path::new(name))?, name.to_owned()),
    };
    Ok(Candidate {
        bytes,
        origin,
        options: (!options.is_empty()).then(|| options.clone()),
        grant: arguments.of_recording.grant.map(|grant| match grant {
            GrantArg::Exact => Grant::Exact,
            GrantArg::Subset => Grant::Subset,
        }),
    })
}

/// What was recorded, for people.
pub fn recorded(figures: &RecorderFigures) -> String {
    let RecorderFigures {
        steps,
        written,
        left_out,
        bytes,
        segments_removed,
        stopped,
    } = figures;
    let mut text = format!("recorded {written} of {steps} steps, {bytes} bytes in all");
    if *left_out > 0 {
        text.push_str(&format!(", {left_out} left out"));
    }
    if *segments_removed > 0 {
        text.push_str(&format!(
            ", {segments_removed} older segments removed to keep the bound"
        ));
    }
    if let Some(stopped) = stopped {
        text.push_str(&format!("; {stopped}"));
    }
    text
}

/// Nanoseconds as microseconds, for people.
fn us(nanoseconds: Option<u64>) -> String {
    nanoseconds.map_or_else(|| "–".to_owned(), |ns| format!("{:.1}", ns as f64 / 1e3))
}

fn count(number: Option<u64>) -> String {
    number.map_or_else(|| "–".to_owned(), |number| number.to_string())
}
