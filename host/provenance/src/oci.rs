//! A component from an OCI registry, by digest: the packaging of the CNCF's wasm working group, an image manifest whose config
//! is `application/vnd.wasm.config.v0+json` and whose one layer is the component, `application/wasm`.
//!
//! Everything that is read is bounded in size, the whole in time, and nothing is believed but what has the digest that was
//! asked for. Of `oci-client` only the data types serve here: its client reads manifests without a bound.
//!
//! Must never know: signatures, policies.

use std::error::Error;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use oci_client::Reference;
use oci_client::manifest::{OCI_IMAGE_INDEX_MEDIA_TYPE, OCI_IMAGE_MEDIA_TYPE, OciManifest};
use reqwest::header::{ACCEPT, WWW_AUTHENTICATE};
use reqwest::{Client, Response, StatusCode, Url, redirect};

use crate::Digest;
use crate::text::shown;

/// The media type of a component's config.
const CONFIG_MEDIA_TYPE: &str = "application/vnd.wasm.config.v0+json";
/// The media type of the component itself.
const LAYER_MEDIA_TYPE: &str = "application/wasm";
/// The longest manifest, in bytes. One of a component has less than two thousand.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;
/// The longest answer of a token service, in bytes.
const TOKEN_BYTES_MAX: u64 = 64 << 10;
/// How often a request may be sent elsewhere.
const REDIRECTS_MAX: usize = 5;

/// A component in a registry: `oci://registry/repository@sha256:…`. Displays as it reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OciReference {
    /// Host, and port if there is one.
    registry: String,
    repository: String,
    /// Of the manifest.
    digest: Digest,
}

/// What names no component in a registry, or not surely one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReferenceError {
    /// No digest.
    #[error(
        "`{0}` names no digest, and what a tag points to may change; give oci://registry/repository@sha256:… (`oras resolve`, \
         `crane digest` or `docker manifest inspect` tell a tag's digest)"
    )]
    NoDigest(String),
    /// A tag and a digest.
    #[error(
        "`{0}` has both a tag and a digest; leave the tag out: oci://registry/repository@sha256:…"
    )]
    Tag(String),
    /// Another algorithm, or not its length.
    #[error(
        "`{0}`: the digest is not a SHA-256; give oci://registry/repository@sha256: and 64 hexadecimal digits"
    )]
    Digest(String),
    /// No registry's host.
    #[error(
        "`{0}` does not begin with a registry's host; give oci://registry/repository@sha256:…, as oci://registry.example/me/builder@sha256:…"
    )]
    NoRegistry(String),
    /// Otherwise not a reference.
    #[error(
        "`{text}` is not a reference to a registry ({problem}); give oci://registry/repository@sha256:…"
    )]
    Form {
        /// The text.
        text: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Another scheme.
    #[error(
        "components do not come by `{0}://`; give a path, or oci://registry/repository@sha256:…"
    )]
    Scheme(String),
}

/// How much and how long.
#[derive(Clone, Copy, Debug)]
pub struct FetchLimits {
    /// The largest component, in bytes. Default: 32 MiB.
    pub component_bytes_max: u64,
    /// How long a registry may take for everything. Default: 60 s.
    pub timeout: Duration,
    /// How long a connection may take to be made. Default: 10 s.
    pub connect_timeout: Duration,
}

impl Default for FetchLimits {
    fn default() -> Self {
        FetchLimits {
            component_bytes_max: 32 << 20,
            timeout: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(10),
        }
    }
}

/// Why a registry gave no component.
#[derive(Debug, thiserror::Error)]
#[error("{reference}: {problem}")]
pub struct OciError {
    /// The component that was asked for.
    pub reference: Box<OciReference>,
    /// What was wrong, and the remedy.
    pub problem: OciProblem,
}

/// What was wrong. Each message says what, with the value, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum OciProblem {
    /// No connection, or one that broke.
    #[error(
        "the registry cannot be reached ({0}); check its name, the network, and that it speaks https (http only on loopback)"
    )]
    Unreachable(String),
    /// Out of time.
    #[error("the registry did not answer in {} s; try again, or fetch it with another tool and give the path", .0.as_secs_f32())]
    Slow(Duration),
    /// A chain of redirections that is not followed.
    #[error("{what} was redirected {problem}; give the registry that serves it itself")]
    Redirected {
        /// What was asked for.
        what: String,
        /// Where, or how often.
        problem: String,
    },
    /// Credentials are asked for.
    #[error(
        "the registry asks for credentials for {what} (status {status}), and only what anyone may read is fetched; make the \
         repository readable, or fetch it with a tool that has your credentials and give the path"
    )]
    Unauthorized {
        /// What was asked for.
        what: String,
        /// 401, 403.
        status: u16,
    },
    /// Not there.
    #[error("the registry has no {0}; check repository and digest, or push it again")]
    Missing(String),
    /// Another status.
    #[error("the registry answered status {status} for {what}; try again, or ask who runs it")]
    Status {
        /// What was asked for.
        what: String,
        /// As HTTP has it.
        status: u16,
    },
    /// Larger than is read.
    #[error(
        "{what} has more than {max} bytes, the most that are fetched; strip it, or check that it is a component"
    )]
    TooLarge {
        /// What was asked for.
        what: String,
        /// The bound.
        max: u64,
    },
    /// Other bytes than were asked for.
    #[error(
        "the bytes of {what} have the digest {found}; nothing was used of them; try again, and tell who runs the registry"
    )]
    WrongDigest {
        /// What was asked for.
        what: String,
        /// What came.
        found: Digest,
    },
    /// Not what the packaging says.
    #[error(
        "is no packaged component: {0}; package it with a tool that follows the wasm OCI layout, as `wkg oci push`"
    )]
    NotAComponent(String),
}

/// Brings the component's bytes.
pub(crate) fn pull(reference: &OciReference, limits: &FetchLimits) -> Result<Vec<u8>, OciError> {
    let failed = |problem| OciError {
        reference: Box::new(reference.clone()),
        problem,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| failed(OciProblem::Unreachable(error.to_string())))?;
    let pulled = runtime.block_on(async {
        let pull = async {
            let mut registry = Registry::new(reference, limits)?;
            registry.pull().await
        };
        tokio::time::timeout(limits.timeout, pull)
            .await
            .unwrap_or(Err(OciProblem::Slow(limits.timeout)))
    });
    // A look-up of a name may still run; nobody waits for it.
    runtime.shutdown_background();
    pulled.map_err(failed)
}

struct Registry<'a> {
    client: Client,
    reference: &'a OciReference,
    limits: &'a FetchLimits,
    token: Option<String>,
}

impl<'a> Registry<'a> {
    fn new(reference: &'a OciReference, limits: &'a FetchLimits) -> Result<Self, OciProblem> {
        // The process has one provider of cryptography; who else set one set it for all.
        drop(rustls::crypto::ring::default_provider().install_default());
        let builder = Client::builder()
            .connect_timeout(limits.connect_timeout)
            .user_agent(concat!("timetable/", env!("CARGO_PKG_VERSION")))
            .redirect(redirect::Policy::custom(follow));
        let builder = match reference.is_loopback() {
            // Plain http: no certificates are looked for.
            true => builder.tls_certs_only([]),
            false => builder,
        };
        let client = builder
            .build()
            .map_err(|error| OciProblem::Unreachable(chain(&error)))?;
        Ok(Registry {
            client,
            reference,
            limits,
            token: None,
        })
    }

    async fn pull(&mut self) -> Result<Vec<u8>, OciProblem> {
        let digest = self.reference.digest;
        let what = "manifest of this digest".to_owned();
        let manifest = self
            .fetch("manifests", digest, what, MANIFEST_BYTES_MAX)
            .await?;
        let (layer, size) = component_of(&manifest)?;
        let what = format!("layer {layer}");
        let max = self.limits.component_bytes_max;
        if size > max {
            return Err(OciProblem::TooLarge { what, max });
        }
        self.fetch("blobs", layer, what, max).await
    }

    /// The bytes with `digest`.
    async fn fetch(
        &mut self,
        kind: &str,
        digest: Digest,
        what: String,
        max: u64,
    ) -> Result<Vec<u8>, OciProblem> {
        let response = self.get(kind, digest, &what).await?;
        let bytes = body(response, &what, max).await?;
        match Digest::of(&bytes) {
            found if found != digest => Err(OciProblem::WrongDigest { what, found }),
            _ => Ok(bytes),
        }
    }

    async fn get(
        &mut self,
        kind: &str,
        digest: Digest,
        what: &str,
    ) -> Result<Response, OciProblem> {
        let OciReference {
            registry,
            repository,
            ..
        } = self.reference;
        let scheme = if self.reference.is_loopback() {
            "http"
        } else {
            "https"
        };
        let url = format!("{scheme}://{registry}/v2/{repository}/{kind}/{digest}");
        let mut response = self.send(&url, what).await?;
        if response.status() == StatusCode::UNAUTHORIZED && self.token.is_none() {
            // Many registries want a token even of those whom they ask for nothing else.
            self.token = self.anonymous_token(&response, what).await?;
            if self.token.is_some() {
                response = self.send(&url, what).await?;
            }
        }
        let what = what.to_owned();
        match response.status() {
            StatusCode::OK => Ok(response),
            StatusCode::NOT_FOUND => Err(OciProblem::Missing(what)),
            status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
                let status = status.as_u16();
                Err(OciProblem::Unauthorized { what, status })
            }
            status => {
                let status = status.as_u16();
                Err(OciProblem::Status { what, status })
            }
        }
    }

    async fn send(&self, url: &str, what: &str) -> Result<Response, OciProblem> {
        let mut request = self.client.get(url).header(
            ACCEPT,
            format!("{OCI_IMAGE_MEDIA_TYPE}, {LAYER_MEDIA_TYPE}, */*;q=0.1"),
        );
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        request.send().await.map_err(|error| broken(&error, what))
    }

    /// The token that a challenge offers to anyone. None if it offers none.
    async fn anonymous_token(
        &self,
        response: &Response,
        what: &str,
    ) -> Result<Option<String>, OciProblem> {
        let challenge = response
            .headers()
            .get(WWW_AUTHENTICATE)
            .and_then(|value| value.to_str().ok());
        let Some(url) = challenge.and_then(token_url) else {
            return Ok(None);
        };
        let response = self.client.get(url).send().await;
        let response = response.map_err(|error| broken(&error, what))?;
        if response.status() != StatusCode::OK {
            return Ok(None);
        }
        let bytes = body(response, "token for anyone", TOKEN_BYTES_MAX).await?;
        let answer: serde_json::Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let token = answer["token"].as_str().or(answer["access_token"].as_str());
        Ok(token.map(str::to_owned))
    }
}

/// Where to ask for a token, from `Bearer realm="…",service="…",scope="…"`. Over https, or on loopback.
fn token_url(challenge: &str) -> Option<Url> {
    let (scheme, parameters) = challenge.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("bearer") {
        return None;
    }
    let mut realm = None;
    let mut others = Vec::new();
    // A scope may hold commas, so values are read by their quotes.
    let mut rest = parameters;
    while let Some((name, after)) = rest.split_once("=\"") {
        let (value, after) = after.split_once('"')?;
        match name.trim_matches([',', ' ']) {
            "realm" => realm = Url::parse(value).ok(),
            name @ ("service" | "scope") => others.push((name, value)),
            _ => {}
        }
        rest = after;
    }
    let mut url = realm.filter(is_safe)?;
    url.query_pairs_mut().extend_pairs(others);
    Some(url)
}

/// Https, or http on this machine.
fn is_safe(url: &Url) -> bool {
    url.scheme() == "https" || (url.scheme() == "http" && url.host_str().is_some_and(loopback))
}

fn follow(attempt: redirect::Attempt<'_>) -> redirect::Action {
    if attempt.previous().len() > REDIRECTS_MAX {
        return attempt.error(format!("more than {REDIRECTS_MAX} times"));
    }
    if !is_safe(attempt.url()) {
        let to = format!("to {}, which is not https", attempt.url());
        return attempt.error(to);
    }
    attempt.follow()
}

/// The whole body, if it has at most `max` bytes.
async fn body(mut response: Response, what: &str, max: u64) -> Result<Vec<u8>, OciProblem> {
    let mut bytes = Vec::new();
    while let Some(chunk) = response
        .chunk()
        .await
        .map_err(|error| broken(&error, what))?
    {
        if (bytes.len() + chunk.len()) as u64 > max {
            let what = what.to_owned();
            return Err(OciProblem::TooLarge { what, max });
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

/// The digest and the size in bytes of a manifest's component.
fn component_of(manifest: &[u8]) -> Result<(Digest, u64), OciProblem> {
    let not = OciProblem::NotAComponent;
    let manifest = match serde_json::from_slice(manifest) {
        Ok(OciManifest::Image(manifest)) => manifest,
        Ok(OciManifest::ImageIndex(_)) => {
            return Err(not(format!(
                "the digest is of an index ({OCI_IMAGE_INDEX_MEDIA_TYPE}), which lists manifests; give the digest of one"
            )));
        }
        Err(error) => return Err(not(format!("its manifest does not read ({error})"))),
    };
    if let Some(found) = manifest.media_type.as_deref()
        && found != OCI_IMAGE_MEDIA_TYPE
    {
        let found = shown(found);
        return Err(not(format!(
            "its manifest is `{found}`, not `{OCI_IMAGE_MEDIA_TYPE}`"
        )));
    }
    if manifest.config.media_type != CONFIG_MEDIA_TYPE {
        let found = shown(&manifest.config.media_type);
        return Err(not(format!(
            "its config is `{found}`, not `{CONFIG_MEDIA_TYPE}`"
        )));
    }
    let [layer] = manifest.layers.as_slice() else {
        let count = manifest.layers.len();
        return Err(not(format!("it has {count} layers, not one")));
    };
    if layer.media_type != LAYER_MEDIA_TYPE {
        let found = shown(&layer.media_type);
        return Err(not(format!(
            "its layer is `{found}`, not `{LAYER_MEDIA_TYPE}`"
        )));
    }
    let digest = oci_digest(&layer.digest).ok_or_else(|| {
        not(format!(
            "its layer's digest is `{}`, no SHA-256",
            shown(&layer.digest)
        ))
    })?;
    let size = u64::try_from(layer.size)
        .map_err(|_| not(format!("its layer's size is {}", layer.size)))?;
    Ok((digest, size))
}

/// As registries write digests: with the algorithm.
fn oci_digest(text: &str) -> Option<Digest> {
    text.starts_with("sha256:").then(|| text.parse().ok())?
}

/// What a failed exchange was.
fn broken(error: &reqwest::Error, what: &str) -> OciProblem {
    if error.is_redirect() {
        let problem = error.source().map_or_else(String::new, ToString::to_string);
        let what = what.to_owned();
        return OciProblem::Redirected { what, problem };
    }
    OciProblem::Unreachable(chain(error))
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

/// Is it this machine? `host` may have brackets around an address.
fn loopback(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']);
    host == "localhost"
        || host
            .parse()
            .is_ok_and(|address: IpAddr| address.is_loopback())
}

impl OciReference {
    /// Is the registry on this machine? Then it may speak http.
    fn is_loopback(&self) -> bool {
        let host = match self.registry.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
            _ => &self.registry,
        };
        loopback(host)
    }
}

impl FromStr for OciReference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<OciReference, ReferenceError> {
        let name = text.strip_prefix("oci://").unwrap_or(text);
        let text = || shown(text);
        let (named, digest) = name
            .split_once('@')
            .ok_or_else(|| ReferenceError::NoDigest(text()))?;
        let digest = oci_digest(digest).ok_or_else(|| ReferenceError::Digest(text()))?;
        let reference: Reference = named.parse().map_err(|error| ReferenceError::Form {
            text: text(),
            problem: format!("{error}"),
        })?;
        // Without a host a name means one that is nowhere said.
        let host = named.split('/').next().unwrap_or_default();
        if host != reference.registry() || host == named {
            return Err(ReferenceError::NoRegistry(text()));
        }
        if named[host.len()..].contains(':') {
            return Err(ReferenceError::Tag(text()));
        }
        Ok(OciReference {
            registry: host.to_owned(),
            repository: reference.repository().to_owned(),
            digest,
        })
    }
}

impl fmt::Display for OciReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OciReference {
            registry,
            repository,
            digest,
        } = self;
        write!(f, "oci://{registry}/{repository}@{digest}")
    }
}
