//! Server-sent events out of pieces of a body, wherever the pieces are cut. Must never know: HTTP, or what an event says.

/// Bytes of one event, at most.
const MAX_EVENT: usize = 4 << 20;

/// Why a body is no stream of events.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SseError {
    /// It would take too much memory.
    #[error("an event has more than {MAX_EVENT} bytes")]
    TooLong,
    /// Events are text.
    #[error("an event is not UTF-8")]
    NotText,
}

/// Takes pieces of a body and gives the data of each event that is complete. Other fields and comments are passed over.
#[derive(Debug, Default)]
pub struct SseReader {
    line: Vec<u8>,
    data: Vec<u8>,
    /// A `data` field was seen since the last event; it may be empty.
    has_data: bool,
    /// The last line ended with CR: an LF that follows belongs to it.
    after_cr: bool,
    /// A line was seen: a byte order mark is none any more.
    begun: bool,
}

impl SseReader {
    /// The events that this piece completes, in order.
    ///
    /// # Errors
    /// If the body is no stream of events. The reader is of no use afterwards.
    pub fn push(&mut self, piece: &[u8]) -> Result<Vec<String>, SseError> {
        let mut events = Vec::new();
        let mut rest = piece;
        if self.after_cr && !rest.is_empty() {
            self.after_cr = false;
            rest = rest.strip_prefix(b"\n").unwrap_or(rest);
        }
        while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            self.keep(&rest[..end])?;
            let cr = rest[end] == b'\r';
            rest = &rest[end + 1..];
            if cr {
                self.after_cr = rest.is_empty();
                rest = rest.strip_prefix(b"\n").unwrap_or(rest);
            }
            events.extend(self.line()?);
        }
        self.keep(rest)?;
        Ok(events)
    }

    /// Was the last event completed? What is left at a body's end is part of one that broke off.
    pub fn is_at_rest(&self) -> bool {
        self.line.is_empty() && !self.has_data
    }

    fn keep(&mut self, bytes: &[u8]) -> Result<(), SseError> {
        if self.line.len() + self.data.len() + bytes.len() > MAX_EVENT {
            return Err(SseError::TooLong);
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    /// Ends a line; the event, if it was the empty line after one.
    fn line(&mut self) -> Result<Option<String>, SseError> {
        let line = std::mem::take(&mut self.line);
        let mut text = line.as_slice();
        if !std::mem::replace(&mut self.begun, true) {
            text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
        }
        if text.is_empty() {
            if !std::mem::take(&mut self.has_data) {
                return Ok(None);
            }
            let data = String::from_utf8(std::mem::take(&mut self.data));
            return data.map(Some).map_err(|_| SseError::NotText);
        }
        let (field, value) = match text.iter().position(|byte| *byte == b':') {
            Some(colon) => (&text[..colon], &text[colon + 1..]),
            None => (text, &[][..]),
        };
        if field == b"data" {
            if std::mem::replace(&mut self.has_data, true) {
                self.data.push(b'\n');
            }
            self.data
                .extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_EVENT, SseError, SseReader};

    const BODY: &str = "\u{feff}: hello\r\n\r\ndata: {\"a\": 1}\n\ndata:ü€\r\rid: 7\ndata: one\r\ndata\r\ndata:  two\r\n\r\nevent: x\n\ndata: [DONE]\n\n";
    const EVENTS: [&str; 4] = ["{\"a\": 1}", "ü€", "one\n\n two", "[DONE]"];

    #[test]
    fn events_are_the_same_wherever_the_body_is_cut() {
        let body = BODY.as_bytes();
        for first in 0..=body.len() {
            for second in first..=body.len() {
                let mut reader = SseReader::default();
                let mut events = Vec::new();
                for piece in [&body[..first], &body[first..second], &body[second..]] {
                    events.extend(reader.push(piece).expect("events"));
                }
                assert_eq!(events, EVENTS, "cut at {first} and {second}");
                assert!(reader.is_at_rest());
            }
        }
        let mut reader = SseReader::default();
        let pieces = body
            .chunks(1)
            .map(|piece| reader.push(piece).expect("events"));
        assert_eq!(pieces.flatten().collect::<Vec<_>>(), EVENTS);
    }

    #[test]
    fn what_is_no_text_or_has_no_end_is_refused() {
        let mut reader = SseReader::default();
        assert_eq!(reader.push(b"data: \xff\n\n"), Err(SseError::NotText));
        let mut reader = SseReader::default();
        let piece = vec![b'x'; MAX_EVENT / 2 + 1];
        assert_eq!(reader.push(&piece), Ok(Vec::new()));
        assert!(!reader.is_at_rest());
        assert_eq!(reader.push(&piece), Err(SseError::TooLong));
        let mut reader = SseReader::default();
        assert_eq!(reader.push(b"data: half an ev"), Ok(Vec::new()));
        assert!(!reader.is_at_rest());
    }
}
