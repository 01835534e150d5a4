//! Frames: the pieces of a segment that are whole or not there.
//!
//! A segment is the line [`MAGIC`], then one zstd stream in frames. A frame is what the compressor gave out at a flush, so that
//! everything up to a frame's end can be read though the stream has no end; it has both its lengths, and checksums that also hold
//! its place, against damage. Must never know: what is in a frame.

use std::io::{self, Read, Write};

use sha2::{Digest, Sha256};

/// The version of recordings that this program writes and reads.
pub const FORMAT: u32 = 1;
/// What every segment begins with; the version and a line feed follow.
pub(crate) const MAGIC: &str = "timetable-recording ";
/// Bytes before a frame's own: its lengths and checksums.
pub(crate) const FRAME_HEADER: usize = 24;
/// A frame's bytes, compressed and not, at most.
const MAX_FRAME: u32 = 256 << 20;
/// How hard is compressed: zstd's own default; most of what is left after the differences are zeros.
const LEVEL: i32 = 3;

/// Compresses entries of one segment into frames.
pub(crate) struct FrameWriter {
    encoder: zstd::stream::write::Encoder<'static, Vec<u8>>,
    index: u64,
    raw: usize,
}

impl FrameWriter {
    /// For a new segment.
    pub(crate) fn new() -> io::Result<FrameWriter> {
        Ok(FrameWriter {
            encoder: zstd::stream::write::Encoder::new(Vec::new(), LEVEL)?,
            index: 0,
            raw: 0,
        })
    }

    /// Adds to the frame that is being made.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.raw += bytes.len();
        self.encoder.write_all(bytes)
    }

    /// Bytes of the frame that is being made, before compression.
    pub(crate) fn raw(&self) -> usize {
        self.raw
    }

    /// The frame, whole.
    pub(crate) fn finish(&mut self) -> io::Result<Vec<u8>> {
        self.encoder.flush()?;
        let bytes = std::mem::take(self.encoder.get_mut());
        let fits = |len: usize| {
            u32::try_from(len)
                .ok()
                .filter(|len| *len <= MAX_FRAME)
                .ok_or_else(|| io::Error::other(format!("a frame of {len} bytes is too large")))
        };
        let header = Lengths {
            bytes: fits(bytes.len())?,
            raw: fits(self.raw)?,
        };
        let mut frame = Vec::with_capacity(FRAME_HEADER + bytes.len());
        frame.extend_from_slice(&header.bytes.to_le_bytes());
        frame.extend_from_slice(&header.raw.to_le_bytes());
        frame.extend_from_slice(&header.checksum(self.index));
        frame.extend_from_slice(&checksum(self.index, &bytes));
        frame.extend_from_slice(&bytes);
        self.index += 1;
        self.raw = 0;
        Ok(frame)
    }
}

/// A frame's lengths: of what follows its header, and of what that was before compression.
#[derive(Clone, Copy)]
struct Lengths {
    bytes: u32,
    raw: u32,
}

impl Lengths {
    fn checksum(self, index: u64) -> [u8; 8] {
        let lengths = [self.bytes.to_le_bytes(), self.raw.to_le_bytes()].concat();
        checksum(index, &lengths)
    }
}

/// Eight bytes of a SHA-256: against damage, not against forgers.
fn checksum(index: u64, bytes: &[u8]) -> [u8; 8] {
    let digest = Sha256::new_with_prefix(index.to_le_bytes())
        .chain_update(bytes)
        .finalize();
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    first
}

/// What a frame's place in a segment holds.
pub(crate) enum Frame {
    /// A whole frame: its entries, one after the other.
    Whole(Vec<u8>),
    /// The segment ends here.
    End,
    /// The segment ends within a frame, as after a crash.
    Unfinished,
    /// Something else stands there.
    Damaged(String),
}

/// Reads a segment's frames.
pub(crate) struct FrameReader<R> {
    file: R,
    decoder: zstd::stream::write::Decoder<'static, Bounded>,
    index: u64,
    /// Where the next frame begins.
    offset: u64,
}

impl<R: Read> FrameReader<R> {
    /// Behind the line that a segment begins with, which has `offset` bytes.
    pub(crate) fn new(file: R, offset: u64) -> io::Result<FrameReader<R>> {
        Ok(FrameReader {
            file,
            decoder: zstd::stream::write::Decoder::new(Bounded::default())?,
            index: 0,
            offset,
        })
    }

    /// Where the frame that is read next begins.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// The next frame. After anything but a whole one the reader is of no more use.
    pub(crate) fn read(&mut self) -> io::Result<Frame> {
        let mut header = [0; FRAME_HEADER];
        match fill(&mut self.file, &mut header)? {
            0 => return Ok(Frame::End),
            FRAME_HEADER => {}
            _ => return Ok(Frame::Unfinished),
        }
        // Space that the file system had set aside when the machine went down.
        if header == [0; FRAME_HEADER] {
            return Ok(Frame::Unfinished);
        }
        let number = |at: usize| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&header[at..at + 4]);
            u32::from_le_bytes(bytes)
        };
        let lengths = Lengths {
            bytes: number(0),
            raw: number(4),
        };
        if header[8..16] != lengths.checksum(self.index)
            || lengths.bytes > MAX_FRAME
            || lengths.raw > MAX_FRAME
        {
            return Ok(Frame::Damaged(
                "its lengths do not have their checksum".to_owned(),
            ));
        }
        let mut bytes = Vec::new();
        (&mut self.file)
            .take(u64::from(lengths.bytes))
            .read_to_end(&mut bytes)?;
        if bytes.len() < lengths.bytes as usize {
            return Ok(Frame::Unfinished);
        }
        if header[16..24] != checksum(self.index, &bytes) {
            return Ok(Frame::Damaged(
                "its bytes do not have their checksum".to_owned(),
            ));
        }
        self.decoder.get_mut().left = lengths.raw as usize;
        let decoded = self
            .decoder
            .write_all(&bytes)
            .and_then(|()| self.decoder.flush());
        let raw = std::mem::take(&mut self.decoder.get_mut().bytes);
        if let Err(error) = decoded {
            return Ok(Frame::Damaged(format!("it does not decompress: {error}")));
        }
        if raw.len() != lengths.raw as usize {
            return Ok(Frame::Damaged(format!(
                "it decompresses to {} bytes of {}",
                raw.len(),
                lengths.raw
            )));
        }
        self.index += 1;
        self.offset += (FRAME_HEADER + bytes.len()) as u64;
        Ok(Frame::Whole(raw))
    }
}

/// Memory for what a frame decompresses to, and no more than it said.
#[derive(Default)]
struct Bounded {
    bytes: Vec<u8>,
    left: usize,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.left {
            return Err(io::Error::other("there is more than its length says"));
        }
        self.left -= bytes.len();
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// As many bytes as there are.
fn fill(file: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < into.len() {
        match file.read(&mut into[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}
