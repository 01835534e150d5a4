//! Where a builder's component comes from, and whether it may run: a path or an OCI registry by digest, detached signatures,
//! an allow-list of content hashes.
//!
//! - [`Source`] names a component: a path, or `oci://registry/repository@sha256:…`. [`Source::fetch`] brings its bytes, bounded
//!   in size and time, and the signature that lies beside a file.
//! - [`ProvenancePolicy`] is what an operator demands, as configuration. [`Trust`] is the policy with its files read:
//!   [`Trust::admit`] says of a component whether it may run.
//!
//! Who fetches need not be who decides: `timetable reload` fetches, the host that it talks to decides.
//!
//! Must never know: the sandbox, the engine, or what a component does.

mod digest;
mod key;
mod oci;
mod policy;
mod signature;
mod source;
mod text;
mod trust;

pub use digest::{Digest, DigestError};
pub use key::{KEY_BYTES_MAX, KeyError, TrustedKey};
pub use oci::{FetchLimits, OciError, OciProblem, OciReference, ReferenceError};
pub use policy::{ProvenancePolicy, Require};
pub use signature::{SIGNATURE_BYTES_MAX, Signature, SignatureError};
pub use source::{Fetched, Source, SourceError};
pub use trust::{Evidence, HASHES_BYTES_MAX, PolicyError, Trust, Untrusted};
