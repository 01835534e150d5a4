//! The server under load: many streaming clients, some of which hang up, while everybody's builder is replaced every second and one
//! tenant's misbehaves. No response may be wrong or lost, no block may leak, and memory must not grow.
//!
//! These are claims, not timings: if one does not hold the program fails. `TIMETABLE_PROGRAM` is the server's program, else it is
//! looked for beside this one; `TIMETABLE_SOAK_SECONDS` and `TIMETABLE_SOAK_CLIENTS` are instead of 120 and 200.

mod host;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use serde_json::Value;
use timetable_load::{
    Client, ClientOptions, End, Limits, Outcome, Recorder, Report, Request, closed_loop,
};

use self::host::{Host, KEY, KEY_OF_CHAOS};
use super::Row;

const SECONDS: u64 = 120;
const CLIENTS: usize = 200;
/// Requests that differ.
const KINDS: usize = 64;
/// A client of so many hangs up.
const LEAVES: usize = 10;
/// A client of so many is of the tenant whose builder misbehaves.
const OF_CHAOS: usize = 8;
const BETWEEN_RELOADS: Duration = Duration::from_secs(1);
const BETWEEN_SAMPLES: Duration = Duration::from_millis(100);
/// How long blocks of clients that hung up may take to be free.
const SETTLE: Duration = Duration::from_secs(30);
const MOST_GROWTH: f64 = 1.05;

/// What to do.
pub struct Soak {
    /// The binary `timetable`.
    pub program: PathBuf,
    /// Clients at once.
    pub clients: usize,
    /// How long they go on once all are warm.
    pub duration: Duration,
}

/// What it showed.
#[derive(Debug)]
pub struct SoakReport {
    /// Rates and latencies.
    pub report: Report,
    /// Whole answers that differ from the same request's alone, and parts of answers that are no part of it.
    pub wrong: u64,
    /// What the first of them was.
    pub first_wrong: Option<String>,
    /// Requests of the tenant whose builder misbehaves.
    pub of_chaos: u64,
    /// Versions of everybody's builder that got into service.
    pub reloads: u64,
    /// Why others did not.
    pub refused_reloads: Vec<String>,
    /// Faults of the tenant's builder.
    pub faults: u64,
    /// Steps in which requests failed.
    pub failed_steps: u64,
    /// Times that a request lost its blocks to another.
    pub preemptions: u64,
    /// Share of the blocks that were held in the end.
    pub blocks_left: f64,
    /// Resident memory in KiB: medians of the first and the last quarter of the time.
    pub resident_kib: [u64; 2],
    /// The server's exit status in the end.
    pub ended_well: bool,
    /// What it said last.
    pub said: String,
}

impl SoakReport {
    /// Responses that never came, by kind.
    fn lost(&self) -> u64 {
        self.report.failed
    }

    fn growth(&self) -> f64 {
        self.resident_kib[1] as f64 / self.resident_kib[0].max(1) as f64
    }

    /// The claims, each with whether it holds and with the figure.
    pub fn claims(&self) -> Vec<(bool, String)> {
        let report = &self.report;
        let first = |text: Option<&String>| {
            text.map_or_else(String::new, |text| format!(", the first: {text}"))
        };
        vec![
            (
                self.wrong == 0,
                format!("{} wrong{}", self.wrong, first(self.first_wrong.as_ref())),
            ),
            (
                self.lost() == 0,
                format!(
                    "{} lost: {:?}{}",
                    self.lost(),
                    report.errors,
                    first(report.error_examples.values().next())
                ),
            ),
            (
                report.completed > 0,
                format!("{} whole answers", report.completed),
            ),
            (
                report.hung_up > 0,
                format!("{} clients hung up", report.hung_up),
            ),
            (
                self.of_chaos > 0 && self.faults > 0,
                format!("{} faults under {} requests", self.faults, self.of_chaos),
            ),
            (
                self.reloads > 0 && self.refused_reloads.is_empty(),
                format!(
                    "{} reloads in service, {} not{}",
                    self.reloads,
                    self.refused_reloads.len(),
                    first(self.refused_reloads.first())
                ),
            ),
            (
                self.failed_steps == 0,
                format!("{} failed steps", self.failed_steps),
            ),
            (
                self.blocks_left == 0.0,
                format!("{} of the blocks held in the end", self.blocks_left),
            ),
            (
                self.resident_kib[0] > 0 && self.growth() <= MOST_GROWTH,
                format!("resident memory {:?} KiB", self.resident_kib),
            ),
            (
                self.ended_well,
                format!("the server's end, after it said: {}", self.said),
            ),
        ]
    }
}

pub(super) fn measure() -> Vec<Row> {
    const NAME: &str = "serve/responses wrong or lost";
    let soak = match from_environment() {
        Ok(soak) => soak,
        // Not measured is not shown to hold.
        Err(why) => return vec![Row::missing(NAME, "responses", &why).broken(true)],
    };
    match soak.run() {
        Ok(report) => rows(&soak, &report),
        Err(why) => vec![Row::missing(NAME, "responses", &why).broken(true)],
    }
}

fn rows(soak: &Soak, soaked: &SoakReport) -> Vec<Row> {
    let report = &soaked.report;
    let claims = soaked.claims();
    let mut rows = vec![
        Row::new("serve/responses wrong or lost", (soaked.wrong + soaked.lost()) as f64, "responses")
            .at_most_none()
            .note(format!(
                "of {} by {} clients in {:.0} s, each compared with the same request alone; {} hung up on, {} reloads, {} faults under {} \
                 requests, {} preemptions",
                report.completed + report.failed + report.hung_up,
                soak.clients,
                report.duration,
                report.hung_up,
                soaked.reloads,
                soaked.faults,
                soaked.of_chaos,
                soaked.preemptions,
            )),
        Row::new("serve/share of the KV blocks held in the end", soaked.blocks_left, "").at_most_none(),
        Row::new("serve/resident memory, last quarter", soaked.resident_kib[1] as f64 / 1024.0, "MiB").against(
            soaked.resident_kib[0] as f64 / 1024.0,
            format!("first quarter: {:.1} MiB; bar: at most {MOST_GROWTH} ×", soaked.resident_kib[0] as f64 / 1024.0),
        ),
        Row::new("serve/whole answers", report.request_throughput, "/s")
            .note(format!("{:.0} output tokens/s", report.output_throughput)),
    ];
    for (name, of) in [
        ("time to first token", &report.ttft_ms),
        ("time per output token", &report.tpot_ms),
    ] {
        let note = format!(
            "p90 {:.1}, p99 {:.1}, longest {:.1}",
            of.p90, of.p99, of.max
        );
        rows.push(Row::new(format!("serve/{name}, median"), of.p50, "ms").note(note));
    }
    for (_, what) in claims.iter().filter(|(holds, _)| !holds) {
        rows.push(Row::missing("serve/a claim that does not hold", "", what).broken(true));
    }
    rows
}

fn from_environment() -> Result<Soak, String> {
    let number = |name: &str, default: u64| match std::env::var(name) {
        Ok(text) => text
            .parse()
            .ok()
            .filter(|number| (1..=1_000_000).contains(number))
            .ok_or_else(|| format!("{name} is {text:?}; give a whole number above 0")),
        Err(_) => Ok(default),
    };
    let beside = || Some(std::env::current_exe().ok()?.with_file_name("timetable"));
    let program = std::env::var_os("TIMETABLE_PROGRAM").map(PathBuf::from);
    let program = program.or_else(beside).filter(|path| path.is_file());
    Ok(Soak {
        program: program
            .ok_or("the binary `timetable` is not there; `cargo xtask bench serve` builds it")?,
        clients: number("TIMETABLE_SOAK_CLIENTS", CLIENTS as u64)? as usize,
        duration: Duration::from_secs(number("TIMETABLE_SOAK_SECONDS", SECONDS)?),
    })
}

/// What each kind of request asks for: prompts of up to 192 tokens, half of which begin alike, and answers of 16 to 111.
fn request(kind: usize) -> Request {
    let kind = kind % KINDS;
    let own = |at: usize| 5 + (at * 31 + kind * 97) % 500;
    let shared = |at: usize| 5 + at * 7 % 500;
    let len = 3 + kind * 3;
    let prompt = (0..len).map(|at| {
        if kind.is_multiple_of(2) && at < 64 {
            shared(at)
        } else {
            own(at)
        }
    });
    Request {
        prompt: prompt.map(|token| token as u32).collect(),
        max_tokens: 16 + kind * 37 % 96,
        api_key: Some(Arc::from(KEY)),
        hang_up_after: None,
    }
}

/// The request that is the n-th of all, of the client at this place.
fn of_client(place: usize, number: usize) -> Request {
    let kind = number * 29 + place;
    let chaos = place % OF_CHAOS == 1;
    Request {
        api_key: Some(Arc::from(if chaos { KEY_OF_CHAOS } else { KEY })),
        hang_up_after: (place % LEAVES == 3).then_some(1 + number % 16),
        ..request(kind)
    }
}

impl Soak {
    /// Runs it.
    ///
    /// # Errors
    /// If the server does not start, or does not answer while it is idle. What it does under load is in the report.
    pub fn run(&self) -> Result<SoakReport, String> {
        let host = Host::start(&self.program)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime = runtime.map_err(|error| format!("no runtime: {error}"))?;
        let options = ClientOptions {
            api_key: Some(Arc::from(KEY)),
            request_timeout: Duration::from_secs(120),
            ..ClientOptions::default()
        };
        let client = Client::new(host.url(), options).map_err(|error| error.to_string())?;
        let models = runtime
            .block_on(client.models())
            .map_err(|error| error.to_string())?;
        let client = client.with_model(&models[0].id);
        let alone = runtime.block_on(alone(&client))?;

        let warm = (self.duration / 4).min(Duration::from_secs(15));
        let done = AtomicBool::new(false);
        let mut judge = Judge::new(&alone);
        let (mut elapsed, mut reloads, mut samples) =
            (Duration::ZERO, Reloads::default(), Vec::new());
        std::thread::scope(|scope| {
            let reloading = scope.spawn(|| reload(&host, &done));
            let sampling = scope.spawn(|| sample(&host, warm, &done));
            let limits = Limits {
                max_requests: None,
                duration: Some(warm + self.duration),
            };
            let seen = |_: usize, request: &Request, outcome: Outcome| judge.see(request, &outcome);
            elapsed = runtime.block_on(closed_loop(&client, self.clients, limits, of_client, seen));
            done.store(true, Relaxed);
            reloads = reloading.join().unwrap_or_default();
            samples = sampling.join().unwrap_or_default();
        });
        let table = settled(&host)?;
        let builders = table["builders"].as_array().into_iter().flatten();
        let of_chaos = builders.filter(|builder| builder["tenant"] == "chaos");
        let faults = of_chaos.map(|builder| sum(&builder["all_faults"])).sum();
        let counts = |name: &str| table["engine"][name].as_u64().unwrap_or(u64::MAX);
        let quarter = samples.len() / 4;
        let resident_kib = [&samples[..quarter], &samples[samples.len() - quarter..]].map(median);
        let (failed_steps, preemptions) = (counts("failed_steps"), counts("preemptions"));
        let said = host.said();
        Ok(SoakReport {
            report: judge.recorder.report(elapsed),
            wrong: judge.wrong,
            first_wrong: judge.first_wrong,
            of_chaos: judge.of_chaos,
            reloads: reloads.taken,
            refused_reloads: reloads.refused,
            faults,
            failed_steps,
            preemptions,
            blocks_left: table["engine"]["kv_cache_usage"].as_f64().unwrap_or(1.0),
            resident_kib,
            ended_well: host.stop().is_some_and(|status| status.success()),
            said,
        })
    }
}

/// Each kind of request's answer while there is no other.
async fn alone(client: &Client) -> Result<BTreeMap<Vec<u32>, String>, String> {
    let mut answers = BTreeMap::new();
    for kind in 0..KINDS {
        let request = request(kind);
        let outcome = client.send(&request).await;
        if outcome.end != End::Complete || outcome.output_tokens != request.max_tokens as u64 {
            return Err(format!("request {kind} is not answered alone: {outcome:?}"));
        }
        answers.insert(request.prompt, outcome.text);
    }
    Ok(answers)
}

/// Compares answers.
struct Judge<'a> {
    alone: &'a BTreeMap<Vec<u32>, String>,
    recorder: Recorder,
    wrong: u64,
    first_wrong: Option<String>,
    of_chaos: u64,
}

impl<'a> Judge<'a> {
    fn new(alone: &'a BTreeMap<Vec<u32>, String>) -> Self {
        Self {
            alone,
            recorder: Recorder::default(),
            wrong: 0,
            first_wrong: None,
            of_chaos: 0,
        }
    }

    fn see(&mut self, request: &Request, outcome: &Outcome) {
        self.recorder.add(outcome);
        self.of_chaos += u64::from(request.api_key.as_deref() == Some(KEY_OF_CHAOS));
        let expected = &self.alone[&request.prompt];
        let right = match &outcome.end {
            End::Complete => {
                outcome.text == *expected
                    && outcome.output_tokens == request.max_tokens as u64
                    && outcome.finish_reason.as_deref() == Some("length")
            }
            End::HungUp | End::Failed(_) => expected.starts_with(&outcome.text),
        };
        if !right {
            self.wrong += 1;
            self.first_wrong.get_or_insert_with(|| {
                format!(
                    "{} tokens for {request:?}: {outcome:?}, alone it is {expected:?}",
                    outcome.output_tokens
                )
            });
        }
    }
}

#[derive(Debug, Default)]
struct Reloads {
    taken: u64,
    refused: Vec<String>,
}

/// Reloads everybody's builder every second, and gives the tenant's other ways to misbehave, until it is done.
fn reload(host: &Host, done: &AtomicBool) -> Reloads {
    let mut reloads = Reloads::default();
    for round in 0.. {
        let begun = Instant::now();
        match host.reload(round, done) {
            Ok(serves) => reloads.taken += u64::from(serves),
            Err(why) => reloads.refused.push(why),
        }
        // It may be refused: it misbehaves. Nobody waits for its version.
        drop(host.reload_chaos(round));
        while begun.elapsed() < BETWEEN_RELOADS {
            if done.load(Relaxed) {
                return reloads;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    reloads
}

/// Resident memory, from when everything is warm until it is done.
fn sample(host: &Host, warm: Duration, done: &AtomicBool) -> Vec<u64> {
    let begun = Instant::now();
    let mut samples = Vec::new();
    while !done.load(Relaxed) {
        if begun.elapsed() >= warm {
            samples.extend(host.resident_kib());
        }
        std::thread::sleep(BETWEEN_SAMPLES);
    }
    samples
}

/// The table of builders, once nothing runs and no block is held, or time is up.
fn settled(host: &Host) -> Result<Value, String> {
    let deadline = Instant::now() + SETTLE;
    loop {
        let table = host.builders()?;
        let engine = &table["engine"];
        let idle = engine["running"] == 0 && engine["waiting"] == 0;
        let free = engine["kv_cache_usage"].as_f64() == Some(0.0);
        if (idle && free) || Instant::now() > deadline {
            return Ok(table);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn sum(counts: &Value) -> u64 {
    let counts = counts.as_object().into_iter().flatten();
    counts.filter_map(|(_, count)| count.as_u64()).sum()
}

/// 0 without samples.
fn median(samples: &[u64]) -> u64 {
    let mut samples = samples.to_vec();
    samples.sort_unstable();
    samples.get(samples.len() / 2).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use timetable_load::{End, Failure, FailureKind, Outcome, Recorder};

    use super::{Judge, KINDS, SoakReport, of_client, request};

    fn outcome(end: End, text: &str, tokens: usize) -> Outcome {
        Outcome {
            end,
            text: text.to_owned(),
            finish_reason: Some("length".to_owned()),
            prompt_tokens: 3,
            output_tokens: tokens as u64,
            first_token: None,
            gaps: Vec::new(),
            elapsed: Duration::from_millis(1),
            retries: 0,
        }
    }

    fn good() -> SoakReport {
        let mut recorder = Recorder::default();
        recorder.add(&outcome(End::Complete, "", 1));
        recorder.add(&outcome(End::HungUp, "", 1));
        SoakReport {
            report: recorder.report(Duration::from_secs(1)),
            wrong: 0,
            first_wrong: None,
            of_chaos: 1,
            reloads: 1,
            refused_reloads: Vec::new(),
            faults: 1,
            failed_steps: 0,
            preemptions: 0,
            blocks_left: 0.0,
            resident_kib: [1000, 1050],
            ended_well: true,
            said: String::new(),
        }
    }

    #[test]
    fn an_answer_that_differs_in_anything_is_wrong() {
        let asked = request(0);
        let alone = BTreeMap::from([(asked.prompt.clone(), "a b c".to_owned())]);
        let tokens = asked.max_tokens;
        let failure = Failure {
            kind: FailureKind::Timeout,
            message: String::new(),
        };
        for (end, text, tokens, wrong) in [
            (End::Complete, "a b c", tokens, 0),
            (End::Complete, "a b d", tokens, 1),
            (End::Complete, "a b", tokens, 1),
            (End::Complete, "a b c", tokens - 1, 1),
            (End::HungUp, "a b", 2, 0),
            (End::HungUp, "a d", 2, 1),
            (End::Failed(failure), "a", 1, 0),
        ] {
            let mut judge = Judge::new(&alone);
            judge.see(&asked, &outcome(end, text, tokens));
            assert_eq!(judge.wrong, wrong, "{text} {tokens}");
            assert_eq!(judge.first_wrong.is_some(), wrong > 0);
        }
    }

    #[test]
    fn each_claim_can_fail() {
        assert!(good().claims().iter().all(|(holds, _)| *holds));
        let lost = outcome(
            End::Failed(Failure {
                kind: FailureKind::BrokenStream,
                message: "gone".to_owned(),
            }),
            "",
            0,
        );
        let spoil: [fn(&mut SoakReport); 8] = [
            |report| report.wrong = 1,
            |report| report.faults = 0,
            |report| report.reloads = 0,
            |report| report.refused_reloads.push("refused".to_owned()),
            |report| report.failed_steps = 1,
            |report| report.blocks_left = 0.01,
            |report| report.resident_kib[1] = 1051,
            |report| report.ended_well = false,
        ];
        for (place, spoil) in spoil.iter().enumerate() {
            let mut report = good();
            spoil(&mut report);
            let broken = report.claims().into_iter().filter(|(holds, _)| !holds);
            assert_eq!(broken.count(), 1, "{place}");
        }
        let mut recorder = Recorder::default();
        recorder.add(&lost);
        let report = SoakReport {
            report: recorder.report(Duration::from_secs(1)),
            ..good()
        };
        // Lost, and neither whole answers nor hang-ups.
        assert_eq!(
            report.claims().iter().filter(|(holds, _)| !holds).count(),
            3
        );
    }

    #[test]
    fn clients_ask_for_every_kind_and_some_leave() {
        let mut prompts: Vec<_> = (0..KINDS).map(|kind| request(kind).prompt).collect();
        prompts.sort();
        prompts.dedup();
        assert_eq!(prompts.len(), KINDS);
        let sent: Vec<_> = (0..2_000)
            .map(|number| of_client(number % 200, number))
            .collect();
        assert!(sent.iter().all(|request| prompts.contains(&request.prompt)));
        assert!(
            sent.iter()
                .all(|request| request.prompt.len() + request.max_tokens < 512)
        );
        let leaving = sent
            .iter()
            .filter(|request| request.hang_up_after.is_some());
        assert_eq!(leaving.count(), 200);
    }
}
