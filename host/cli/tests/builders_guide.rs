//! The builder's guide does what it says: its commands, executed in order, in an empty directory.

mod support;

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use support::{outside_of_this_build, tiny_llama};

/// Much more than it takes.
const PATIENCE: Duration = Duration::from_secs(600);

/// The text of every `sh` block of a page.
fn blocks(page: &str) -> Vec<&str> {
    let ends = page.split("```sh\n").skip(1);
    ends.map(|rest| rest.split("```").next().unwrap_or_default())
        .collect()
}

#[test]
fn every_command_of_the_guide_does_what_it_says() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/builders-guide.md");
    let guide = fs::read_to_string(guide).expect("the guide");
    let blocks = blocks(&guide);
    assert!(blocks.len() >= 6, "{} blocks", blocks.len());
    let scratch = tempfile::tempdir().unwrap();
    let script = format!("set -eux\n{}", blocks.join("\n"));
    let path = |name: &str| scratch.path().join(name);
    fs::write(path("guide.sh"), script).unwrap();
    fs::create_dir(path("empty")).unwrap();
    let log = fs::File::create(path("log")).unwrap();

    let program = Path::new(env!("CARGO_BIN_EXE_timetable"));
    let mut search = vec![program.parent().expect("a directory").to_path_buf()];
    search.extend(std::env::split_paths(
        &std::env::var_os("PATH").unwrap_or_default(),
    ));
    let mut command = Command::new("sh");
    command
        .arg(path("guide.sh"))
        .current_dir(path("empty"))
        .env("PATH", std::env::join_paths(search).unwrap())
        .env("MODEL", tiny_llama().canonicalize().unwrap())
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        // With all that it starts in the background.
        .process_group(0);
    let mut shell = outside_of_this_build(&mut command)
        .spawn()
        .expect("a shell");
    let begun = Instant::now();
    let ended = loop {
        if let Some(status) = shell.try_wait().unwrap() {
            break Some(status);
        }
        if begun.elapsed() > PATIENCE {
            break None;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    if let Some(group) = rustix::process::Pid::from_raw(shell.id() as i32) {
        // Nothing is left of it where all went well.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    let _ = shell.wait();
    let log = fs::read_to_string(path("log")).unwrap_or_default();
    assert!(
        ended.is_some_and(|status| status.success()),
        "{ended:?}\n{log}"
    );

    // It reloaded, and the fault of the wrong builder was made to happen again.
    assert!(log.contains("takes over at the next step"), "{log}");
    assert!(log.contains("reproduced"), "{log}");
    assert!(log.contains("a host would refuse it"), "{log}");
}
