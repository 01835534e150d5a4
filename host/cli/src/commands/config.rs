//! `config`: the operator's configuration, looked at without a host; and `config apply`, which asks the running one.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};
use serde_json::{Value, json};

use super::control::socket;
use super::setup::settings;
use super::table::table;
use super::{print, print_json};
use crate::admin::{self, Request};
use crate::cli::{AdminArgs, SettingArgs};
use crate::config::{self, Effective, File, Flags, Layer};
use crate::exit::{Exit, Failure};

/// What `timetable config` does.
#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "parsed once")]
pub enum ConfigCommand {
    /// Check a file: every problem with its line, or what differs from the defaults
    Check(ConfigCheck),

    /// Show every setting in force, and whether it comes from a flag, the file or the default
    Show(ConfigShow),

    /// Print a complete file: every setting with its documentation and its default
    Default(ConfigDefault),

    /// Make the running host read the file anew: what can change while it runs does, the rest is named
    Apply(ConfigApply),
}

#[derive(Debug, Args)]
pub struct ConfigCheck {
    /// The file
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub path: PathBuf,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ConfigShow {
    #[command(flatten)]
    pub settings: SettingArgs,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ConfigDefault {
    /// Print the same as Markdown tables
    #[arg(long)]
    pub markdown: bool,
}

#[derive(Debug, Args)]
pub struct ConfigApply {
    /// The file
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub path: PathBuf,

    #[command(flatten)]
    pub admin: AdminArgs,
}

/// One of its commands.
pub fn run(command: &ConfigCommand) -> Result<(), Failure> {
    match command {
        ConfigCommand::Check(arguments) => check(arguments),
        ConfigCommand::Show(arguments) => show(arguments),
        ConfigCommand::Apply(arguments) => apply(arguments),
        ConfigCommand::Default(arguments) => print(
            if arguments.markdown {
                config::markdown()
            } else {
                config::default_file()
            }
            .as_bytes(),
        ),
    }
}

/// Every problem of the file on a line of its own, or what differs from the defaults.
fn check(arguments: &ConfigCheck) -> Result<(), Failure> {
    let path = &arguments.path;
    let (file, mut problems) = File::parse(path, File::text_of(path)?);
    if problems.is_empty() {
        match Effective::new(Some(&file), &Layer::new()) {
            Ok(effective) => return fine(&effective, arguments.json),
            Err(found) => problems = found,
        }
    }
    if arguments.json {
        print_json(&json!({ "ok": false, "problems": problems }))?;
    } else {
        for problem in &problems {
            print(format!("{}:{problem}\n", path.display()).as_bytes())?;
        }
    }
    let count = match problems.len() {
        1 => "1 problem".to_owned(),
        count => format!("{count} problems"),
    };
    Err(Failure::new(
        Exit::BadInput,
        format!(
            "{}: {count}; mend the file and check it again",
            path.display()
        ),
    ))
}

fn fine(effective: &Effective, as_json: bool) -> Result<(), Failure> {
    if as_json {
        return print_json(&json!({ "ok": true, "settings": effective.json() }));
    }
    let changed = effective.changed();
    let mut text = match changed.len() {
        0 => "ok: every setting is the default\n".to_owned(),
        1 => "ok: 1 setting differs from its default\n".to_owned(),
        count => format!("ok: {count} settings differ from their defaults\n"),
    };
    for (key, entry) in &changed {
        text.push_str(&format!("{key} = {}\n", entry.written()));
    }
    if !changed.is_empty() {
        text.push_str("files and directories that it names were not opened\n");
    }
    print(text.as_bytes())
}

/// Sends the file to the running host: what it changed, and what waits for a restart.
fn apply(arguments: &ConfigApply) -> Result<(), Failure> {
    let path = std::path::absolute(&arguments.path).map_err(Failure::of(Exit::BadInput))?;
    let request = Request::Configure {
        path: path.display().to_string(),
        text: File::text_of(&arguments.path)?,
    };
    let answer = admin::call(&socket(&arguments.admin), &request, &[])?;
    if arguments.admin.json {
        return print_json(&answer);
    }
    let changes = answer["changes"].as_array().map_or(&[][..], Vec::as_slice);
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let rows: Vec<Vec<String>> = changes
        .iter()
        .map(|change| {
            let when = match change["live"].as_bool() {
                Some(true) => "now",
                _ => "at the next start",
            };
            vec![
                text(&change["setting"]),
                text(&change["from"]),
                text(&change["to"]),
                when.to_owned(),
            ]
        })
        .collect();
    if rows.is_empty() {
        return print(b"nothing changes\n");
    }
    print(table(&["SETTING", "FROM", "TO", "CHANGES"], &rows).as_bytes())
}

fn show(arguments: &ConfigShow) -> Result<(), Failure> {
    let effective = settings(&Flags::of(&arguments.settings))?;
    if arguments.json {
        return print_json(&effective.json());
    }
    let rows: Vec<Vec<String>> = effective
        .entries()
        .into_iter()
        .map(|(key, entry)| {
            vec![
                key.to_string(),
                entry.written(),
                entry.source.to_string(),
                if entry.setting.live {
                    "live"
                } else {
                    "restart"
                }
                .to_owned(),
            ]
        })
        .collect();
    print(table(&["SETTING", "VALUE", "FROM", "CHANGES"], &rows).as_bytes())
}
