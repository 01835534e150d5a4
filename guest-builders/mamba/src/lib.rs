//! The Mamba family's reference builder: MAMBA1, MAMBA2, SHORT_CONV, LINEAR or GDN, as the group's spec says. The family's
//! metadata leaves nothing to choose, so this is the field's record and no more.
//!
//! It must never know what a state is, nor a block id.

use timetable_guest::{
    Builder, export_mamba,
    mamba::Record,
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        LaunchPromise, MambaType, mamba::Metadata,
    },
};

/// The reference builder.
pub struct FieldRecord {
    record: Record,
    name: &'static str,
}

impl Builder for FieldRecord {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        let mamba_type = config.kv_cache_spec.mamba.as_ref();
        let name = match mamba_type.map(|mamba| mamba.mamba_type) {
            Some(MambaType::Mamba1) => "mamba, mamba1",
            Some(MambaType::Gdn) => "mamba, gdn",
            Some(MambaType::ShortConv) => "mamba, short conv",
            Some(MambaType::Linear) => "mamba, linear",
            Some(MambaType::Mamba2) | None => "mamba, mamba2",
        };
        Ok(Self {
            record: Record::new(config)?,
            name,
        })
    }

    fn info(&self) -> BuilderInfo {
        self.record.info(self.name)
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

    fn build_for_cudagraph_capture(
        &mut self,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildError> {
        self.record.build_for_cudagraph_capture(common)
    }

    fn update_block_table(
        &mut self,
        metadata: Metadata,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildError> {
        Ok(self.record.update_block_table(metadata, common))
    }
}

export_mamba!(FieldRecord);
