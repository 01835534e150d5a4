//! A good builder of the Mamba family. It must never know chaos.

use timetable_guest::{
    Builder,
    mamba::Record,
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        LaunchPromise, mamba::Metadata,
    },
};

/// The field's record.
pub struct States {
    record: Record,
}

impl Builder for States {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        Ok(Self {
            record: Record::new(config)?,
        })
    }

    fn info(&self) -> BuilderInfo {
        BuilderInfo {
            supports_update_block_table: false,
            ..self.record.info("mamba")
        }
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        self.record.launch_promise(shape)
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        self.record.build(common)
    }
}
