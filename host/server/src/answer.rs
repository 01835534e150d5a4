//! Answers as OpenAI writes them: whole, or piece by piece.
//!
//! A token costs one serialisation into a buffer that is written at once with whatever else is there. Must never know: the
//! engine, or how a request was read.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::{BufMut, Bytes, BytesMut};
use serde::Serialize;
use timetable_engine::FinishReason;
use timetable_engine::sampling::TokenLogprobs;
use timetable_engine::tokenizer::Tokenizer;

use crate::error::ApiError;
use crate::generation::{Generation, Style};
use crate::logprobs::Logprobs;
use crate::model::ServedModel;
use crate::running::{Event, Running, What};

/// Tokens of a request and its answers.
#[derive(Clone, Copy, Default, Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
}

#[derive(Serialize)]
struct Envelope<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    /// Left out where a stream was not asked for it; null in its chunks but the last where it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

/// A choice: `text`, `message` or, in a piece of a chat, `delta`.
#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    #[serde(flatten)]
    content: Content<'a>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Content<'a> {
    Text(&'a str),
    Message {
        role: &'static str,
        content: &'a str,
    },
    Delta {
        #[serde(skip_serializing_if = "Option::is_none")]
        role: Option<&'static str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        content: Option<&'a str>,
    },
}

/// One answer so far.
struct Partial {
    /// Its text; in a stream, what is still to be put before it.
    text: String,
    finish: Option<FinishReason>,
    logprobs: Option<Logprobs>,
    /// Where the next token begins, in characters.
    offset: usize,
}

/// Writes one request's answers.
pub struct Answer {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    style: Style,
    stream: bool,
    include_usage: bool,
    usage: Usage,
    answers: Vec<Partial>,
    buffer: BytesMut,
    /// A stream's end was written.
    done: bool,
}

impl Answer {
    /// Of a request, before it is handed to the engine.
    pub fn new(model: &ServedModel, generation: &Generation) -> Self {
        let prefix = match generation.style {
            Style::Completion => "cmpl",
            Style::Chat => "chatcmpl",
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut answers = Vec::with_capacity(generation.choices());
        for prompt in &generation.prompts {
            answers.extend((0..generation.n).map(|_| Partial {
                text: prompt.echo.clone(),
                finish: None,
                logprobs: None,
                offset: prompt.echo.chars().count(),
            }));
        }
        let prompt_tokens = generation.prompts.iter().map(|prompt| prompt.tokens.len());
        Answer {
            id: format!("{prefix}-{:032x}", rand::random::<u128>()),
            created: now.map_or(0, |now| now.as_secs()),
            model: model.name.clone(),
            tokenizer: Arc::clone(&model.tokenizer),
            style: generation.style,
            stream: generation.stream,
            include_usage: generation.include_usage,
            usage: Usage {
                prompt_tokens: prompt_tokens.sum(),
                ..Usage::default()
            },
            answers,
            buffer: BytesMut::new(),
            done: false,
        }
    }

    /// Is it to be written while it comes?
    pub fn streams(&self) -> bool {
        self.stream
    }

    /// Collects every answer, and writes them as one.
    pub async fn whole(mut self, mut running: Running) -> Result<Bytes, ApiError> {
        while let Some(Event { choice, what }) = running.next().await {
            match what {
                What::Token {
                    token,
                    text,
                    logprobs,
                } => {
                    self.usage.completion_tokens += 1;
                    let answer = &mut self.answers[choice];
                    answer.text.push_str(&text);
                    if let Some(logprobs) = logprobs {
                        let all = answer
                            .logprobs
                            .get_or_insert_with(|| Logprobs::new(self.style));
                        answer.offset = all.push(&self.tokenizer, token, &logprobs, answer.offset);
                    }
                }
                What::Finished(reason) => self.answers[choice].finish = Some(reason),
                What::Failed(error) => return Err(error),
            }
        }
        let usage = Some(Some(self.usage()));
        let mut answers = std::mem::take(&mut self.answers);
        let choices: Vec<Choice<'_>> = answers
            .iter_mut()
            .enumerate()
            .map(|(index, answer)| Choice {
                index,
                content: match self.style {
                    Style::Completion => Content::Text(&answer.text),
                    Style::Chat => Content::Message {
                        role: "assistant",
                        content: &answer.text,
                    },
                },
                logprobs: answer.logprobs.take(),
                finish_reason: answer.finish.map(FinishReason::name),
            })
            .collect();
        let object = match self.style {
            Style::Completion => "text_completion",
            Style::Chat => "chat.completion",
        };
        self.json(object, &choices, usage);
        Ok(self.buffer.freeze())
    }

    /// What a chat's stream begins with: whose the words are.
    pub fn open(&mut self) {
        if self.style == Style::Chat {
            for index in 0..self.answers.len() {
                let delta = Content::Delta {
                    role: Some("assistant"),
                    content: Some(""),
                };
                self.chunk(index, delta, None, None);
            }
        }
    }

    /// The next piece of a stream: all that is there, as soon as something is. None after its end.
    pub async fn piece(&mut self, running: &mut Running) -> Option<Bytes> {
        while self.buffer.is_empty() && !self.done {
            match running.next().await {
                Some(event) => self.event(event, running),
                None => self.end(),
            }
            while !self.done
                && let Some(event) = running.ready()
            {
                self.event(event, running);
            }
        }
        (!self.buffer.is_empty()).then(|| self.buffer.split().freeze())
    }

    fn event(&mut self, Event { choice, what }: Event, running: &mut Running) {
        match what {
            What::Token {
                token,
                text,
                logprobs,
            } => {
                self.usage.completion_tokens += 1;
                let logprobs = logprobs.map(|logprobs| self.logprobs(choice, token, &logprobs));
                if !text.is_empty() || logprobs.is_some() {
                    self.text(choice, text, logprobs, None);
                }
            }
            What::Finished(reason) => self.text(choice, String::new(), None, Some(reason)),
            What::Failed(error) => {
                running.abort();
                self.buffer.put_slice(b"data: ");
                self.buffer.put_slice(&error.json());
                self.buffer.put_slice(b"\n\n");
                self.finish();
            }
        }
    }

    fn logprobs(&mut self, choice: usize, token: u32, logprobs: &TokenLogprobs) -> Logprobs {
        let mut one = Logprobs::new(self.style);
        let offset = &mut self.answers[choice].offset;
        *offset = one.push(&self.tokenizer, token, logprobs, *offset);
        one
    }

    /// A chunk with text of an answer; the first has what is put before it.
    fn text(
        &mut self,
        index: usize,
        text: String,
        logprobs: Option<Logprobs>,
        finish: Option<FinishReason>,
    ) {
        let before = std::mem::take(&mut self.answers[index].text);
        let text = if before.is_empty() {
            text
        } else {
            before + &text
        };
        let content = match self.style {
            Style::Completion => Content::Text(&text),
            Style::Chat => Content::Delta {
                role: None,
                content: (!text.is_empty()).then_some(&text),
            },
        };
        self.chunk(index, content, logprobs, finish);
    }

    fn chunk(
        &mut self,
        index: usize,
        content: Content<'_>,
        logprobs: Option<Logprobs>,
        finish: Option<FinishReason>,
    ) {
        let choice = Choice {
            index,
            content,
            logprobs,
            finish_reason: finish.map(FinishReason::name),
        };
        self.data(&[choice], None);
    }

    fn end(&mut self) {
        if self.include_usage {
            let usage = self.usage();
            self.data(&[], Some(usage));
        }
        self.finish();
    }

    fn finish(&mut self) {
        self.buffer.put_slice(b"data: [DONE]\n\n");
        self.done = true;
    }

    fn data(&mut self, choices: &[Choice<'_>], usage: Option<Usage>) {
        let object = match self.style {
            Style::Completion => "text_completion",
            Style::Chat => "chat.completion.chunk",
        };
        self.buffer.put_slice(b"data: ");
        self.json(object, choices, self.include_usage.then_some(usage));
        self.buffer.put_slice(b"\n\n");
    }

    fn json(&mut self, object: &'static str, choices: &[Choice<'_>], usage: Option<Option<Usage>>) {
        let envelope = Envelope {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            usage,
        };
        // A buffer takes everything, and strings and finite numbers always serialise.
        let _ = serde_json::to_writer((&mut self.buffer).writer(), &envelope);
    }

    fn usage(&self) -> Usage {
        Usage {
            total_tokens: self.usage.prompt_tokens + self.usage.completion_tokens,
            ..self.usage
        }
    }
}
