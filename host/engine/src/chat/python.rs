//! What templates expect of Python and of transformers beyond Jinja: JSON as `json.dumps` writes it, the date, an exception.
//!
//! Knows no conversation.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{
    Environment, Error, ErrorKind,
    value::{Kwargs, Value, ValueKind},
};

/// Spaces of a level of indented JSON, at most: a template must not make huge texts in one step.
const MAX_INDENT: usize = 16;

/// Adds the functions and filters.
pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_function(
        "raise_exception",
        |message: String| -> Result<String, Error> { Err(invalid(message)) },
    );
    environment.add_function("strftime_now", |format: String| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        strftime(&format, now.map_or(0, |now| now.as_secs()))
    });
    environment.add_filter("tojson", to_json);
}

/// `{% generation %}` blocks mark what a trainer learns from. They change no text, and Jinja without transformers' extension
/// does not know them.
pub(super) fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let word = tag.trim_matches(|c: char| "{%}-+".contains(c) || c.is_whitespace());
        match word {
            "generation" => out.push_str(&tag.replace(word, "if true")),
            "endgeneration" => out.push_str(&tag.replace(word, "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out + rest
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// transformers' `tojson`: Python's separators, nothing escaped for HTML, text as it is.
#[allow(
    clippy::needless_pass_by_value,
    reason = "a filter's arguments are its own"
)]
fn to_json(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    kwargs.assert_all_used()?;
    if ascii == Some(true) {
        return Err(invalid("tojson with ensure_ascii is not there".to_owned()));
    }
    if let Some(indent) = indent.filter(|&indent| indent > MAX_INDENT) {
        return Err(invalid(format!(
            "tojson with an indent of {indent}, above {MAX_INDENT}"
        )));
    }
    let mut out = String::new();
    write_json(value, indent, 0, &mut out)?;
    Ok(Value::from_safe_string(out))
}

fn write_json(
    value: &Value,
    indent: Option<usize>,
    depth: usize,
    out: &mut String,
) -> Result<(), Error> {
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    let separator = if indent.is_some() { "," } else { ", " };
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => out.push_str("null"),
        // Shown by itself it is Python's `True`.
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&value.to_string()),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            let mut is_empty = true;
            for item in value.try_iter()? {
                if !is_empty {
                    out.push_str(separator);
                }
                is_empty = false;
                line(out, depth + 1);
                write_json(&item, indent, depth + 1, out)?;
            }
            if !is_empty {
                line(out, depth);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            let mut is_empty = true;
            for key in value.try_iter()? {
                if !is_empty {
                    out.push_str(separator);
                }
                is_empty = false;
                line(out, depth + 1);
                write_text(&key, out)?;
                out.push_str(": ");
                write_json(&value.get_item(&key)?, indent, depth + 1, out)?;
            }
            if !is_empty {
                line(out, depth);
            }
            out.push('}');
        }
        _ => write_text(value, out)?,
    }
    Ok(())
}

fn write_text(value: &Value, out: &mut String) -> Result<(), Error> {
    let text = serde_json::to_string(&value.to_string());
    out.push_str(&text.map_err(|error| invalid(error.to_string()))?);
    Ok(())
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
];

/// A moment, in seconds since 1970, as a format of `strftime` says, in UTC.
fn strftime(format: &str, seconds: u64) -> Result<String, Error> {
    let days = seconds / 86_400;
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let month_name = MONTHS[month as usize - 1];
    // 1970 began on a Thursday.
    let day_name = DAYS[(days as usize + 3) % 7];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out += &year.to_string(),
            Some('y') => out += &format!("{:02}", year % 100),
            Some('m') => out += &format!("{month:02}"),
            Some('B') => out += month_name,
            Some('b') => out += &month_name[..3],
            Some('d') => out += &format!("{day:02}"),
            Some('A') => out += day_name,
            Some('a') => out += &day_name[..3],
            Some('H') => out += &format!("{hour:02}"),
            Some('M') => out += &format!("{minute:02}"),
            Some('S') => out += &format!("{second:02}"),
            Some('%') => out.push('%'),
            other => {
                let other = other.map(String::from).unwrap_or_default();
                return Err(invalid(format!("strftime_now does not know `%{other}`")));
            }
        }
    }
    Ok(out)
}

/// Year, month and day of a day since 1970-01-01, in the Gregorian calendar: whole years, then whole months.
fn civil(mut days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = |seconds| strftime("%a %A %d %b %B %Y %y-%m-%d %H:%M:%S %%", seconds).unwrap();
        assert_eq!(
            at(0),
            "Thu Thursday 01 Jan January 1970 70-01-01 00:00:00 %"
        );
        assert_eq!(
            at(951_827_696),
            "Tue Tuesday 29 Feb February 2000 00-02-29 12:34:56 %"
        );
        assert_eq!(
            at(1_798_761_599),
            "Thu Thursday 31 Dec December 2026 26-12-31 23:59:59 %"
        );
        assert!(strftime("%Q", 0).is_err() && strftime("%", 0).is_err());
    }

    #[test]
    fn generation_blocks_become_plain_ones() {
        let source = "a{%- generation -%}b{% endgeneration %}c{% if x %}generation{% endif %}{% d";
        assert_eq!(
            without_generation_blocks(source),
            "a{%- if true -%}b{% endif %}c{% if x %}generation{% endif %}{% d"
        );
    }
}
