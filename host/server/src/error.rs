//! What a client is told when it gets no answer: OpenAI's error object, and the status that goes with it.
//!
//! Must never know: which endpoint it is for.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use serde::Serialize;
use timetable_engine::RequestError;
use timetable_engine::sampling::SamplingError;
use timetable_engine::scheduler::AddRequestError;

/// Seconds after which a client that was sent away may come back.
const RETRY_AFTER: &str = "1";

/// Why a request gets no answer.
#[derive(Debug, Clone)]
pub struct ApiError {
    pub status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
}

/// The body, as OpenAI has it.
#[derive(Serialize)]
struct Envelope<'a> {
    error: Object<'a>,
}

#[derive(Serialize)]
struct Object<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        ApiError {
            status,
            kind,
            code: None,
            param: None,
            // It repeats what it was given, and is to be one line of text.
            message: message.into().replace(char::is_control, "\u{fffd}"),
        }
    }

    /// The request is wrong: 400. `message` says how, with the value, and what to do.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A field of the request is wrong: 400.
    pub fn field(name: &str, message: impl Into<String>) -> Self {
        ApiError {
            param: Some(name.to_owned()),
            ..Self::bad(message)
        }
    }

    /// A field asks for something that this server does not do: 400.
    pub fn unsupported(name: &str, message: impl Into<String>) -> Self {
        Self::field(name, message).code("unsupported_parameter")
    }

    /// A model that is not here: 404.
    pub fn unknown_model(message: impl Into<String>) -> Self {
        ApiError {
            status: StatusCode::NOT_FOUND,
            ..Self::field("model", message).code("model_not_found")
        }
    }

    /// No key, or one that is not known: 401.
    pub fn unknown_key(message: &str) -> Self {
        let status = StatusCode::UNAUTHORIZED;
        Self::new(status, "authentication_error", message).code("invalid_api_key")
    }

    /// It took too long: 408.
    pub fn timeout(message: impl Into<String>) -> Self {
        let status = StatusCode::REQUEST_TIMEOUT;
        Self::new(status, "timeout_error", message).code("timeout")
    }

    /// Another status in the 400s, the request being wrong.
    pub fn client(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", message)
    }

    /// The server's side failed: a status in the 500s.
    pub fn server(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self::new(status, "server_error", message).code(code)
    }

    /// Too many requests wait: 429.
    pub fn busy(message: impl Into<String>) -> Self {
        let status = StatusCode::TOO_MANY_REQUESTS;
        Self::new(status, "rate_limit_error", message).code("queue_full")
    }

    /// The same with a code for programs.
    #[must_use]
    pub fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// Why the engine did not answer.
    pub fn of_engine(error: &RequestError) -> Self {
        let message = error.to_string();
        match error {
            RequestError::Refused(AddRequestError::PromptTooLong { .. }) => {
                Self::bad(message).code("context_length_exceeded")
            }
            RequestError::Sampling(SamplingError::Logits(_))
            | RequestError::Model(_)
            | RequestError::Step(_) => {
                Self::server(StatusCode::INTERNAL_SERVER_ERROR, "engine_error", message)
            }
            RequestError::Vocabulary { .. } => Self::field("prompt", message),
            RequestError::Refused(_) | RequestError::Sampling(_) | RequestError::NoTokenizer => {
                Self::bad(message)
            }
            RequestError::UnknownTenant { .. } => Self::client(StatusCode::FORBIDDEN, message),
            RequestError::Device(_) | RequestError::Stopped => Self::stopped(message),
        }
    }

    /// The engine is gone, or going: 503.
    pub fn stopped(message: impl Into<String>) -> Self {
        Self::server(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
    }

    /// The error object as JSON.
    pub fn json(&self) -> Vec<u8> {
        let body = Envelope {
            error: Object {
                message: &self.message,
                r#type: self.kind,
                param: self.param.as_deref(),
                code: self.code,
            },
        };
        // Strings always serialise.
        serde_json::to_vec(&body).unwrap_or_default()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::from(self.json()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        let json = HeaderValue::from_static("application/json");
        headers.insert(header::CONTENT_TYPE, json);
        let retry = HeaderValue::from_static(RETRY_AFTER);
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(header::RETRY_AFTER, retry);
            }
            StatusCode::UNAUTHORIZED => {
                let scheme = HeaderValue::from_static("Bearer");
                headers.insert(header::WWW_AUTHENTICATE, scheme);
            }
            _ => {}
        }
        response
    }
}
