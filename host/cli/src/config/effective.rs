//! Flags over file over defaults: each setting's value and where it came from, and the typed configuration that they make.
//!
//! Must never know: how a file or a command line is read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::file::{File, Problem};
use super::settings::{SETTINGS, Setting, TABLES};
use super::{BuilderSettings, Config, Key, TenantSettings};
use crate::exit::{Exit, Failure};

/// Settings that one source gives.
pub type Layer = BTreeMap<Key, Value>;

/// Where a value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The code.
    Default,
    /// The file, at this line.
    File(usize),
    /// The command line, with this flag.
    Flag(&'static str),
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::Default => f.write_str("default"),
            Source::File(line) => write!(f, "file, line {line}"),
            Source::Flag(flag) => write!(f, "flag {flag}"),
        }
    }
}

/// One setting's value in force.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its row of the table.
    pub setting: &'static Setting,
    /// As serde has it; null: it has none.
    pub value: Value,
    /// From where.
    pub source: Source,
}

impl Entry {
    /// The value as TOML; a dash where there is none.
    pub fn written(&self) -> String {
        if self.value.is_null() {
            return "-".to_owned();
        }
        self.setting.kind.write(&self.value)
    }
}

/// A setting that is to change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Which.
    pub key: Key,
    /// As TOML; a dash: there was none.
    pub from: String,
    /// As TOML; a dash: there is none any more.
    pub to: String,
    /// Can it change while the host runs?
    pub live: bool,
}

/// The configuration in force.
#[derive(Clone, Debug)]
pub struct Effective {
    /// As the program uses it.
    pub config: Config,
    entries: BTreeMap<Key, Entry>,
}

impl Effective {
    /// Lays `flags` over `file` over the defaults.
    ///
    /// # Errors
    /// Numbers that do not suit each other, each with its place in the file if it has one.
    pub fn new(file: Option<&File>, flags: &Layer) -> Result<Effective, Vec<Problem>> {
        let nothing = Layer::new();
        let layer = file.map_or(&nothing, |file| &file.layer);
        let tables = file.into_iter().flat_map(File::tables);
        let mut entries = defaults(layer.keys().chain(flags.keys()).chain(tables));
        let given = layer.iter().map(|(key, value)| {
            let line = file.and_then(|file| file.line(key)).unwrap_or(0);
            (key, value, Source::File(line))
        });
        let flags = flags.iter().map(|(key, value)| {
            // What has no flag of its own is part of a policy that flags state whole.
            let flag = setting(key).and_then(|setting| setting.flag);
            (key, value, Source::Flag(flag.unwrap_or("--trusted-key")))
        });
        for (key, value, source) in given.chain(flags) {
            if let Some(setting) = setting(key) {
                let value = value.clone();
                entries.insert(
                    key.clone(),
                    Entry {
                        setting,
                        value,
                        source,
                    },
                );
            }
        }
        let problem =
            |key: &Key, text: String| match (entries.get(key).map(|entry| entry.source), file) {
                (Some(Source::Flag(flag)), _) => Problem {
                    line: 0,
                    column: 0,
                    key: flag.to_owned(),
                    value: String::new(),
                    problem: text,
                },
                (_, Some(file)) => file.problem_at(key, text),
                (_, None) => Problem {
                    line: 0,
                    column: 0,
                    key: key.to_string(),
                    value: String::new(),
                    problem: text,
                },
            };
        let config: Config = serde_json::from_value(nested(&entries))
            .map_err(|error| vec![problem(&Key::default(), error.to_string())])?;
        let problems: Vec<Problem> = config
            .problems()
            .into_iter()
            .map(|(key, text)| problem(&key, text))
            .collect();
        if problems.is_empty() {
            Ok(Effective { config, entries })
        } else {
            Err(problems)
        }
    }

    /// The same from a file's path, and the flags as they are over that file.
    ///
    /// # Errors
    /// The file cannot be read, or has problems: the first, and how many more. What is wrong with the flags.
    pub fn load(
        path: Option<&Path>,
        flags: impl Fn(Option<&Layer>) -> Result<Layer, Failure>,
    ) -> Result<Effective, Failure> {
        let Some(path) = path else {
            return Effective::new(None, &flags(None)?).map_err(|p| refused(None, &p));
        };
        let (file, problems) = File::parse(path, File::text_of(path)?);
        if !problems.is_empty() {
            return Err(refused(Some(path), &problems));
        }
        Effective::new(Some(&file), &flags(Some(&file.layer))?)
            .map_err(|problems| refused(Some(path), &problems))
    }

    /// Every setting, in the order of the table; the tables of one name together.
    pub fn entries(&self) -> Vec<(&Key, &Entry)> {
        let mut entries: Vec<_> = self.entries.iter().collect();
        let table = |key: &Key| {
            let first = key.parts().next().unwrap_or_default();
            TABLES
                .iter()
                .position(|(table, _)| table.split('.').next() == Some(first))
        };
        let row = |entry: &Entry| SETTINGS.iter().position(|s| std::ptr::eq(s, entry.setting));
        entries.sort_by_cached_key(|(key, entry)| {
            let name = match entry.setting.parts().nth(1) {
                Some("*") => key.parts().nth(1).unwrap_or_default().to_owned(),
                _ => String::new(),
            };
            (table(key), name, row(entry), (*key).clone())
        });
        entries
    }

    /// The settings whose value is not the default.
    pub fn changed(&self) -> Vec<(&Key, &Entry)> {
        let defaults = defaults(self.entries.keys());
        let mut entries = self.entries();
        entries.retain(|(key, entry)| {
            defaults.get(*key).map(|entry| &entry.value) != Some(&entry.value)
        });
        entries
    }

    /// The settings in which `self` and `after` differ.
    pub fn difference(&self, after: &Effective) -> Vec<Change> {
        let keys: BTreeSet<&Key> = self.entries.keys().chain(after.entries.keys()).collect();
        keys.into_iter()
            .filter_map(|key| {
                let (old, new) = (self.entries.get(key), after.entries.get(key));
                let setting = old.or(new)?.setting;
                // A tenant that comes or goes is said, even where all of it is the default.
                let comes_or_goes =
                    setting.key == "tenants.*.share" && old.is_some() != new.is_some();
                // A table that is not there means its defaults.
                let absent = || Entry {
                    setting,
                    value: match comes_or_goes {
                        true => Value::Null,
                        false => default_of(setting),
                    },
                    source: Source::Default,
                };
                let old = old.cloned().unwrap_or_else(absent);
                let new = new.cloned().unwrap_or_else(absent);
                (old.value != new.value).then(|| Change {
                    key: key.clone(),
                    from: old.written(),
                    to: new.written(),
                    live: self.changes_live(after, key, setting),
                })
            })
            .collect()
    }

    /// May the setting at `key` become what it is in `after` while the host runs? A tenant's builder only if there is one before
    /// and after.
    fn changes_live(&self, after: &Effective, key: &Key, setting: &Setting) -> bool {
        let own_builder = |config: &Config| {
            let tenant = key.parts().nth(1).unwrap_or_default();
            let tenant = config.tenants.get(tenant);
            tenant.is_some_and(|tenant| tenant.builder.component.is_some())
        };
        let of_tenant = key.parts().next() == Some("tenants");
        setting.live && (!of_tenant || own_builder(&self.config) && own_builder(&after.config))
    }

    /// `after` as far as it can be had while the host runs: what needs a restart stays as it is here.
    pub fn live(&self, after: &Effective) -> Result<Effective, String> {
        let live = |key: &Key, entry: &Entry| self.changes_live(after, key, entry.setting);
        let mut entries = after.entries.clone();
        entries.retain(|key, entry| live(key, entry));
        let stay = self.entries.iter().filter(|(key, entry)| !live(key, entry));
        entries.extend(stay.map(|(key, entry)| (key.clone(), entry.clone())));
        let config: Config =
            serde_json::from_value(nested(&entries)).map_err(|error| error.to_string())?;
        match config.problems().into_iter().next() {
            Some((key, problem)) => Err(format!(
                "{key}, with what changes only at a restart as it is: {problem}"
            )),
            None => Ok(Effective { config, entries }),
        }
    }

    /// The configuration as data: `{"limits.watchdog": {"value": …, "source": …}}`.
    pub fn json(&self) -> Value {
        self.entries()
            .into_iter()
            .map(|(key, entry)| {
                let value = if entry.value.is_null() {
                    Value::Null
                } else {
                    json!(entry.written())
                };
                let said = json!({
                    "value": value,
                    "source": entry.source.to_string(),
                    "live": entry.setting.live,
                });
                (key.to_string(), said)
            })
            .collect::<Map<String, Value>>()
            .into()
    }
}

/// The setting at `key`.
pub fn setting(key: &Key) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.is_at(key))
}

/// A configuration of defaults as serde has it, with a table `*`, and an entry `*` without a value, wherever the operator
/// chooses names.
pub fn sample() -> Value {
    let mut sample = Config::default();
    sample
        .builders
        .insert("*".to_owned(), BuilderSettings::default());
    sample
        .tenants
        .insert("*".to_owned(), TenantSettings::default());
    let mut sample = serde_json::to_value(sample).unwrap_or_default();
    for table in ["builders", "tenants"] {
        sample[table]["*"]["options"]["*"] = Value::Null;
    }
    sample
}

/// The default of a setting, as serde has it; null: none.
pub fn default_of(setting: &Setting) -> Value {
    let sample = sample();
    let mut value = &sample;
    for part in setting.parts() {
        value = &value[part];
    }
    value.clone()
}

/// Every setting at its default. `keys` says which names there are where the operator chooses them.
fn defaults<'a>(keys: impl Iterator<Item = &'a Key>) -> BTreeMap<Key, Entry> {
    let named: BTreeSet<&Key> = keys.collect();
    let mut entries = BTreeMap::new();
    for setting in SETTINGS.iter() {
        let entry = Entry {
            setting,
            value: default_of(setting),
            source: Source::Default,
        };
        let stars: Vec<usize> = setting
            .parts()
            .enumerate()
            .filter_map(|(index, part)| (part == "*").then_some(index))
            .collect();
        match stars[..] {
            [] => {
                entries.insert(Key::of(&setting.key), entry);
            }
            // A table of the operator's own name has every setting; an entry of its own name has no default.
            [star] => {
                let table: Vec<&str> = setting.parts().take(star).collect();
                for key in &named {
                    if key.len() > star && key.parts().take(star).eq(table.iter().copied()) {
                        let name = key.parts().nth(star).unwrap_or_default();
                        let key = Key(setting
                            .parts()
                            .map(|part| if part == "*" { name } else { part }.to_owned())
                            .collect());
                        entries.insert(key, entry.clone());
                    }
                }
            }
            _ => {}
        }
    }
    entries
}

/// The entries as one tree.
fn nested(entries: &BTreeMap<Key, Entry>) -> Value {
    fn insert(table: &mut Map<String, Value>, parts: &[String], value: &Value) {
        match parts {
            [] => {}
            [name] => drop(table.insert(name.clone(), value.clone())),
            [name, below @ ..] => {
                let table = table.entry(name).or_insert_with(|| json!({}));
                // A setting is never a table, so nothing stands here but what was put here.
                if let Value::Object(table) = table {
                    insert(table, below, value);
                }
            }
        }
    }
    let mut tree = Map::new();
    for (key, entry) in entries {
        insert(&mut tree, &key.0, &entry.value);
    }
    Value::Object(tree)
}

/// One line about a configuration with problems.
pub fn refused(path: Option<&Path>, problems: &[Problem]) -> Failure {
    let place = path.map_or_else(
        || "configuration: ".to_owned(),
        |path| format!("{}:", path.display()),
    );
    let first = problems.first().map(Problem::to_string).unwrap_or_default();
    let more = match (problems.len(), path) {
        (0 | 1, _) | (_, None) => String::new(),
        (count, Some(path)) => format!(
            " (and {} more: timetable config check {})",
            count - 1,
            path.display()
        ),
    };
    Failure::new(Exit::BadInput, format!("{place}{first}{more}"))
}
