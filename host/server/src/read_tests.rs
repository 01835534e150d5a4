//! Bodies of any kind: read, or refused in OpenAI's shape; never a panic.

use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use timetable_engine::chat::ChatTemplate;
use timetable_engine::tokenizer::Tokenizer;

use crate::error::ApiError;
use crate::generation::Generation;
use crate::model::{Bounds, ServedModel};
use crate::{chat, completions, tokens};

fn model() -> ServedModel {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/tiny-llama");
    let template = "{% for message in messages %}{{ message.content }} {% endfor %}";
    ServedModel {
        name: "tiny".to_owned(),
        tokenizer: Arc::new(Tokenizer::load(path).unwrap()),
        template: ChatTemplate::new(template, String::new(), String::new()),
        bounds: Bounds {
            max_model_len: 64,
            cache_tokens: 48,
            max_num_seqs: 4,
        },
    }
}

/// Members that requests have; what is refused of them is refused by its name.
const NAMES: [&str; 40] = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "best_of",
    "stream",
    "stream_options",
    "include_usage",
    "stop",
    "stop_token_ids",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "echo",
    "suffix",
    "user",
    "tools",
    "tool_choice",
    "response_format",
    "ignore_eos",
    "add_special_tokens",
    "add_generation_prompt",
    "role",
    "content",
    "type",
    "text",
    "tool_calls",
    "tokens",
    "return_token_strs",
    "other",
];

fn any_value() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-3i64..200).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (-3.0..3.0).prop_map(Value::from),
    ];
    let word = prop_oneof![
        Just("tiny"),
        Just("t5"),
        Just("user"),
        Just("text"),
        Just("")
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        number,
        word.prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 48, 8, |inner| {
        let member = (prop::sample::select(&NAMES[..]), inner.clone());
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec(member, 0..6).prop_map(object),
            prop::collection::hash_map("[0-9]{1,4}", inner, 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

fn object(members: Vec<(&str, Value)>) -> Value {
    let members = members.into_iter();
    Value::Object(
        members
            .map(|(name, value)| (name.to_owned(), value))
            .collect::<Map<_, _>>(),
    )
}

fn any_body() -> impl Strategy<Value = Value> {
    let members = prop::collection::vec((prop::sample::select(&NAMES[..]), any_value()), 0..5);
    // Near one that is read, so that what comes late is reached.
    (members, any::<bool>()).prop_map(|(members, near)| {
        let mut body = match near {
            true => json!({
                "model": "tiny", "prompt": "t5 t6", "tokens": [5], "messages": [{ "role": "user", "content": "t5" }]
            }),
            false => json!({}),
        };
        for (name, value) in members {
            body[name] = value;
        }
        body
    })
}

fn check<T>(read: Result<T, ApiError>, body: &Value) -> Option<T> {
    match read {
        Ok(read) => Some(read),
        Err(error) => {
            assert!(error.status.is_client_error(), "{body}");
            let said: Value = serde_json::from_slice(&error.json()).expect("JSON");
            let message = said["error"]["message"].as_str().expect("a message");
            assert!(!message.contains('\n') && message.len() < 1000, "{message}");
            None
        }
    }
}

fn fits(generation: &Generation) {
    assert!(!generation.prompts.is_empty() && generation.choices() <= 128);
    assert_eq!(generation.params.validate(), Ok(()));
    for prompt in &generation.prompts {
        let total = prompt.tokens.len() + prompt.max_tokens;
        assert!(prompt.max_tokens > 0 && total <= 49, "{total}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_body_is_read_or_refused(body in any_body()) {
        thread_local!(static MODEL: ServedModel = model());
        let bytes = body.to_string();
        let bytes = bytes.as_bytes();
        MODEL.with(|model| {
            if let Some(generation) = check(completions::read(bytes, model), &body) {
                fits(&generation);
            }
            if let Some(generation) = check(chat::read(bytes, model), &body) {
                fits(&generation);
            }
            check(tokens::tokenize(bytes, model), &body);
            check(tokens::detokenize(bytes, model), &body);
        });
    }

    #[test]
    fn bytes_that_are_no_request_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        thread_local!(static MODEL: ServedModel = model());
        MODEL.with(|model| {
            prop_assert!(completions::read(&bytes, model).is_err());
            prop_assert!(chat::read(&bytes, model).is_err());
            Ok(())
        })?;
    }
}
