//! What is no HTTP, or HTTP that nobody should send: refused or hung up on, in bounded time, and nothing left behind.

use std::io::ErrorKind;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::http::{Connection, Request, Response};
use crate::server::{KEY, Kind, Served};

fn good() -> Request {
    let body = json!({"model": "tiny-llama", "prompt": "t5 t6 t7", "max_tokens": 2}).to_string();
    Request::post("/v1/completions", body).with("Authorization", format!("Bearer {KEY}"))
}

/// A request with these lines in place of its length.
fn framed(lines: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n{lines}\r\n"
    );
    [head.as_bytes(), body].concat()
}

fn chunk(size: &str, data: &str) -> String {
    format!("{size}\r\n{data}\r\n")
}

/// What comes back, if anything does.
fn outcome(server: &Served, bytes: &[u8]) -> Option<Response> {
    let mut connection = Connection::open(server.address).expect("the server listens");
    // It may have refused and closed before all was sent.
    let _ = connection.send(bytes);
    let _ = connection.finish();
    match connection.response() {
        Ok(response) => Some(response),
        Err(error) => {
            // A hang shows as a timeout.
            let closed = [
                ErrorKind::UnexpectedEof,
                ErrorKind::ConnectionReset,
                ErrorKind::BrokenPipe,
            ];
            assert!(closed.contains(&error.kind()), "{error}");
            None
        }
    }
}

fn garbage() -> Vec<(&'static str, Vec<u8>)> {
    let body = br#"{"model": "tiny-llama", "prompt": "t5", "max_tokens": 2}"#;
    let text = std::str::from_utf8(body).unwrap_or_default();
    let length = format!("{:x}", body.len());
    let mut all: Vec<(&str, Vec<u8>)> = Vec::new();
    for line in [
        "\r\n\r\n",
        "\0",
        "GET\r\n\r\n",
        "GET / \r\n\r\n",
        "GET /health HTTP/9.9\r\n\r\n",
        "GET /health HTTP/1.1 HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET health HTTP/1.1\r\nHost: a\r\n\r\n",
        "GE\0T /health HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET /hea\0lth HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET /hea lth HTTP/1.1\r\nHost: a\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "\u{16}\u{3}\u{1}\u{2}\0\u{1}\0\u{1}\u{fc}\u{3}\u{3}",
        "HTTP/1.1 200 OK\r\n\r\n",
        "{\"prompt\": \"t5\"}\r\n\r\n",
    ] {
        all.push(("request lines", line.as_bytes().to_vec()));
    }
    all.push((
        "request lines",
        format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(1 << 20)).into(),
    ));
    all.push(("request lines", vec![b'A'; 1 << 20]));
    for header in [
        "No colon\r\n",
        ": no name\r\n",
        "Na me: a\r\n",
        "Name\0: a\r\n",
        "Name: a\0b\r\n",
        " Folded: a\r\n",
        "Content-Length: abc\r\n",
        "Content-Length: -1\r\n",
        "Content-Length: +3\r\n",
        "Content-Length: 99999999999999999999999999\r\n",
        "Content-Length: 3, 4\r\n",
        "Content-Length: 3\r\nContent-Length: 4\r\n",
        "Transfer-Encoding: bogus\r\n",
        "Transfer-Encoding: chunked, bogus\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
    ] {
        all.push(("headers", framed(header, b"abcd")));
    }
    let many: String = (0..5000)
        .map(|number| format!("X-{number}: a\r\n"))
        .collect();
    all.push((
        "headers",
        framed(&format!("{many}Content-Length: {}\r\n", body.len()), body),
    ));
    let long = format!(
        "X-Long: {}\r\nContent-Length: {}\r\n",
        "x".repeat(2 << 20),
        body.len()
    );
    all.push(("headers", framed(&long, body)));
    let chunked = "Transfer-Encoding: chunked\r\n";
    for bad in [
        chunk("zz", text),
        chunk("-1", text),
        chunk("", text),
        chunk("ffffffffffffffffff", text),
        chunk("7fffffffffffffff", text),
        chunk("3", text),
        chunk(&length, text) + "x",
        chunk(&length, text).replace("\r\n", "\n") + "0\n\n",
        chunk(&length, text),
        format!("{length};{}\r\n{text}\r\n0\r\n\r\n", "x".repeat(1 << 20)),
        // It ends before its object does.
        chunk("5", &text[..5]) + "0\r\n\r\n",
    ] {
        all.push(("chunks", framed(chunked, bad.as_bytes())));
    }
    // A length that the body does not have.
    all.push((
        "lengths",
        framed(&format!("Content-Length: {}\r\n", body.len() + 5), body),
    ));
    all.push((
        "lengths",
        framed(&format!("Content-Length: {}\r\n", body.len() - 5), body),
    ));
    all.push(("lengths", framed("Content-Length: 0\r\n", b"")));
    all.push(("lengths", framed("", b"")));
    all.push(("lengths", framed("Content-Length: 1099511627776\r\n", body)));
    // Any bytes: those of a generator that everybody knows.
    let mut state = 1_u64;
    for size in [1, 10, 100, 1000, 10_000, 100_000]
        .into_iter()
        .cycle()
        .take(60)
    {
        let bytes = (0..size).map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        });
        all.push(("any bytes", bytes.collect()));
    }
    // A good request that breaks off, at every tenth byte of its head and body.
    let whole = good().bytes();
    for end in (1..whole.len()).step_by(10) {
        all.push(("broken off", whole[..end].to_vec()));
    }
    all
}

#[test]
fn garbage_is_refused_or_hung_up_on() {
    let server = Served::small();
    let all = garbage();
    let (mut refused, mut closed) = (0, 0);
    for (kind, bytes) in &all {
        match outcome(&server, bytes) {
            Some(response) => {
                let beginning =
                    String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned();
                assert!(
                    (400..500).contains(&response.status),
                    "{kind}: {} to {beginning:?}",
                    response.status
                );
                refused += 1;
            }
            None => closed += 1,
        }
    }
    println!(
        "garbage: {} kinds of it, {refused} refused, {closed} hung up on",
        all.len()
    );
    server.ends_well();
}

#[test]
fn requests_in_one_packet_are_answered_in_order() {
    let server = Served::small();
    let bad = Request::post("/v1/completions", "{").with("Authorization", format!("Bearer {KEY}"));
    let packet = [
        good().bytes(),
        bad.bytes(),
        Request::get("/health").bytes(),
        good().bytes(),
    ]
    .concat();
    let mut connection = Connection::open(server.address).unwrap();
    connection.send(&packet).unwrap();
    let statuses: Vec<u16> = (0..4)
        .map(|_| connection.response().unwrap().status)
        .collect();
    assert_eq!(statuses, [200, 400, 200, 200]);
    server.ends_well();
}

#[test]
fn a_body_beyond_the_limit_is_refused_before_it_is_sent() {
    let server = Served::small();
    let mut connection = Connection::open(server.address).unwrap();
    connection
        .send(&framed("Content-Length: 1099511627776\r\n", b""))
        .unwrap();
    let response = connection.response().unwrap();
    assert_eq!(response.status, 413);
    response.is_refusal().unwrap();

    // Without a length, it is refused on the way.
    let mut connection = Connection::open(server.address).unwrap();
    connection
        .send(&framed("Transfer-Encoding: chunked\r\n", b""))
        .unwrap();
    let megabyte = chunk("100000", &"x".repeat(1 << 20));
    for _ in 0..64 {
        if connection.send(megabyte.as_bytes()).is_err() {
            break;
        }
    }
    match connection.response() {
        Ok(response) => assert_eq!(response.status, 413),
        // What was on its way when it closed takes the answer along.
        Err(error) => assert_ne!(error.kind(), ErrorKind::WouldBlock, "{error}"),
    }
    server.ends_well();
}

#[test]
fn who_is_slow_is_hung_up_on() {
    let server = Served::start(Kind::Small, "[server]\nheader_timeout = \"1s\"\n");
    let whole = good().bytes();
    let head = whole.len() - good().body.len();
    // Nothing at all, a piece of the head now and then, and a head without its body.
    for (first, slow) in [(0, false), (10, true), (head, false), (head + 3, true)] {
        let mut connection = Connection::open(server.address).unwrap();
        connection.send(&whole[..first]).unwrap();
        let begun = Instant::now();
        let drip = whole[first..].iter().take(if slow { 20 } else { 0 });
        for byte in drip {
            sleep(Duration::from_millis(200));
            if connection.send(&[*byte]).is_err() {
                break;
            }
        }
        match connection.response() {
            Ok(response) => assert_eq!(response.status, 408, "{}", response.text()),
            Err(error) => assert_ne!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "{:?}",
            begun.elapsed()
        );
    }
    server.ends_well();
}

#[test]
fn who_hangs_up_leaves_nothing_behind() {
    let server = Served::small();
    let body = |stream: bool| json!({"model": "tiny-llama", "prompt": "t5", "max_tokens": 1000, "n": 4, "ignore_eos": true, "stream": stream});
    for round in 0..40 {
        let request = Request::post("/v1/completions", body(round % 2 == 0).to_string())
            .with("Authorization", format!("Bearer {KEY}"))
            .bytes();
        let mut connection = Connection::open(server.address).unwrap();
        connection.send(&request).unwrap();
        sleep(Duration::from_millis(round % 8));
        drop(connection);
    }
    server.ends_well();
}
