//! What can go wrong between a path on disk and a row of logits.
//!
//! Every message is one line: the thing, its value, and what to do about it. This module knows nothing of how models
//! are computed.

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// An error of the caller's attention implementation, handed through unchanged.
pub type AttentionError = Box<dyn Error + Send + Sync>;

/// Why a model could not be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The operating system refused a file.
    #[error("cannot read {}: {source}; {remedy}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// A file's contents contradict its format or each other.
    #[error("{} is not a usable model: {what}; {remedy}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The thing that is wrong, with its value.
        what: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The model is of a family that this engine does not run.
    #[error(
        "{}: unknown architecture '{found}'; use a model whose architecture is one of {}",
        path.display(),
        super::config::Architecture::NAMES
    )]
    UnknownArchitecture {
        /// The file that names it.
        path: PathBuf,
        /// The name found there.
        found: String,
    },
    /// The model uses a feature that this engine does not run.
    #[error("{}: {what} is not supported; {remedy}", path.display())]
    Unsupported {
        /// The file that asks for it.
        path: PathBuf,
        /// The feature, with its value.
        what: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A weight that the architecture needs is not there.
    #[error("{}: tensor '{name}' is missing; fetch the model again, or convert it again with all its weights", path.display())]
    MissingTensor {
        /// The file or directory searched.
        path: PathBuf,
        /// The tensor's name there.
        name: String,
    },
    /// A weight's shape contradicts the configuration.
    #[error(
        "{}: tensor '{name}' has shape {} but the configuration needs {}; the file and its configuration do not belong together, fetch the model again",
        path.display(), shape_text(found), shape_text(expected)
    )]
    WrongShape {
        /// The file or directory.
        path: PathBuf,
        /// The tensor's name there.
        name: String,
        /// Its shape, slowest dimension first.
        found: Vec<usize>,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
    },
    /// The caller handed `forward` something that no step may contain.
    #[error("bad batch: {0}")]
    Batch(String),
    /// The attention implementation failed.
    #[error("attention of layer {layer} failed: {source}")]
    Attention {
        /// Layer index, from 0.
        layer: usize,
        /// What it said.
        source: AttentionError,
    },
}

impl ModelError {
    /// A corrupt file, with the usual remedy.
    pub(crate) fn corrupt(path: &Path, what: impl Into<String>) -> Self {
        Self::Corrupt {
            path: path.to_owned(),
            what: what.into(),
            remedy: "the file is truncated or damaged, fetch it again",
        }
    }

    /// A failed read, with a remedy.
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        let remedy = match source.kind() {
            std::io::ErrorKind::NotFound => {
                "give the path of a GGUF file or of a Hugging Face model directory"
            }
            std::io::ErrorKind::PermissionDenied => "make it readable for this user",
            _ => "check the path and the disk",
        };
        Self::Io {
            path: path.to_owned(),
            source,
            remedy,
        }
    }
}

fn shape_text(shape: &[usize]) -> String {
    let mut text = String::from("[");
    for (i, dim) in shape.iter().enumerate() {
        let _ = write!(text, "{}{dim}", if i == 0 { "" } else { ", " });
    }
    text.push(']');
    text
}
