//! Where the official Python client is installed, below the target directory. Included by `xtask`, which installs it, and by the
//! tests that use it. It must never know a server.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What is installed, and is there when it is the same as here.
pub const REQUIREMENTS: &str = include_str!("requirements.txt");

/// The directory for `PYTHONPATH`, below the target directory.
pub fn directory(target: &Path) -> PathBuf {
    target.join("openai-client")
}

/// The same, if the client is there, of this version, and Python can import it.
pub fn find(target: &Path) -> Option<PathBuf> {
    let directory = directory(target);
    let installed = std::fs::read_to_string(directory.join("requirements.txt")).ok()?;
    let imported = Command::new("python3")
        .args(["-c", "import openai"])
        .env("PYTHONPATH", &directory)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    (installed == REQUIREMENTS && imported.is_ok_and(|status| status.success()))
        .then_some(directory)
}
