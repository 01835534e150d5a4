//! Recordings that somebody made up: every checksum holds, and nothing else need to. Whatever they say is an error of one line or a
//! difference, and never a panic.

mod support;

use std::{fs, io::Write, path::Path};

use sha2::{Digest, Sha256};
use support::{Host, component, recorder};
use timetable_record::{Recording, RecordingError, ReplayOptions, replay};
use timetable_sandbox::{Limits, Sandbox};
use timetable_types::Family;

const LINE: &[u8] = b"timetable-recording 1\n";

fn checksum(parts: &[&[u8]]) -> [u8; 8] {
    let mut digest = Sha256::new_with_prefix(0u64.to_le_bytes());
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize()[..8].try_into().unwrap()
}

/// What a segment says, decompressed: the format is the recorder's, read by other code.
fn entries(segment: &[u8]) -> Vec<u8> {
    let mut rest = segment.strip_prefix(LINE).expect("a segment");
    let mut decoder = zstd::stream::write::Decoder::new(Vec::new()).unwrap();
    while !rest.is_empty() {
        let len = u32::from_le_bytes(rest[..4].try_into().unwrap()) as usize;
        decoder.write_all(&rest[24..24 + len]).unwrap();
        rest = &rest[24 + len..];
    }
    decoder.flush().unwrap();
    decoder.into_inner()
}

/// A segment of one frame that says `entries`.
fn segment(entries: &[u8]) -> Vec<u8> {
    let bytes = zstd::encode_all(entries, 1).unwrap();
    let lengths = [
        (bytes.len() as u32).to_le_bytes(),
        (entries.len() as u32).to_le_bytes(),
    ]
    .concat();
    [
        LINE,
        &lengths,
        &checksum(&[&lengths]),
        &checksum(&[&bytes]),
        &bytes,
    ]
    .concat()
}

fn random(seed: &mut u64) -> usize {
    *seed = seed
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) as usize
}

/// Reads it; true if it came to its end.
fn reads(path: &Path) -> bool {
    let read = || {
        let mut steps = Recording::open(path)?.steps();
        while steps.next_step()?.is_some() {}
        Ok::<(), RecordingError>(())
    };
    one_line(read())
}

/// As [`reads`], with the recorded builders run again.
fn replays(path: &Path) -> bool {
    let options = ReplayOptions {
        candidate: None,
        group: None,
        limit: None,
        max_differences: 3,
    };
    let recording = Recording::open(path).expect("it was read before");
    one_line(replay(&recording, &options, |_| {}).map(|_| ()))
}

#[track_caller]
fn one_line<E: std::fmt::Display>(result: Result<(), E>) -> bool {
    match result {
        Ok(()) => true,
        Err(error) => {
            let text = error.to_string();
            assert!(!text.contains('\n'), "{text}");
            false
        }
    }
}

#[test]
fn whatever_a_recording_says_is_an_error_or_a_difference() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("recording");
    let sandbox = Sandbox::new(Limits::default()).unwrap();
    let (mut recorder, handle) = recorder(&path);
    let mut hosts = [
        Host::new(
            &sandbox,
            component(Family::FlashAttn),
            "FLASH_ATTN/0",
            &[],
            4,
        ),
        Host::new(
            &sandbox,
            component(Family::Flashinfer),
            "FLASHINFER/1",
            &[],
            4,
        ),
    ];
    for _ in 0..6 {
        hosts.iter_mut().for_each(|host| host.step(&mut recorder));
    }
    handle.finish();
    let file = path.join("00000000.ttrec");
    let good = entries(&fs::read(&file).unwrap());
    fs::write(&file, segment(&good)).unwrap();
    assert!(reads(&path) && replays(&path), "unchanged, it replays");

    // The components are most of it, and their bytes are the sandbox's matter: what stands around them is changed.
    let wasm: Vec<usize> = good
        .windows(8)
        .enumerate()
        .filter(|(_, window)| *window == b"\0asm\x0d\0\x01\0")
        .map(|(at, _)| at)
        .collect();
    let components = [Family::FlashAttn, Family::Flashinfer].map(|family| component(family).len());
    let inside = |at: usize| {
        wasm.iter()
            .any(|start| (*start..*start + components[0].min(components[1])).contains(&at))
    };
    let mut seed = 1;
    let (mut whole, mut broken, mut replayed) = (0, 0, 0);
    while whole + broken < 1000 {
        let mut changed = good.clone();
        let at = random(&mut seed) % changed.len();
        if inside(at) {
            continue;
        }
        match random(&mut seed) % 4 {
            0 => changed[at] ^= 1 << (random(&mut seed) % 8),
            1 => changed[at] = [0, 1, 0x7f, 0x80, 0xff][random(&mut seed) % 5],
            2 => {
                changed.remove(at);
            }
            _ => changed.insert(at, random(&mut seed) as u8),
        }
        fs::write(&file, segment(&changed)).unwrap();
        if !reads(&path) {
            broken += 1;
            continue;
        }
        whole += 1;
        // Each compiles its components.
        if whole <= 20 {
            replayed += u32::from(replays(&path));
        }
    }
    assert!(whole > 20 && broken > 20, "{whole} of {}", whole + broken);
    assert!(replayed > 0, "some change nothing that a builder looks at");
}

#[test]
fn a_length_that_does_not_hold_is_refused_before_memory_is_taken() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("recording");
    fs::create_dir(&path).unwrap();
    // A gigabyte of zeros, in a frame that says ten bytes.
    let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
    let zeros = vec![0; 1 << 20];
    (0..1024).for_each(|_| encoder.write_all(&zeros).unwrap());
    let bytes = encoder.finish().unwrap();
    let lengths = [(bytes.len() as u32).to_le_bytes(), 10u32.to_le_bytes()].concat();
    let frame = [
        LINE,
        &lengths,
        &checksum(&[&lengths]),
        &checksum(&[&bytes]),
        &bytes,
    ]
    .concat();
    fs::write(path.join("00000000.ttrec"), frame).unwrap();
    let error = Recording::open(&path).unwrap_err().to_string();
    assert!(error.contains("more than its length says"), "{error}");
}
