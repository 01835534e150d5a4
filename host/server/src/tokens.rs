//! `/tokenize` and `/detokenize`, in vLLM's shapes.
//!
//! Must never know: HTTP, or the engine.

use serde_json::{Value, json};

use crate::chat;
use crate::error::ApiError;
use crate::fields::{Fields, token_ids, wrong};
use crate::generation::check_model;
use crate::model::ServedModel;

/// Token ids of a text or of a conversation.
pub fn tokenize(body: &[u8], model: &ServedModel) -> Result<Value, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(&mut fields, model, false)?;
    let strings = fields.flag("return_token_strs")?.unwrap_or(false);
    let tokens = match fields.text("prompt")? {
        Some(prompt) => {
            let special = fields.flag("add_special_tokens")?.unwrap_or(true);
            let tokens = model.tokenizer.encode(&prompt, special);
            tokens.map_err(|error| ApiError::field("prompt", error.to_string()))?
        }
        None if fields.has("messages") => chat::conversation(&mut fields, body, model)?,
        None => {
            let message = "`prompt` is missing; give a string, or `messages`";
            return Err(ApiError::field("prompt", message));
        }
    };
    let spelled = |id: &u32| model.tokenizer.token_text(*id);
    let strings = strings.then(|| tokens.iter().map(spelled).collect::<Vec<_>>());
    Ok(json!({
        "count": tokens.len(),
        "max_model_len": model.bounds.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }))
}

/// The text of token ids.
pub fn detokenize(body: &[u8], model: &ServedModel) -> Result<Value, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(&mut fields, model, false)?;
    let tokens = match fields.take("tokens") {
        Some(Value::Array(list)) => {
            let tokens = token_ids("tokens", &list)?;
            let unknown = |token: &&u32| model.tokenizer.token_text(**token).is_none();
            if let Some(token) = tokens.iter().find(unknown) {
                let message = format!(
                    "the token {token} is not in the model's vocabulary; give tokens of this model"
                );
                return Err(ApiError::field("tokens", message));
            }
            tokens
        }
        Some(other) => return Err(wrong("tokens", &other, "a list of token ids")),
        None => {
            let message = "`tokens` is missing; give a list of token ids";
            return Err(ApiError::field("tokens", message));
        }
    };
    Ok(json!({ "prompt": model.tokenizer.decode(&tokens, false) }))
}
