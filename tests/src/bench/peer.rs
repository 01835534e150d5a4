//! llama.cpp as a process: Python with `llama-cpp-python`, which is installed into an environment of its own when it is not
//! there. It must never know our own engine.

use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

/// The version against which figures are documented.
const PACKAGE: &str = "llama-cpp-python==0.3.36";

/// A running peer with its model loaded.
pub(super) struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    name: String,
}

/// One run.
#[derive(serde::Deserialize)]
pub(super) struct Run {
    pub(super) tokens_per_second: f64,
    pub(super) tokens: Vec<u32>,
}

/// The script's first line.
#[derive(serde::Deserialize)]
struct Ready {
    version: String,
}

impl Peer {
    /// Starts it; `Err` says why there is none.
    pub(super) fn start(
        model: &Path,
        threads: usize,
        tokens: usize,
        prompt: &[u32],
    ) -> Result<Self, String> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/llama_cpp_decode.py");
        let mut child = Command::new(python()?)
            .arg(script)
            .arg(model)
            .args([threads, tokens].map(|number| number.to_string()))
            .args(prompt.iter().map(u32::to_string))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("the peer's Python could not be started: {error}"))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("the peer has no pipes".to_owned());
        };
        let mut peer = Self {
            child,
            input,
            output: BufReader::new(output),
            name: String::new(),
        };
        let ready: Ready = peer.read()?;
        peer.name = format!("llama.cpp (llama-cpp-python {})", ready.version);
        Ok(peer)
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Runs the prompt and the tokens after it once.
    pub(super) fn decode(&mut self) -> Result<Run, String> {
        writeln!(self.input, "run")
            .and_then(|()| self.input.flush())
            .map_err(|error| format!("the peer ended: {error}"))?;
        self.read()
    }

    fn read<T: serde::de::DeserializeOwned>(&mut self) -> Result<T, String> {
        let mut line = String::new();
        self.output
            .read_line(&mut line)
            .map_err(|error| format!("the peer could not be read: {error}"))?;
        if line.is_empty() {
            return Err("the peer ended without an answer".to_owned());
        }
        // The script answers with the figures, or with {"error": …}.
        serde_json::from_str(&line).map_err(|_| format!("the peer said {}", line.trim()))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It ends at the end of its input anyway; nobody waits for a model to be unloaded.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A Python that has the package.
fn python() -> Result<PathBuf, String> {
    let directory = std::env::var_os("TIMETABLE_BENCH_VENV").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench-venv"),
        PathBuf::from,
    );
    let python = directory.join("bin/python");
    let quiet = |command: &mut Command| {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    let has_package = || {
        quiet(
            Command::new(&python)
                .args(["-c", "import llama_cpp"])
                .stderr(Stdio::null()),
        )
    };
    if has_package() {
        return Ok(python);
    }
    eprintln!(
        "installing {PACKAGE} into {}: it is compiled for this CPU, which takes several minutes",
        directory.display()
    );
    if !quiet(Command::new("python3").args(["-m", "venv"]).arg(&directory)) {
        return Err(format!(
            "`python3 -m venv {}` failed; install Python with venv",
            directory.display()
        ));
    }
    let arguments = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        PACKAGE,
    ];
    if !quiet(Command::new(&python).args(arguments)) {
        return Err(format!(
            "pip could not install {PACKAGE}; it needs the network and a C++ compiler"
        ));
    }
    if has_package() {
        Ok(python)
    } else {
        Err(format!("{PACKAGE} is installed but cannot be imported"))
    }
}
