//! One module a command.

mod ask;
pub mod backends;
pub mod bench;
pub mod build;
pub mod check;
pub mod componentize;
pub mod components;
pub mod config;
pub mod control;
pub mod explain_graphs;
pub mod generate;
pub mod new;
mod progress;
pub mod reload;
pub mod replay;
pub mod replay_bundle;
pub mod selftest;
pub mod serve;
mod setup;
mod signals;
mod table;
pub mod top;

use std::io::{Read, Write};

use clap::CommandFactory;
use timetable_engine::backend_name;
use timetable_types::Family;

use crate::exit::{Exit, Failure};

/// Prints a completion script.
pub fn completions(shell: clap_complete::Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(
        shell,
        &mut crate::cli::Cli::command(),
        "timetable",
        &mut script,
    );
    print(&script)
}

/// Writes to standard output. A reader that went away (`| head`) ends the output, quietly.
pub fn print(bytes: &[u8]) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::new(
            Exit::Failure,
            format!("standard output: cannot be written ({error})"),
        )),
        _ => Ok(()),
    }
}

/// Prints a value as one line of JSON.
pub fn print_json(value: &serde_json::Value) -> Result<(), Failure> {
    print(format!("{value}\n").as_bytes())
}

/// The name under which operators give and configure the builder of a group: its backend's, but for recurrent layers, whose types
/// share one.
pub fn builder_name(backend: &str, family: Family) -> &str {
    match family {
        Family::Mamba => backend_name(family),
        _ => backend,
    }
}

/// The embedded default component of a backend.
pub fn embedded(backend: &str) -> Result<&'static timetable_reference::Embedded, Failure> {
    let components = timetable_reference::components();
    components
        .iter()
        .find(|component| component.default && component.backend == backend)
        .ok_or_else(|| {
            let known: Vec<&str> = components
                .iter()
                .filter(|component| component.default)
                .map(|component| component.backend)
                .collect();
            Failure::new(
                Exit::BadInput,
                format!(
                    "backend `{backend}`: this binary has no builder for it; it has {}",
                    known.join(", ")
                ),
            )
        })
}

/// The bytes of a component file. Never more than a component may have, whatever the path leads to.
///
/// # Errors
/// It cannot be read, is not a regular file, or is too large.
pub fn read_component(path: &std::path::Path) -> Result<Vec<u8>, Failure> {
    let unusable = |what: String| {
        Failure::new(
            Exit::BadInput,
            format!(
                "component {}: {what}; give the path of a component (.wasm)",
                path.display()
            ),
        )
    };
    let cannot = |error: std::io::Error| unusable(format!("cannot be read ({error})"));
    let max = crate::admin::component_bytes_max();
    // Asked before it is opened: opening a pipe would wait for its other end.
    if !std::fs::metadata(path).map_err(cannot)?.is_file() {
        return Err(unusable("is not a regular file".to_owned()));
    }
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(max + 1).read_to_end(&mut bytes))
        .map_err(cannot)?;
    if bytes.len() as u64 > max {
        return Err(unusable(format!(
            "has more than the {max} bytes that a component may have"
        )));
    }
    Ok(bytes)
}
