//! Reading a recording: its steps in order, and what is missing.
//!
//! A recording may come from anybody, so nothing in it is believed: lengths are bounded before anything is allocated by them. Must
//! never know: builders.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Serialize;
use timetable_sandbox::{Limits, WrittenBy};

use crate::{
    entry::{Before, Entry, RecordedStep, RecordedVersion, Slot},
    frame::{FORMAT, Frame, FrameReader, MAGIC},
};

/// Why a recording is not read, or not further. Each message says which file, what, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// Not there, or not readable.
    #[error("recording `{path}`: {error}; give a directory that `--record` wrote", path = path.display())]
    Io {
        /// The directory, or a file in it.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// A directory without segments.
    #[error(
        "recording `{path}` has no segments (NNNNNNNN.ttrec); give a directory that `--record` wrote",
        path = path.display()
    )]
    Empty {
        /// The directory.
        path: PathBuf,
    },
    /// Another file.
    #[error(
        "recording `{path}` begins with {found:?}, not with `timetable-recording`; remove the file, or give a directory that \
         `--record` wrote",
        path = path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// How it begins, cut.
        found: String,
    },
    /// Another version's.
    #[error(
        "recording `{path}` has format {found}, and this version of Timetable reads {FORMAT}; replay it with the version that \
         wrote it",
        path = path.display()
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: String,
    },
    /// Bytes are others than were written.
    #[error(
        "recording `{path}` is damaged at byte {offset}: {what}; copy the file again, or remove it and replay the others",
        path = path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where the frame begins.
        offset: u64,
        /// What is wrong.
        what: String,
    },
}

/// What a recording does not hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// Steps that the recorder left out, between recorded ones and after the last: it was behind, or they were too large.
    pub left_out: u64,
    /// Steps before the first that is kept: their segments made place for later ones.
    pub removed: u64,
    /// Segments that end within a frame, as after a crash: up to there everything is read.
    pub unfinished: Vec<PathBuf>,
    /// Recorders that did not end their recording: the host crashed, or still runs.
    pub not_ended: u64,
}

/// A directory of segments.
#[derive(Clone, Debug)]
pub struct Recording {
    segments: Vec<PathBuf>,
    written_by: WrittenBy,
    limits: Limits,
}

impl Recording {
    /// Looks at `path` and the beginning of its first segment.
    ///
    /// # Errors
    /// If there is no recording, or one of another version.
    pub fn open(path: &Path) -> Result<Recording, RecordingError> {
        let segments: Vec<PathBuf> = segments(path)
            .map_err(|error| RecordingError::Io {
                path: path.to_owned(),
                error,
            })?
            .into_values()
            .collect();
        let Some(first) = segments.first() else {
            return Err(RecordingError::Empty {
                path: path.to_owned(),
            });
        };
        let mut steps = Steps::new(vec![first.clone()]);
        while steps.header.is_none() && steps.next_frame()? {}
        let (written_by, limits) = steps.header.ok_or_else(|| RecordingError::Damaged {
            path: first.clone(),
            offset: 0,
            what: "it ends before its first entry".to_owned(),
        })?;
        Ok(Recording {
            segments,
            written_by,
            limits,
        })
    }

    /// Where it was written.
    pub fn written_by(&self) -> &WrittenBy {
        &self.written_by
    }

    /// What the recorded builders ran with, as it says.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Its steps, oldest first.
    pub fn steps(&self) -> Steps {
        Steps::new(self.segments.clone())
    }
}

/// Reads steps one after the other.
pub struct Steps {
    /// Still to read, last first.
    segments: Vec<PathBuf>,
    now: Option<Segment>,
    header: Option<(WrittenBy, Limits)>,
    /// The run that is read, and the number that its next step has if none is missing; none before the first, where segments
    /// before it are gone.
    run: Option<(u64, Option<u64>)>,
    run_ended: bool,
    missing: Missing,
    /// Those of all segments: a slot that is equal in two is one.
    slots: Vec<Arc<Slot>>,
    versions: Vec<Arc<RecordedVersion>>,
}

/// The segment that is read.
struct Segment {
    path: PathBuf,
    frames: FrameReader<BufReader<File>>,
    /// Entries of the frame that is read, and how many of its bytes are behind.
    entries: Vec<u8>,
    at: usize,
    frame_offset: u64,
    slots: Vec<Arc<Slot>>,
    before: Vec<Before>,
    versions: Vec<Arc<RecordedVersion>>,
}

impl Steps {
    fn new(mut segments: Vec<PathBuf>) -> Steps {
        segments.reverse();
        Steps {
            segments,
            now: None,
            header: None,
            run: None,
            run_ended: true,
            missing: Missing::default(),
            slots: Vec::new(),
            versions: Vec::new(),
        }
    }

    /// What was missing so far; of the whole recording after its last step.
    pub fn missing(&self) -> &Missing {
        &self.missing
    }

    /// The next step. None after the last.
    ///
    /// # Errors
    /// If what stands there is no step. What follows in the same segment cannot be read then.
    pub fn next_step(&mut self) -> Result<Option<RecordedStep>, RecordingError> {
        loop {
            while let Some(entry) = self.next_entry()? {
                if let Some(step) = self.take(entry)? {
                    return Ok(Some(step));
                }
            }
            if !self.next_frame()? {
                self.leave_run();
                return Ok(None);
            }
        }
    }

    /// The next entry of the frame that is read.
    fn next_entry(&mut self) -> Result<Option<Entry>, RecordingError> {
        let Some(segment) = &mut self.now else {
            return Ok(None);
        };
        let rest = &segment.entries[segment.at..];
        if rest.is_empty() {
            return Ok(None);
        }
        match postcard::take_from_bytes::<Entry>(rest) {
            Ok((entry, after)) => {
                segment.at = segment.entries.len() - after.len();
                Ok(Some(entry))
            }
            Err(error) => Err(segment.damaged(format!("an entry does not read ({error})"))),
        }
    }

    /// Goes on to the next frame, of the next segment after the last of this one. False if there is none.
    fn next_frame(&mut self) -> Result<bool, RecordingError> {
        loop {
            if self.now.is_none() {
                let Some(path) = self.segments.pop() else {
                    return Ok(false);
                };
                self.now = Segment::open(&path)?;
                if self.now.is_none() {
                    self.missing.unfinished.push(path);
                }
            }
            let Some(segment) = &mut self.now else {
                continue;
            };
            segment.frame_offset = segment.frames.offset();
            let frame = segment.frames.read().map_err(|error| RecordingError::Io {
                path: segment.path.clone(),
                error,
            })?;
            match frame {
                Frame::Whole(entries) => {
                    segment.entries = entries;
                    segment.at = 0;
                    if self.header.is_none()
                        && let Some(entry) = self.next_entry()?
                    {
                        self.take(entry)?;
                    }
                    return Ok(true);
                }
                Frame::Damaged(what) => return Err(segment.damaged(what)),
                Frame::Unfinished => {
                    let path = segment.path.clone();
                    self.missing.unfinished.push(path);
                    self.now = None;
                }
                Frame::End => self.now = None,
            }
        }
    }

    /// Remembers an entry; a step is given back.
    fn take(&mut self, entry: Entry) -> Result<Option<RecordedStep>, RecordingError> {
        match entry {
            Entry::Header(header) => {
                if self.run.is_none_or(|(run, _)| run != header.run) {
                    self.leave_run();
                    self.run = Some((header.run, (header.segment == 0).then_some(0)));
                    self.run_ended = false;
                }
                self.header = Some((header.written_by, header.limits));
            }
            Entry::End { steps } => {
                self.count(steps);
                self.run_ended = true;
            }
            Entry::Slot(slot) => {
                if let Some(segment) = &mut self.now {
                    segment.slots.push(one(&mut self.slots, slot));
                    segment.before.push(Before::default());
                }
            }
            Entry::Version(version) => {
                if let Some(segment) = &mut self.now {
                    segment.versions.push(one(&mut self.versions, version));
                }
            }
            Entry::Step(step) => {
                let Some(segment) = &mut self.now else {
                    return Ok(None);
                };
                let (slot, version) = step.ids();
                let unknown = |what: &str, id: u32| {
                    format!("a step names {what} {id}, which the segment does not have")
                };
                let slot_index = slot as usize;
                let Some(slot) = segment.slots.get(slot_index).cloned() else {
                    return Err(segment.damaged(unknown("slot", slot)));
                };
                let version = match version {
                    None => None,
                    Some(id) => match segment.versions.get(id as usize) {
                        Some(version) => Some(Arc::clone(version)),
                        None => return Err(segment.damaged(unknown("version", id))),
                    },
                };
                let step = step
                    .unpack(slot, version, &mut segment.before[slot_index])
                    .map_err(|what| segment.damaged(what))?;
                self.count(step.number);
                return Ok(Some(step));
            }
        }
        Ok(None)
    }

    /// What has this number was read: were there steps before it?
    fn count(&mut self, number: u64) {
        let Some((_, next)) = &mut self.run else {
            return;
        };
        match *next {
            None => self.missing.removed += number,
            Some(next) => self.missing.left_out += number.saturating_sub(next),
        }
        *next = Some(number.saturating_add(1));
    }

    /// What comes is another run's, or nothing comes.
    fn leave_run(&mut self) {
        self.missing.not_ended += u64::from(!self.run_ended);
        self.run_ended = true;
    }
}

impl Segment {
    /// None if it ends within its first line, as after a crash.
    fn open(path: &Path) -> Result<Option<Segment>, RecordingError> {
        let failed = |error| RecordingError::Io {
            path: path.to_owned(),
            error,
        };
        let mut file = BufReader::new(File::open(path).map_err(failed)?);
        let line = first_line(&mut file).map_err(failed)?;
        let expected = format!("{MAGIC}{FORMAT}\n");
        if line.len() < expected.len() && expected.as_bytes().starts_with(&line) {
            return Ok(None);
        }
        let text: String = line
            .iter()
            .map(|&byte| match byte {
                b' '..=b'~' => char::from(byte),
                _ => '.',
            })
            .collect();
        let Some(version) = text.trim_end_matches('.').strip_prefix(MAGIC) else {
            return Err(RecordingError::Foreign {
                path: path.to_owned(),
                found: text,
            });
        };
        if line != expected.as_bytes() {
            return Err(RecordingError::Format {
                found: version.to_owned(),
                path: path.to_owned(),
            });
        }
        let offset = line.len() as u64;
        Ok(Some(Segment {
            frames: FrameReader::new(file, offset).map_err(failed)?,
            path: path.to_owned(),
            entries: Vec::new(),
            at: 0,
            frame_offset: offset,
            slots: Vec::new(),
            before: Vec::new(),
            versions: Vec::new(),
        }))
    }

    fn damaged(&self, what: String) -> RecordingError {
        RecordingError::Damaged {
            path: self.path.clone(),
            offset: self.frame_offset,
            what,
        }
    }
}

/// The one of `known` that is equal, which `new` becomes if there is none.
fn one<T: PartialEq>(known: &mut Vec<Arc<T>>, new: T) -> Arc<T> {
    match known.iter().find(|known| ***known == new) {
        Some(known) => Arc::clone(known),
        None => {
            known.push(Arc::new(new));
            Arc::clone(&known[known.len() - 1])
        }
    }
}

/// Up to and with a line feed, cut at 40 bytes.
fn first_line(file: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut byte = [0];
    while line.len() < 40 && line.last() != Some(&b'\n') && file.read(&mut byte)? == 1 {
        line.push(byte[0]);
    }
    Ok(line)
}

/// The segments of a directory, by number.
pub(crate) fn segments(path: &Path) -> io::Result<BTreeMap<u64, PathBuf>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_suffix(".ttrec"))
            .and_then(|number| number.parse().ok());
        if let Some(number) = number
            && entry.file_type()?.is_file()
        {
            found.insert(number, entry.path());
        }
    }
    Ok(found)
}
