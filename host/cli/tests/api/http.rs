//! A client of HTTP/1.1 that can say what no good client says. It must never know what is asked.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Much longer than any answer takes: who waits so long has found a hang.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// What came back.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    /// Names in small letters.
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(given, _)| given == name);
        found.map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error} in {}: {}", self.status, self.text()))
    }

    /// Why this is not an error as OpenAI has it, with a status that blames the client.
    pub fn is_refusal(&self) -> Result<(), String> {
        let complaint = |what: &str| Err(format!("{what}: {} {}", self.status, self.text()));
        if !(400..500).contains(&self.status) {
            return complaint("no 4xx");
        }
        if self.header("content-type") != Some("application/json") {
            return complaint("not JSON by its content type");
        }
        let Ok(body) = serde_json::from_slice::<Value>(&self.body) else {
            return complaint("not JSON");
        };
        let error = &body["error"];
        let text = |name: &str| error[name].as_str().is_some_and(|text| !text.is_empty());
        let text_or_null = |name: &str| error.get(name).is_some_and(Value::is_null) || text(name);
        if !(text("message") && text("type") && text_or_null("param") && text_or_null("code")) {
            return complaint("not OpenAI's error");
        }
        // One line that a terminal shows as it is, and not the whole request again.
        let message = error["message"].as_str().unwrap_or_default();
        if message.len() > 1000 || message.chars().any(char::is_control) {
            return complaint("no short line");
        }
        Ok(())
    }
}

/// One connection.
pub struct Connection(BufReader<TcpStream>);

impl Connection {
    pub fn open(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.get_mut().write_all(bytes)
    }

    /// Nothing more will be sent.
    pub fn finish(&self) -> io::Result<()> {
        self.0.get_ref().shutdown(Shutdown::Write)
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.0.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end().to_owned())
    }

    /// The next answer, all of it.
    ///
    /// # Errors
    /// `UnexpectedEof` if the connection is closed before its end, `InvalidData` for what is not HTTP.
    pub fn response(&mut self) -> io::Result<Response> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let line = self.line()?;
        let status = line
            .strip_prefix("HTTP/1.1 ")
            .or_else(|| line.strip_prefix("HTTP/1.0 "))
            .and_then(|rest| rest.get(..3)?.parse().ok())
            .ok_or_else(|| invalid(&line))?;
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').ok_or_else(|| invalid(&line))?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let mut response = Response {
            status,
            headers,
            body: Vec::new(),
        };
        if response.header("transfer-encoding") == Some("chunked") {
            loop {
                let line = self.line()?;
                let size = usize::from_str_radix(&line, 16).map_err(|_| invalid(&line))?;
                let mut chunk = vec![0; size + 2];
                self.0.read_exact(&mut chunk)?;
                if size == 0 {
                    break;
                }
                response.body.extend_from_slice(&chunk[..size]);
            }
        } else if let Some(length) = response.header("content-length") {
            let length = length.parse().map_err(|_| invalid(length))?;
            response.body.resize(length, 0);
            self.0.read_exact(&mut response.body)?;
        } else {
            self.0.read_to_end(&mut response.body)?;
        }
        Ok(response)
    }
}

/// A request that may be any nonsense but in its framing.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub headers: Vec<(String, Vec<u8>)>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn get(path: &str) -> Self {
        Self {
            method: "GET".to_owned(),
            path: path.to_owned(),
            headers: Vec::new(),
            body: Vec::new(),
        }
    }

    /// JSON, or what pretends to be.
    pub fn post(path: &str, body: impl Into<Vec<u8>>) -> Self {
        let mut request = Self::get(path);
        request.method = "POST".to_owned();
        request.body = body.into();
        request.with("Content-Type", "application/json")
    }

    /// With this header, and no other of this name.
    pub fn with(mut self, name: &str, value: impl Into<Vec<u8>>) -> Self {
        self = self.without(name);
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    pub fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(given, _)| given != name);
        self
    }

    /// As it travels.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes =
            format!("{} {} HTTP/1.1\r\nHost: test\r\n", self.method, self.path).into_bytes();
        for (name, value) in &self.headers {
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend_from_slice(b": ");
            bytes.extend_from_slice(value);
            bytes.extend_from_slice(b"\r\n");
        }
        bytes.extend_from_slice(format!("Content-Length: {}\r\n\r\n", self.body.len()).as_bytes());
        bytes.extend_from_slice(&self.body);
        bytes
    }
}

/// Asks one request after the other over one connection, for as long as the server keeps it.
pub struct Client {
    address: SocketAddr,
    connection: Option<Connection>,
}

impl Client {
    pub fn new(address: SocketAddr) -> Self {
        Self {
            address,
            connection: None,
        }
    }

    /// # Errors
    /// If there is no answer: the server is gone, closed the connection, or takes longer than [`PATIENCE`].
    pub fn ask(&mut self, request: &Request) -> io::Result<Response> {
        let bytes = request.bytes();
        // A connection that was kept may have been closed since; a new one may not.
        if let Some(kept) = self.connection.take()
            && let Ok(response) = self.over(kept, &bytes)
        {
            return Ok(response);
        }
        let fresh = Connection::open(self.address)?;
        self.over(fresh, &bytes)
    }

    fn over(&mut self, mut connection: Connection, bytes: &[u8]) -> io::Result<Response> {
        connection.send(bytes)?;
        let response = connection.response()?;
        if response.header("connection") != Some("close") {
            self.connection = Some(connection);
        }
        Ok(response)
    }
}
