//! Reads `host/server/openapi.json`: its operations, and as much of JSON Schema as it uses.
//!
//! It must never know a server.

use serde_json::{Value, json};

/// The description that the server publishes.
pub struct Description(Value);

/// A request that the description allows, by its own example.
pub struct Example<'a> {
    pub path: &'a str,
    pub schema: &'a Value,
    pub body: Value,
}

/// A value within a body: where it stands, and what it has to be.
pub struct Place<'a> {
    /// JSON pointer.
    pub pointer: String,
    pub schema: &'a Value,
}

impl Description {
    pub fn new(text: &str) -> Self {
        Self(serde_json::from_str(text).expect("JSON"))
    }

    /// Path, method and operation of each.
    pub fn operations(&self) -> impl Iterator<Item = (&str, &str, &Value)> {
        members(&self.0["paths"]).flat_map(|(path, methods)| {
            members(methods)
                .map(move |(method, operation)| (path.as_str(), method.as_str(), operation))
        })
    }

    /// One request for each body that an operation takes.
    pub fn examples(&self) -> Vec<Example<'_>> {
        let mut examples = Vec::new();
        for (path, _, operation) in self.operations() {
            let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
            let alone = std::slice::from_ref(schema);
            let alternatives = schema["oneOf"].as_array().map_or(alone, Vec::as_slice);
            for alternative in alternatives.iter().filter(|schema| !schema.is_null()) {
                // By its name, so that it lives as long as the description.
                let schema =
                    self.resolve_name(alternative["$ref"].as_str().expect("a named schema"));
                let body = schema["examples"][0].clone();
                assert!(body.is_object(), "{path} has no example");
                examples.push(Example { path, schema, body });
            }
        }
        examples
    }

    /// The schema of an answer.
    pub fn answer(&self, path: &str, method: &str, status: u16) -> &Value {
        let response = &self.0["paths"][path][method]["responses"][status.to_string()];
        &self.resolve(response)["content"]["application/json"]["schema"]
    }

    fn resolve_name(&self, name: &str) -> &Value {
        let found = self.0.pointer(name.trim_start_matches('#'));
        found.unwrap_or_else(|| panic!("{name} does not exist"))
    }

    fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            Some(name) => self.resolve(self.resolve_name(name)),
            None => schema,
        }
    }

    /// Does `value` have this schema?
    pub fn accepts(&self, schema: &Value, value: &Value) -> bool {
        let schema = self.resolve(schema);
        let all = |name: &str| schema[name].as_array().into_iter().flatten();
        let count = |name: &str| schema[name].as_u64().map(|number| number as usize);
        let within = |least: &str, length: usize, most: &str| {
            count(least).is_none_or(|least| length >= least)
                && count(most).is_none_or(|most| length <= most)
        };
        let own = match value {
            Value::String(text) => within("minLength", text.chars().count(), "maxLength"),
            Value::Number(_) => in_range(schema, value),
            Value::Array(list) => {
                within("minItems", list.len(), "maxItems")
                    && list.iter().all(|item| self.accepts(&schema["items"], item))
            }
            Value::Object(object) => {
                within("minProperties", object.len(), "maxProperties")
                    && all("required")
                        .all(|name| object.contains_key(name.as_str().unwrap_or_default()))
                    && object
                        .iter()
                        .all(|(name, member)| match schema["properties"].get(name) {
                            Some(schema) => self.accepts(schema, member),
                            None => self.accepts(&schema["additionalProperties"], member),
                        })
            }
            Value::Null | Value::Bool(_) => true,
        };
        let number_of = |name: &str| {
            all(name)
                .filter(|schema| self.accepts(schema, value))
                .count()
        };
        own && has_type(schema, value)
            && schema
                .get("enum")
                .is_none_or(|_| all("enum").any(|allowed| allowed == value))
            && schema.get("const").is_none_or(|only| only == value)
            && all("allOf").all(|schema| self.accepts(schema, value))
            && schema.get("oneOf").is_none_or(|_| number_of("oneOf") == 1)
    }

    /// Name and schema of each member that an object may have.
    pub fn properties<'a>(&'a self, schema: &'a Value) -> Vec<(&'a str, &'a Value)> {
        let schema = self.resolve(schema);
        let parts = schema["allOf"].as_array().into_iter().flatten();
        let mut found: Vec<_> = parts.flat_map(|part| self.properties(part)).collect();
        found.extend(members(&schema["properties"]).map(|(name, schema)| (name.as_str(), schema)));
        found
    }

    /// Every place of a body, members that it could have included.
    pub fn places<'a>(&'a self, schema: &'a Value, body: &Value) -> Vec<Place<'a>> {
        let mut places = Vec::new();
        self.descend(schema, body, "", &mut places);
        places
    }

    fn descend<'a>(
        &'a self,
        schema: &'a Value,
        value: &Value,
        at: &str,
        places: &mut Vec<Place<'a>>,
    ) {
        let schema = self.resolve(schema);
        places.push(Place {
            pointer: at.to_owned(),
            schema,
        });
        // Of alternatives, the one that the value is.
        for alternative in schema["oneOf"].as_array().into_iter().flatten() {
            if self.accepts(alternative, value) {
                return self.descend(alternative, value, at, places);
            }
        }
        for (name, schema) in self.properties(schema) {
            let member = value
                .get(name)
                .cloned()
                .unwrap_or_else(|| sample(self.resolve(schema)));
            self.descend(schema, &member, &format!("{at}/{name}"), places);
        }
        if let Some(first) = value.get(0) {
            self.descend(&schema["items"], first, &format!("{at}/0"), places);
        }
    }
}

/// Something that the schema allows, with parts where there can be some.
fn sample(schema: &Value) -> Value {
    match schema["examples"]
        .as_array()
        .and_then(|examples| examples.last())
    {
        Some(example) => example.clone(),
        None if schema.get("properties").is_some() => json!({}),
        None => schema["default"].clone(),
    }
}

fn members(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

fn has_type(schema: &Value, value: &Value) -> bool {
    let is = |name: &str| match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        other => panic!("the type {other} is none"),
    };
    match &schema["type"] {
        Value::Null => true,
        Value::String(name) => is(name),
        names => names
            .as_array()
            .is_some_and(|names| names.iter().any(|name| name.as_str().is_some_and(is))),
    }
}

fn in_range(schema: &Value, value: &Value) -> bool {
    // Whole numbers of 64 bits exactly; a double tells no neighbours apart there.
    let whole = |value: &Value| {
        value
            .as_i64()
            .map(i128::from)
            .or(value.as_u64().map(i128::from))
    };
    let less = |a: &Value, b: &Value| match (whole(a), whole(b)) {
        (Some(a), Some(b)) => a < b,
        _ => a.as_f64() < b.as_f64(),
    };
    schema
        .get("minimum")
        .is_none_or(|least| !less(value, least))
        && schema.get("maximum").is_none_or(|most| !less(most, value))
        && schema
            .get("exclusiveMinimum")
            .is_none_or(|below| less(below, value))
}
