//! `replay-bundle`: a builder's fault again, from its bundle, on this machine.

use std::fmt::Write;
use std::io::Read;

use serde_json::json;
use timetable_sandbox::{FaultBundle, MAX_BUNDLE_BYTES, Outcome, Replay, WrittenBy};

use super::{print, print_json};
use crate::cli::ReplayBundle;
use crate::exit::{Exit, Failure};

pub fn run(arguments: &ReplayBundle) -> Result<(), Failure> {
    let wrong = |what: &dyn std::fmt::Display| {
        Failure::new(
            Exit::BadInput,
            format!("bundle {}: {what}", arguments.path.display()),
        )
    };
    let bytes = read(&arguments.path).map_err(|what| wrong(&what))?;
    let bundle = FaultBundle::from_bytes(&bytes).map_err(|error| wrong(&error))?;
    drop(bytes);
    let replay = bundle.replay().map_err(|error| wrong(&error))?;
    if arguments.json {
        print_json(&report(&bundle, &replay))?;
    } else {
        print(text(&bundle, &replay).as_bytes())?;
    }
    match replay.outcome {
        Outcome::Reproduced | Outcome::DoesNotReplay => Ok(()),
        Outcome::NotReproduced => Err(Failure::new(
            Exit::Failure,
            format!(
                "bundle {}: the fault did not happen again: {}",
                arguments.path.display(),
                bundle.header.fault
            ),
        )),
    }
}

fn read(path: &std::path::Path) -> Result<Vec<u8>, String> {
    let cannot = |error: std::io::Error| {
        format!("cannot be read ({error}); give the path of a bundle (.ttfault)")
    };
    // Asked before it is opened: opening a pipe would wait for its other end.
    if !std::fs::metadata(path).map_err(cannot)?.is_file() {
        return Err("is not a regular file; give the path of a bundle (.ttfault)".to_owned());
    }
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_BUNDLE_BYTES + 1).read_to_end(&mut bytes))
        .map_err(cannot)?;
    if bytes.len() as u64 > MAX_BUNDLE_BYTES {
        return Err(format!(
            "has more than the {MAX_BUNDLE_BYTES} bytes that a bundle may have"
        ));
    }
    Ok(bytes)
}

fn report(bundle: &FaultBundle, replay: &Replay) -> serde_json::Value {
    let header = &bundle.header;
    json!({
        "bundle": {
            "group": header.group,
            "family": header.family,
            "version": header.version,
            "component": header.component,
            "component_bytes": bundle.component.len(),
            "name": header.name,
            "origin": header.origin,
            "unix_time": header.unix_time,
            "written_by": header.written_by,
            "fault": header.fault,
            "call": header.call,
            "instance_calls": header.instance_calls,
            "options": header.config.options,
            "has_step": header.step.is_some(),
            "has_metadata": header.metadata.is_some(),
        },
        "here": WrittenBy::here(),
        "replay": replay,
    })
}

fn text(bundle: &FaultBundle, replay: &Replay) -> String {
    let header = &bundle.header;
    let mut text = String::new();
    let name = match header.name.as_str() {
        "" => "a builder that was never constructed",
        name => name,
    };
    let by = |by: &WrittenBy| format!("wasmtime {} on {} ({})", by.wasmtime, by.cpu, by.arch);
    let here = match &replay.here {
        Some(fault) => fault.to_string(),
        None => "nothing was wrong".to_owned(),
    };
    let outcome = match replay.outcome {
        Outcome::Reproduced => "reproduced",
        Outcome::NotReproduced => "not reproduced",
        Outcome::DoesNotReplay => "does not replay",
    };
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{}: {name}, version {}, from {}",
        header.group,
        header.version,
        if header.origin.is_empty() {
            "?"
        } else {
            &header.origin
        }
    );
    let _ = writeln!(text, "there: {}; {}", header.fault, by(&header.written_by));
    let _ = writeln!(text, "here:  {here}; {}", by(&WrittenBy::here()));
    let _ = writeln!(
        text,
        "{outcome}, in call {} of a fresh instance",
        replay.calls
    );
    if let Some(same) = replay.same_metadata {
        let _ = writeln!(
            text,
            "its metadata is {} what the bundle has",
            if same { "bit for bit" } else { "not" }
        );
    }
    for remark in &replay.remarks {
        let _ = writeln!(text, "note: {remark}");
    }
    text
}
