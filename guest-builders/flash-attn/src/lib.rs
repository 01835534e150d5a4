//! FLASH_ATTN's reference builder: the field's record, and a schedule that divides long requests so that workers finish
//! together.
//!
//! Workers that take one split after the other (a CPU's threads) get several each. On a GPU a split is a block for each KV head
//! and all blocks should run at once, so there are as many as there are places, or one for each row if rows are more.
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
/// The same on a GPU, in keys.
const MIN_KEYS_ON_GPU: u64 = 128;
/// Rows with more query tokens have work enough without splits.
const MAX_QUERY_LEN_TO_SPLIT: i32 = 16;

/// Chooses splits per request so that decode work is balanced over the workers.
pub struct BalancedSplits {
    record: Record,
    max_num_splits: u32,
    /// What runs at once of one KV head: workers, times what each runs at a time, over KV heads; at least 1.
    workers_per_head: u64,
    is_gpu: bool,
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
        let is_gpu = device.compute_capability.0 > 0;
        let record = Record::new(config)?;
        Ok(Self {
            max_num_splits: record.max_num_splits(),
            workers_per_head: workers.div_ceil(heads),
            is_gpu,
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
            max_work_items: self.most_splits(shape.num_reqs),
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

    /// The most splits that `rows` rows have together, of any lengths.
    ///
    /// Let K be the keys of all rows and W the workers of a head. On a GPU a row of n keys has at most max(1, floor(n W / K))
    /// splits, so the sum is at most rows + W. Elsewhere a split has S keys, S the largest power of two of pages that is not above
    /// K / 4W (or more: 4 pages at least), so S > K / 8W; a row has max(1, ceil(n / S)) < n / S + 1 splits if it has keys, so
    /// the sum is at most rows + K / S < rows + 8 W. Fewer rows are split where some have long queries.
    fn most_splits(&self, rows: u32) -> u32 {
        let beyond = if self.is_gpu {
            self.workers_per_head
        } else {
            2 * SPLITS_PER_WORKER * self.workers_per_head
        };
        let most = u64::from(rows) * u64::from(self.max_num_splits);
        u32::try_from(most.min(u64::from(rows) + beyond)).unwrap_or(u32::MAX)
    }

    fn split(&self, common: &CommonAttentionMetadata, lens: &[i32], schedule: &mut Schedule) {
        let is_short = common.max_query_len <= MAX_QUERY_LEN_TO_SPLIT as u32;
        let splits = if self.is_gpu {
            self.as_many_as_run(common, lens, is_short)
        } else {
            self.some_a_worker(common, lens)
        };
        let Some(mut splits) = splits else {
            return;
        };
        if !is_short {
            for (splits, query_len) in splits.iter_mut().zip(query_lens(common)) {
                if query_len > MAX_QUERY_LEN_TO_SPLIT {
                    *splits = 1;
                }
            }
        }
        schedule.max_num_splits = splits.iter().fold(1, |most, &splits| most.max(splits)) as u32;
        if schedule.max_num_splits > 1 {
            schedule.num_splits = splits;
        }
    }

    /// On a GPU: to each row its share of the places, rounded down, and one at least; so they are not more than places but for
    /// rows whose share is less than one. Rows with long queries are another launch's. `None`: no row has a share of two.
    fn as_many_as_run(
        &self,
        common: &CommonAttentionMetadata,
        lens: &[i32],
        is_short: bool,
    ) -> Option<Vec<i32>> {
        let keys = if is_short {
            total(lens)
        } else {
            lens.iter()
                .zip(query_lens(common))
                .filter(|&(_, query_len)| query_len <= MAX_QUERY_LEN_TO_SPLIT)
                .map(|(&len, _)| len.max(0) as u64)
                .sum()
        };
        if keys == 0 || keys >> 32 != 0 {
            return None;
        }
        // A row of n keys gets n · W / keys of the W places, as a product with a fraction of 2^32, which is at most 1 too large:
        // a row then has n / 2^32 too much before it is rounded down, all rows together less than 1. So their sum, which is a
        // whole number, is at most W still.
        let least = MIN_KEYS_ON_GPU.max(u64::from(self.block_size));
        let places = self.workers_per_head.min(1 << 20);
        let share = ((places << 32) / keys + 1).min((1 << 32) / least);
        let most = self.max_num_splits.min(i32::MAX as u32) as i32;
        let of = |len: i32| ((len.max(0) as u64 * share) >> 32) as i32;
        let longest = common.max_seq_len.min(i32::MAX as u32) as i32;
        if of(longest) < 2 {
            return None;
        }
        Some(lens.iter().map(|&len| of(len).clamp(1, most)).collect())
    }

    /// Elsewhere: a power of two of pages per split, so that a row's splits are an addition and a shift: the largest that
    /// leaves `SPLITS_PER_WORKER` splits a worker. `None`: no row is longer than one.
    fn some_a_worker(&self, common: &CommonAttentionMetadata, lens: &[i32]) -> Option<Vec<i32>> {
        let keys = total(lens);
        let target = keys / (SPLITS_PER_WORKER * self.workers_per_head).max(1);
        let block = u64::from(self.block_size);
        let pages_log2 = (target / block).max(1).ilog2().max(MIN_PAGES_LOG2);
        let split = block << pages_log2;
        let longest = u64::from(common.max_seq_len).min(i32::MAX as u64);
        if longest <= split {
            return None;
        }
        // A split is shorter than a row, so it is below 2^31 keys.
        let most = self.max_num_splits.min(i32::MAX as u32) as i32;
        Some(if self.block_size.is_power_of_two() {
            let shift = self.block_size.ilog2() + pages_log2;
            let round_up = (1 << shift) - 1;
            lens.iter()
                .map(|&len| (len.saturating_add(round_up) >> shift).clamp(1, most))
                .collect()
        } else {
            lens.iter()
                .map(|&len| (len.max(0) as u32).div_ceil(split as u32) as i32)
                .map(|splits| splits.clamp(1, most))
                .collect()
        })
    }
}

/// Query tokens of each row.
fn query_lens(common: &CommonAttentionMetadata) -> impl Iterator<Item = i32> {
    let starts = &common.query_start_loc_cpu;
    starts
        .iter()
        .zip(starts.iter().skip(1))
        .map(|(start, end)| end - start)
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
