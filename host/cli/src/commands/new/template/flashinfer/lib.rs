//! {{name}}: a metadata builder of {{backend}}. The frame: it plans the chunks that `policy` says.

mod policy;

use timetable_guest::{
    Builder, export_flashinfer,
    flashinfer::Record,
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        LaunchPromise, flashinfer::Metadata,
    },
};

/// The builder of one attention group.
pub struct Policy {
    record: Record,
}

impl Builder for Policy {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        Ok(Self {
            record: Record::new(config, policy::MAX_SPLITS)?,
        })
    }

    fn info(&self) -> BuilderInfo {
        self.record.info("{{name}}")
    }

    /// What a captured graph may rely on: no step exceeds it.
    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        self.record.launch_promise(shape)
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        self.record.build(common, policy::choose)
    }
}

export_flashinfer!(Policy);

#[cfg(test)]
mod tests {
    use super::*;
    use timetable_guest::testing::{batch, config};
    use timetable_guest::types::flashinfer::{Decode, Prefill};

    #[test]
    fn decodes_and_prefills_are_planned_over_all_their_pages() {
        let mut builder = Policy::create(config()).unwrap();
        let step = batch(&[(1, 40), (1, 8_000), (20, 32)]);
        let metadata = builder.build(&step, false).unwrap();
        let Some(Decode::Wrapper(decodes)) = metadata.decode else {
            panic!("two decodes");
        };
        let Some(Prefill::Wrapper(prefill)) = metadata.prefill else {
            panic!("a prefill");
        };
        assert_eq!(decodes.paged_kv_indptr, [0, 3, 503]);
        assert_eq!(prefill.paged_kv_indptr, [0, 2]);
        assert_eq!(decodes.work.kv_chunk_size % 16, 0);
    }
}
