//! Several answers at once: collected, and shown while they come.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Select};
use timetable_engine::{FinishReason, RequestError, RequestEvent, RequestStream};

use crate::exit::{Exit, Failure};

/// With several prompts a line is shown once it has so many characters.
const LINE_CHARS: usize = 72;

/// One prompt's answer.
#[derive(Default)]
pub struct Answer {
    pub text: String,
    pub tokens: Vec<u32>,
    pub finish: Option<FinishReason>,
    pub error: Option<AnswerError>,
    /// From the start of all.
    pub first_token: Option<Duration>,
}

/// Why there is no answer, or only a part.
pub struct AnswerError {
    pub message: String,
    pub exit: Exit,
}

/// Collects all streams to their ends; with `show`, prints text as it comes. One prompt is shown as it is; of several, each
/// line says whose it is. What comes from `interrupted` ends all of them where they are.
pub fn collect(
    streams: &[RequestStream],
    show: bool,
    interrupted: &Receiver<()>,
) -> Result<Vec<Answer>, Failure> {
    let started = Instant::now();
    let mut answers: Vec<Answer> = streams.iter().map(|_| Answer::default()).collect();
    let mut screen = Screen::new(streams.len(), show);
    let mut open: Vec<usize> = (0..streams.len()).collect();
    while !open.is_empty() {
        let mut select = Select::new();
        for index in &open {
            select.recv(streams[*index].events());
        }
        let interrupt = select.recv(interrupted);
        let operation = select.select();
        let position = operation.index();
        if position == interrupt {
            // The thread that sends lives as long as the process.
            let _ = operation.recv(interrupted);
            open.iter().for_each(|index| streams[*index].abort());
            continue;
        }
        let index = open[position];
        let event = operation
            .recv(streams[index].events())
            .unwrap_or(RequestEvent::Finished {
                reason: FinishReason::Error,
                error: Some(RequestError::Stopped),
            });
        let answer = &mut answers[index];
        match event {
            RequestEvent::Token { token, text, .. } => {
                answer.first_token.get_or_insert_with(|| started.elapsed());
                answer.tokens.push(token);
                answer.text.push_str(&text);
                screen.text(index, &text)?;
            }
            RequestEvent::Finished { reason, error } => {
                answer.finish = Some(reason);
                answer.error = error.map(|error| AnswerError {
                    exit: match &error {
                        RequestError::Step(_) => Exit::Refused,
                        RequestError::Device(_) => Exit::Device,
                        RequestError::Model(_) | RequestError::Stopped => Exit::Failure,
                        _ => Exit::BadInput,
                    },
                    message: if streams.len() == 1 {
                        error.to_string()
                    } else {
                        format!("prompt {index}: {error}")
                    },
                });
                screen.end(index)?;
                open.swap_remove(position);
            }
        }
    }
    Ok(answers)
}

/// Standard output while answers stream.
struct Screen {
    show: bool,
    /// Text of each prompt that is not shown yet; unused with one prompt.
    held: Vec<String>,
}

impl Screen {
    fn new(prompts: usize, show: bool) -> Self {
        Screen {
            show,
            held: vec![String::new(); prompts],
        }
    }

    fn text(&mut self, index: usize, text: &str) -> Result<(), Failure> {
        if !self.show || text.is_empty() {
            return Ok(());
        }
        if self.held.len() == 1 {
            return write(text);
        }
        self.held[index].push_str(text);
        while let Some(line) = whole_line(&mut self.held[index]) {
            write(&format!("[{index}] {line}\n"))?;
        }
        Ok(())
    }

    fn end(&mut self, index: usize) -> Result<(), Failure> {
        if !self.show {
            return Ok(());
        }
        if self.held.len() == 1 {
            return write("\n");
        }
        let rest = std::mem::take(&mut self.held[index]);
        if rest.is_empty() {
            Ok(())
        } else {
            write(&format!("[{index}] {rest}\n"))
        }
    }
}

/// Takes a line off the front of `held`: up to a line break, or up to the last space before it grows too long.
fn whole_line(held: &mut String) -> Option<String> {
    let (end, next) = match held.find('\n') {
        Some(end) => (end, end + 1),
        None => {
            let limit = held.char_indices().nth(LINE_CHARS)?.0;
            let end = held[..limit].rfind(' ').unwrap_or(limit);
            (
                end,
                if held[end..].starts_with(' ') {
                    end + 1
                } else {
                    end
                },
            )
        }
    };
    let line = held[..end].to_owned();
    held.replace_range(..next, "");
    Some(line)
}

/// Shows text at once on a terminal. A reader that went away (`| head`) is no error.
fn write(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text.as_bytes());
    let written = if stdout.is_terminal() || text.ends_with('\n') {
        written.and_then(|()| stdout.flush())
    } else {
        written
    };
    match written {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::new(
            Exit::Failure,
            format!("standard output: cannot be written ({error})"),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::{LINE_CHARS, whole_line};

    #[test]
    fn lines_break_at_line_breaks_and_spaces() {
        let mut held = "one\ntwo".to_owned();
        assert_eq!(whole_line(&mut held).as_deref(), Some("one"));
        assert_eq!(whole_line(&mut held), None);
        assert_eq!(held, "two");

        let mut held = "wörter ".repeat(20);
        let line = whole_line(&mut held).unwrap();
        assert!(
            line.chars().count() <= LINE_CHARS && line.ends_with("wörter"),
            "{line}"
        );
        assert!(held.starts_with("wörter"));

        let mut held = "x".repeat(LINE_CHARS + 5);
        assert_eq!(whole_line(&mut held).unwrap().len(), LINE_CHARS);
        assert_eq!(held.len(), 5);
    }
}
