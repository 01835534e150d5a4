//! Detokenisation of a stream: text as soon as it is certain, never half a character.

use super::Tokenizer;

/// Tokens of context kept before the text that is still open: decoders treat the first token of a text specially.
const CONTEXT: usize = 4;
/// Window length at which decided tokens are dropped.
const MAX_WINDOW: usize = 16;
/// An unfinished character shows as at most this many replacement characters at the end.
const MAX_OPEN: usize = 3;

/// The text of one request's tokens, piece by piece. The pieces together are what decoding all tokens at once gives.
#[derive(Debug, Clone, Default)]
pub struct TextStream {
    skip_special_tokens: bool,
    /// Tokens whose text is not complete, after a few that are.
    window: Vec<u32>,
    /// Bytes of the window's text that were handed out already.
    emitted: usize,
}

impl TextStream {
    /// An empty stream.
    pub fn new(skip_special_tokens: bool) -> Self {
        Self {
            skip_special_tokens,
            ..Self::default()
        }
    }

    /// Adds a token and returns the text that became certain, often that of the token, sometimes nothing.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> String {
        self.window.push(token);
        let text = tokenizer.decode(&self.window, self.skip_special_tokens);
        let certain = certain_length(&text);
        let piece = text
            .get(self.emitted..certain)
            .unwrap_or_default()
            .to_owned();
        self.emitted = self.emitted.max(certain);
        if certain == text.len() && self.window.len() > MAX_WINDOW {
            self.shorten(tokenizer);
        }
        piece
    }

    /// The rest: a character that was never completed, as U+FFFD.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> String {
        let text = tokenizer.decode(&self.window, self.skip_special_tokens);
        let piece = text.get(self.emitted..).unwrap_or_default().to_owned();
        self.window.clear();
        self.emitted = 0;
        piece
    }

    /// Drops decided tokens, all but a few; the window must have no open text.
    fn shorten(&mut self, tokenizer: &Tokenizer) {
        let kept = &self.window[self.window.len() - CONTEXT..];
        let text = tokenizer.decode(kept, self.skip_special_tokens);
        // Cutting inside a character would leave its tail to be decoded alone; then wait for a better place.
        if !text.contains(char::REPLACEMENT_CHARACTER) {
            self.emitted = text.len();
            self.window.drain(..self.window.len() - CONTEXT);
        }
    }
}

/// Length of `text` without the replacement characters at its end that the next token may complete.
fn certain_length(text: &str) -> usize {
    let mut rest = text;
    for _ in 0..MAX_OPEN {
        match rest.strip_suffix(char::REPLACEMENT_CHARACTER) {
            Some(shorter) => rest = shorter,
            None => break,
        }
    }
    rest.len()
}
