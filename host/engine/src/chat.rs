//! Renders a conversation with the model's own chat template (Jinja), from a GGUF file or a model directory.
//!
//! Knows templates and texts, not tokens.

mod conversation;
mod python;

pub use self::conversation::Conversation;

use crate::model::{ModelError, Source};
use crate::tokenizer::{Tokenizer, special, tokenizer_config};
use minijinja::{Environment, Value as Variable, context};
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
/// The one that a model may have for conversations with tools, by the field's name.
const TOOL_USE: &str = "tool_use";

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
        let (sources, bos, eos) = match Source::open(path)? {
            Source::Gguf(file) => {
                let tokenizer = Tokenizer::load(path)?;
                let own = |t: Option<&str>| t.unwrap_or_default().to_owned();
                let tokens = (own(tokenizer.bos_token()), own(tokenizer.eos_token()));
                let template = |key: &str| file.text(&format!("tokenizer.chat_template{key}"));
                ((template(""), template(".tool_use")), tokens.0, tokens.1)
            }
            Source::HuggingFace => {
                let config = tokenizer_config(path)?;
                let file = |name: &str| std::fs::read_to_string(path.join(name)).ok();
                let templates = (
                    file("chat_template.jinja").or_else(|| template_of_config(&config, "default")),
                    file("additional_chat_templates/tool_use.jinja")
                        .or_else(|| template_of_config(&config, TOOL_USE)),
                );
                let token = |key: &str| special(&config, key).unwrap_or_default();
                (templates, token("bos_token"), token("eos_token"))
            }
        };
        let none = || ChatError::NoTemplate(path.display().to_string());
        let mut this = Self::new(&sources.0.ok_or_else(none)?, bos, eos)?;
        if let Some(source) = sources.1 {
            this.add(TOOL_USE, &source)?;
        }
        Ok(this)
    }

    /// Compiles a template.
    ///
    /// # Errors
    /// `Template` if it is not valid Jinja.
    pub fn new(source: &str, bos_token: String, eos_token: String) -> Result<Self, ChatError> {
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
        python::add_to(&mut environment);
        let mut this = Self {
            environment,
            bos_token,
            eos_token,
        };
        this.add(NAME, source)?;
        Ok(this)
    }

    fn add(&mut self, name: &'static str, source: &str) -> Result<(), ChatError> {
        let source = python::without_generation_blocks(source);
        let added = self.environment.add_template_owned(name, source);
        added.map_err(|e| template_error(&e))
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
        let variables = context! { messages, add_generation_prompt };
        self.render_with(NAME, variables)
    }

    /// As [`ChatTemplate::render`], with tools and whatever else the conversation has for the template. What the assistant is
    /// to answer with a tool stays text: nothing here reads answers. Texts in a list or an object that a template shows without
    /// `tojson` have double quotes, where Python's have single ones.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render_conversation(&self, conversation: &Conversation) -> Result<String, ChatError> {
        let tools = conversation.tools();
        let has_own = tools.is_some() && self.environment.get_template(TOOL_USE).is_ok();
        let name = if has_own { TOOL_USE } else { NAME };
        let variables = context! {
            messages => conversation.messages(),
            tools,
            add_generation_prompt => conversation.add_generation_prompt(),
        };
        let further: Variable = conversation.variables().collect();
        self.render_with(name, context! { ..variables, ..further })
    }

    fn render_with(&self, name: &str, variables: Variable) -> Result<String, ChatError> {
        let template = self
            .environment
            .get_template(name)
            .map_err(|e| template_error(&e))?;
        let mut prompt = Bounded(Vec::new());
        let tokens = context! { bos_token => self.bos_token, eos_token => self.eos_token };
        template
            .render_captured_to(context! { ..variables, ..tokens }, &mut prompt)
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

/// A string, which is `default`, or one of a list of named templates; of those the first stands for a `default` that is missing.
fn template_of_config(config: &Value, name: &str) -> Option<String> {
    match &config["chat_template"] {
        Value::String(text) => (name == "default").then(|| text.clone()),
        Value::Array(list) => {
            let first = list.first().filter(|_| name == "default");
            let named = list.iter().find(|t| t["name"] == name).or(first)?;
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

    /// What `tests/peers/chat_templates.py` recorded of transformers.
    #[test]
    fn conversations_with_tools_are_rendered_as_transformers_renders_them() {
        let path = repository_file("tests/vectors/chat_templates.json");
        let recorded: Value =
            serde_json::from_slice(&std::fs::read(path).expect("it is there")).expect("it is JSON");
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let cases = recorded["cases"].as_array().expect("cases");
        assert!(cases.len() >= 24);
        for case in cases {
            let name = text(&case["template"]);
            let source = text(&recorded["templates"][&name]);
            let template = ChatTemplate::new(&source, "<s>".to_owned(), "</s>".to_owned());
            let template = template.expect("it compiles");
            let conversation = Conversation::from_request(text(&case["request"]).as_bytes());
            let found = template.render_conversation(&conversation.expect("a request"));
            let what = format!("{name}, {}", case["id"]);
            match (found, &case["text"], &case["error"]) {
                (Ok(found), Value::String(expected), _) => assert_eq!(found, *expected, "{what}"),
                (Err(found), _, Value::String(expected)) => {
                    assert!(found.to_string().contains(expected), "{what}: {found}");
                }
                (found, ..) => panic!("{what}: {found:?}"),
            }
        }
    }

    #[test]
    fn a_template_of_its_own_serves_conversations_with_tools() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text);
        write("config.json", "{}").expect("written");
        let templates = r#"{"chat_template": [{"name": "tool_use", "template": "{{ tools | length }} tools"},
            {"name": "default", "template": "no tools"}]}"#;
        write("tokenizer_config.json", templates).expect("written");
        let template = ChatTemplate::load(dir.path()).expect("it compiles");
        let render = |tools: &str| {
            let request = format!(r#"{{"messages": [], "tools": {tools}}}"#);
            let conversation = Conversation::from_request(request.as_bytes()).expect("a request");
            template
                .render_conversation(&conversation)
                .expect("renders")
        };
        assert_eq!(render("[{}, {}]"), "2 tools");
        assert_eq!(
            (render("[]"), render("null")),
            ("no tools".to_owned(), "no tools".to_owned())
        );
    }

    #[test]
    fn bad_conversations_and_templates_that_ask_too_much_are_refused() {
        assert!(Conversation::from_request(b"{}").is_err());
        assert!(Conversation::from_request(b"{\"messages\": 3}").is_err());
        let deep = format!("{{\"messages\": {}", "[".repeat(100_000));
        assert!(Conversation::from_request(deep.as_bytes()).is_err());
        // Messages need not be objects: what becomes of them is the template's affair, and never a crash.
        let odd = br#"{"messages": [1, [], {"content": [1, {"text": 2}], "tool_calls": [1, {"function": 2}]}]}"#;
        let odd = Conversation::from_request(odd).expect("JSON");
        let compile = |source: &str| {
            ChatTemplate::new(source, String::new(), String::new()).expect("it compiles")
        };
        assert!(
            compile("{{ messages | length }}")
                .render_conversation(&odd)
                .is_ok()
        );
        for source in [
            "{{ messages | tojson(indent=1000000000) }}",
            "{{ messages | tojson(separators=',') }}",
            "{{ strftime_now('%Q') }}",
            "{{ '{:1000000000}'.format(1) }}",
            "{% for i in range(100000000) %}x{% endfor %}",
        ] {
            let error = compile(source).render_conversation(&odd).expect_err(source);
            assert!(matches!(error, ChatError::Template(_)), "{source}: {error}");
        }
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
        let error = ChatTemplate::new("{% for %}", String::new(), String::new())
            .err()
            .expect("invalid");
        assert!(error.to_string().starts_with("chat template:"), "{error}");
    }
}
