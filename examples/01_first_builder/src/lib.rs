//! 01: the smallest metadata builder. It gives FLASH_ATTN the field's record and a schedule of its own: requests longer than
//! a threshold, which the operator sets, are divided in two.
//!
//! Build the component from here, swap it into a running engine, and back:
//!
//! ```sh
//! cd guest-builders    # its .cargo/config.toml has the flags
//! cargo run -p timetable-componentize -- build --out /tmp first-builder
//! timetable reload FLASH_ATTN /tmp/first-builder.wasm
//! timetable rollback FLASH_ATTN
//! ```
//!
//! `cargo test -p first-builder` runs the same code natively.

use timetable_guest::{
    Builder, export_flash_attn,
    flash_attn::Record,
    option,
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        LaunchPromise,
        flash_attn::{Metadata, Schedule, TileOrder},
    },
};

/// Halves long requests.
pub struct HalveLong {
    record: Record,
    threshold: u32,
    splits: u32,
}

impl Builder for HalveLong {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        let threshold = option(&config, "threshold", 2048, 1..=1 << 30)?;
        let record = Record::new(config)?;
        let splits = record.max_num_splits().min(2);
        Ok(Self {
            record,
            threshold,
            splits,
        })
    }

    fn info(&self) -> BuilderInfo {
        self.record.info("first builder: halve long requests")
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        LaunchPromise {
            max_num_splits: self.splits,
            max_work_items: shape.num_reqs * self.splits,
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
        let is_long = |len: &i32| *len as u32 > self.threshold;
        let splits = |len| if is_long(len) { self.splits as i32 } else { 1 };
        let schedule = Schedule {
            max_num_splits: self.splits,
            num_splits: common.seq_lens_cpu_upper_bound.iter().map(splits).collect(),
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

export_flash_attn!(HalveLong);
