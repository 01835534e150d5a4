//! The body of `/v1/completions`.
//!
//! Must never know: HTTP, or how an answer is written.

use serde_json::Value;
use timetable_engine::sampling::MAX_LOGPROBS;

use crate::error::ApiError;
use crate::fields::{Fields, token_ids, wrong};
use crate::generation::{
    CHOICES_MAX, Common, Generation, Prompt, Style, check_model, common, prompt,
};
use crate::model::ServedModel;

/// Tokens of an answer where nobody says a number: OpenAI's.
const MAX_TOKENS: usize = 16;
const PROMPT: &str = "a string, a list of token ids, or a list of either, none of them empty; with `n` answers of each, up to 128 answers";

/// Reads a body; tokenises its prompts.
pub fn read(body: &[u8], model: &ServedModel) -> Result<Generation, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(&mut fields, model, true)?;
    let Common {
        n,
        mut params,
        stream,
        include_usage,
    } = common(&mut fields)?;
    match fields.integer("best_of", 1..=i64::MAX)? {
        Some(best) if best != n as i64 => {
            return Err(ApiError::unsupported(
                "best_of",
                format!(
                    "`best_of` is {best}: every answer is returned here; give as many as `n`, or leave it out"
                ),
            ));
        }
        _ => {}
    }
    fields.refuse(
        "suffix",
        |suffix| suffix == "",
        "this server does not fill in; leave it out",
    )?;
    let echo = fields.flag("echo")?.unwrap_or(false);
    let logprobs = fields.integer("logprobs", 0..=i64::from(MAX_LOGPROBS))?;
    params.logprobs = logprobs.map(|count| count as u32);
    if echo && params.logprobs.is_some() {
        let message = "`echo` is true and `logprobs` is given: the prompt's tokens have none here; leave one of them out";
        return Err(ApiError::unsupported("echo", message));
    }
    let asked = fields.integer("max_tokens", 1..=i64::MAX)?;
    let asked = asked.map(|tokens| tokens as usize);
    let special = fields.flag("add_special_tokens")?.unwrap_or(true);
    let Some(given) = fields.take("prompt") else {
        return Err(ApiError::field(
            "prompt",
            format!("`prompt` is missing; give {PROMPT}"),
        ));
    };
    let read = |value: &Value| -> Result<Prompt, ApiError> {
        let (tokens, text) = match value {
            Value::String(text) => {
                let tokens = model.tokenizer.encode(text, special);
                let tokens = tokens.map_err(|e| ApiError::field("prompt", e.to_string()))?;
                (tokens, echo.then(|| text.clone()))
            }
            Value::Array(ids) if !ids.is_empty() => {
                let tokens = token_ids("prompt", ids)?;
                let text = echo.then(|| model.tokenizer.decode(&tokens, true));
                (tokens, text)
            }
            other => return Err(wrong("prompt", other, PROMPT)),
        };
        Ok(Prompt {
            echo: text.unwrap_or_default(),
            ..prompt(model, tokens, asked, Some(MAX_TOKENS))?
        })
    };
    let prompts = match &given {
        Value::Array(list) if list.first().is_some_and(|first| !first.is_number()) => {
            let alike = list.iter().all(Value::is_string) || list.iter().all(Value::is_array);
            if !alike || list.len() * n > CHOICES_MAX {
                return Err(wrong("prompt", &given, PROMPT));
            }
            list.iter().map(read).collect::<Result<_, _>>()?
        }
        one => vec![read(one)?],
    };
    Ok(Generation {
        prompts,
        n,
        params,
        stream,
        include_usage,
        style: Style::Completion,
    })
}
