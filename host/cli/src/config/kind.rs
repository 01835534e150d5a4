//! What a setting's value may be, and how it is written: the one place that reads TOML values and writes them.
//!
//! A value is kept as the JSON that serde makes of the Rust value, so that the typed configuration is one deserialisation.
//! Must never know: which settings there are.

use std::time::Duration;

use serde_json::{Value, json};
use toml::de::DeValue;

/// The kind of a setting's value.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// `true` or `false`.
    Switch,
    /// An integer in a range, with what it counts.
    Count {
        /// What is counted: `steps`, `files`.
        unit: &'static str,
        /// At least.
        min: u64,
        /// At most.
        max: u64,
    },
    /// A number above 0 and at most 1.
    Fraction,
    /// A number; at least, at most.
    Number(f64, f64),
    /// Bytes: an integer, or text as `"4MiB"`; at least, at most.
    Size(u64, u64),
    /// Time: text as `"200ms"`; at least, at most, in nanoseconds.
    Time(u64, u64),
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// Text for which the check has no complaint; what it is.
    Text(&'static str, fn(&str) -> Result<(), String>),
    /// Text that names a place, for which the check has no complaint; a relative path is taken from the file's directory.
    Path(&'static str, fn(&str) -> Result<(), String>),
    /// A list of positive integers.
    Counts(&'static str),
    /// A list of texts, none with a complaint.
    Texts(&'static str, fn(&str) -> Result<(), String>),
    /// A list of places.
    Paths(&'static str),
}

/// Suffixes of sizes, in bytes. The largest that divides is written.
const SIZES: [(&str, u64); 4] = [
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("B", 1),
];
/// Suffixes of times, in nanoseconds. The largest that divides is written.
const TIMES: [(&str, u64); 6] = [
    ("min", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("µs", 1_000),
    ("ns", 1),
];

impl Kind {
    /// Integers of a Rust type that has `bits` bits.
    pub const fn count(unit: &'static str, bits: u32) -> Kind {
        Kind::Count {
            unit,
            min: 0,
            max: u64::MAX >> (64 - bits),
        }
    }

    /// Any text.
    pub const fn text(what: &'static str) -> Kind {
        Kind::Text(what, not_empty)
    }

    /// Any place.
    pub const fn path(what: &'static str) -> Kind {
        Kind::Path(what, not_empty)
    }

    /// The value, or what is wrong with it and what to write.
    pub fn read(self, value: &DeValue<'_>) -> Result<Value, String> {
        let expected = || Err(format!("give {}", self.accepts()));
        match (self, value) {
            (Kind::Switch, DeValue::Boolean(on)) => Ok(json!(on)),
            (Kind::Count { min, max, .. }, DeValue::Integer(_)) => match integer(value) {
                Some(count) if (min..=max).contains(&count) => Ok(json!(count)),
                _ => expected(),
            },
            (Kind::Fraction, DeValue::Float(number)) => match number.as_str().parse::<f64>() {
                Ok(number) if number > 0.0 && number <= 1.0 => Ok(json!(number)),
                _ => expected(),
            },
            (Kind::Fraction, DeValue::Integer(_)) if integer(value) == Some(1) => Ok(json!(1.0)),
            (Kind::Number(min, max), DeValue::Float(_) | DeValue::Integer(_)) => {
                let number = match value {
                    DeValue::Float(number) => number.as_str().parse::<f64>().ok(),
                    _ => integer(value).map(|number| number as f64),
                };
                match number {
                    Some(number) if (min..=max).contains(&number) => Ok(json!(number)),
                    _ => expected(),
                }
            }
            (Kind::Size(min, max), DeValue::Integer(_) | DeValue::String(_)) => {
                let bytes = match value {
                    DeValue::String(text) => amount(text, &SIZES),
                    _ => integer(value),
                };
                match bytes {
                    Some(bytes) if (min..=max).contains(&bytes) => Ok(json!(bytes)),
                    _ => expected(),
                }
            }
            (Kind::Time(min, max), DeValue::String(text)) => match amount(text, &TIMES) {
                Some(time) if (min..=max).contains(&time) => Ok(json!(Duration::from_nanos(time))),
                _ => expected(),
            },
            (Kind::OneOf(words), DeValue::String(text)) if words.contains(&text.as_ref()) => {
                Ok(json!(text))
            }
            (Kind::Text(_, check) | Kind::Path(_, check), DeValue::String(text)) => check(text)
                .map(|()| json!(text))
                .map_err(|problem| format!("{problem}; give {}", self.accepts())),
            (Kind::Counts(_), DeValue::Array(list)) => list
                .iter()
                .map(|item| {
                    integer(item.get_ref()).filter(|n| (1..=u64::from(u32::MAX)).contains(n))
                })
                .collect::<Option<Vec<u64>>>()
                .map_or_else(expected, |list| Ok(json!(list))),
            (Kind::Texts(..) | Kind::Paths(_), DeValue::Array(list)) => {
                let check = match self {
                    Kind::Texts(_, check) => check,
                    _ => not_empty,
                };
                let mut texts = Vec::new();
                for item in list {
                    let Some(text) = item.get_ref().as_str() else {
                        return expected();
                    };
                    check(text).map_err(|problem| format!("{problem}; give {}", self.accepts()))?;
                    texts.push(text);
                }
                Ok(json!(texts))
            }
            _ => expected(),
        }
    }

    /// The value as TOML, in its shortest form. `null` has none.
    pub fn write(self, value: &Value) -> String {
        match self {
            Kind::Size(..) => match value.as_u64() {
                Some(bytes) => quote(&shortest(bytes, &SIZES)),
                None => value.to_string(),
            },
            Kind::Time(..) => match serde_json::from_value::<Duration>(value.clone()) {
                Ok(time) => quote(&shortest(
                    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX),
                    &TIMES,
                )),
                Err(_) => value.to_string(),
            },
            Kind::Count { .. } => value.as_u64().map_or_else(|| value.to_string(), digits),
            _ => toml::Value::try_from(value).map_or_else(|_| value.to_string(), |v| v.to_string()),
        }
    }

    /// What may be written, for messages and documents.
    pub fn accepts(self) -> String {
        match self {
            Kind::Switch => "true or false".to_owned(),
            Kind::Count { unit, min, max } if max >= u64::from(u32::MAX) => match min {
                0 => format!("a whole number of {unit}"),
                _ => format!("a whole number of {unit}, at least {}", digits(min)),
            },
            Kind::Count { unit, min, max } => {
                format!(
                    "a whole number of {unit}, {} to {}",
                    digits(min),
                    digits(max)
                )
            }
            Kind::Fraction => "a number above 0 and at most 1, as 0.9".to_owned(),
            Kind::Number(min, max) => format!("a number from {min} to {max}"),
            Kind::Size(min, max) => format!(
                "a size, as \"4MiB\", \"256KiB\" or a number of bytes, from {} to {}",
                shortest(min, &SIZES),
                shortest(max, &SIZES)
            ),
            Kind::Time(min, max) => format!(
                "a time, as \"200ms\", \"250us\" or \"2s\", from {} to {}",
                shortest(min, &TIMES),
                shortest(max, &TIMES)
            ),
            Kind::OneOf(words) => {
                let words: Vec<String> = words.iter().map(|word| quote(word)).collect();
                format!("one of {}", words.join(", "))
            }
            Kind::Text(what, _) | Kind::Path(what, _) => format!("text: {what}"),
            Kind::Texts(what, _) | Kind::Paths(what) => format!("a list of texts: {what}"),
            Kind::Counts(what) => format!("a list of whole numbers above 0: {what}"),
        }
    }
}

fn not_empty(text: &str) -> Result<(), String> {
    match text {
        "" => Err("is empty".to_owned()),
        _ => Ok(()),
    }
}

/// An integer of the file that is not negative, in any of TOML's notations.
fn integer(value: &DeValue<'_>) -> Option<u64> {
    match value {
        DeValue::Integer(integer) => u64::from_str_radix(integer.as_str(), integer.radix()).ok(),
        _ => None,
    }
}

/// A whole number and a suffix, as `200ms`.
fn amount(text: &str, suffixes: &[(&str, u64)]) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, suffix) = text.split_at(end);
    let (_, each) = suffixes
        .iter()
        .find(|(name, _)| *name == suffix.trim_start())?;
    number.parse::<u64>().ok()?.checked_mul(*each)
}

fn shortest(amount: u64, suffixes: &[(&str, u64)]) -> String {
    let (suffix, each) = suffixes
        .iter()
        .find(|(_, each)| amount >= *each && amount.is_multiple_of(*each))
        .or(suffixes.last())
        .copied()
        .unwrap_or(("", 1));
    format!("{}{suffix}", amount / each)
}

/// A number with TOML's separators: 20_000_000.
fn digits(number: u64) -> String {
    let text = number.to_string();
    let mut grouped = String::new();
    for (index, digit) in text.chars().enumerate() {
        if index > 0 && (text.len() - index).is_multiple_of(3) && text.len() > 4 {
            grouped.push('_');
        }
        grouped.push(digit);
    }
    grouped
}

/// Text as a TOML string.
pub fn quote(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}
