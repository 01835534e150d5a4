//! The answering side: a thread that accepts one connection after the other.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use timetable_provenance::SIGNATURE_BYTES_MAX;
use timetable_sandbox::{ReloadPlan, TenantName};

use super::{LINE_BYTES_MAX, Request, Response, component_bytes_max, metrics, prepare};
use crate::exit::{Exit, Failure};

/// How long a client may take to send its request. A slow client delays other clients, never a step.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// A version that somebody wants in service.
pub struct Submission<'a> {
    /// FLASH_ATTN, FLASHINFER, …
    pub backend: &'a str,
    /// Whose builder. None: everybody's.
    pub tenant: Option<&'a TenantName>,
    /// Where the component came from, for people.
    pub origin: &'a str,
    /// Its bytes. None: the component in service.
    pub component: Option<&'a [u8]>,
    /// Its detached signature, if it has one.
    pub signature: Option<&'a [u8]>,
    /// The builder's own options. None: those of the version before.
    pub options: Option<Vec<(String, String)>>,
    /// The stages that it goes through. None: the host's own.
    pub plan: Option<ReloadPlan>,
}

/// What the socket controls. Each answer is data for `--json` and for the tables; each error is one line.
pub trait Control: Send + 'static {
    /// Replaces the builder of a backend. Returns when the new one is checked: published for the next step boundary, or in its
    /// first stage.
    fn reload(&self, submission: Submission<'_>) -> Result<serde_json::Value, String>;
    /// Withdraws a candidate, or returns to the previous version.
    fn rollback(
        &self,
        backend: &str,
        tenant: Option<&TenantName>,
    ) -> Result<serde_json::Value, String>;
    /// The table of builders.
    fn builders(&self) -> Result<serde_json::Value, String>;
    /// Applies the configuration `text`, which lies at `path`: whole, or not at all.
    fn configure(&self, path: &str, text: String) -> Result<serde_json::Value, String>;
    /// The last `count` steps and where their time went.
    fn steps(&self, count: usize) -> Result<serde_json::Value, String>;
}

impl<C: Control + Sync> Control for Arc<C> {
    fn reload(&self, submission: Submission<'_>) -> Result<serde_json::Value, String> {
        (**self).reload(submission)
    }
    fn rollback(
        &self,
        backend: &str,
        tenant: Option<&TenantName>,
    ) -> Result<serde_json::Value, String> {
        (**self).rollback(backend, tenant)
    }
    fn builders(&self) -> Result<serde_json::Value, String> {
        (**self).builders()
    }
    fn configure(&self, path: &str, text: String) -> Result<serde_json::Value, String> {
        (**self).configure(path, text)
    }
    fn steps(&self, count: usize) -> Result<serde_json::Value, String> {
        (**self).steps(count)
    }
}

/// The bound socket and its thread. Dropping it ends the thread and removes the socket, without waiting for a client.
pub struct Server {
    path: PathBuf,
    identity: Option<(u64, u64)>,
    stopping: Arc<AtomicBool>,
}

impl Server {
    /// Binds `path`, mode 0600, and starts to answer.
    ///
    /// # Errors
    /// See [`prepare`]; or the path cannot be bound.
    pub fn start(path: &Path, control: impl Control) -> Result<Self, Failure> {
        prepare(path)?;
        let unbound = |error: std::io::Error| {
            Failure::new(
                Exit::BadInput,
                format!(
                    "admin socket {}: cannot be opened ({error}); choose another path with --admin PATH (--admin none opens none)",
                    path.display()
                ),
            )
        };
        // The directory is private or sticky, so nobody else gets in between these two lines.
        let listener = UnixListener::bind(path).map_err(unbound)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(unbound)?;
        let stopping = Arc::new(AtomicBool::new(false));
        // Not joined: a slow client must not keep the host from ending.
        std::thread::Builder::new()
            .name("admin".to_owned())
            .spawn({
                let stopping = Arc::clone(&stopping);
                move || serve(&listener, &control, &stopping)
            })
            .map_err(unbound)?;
        Ok(Server {
            path: path.to_path_buf(),
            identity: identity(path),
            stopping,
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        // The path may be another host's by now: its socket is not ours to remove.
        if self.identity.is_some() && identity(&self.path) == self.identity {
            // Wakes the accepting thread, which ends; if that fails, it ends with the process.
            drop(UnixStream::connect(&self.path));
            drop(fs::remove_file(&self.path));
        }
    }
}

/// What tells a socket from another one at the same path: device and inode.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let metadata = fs::symlink_metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// Reads until a deadline for all of it, however slowly a client sends.
struct Timely<'a> {
    stream: &'a UnixStream,
    deadline: Instant,
}

impl Read for Timely<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let message = "the request did not arrive in time";
            return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, message));
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(buffer)
    }
}

fn serve(listener: &UnixListener, control: &impl Control, stopping: &AtomicBool) {
    for connection in listener.incoming() {
        if stopping.load(Ordering::Acquire) {
            return;
        }
        match connection {
            Ok(stream) => {
                if let Err(error) = answer(&stream, control) {
                    tracing::debug!(%error, "admin client went away");
                }
            }
            Err(error) => {
                tracing::warn!(%error, "admin socket: a connection was not accepted");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

fn answer(mut stream: &UnixStream, control: &impl Control) -> std::io::Result<()> {
    stream.set_write_timeout(Some(CLIENT_TIMEOUT))?;
    let mut reader = BufReader::new(Timely {
        stream,
        deadline: Instant::now() + CLIENT_TIMEOUT,
    });
    let mut line = String::new();
    reader.by_ref().take(LINE_BYTES_MAX).read_line(&mut line)?;
    if line.starts_with("GET ") {
        return scrape(stream, &line, control);
    }
    let response = match handle(&line, reader, control) {
        Ok(value) => Response::Ok(value),
        Err(message) => Response::Error(message),
    };
    let mut line = serde_json::to_vec(&response)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Answers a scraper, in as much HTTP as that takes.
fn scrape(mut stream: &UnixStream, request: &str, control: &impl Control) -> std::io::Result<()> {
    let (status, body) = match (request.split_whitespace().nth(1), control.builders()) {
        (Some("/metrics"), Ok(table)) => ("200 OK", metrics::render(&table)),
        (Some("/metrics"), Err(message)) => ("500 Internal Server Error", message),
        _ => ("404 Not Found", "only /metrics is here\n".to_owned()),
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

fn handle(
    line: &str,
    reader: impl Read,
    control: &impl Control,
) -> Result<serde_json::Value, String> {
    match serde_json::from_str(line)
        .map_err(|error| format!("the request is not understood ({error})"))?
    {
        Request::Reload {
            backend,
            tenant,
            origin,
            component_bytes,
            signature_bytes,
            options,
            plan,
        } => {
            let max = component_bytes_max();
            if component_bytes > max {
                return Err(format!(
                    "{origin}: {component_bytes} bytes are more than a component may have ({max})"
                ));
            }
            if signature_bytes > SIGNATURE_BYTES_MAX {
                return Err(format!(
                    "{origin}: {signature_bytes} bytes are more than a signature may have ({SIGNATURE_BYTES_MAX})"
                ));
            }
            let announced = component_bytes + signature_bytes;
            let mut component = Vec::new();
            reader
                .take(announced)
                .read_to_end(&mut component)
                .map_err(|error| format!("{origin}: the component could not be read ({error})"))?;
            if component.len() as u64 != announced {
                return Err(format!(
                    "{origin}: {} of {announced} bytes arrived; nothing was changed",
                    component.len()
                ));
            }
            let signature = component.split_off(component.len() - signature_bytes as usize);
            control.reload(Submission {
                backend: &backend,
                tenant: tenant.as_ref(),
                origin: &origin,
                component: Some(component.as_slice()).filter(|bytes| !bytes.is_empty()),
                signature: Some(signature.as_slice()).filter(|bytes| !bytes.is_empty()),
                options,
                plan,
            })
        }
        Request::Rollback { backend, tenant } => control.rollback(&backend, tenant.as_ref()),
        Request::Builders => control.builders(),
        Request::Configure { path, text } => control.configure(&path, text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::call;
    use serde_json::json;

    struct Echo;
    impl Control for Echo {
        fn reload(&self, submission: Submission<'_>) -> Result<serde_json::Value, String> {
            let Submission {
                backend,
                origin,
                component,
                signature,
                ..
            } = submission;
            let bytes = component.map_or(0, <[u8]>::len);
            Ok(
                json!({ "backend": backend, "origin": origin, "bytes": bytes, "signature": signature }),
            )
        }
        fn rollback(
            &self,
            backend: &str,
            _: Option<&TenantName>,
        ) -> Result<serde_json::Value, String> {
            Err(format!(
                "{backend}: there is no previous version to return to"
            ))
        }
        fn builders(&self) -> Result<serde_json::Value, String> {
            Ok(json!({ "builders": [] }))
        }
        fn configure(&self, path: &str, text: String) -> Result<serde_json::Value, String> {
            Ok(json!({ "path": path, "text": text }))
        }
        fn steps(&self, count: usize) -> Result<serde_json::Value, String> {
            Ok(json!({ "count": count }))
        }
    }

    #[test]
    fn requests_are_answered_and_the_socket_is_private_and_goes_with_its_server() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("admin.sock");
        let server = Server::start(&path, Echo).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);

        let payload = [vec![7; 300_000], vec![1, 2, 3]].concat();
        for (signature_bytes, signature) in [(3, json!([1, 2, 3])), (0, json!(null))] {
            let reload = Request::Reload {
                backend: "FLASH_ATTN".to_owned(),
                tenant: None,
                origin: "x.wasm".to_owned(),
                component_bytes: 300_000,
                signature_bytes,
                options: None,
                plan: None,
            };
            let answer = call(
                &path,
                &reload,
                &payload[..300_000 + signature_bytes as usize],
            );
            assert_eq!(
                answer.unwrap(),
                json!({ "backend": "FLASH_ATTN", "origin": "x.wasm", "bytes": 300_000, "signature": signature })
            );
        }

        let error = call(
            &path,
            &Request::Rollback {
                backend: "FLASHINFER".to_owned(),
                tenant: None,
            },
            &[],
        )
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "FLASHINFER: there is no previous version to return to"
        );

        drop(server);
        assert!(!path.exists());
        let error = call(&path, &Request::Builders, &[])
            .unwrap_err()
            .to_string();
        assert!(error.contains("no running host"), "{error}");
    }

    #[test]
    fn a_request_that_is_no_request_or_too_large_gets_one_line() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("admin.sock");
        let _server = Server::start(&path, Echo).unwrap();
        for (request, expected) in [
            (
                "GET / HTTP/1.1\r\n\r\n".to_owned(),
                "HTTP/1.1 404 Not Found",
            ),
            (
                "GET /metrics HTTP/1.1\r\n\r\n".to_owned(),
                "HTTP/1.1 200 OK",
            ),
            ("\n".to_owned(), "the request is not understood"),
            (
                format!(
                    "{}\n",
                    json!({"op": "reload", "backend": "A", "origin": "b", "component_bytes": 1u64 << 40})
                ),
                "are more than a component may have",
            ),
            (
                format!(
                    "{}\n",
                    json!({"op": "reload", "backend": "A", "origin": "b", "component_bytes": 1, "signature_bytes": 1u64 << 40})
                ),
                "are more than a signature may have",
            ),
        ] {
            let mut stream = UnixStream::connect(&path).unwrap();
            stream.write_all(request.as_bytes()).unwrap();
            let mut answer = String::new();
            BufReader::new(stream).read_line(&mut answer).unwrap();
            assert!(answer.contains(expected), "{answer}");
        }
        // Still answers.
        assert!(call(&path, &Request::Builders, &[]).is_ok());
    }

    #[test]
    fn a_socket_that_is_another_hosts_by_now_is_left_to_it() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("admin.sock");
        let first = Server::start(&path, Echo).unwrap();
        fs::remove_file(&path).unwrap();
        let _second = Server::start(&path, Echo).unwrap();
        // Ends at once, and the second still answers.
        drop(first);
        assert!(call(&path, &Request::Builders, &[]).is_ok());
    }

    #[test]
    fn a_client_that_says_nothing_does_not_keep_the_host_from_ending() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("admin.sock");
        let server = Server::start(&path, Echo).unwrap();
        let _mute = UnixStream::connect(&path).unwrap();
        let (ended, end) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            drop(server);
            ended.send(()).unwrap();
        });
        // Far less than a client's time limit would be; far more than it takes.
        end.recv_timeout(CLIENT_TIMEOUT / 2).expect("the host ends");
    }
}
