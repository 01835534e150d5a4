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
            self.number += 1;
        }
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(self.path(self.number))?;
        let line = format!("{MAGIC}{FORMAT}\n");
        file.write_all(line.as_bytes())?;
        self.bytes = line.len() as u64;
        self.file = Some(file);
        File::open(self.dir.path())?.sync_all()
    }

    /// Is the segment that is being written long enough?
    fn is_full(&self) -> bool {
        self.bytes >= self.segment_bytes
    }

    fn total(&self) -> u64 {
        self.bytes + self.old.values().sum::<u64>()
    }

    /// Appends to the segment that is being written, the oldest making place. Returns how many of those went.
    fn append(&mut self, frame: &[u8]) -> io::Result<u64> {
        let mut removed = 0;
        while self.total() + frame.len() as u64 > self.max_bytes
            && let Some((oldest, _)) = self.old.pop_first()
        {
            match fs::remove_file(self.path(oldest)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => removed += 1,
            }
        }
        if self.total() + frame.len() as u64 > self.max_bytes {
            return Err(io::Error::other(format!(
                "a frame of {} bytes does not fit the {} bytes that the recording may have: allow more",
                frame.len(),
                self.max_bytes
            )));
        }
        let file = self
            .file
            .as_mut()
            .ok_or_else(|| io::Error::other("no segment is open"))?;
        file.write_all(frame)?;
        self.bytes += frame.len() as u64;
        Ok(removed)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.as_ref().map_or(Ok(()), File::sync_all)
    }
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
                self.shared.written.fetch_add(1, Relaxed);
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
        self.push(&Entry::Step(entry))?;
        if self.frames.raw() >= FRAME_BYTES {
            self.flush_frame()?;
        }
        Ok(())
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
        let removed = self.segments.append(&frame)?;
        self.shared.segments_removed.fetch_add(removed, Relaxed);
        self.shared.bytes.store(self.segments.total(), Relaxed);
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
        let dir = self.segments.dir.path();
        let message = format!(
            "the recording in {} stopped: {error}; steps are served and no longer recorded",
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
