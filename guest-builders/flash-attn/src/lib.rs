//! FLASH_ATTN's reference builder: the field's record, and a schedule that divides long requests so that workers finish
//! together.
//!
//! It must never know the kernels: a schedule names splits and an order, and whatever executes it merges in split order.

use timetable_guest::{
    Builder, export_flash_attn,
    flash_attn::{Record, one_split},
    types::{
        BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata,
        LaunchPromise,
        flash_attn::{Metadata, Schedule, TileOrder},
    },
};

/// Splits that a worker gets on average where the batch is long enough: one worker's share is then at most about a quarter
/// above the mean, whatever the order in which splits finish.
const SPLITS_PER_WORKER: u64 = 4;
/// Fewer pages than this in a split cost more in merging than they gain.
const MIN_PAGES_LOG2: u32 = 2;
/// Rows with more query tokens have work enough without splits.
const MAX_QUERY_LEN_TO_SPLIT: i32 = 16;

/// Chooses splits per request so that decode work is balanced over the workers.
pub struct BalancedSplits {
    record: Record,
    max_num_splits: u32,
    /// Kernel launches' parallel units that share the batch: workers over KV heads, at least 1.
    workers_per_head: u64,
    block_size: u32,
}

impl Builder for BalancedSplits {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        let device = &config.device;
        let workers =
            u64::from(device.num_workers.max(1)) * u64::from(device.ctas_per_worker.max(1));
        let heads = u64::from(config.kv_cache_spec.num_kv_heads.max(1));
        let block_size = config.kv_cache_spec.block_size;
        let record = Record::new(config)?;
        Ok(Self {
            max_num_splits: record.max_num_splits(),
            workers_per_head: workers.div_ceil(heads),
            block_size,
            record,
        })
    }

    fn info(&self) -> BuilderInfo {
        self.record.info("flash-attn, balanced splits")
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        LaunchPromise {
            max_num_splits: self.max_num_splits,
            max_work_items: shape.num_reqs.saturating_mul(self.max_num_splits),
            scratch_bytes: self
                .record
                .scratch_bytes(shape.num_tokens, self.max_num_splits),
            max_query_len: shape.max_query_len,
            uniform_query_len: shape.uniform_query_len,
        }
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        let schedule = self.schedule(common, fast_build);
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

impl BalancedSplits {
    fn schedule(&self, common: &CommonAttentionMetadata, fast_build: bool) -> Schedule {
        let lens = common.seq_lens_cpu_upper_bound.as_slice();
        let rows = common.num_reqs as usize;
        // Without host lengths there is nothing to balance by.
        if lens.len() < rows || rows == 0 {
            return one_split();
        }
        let lens = &lens[..rows];
        let mut schedule = one_split();
        if self.max_num_splits > 1 {
            self.split(common, lens, &mut schedule);
        }
        if !fast_build && common.max_query_len > 1 && !self.record.config().batch_invariant {
            schedule.tile_order = longest_first(common, lens);
        }
        schedule
    }

    /// A power of two of pages per split, so that a row's splits are an addition and a shift: the largest that leaves
    /// `SPLITS_PER_WORKER` splits a worker.
    fn split(&self, common: &CommonAttentionMetadata, lens: &[i32], schedule: &mut Schedule) {
        let keys = total(lens);
        let target = keys / (SPLITS_PER_WORKER * self.workers_per_head).max(1);
        let block = u64::from(self.block_size);
        let pages_log2 = (target / block).max(1).ilog2().max(MIN_PAGES_LOG2);
        let longest = u64::from(common.max_seq_len);
        if longest <= block << pages_log2 {
            return;
        }
        let most = self.max_num_splits as i32;
        let mut splits: Vec<i32> = if self.block_size.is_power_of_two() {
            let shift = (self.block_size.ilog2() + pages_log2).min(30);
            let round_up = (1 << shift) - 1;
            lens.iter()
                .map(|&len| (len.saturating_add(round_up) >> shift).clamp(1, most))
                .collect()
        } else {
            let keys_per_split = (block << pages_log2).min(1 << 30) as u32;
            lens.iter()
                .map(|&len| (len.max(0) as u32).div_ceil(keys_per_split) as i32)
                .map(|splits| splits.clamp(1, most))
                .collect()
        };
        if common.max_query_len > MAX_QUERY_LEN_TO_SPLIT as u32 {
            let starts = &common.query_start_loc_cpu;
            for (splits, (start, end)) in splits
                .iter_mut()
                .zip(starts.iter().zip(starts.iter().skip(1)))
            {
                if end - start > MAX_QUERY_LEN_TO_SPLIT {
                    *splits = 1;
                }
            }
        }
        schedule.max_num_splits = splits.iter().fold(1, |most, &splits| most.max(splits)) as u32;
        if schedule.max_num_splits > 1 {
            schedule.num_splits = splits;
        }
    }
}

/// Rows that prefill, the costliest first, then the others in order: the long tiles are then not the last to start.
fn longest_first(common: &CommonAttentionMetadata, lens: &[i32]) -> TileOrder {
    let starts = &common.query_start_loc_cpu;
    if starts.len() <= lens.len() {
        return TileOrder::Natural;
    }
    let mut prefills: Vec<(u64, i32)> = Vec::new();
    let mut others: Vec<i32> = Vec::with_capacity(lens.len());
    for (row, &len) in lens.iter().enumerate() {
        let query_len = starts[row + 1] - starts[row];
        if query_len > 1 {
            prefills.push((query_len as u64 * len.max(0) as u64, row as i32));
        } else {
            others.push(row as i32);
        }
    }
    if prefills.is_empty() {
        return TileOrder::Natural;
    }
    prefills.sort_unstable_by_key(|&(cost, row)| (u64::MAX - cost, row));
    let mut order: Vec<i32> = Vec::with_capacity(lens.len());
    order.extend(prefills.iter().map(|&(_, row)| row));
    order.extend_from_slice(&others);
    TileOrder::Rows(order)
}

/// The sum of the lengths.
fn total(lens: &[i32]) -> u64 {
    // 2,048 lengths below 2^20 stay within 32 bits, whose lanes are twice as many; longer ones take the plain sum.
    let all = lens.iter().fold(0, |all, &len| all | len) as u32;
    if all >> 20 == 0 {
        lens.chunks(2048)
            .map(|block| {
                u64::from(
                    block
                        .iter()
                        .fold(0_u32, |sum, &len| sum.wrapping_add(len as u32)),
                )
            })
            .sum()
    } else {
        lens.iter().map(|&len| len.max(0) as u64).sum()
    }
}

export_flash_attn!(BalancedSplits);
