//! A good builder of FLASH_ATTN that decides nothing. It must never know chaos.

use timetable_guest::{
    Builder,
    flash_attn::{Record, one_split},
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        LaunchPromise, flash_attn::Metadata,
    },
};

/// One split for every row.
pub struct OneSplit {
    record: Record,
}

impl Builder for OneSplit {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        Ok(Self {
            record: Record::new(config)?,
        })
    }

    fn info(&self) -> BuilderInfo {
        BuilderInfo {
            supports_update_block_table: false,
            ..self.record.info("flash-attn, one split")
        }
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        LaunchPromise {
            max_num_splits: 1,
            max_work_items: shape.num_reqs,
            scratch_bytes: 0,
            max_query_len: shape.max_query_len,
            uniform_query_len: shape.uniform_query_len,
        }
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        let mut schedule = one_split();
        // By value, so that there is something to damage.
        schedule.num_splits = vec![1; common.num_reqs as usize];
        schedule.tile_order = timetable_guest::types::flash_attn::TileOrder::Rows(
            (0..common.num_reqs as i32).collect(),
        );
        self.record.build(common, fast_build, schedule)
    }
}
