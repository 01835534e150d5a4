//! Are all dependencies under licences that `deny.toml` allows? cargo-deny says more (advisories, with its database at hand);
//! this needs nothing but cargo.

use anyhow::{Context, Result, bail};

use crate::process::{cargo_program, heading, output};

pub fn check() -> Result<()> {
    heading("licences");
    let policy = std::fs::read_to_string(crate::root().join("deny.toml"))
        .context("deny.toml could not be read")?;
    let allowed = allowed(&policy);
    let metadata = output(
        &cargo_program(),
        &["metadata", "--format-version", "1", "--locked"],
    )?;
    let metadata: serde_json::Value =
        serde_json::from_str(&metadata).context("cargo metadata printed no JSON")?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata names no packages")?;
    let mut refused = Vec::new();
    for package in packages {
        let licence = package["license"].as_str().unwrap_or("");
        if !is_allowed(licence, &allowed) {
            refused.push(format!(
                "{} {}: `{licence}`",
                package["name"], package["version"]
            ));
        }
    }
    if !refused.is_empty() {
        bail!(
            "licences that deny.toml does not allow: {}",
            refused.join("; ")
        );
    }
    eprintln!(
        "{} packages, every licence allowed by deny.toml",
        packages.len()
    );
    Ok(())
}

/// The strings of `[licenses] allow`.
fn allowed(policy: &str) -> Vec<&str> {
    let list = policy
        .split_once("allow = [")
        .and_then(|(_, rest)| rest.split_once(']'))
        .map_or("", |(list, _)| list);
    list.split('"').skip(1).step_by(2).collect()
}

/// Evaluates an SPDX expression: OR needs one side, AND both and binds more tightly. `/` is an old spelling of OR.
fn is_allowed(expression: &str, allowed: &[&str]) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let mut words: Vec<&str> = spaced.split_whitespace().rev().collect();
    either(&mut words, allowed) && words.is_empty()
}

fn either(words: &mut Vec<&str>, allowed: &[&str]) -> bool {
    let mut value = both(words, allowed);
    while words.pop_if(|word| *word == "OR").is_some() {
        value |= both(words, allowed);
    }
    value
}

fn both(words: &mut Vec<&str>, allowed: &[&str]) -> bool {
    let mut value = one(words, allowed);
    while words.pop_if(|word| *word == "AND").is_some() {
        value &= one(words, allowed);
    }
    value
}

/// A parenthesis, or a licence with its exception.
fn one(words: &mut Vec<&str>, allowed: &[&str]) -> bool {
    if words.pop_if(|word| *word == "(").is_some() {
        let value = either(words, allowed);
        return words.pop() == Some(")") && value;
    }
    let Some(name) = words.pop() else {
        return false;
    };
    if words.pop_if(|word| *word == "WITH").is_some() {
        let Some(exception) = words.pop() else {
            return false;
        };
        return allowed.contains(&format!("{name} WITH {exception}").as_str());
    }
    allowed.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::{allowed, is_allowed};

    #[test]
    fn expressions_are_evaluated() {
        let allowed = allowed(
            "[licenses]\nallow = [\n  \"MIT\",\n  \"Apache-2.0 WITH LLVM-exception\",\n]\n[bans]\n",
        );
        assert_eq!(allowed, ["MIT", "Apache-2.0 WITH LLVM-exception"]);
        for (expression, expected) in [
            ("MIT", true),
            ("MIT OR GPL-3.0", true),
            ("GPL-3.0/MIT", true),
            ("MIT AND GPL-3.0", false),
            ("(MIT OR GPL-3.0) AND MIT", true),
            ("(MIT OR GPL-3.0) AND GPL-3.0", false),
            ("MIT OR GPL-3.0 AND GPL-3.0", true),
            ("Apache-2.0 WITH LLVM-exception", true),
            ("GPL-3.0", false),
            ("", false),
        ] {
            assert_eq!(is_allowed(expression, &allowed), expected, "{expression}");
        }
    }
}
