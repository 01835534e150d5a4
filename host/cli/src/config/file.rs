//! One configuration file: read by the table of settings, with every problem and where it stands.
//!
//! Must never know: flags, defaults, or whether numbers suit each other.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::Value;
use toml::de::{DeTable, DeValue};

use super::effective::Layer;
use super::kind::Kind;
use super::settings::{SETTINGS, Setting, TABLES};
use super::{Key, names};
use crate::exit::{Exit, Failure};

/// The largest configuration file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// The longest piece of the file that a problem quotes, in characters.
const QUOTE_CHARS: usize = 60;

/// What is wrong at one place of a file.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Problem {
    /// From 1; 0: it is not in the file.
    pub line: usize,
    /// From 1, in characters; 0: it is not in the file.
    pub column: usize,
    /// The setting or table; empty where the file does not read as TOML.
    pub key: String,
    /// As it is written in the file.
    pub value: String,
    /// What is wrong, and what to write.
    pub problem: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "{}:{}: ", self.line, self.column)?;
        }
        if !self.key.is_empty() {
            f.write_str(&self.key)?;
            if !self.value.is_empty() {
                write!(f, " = {}", self.value)?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&self.problem)
    }
}

/// A file that was read: its settings, and where each stands.
#[derive(Debug)]
pub struct File {
    /// Where it lies, absolute.
    pub path: PathBuf,
    /// Its settings.
    pub layer: Layer,
    text: String,
    /// Where settings' values and tables' names stand, in bytes.
    places: BTreeMap<Key, Range<usize>>,
}

impl File {
    /// The text of a configuration file.
    ///
    /// # Errors
    /// It cannot be read, is not a regular file, is too large, or is no text.
    pub fn text_of(path: &Path) -> Result<String, Failure> {
        let unusable = |what: String| {
            Failure::new(
                Exit::BadInput,
                format!(
                    "configuration {}: {what}; `timetable config default` prints a complete file",
                    path.display()
                ),
            )
        };
        let cannot = |error: std::io::Error| unusable(format!("cannot be read ({error})"));
        // Asked before it is opened: opening a pipe would wait for its other end.
        if !std::fs::metadata(path).map_err(cannot)?.is_file() {
            return Err(unusable("is not a regular file".to_owned()));
        }
        let mut bytes = Vec::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes))
            .map_err(cannot)?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(unusable(format!("has more than {FILE_BYTES_MAX} bytes")));
        }
        String::from_utf8(bytes).map_err(|error| unusable(format!("is not UTF-8 text ({error})")))
    }

    /// Reads `text`, which lies at `path`. Settings with problems are left out of the layer.
    pub fn parse(path: &Path, text: String) -> (File, Vec<Problem>) {
        let mut file = File {
            path: std::path::absolute(path).unwrap_or_else(|_| path.to_owned()),
            layer: Layer::new(),
            text: String::new(),
            places: BTreeMap::new(),
        };
        let (document, errors) = DeTable::parse_recoverable(&text);
        let mut problems: Vec<Problem> = errors
            .iter()
            .map(|error| {
                let (line, column) = position(&text, error.span().map_or(0, |span| span.start));
                Problem {
                    line,
                    column,
                    key: String::new(),
                    value: String::new(),
                    problem: format!("is not TOML: {}", error.message().replace('\n', " ")),
                }
            })
            .collect();
        // One mistake is often many to a parser.
        problems.dedup_by(|next, problem| next.problem == problem.problem);
        // What a parser makes of the rest of a file that is no TOML would be guesses.
        if problems.is_empty() {
            file.walk(&text, document.get_ref(), &Key::default(), &mut problems);
        }
        file.text = text;
        (file, problems)
    }

    fn walk(&mut self, text: &str, table: &DeTable<'_>, above: &Key, problems: &mut Vec<Problem>) {
        let mut entries: Vec<_> = table.iter().collect();
        entries.sort_by_key(|(name, _)| name.span().start);
        for (name, value) in entries {
            let key = above.child(name.get_ref());
            let mut refuse = |span: Range<usize>, value: &str, problem: String| {
                let (line, column) = position(text, span.start);
                problems.push(Problem {
                    line,
                    column,
                    key: key.to_string(),
                    value: one_line(value),
                    problem,
                });
            };
            let written = text.get(value.span()).unwrap_or_default();
            if let Some(setting) = SETTINGS.iter().find(|setting| setting.is_at(&key)) {
                match self.value(setting, value.get_ref()) {
                    Ok(read) => {
                        self.places.insert(key.clone(), value.span());
                        self.layer.insert(key, read);
                    }
                    Err(problem) => refuse(value.span(), written, problem),
                }
                continue;
            }
            if !is_table(&key) {
                let problem = unknown(&key, above);
                refuse(name.span(), "", problem);
                continue;
            }
            if let Some(problem) = names::problem(&above.to_string(), name.get_ref()) {
                refuse(name.span(), "", problem);
                continue;
            }
            match value.get_ref() {
                DeValue::Table(below) => {
                    self.places.insert(key.clone(), name.span());
                    self.walk(text, below, &key, problems);
                }
                _ => refuse(
                    value.span(),
                    written,
                    format!("is a table: write [{key}], and its settings below"),
                ),
            }
        }
    }

    fn value(&self, setting: &Setting, value: &DeValue<'_>) -> Result<Value, String> {
        let read = setting.kind.read(value)?;
        let folder = self.path.parent().unwrap_or(Path::new("."));
        let place = |value: &Value| match value.as_str() {
            Some(path) if !["none", "default"].contains(&path) && !path.contains("://") => {
                Value::from(folder.join(path).to_string_lossy())
            }
            _ => value.clone(),
        };
        Ok(match (setting.kind, &read) {
            (Kind::Path(..), path) => place(path),
            (Kind::Paths(_), Value::Array(paths)) => paths.iter().map(place).collect(),
            _ => read,
        })
    }

    /// What is wrong with the setting or the table `key`, which may be written here, in a table above, or not at all.
    pub fn problem_at(&self, key: &Key, problem: String) -> Problem {
        let mut at = key.clone();
        while at.len() > 0 && !self.places.contains_key(&at) {
            at = at.parent();
        }
        let place = self.places.get(&at);
        let (line, column) = place.map_or((0, 0), |span| position(&self.text, span.start));
        let written = place
            .filter(|_| self.layer.contains_key(key))
            .and_then(|span| self.text.get(span.clone()))
            .unwrap_or_default();
        Problem {
            line,
            column,
            key: key.to_string(),
            value: one_line(written),
            problem,
        }
    }

    /// Its tables, those without settings too.
    pub fn tables(&self) -> impl Iterator<Item = &Key> {
        let places = self.places.keys();
        places.filter(|key| !self.layer.contains_key(key))
    }

    /// The line of a setting in the file, from 1.
    pub fn line(&self, key: &Key) -> Option<usize> {
        let place = self.places.get(key)?;
        Some(position(&self.text, place.start).0)
    }
}

/// Does a setting stand below `key`?
fn is_table(key: &Key) -> bool {
    SETTINGS
        .iter()
        .any(|setting| setting.parts().count() > key.len() && setting.begins_with(key))
}

/// What to say of a key that is neither a setting nor a table.
fn unknown(key: &Key, above: &Key) -> String {
    let name = key.parts().last().unwrap_or_default();
    let mut siblings: Vec<&str> = SETTINGS
        .iter()
        .filter(|setting| setting.parts().count() > above.len() && setting.begins_with(above))
        .filter_map(|setting| setting.parts().nth(above.len()))
        .filter(|name| *name != "*")
        .collect();
    siblings.dedup();
    let is = if above.len() == 0 {
        "is no table"
    } else {
        "is no setting"
    };
    if let Some(nearest) = names::nearest(name, siblings.iter().copied()) {
        return format!("{is}; did you mean {}?", above.child(nearest));
    }
    let elsewhere = SETTINGS.iter().find(|setting| setting.split().1 == name);
    if let Some(setting) = elsewhere {
        return format!("{is} here; it belongs into [{}]", setting.split().0);
    }
    let mut known = siblings.join(", ");
    if above.len() == 0 {
        let mut tables: Vec<&str> = TABLES.iter().map(|(table, _)| *table).collect();
        tables.retain(|table| table.matches('.').count() == usize::from(table.ends_with(".*")));
        known = tables.join(", ");
    }
    format!("{is}; known here: {known}")
}

/// Line and column of a byte, from 1.
fn position(text: &str, byte: usize) -> (usize, usize) {
    let before = text.get(..byte).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    (
        before.matches('\n').count() + 1,
        before[line_start..].chars().count() + 1,
    )
}

/// On one line, and not longer than what is worth reading.
fn one_line(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(QUOTE_CHARS) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}
