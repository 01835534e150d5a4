//! A good builder of TRITON_ATTN that divides nothing: the 2D form for every step. It must never know chaos.

use timetable_guest::{
    Builder,
    triton_attn::{Record, Segments},
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        LaunchPromise, triton_attn::Metadata,
    },
};

/// One segment for every row.
pub struct OneSegment {
    record: Record,
}

impl Builder for OneSegment {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        Ok(Self {
            record: Record::new(config)?,
        })
    }

    fn info(&self) -> BuilderInfo {
        self.record.info("triton-attn, one segment", Segments::NONE)
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        self.record.launch_promise(shape, Segments::NONE)
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        self.record.build(common, Segments::NONE)
    }
}
