//! A host with an admin page.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use serde_json::Value;

use crate::support::{file, timetable, tiny_llama};

/// Longer than anything takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// It answers so many prompts that it outlives every test, and ends with this.
pub struct Host {
    child: Child,
    /// `127.0.0.1:43210`.
    pub address: String,
    pub scratch: tempfile::TempDir,
}

impl Host {
    pub fn start(extra: &[&str]) -> Host {
        const PROMPTS: usize = 20_000;
        let scratch = tempfile::tempdir().unwrap();
        let prompts =
            (0..PROMPTS).flat_map(|i| ["--prompt".to_owned(), format!("t{}", 40 + i % 400)]);
        let mut child = timetable()
            .args(["generate", "--model", tiny_llama().to_str().unwrap()])
            .args(["--admin", "none", "--admin-listen", "127.0.0.1:0", "--json"])
            .args(["--num-gpu-blocks-override", "256", "--weights", "f32"])
            .args(["--ignore-eos", "--max-tokens", "500", "--max-num-seqs", "4"])
            .args(prompts)
            .args(extra)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        // Nobody listens after the first lines; it is read all the same, so that the host never waits.
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                drop(sender.send(line));
            }
        });
        let mut said = Vec::new();
        let address = loop {
            let line = lines.recv_timeout(PATIENCE).unwrap_or_else(|error| {
                panic!("{error}; the host said where its page is in none of\n{said:#?}")
            });
            if let Some((_, rest)) = line.split_once("admin page at http://") {
                break rest.trim_end_matches('/').to_owned();
            }
            said.push(line);
        };
        Host {
            child,
            address,
            scratch,
        }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Ends it as an operator would not.
    pub fn kill(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A client, and what runs it. One connection for each request, as the host has it.
pub fn client() -> (tokio::runtime::Runtime, reqwest::Client) {
    // Another test of this program may have done it.
    drop(rustls::crypto::ring::default_provider().install_default());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let client = reqwest::Client::builder()
        .timeout(PATIENCE)
        .no_proxy()
        .build()
        .unwrap();
    (runtime, client)
}

/// Another builder for FLASH_ATTN.
pub fn fixed_split() -> Vec<u8> {
    timetable_reference::component("flash-attn-fixed-split")
        .unwrap()
        .bytes
        .to_vec()
}

/// The same, which calls itself by markup that would run in a page that took it for markup.
pub fn hostile(scratch: &tempfile::TempDir) -> (String, &'static str) {
    const OWN: &[u8; 24] = b"flash-attn, fixed splits";
    const NAME: &str = "<img src onerror=bad() >";
    let mut bytes = fixed_split();
    let places: Vec<usize> = (0..bytes.len() - OWN.len())
        .filter(|at| bytes[*at..].starts_with(OWN))
        .collect();
    assert!(!places.is_empty(), "the builder's name is in its data");
    for at in places {
        bytes[at..at + OWN.len()].copy_from_slice(NAME.as_bytes());
    }
    (file(scratch, "hostile.wasm", &bytes), NAME)
}

/// Whoever misbehaves on command.
pub fn chaos(scratch: &tempfile::TempDir) -> String {
    let bytes = timetable_reference::chaos(timetable_types::Family::FlashAttn).unwrap();
    file(scratch, "chaos.wasm", bytes)
}

/// The first slot of an answer of `/api/builders`.
pub fn slot(table: &Value) -> &Value {
    &table["builders"][0]
}

/// The name of a file.
pub fn name_of(path: &str) -> &str {
    Path::new(path).file_name().unwrap().to_str().unwrap()
}
