//! Compiled code, kept between runs: compiling 30 KB takes 15–40 ms, loading it again 0.1 ms.
//!
//! Code from this directory runs in this process unchecked, so the directory must be the host's own and nobody else's, and
//! every file carries its own digest. Must never know: what a component is for.

use std::{
    hash::{Hash, Hasher},
    path::Path,
};

use sha2::{Digest, Sha256};
use wasmtime::{Engine, component::Component as Compiled};

use crate::{
    ContentHash, DirError, LoadError, Sandbox,
    owned_dir::{Access, OwnedDir},
};

const HEADER: &[u8] = b"timetable compiled code 1\n";

/// A directory of compiled components.
#[derive(Debug)]
pub struct CodeCache {
    dir: OwnedDir,
}

impl CodeCache {
    /// Opens `path`, or makes it with mode 0700.
    ///
    /// # Errors
    /// If it belongs to another user, has a mode other than 0700, is a link or a file, or cannot be made.
    pub fn open(path: &Path) -> Result<CodeCache, DirError> {
        Ok(CodeCache {
            dir: OwnedDir::open("the compiled-code cache", path, Access::Private)?,
        })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    fn get(&self, engine: &Engine, name: &str) -> Option<Compiled> {
        let file = match self.dir.read(name) {
            Ok(file) => file?,
            Err(error) => {
                tracing::warn!("{error}; compiling instead");
                return None;
            }
        };
        let code = file
            .strip_prefix(HEADER)
            .and_then(|rest| rest.split_at_checked(32));
        let Some((digest, code)) =
            code.filter(|(digest, code)| ContentHash::of(code).0 == **digest)
        else {
            tracing::warn!("the compiled-code cache's file `{name}` is damaged; compiling instead");
            return None;
        };
        let _ = digest;
        // SAFETY: `code` is what `Component::serialize` gave to a process of this user: the directory and the file belong to
        // it and nobody else may write there (checked in `OwnedDir`), and its digest holds for the very bytes that are used
        // here. wasmtime itself refuses code of another version or configuration.
        match unsafe { Compiled::deserialize(engine, code) } {
            Ok(component) => Some(component),
            Err(error) => {
                tracing::warn!(
                    "the compiled-code cache's file `{name}` does not fit: {error:#}; compiling instead"
                );
                None
            }
        }
    }

    fn put(&self, component: &Compiled, name: &str) {
        let written = component
            .serialize()
            .map_err(|error| format!("{error:#}"))
            .and_then(|code| {
                let digest = ContentHash::of(&code).0;
                self.dir
                    .write(name, &[HEADER, &digest, &code])
                    .map_err(|error| error.to_string())
            });
        if let Err(error) = written {
            tracing::warn!("compiled code is not kept: {error}");
        }
    }
}

/// The name of a component's compiled code: it depends on the component, wasmtime's version, its configuration and the CPU's
/// features.
fn file_name(engine: &Engine, bytes: &[u8]) -> String {
    struct IntoSha(Sha256);
    impl Hasher for IntoSha {
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }
        fn finish(&self) -> u64 {
            0
        }
    }
    let mut hash = IntoSha(Sha256::new_with_prefix(ContentHash::of(bytes).0));
    engine.precompile_compatibility_hash().hash(&mut hash);
    format!("{}.cwasm", ContentHash(hash.0.finalize().into()).to_hex())
}

impl Sandbox {
    /// Compiled code for `bytes`: from the cache if there is one and it has it.
    pub(crate) fn compile(&self, bytes: &[u8]) -> Result<Compiled, LoadError> {
        let engine = self.engine();
        let cached = self
            .shared
            .cache
            .as_ref()
            .map(|cache| (cache, file_name(engine, bytes)));
        if let Some(component) = cached
            .as_ref()
            .and_then(|(cache, name)| cache.get(engine, name))
        {
            return Ok(component);
        }
        let component = Compiled::from_binary(engine, bytes)
            .map_err(|error| LoadError::Invalid(one_line(&error)))?;
        if let Some((cache, name)) = cached {
            cache.put(&component, &name);
        }
        Ok(component)
    }
}

fn one_line(error: &wasmtime::Error) -> String {
    crate::fault::cut(&format!("{error:#}"), 512)
}
