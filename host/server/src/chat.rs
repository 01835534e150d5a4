//! The body of `/v1/chat/completions`.
//!
//! Must never know: HTTP, or how an answer is written.

use serde_json::Value;
use timetable_engine::chat::ChatMessage;
use timetable_engine::sampling::MAX_LOGPROBS;

use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::generation::{Common, Generation, Style, check_model, common, prompt};
use crate::model::ServedModel;

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
/// Messages of one conversation, at most.
const MESSAGES_MAX: usize = 4096;

/// Reads a body; renders its conversation and tokenises it.
pub fn read(body: &[u8], model: &ServedModel) -> Result<Generation, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(&mut fields, model, true)?;
    let Common {
        n,
        mut params,
        stream,
        include_usage,
    } = common(&mut fields)?;
    let wanted = fields.flag("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=i64::from(MAX_LOGPROBS))?;
    if top.is_some_and(|top| top > 0) && !wanted {
        let message = "`top_logprobs` is given without `logprobs`: true; give both, or neither";
        return Err(ApiError::field("top_logprobs", message));
    }
    params.logprobs = wanted.then(|| top.unwrap_or(0) as u32);
    let newer = fields.integer("max_completion_tokens", 1..=i64::MAX)?;
    let older = fields.integer("max_tokens", 1..=i64::MAX)?;
    if let (Some(newer), Some(older)) = (newer, older)
        && newer != older
    {
        let message = format!(
            "`max_tokens` is {older} and `max_completion_tokens`, its newer name, is {newer}; give one of them"
        );
        return Err(ApiError::field("max_tokens", message));
    }
    let asked = newer.or(older).map(|tokens| tokens as usize);
    let tokens = conversation(&mut fields, model)?;
    Ok(Generation {
        prompts: vec![prompt(model, tokens, asked, None)?],
        n,
        params,
        stream,
        include_usage,
        style: Style::Chat,
    })
}

/// The token ids of `messages`, rendered by the model's template.
pub fn conversation(fields: &mut Fields, model: &ServedModel) -> Result<Vec<u32>, ApiError> {
    let wanted = format!("a list of 1 to {MESSAGES_MAX} messages");
    let messages = match fields.take("messages") {
        None => {
            return Err(ApiError::field(
                "messages",
                format!("`messages` is missing; give {wanted}"),
            ));
        }
        Some(Value::Array(list)) if !list.is_empty() && list.len() <= MESSAGES_MAX => list,
        Some(other) => return Err(wrong("messages", &other, &wanted)),
    };
    let messages = messages
        .into_iter()
        .enumerate()
        .map(|(index, message)| read_message(index, message))
        .collect::<Result<Vec<_>, _>>()?;
    let generation = fields.flag("add_generation_prompt")?.unwrap_or(true);
    let template = model.template.as_ref();
    let template =
        template.map_err(|error| ApiError::unsupported("messages", error.to_string()))?;
    let text = template.render(&messages, generation);
    let text = text.map_err(|error| ApiError::field("messages", error.to_string()))?;
    // The template writes the special tokens.
    let special = fields.flag("add_special_tokens")?.unwrap_or(false);
    let tokens = model.tokenizer.encode(&text, special);
    tokens.map_err(|error| ApiError::field("messages", error.to_string()))
}

fn read_message(index: usize, message: Value) -> Result<ChatMessage, ApiError> {
    let name = format!("messages[{index}]");
    let Value::Object(mut members) = message else {
        return Err(wrong(
            &name,
            &message,
            "an object with a role and a content",
        ));
    };
    let role = match members.remove("role") {
        Some(Value::String(role)) if ROLES.contains(&role.as_str()) => match &*role {
            // Its newer name, which templates do not know.
            "developer" => "system".to_owned(),
            _ => role,
        },
        other => {
            let role = other.unwrap_or(Value::Null);
            return Err(wrong(
                &format!("{name}.role"),
                &role,
                &format!("one of {}", ROLES.join(", ")),
            ));
        }
    };
    let content = content(&name, members.remove("content").unwrap_or(Value::Null))?;
    Ok(ChatMessage { role, content })
}

/// A message's text: as it is, or its parts put together.
fn content(name: &str, content: Value) -> Result<String, ApiError> {
    let name = format!("{name}.content");
    match content {
        Value::String(text) => Ok(text),
        Value::Null => Ok(String::new()),
        Value::Array(parts) => {
            let mut texts = Vec::new();
            for part in &parts {
                match (part["type"].as_str(), part["text"].as_str()) {
                    (Some("text"), Some(text)) => texts.push(text),
                    (Some("text"), None) | (None, _) => {
                        return Err(wrong(
                            &name,
                            part,
                            "parts as {\"type\": \"text\", \"text\": …}",
                        ));
                    }
                    (Some(kind), _) => {
                        let kind: String = kind.chars().take(40).collect();
                        return Err(ApiError::unsupported(
                            &name,
                            format!(
                                "`{name}` has a part of type `{kind}`: this model reads text only"
                            ),
                        ));
                    }
                }
            }
            Ok(texts.join("\n"))
        }
        other => Err(wrong(&name, &other, "a string or a list of parts")),
    }
}
