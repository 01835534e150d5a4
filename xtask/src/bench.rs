//! `cargo xtask bench`: builds the measuring program and runs it. What is measured, and how, is said there.

use anyhow::Result;

use crate::process::{cargo_program, run_with};

pub fn run(arguments: &[String]) -> Result<()> {
    crate::wasm_target()?;
    let model = crate::model()?.to_string_lossy().into_owned();
    let target = crate::target_dir()
        .join("native")
        .to_string_lossy()
        .into_owned();
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
    // For this machine's own CPU, in a target directory of its own: another RUSTFLAGS would rebuild everything else.
    run_with(
        &cargo_program(),
        &cargo,
        &[
            ("RUSTFLAGS", "-C target-cpu=native"),
            ("CARGO_TARGET_DIR", &target),
            ("TIMETABLE_MODEL", &model),
        ],
    )
}
