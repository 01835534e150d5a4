//! `cargo xtask kernels`: the CUDA kernels, built into `target/kernels`, where the build of the host finds and embeds them.
//!
//! Without a CUDA compiler on the machine one is installed from Python's packages: compiling needs no GPU.

#[path = "../../host/device/cuda/compile.rs"]
mod compile;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::process::{heading, run};
use compile::{Compiler, Manifest};

/// Machine code for the data-centre and desktop GPUs of three generations, and PTX for what comes after them.
const ALL: [&str; 6] = ["80", "89", "90a", "100", "ptx80", "ptx90"];

/// What tests need: one generation, and PTX, which the driver compiles for any other.
const TESTS: [&str; 2] = ["90a", "ptx80"];

/// The compiler as Python packages, of one release.
const PACKAGES: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-nvvm==13.0.88",
];

pub fn run_task(arguments: &[String]) -> Result<()> {
    match arguments {
        [] => build(&ALL).map(drop),
        [flag, targets] if flag == "--targets" => build(&parse(targets)?).map(drop),
        _ => bail!("unknown arguments; `cargo xtask kernels [--targets \"90a ptx80\"]`"),
    }
}

/// The targets of a list, which are separated by blanks.
fn parse(list: &str) -> Result<Vec<&str>> {
    let targets: Vec<&str> = list.split_whitespace().collect();
    if let Some(wrong) = targets.iter().find(|target| !is_target(target)) {
        bail!(
            "`{wrong}` is no target; give compute capabilities (`90a`, `100`) and PTX versions (`ptx80`), such as \
             --targets \"90a ptx80\""
        );
    }
    if targets.is_empty() {
        bail!(
            "no target; leave --targets out to build all of them: {}",
            ALL.join(" ")
        );
    }
    Ok(targets)
}

/// Builds what tests need, unless the kernels that are there have it; returns their directory.
pub fn for_tests() -> Result<PathBuf> {
    at_least(&TESTS)
}

/// Builds for a list of targets, by default all, unless the kernels that are there have them; returns their directory.
pub fn with(targets: Option<&str>) -> Result<PathBuf> {
    match targets {
        Some(list) => at_least(&parse(list)?),
        None => at_least(&ALL),
    }
}

fn at_least(targets: &[&str]) -> Result<PathBuf> {
    let directory = directory();
    let sources = compile::sources(&crate::root()).map_err(anyhow::Error::msg)?;
    let there = Manifest::read(&directory).is_some_and(|manifest| {
        let has = |target: &&str| manifest.targets.iter().any(|t| t == target);
        manifest.sources == sources && targets.iter().all(has)
    });
    if there {
        return Ok(directory);
    }
    build(targets)
}

fn build(targets: &[&str]) -> Result<PathBuf> {
    let compiler = compiler()?;
    let out = directory();
    heading(&format!(
        "kernels for {} with {}",
        targets.join(" "),
        compiler.path().display()
    ));
    let begun = Instant::now();
    let built =
        compile::build(&crate::root(), &out, targets, &compiler).map_err(anyhow::Error::msg)?;
    let mut bytes = 0;
    for image in compile::images(&out).map_err(anyhow::Error::msg)? {
        bytes += fs::metadata(&image)
            .with_context(|| format!("{} could not be read", image.display()))?
            .len();
    }
    let how = if built {
        format!("built in {} s", begun.elapsed().as_secs())
    } else {
        "up to date".to_owned()
    };
    eprintln!("{}: {bytes} bytes, {how}", out.display());
    Ok(out)
}

/// The machine's compiler, or one that is installed for this project alone.
fn compiler() -> Result<Compiler> {
    let target = crate::target_dir();
    if let Some(compiler) = Compiler::find(&target) {
        return Ok(compiler);
    }
    heading("no nvcc on PATH or under CUDA_HOME: installing one into the target directory");
    let home = target.join(compile::INSTALLED);
    // Within the same directory, so that the last step is a rename and nothing incomplete has the final name.
    let work = target.join(format!(".{}-{}", compile::INSTALLED, std::process::id()));
    let outcome = install(&work, &home);
    // Left-overs do no harm; the outcome matters more than a failure to remove them.
    let _ = fs::remove_dir_all(&work);
    outcome?;
    Compiler::find(&target).with_context(|| {
        format!(
            "the compiler in {} does not run; set CUDA_HOME to an installation of CUDA 13.0 or later",
            home.display()
        )
    })
}

fn install(work: &Path, home: &Path) -> Result<()> {
    let to = work.to_string_lossy();
    let mut arguments = vec![
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--target",
        &to,
    ];
    arguments.extend(PACKAGES);
    run("python3", &arguments).context(
        "cannot install a CUDA compiler; check the network and that python3 has pip, or set CUDA_HOME to an \
         installation of CUDA 13.0 or later",
    )?;
    // What does not run is not worth keeping.
    if home.exists() {
        fs::remove_dir_all(home).with_context(|| format!("cannot remove {}", home.display()))?;
    }
    fs::rename(work, home)
        .with_context(|| format!("cannot move the compiler to {}", home.display()))
}

fn directory() -> PathBuf {
    crate::target_dir().join("kernels")
}

/// Digits, perhaps an `a` behind them, perhaps `ptx` before them.
fn is_target(text: &str) -> bool {
    let number = text.strip_prefix("ptx").unwrap_or(text);
    let number = number.strip_suffix('a').unwrap_or(number);
    number.len() >= 2 && number.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_capabilities_and_ptx_versions() {
        for target in ALL {
            assert!(is_target(target), "{target}");
        }
        assert_eq!(
            parse(" 90a  ptx80 ").expect("both are targets"),
            ["90a", "ptx80"]
        );
        assert!(parse(" ").is_err());
        for wrong in ["", "a", "ptx", "sm_90", "9", "90b", "ptx80,", "90 ptx80"] {
            assert!(!is_target(wrong), "{wrong}");
        }
    }

    #[test]
    fn the_digest_of_the_sources_is_the_same_twice() {
        let first = compile::sources(&crate::root()).expect("the sources can be read");
        assert_eq!(compile::sources(&crate::root()), Ok(first.clone()));
        assert_eq!(first.len(), 16);
    }
}
