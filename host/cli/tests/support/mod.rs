//! Running the binary as a person would, with a tiny model.
#![allow(dead_code, reason = "each test program uses a part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What a run printed, and how it ended.
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    /// The run ended with `code` and exactly one line of error that contains every text of `parts`.
    #[track_caller]
    pub fn fails(&self, code: i32, parts: &[&str]) {
        assert_eq!(
            self.code, code,
            "stdout:\n{}\nstderr:\n{}",
            self.stdout, self.stderr
        );
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        let lines: Vec<&str> = self
            .stderr
            .lines()
            .filter(|line| line.starts_with("timetable: "))
            .collect();
        assert_eq!(lines.len(), 1, "one line of error, not\n{}", self.stderr);
        for part in parts {
            assert!(
                lines[0].contains(part),
                "`{part}` is missing in: {}",
                lines[0]
            );
        }
    }

    /// The run ended well.
    #[track_caller]
    pub fn succeeds(&self) -> &Self {
        assert_eq!(
            self.code, 0,
            "stdout:\n{}\nstderr:\n{}",
            self.stdout, self.stderr
        );
        self
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error} in\n{}", self.stdout))
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Ran {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// The binary under test.
pub fn timetable() -> Command {
    Command::new(env!("CARGO_BIN_EXE_timetable"))
}

/// Runs it to its end.
#[track_caller]
pub fn run(arguments: &[&str]) -> Ran {
    timetable()
        .args(arguments)
        .output()
        .expect("the binary starts")
        .into()
}

/// Runs it with text on standard input.
#[track_caller]
pub fn run_with_input(arguments: &[&str], input: &str) -> Ran {
    use std::io::Write;
    use std::process::Stdio;
    let mut child = timetable()
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    child
        .stdin
        .take()
        .unwrap()
        .write_all(input.as_bytes())
        .unwrap();
    child.wait_with_output().unwrap().into()
}

/// A random two-layer Llama whose words are t0 … t511.
pub fn tiny_llama() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/tiny-llama")
}

/// Writes `bytes` to `name` in `directory` and gives the path as text.
pub fn file(directory: &tempfile::TempDir, name: &str, bytes: &[u8]) -> String {
    let path = directory.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}
