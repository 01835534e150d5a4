//! kill −9 at random points during a storm of reloads: the next start finds a complete version that was active before.
//!
//! Eight kills; with `TIMETABLE_TEST_FULL` fifty. `TIMETABLE_TEST_SEED` repeats a run up to the scheduler's whims.

mod support;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{timetable, tiny_llama};
use timetable_sandbox::{ContentHash, StateDir};

/// SplitMix64: small, and the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}

/// A component with options, as it is submitted.
struct Version {
    bytes: Vec<u8>,
    options: Value,
}

impl Version {
    fn key(&self) -> (String, String) {
        (
            ContentHash::of(&self.bytes).to_hex(),
            self.options.to_string(),
        )
    }
}

/// Versions that may be active.
fn good() -> Vec<Version> {
    let fixed = timetable_reference::component("flash-attn-fixed-split").unwrap();
    let reference = timetable_reference::component("flash-attn").unwrap();
    [
        (fixed.bytes, json!([["splits", "1"]])),
        (fixed.bytes, json!([["splits", "2"]])),
        (reference.bytes, json!([])),
    ]
    .into_iter()
    .map(|(bytes, options)| Version {
        bytes: bytes.to_vec(),
        options,
    })
    .collect()
}

/// One that must never be: each instance traps in its first live call, after those that it is tried with.
fn bad() -> Version {
    Version {
        bytes: timetable_reference::chaos(timetable_types::Family::FlashAttn)
            .unwrap()
            .to_vec(),
        options: json!([["chaos", "trap"], ["chaos-from-call", "7"]]),
    }
}

struct Scratch {
    dir: tempfile::TempDir,
}

impl Scratch {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn start(&self) -> Child {
        let path = |name: &str| self.path(name).to_str().unwrap().to_owned();
        timetable()
            .args(["generate", "--model", tiny_llama().to_str().unwrap()])
            .args(["--state-dir", &path("state"), "--cache-dir", &path("cache")])
            .args(["--admin", &path("admin.sock"), "--json", "--weights", "f32"])
            .args(["--num-gpu-blocks-override", "256", "--max-num-seqs", "4"])
            // Longer than any run: it ends by the kill.
            .args(["--ignore-eos", "--max-tokens", "500", "--threads", "1"])
            .args(
                (0..2000)
                    .flat_map(|index| ["--prompt".to_owned(), format!("t{}", 40 + index % 400)]),
            )
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// One request to the host, if it answers.
    fn ask(&self, request: &Value, payload: &[u8]) -> Option<Value> {
        let mut stream = UnixStream::connect(self.path("admin.sock")).ok()?;
        stream.write_all(format!("{request}\n").as_bytes()).ok()?;
        stream.write_all(payload).ok()?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).ok()?;
        serde_json::from_str(&answer).ok()
    }

    fn submit(&self, version: &Version, plan: &Value) -> Option<Value> {
        let request = json!({
            "op": "reload", "backend": "FLASH_ATTN", "origin": "storm", "component_bytes": version.bytes.len(),
            "options": version.options, "plan": plan,
        });
        self.ask(&request, &version.bytes)
    }

    /// What serves, once steps are built.
    fn serves(&self, child: &mut Child) -> Value {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(answer) = self.ask(&json!({ "op": "builders" }), &[])
                && let builder = &answer["ok"]["builders"][0]
                && builder["steps"].as_u64() > Some(0)
            {
                return builder.clone();
            }
            if let Some(status) = child.try_wait().unwrap() {
                let mut text = String::new();
                std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut text)
                    .unwrap();
                panic!("the host does not start ({status}): {text}");
            }
            assert!(Instant::now() < deadline, "the host does not serve");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The manifest reads, and every component that it names is there, whole. What it names, by role.
fn check(state: &Path) -> BTreeMap<&'static str, (String, String)> {
    let dir = StateDir::open(state).expect("a state directory that reads");
    let mut found = BTreeMap::new();
    for (_, slot) in dir.slots() {
        let candidate = slot.candidate.as_ref().map(|candidate| &candidate.version);
        for (role, kept) in [
            ("active", slot.active.as_ref()),
            ("previous", slot.previous.as_ref()),
            ("candidate", candidate),
        ] {
            let Some(kept) = kept else { continue };
            dir.component(kept.component).expect("a whole component");
            let options = json!(kept.options).to_string();
            found.insert(role, (kept.component.to_hex(), options));
        }
    }
    found
}

#[test]
fn a_host_that_is_killed_at_any_point_starts_with_a_version_that_was_active() {
    let full = std::env::var_os("TIMETABLE_TEST_FULL").is_some();
    let kills = if full { 50 } else { 8 };
    let seed = std::env::var("TIMETABLE_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| u64::from(std::process::id()) ^ 0x5eed);
    println!("seed {seed}, {kills} kills");
    let mut random = Random(seed);
    let dir = tempfile::tempdir().unwrap();
    let scratch = Scratch { dir };
    let (good, bad) = (good(), bad());
    let allowed: Vec<(String, String)> = good.iter().map(Version::key).collect();
    let gates = json!({
        "max_build_ratio": 1e9, "max_extra_build_us": 1_000_000_000, "max_fuel_ratio": 1e9, "min_observed_per_mille": 0,
    });
    let immediate = json!({});
    let staged =
        json!({ "shadow_steps": 3, "canary": { "per_mille": 500, "steps": 3 }, "gates": gates });
    let (submitted, took) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let mut roles: BTreeMap<&str, usize> = BTreeMap::new();
    for kill in 0..kills {
        let mut child = scratch.start();
        // One in five is killed while it starts.
        let starting = random.below(5) == 0 && kill > 0;
        if !starting {
            scratch.serves(&mut child);
        }
        // However slow the machine is: some requests into the storm, and then anywhere in the next.
        let answers = if starting {
            0
        } else {
            random.below(10) as usize
        };
        let after = Duration::from_micros(random.below(60_000));
        let before = submitted.load(Ordering::Relaxed);
        std::thread::scope(|scope| {
            let mut choices = Random(random.below(u64::MAX));
            let storm = scope.spawn({
                let (scratch, good, bad, submitted, took) =
                    (&scratch, &good, &bad, &submitted, &took);
                let (immediate, staged) = (&immediate, &staged);
                move || {
                    let give_up = Instant::now() + Duration::from_secs(30);
                    while Instant::now() < give_up {
                        let version = &good[choices.below(good.len() as u64) as usize];
                        let answer = match choices.below(8) {
                            0..=2 => scratch.submit(version, immediate),
                            3..=5 => scratch.submit(version, staged),
                            6 => scratch.submit(bad, staged),
                            _ => scratch
                                .ask(&json!({ "op": "rollback", "backend": "FLASH_ATTN" }), &[]),
                        };
                        let Some(answer) = answer else { return };
                        submitted.fetch_add(1, Ordering::Relaxed);
                        took.fetch_add(usize::from(answer["ok"].is_object()), Ordering::Relaxed);
                    }
                }
            });
            let patience = Instant::now() + Duration::from_secs(10);
            while submitted.load(Ordering::Relaxed) < before + answers && Instant::now() < patience
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(after);
            child.kill().unwrap();
            child.wait().unwrap();
            storm.join().unwrap();
        });

        let found = check(&scratch.path("state"));
        if let Some(active) = found.get("active") {
            assert!(
                allowed.contains(active),
                "kill {kill}: {active:?} was never active"
            );
        }
        for role in found.keys() {
            *roles.entry(*role).or_default() += 1;
        }
        // And it serves, with that version.
        let mut child = scratch.start();
        let builder = scratch.serves(&mut child);
        let info = &builder["active"];
        let serves = (
            info["component"].as_str().unwrap().to_owned(),
            info["options"].to_string(),
        );
        match found.get("active") {
            Some(active) => assert_eq!(serves, *active, "kill {kill}"),
            // Nothing was recorded yet: the embedded one.
            None => assert_eq!(info["origin"], "embedded flash-attn", "kill {kill}"),
        }
        assert_eq!(builder["failed_steps"], 0);
        child.kill().unwrap();
        child.wait().unwrap();
        check(&scratch.path("state"));
    }
    println!(
        "{kills} kills among {} requests, of which {} were taken; after them the manifest named {roles:?}",
        submitted.load(Ordering::Relaxed),
        took.load(Ordering::Relaxed)
    );
    assert!(took.load(Ordering::Relaxed) > kills, "a storm");
}
