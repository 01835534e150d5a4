//! A second FLASH_ATTN builder with another policy: every request is divided into the same number of splits, the operator's
//! option `splits`. It exists to be swapped in beside the reference builder.
//!
//! It must never know the workers: that is the difference.

use timetable_guest::{
    Builder, export_flash_attn,
    flash_attn::{Record, one_split},
    option,
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        LaunchPromise,
        flash_attn::{Metadata, Schedule, TileOrder},
    },
};

/// Splits where the operator gives none.
const DEFAULT_SPLITS: u32 = 4;

/// Divides every request into `splits`, or into its pages where it has fewer.
pub struct FixedSplits {
    record: Record,
    splits: u32,
}

impl Builder for FixedSplits {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        let splits = option(&config, "splits", DEFAULT_SPLITS, 1..=1 << 16)?;
        let record = Record::new(config)?;
        Ok(Self {
            splits: splits.min(record.max_num_splits()),
            record,
        })
    }

    fn info(&self) -> BuilderInfo {
        self.record.info("flash-attn, fixed splits")
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        LaunchPromise {
            max_num_splits: self.splits,
            max_work_items: shape.num_reqs.saturating_mul(self.splits),
            scratch_bytes: self.record.scratch_bytes(shape.num_tokens, self.splits),
            max_query_len: shape.max_query_len,
            uniform_query_len: shape.uniform_query_len,
        }
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        let schedule = if self.splits == 1 {
            one_split()
        } else {
            Schedule {
                max_num_splits: self.splits,
                num_splits: vec![self.splits as i32; common.num_reqs as usize],
                tile_order: TileOrder::Natural,
            }
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

export_flash_attn!(FixedSplits);
