//! From a request to its answer: which endpoint, whose it is, and what is sent.
//!
//! Must never know: sockets.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use axum::response::IntoResponse;
use bytes::Bytes;
use futures_util::stream;
use hyper::body::Incoming;
use serde_json::{Value, json};
use timetable_sandbox::TenantName;

use crate::admission::Admission;
use crate::answer::Answer;
use crate::error::ApiError;
use crate::generation::{Generation, unknown_model};
use crate::metrics::Metrics;
use crate::model::ServedModel;
use crate::options::Options;
use crate::running::Running;
use crate::server::Service;
use crate::{chat, completions, tokens};

/// A body of so many bytes is read, rendered and tokenised at once; what is longer, beside the runtime.
const AT_ONCE_BYTES: usize = 1024;

/// The API's description.
const OPENAPI: &str = include_str!("../openapi.json");

/// What answers have in common.
pub struct State {
    pub service: Service,
    pub options: Options,
    pub admission: Arc<Admission>,
    pub metrics: Arc<Metrics>,
}

/// What there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    Completions,
    Chat,
    Embeddings,
    Tokenize,
    Detokenize,
    Models,
    Model,
    Health,
    Version,
    Metrics,
    OpenApi,
}

impl Endpoint {
    /// The endpoint of a path, and what it is called where requests are counted.
    fn of(path: &str) -> Option<(Endpoint, &'static str)> {
        Some(match path {
            "/v1/completions" => (Endpoint::Completions, "/v1/completions"),
            "/v1/chat/completions" => (Endpoint::Chat, "/v1/chat/completions"),
            "/v1/embeddings" => (Endpoint::Embeddings, "/v1/embeddings"),
            "/tokenize" => (Endpoint::Tokenize, "/tokenize"),
            "/detokenize" => (Endpoint::Detokenize, "/detokenize"),
            "/v1/models" => (Endpoint::Models, "/v1/models"),
            "/health" => (Endpoint::Health, "/health"),
            "/version" => (Endpoint::Version, "/version"),
            "/metrics" => (Endpoint::Metrics, "/metrics"),
            "/openapi.json" => (Endpoint::OpenApi, "/openapi.json"),
            _ if path.starts_with("/v1/models/") => (Endpoint::Model, "/v1/models/{model}"),
            _ => return None,
        })
    }

    fn takes_a_body(self) -> bool {
        matches!(
            self,
            Endpoint::Completions
                | Endpoint::Chat
                | Endpoint::Embeddings
                | Endpoint::Tokenize
                | Endpoint::Detokenize
        )
    }

    /// May be asked without a key: what says nothing of anybody's requests, or only numbers.
    fn is_open(self) -> bool {
        matches!(
            self,
            Endpoint::Health | Endpoint::Version | Endpoint::Metrics | Endpoint::OpenApi
        )
    }
}

impl State {
    /// Answers one request, whatever it is.
    pub async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Infallible> {
        let arrived = Instant::now();
        let method = match *request.method() {
            Method::GET => "GET",
            Method::POST => "POST",
            Method::HEAD => "HEAD",
            _ => "other",
        };
        let found = Endpoint::of(request.uri().path());
        let handler = found.map_or("none", |(_, handler)| handler);
        let answer = self.route(found.map(|(endpoint, _)| endpoint), request, arrived);
        let response = answer.await.unwrap_or_else(IntoResponse::into_response);
        self.metrics
            .answered(handler, method, response.status().as_u16());
        Ok(response)
    }

    async fn route(
        self: &Arc<Self>,
        endpoint: Option<Endpoint>,
        request: Request<Incoming>,
        arrived: Instant,
    ) -> Result<Response<Body>, ApiError> {
        let Some(endpoint) = endpoint else {
            let path: String = request.uri().path().chars().take(100).collect();
            return Err(ApiError::client(
                StatusCode::NOT_FOUND,
                format!("there is no `{path}` here; /openapi.json says what there is"),
            )
            .code("not_found"));
        };
        let wanted = match endpoint.takes_a_body() {
            true => Method::POST,
            false => Method::GET,
        };
        if *request.method() != wanted
            && !(wanted == Method::GET && *request.method() == Method::HEAD)
        {
            let message = format!("the method is not allowed here; use {wanted}");
            let refused = ApiError::client(StatusCode::METHOD_NOT_ALLOWED, message);
            let mut response = refused.code("method_not_allowed").into_response();
            let allow = match endpoint.takes_a_body() {
                true => HeaderValue::from_static("POST"),
                false => HeaderValue::from_static("GET, HEAD"),
            };
            response.headers_mut().insert(header::ALLOW, allow);
            return Ok(response);
        }
        let tenant = match endpoint.is_open() {
            true => None,
            false => self.tenant(request.headers())?,
        };
        let model = &self.service.model;
        match endpoint {
            Endpoint::Completions => {
                let body = self.body(request).await?;
                let read = self.beside(body, completions::read).await?;
                self.generate(read, tenant, arrived).await
            }
            Endpoint::Chat => {
                let body = self.body(request).await?;
                let read = self.beside(body, chat::read).await?;
                self.generate(read, tenant, arrived).await
            }
            Endpoint::Tokenize => {
                let body = self.body(request).await?;
                self.beside(body, tokens::tokenize)
                    .await
                    .map(|v| json_of(&v))
            }
            Endpoint::Detokenize => {
                let body = self.body(request).await?;
                self.beside(body, tokens::detokenize)
                    .await
                    .map(|v| json_of(&v))
            }
            Endpoint::Embeddings => {
                let message = "this server makes no embeddings: its model writes text; ask a server of an embedding model";
                Err(ApiError::client(StatusCode::NOT_FOUND, message).code("unsupported"))
            }
            Endpoint::Models => Ok(json_of(
                &json!({ "object": "list", "data": [self.model_card()] }),
            )),
            Endpoint::Model => {
                let path = request.uri().path();
                let name = unescaped(path.strip_prefix("/v1/models/").unwrap_or_default());
                match name == model.name {
                    true => Ok(json_of(&self.model_card())),
                    false => Err(unknown_model(&name, model)),
                }
            }
            Endpoint::Health => {
                self.admission.check()?;
                match self.service.engine.fatal_error() {
                    None => Ok(Response::new(Body::empty())),
                    Some(message) => Err(ApiError::stopped(message)),
                }
            }
            Endpoint::Version => Ok(json_of(&json!({ "version": env!("CARGO_PKG_VERSION") }))),
            Endpoint::OpenApi => Ok(typed("application/json", OPENAPI.into())),
            Endpoint::Metrics => {
                let state = Arc::clone(self);
                let text = tokio::task::spawn_blocking(move || (state.service.metrics_text)());
                let text = text.await.map_err(|error| panicked(&error))?;
                text.map(|text| typed("text/plain; version=0.0.4; charset=utf-8", text.into()))
                    .map_err(|message| {
                        let status = StatusCode::INTERNAL_SERVER_ERROR;
                        ApiError::server(status, "metrics", message)
                    })
            }
        }
    }

    /// Whose the request is, by its key.
    fn tenant(&self, headers: &HeaderMap) -> Result<Option<TenantName>, ApiError> {
        let given = headers.get(header::AUTHORIZATION);
        let key = given
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, key)| key.trim());
        self.options.keys.tenant(key).ok_or_else(|| {
            let message = match given {
                None => {
                    "there is no API key; send one as `Authorization: Bearer KEY`, which clients call api_key"
                }
                Some(_) => "the API key is not known here; ask whoever runs this server for one",
            };
            ApiError::unknown_key(message)
        })
    }

    /// The whole body, within its bounds of size and time.
    async fn body(&self, request: Request<Incoming>) -> Result<Bytes, ApiError> {
        // Before any of it is read: who drains or is full reads nothing.
        self.admission.check()?;
        let is_json = |kind: &str| {
            let kind = kind.split(';').next().unwrap_or_default().trim();
            kind.eq_ignore_ascii_case("application/json") || kind.ends_with("+json")
        };
        let headers = request.headers();
        if let Some(kind) = headers.get(header::CONTENT_TYPE)
            && !kind.to_str().is_ok_and(is_json)
        {
            let message = "the Content-Type is not application/json; send JSON, and say so";
            let refused = ApiError::client(StatusCode::UNSUPPORTED_MEDIA_TYPE, message);
            return Err(refused.code("unsupported_media_type"));
        }
        let max = self.options.max_body_bytes;
        let too_large = || {
            let message = format!(
                "the body has more than the {max} bytes that this server reads; send less, or raise its max_body_bytes"
            );
            ApiError::client(StatusCode::PAYLOAD_TOO_LARGE, message).code("body_too_large")
        };
        let length = headers.get(header::CONTENT_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if length.is_some_and(|length| length > max as u64) {
            return Err(too_large());
        }
        let read = to_bytes(Body::new(request.into_body()), max);
        match tokio::time::timeout(self.options.header_timeout, read).await {
            Ok(Ok(body)) => Ok(body),
            // What is longer than it said it would be, or did not say, and what broke off: nobody reads that answer.
            Ok(Err(_)) if length.is_none() => Err(too_large()),
            Ok(Err(error)) => Err(ApiError::bad(format!("the body cannot be read: {error}"))),
            Err(_) => Err(ApiError::timeout(
                "the body did not arrive in time; send it faster",
            )),
        }
    }

    /// Reads a body with `read`, beside the runtime if that may take long.
    async fn beside<T: Send + 'static>(
        self: &Arc<Self>,
        body: Bytes,
        read: impl FnOnce(&[u8], &ServedModel) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if body.len() <= AT_ONCE_BYTES {
            return read(&body, &self.service.model);
        }
        let state = Arc::clone(self);
        let read = tokio::task::spawn_blocking(move || read(&body, &state.service.model));
        read.await.map_err(|error| panicked(&error))?
    }

    async fn generate(
        &self,
        mut generation: Generation,
        tenant: Option<TenantName>,
        arrived: Instant,
    ) -> Result<Response<Body>, ApiError> {
        if let Some(message) = self.service.engine.fatal_error() {
            return Err(ApiError::stopped(message));
        }
        let permit = self
            .admission
            .admit(tenant.as_ref(), generation.choices())?;
        let mut answer = Answer::new(&self.service.model, &generation);
        let mut running = Running::submit(
            &self.service.engine,
            &mut generation,
            tenant.as_ref(),
            permit,
            arrived,
            self.options.request_timeout,
            &self.metrics,
        );
        running.begin().await?;
        if !answer.streams() {
            let body = answer.whole(running).await?;
            return Ok(typed("application/json", body.into()));
        }
        answer.open();
        let pieces = stream::unfold((answer, running), |(mut answer, mut running)| async {
            let piece = answer.piece(&mut running).await?;
            Some((Ok::<_, Infallible>(piece), (answer, running)))
        });
        let mut response = typed(
            "text/event-stream; charset=utf-8",
            Body::from_stream(pieces),
        );
        let never = HeaderValue::from_static("no-cache");
        response.headers_mut().insert(header::CACHE_CONTROL, never);
        Ok(response)
    }

    fn model_card(&self) -> Value {
        let model = &self.service.model;
        json!({
            "id": model.name,
            "object": "model",
            "created": self.service.created,
            "owned_by": "timetable",
            "root": model.name,
            "parent": null,
            "max_model_len": model.bounds.max_model_len,
        })
    }
}

/// A panic is a mistake of ours; the request that found it is answered, and the others go on.
fn panicked(error: &tokio::task::JoinError) -> ApiError {
    tracing::error!(%error, "a request could not be read");
    let status = StatusCode::INTERNAL_SERVER_ERROR;
    ApiError::server(
        status,
        "internal",
        "the request could not be read; the server's log says why",
    )
}

fn json_of(value: &Value) -> Response<Body> {
    typed("application/json", value.to_string().into())
}

fn typed(kind: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let kind = HeaderValue::from_static(kind);
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// A part of a path without its `%` escapes.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let escaped = after.get(..2).and_then(|hex| {
            let hex = std::str::from_utf8(hex).ok()?;
            u8::from_str_radix(hex, 16).ok()
        });
        match (first, escaped) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
