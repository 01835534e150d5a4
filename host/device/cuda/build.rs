//! Embeds the kernels: leaves `images.rs` in `OUT_DIR`, which `src/images.rs` includes.
//!
//! They are taken from the first of
//! 1. `TIMETABLE_KERNELS_DIR` (absolute), if it is set: a directory that `cargo xtask kernels` filled;
//! 2. `kernels` in the target directory, where `cargo xtask kernels` puts them. The target directory is the one that this
//!    build writes to, so that `CARGO_TARGET_DIR`, `--target-dir` and a configured one are all found;
//! 3. a compiler (`NVCC`, `CUDA_HOME`, `PATH`, or the one that `cargo xtask kernels` installed): built here, for
//!    [`DEFAULT_TARGETS`];
//! 4. nowhere: nothing is embedded, the CUDA device says at run time what is missing, and everything else works.
//!
//! Kernels that were built from other sources than these are never embedded: arguments would be read at other offsets.

#[path = "compile.rs"]
mod compile;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use compile::{Compiler, Manifest};

/// Machine code for compute capability 9.0, and PTX, which the driver compiles for any other from 8.0 on.
const DEFAULT_TARGETS: [&str; 2] = ["90a", "ptx80"];

fn main() -> ExitCode {
    match embed() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn embed() -> Result<(), String> {
    let root = PathBuf::from(variable("CARGO_MANIFEST_DIR")?).join("../../..");
    let out = PathBuf::from(variable("OUT_DIR")?);
    for source in ["kernels/src", "kernels/build.sh"] {
        println!("cargo::rerun-if-changed={}", root.join(source).display());
    }
    for name in ["TIMETABLE_KERNELS_DIR", "NVCC", "CUDA_HOME"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let from = find(&root, &out)?;
    let mut text = String::new();
    let mut targets = Vec::new();
    if let Some(from) = &from {
        // The crate includes copies: what is built there later must not change a build under way.
        let copies = out.join("images");
        fs::create_dir_all(&copies).map_err(|error| failed(&copies, &error))?;
        for image in compile::images(from)? {
            let name = image.file_stem().unwrap_or_default().to_string_lossy();
            let copy = copies.join(image.file_name().unwrap_or_default());
            fs::copy(&image, &copy).map_err(|error| failed(&image, &error))?;
            text += &format!("    Image {{ name: {name:?}, bytes: aligned!({copy:?}) }},\n");
        }
        targets = Manifest::read(from).map_or_else(Vec::new, |manifest| manifest.targets);
    }
    let text =
        format!("const IMAGES: &[Image] = &[\n{text}];\nconst TARGETS: &[&str] = &{targets:?};\n");
    let path = out.join("images.rs");
    fs::write(&path, text).map_err(|error| failed(&path, &error))
}

/// The directory with the images, if there is one.
fn find(root: &Path, out: &Path) -> Result<Option<PathBuf>, String> {
    let sources = compile::sources(root)?;
    if let Some(named) = env::var_os("TIMETABLE_KERNELS_DIR") {
        let named = PathBuf::from(named);
        println!("cargo::rerun-if-changed={}", named.display());
        return match Manifest::read(&named) {
            Some(manifest) if manifest.sources == sources => Ok(Some(named)),
            Some(_) => Err(format!(
                "TIMETABLE_KERNELS_DIR is {}, whose kernels were built from other sources than kernels/src; build them \
                 again with `cargo xtask kernels`, or unset it",
                named.display()
            )),
            None => Err(format!(
                "TIMETABLE_KERNELS_DIR is {}, which has no kernels ({} is missing); build them with `cargo xtask \
                 kernels`, or unset it",
                named.display(),
                compile::MANIFEST
            )),
        };
    }
    let target = target_directory(root, out);
    let built = target.join("kernels");
    // A path that does not exist would make cargo run this every time.
    fs::create_dir_all(&built).map_err(|error| failed(&built, &error))?;
    println!("cargo::rerun-if-changed={}", built.display());
    if Manifest::read(&built).is_some_and(|manifest| manifest.sources == sources) {
        return Ok(Some(built));
    }
    let Some(compiler) = Compiler::find(&target) else {
        if Manifest::read(&built).is_some() {
            println!(
                "cargo::warning=the kernels in {} were built from other sources and are left out; `cargo xtask kernels` \
                 builds them again",
                built.display()
            );
        }
        return Ok(None);
    };
    let here = out.join("kernels");
    match compile::build(root, &here, &DEFAULT_TARGETS, &compiler) {
        Ok(_) => Ok(Some(here)),
        // An old compiler, say, must not keep anyone from the CPU device.
        Err(error) => {
            for line in error.lines().take(20) {
                println!("cargo::warning={line}");
            }
            println!(
                "cargo::warning=no kernels are embedded: the CUDA device will not work; `cargo xtask kernels` builds them"
            );
            Ok(None)
        }
    }
}

/// The target directory of this build: the nearest directory above `out` that cargo has marked as its own.
fn target_directory(root: &Path, out: &Path) -> PathBuf {
    out.ancestors()
        .find(|directory| directory.join("CACHEDIR.TAG").is_file())
        .map_or_else(
            || env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from),
            Path::to_path_buf,
        )
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|error| format!("cargo sets {name}: {error}"))
}

fn failed(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}", path.display())
}
