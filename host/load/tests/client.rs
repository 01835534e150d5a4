//! The client and the loops against a server that answers as its tests want.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, Response, StatusCode},
    routing::{get, post},
};
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use timetable_load::{
    Client, ClientError, ClientOptions, End, FailureKind, Limits, Outcome, Recorder, Request,
    Traffic, closed_loop, open_loop,
};

/// Of the server.
#[derive(Default)]
struct Counts {
    requests: AtomicUsize,
    running: AtomicUsize,
    most: AtomicUsize,
}

/// While an answer is written.
struct Running(Arc<Counts>);

impl Running {
    fn of(counts: &Arc<Counts>) -> Self {
        let running = counts.running.fetch_add(1, Relaxed) + 1;
        counts.most.fetch_max(running, Relaxed);
        Running(Arc::clone(counts))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Relaxed);
    }
}

/// Word i of the answer to a prompt.
fn word(prompt: &[u64], index: u64) -> String {
    format!("w{} ", (prompt.iter().sum::<u64>() + index) % 100)
}

fn words(prompt: &[u32], count: usize) -> String {
    let prompt: Vec<u64> = prompt.iter().map(|token| u64::from(*token)).collect();
    (0..count as u64)
        .map(|index| word(&prompt, index))
        .collect()
}

fn events(texts: Vec<String>, between: Duration) -> Body {
    let pieces = stream::iter(texts).then(move |text| async move {
        tokio::time::sleep(between).await;
        Ok::<_, Infallible>(Bytes::from(text))
    });
    Body::from_stream(pieces)
}

/// The last piece is an error, well after the others.
fn broken_off(texts: Vec<String>) -> Body {
    let pieces = events(texts, Duration::ZERO).into_data_stream();
    let pieces = pieces.map(|piece| piece.map_err(io::Error::other));
    let end = stream::once(async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        Err(io::Error::other("the server is gone"))
    });
    Body::from_stream(pieces.chain(end))
}

/// What a server answers depends on the model that is asked for.
async fn completions(
    State(counts): State<Arc<Counts>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    let number = counts.requests.fetch_add(1, Relaxed);
    let running = Running::of(&counts);
    let body: Value = serde_json::from_slice(&body).expect("the client sends JSON");
    let number_of = |field: &str| body[field].as_u64().expect("a number");
    let prompt: Vec<u64> = body["prompt"]
        .as_array()
        .expect("token ids")
        .iter()
        .map(|token| token.as_u64().expect("an id"))
        .collect();
    assert_eq!(
        (&body["stream"], &body["ignore_eos"]),
        (&json!(true), &json!(true))
    );
    let tokens = number_of("max_tokens");
    let data = |value: &Value| format!("data: {value}\n\n");
    let choice = |text: &str, finish: Option<&str>| {
        data(&json!({ "choices": [{ "index": 0, "text": text, "finish_reason": finish }] }))
    };
    let mut texts: Vec<String> = (0..tokens)
        .map(|index| {
            choice(
                &word(&prompt, index),
                (index + 1 == tokens).then_some("length"),
            )
        })
        .collect();
    let usage = json!({ "prompt_tokens": prompt.len(), "completion_tokens": tokens });
    let end = [
        data(&json!({ "choices": [], "usage": usage })),
        "data: [DONE]\n\n".to_owned(),
    ];
    let answer = |status: u16| Response::builder().status(status);
    let streamed = |body: Body| {
        let held = body.into_data_stream().map(move |piece| {
            let _ = &running;
            piece
        });
        let answer = answer(200).header("content-type", "text/event-stream; charset=utf-8");
        answer.body(Body::from_stream(held)).expect("an answer")
    };
    let error = |status: u16, message: &str| {
        let body =
            json!({ "error": { "message": message, "type": "x", "param": null, "code": null } });
        answer(status)
            .body(Body::from(body.to_string()))
            .expect("an answer")
    };
    let soon = Duration::from_millis(1);
    match body["model"].as_str().expect("a model") {
        "good" => {
            texts.extend(end);
            streamed(events(texts, soon))
        }
        // All at once, cut anywhere.
        "cut" => {
            texts.extend(end);
            let whole = texts.concat().into_bytes();
            let pieces: Vec<_> = whole
                .chunks(7)
                .map(|piece| Ok::<_, Infallible>(Bytes::copy_from_slice(piece)))
                .collect();
            streamed(Body::from_stream(stream::iter(pieces)))
        }
        "key" => match headers
            .get("authorization")
            .map(|key| key.to_str().expect("text"))
        {
            Some("Bearer secret") => {
                texts.extend(end);
                streamed(events(texts, soon))
            }
            other => error(401, &format!("the key {other:?} is unknown")),
        },
        "busy" if number % 3 != 2 => {
            let mut refused = error(429, "the queue is full");
            refused
                .headers_mut()
                .insert("retry-after", "0".parse().expect("a value"));
            refused
        }
        "busy" => {
            texts.extend(end);
            streamed(events(texts, soon))
        }
        "always busy" => error(503, "it drains"),
        "breaks off" => streamed(broken_off(texts)),
        "ends early" => streamed(events(texts, soon)),
        "ends within" => {
            texts.push("data: {\"choi".to_owned());
            streamed(events(texts, soon))
        }
        "no reason" => streamed(events(vec![choice("w", None), end[1].clone()], soon)),
        "no json" => streamed(events(vec!["data: {\"choices\": [\n\n".to_owned()], soon)),
        "other json" => streamed(events(vec![data(&json!({ "hello": 1 }))], soon)),
        "wrong types" => streamed(events(vec![data(&json!({ "choices": 7 }))], soon)),
        "no text" => streamed(Body::from_stream(stream::iter([Ok::<_, Infallible>(
            Bytes::from_static(b"data: \xff\n\n"),
        )]))),
        "no stream" => answer(200)
            .header("content-type", "application/json")
            .body(Body::from("{}"))
            .expect("an answer"),
        "error within" => {
            texts.push(data(&json!({ "error": { "message": "a step failed" } })));
            streamed(events(texts, soon))
        }
        "hangs" => streamed(Body::from_stream(
            stream::iter(texts)
                .map(|text| Ok::<_, Infallible>(Bytes::from(text)))
                .chain(stream::pending()),
        )),
        "says nothing" => {
            tokio::time::sleep(Duration::from_secs(600)).await;
            error(500, "too late")
        }
        "elsewhere" => answer(307)
            .header("location", "/v1/elsewhere")
            .body(Body::empty())
            .expect("an answer"),
        other => error(404, &format!("the model `{other}` does not exist")),
    }
}

/// Starts a server on a thread of its own, which lives as long as the process.
fn server() -> (SocketAddr, Arc<Counts>) {
    let counts = Arc::new(Counts::default());
    let state = Arc::clone(&counts);
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        runtime().block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
                .await
                .expect("a port");
            tell.send(listener.local_addr().expect("an address"))
                .expect("it is waited for");
            let models =
                json!({ "object": "list", "data": [{ "id": "good", "max_model_len": 96 }] });
            let app = Router::new()
                .route("/v1/models", get(move || async move { models.to_string() }))
                .route("/v1/completions", post(completions))
                .route("/v1/elsewhere", post(|| async { StatusCode::IM_A_TEAPOT }))
                .route("/empty/v1/models", get(|| async { "{\"data\": []}" }))
                .with_state(state);
            axum::serve(listener, app).await.expect("it serves");
        });
    });
    (told.recv().expect("a server"), counts)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
}

/// No test waits longer.
fn wait<T>(what: impl Future<Output = T>) -> T {
    let most = Duration::from_secs(60);
    runtime().block_on(async { tokio::time::timeout(most, what).await.expect("it ends") })
}

fn options() -> ClientOptions {
    ClientOptions {
        request_timeout: Duration::from_secs(30),
        ..ClientOptions::default()
    }
}

fn client(address: SocketAddr, model: &str, options: ClientOptions) -> Client {
    let client = Client::new(&format!("http://{address}/v1/"), options);
    client.expect("a client").with_model(model)
}

fn request() -> Request {
    Request {
        prompt: vec![5, 6, 7],
        max_tokens: 5,
        ..Request::default()
    }
}

fn send(address: SocketAddr, model: &str, options: ClientOptions) -> Outcome {
    wait(client(address, model, options).send(&request()))
}

#[track_caller]
fn fails(outcome: &Outcome, kind: FailureKind, part: &str) {
    let End::Failed(failure) = &outcome.end else {
        panic!("it ends with {:?}", outcome.end);
    };
    assert_eq!(failure.kind, kind, "{failure:?}");
    assert!(
        failure.message.contains(part),
        "`{part}` is missing: {failure:?}"
    );
    let mut recorder = Recorder::default();
    recorder.add(outcome);
    let report = recorder.report(Duration::from_secs(1));
    assert_eq!((report.failed, report.errors[&kind.to_string()]), (1, 1));
}

#[test]
fn an_answer_is_read_whole_and_timed() {
    let (address, _) = server();
    for model in ["good", "cut"] {
        let outcome = send(address, model, options());
        assert_eq!(outcome.end, End::Complete, "{model}");
        assert_eq!(outcome.text, words(&[5, 6, 7], 5));
        assert_eq!(outcome.finish_reason.as_deref(), Some("length"));
        assert_eq!((outcome.prompt_tokens, outcome.output_tokens), (3, 5));
        assert_eq!(outcome.gaps.len(), 4);
        let first = outcome.first_token.expect("a first token");
        let sum = first + outcome.gaps.iter().sum::<Duration>();
        assert!(sum <= outcome.elapsed, "{outcome:?}");
        assert_eq!(
            outcome.time_per_output_token(),
            Some(outcome.gaps.iter().sum::<Duration>() / 4)
        );
    }
}

#[test]
fn models_are_listed_or_it_is_said_why_not() {
    let (address, _) = server();
    let models = wait(client(address, "", options()).models()).expect("models");
    assert_eq!(
        (models[0].id.as_str(), models[0].max_model_len),
        ("good", Some(96))
    );
    for (url, part) in [
        (format!("http://{address}/empty"), "an empty list"),
        (format!("http://{address}/nothing"), "status 404"),
        ("http://127.0.0.1:9".to_owned(), "efused"),
    ] {
        let client = Client::new(&url, options()).expect("a client");
        let error = wait(client.models()).expect_err("no models").to_string();
        assert!(error.contains(part) && error.contains(&url), "{error}");
    }
    for url in ["127.0.0.1:8000", "ftp://a/", "", "http://", "http://a/?x=1"] {
        let error = Client::new(url, options()).expect_err("no address");
        assert!(matches!(error, ClientError::Url { .. }), "{error}");
    }
}

#[test]
fn each_failure_is_counted_by_its_kind() {
    let (address, _) = server();
    for (model, kind, part) in [
        (
            "unknown",
            FailureKind::Status(404),
            "`unknown` does not exist",
        ),
        ("key", FailureKind::Status(401), "the key None is unknown"),
        ("always busy", FailureKind::Status(503), "it drains"),
        ("busy", FailureKind::Status(429), "the queue is full"),
        ("elsewhere", FailureKind::Status(307), ""),
        ("breaks off", FailureKind::BrokenStream, ""),
        ("ends early", FailureKind::BrokenStream, "without [DONE]"),
        ("ends within", FailureKind::BrokenStream, "within an event"),
        (
            "no reason",
            FailureKind::BrokenStream,
            "without a finish reason",
        ),
        ("no json", FailureKind::Malformed, "in the event"),
        ("other json", FailureKind::Malformed, "neither choices"),
        ("wrong types", FailureKind::Malformed, "invalid type"),
        ("no text", FailureKind::Malformed, "UTF-8"),
        ("no stream", FailureKind::Malformed, "application/json"),
        ("error within", FailureKind::ErrorEvent, "a step failed"),
    ] {
        // `busy` refuses by number.
        let (address, _) = if model == "busy" {
            server()
        } else {
            (address, Arc::default())
        };
        fails(&send(address, model, options()), kind, part);
    }
}

#[test]
fn a_server_that_is_not_there_and_one_that_hangs_are_failures_in_time() {
    let refused = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.local_addr().expect("an address")
    };
    fails(
        &send(refused, "good", options()),
        FailureKind::Connect,
        "efused",
    );
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = std::thread::spawn(move || {
        let address = silent.local_addr().expect("an address");
        let closes = std::thread::spawn(move || drop(silent.accept()));
        (address, closes)
    });
    let (closing, closes) = silent.join().expect("a server");
    fails(&send(closing, "good", options()), FailureKind::NoAnswer, "");
    closes.join().expect("it accepted");
    let (address, _) = server();
    let hasty = ClientOptions {
        request_timeout: Duration::from_millis(200),
        ..options()
    };
    for (model, text) in [
        ("says nothing", String::new()),
        ("hangs", words(&[5, 6, 7], 5)),
    ] {
        let outcome = send(address, model, hasty.clone());
        fails(&outcome, FailureKind::Timeout, "200ms");
        assert_eq!(outcome.text, text);
        assert!(outcome.elapsed >= hasty.request_timeout, "{outcome:?}");
    }
}

#[test]
fn a_busy_server_is_asked_again_when_it_says() {
    let (address, counts) = server();
    let patient = ClientOptions {
        max_retries: 2,
        ..options()
    };
    let outcome = send(address, "busy", patient.clone());
    assert_eq!((outcome.end, outcome.retries), (End::Complete, 2));
    assert_eq!(counts.requests.load(Relaxed), 3);
    // Without Retry-After it waits a second each time.
    let begun = Instant::now();
    let outcome = send(address, "always busy", patient);
    fails(&outcome, FailureKind::Status(503), "it drains");
    assert_eq!(outcome.retries, 2);
    assert!(begun.elapsed() >= Duration::from_secs(2));
    // What is no sign of being busy is not asked again.
    let patient = ClientOptions {
        max_retries: 9,
        ..options()
    };
    assert_eq!(send(address, "unknown", patient).retries, 0);
}

#[test]
fn keys_are_the_requests_or_the_clients() {
    let (address, _) = server();
    let with_key = |key: &str| ClientOptions {
        api_key: Some(Arc::from(key)),
        ..options()
    };
    assert_eq!(send(address, "key", with_key("secret")).end, End::Complete);
    fails(
        &send(address, "key", with_key("wrong")),
        FailureKind::Status(401),
        "wrong",
    );
    let own = Request {
        api_key: Some(Arc::from("secret")),
        ..request()
    };
    let client = client(address, "key", with_key("wrong"));
    assert_eq!(wait(client.send(&own)).end, End::Complete);
}

#[test]
fn a_client_that_hangs_up_closes_its_connection() {
    let (address, counts) = server();
    let leaving = Request {
        hang_up_after: Some(2),
        ..request()
    };
    wait(async {
        let client = client(address, "hangs", options());
        let outcome = client.send(&leaving).await;
        assert_eq!(outcome.end, End::HungUp);
        assert!(words(&[5, 6, 7], 5).starts_with(&outcome.text) && !outcome.text.is_empty());
        // The server drops the answer when nobody is there.
        while counts.running.load(Relaxed) > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
}

#[test]
fn clients_take_turns_until_there_were_enough_requests() {
    let (address, counts) = server();
    let mut recorder = Recorder::default();
    let mut of_client = [0; 4];
    let limits = Limits {
        max_requests: Some(30),
        duration: None,
    };
    let make = |place: usize, number: usize| Request {
        prompt: vec![place as u32, number as u32],
        max_tokens: 1 + number % 5,
        ..Request::default()
    };
    wait(closed_loop(
        &client(address, "good", options()),
        4,
        limits,
        make,
        |place, request, outcome| {
            assert_eq!(outcome.text, words(&request.prompt, request.max_tokens));
            of_client[place] += 1;
            recorder.add(&outcome);
        },
    ));
    assert_eq!(
        (recorder.ended(), counts.requests.load(Relaxed)),
        ((30, 0, 0), 30)
    );
    assert!(counts.most.load(Relaxed) <= 4 && of_client.iter().all(|count| *count > 0));
}

#[test]
fn a_time_limit_ends_both_loops_and_answers_under_way_are_read() {
    let (address, _) = server();
    let limits = Limits {
        max_requests: None,
        duration: Some(Duration::from_millis(300)),
    };
    let client = client(address, "good", options());
    let mut ends = Vec::new();
    let elapsed = wait(closed_loop(
        &client,
        2,
        limits,
        |_, _| request(),
        |_, _, outcome| ends.push(outcome.end),
    ));
    assert!(elapsed >= Duration::from_millis(300), "{elapsed:?}");
    let arrivals = (0..).map(|number| (Duration::from_millis(20 * number), request()));
    let elapsed = wait(open_loop(&client, arrivals, 8, limits, |_, outcome| {
        ends.push(outcome.end);
    }));
    assert!(elapsed >= Duration::from_millis(280), "{elapsed:?}");
    assert!(
        ends.len() > 4 && ends.iter().all(|end| *end == End::Complete),
        "{ends:?}"
    );
}

#[test]
fn requests_arrive_at_their_times_and_wait_for_room() {
    let (address, counts) = server();
    let client = client(address, "good", options());
    let traffic = Traffic::uniform(3, 4, timetable_load::Scale::default()).expect("traffic");
    let arrivals = |apart: u64| {
        (0..12).map(move |number| {
            let (prompt, max_tokens) = traffic.request(number);
            let request = Request {
                prompt,
                max_tokens,
                ..Request::default()
            };
            (Duration::from_millis(apart * number as u64), request)
        })
    };
    let mut complete = 0;
    let mut count =
        |_: &Request, outcome: Outcome| complete += usize::from(outcome.end == End::Complete);
    let elapsed = wait(open_loop(
        &client,
        arrivals.clone()(20),
        100,
        Limits::default(),
        &mut count,
    ));
    assert!(elapsed >= Duration::from_millis(220), "{elapsed:?}");
    counts.most.store(0, Relaxed);
    wait(open_loop(
        &client,
        arrivals(0),
        3,
        Limits::default(),
        &mut count,
    ));
    assert_eq!((complete, counts.most.load(Relaxed)), (24, 3));
    // Nothing that arrives is nothing to wait for.
    wait(open_loop(
        &client,
        std::iter::empty(),
        3,
        Limits::default(),
        |_, _| {},
    ));
}
