//! `cargo xtask bundle`: a directory that runs on a GPU machine without a Rust toolchain and without this repository.
//!
//! The binary has the kernels of all targets in it; what it needs of CUDA it loads there, at run time.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::model::sha256;
use crate::process::{cargo, cargo_program, heading, output, output_with, run, run_with};
use crate::{kernels, target_dir};

/// What a bundle may weigh without a model: it has to travel.
const MAX_BYTES: u64 = 60 << 20;

const SUMS: &str = "SHA256SUMS";

struct Options {
    out: PathBuf,
    target_cpu: Option<String>,
    targets: Option<String>,
    tests: bool,
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Self> {
        let mut options = Self {
            out: target_dir().join("bundle"),
            target_cpu: None,
            targets: None,
            tests: false,
        };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let mut value = || {
                rest.next()
                    .cloned()
                    .with_context(|| format!("{argument} needs a value"))
            };
            match argument.as_str() {
                "--out" => options.out = PathBuf::from(value()?),
                "--target-cpu" => options.target_cpu = Some(value()?),
                "--targets" => options.targets = Some(value()?),
                "--tests" => options.tests = true,
                other => bail!(
                    "unknown argument `{other}`; `cargo xtask bundle [--out DIR] [--target-cpu CPU] [--targets LIST] [--tests]`"
                ),
            }
        }
        Ok(options)
    }
}

pub fn run_task(arguments: &[String]) -> Result<()> {
    let options = Options::parse(arguments)?;
    // Found out before the work, not after it.
    let old = options.out.join(SUMS);
    if options.out.exists() && !old.is_file() {
        bail!(
            "{} exists and is no bundle; give another directory with --out, or remove it",
            options.out.display()
        );
    }
    crate::wasm_target()?;
    let kernels = std::path::absolute(kernels::with(options.targets.as_deref())?)
        .context("the directory of the kernels has no absolute path")?;
    let build = Build::new(options.target_cpu.as_deref(), &kernels);

    heading("the binary");
    build.cargo(&["build", "--release", "--workspace", "--bin", "timetable"])?;
    let tests = if options.tests {
        heading("tests that need a GPU");
        build.tests()?
    } else {
        Vec::new()
    };

    // Beside its final place, so that the last step is a rename and nothing incomplete has the final name.
    let name = options
        .out
        .file_name()
        .context("--out names a directory to make, such as target/bundle")?;
    let work = options.out.with_file_name(format!(
        ".{}-{}",
        name.to_string_lossy(),
        std::process::id()
    ));
    let outcome = fill(&work, &build, &tests).and_then(|bytes| {
        if old.is_file() {
            fs::remove_dir_all(&options.out)
                .with_context(|| format!("cannot replace {}", options.out.display()))?;
        }
        fs::rename(&work, &options.out)
            .with_context(|| format!("cannot move the bundle to {}", options.out.display()))?;
        Ok(bytes)
    });
    // Left-overs do no harm; the outcome matters more than a failure to remove them.
    let _ = fs::remove_dir_all(&work);
    let bytes = outcome?;
    println!(
        "{}: {:.1} MiB, {} GPU tests",
        options.out.display(),
        bytes as f64 / f64::from(1 << 20),
        tests.len()
    );
    if tests.is_empty() && bytes > MAX_BYTES {
        bail!(
            "the bundle has {bytes} bytes, more than the {MAX_BYTES} that it may have; build fewer targets with --targets"
        );
    }
    Ok(())
}

/// How the bundle's programs are built.
struct Build {
    cpu: Option<String>,
    target: PathBuf,
    environment: Vec<(&'static str, String)>,
}

impl Build {
    /// With the workspace's own settings what other tasks have built serves; for another CPU everything is compiled again, in
    /// a directory of its own.
    fn new(cpu: Option<&str>, kernels: &Path) -> Self {
        let Some(cpu) = cpu else {
            return Self {
                cpu: None,
                target: target_dir(),
                environment: Vec::new(),
            };
        };
        let target = target_dir().join(format!("bundle-{cpu}"));
        let environment = vec![
            ("CARGO_TARGET_DIR", target.to_string_lossy().into_owned()),
            ("RUSTFLAGS", format!("-C target-cpu={cpu}")),
            (
                "TIMETABLE_KERNELS_DIR",
                kernels.to_string_lossy().into_owned(),
            ),
        ];
        Self {
            cpu: Some(cpu.to_owned()),
            target,
            environment,
        }
    }

    fn environment(&self) -> Vec<(&str, &str)> {
        self.environment
            .iter()
            .map(|(name, value)| (*name, value.as_str()))
            .collect()
    }

    fn cargo(&self, arguments: &[&str]) -> Result<()> {
        if self.environment.is_empty() {
            return cargo(arguments);
        }
        run_with(&cargo_program(), arguments, &self.environment())
    }

    fn binary(&self) -> PathBuf {
        self.target.join("release/timetable")
    }

    /// Builds the integration tests that need a GPU; their names and programs.
    fn tests(&self) -> Result<Vec<(String, PathBuf)>> {
        let metadata = output(
            &cargo_program(),
            &["metadata", "--format-version", "1", "--no-deps", "--locked"],
        )?;
        let metadata: serde_json::Value =
            serde_json::from_str(&metadata).context("cargo metadata printed no JSON")?;
        let names = gpu_tests(&metadata);
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let mut arguments = vec![
            "test",
            "--release",
            "--workspace",
            "--no-run",
            "--message-format",
            "json-render-diagnostics",
        ];
        for name in &names {
            arguments.extend(["--test", name]);
        }
        let messages = output_with(&cargo_program(), &arguments, &self.environment())?;
        Ok(messages
            .lines()
            .filter_map(|line| built_test(line, &names))
            .collect())
    }
}

/// Names of the integration tests in `cargo metadata` that need a GPU: the device's own, and those named after it.
fn gpu_tests(metadata: &serde_json::Value) -> Vec<&str> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let mut names = Vec::new();
    for package in packages {
        let own = package["name"] == "timetable-device-cuda";
        for target in package["targets"].as_array().into_iter().flatten() {
            let name = target["name"].as_str().unwrap_or_default();
            if target["kind"][0] == "test" && (own || name.starts_with("cuda")) {
                names.push(name);
            }
        }
    }
    names
}

/// Name and program of the test that a line of cargo's messages says was built.
fn built_test(line: &str, names: &[&str]) -> Option<(String, PathBuf)> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    let target = &message["target"];
    let name = target["name"].as_str()?;
    let program = message["executable"].as_str()?;
    (target["kind"][0] == "test" && names.contains(&name))
        .then(|| (name.to_owned(), PathBuf::from(program)))
}

/// Makes the bundle in `to`; its bytes.
fn fill(to: &Path, build: &Build, tests: &[(String, PathBuf)]) -> Result<u64> {
    fs::create_dir_all(to).with_context(|| {
        format!(
            "cannot create {}; choose a writable place with --out",
            to.display()
        )
    })?;
    copy_program(&build.binary(), &to.join("timetable"))?;
    run(
        &to.join("timetable").to_string_lossy(),
        &[
            "components",
            "--export",
            &to.join("components").to_string_lossy(),
        ],
    )?;
    if !tests.is_empty() {
        let directory = to.join("tests");
        fs::create_dir(&directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        for (name, program) in tests {
            copy_program(program, &directory.join(name))?;
        }
    }
    copy(&crate::root().join("LICENSE"), &to.join("LICENSE"))?;
    let library = output("getconf", &["GNU_LIBC_VERSION"])?;
    write(
        &to.join("README.txt"),
        &readme(build.cpu.as_deref().unwrap_or("x86-64"), library.trim()),
    )?;
    write(&to.join("run.sh"), RUN)?;
    make_executable(&to.join("run.sh"))?;
    let files = files(to)?;
    let mut sums = String::new();
    let mut bytes = 0;
    for file in &files {
        let name = file.strip_prefix(to).unwrap_or(file).display();
        sums += &format!("{}  {name}\n", sha256(file)?);
        bytes += fs::metadata(file)
            .with_context(|| format!("cannot read {}", file.display()))?
            .len();
    }
    write(&to.join(SUMS), &sums)?;
    Ok(bytes + sums.len() as u64)
}

/// Copies a program without its symbols and debug information.
fn copy_program(from: &Path, to: &Path) -> Result<()> {
    let (source, target) = (from.to_string_lossy(), to.to_string_lossy());
    run("strip", &["-o", &target, &source])
        .context("`strip` is part of binutils, which the linker needs as well")
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .map(drop)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} executable", path.display()))
}

/// Every file below a directory, sorted.
fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries =
        fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    for entry in entries {
        let path = entry
            .with_context(|| format!("cannot read {}", directory.display()))?
            .path();
        if path.is_dir() {
            found.extend(files(&path)?);
        } else {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Checks the files, runs the self-test and then, if there are any, the tests; or runs what it is given.
const RUN: &str = r#"#!/bin/sh
# Checks this bundle on a GPU machine: `./run.sh`. Or runs one command of it: `./run.sh bench --device cuda --json`.
set -eu
cd "$(dirname "$0")"
if [ $# -gt 0 ]; then
    exec ./timetable "$@"
fi
sha256sum --check --quiet SHA256SUMS
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "nvidia-smi is not there" >&2
./timetable selftest --device cuda
for test in tests/*; do
    [ -x "$test" ] || continue
    if [ "$test" = tests/cuda ] && [ -z "${TIMETABLE_TESTS_DIR:-}" ]; then
        echo "tests/cuda is left out: set TIMETABLE_TESTS_DIR to a copy of the repository's tests directory" >&2
        continue
    fi
    "$test"
done
"#;

fn readme(cpu: &str, library: &str) -> String {
    format!(
        "Timetable on a GPU machine

Needs: Linux on {cpu} with {library} or later (Ubuntu 24.04 has 2.39) and libstdc++, an NVIDIA driver that serves CUDA
13.0 (580 or later), and cuBLASLt 13: the system's, that of Python's nvidia packages (nvidia-cublas, which PyTorch for CUDA 13
brings along), or that of the directories in TIMETABLE_CUDA_LIBRARY_PATH. Nothing is compiled or installed.

  ./run.sh                                     check the files, then every kernel against the CPU
  ./run.sh selftest --device cuda              only the latter
  ./run.sh bench --device cuda --json          measure; beside FlashInfer where Python has it
  ./run.sh generate --device cuda --model MODEL.gguf --prompt \"Hello\"

timetable    the program; its kernels and its metadata builders are in it
components/  the metadata builders as files, for `timetable reload` and --builder
tests/       tests that need a GPU, where the bundle was made with them; tests/cuda reads the models and vectors of the
             repository's tests directory, which TIMETABLE_TESTS_DIR names, and the default model in TIMETABLE_MODEL_DIR
{SUMS}   of every other file
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(arguments: &[&str]) -> Vec<String> {
        arguments
            .iter()
            .map(|&argument| argument.to_owned())
            .collect()
    }

    #[test]
    fn options_are_read_and_unknown_ones_are_named() {
        let options = Options::parse(&strings(&[
            "--out",
            "x",
            "--target-cpu",
            "x86-64-v3",
            "--tests",
        ]))
        .expect("they are right");
        assert_eq!(options.out, Path::new("x"));
        assert_eq!(options.target_cpu.as_deref(), Some("x86-64-v3"));
        assert!(options.tests && options.targets.is_none());
        let error = |arguments: &[&str]| {
            Options::parse(&strings(arguments))
                .err()
                .map(|error| error.to_string())
                .unwrap_or_default()
        };
        assert!(error(&["--strip"]).contains("`--strip`"));
        assert_eq!(error(&["--out"]), "--out needs a value");
    }

    #[test]
    fn the_devices_own_integration_tests_and_those_named_after_it_are_taken() {
        let metadata = serde_json::json!({"packages": [
            {"name": "timetable-device-cuda", "targets": [
                {"kind": ["lib"], "name": "timetable_device_cuda"},
                {"kind": ["test"], "name": "driver"},
            ]},
            {"name": "timetable-tests", "targets": [
                {"kind": ["test"], "name": "cuda_graphs"},
                {"kind": ["test"], "name": "engine"},
            ]},
        ]});
        let names = gpu_tests(&metadata);
        assert_eq!(names, ["driver", "cuda_graphs"]);
        let line = |kind: &str, name: &str| {
            serde_json::json!({"reason": "compiler-artifact", "target": {"kind": [kind], "name": name},
                "executable": "/x/driver-1"})
            .to_string()
        };
        assert_eq!(
            built_test(&line("test", "driver"), &names),
            Some(("driver".to_owned(), PathBuf::from("/x/driver-1")))
        );
        assert_eq!(built_test(&line("bin", "driver"), &names), None);
        assert_eq!(built_test(&line("test", "engine"), &names), None);
        assert_eq!(built_test("not JSON", &names), None);
    }
}
