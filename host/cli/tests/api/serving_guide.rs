//! docs/serving.md does what it says: its commands and its Python, in order, in an empty directory.

use std::fs;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::openai::client_directory;
use crate::server::model;

/// Much more than it takes.
const PATIENCE: Duration = Duration::from_secs(300);

/// What the first block of Python makes, and each goes on from.
const PRELUDE: &str = "from openai import OpenAI\nclient = OpenAI()\n";

/// The page's blocks as one script for a shell, and their number.
fn script(page: &str) -> (String, usize) {
    let mut script = "set -eux\n".to_owned();
    let mut count = 0;
    let blocks = page.split("\n```");
    for (language, text) in blocks.filter_map(|block| block.split_once('\n')) {
        match language {
            "sh" => script.push_str(text),
            "python" => {
                script.push_str(&format!("python3 - <<'PYTHON'\n{PRELUDE}{text}\nPYTHON"));
            }
            _ => continue,
        }
        script.push('\n');
        count += 1;
    }
    (script, count)
}

#[test]
fn every_command_of_the_guide_does_what_it_says() {
    let Some(packages) = client_directory() else {
        return;
    };
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/serving.md");
    let guide = fs::read_to_string(guide).expect("the guide");
    // Free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let (script, count) = script(&guide.replace("127.0.0.1:8000", &format!("127.0.0.1:{port}")));
    assert!(count >= 14, "{count} blocks");
    let scratch = tempfile::tempdir().unwrap();
    let path = |name: &str| scratch.path().join(name);
    fs::write(path("guide.sh"), script).unwrap();
    fs::create_dir(path("empty")).unwrap();
    let log = fs::File::create(path("log")).unwrap();

    let program = Path::new(env!("CARGO_BIN_EXE_timetable"));
    let mut search = vec![program.parent().expect("a directory").to_path_buf()];
    search.extend(std::env::split_paths(
        &std::env::var_os("PATH").unwrap_or_default(),
    ));
    let mut shell = Command::new("sh")
        .arg(path("guide.sh"))
        .current_dir(path("empty"))
        .env("PATH", std::env::join_paths(search).unwrap())
        .env("MODEL", model(scratch.path(), true, 1024))
        .env("PYTHONPATH", packages)
        .env("PYTHONUTF8", "1")
        .env("XDG_RUNTIME_DIR", scratch.path())
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        // With all that it starts in the background.
        .process_group(0)
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

    for part in [
        "timetable: serving small at http://127.0.0.1:",
        "\"prompt_tokens\":3",
        "data: [DONE]",
        "\"tokens\":[5,6,7]",
        "{\"prompt\":\"t5 t6 t7\"}",
        "`temperature` is -1",
        "\"code\":\"model_not_found\"",
        "\"code\":\"invalid_api_key\"",
        "top_p ",
        "t55 t6 t7 →",
        "hung up: what it asked for is ended",
        "vllm:time_to_first_token_seconds_count",
        "{\"version\":",
    ] {
        assert!(log.contains(part), "`{part}` is missing\n{log}");
    }
}
