//! A conversation as clients send it: JSON whose members keep their order, because templates write tools out as they came.
//!
//! Knows the shape of messages, not templates.

use std::{fmt, sync::Arc};

use minijinja::value::{Enumerator, Object, Value};
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};

/// Messages, tools and what else a template is given.
#[derive(Debug, Clone, Deserialize)]
pub struct Conversation {
    messages: Vec<Node>,
    #[serde(default)]
    tools: Option<Vec<Node>>,
    #[serde(default)]
    chat_template_kwargs: Option<Node>,
    #[serde(default)]
    add_generation_prompt: Option<bool>,
}

impl Conversation {
    /// Reads `messages`, `tools`, `chat_template_kwargs` and `add_generation_prompt` of a chat completion request's body; what
    /// else it has is left alone. A message's content in parts is put together, a line each, and one that is missing or null
    /// is empty; the role `developer` is `system`, which templates know; arguments of tool calls are read where they are JSON.
    ///
    /// # Errors
    /// If it is not JSON of that shape.
    pub fn from_request(body: &[u8]) -> Result<Self, serde_json::Error> {
        let mut this: Self = serde_json::from_slice(body)?;
        for message in &mut this.messages {
            message.normalise();
        }
        Ok(this)
    }

    /// Keeps the tools from the template.
    pub fn forget_tools(&mut self) {
        self.tools = None;
    }

    /// Does the text end where the assistant's answer begins? Unless the request says no.
    pub(super) fn add_generation_prompt(&self) -> bool {
        self.add_generation_prompt.unwrap_or(true)
    }

    /// For templates, which ask whether there are tools.
    pub(super) fn tools(&self) -> Option<Value> {
        let tools = self.tools.as_ref().filter(|tools| !tools.is_empty())?;
        Some(tools.iter().map(Node::value).collect())
    }

    pub(super) fn messages(&self) -> Value {
        self.messages.iter().map(Node::value).collect()
    }

    /// Further variables, by name.
    pub(super) fn variables(&self) -> impl Iterator<Item = (&str, Value)> {
        let members = match &self.chat_template_kwargs {
            Some(Node::Map(members)) => members.as_slice(),
            _ => &[],
        };
        members
            .iter()
            .map(|(name, node)| (name.as_str(), node.value()))
    }
}

/// JSON with its members in order.
#[derive(Debug, Clone)]
enum Node {
    Leaf(Value),
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
}

impl Node {
    fn text(text: &str) -> Self {
        Self::Leaf(Value::from(text))
    }

    fn as_str(&self) -> Option<&str> {
        match self {
            Self::Leaf(value) => value.as_str(),
            _ => None,
        }
    }

    fn get(&self, name: &str) -> Option<&Node> {
        match self {
            Self::Map(members) => members.iter().find(|member| member.0 == name),
            _ => None,
        }
        .map(|member| &member.1)
    }

    fn get_mut(&mut self, name: &str) -> Option<&mut Node> {
        match self {
            Self::Map(members) => members.iter_mut().find(|member| member.0 == name),
            _ => None,
        }
        .map(|member| &mut member.1)
    }

    fn value(&self) -> Value {
        match self {
            Self::Leaf(value) => value.clone(),
            Self::List(nodes) => nodes.iter().map(Node::value).collect(),
            Self::Map(members) => {
                let members = members.iter();
                let members = members.map(|(name, node)| (Value::from(name), node.value()));
                Value::from_object(Ordered(members.collect()))
            }
        }
    }

    /// A message as templates expect it.
    fn normalise(&mut self) {
        if let Some(role) = self.get_mut("role")
            && role.as_str() == Some("developer")
        {
            *role = Self::text("system");
        }
        let content = match self.get("content") {
            Some(Self::List(parts)) => {
                let texts = parts.iter().filter_map(|part| part.get("text")?.as_str());
                Some(texts.collect::<Vec<_>>().join("\n"))
            }
            Some(Self::Leaf(value)) if value.is_none() => Some(String::new()),
            None => Some(String::new()),
            Some(_) => None,
        };
        if let (Some(text), Self::Map(members)) = (content, &mut *self) {
            match members.iter_mut().find(|member| member.0 == "content") {
                Some(member) => member.1 = Self::text(&text),
                None => members.push(("content".to_owned(), Self::text(&text))),
            }
        }
        let Some(Self::List(calls)) = self.get_mut("tool_calls") else {
            return;
        };
        for call in calls {
            let arguments = call.get_mut("function");
            let Some(arguments) = arguments.and_then(|function| function.get_mut("arguments"))
            else {
                continue;
            };
            if let Some(text) = arguments.as_str()
                && let Ok(read @ Self::Map(_)) = serde_json::from_str(text)
            {
                *arguments = read;
            }
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Leaf(Value::from(())))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Leaf(Value::from(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Leaf(Value::from(value)))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Leaf(Value::from(value)))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Node, E> {
        Ok(Node::Leaf(Value::from(value)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Node, E> {
        Ok(Node::text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let mut nodes = Vec::new();
        while let Some(node) = access.next_element()? {
            nodes.push(node);
        }
        Ok(Node::List(nodes))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let mut members: Vec<(String, Node)> = Vec::new();
        while let Some(member) = access.next_entry()? {
            members.push(member);
        }
        Ok(Node::Map(members))
    }
}

/// A template's view of an object. Of a name that occurs twice the last one counts, as for Python.
#[derive(Debug)]
struct Ordered(Vec<(Value, Value)>);

impl Object for Ordered {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let member = self.0.iter().rev().find(|member| member.0 == *key);
        member.map(|member| member.1.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|member| member.0.clone()).collect())
    }
}
