//! TRITON_MLA's reference builder: the common record of the MLA backends; the kernel divides keys by itself.
//!
//! It must never know what the common record holds: that is the SDK's.

use timetable_guest::{
    export_flash_mla,
    flash_mla::{Backend, Lazy, LazyDecodes},
};

/// TRITON_MLA.
pub struct TritonMla;

impl Lazy for TritonMla {
    const NAME: &'static str = "triton-mla";
    const BACKEND: Backend = Backend {
        name: "TRITON_MLA",
        base_threshold: 1,
        varlen: false,
        dcp_with_varlen: false,
        supports_draft_decode_metadata_update: true,
    };
}

/// The common record.
pub type Common = LazyDecodes<TritonMla>;

export_flash_mla!(Common);
