//! What the admin page's addresses do: the host's answer as JSON, or an error in one line.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::{
    ALLOW, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE,
};
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use serde_json::{Value, json};
use timetable_provenance::SIGNATURE_BYTES_MAX;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::access::Refusal;
use super::query::{Query, ReloadQuery, rollback as read_rollback};
use crate::admin::{Control, Submission, component_bytes_max, metrics};

/// Reloads and rollbacks at once, from a request's first byte to its answer; the host makes one after the other.
const CHANGES_MAX: usize = 4;
/// How long a component may take to arrive.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(60);
/// What is read of a refused request's body, so that its sender gets to read the refusal.
const DRAIN_BYTES: usize = 1 << 20;
/// How long that may take.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Steps that are shown where nobody says how many.
const STEPS_SHOWN: usize = 200;

/// The host, and how many may change it at once.
pub struct Api {
    control: Arc<dyn Control + Sync>,
    changes: Arc<Semaphore>,
}

impl Api {
    pub fn new(control: Arc<dyn Control + Sync>) -> Self {
        Self {
            control,
            changes: Arc::new(Semaphore::new(CHANGES_MAX)),
        }
    }

    /// Asks the host, on a thread that may wait. What it says against that comes with the status `against`.
    async fn ask<T: Send + 'static>(
        &self,
        against: StatusCode,
        question: impl FnOnce(&(dyn Control + Sync)) -> Result<T, String> + Send + 'static,
    ) -> Result<T, Refusal> {
        let control = Arc::clone(&self.control);
        match tokio::task::spawn_blocking(move || question(&*control)).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(message)) => Err(refusal(against, message)),
            Err(error) => Err(refusal(
                DEFECT,
                format!("the host could not answer ({error}); this is a defect, see its log"),
            )),
        }
    }

    fn change(&self) -> Result<OwnedSemaphorePermit, Refusal> {
        let permit = Arc::clone(&self.changes).try_acquire_owned();
        permit.map_err(|_| {
            refusal(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("{CHANGES_MAX} changes are under way already; try again in a moment"),
            )
        })
    }
}

/// The host cannot say what it is asked.
const DEFECT: StatusCode = StatusCode::INTERNAL_SERVER_ERROR;
/// The host does not do what it is asked; what ran before still runs.
const NOT_DONE: StatusCode = StatusCode::UNPROCESSABLE_ENTITY;

type Answer = Result<Response, Refusal>;

fn refusal(status: StatusCode, message: impl Into<String>) -> Refusal {
    Refusal {
        status,
        message: message.into(),
    }
}

fn json_of(status: StatusCode, value: &Value) -> Response {
    let kind = [(CONTENT_TYPE, "application/json")];
    (status, kind, value.to_string()).into_response()
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = json_of(self.status, &json!({ "error": self.message }));
        let (name, value) = match self.status {
            StatusCode::UNAUTHORIZED => (WWW_AUTHENTICATE, "Bearer"),
            StatusCode::SERVICE_UNAVAILABLE => (RETRY_AFTER, "1"),
            _ => return response,
        };
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
        response
    }
}

/// A request that is not looked at. A little of its body is, for a sender whose connection is reset reads no answer.
pub async fn refused(refusal: Refusal, request: Request) -> Response {
    // It is dropped; that it was too long or too slow changes nothing.
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, to_bytes(request.into_body(), DRAIN_BYTES)).await;
    refusal.into_response()
}

pub async fn builders(State(api): State<Arc<Api>>) -> Answer {
    let table = api.ask(DEFECT, |control| control.builders()).await?;
    Ok(json_of(StatusCode::OK, &table))
}

pub async fn metrics(State(api): State<Arc<Api>>) -> Answer {
    let text = api.ask(DEFECT, |control| {
        control.builders().map(|table| metrics::render(&table))
    });
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4")], text.await?).into_response())
}

pub async fn steps(State(api): State<Arc<Api>>, uri: Uri) -> Answer {
    let bad = |message: String| refusal(StatusCode::BAD_REQUEST, message);
    let read = || {
        let mut query = Query::parse(uri.query().unwrap_or_default())?;
        let count = query.read("last", "how many steps to show")?;
        query.end("last")?;
        Ok(count.unwrap_or(STEPS_SHOWN))
    };
    let count = read().map_err(bad)?;
    let steps = api.ask(DEFECT, move |control| control.steps(count)).await?;
    Ok(json_of(StatusCode::OK, &steps))
}

pub async fn reload(State(api): State<Arc<Api>>, request: Request) -> Answer {
    let permit = match api.change() {
        Ok(permit) => permit,
        Err(refusal) => return Ok(refused(refusal, request).await),
    };
    let query = Query::parse(request.uri().query().unwrap_or_default()).and_then(ReloadQuery::read);
    let query = match query {
        Ok(query) => query,
        Err(message) => {
            let refusal = refusal(StatusCode::BAD_REQUEST, message);
            return Ok(refused(refusal, request).await);
        }
    };
    let mut component = upload(request, &query.origin).await?;
    let origin = &query.origin;
    let too_large = |message: String| refusal(StatusCode::PAYLOAD_TOO_LARGE, message);
    if query.signature_bytes > SIGNATURE_BYTES_MAX {
        return Err(too_large(format!(
            "{origin}: {} bytes are more than a signature may have ({SIGNATURE_BYTES_MAX})",
            query.signature_bytes
        )));
    }
    let length = component.len();
    let Some(split) = length.checked_sub(query.signature_bytes as usize) else {
        return Err(refusal(
            StatusCode::BAD_REQUEST,
            format!(
                "{origin}: signature_bytes is {}, and {length} bytes arrived; the signature follows the component in the body",
                query.signature_bytes
            ),
        ));
    };
    let signature = component.split_off(split);
    let max = component_bytes_max();
    if component.len() as u64 > max {
        return Err(too_large(format!(
            "{origin}: {} bytes are more than a component may have ({max})",
            component.len()
        )));
    }
    if component.is_empty() && query.options.is_none() {
        return Err(refusal(
            StatusCode::BAD_REQUEST,
            "there is neither a component nor an option; send a component's bytes as the body, or option=KEY=VALUE for the one in service",
        ));
    }
    let answer = api.ask(NOT_DONE, move |control| {
        let _permit = permit;
        control.reload(Submission {
            backend: &query.backend,
            tenant: query.tenant.as_ref(),
            origin: &query.origin,
            component: Some(component.as_slice()).filter(|bytes| !bytes.is_empty()),
            signature: Some(signature.as_slice()).filter(|bytes| !bytes.is_empty()),
            options: query.options,
            plan: query.plan,
        })
    });
    Ok(json_of(StatusCode::OK, &answer.await?))
}

pub async fn rollback(State(api): State<Arc<Api>>, request: Request) -> Answer {
    let query = Query::parse(request.uri().query().unwrap_or_default()).and_then(read_rollback);
    let (backend, tenant) = match query {
        Ok(whose) => whose,
        Err(message) => {
            let refusal = refusal(StatusCode::BAD_REQUEST, message);
            return Ok(refused(refusal, request).await);
        }
    };
    let permit = api.change()?;
    let answer = api.ask(NOT_DONE, move |control| {
        let _permit = permit;
        control.rollback(&backend, tenant.as_ref())
    });
    Ok(json_of(StatusCode::OK, &answer.await?))
}

/// The body, if it is not larger than a component with its signature may be and comes in time.
async fn upload(request: Request, origin: &str) -> Result<Vec<u8>, Refusal> {
    let max = component_bytes_max() + SIGNATURE_BYTES_MAX;
    let too_large = |bytes: u64| {
        refusal(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!(
                "{origin}: {bytes} bytes are more than a component with its signature may have ({max})"
            ),
        )
    };
    let announced = request.headers().get(CONTENT_LENGTH);
    let announced = announced.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if let Some(bytes) = announced.filter(|bytes| *bytes > max) {
        return Err(too_large(bytes));
    }
    match tokio::time::timeout(UPLOAD_TIMEOUT, collect(request.into_body(), max)).await {
        Ok(Ok(bytes)) if bytes.len() as u64 <= max => Ok(bytes),
        Ok(Ok(bytes)) => Err(too_large(bytes.len() as u64)),
        Ok(Err(error)) => Err(refusal(
            StatusCode::BAD_REQUEST,
            format!("{origin}: the component did not arrive whole ({error}); nothing was changed"),
        )),
        Err(_) => Err(refusal(
            StatusCode::REQUEST_TIMEOUT,
            format!(
                "{origin}: the component did not arrive within {} s; nothing was changed",
                UPLOAD_TIMEOUT.as_secs()
            ),
        )),
    }
}

/// All of it, or what there was when it became more than `max`.
async fn collect(body: Body, max: u64) -> Result<Vec<u8>, axum::Error> {
    let mut bytes = Vec::new();
    let mut chunks = body.into_data_stream();
    while let Some(chunk) = chunks.next().await {
        bytes.extend_from_slice(&chunk?);
        if bytes.len() as u64 > max {
            break;
        }
    }
    Ok(bytes)
}

/// An address that is not there.
pub async fn unknown(request: Request) -> Response {
    let message = format!(
        "there is nothing at {:?}; the page is at /, and there are /api/builders, /api/steps, /api/reload, /api/rollback and /metrics",
        request.uri().path()
    );
    refused(refusal(StatusCode::NOT_FOUND, message), request).await
}

/// An address that is asked in a way that it does not answer.
pub async fn wrong_method(request: Request) -> Response {
    let path = request.uri().path();
    let allowed = match path {
        "/api/reload" | "/api/rollback" => Method::POST,
        _ => Method::GET,
    };
    let message = format!("{path} answers {allowed}, not {}", request.method());
    let refusal = refusal(StatusCode::METHOD_NOT_ALLOWED, message);
    let mut response = refused(refusal, request).await;
    if let Ok(allowed) = HeaderValue::from_str(allowed.as_str()) {
        response.headers_mut().insert(ALLOW, allowed);
    }
    response
}
