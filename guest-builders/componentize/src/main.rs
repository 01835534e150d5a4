//! `timetable-componentize`: core modules and builder crates to components.

use std::{env, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result, bail};
use timetable_componentize::GuestBuild;

const USAGE: &str = "\
usage: timetable-componentize wrap MODULE.wasm -o COMPONENT.wasm
           wraps a core module that a compiler wrote for wasm32-unknown-unknown
       timetable-componentize build --out DIRECTORY PACKAGE...
           compiles builder crates of the workspace that it is run in, and wraps them";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let mut arguments = env::args_os().skip(1);
    let command = arguments.next().unwrap_or_default();
    let (mut output, mut inputs) = (None, Vec::new());
    while let Some(argument) = arguments.next() {
        if argument == "-o" || argument == "--out" {
            output = arguments.next().map(PathBuf::from);
        } else {
            inputs.push(argument);
        }
    }
    let Some(output) = output else {
        bail!("{USAGE}");
    };
    match (command.to_str(), inputs.as_slice()) {
        (Some("wrap"), [module]) => {
            let module = PathBuf::from(module);
            let core = std::fs::read(&module)
                .with_context(|| format!("cannot read {}", module.display()))?;
            let bytes = timetable_componentize::wrap(&core)
                .with_context(|| format!("{} does not become a component", module.display()))?;
            write(&output, &bytes)
        }
        (Some("build"), packages) if !packages.is_empty() => {
            let directory = env::current_dir().context("the current directory is gone")?;
            let build = GuestBuild {
                directory,
                target_dir: output.join("guests"),
                packages: packages
                    .iter()
                    .map(|package| package.to_string_lossy().into_owned())
                    .collect(),
                profile: "guest".to_owned(),
            };
            for guest in build.run()? {
                write(
                    &output.join(&guest.package).with_extension("wasm"),
                    &guest.bytes,
                )?;
            }
            Ok(())
        }
        _ => bail!("{USAGE}"),
    }
}

fn write(path: &PathBuf, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    println!("{}: {} bytes", path.display(), bytes.len());
    Ok(())
}
