//! Runs `tests/openai/test_client.py`: the official Python client, unmodified, against servers of the tiny model.

#[path = "../../../../tests/openai/client.rs"]
mod client;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::server::{Kind, Served};

/// Much longer than all cases take.
const PATIENCE: Duration = Duration::from_secs(900);
const CASES: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../tests/openai/test_client.py"
);

/// Where the client is installed; none where it is not and nobody insists.
pub fn client_directory() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .parent()
        .expect("the target directory");
    let found = client::find(target);
    if found.is_none() {
        let missing = "the openai client is not installed: run `cargo xtask test`";
        assert!(std::env::var("CI").is_err(), "{missing}");
        eprintln!("SKIPPED: nothing is asked with the official client: {missing}");
    }
    found
}

#[test]
fn the_official_client_gets_what_it_asks_for() {
    let Some(packages) = client_directory() else {
        return;
    };
    let open = Served::start(Kind::Long, "");
    let guarded = Served::start(
        Kind::Guarded,
        "[engine]\nmax_num_seqs = 1\n[server]\nmax_waiting_requests = 1\n[tenants.a]\n[tenants.b]\n",
    );
    let hasty = Served::start(Kind::Long, "[server]\nrequest_timeout = \"1s\"\n");
    let plain = Served::start(Kind::Plain, "");
    let prompts = ["t5 t6 t7", "t40", "t400 t8 t77 t92 t9"];
    let expected: serde_json::Map<_, _> = prompts
        .iter()
        .map(|prompt| ((*prompt).to_owned(), json!(open.alone(prompt, 24))))
        .collect();
    let servers = json!({
        "open": open.url(), "guarded": guarded.url(), "hasty": hasty.url(), "plain": plain.url(), "expected": expected,
    });

    let path = open.scratch().join("report");
    let report = File::create(&path).unwrap();
    let mut python = Command::new("python3")
        .args(["-W", "error::ResourceWarning", CASES, "--verbose"])
        .env("PYTHONPATH", packages)
        .env("TIMETABLE_SERVERS", servers.to_string())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::null())
        .stdout(report.try_clone().unwrap())
        .stderr(report)
        .spawn()
        .expect("python3 starts");
    let begun = Instant::now();
    let ended = loop {
        if let Some(status) = python.try_wait().unwrap() {
            break Some(status);
        }
        if begun.elapsed() > PATIENCE {
            drop(python.kill());
            drop(python.wait());
            break None;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    // A line for each case.
    let report = fs::read_to_string(&path).unwrap();
    println!("{report}");
    assert!(
        ended.is_some_and(|status| status.success()),
        "{ended:?}\n{report}"
    );
    let passed = report
        .lines()
        .filter(|line| line.ends_with("... ok"))
        .count();
    assert!(
        passed >= 35 && !report.contains("skipped"),
        "{passed} cases\n{report}"
    );
    for server in [open, guarded, hasty, plain] {
        server.ends_well();
    }
}
