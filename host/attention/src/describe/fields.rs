//! Reads fields out of a JSON object, each with an error that names it.

use serde_json::{Map, Value};
use timetable_types::Causal;

use super::DescriptionError;

/// The largest list that is read: far above any step, far below memory.
const MAX_LIST: usize = 1 << 26;

pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(object: &'a Map<String, Value>) -> Self {
        Fields { object }
    }

    /// The field, unless it is absent or null.
    pub(super) fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    fn required(&self, field: &str, remedy: &'static str) -> Result<&'a Value, DescriptionError> {
        self.get(field).ok_or_else(|| DescriptionError::Missing {
            field: field.to_owned(),
            remedy,
        })
    }

    pub(super) fn required_u32(
        &self,
        field: &str,
        remedy: &'static str,
    ) -> Result<u32, DescriptionError> {
        let value = integer(field, self.required(field, remedy)?, 0, i32::MAX.into())?;
        Ok(value as u32)
    }

    pub(super) fn optional_u32(&self, field: &str) -> Result<Option<u32>, DescriptionError> {
        self.get(field)
            .map(|value| integer(field, value, 0, i32::MAX.into()).map(|value| value as u32))
            .transpose()
    }

    pub(super) fn required_i32s(
        &self,
        field: &str,
        remedy: &'static str,
    ) -> Result<Vec<i32>, DescriptionError> {
        i32s(field, self.required(field, remedy)?, 0)
    }

    pub(super) fn optional_i32s(&self, field: &str) -> Result<Option<Vec<i32>>, DescriptionError> {
        self.get(field)
            .map(|value| i32s(field, value, 0))
            .transpose()
    }

    /// A list, or the text that says it equals another field; none for that and for absence.
    pub(super) fn same_or_i32s(
        &self,
        field: &str,
        same: &str,
    ) -> Result<Option<Vec<i32>>, DescriptionError> {
        match self.get(field) {
            Some(Value::String(text)) if text == same => Ok(None),
            other => other.map(|value| i32s(field, value, 0)).transpose(),
        }
    }

    pub(super) fn required_i64s(
        &self,
        field: &str,
        remedy: &'static str,
        low: i64,
    ) -> Result<Vec<i64>, DescriptionError> {
        integers(field, self.required(field, remedy)?, low, i64::MAX)
    }

    pub(super) fn optional_i64s(
        &self,
        field: &str,
        low: i64,
    ) -> Result<Option<Vec<i64>>, DescriptionError> {
        self.get(field)
            .map(|value| integers(field, value, low, i64::MAX))
            .transpose()
    }

    pub(super) fn flags(&self, field: &str) -> Result<Option<Vec<u8>>, DescriptionError> {
        self.get(field)
            .map(|value| flag_list(field, value))
            .transpose()
    }

    pub(super) fn causal(&self) -> Result<(Causal, Option<Vec<i32>>), DescriptionError> {
        super::causal_of(self.get("causal"))
    }

    /// `block_table`, or `block_table_tensor` as the field spells it: rows of one width. Row-major ids and the width.
    pub(super) fn block_table(&self, rows: usize) -> Result<(Vec<i32>, usize), DescriptionError> {
        let field = match (self.get("block_table"), self.get("block_table_tensor")) {
            (Some(_), Some(_)) => {
                return Err(DescriptionError::Inconsistent {
                    field: "block_table".to_owned(),
                    value: "given".to_owned(),
                    other: "block_table_tensor is its other name and given too".to_owned(),
                });
            }
            (None, Some(_)) => "block_table_tensor",
            _ => "block_table",
        };
        let table = list(
            field,
            self.required(field, "a list of R rows of block ids")?,
        )?;
        if table.len() != rows {
            return Err(DescriptionError::Inconsistent {
                field: field.to_owned(),
                value: format!("{} rows", table.len()),
                other: format!("seq_lens has {rows} entries"),
            });
        }
        let mut data = Vec::new();
        let mut width = 0;
        for (row, ids) in table.iter().enumerate() {
            let field = format!("{field}[{row}]");
            let ids = i32s(&field, ids, 0)?;
            if row == 0 {
                width = ids.len();
            } else if ids.len() != width {
                return Err(DescriptionError::Inconsistent {
                    field,
                    value: format!("{} columns", ids.len()),
                    other: format!("the first row has {width}"),
                });
            }
            data.extend(ids);
        }
        Ok((data, width))
    }
}

/// A value that is not what the field takes; long values are cut.
pub(super) fn wrong(field: &str, value: &Value, remedy: &str) -> DescriptionError {
    let mut text = value.to_string();
    if let Some((cut, _)) = text.char_indices().nth(60) {
        text.truncate(cut);
        text.push('…');
    }
    DescriptionError::Value {
        field: field.to_owned(),
        value: text,
        remedy: remedy.to_owned(),
    }
}

pub(super) fn integer(
    field: &str,
    value: &Value,
    low: i64,
    high: i64,
) -> Result<i64, DescriptionError> {
    match value.as_i64() {
        Some(found) if (low..=high).contains(&found) => Ok(found),
        _ => Err(wrong(
            field,
            value,
            &format!("an integer in {low}..={high}"),
        )),
    }
}

pub(super) fn list<'v>(field: &str, value: &'v Value) -> Result<&'v [Value], DescriptionError> {
    match value {
        Value::Array(list) if list.len() <= MAX_LIST => Ok(list),
        other => Err(wrong(field, other, "a list")),
    }
}

fn integers(field: &str, value: &Value, low: i64, high: i64) -> Result<Vec<i64>, DescriptionError> {
    list(field, value)?
        .iter()
        .enumerate()
        .map(|(index, value)| match value.as_i64() {
            Some(found) if (low..=high).contains(&found) => Ok(found),
            _ => integer(&format!("{field}[{index}]"), value, low, high),
        })
        .collect()
}

pub(super) fn i32s(field: &str, value: &Value, low: i64) -> Result<Vec<i32>, DescriptionError> {
    let values = integers(field, value, low, i32::MAX.into())?;
    Ok(values.into_iter().map(|value| value as i32).collect())
}

/// A list of true, false, 0 and 1.
pub(super) fn flag_list(field: &str, value: &Value) -> Result<Vec<u8>, DescriptionError> {
    list(field, value)?
        .iter()
        .enumerate()
        .map(|(index, value)| match value {
            Value::Bool(flag) => Ok(u8::from(*flag)),
            other => match other.as_i64() {
                Some(flag @ 0..=1) => Ok(flag as u8),
                _ => Err(wrong(&format!("{field}[{index}]"), other, "true or false")),
            },
        })
        .collect()
}
