//! A good builder of the MLA backends that decides nothing: the kernel divides the decodes' keys. It must never know chaos.

use timetable_guest::{
    Builder,
    flash_mla::{Backend, Choice, Record},
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        LaunchPromise, flash_mla::Metadata,
    },
};

const COMMON: Backend = Backend {
    name: "FLASHMLA",
    base_threshold: 1,
    varlen: false,
    dcp_with_varlen: false,
    supports_draft_decode_metadata_update: false,
};

/// The common record as it is.
pub struct LazyDecodes {
    record: Record,
}

impl Builder for LazyDecodes {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        Ok(Self {
            record: Record::new(config, COMMON)?,
        })
    }

    fn info(&self) -> BuilderInfo {
        self.record.info("flash-mla, lazy")
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
}
