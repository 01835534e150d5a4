//! Where a builder's component comes from, and whether it may run: a path or an OCI registry by digest, detached signatures,
//! an allow-list of content hashes.
//!
//! Must never know: the sandbox, the engine, or what a component does.
