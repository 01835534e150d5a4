//! A host that serves, and its clients.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use serde_json::Value;

use super::{Ran, file, run, timetable, tiny_llama};

/// How long anything may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A chat template for a model that has none: each message's role and text as words. (Words that begin as its special tokens do, t0
/// to t3, are several tokens.)
pub const TEMPLATE: &str = "{% for message in messages %}{{ {'system': 't411', 'user': 't412'}[message.role] or 't413' }} {{ message.content }} {% endfor %}{% if tools %}{{ tools[0].function.name }} {% endif %}{% if add_generation_prompt %}t414{% endif %}";

/// `timetable serve` of the tiny model on a port of its own.
pub struct Serving {
    child: Child,
    lines: Receiver<String>,
    /// What it said on standard error until it served.
    pub said: Vec<String>,
    /// HOST:PORT.
    pub address: String,
    /// The admin socket.
    pub socket: String,
    pub scratch: tempfile::TempDir,
}

impl Serving {
    pub fn start(extra: &[&str]) -> Serving {
        let scratch = tempfile::tempdir().unwrap();
        let template = file(&scratch, "template.jinja", TEMPLATE.as_bytes());
        let socket = scratch.path().join("admin.sock");
        let socket = socket.to_str().unwrap().to_owned();
        let blocks = "--num-gpu-blocks-override";
        let blocks = (!extra.contains(&blocks)).then_some([blocks, "256"]);
        let mut child = timetable()
            .args(["serve", "--model", tiny_llama().to_str().unwrap()])
            .args(["--listen", "127.0.0.1:0", "--admin", &socket])
            .args(["--chat-template", &template, "--weights", "f32"])
            .args(blocks.into_iter().flatten())
            .args(extra)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Read as it comes, until its end: it never waits for us.
        let (sender, lines) = unbounded();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let mut serving = Serving {
            child,
            lines,
            said: Vec::new(),
            address: String::new(),
            socket,
            scratch,
        };
        let ready = serving.wait_for_line(" at http://");
        let (_, address) = ready.rsplit_once("http://").unwrap();
        serving.address = address.to_owned();
        serving
    }

    /// Waits until it says `part` on standard error.
    #[track_caller]
    pub fn wait_for_line(&mut self, part: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.said.push(line.clone());
                    if line.contains(part) {
                        return line;
                    }
                }
                Err(_) => panic!("it does not say `{part}`, but {:?}", self.said),
            }
        }
    }

    /// Sends one request; the whole answer.
    #[track_caller]
    pub fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        self.send(method, path, headers, body).answer()
    }

    #[track_caller]
    pub fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &[], "")
    }

    #[track_caller]
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.ask("POST", path, &[], &body.to_string())
    }

    /// Sends one request and reads nothing.
    #[track_caller]
    pub fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Connection {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n",
            self.address
        );
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !body.is_empty() {
            head.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        // A server that refuses a body unread may close before all of it is written.
        let _ = stream.write_all(format!("{head}\r\n{body}").as_bytes());
        Connection(BufReader::new(stream))
    }

    /// The host's table of builders.
    #[track_caller]
    pub fn table(&self) -> Value {
        run(&["builders", "--admin", &self.socket, "--json"])
            .succeeds()
            .json()
    }

    /// Waits until the table is as it should be.
    #[track_caller]
    pub fn wait_until(&self, what: &str, condition: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let table = self.table();
            if condition(&table) {
                return table;
            }
            assert!(Instant::now() < deadline, "not {what}: {}", table["engine"]);
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn signal(&self, name: &str) {
        signal(self.child.id(), name);
    }

    /// Waits for its end.
    #[track_caller]
    pub fn end(mut self) -> Ran {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut said = std::mem::take(&mut self.said);
        said.extend(self.lines.iter());
        Ran {
            code: status.code().unwrap_or(-1),
            stdout: String::new(),
            stderr: said.join("\n"),
        }
    }

    /// A file of its scratch directory.
    pub fn path(&self, name: &str) -> std::path::PathBuf {
        Path::new(self.scratch.path()).join(name)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal to a process of ours.
#[track_caller]
pub fn signal(process: u32, name: &str) {
    let mut kill = std::process::Command::new("kill");
    let sent = kill.args(["-s", name, &process.to_string()]).status();
    assert!(sent.unwrap().success());
}

/// A connection whose request was sent.
pub struct Connection(BufReader<TcpStream>);

impl Connection {
    /// Reads until `part` has come.
    #[track_caller]
    pub fn read_until(&mut self, part: &str) -> String {
        let mut text = String::new();
        while !text.contains(part) {
            let read = self.0.read_line(&mut text).expect("it answers in time");
            assert!(read > 0, "`{part}` does not come, but {text}");
        }
        text
    }

    /// The whole answer.
    #[track_caller]
    pub fn answer(self) -> Answer {
        self.answer_after(String::new())
    }

    /// The whole answer, of which `begun` was read already.
    #[track_caller]
    pub fn answer_after(mut self, begun: String) -> Answer {
        let mut bytes = begun.into_bytes();
        let read = self.0.read_to_end(&mut bytes);
        let text = String::from_utf8(bytes).expect("text");
        read.unwrap_or_else(|error| panic!("{error} after {text}"));
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        let mut lines = head.lines();
        let status = lines.next().and_then(|line| line.split(' ').nth(1));
        let headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let chunked = headers
            .iter()
            .any(|(name, value)| name == "transfer-encoding" && value == "chunked");
        Answer {
            status: status
                .and_then(|status| status.parse().ok())
                .expect("a status"),
            body: if chunked {
                unchunked(body)
            } else {
                body.to_owned()
            },
            headers,
        }
    }
}

/// A body without its chunks' sizes; whole, or the test fails.
#[track_caller]
fn unchunked(mut rest: &str) -> String {
    let mut body = String::new();
    loop {
        let (size, after) = rest.split_once("\r\n").expect("a chunk's size");
        let size = usize::from_str_radix(size, 16).expect("a chunk's size");
        if size == 0 {
            return body;
        }
        body.push_str(&after[..size]);
        rest = after[size..].strip_prefix("\r\n").expect("a chunk's end");
    }
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The answer's JSON; its status must be 200.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.json()
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// It is an error of OpenAI's shape, with this status, and says `part`.
    #[track_caller]
    pub fn refused(&self, status: u16, part: &str) -> Value {
        assert_eq!(self.status, status, "{}", self.body);
        assert_eq!(self.header("content-type"), Some("application/json"));
        let error = self.json()["error"].clone();
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains(part), "`{part}` is missing in: {message}");
        assert!(error["type"].is_string(), "{error}");
        for optional in ["param", "code"] {
            let value = error.get(optional).expect("a member");
            assert!(value.is_string() || value.is_null(), "{error}");
        }
        error
    }

    /// The events of a stream, which must end with `[DONE]`.
    #[track_caller]
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.body);
        let kind = self.header("content-type").unwrap_or_default();
        assert!(kind.starts_with("text/event-stream"), "{kind}");
        let events: Vec<&str> = self.body.split_terminator("\n\n").collect();
        let (last, events) = events.split_last().expect("an event");
        assert_eq!(*last, "data: [DONE]");
        events
            .iter()
            .map(|event| {
                let data = event.strip_prefix("data: ").expect("an event");
                serde_json::from_str(data).expect("JSON")
            })
            .collect()
    }
}
