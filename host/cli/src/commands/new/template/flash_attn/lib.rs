//! {{name}}: a metadata builder of {{backend}}. The frame: it gives every request the splits that `policy` says.

mod policy;

use timetable_guest::{
    Builder, export_flash_attn,
    flash_attn::Record,
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        LaunchPromise,
        flash_attn::{Metadata, Schedule, TileOrder},
    },
};

/// The builder of one attention group.
pub struct Policy {
    record: Record,
    workers: u32,
}

impl Builder for Policy {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        let device = &config.device;
        Ok(Self {
            workers: device.num_workers.max(1) * device.ctas_per_worker.max(1),
            record: Record::new(config)?,
        })
    }

    fn info(&self) -> BuilderInfo {
        self.record.info("{{name}}")
    }

    /// What a captured graph may rely on: no step exceeds it.
    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        let splits = self.record.max_num_splits();
        LaunchPromise {
            max_num_splits: splits,
            max_work_items: shape.num_reqs.saturating_mul(splits),
            scratch_bytes: self.record.scratch_bytes(shape.num_tokens, splits),
            max_query_len: shape.max_query_len,
            uniform_query_len: shape.uniform_query_len,
        }
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        let most = self.record.max_num_splits();
        let splits = |keys: &i32| policy::num_splits(*keys as u32, self.workers, most) as i32;
        let num_splits: Vec<i32> = common.seq_lens_cpu_upper_bound.iter().map(splits).collect();
        let schedule = Schedule {
            max_num_splits: num_splits.iter().fold(1, |most, splits| most.max(*splits)) as u32,
            num_splits,
            tile_order: TileOrder::Natural,
        };
        self.record.build(common, fast_build, schedule)
    }

    fn update_block_table(
        &mut self,
        metadata: Metadata,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildError> {
        Ok(self.record.update_block_table(metadata, common))
    }
}

export_flash_attn!(Policy);

#[cfg(test)]
mod tests {
    use super::*;
    use timetable_guest::testing::{batch, config};

    #[test]
    fn every_request_has_one_split_or_more() {
        let mut builder = Policy::create(config()).unwrap();
        let step = batch(&[(1, 40), (1, 8_000), (20, 32)]);
        let schedule = builder.build(&step, false).unwrap().schedule;
        assert_eq!(schedule.num_splits.len(), 3);
        for splits in schedule.num_splits {
            assert!((1..=config().max_num_splits as i32).contains(&splits), "{splits}");
        }
    }
}
