//! Components as the command line names them: fetched, and held against the operator's policy.
//!
//! Must never know: a running engine, or what a component does.

use std::path::Path;

use timetable_provenance::{
    Digest, FetchLimits, Fetched, ProvenancePolicy, Require, Source, Trust,
};

use crate::cli::TrustArgs;
use crate::exit::{Exit, Failure};

/// Brings a component and its signature: `signature`, or what lies beside a path.
///
/// # Errors
/// It cannot be brought, or has more than `bytes_max` bytes.
pub fn fetch(
    source: &Source,
    signature: Option<&Path>,
    bytes_max: u64,
) -> Result<Fetched, Failure> {
    let limits = FetchLimits {
        component_bytes_max: bytes_max,
        ..FetchLimits::default()
    };
    source
        .fetch(signature, &limits)
        .map_err(Failure::of(Exit::BadInput))
}

/// What the flags demand: whatever is named is enforced.
pub fn policy(arguments: &TrustArgs) -> ProvenancePolicy {
    let TrustArgs {
        trusted_key,
        allow_hashes,
        require_signature,
    } = arguments;
    ProvenancePolicy {
        require: match (
            trusted_key.is_empty(),
            allow_hashes.is_empty(),
            require_signature,
        ) {
            (true, true, _) => Require::None,
            (false, true, _) => Require::Signature,
            (true, false, _) => Require::AllowList,
            (false, false, false) => Require::Either,
            (false, false, true) => Require::Both,
        },
        key_files: trusted_key.clone(),
        allowed_hashes_files: allow_hashes.clone(),
        ..ProvenancePolicy::default()
    }
}

/// The policy with its files read. The components in this program are part of it.
///
/// # Errors
/// A file of it cannot be read, or it could admit nothing.
pub fn trust(policy: &ProvenancePolicy) -> Result<Trust, Failure> {
    let built_in = timetable_reference::components()
        .iter()
        .map(|component| Digest::of(component.bytes));
    Trust::new(policy)
        .map(|trust| trust.with_built_in(built_in))
        .map_err(Failure::of(Exit::BadInput))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_flags_name_is_enforced() {
        for (keys, hashes, both, expected) in [
            (0, 0, false, Require::None),
            (1, 0, false, Require::Signature),
            (1, 0, true, Require::Signature),
            (0, 1, false, Require::AllowList),
            (1, 1, false, Require::Either),
            (2, 1, true, Require::Both),
        ] {
            let arguments = TrustArgs {
                trusted_key: vec!["key".into(); keys],
                allow_hashes: vec!["hashes".into(); hashes],
                require_signature: both,
            };
            assert_eq!(policy(&arguments).require, expected, "{arguments:?}");
        }
    }
}
