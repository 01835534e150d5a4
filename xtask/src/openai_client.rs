//! The official Python client of OpenAI's API, for the tests of the server: installed by `python3 -m pip`, in pinned versions.

#[path = "../../tests/openai/client.rs"]
mod client;

use std::fs;

use anyhow::{Context, Result};

use crate::process::{heading, run};

/// Sees to it that it is there.
pub fn for_tests() -> Result<()> {
    let target = crate::target_dir();
    if client::find(&target).is_some() {
        return Ok(());
    }
    heading("installing the openai client into the target directory");
    let home = client::directory(&target);
    // Within the same directory, so that the last step is a rename and nothing incomplete has the final name.
    let work = target.join(format!(".openai-client-{}", std::process::id()));
    let requirements = work.join("requirements.txt");
    fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
    fs::write(&requirements, client::REQUIREMENTS)
        .with_context(|| format!("cannot write {}", requirements.display()))?;
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
            &work.to_string_lossy(),
            "--requirement",
            &requirements.to_string_lossy(),
        ],
    )
    .context("cannot install the openai client; check the network and that python3, 3.11 or later, has pip");
    let moved = installed.and_then(|()| {
        // Another version's.
        if home.exists() {
            fs::remove_dir_all(&home)?;
        }
        fs::rename(&work, &home).with_context(|| format!("cannot move it to {}", home.display()))
    });
    // Left-overs do no harm.
    let _ = fs::remove_dir_all(&work);
    moved?;
    client::find(&target)
        .map(drop)
        .with_context(|| format!("the openai client in {} cannot be imported", home.display()))
}
