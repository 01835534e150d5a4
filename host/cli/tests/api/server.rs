//! A server of the tiny model, for as long as a test needs it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::http::{Client, PATIENCE, Request};
use crate::support::{run, timetable, tiny_llama};

/// A key of the server's, of the tenant `a`.
pub const KEY: &str = "key-a";
/// Lines of the file of keys.
const KEYS: &str = "key-a a\nkey-b b\n";

/// A conversation's template with words of the tiny model, none of which begins with a special one; it knows the usual roles only.
const TEMPLATE: &str = "\
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant'] -%}{{ raise_exception('unknown role') }}{%- endif -%}
t40 {{ message.content }} t41
{%- endfor -%}
{%- if add_generation_prompt %} t42{% endif -%}";

/// Copies the tiny model, with a chat template where asked, and a context as long as `max_model_len`.
pub fn model(directory: &Path, template: bool, max_model_len: usize) -> String {
    let model = directory.join("tiny-llama");
    fs::create_dir(&model).unwrap();
    for file in [
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        fs::copy(tiny_llama().join(file), model.join(file)).unwrap();
    }
    let config = fs::read_to_string(tiny_llama().join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["max_position_embeddings"] = json!(max_model_len);
    fs::write(model.join("config.json"), config.to_string()).unwrap();
    if template {
        fs::write(model.join("chat_template.jinja"), TEMPLATE).unwrap();
    }
    model.to_str().unwrap().to_owned()
}

/// What a test needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Keys, and a small context: nothing takes long.
    Small,
    /// A context so long that a request lasts until somebody ends it.
    Long,
    /// The same, with keys.
    Guarded,
    /// The same as `Long`, without a chat template.
    Plain,
}

/// `timetable serve`, ended when dropped.
pub struct Served {
    child: Child,
    pub address: SocketAddr,
    model: String,
    scratch: tempfile::TempDir,
}

impl Served {
    /// With keys, and so small a context that nothing takes long.
    pub fn small() -> Self {
        Self::start(Kind::Small, "")
    }

    /// `settings` are lines of a configuration.
    pub fn start(kind: Kind, settings: &str) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let context = if kind == Kind::Small { 1024 } else { 32_768 };
        let model = model(scratch.path(), kind != Kind::Plain, context);
        let file = |name: &str, text: &str| {
            let path = scratch.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let mut command = timetable();
        command
            .args([
                "serve",
                "--model",
                &model,
                "--admin",
                "none",
                "--listen",
                "127.0.0.1:0",
                "--weights",
                "f32",
            ])
            .args(["--served-model-name", "tiny-llama"])
            // Room for three of the longest.
            .args(["--num-gpu-blocks-override", &(3 * context / 16).to_string()])
            .arg("--config")
            .arg(file("config.toml", settings));
        if matches!(kind, Kind::Small | Kind::Guarded) {
            command.arg("--api-keys").arg(file("keys", KEYS));
        }
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let (sender, lines) = mpsc::channel();
        // Read to the end, so that it never waits for its reader.
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                eprintln!("server: {line}");
                let _ = sender.send(line);
            }
        });
        let address = loop {
            let line = match lines.recv_timeout(PATIENCE) {
                Ok(line) => line,
                Err(error) => {
                    drop(child.kill());
                    panic!("the server does not start: {error}, {:?}", child.wait());
                }
            };
            if let Some((_, address)) = line.split_once(" at http://") {
                break address
                    .trim()
                    .parse()
                    .unwrap_or_else(|error| panic!("{error}: {line}"));
            }
        };
        Self {
            child,
            address,
            model,
            scratch,
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Somewhere to leave files.
    pub fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    fn get(&self, path: &str) -> String {
        let response = Client::new(self.address).ask(&Request::get(path)).unwrap();
        assert_eq!(response.status, 200, "{path}: {}", response.text());
        response.text()
    }

    pub fn description(&self) -> String {
        self.get("/openapi.json")
    }

    /// What `timetable generate` answers, without a server: `max_tokens` words, greedily.
    pub fn alone(&self, prompt: &str, max_tokens: usize) -> String {
        let ran = run(&[
            "generate",
            "--admin",
            "none",
            "--model",
            &self.model,
            "--prompt",
            prompt,
            "--max-tokens",
            &max_tokens.to_string(),
            "--ignore-eos",
            "--weights",
            "f32",
            "--json",
            "--num-gpu-blocks-override",
            "256",
        ]);
        let answer = ran.succeeds().json();
        answer["outputs"][0]["text"]
            .as_str()
            .unwrap_or_else(|| panic!("{answer}"))
            .to_owned()
    }

    /// It runs, a good request has the right answer, and nothing runs, waits or holds a block afterwards.
    pub fn ends_well(mut self) {
        let body =
            json!({"model": "tiny-llama", "prompt": "t5 t6 t7", "max_tokens": 8, "temperature": 0, "ignore_eos": true})
                .to_string();
        let request =
            Request::post("/v1/completions", body).with("Authorization", format!("Bearer {KEY}"));
        let response = Client::new(self.address).ask(&request).expect("an answer");
        assert_eq!(response.status, 200, "{}", response.text());
        assert_eq!(
            response.json()["choices"][0]["text"],
            self.alone("t5 t6 t7", 8)
        );
        let deadline = Instant::now() + PATIENCE;
        loop {
            let metrics = metrics(&self.get("/metrics"));
            let busy = [
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                "vllm:kv_cache_usage_perc",
            ]
            .map(|name| (name, metrics[name]));
            if busy.iter().all(|(_, value)| *value == 0.0) {
                break;
            }
            assert!(Instant::now() < deadline, "{busy:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(self.child.try_wait().expect("a child"), None);
    }
}

/// Each metric's sum.
fn metrics(text: &str) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if let Some((series, value)) = line.rsplit_once(' ') {
            let name = series.split('{').next().unwrap_or_default();
            *sums.entry(name.to_owned()).or_default() += value.parse().unwrap_or(0.0);
        }
    }
    sums
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
