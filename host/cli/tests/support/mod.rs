//! Running the binary as a person would, with a tiny model.
#![allow(dead_code, reason = "each test program uses a part")]

pub mod serving;

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

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
    pub fn json(&self) -> Value {
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

/// How long a command may take on a busy machine. One that takes longer hangs.
const RUN_MAX: Duration = Duration::from_secs(300);

/// Runs it to its end.
#[track_caller]
pub fn run(arguments: &[&str]) -> Ran {
    let child = timetable()
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    Running::of(child).finish(&arguments)
}

/// A child whose output is read as it comes: it never waits for its reader.
pub struct Running {
    child: Child,
    stdout: JoinHandle<String>,
    stderr: JoinHandle<String>,
}

impl Running {
    pub fn of(mut child: Child) -> Self {
        fn read(from: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
            let mut from = from.expect("a pipe");
            std::thread::spawn(move || {
                let mut text = String::new();
                from.read_to_string(&mut text).expect("text");
                text
            })
        }
        let (stdout, stderr) = (read(child.stdout.take()), read(child.stderr.take()));
        Self {
            child,
            stdout,
            stderr,
        }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for its end; kills what hangs, and shows what it had said.
    #[track_caller]
    pub fn finish(mut self, what: &dyn std::fmt::Debug) -> Ran {
        let deadline = Instant::now() + RUN_MAX;
        let mut status = self.child.try_wait().unwrap();
        while status.is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
            status = self.child.try_wait().unwrap();
        }
        if status.is_none() {
            drop(self.child.kill());
            drop(self.child.wait());
        }
        let (stdout, stderr) = (self.stdout.join().unwrap(), self.stderr.join().unwrap());
        let Some(status) = status else {
            panic!("{what:?} hangs\nstdout:\n{stdout}\nstderr:\n{stderr}");
        };
        Ran {
            code: status.code().unwrap_or(-1),
            stdout,
            stderr,
        }
    }
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

/// The prompts of a [`Host`], which take turns.
const PROMPTS: [&str; 8] = ["t40", "t41", "t42", "t43", "t44", "t45", "t46", "t47"];
/// More answers than the slowest test waits for: a host ends because it is told to.
const ANSWERS: usize = 8_000;

/// A host that answers prompts, four at a time, until it is told to finish.
pub struct Host {
    running: Option<Running>,
    pub socket: String,
    pub scratch: tempfile::TempDir,
}

fn generate<'a>(model: &Path, prompts: impl Iterator<Item = &'a str>) -> Command {
    let mut command = timetable();
    command
        .args(["generate", "--model", model.to_str().unwrap()])
        .args(["--json", "--num-gpu-blocks-override", "256"])
        .args(["--weights", "f32", "--ignore-eos", "--max-tokens", "500"])
        .args(["--max-num-seqs", "4"])
        .args(prompts.flat_map(|prompt| ["--prompt", prompt]));
    command
}

/// The token ids of each prompt's whole answers. Every answer to one prompt is the same.
#[track_caller]
fn answers(report: &Value) -> BTreeMap<String, Value> {
    let mut answers = BTreeMap::new();
    for output in report["outputs"].as_array().unwrap() {
        if output["finish_reason"] == "abort" {
            continue;
        }
        let prompt = output["prompt"].as_str().unwrap();
        let tokens = &output["output_token_ids"];
        let first = answers
            .entry(prompt.to_owned())
            .or_insert_with(|| tokens.clone());
        assert_eq!(tokens, first, "an answer to {prompt}");
    }
    answers
}

/// A host's answers while it was disturbed are those of one that nobody disturbs.
#[track_caller]
pub fn answered_as_undisturbed(report: &Value) {
    let mut undisturbed = generate(&tiny_llama(), PROMPTS.into_iter());
    undisturbed.args(["--admin", "none"]).stdin(Stdio::null());
    undisturbed.stdout(Stdio::piped()).stderr(Stdio::piped());
    let undisturbed = Running::of(undisturbed.spawn().unwrap()).finish(&"undisturbed");
    let undisturbed = answers(&undisturbed.succeeds().json());
    let disturbed = answers(report);
    assert!(!disturbed.is_empty(), "it answered nothing");
    for (prompt, tokens) in &disturbed {
        assert_eq!(tokens, &undisturbed[prompt], "the answers to {prompt}");
    }
}

impl Host {
    pub fn start(extra: &[&str]) -> Host {
        Host::with_model(&tiny_llama(), extra)
    }

    /// One whose model is not tiny-llama.
    pub fn with_model(model: &Path, extra: &[&str]) -> Host {
        let scratch = tempfile::tempdir().unwrap();
        let socket = scratch.path().join("admin.sock");
        let socket = socket.to_str().unwrap().to_owned();
        let child = generate(model, PROMPTS.into_iter().cycle().take(ANSWERS))
            .args(["--admin", &socket])
            .args(["--cudagraph-mode", "FULL_AND_PIECEWISE"])
            .args(extra)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let host = Host {
            running: Some(Running::of(child)),
            socket,
            scratch,
        };
        host.wait_for(|builders| builders["builders"][0]["steps"].as_u64() > Some(0));
        host
    }

    pub fn ask(&self, command: &[&str]) -> Ran {
        let mut arguments = command.to_vec();
        arguments.extend(["--admin", &self.socket, "--json"]);
        run(&arguments)
    }

    pub fn wait_for(&self, condition: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + serving::PATIENCE;
        loop {
            let answer = self.ask(&["builders"]);
            if answer.code == 0 {
                let table = answer.json();
                if condition(&table) {
                    return table;
                }
            }
            assert!(
                Instant::now() < deadline,
                "{} {}",
                answer.stdout,
                answer.stderr
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Tells it to end. Its report, with the answers until then.
    #[track_caller]
    pub fn finish(mut self) -> Value {
        let running = self.running.take().unwrap();
        serving::signal(running.id(), "TERM");
        let ran = running.finish(&self.socket);
        ran.fails(1, &["interrupted"]);
        ran.json()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(mut running) = self.running.take() {
            drop(running.child.kill());
            drop(running.child.wait());
        }
    }
}

/// For a command that compiles something of its own: what this build was told is not for that one, and nothing is fetched.
pub fn outside_of_this_build(command: &mut Command) -> &mut Command {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if (name.starts_with("CARGO_") && name != "CARGO_HOME") || name.starts_with("RUSTFLAGS") {
            command.env_remove(&*name);
        }
    }
    command.env("CARGO_NET_OFFLINE", "true")
}
