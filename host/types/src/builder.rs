//! What a builder says of itself, promises, and declines.

use alloc::{string::String, vec::Vec};

use crate::{CudagraphSupport, HostInput};

record! {
    /// Asked for once, after construction.
    pub struct BuilderInfo {
        /// A name for people, such as "flash-attn, fixed splits".
        name as "name": String,
        /// `cudagraph_support`
        cudagraph_support as "cudagraph-support": CudagraphSupport,
        /// Rows with at most this many query tokens are decodes and go first; none: the backend does not care.
        reorder_batch_threshold as "reorder-batch-threshold": Option<u32>,
        /// Largest query length L such that a full graph replays any mix of 1..L.
        varlen_cudagraph_max_query_len as "varlen-cudagraph-max-query-len": Option<u32>,
        /// `supports_update_block_table`
        supports_update_block_table as "supports-update-block-table": bool,
        /// `supports_draft_decode_metadata_update`
        supports_draft_decode_metadata_update as "supports-draft-decode-metadata-update": bool,
        /// `needs`
        needs as "needs": Vec<HostInput>,
        /// The most a plan may need on the device, in bytes.
        max_scratch_bytes as "max-scratch-bytes": u64,
    }
}

record! {
    /// A batch shape that a graph is, or may be, captured with.
    pub struct CaptureShape {
        /// `num_tokens`
        num_tokens as "num-tokens": u32,
        /// `num_reqs`
        num_reqs as "num-reqs": u32,
        /// `max_query_len`
        max_query_len as "max-query-len": u32,
        /// None: any mix.
        uniform_query_len as "uniform-query-len": Option<u32>,
    }
}

record! {
    /// What a captured graph relies on: no step replayed through it exceeds any of this.
    pub struct LaunchPromise {
        /// `max_num_splits`
        max_num_splits as "max-num-splits": u32,
        /// In the family's own count: for FLASH_ATTN the sum of `num-splits` over the rows (a row without a count has one), for
        /// FLASHINFER the items of each part. A bound like the others; what the plain builder needs always fits, so 0 promises no
        /// more than that.
        max_work_items as "max-work-items": u32,
        /// `scratch_bytes`
        scratch_bytes as "scratch-bytes": u64,
        /// `max_query_len`
        max_query_len as "max-query-len": u32,
        /// `uniform_query_len`
        uniform_query_len as "uniform-query-len": Option<u32>,
    }
}

enumeration! {
    /// What a builder that declines a batch complains of; the field's ValueError, AssertionError and NotImplementedError.
    pub enum ErrorKind in "snake_case" {
        /// `invalid-value`
        InvalidValue as "invalid-value",
        /// `assertion`
        Assertion as "assertion",
        /// `not-implemented`
        NotImplemented as "not-implemented",
    }
}

record! {
    /// A builder declines a batch. Not a fault of the sandbox: the host falls back to its plain builder.
    pub struct BuildError {
        /// `kind`
        kind as "kind": ErrorKind,
        /// `message`
        message as "message": String,
    }
}
