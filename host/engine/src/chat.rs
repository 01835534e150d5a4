//! Renders a conversation with the model's own chat template (Jinja), from a GGUF file or a model directory.
//!
//! Knows templates and texts, not tokens.

use crate::model::{ModelError, Source};
use crate::tokenizer::{Tokenizer, special, tokenizer_config};
use minijinja::{Environment, ErrorKind, context};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`, or what else the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

/// Why a conversation could not be rendered.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The model's files could not be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model is no chat model, or its template was left out.
    #[error(
        "{0} has no chat template; use plain prompts, or an instruction-tuned model that has one"
    )]
    NoTemplate(String),
    /// The template is not valid Jinja, or fails on this conversation.
    #[error("chat template: {0}; check the roles and their order, or use a plain prompt")]
    Template(String),
}

/// A model's chat template, compiled.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
}

const NAME: &str = "chat";

/// Steps that rendering may take. A template comes with a model, which may come from anywhere: a real one takes some hundred
/// steps a message.
const FUEL: u64 = 5_000_000;

/// Bytes of a rendered conversation, at most: some millions of tokens.
const MAX_PROMPT_BYTES: usize = 16 << 20;

impl ChatTemplate {
    /// Loads the template of a model: `tokenizer.chat_template` of a GGUF file, or of a directory
    /// `chat_template.jinja` or the one in `tokenizer_config.json`.
    ///
    /// # Errors
    /// `NoTemplate` if the model has none, `Template` if it does not compile, `Model` if files cannot be read.
    pub fn load(model: impl AsRef<Path>) -> Result<Self, ChatError> {
        let path = model.as_ref();
        let (source, bos, eos) = match Source::open(path)? {
            Source::Gguf(file) => {
                let tokenizer = Tokenizer::load(path)?;
                let own = |t: Option<&str>| t.unwrap_or_default().to_owned();
                let tokens = (own(tokenizer.bos_token()), own(tokenizer.eos_token()));
                (file.text("tokenizer.chat_template"), tokens.0, tokens.1)
            }
            Source::HuggingFace => {
                let config = tokenizer_config(path)?;
                let template = match std::fs::read_to_string(path.join("chat_template.jinja")) {
                    Ok(text) => Some(text),
                    Err(_) => template_of_config(&config),
                };
                let token = |key: &str| special(&config, key).unwrap_or_default();
                (template, token("bos_token"), token("eos_token"))
            }
        };
        let source = source.ok_or_else(|| ChatError::NoTemplate(path.display().to_string()))?;
        Self::new(source, bos, eos)
    }

    /// Compiles a template.
    ///
    /// # Errors
    /// `Template` if it is not valid Jinja.
    pub fn new(source: String, bos_token: String, eos_token: String) -> Result<Self, ChatError> {
        let mut environment = Environment::new();
        // transformers' settings, which templates are written for.
        environment.set_fuel(Some(FUEL));
        // Their widths make huge strings in one step, which fuel does not see; no chat template needs them.
        for filter in ["format", "indent", "center"] {
            environment.remove_filter(filter);
        }
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<String, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment
            .add_template_owned(NAME, source)
            .map_err(|e| template_error(&e))?;
        Ok(Self {
            environment,
            bos_token,
            eos_token,
        })
    }

    /// The prompt text of a conversation. With `add_generation_prompt` it ends where the assistant's answer begins.
    /// Tokenise it without adding special tokens: the template writes them.
    ///
    /// # Errors
    /// `Template` with the template's own message if it refuses the conversation.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<String, ChatError> {
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|e| template_error(&e))?;
        let mut prompt = Bounded(Vec::new());
        template
            .render_captured_to(
                context! {
                    messages,
                    add_generation_prompt,
                    bos_token => self.bos_token,
                    eos_token => self.eos_token,
                },
                &mut prompt,
            )
            .map_err(|e| template_error(&e))?;
        String::from_utf8(prompt.0).map_err(|e| ChatError::Template(e.to_string()))
    }
}

/// A prompt's text, up to [`MAX_PROMPT_BYTES`].
struct Bounded(Vec<u8>);

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_PROMPT_BYTES {
            let message = format!("the prompt is longer than {MAX_PROMPT_BYTES} bytes");
            return Err(std::io::Error::other(message));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn template_error(error: &minijinja::Error) -> ChatError {
    ChatError::Template(error.to_string())
}

/// A string, or a list of named templates of which `default` is taken.
fn template_of_config(config: &Value) -> Option<String> {
    match &config["chat_template"] {
        Value::String(text) => Some(text.clone()),
        Value::Array(list) => {
            let named = list
                .iter()
                .find(|t| t["name"] == "default")
                .or(list.first())?;
            named["template"].as_str().map(str::to_owned)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::{GgufBuilder, repository_file};

    fn message(role: &str, content: &str) -> ChatMessage {
        ChatMessage {
            role: role.to_owned(),
            content: content.to_owned(),
        }
    }

    /// In the style of ChatML, with Python's methods.
    const TEMPLATE: &str = "{%- if messages[0].role not in ['system', 'user'] %}\n{{ raise_exception('begin with the user') }}\n{%- endif %}\n{%- for message in messages %}\n{{- bos_token + message['role'].upper() + ': ' + message.content.strip() + eos_token + '\\n' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n{{- bos_token + 'ASSISTANT:' }}\n{%- endif %}\n";

    #[test]
    fn renders_with_the_files_tokens() {
        let file = GgufBuilder::new()
            .text("tokenizer.chat_template", TEMPLATE)
            .text("tokenizer.ggml.model", "gpt2")
            .text("tokenizer.ggml.pre", "smollm")
            .texts(
                "tokenizer.ggml.tokens",
                &["<s>".to_owned(), "</s>".to_owned()],
            )
            .texts("tokenizer.ggml.merges", &[])
            .uint("tokenizer.ggml.bos_token_id", 0)
            .uint("tokenizer.ggml.eos_token_id", 1)
            .write();
        let template = ChatTemplate::load(file.path()).expect("compiles");
        let conversation = [message("user", "  hello "), message("assistant", "yes")];
        let text = template.render(&conversation, true).expect("renders");
        assert_eq!(
            text,
            "<s>USER: hello</s>\n<s>ASSISTANT: yes</s>\n<s>ASSISTANT:"
        );
        let text = template.render(&conversation[..1], false).expect("renders");
        assert_eq!(text, "<s>USER: hello</s>\n");
        let refused = template
            .render(&[message("tool", "x")], true)
            .expect_err("refused")
            .to_string();
        assert!(refused.contains("begin with the user"), "{refused}");
    }

    #[test]
    fn a_model_without_a_template_says_so() {
        let error = ChatTemplate::load(repository_file("tests/models/tiny-llama"))
            .err()
            .expect("none");
        assert!(matches!(error, ChatError::NoTemplate(_)));
        assert!(
            error
                .to_string()
                .contains("tiny-llama has no chat template; use plain prompts"),
            "{error}"
        );
        let error = ChatTemplate::new("{% for %}".to_owned(), String::new(), String::new())
            .err()
            .expect("invalid");
        assert!(error.to_string().starts_with("chat template:"), "{error}");
    }
}
