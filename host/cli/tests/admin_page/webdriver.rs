//! A headless Chromium, driven through ChromeDriver: WebDriver's protocol, which is JSON over HTTP.

use std::env;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use base64::Engine as _;
use serde_json::{Value, json};

use crate::host::{PATIENCE, client};

/// How WebDriver writes a reference to an element.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// The driver's process and one window.
pub struct Browser {
    driver: Child,
    session: String,
    runtime: tokio::runtime::Runtime,
    client: reqwest::Client,
    _profile: tempfile::TempDir,
}

/// A program: where `variable` says, or on the path.
fn program(variable: &str, names: &[&str]) -> Option<PathBuf> {
    if let Some(named) = env::var_os(variable) {
        return Some(named.into());
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = env::split_paths(&path).collect();
    let mut places = names
        .iter()
        .flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    places.find(|place| place.is_file())
}

impl Browser {
    /// None where there is no browser: says so, and how to get one. In CI that is an error.
    pub fn start() -> Option<Browser> {
        let found = (
            program(
                "CHROMIUM",
                &["chromium", "chromium-browser", "google-chrome"],
            ),
            program("CHROMEDRIVER", &["chromedriver"]),
        );
        let (Some(chromium), Some(driver)) = found else {
            let message = "SKIPPED: there is no Chromium with ChromeDriver; install them (Debian: apt-get install chromium chromium-driver), or name them with CHROMIUM and CHROMEDRIVER";
            assert!(env::var_os("CI").is_none_or(|ci| ci != "true"), "{message}");
            println!("{message}");
            return None;
        };
        Some(Browser::of(&chromium, &driver))
    }

    fn of(chromium: &Path, driver: &Path) -> Browser {
        let mut driver = Command::new(driver)
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("ChromeDriver starts");
        let mut said = BufReader::new(driver.stdout.take().unwrap()).lines();
        let port = said.by_ref().map_while(Result::ok).find_map(|line| {
            let (_, port) = line.split_once("successfully on port ")?;
            port.trim_end_matches('.').parse::<u16>().ok()
        });
        // Read on, so that it never waits.
        std::thread::spawn(move || said.map_while(Result::ok).for_each(drop));
        let profile = tempfile::tempdir().unwrap();
        let arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            "--window-size=1280,900",
            &format!("--user-data-dir={}", profile.path().display()),
        ];
        let (runtime, client) = client();
        let mut browser = Browser {
            driver,
            session: format!(
                "http://127.0.0.1:{}/session",
                port.expect("ChromeDriver says its port")
            ),
            runtime,
            client,
            _profile: profile,
        };
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": { "binary": chromium, "args": arguments },
            "goog:loggingPrefs": { "browser": "ALL" },
        } } });
        let session = browser.post("", &wanted);
        browser.session = format!(
            "{}/{}",
            browser.session,
            session["sessionId"].as_str().unwrap()
        );
        browser
    }

    #[track_caller]
    fn send(&self, request: reqwest::RequestBuilder) -> Result<Value, String> {
        let text = self
            .runtime
            .block_on(async { request.send().await.unwrap().text().await.unwrap() });
        let answer: Value = serde_json::from_str(&text).unwrap();
        match answer["value"]["error"].as_str() {
            Some(error) => Err(format!("{error}: {}", answer["value"]["message"])),
            None => Ok(answer["value"].clone()),
        }
    }

    #[track_caller]
    fn post(&self, command: &str, body: &Value) -> Value {
        let request = self.client.post(format!("{}{command}", self.session));
        let request = request.header("content-type", "application/json");
        self.send(request.body(body.to_string())).unwrap()
    }

    pub fn open(&self, url: &str) {
        self.post("/url", &json!({ "url": url }));
    }

    /// What a script returns.
    pub fn run(&self, script: &str) -> Value {
        self.post("/execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// The visible text of what `css` selects first.
    #[track_caller]
    pub fn text(&self, css: &str) -> String {
        let script = format!(
            "return document.querySelector({})?.innerText ?? ''",
            json!(css)
        );
        self.run(&script).as_str().unwrap().to_owned()
    }

    /// Waits until the text of what `css` selects is as `condition` wants it.
    #[track_caller]
    pub fn wait_for(&self, css: &str, condition: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let text = self.text(css);
            if condition(&text) {
                return text;
            }
            assert!(
                Instant::now() < deadline,
                "{css} is {text:?}\n{}",
                self.text("body")
            );
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    #[track_caller]
    fn element(&self, css: &str) -> String {
        let found = self.post(
            "/element",
            &json!({ "using": "css selector", "value": css }),
        );
        found[ELEMENT].as_str().unwrap().to_owned()
    }

    /// Clicks as a person does: what is covered or not there is an error.
    #[track_caller]
    pub fn click(&self, css: &str) {
        let element = self.element(css);
        self.post(&format!("/element/{element}/click"), &json!({}));
    }

    /// Types into a field, or chooses a file.
    #[track_caller]
    pub fn keys(&self, css: &str, text: &str) {
        let element = self.element(css);
        self.post(
            &format!("/element/{element}/value"),
            &json!({ "text": text }),
        );
    }

    /// Empties a field and types into it.
    #[track_caller]
    pub fn fill(&self, css: &str, text: &str) {
        let element = self.element(css);
        self.post(&format!("/element/{element}/clear"), &json!({}));
        self.keys(css, text);
    }

    /// A command of Chromium's own protocol.
    pub fn devtools(&self, command: &str, parameters: &Value) -> Value {
        self.post(
            "/goog/cdp/execute",
            &json!({ "cmd": command, "params": parameters }),
        )
    }

    /// The whole page as a PNG, at that width and in that colour scheme.
    pub fn picture(&self, width: u32, scheme: &str) -> Vec<u8> {
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.devtools("Emulation.setEmulatedMedia", &features);
        let size = |height: &Value| {
            let metrics = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
            self.devtools("Emulation.setDeviceMetricsOverride", &metrics);
        };
        size(&json!(900));
        size(&self.run("return document.documentElement.scrollHeight"));
        let frames = "return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))";
        self.run(frames);
        let taken = self.devtools("Page.captureScreenshot", &json!({}));
        self.devtools("Emulation.clearDeviceMetricsOverride", &json!({}));
        let text = taken["data"].as_str().unwrap();
        base64::engine::general_purpose::STANDARD
            .decode(text)
            .unwrap()
    }

    /// What the browser has complained of since the last call: level, source, message.
    pub fn complaints(&self) -> Vec<String> {
        let entries = self.post("/se/log", &json!({ "type": "browser" }));
        let entries = entries.as_array().unwrap().iter();
        let severe =
            entries.filter(|entry| matches!(entry["level"].as_str(), Some("SEVERE" | "WARNING")));
        severe
            .map(|entry| format!("{} {}", entry["source"], entry["message"]))
            .collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The driver ends its browser with the session.
        let end = async { self.client.delete(&self.session).send().await };
        drop(self.runtime.block_on(end));
        drop(self.driver.kill());
        drop(self.driver.wait());
    }
}
