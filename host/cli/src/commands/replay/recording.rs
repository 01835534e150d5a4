//! `replay DIR`: the recorded builders again, and another one beside them.

use std::fmt::Write;
use std::path::Path;

use serde_json::json;
use timetable_record::{
    BuilderReport, Candidate, Missing, Recording, ReplayError, ReplayOptions, ReplayReport, replay,
};
use timetable_sandbox::WrittenBy;

use super::super::progress::Progress;
use super::super::table::table;
use super::super::{print, print_json};
use super::{Replay, count, us};
use crate::exit::{Exit, Failure};

pub fn run(arguments: &Replay, path: &Path, candidate: Option<&Candidate>) -> Result<(), Failure> {
    if arguments.of_recording.limit == Some(0) {
        return Err(Failure::new(
            Exit::Usage,
            "--limit 0: give 1 or more, or leave it out for every step",
        ));
    }
    let recording = Recording::open(path).map_err(Failure::of(Exit::BadInput))?;
    let progress = Progress::start(&format!("replaying {}", path.display()), !arguments.json);
    let options = ReplayOptions {
        candidate,
        group: arguments.of_recording.group.as_deref(),
        limit: arguments.of_recording.limit,
        max_differences: arguments.of_recording.differences,
    };
    let report = replay(&recording, &options, |steps| {
        if steps.is_multiple_of(256) {
            progress.note(format!("replaying {}: {steps} steps", path.display()));
        }
    })
    .map_err(|error| match error {
        ReplayError::Recording(error) => Failure::new(Exit::BadInput, error),
        error @ ReplayError::Candidate { .. } => Failure::new(Exit::BadInput, error),
        error => Failure::new(
            Exit::BadInput,
            format!("recording {}: {error}", path.display()),
        ),
    })?;
    progress.finish();
    if arguments.json {
        let mut value = json!(report);
        value["written_by"] = json!(recording.written_by());
        value["here"] = json!(WrittenBy::here());
        value["reproduced"] = json!(report.reproduced());
        value["builder"] = json!(candidate.map(|candidate| &candidate.origin));
        print_json(&value)?;
    } else {
        print(text(path, &recording, candidate, &report).as_bytes())?;
    }
    judge(path, candidate, &report)
}

/// How the command ends.
fn judge(path: &Path, candidate: Option<&Candidate>, report: &ReplayReport) -> Result<(), Failure> {
    if report.steps == 0 {
        return Err(Failure::new(
            Exit::BadInput,
            format!(
                "recording {}: there are no steps in it, so nothing was compared; record a host while it serves requests",
                path.display()
            ),
        ));
    }
    if let (Some(candidate), Some(of)) = (candidate, &report.candidate) {
        let faults: u64 = of.faults.values().sum();
        let what = format!(
            "builder {} on recording {}: of {} steps {} are refused, {} differ in meaning, {faults} faulted",
            candidate.origin,
            path.display(),
            of.steps,
            of.refused,
            of.different
        );
        if of.refused > 0 {
            return Err(Failure::new(Exit::Refused, what));
        }
        if of.different > 0 || faults > 0 {
            return Err(Failure::new(Exit::Failure, what));
        }
    }
    if report.reproduced() {
        return Ok(());
    }
    let recorded = &report.recorded;
    let faults: u64 = report.recorded_faults.values().sum();
    let first = recorded.differences.first();
    Err(Failure::new(
        Exit::Failure,
        format!(
            "recording {}: {} of {} steps were built as recorded, and {} of {faults} faults happened again{}",
            path.display(),
            recorded.identical,
            recorded.steps,
            report.faults_again,
            first.map_or_else(String::new, |first| format!(
                "; the first is step {} of {}: {}",
                first.step, first.slot, first.what
            )),
        ),
    ))
}

fn text(
    path: &Path,
    recording: &Recording,
    candidate: Option<&Candidate>,
    report: &ReplayReport,
) -> String {
    let mut text = String::new();
    let by = recording.written_by();
    let slots: Vec<String> = report
        .slots
        .iter()
        .map(|(slot, steps)| format!("{slot} {steps}"))
        .collect();
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{}: {} steps ({}), {} served by the plain builder; written by timetable {}, wasmtime {} on {} ({})",
        path.display(),
        report.steps,
        slots.join(", "),
        report.plain_steps,
        by.timetable,
        by.wasmtime,
        by.cpu,
        by.arch
    );
    missing(&mut text, &report.missing);
    if !report.recorded_faults.is_empty() {
        let _ = writeln!(
            text,
            "faults in the recording: {}; {} happened again, {} are of kinds that do not replay",
            by_kind(&report.recorded_faults),
            report.faults_again,
            report.faults_that_do_not_replay
        );
    }
    let _ = writeln!(
        text,
        "digest of the metadata: {} recorded, {} built here",
        report.recorded_digest, report.digest
    );
    let mut rows = vec![row("recorded, again", &report.recorded)];
    if let (Some(candidate), Some(of)) = (candidate, &report.candidate) {
        rows.push(row(&candidate.origin, of));
    }
    text.push_str(&table(
        &[
            "BUILDER",
            "STEPS",
            "IDENTICAL",
            "SAME MEANING",
            "DIFFERENT",
            "REFUSED",
            "DECLINED",
            "FAULTS",
            "BUILD P50 µs",
            "P99 µs",
            "FUEL P50",
            "P99",
        ],
        &rows,
    ));
    for (name, of) in [
        ("recorded", Some(&report.recorded)),
        ("builder", report.candidate.as_ref()),
    ] {
        for difference in of.iter().flat_map(|of| &of.differences) {
            let _ = writeln!(
                text,
                "{name}, step {} of {}: {}",
                difference.step, difference.slot, difference.what
            );
        }
    }
    text
}

fn row(name: &str, of: &BuilderReport) -> Vec<String> {
    let faults: u64 = of.faults.values().sum();
    let cost = &of.cost;
    vec![
        name.to_owned(),
        of.steps.to_string(),
        of.identical.to_string(),
        of.same_meaning.to_string(),
        of.different.to_string(),
        of.refused.to_string(),
        of.declined.to_string(),
        faults.to_string(),
        us(cost.build_p50_ns),
        us(cost.build_p99_ns),
        count(cost.fuel_p50),
        count(cost.fuel_p99),
    ]
}

pub fn by_kind(faults: &std::collections::BTreeMap<&'static str, u64>) -> String {
    let faults: Vec<String> = faults
        .iter()
        .map(|(kind, count)| format!("{kind} {count}"))
        .collect();
    faults.join(", ")
}

fn missing(text: &mut String, missing: &Missing) {
    let Missing {
        left_out,
        removed,
        unfinished,
        not_ended,
    } = missing;
    let mut say = |what: String| {
        let _ = writeln!(text, "not there: {what}");
    };
    if *left_out > 0 {
        say(format!("{left_out} steps that the recorder left out"));
    }
    if *removed > 0 {
        say(format!(
            "{removed} steps before the first, whose segments made place"
        ));
    }
    for path in unfinished {
        say(format!(
            "the end of {}, which breaks off in a frame",
            path.display()
        ));
    }
    if *not_ended > 0 {
        say(format!(
            "the end of {not_ended} recordings: their hosts crashed, could not write any more, or still run"
        ));
    }
}
