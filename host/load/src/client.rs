//! The client: one request, streamed, and what came of it. Must never know: what the requests are for, or what is measured over many.

use std::{
    collections::BTreeMap,
    error::Error,
    sync::Arc,
    time::{Duration, Instant},
};

use reqwest::{
    Response, StatusCode, Url,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, RETRY_AFTER},
    redirect,
};
use serde::Deserialize;
use serde_json::json;

use crate::{End, Failure, FailureKind, Outcome, SseReader};

/// Bytes of an answer that is no stream, at most: a list of models, an error.
const MAX_BODY: usize = 1 << 20;
/// How long the end of a connection's answer is waited for after its last event, so that the connection can be used again.
const AFTER_DONE: Duration = Duration::from_secs(1);

/// How a client behaves.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Sent with each request that has none of its own.
    pub api_key: Option<Arc<str>>,
    /// For a connection.
    pub connect_timeout: Duration,
    /// For a request with all its attempts, until the end of its answer.
    pub request_timeout: Duration,
    /// Attempts after the first, each after as long as a busy server (429, 503) asks for; 0: being refused is a failure.
    pub max_retries: u32,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            api_key: None,
            connect_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(600),
            max_retries: 0,
        }
    }
}

/// Why there is no client, or no list of models.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// It names no server.
    #[error("`{url}` is no server's address ({why}); give one such as http://127.0.0.1:8000")]
    Url {
        /// As it was given.
        url: String,
        /// What is wrong.
        why: String,
    },
    /// The client cannot be made on this machine.
    #[error("no HTTP client: {0}; give an http:// address, which needs no certificates")]
    Setup(String),
    /// It gives no list of models.
    #[error("{url}: {why}; is an OpenAI-compatible server running there?")]
    Models {
        /// What was asked.
        url: String,
        /// What was wrong.
        why: String,
    },
}

/// A model, as a server lists it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ServedModel {
    /// What requests call it.
    pub id: String,
    /// Tokens of a prompt and its answer together, at most; not every server says it.
    pub max_model_len: Option<usize>,
}

/// A streaming completion, greedy, of exactly as many tokens as it asks for.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Token ids.
    pub prompt: Vec<u32>,
    /// Tokens of the answer.
    pub max_tokens: usize,
    /// Instead of the client's.
    pub api_key: Option<Arc<str>>,
    /// After so many pieces of the answer the client goes away.
    pub hang_up_after: Option<usize>,
}

/// Talks to one server: to the host in its address and to no other, whatever redirects and proxies there are.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    completions: Url,
    models: Url,
    model: Arc<str>,
    options: ClientOptions,
}

impl Client {
    /// A client of the server at `url`, with or without `/v1`. Nothing is sent yet.
    ///
    /// # Errors
    /// If `url` is no address of a server, or the machine has no certificates for one that is encrypted.
    pub fn new(url: &str, options: ClientOptions) -> Result<Self, ClientError> {
        let wrong = |why: String| ClientError::Url {
            url: url.to_owned(),
            why,
        };
        let base = Url::parse(url).map_err(|error| wrong(error.to_string()))?;
        if !matches!(base.scheme(), "http" | "https") {
            return Err(wrong(format!("its scheme is {}", base.scheme())));
        }
        if base.query().is_some() || base.fragment().is_some() {
            return Err(wrong("it has more than a path".to_owned()));
        }
        let path = base.path().trim_end_matches('/');
        let path = path.strip_suffix("/v1").unwrap_or(path).to_owned();
        let endpoint = |name: &str| {
            let mut url = base.clone();
            url.set_path(&format!("{path}/v1/{name}"));
            url
        };
        // The process has one provider of cryptography; who else set one set it for all.
        drop(rustls::crypto::ring::default_provider().install_default());
        let builder = reqwest::Client::builder()
            .no_proxy()
            .redirect(redirect::Policy::none())
            .connect_timeout(options.connect_timeout)
            .user_agent(concat!("timetable-load/", env!("CARGO_PKG_VERSION")));
        let builder = match base.scheme() {
            // No certificates are looked for.
            "http" => builder.tls_certs_only([]),
            _ => builder,
        };
        let http = builder.build();
        Ok(Self {
            http: http.map_err(|error| ClientError::Setup(chain(&error)))?,
            completions: endpoint("completions"),
            models: endpoint("models"),
            model: Arc::from(""),
            options,
        })
    }

    /// Asks for this model from now on.
    #[must_use]
    pub fn with_model(self, model: &str) -> Self {
        Self {
            model: Arc::from(model),
            ..self
        }
    }

    /// The models that the server lists; at least one.
    ///
    /// # Errors
    /// If it cannot be reached in time, or answers anything else.
    pub async fn models(&self) -> Result<Vec<ServedModel>, ClientError> {
        #[derive(Deserialize)]
        struct List {
            data: Vec<ServedModel>,
        }
        let ask = async {
            let request = self.authorised(self.http.get(self.models.clone()), None);
            let mut response = request.send().await.map_err(|error| chain(&error))?;
            let status = response.status();
            let body = body_of(&mut response).await;
            if status != StatusCode::OK {
                return Err(format!("status {status}: {}", message_of(&body)));
            }
            let list: List = serde_json::from_slice(&body)
                .map_err(|error| format!("no list of models ({error})"))?;
            match list.data.is_empty() {
                true => Err("an empty list of models".to_owned()),
                false => Ok(list.data),
            }
        };
        let time = self.options.request_timeout;
        let answer = tokio::time::timeout(time, ask).await;
        let answer = answer.unwrap_or_else(|_| Err(format!("no answer in {time:?}")));
        answer.map_err(|why| ClientError::Models {
            url: self.models.to_string(),
            why,
        })
    }

    /// Sends a request, again if the server is busy and there are attempts left, and reads its answer to the end.
    pub async fn send(&self, request: &Request) -> Outcome {
        let mut answer = Answer::new();
        let time = self.options.request_timeout;
        let attempts = self.attempts(request, &mut answer);
        let end = match tokio::time::timeout(time, attempts).await {
            Ok(end) => end,
            Err(_) => failed(FailureKind::Timeout, format!("no end in {time:?}")),
        };
        answer.ended(end)
    }

    async fn attempts(&self, request: &Request, answer: &mut Answer) -> End {
        loop {
            let (end, busy_for) = match self.attempt(request, answer).await {
                Ok(end) => return end,
                Err(refused) => refused,
            };
            match busy_for {
                Some(time) if answer.outcome.retries < self.options.max_retries => {
                    tokio::time::sleep(time).await;
                    answer.outcome.retries += 1;
                }
                _ => return end,
            }
        }
    }

    /// One attempt. If the server does not take the request: the failure, and when to come again, if it is busy.
    async fn attempt(
        &self,
        request: &Request,
        answer: &mut Answer,
    ) -> Result<End, (End, Option<Duration>)> {
        let body = json!({
            "model": &*self.model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "ignore_eos": true,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        let post = self
            .http
            .post(self.completions.clone())
            .header(CONTENT_TYPE, "application/json")
            .body(body.to_string());
        let sent = self.authorised(post, request.api_key.as_deref()).send();
        let mut response = match sent.await {
            Ok(response) => response,
            Err(error) => {
                let kind = match (error.is_connect(), error.is_timeout()) {
                    (true, _) => FailureKind::Connect,
                    (false, true) => FailureKind::Timeout,
                    (false, false) => FailureKind::NoAnswer,
                };
                return Err((failed(kind, chain(&error)), None));
            }
        };
        let status = response.status();
        if status != StatusCode::OK {
            let busy_for = busy_for(status, response.headers());
            let message = message_of(&body_of(&mut response).await);
            let end = failed(FailureKind::Status(status.as_u16()), message);
            return Err((end, busy_for));
        }
        let kind = response.headers().get(CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or("none");
        if !kind.starts_with("text/event-stream") {
            let message = format!("the answer's content type is {kind:?}, not a stream of events");
            return Ok(failed(FailureKind::Malformed, message));
        }
        Ok(answer.read(&mut response, request.hang_up_after).await)
    }

    fn authorised(
        &self,
        request: reqwest::RequestBuilder,
        key: Option<&str>,
    ) -> reqwest::RequestBuilder {
        match key.or(self.options.api_key.as_deref()) {
            Some(key) => request.header(AUTHORIZATION, format!("Bearer {key}")),
            None => request,
        }
    }
}

/// An answer as it comes.
struct Answer {
    sent: Instant,
    last: Instant,
    pieces: u64,
    outcome: Outcome,
}

/// What an event of a completion's stream says. Of one that says nothing of this, nothing is counted.
#[derive(Deserialize)]
struct Chunk {
    choices: Option<Vec<Choice>>,
    usage: Option<Usage>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
}

impl Answer {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            sent: now,
            last: now,
            pieces: 0,
            outcome: Outcome::begin(),
        }
    }

    fn ended(self, end: End) -> Outcome {
        let mut outcome = self.outcome;
        if outcome.output_tokens == 0 {
            outcome.output_tokens = self.pieces;
        }
        if outcome.elapsed.is_zero() {
            outcome.elapsed = self.sent.elapsed();
        }
        outcome.end = end;
        outcome
    }

    async fn read(&mut self, response: &mut Response, hang_up_after: Option<usize>) -> End {
        let mut events = SseReader::default();
        loop {
            let piece = match response.chunk().await {
                Ok(Some(piece)) => piece,
                Ok(None) => {
                    let message = match events.is_at_rest() {
                        true => "the answer ended without [DONE]",
                        false => "the answer ended within an event",
                    };
                    return failed(FailureKind::BrokenStream, message.to_owned());
                }
                Err(error) => return failed(FailureKind::BrokenStream, chain(&error)),
            };
            let complete = match events.push(&piece) {
                Ok(complete) => complete,
                Err(error) => return failed(FailureKind::Malformed, error.to_string()),
            };
            for event in complete {
                if event == "[DONE]" {
                    return self.done(response).await;
                }
                if let Err(failure) = self.event(&event) {
                    return End::Failed(failure);
                }
                if hang_up_after.is_some_and(|pieces| self.pieces >= pieces as u64) {
                    return End::HungUp;
                }
            }
        }
    }

    /// The server said that this is all.
    async fn done(&mut self, response: &mut Response) -> End {
        self.outcome.elapsed = self.sent.elapsed();
        let rest = async { while let Ok(Some(_)) = response.chunk().await {} };
        // A server that keeps it open costs a connection, no answer.
        let _ = tokio::time::timeout(AFTER_DONE, rest).await;
        match self.outcome.finish_reason {
            Some(_) => End::Complete,
            None => failed(
                FailureKind::BrokenStream,
                "[DONE] came without a finish reason".to_owned(),
            ),
        }
    }

    fn event(&mut self, text: &str) -> Result<(), Failure> {
        let malformed = |message: String| Failure {
            kind: FailureKind::Malformed,
            message,
        };
        let chunk: Chunk = serde_json::from_str(text)
            .map_err(|error| malformed(format!("{error} in the event {}", shown(text))))?;
        if let Some(error) = chunk.error {
            return Err(Failure {
                kind: FailureKind::ErrorEvent,
                message: message_of(error.to_string().as_bytes()),
            });
        }
        let Some(choices) = chunk.choices else {
            let message = format!("neither choices nor an error in the event {}", shown(text));
            return Err(malformed(message));
        };
        for choice in choices {
            let text = choice.text.unwrap_or_default();
            // An end alone is no token; a token may have no text of its own.
            if !text.is_empty() || choice.finish_reason.is_none() {
                self.piece();
            }
            self.outcome.text.push_str(&text);
            self.outcome.finish_reason = choice.finish_reason.or(self.outcome.finish_reason.take());
        }
        if let Some(usage) = chunk.usage {
            self.outcome.prompt_tokens = usage.prompt_tokens;
            self.outcome.output_tokens = usage.completion_tokens;
        }
        Ok(())
    }

    fn piece(&mut self) {
        let now = Instant::now();
        match self.outcome.first_token {
            None => self.outcome.first_token = Some(now - self.sent),
            Some(_) => self.outcome.gaps.push(now - self.last),
        }
        self.last = now;
        self.pieces += 1;
    }
}

fn failed(kind: FailureKind, message: String) -> End {
    End::Failed(Failure { kind, message })
}

/// How long a server that is busy wants to be left alone; a second if it does not say, or says a date.
fn busy_for(status: StatusCode, headers: &HeaderMap) -> Option<Duration> {
    let busy = [
        StatusCode::TOO_MANY_REQUESTS,
        StatusCode::SERVICE_UNAVAILABLE,
    ];
    busy.contains(&status).then(|| {
        let text = headers
            .get(RETRY_AFTER)
            .and_then(|value| value.to_str().ok());
        let seconds = text.and_then(|text| text.trim().parse().ok());
        Duration::from_secs(seconds.unwrap_or(1))
    })
}

/// What there is of a body, up to a bound.
async fn body_of(response: &mut Response) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Ok(Some(piece)) = response.chunk().await {
        bytes.extend_from_slice(&piece);
        if bytes.len() > MAX_BODY {
            break;
        }
    }
    bytes
}

/// The message of an OpenAI-compatible error, with or without the object around it; else the text, cut.
fn message_of(body: &[u8]) -> String {
    let error: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(body).unwrap_or_default();
    let inner = error.get("error").map(|error| &error["message"]);
    match inner
        .or(error.get("message"))
        .and_then(|text| text.as_str())
    {
        Some(message) => shown(message),
        None => shown(&String::from_utf8_lossy(body)),
    }
}

/// A server's text in a message: one line, cut.
fn shown(text: &str) -> String {
    let line: String = text
        .chars()
        .map(|letter| if letter.is_control() { ' ' } else { letter })
        .take(200)
        .collect();
    match line.len() < text.len() {
        true => format!("{line}…"),
        false => line,
    }
}

/// An error with its causes, in one line.
fn chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line.push_str(": ");
        line.push_str(&error.to_string());
        cause = error.source();
    }
    line
}
