//! A registry on loopback that answers as it is told, and components packaged for it.
#![allow(dead_code, reason = "each test program uses a part")]

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::IntoResponse;
use serde_json::{Value, json};
use timetable_provenance::Digest;

pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const CONFIG: &str = "application/vnd.wasm.config.v0+json";
pub const LAYER: &str = "application/wasm";

/// What is answered at a path.
#[derive(Clone)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    pub delay: Duration,
    /// Without this bearer token, status 401.
    pub token: Option<&'static str>,
}

impl Reply {
    pub fn of(body: impl Into<Vec<u8>>) -> Reply {
        Reply {
            status: 200,
            headers: Vec::new(),
            body: body.into(),
            delay: Duration::ZERO,
            token: None,
        }
    }

    pub fn status(status: u16) -> Reply {
        Reply {
            status,
            ..Reply::of("")
        }
    }

    pub fn redirect(to: String) -> Reply {
        Reply {
            headers: vec![("location", to)],
            ..Reply::status(307)
        }
    }
}

#[derive(Default)]
struct Shared {
    replies: HashMap<String, Reply>,
    /// Path with query, and the authorization that came with it.
    asked: Vec<(String, Option<String>)>,
    challenge: Option<String>,
}

/// A running registry.
pub struct Registry {
    pub address: SocketAddr,
    shared: Arc<Mutex<Shared>>,
}

impl Registry {
    pub fn start() -> Registry {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Mutex::new(Shared::default()));
        let state = Arc::clone(&shared);
        // Ends with the test's process.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                let router = Router::new().fallback(answer).with_state(state);
                axum::serve(listener, router).await.unwrap();
            });
        });
        Registry { address, shared }
    }

    pub fn reply(&self, path: &str, reply: Reply) {
        self.shared
            .lock()
            .unwrap()
            .replies
            .insert(path.to_owned(), reply);
    }

    /// What a request without a token is challenged with.
    pub fn challenge(&self, challenge: String) {
        self.shared.lock().unwrap().challenge = Some(challenge);
    }

    pub fn asked(&self) -> Vec<(String, Option<String>)> {
        self.shared.lock().unwrap().asked.clone()
    }

    /// Puts `component` there as `me/builder`, and gives the reference to it.
    pub fn push(&self, component: &[u8]) -> String {
        self.reply(&blob(component), Reply::of(component));
        self.push_manifest(&manifest(component))
    }

    /// Puts a manifest there, and gives the reference to it.
    pub fn push_manifest(&self, manifest: &Value) -> String {
        let bytes = manifest.to_string();
        let digest = Digest::of(bytes.as_bytes());
        self.reply(
            &format!("/v2/me/builder/manifests/{digest}"),
            Reply::of(bytes),
        );
        self.reference(digest)
    }

    pub fn reference(&self, digest: Digest) -> String {
        format!("oci://{}/me/builder@{digest}", self.address)
    }
}

/// Where a layer of these bytes is.
pub fn blob(bytes: &[u8]) -> String {
    format!("/v2/me/builder/blobs/{}", Digest::of(bytes))
}

/// The manifest of a component.
pub fn manifest(component: &[u8]) -> Value {
    let config = br#"{"architecture":"wasm","os":"wasip2"}"#;
    json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": { "mediaType": CONFIG, "digest": Digest::of(config), "size": config.len() },
        "layers": [{ "mediaType": LAYER, "digest": Digest::of(component), "size": component.len() }],
    })
}

async fn answer(
    State(shared): State<Arc<Mutex<Shared>>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
) -> impl IntoResponse {
    let authorization = headers
        .get("authorization")
        .map(|value| value.to_str().unwrap().to_owned());
    let (reply, challenge) = {
        let mut shared = shared.lock().unwrap();
        shared.asked.push((uri.to_string(), authorization.clone()));
        let reply = shared.replies.get(uri.path()).cloned();
        (
            reply.filter(|_| method == Method::GET),
            shared.challenge.clone(),
        )
    };
    let mut reply = reply.unwrap_or_else(|| Reply::status(404));
    if let Some(token) = reply.token
        && authorization.as_deref() != Some(&format!("Bearer {token}"))
    {
        reply = Reply::status(401);
        reply
            .headers
            .extend(challenge.map(|challenge| ("www-authenticate", challenge)));
    }
    tokio::time::sleep(reply.delay).await;
    let mut headers = HeaderMap::new();
    for (name, value) in reply.headers {
        headers.insert(name, value.parse().unwrap());
    }
    (
        StatusCode::from_u16(reply.status).unwrap(),
        headers,
        reply.body,
    )
}
