//! A good builder of the MLA backends that decides nothing: the kernel divides the decodes' keys. It must never know chaos.

use timetable_guest::flash_mla::{self, Backend, Lazy};

/// Of no backend more than of another: a decode has one token.
pub struct AnyLatent;

impl Lazy for AnyLatent {
    const NAME: &'static str = "flash-mla, lazy";
    const BACKEND: Backend = Backend {
        name: "FLASHMLA",
        base_threshold: 1,
        varlen: false,
        dcp_with_varlen: false,
        supports_draft_decode_metadata_update: false,
    };
}

/// The common record as it is.
pub type LazyDecodes = flash_mla::LazyDecodes<AnyLatent>;
