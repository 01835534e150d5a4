//! `bench serve`: a server under load.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, ValueHint};
use serde_json::json;
use timetable_load::{
    ChildServer, Client, ClientOptions, Limits, Outcome, Quantiles, Recorder, Report, Request,
    Scale, ServedModel, Traffic, closed_loop, open_loop,
};
use timetable_record::trace::Trace;

use super::super::progress::Progress;
use super::super::replay::FormatArg;
use super::super::table::table;
use super::super::{print, print_json};
use crate::exit::{Exit, Failure};

/// How long clients go on where nobody says it.
const CLIENTS_DURATION: Duration = Duration::from_secs(30);
/// How long a model may take to load.
const START: Duration = Duration::from_secs(600);
/// How long a server of ours may take to end.
const STOP: Duration = Duration::from_secs(30);

#[derive(Debug, Args)]
pub struct BenchServe {
    /// The server, of any OpenAI-compatible kind
    #[arg(
        long,
        value_name = "URL",
        required_unless_present = "model",
        conflicts_with = "model"
    )]
    pub url: Option<String>,

    /// Start a server of this model for as long as it is measured
    #[arg(short, long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub model: Option<PathBuf>,

    /// More flags for that server, as `timetable serve` has them
    #[arg(last = true, value_name = "FLAGS", requires = "model")]
    pub serve_flags: Vec<String>,

    /// What requests call the model [default: the first that the server lists]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,

    /// Sent with each request
    #[arg(
        long,
        value_name = "KEY",
        env = "TIMETABLE_API_KEY",
        hide_env_values = true
    )]
    pub api_key: Option<String>,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,

    #[command(flatten, next_help_heading = "Requests")]
    pub requests: RequestArgs,

    #[command(flatten, next_help_heading = "Limits")]
    pub limits: LimitArgs,
}

#[derive(Debug, Args)]
pub struct RequestArgs {
    /// A public request trace (Azure's CSV, Mooncake's JSON lines): lengths, shared prefixes, and unless --clients is given, arrivals
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, required_unless_present = "clients")]
    pub trace: Option<PathBuf>,

    /// How the trace is written [default: its first line tells]
    #[arg(long, value_enum, requires = "trace")]
    pub format: Option<FormatArg>,

    /// Clients, each of which sends its next request when it has its answer
    #[arg(long, value_name = "N")]
    pub clients: Option<usize>,

    /// How much faster than in the trace requests arrive: 0.000001 to 1000000
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        conflicts_with = "clients"
    )]
    pub rate_scale: f64,

    /// Share of the trace's lengths that is left; what prompts share is shortened alike
    #[arg(long, value_name = "X", default_value_t = 1.0, requires = "trace")]
    pub length_scale: f64,

    /// Tokens of a prompt, without a trace
    #[arg(
        long,
        value_name = "N",
        default_value_t = 128,
        conflicts_with = "trace"
    )]
    pub random_input_len: usize,

    /// Tokens of an answer, without a trace
    #[arg(long, value_name = "N", default_value_t = 64, conflicts_with = "trace")]
    pub random_output_len: usize,

    /// Tokens of a prompt, at most [default: what the server's max_model_len leaves room for]
    #[arg(long, value_name = "N")]
    pub max_input_len: Option<usize>,

    /// Tokens of an answer, at most [default: half of the server's max_model_len]
    #[arg(long, value_name = "N")]
    pub max_output_len: Option<usize>,

    /// Token ids of prompts are below this
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub vocab_size: u32,
}

#[derive(Debug, Args)]
pub struct LimitArgs {
    /// Requests in all [default: as many as the trace has]
    #[arg(long, value_name = "N")]
    pub max_requests: Option<usize>,

    /// After so long no more requests are sent [default: 30 with --clients alone]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub duration: Option<Duration>,

    /// Requests at once, at most; later ones of a trace wait
    #[arg(
        long,
        value_name = "N",
        default_value_t = 512,
        conflicts_with = "clients"
    )]
    pub max_concurrency: usize,

    /// For one request, until its answer ends; then it has failed
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub timeout: Duration,

    /// Attempts after the first, each when a busy server asks for it; 0: being refused is a failure
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub retries: u32,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.parse().ok();
    let seconds = seconds.filter(|seconds| (0.001..=1e6).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| format!("`{text}`: give a number of seconds from 0.001 to 1000000"))
}

pub fn run(arguments: &BenchServe) -> Result<(), Failure> {
    let RequestArgs { clients, .. } = arguments.requests;
    for (flag, given) in [
        ("--clients", clients),
        ("--max-requests", arguments.limits.max_requests),
        ("--max-concurrency", Some(arguments.limits.max_concurrency)),
    ] {
        if given == Some(0) {
            return Err(Failure::new(
                Exit::Usage,
                format!("{flag} 0: give 1 or more"),
            ));
        }
    }
    // What can be refused at once is refused before a model is loaded.
    let trace = trace(arguments)?;
    traffic(arguments, trace.clone(), None)?;
    let progress = Progress::start("", !arguments.json);
    let server = match &arguments.model {
        Some(model) => {
            progress.next(&format!("loading {}", model.display()));
            Some(start(model, &arguments.serve_flags)?)
        }
        None => None,
    };
    let url = match (&server, &arguments.url) {
        (Some(server), _) => server.url(),
        (None, Some(url)) => url,
        // clap asks for one of them.
        (None, None) => return Err(Failure::new(Exit::Usage, "give --url or --model")),
    };
    let options = ClientOptions {
        api_key: arguments.api_key.as_deref().map(Arc::from),
        request_timeout: arguments.limits.timeout,
        max_retries: arguments.limits.retries,
        ..ClientOptions::default()
    };
    let client = Client::new(url, options).map_err(Failure::of(Exit::Usage))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::of(Exit::Failure))?;
    let model = model(
        arguments,
        runtime
            .block_on(client.models())
            .map_err(Failure::of(Exit::Unreachable))?,
    )?;
    let traffic = traffic(arguments, trace, model.max_model_len)?;
    let client = client.with_model(&model.id);
    progress.next("");
    let (recorder, elapsed) = runtime.block_on(send(arguments, &client, &traffic, &progress));
    progress.finish();
    let report = recorder.report(elapsed);
    let cut = traffic.cut();
    if arguments.json {
        let mut value = json!(report);
        value["url"] = json!(url);
        value["model"] = json!(model.id);
        value["trace"] = json!(arguments.requests.trace);
        value["clients"] = json!(clients);
        value["rate_scale"] = json!(clients.is_none().then_some(arguments.requests.rate_scale));
        value["length_scale"] = json!(arguments.requests.length_scale);
        value["cut_requests"] = json!(cut);
        print_json(&value)?;
    } else {
        let requests = match cut {
            0 => String::new(),
            cut => format!("; {cut} of the {} requests are cut", traffic.len()),
        };
        let about = format!("{url}, {}{requests}\n", model.id);
        print(text(&about, &report).as_bytes())?;
    }
    if let Some(server) = server {
        server.stop(STOP);
    }
    match (report.completed, report.error_examples.iter().next()) {
        (0, Some((kind, message))) => Err(Failure::new(
            Exit::Failure,
            format!("no request was answered; {kind}: {message}"),
        )),
        _ => Ok(()),
    }
}

fn trace(arguments: &BenchServe) -> Result<Option<Trace>, Failure> {
    let of = &arguments.requests;
    let format = of.format.map(FormatArg::format);
    // Clients go on after the last request with the first one's lengths: all of the trace is theirs.
    let most = arguments.limits.max_requests;
    let read = |path: &PathBuf| Trace::read(path, format, most);
    let trace = of.trace.as_ref().map(read).transpose();
    trace.map_err(Failure::of(Exit::BadInput))
}

fn traffic(
    arguments: &BenchServe,
    trace: Option<Trace>,
    max_model_len: Option<usize>,
) -> Result<Traffic, Failure> {
    let of = &arguments.requests;
    let scale = Scale {
        rate: of.rate_scale,
        length: of.length_scale,
        max_input_len: of.max_input_len.unwrap_or(usize::MAX),
        max_output_len: of.max_output_len.unwrap_or(usize::MAX),
        max_model_len: max_model_len.unwrap_or(usize::MAX),
        vocab_size: of.vocab_size,
    };
    let traffic = match trace {
        Some(trace) => Traffic::of_trace(trace, scale),
        None => Traffic::uniform(of.random_input_len, of.random_output_len, scale),
    };
    traffic.map_err(Failure::of(Exit::Usage))
}

/// `timetable serve` of the model, at a free port of this machine.
fn start(model: &Path, flags: &[String]) -> Result<ChildServer, Failure> {
    let program = std::env::current_exe().map_err(|error| {
        Failure::new(
            Exit::Failure,
            format!(
                "the path of this program is not known ({error}); start a server and give its --url"
            ),
        )
    })?;
    let mut command = Command::new(program);
    command
        .arg("serve")
        .arg("--model")
        .arg(model)
        .args(["--listen", "127.0.0.1:0", "--admin", "none"])
        .args(flags);
    ChildServer::start(command, START).map_err(Failure::of(Exit::BadInput))
}

/// The model that is asked for.
fn model(arguments: &BenchServe, served: Vec<ServedModel>) -> Result<ServedModel, Failure> {
    let known: Vec<String> = served.iter().map(|model| model.id.clone()).collect();
    let mut served = served.into_iter();
    match &arguments.served_model_name {
        None => served.next(),
        Some(name) => served.find(|model| model.id == *name),
    }
    .ok_or_else(|| {
        let name = arguments.served_model_name.as_deref().unwrap_or_default();
        let known = known.join(", ");
        Failure::new(
            Exit::BadInput,
            format!("--served-model-name {name}: the server has {known}"),
        )
    })
}

async fn send(
    arguments: &BenchServe,
    client: &Client,
    traffic: &Traffic,
    progress: &Progress,
) -> (Recorder, Duration) {
    let of_trace = arguments.requests.trace.is_some();
    let limits = Limits {
        max_requests: arguments
            .limits
            .max_requests
            .or((of_trace && arguments.limits.duration.is_none()).then_some(traffic.len())),
        duration: arguments
            .limits
            .duration
            .or((!of_trace && arguments.limits.max_requests.is_none()).then_some(CLIENTS_DURATION)),
    };
    let request = |number: usize| {
        let (prompt, max_tokens) = traffic.request(number);
        Request {
            prompt,
            max_tokens,
            ..Request::default()
        }
    };
    let mut recorder = Recorder::default();
    let mut said = Instant::now();
    let mut seen = |outcome: &Outcome| {
        recorder.add(outcome);
        if said.elapsed() > Duration::from_millis(100) {
            said = Instant::now();
            let (completed, failed, _) = recorder.ended();
            let of = limits
                .max_requests
                .map_or_else(String::new, |most| format!(" of {most}"));
            progress.note(format!("{completed}{of} answered, {failed} failed"));
        }
    };
    let elapsed = match arguments.requests.clients {
        Some(clients) => {
            closed_loop(
                client,
                clients,
                limits,
                |_, number| request(number),
                |_, _, outcome| seen(&outcome),
            )
            .await
        }
        None => {
            let arrivals =
                (0..traffic.len()).map(|number| (traffic.arrival(number), request(number)));
            let most = arguments.limits.max_concurrency;
            open_loop(client, arrivals, most, limits, |_, outcome| seen(&outcome)).await
        }
    };
    (recorder, elapsed)
}

fn text(about: &str, report: &Report) -> String {
    let mut text = about.to_owned();
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{} answered, {} failed in {:.1} s: {:.2} requests/s, {:.1} output tokens/s ({} prompt tokens, {} output tokens)",
        report.completed,
        report.failed,
        report.duration,
        report.request_throughput,
        report.output_throughput,
        report.total_input_tokens,
        report.total_output_tokens,
    );
    if report.retries > 0 {
        let _ = writeln!(text, "sent again after being refused: {}", report.retries);
    }
    let row = |name: &str, of: &Quantiles| {
        let ms = [of.mean, of.p50, of.p90, of.p99, of.max].map(|ms| format!("{ms:.2}"));
        let mut cells = vec![name.to_owned()];
        cells.extend(match of.count {
            0 => std::array::from_fn(|_| "–".to_owned()),
            _ => ms,
        });
        cells
    };
    text.push_str(&table(
        &["MILLISECONDS", "MEAN", "P50", "P90", "P99", "MAX"],
        &[
            row("TTFT", &report.ttft_ms),
            row("TPOT", &report.tpot_ms),
            row("ITL", &report.itl_ms),
            row("E2E", &report.e2e_ms),
        ],
    ));
    for (kind, count) in &report.errors {
        let first = report.error_examples.get(kind).map_or("", String::as_str);
        let _ = writeln!(text, "failed, {kind}: {count}; the first: {first}");
    }
    text
}
