//! Opens a model's files: plain files only, so that nothing waits for a pipe's writer or a device, and of a bounded size
//! where they are read whole.

use super::error::ModelError;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Bytes of a `config.json`, and of the other small texts beside it.
pub(crate) const MAX_CONFIG: u64 = 16 << 20;
/// Bytes of a `tokenizer.json`, and of an index of shards.
pub(crate) const MAX_TOKENIZER: u64 = 512 << 20;

/// Opens a plain file.
///
/// # Errors
/// `Io` if it cannot be opened, `Corrupt` if it is anything else than a plain file.
pub(crate) fn open(path: &Path) -> Result<File, ModelError> {
    let io = |e| ModelError::io(path, e);
    // Asked before it is opened: opening a pipe waits for its writer.
    if !std::fs::metadata(path).map_err(io)?.is_file() {
        return Err(ModelError::Corrupt {
            path: path.to_owned(),
            what: "it is not a plain file".to_owned(),
            remedy: "put a plain file, or a link to one, in its place",
        });
    }
    File::open(path).map_err(io)
}

/// Reads a plain file of at most `max` bytes.
///
/// # Errors
/// As [`open`], and `Corrupt` if the file is larger.
pub(crate) fn read(path: &Path, max: u64) -> Result<Vec<u8>, ModelError> {
    let io = |e| ModelError::io(path, e);
    let file = open(path)?;
    let size = file.metadata().map_err(io)?.len();
    let too_large =
        |size: String| ModelError::corrupt(path, format!("it has {size} bytes, above {max}"));
    if size > max {
        return Err(too_large(size.to_string()));
    }
    let mut bytes = Vec::with_capacity(size as usize);
    file.take(max + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > max {
        return Err(too_large(format!("at least {}", bytes.len())));
    }
    Ok(bytes)
}

/// As [`read`]; nothing where there is no such file.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_if_there(path: &Path, max: u64) -> Result<Option<Vec<u8>>, ModelError> {
    match read(path, max) {
        Err(ModelError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            Ok(None)
        }
        read => read.map(Some),
    }
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
