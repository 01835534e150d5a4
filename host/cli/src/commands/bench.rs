//! `bench`: the CUDA kernels' figures on this machine's GPU, beside its ceilings and FlashInfer; `bench serve`: a server's.

mod gap;
mod serve;
mod small_model;

use clap::Subcommand;
use serde_json::json;
use timetable_selftest::bench::{self, Bench as Measured, BenchError, Options, Row};

use super::selftest::{fresh_seed, ordinal};
use super::table::table;
use super::{print, print_json};
use crate::cli::Bench;
use crate::exit::{Exit, Failure};

/// What the engine is needed for.
const GAP: &str = "gap";

/// What is measured, if not a GPU.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Send requests to a server, of a public request trace or of so many clients, and measure what comes back
    #[command(after_help = "\
Latencies are those of whole answers: TTFT is the time to the first token, TPOT an answer's mean time of a token after it, ITL the time
between two pieces of the stream, E2E that of the whole answer. What failed is counted by its kind.

Examples:
  timetable bench serve --model ./my-llama --clients 32 --duration 60
  timetable bench serve --url http://127.0.0.1:8000 --trace AzureLLMInferenceTrace_conv.csv --rate-scale 0.5 --max-requests 500
  timetable bench serve --model m.gguf --trace conversation_trace.jsonl --length-scale 0.05 --json -- --max-num-seqs 16")]
    Serve(Box<serve::BenchServe>),
}

pub fn run(arguments: &Bench) -> Result<(), Failure> {
    if let Some(BenchCommand::Serve(arguments)) = &arguments.command {
        return serve::run(arguments);
    }
    let mut known = bench::NAMES.to_vec();
    known.push(GAP);
    if let Some(unknown) = arguments
        .only
        .iter()
        .find(|name| !known.contains(&name.as_str()))
    {
        return Err(Failure::new(
            Exit::Usage,
            format!("--only {unknown}: give {}", known.join(", ")),
        ));
    }
    let options = Options {
        ordinal: ordinal(arguments.device, "bench")?,
        only: arguments.only.clone(),
        python: (!arguments.no_peer).then(|| arguments.python.clone()),
        seed: fresh_seed(),
    };
    let mut measured = bench::run(&options, |what| eprintln!("measuring {what}"))
        .map_err(|error| failure(&error))?;
    if options.wants(GAP) {
        eprintln!("measuring {GAP}");
        measured
            .rows
            .extend(gap::measure(options.ordinal, arguments.model.as_deref())?);
    }
    if arguments.json {
        return print_json(&json!(measured));
    }
    print(render(&measured).as_bytes())
}

fn failure(error: &BenchError) -> Failure {
    match error {
        BenchError::Device(_) => Failure::new(Exit::Device, error),
        BenchError::Builder(_) | BenchError::Step(_) => Failure::new(Exit::Failure, error),
    }
}

fn render(measured: &Measured) -> String {
    let mut text = format!(
        "{}, {} multiprocessors, driver for CUDA {}.{}\n",
        measured.device,
        measured.multiprocessors,
        measured.driver / 1000,
        measured.driver % 1000 / 10
    );
    if let Some(ceilings) = &measured.ceilings {
        text.push_str(&format!(
            "ceilings: copy {:.2} TB/s, bf16 matmul {:.0} TFLOP/s, an empty graph {:.1} µs\n",
            ceilings.copy_tb_s, ceilings.matmul_tflop_s, ceilings.empty_us
        ));
    }
    let peer = &measured.peer;
    text.push_str(&match (&peer.flashinfer, &peer.absent) {
        (Some(version), _) => format!(
            "FlashInfer {version}, PyTorch {}\n",
            peer.torch.as_deref().unwrap_or("?")
        ),
        (None, reason) => format!(
            "FlashInfer was not measured: {}\n",
            reason.as_deref().unwrap_or("it gave no answer")
        ),
    });
    let rows: Vec<Vec<String>> = measured.rows.iter().map(cells).collect();
    text.push_str(&table(
        &[
            "CASE",
            "BATCH",
            "CONTEXT",
            "µs",
            "ACHIEVED",
            "OF CEILING",
            "PEER µs",
            "RATIO",
            "BAR",
            "MET",
            "NOTE",
        ],
        &rows,
    ));
    for row in &peer.rows {
        if let Some(error) = &row.error {
            text.push_str(&format!(
                "FlashInfer {} {} x {} {}: {error}\n",
                row.kind, row.batch, row.context, row.backend
            ));
        } else if let (Some(us), "fa3") = (row.us, row.backend.as_str()) {
            text.push_str(&format!(
                "FlashInfer {} {} x {} with its FA3 kernels: {us:.1} µs\n",
                row.kind, row.batch, row.context
            ));
        }
    }
    text
}

fn cells(row: &Row) -> Vec<String> {
    let optional = |value: Option<String>| value.unwrap_or_default();
    vec![
        row.kind.to_owned(),
        row.batch.to_string(),
        row.context.to_string(),
        format!("{:.1}", row.us),
        optional(row.achieved.map(|achieved| match row.unit {
            "TB/s" => format!("{achieved:.2} TB/s"),
            unit => format!("{achieved:.0} {unit}"),
        })),
        optional(
            row.of_ceiling
                .map(|share| format!("{:.0} %", share * 100.0)),
        ),
        optional(row.peer_us.map(|us| format!("{us:.1}"))),
        optional(row.ratio.map(|ratio| format!("{ratio:.2}"))),
        optional(row.bar.map(|bar| bar.to_string())),
        optional(row.met.map(|met| if met { "yes" } else { "NO" }.to_owned())),
        row.note.clone(),
    ]
}
