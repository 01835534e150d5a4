//! `cargo xtask bench`: builds the measuring program and runs it. What is measured, and how, is said there.

use anyhow::Result;

use crate::process::{cargo, cargo_program, heading, run_with};

pub fn run(arguments: &[String]) -> Result<()> {
    crate::wasm_target()?;
    let path = |name: &str| {
        crate::target_dir()
            .join(name)
            .to_string_lossy()
            .into_owned()
    };
    let (target, venv) = (path("native"), path("bench-venv"));
    let mut environment = vec![
        // For this machine's own CPU, in a target directory of its own: another RUSTFLAGS would rebuild everything else.
        ("RUSTFLAGS", "-C target-cpu=native"),
        ("CARGO_TARGET_DIR", target.as_str()),
        // Where the peer is installed when it is asked for and not there.
        ("TIMETABLE_BENCH_VENV", venv.as_str()),
    ];
    let model = model_for(arguments);
    if let Some(model) = &model {
        environment.push(("TIMETABLE_MODEL", model));
    }
    let program = crate::host();
    if asked(arguments, "serve") {
        // As users have it, in the target directory that they have.
        cargo(&["build", "--release", "--workspace", "--bin", "timetable"])?;
        environment.push(("TIMETABLE_PROGRAM", &program));
    }
    let mut cargo = vec![
        "run",
        "--quiet",
        "--release",
        "--package",
        "timetable-tests",
        "--bin",
        "bench",
        "--",
    ];
    cargo.extend(arguments.iter().map(String::as_str));
    heading("building the benchmarks for this machine's CPU (the first time, about ten minutes)");
    run_with(&cargo_program(), &cargo, &environment)
}

/// The default model, for the benchmarks that run it. Without a network the others can still be measured; the program says
/// which were not.
fn model_for(arguments: &[String]) -> Option<String> {
    if !["decode", "speculation"]
        .iter()
        .any(|name| asked(arguments, name))
    {
        return None;
    }
    match crate::model() {
        Ok(path) => Some(path.to_string_lossy().into_owned()),
        Err(error) => {
            eprintln!("xtask: no default model, what runs it is left out: {error:#}");
            None
        }
    }
}

/// Is this benchmark to be measured?
fn asked(arguments: &[String], name: &str) -> bool {
    let mut names = arguments
        .iter()
        .filter(|argument| !argument.starts_with('-'));
    let all = arguments.iter().all(|argument| argument.starts_with('-'));
    (all || names.any(|asked| asked == name))
        && !arguments.iter().any(|argument| argument == "--list")
}
