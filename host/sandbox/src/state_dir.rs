//! The state directory: components by content, and a manifest of which version of each slot is active, which was before it, and
//! which is being tried. What is active survives a restart, and a file that changes on disk changes nothing.
//!
//! Every file is written whole, to disk, and then renamed, so that a crash at any point leaves the manifest before or the one
//! after, and every component that it names. Must never know: how a component is loaded or run.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde::{Deserialize, Serialize};
use timetable_types::Family;

use crate::{
    ContentHash, DirError, Stage, TenantName,
    owned_dir::{Access, OwnedDir},
};

const MANIFEST: &str = "active.json";
const MANIFEST_VERSION: u32 = 2;
const WHAT: &str = "the state directory";
/// Components that are kept beside those that the manifest names, the newest: a version that is being submitted, or that a
/// rollback may return to, is among them.
const MAX_UNNAMED: usize = 64;

/// A state directory, locked for this process.
#[derive(Debug)]
pub struct StateDir {
    dir: OwnedDir,
    components: OwnedDir,
    manifest: Manifest,
    _lock: File,
}

/// A version, as the manifest names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptVersion {
    /// The component's content, kept as `components/<hash>.wasm`.
    pub component: ContentHash,
    /// Where it came from.
    pub origin: String,
    /// What it is constructed with, beside what the engine says.
    #[serde(default)]
    pub options: Vec<(String, String)>,
}

/// A version that is being tried. After a crash it is not tried again by itself: the active one serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptCandidate {
    /// The version.
    pub version: KeptVersion,
    /// How far it had come.
    pub stage: Stage,
}

/// What is known of one slot. None where the version is not kept here: an embedded one, or one given on the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SlotState {
    /// What serves after a restart.
    pub active: Option<KeptVersion>,
    /// What served before it.
    pub previous: Option<KeptVersion>,
    /// What is being tried.
    pub candidate: Option<KeptCandidate>,
}

impl SlotState {
    fn components(&self) -> impl Iterator<Item = ContentHash> {
        let candidate = self.candidate.as_ref().map(|candidate| &candidate.version);
        [self.active.as_ref(), self.previous.as_ref(), candidate]
            .into_iter()
            .flatten()
            .map(|kept| kept.component)
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    version: u32,
    /// By the family's interface, and `@tenant` where a tenant has its own.
    slots: BTreeMap<String, SlotState>,
}

/// As version 1 had it: what is active for a family.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest1 {
    #[serde(rename = "version")]
    _version: u32,
    active: BTreeMap<Family, KeptVersion>,
}

/// Why the state directory cannot be used, or a component cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The directory, or a file in it.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The manifest does not read.
    #[error("`{path}` is not a manifest of version 1 or {MANIFEST_VERSION}: {problem}; move it away to start with the built-in builders", path = path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A component that should be there is not.
    #[error("`{path}` is missing, but {MANIFEST} names it; put it back, or move {MANIFEST} away", path = path.display())]
    Missing {
        /// The component.
        path: PathBuf,
    },
    /// A component's content is not what its name says.
    #[error("`{path}` has the content {found}, not that of its name; put the right file back, or move {MANIFEST} away", path = path.display())]
    Changed {
        /// The component.
        path: PathBuf,
        /// What its content is.
        found: ContentHash,
    },
}

impl Manifest {
    fn read(bytes: &[u8]) -> Result<Manifest, String> {
        let value: serde_json::Value =
            serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let version = value.get("version").and_then(serde_json::Value::as_u64);
        let text = |error: serde_json::Error| error.to_string();
        match version {
            Some(1) => {
                let Manifest1 { active, .. } = serde_json::from_value(value).map_err(text)?;
                let slot = |(family, active): (Family, KeptVersion)| {
                    let state = SlotState {
                        active: Some(active),
                        ..SlotState::default()
                    };
                    (family.interface().to_owned(), state)
                };
                Ok(Manifest {
                    version: MANIFEST_VERSION,
                    slots: active.into_iter().map(slot).collect(),
                })
            }
            Some(2) => {
                let manifest: Manifest = serde_json::from_value(value).map_err(text)?;
                // A name that nobody asks for would be an active version that is silently lost.
                match manifest.slots.keys().find(|slot| !is_slot(slot)) {
                    Some(slot) => Err(format!(
                        "`{slot}` is no slot; it has those of a family's interface, with /BACKEND where builders share it, and @tenant"
                    )),
                    None => Ok(manifest),
                }
            }
            Some(other) => Err(format!("version is {other}")),
            None => Err("it has no version".to_owned()),
        }
    }
}

fn is_slot(name: &str) -> bool {
    let (family, tenant) = match name.split_once('@') {
        Some((family, tenant)) => (family, Some(tenant)),
        None => (name, None),
    };
    let (family, backend) = match family.split_once('/') {
        Some((family, backend)) => (family, Some(backend)),
        None => (family, None),
    };
    let is_name = |name: &str| {
        let mut bytes = name.bytes();
        !name.is_empty() && bytes.all(|b| b == b'_' || b.is_ascii_uppercase() || b.is_ascii_digit())
    };
    let is_family = Family::ALL.iter().any(|known| known.interface() == family);
    is_family
        && backend.is_none_or(is_name)
        && tenant.is_none_or(|tenant| TenantName::new(tenant).is_ok())
}

impl StateDir {
    /// Opens `path`, or makes it, and locks it for this process. What a crash left half-written is removed.
    ///
    /// # Errors
    /// If it belongs to another user, others may write to it, it cannot be written, another process has it open, or its
    /// manifest does not read.
    pub fn open(path: &Path) -> Result<StateDir, StateError> {
        let dir = OwnedDir::open(WHAT, path, Access::Readable)?;
        let lock = dir.lock()?;
        let components = OwnedDir::open(WHAT, &path.join("components"), Access::Readable)?;
        dir.remove_temporaries();
        components.remove_temporaries();
        let manifest = match dir.read(MANIFEST)? {
            None => Manifest {
                version: MANIFEST_VERSION,
                slots: BTreeMap::new(),
            },
            Some(bytes) => Manifest::read(&bytes).map_err(|problem| StateError::Manifest {
                path: path.join(MANIFEST),
                problem,
            })?,
        };
        Ok(StateDir {
            dir,
            components,
            manifest,
            _lock: lock,
        })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Keeps a component by its content, durably. Writes nothing if it is there. It stays as long as it is named, and among the
    /// newest 64 that are not.
    pub fn keep(&self, bytes: &[u8]) -> Result<ContentHash, StateError> {
        let hash = ContentHash::of(bytes);
        let name = file_name(hash);
        if self
            .components
            .read(&name)?
            .is_none_or(|kept| ContentHash::of(&kept) != hash)
        {
            self.components.write(&name, &[bytes])?;
        } else if let Ok(file) = File::options()
            .append(true)
            .open(self.components.path().join(&name))
        {
            // Among the newest again. It is there in any case.
            let _ = file.set_modified(SystemTime::now());
        }
        Ok(hash)
    }

    /// Is the component kept? (`component` checks its content.)
    pub fn has(&self, hash: ContentHash) -> bool {
        self.components.path().join(file_name(hash)).is_file()
    }

    /// The bytes of a kept component, checked against its name.
    pub fn component(&self, hash: ContentHash) -> Result<Vec<u8>, StateError> {
        let name = file_name(hash);
        let path = self.components.path().join(&name);
        let bytes = self.components.read(&name)?;
        let bytes = bytes.ok_or_else(|| StateError::Missing { path: path.clone() })?;
        match ContentHash::of(&bytes) {
            found if found != hash => Err(StateError::Changed { path, found }),
            _ => Ok(bytes),
        }
    }

    /// Keeps the detached signature that came with a component, beside it.
    pub fn keep_signature(&self, hash: ContentHash, signature: &[u8]) -> Result<(), StateError> {
        Ok(self.components.write(&signature_name(hash), &[signature])?)
    }

    /// The detached signature that came with a component, if one did.
    pub fn signature(&self, hash: ContentHash) -> Result<Option<Vec<u8>>, StateError> {
        Ok(self.components.read(&signature_name(hash))?)
    }

    /// What is known of a slot: a family's interface, or that and `@tenant`.
    pub fn slot(&self, name: &str) -> Option<&SlotState> {
        self.manifest.slots.get(name)
    }

    /// Every slot that something is known of.
    pub fn slots(&self) -> impl Iterator<Item = (&str, &SlotState)> {
        let slots = self.manifest.slots.iter();
        slots.map(|(name, state)| (name.as_str(), state))
    }

    /// What is active for everybody in `family`. None: its built-in builder.
    pub fn active(&self, family: Family) -> Option<&KeptVersion> {
        self.slot(family.interface())?.active.as_ref()
    }

    /// Makes these slots' states what a restart finds, durably, before returning. Other slots stay; nothing is written if
    /// nothing changes. Of components that no slot names the oldest are removed.
    ///
    /// # Errors
    /// If a component that is named is not kept, or the manifest cannot be written: what a restart finds stays.
    pub fn set(
        &mut self,
        slots: impl IntoIterator<Item = (String, SlotState)>,
    ) -> Result<(), StateError> {
        let mut all = self.manifest.slots.clone();
        for (slot, state) in slots {
            if let Some(missing) = state.components().find(|hash| !self.has(*hash)) {
                let path = self.components.path().join(file_name(missing));
                return Err(StateError::Missing { path });
            }
            all.insert(slot, state);
        }
        if all == self.manifest.slots {
            return Ok(());
        }
        let manifest = Manifest {
            version: MANIFEST_VERSION,
            slots: all,
        };
        let text = serde_json::to_vec_pretty(&manifest).map_err(|error| StateError::Manifest {
            path: self.dir.path().join(MANIFEST),
            problem: error.to_string(),
        })?;
        self.dir.write(MANIFEST, &[&text])?;
        self.manifest = manifest;
        self.forget_old();
        Ok(())
    }

    /// After the manifest, so that what it names is always there. A file that stays costs space only.
    fn forget_old(&self) {
        let Ok(files) = fs::read_dir(self.components.path()) else {
            return;
        };
        let slots = self.manifest.slots.values();
        let named: BTreeSet<ContentHash> = slots.flat_map(SlotState::components).collect();
        let mut unnamed: Vec<(SystemTime, ContentHash)> = files
            .flatten()
            .filter_map(|file| {
                let name = file.file_name();
                let hash = ContentHash::from_hex(name.to_str()?.strip_suffix(".wasm")?)?;
                let modified = file.metadata().and_then(|metadata| metadata.modified());
                (!named.contains(&hash)).then(|| (modified.unwrap_or(SystemTime::UNIX_EPOCH), hash))
            })
            .collect();
        unnamed.sort_unstable();
        let old = unnamed.len().saturating_sub(MAX_UNNAMED);
        for (_, hash) in &unnamed[..old] {
            for name in [file_name(*hash), signature_name(*hash)] {
                // It may have no signature.
                let _ = fs::remove_file(self.components.path().join(name));
            }
        }
    }
}

fn signature_name(hash: ContentHash) -> String {
    format!("{}.wasm.sig", hash.to_hex())
}

fn file_name(hash: ContentHash) -> String {
    format!("{}.wasm", hash.to_hex())
}
