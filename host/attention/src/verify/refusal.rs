//! What a refusal says: the field, the row, the value and the bound, on one line.

use std::fmt;

/// Why a step or a builder's metadata is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The record that the field belongs to, where it is not the outermost: "decode", "schedule", …; empty otherwise.
    pub part: &'static str,
    /// The field.
    pub field: &'static str,
    /// The row, item or element, where the field is a vector.
    pub row: Option<u32>,
    /// What it held.
    pub value: i64,
    /// The rule that it broke.
    pub rule: Rule,
    /// What the rule compares with.
    pub bound: i64,
}

/// How a value must stand to its bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Equal to it.
    Equal,
    /// Not below it.
    AtLeast,
    /// Not above it.
    AtMost,
    /// Below it.
    Below,
    /// A multiple of it.
    MultipleOf,
    /// One of a few, which are named.
    OneOf(&'static str),
    /// Not the same as an earlier element.
    Once,
    /// As many elements as the bound says.
    Length,
    /// One of the values that the configuration allows.
    Configured,
    /// The host's tensor of that name, by reference.
    Reference(&'static str),
    /// Present.
    Present,
    /// Absent.
    Absent,
    /// Selected blocks without the operator's grant.
    Granted,
}

impl Refusal {
    pub(super) fn new(field: &'static str, value: i64, rule: Rule, bound: i64) -> Self {
        Refusal {
            part: "",
            field,
            row: None,
            value,
            rule,
            bound,
        }
    }

    pub(super) fn at(field: &'static str, row: usize, value: i64, rule: Rule, bound: i64) -> Self {
        Refusal {
            row: Some(u32::try_from(row).unwrap_or(u32::MAX)),
            ..Refusal::new(field, value, rule, bound)
        }
    }

    pub(super) fn reference(field: &'static str, input: &'static str) -> Self {
        Refusal::new(field, 0, Rule::Reference(input), 0)
    }

    pub(super) fn missing(field: &'static str) -> Self {
        Refusal::new(field, 0, Rule::Present, 1)
    }

    /// The field belongs to `part`, unless an inner record said so already.
    pub(super) fn within(self, part: &'static str) -> Self {
        if self.part.is_empty() {
            Refusal { part, ..self }
        } else {
            self
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.part.is_empty() {
            write!(f, "{}.", self.part)?;
        }
        f.write_str(self.field)?;
        if let Some(row) = self.row {
            write!(f, "[{row}]")?;
        }
        let (value, bound) = (self.value, self.bound);
        match self.rule {
            Rule::Equal => write!(f, " is {value}, must be {bound}"),
            Rule::AtLeast => write!(f, " is {value}, must be at least {bound}"),
            Rule::AtMost => write!(f, " is {value}, must be at most {bound}"),
            Rule::Below => write!(f, " is {value}, must be below {bound}"),
            Rule::MultipleOf => write!(f, " is {value}, must be a positive multiple of {bound}"),
            Rule::OneOf(values) => write!(f, " is {value}, must be one of {values}"),
            Rule::Once => write!(f, " is {value}, which occurred before; each may occur once"),
            Rule::Length => write!(f, " has {value} elements, must have {bound}"),
            Rule::Configured => write!(f, " is {value}, must be as configured ({bound})"),
            Rule::Reference(input) => write!(f, " must refer to the step's own {input}"),
            Rule::Present => write!(f, " is missing"),
            Rule::Absent => write!(f, " is given, must be absent"),
            Rule::Granted => write!(
                f,
                " selects blocks without the grant `subset`; ask the operator to grant it"
            ),
        }
    }
}

impl std::error::Error for Refusal {}

/// `value == bound`.
pub(super) fn equal(
    field: &'static str,
    value: impl Into<i64>,
    bound: impl Into<i64>,
) -> Result<(), Refusal> {
    let (value, bound) = (value.into(), bound.into());
    if value == bound {
        Ok(())
    } else {
        Err(Refusal::new(field, value, Rule::Equal, bound))
    }
}

/// `low <= value <= high`.
pub(super) fn between(
    field: &'static str,
    value: impl Into<i64>,
    low: impl Into<i64>,
    high: impl Into<i64>,
) -> Result<(), Refusal> {
    let (value, low, high) = (value.into(), low.into(), high.into());
    if value < low {
        Err(Refusal::new(field, value, Rule::AtLeast, low))
    } else if value > high {
        Err(Refusal::new(field, value, Rule::AtMost, high))
    } else {
        Ok(())
    }
}

/// `len` elements where `wanted` are needed.
pub(super) fn length(field: &'static str, len: usize, wanted: usize) -> Result<(), Refusal> {
    if len == wanted {
        Ok(())
    } else {
        Err(Refusal::new(field, len as i64, Rule::Length, wanted as i64))
    }
}

/// A value that the configuration fixes and that is no integer, such as a dtype.
pub(super) fn configured(
    field: &'static str,
    holds: bool,
    value: i64,
    bound: i64,
) -> Result<(), Refusal> {
    if holds {
        Ok(())
    } else {
        Err(Refusal::new(field, value, Rule::Configured, bound))
    }
}

/// Must be absent.
pub(super) fn absent(field: &'static str, is_some: bool) -> Result<(), Refusal> {
    if is_some {
        Err(Refusal::new(field, 1, Rule::Absent, 0))
    } else {
        Ok(())
    }
}

/// Must be present.
pub(super) fn present<'t, T>(field: &'static str, value: &'t Option<T>) -> Result<&'t T, Refusal> {
    value.as_ref().ok_or(Refusal::missing(field))
}
