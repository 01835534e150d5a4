//! The table of settings as documents: the file of defaults, and the tables of docs/configuration.md.
//!
//! Must never know: any configuration but the defaults.

use std::fmt::Write;

use super::effective::default_of;
use super::settings::{SETTINGS, Setting, TABLES};

/// Columns of comments in the file of defaults.
const WIDTH: usize = 110;

/// A complete file: every setting with its documentation and its default. What has no default, and every table whose name
/// the operator chooses, is a comment that begins with `#` and no space.
pub fn default_file() -> String {
    let mut text = String::new();
    comment(
        &mut text,
        "Timetable's configuration: every setting, with its default. A line that begins with `#` and no space is a setting \
         without a default, or an example of a table whose name you choose: take the `#` away to use it. Flags of `timetable \
         generate` come before this file, this file before the defaults; unknown settings are refused. `live` settings are \
         changed in a running host by `timetable config apply FILE`.",
    );
    for (table, what) in TABLES {
        text.push('\n');
        comment(&mut text, what);
        let off = if table.contains('*') { "#" } else { "" };
        let _ = writeln!(text, "{off}[{}]", table.replace('*', example_name(table)));
        for setting in settings_of(table) {
            let note = format!(
                "{} Accepts {}. Default: {}. Cost: {} {}",
                setting.what,
                setting.kind.accepts(),
                default(setting),
                setting.cost,
                if setting.live { "Live." } else { "Restart." }
            );
            text.push('\n');
            comment(&mut text, &note);
            let name = match setting.split().1 {
                "*" => "name",
                name => name,
            };
            let value = default_of(setting);
            let _ = match setting.unset {
                Some((_, example)) => writeln!(text, "#{name} = {example}"),
                None => writeln!(text, "{off}{name} = {}", setting.kind.write(&value)),
            };
        }
    }
    text
}

/// The same as Markdown: a section for each table of settings.
pub fn markdown() -> String {
    let mut text = String::new();
    for (table, what) in TABLES {
        let title = table.replace('*', name_of(table));
        let _ = write!(
            text,
            "### [{title}]\n\n{what}\n\n| setting | accepts | default | what it does | cost | changes | flag |\n|---|---|---|---|---|---|---|\n"
        );
        for setting in settings_of(table) {
            let name = match setting.split().1 {
                "*" => "any name",
                name => name,
            };
            let cells = [
                format!("`{name}`"),
                setting.kind.accepts(),
                default(setting),
                setting.what.to_owned(),
                setting.cost.to_owned(),
                if setting.live { "live" } else { "restart" }.to_owned(),
                setting
                    .flag
                    .map_or_else(String::new, |flag| format!("`{flag}`")),
            ];
            let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
            let _ = writeln!(text, "| {} |", cells.join(" | "));
        }
        text.push('\n');
    }
    text
}

fn settings_of(table: &str) -> impl Iterator<Item = &'static Setting> {
    SETTINGS
        .iter()
        .filter(move |setting| setting.split().0 == table)
}

/// The default in words, or as it is written.
fn default(setting: &Setting) -> String {
    match setting.unset {
        Some((meaning, _)) => meaning.to_owned(),
        None => setting.kind.write(&default_of(setting)),
    }
}

/// What stands for the name that the operator chooses.
fn name_of(table: &str) -> &'static str {
    match table.split('.').next() {
        Some("builders") => "BACKEND",
        _ => "NAME",
    }
}

/// A name for the file of defaults.
fn example_name(table: &str) -> &'static str {
    match table.split('.').next() {
        Some("builders") => "FLASH_ATTN",
        _ => "acme",
    }
}

fn comment(text: &mut String, words: &str) {
    let mut width = WIDTH;
    for word in words.split_whitespace() {
        let len = word.chars().count() + 1;
        if width + len > WIDTH {
            text.push_str(if text.ends_with('\n') || text.is_empty() {
                "#"
            } else {
                "\n#"
            });
            width = 1;
        }
        text.push(' ');
        text.push_str(word);
        width += len;
    }
    text.push('\n');
}
