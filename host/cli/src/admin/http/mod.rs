//! The admin page: what the admin socket does, over HTTP, and a page for people.
//!
//! On a thread of its own with a runtime of its own; what asks the host blocks on threads beside it, so that a slow client
//! delays nobody. `access` decides who may ask what. Must never know: the engine.

mod access;
mod api;
mod page;
mod query;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use self::access::Access;
use self::api::Api;
use super::Control;
use crate::config::AdminSettings;
use crate::exit::{Exit, Failure};

/// Connections at once. One more is closed at once.
const CONNECTIONS_MAX: usize = 128;
/// How long a client may take to send a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection may live; it serves one request.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(300);
/// Threads that may ask the host at the same time.
const ASKING_MAX: usize = 8;

/// The bound address. Nobody is answered yet.
pub struct PageListener {
    listener: TcpListener,
    address: SocketAddr,
    access: Access,
}

impl PageListener {
    /// Binds the configured address; none if none is.
    ///
    /// # Errors
    /// The address cannot be had, or the token's file is not usable.
    pub fn bind(settings: &AdminSettings) -> Result<Option<Self>, Failure> {
        let Some(wanted) = settings.listen else {
            return Ok(None);
        };
        let access = Access::new(settings.token_file.as_deref())?;
        let unbound = |error: std::io::Error| {
            Failure::new(
                Exit::BadInput,
                format!(
                    "admin page {wanted}: cannot listen there ({error}); choose another address with --admin-listen, port 0 for any"
                ),
            )
        };
        let listener = TcpListener::bind(wanted).map_err(unbound)?;
        listener.set_nonblocking(true).map_err(unbound)?;
        let address = listener.local_addr().map_err(unbound)?;
        Ok(Some(Self {
            listener,
            address,
            access,
        }))
    }

    /// Starts to answer, for `control`, and says where: with port 0 nobody knows otherwise.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    pub fn serve(self, control: impl Control + Sync) -> Result<Page, Failure> {
        let failed = |error: std::io::Error| Failure::new(Exit::Failure, error);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(ASKING_MAX)
            .thread_name("timetable-admin")
            .build()
            .map_err(failed)?;
        let (stop, stopped) = oneshot::channel();
        let app = app(Arc::new(control), self.access);
        let thread = std::thread::Builder::new()
            .name("timetable-admin-http".to_owned())
            .spawn(move || run(runtime, self.listener, &app, stopped))
            .map_err(failed)?;
        eprintln!("timetable: admin page at http://{}/", self.address);
        Ok(Page {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

/// The page that is served. Dropping it closes the address and all connections, without waiting for a client.
pub struct Page {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Page {
    fn drop(&mut self) {
        drop(self.stop.take());
        // Its thread waits for nobody. If it panicked, the address is closed all the same.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

fn run(runtime: Runtime, listener: TcpListener, app: &Router, stopped: oneshot::Receiver<()>) {
    runtime.block_on(async {
        match tokio::net::TcpListener::from_std(listener) {
            Ok(listener) => tokio::select! {
                () = accept(&listener, app) => {}
                _ = stopped => {}
            },
            Err(error) => tracing::error!(%error, "the admin page is not served"),
        }
    });
    // A reload that is under way ends by itself.
    runtime.shutdown_background();
}

async fn accept(listener: &tokio::net::TcpListener, app: &Router) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                if let Ok(permit) = Arc::clone(&connections).try_acquire_owned() {
                    tokio::spawn(serve(stream, app.clone(), permit));
                }
            }
            Err(error) => {
                tracing::warn!(%error, "admin page: a connection was not accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// One connection, one request.
async fn serve(stream: TcpStream, app: Router, _permit: OwnedSemaphorePermit) {
    let service = TowerToHyperService::new(app);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(CONNECTION_TIMEOUT, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "admin page: a client went away"),
        Err(_) => tracing::debug!("admin page: a client was too slow"),
    }
}

fn app(control: Arc<dyn Control + Sync>, access: Access) -> Router {
    let api = Router::new()
        .route("/api/builders", get(api::builders))
        .route("/api/steps", get(api::steps))
        .route("/api/reload", post(api::reload))
        .route("/api/rollback", post(api::rollback))
        .route("/metrics", get(api::metrics))
        .with_state(Arc::new(Api::new(control)));
    page::routes(api)
        .fallback(api::unknown)
        .method_not_allowed_fallback(api::wrong_method)
        .layer(from_fn_with_state(Arc::new(access), guard))
}

/// Whoever may not ask gets no further; every answer has the headers that keep a browser from being used against the host.
async fn guard(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    let mut response = match access.check(&request) {
        Ok(()) => next.run(request).await,
        Err(refusal) => api::refused(refusal, request).await,
    };
    access::harden(response.headers_mut());
    response
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::time::Instant;

    use serde_json::{Value, json};
    use timetable_sandbox::TenantName;

    use super::*;
    use crate::admin::Submission;

    /// A host that takes its time with changes.
    struct Slow;
    impl Control for Slow {
        fn reload(&self, submission: Submission<'_>) -> Result<Value, String> {
            std::thread::sleep(Duration::from_secs(30));
            Ok(json!(submission.origin))
        }
        fn rollback(&self, backend: &str, _: Option<&TenantName>) -> Result<Value, String> {
            panic!("{backend} is asked for, and this is a defect")
        }
        fn builders(&self) -> Result<Value, String> {
            Ok(json!({ "builders": [] }))
        }
        fn configure(&self, _: &str, text: String) -> Result<Value, String> {
            Err(text)
        }
        fn steps(&self, count: usize) -> Result<Value, String> {
            Err(format!("{count} steps are not kept"))
        }
    }

    fn send(address: SocketAddr, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    fn answer(mut stream: TcpStream) -> String {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn neither_slow_clients_nor_a_busy_host_keep_it_from_answering_and_ending() {
        let settings = AdminSettings {
            listen: Some("127.0.0.1:0".parse().unwrap()),
            ..AdminSettings::default()
        };
        let listener = PageListener::bind(&settings).unwrap().unwrap();
        let address = listener.address;
        let page = listener.serve(Slow).unwrap();
        let head = "HTTP/1.1\r\nHost: localhost\r\nX-Timetable-Admin: 1\r\n";
        let slow: Vec<TcpStream> = (0..30)
            .map(|_| send(address, "GET / HT"))
            .chain((0..2).map(|_| {
                let half =
                    format!("POST /api/reload?backend=A {head}Content-Length: 9\r\n\r\nhalf");
                send(address, &half)
            }))
            .chain([send(
                address,
                &format!("POST /api/reload?backend=A&option=a=b {head}Content-Length: 0\r\n\r\n"),
            )])
            .collect();
        for (request, expected) in [
            ("GET /api/builders", "200 OK"),
            ("GET /api/steps?last=3", "500 Internal Server Error"),
            ("POST /api/rollback?backend=B", "500 Internal Server Error"),
            ("GET /api/builders", "200 OK"),
        ] {
            let text = answer(send(
                address,
                &format!("{request} {head}Content-Length: 0\r\n\r\n"),
            ));
            assert!(text.starts_with(&format!("HTTP/1.1 {expected}")), "{text}");
        }
        let began = Instant::now();
        drop(page);
        // Far less than the host takes for the change, or than a client may take.
        assert!(
            began.elapsed() < Duration::from_secs(9),
            "{:?}",
            began.elapsed()
        );
        assert!(TcpStream::connect(address).is_err(), "closed");
        for stream in slow {
            // Closed, with an answer or without.
            let mut rest = Vec::new();
            drop((&stream).read_to_end(&mut rest));
        }
    }
}
