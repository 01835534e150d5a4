//! The table of settings: what each is, what it may be, what it costs, and whether it changes while a host runs. The file's
//! keys, the file of defaults and docs/configuration.md are made of it; defaults are the code's own.
//!
//! Must never know: how a file is read, or what is done with a value.

mod builders;
mod engine;
mod places;
mod server;

use std::borrow::Cow;
use std::sync::LazyLock;

use self::builders::{BUILDERS, PROVENANCE, RELOAD, TENANT, TENANT_LIMITS};
use self::engine::{ENGINE, LIMITS};
use self::places::{ADMIN, FAULTS, RECORDING};
use self::server::SERVER;
use super::Key;
use super::kind::Kind;

/// One setting.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Its tables and its name, with dots; `*` stands for a name that the operator chooses.
    pub key: Cow<'static, str>,
    /// What its value may be.
    pub kind: Kind,
    /// What it does.
    pub what: &'static str,
    /// What it costs to have, or to raise.
    pub cost: &'static str,
    /// Does `timetable config apply` change it while the host runs?
    pub live: bool,
    /// The flag of `timetable generate` and `serve` that says the same, if there is one.
    pub flag: Option<&'static str>,
    /// Where there is no value by default: what that means, and a value for the file of defaults.
    pub unset: Option<(&'static str, &'static str)>,
}

impl Setting {
    const fn flag(mut self, flag: &'static str) -> Setting {
        self.flag = Some(flag);
        self
    }

    const fn unset(mut self, meaning: &'static str, example: &'static str) -> Setting {
        self.unset = Some((meaning, example));
        self
    }

    const fn live(mut self) -> Setting {
        self.live = true;
        self
    }

    /// The parts of its key.
    pub fn parts(&self) -> impl Iterator<Item = &str> {
        self.key.split('.')
    }

    /// Its table, `builders.*.policy`, and its own name.
    pub fn split(&self) -> (&str, &str) {
        self.key.rsplit_once('.').unwrap_or(("", &self.key))
    }

    /// Is it the setting at `key`?
    pub fn is_at(&self, key: &Key) -> bool {
        self.parts().count() == key.len() && self.begins_with(key)
    }

    /// Does it stand at `key`, or somewhere below?
    pub fn begins_with(&self, key: &Key) -> bool {
        let mut own = self.parts();
        key.parts()
            .all(|part| own.next().is_some_and(|own| own == "*" || own == part))
    }
}

const fn setting(key: &'static str, kind: Kind, what: &'static str, cost: &'static str) -> Setting {
    Setting {
        key: Cow::Borrowed(key),
        kind,
        what,
        cost,
        live: false,
        flag: None,
        unset: None,
    }
}

/// What a table is for, in the order of the file.
pub static TABLES: &[(&str, &str)] = &[
    (
        "engine",
        "The model's device, its steps and its KV cache. Names are the field's.",
    ),
    (
        "limits",
        "Bounds on every component. They belong to the sandbox, so they are one for all builders.",
    ),
    (
        "builders.*",
        "The builder of a backend: FLASH_ATTN, FLASHINFER, TRITON_ATTN, FLASHMLA, FLASH_ATTN_MLA, TRITON_MLA, or MAMBA for every recurrent layer. One table each.",
    ),
    (
        "builders.*.options",
        "Options of the builder's own, any names. They are part of its version: changing one makes a new version.",
    ),
    (
        "builders.*.policy",
        "What is done about this builder's faults. All but the build budget is counted in steps.",
    ),
    (
        "builders.*.policy.build_budget",
        "Measured time of its calls: a balance that starts at `reserve`, gains `per_step` with each step, and pays each call.",
    ),
    (
        "tenants.*",
        "A tenant, as requests name it. With none, requests may carry any name, which keeps their cached prefixes apart.",
    ),
    (
        "tenants.*.options",
        "Options of its builder, any names; part of the builder's version.",
    ),
    (
        "tenants.*.policy",
        "What is done about its builder's faults.",
    ),
    (
        "tenants.*.policy.build_budget",
        "Measured time of its builder's calls.",
    ),
    (
        "tenants.*.limits",
        "Tighter bounds on its builder's calls; never above those of [limits].",
    ),
    (
        "reload",
        "How a new version gets into service where `timetable reload` does not say it, and for `timetable config apply`.",
    ),
    (
        "reload.canary",
        "What a candidate serves before it serves everything. Without a share and without tenants there is no canary.",
    ),
    (
        "reload.gates",
        "What a candidate must keep to in shadow and canary; one that fails a gate is withdrawn, and what served goes on.",
    ),
    (
        "provenance",
        "Which components may run. Any flag about it states the whole policy, and this table is not used.",
    ),
    (
        "faults",
        "Fault bundles: a file for each fault, which `timetable replay-bundle` makes happen again.",
    ),
    (
        "recording",
        "What `timetable replay` tries other builders on.",
    ),
    ("admin", "The host's own places."),
    (
        "server",
        "The HTTP API of `timetable serve`, and what clients may take of it.",
    ),
];

const B: u64 = 1;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const MS: u64 = 1_000_000;
const HOUR: u64 = 3_600_000 * MS;

/// Rows, tokens, blocks: any number of them.
const fn number(unit: &'static str) -> Kind {
    Kind::Count {
        unit,
        min: 1,
        max: u32::MAX as u64,
    }
}

/// Every setting, table by table, in the order of the file.
pub static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| {
    // A tenant's builder has what everybody's has; no flag is about it.
    let of_tenant = |setting: &Setting| Setting {
        key: setting.key.replacen("builders", "tenants", 1).into(),
        flag: None,
        ..setting.clone()
    };
    let own = BUILDERS
        .iter()
        .filter(|setting| setting.key != "builders.*.component");
    let tenants = [
        TENANT,
        &own.map(of_tenant).collect::<Vec<_>>(),
        TENANT_LIMITS,
    ]
    .concat();
    [
        ENGINE, LIMITS, BUILDERS, &tenants, RELOAD, PROVENANCE, FAULTS, RECORDING, ADMIN, SERVER,
    ]
    .concat()
});

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;
    use serde_json::Value;

    use super::super::effective::{default_of, sample};
    use super::*;

    /// The keys of a tree of settings; a value that is a setting's own is no table.
    fn leaves(value: &Value, above: &str, found: &mut BTreeSet<String>) {
        for (name, value) in value.as_object().unwrap() {
            let key = if above.is_empty() {
                name.clone()
            } else {
                format!("{above}.{name}")
            };
            if value.is_object() && !SETTINGS.iter().any(|setting| setting.key == key) {
                leaves(value, &key, found);
            } else {
                found.insert(key);
            }
        }
    }

    #[test]
    fn the_table_has_every_field_of_the_configuration_and_no_other() {
        let mut fields = BTreeSet::new();
        leaves(&sample(), "", &mut fields);
        let rows: BTreeSet<String> = SETTINGS.iter().map(|s| s.key.to_string()).collect();
        assert_eq!(rows.len(), SETTINGS.len(), "a key twice");
        assert_eq!(rows, fields);
        let tables: BTreeSet<&str> = SETTINGS.iter().map(|s| s.split().0).collect();
        assert_eq!(tables, TABLES.iter().map(|(table, _)| *table).collect());
    }

    #[test]
    fn every_default_is_one_that_its_kind_reads_and_every_row_is_documented() {
        for setting in SETTINGS.iter() {
            let key = &setting.key;
            let value = default_of(setting);
            let none = value.is_null() || value == serde_json::json!([]);
            assert_eq!(none, setting.unset.is_some(), "{key}");
            let written = match setting.unset {
                Some((_, example)) => example.to_owned(),
                None => setting.kind.write(&value),
            };
            let text = format!("x = {written}");
            let read = toml::de::DeTable::parse(&text).unwrap();
            let read = setting.kind.read(read.get_ref()["x"].get_ref()).unwrap();
            assert!(none || read == value, "{key}: {value}, {read}");
            for text in [setting.what, setting.cost] {
                assert!(text.ends_with('.') || text.ends_with('?'), "{key}: {text}");
            }
        }
    }

    #[test]
    fn the_help_of_a_flag_says_the_default_of_its_setting() {
        let command = crate::cli::Cli::command();
        let commands = ["generate", "serve"].map(|name| command.find_subcommand(name).unwrap());
        for setting in SETTINGS.iter() {
            let Some(flag) = setting.flag else { continue };
            let argument = commands
                .iter()
                .flat_map(|command| command.get_arguments())
                .find(|argument| argument.get_long() == flag.strip_prefix("--"))
                .unwrap_or_else(|| panic!("{flag} is no flag of generate or serve"));
            if setting.unset.is_none() && argument.get_action().takes_values() {
                let help = argument.get_help().unwrap().to_string();
                let value = setting.kind.write(&default_of(setting));
                let says = format!("[default: {}", value.trim_matches('"'));
                assert!(help.contains(&says), "{flag}: {says} is missing in: {help}");
            }
        }
    }
}
