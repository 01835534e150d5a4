//! The project's own tasks: `cargo xtask demo | test | bench | guests | model | tiny-models |
//! transformers | kernels | bundle`.
//!
//! `demo` and `test` work from a fresh clone, alone: they add the wasm target, fetch the default model, build what is
//! missing and then do their work. Everything here runs other programs; nothing of the product lives here.

mod bench;
mod browser;
mod bundle;
mod c_compiler;
mod demo;
mod kernels;
mod licences;
mod model;
mod openai_client;
mod process;
mod test;
mod transformers;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};

const HELP: &str = "\
Timetable's own tasks.

Usage: cargo xtask <TASK>

Tasks:
  demo                     A model answers several prompts; its metadata builder is swapped while it does
  test [--quick]           Everything a fresh machine needs, then all tests (--quick: no model runs)
  bench [NAME…] [--json]   Measure: name, value, unit, ratio and to what; without a name, all (--list names them)
  guests                   Build the host and write its reference components to target/guests
  kernels [--targets LIST] Build the CUDA kernels into target/kernels, with a compiler of its own where there is none;
                           LIST: such as '90a ptx80'; else all targets
  bundle [--out DIR]       A directory that runs on a GPU machine without a Rust toolchain: target/bundle, or DIR
                           (--target-cpu CPU: compile for it; --targets LIST: kernels; --tests: GPU tests too)
  model                    Fetch the default model into target/models
  tiny-models [DIR]        Write a small random model of each hybrid and latent family to target/tiny-models, or DIR
  transformers             Compare the hybrid and latent families with Hugging Face transformers, which it installs into
                           target/transformers (about 7 GB)
  help                     This text
";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (task, rest) = match arguments.split_first() {
        Some((task, rest)) => (task.as_str(), rest),
        None => ("help", &[][..]),
    };
    match task {
        "demo" => demo::run(rest),
        "test" => test::run(rest),
        "bench" => bench::run(rest),
        "guests" => guests().map(drop),
        "model" => model().map(drop),
        "bundle" => bundle::run_task(rest),
        "tiny-models" => tiny_models(rest),
        "transformers" => transformers::run_task(rest),
        "kernels" => kernels::run_task(rest),
        "help" | "--help" | "-h" => {
            print!("{HELP}");
            Ok(())
        }
        other => bail!("unknown task `{other}`; `cargo xtask help` lists the tasks"),
    }
}

/// The repository's root.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the root")
        .to_path_buf()
}

/// Where built things go: `CARGO_TARGET_DIR`, else `target` in the root.
fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// The wasm target that the guests are compiled for. A toolchain file alone does not add it where rustup's automatic
/// installation is off.
fn wasm_target() -> Result<()> {
    const TARGET: &str = "wasm32-unknown-unknown";
    let sysroot = process::output("rustc", &["--print", "sysroot"])?;
    let installed = Path::new(sysroot.trim())
        .join("lib/rustlib")
        .join(TARGET)
        .join("lib");
    if installed.is_dir() {
        return Ok(());
    }
    process::heading("adding the Rust target wasm32-unknown-unknown");
    process::run("rustup", &["target", "add", TARGET])
}

/// Builds the host, which has the reference components in it, and writes them to `target/guests`.
fn guests() -> Result<PathBuf> {
    wasm_target()?;
    // With the workspace's features, so that `test` and `demo` share what they compile.
    process::cargo(&["build", "--release", "--workspace", "--bin", "timetable"])?;
    let directory = target_dir().join("guests");
    process::run(
        &host(),
        &["components", "--export", &directory.to_string_lossy()],
    )?;
    Ok(directory)
}

/// The host's path, once it is built.
fn host() -> String {
    target_dir()
        .join("release/timetable")
        .to_string_lossy()
        .into_owned()
}

/// Writes the tiny models of the tests where users can run them.
fn tiny_models(arguments: &[String]) -> Result<()> {
    let out = match arguments {
        [] => target_dir()
            .join("tiny-models")
            .to_string_lossy()
            .into_owned(),
        [out] if !out.starts_with('-') => out.clone(),
        _ => bail!("unknown arguments {arguments:?}; give at most a directory"),
    };
    wasm_target()?;
    // With the workspace's features, so that `test` and `demo` share what they compile.
    process::cargo(&["build", "--release", "--workspace", "--bin", "tiny-models"])?;
    let program = target_dir().join("release/tiny-models");
    process::run(&program.to_string_lossy(), &[&out])
}

/// The default model's path, fetched when it is not there yet.
fn model() -> Result<PathBuf> {
    model::fetch(&root().join("target/models"))
}
