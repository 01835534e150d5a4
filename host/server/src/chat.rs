//! The body of `/v1/chat/completions`.
//!
//! Must never know: HTTP, or how an answer is written.

use serde_json::Value;
use timetable_engine::chat::Conversation;
use timetable_engine::sampling::MAX_LOGPROBS;

use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::generation::{Common, Generation, Style, check_model, common, prompt};
use crate::model::ServedModel;

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
/// Messages of one conversation, at most.
const MESSAGES_MAX: usize = 4096;
/// Tools, at most.
const TOOLS_MAX: usize = 128;

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
    let tokens = conversation(&mut fields, body, model)?;
    Ok(Generation {
        prompts: vec![prompt(model, tokens, asked, None)?],
        n,
        params,
        stream,
        include_usage,
        style: Style::Chat,
    })
}

/// The token ids of `messages`, rendered by the model's template with `tools` and `chat_template_kwargs`. Members keep the
/// order that they have in the body, since templates write tools out.
pub fn conversation(
    fields: &mut Fields,
    body: &[u8],
    model: &ServedModel,
) -> Result<Vec<u32>, ApiError> {
    let wanted = format!("a list of 1 to {MESSAGES_MAX} messages");
    match fields.take("messages") {
        None => {
            return Err(ApiError::field(
                "messages",
                format!("`messages` is missing; give {wanted}"),
            ));
        }
        Some(Value::Array(list)) if !list.is_empty() && list.len() <= MESSAGES_MAX => {
            for (index, message) in list.iter().enumerate() {
                check_message(index, message)?;
            }
        }
        Some(other) => return Err(wrong("messages", &other, &wanted)),
    }
    let has_tools = check_tools(fields)?;
    let is_text = |list: &Value| {
        list.as_array()
            .is_some_and(|kinds| kinds.iter().all(|kind| kind == "text"))
    };
    fields.refuse(
        "modalities",
        is_text,
        "this server writes text only; leave it out",
    )?;
    fields.object("chat_template_kwargs")?;
    fields.flag("add_generation_prompt")?;
    let special = fields.flag("add_special_tokens")?.unwrap_or(false);
    let template = model.template.as_ref();
    let template =
        template.map_err(|error| ApiError::unsupported("messages", error.to_string()))?;
    let field = |error: String| ApiError::field("messages", error);
    let conversation = Conversation::from_request(body);
    let mut conversation = conversation.map_err(|error| field(error.to_string()))?;
    if !has_tools {
        conversation.forget_tools();
    }
    let text = template.render_conversation(&conversation);
    let text = text.map_err(|error| field(error.to_string()))?;
    // The template writes the special tokens.
    let tokens = model.tokenizer.encode(&text, special);
    tokens.map_err(|error| field(error.to_string()))
}

/// Whether the template gets tools. What the model answers with them stays text.
fn check_tools(fields: &mut Fields) -> Result<bool, ApiError> {
    let wanted = format!("a list of at most {TOOLS_MAX} objects");
    match fields.take("tools") {
        None => {}
        Some(Value::Array(list))
            if list.len() <= TOOLS_MAX && list.iter().all(Value::is_object) => {}
        Some(other) => return Err(wrong("tools", &other, &wanted)),
    }
    match fields.take("tool_choice") {
        None => Ok(true),
        Some(choice) if choice == "auto" => Ok(true),
        Some(choice) if choice == "none" => Ok(false),
        Some(other) => {
            let wanted =
                "\"auto\" or \"none\": this server leaves tool calls as text, and cannot force one";
            Err(wrong("tool_choice", &other, wanted))
        }
    }
}

fn check_message(index: usize, message: &Value) -> Result<(), ApiError> {
    let name = format!("messages[{index}]");
    if !message.is_object() {
        return Err(wrong(&name, message, "an object with a role and a content"));
    }
    let role = &message["role"];
    if !role.as_str().is_some_and(|role| ROLES.contains(&role)) {
        return Err(wrong(
            &format!("{name}.role"),
            role,
            &format!("one of {}", ROLES.join(", ")),
        ));
    }
    match &message["content"] {
        // It may have made tool calls instead.
        Value::Null if role == "assistant" => Ok(()),
        content => check_content(&name, content),
    }
}

/// A message's text: as it is, or in parts.
fn check_content(name: &str, content: &Value) -> Result<(), ApiError> {
    let name = format!("{name}.content");
    let parts = match content {
        Value::String(_) => return Ok(()),
        Value::Array(parts) => parts,
        other => return Err(wrong(&name, other, "a string or a list of parts")),
    };
    for part in parts {
        match (part["type"].as_str(), part["text"].as_str()) {
            (Some("text"), Some(_)) => {}
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
                    format!("`{name}` has a part of type `{kind}`: this model reads text only"),
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use timetable_engine::chat::ChatTemplate;
    use timetable_engine::tokenizer::Tokenizer;

    use super::*;
    use crate::model::Bounds;

    /// With the words `t0` to `t511`.
    fn model(template: &str) -> ServedModel {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/models/tiny-llama");
        let template = ChatTemplate::new(template, String::new(), String::new());
        ServedModel {
            name: "m".to_owned(),
            tokenizer: Arc::new(Tokenizer::load(dir).expect("the tokenizer")),
            template,
            bounds: Bounds {
                max_model_len: 100,
                cache_tokens: 100,
                max_num_seqs: 1,
            },
        }
    }

    #[test]
    fn tools_reach_the_template_and_bad_ones_are_named() {
        let model = model(
            "{% for m in messages %}{{ m.content }} {% endfor %}{% for t in tools or [] %}{% for k in t %}{{ k }} {% endfor %}{% endfor %}{{ word }}",
        );
        let text = |rest: &str| {
            let body =
                format!(r#"{{"messages": [{{"role": "user", "content": "t50 t51"}}]{rest}}}"#);
            let mut fields = Fields::parse(body.as_bytes()).expect("JSON");
            let tokens = conversation(&mut fields, body.as_bytes(), &model)?;
            Ok::<_, ApiError>(model.tokenizer.decode(&tokens, false))
        };
        let is = |rest: &str| text(rest).unwrap_or_else(|error| panic!("{rest}: {error:?}"));
        assert_eq!(is(""), "t50 t51");
        // In the order of the body.
        let tools = r#", "tools": [{"t59": 1, "t53": 2, "t55": 3}], "chat_template_kwargs": {"word": "t57"}"#;
        assert_eq!(is(tools), "t50 t51 t59 t53 t55 t57");
        assert_eq!(
            is(&format!(r#"{tools}, "tool_choice": "auto""#)),
            "t50 t51 t59 t53 t55 t57"
        );
        assert_eq!(
            is(&format!(r#"{tools}, "tool_choice": "none""#)),
            "t50 t51 t57"
        );
        for (rest, field) in [
            (r#", "tools": {}"#, "tools"),
            (r#", "tools": [3]"#, "tools"),
            (r#", "tool_choice": "required""#, "tool_choice"),
            (r#", "chat_template_kwargs": []"#, "chat_template_kwargs"),
            (r#", "add_generation_prompt": 3"#, "add_generation_prompt"),
        ] {
            let error = text(rest).expect_err(rest);
            assert_eq!(error.status.as_u16(), 400);
            let body: Value = serde_json::from_slice(&error.json()).expect("JSON");
            assert_eq!(body["error"]["param"], field, "{rest}");
        }
    }
}
