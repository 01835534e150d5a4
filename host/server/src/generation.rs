//! What a request asks of the engine, whichever endpoint it came by.
//!
//! Must never know: HTTP, or how an answer is written.

use serde_json::Value;
use timetable_engine::sampling::SamplingParams;

use crate::error::ApiError;
use crate::fields::{Fields, token_ids, wrong};
use crate::model::ServedModel;

/// Answers of one request, at most: OpenAI's bound.
pub const CHOICES_MAX: usize = 128;
/// Stop strings, at most.
const STOPS_MAX: usize = 16;
/// Bytes of a stop string: each token's text is compared with its beginning.
const STOP_BYTES_MAX: usize = 1024;
/// Biases, at most: each is added for each token. The field's bound.
const BIASES_MAX: usize = 1024;
/// Stop tokens, at most: each token is compared with them.
const STOP_TOKENS_MAX: usize = 128;

/// One or more prompts, each answered `n` times.
pub struct Generation {
    pub prompts: Vec<Prompt>,
    /// Answers of each prompt.
    pub n: usize,
    /// Of every answer; `max_tokens` is the prompt's.
    pub params: SamplingParams,
    /// Whether the answer is written while it comes.
    pub stream: bool,
    /// Whether a stream ends with the tokens' numbers.
    pub include_usage: bool,
    pub style: Style,
}

/// A prompt as the model sees it.
pub struct Prompt {
    pub tokens: Vec<u32>,
    /// Tokens of its answer, at most.
    pub max_tokens: usize,
    /// Text that is put before its answer.
    pub echo: String,
}

/// Whose shape the answer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// `/v1/completions`.
    Completion,
    /// `/v1/chat/completions`.
    Chat,
}

impl Generation {
    /// Answers, all prompts together.
    pub fn choices(&self) -> usize {
        self.prompts.len() * self.n
    }
}

/// What both endpoints read alike.
pub struct Common {
    pub n: usize,
    pub params: SamplingParams,
    pub stream: bool,
    pub include_usage: bool,
}

/// The model that a request names must be the one that is served.
pub fn check_model(
    fields: &mut Fields,
    model: &ServedModel,
    required: bool,
) -> Result<(), ApiError> {
    match fields.text("model")? {
        Some(name) if name != model.name => Err(unknown_model(&name, model)),
        None if required => Err(ApiError::field(
            "model",
            format!("`model` is missing; give `{}`", model.name),
        )),
        _ => Ok(()),
    }
}

/// 404 for a model that is not served.
pub fn unknown_model(name: &str, model: &ServedModel) -> ApiError {
    let name: String = name.chars().take(100).collect();
    let message = format!(
        "the model `{name}` does not exist here; this server has `{}`",
        model.name
    );
    ApiError::unknown_model(message)
}

/// Reads the fields that both endpoints have, and refuses what neither does.
pub fn common(fields: &mut Fields) -> Result<Common, ApiError> {
    let n = fields.integer("n", 1..=CHOICES_MAX as i64)?.unwrap_or(1);
    let stream = fields.flag("stream")?.unwrap_or(false);
    let include_usage = match fields.object("stream_options")? {
        None => false,
        Some(_) if !stream => {
            return Err(ApiError::field(
                "stream_options",
                "`stream_options` is given without `stream`: true; leave it out, or stream",
            ));
        }
        Some(mut options) => options.flag("include_usage")?.unwrap_or(false),
    };
    let why = "this server writes text only; leave it out";
    let is_text = |value: &Value| value["type"] == "text";
    fields.refuse("response_format", is_text, why)?;
    for name in [
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
    ] {
        fields.refuse(name, |_| false, why)?;
    }
    let is = |expected: Value| move |value: &Value| *value == expected;
    fields.refuse(
        "use_beam_search",
        is(Value::Bool(false)),
        "there is no beam search here; leave it out",
    )?;
    // They would change the answer.
    for name in [
        "bad_words",
        "allowed_token_ids",
        "prompt_logprobs",
        "prompt_embeds",
        "truncate_prompt_tokens",
        "logits_processors",
        "chat_template",
        "functions",
        "function_call",
        "audio",
        "prediction",
    ] {
        fields.refuse(name, |_| false, "it is not supported; leave it out")?;
    }
    for (name, only) in [
        ("min_tokens", Value::from(0)),
        ("include_stop_str_in_output", Value::Bool(false)),
        ("skip_special_tokens", Value::Bool(true)),
        ("continue_final_message", Value::Bool(false)),
        ("return_tokens_as_token_ids", Value::Bool(false)),
    ] {
        let why = format!("only {only} is supported; leave it out");
        fields.refuse(name, is(only), &why)?;
    }
    let params = SamplingParams {
        temperature: fields.number("temperature", 0.0..=2.0)?.unwrap_or(1.0) as f32,
        top_p: above_0(fields, "top_p", 1.0)?,
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(0.0) as f32,
        presence_penalty: fields
            .number("presence_penalty", -2.0..=2.0)?
            .unwrap_or(0.0) as f32,
        frequency_penalty: fields
            .number("frequency_penalty", -2.0..=2.0)?
            .unwrap_or(0.0) as f32,
        repetition_penalty: above_0(fields, "repetition_penalty", 2.0)?,
        logit_bias: logit_bias(fields)?,
        // The field's servers say "all" as −1.
        top_k: usize::try_from(
            fields
                .integer("top_k", -1..=i64::from(u32::MAX))?
                .unwrap_or(0),
        )
        .unwrap_or(0),
        seed: fields
            .integer("seed", i64::MIN..=i64::MAX)?
            .map(i64::cast_unsigned),
        stop: stops(fields)?,
        stop_token_ids: stop_tokens(fields)?,
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        ..SamplingParams::default()
    };
    Ok(Common {
        n: n as usize,
        params,
        stream,
        include_usage,
    })
}

/// A number above 0 and at most `max`; 1 where there is none.
fn above_0(fields: &mut Fields, name: &str, max: f64) -> Result<f32, ApiError> {
    let number = fields.number(name, 0.0..=max)?.unwrap_or(1.0) as f32;
    match number > 0.0 {
        true => Ok(number),
        false => Err(wrong(
            name,
            &Value::from(number),
            &format!("a number above 0 and at most {max}"),
        )),
    }
}

/// Token ids, as texts, with what is added to their logits.
fn logit_bias(fields: &mut Fields) -> Result<Vec<(u32, f32)>, ApiError> {
    let name = "logit_bias";
    let Some(given) = fields.object(name)? else {
        return Ok(Vec::new());
    };
    let members = given.members();
    if members.len() > BIASES_MAX {
        let message = format!(
            "`{name}` names {} tokens; give {BIASES_MAX} at most",
            members.len()
        );
        return Err(ApiError::field(name, message));
    }
    let entry = |(token, bias): (&String, &Value)| {
        let token = token.parse().ok();
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        Some((token?, bias? as f32))
    };
    let biases = members.iter().map(entry).collect::<Option<_>>();
    biases.ok_or_else(|| {
        let wanted = "token ids as strings, each with a number from -100 to 100";
        ApiError::field(name, format!("`{name}` has another entry; give {wanted}"))
    })
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let wanted = format!(
        "a string or up to {STOPS_MAX} strings, none empty or longer than {STOP_BYTES_MAX} bytes"
    );
    let Some(value) = fields.take("stop") else {
        return Ok(Vec::new());
    };
    let stops = match &value {
        Value::String(stop) => Some(vec![stop.clone()]),
        Value::Array(list) if list.len() <= STOPS_MAX => list
            .iter()
            .map(|stop| stop.as_str().map(str::to_owned))
            .collect(),
        _ => None,
    };
    let usable = |stop: &String| !stop.is_empty() && stop.len() <= STOP_BYTES_MAX;
    stops
        .filter(|stops| stops.iter().all(usable))
        .ok_or_else(|| wrong("stop", &value, &wanted))
}

fn stop_tokens(fields: &mut Fields) -> Result<Vec<u32>, ApiError> {
    match fields.take("stop_token_ids") {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() <= STOP_TOKENS_MAX => {
            token_ids("stop_token_ids", &list)
        }
        Some(other) => Err(wrong(
            "stop_token_ids",
            &other,
            &format!("a list of at most {STOP_TOKENS_MAX} token ids"),
        )),
    }
}

/// A prompt of `tokens` whose answer has at most `asked` tokens, else `default` of those that fit, else all that fit.
pub fn prompt(
    model: &ServedModel,
    tokens: Vec<u32>,
    asked: Option<usize>,
    default: Option<usize>,
) -> Result<Prompt, ApiError> {
    let max_tokens = model.bounds.max_tokens(tokens.len(), asked, default)?;
    Ok(Prompt {
        tokens,
        max_tokens,
        echo: String::new(),
    })
}
