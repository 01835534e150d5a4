//! Text to token ids and back, from a `tokenizer.json` or from the vocabulary inside a GGUF file.
//!
//! Knows no model weights and no chat formats.

mod from_gguf;
mod stream;

pub use stream::TextStream;

use crate::model::{ModelError, Source, files};
use serde_json::Value;
use std::path::Path;

/// A model's tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Put before and after a text when special tokens are asked for; GGUF says so by flags. A `tokenizer.json` has its
    /// own post-processor instead.
    prefix: Option<u32>,
    suffix: Option<u32>,
    bos: Option<String>,
    eos: Option<String>,
}

impl Tokenizer {
    /// Loads the tokenizer that belongs to a model: a GGUF file's own, or `tokenizer.json` in a model directory.
    ///
    /// # Errors
    /// `Io` if there is none, `Corrupt` if it does not parse, `Unsupported` for a kind that is not run.
    pub fn load(model: impl AsRef<Path>) -> Result<Self, ModelError> {
        let path = model.as_ref();
        match Source::open(path)? {
            Source::Gguf(file) => from_gguf::build(&file),
            Source::HuggingFace => Self::from_dir(path),
        }
    }

    fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("tokenizer.json");
        let text = files::read(&path, files::MAX_TOKENIZER)?;
        let mut inner = tokenizers::Tokenizer::from_bytes(&text)
            .map_err(|e| ModelError::corrupt(&path, format!("it is not a tokenizer: {e}")))?;
        // A prompt is never cut or padded silently, whatever the file was saved with.
        let _ = inner.with_truncation(None);
        inner.with_padding(None);
        let config = tokenizer_config(dir)?;
        Ok(Self {
            inner,
            prefix: None,
            suffix: None,
            bos: special(&config, "bos_token"),
            eos: special(&config, "eos_token"),
        })
    }

    /// Token ids of `text`. With `add_special_tokens` also those that the model expects around a plain text (a chat
    /// template writes its own).
    ///
    /// # Errors
    /// `Batch` if the tokenizer cannot encode the text (a vocabulary without an unknown token).
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, ModelError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special_tokens)
            .map_err(|e| {
                ModelError::Batch(format!(
                    "the prompt cannot be tokenised: {e}; use other text"
                ))
            })?;
        let mut ids = encoding.get_ids().to_vec();
        if add_special_tokens {
            if let Some(id) = self.prefix {
                ids.insert(0, id);
            }
            ids.extend(self.suffix);
        }
        Ok(ids)
    }

    /// Text of `ids`; ids outside the vocabulary give nothing, broken UTF-8 gives U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        // The decoders fail only on regular expressions that do not compile, which loading would have refused.
        self.inner
            .decode(ids, skip_special_tokens)
            .unwrap_or_default()
    }

    /// Number of tokens, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// A token's text as the vocabulary spells it.
    pub fn token_text(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token, spelled as in the vocabulary.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// The text of the begin-of-text token, if there is one.
    pub fn bos_token(&self) -> Option<&str> {
        self.bos.as_deref()
    }

    /// The text of the end-of-text token, if there is one.
    pub fn eos_token(&self) -> Option<&str> {
        self.eos.as_deref()
    }
}

/// `tokenizer_config.json` of a model directory; null if there is none.
pub(crate) fn tokenizer_config(dir: &Path) -> Result<Value, ModelError> {
    let path = dir.join("tokenizer_config.json");
    match files::read_if_there(&path, files::MAX_CONFIG)? {
        Some(text) => serde_json::from_slice(&text)
            .map_err(|e| ModelError::corrupt(&path, format!("it is not JSON: {e}"))),
        None => Ok(Value::Null),
    }
}

/// A special token of `tokenizer_config.json`: text, or an object with `content`.
pub(crate) fn special(config: &Value, key: &str) -> Option<String> {
    let value = &config[key];
    let text = value.as_str().or_else(|| value["content"].as_str());
    text.map(str::to_owned)
}

#[cfg(test)]
mod tests;
