//! Who may ask the admin page for what, and the headers of its answers.
//!
//! Two kinds of attackers: whoever else can reach the address, kept out by loopback or by a token; and a web page of
//! somebody else's in the operator's own browser, which can send requests there (CSRF) or give its own name the host's address
//! (DNS rebinding). Must never know: what is asked.

use std::net::IpAddr;
use std::path::Path;

use axum::extract::Request;
use axum::http::header::{self, AUTHORIZATION, HOST, HeaderMap, HeaderName, HeaderValue, ORIGIN};
use axum::http::{Method, StatusCode};

use super::page;
use crate::exit::{Exit, Failure};

/// What a request that changes something carries where there is no token. A page of another origin cannot send it without asking
/// the host first, which never allows it.
pub const CHANGE_HEADER: &str = "x-timetable-admin";

/// The shortest token, in characters.
const TOKEN_MIN: usize = 16;
/// The longest.
const TOKEN_MAX: usize = 4096;

/// Why a request is not answered.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    pub status: StatusCode,
    pub message: String,
}

/// Who may ask.
pub struct Access {
    token: Option<String>,
}

impl Access {
    /// Whoever shows the token in `file`; without one, whoever reaches the address.
    ///
    /// # Errors
    /// The file cannot be read, or holds no token.
    pub fn new(file: Option<&Path>) -> Result<Self, Failure> {
        let token = file.map(read_token).transpose()?;
        Ok(Self { token })
    }

    /// May it be answered?
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, request: &Request) -> Result<(), Refusal> {
        let headers = request.headers();
        let host = one(headers, &HOST)?.unwrap_or_default();
        let forbidden = |message: String| {
            Err(Refusal {
                status: StatusCode::FORBIDDEN,
                message,
            })
        };
        // A name that somebody else made to mean this machine is not ours. A token is not theirs.
        if self.token.is_none() && !is_loopback(host) {
            return forbidden(format!(
                "the request is for {host:?}, and without a token this page answers as 127.0.0.1, [::1] or localhost only; open it by one of these, or give the host a token with --admin-token-file"
            ));
        }
        if let Some(origin) = one(headers, &ORIGIN)?
            && origin.split_once("://").map(|(_, host)| host) != Some(host)
        {
            return forbidden(format!(
                "the request comes from a page of {origin:?}, and only this host's own page may ask"
            ));
        }
        let Some(token) = &self.token else {
            let changes = !matches!(*request.method(), Method::GET | Method::HEAD);
            if changes && !headers.contains_key(CHANGE_HEADER) {
                return forbidden(format!(
                    "the request would change something and does not say that it means to: send the header {CHANGE_HEADER}: 1"
                ));
            }
            return Ok(());
        };
        if page::is_file(request.uri().path()) {
            return Ok(());
        }
        let shown = one(headers, &AUTHORIZATION)?.and_then(|value| value.split_once(' '));
        match shown {
            Some((scheme, shown))
                if scheme.eq_ignore_ascii_case("bearer") && is_same(shown.trim(), token) =>
            {
                Ok(())
            }
            _ => Err(Refusal {
                status: StatusCode::UNAUTHORIZED,
                message: "the host's token is needed: Authorization: Bearer TOKEN, from the file that --admin-token-file names".to_owned(),
            }),
        }
    }
}

fn read_token(path: &Path) -> Result<String, Failure> {
    let refused = |what: String| {
        Failure::new(
            Exit::BadInput,
            format!("admin token {}: {what}", path.display()),
        )
    };
    let text = std::fs::read_to_string(path).map_err(|error| {
        refused(format!(
            "cannot be read ({error}); make it with `openssl rand -hex 32`"
        ))
    })?;
    let token = text.trim();
    let length = token.len();
    if !(TOKEN_MIN..=TOKEN_MAX).contains(&length) || !token.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(refused(format!(
            "{length} bytes; a token is {TOKEN_MIN} to {TOKEN_MAX} visible ASCII characters without spaces, as `openssl rand -hex 32` prints"
        )));
    }
    Ok(token.to_owned())
}

/// The header, if it is there; more than one is not understood.
fn one<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, Refusal> {
    let mut all = headers.get_all(name).iter();
    let first = all.next().map(HeaderValue::to_str);
    match (first, all.next()) {
        (None, _) => Ok(None),
        (Some(Ok(text)), None) => Ok(Some(text)),
        _ => Err(Refusal {
            status: StatusCode::BAD_REQUEST,
            message: format!("the header {name} is there twice, or is no text"),
        }),
    }
}

/// Is `host`, a name with or without a port, this machine's own for certain?
fn is_loopback(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']');
    let address: Result<IpAddr, _> = address.parse();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// Compares all of it, so that time does not tell how much is right.
fn is_same(shown: &str, token: &str) -> bool {
    let differ = shown
        .bytes()
        .zip(token.bytes())
        .fold(0, |d, (a, b)| d | (a ^ b));
    shown.len() == token.len() && differ == 0
}

/// Nothing from elsewhere runs in the page, nobody frames it, and nothing of it is kept.
pub fn harden(headers: &mut HeaderMap) {
    const HEADERS: [(HeaderName, &str); 7] = [
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        ),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
    ];
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn ask(access: &Access, method: &str, path: &str, headers: &[(&str, &str)]) -> u16 {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let refusal = access.check(&request.body(Body::empty()).unwrap()).err();
        refusal.map_or(200, |refusal| refusal.status.as_u16())
    }

    #[test]
    fn without_a_token_only_this_machines_own_names_and_pages_are_answered() {
        let open = Access { token: None };
        for host in [
            "127.0.0.1:9090",
            "localhost",
            "LocalHost:1",
            "[::1]:9090",
            "[::1]",
            "127.3.2.1",
        ] {
            assert_eq!(
                ask(&open, "GET", "/api/builders", &[("host", host)]),
                200,
                "{host}"
            );
        }
        for host in [
            "evil.example",
            "evil.example:9090",
            "localhost.evil.example",
            "10.0.0.1",
            "",
            "127.0.0.1.evil:9090",
            "[::1",
            "a:b",
        ] {
            let status = ask(&open, "GET", "/", &[("host", host)]);
            assert_eq!(status, 403, "{host}");
        }
        assert_eq!(ask(&open, "GET", "/", &[]), 403);
        assert_eq!(
            ask(
                &open,
                "GET",
                "/",
                &[("host", "localhost"), ("host", "localhost")]
            ),
            400
        );
        let host = ("host", "127.0.0.1:9090");
        for (origin, expected) in [
            ("http://127.0.0.1:9090", 200),
            ("http://127.0.0.1:9091", 403),
            ("http://localhost:9090", 403),
            ("https://evil.example", 403),
            ("null", 403),
            ("", 403),
        ] {
            let headers = [host, ("origin", origin), (CHANGE_HEADER, "1")];
            assert_eq!(
                ask(&open, "POST", "/api/reload", &headers),
                expected,
                "{origin}"
            );
        }
        assert_eq!(ask(&open, "POST", "/api/reload", &[host]), 403);
        assert_eq!(ask(&open, "DELETE", "/", &[host]), 403);
        assert_eq!(
            ask(&open, "POST", "/api/reload", &[host, (CHANGE_HEADER, "1")]),
            200
        );
    }

    #[test]
    fn with_a_token_nothing_but_the_pages_files_is_answered_without_it() {
        let token = "0123456789abcdef".to_owned();
        let closed = Access { token: Some(token) };
        let host = ("host", "gpu-7.example:9090");
        assert_eq!(ask(&closed, "GET", "/", &[host]), 200);
        for path in ["/api/builders", "/metrics", "/nothing", "//"] {
            assert_eq!(ask(&closed, "GET", path, &[host]), 401, "{path}");
        }
        for (shown, expected) in [
            ("Bearer 0123456789abcdef", 200),
            ("bearer  0123456789abcdef", 200),
            ("Bearer 0123456789abcdeF", 401),
            ("Bearer 0123456789abcde", 401),
            ("Bearer 0123456789abcdef0", 401),
            ("Bearer", 401),
            ("Basic 0123456789abcdef", 401),
        ] {
            let headers = [host, ("authorization", shown)];
            assert_eq!(
                ask(&closed, "POST", "/api/reload", &headers),
                expected,
                "{shown}"
            );
        }
        let headers = [
            host,
            ("authorization", "Bearer 0123456789abcdef"),
            ("origin", "http://evil.example"),
        ];
        assert_eq!(ask(&closed, "POST", "/api/reload", &headers), 403);
    }

    #[test]
    fn a_file_without_a_good_token_is_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("token");
        for (text, expected) in [
            ("", "0 bytes"),
            ("short\n", "5 bytes"),
            ("0123456789 abcdef", "17 bytes"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = Access::new(Some(&path)).err().unwrap().to_string();
            assert!(
                error.contains(expected) && error.contains("openssl"),
                "{error}"
            );
        }
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        assert_eq!(
            Access::new(Some(&path)).unwrap().token.as_deref(),
            Some("0123456789abcdef")
        );
        let error = Access::new(Some(&scratch.path().join("none")))
            .err()
            .unwrap();
        assert!(error.to_string().contains("cannot be read"), "{error}");
    }
}
