//! A server in a process of its own. Must never know: what the server is asked, or how its program is configured.

use std::{
    collections::VecDeque,
    io::{self, BufRead, BufReader},
    os::unix::process::CommandExt,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

/// What the last lines are kept of.
const LINES: usize = 50;

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The program does not start.
    #[error("the server's program does not start: {0}")]
    Spawn(io::Error),
    /// It ended, or did not say its address in time.
    #[error("the server {what}; it said: {said}")]
    NotReady {
        /// What it did.
        what: String,
        /// Its last lines.
        said: String,
    },
}

/// A `timetable serve` of one's own. It is killed when this is dropped, and asked to end when the thread that started it ends, however
/// that comes.
#[derive(Debug)]
pub struct ChildServer {
    child: Child,
    url: String,
    lines: Arc<Mutex<VecDeque<String>>>,
    reader: Option<JoinHandle<()>>,
}

impl ChildServer {
    /// Runs the command and waits until it says `… serving MODEL at URL` on standard error.
    ///
    /// # Errors
    /// If it does not start, ends, or does not say so in time.
    pub fn start(mut command: Command, within: Duration) -> Result<Self, ChildError> {
        // SAFETY: between fork and exec the closure makes one system call; it allocates nothing and takes no lock.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?));
        }
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(ChildError::Spawn)?;
        let lines = Arc::new(Mutex::new(VecDeque::new()));
        let (tell, told) = mpsc::channel();
        // Read to the end: a server whose messages nobody takes would wait for its reader.
        let reader = child.stderr.take().map(|stderr| {
            let lines = Arc::clone(&lines);
            std::thread::spawn(move || {
                for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
                    let line = String::from_utf8_lossy(&line).into_owned();
                    if let Some(url) = address(&line) {
                        // Who started it may have lost patience.
                        let _ = tell.send(url.to_owned());
                    }
                    let mut lines = locked(&lines);
                    if lines.len() == LINES {
                        lines.pop_front();
                    }
                    lines.push_back(line);
                }
            })
        });
        let mut server = Self {
            child,
            url: String::new(),
            lines,
            reader,
        };
        match told.recv_timeout(within) {
            Ok(url) => {
                server.url = url;
                Ok(server)
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                Err(server.not_ready(format!("did not say its address in {within:?}")))
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let what = match server.wait(Instant::now() + Duration::from_secs(10)) {
                    Some(status) => format!("ended ({status})"),
                    None => "closed its standard error".to_owned(),
                };
                Err(server.not_ready(what))
            }
        }
    }

    fn not_ready(&self, what: String) -> ChildError {
        ChildError::NotReady {
            what,
            said: self.said(),
        }
    }

    /// Where it serves.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its last lines on standard error.
    pub fn said(&self) -> String {
        locked(&self.lines)
            .iter()
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// Asks it to end, as an operator does, and waits; `None` if it did not within this time, and was killed.
    pub fn stop(mut self, within: Duration) -> Option<ExitStatus> {
        if let Ok(id) = i32::try_from(self.child.id())
            && let Some(id) = Pid::from_raw(id)
        {
            // It may have ended by itself.
            let _ = kill_process(id, Signal::TERM);
        }
        self.wait(Instant::now() + within)
    }

    fn wait(&mut self, deadline: Instant) -> Option<ExitStatus> {
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Ok(status) => return status,
                Err(_) => return None,
            }
        }
    }
}

impl Drop for ChildServer {
    fn drop(&mut self) {
        // Both fail if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

fn locked(lines: &Mutex<VecDeque<String>>) -> MutexGuard<'_, VecDeque<String>> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The address in the line that says that it serves.
fn address(line: &str) -> Option<&str> {
    let (_, of) = line.split_once("serving ")?;
    let (_, url) = of.rsplit_once(" at ")?;
    let url = url.trim();
    url.starts_with("http://").then_some(url)
}

#[cfg(test)]
mod tests {
    use std::{
        process::Command,
        time::{Duration, Instant},
    };

    use super::ChildServer;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_server_says_its_address_and_ends_when_it_is_asked_to() {
        let script = "trap 'exit 7' TERM; echo loading >&2; echo 'timetable: serving at at http://127.0.0.1:77' >&2; \
                      while :; do sleep 0.01; done";
        let server = ChildServer::start(shell(script), Duration::from_secs(60)).expect("a server");
        assert_eq!(server.url(), "http://127.0.0.1:77");
        assert!(server.said().contains("loading"));
        let status = server.stop(Duration::from_secs(60)).expect("it ends");
        assert_eq!(status.code(), Some(7));
    }

    #[test]
    fn a_server_ends_with_who_started_it() {
        let scratch = tempfile::tempdir().expect("a directory");
        let told = scratch.path().join("told");
        let script = format!(
            "trap 'touch {}; exit' TERM; echo 'timetable: serving at at http://127.0.0.1:77' >&2; while :; do sleep 0.01; done",
            told.display()
        );
        let started = std::thread::spawn(move || {
            let server = ChildServer::start(shell(&script), Duration::from_secs(60));
            // As if the process were killed: nothing is dropped.
            std::mem::forget(server.expect("a server"));
        });
        started.join().expect("it starts");
        let deadline = Instant::now() + Duration::from_secs(60);
        while !told.exists() {
            assert!(Instant::now() < deadline, "it was not told to end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_server_that_ends_or_says_nothing_is_none() {
        let of = |script, ms| {
            let error = ChildServer::start(shell(script), Duration::from_millis(ms));
            error.expect_err("no server").to_string()
        };
        let error = of("echo 'timetable: no such model' >&2; exit 4", 60_000);
        assert!(
            error.contains("ended") && error.contains("no such model"),
            "{error}"
        );
        let error = of("exec sleep 60", 50);
        assert!(error.contains("did not say its address in 50ms"), "{error}");
        let none = ChildServer::start(Command::new("/no/such/program"), Duration::ZERO);
        assert!(none.is_err());
    }
}
