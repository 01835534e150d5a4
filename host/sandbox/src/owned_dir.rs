//! A directory that is the host's own, and atomic writes into it.
//!
//! Must never know: what is kept there.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

/// Why a directory is not used. Each message says what, with the value, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// Not there and not to be made, or not readable.
    #[error("{what} `{path}`: {error}; give a directory that this user can create and write", path = path.display())]
    Io {
        /// What the directory is for.
        what: &'static str,
        /// The directory, or a file in it.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// A file or a symbolic link.
    #[error("{what} `{path}` is not a directory (symbolic links are not followed); give a directory", path = path.display())]
    NotADirectory {
        /// What the directory is for.
        what: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// Somebody else's.
    #[error(
        "{what} `{path}` belongs to user {owner}, but this process runs as user {user}; give a directory of its own",
        path = path.display()
    )]
    Foreign {
        /// What the directory is for.
        what: &'static str,
        /// The directory.
        path: PathBuf,
        /// Its owner's uid.
        owner: u32,
        /// This process's effective uid.
        user: u32,
    },
    /// Others may write there.
    #[error(
        "{what} `{path}` has mode {mode:04o}, but {rule}; chmod {wanted:04o} it",
        path = path.display()
    )]
    Mode {
        /// What the directory is for.
        what: &'static str,
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
        /// What is asked for, in words.
        rule: &'static str,
        /// A mode that is accepted.
        wanted: u32,
    },
    /// Another process uses it.
    #[error("{what} `{path}` is in use by another process; give each process its own", path = path.display())]
    Busy {
        /// What the directory is for.
        what: &'static str,
        /// The directory.
        path: PathBuf,
    },
}

/// Who may enter the directory besides its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Nobody: mode 0700.
    Private,
    /// Others may read, but not write.
    Readable,
}

/// A directory that was checked, by path.
#[derive(Debug)]
pub struct OwnedDir {
    what: &'static str,
    path: PathBuf,
}

impl OwnedDir {
    /// Makes `path` (mode 0700) if it is not there, and checks that it is this user's own. `what` names it in errors.
    ///
    /// # Errors
    /// If it belongs to another user, may be entered or written by others than `access` says, is a link or a file, or cannot be
    /// made.
    pub fn open(what: &'static str, path: &Path, access: Access) -> Result<OwnedDir, DirError> {
        let io_error = |error| DirError::Io {
            what,
            path: path.to_owned(),
            error,
        };
        if let Some(parent) = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty())
        {
            fs::create_dir_all(parent).map_err(io_error)?;
        }
        match DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => {
                // So that it is there after a crash if something in it is.
                let parent = path
                    .parent()
                    .filter(|parent| !parent.as_os_str().is_empty());
                let parent = parent.unwrap_or(Path::new("."));
                File::open(parent)
                    .and_then(|parent| parent.sync_all())
                    .map_err(io_error)?;
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(io_error(error)),
        }
        let metadata = fs::symlink_metadata(path).map_err(io_error)?;
        if !metadata.is_dir() {
            return Err(DirError::NotADirectory {
                what,
                path: path.to_owned(),
            });
        }
        let user = rustix::process::geteuid().as_raw();
        if metadata.uid() != user {
            let owner = metadata.uid();
            return Err(DirError::Foreign {
                what,
                path: path.to_owned(),
                owner,
                user,
            });
        }
        let mode = metadata.mode() & 0o777;
        let (forbidden, rule, wanted) = match access {
            Access::Private => (0o077, "only its owner may enter it", 0o700),
            Access::Readable => (0o022, "only its owner may write to it", 0o755),
        };
        if mode & forbidden != 0 {
            return Err(DirError::Mode {
                what,
                path: path.to_owned(),
                mode,
                rule,
                wanted,
            });
        }
        Ok(OwnedDir {
            what,
            path: path.to_owned(),
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A file of this user's own, followed through no link. None if it is not there.
    pub(crate) fn read(&self, name: &str) -> Result<Option<Vec<u8>>, DirError> {
        let path = self.path.join(name);
        let error = |error| DirError::Io {
            what: self.what,
            path: path.clone(),
            error,
        };
        let mut file = match OpenOptions::new()
            .read(true)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(&path)
        {
            Ok(file) => file,
            Err(not_there) if not_there.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(other) => return Err(error(other)),
        };
        let metadata = file.metadata().map_err(error)?;
        let user = rustix::process::geteuid().as_raw();
        if metadata.uid() != user {
            let owner = metadata.uid();
            return Err(DirError::Foreign {
                what: self.what,
                path,
                owner,
                user,
            });
        }
        let mut bytes = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0));
        io::Read::read_to_end(&mut file, &mut bytes).map_err(error)?;
        Ok(Some(bytes))
    }

    /// Writes `name` so that it has either its old or its new content, also after a crash: temporary file, fsync, rename,
    /// fsync of the directory.
    pub(crate) fn write(&self, name: &str, parts: &[&[u8]]) -> Result<(), DirError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let temporary = self
            .path
            .join(format!(".{name}.{}.{count}.tmp", std::process::id()));
        let path = self.path.join(name);
        let written = (|| {
            let mut file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&temporary)?;
            for part in parts {
                file.write_all(part)?;
            }
            file.sync_all()?;
            fs::rename(&temporary, &path)?;
            File::open(&self.path)?.sync_all()
        })();
        written.map_err(|error| {
            // Whatever could not be written is not left behind; the first error is the one to report.
            let _ = fs::remove_file(&temporary);
            DirError::Io {
                what: self.what,
                path,
                error,
            }
        })
    }

    /// Removes what a crash left half-written. For whoever holds the lock: others may be writing.
    pub fn remove_temporaries(&self) {
        let Ok(files) = fs::read_dir(&self.path) else {
            return;
        };
        for file in files.flatten() {
            let name = file.file_name();
            let name = name.to_string_lossy();
            if name.starts_with('.')
                && name.ends_with(".tmp")
                && let Err(error) = fs::remove_file(file.path())
            {
                tracing::debug!("{}: a temporary file stays: {error}", self.what);
            }
        }
    }

    /// A lock that lasts as long as the returned file.
    ///
    /// # Errors
    /// If another process has it, or the lock's file cannot be made.
    pub fn lock(&self) -> Result<File, DirError> {
        let path = self.path.join("lock");
        let error = |error| DirError::Io {
            what: self.what,
            path: path.clone(),
            error,
        };
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(&path)
            .map_err(error)?;
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(DirError::Busy {
                what: self.what,
                path: self.path.clone(),
            }),
            Err(other) => Err(error(other.into())),
        }
    }
}
