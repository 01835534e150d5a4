//! Components by registry and signature, as an operator uses them: at start, by a reload, after a restart.

#[path = "../../provenance/tests/support/mod.rs"]
mod registry;
mod support;

use std::path::Path;

use ed25519_dalek::{Signer, SigningKey};
use registry::{Registry, Reply, blob};
use serde_json::Value;
use support::{Host, Ran, file, run, tiny_llama};
use timetable_provenance::Digest;

/// A builder that this program does not contain: one that it does, with a custom section more.
fn component(name: &str) -> Vec<u8> {
    let mut bytes = timetable_reference::component("flash-attn-fixed-split")
        .unwrap()
        .bytes
        .to_vec();
    let name = name.as_bytes();
    bytes.extend([0, name.len() as u8 + 1, name.len() as u8]);
    bytes.extend(name);
    bytes
}

fn signer() -> SigningKey {
    SigningKey::from_bytes(&[7; 32])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes the component, and beside it its signature by `signer`.
fn signed(scratch: &tempfile::TempDir, name: &str, signer: &SigningKey) -> String {
    let bytes = component(name);
    let path = file(scratch, &format!("{name}.wasm"), &bytes);
    std::fs::write(format!("{path}.sig"), hex(&signer.sign(&bytes).to_bytes())).unwrap();
    path
}

fn key(scratch: &tempfile::TempDir) -> String {
    let key = hex(signer().verifying_key().as_bytes());
    file(scratch, "release.pub", key.as_bytes())
}

/// A host that is expected not to start.
fn generate(extra: &[&str]) -> Ran {
    let model = tiny_llama();
    let mut arguments = vec!["generate", "--model", model.to_str().unwrap()];
    arguments.extend([
        "--prompt",
        "t1",
        "--max-tokens",
        "2",
        "--admin",
        "none",
        "--json",
    ]);
    arguments.extend(["--num-gpu-blocks-override", "64", "--weights", "f32"]);
    arguments.extend(extra);
    run(&arguments)
}

fn origin(table: &Value) -> &Value {
    &table["builders"][0]["active"]["origin"]
}

#[test]
fn a_builder_from_a_registry_serves_at_start_and_by_reload() {
    let registry = Registry::start();
    let first = registry.push(&component("first"));
    let second = registry.push(&component("second"));

    let ran = generate(&["--builder", &format!("FLASH_ATTN={first}")]);
    let report = ran.succeeds().json();
    assert_eq!(*origin(&report), first.as_str());

    let host = Host::start(&[]);
    let reloaded = host
        .ask(&["reload", "FLASH_ATTN", &second])
        .succeeds()
        .json();
    assert_eq!(
        reloaded["component"],
        hex(&Digest::of(&component("second")).0)
    );
    let table = host.wait_for(|table| *origin(table) == second.as_str());
    assert_eq!(
        table["builders"][0]["active"]["version"],
        reloaded["version"]
    );

    // Each thing that is wrong with a registry is one line, and what serves stays.
    for (reference, parts) in [
        (
            second.replace("@sha256:", ":latest@sha256:"),
            ["leave the tag out", "oci://registry/repository@sha256:"],
        ),
        (
            format!("oci://{}/me/builder:latest", registry.address),
            ["names no digest", "oci://registry/repository@sha256:"],
        ),
    ] {
        let ran = host.ask(&["reload", "FLASH_ATTN", &reference]);
        assert_eq!(ran.code, 2, "{}", ran.stderr);
        for part in parts {
            assert!(ran.stderr.contains(part), "{}", ran.stderr);
        }
    }
    registry.reply(&blob(&component("first")), Reply::of("something else"));
    host.ask(&["reload", "FLASH_ATTN", &first])
        .fails(4, &[&first, "nothing was used of them"]);
    let unknown = registry.reference(Digest::of(b"unknown"));
    host.ask(&["reload", "FLASH_ATTN", &unknown])
        .fails(4, &[&unknown, "the registry has no manifest"]);
    assert_eq!(*origin(&host.wait_for(|_| true)), second.as_str());
    assert_eq!(host.finish()["failed_steps"], 0);
}

#[test]
fn a_host_that_requires_signatures_takes_no_other_component() {
    let scratch = tempfile::tempdir().unwrap();
    let good = signed(&scratch, "good", &signer());
    let other = signed(&scratch, "other", &SigningKey::from_bytes(&[8; 32]));
    let unsigned = file(&scratch, "unsigned.wasm", &component("unsigned"));
    let key = key(&scratch);

    let host = Host::start(&["--trusted-key", &key]);
    let before = host.wait_for(|_| true)["builders"][0]["active"].clone();
    host.ask(&["reload", "FLASH_ATTN", &unsigned]).fails(
        4,
        &["unsigned.wasm", "is not signed", "--signature", "stays"],
    );
    host.ask(&["reload", "FLASH_ATTN", &other])
        .fails(4, &["other.wasm", "by none of the 1 trusted keys", "stays"]);
    let signature = format!("{good}.sig");
    host.ask(&["reload", "FLASH_ATTN", &unsigned, "--signature", &signature])
        .fails(4, &["unsigned.wasm", "by none of the 1 trusted keys"]);
    host.ask(&["reload", "FLASH_ATTN", &good, "--signature", &unsigned])
        .fails(4, &["signature", "unsigned.wasm", "more than 4096 bytes"]);
    assert_eq!(host.wait_for(|_| true)["builders"][0]["active"], before);

    let reloaded = host.ask(&["reload", "FLASH_ATTN", &good]).succeeds().json();
    assert_eq!(
        reloaded["signed_by"],
        format!("ed25519:{}", hex(signer().verifying_key().as_bytes()))
    );
    host.wait_for(|table| *origin(table) == good.as_str());
    // What the program contains is part of it: it may come back.
    host.ask(&["rollback", "FLASH_ATTN"]).succeeds();
    host.wait_for(|table| table["builders"][0]["active"] == before);
    assert_eq!(host.finish()["failed_steps"], 0);
}

#[test]
fn the_policy_holds_for_the_command_line_and_after_a_restart() {
    let scratch = tempfile::tempdir().unwrap();
    let state = scratch.path().join("state");
    let state = state.to_str().unwrap();
    let good = signed(&scratch, "good", &signer());
    let unsigned = file(&scratch, "unsigned.wasm", &component("unsigned"));
    let key = key(&scratch);
    let trusted = ["--trusted-key", &key, "--state-dir", state];

    let builder = format!("FLASH_ATTN={unsigned}");
    generate(&["--builder", &builder, "--trusted-key", &key])
        .fails(4, &["unsigned.wasm", "is not signed"]);

    // The signature is kept with the component: both files may go.
    let host = Host::start(&trusted);
    host.ask(&["reload", "FLASH_ATTN", &good]).succeeds();
    host.finish();
    for path in [good.clone(), format!("{good}.sig")] {
        std::fs::remove_file(Path::new(&path)).unwrap();
    }
    let report = generate(&trusted);
    assert_eq!(*origin(&report.succeeds().json()), good.as_str());

    // A host whose policy is another one does not run it.
    let other = SigningKey::from_bytes(&[8; 32]).verifying_key();
    let other = file(&scratch, "other.pub", hex(other.as_bytes()).as_bytes());
    generate(&["--trusted-key", &other, "--state-dir", state])
        .fails(4, &["good.wasm", "by none of the 1 trusted keys"]);
    // Where nothing is required, it does.
    generate(&["--state-dir", state]).succeeds();
}

#[test]
fn an_allow_list_admits_what_it_names() {
    let scratch = tempfile::tempdir().unwrap();
    let good = signed(&scratch, "good", &signer());
    let listed = file(&scratch, "listed.wasm", &component("listed"));
    let key = key(&scratch);
    let line = format!(
        "{}  listed.wasm\n",
        hex(&Digest::of(&component("listed")).0)
    );
    let list = file(&scratch, "allowed", line.as_bytes());
    let given = |path: &str| format!("FLASH_ATTN={path}");

    let only = ["--allow-hashes", &list];
    generate(&[&["--builder", &given(&listed)], &only[..]].concat()).succeeds();
    generate(&[&["--builder", &given(&good)], &only[..]].concat())
        .fails(4, &["good.wasm", "is not among the 1 contents"]);
    let either = ["--allow-hashes", &list, "--trusted-key", &key];
    for path in [&listed, &good] {
        generate(&[&["--builder", &given(path)], &either[..]].concat()).succeeds();
    }
    let both = [
        "--allow-hashes",
        &list,
        "--trusted-key",
        &key,
        "--require-signature",
    ];
    for (path, part) in [(&listed, "is not signed"), (&good, "is not among")] {
        generate(&[&["--builder", &given(path)], &both[..]].concat()).fails(4, &[path, part]);
    }
}

#[test]
fn a_policy_that_does_not_read_gets_one_line() {
    let scratch = tempfile::tempdir().unwrap();
    let bad = file(&scratch, "bad.pub", b"nonsense");
    generate(&["--trusted-key", &bad]).fails(4, &["bad.pub", "`nonsense` is no public key"]);
    generate(&["--trusted-key", "/nonexistent.pub"])
        .fails(4, &["/nonexistent.pub", "cannot be read"]);
    generate(&["--allow-hashes", &bad]).fails(4, &["bad.pub, line 1", "is not a SHA-256"]);
    let empty = file(&scratch, "empty", b"# none yet\n");
    generate(&["--allow-hashes", &empty]).fails(4, &["allow-list", "is empty"]);
    let ran = generate(&["--require-signature"]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("--trusted-key"), "{}", ran.stderr);
}
