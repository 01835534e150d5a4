//! A request's body, field by field: each error names its field, with the value and what to give instead.
//!
//! `null` is as good as absent, and what nobody asks for is ignored, as the field's servers do. Must never know: what a field
//! means.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::json::Json;

/// Characters of a value that an error repeats.
const SHOWN: usize = 60;

/// The members of a JSON object.
pub struct Fields(Map<String, Value>);

impl Fields {
    /// Of a body.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body).map(|Json(value)| value) {
            Ok(Value::Object(members)) => Ok(Fields(members)),
            Ok(other) => Err(ApiError::bad(format!(
                "the body is {}; give a JSON object",
                shown(&other)
            ))),
            Err(error) => Err(ApiError::bad(format!(
                "the body is not JSON: {error}; give a JSON object"
            ))),
        }
    }

    /// Of a field that is an object itself.
    pub fn object(&mut self, name: &str) -> Result<Option<Fields>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(members)) => Ok(Some(Fields(members))),
            Some(other) => Err(wrong(name, &other, "an object")),
        }
    }

    /// All fields.
    pub fn members(&self) -> &Map<String, Value> {
        &self.0
    }

    /// The field, unless it is absent or `null`.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    /// Is it there, and not `null`?
    pub fn has(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| !value.is_null())
    }

    /// A text.
    pub fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(name, &other, "a string")),
        }
    }

    /// `true` or `false`.
    pub fn flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(wrong(name, &other, "true or false")),
        }
    }

    /// A whole number.
    pub fn integer(
        &mut self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        match integer(&value).filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(wrong(name, &value, &integers(&range))),
        }
    }

    /// A number.
    pub fn number(
        &mut self,
        name: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        match value.as_f64().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                let (low, high) = (range.start(), range.end());
                Err(wrong(
                    name,
                    &value,
                    &format!("a number from {low} to {high}"),
                ))
            }
        }
    }

    /// Refuses a field that this server does not do, unless its value asks for nothing.
    pub fn refuse(
        &mut self,
        name: &str,
        asks_nothing: impl Fn(&Value) -> bool,
        why: &str,
    ) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !asks_nothing(&value) => Err(ApiError::unsupported(
                name,
                format!("`{name}` is {}: {why}", shown(&value)),
            )),
            _ => Ok(()),
        }
    }
}

/// A list of token ids.
pub fn token_ids(name: &str, list: &[Value]) -> Result<Vec<u32>, ApiError> {
    list.iter()
        .map(|value| {
            let id = integer(value).and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| wrong(name, value, "a list of token ids"))
        })
        .collect()
}

/// `name` is `value`, and should be `wanted`.
pub fn wrong(name: &str, value: &Value, wanted: &str) -> ApiError {
    ApiError::field(name, format!("`{name}` is {}; give {wanted}", shown(value)))
}

/// The value in an error: its beginning, on one line.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Array(list) => return format!("a list of {}", list.len()),
        Value::Object(_) => return "an object".to_owned(),
        _ => {}
    }
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// A whole number; 5.0 is one.
fn integer(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        let number = value.as_f64()?;
        // Above, a double no longer tells whole numbers apart.
        (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64)
    })
}

fn integers(range: &RangeInclusive<i64>) -> String {
    match (*range.start(), *range.end()) {
        (i64::MIN, i64::MAX) => "a whole number".to_owned(),
        (low, i64::MAX) => format!("a whole number of at least {low}"),
        (low, high) => format!("a whole number from {low} to {high}"),
    }
}
