//! The operator's configuration file: checked, shown, used.

mod support;

use serde_json::Value;
use support::{Ran, file, run, tiny_llama};

/// A configuration file in a directory of its own.
struct Written {
    path: String,
    _scratch: tempfile::TempDir,
}

fn written(text: &str) -> Written {
    let scratch = tempfile::tempdir().unwrap();
    Written {
        path: file(&scratch, "timetable.toml", text.as_bytes()),
        _scratch: scratch,
    }
}

fn check(text: &str) -> Ran {
    run(&["config", "check", &written(text).path, "--json"])
}

/// The problems of a file, each as `line:column key = value: problem`.
#[track_caller]
fn problems(text: &str) -> Vec<String> {
    let ran = check(text);
    assert_eq!(ran.code, 4, "{}{}", ran.stdout, ran.stderr);
    let said = ran.json();
    assert_eq!(said["ok"], false);
    said["problems"]
        .as_array()
        .unwrap()
        .iter()
        .map(|problem| {
            let text = |key: &str| problem[key].as_str().unwrap().to_owned();
            format!(
                "{}:{} {} = {}: {}",
                problem["line"],
                problem["column"],
                text("key"),
                text("value"),
                text("problem")
            )
        })
        .collect()
}

/// The file of defaults with every setting and every example switched on.
fn everything() -> String {
    let defaults = run(&["config", "default"]).succeeds().stdout.clone();
    defaults
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(setting) if !setting.starts_with(' ') => format!("{setting}\n"),
            _ => format!("{line}\n"),
        })
        .collect()
}

fn keys(settings: &Value) -> Vec<&String> {
    settings.as_object().unwrap().keys().collect()
}

#[test]
fn the_file_of_defaults_changes_nothing() {
    let defaults = run(&["config", "default"]).succeeds().stdout.clone();
    let path = written(&defaults);
    let ran = run(&["config", "check", &path.path]);
    assert_eq!(ran.succeeds().stdout, "ok: every setting is the default\n");
}

#[test]
fn a_file_with_everything_set_is_read_whole_and_comes_back() {
    let text = everything();
    let settings = check(&text).succeeds().json()["settings"].clone();
    for (key, setting) in settings.as_object().unwrap() {
        let source = setting["source"].as_str().unwrap();
        let line: usize = source
            .strip_prefix("file, line ")
            .unwrap_or_else(|| panic!("{key} is not in the file of defaults: {source}"))
            .parse()
            .unwrap();
        // The line that is named is the setting's, and what was read is what it says.
        let written = text.lines().nth(line - 1).unwrap();
        let (name, value) = written.split_once(" = ").unwrap();
        assert!(key.ends_with(name), "{key} is not in {written}");
        let read = setting["value"].as_str().unwrap().replace(' ', "");
        let path = value.trim_start_matches(['[', '"']);
        assert!(
            read == value.replace(' ', "") || read.ends_with(&format!("/{path}")),
            "{key}: {written} was read as {read}"
        );
    }
    // A file of what was read is read as the same.
    let again: String = settings
        .as_object()
        .unwrap()
        .iter()
        .map(|(key, setting)| format!("{key} = {}\n", setting["value"].as_str().unwrap()))
        .collect();
    let again = check(&again).succeeds().json()["settings"].clone();
    assert_eq!(keys(&again), keys(&settings));
    for key in keys(&settings) {
        assert_eq!(again[key]["value"], settings[key]["value"], "{key}");
    }
}

#[test]
fn the_document_has_every_setting() {
    let tables = run(&["config", "default", "--markdown"])
        .succeeds()
        .stdout
        .clone();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");
    let document = std::fs::read_to_string(path).unwrap();
    assert!(
        document.contains(tables.trim()),
        "docs/configuration.md is not what the code says; put the output of `timetable config default --markdown` below its \
         heading Settings"
    );
}

#[test]
fn unknown_keys_are_refused_anywhere_with_the_nearest() {
    for (text, expected) in [
        (
            "engin = 1",
            "1:1 engin = : is no table; did you mean engine?",
        ),
        (
            "[limit]\nwatchdog = \"1s\"",
            "1:2 limit = : is no table; did you mean limits?",
        ),
        (
            "[engine]\nmax-num-seqs = 8",
            "2:1 engine.max-num-seqs = : is no setting; did you mean engine.max_num_seqs?",
        ),
        (
            "[engine]\n  watchdog = \"1s\"",
            "2:3 engine.watchdog = : is no setting here; it belongs into [limits]",
        ),
        (
            "[builders.FLASH_ATTN.policy]\nbuild_budget.per_stp = \"1ms\"",
            "2:14 builders.FLASH_ATTN.policy.build_budget.per_stp = : is no setting; did you mean \
             builders.FLASH_ATTN.policy.build_budget.per_step?",
        ),
        (
            "[builders.FLASH_ATTN]\npolicy = { onfault = \"fallback\" }",
            "2:12 builders.FLASH_ATTN.policy.onfault = : is no setting; did you mean builders.FLASH_ATTN.policy.on_fault?",
        ),
        (
            "[builders.flash]\ncomponent = \"x.wasm\"",
            "1:11 builders.flash = : there is no such backend; the tables are [builders.FLASH_ATTN], [builders.FLASHINFER], [builders.TRITON_ATTN], \
             [builders.FLASHMLA], [builders.FLASH_ATTN_MLA], [builders.TRITON_MLA], [builders.MAMBA]",
        ),
    ] {
        assert_eq!(problems(text), [expected], "{text}");
    }
    // What is near to nothing gets the list.
    let problem = problems("[admin]\ncolour = 1").remove(0);
    assert!(
        problem.contains("known here: socket, listen, token_file, state_dir, cache_dir"),
        "{problem}"
    );
    // A setting at a table's place, and a table at a setting's.
    assert!(problems("limits = 3")[0].contains("is a table: write [limits]"));
    assert!(problems("[engine.threads]\nx = 1")[0].contains("a whole number of threads, 1 to 256"));
}

#[test]
fn each_bad_value_gets_one_error() {
    for (text, expected) in [
        (
            "[limits]\nwatchdog = \"10ms\"",
            "2:12 limits.watchdog = \"10ms\": give a time, as \"200ms\"",
        ),
        (
            "[limits]\nwatchdog = 200",
            "2:12 limits.watchdog = 200: give a time",
        ),
        ("[limits]\nwatchdog = \"200 parsecs\"", "give a time"),
        (
            "[limits]\nmax_memory_bytes = \"4MB\"",
            "give a size, as \"4MiB\"",
        ),
        (
            "[limits]\nmax_memory_bytes = -1",
            "limits.max_memory_bytes = -1: give a size",
        ),
        (
            "[limits]\nmax_memory_bytes = \"99999999999999999999GiB\"",
            "give a size",
        ),
        (
            "[limits]\nmax_instances = 0",
            "a whole number of instances, 1 to 10_000",
        ),
        ("[limits]\nmax_instances = 1.5", "a whole number"),
        ("[limits]\nmax_instances = []", "a whole number"),
        (
            "[limits]\nmemory_reservation_bytes = \"1MiB\"",
            "below max_memory_bytes 4194304; reserve at least the cap",
        ),
        (
            "[limits]\nwatchdog_tick = \"300ms\"",
            "2:17 limits.watchdog_tick = \"300ms\": watchdog_tick is 300ms; use 1 ms up to watchdog",
        ),
        // The number that does not suit a default stands in the file; the default does not.
        (
            "[limits]\nmax_memory_bytes = \"8MiB\"",
            "memory_reservation_bytes is 4194304, below max_memory_bytes 8388608",
        ),
        (
            "[engine]\ndevice = \"tpu\"",
            "`tpu` is no device: give cpu, cuda",
        ),
        ("[engine]\nattention_backend = \"MAGIC\"", "MAGIC"),
        (
            "[engine]\ncudagraph_mode = \"MAGIC\"",
            "MAGIC: unknown; valid are NONE",
        ),
        (
            "[engine]\nkv_cache_dtype = \"int4\"",
            "give one of \"auto\"",
        ),
        (
            "[engine]\nmemory_fraction = 1.5",
            "a number above 0 and at most 1",
        ),
        (
            "[engine]\nmemory_fraction = nan",
            "a number above 0 and at most 1",
        ),
        (
            "[engine]\nenable_prefix_caching = \"yes\"",
            "give true or false",
        ),
        (
            "[engine]\ncudagraph_capture_sizes = [1, 0]",
            "a list of whole numbers above 0",
        ),
        ("[engine]\nmax_num_seqs = 1_000_000", "65536 requests"),
        ("[engine]\nmax_model_len = 1", "it must be at least 2"),
        (
            "[engine]\nkernel_block_size = 7",
            "does not divide block_size 16",
        ),
        (
            "[builders.FLASHINFER.options]\nx = 3",
            "2:5 builders.FLASHINFER.options.x = 3: give text",
        ),
        (
            "[builders.FLASH_ATTN.policy]\non_fault = \"ignore\"",
            "one of \"fallback\", \"fail-step\", \"fail-closed\"",
        ),
        (
            "[builders.FLASH_ATTN.policy]\nwindow_steps = 4",
            "window_steps is 4, below quarantine_faults 8",
        ),
        (
            "[builders.FLASH_ATTN.policy.build_budget]\nreserve = \"1us\"",
            "give a time",
        ),
        (
            "[faults]\nmax_bytes = \"1MiB\"",
            "below max_bundle_bytes 33554432; the directory must hold one bundle",
        ),
        (
            "[tenants.acme]\nshare = 5000",
            "2:9 tenants.acme.share = 5000: give a number from 0.001 to 1000",
        ),
        (
            "[tenants.Acme]\nshare = 1",
            "1:10 tenants.Acme = : tenant name \"Acme\": use 1 to 64",
        ),
        (
            "[tenants.acme]\ngrant = \"subset\"",
            "tenants.acme.component = : component is not given",
        ),
        (
            "[tenants.acme]\ncomponent = \"default\"\nlimits.fuel_per_call = 1_000_000",
            "3:24 tenants.acme.limits.fuel_per_call = 1_000_000: fuel_per_call is 1000000, above the sandbox's 400000",
        ),
        (
            "[tenants.\"a.b\"]\ncomponent = \"default\"\npolicy.window_steps = 1",
            "3:23 tenants.\"a.b\".policy.window_steps = 1: window_steps is 1, below",
        ),
        (
            "[recording]\nmax_bytes = \"32MiB\"",
            "segment_bytes is 33554432, more than an eighth of max_bytes 33554432",
        ),
        (
            "[reload.gates]\nmax_build_ratio = inf",
            "give a number from 0.001 to 1000000000",
        ),
        (
            "[reload.canary]\nper_mille = 10\ntenants = [\"acme\"]",
            "canary has a share of 10",
        ),
        (
            "[provenance]\nrequire = \"signature\"",
            "require would admit nothing: give keys or key_files as well",
        ),
        ("[provenance]\nkeys = [\"nonsense\"]", "2:8 provenance.keys"),
        (
            "[provenance]\nallowed_hashes = [\"abc\"]",
            "is not a SHA-256",
        ),
        (
            "[builders.FLASH_ATTN]\ncomponent = \"oci://x/y:latest\"",
            "builders.FLASH_ATTN.component",
        ),
        (
            "[engine]\nspeculative_method = \"ngram\"\nnum_speculative_tokens = 0",
            "engine.num_speculative_tokens = 0: give a whole number of draft tokens, 1 to 16",
        ),
        (
            "[engine]\nspeculative_method = \"ngram\"",
            "num_speculative_tokens is not given, and speculative_method is ngram; give 1 to 16",
        ),
        (
            "[engine]\nprompt_lookup_max = 4",
            "prompt_lookup_max is given without speculative_method",
        ),
        (
            "[engine]\nspeculative_method = \"ngram\"\nnum_speculative_tokens = 3\nprompt_lookup_min = 4\nprompt_lookup_max = 2",
            "prompt_lookup_min is 4: it must not exceed prompt_lookup_max",
        ),
        (
            "[engine]\nspeculative_method = \"ngram\"\nnum_speculative_tokens = 3\nasync_scheduling = true",
            "async_scheduling is true: drafts follow from tokens",
        ),
        (
            "[engine]\nspeculative_method = \"eagle\"",
            "give one of \"ngram\", \"ngram_gpu\"",
        ),
        ("[admin]\nstate_dir = \"\"", "give text: a directory"),
        ("[admin\n", "is not TOML"),
        (
            "[limits]\nwatchdog = \"1s\"\nwatchdog = \"2s\"\n",
            "is not TOML: duplicate key",
        ),
    ] {
        let found = problems(text);
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        assert!(found[0].contains(expected), "{text}: {}", found[0]);
    }
}

#[test]
fn all_problems_are_told_at_once_with_their_places() {
    let path = written(
        "[limits]\nwatchdog = \"1ms\"\ncolour = \"red\"\n\n[engine]\nmax_num_seqs = \"many\"\nkv_cache_dtype = \"int4\"\n\
         [faults]\nmax_files = 0\n",
    );
    let ran = run(&["config", "check", &path.path]);
    ran.fails(4, &[&path.path, "5 problems"]);
    let places: Vec<&str> = ran
        .stdout
        .lines()
        .map(|line| line.strip_prefix(&path.path).unwrap())
        .map(|rest| &rest[..rest.find(": ").unwrap()])
        .collect();
    assert_eq!(places, [":2:12", ":3:1", ":6:16", ":7:18", ":9:13"]);
    // Numbers against each other as well.
    let found = problems(
        "[limits]\nwatchdog_tick = \"1min\"\nmax_memory_bytes = \"8MiB\"\n[faults]\nmax_bytes = \"1MiB\"",
    );
    assert_eq!(found.len(), 3, "{found:?}");
}

#[test]
fn a_file_that_cannot_be_used_gets_one_line() {
    let scratch = tempfile::tempdir().unwrap();
    let missing = scratch.path().join("none.toml");
    let binary = file(&scratch, "binary.toml", &[0xff, 0xfe]);
    let huge = file(&scratch, "huge.toml", &vec![b'#'; (1 << 20) + 1]);
    for (path, expected) in [
        (missing.to_str().unwrap(), "cannot be read"),
        (scratch.path().to_str().unwrap(), "is not a regular file"),
        (&binary, "is not UTF-8"),
        (&huge, "has more than 1048576 bytes"),
    ] {
        run(&["config", "check", path]).fails(4, &[path, expected, "timetable config default"]);
    }
    let bad = written("[limits]\nwatchdog = \"1ms\"\ncolour = 1\n");
    generate(&bad.path, &[]).fails(
        4,
        &[
            &bad.path,
            ":2:12",
            "watchdog",
            "and 1 more: timetable config check",
        ],
    );
}

#[test]
fn flags_come_before_the_file_and_the_file_before_defaults() {
    let path = written(
        "[engine]\nmax_num_seqs = 8\nblock_size = 32\n[builders.FLASH_ATTN.policy]\nquarantine_faults = 3\n\
         [builders.FLASH_ATTN.options]\na = \"1\"\n",
    );
    let shown = run(&[
        "config",
        "show",
        "--config",
        &path.path,
        "--max-num-seqs",
        "4",
        "--no-enable-prefix-caching",
        "--builder-option",
        "b=2",
        "--json",
    ]);
    let shown = shown.succeeds().json();
    for (key, value, source) in [
        ("engine.max_num_seqs", "4", "flag --max-num-seqs"),
        ("engine.block_size", "32", "file, line 3"),
        ("engine.max_num_batched_tokens", "512", "default"),
        (
            "engine.enable_prefix_caching",
            "false",
            "flag --no-enable-prefix-caching",
        ),
        (
            "builders.FLASH_ATTN.policy.quarantine_faults",
            "3",
            "file, line 5",
        ),
        (
            "builders.FLASH_ATTN.policy.window_steps",
            "10_000",
            "default",
        ),
        ("builders.FLASH_ATTN.options.a", "\"1\"", "file, line 7"),
        (
            "builders.FLASH_ATTN.options.b",
            "\"2\"",
            "flag --builder-option",
        ),
        ("limits.watchdog", "\"200ms\"", "default"),
    ] {
        assert_eq!(shown[key]["value"], value, "{key}");
        assert_eq!(shown[key]["source"], source, "{key}");
    }
    // As a table as well.
    let table = run(&["config", "show", "--config", &path.path]);
    let line = table
        .succeeds()
        .stdout
        .lines()
        .find(|line| line.starts_with("engine.block_size "))
        .unwrap()
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ");
    assert_eq!(line, "engine.block_size 32 file, line 3 restart");
    // A flag that does not suit the file is named.
    run(&[
        "config",
        "show",
        "--config",
        &path.path,
        "--block-size",
        "0",
    ])
    .fails(4, &["--block-size", "block_size is 0"]);
}

fn generate(config: &str, extra: &[&str]) -> Ran {
    let model = tiny_llama();
    let mut arguments = vec![
        "generate",
        "--model",
        model.to_str().unwrap(),
        "--config",
        config,
        "--prompt",
        "t1 t2 t3",
        "--max-tokens",
        "8",
        "--json",
    ];
    arguments.extend(extra);
    run(&arguments)
}

#[test]
fn generate_runs_by_its_file() {
    let scratch = tempfile::tempdir().unwrap();
    let component = timetable_reference::component("flash-attn-fixed-split").unwrap();
    file(&scratch, "mine.wasm", component.bytes);
    let text = "[engine]\nmax_model_len = 64\nnum_gpu_blocks_override = 64\nweights = \"f32\"\n\
                [admin]\nsocket = \"none\"\nstate_dir = \"state\"\n\
                [builders.FLASH_ATTN]\ncomponent = \"mine.wasm\"\npolicy.quarantine_faults = 3\n";
    let path = file(&scratch, "timetable.toml", text.as_bytes());
    let report = generate(&path, &[]).succeeds().json();
    let builder = &report["builders"][0];
    // Paths are taken from the file's directory.
    let origin = builder["active"]["origin"].as_str().unwrap();
    assert!(origin.ends_with("/mine.wasm"), "{origin}");
    assert!(scratch.path().join("state").is_dir());
    assert_eq!(builder["policy"]["quarantine_faults"], 3);
    assert_eq!(builder["policy"]["window_steps"], 10_000);
    // The context of the file holds, and a flag's comes before it.
    let long = "t5 ".repeat(80);
    generate(&path, &["--prompt", &long]).fails(4, &["80", "64"]);
    generate(&path, &["--prompt", &long, "--max-model-len", "128"]).succeeds();
    // Its limits are the sandbox's.
    let tight = format!("{text}[limits]\nmax_component_bytes = \"1KiB\"\n");
    let tight = file(&scratch, "tight.toml", tight.as_bytes());
    generate(&tight, &[]).fails(4, &["mine.wasm", "1024"]);
}

/// A host that runs by a file for as long as it is looked at.
struct Host {
    child: std::process::Child,
    scratch: tempfile::TempDir,
    socket: String,
    config: String,
}

impl Host {
    fn start(settings: &str) -> Host {
        let scratch = tempfile::tempdir().unwrap();
        let config = file(&scratch, "timetable.toml", settings.as_bytes());
        let socket = scratch.path().join("admin.sock");
        let socket = socket.to_str().unwrap().to_owned();
        let child = support::timetable()
            .args([
                "generate",
                "--model",
                tiny_llama().to_str().unwrap(),
                "--json",
            ])
            .args(["--config", &config, "--admin", &socket, "--ignore-eos"])
            .args(["--max-tokens", "500", "--max-num-seqs", "2"])
            .args(
                (0..2000)
                    .flat_map(|index| ["--prompt".to_owned(), format!("t{}", 40 + index % 400)]),
            )
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let host = Host {
            child,
            scratch,
            socket,
            config,
        };
        host.wait_for(|group| group["steps"].as_u64() > Some(0));
        host
    }

    /// Its only group, once it is as it should be.
    fn wait_for(&self, condition: impl Fn(&Value) -> bool) -> Value {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            let ran = run(&["builders", "--admin", &self.socket, "--json"]);
            if ran.code == 0 && condition(&ran.json()["builders"][0]) {
                return ran.json()["builders"][0].clone();
            }
            assert!(
                std::time::Instant::now() < deadline,
                "{}{}",
                ran.stdout,
                ran.stderr
            );
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    fn apply(&self, settings: &str) -> Ran {
        std::fs::write(&self.config, settings).unwrap();
        run(&[
            "config",
            "apply",
            &self.config,
            "--admin",
            &self.socket,
            "--json",
        ])
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// The changes that an answer names, each as `setting from to live`.
fn changes(ran: &Ran) -> Vec<String> {
    ran.succeeds().json()["changes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|change| {
            let text = |key: &str| change[key].as_str().unwrap().to_owned();
            let (setting, from, to) = (text("setting"), text("from"), text("to"));
            format!("{setting} {from} {to} {}", change["live"])
        })
        .collect()
}

#[test]
fn what_can_change_live_does_and_what_cannot_is_named() {
    let start = "[engine]\nnum_gpu_blocks_override = 256\nweights = \"f32\"\n";
    let host = Host::start(start);
    let before = host.wait_for(|_| true);
    assert_eq!(before["policy"]["on_fault"], "fallback");

    let policy = "[builders.FLASH_ATTN.policy]\non_fault = \"fail-step\"\nquarantine_faults = 3\n";
    let bounds = "[limits]\nwatchdog = \"1s\"\n[faults]\ndir = \"faults\"\n";
    let ran = host.apply(&format!("{start}{policy}{bounds}"));
    let dir = host.scratch.path().join("faults");
    assert_eq!(
        changes(&ran),
        [
            "builders.FLASH_ATTN.policy.on_fault \"fallback\" \"fail-step\" true".to_owned(),
            "builders.FLASH_ATTN.policy.quarantine_faults 8 3 true".to_owned(),
            format!("faults.dir - \"{}\" true", dir.display()),
            "limits.watchdog \"200ms\" \"1s\" false".to_owned(),
        ]
    );
    assert!(dir.is_dir());
    let group = host.wait_for(|_| true);
    assert_eq!(group["policy"]["on_fault"], "fail-step");
    assert_eq!(group["policy"]["quarantine_faults"], 3);
    assert_eq!(group["active"], before["active"]);

    // Applied again, only what waits for a restart is left.
    let again = host.apply(&format!("{start}{policy}{bounds}"));
    assert_eq!(changes(&again), ["limits.watchdog \"200ms\" \"1s\" false"]);

    // How versions get into service from now on: a candidate first.
    let staged = format!("{start}[reload]\nshadow_steps = 1_000_000\n");
    assert_eq!(
        changes(&host.apply(&staged)).last().unwrap(),
        "reload.shadow_steps 0 1_000_000 true"
    );
    let builder = "[builders.FLASH_ATTN]\noptions = { splits = \"2\" }\n";
    host.apply(&format!("{staged}{builder}")).succeeds();
    host.wait_for(|group| group["candidate"]["stage"] == "shadow");
    host.apply(start).succeeds();

    // Options and the component are a new version.
    let component = timetable_reference::component("flash-attn-fixed-split").unwrap();
    file(&host.scratch, "mine.wasm", component.bytes);
    let builder =
        "[builders.FLASH_ATTN]\ncomponent = \"mine.wasm\"\noptions = { splits = \"3\" }\n";
    let ran = host.apply(&format!("{start}{builder}"));
    let version = ran.succeeds().json()["versions"][0]["version"]["version"].clone();
    let group = host.wait_for(|group| group["active"]["version"] == version);
    assert!(
        group["active"]["origin"]
            .as_str()
            .unwrap()
            .ends_with("/mine.wasm")
    );
    assert_eq!(group["previous"], before["active"]);
    // What the file does not say any more is the default again.
    assert_eq!(group["policy"]["on_fault"], "fallback");
    let ran = host.apply(&format!("{start}{builder}").replace("\"3\"", "\"4\""));
    assert_eq!(
        changes(&ran),
        ["builders.FLASH_ATTN.options.splits \"3\" \"4\" true"]
    );
    host.wait_for(|group| group["active"]["version"] != version);
    assert_eq!(
        changes(&host.apply(&format!("{start}{builder}").replace("\"3\"", "\"4\""))).len(),
        0
    );
}

#[test]
fn tenants_of_the_file_have_builders_of_their_own() {
    let start = "[engine]\nnum_gpu_blocks_override = 256\nweights = \"f32\"\n\
                 [recording]\ndir = \"recording\"\n\
                 [tenants.plain]\nshare = 2\n\
                 [tenants.acme]\ncomponent = \"default\"\npolicy.quarantine_faults = 3\n";
    let host = Host::start(start);
    assert!(host.scratch.path().join("recording").is_dir());
    let of_acme = || {
        let ran = run(&["builders", "--admin", &host.socket, "--json"]);
        let table = ran.succeeds().json();
        let groups = table["builders"].as_array().unwrap();
        assert_eq!(groups.len(), 2, "{table}");
        assert_eq!(groups[0]["tenant"], Value::Null);
        assert_eq!(groups[0]["policy"]["quarantine_faults"], 8);
        assert_eq!(groups[1]["tenant"], "acme");
        groups[1].clone()
    };
    let before = of_acme();
    assert_eq!(before["policy"]["quarantine_faults"], 3);

    // Its policy and component change live; its share and who there is do not.
    let component = timetable_reference::component("flash-attn-fixed-split").unwrap();
    file(&host.scratch, "mine.wasm", component.bytes);
    let changed = start
        .replace("share = 2", "share = 3")
        .replace("quarantine_faults = 3", "quarantine_faults = 5")
        .replace("\"default\"", "\"mine.wasm\"")
        + "[tenants.new]\n";
    let ran = host.apply(&changed);
    let mine = host.scratch.path().join("mine.wasm");
    assert_eq!(
        changes(&ran),
        [
            format!(
                "tenants.acme.component \"default\" \"{}\" true",
                mine.display()
            ),
            "tenants.acme.policy.quarantine_faults 3 5 true".to_owned(),
            "tenants.new.share - 1.0 false".to_owned(),
            "tenants.plain.share 2.0 3.0 false".to_owned(),
        ]
    );
    let versions = ran.json()["versions"].clone();
    assert_eq!(versions[0]["tenant"], "acme");
    let after = of_acme();
    assert_eq!(after["policy"]["quarantine_faults"], 5);
    let served = [&after["active"]["version"], &after["pending"]["version"]];
    assert!(
        served.contains(&&versions[0]["version"]["version"]),
        "{after}"
    );
    // What waits for a restart is told again.
    assert_eq!(changes(&host.apply(&changed)).len(), 2);
}

#[test]
fn a_configuration_that_is_refused_changes_nothing_of_a_running_host() {
    let start = "[engine]\nnum_gpu_blocks_override = 256\nweights = \"f32\"\n";
    let host = Host::start(start);
    let before = host.wait_for(|_| true);
    file(&host.scratch, "bad.wasm", b"\0asm\x01\0\0\0");
    let policy = "[builders.FLASH_ATTN]\npolicy.quarantine_faults = 3\n";
    for (addition, parts) in [
        (
            "component = \"bad.wasm\"\n",
            &["bad.wasm", "core module", "stays"][..],
        ),
        (
            "component = \"none.wasm\"\n",
            &["none.wasm", "cannot be read"],
        ),
        (
            "[faults]\ndir = \"bad.wasm\"\n",
            &["bad.wasm", "is not a directory"],
        ),
        ("colour = \"red\"\n", &["timetable.toml", "is no setting"]),
        (
            "[limits]\nwatchdog = \"1ms\"\n",
            &["limits.watchdog", "give a time"],
        ),
        (
            "policy.window_steps = 2\n",
            &["window_steps is 2, below quarantine_faults 3"],
        ),
    ] {
        host.apply(&format!("{start}{policy}{addition}"))
            .fails(4, parts);
        let group = host.wait_for(|_| true);
        assert_eq!(group["policy"], before["policy"], "{addition}");
        assert_eq!(group["active"], before["active"], "{addition}");
        assert_eq!(group["pending"], Value::Null, "{addition}");
    }
    assert_eq!(changes(&host.apply(&format!("{start}{policy}"))).len(), 1);
}
