//! Builds the reference builders for wasm and leaves the components in `OUT_DIR`, where `src/embedded.rs` includes them.
//!
//! The work is done by `timetable-componentize`, run by a cargo of its own with its own target directory: the outer build
//! holds the lock of its own, and the libraries that wrap a module stay out of the outer build's graph.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

const PACKAGES: [&str; 14] = [
    "flash-attn-builder",
    "flash-attn-fixed-split-builder",
    "flashinfer-builder",
    "flashinfer-window-sink-builder",
    "triton-attn-builder",
    "flash-mla-builder",
    "flash-attn-mla-builder",
    "triton-mla-builder",
    "mamba-builder",
    "chaos-flash-attn",
    "chaos-flashinfer",
    "chaos-triton-attn",
    "chaos-flash-mla",
    "chaos-mamba",
];

/// What a component is made of.
const SOURCES: [&str; 17] = [
    "guest-builders/.cargo/config.toml",
    "guest-builders/componentize",
    "guest-builders/sdk/src",
    "guest-builders/sdk/Cargo.toml",
    "guest-builders/flash-attn",
    "guest-builders/flash-attn-fixed-split",
    "guest-builders/flashinfer",
    "guest-builders/flashinfer-window-sink",
    "guest-builders/triton-attn",
    "guest-builders/flash-mla",
    "guest-builders/flash-attn-mla",
    "guest-builders/triton-mla",
    "guest-builders/mamba",
    "guest-builders/chaos",
    "host/types/src",
    "host/types/Cargo.toml",
    "wit",
];

fn main() -> ExitCode {
    let root = Path::new(&variable("CARGO_MANIFEST_DIR")).join("../..");
    let out = PathBuf::from(variable("OUT_DIR"));
    for source in SOURCES {
        println!("cargo::rerun-if-changed={}", root.join(source).display());
    }
    let mut command = Command::new(variable("CARGO"));
    command
        .current_dir(root.join("guest-builders"))
        .args([
            "run",
            "--quiet",
            "--package",
            "timetable-componentize",
            "--target-dir",
        ])
        .arg(out.join("guests"))
        .args(["--", "build", "--out"])
        .arg(&out)
        .args(PACKAGES);
    // What the outer build was told is not for this one: flags come from the directory's own configuration.
    for name in [
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_BUILD_RUSTFLAGS",
        "CARGO_BUILD_TARGET",
        "CARGO_TARGET_DIR",
        "RUSTC_WRAPPER",
        "RUSTC_WORKSPACE_WRAPPER",
        "CLIPPY_ARGS",
        "TARGET",
        "HOST",
    ] {
        command.env_remove(name);
    }
    match command.output() {
        Ok(output) if output.status.success() => ExitCode::SUCCESS,
        Ok(output) => {
            eprintln!("{}", String::from_utf8_lossy(&output.stderr));
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("cargo could not be started for the guest builders: {error}");
            ExitCode::FAILURE
        }
    }
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|error| panic!("cargo sets {name}: {error}"))
}
