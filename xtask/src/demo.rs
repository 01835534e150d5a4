//! `cargo xtask demo`: several prompts are continued by a real model, every step's attention metadata made by a WebAssembly
//! component; while the text streams, a component with another split policy takes its place.

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::process::{heading, output};

const PROMPTS: [&str; 4] = [
    "The night train left the station at ten, and the conductor",
    "A timetable tells passengers when",
    "To bake a good loaf of bread, start with",
    "The history of the railway began when",
];

pub fn run(arguments: &[String]) -> Result<()> {
    if let Some(argument) = arguments.first() {
        bail!("unknown argument `{argument}`; `cargo xtask demo` takes none");
    }
    let model = crate::model()?;
    heading(
        "building the components and the host (a first build takes about ten minutes on two cores)",
    );
    let guests = crate::guests()?;

    let host = crate::host();
    let directory = crate::target_dir().join("demo");
    std::fs::create_dir_all(&directory)
        .with_context(|| format!("{} could not be made", directory.display()))?;
    let socket = directory.join("admin.sock").to_string_lossy().into_owned();
    let replacement = guests.join("flash-attn-fixed-split.wasm");

    heading("the model writes, its builder a component: FLASH_ATTN, balanced splits");
    let mut generate = Command::new(&host);
    generate.arg("generate").arg("--model").arg(&model).args([
        "--ignore-eos",
        "--max-tokens",
        "256",
        "--temperature",
        "0.7",
        "--seed",
        "1",
        "--attention-backend",
        "FLASH_ATTN",
        "--admin",
        &socket,
    ]);
    for prompt in PROMPTS {
        generate.args(["--prompt", prompt]);
    }
    let mut generate = generate
        .spawn()
        .with_context(|| format!("{host} could not be started"))?;
    let swapped = swap_while_running(&host, &socket, &replacement, &mut generate);
    if swapped.is_err() {
        // The error that explains the failure is the swap's; the host is stopped on the way out.
        drop(generate.kill());
    }
    let status = generate.wait()?;
    swapped?;
    if !status.success() {
        bail!("timetable generate failed ({status})");
    }
    eprintln!("\nEvery text was written to its end; no step waited for the swap.");
    Ok(())
}

/// Replaces the builder once text streams, waits until the new one has built some steps, and shows the table.
fn swap_while_running(
    host: &str,
    socket: &str,
    replacement: &Path,
    generate: &mut Child,
) -> Result<()> {
    let first = wait_for_steps(host, socket, 24, None, generate)?;
    heading(
        "another split policy takes its place: timetable reload FLASH_ATTN flash-attn-fixed-split.wasm",
    );
    let path = replacement.to_string_lossy();
    eprint!(
        "{}",
        output(host, &["reload", "FLASH_ATTN", &path, "--admin", socket])?
    );
    wait_for_steps(host, socket, 24, Some(&first), generate)?;
    heading("timetable builders");
    eprintln!("{}", output(host, &["builders", "--admin", socket])?);
    Ok(())
}

/// Waits until a version, another one than `not`, has served `steps` steps. Returns its hash.
fn wait_for_steps(
    host: &str,
    socket: &str,
    steps: u64,
    not: Option<&str>,
    generate: &mut Child,
) -> Result<String> {
    let deadline = Instant::now() + Duration::from_secs(120);
    while Instant::now() < deadline {
        if let Some(status) = generate.try_wait()? {
            bail!("timetable generate ended before its builder was swapped ({status})");
        }
        let answer = Command::new(host)
            .args(["builders", "--json", "--admin", socket])
            .output()
            .with_context(|| format!("{host} could not be started"))?;
        let table: serde_json::Value = serde_json::from_slice(&answer.stdout).unwrap_or_default();
        let builder = &table["builders"][0];
        if let (Some(version), Some(built)) = (
            builder["active"]["version"].as_str(),
            builder["steps"].as_u64(),
        ) && Some(version) != not
            && built >= steps
        {
            return Ok(version.to_owned());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    bail!("no version served {steps} steps within two minutes")
}
