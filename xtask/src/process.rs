//! Running other programs, with errors that say which and how.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Prints a line that stands out among the output of the programs that run.
pub fn heading(text: &str) {
    eprintln!("\n── {text}");
}

/// Runs a program in the repository's root and waits; an exit status other than 0 is an error.
pub fn run(program: &str, arguments: &[&str]) -> Result<()> {
    run_with(program, arguments, &[])
}

/// As [`run`], with environment variables set.
pub fn run_with(program: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Result<()> {
    let status = Command::new(program)
        .args(arguments)
        .envs(environment.iter().copied())
        .current_dir(crate::root())
        .status()
        .with_context(|| format!("{program} could not be started; is it installed and on PATH?"))?;
    if !status.success() {
        bail!("`{program} {}` failed ({status})", arguments.join(" "));
    }
    Ok(())
}

/// Runs cargo: the one that runs this program.
pub fn cargo(arguments: &[&str]) -> Result<()> {
    run(&cargo_program(), arguments)
}

/// The cargo that runs this program.
pub fn cargo_program() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned())
}

/// Standard output of a program, as text.
pub fn output(program: &str, arguments: &[&str]) -> Result<String> {
    output_with(program, arguments, &[])
}

/// As [`output`], with environment variables set.
pub fn output_with(
    program: &str,
    arguments: &[&str],
    environment: &[(&str, &str)],
) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .envs(environment.iter().copied())
        .current_dir(crate::root())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("{program} could not be started; is it installed and on PATH?"))?;
    if !output.status.success() {
        bail!(
            "`{program} {}` failed ({})",
            arguments.join(" "),
            output.status
        );
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("{program} printed something that is not text"))
}
