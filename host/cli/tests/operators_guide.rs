//! The commands of the operator's guide are run as they stand there.

mod support;

use std::path::Path;
use std::process::Command;

use support::tiny_llama;

/// The text of each `sh` block, in order, with the line that it begins in.
fn blocks(guide: &str) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut inside = false;
    for (index, line) in guide.lines().enumerate() {
        match line {
            "```sh" => {
                inside = true;
                found.push((index + 2, String::new()));
            }
            "```" => inside = false,
            line if inside => {
                if let Some((_, block)) = found.last_mut() {
                    block.push_str(line);
                    block.push('\n');
                }
            }
            _ => {}
        }
    }
    found
}

#[test]
fn the_reload_walk_through_does_what_it_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operators-guide.md");
    let guide = std::fs::read_to_string(path).unwrap();
    let start = guide.find("\n## Reload\n").expect("the section");
    let rest = &guide[start + 1..];
    let end = rest[1..].find("\n## ").map_or(rest.len(), |end| end + 2);
    let before = guide[..=start].lines().count();
    let blocks = blocks(&rest[..end]);
    assert!(blocks.len() >= 6, "blocks");
    let scratch = tempfile::tempdir().unwrap();
    let mut script = String::from(
        "set -e\ntrap 'status=$?; test -f host.pid && kill -9 $(cat host.pid) 2> /dev/null || true; exit $status' EXIT\n",
    );
    for (line, block) in &blocks {
        script.push_str(&format!("echo 'line {}' >&2\n{block}", before + line));
    }
    let timetable = Path::new(env!("CARGO_BIN_EXE_timetable"));
    let mut directories = vec![timetable.parent().unwrap().to_owned()];
    let path = std::env::var_os("PATH").unwrap_or_default();
    directories.extend(std::env::split_paths(&path));
    let ran = Command::new("sh")
        .args(["-c", &script])
        .current_dir(scratch.path())
        .env("PATH", std::env::join_paths(directories).unwrap())
        .env("MODEL", tiny_llama().canonicalize().unwrap())
        .env("XDG_RUNTIME_DIR", scratch.path())
        .output()
        .expect("a shell");
    assert!(
        ran.status.success(),
        "{}\nstdout:\n{}\nstderr (the last line is that of the block that failed):\n{}",
        ran.status,
        String::from_utf8_lossy(&ran.stdout),
        String::from_utf8_lossy(&ran.stderr)
    );
}
