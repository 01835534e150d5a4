//! `SPECIFICATION.md` names tests that exist: a promise whose test is renamed or removed fails here.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The repository.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() && !name.starts_with('.') && !["target", "vectors"].contains(&&*name) {
            sources(&path, found);
        } else if name.ends_with(".rs") {
            found.push(path);
        }
    }
}

/// Does `text` define a function that `pattern` names? `NN` stands for two digits, `*` for any rest or beginning.
fn defines(text: &str, pattern: &str) -> bool {
    let known = |part: &str| part.split("NN").next().unwrap_or_default().to_owned();
    let names = text.split("fn ").skip(1).map(|rest| {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
        &rest[..end.unwrap_or(rest.len())]
    });
    let (start, end) = match pattern.split_once('*') {
        Some((start, end)) => (known(start), Some(end)),
        None => (known(pattern), None),
    };
    names.into_iter().any(|name| match end {
        Some(end) => name.starts_with(&start) && name.ends_with(end),
        None if pattern.contains("NN") => name.starts_with(&start),
        None => name == pattern,
    })
}

/// The repository's sources, with their paths.
fn all_sources() -> Vec<(String, String)> {
    let mut files = Vec::new();
    sources(Path::new(ROOT), &mut files);
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).expect("a source");
        (path.display().to_string(), text)
    };
    files.into_iter().map(read).collect()
}

/// What a line of Markdown has between backticks.
fn quoted(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// Does the file of `FILE.rs::FUNCTION` exist, and define that function?
fn exists(texts: &[(String, String)], file: &str, function: &str) -> bool {
    let file = file.trim_start_matches("./");
    let (folder, base) = file.rsplit_once('/').unwrap_or(("", file));
    texts.iter().any(|(path, text)| {
        let here = match base {
            "*.rs" => path.contains(&format!("/{folder}/")),
            _ => path.ends_with(&format!("/{file}")),
        };
        here && defines(text, function)
    })
}

/// A row of the table of field cases for each of them, in order, that names tests which exist, and nothing else.
#[test]
fn every_field_case_has_a_test() {
    let specification = fs::read_to_string(format!("{ROOT}/SPECIFICATION.md")).expect("it exists");
    let table = specification
        .lines()
        .skip_while(|line| !line.starts_with("| case |"));
    let rows: Vec<Vec<&str>> = table
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let numbers: Vec<usize> = rows.iter().filter_map(|row| row[0].parse().ok()).collect();
    assert_eq!(numbers, (1..=30).collect::<Vec<_>>());
    let texts = all_sources();
    for row in &rows {
        assert!(quoted(row[2]).count() > 0, "case {} names no test", row[0]);
        for name in quoted(row[2]) {
            let test = name.split_once("::");
            let is_there = test.is_some_and(|(file, function)| {
                file.ends_with(".rs") && exists(&texts, file, function)
            });
            assert!(is_there, "case {} names {name}, which is no test", row[0]);
        }
    }
}

#[test]
fn every_test_that_the_specification_names_exists() {
    let specification = fs::read_to_string(format!("{ROOT}/SPECIFICATION.md")).expect("it exists");
    let texts = all_sources();
    let mut named = 0;
    let mut missing = Vec::new();
    for name in specification.lines().flat_map(quoted) {
        let is_there = match name.split_once("::") {
            Some((file, function)) if file.ends_with(".rs") => exists(&texts, file, function),
            _ if name.ends_with(".rs") => texts
                .iter()
                .any(|(path, _)| path.ends_with(&format!("/{name}"))),
            // A further test of the file named before, or a vectors file.
            _ if name.matches('_').count() > 2
                && name
                    .chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_*".contains(c)) =>
            {
                texts.iter().any(|(_, text)| defines(text, name))
                    || Path::new(&format!("{ROOT}/tests/vectors/{name}.json")).exists()
            }
            _ => continue,
        };
        named += 1;
        if !is_there {
            missing.push(name);
        }
    }
    println!("{named} names");
    assert!(named > 80, "only {named} names were found");
    assert!(
        missing.is_empty(),
        "SPECIFICATION.md names what is not there: {missing:?}"
    );
}
