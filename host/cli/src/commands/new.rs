//! `new`: the crate of a builder, with the SDK's sources in it, so that it needs neither this repository nor a registry.

mod sdk;

use std::path::{Path, PathBuf};

use super::print;
use crate::cli::New;
use crate::exit::{Exit, Failure};

/// What differs from backend to backend.
struct Template {
    backend: &'static str,
    frame: &'static str,
    policy: &'static str,
}

const TEMPLATES: [Template; 2] = [
    Template {
        backend: "FLASH_ATTN",
        frame: include_str!("new/template/flash_attn/lib.rs"),
        policy: include_str!("new/template/flash_attn/policy.rs"),
    },
    Template {
        backend: "FLASHINFER",
        frame: include_str!("new/template/flashinfer/lib.rs"),
        policy: include_str!("new/template/flashinfer/policy.rs"),
    },
];

/// What is the same: path and text.
const COMMON: [(&str, &str); 4] = [
    ("Cargo.toml", include_str!("new/template/Cargo.toml.txt")),
    (
        ".cargo/config.toml",
        include_str!("new/template/config.toml"),
    ),
    (".gitignore", "/target/\n/*.wasm\n"),
    ("README.md", include_str!("new/template/README.md")),
];

/// Longest name.
const MAX_NAME: usize = 64;

pub fn run(arguments: &New) -> Result<(), Failure> {
    let name = arguments.name.as_str();
    if let Some(problem) = problem(name) {
        return Err(Failure::new(
            Exit::BadInput,
            format!("name `{name}`: {problem}"),
        ));
    }
    let template = TEMPLATES
        .iter()
        .find(|template| template.backend == arguments.backend)
        .ok_or_else(|| {
            let there: Vec<&str> = TEMPLATES.iter().map(|template| template.backend).collect();
            Failure::new(
                Exit::BadInput,
                format!(
                    "backend `{}`: this host runs no builders of it, so that there is no template; there are {}",
                    arguments.backend,
                    there.join(", ")
                ),
            )
        })?;
    let directory = arguments
        .path
        .clone()
        .unwrap_or_else(|| PathBuf::from(name));
    if directory.symlink_metadata().is_ok() {
        return Err(Failure::new(
            Exit::BadInput,
            format!(
                "directory {}: there is something already; name another with --path DIR",
                directory.display()
            ),
        ));
    }
    write(&directory, &files(name, template)).map_err(|(path, error)| {
        // Half a crate is worth nothing; the directory was not there before.
        let _ = std::fs::remove_dir_all(&directory);
        Failure::new(
            Exit::BadInput,
            format!(
                "{}: cannot be written ({error}); name another directory with --path DIR",
                path.display()
            ),
        )
    })?;
    let module = name.replace('-', "_");
    print(
        format!(
            "{directory}: a builder of {backend}; change src/policy.rs, then there:\n\n    \
             cargo test\n    cargo wasm\n    \
             timetable componentize target/wasm32-unknown-unknown/release/{module}.wasm -o {name}.wasm\n    \
             timetable check {name}.wasm\n",
            directory = directory.display(),
            backend = template.backend,
        )
        .as_bytes(),
    )
}

/// What is wrong with a crate's name.
fn problem(name: &str) -> Option<&'static str> {
    // Names of crates that the new one uses, and words that are none.
    const TAKEN: [&str; 12] = [
        "alloc",
        "core",
        "crate",
        "deps",
        "build",
        "examples",
        "self",
        "std",
        "super",
        "test",
        "timetable-guest",
        "timetable-types",
    ];
    let mut letters = name.chars();
    if !letters
        .next()
        .is_some_and(|first| first.is_ascii_lowercase())
        || !letters.all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c))
    {
        return Some(
            "a crate is named by a lower-case letter, then lower-case letters, digits, `-` and `_`; give such a name",
        );
    }
    if name.len() > MAX_NAME {
        return Some("it has more than 64 letters; give a shorter one");
    }
    TAKEN
        .contains(&name.replace('_', "-").as_str())
        .then_some("this name has a meaning of its own to the compiler; give another")
}

/// Every file of the crate: path and text.
fn files(name: &str, template: &Template) -> Vec<(String, String)> {
    let fill = |text: &str| {
        text.replace("{{name}}", name)
            .replace("{{module}}", &name.replace('-', "_"))
            .replace("{{backend}}", template.backend)
    };
    let own = [
        ("src/lib.rs", template.frame),
        ("src/policy.rs", template.policy),
    ];
    COMMON
        .iter()
        .chain(&own)
        .map(|(path, text)| ((*path).to_owned(), fill(text)))
        .chain(sdk::files())
        .collect()
}

fn write(directory: &Path, files: &[(String, String)]) -> Result<(), (PathBuf, std::io::Error)> {
    for (path, text) in files {
        let path = directory.join(path);
        path.parent()
            .map_or(Ok(()), std::fs::create_dir_all)
            .and_then(|()| std::fs::write(&path, text))
            .map_err(|error| (path, error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_crates() {
        for good in ["a", "my-builder", "b2_b"] {
            assert_eq!(problem(good), None, "{good}");
        }
        let long = "a".repeat(65);
        for bad in [
            "",
            "2b",
            "-a",
            "My",
            "a b",
            "a/b",
            "..",
            "a.b",
            "über",
            "test",
            "timetable_guest",
            &long,
        ] {
            assert!(problem(bad).is_some(), "{bad}");
        }
    }

    #[test]
    fn no_placeholder_is_left() {
        for template in &TEMPLATES {
            for (path, text) in files("my-builder", template) {
                assert!(!text.contains("{{"), "{path}: {text}");
            }
        }
    }
}
