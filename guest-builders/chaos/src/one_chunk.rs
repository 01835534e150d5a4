//! A good builder of FLASHINFER that decides nothing: one chunk as long as the longest request, work items in row order. It
//! must never know chaos.

use timetable_guest::{
    Builder,
    flashinfer::{Choice, Record},
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        LaunchPromise, flashinfer::Metadata,
    },
};

/// One chunk for every request.
pub struct OneChunk {
    record: Record,
}

impl Builder for OneChunk {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        Ok(Self {
            record: Record::new(config, 1)?,
        })
    }

    fn info(&self) -> BuilderInfo {
        self.record.info("flashinfer, one chunk")
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        self.record.launch_promise(shape)
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        self.record.build(common, |_| Choice::one_chunk())
    }
}
