//! The fault directory: bundles by time, bounded in number and in bytes. The oldest make place for the newest.
//!
//! Must never know: what is in a bundle.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};
use timetable_attention::FaultKind;

use super::{FaultBundle, MAX_BUNDLE_BYTES};
use crate::{
    ContentHash, DirError,
    mailbox::lock,
    owned_dir::{Access, OwnedDir},
};

const WHAT: &str = "the fault directory";
const ENDING: &str = ".ttfault";

/// Bounds on what the fault directory keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BundleLimits {
    /// Files. Default: 64.
    pub max_files: usize,
    /// Bytes of all files. Default: 256 MiB.
    pub max_bytes: u64,
    /// Bytes of one file; what the verifier needs is left out first, then the file is not written. Default: 32 MiB.
    pub max_bundle_bytes: u64,
    /// Bundles of one version and kind of fault, as long as the process runs; more tell nothing new. Default: 4.
    pub max_alike: u32,
    /// Bytes of a step's tensors that are copied on the step thread where the verifier had no part in the fault. Default:
    /// 256 KiB, about 20 µs.
    pub max_step_bytes: usize,
    /// The same where it refused the result, and they are needed. Default: 16 MiB, about 2 ms.
    pub max_refused_step_bytes: usize,
}

impl Default for BundleLimits {
    fn default() -> Self {
        BundleLimits {
            max_files: 64,
            max_bytes: 256 << 20,
            max_bundle_bytes: 32 << 20,
            max_alike: 4,
            max_step_bytes: 256 << 10,
            max_refused_step_bytes: 16 << 20,
        }
    }
}

impl BundleLimits {
    /// What is wrong with these limits: field, value, remedy.
    pub fn problems(&self) -> Vec<String> {
        let mut found = Vec::new();
        if self.max_files == 0 {
            found.push("max_files is 0; use at least 1, or keep no faults".to_owned());
        }
        if !(1..=MAX_BUNDLE_BYTES).contains(&self.max_bundle_bytes) {
            found.push(format!(
                "max_bundle_bytes is {}; use 1 to {MAX_BUNDLE_BYTES}, the largest bundle that is read",
                self.max_bundle_bytes
            ));
        } else if self.max_bytes < self.max_bundle_bytes {
            found.push(format!(
                "max_bytes is {}, below max_bundle_bytes {}; the directory must hold one bundle",
                self.max_bytes, self.max_bundle_bytes
            ));
        }
        found
    }
}

/// Bundles that wait to be written, at most: each holds a copy of its step.
const MAX_WAITING: usize = 8;
/// Distinct versions and kinds that are counted, at most.
const MAX_KINDS: usize = 4096;

/// A directory of fault bundles, of this user's own.
#[derive(Debug)]
pub struct FaultDir {
    dir: OwnedDir,
    limits: BundleLimits,
}

impl FaultDir {
    /// Opens `path`, or makes it with mode 0700. What it holds already counts.
    ///
    /// # Errors
    /// If it belongs to another user, has a mode other than 0700, is a link or a file, or cannot be made.
    pub fn open(path: &Path, limits: BundleLimits) -> Result<FaultDir, DirError> {
        Ok(FaultDir {
            dir: OwnedDir::open(WHAT, path, Access::Private)?,
            limits,
        })
    }

    /// The bundles, oldest first.
    ///
    /// # Errors
    /// If the directory does not read.
    pub fn bundles(&self) -> Result<Vec<PathBuf>, DirError> {
        Ok(self.list()?.into_iter().map(|(path, _)| path).collect())
    }

    /// Bundles with their sizes, oldest first: names begin with the time.
    fn list(&self) -> Result<Vec<(PathBuf, u64)>, DirError> {
        let failed = |error| DirError::Io {
            what: WHAT,
            path: self.dir.path().to_owned(),
            error,
        };
        let mut found = Vec::new();
        for entry in fs::read_dir(self.dir.path()).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            if !name.to_string_lossy().ends_with(ENDING) {
                continue;
            }
            // One that is gone by now, or is no file, takes no place.
            if let Ok(metadata) = fs::symlink_metadata(entry.path())
                && metadata.is_file()
            {
                found.push((entry.path(), metadata.len()));
            }
        }
        found.sort();
        Ok(found)
    }

    /// Writes a bundle, and removes the oldest as far as the bounds ask.
    fn write(&self, name: &str, bytes: &[u8]) -> Result<PathBuf, String> {
        let limit = self.limits.max_bundle_bytes.min(self.limits.max_bytes);
        if bytes.len() as u64 > limit {
            return Err(format!(
                "it has {} bytes, more than the {limit} that a bundle may have",
                bytes.len()
            ));
        }
        let list = self.list().map_err(|error| error.to_string())?;
        let mut files = list.len();
        let mut total: u64 = list.iter().map(|(_, bytes)| bytes).sum();
        for (path, size) in list {
            if files < self.limits.max_files && total + bytes.len() as u64 <= self.limits.max_bytes
            {
                break;
            }
            if let Err(error) = fs::remove_file(&path)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                return Err(format!("{} cannot be removed: {error}", path.display()));
            }
            files -= 1;
            total -= size;
        }
        self.dir
            .write(name, &[bytes])
            .map_err(|error| error.to_string())?;
        Ok(self.dir.path().join(name))
    }
}

/// What became of bundles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BundleFigures {
    /// Written.
    pub written: u64,
    /// Faults whose bundle was left out: like others before, or too many at once.
    pub left_out: u64,
    /// Not to be written: too large, or the directory refused.
    pub failed: u64,
}

/// Decides which faults are kept, and writes them off the step thread.
pub(crate) struct BundleWriter {
    dir: FaultDir,
    /// Bundles of each version and kind so far.
    alike: Mutex<BTreeMap<(ContentHash, FaultKind), u32>>,
    waiting: AtomicUsize,
    written: AtomicU64,
    left_out: AtomicU64,
    failed: AtomicU64,
}

impl BundleWriter {
    pub(crate) fn new(dir: FaultDir) -> BundleWriter {
        BundleWriter {
            dir,
            alike: Mutex::new(BTreeMap::new()),
            waiting: AtomicUsize::new(0),
            written: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }
    }

    pub(crate) fn limits(&self) -> &BundleLimits {
        &self.dir.limits
    }

    pub(crate) fn figures(&self) -> BundleFigures {
        BundleFigures {
            written: self.written.load(Ordering::Relaxed),
            left_out: self.left_out.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
        }
    }

    /// For the step thread, before it copies anything: is this fault kept? If so, `write` must follow.
    pub(crate) fn admit(&self, version: ContentHash, kind: FaultKind) -> bool {
        let admitted = {
            let mut alike = lock(&self.alike);
            let room = alike.len() < MAX_KINDS;
            match alike.get_mut(&(version, kind)) {
                Some(count) if *count >= self.dir.limits.max_alike => false,
                _ if self.waiting.load(Ordering::Relaxed) >= MAX_WAITING => false,
                Some(count) => {
                    *count += 1;
                    true
                }
                None if room => {
                    alike.insert((version, kind), 1);
                    true
                }
                None => false,
            }
        };
        if admitted {
            self.waiting.fetch_add(1, Ordering::Relaxed);
        } else {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
        admitted
    }

    /// Writes an admitted bundle. Not for the step thread.
    pub(crate) fn write(&self, mut bundle: FaultBundle) {
        let name = name(&bundle);
        let written = bundle
            .to_bytes()
            .map_err(|error| error.to_string())
            .and_then(|bytes| {
                if bytes.len() as u64 <= self.dir.limits.max_bundle_bytes
                    || bundle.header.step.is_none()
                {
                    return self.dir.write(&name, &bytes);
                }
                bundle.header.step = None;
                let bytes = bundle.to_bytes().map_err(|error| error.to_string())?;
                self.dir.write(&name, &bytes)
            });
        match written {
            Ok(path) => {
                self.written.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(
                    group = %bundle.header.group, "{}; replay it with `timetable replay-bundle {}`",
                    bundle.header.fault, path.display()
                );
            }
            Err(error) => {
                self.failed.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(group = %bundle.header.group, "{}; no fault bundle: {error}", bundle.header.fault);
            }
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Sorts by time; says what it is about.
fn name(bundle: &FaultBundle) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let millis = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_millis());
    let group: String = bundle
        .header
        .group
        .chars()
        .take(48)
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect();
    format!(
        "{millis:015}-{:06}-{count:04}-{group}-{}{ENDING}",
        std::process::id() % 1_000_000,
        bundle.header.fault.kind
    )
}
