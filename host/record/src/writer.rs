//! The writer's half of a recorder: steps to entries, entries to frames, frames to segments, and the oldest segments away.
//!
//! Whatever the file system refuses ends the recording, never a step. Must never know: what a replay looks at.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, atomic::Ordering::Relaxed},
    time::{SystemTime, UNIX_EPOCH},
};

use timetable_sandbox::{
    Access, ContentHash, DirError, Limits, OwnedDir, SeenFault, VersionHandle, WrittenBy,
};

use crate::{
    entry::{Before, Entry, Facts, Header, RecordedVersion, Slot, StepEntry},
    frame::{FORMAT, FrameWriter, MAGIC},
    reader::segments,
    recorder::{Buffer, Shared},
};

/// What the directory is, in errors.
pub(crate) const WHAT: &str = "the recording directory";
/// A frame is ended when there is this much in it, though more steps wait.
const FRAME_BYTES: usize = 256 << 10;

/// The segments of a directory, the newest being written.
pub(crate) struct Segments {
    dir: OwnedDir,
    /// Held as long as this recorder lives.
    _lock: File,
    /// All but the one that is being written, by number, with their bytes.
    old: BTreeMap<u64, u64>,
    number: u64,
    file: Option<File>,
    bytes: u64,
    max_bytes: u64,
    segment_bytes: u64,
    /// How many of `old` went to keep the bound.
    removed: u64,
}

impl Segments {
    /// Those of `path`.
    pub(crate) fn open(
        path: &Path,
        max_bytes: u64,
        segment_bytes: u64,
    ) -> Result<Segments, DirError> {
        let dir = OwnedDir::open(WHAT, path, Access::Private)?;
        let lock = dir.lock()?;
        let found = segments(dir.path()).map_err(|error| DirError::Io {
            what: WHAT,
            path: path.to_owned(),
            error,
        })?;
        let old = found
            .into_iter()
            .map(|(number, path)| (number, fs::metadata(path).map_or(0, |file| file.len())))
            .collect::<BTreeMap<_, _>>();
        Ok(Segments {
            number: old.keys().next_back().map_or(0, |last| last + 1),
            dir,
            _lock: lock,
            old,
            file: None,
            bytes: 0,
            max_bytes,
            segment_bytes: segment_bytes.min(max_bytes / 8),
            removed: 0,
        })
    }

    fn path(&self, number: u64) -> PathBuf {
        self.dir.path().join(segment_name(number))
    }

    /// Ends the segment that is being written and begins the next.
    fn begin(&mut self) -> io::Result<()> {
        if let Some(file) = self.file.take() {
            file.sync_all()?;
            self.old.insert(self.number, self.bytes);
            self.bytes = 0;
            self.number += 1;
        }
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(self.path(self.number))?;
        self.file = Some(file);
        self.write(first_line().as_bytes())?;
        File::open(self.dir.path())?.sync_all()
    }

    /// Is the segment that is being written long enough?
    fn is_full(&self) -> bool {
        self.bytes >= self.segment_bytes
    }

    fn total(&self) -> u64 {
        self.bytes + self.old.values().sum::<u64>()
    }

    /// Appends to the segment that is being written, the oldest making place.
    fn append(&mut self, frame: &[u8]) -> io::Result<()> {
        while self.total() + frame.len() as u64 > self.max_bytes
            && let Some((oldest, _)) = self.old.pop_first()
        {
            match fs::remove_file(self.path(oldest)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => self.removed += 1,
            }
        }
        if self.total() + frame.len() as u64 > self.max_bytes {
            let error = io::Error::other(format!(
                "a frame of {} bytes does not fit the {} bytes that the recording may have: allow more",
                frame.len(),
                self.max_bytes
            ));
            return Err(self.cut(error));
        }
        self.write(frame)
    }

    /// Writes all of it, or leaves the segment as it was.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(file) = &mut self.file else {
            return Err(io::Error::other("no segment is open"));
        };
        match file.write_all(bytes) {
            Ok(()) => {
                self.bytes += bytes.len() as u64;
                Ok(())
            }
            Err(error) => Err(self.cut(error)),
        }
    }

    /// Ends the segment with its last whole frame; without one it goes. Best effort: gives `error` back, with what failed.
    fn cut(&mut self, error: io::Error) -> io::Error {
        let Some(file) = self.file.take() else {
            return error;
        };
        let cut = if self.bytes > first_line().len() as u64 {
            file.set_len(self.bytes)
        } else {
            self.bytes = 0;
            fs::remove_file(self.path(self.number))
        };
        match cut {
            Ok(()) => error,
            Err(cut) => io::Error::other(format!(
                "{error}, and the unfinished end of its last segment stays: {cut}"
            )),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.file.as_ref().map_or(Ok(()), File::sync_all)
    }
}

/// What a segment begins with.
fn first_line() -> String {
    format!("{MAGIC}{FORMAT}\n")
}

/// A segment's file.
pub(crate) fn segment_name(number: u64) -> String {
    format!("{number:08}.ttrec")
}

/// What the segment that is being written holds already.
#[derive(Default)]
struct Known {
    slots: Vec<(Arc<Slot>, Before)>,
    versions: BTreeMap<ContentHash, u32>,
}

/// Turns steps into segments.
pub(crate) struct Writer {
    segments: Segments,
    frames: FrameWriter,
    known: Known,
    limits: Limits,
    run: u64,
    /// Segments begun so far.
    begun: u64,
    /// Steps in the frame that is being made: they count as written when it is.
    pending: u64,
    shared: Arc<Shared>,
    stopped: bool,
    scratch: Vec<u8>,
}

impl Writer {
    /// Begins the first segment.
    pub(crate) fn begin(
        segments: Segments,
        limits: Limits,
        shared: Arc<Shared>,
    ) -> io::Result<Writer> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut writer = Writer {
            segments,
            frames: FrameWriter::new()?,
            known: Known::default(),
            limits,
            run: since.map_or(0, |since| since.as_nanos() as u64),
            begun: 0,
            pending: 0,
            shared,
            stopped: false,
            scratch: Vec::new(),
        };
        writer.next_segment()?;
        writer.flush_frame()?;
        Ok(writer)
    }

    fn next_segment(&mut self) -> io::Result<()> {
        self.segments.begin()?;
        self.frames = FrameWriter::new()?;
        self.known = Known::default();
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        self.begun += 1;
        self.push(&Entry::Header(Header {
            written_by: WrittenBy::here(),
            unix_time: since.map_or(0, |since| since.as_secs()),
            run: self.run,
            segment: self.begun - 1,
            limits: self.limits.clone(),
        }))
    }

    fn push(&mut self, entry: &Entry) -> io::Result<()> {
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.clear();
        self.scratch = postcard::to_extend(entry, bytes).map_err(io::Error::other)?;
        self.frames.push(&self.scratch)
    }

    /// Writes a step that fits.
    pub(crate) fn write(&mut self, buffer: &mut Buffer) {
        let Some(slot) = buffer.slot.take() else {
            return;
        };
        if self.stopped {
            self.shared.left_out.fetch_add(1, Relaxed);
            return;
        }
        match self.try_write(&slot, buffer) {
            Ok(()) => {
                self.pending += 1;
                if self.frames.raw() >= FRAME_BYTES {
                    self.flush();
                }
            }
            Err(error) => {
                self.shared.left_out.fetch_add(1, Relaxed);
                self.stop(&error);
            }
        }
    }

    fn try_write(&mut self, slot: &Arc<Slot>, buffer: &mut Buffer) -> io::Result<()> {
        if self.segments.is_full() {
            self.flush_frame()?;
            self.next_segment()?;
        }
        let place = self.slot(slot)?;
        let version = match &buffer.version {
            Some(version) => Some(self.version(version)?),
            None => None,
        };
        let Some(metadata) = &buffer.metadata else {
            return Ok(());
        };
        let facts = Facts {
            number: buffer.number,
            at: buffer.at,
            slot: place,
            version,
            built_by: buffer.built_by,
            fault: buffer.fault.as_ref().map(SeenFault::of),
            build_time: buffer.build_time,
            fuel: buffer.fuel,
        };
        let before = &mut self.known.slots[place as usize].1;
        let entry = StepEntry::pack(
            facts,
            &mut buffer.common,
            &mut buffer.tensors,
            metadata,
            before,
        )
        .map_err(io::Error::other)?;
        self.push(&Entry::Step(entry))
    }

    /// The slot's number in this segment.
    fn slot(&mut self, slot: &Arc<Slot>) -> io::Result<u32> {
        let slots = &self.known.slots;
        if let Some(place) = slots.iter().position(|(known, _)| Arc::ptr_eq(known, slot)) {
            return Ok(place as u32);
        }
        self.push(&Entry::Slot(Slot::clone(slot)))?;
        self.known.slots.push((Arc::clone(slot), Before::default()));
        Ok(self.known.slots.len() as u32 - 1)
    }

    /// The version's number in this segment.
    fn version(&mut self, version: &VersionHandle) -> io::Result<u32> {
        let info = version.info();
        if let Some(&number) = self.known.versions.get(&info.version) {
            return Ok(number);
        }
        self.push(&Entry::Version(RecordedVersion {
            version: info.version,
            component: info.component,
            name: info.name.clone(),
            origin: info.origin.clone(),
            config: version.config().as_ref().clone(),
            bytes: version.component().bytes().to_vec(),
        }))?;
        let number = self.known.versions.len() as u32;
        self.known.versions.insert(info.version, number);
        Ok(number)
    }

    fn flush_frame(&mut self) -> io::Result<()> {
        if self.frames.raw() == 0 {
            return Ok(());
        }
        let frame = self.frames.finish()?;
        let appended = self.segments.append(&frame);
        let shared = &self.shared;
        shared
            .segments_removed
            .store(self.segments.removed, Relaxed);
        shared.bytes.store(self.segments.total(), Relaxed);
        appended?;
        shared
            .written
            .fetch_add(std::mem::take(&mut self.pending), Relaxed);
        Ok(())
    }

    /// Everything so far can be read.
    pub(crate) fn flush(&mut self) {
        if !self.stopped
            && let Err(error) = self.flush_frame()
        {
            self.stop(&error);
        }
    }

    /// No further step comes.
    pub(crate) fn end(&mut self) {
        if self.stopped {
            return;
        }
        let steps = self.shared.steps.load(Relaxed);
        let ended = self
            .push(&Entry::End { steps })
            .and_then(|()| self.flush_frame())
            .and_then(|()| self.segments.sync());
        if let Err(error) = ended {
            self.stop(&error);
        }
    }

    fn stop(&mut self, error: &io::Error) {
        self.stopped = true;
        let lost = std::mem::take(&mut self.pending);
        self.shared.left_out.fetch_add(lost, Relaxed);
        let written = self.shared.written.load(Relaxed);
        let dir = self.segments.dir.path();
        let message = format!(
            "the recording in {} stopped after {written} steps, which are whole: {error}; make room, or record elsewhere; steps are \
             served and no longer recorded",
            dir.display()
        );
        tracing::warn!("{message}");
        *self
            .shared
            .stopped
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_write_left_unfinished_is_cut_off() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("recording");
        let mut segments = Segments::open(&path, 1 << 20, 1 << 10).unwrap();
        segments.begin().unwrap();
        segments.append(b"a whole frame").unwrap();
        let (whole, segment) = (segments.total(), segments.path(0));
        let unfinished = |segments: &mut Segments| {
            segments.file.as_mut().unwrap().write_all(b"half").unwrap();
            let error = segments.cut(io::Error::other("no space"));
            assert_eq!(error.to_string(), "no space");
            assert!(segments.append(b"later").is_err());
        };
        unfinished(&mut segments);
        assert_eq!(fs::metadata(&segment).unwrap().len(), whole);

        // A segment without a whole frame goes: it would be in the way of those before and after it.
        drop(segments);
        let mut segments = Segments::open(&path, 1 << 20, 1 << 10).unwrap();
        segments.begin().unwrap();
        unfinished(&mut segments);
        assert!(!segments.path(1).exists());
        assert_eq!(segments.total(), whole);
    }
}
