//! The state directory: components by content, and which of them is active. What is active survives a restart, and a file
//! that changes on disk changes nothing.
//!
//! Must never know: how a component is loaded or run.

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use timetable_types::Family;

use crate::{
    ContentHash, DirError,
    owned_dir::{Access, OwnedDir},
};

const MANIFEST: &str = "active.json";
const MANIFEST_VERSION: u32 = 1;
const WHAT: &str = "the state directory";

/// A state directory, locked for this process.
#[derive(Debug)]
pub struct StateDir {
    dir: OwnedDir,
    components: OwnedDir,
    manifest: Manifest,
    _lock: File,
}

/// What is active for one family.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ActiveComponent {
    /// The component's content, kept as `components/<hash>.wasm`.
    pub component: ContentHash,
    /// Where it came from.
    pub origin: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    version: u32,
    active: BTreeMap<Family, ActiveComponent>,
}

/// Why the state directory cannot be used, or a component cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The directory, or a file in it.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The manifest does not read.
    #[error("`{path}` is not a manifest of version {MANIFEST_VERSION}: {problem}; move it away to start with the built-in builders", path = path.display())]
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

impl StateDir {
    /// Opens `path`, or makes it, and locks it for this process.
    ///
    /// # Errors
    /// If it belongs to another user, others may write to it, it cannot be written, another process has it open, or its
    /// manifest does not read.
    pub fn open(path: &Path) -> Result<StateDir, StateError> {
        let dir = OwnedDir::open(WHAT, path, Access::Readable)?;
        let lock = dir.lock()?;
        let components = OwnedDir::open(WHAT, &path.join("components"), Access::Readable)?;
        let manifest = match dir.read(MANIFEST)? {
            None => Manifest {
                version: MANIFEST_VERSION,
                active: BTreeMap::new(),
            },
            Some(bytes) => {
                let broken = |problem| StateError::Manifest {
                    path: path.join(MANIFEST),
                    problem,
                };
                let manifest: Manifest =
                    serde_json::from_slice(&bytes).map_err(|error| broken(error.to_string()))?;
                if manifest.version != MANIFEST_VERSION {
                    return Err(broken(format!("version is {}", manifest.version)));
                }
                manifest
            }
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

    /// Keeps a component by its content. Writes nothing if it is there.
    pub fn keep(&self, bytes: &[u8]) -> Result<ContentHash, StateError> {
        let hash = ContentHash::of(bytes);
        let name = file_name(hash);
        if self
            .components
            .read(&name)?
            .is_none_or(|kept| ContentHash::of(&kept) != hash)
        {
            self.components.write(&name, &[bytes])?;
        }
        Ok(hash)
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

    /// What is active for `family`. None: its built-in builder.
    pub fn active(&self, family: Family) -> Option<&ActiveComponent> {
        self.manifest.active.get(&family)
    }

    /// Keeps `bytes` and makes them the active component of `family`, durably, before returning.
    pub fn activate(
        &mut self,
        family: Family,
        bytes: &[u8],
        origin: &str,
    ) -> Result<ContentHash, StateError> {
        let component = self.keep(bytes)?;
        let active = ActiveComponent {
            component,
            origin: origin.to_owned(),
        };
        self.change(family, Some(active))?;
        Ok(component)
    }

    /// Makes a component that was kept before the active one, as after a rollback.
    pub fn activate_kept(
        &mut self,
        family: Family,
        component: ContentHash,
        origin: &str,
    ) -> Result<(), StateError> {
        self.component(component)?;
        let active = ActiveComponent {
            component,
            origin: origin.to_owned(),
        };
        self.change(family, Some(active))
    }

    /// Goes back to the built-in builder of `family`.
    pub fn deactivate(&mut self, family: Family) -> Result<(), StateError> {
        self.change(family, None)
    }

    fn change(&mut self, family: Family, to: Option<ActiveComponent>) -> Result<(), StateError> {
        let mut active = self.manifest.active.clone();
        match to {
            Some(to) => active.insert(family, to),
            None => active.remove(&family),
        };
        let manifest = Manifest {
            version: MANIFEST_VERSION,
            active,
        };
        let text = serde_json::to_vec_pretty(&manifest).map_err(|error| StateError::Manifest {
            path: self.dir.path().join(MANIFEST),
            problem: error.to_string(),
        })?;
        self.dir.write(MANIFEST, &[&text])?;
        self.manifest = manifest;
        Ok(())
    }
}

fn signature_name(hash: ContentHash) -> String {
    format!("{}.wasm.sig", hash.to_hex())
}

fn file_name(hash: ContentHash) -> String {
    format!("{}.wasm", hash.to_hex())
}
