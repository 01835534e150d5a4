//! What is written comes back; what is cut, damaged or another file is said; what does not fit goes.

mod support;

use std::{fs, path::Path};

use support::{Host, component, recorder, settle};
use timetable_record::{
    Behind, Missing, RecordError, RecordedStep, RecorderOptions, Recording, RecordingError, record,
};
use timetable_sandbox::{Limits, Sandbox, TenantName};
use timetable_types::Family;

fn sandbox() -> Sandbox {
    Sandbox::new(Limits::default()).unwrap()
}

/// Every step, and what is missing.
fn read(path: &Path) -> Result<(Vec<RecordedStep>, Missing), RecordingError> {
    let mut steps = Recording::open(path)?.steps();
    let mut found = Vec::new();
    while let Some(step) = steps.next_step()? {
        found.push(step);
    }
    Ok((found, steps.missing().clone()))
}

/// A recording of one segment in several frames. Returns its bytes and how many steps it has.
fn several_frames(path: &Path) -> (Vec<u8>, usize) {
    let sandbox = sandbox();
    let (mut recorder, handle) = recorder(path);
    let mut host = Host::new(
        &sandbox,
        component(Family::FlashAttn),
        "FLASH_ATTN/0",
        &[],
        3,
    );
    for _ in 0..4 {
        host.step(&mut recorder);
        host.step(&mut recorder);
        settle(&handle);
    }
    handle.finish();
    (fs::read(path.join("00000000.ttrec")).unwrap(), 8)
}

#[test]
fn every_step_comes_back_as_it_was() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("recording");
    let sandbox = sandbox();
    let (mut recorder, handle) = recorder(&path);
    let chaos = timetable_reference::chaos(Family::FlashAttn).unwrap();
    let trap = [("chaos", "trap"), ("chaos-min-rows", "9")];
    let mut hosts = [
        Host::new(
            &sandbox,
            component(Family::FlashAttn),
            "FLASH_ATTN/0",
            &[],
            12,
        ),
        Host::new(
            &sandbox,
            component(Family::Flashinfer),
            "FLASHINFER/1",
            &[],
            7,
        ),
        Host::new(&sandbox, chaos, "FLASH_ATTN/2", &trap, 12),
    ];
    hosts[2].tenant = Some(TenantName::new("team-a").unwrap());
    for _ in 0..60 {
        for host in &mut hosts {
            host.step(&mut recorder);
        }
    }
    let figures = handle.finish();
    assert_eq!(
        (figures.steps, figures.written, figures.left_out),
        (180, 180, 0)
    );
    assert_eq!(figures.stopped, None);

    let (steps, missing) = read(&path).unwrap();
    assert_eq!(missing, Missing::default());
    assert_eq!(steps.len(), 180);
    let mut faults = 0;
    for (index, step) in steps.iter().enumerate() {
        let served = &hosts[index % 3].served[index / 3];
        assert_eq!(step.number, index as u64);
        assert_eq!(step.slot.tenant, hosts[index % 3].tenant);
        assert_eq!(step.common, served.common, "step {index}");
        assert_eq!(step.tensors, served.tensors, "step {index}");
        assert_eq!(step.metadata, served.built.metadata, "step {index}");
        assert_eq!(step.built_by, served.built.built_by);
        assert_eq!(step.build_time, served.built.build_time);
        assert_eq!(step.fuel, served.built.fuel);
        assert_eq!(step.fault.is_some(), served.built.fault.is_some());
        faults += usize::from(step.fault.is_some());
        if let Some(version) = &step.version {
            let asked = served.built.version.as_ref().unwrap();
            assert_eq!(version.version, asked.info().version);
            assert_eq!(version.bytes, asked.component().bytes());
            assert_eq!(&version.config, asked.config().as_ref());
        }
    }
    assert!(faults > 0, "the chaos builder faulted");
    // A segment without its bytes that repeat: a few hundred bytes a step, the components included.
    assert!(figures.bytes < 180 * 1000, "{} bytes", figures.bytes);
}

#[test]
fn a_segment_cut_anywhere_gives_its_whole_frames() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("recording");
    let (bytes, steps) = several_frames(&path);
    let cut = scratch.path().join("cut");
    fs::create_dir(&cut).unwrap();
    let (mut least, mut whole, mut seen) = (steps, 0, std::collections::BTreeSet::new());
    // The first frame has the component and is large; every byte of those after it.
    for len in bytes.len().saturating_sub(1500)..=bytes.len() {
        fs::write(cut.join("00000000.ttrec"), &bytes[..len]).unwrap();
        let (found, missing) = read(&cut).unwrap();
        assert!(found.len() >= whole, "at {len}: {} of {whole}", found.len());
        whole = found.len();
        least = least.min(whole);
        seen.insert(whole);
        assert!(missing.unfinished.len() <= 1);
        // Cut at a frame's end, it cannot be told from a host that was killed.
        assert_eq!(missing.not_ended, u64::from(len < bytes.len()));
        if missing.unfinished.is_empty() && len < bytes.len() {
            assert_eq!(whole % 2, 0, "frames of two steps");
        }
    }
    assert!(
        least < steps && whole == steps && seen.len() > 2,
        "{seen:?}"
    );
    // Space that was set aside and not written.
    let mut padded = bytes.clone();
    padded.resize(bytes.len() + 4096, 0);
    fs::write(cut.join("00000000.ttrec"), &padded).unwrap();
    let (found, missing) = read(&cut).unwrap();
    assert_eq!((found.len(), missing.unfinished.len()), (steps, 1));
    // Before its first entry there is nothing to read.
    for len in [0, 5, 22, 23, 60] {
        fs::write(cut.join("00000000.ttrec"), &bytes[..len]).unwrap();
        let error = read(&cut).unwrap_err().to_string();
        assert!(
            error.contains("ends before its first entry"),
            "{len}: {error}"
        );
    }
}

#[test]
fn a_changed_byte_is_found_wherever_it_is() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("recording");
    let (bytes, _) = several_frames(&path);
    let tail = bytes.len().saturating_sub(600)..bytes.len();
    for at in (0..200).chain((200..tail.start).step_by(97)).chain(tail) {
        let mut changed = bytes.clone();
        changed[at] ^= 0x20;
        fs::write(path.join("00000000.ttrec"), &changed).unwrap();
        let error = read(&path).expect_err("it is found");
        let text = error.to_string();
        assert!(!text.contains('\n'), "{text}");
        match error {
            RecordingError::Foreign { .. } | RecordingError::Format { .. } => assert!(at < 22),
            RecordingError::Damaged { .. } => assert!(at >= 22, "{text}"),
            other => panic!("byte {at}: {other}"),
        }
    }
}

#[test]
fn other_files_and_other_versions_are_told_apart_in_one_line() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("recording");
    let says = |text: &str| {
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
        assert!(!error.contains('\n'), "{error}");
    };
    says("give a directory that `--record` wrote");
    fs::create_dir(&path).unwrap();
    says("has no segments");
    let segment = path.join("00000000.ttrec");
    fs::write(&segment, "\0asm\x01\0\0\0").unwrap();
    says("begins with \".asm....\"");
    fs::write(&segment, "timetable-recording 2\nwhatever").unwrap();
    says("has format 2, and this version of Timetable reads 1");
    fs::write(&segment, "timetable-recording 11111111111111111111111111").unwrap();
    says("has format 111");
    fs::write(
        &segment,
        [b"timetable-recording 1\n".as_slice(), &[7; 100]].concat(),
    )
    .unwrap();
    says("is damaged at byte 22: its lengths");
}

#[test]
fn a_recording_is_bounded_and_its_oldest_steps_go() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("recording");
    let sandbox = sandbox();
    let max_bytes = 256 << 10;
    let options = RecorderOptions {
        max_bytes,
        behind: Behind::Wait,
        ..RecorderOptions::default()
    };
    let (mut recorder, handle) = record(&path, &Limits::default(), options).unwrap();
    let mut host = Host::new(
        &sandbox,
        component(Family::Flashinfer),
        "FLASHINFER/0",
        &[],
        60,
    );
    let mut steps = 0;
    while handle.figures().segments_removed < 3 {
        for _ in 0..50 {
            host.step(&mut recorder);
        }
        host.served.drain(..host.served.len() - 10);
        steps += 50;
        assert!(steps < 100_000, "{:?}", handle.figures());
    }
    let figures = handle.finish();
    assert_eq!((figures.written, figures.stopped), (steps, None));
    let on_disk: u64 = fs::read_dir(&path)
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .sum();
    assert!(
        on_disk <= max_bytes && on_disk == figures.bytes,
        "{on_disk}"
    );
    let (found, missing) = read(&path).unwrap();
    assert_eq!(missing.removed + found.len() as u64, steps);
    assert_eq!((missing.left_out, missing.not_ended), (0, 0));
    let numbers: Vec<u64> = found.iter().map(|step| step.number).collect();
    assert!(numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]));
    assert_eq!(numbers.last(), Some(&(steps - 1)));
    // The last ones are whole though what they were told by is gone with its segment.
    for (step, served) in found.iter().rev().zip(host.served.iter().rev()) {
        assert_eq!(step.tensors, served.tensors);
        assert_eq!(step.metadata, served.built.metadata);
    }
}

#[test]
fn steps_that_are_left_out_are_counted_and_the_recording_says_so() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("recording");
    let sandbox = sandbox();
    // 12 decodes fit, a prefill beside them may not.
    let options = RecorderOptions {
        max_step_bytes: 1400,
        behind: Behind::Wait,
        ..RecorderOptions::default()
    };
    let (mut recorder, handle) = record(&path, &Limits::default(), options).unwrap();
    let mut host = Host::new(
        &sandbox,
        component(Family::FlashAttn),
        "FLASH_ATTN/0",
        &[],
        4,
    );
    for _ in 0..100 {
        host.step(&mut recorder);
    }
    let figures = handle.finish();
    assert!(figures.left_out > 0 && figures.written > 0, "{figures:?}");
    assert_eq!(figures.left_out + figures.written, 100);
    let (found, missing) = read(&path).unwrap();
    assert_eq!(found.len() as u64, figures.written);
    assert_eq!((missing.left_out, missing.removed), (figures.left_out, 0));
    for step in &found {
        assert_eq!(step.tensors, host.served[step.number as usize].tensors);
    }
}

#[test]
fn several_recorders_one_after_the_other_share_a_directory() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("recording");
    let sandbox = sandbox();
    for _ in 0..2 {
        let (mut recorder, handle) = recorder(&path);
        let busy = record(&path, &Limits::default(), RecorderOptions::default()).err();
        let busy = busy.expect("one at a time").to_string();
        assert!(busy.contains("in use by another process"), "{busy}");
        let mut host = Host::new(
            &sandbox,
            component(Family::FlashAttn),
            "FLASH_ATTN/0",
            &[],
            3,
        );
        (0..5).for_each(|_| host.step(&mut recorder));
        handle.finish();
    }
    let (found, missing) = read(&path).unwrap();
    assert_eq!((found.len(), missing), (10, Missing::default()));
    // One slot and one version, whatever the number of segments.
    assert!(std::sync::Arc::ptr_eq(&found[0].slot, &found[9].slot));
}

#[test]
fn a_directory_of_someone_else_and_bounds_without_room_are_refused() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("recording");
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let refused = |path: &Path, options| {
        record(path, &Limits::default(), options)
            .err()
            .expect("it is refused")
    };
    let error = refused(&path, RecorderOptions::default()).to_string();
    assert!(
        error.contains("the recording directory") && error.contains("0755"),
        "{error}"
    );
    let file = scratch.path().join("file");
    fs::write(&file, "").unwrap();
    let error = refused(&file, RecorderOptions::default());
    assert!(matches!(error, RecordError::Dir(_)), "{error}");
    let small = RecorderOptions {
        max_bytes: 1000,
        ..RecorderOptions::default()
    };
    let error = refused(&scratch.path().join("small"), small).to_string();
    assert!(error.contains("at least 262144"), "{error}");
}
