//! `cargo xtask transformers`: the hybrid and latent families against Hugging Face transformers as it computes now, not as it
//! was recorded.

use std::{fs, path::Path};

use anyhow::{Context, Result, bail};

use crate::process::{cargo_program, heading, output, run, run_with};

/// Kibibytes that an installation needs, with what it downloads.
const ROOM_KIB: u64 = 12 << 20;
const REQUIREMENTS: &str = "tests/peers/requirements-transformers.txt";
const SCRIPT: &str = "tests/peers/tiny_models.py";

pub fn run_task(arguments: &[String]) -> Result<()> {
    if let [argument, ..] = arguments {
        bail!("unknown argument `{argument}`; `cargo xtask transformers` has none");
    }
    compare()
}

/// Compares, unless it would have to install what the disk has no room for: then it says so, and the recorded numbers, which
/// every test run compares with, have to do.
pub fn for_tests() -> Result<()> {
    let target = crate::target_dir();
    let free = free_kib(&target.to_string_lossy())?;
    if free < ROOM_KIB && !target.join("transformers/installed.txt").exists() {
        heading(&format!(
            "not comparing with transformers itself: {} GiB free at {}, {} needed; compared with what it was recorded to compute",
            free >> 20,
            target.display(),
            ROOM_KIB >> 20
        ));
        return Ok(());
    }
    compare()
}

fn free_kib(path: &str) -> Result<u64> {
    let text = output("df", &["-Pk", path])?;
    let free = text
        .lines()
        .last()
        .and_then(|line| line.split_whitespace().nth(3));
    free.and_then(|kib| kib.parse().ok())
        .with_context(|| format!("df printed something else for {path}: {text}"))
}

/// Installs pinned versions into an environment below the target directory, where they are not there yet; computes the
/// record anew; tests against it.
pub fn compare() -> Result<()> {
    let home = crate::target_dir().join("transformers");
    let python = home.join("bin/python");
    let python = python.to_string_lossy();
    let wanted = crate::root().join(REQUIREMENTS);
    let installed = home.join("installed.txt");
    let requirements =
        fs::read_to_string(&wanted).with_context(|| format!("cannot read {}", wanted.display()))?;
    if fs::read_to_string(&installed).ok().as_ref() != Some(&requirements) {
        // Networks fail now and then.
        install(&home, &wanted).or_else(|error| {
            heading(&format!("{error:#}; once more"));
            install(&home, &wanted)
        })?;
        // Last, so that an installation that was cut off is made anew.
        fs::write(&installed, &requirements)
            .with_context(|| format!("cannot write {}", installed.display()))?;
    }
    heading("what transformers computes with the tiny models");
    let record = home.join("tiny_models.json");
    let record = record.to_string_lossy();
    let script = crate::root().join(SCRIPT);
    run(&python, &[&script.to_string_lossy(), &record])?;
    heading("the same by our decoders, and through the engine");
    let program = cargo_program();
    let test = ["test", "--release", "--workspace"];
    for which in [
        &["--test", "tiny_models"][..],
        &["--test", "engine", "families::"],
    ] {
        let arguments = [&test, which].concat();
        run_with(&program, &arguments, &[("TIMETABLE_TINY_MODELS", &record)])?;
    }
    Ok(())
}

/// Makes an environment of the `wanted` versions at `home`.
fn install(home: &Path, wanted: &Path) -> Result<()> {
    heading("installing transformers into the target directory (about 7 GB)");
    run(
        "python3",
        &["-m", "venv", "--clear", &home.to_string_lossy()],
    )
    .context("cannot make an environment; check that python3, 3.11 or later, has venv")?;
    run(
        &home.join("bin/python").to_string_lossy(),
        &[
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-cache-dir",
            "--requirement",
            &wanted.to_string_lossy(),
        ],
    )
    .context("cannot install transformers; check the network and the space on the disk")
}
