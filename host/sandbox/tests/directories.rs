//! The compiled-code cache and the state directory: whose they are, what survives, and what is said when they cannot be used.

mod support;

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use support::{Guest, config, decodes};
use timetable_attention::MetadataBuilder;
use timetable_sandbox::{
    CodeCache, ContentHash, DirError, KeptCandidate, KeptVersion, Limits, Sandbox, SlotState,
    Stage, StateDir, StateError, WasmBuilder,
};
use timetable_types::Family;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// A directory of another user: one given away, if this process may do that; else the root directory.
fn foreign(parent: &Path) -> PathBuf {
    let given = parent.join("given");
    fs::create_dir(&given).unwrap();
    match std::os::unix::fs::chown(&given, Some(12345), None) {
        Ok(()) => given,
        Err(_) => PathBuf::from("/"),
    }
}

fn cached(dir: &Path) -> Sandbox {
    Sandbox::with_cache(Limits::default(), CodeCache::open(dir).unwrap()).unwrap()
}

fn builds(sandbox: &Sandbox, bytes: &[u8]) {
    let component = sandbox.load(bytes).unwrap();
    WasmBuilder::new(&component, &config())
        .unwrap()
        .build(&decodes(4), false)
        .unwrap();
}

fn only_file(dir: &Path) -> PathBuf {
    let files: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files[0].clone()
}

#[test]
fn the_cache_directory_is_the_hosts_own() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("a/b/cache");
    assert_eq!(CodeCache::open(&dir).unwrap().path(), dir);
    assert_eq!(mode(&dir), 0o700);

    fs::set_permissions(&dir, Permissions::from_mode(0o750)).unwrap();
    let error = CodeCache::open(&dir).unwrap_err();
    assert!(matches!(error, DirError::Mode { .. }), "{error:?}");
    assert!(
        error.to_string().contains("has mode 0750") && error.to_string().contains("chmod 0700"),
        "{error}"
    );

    let error = CodeCache::open(&foreign(temporary.path())).unwrap_err();
    assert!(matches!(error, DirError::Foreign { .. }), "{error:?}");
    assert!(error.to_string().contains("belongs to user"), "{error}");

    let file = temporary.path().join("file");
    fs::write(&file, "x").unwrap();
    assert!(matches!(
        CodeCache::open(&file).unwrap_err(),
        DirError::NotADirectory { .. }
    ));
    let link = temporary.path().join("link");
    fs::set_permissions(&dir, Permissions::from_mode(0o700)).unwrap();
    symlink(&dir, &link).unwrap();
    assert!(matches!(
        CodeCache::open(&link).unwrap_err(),
        DirError::NotADirectory { .. }
    ));
    let error = CodeCache::open(&file.join("below")).unwrap_err();
    assert!(matches!(error, DirError::Io { .. }), "{error:?}");
}

#[test]
fn code_is_taken_from_the_cache_only_if_it_is_whole() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("cache");
    let bytes = Guest::default().component();
    builds(&cached(&dir), &bytes);
    let file = only_file(&dir);
    let whole = fs::read(&file).unwrap();
    assert_eq!(mode(&file), 0o600);

    // Used again: the file is not written anew.
    let written = fs::metadata(&file).unwrap().modified().unwrap();
    builds(&cached(&dir), &bytes);
    assert_eq!(fs::metadata(&file).unwrap().modified().unwrap(), written);

    // Damaged anywhere, it is compiled again, and replaced.
    for damage in [0, 30, 100, whole.len() / 2, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[damage] ^= 1;
        fs::write(&file, &damaged).unwrap();
        builds(&cached(&dir), &bytes);
        assert_eq!(fs::read(&file).unwrap(), whole, "byte {damage}");
    }
    fs::write(&file, &whole[..10]).unwrap();
    builds(&cached(&dir), &bytes);
    assert_eq!(fs::read(&file).unwrap(), whole);

    // Another component has another file.
    builds(
        &cached(&dir),
        &Guest {
            name: "another",
            ..Guest::default()
        }
        .component(),
    );
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 2);
}

#[test]
fn a_cache_that_cannot_be_written_is_gone_without() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("cache");
    let sandbox = cached(&dir);
    // As with a full disk, the write fails; with the directory gone, for every user.
    fs::remove_dir(&dir).unwrap();
    builds(&sandbox, &Guest::default().component());
    assert!(!dir.exists());
}

/// Keeps `bytes` and makes them what is active.
fn activate(
    state: &mut StateDir,
    slot: &str,
    bytes: &[u8],
    origin: &str,
) -> Result<ContentHash, StateError> {
    let component = state.keep(bytes)?;
    let active = KeptVersion {
        component,
        origin: origin.to_owned(),
        options: Vec::new(),
    };
    let slots = SlotState {
        active: Some(active),
        ..SlotState::default()
    };
    state.set([(slot.to_owned(), slots)])?;
    Ok(component)
}

#[test]
fn what_is_active_survives_a_restart() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("state");
    let (one, two) = (
        Guest::default().component(),
        Guest {
            name: "two",
            ..Guest::default()
        }
        .component(),
    );
    let hash = {
        let mut state = StateDir::open(&dir).unwrap();
        assert_eq!(state.active(Family::FlashAttn), None);
        activate(&mut state, "flash-attn", &one, "one.wasm").unwrap();
        activate(&mut state, "flash-attn", &two, "two.wasm").unwrap();
        activate(&mut state, "flashinfer", b"never looked at here", "x").unwrap();
        let nothing = ("flashinfer".to_owned(), SlotState::default());
        state.set([nothing]).unwrap();
        ContentHash::of(&two)
    };
    let mut state = StateDir::open(&dir).unwrap();
    let active = state.active(Family::FlashAttn).unwrap().clone();
    assert_eq!(
        (active.component, active.origin.as_str()),
        (hash, "two.wasm")
    );
    assert_eq!(state.component(hash).unwrap(), two);
    assert_eq!(state.active(Family::Flashinfer), None);
    let kept = |component, origin: &str| KeptVersion {
        component,
        origin: origin.to_owned(),
        options: vec![("a".to_owned(), "b".to_owned())],
    };
    let whole = SlotState {
        active: Some(kept(hash, "two.wasm")),
        previous: Some(kept(state.keep(&one).unwrap(), "one.wasm")),
        candidate: Some(KeptCandidate {
            version: kept(state.keep(b"new").unwrap(), "new.wasm"),
            stage: Stage::Canary,
        }),
    };
    let slots = ["flash-attn", "flash-attn@lab"].map(|slot| (slot.to_owned(), whole.clone()));
    state.set(slots).unwrap();
    drop(state);
    // As a crash leaves it, in the middle of a write.
    fs::write(dir.join(".active.json.1.2.tmp"), "{").unwrap();
    fs::write(dir.join("components/.x.1.2.tmp"), "{").unwrap();
    let mut state = StateDir::open(&dir).unwrap();
    for slot in ["flash-attn", "flash-attn@lab"] {
        assert_eq!(state.slot(slot), Some(&whole));
    }
    assert_eq!(state.component(ContentHash::of(&one)).unwrap(), one);
    let missing = SlotState {
        active: Some(kept(ContentHash::of(b"?"), "x")),
        ..SlotState::default()
    };
    let missing = state.set([("flash-attn".to_owned(), missing)]).unwrap_err();
    assert!(matches!(missing, StateError::Missing { .. }), "{missing:?}");
    assert_eq!(state.slot("flash-attn"), Some(&whole));
    assert!(
        dir.join("components")
            .join(format!("{}.wasm", hash.to_hex()))
            .is_file()
    );
    // Nothing temporary is left.
    let names: Vec<_> = fs::read_dir(&dir)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names.len(), 3, "{names:?}");
}

#[test]
fn of_components_that_nothing_names_the_oldest_go() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("state");
    let mut state = StateDir::open(&dir).unwrap();
    let first = activate(&mut state, "flash-attn", b"first", "first").unwrap();
    state.keep_signature(first, b"signature").unwrap();
    let old = state.keep(b"old").unwrap();
    for index in 0..80_u32 {
        let hash = state.keep(&index.to_le_bytes()).unwrap();
        let path = dir
            .join("components")
            .join(format!("{}.wasm", hash.to_hex()));
        // One a second, whatever the file system's clock.
        let file = fs::File::options().append(true).open(path).unwrap();
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(index.into());
        file.set_modified(time).unwrap();
    }
    // Kept again: among the newest.
    state.keep(b"old").unwrap();
    activate(&mut state, "flashinfer", b"another", "another").unwrap();
    assert!(state.has(old) && state.has(first));
    assert_eq!(state.signature(first).unwrap().unwrap(), b"signature");
    assert_eq!(
        fs::read_dir(dir.join("components")).unwrap().count(),
        64 + 2 + 1
    );
    assert!(!state.has(ContentHash::of(&0_u32.to_le_bytes())));
    assert!(state.has(ContentHash::of(&79_u32.to_le_bytes())));
}

#[test]
fn a_kept_component_that_changed_on_disk_is_refused() {
    let temporary = tempfile::tempdir().unwrap();
    let mut state = StateDir::open(temporary.path().join("state").as_path()).unwrap();
    let hash = activate(&mut state, "flash-attn", b"right", "x").unwrap();
    let path = state
        .path()
        .join("components")
        .join(format!("{}.wasm", hash.to_hex()));
    fs::write(&path, "wrong").unwrap();
    let error = state.component(hash).unwrap_err();
    assert!(matches!(error, StateError::Changed { .. }), "{error:?}");
    assert!(error.to_string().contains("has the content"), "{error}");
    // Keeping it again mends it.
    state.keep(b"right").unwrap();
    assert_eq!(state.component(hash).unwrap(), b"right");
    fs::remove_file(&path).unwrap();
    assert!(matches!(
        state.component(hash).unwrap_err(),
        StateError::Missing { .. }
    ));
}

#[test]
fn a_state_directory_that_cannot_be_used_says_why() {
    let temporary = tempfile::tempdir().unwrap();
    let open = |path: &Path| StateDir::open(path).unwrap_err().to_string();
    assert!(open(&foreign(temporary.path())).contains("belongs to user"));
    let dir = temporary.path().join("state");
    let first = StateDir::open(&dir).unwrap();
    assert!(open(&dir).contains("in use by another process"));
    drop(first);

    fs::set_permissions(&dir, Permissions::from_mode(0o777)).unwrap();
    assert!(open(&dir).contains("has mode 0777"), "{}", open(&dir));
    fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
    StateDir::open(&dir).unwrap();

    for manifest in [
        "",
        "{",
        "[]",
        r#"{"active": {}}"#,
        r#"{"version": 3, "slots": {}}"#,
        r#"{"version": 2, "active": {}}"#,
        r#"{"version": 2, "slots": {"flash-attn": {"serves": null}}}"#,
        r#"{"version": 2, "slots": {"flash_attn": {}}}"#,
        r#"{"version": 2, "slots": {"flash-attn@Not A Name": {}}}"#,
        r#"{"version": 1, "active": {"flash-attn": {"component": "xyz", "origin": ""}}}"#,
    ] {
        fs::write(dir.join("active.json"), manifest).unwrap();
        let error = open(&dir);
        assert!(
            error.contains("is not a manifest of version 1 or 2"),
            "{error}"
        );
        assert!(error.contains("move it away"), "{error}");
    }
    // As versions before this one wrote it.
    let hash = ContentHash::of(b"one").to_hex();
    let old = format!(
        r#"{{"version": 1, "active": {{"flash-attn": {{"component": "{hash}", "origin": "o"}}}}}}"#
    );
    fs::write(dir.join("active.json"), old).unwrap();
    let state = StateDir::open(&dir).unwrap();
    assert_eq!(state.active(Family::FlashAttn).unwrap().origin, "o");
    drop(state);
    fs::remove_file(dir.join("active.json")).unwrap();

    // A write that fails, as on a full disk, is an error, and what was active stays so.
    let mut state = StateDir::open(&dir).unwrap();
    activate(&mut state, "flash-attn", b"one", "one").unwrap();
    fs::remove_file(dir.join("active.json")).unwrap();
    fs::create_dir(dir.join("active.json")).unwrap();
    let error = activate(&mut state, "flash-attn", b"two", "two").unwrap_err();
    assert!(error.to_string().contains("active.json"), "{error}");
    assert_eq!(state.active(Family::FlashAttn).unwrap().origin, "one");
}
