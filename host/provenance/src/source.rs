//! Where a component comes from, as an operator names it, and how its bytes are brought.
//!
//! Must never know: whether it may run.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::oci::{self, FetchLimits, OciError, OciReference, ReferenceError};
use crate::signature::SIGNATURE_BYTES_MAX;
use crate::text::read_bounded;

/// What a signature's file is called, beside the component's: these endings after its whole name, in this order.
const BESIDE: [&str; 2] = [".minisig", ".sig"];

/// A component's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file.
    Path(PathBuf),
    /// A registry, by digest: `oci://registry/repository@sha256:…`.
    Oci(OciReference),
}

/// A component's bytes.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// The component, as it lay there.
    pub component: Vec<u8>,
    /// The content of its signature's file, if there is one.
    pub signature: Option<Vec<u8>>,
}

/// Why a component could not be brought. Each message says what, with the value, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A file.
    #[error("component {path}: cannot be read ({error}); give the path of a component (.wasm), or oci://registry/repository@sha256:…", path = path.display())]
    Component {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// A signature's file.
    #[error("signature {path}: cannot be read ({error}); give the detached signature's file with --signature FILE", path = path.display())]
    Signature {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// A registry.
    #[error(transparent)]
    Oci(#[from] OciError),
}

impl Source {
    /// Brings the component. `signature` is its signature's file; without one, what lies beside a path as `PATH.minisig` or
    /// `PATH.sig` is taken. Waits: at most `limits.timeout` for a registry. Not to be called on a thread that serves, nor on
    /// one of an asynchronous runtime.
    ///
    /// # Errors
    /// See [`SourceError`].
    pub fn fetch(
        &self,
        signature: Option<&Path>,
        limits: &FetchLimits,
    ) -> Result<Fetched, SourceError> {
        let (component, beside) = match self {
            Source::Path(path) => {
                let component =
                    read_bounded(path, limits.component_bytes_max).map_err(|error| {
                        SourceError::Component {
                            path: path.clone(),
                            error,
                        }
                    })?;
                (component, beside(path))
            }
            Source::Oci(reference) => (oci::pull(reference, limits)?, None),
        };
        let file = signature.map(Path::to_path_buf).or(beside);
        let signature = file
            .map(|path| {
                read_bounded(&path, SIGNATURE_BYTES_MAX)
                    .map_err(|error| SourceError::Signature { path, error })
            })
            .transpose()?;
        Ok(Fetched {
            component,
            signature,
        })
    }
}

/// The signature's file beside a component's, if there is one.
fn beside(component: &Path) -> Option<PathBuf> {
    BESIDE
        .iter()
        .map(|ending| {
            let mut name = component.as_os_str().to_owned();
            name.push(ending);
            PathBuf::from(name)
        })
        .find(|path| path.exists())
}

impl FromStr for Source {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Source, ReferenceError> {
        match text.split_once("://") {
            Some(("oci", _)) => text.parse().map(Source::Oci),
            Some((scheme, _)) if scheme.bytes().all(|byte| byte.is_ascii_alphanumeric()) => {
                Err(ReferenceError::Scheme(scheme.to_owned()))
            }
            _ => Ok(Source::Path(PathBuf::from(text))),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Path(path) => path.display().fmt(f),
            Source::Oci(reference) => reference.fmt(f),
        }
    }
}
