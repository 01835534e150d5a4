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

/// The state directory's name for whom a builder builds: its family, with the backend where several builders share that, and the
/// tenant if it is one's own.
pub fn slot_name(builder: &str, family: Family, tenant: Option<&str>) -> String {
    let mut name = family.interface().to_owned();
    if family == Family::FlashMla {
        name = format!("{name}/{builder}");
    }
    match tenant {
        Some(tenant) => format!("{name}@{tenant}"),
        None => name,
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use timetable_sandbox::{SlotState, StateDir};

    use super::{builder_name, slot_name};

    #[test]
    fn each_builder_has_a_slot_of_its_own_in_the_state_directory() {
        let components = timetable_reference::components().iter();
        let defaults: Vec<_> = components.filter(|component| component.default).collect();
        let names = |tenant: Option<&str>| -> BTreeSet<String> {
            let name = |builder: &str, family| slot_name(builder, family, tenant);
            let names = defaults.iter();
            names.map(|of| name(of.backend, of.family)).collect()
        };
        let all: Vec<String> = names(None).into_iter().chain(names(Some("a"))).collect();
        assert_eq!(all.len(), 2 * defaults.len());
        // Recurrent layers of all types share a builder; what directories have of the other families keeps its name.
        let mamba = timetable_reference::component("mamba").unwrap();
        let builder = builder_name("GDN_ATTN", mamba.family);
        assert_eq!(slot_name(builder, mamba.family, Some("a")), "mamba@a");
        assert!(all.contains(&"flash-attn".to_owned()));

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let mut state = StateDir::open(&path).unwrap();
        let slots = all.iter().map(|name| (name.clone(), SlotState::default()));
        state.set(slots).unwrap();
        drop(state);
        let again = StateDir::open(&path).unwrap();
        let found: BTreeSet<&str> = again.slots().map(|(name, _)| name).collect();
        let kept = found
            .iter()
            .all(|name| all.iter().any(|known| known == name));
        assert!(kept, "{found:?}");
    }
}
