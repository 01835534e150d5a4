//! The compiler of the builder in C, for its test: the machine's, or zig from Python's packages, which contains one.

#[path = "../../guest-builders/c/compile.rs"]
mod compile;

use std::fs;

use anyhow::{Context, Result};

use crate::process::{heading, run};
use compile::{Compiler, INSTALLED};

/// About 98 MB to fetch, 400 MB installed.
const PACKAGE: &str = "ziglang==0.16.0";

/// Sees to it that there is one.
pub fn for_tests() -> Result<()> {
    let target = crate::target_dir();
    if let Some(compiler) = Compiler::find(&target) {
        heading(&format!(
            "the builder in C is compiled with {}",
            compiler.name()
        ));
        return Ok(());
    }
    heading("no clang for wasm32 and no zig: installing zig into the target directory");
    let home = target.join(INSTALLED);
    // Within the same directory, so that the last step is a rename and nothing incomplete has the final name.
    let work = target.join(format!(".{INSTALLED}-{}", std::process::id()));
    let to = work.to_string_lossy();
    let installed = run(
        "python3",
        &[
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
            PACKAGE,
        ],
    )
    .context(
        "cannot install a C compiler for wasm32; check the network and that python3 has pip, or install clang and lld",
    );
    let moved = installed.and_then(|()| {
        // What does not run is not worth keeping.
        if home.exists() {
            fs::remove_dir_all(&home)?;
        }
        fs::rename(&work, &home).with_context(|| format!("cannot move it to {}", home.display()))
    });
    // Left-overs do no harm; the outcome matters more than a failure to remove them.
    let _ = fs::remove_dir_all(&work);
    moved?;
    Compiler::find(&target).map(drop).with_context(|| {
        format!(
            "the compiler in {} does not run; install clang and lld",
            home.display()
        )
    })
}
