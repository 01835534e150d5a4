//! The model that is served: its name, its texts and its bounds.
//!
//! Must never know: HTTP.

use std::sync::Arc;

use timetable_engine::Engine;
use timetable_engine::chat::{ChatError, ChatTemplate};
use timetable_engine::tokenizer::Tokenizer;

use crate::error::ApiError;

/// What the server knows of the model.
pub struct ServedModel {
    /// As clients name it.
    pub name: String,
    /// Texts to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Conversations to text, or why there is no way.
    pub template: Result<ChatTemplate, ChatError>,
    /// What fits.
    pub bounds: Bounds,
}

/// How large a request may be. A copy of what the scheduler refuses by, so that nothing is submitted that never fits.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Tokens of a request, prompt and answer.
    pub max_model_len: usize,
    /// Tokens that the whole cache holds.
    pub cache_tokens: usize,
    /// Requests that run at once.
    pub max_num_seqs: usize,
}

impl Bounds {
    /// Those of an engine.
    pub fn of(engine: &Engine) -> Self {
        let scheduler = engine.scheduler();
        Bounds {
            max_model_len: scheduler.limits().max_model_len,
            cache_tokens: scheduler.kv().capacity_tokens(),
            max_num_seqs: scheduler.limits().max_num_seqs,
        }
    }

    /// Tokens that a prompt's answer may have: as many as were asked for, or `default` of those that fit, or all of them.
    pub(crate) fn max_tokens(
        &self,
        prompt: usize,
        asked: Option<usize>,
        default: Option<usize>,
    ) -> Result<usize, ApiError> {
        let context = |message: String| Err(ApiError::bad(message).code("context_length_exceeded"));
        // The last token that is sampled needs no keys and values.
        let most = self.max_model_len.min(self.cache_tokens + 1);
        let wanted = asked.unwrap_or(1);
        if prompt == 0 {
            return Err(ApiError::bad(
                "the prompt has no tokens; give at least one (a begin-of-sequence token will do)",
            ));
        }
        if prompt.saturating_add(wanted) > self.max_model_len {
            return context(format!(
                "this model's maximum context length is {} tokens, and the request asks for {} ({prompt} of the prompt, \
                 {wanted} of the answer); shorten the prompt or lower max_tokens",
                self.max_model_len,
                prompt.saturating_add(wanted),
            ));
        }
        if prompt.saturating_add(wanted) > most {
            return context(format!(
                "the request asks for {} tokens ({prompt} of the prompt, {wanted} of the answer), and the whole KV cache holds \
                 {}; shorten the prompt or lower max_tokens",
                prompt.saturating_add(wanted),
                self.cache_tokens,
            ));
        }
        let fits = most - prompt;
        Ok(asked.unwrap_or_else(|| default.map_or(fits, |default| default.min(fits))))
    }
}
