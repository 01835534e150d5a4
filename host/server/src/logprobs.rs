//! Log-probabilities as the two endpoints write them.
//!
//! Must never know: how they were computed, or where a text is cut into pieces.

use std::collections::BTreeMap;

use serde::Serialize;
use timetable_engine::sampling::TokenLogprobs;
use timetable_engine::tokenizer::Tokenizer;

use crate::generation::Style;

/// JSON has no infinity: the field's number for what cannot be.
const NEVER: f32 = -9999.0;

/// Those of some tokens of an answer.
#[derive(Serialize)]
#[serde(untagged)]
pub enum Logprobs {
    Text(TextLogprobs),
    Chat(ChatLogprobs),
}

/// As `/v1/completions` has them.
#[derive(Default, Serialize)]
pub struct TextLogprobs {
    /// Characters of the answer before the token.
    text_offset: Vec<usize>,
    token_logprobs: Vec<f32>,
    tokens: Vec<String>,
    /// The likeliest, and the token that came.
    top_logprobs: Vec<BTreeMap<String, f32>>,
}

/// As `/v1/chat/completions` has them.
#[derive(Default, Serialize)]
pub struct ChatLogprobs {
    content: Vec<ChatToken>,
}

#[derive(Serialize)]
struct ChatToken {
    #[serde(flatten)]
    token: Token,
    top_logprobs: Vec<Token>,
}

#[derive(Serialize)]
struct Token {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl Logprobs {
    /// Of no token yet.
    pub fn new(style: Style) -> Self {
        match style {
            Style::Completion => Logprobs::Text(TextLogprobs::default()),
            Style::Chat => Logprobs::Chat(ChatLogprobs::default()),
        }
    }

    /// Adds a token that begins at `offset`; the offset behind it.
    pub fn push(
        &mut self,
        tokenizer: &Tokenizer,
        token: u32,
        logprobs: &TokenLogprobs,
        offset: usize,
    ) -> usize {
        let text = |token: u32| tokenizer.decode(&[token], false);
        let own = text(token);
        let behind = offset + own.chars().count();
        match self {
            Logprobs::Text(all) => {
                let top = logprobs
                    .top
                    .iter()
                    .map(|(token, value)| (text(*token), *value));
                let mut top: BTreeMap<String, f32> = top.map(|(t, v)| (t, number(v))).collect();
                top.insert(own.clone(), number(logprobs.logprob));
                all.text_offset.push(offset);
                all.token_logprobs.push(number(logprobs.logprob));
                all.tokens.push(own);
                all.top_logprobs.push(top);
            }
            Logprobs::Chat(all) => {
                let token = |token: String, value: f32| Token {
                    bytes: token.as_bytes().to_vec(),
                    token,
                    logprob: number(value),
                };
                let top = logprobs.top.iter();
                all.content.push(ChatToken {
                    top_logprobs: top.map(|(id, value)| token(text(*id), *value)).collect(),
                    token: token(own, logprobs.logprob),
                });
            }
        }
        behind
    }
}

fn number(value: f32) -> f32 {
    if value.is_finite() { value } else { NEVER }
}
