//! A `timetable serve` of the tiny model, as the soak needs it: keys, two tenants, an admin socket. Knows no load.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::{fs::DirBuilderExt, net::UnixStream},
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use timetable_load::ChildServer;
use timetable_reference::{chaos, component};
use timetable_types::Family;

use crate::drive::tiny_llama_dir;

/// The backend whose builders are replaced.
const BACKEND: &str = "FLASH_ATTN";
/// Everybody's builders, in turn.
const NAMES: [&str; 2] = ["flash-attn-fixed-split", "flash-attn"];
/// Calls of an instance that behave: those that it is tried with.
const CALLS_OF_THE_TRIAL: &str = "8";
const START: Duration = Duration::from_secs(120);
const ANSWER: Duration = Duration::from_secs(60);

/// The key of those who are nobody's.
pub const KEY: &str = "key-of-nobody";
/// The key of the tenant whose builder misbehaves.
pub const KEY_OF_CHAOS: &str = "key-of-chaos";

const CONFIG: &str = r#"
[engine]
weights = "f32"
max_model_len = 512
max_num_seqs = 128
# Less than all clients ask for at once: some requests lose their blocks and begin again.
num_gpu_blocks_override = 640
# One split for each request, whatever the version: an equal order of sums.
max_num_splits = 1

[server]
max_waiting_requests = 4096

[admin]
socket = "admin/admin.sock"
cache_dir = "cache"

[tenants.chaos]
component = "chaos.wasm"

[tenants.chaos.options]
chaos = "random"
chaos-from-call = "8"

[tenants.chaos.policy]
quarantine_faults = 1000
window_steps = 1000
max_backoff_steps = 8
"#;

/// The running server.
pub struct Host {
    server: ChildServer,
    socket: PathBuf,
    chaos: Vec<u8>,
    // Last: the server ends before its directory.
    _scratch: tempfile::TempDir,
}

impl Host {
    /// Starts `program` and waits until it serves.
    pub fn start(program: &Path) -> Result<Self, String> {
        let scratch = tempfile::tempdir().map_err(|error| format!("no directory: {error}"))?;
        let path = |name: &str| scratch.path().join(name);
        let chaos = chaos(Family::FlashAttn).ok_or("this build has no chaos builder")?;
        let keys = format!("{KEY}\n{KEY_OF_CHAOS} chaos\n");
        let files: [(&str, &[u8]); 3] = [
            ("timetable.toml", CONFIG.as_bytes()),
            ("keys", keys.as_bytes()),
            ("chaos.wasm", chaos),
        ];
        for (name, bytes) in files {
            std::fs::write(path(name), bytes).map_err(|error| format!("{name}: {error}"))?;
        }
        for name in ["admin", "cache"] {
            let made = std::fs::DirBuilder::new().mode(0o700).create(path(name));
            made.map_err(|error| format!("{name}: {error}"))?;
        }
        let mut command = Command::new(program);
        command
            .args(["serve", "--listen", "127.0.0.1:0", "--model"])
            .arg(tiny_llama_dir())
            .arg("--config")
            .arg(path("timetable.toml"))
            .arg("--api-keys")
            .arg(path("keys"));
        let server = ChildServer::start(command, START);
        Ok(Self {
            server: server.map_err(|error| error.to_string())?,
            socket: path("admin/admin.sock"),
            chaos: chaos.to_vec(),
            _scratch: scratch,
        })
    }

    /// Where it serves.
    pub fn url(&self) -> &str {
        self.server.url()
    }

    /// Its last lines on standard error.
    pub fn said(&self) -> String {
        self.server.said()
    }

    /// Ends it; what it ended with, if it did in time.
    pub fn stop(self) -> Option<ExitStatus> {
        self.server.stop(Duration::from_secs(60))
    }

    /// Resident memory.
    pub fn resident_kib(&self) -> Option<u64> {
        let path = format!("/proc/{}/status", self.server.id());
        let status = std::fs::read_to_string(path).ok()?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.split_whitespace().next()?.parse().ok()
    }

    /// The table of builders, with the engine's counts.
    pub fn builders(&self) -> Result<Value, String> {
        self.ask(&json!({ "op": "builders" }), &[])
    }

    /// Puts another version of everybody's builder into service, and waits until it serves. False if it did not before `done`: nothing
    /// steps any more then, and no version begins to serve.
    pub fn reload(&self, round: usize, done: &AtomicBool) -> Result<bool, String> {
        let name = NAMES[round % NAMES.len()];
        let component = component(name).ok_or("this build has no reference builders")?;
        let request = json!({
            "op": "reload", "backend": BACKEND, "origin": name, "component_bytes": component.bytes.len(), "options": [],
            "plan": {},
        });
        let version = self.ask(&request, component.bytes)?["version"].take();
        let deadline = Instant::now() + ANSWER;
        loop {
            let table = self.builders()?;
            let mut builders = table["builders"].as_array().into_iter().flatten();
            let everybodys = builders.find(|builder| builder["tenant"].is_null());
            if everybodys.is_some_and(|builder| builder["active"]["version"] == version) {
                return Ok(true);
            }
            if done.load(Relaxed) {
                return Ok(false);
            }
            if Instant::now() > deadline {
                return Err(format!(
                    "{name} was taken and does not serve: {everybodys:?}"
                ));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Gives the tenant's builder other ways to misbehave.
    pub fn reload_chaos(&self, round: usize) -> Result<Value, String> {
        let options = json!([
            ["chaos", "random"],
            ["chaos-from-call", CALLS_OF_THE_TRIAL],
            ["chaos-seed", round.to_string()],
        ]);
        let request = json!({
            "op": "reload", "backend": BACKEND, "tenant": "chaos", "origin": "chaos", "component_bytes": self.chaos.len(),
            "options": options, "plan": {},
        });
        self.ask(&request, &self.chaos)
    }

    fn ask(&self, request: &Value, payload: &[u8]) -> Result<Value, String> {
        let asked = || {
            let mut stream = UnixStream::connect(&self.socket)?;
            stream.set_read_timeout(Some(ANSWER))?;
            stream.set_write_timeout(Some(ANSWER))?;
            stream.write_all(format!("{request}\n").as_bytes())?;
            stream.write_all(payload)?;
            let mut answer = String::new();
            BufReader::new(stream).read_line(&mut answer)?;
            Ok::<_, std::io::Error>(answer)
        };
        let answer = asked().map_err(|error| format!("the admin socket: {error}"))?;
        let mut answer: Value = serde_json::from_str(&answer)
            .map_err(|error| format!("the admin socket answered {answer:?}: {error}"))?;
        match answer.get_mut("ok") {
            Some(ok) => Ok(ok.take()),
            None => Err(answer["error"].to_string()),
        }
    }
}
