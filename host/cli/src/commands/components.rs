//! `components`: the reference components in this binary.

use serde_json::json;
use timetable_attention::Grant;
use timetable_reference::components;
use timetable_sandbox::ContentHash;

use super::table::table;
use super::{print, print_json};
use crate::cli::Components;
use crate::exit::{Exit, Failure};

pub fn run(arguments: &Components) -> Result<(), Failure> {
    if let Some(directory) = &arguments.export {
        let unwritable = |path: &std::path::Path, error: std::io::Error| {
            Failure::new(
                Exit::BadInput,
                format!(
                    "{}: cannot be written ({error}); give a directory with --export DIR",
                    path.display()
                ),
            )
        };
        std::fs::create_dir_all(directory).map_err(|error| unwritable(directory, error))?;
        for component in components() {
            let path = directory.join(component.name).with_extension("wasm");
            std::fs::write(&path, component.bytes).map_err(|error| unwritable(&path, error))?;
        }
    }
    let hash = |bytes: &[u8]| ContentHash::of(bytes);
    if arguments.json {
        let list: Vec<_> = components()
            .iter()
            .map(|component| {
                json!({
                    "name": component.name,
                    "backend": component.backend,
                    "default": component.default,
                    "grant": component.grant,
                    "bytes": component.bytes.len(),
                    "component": hash(component.bytes).to_hex(),
                })
            })
            .collect();
        return print_json(&json!({ "components": list }));
    }
    let rows: Vec<Vec<String>> = components()
        .iter()
        .map(|component| {
            vec![
                component.name.to_owned(),
                component.backend.to_owned(),
                if component.default { "yes" } else { "" }.to_owned(),
                match component.grant {
                    Grant::Exact => "",
                    Grant::Subset => "subset",
                }
                .to_owned(),
                component.bytes.len().to_string(),
                hash(component.bytes).to_string(),
            ]
        })
        .collect();
    print(
        table(
            &["NAME", "BACKEND", "DEFAULT", "GRANT", "BYTES", "COMPONENT"],
            &rows,
        )
        .as_bytes(),
    )
}
