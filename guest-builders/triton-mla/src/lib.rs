//! TRITON_MLA's reference builder: the common record of the MLA backends; the kernel divides keys by itself.
//!
//! It must never know what the common record holds: that is the SDK's.

use timetable_guest::{
    Builder, export_flash_mla,
    flash_mla::{Backend, Choice, Record},
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        LaunchPromise, flash_mla::Metadata,
    },
};

const TRITON_MLA: Backend = Backend {
    name: "TRITON_MLA",
    base_threshold: 1,
    varlen: false,
    dcp_with_varlen: false,
    supports_draft_decode_metadata_update: true,
};

/// The common record.
pub struct Common {
    record: Record,
}

impl Builder for Common {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        Ok(Self {
            record: Record::new(config, TRITON_MLA)?,
        })
    }

    fn info(&self) -> BuilderInfo {
        self.record.info("triton-mla")
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        self.record.launch_promise(shape, 1)
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        self.record.build(common, |_| Choice::lazy())
    }

    fn build_for_cudagraph_capture(
        &mut self,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildError> {
        self.record
            .build_for_cudagraph_capture(common, |_| Choice::lazy())
    }
}

export_flash_mla!(Common);
