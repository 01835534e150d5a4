//! A fault bundle: everything that a builder's fault depends on, in one file that another machine can replay.
//!
//! The file is a line that says what it is and how long its parts are, a header as one line of JSON (`head -2 FILE | tail -1 |
//! jq`), and the component's bytes. Must never know: steps in flight, or where bundles are kept.

mod replay;
mod step;
mod store;

use std::{
    borrow::Cow,
    fmt,
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use timetable_attention::{BuildFault, FaultKind};
use timetable_types::{BuilderConfig, CommonAttentionMetadata, Family, Metadata};

pub use replay::{Outcome, Replay, ReplayError, limits_for_replay};
pub use step::StepRecord;
pub(crate) use store::BundleWriter;
pub use store::{BundleFigures, BundleLimits, FaultDir};

use crate::{BuilderCall, ContentHash, Limits};

const MAGIC: &str = "timetable-fault-bundle 1";
/// wasmtime's version, whose code the fault was seen in.
const WASMTIME: &str = "48.0.8";
/// Files above this are not looked at: far above any bundle that is written.
pub const MAX_BUNDLE_BYTES: u64 = 256 << 20;

/// Where a fault was seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenBy {
    /// Timetable's version.
    pub timetable: Cow<'static, str>,
    /// wasmtime's version.
    pub wasmtime: Cow<'static, str>,
    /// The CPU's name, or "unknown".
    pub cpu: String,
    /// Its architecture.
    pub arch: Cow<'static, str>,
    /// The operating system.
    pub os: Cow<'static, str>,
}

impl WrittenBy {
    /// This program on this machine.
    pub fn here() -> WrittenBy {
        WrittenBy {
            timetable: env!("CARGO_PKG_VERSION").into(),
            wasmtime: WASMTIME.into(),
            cpu: cpu(),
            arch: std::env::consts::ARCH.into(),
            os: std::env::consts::OS.into(),
        }
    }
}

fn cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map(|rest| rest.trim_start_matches([' ', '\t', ':']).trim());
    name.filter(|name| !name.is_empty())
        .map_or_else(|| "unknown".to_owned(), |name| crate::fault::cut(name, 128))
}

/// What was seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenFault {
    /// The kind.
    pub kind: FaultKind,
    /// What the sandbox, or the verifier, said.
    pub message: String,
}

impl SeenFault {
    /// As the sandbox, or the verifier, said it.
    pub fn of(fault: &BuildFault) -> SeenFault {
        match fault {
            BuildFault::Declined(error) => SeenFault {
                kind: FaultKind::Declined,
                message: error.message.clone(),
            },
            BuildFault::Fault { kind, message } => SeenFault {
                kind: *kind,
                message: message.clone(),
            },
        }
    }
}

impl fmt::Display for SeenFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.message)
    }
}

/// What a fresh instance did with the same call, where that was the fault.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(clippy::large_enum_variant, reason = "one value a bundle")]
pub enum Again {
    /// It built this.
    Built(Metadata),
    /// It did not build.
    Fault(SeenFault),
}

/// Everything that a fault depends on but the component.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultHeader {
    /// Where it was seen.
    pub written_by: WrittenBy,
    /// When, in seconds since 1970.
    pub unix_time: u64,
    /// The attention group's name.
    pub group: String,
    /// Its family.
    pub family: Family,
    /// The version: component and configuration.
    pub version: ContentHash,
    /// The component.
    pub component: ContentHash,
    /// What the builder calls itself; empty if it was never constructed.
    pub name: String,
    /// Where it came from.
    pub origin: String,
    /// What was seen.
    pub fault: SeenFault,
    /// What it was asked for.
    pub call: BuilderCall<'static>,
    /// Calls that the instance had begun, this one included. Where a fresh instance does not fault, that many may.
    pub instance_calls: u64,
    /// What it was constructed with.
    pub config: BuilderConfig,
    /// What it was bounded by.
    pub limits: Limits,
    /// The batch. None for calls without one.
    pub common: Option<CommonAttentionMetadata>,
    /// What the verifier held the result against. None if it was not given, or above the bundle's limit.
    pub step: Option<StepRecord>,
    /// What came back, where something did.
    pub metadata: Option<Metadata>,
    /// What a fresh instance did.
    pub again: Option<Again>,
}

/// A fault bundle in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultBundle {
    /// Everything but the component.
    pub header: FaultHeader,
    /// The component's bytes.
    pub component: Vec<u8>,
}

/// Why a file is no bundle that can be used. Each message says what, with the value, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// Another file.
    #[error(
        "is no fault bundle: it begins with {found:?}, not with `{MAGIC}`; give a file that a host wrote into its fault directory"
    )]
    NotABundle {
        /// Its first line, cut.
        found: String,
    },
    /// Not all of it is there, or there is more.
    #[error(
        "is damaged: its first line announces {announced} bytes after it, and there are {found}; copy it again"
    )]
    Length {
        /// What the first line says.
        announced: u64,
        /// What is there.
        found: u64,
    },
    /// A byte is another one.
    #[error("is damaged: its content does not have the SHA-256 of its first line; copy it again")]
    Digest,
    /// The header does not read.
    #[error(
        "has a header that this version of Timetable does not read: {0}; replay it with the version that wrote it"
    )]
    Header(String),
    /// Not the component of the header.
    #[error(
        "holds the component {found}, but its header names {named}; it was put together by hand"
    )]
    Component {
        /// The header's.
        named: ContentHash,
        /// What is there.
        found: ContentHash,
    },
}

impl FaultBundle {
    /// The file.
    ///
    /// # Errors
    /// If the header has no JSON form.
    pub fn to_bytes(&self) -> Result<Vec<u8>, BundleError> {
        let header = serde_json::to_vec(&self.header)
            .map_err(|error| BundleError::Header(error.to_string()))?;
        let mut digest = Sha256::new_with_prefix(&header);
        digest.update(b"\n");
        digest.update(&self.component);
        let digest = ContentHash(digest.finalize().into()).to_hex();
        let first = format!(
            "{MAGIC} {} {} {digest}\n",
            header.len(),
            self.component.len()
        );
        let mut bytes = Vec::with_capacity(first.len() + header.len() + 1 + self.component.len());
        bytes.extend_from_slice(first.as_bytes());
        bytes.extend_from_slice(&header);
        bytes.push(b'\n');
        bytes.extend_from_slice(&self.component);
        Ok(bytes)
    }

    /// Reads a file's content.
    ///
    /// # Errors
    /// If it is another file, damaged, or of another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<FaultBundle, BundleError> {
        let foreign = || BundleError::NotABundle {
            found: bytes
                .iter()
                .take(24)
                .map(|byte| char::from(*byte))
                .map(|c| {
                    if c.is_ascii_graphic() || c == ' ' {
                        c
                    } else {
                        '.'
                    }
                })
                .collect(),
        };
        let end = bytes
            .iter()
            .take(256)
            .position(|byte| *byte == b'\n')
            .ok_or_else(foreign)?;
        let first = std::str::from_utf8(&bytes[..end]).map_err(|_| foreign())?;
        let numbers = first.strip_prefix(MAGIC).ok_or_else(foreign)?;
        let mut numbers = numbers.split_ascii_whitespace();
        let mut number = || numbers.next()?.parse::<u64>().ok();
        let (Some(header_len), Some(component_len)) = (number(), number()) else {
            return Err(foreign());
        };
        let digest = numbers
            .next()
            .and_then(ContentHash::from_hex)
            .ok_or_else(foreign)?;
        let rest = &bytes[end + 1..];
        let announced = header_len.saturating_add(component_len).saturating_add(1);
        if announced != rest.len() as u64 {
            return Err(BundleError::Length {
                announced,
                found: rest.len() as u64,
            });
        }
        if ContentHash::of(rest) != digest {
            return Err(BundleError::Digest);
        }
        let (header, component) = rest.split_at(header_len as usize);
        let header: FaultHeader = serde_json::from_slice(header)
            .map_err(|error| BundleError::Header(error.to_string()))?;
        let component = &component[1..];
        let found = ContentHash::of(component);
        if found != header.component {
            return Err(BundleError::Component {
                named: header.component,
                found,
            });
        }
        Ok(FaultBundle {
            header,
            component: component.to_vec(),
        })
    }
}

pub(crate) fn unix_time() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wasmtimes_version_is_the_locked_one() {
        let lock = concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.lock");
        let lock = std::fs::read_to_string(lock).expect("the lock file");
        let locked = format!("name = \"wasmtime\"\nversion = \"{WASMTIME}\"");
        assert!(lock.contains(&locked), "Cargo.lock has another wasmtime");
        assert!(!WrittenBy::here().cpu.is_empty());
    }

    #[test]
    fn other_files_are_told_apart_in_one_line() {
        for bytes in [
            &b""[..],
            b"\0asm\x0d\0\x01\0",
            b"timetable-fault-bundle 2 1 1 00\n",
            b"timetable-fault-bundle 1 many\nx",
            b"timetable-fault-bundle 1 1 1 zz\n{}",
        ] {
            let error = FaultBundle::from_bytes(bytes).unwrap_err();
            assert!(matches!(error, BundleError::NotABundle { .. }), "{error}");
            assert!(!error.to_string().contains('\n'), "{error}");
        }
    }
}
