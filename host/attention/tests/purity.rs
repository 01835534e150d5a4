//! The rule book is pure: its sources name no file, socket, process, thread, environment, wasm runtime or device library,
//! its manifest depends on none, and the compiler refuses `unsafe` in it.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The crate's folder.
const CRATE: &str = env!("CARGO_MANIFEST_DIR");

/// What a pure source must not name, outside comments.
const FORBIDDEN: &[&str] = &[
    "std::fs",
    "std::net",
    "std::io",
    "std::process",
    "std::os",
    "std::env",
    "std::thread",
    "std::time",
    "std::path",
    "println!",
    "print!",
    "unsafe {",
    "unsafe fn",
    "unsafe impl",
    "extern \"C\"",
    "include_bytes!",
    "wasmtime",
    "wit_bindgen",
    "cudarc",
    "timetable_sandbox",
    "timetable_device",
    "timetable_engine",
];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn sources_name_no_io_no_wasm_and_no_device() {
    let mut files = Vec::new();
    sources(&Path::new(CRATE).join("src"), &mut files);
    assert!(files.len() > 40, "only {} sources found", files.len());
    for file in files {
        let text = fs::read_to_string(&file).expect("a source");
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().expect("a first part");
            // `use std::{fs, …}` would slip past a search for whole paths.
            let grouped = code.contains("use std::{")
                && [
                    "fs", "net", "io", "process", "os", "env", "thread", "time", "path",
                ]
                .iter()
                .any(|m| {
                    code.split(|c: char| !c.is_alphanumeric() && c != '_')
                        .any(|w| w == *m)
                });
            let named = FORBIDDEN.iter().find(|name| code.contains(**name));
            assert!(
                named.is_none() && !grouped,
                "{}:{} is not pure: {line}",
                file.display(),
                number + 1
            );
        }
    }
}

#[test]
fn the_compiler_refuses_unsafe() {
    let root = fs::read_to_string(format!("{CRATE}/src/lib.rs")).expect("the crate root");
    assert!(root.lines().any(|line| line == "#![forbid(unsafe_code)]"));
}

#[test]
fn the_manifest_depends_on_no_runtime() {
    let manifest = fs::read_to_string(format!("{CRATE}/Cargo.toml")).expect("the manifest");
    let dependencies: Vec<&str> = manifest
        .lines()
        .skip_while(|line| *line != "[dependencies]")
        .skip(1)
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| line.split(['.', ' ', '=']).next())
        .filter(|name| !name.is_empty())
        .collect();
    // Derives, JSON in memory, error texts, and the contract's records. Adding to the list is a decision.
    assert_eq!(
        dependencies,
        ["serde", "serde_json", "thiserror", "timetable-types"]
    );
}
