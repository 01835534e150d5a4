//! Every address of the page, and what it refuses.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use reqwest::{Method, RequestBuilder};
use serde_json::Value;

use crate::host::{Host, PATIENCE, client, fixed_split, slot};
use crate::support::{file, run, tiny_llama};

/// A host's answer.
struct Answer {
    status: u16,
    headers: reqwest::header::HeaderMap,
    body: String,
}

impl Answer {
    #[track_caller]
    fn json(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.body);
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// It is this error, in one line.
    #[track_caller]
    fn refuses(&self, status: u16, parts: &[&str]) {
        let answer = self.json(status);
        let error = answer["error"].as_str().unwrap();
        assert!(!error.contains('\n'), "{error}");
        for part in parts {
            assert!(error.contains(part), "{part} is missing in {error}");
        }
    }
}

struct Client {
    runtime: tokio::runtime::Runtime,
    client: reqwest::Client,
    base: String,
}

impl Client {
    fn of(host: &Host) -> Client {
        let (runtime, client) = client();
        Client {
            runtime,
            client,
            base: host.url(""),
        }
    }

    fn ask(
        &self,
        method: Method,
        path: &str,
        with: impl FnOnce(RequestBuilder) -> RequestBuilder,
    ) -> Answer {
        self.runtime.block_on(async {
            let request = self.client.request(method, format!("{}{path}", self.base));
            let response = with(request).send().await.unwrap();
            Answer {
                status: response.status().as_u16(),
                headers: response.headers().clone(),
                body: response.text().await.unwrap(),
            }
        })
    }

    fn get(&self, path: &str) -> Answer {
        self.ask(Method::GET, path, |request| request)
    }

    fn change(&self, path: &str, body: Vec<u8>) -> Answer {
        self.ask(Method::POST, path, |request| {
            request.header("x-timetable-admin", "1").body(body)
        })
    }

    #[track_caller]
    fn wait_for(&self, condition: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let table = self.get("/api/builders").json(200);
            if condition(&table) {
                return table;
            }
            assert!(Instant::now() < deadline, "{table:#}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn every_address_answers_and_a_builder_is_reloaded_and_rolled_back() {
    let host = Host::start(&[]);
    let client = Client::of(&host);
    for (path, kind, part) in [
        ("/", "text/html", "<title>Timetable</title>"),
        ("/page.css", "text/css", "prefers-color-scheme"),
        ("/page.js", "text/javascript", "/api/builders"),
        ("/host.js", "text/javascript", "fetch("),
        ("/chart.js", "text/javascript", "canvas"),
        ("/change.js", "text/javascript", "/api/reload"),
        ("/icon.svg", "image/svg+xml", "<svg"),
        ("/metrics", "text/plain", "vllm:num_requests_running"),
        ("/api/builders", "application/json", "\"builders\""),
        ("/api/steps", "application/json", "\"capacity\""),
        ("/nothing", "application/json", "error"),
    ] {
        let answer = client.get(path);
        assert_eq!(
            answer.status,
            if path == "/nothing" { 404 } else { 200 },
            "{path}"
        );
        let header = |name: &str| answer.headers[name].to_str().unwrap();
        assert!(header("content-type").starts_with(kind), "{path}");
        assert!(answer.body.contains(part), "{path}");
        let policy = header("content-security-policy");
        for rule in [
            "default-src 'none'",
            "script-src 'self';",
            "frame-ancestors 'none'",
        ] {
            assert!(policy.contains(rule), "{path}: {policy}");
        }
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(header("x-content-type-options"), "nosniff");
    }

    let before = client.wait_for(|table| slot(table)["steps"].as_u64() > Some(9));
    let steps = client.get("/api/steps?last=7").json(200);
    let steps = steps["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 7);
    let number = |step: &Value, key: &str| step[key].as_u64().unwrap();
    for pair in steps.windows(2) {
        assert_eq!(number(&pair[0], "step") + 1, number(&pair[1], "step"));
        assert!(number(&pair[0], "ended_us") <= number(&pair[1], "ended_us"));
    }
    for step in steps {
        let (requests, tokens) = (number(step, "requests"), number(step, "tokens"));
        assert!((1..=4).contains(&requests) && tokens >= requests, "{step}");
        assert!(
            step["ns"]["model"].as_u64() > Some(0) && step["ns"]["build"].as_u64() > Some(0),
            "{step}"
        );
        assert_eq!(
            (&step["fell_back"], &step["failed"]),
            (&false.into(), &false.into())
        );
    }

    // An origin is kept as it was said; whoever shows it takes it for text.
    let origin = "/api/reload?backend=FLASH_ATTN&origin=%3Cscript%3E%26&immediate=true";
    let reloaded = client.change(origin, fixed_split()).json(200);
    assert_eq!(
        (&reloaded["origin"], &reloaded["stage"]),
        (&"<script>&".into(), &"checked".into())
    );
    client.wait_for(|table| slot(table)["active"]["version"] == reloaded["version"]);
    // Its own component again, with other options, in stages.
    let staged =
        "/api/reload?backend=FLASH_ATTN&option=splits=1&canary_per_mille=1&canary_steps=9999999";
    let staged = client.change(staged, Vec::new()).json(200);
    assert_eq!(
        (&staged["stage"], &staged["options"][0][1]),
        (&"canary".into(), &"1".into())
    );
    let withdrawn = client
        .change("/api/rollback?backend=FLASH_ATTN", Vec::new())
        .json(200);
    assert_eq!(withdrawn["withdrawn"]["version"], staged["version"]);
    let back = client
        .change("/api/rollback?backend=FLASH_ATTN", Vec::new())
        .json(200);
    assert_eq!(back["version"], slot(&before)["active"]["version"]);
    let table = client.wait_for(|table| slot(table)["active"]["version"] == back["version"]);
    assert_eq!(table["engine"]["failed_steps"], 0);
}

#[test]
fn what_makes_no_sense_is_refused_in_one_line_and_changes_nothing() {
    let host = Host::start(&[]);
    let client = Client::of(&host);
    let version = slot(&client.get("/api/builders").json(200))["active"]["version"].clone();
    client
        .get("/nothing")
        .refuses(404, &["/nothing", "/api/builders"]);
    let wrong = client.get("/api/reload");
    wrong.refuses(405, &["/api/reload answers POST, not GET"]);
    assert_eq!(wrong.headers["allow"], "POST");
    client
        .change("/api/builders", Vec::new())
        .refuses(405, &["answers GET"]);
    client
        .get("/api/steps?last=many")
        .refuses(400, &["last is \"many\""]);
    client
        .get("/api/steps?first=1")
        .refuses(400, &["\"first\"", "last"]);
    let reload =
        |query: &str, body: &[u8]| client.change(&format!("/api/reload?{query}"), body.to_vec());
    reload("", &[]).refuses(400, &["backend is missing"]);
    reload("backend=FLASH_ATTN", &[]).refuses(400, &["neither a component nor an option"]);
    reload("backend=FLASH_ATTN&shadow_steps=x", &[0; 300_000])
        .refuses(400, &["shadow_steps is \"x\""]);
    reload("backend=FLASH_ATTN&signature_bytes=5", &[1; 4])
        .refuses(400, &["signature_bytes is 5", "4 bytes arrived"]);
    reload("backend=FLASH_ATTN&signature_bytes=99999999", &[1; 4])
        .refuses(413, &["more than a signature"]);
    reload("backend=FLASHINFER", &fixed_split()).refuses(422, &["FLASHINFER", "FLASH_ATTN"]);
    reload("backend=FLASH_ATTN&tenant=acme", &fixed_split()).refuses(422, &["acme"]);
    reload("backend=FLASH_ATTN&origin=bad.wasm", b"\0asm\x01\0\0\0")
        .refuses(422, &["bad.wasm", "core module", "stays"]);
    reload("backend=FLASH_ATTN&canary_steps=5", &fixed_split())
        .refuses(422, &["no share and no tenants", "stays"]);
    client
        .change("/api/rollback", Vec::new())
        .refuses(400, &["backend is missing"]);
    client
        .change("/api/rollback?backend=FLASH_ATTN&stage=2", Vec::new())
        .refuses(400, &["\"stage\""]);
    client
        .change("/api/rollback?backend=FLASH_ATTN", Vec::new())
        .refuses(422, &["no previous version"]);
    // Announced, and not sent.
    let answer = raw(
        &host,
        &format!(
            "POST /api/reload?backend=FLASH_ATTN HTTP/1.1\r\nHost: {}\r\nX-Timetable-Admin: 1\r\nContent-Length: 999999999\r\n\r\n",
            host.address
        ),
    );
    assert!(
        answer.starts_with("HTTP/1.1 413 ") && answer.contains("999999999 bytes are more"),
        "{answer}"
    );
    let table = client.get("/api/builders").json(200);
    assert_eq!(
        (
            &slot(&table)["active"]["version"],
            &slot(&table)["candidate"]
        ),
        (&version, &Value::Null)
    );
}

/// Sends `request` as it is, and gives all that is answered.
fn raw(host: &Host, request: &str) -> String {
    let mut stream = TcpStream::connect(&host.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_page_from_elsewhere_can_ask_for_nothing() {
    let host = Host::start(&[]);
    let client = Client::of(&host);
    let version = slot(&client.get("/api/builders").json(200))["active"]["version"].clone();
    let with = |method: &str, headers: &[(&'static str, &str)]| {
        let path = "/api/reload?backend=FLASH_ATTN&immediate=true";
        let method: Method = method.parse().unwrap();
        client.ask(
            method.clone(),
            if method == Method::GET {
                "/api/builders"
            } else {
                path
            },
            |mut request| {
                for (name, value) in headers {
                    request = request.header(*name, *value);
                }
                if method == Method::POST {
                    request.body(fixed_split())
                } else {
                    request
                }
            },
        )
    };
    let port = host.address.rsplit_once(':').unwrap().1;
    let (rebound, local) = (format!("evil.example:{port}"), format!("localhost:{port}"));
    let own = format!("http://{}", host.address);
    let means_it = ("x-timetable-admin", "1");
    // A form or a script of another page: it cannot send the header.
    with("POST", &[]).refuses(403, &["X-Timetable-Admin".to_ascii_lowercase().as_str()]);
    with("POST", &[("content-type", "text/plain")]).refuses(403, &["x-timetable-admin"]);
    with("POST", &[means_it, ("origin", "http://evil.example")]).refuses(403, &["evil.example"]);
    with("POST", &[means_it, ("origin", "null")]).refuses(403, &["\"null\""]);
    // Nor is it told that it may.
    let asked = with(
        "OPTIONS",
        &[
            ("origin", "http://evil.example"),
            ("access-control-request-headers", "x-timetable-admin"),
        ],
    );
    assert_eq!(asked.status, 403, "{}", asked.body);
    assert!(
        asked
            .headers
            .keys()
            .all(|name| !name.as_str().starts_with("access-control"))
    );
    // A name of another's that was made to mean this machine.
    with("POST", &[means_it, ("host", &rebound)]).refuses(403, &["evil.example", "127.0.0.1"]);
    with("GET", &[("host", &rebound)]).refuses(403, &["evil.example"]);
    with(
        "GET",
        &[("host", &rebound), ("origin", &format!("http://{rebound}"))],
    )
    .refuses(403, &["evil.example"]);
    let table = client.get("/api/builders").json(200);
    assert_eq!(slot(&table)["active"]["version"], version);
    // The page itself, by either name.
    assert_eq!(with("GET", &[("host", &local)]).status, 200);
    with("POST", &[means_it, ("origin", &own)]).json(200);
}

#[test]
fn with_a_token_nobody_else_is_answered_and_without_one_only_loopback_is_opened() {
    let scratch = tempfile::tempdir().unwrap();
    let token = file(&scratch, "token", b"0123456789abcdef0123456789abcdef\n");
    let host = Host::start(&["--admin-token-file", &token]);
    let client = Client::of(&host);
    let answer = client.get("/api/builders");
    answer.refuses(401, &["token", "--admin-token-file"]);
    assert_eq!(answer.headers["www-authenticate"], "Bearer");
    client.get("/metrics").refuses(401, &["token"]);
    client
        .change("/api/rollback?backend=FLASH_ATTN", Vec::new())
        .refuses(401, &["token"]);
    assert_eq!(client.get("/").status, 200);
    let bearer = |token: &str| {
        client.ask(Method::GET, "/api/builders", |request| {
            request
                .header("host", "gpu-7.example:9090")
                .bearer_auth(token)
        })
    };
    bearer("0123456789abcdef0123456789abcdee").refuses(401, &["token"]);
    bearer("0123456789abcdef0123456789abcdef").json(200);

    let model = tiny_llama();
    let start = |more: &[&str]| {
        let mut arguments = vec![
            "generate",
            "--model",
            model.to_str().unwrap(),
            "--prompt",
            "t1",
            "--admin",
            "none",
        ];
        arguments.extend(more);
        run(&arguments)
    };
    start(&["--admin-listen", "0.0.0.0:0"]).fails(4, &["0.0.0.0:0", "token_file", "127.0.0.1"]);
    start(&["--admin-listen", &host.address])
        .fails(4, &[&host.address, "in use", "--admin-listen"]);
    let short = file(&scratch, "short", b"secret");
    start(&[
        "--admin-listen",
        "127.0.0.1:0",
        "--admin-token-file",
        &short,
    ])
    .fails(4, &["6 bytes", "openssl"]);
    assert_eq!(start(&["--admin-listen", "nowhere"]).code, 2);
}

#[test]
fn a_slow_client_delays_nobody() {
    let host = Host::start(&[]);
    let client = Client::of(&host);
    let connect = |text: &str| {
        let mut stream = TcpStream::connect(&host.address).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        stream
    };
    let upload = format!(
        "POST /api/reload?backend=FLASH_ATTN HTTP/1.1\r\nHost: {}\r\nX-Timetable-Admin: 1\r\nContent-Length: 1000000\r\n\r\nhalf",
        host.address
    );
    let mut slow: Vec<TcpStream> = (0..20).map(|_| connect("GET / HT")).collect();
    slow.extend((0..3).map(|_| connect(&upload)));
    client.get("/api/builders").json(200);
    let origin = "/api/reload?backend=FLASH_ATTN&origin=x&immediate=true";
    let reloaded = client.change(origin, fixed_split()).json(200);
    // Four changes at once are enough: one more is told to come again.
    let deadline = Instant::now() + PATIENCE;
    let refused = loop {
        slow.push(connect(&upload));
        std::thread::sleep(Duration::from_millis(20));
        let answer = client.change("/api/rollback?backend=FLASH_ATTN", Vec::new());
        if answer.status == 503 {
            break answer;
        }
        assert!(Instant::now() < deadline, "{}", answer.body);
    };
    refused.refuses(503, &["4 changes are under way"]);
    assert_eq!(refused.headers["retry-after"], "1");
    client.wait_for(|table| slot(table)["steps"].as_u64() > Some(0));
    assert!(reloaded["version"].is_string());
    drop(slow);
}
