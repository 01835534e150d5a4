//! `cargo xtask test`: what a fresh machine needs, then every check and every test.

use anyhow::{Result, bail};

use crate::process::{cargo, heading, run_with};

/// Crates without heavy dependencies: tested with debug assertions and overflow checks too.
const PURE: [&str; 2] = ["timetable-types", "timetable-attention"];

pub fn run(arguments: &[String]) -> Result<()> {
    let mut quick = false;
    for argument in arguments {
        match argument.as_str() {
            "--quick" => quick = true,
            other => bail!("unknown argument `{other}`; `cargo xtask test [--quick]`"),
        }
    }

    crate::wasm_target()?;
    if !quick {
        heading("default model");
        crate::model()?;
        // Before anything is compiled, which embeds what is there.
        crate::kernels::for_tests()?;
        crate::c_compiler::for_tests()?;
        crate::browser::for_tests()?;
        crate::openai_client::for_tests()?;
    }

    heading("formatting");
    cargo(&["fmt", "--all", "--check"])?;

    heading("lints");
    cargo(&[
        "clippy",
        "--release",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ])?;

    crate::licences::check()?;

    heading("the rule book, with debug assertions");
    let mut arguments = vec!["test", "--quiet", "--no-fail-fast"];
    for name in PURE {
        arguments.extend(["--package", name]);
    }
    arguments.extend(["--features", "timetable-types/serde"]);
    cargo(&arguments)?;

    heading("all tests, optimised");
    let mut arguments = vec!["test", "--release", "--workspace", "--no-fail-fast"];
    if quick {
        arguments.extend(["--exclude", "timetable-tests"]);
    }
    cargo(&arguments)?;
    if !quick {
        crate::transformers::for_tests()?;
    }

    heading("documentation");
    run_with(
        &crate::process::cargo_program(),
        &["doc", "--release", "--workspace", "--no-deps", "--quiet"],
        &[("RUSTDOCFLAGS", "-D warnings")],
    )
}
