//! A group's device memory besides its caches: what a step's lists are unpacked to, the work items that plan kernels make of
//! them, and scratch for partial results. Fixed addresses, sized once; a graph that was captured with a workspace keeps it.
//! It must never know a step's values.
//!
//! Partial results are what costs memory: a packed row in f32 for each split and KV head. Only lists with a split need
//! any, and they share one pool, because lists and layers run one after the other.

use timetable_types::Family;

use super::config::GroupConfig;
use super::launch::{Launch, items};
use crate::driver::{Device, DeviceBuffer, DevicePtr};
use crate::error::Result;
use crate::kernels::AttentionKind;
use crate::params::{WorkHeader, WorkItem, WorkListSizes};

/// What a workspace has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceSize {
    /// Work items of each list.
    pub max_work_items: [usize; 2],
    /// Query tiles of each FLASHINFER part.
    pub max_tiles: usize,
    /// Pages of both FLASHINFER parts.
    pub max_pages: usize,
    /// Packed rows of partial results, over all slots and KV heads.
    pub partial_rows: usize,
    /// Entries of the table that plain attention reads for FLASHINFER.
    pub plain_entries: usize,
}

impl WorkspaceSize {
    /// Room for every captured graph and for the largest eager step. Partial results have no more than
    /// `max_partial_bytes`: a step that splits more than they hold is refused when it is prepared, with the numbers, and the plain
    /// builder, which never splits, serves it.
    pub fn new<'l>(config: &GroupConfig, captured: impl IntoIterator<Item = &'l Launch>) -> Self {
        let (reqs, tokens) = (
            config.limits.max_num_reqs as u64,
            config.limits.max_num_tokens as u64,
        );
        let group = u64::from(config.heads_per_kv_head());
        let entries = config.limits.max_num_reqs * config.limits.table_width;
        let mut size = Self {
            max_work_items: [1, 1],
            max_tiles: 1,
            max_pages: 1,
            partial_rows: 1,
            plain_entries: 1,
        };
        match config.family {
            Family::Flashinfer if config.is_plain() => size.plain_entries = entries.max(1),
            _ if config.is_plain() => {}
            Family::Flashinfer => {
                // As `flashinfer` in `launch`: the plain builder's tiles; then splits that fill the device many times over.
                let tiles = reqs + tokens * group / 16;
                let workers = 64 * u64::from(config.num_multiprocessors);
                size.max_tiles = tiles as usize;
                size.max_pages = entries.max(1);
                size.max_work_items = [items(2 * tiles + workers) as usize; 2];
            }
            _ => {
                let splits = u64::from(config.max_num_splits);
                let tile = u64::from(config.tile_rows(AttentionKind::Prefill));
                let rows = reqs.min(tokens * group / 17);
                let tiles = tokens * group / tile + rows;
                size.max_work_items = [
                    items((reqs.min(tokens) * splits).min(EAGER_ITEMS.max(reqs))) as usize,
                    items((tiles * splits).min(EAGER_ITEMS.max(tiles))) as usize,
                ];
            }
        }
        // What every list would take if all its items were partial results.
        let heads = config.num_kv_heads as usize;
        let tile = |list: usize| {
            config.tile_rows([AttentionKind::Decode, AttentionKind::Prefill][list]) as usize
        };
        let mut partial_rows = 0;
        if !config.is_plain() && config.max_num_splits > 1 {
            for (list, &items) in size.max_work_items.iter().enumerate() {
                partial_rows = partial_rows.max(items * heads * tile(list));
            }
            partial_rows =
                partial_rows.min(EAGER_PARTIALS * config.num_multiprocessors as usize * 128);
        }
        for launch in captured {
            for (index, list) in launch.lists.iter().enumerate() {
                let Some(list) = list else { continue };
                let items = list.max_work_items as usize;
                size.max_work_items[index] = size.max_work_items[index].max(items);
                size.max_tiles = size.max_tiles.max(list.max_tiles as usize);
                if launch.max_num_splits > 1 {
                    partial_rows = partial_rows.max(items * heads * list.partial_rows as usize);
                }
            }
        }
        let row_bytes = (config.head_size as usize + 1) * size_of::<f32>();
        size.partial_rows = partial_rows
            .min(config.max_partial_bytes / row_bytes)
            .max(1);
        size
    }

    /// Does a workspace of this size serve where one of `other` is needed?
    pub fn holds(&self, other: &Self) -> bool {
        self.max_work_items[0] >= other.max_work_items[0]
            && self.max_work_items[1] >= other.max_work_items[1]
            && self.max_tiles >= other.max_tiles
            && self.max_pages >= other.max_pages
            && self.partial_rows >= other.partial_rows
            && self.plain_entries >= other.plain_entries
    }

    /// Bytes of a workspace of this size.
    pub fn bytes(&self, config: &GroupConfig) -> usize {
        WorkspacePtrs::layout(config, self, DevicePtr::NULL).1
    }
}

/// Items that an eager list has room for, where splits would allow more.
const EAGER_ITEMS: u64 = 1 << 16;

/// Partial results of an eager step for each multiprocessor, at 128 packed rows each: many more would take longer to merge than
/// splitting gains.
const EAGER_PARTIALS: usize = 32;

/// One list's buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListPtrs {
    /// [`WorkHeader`]
    pub header: DevicePtr,
    /// [`WorkItem`] `[max_work_items]`
    pub items: DevicePtr,
    /// FLASHINFER, as all that follow: [`WorkListSizes`]
    pub sizes: DevicePtr,
    /// `s32 [R + 1]`
    pub qo_indptr: DevicePtr,
    /// `s32 [R + 1]`
    pub paged_kv_indptr: DevicePtr,
    /// `s32 [R]`
    pub seq_lens: DevicePtr,
    /// `s32 [max_work_items]`
    pub request_indices: DevicePtr,
    /// `s32 [max_work_items]`
    pub qo_tile_indices: DevicePtr,
    /// `s32 [max_work_items]`
    pub kv_tile_indices: DevicePtr,
    /// `s32 [max_tiles + 1]`
    pub merge_indptr: DevicePtr,
}

/// Addresses within a workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspacePtrs {
    /// Both lists.
    pub lists: [ListPtrs; 2],
    /// `s32 [R + 1]`: FLASH_ATTN's and plain attention's query starts.
    pub query_start_loc: DevicePtr,
    /// `s32 [R]`: their key lengths.
    pub seq_lens: DevicePtr,
    /// `s32 [R]`: FLASH_ATTN's splits.
    pub num_splits: DevicePtr,
    /// `s32 [R]`: FLASH_ATTN's order of rows.
    pub row_order: DevicePtr,
    /// `s32 [R]`: causal flags.
    pub causal: DevicePtr,
    /// `s32 [max_pages]`: FLASHINFER's pages, the decodes' first.
    pub pages: DevicePtr,
    /// `s32 [R, W]`: the table of plain attention for FLASHINFER.
    pub plain_table: DevicePtr,
    /// f32 `[partial_rows, D]`
    pub partial_output: DevicePtr,
    /// f32 `[partial_rows]`
    pub partial_lse: DevicePtr,
    /// `s32 [max_work_items, Hkv]`; zero when new, and after every launch.
    pub merge_counters: DevicePtr,
}

impl WorkspacePtrs {
    /// Everything one after the other from `base`, and the bytes of all.
    pub(crate) fn layout(
        config: &GroupConfig,
        size: &WorkspaceSize,
        base: DevicePtr,
    ) -> (Self, usize) {
        let mut end = 0_usize;
        let mut take = |elements: usize, bytes: usize| {
            let begin = end;
            end = (begin + elements.max(1) * bytes).next_multiple_of(256);
            base.offset(begin)
        };
        let reqs = config.limits.max_num_reqs;
        let mut lists = [ListPtrs::default(); 2];
        for (list, &items) in lists.iter_mut().zip(&size.max_work_items) {
            list.header = take(1, size_of::<WorkHeader>());
            list.items = take(items, size_of::<WorkItem>());
            if config.family == Family::Flashinfer {
                list.sizes = take(1, size_of::<WorkListSizes>());
                list.qo_indptr = take(reqs + 1, 4);
                list.paged_kv_indptr = take(reqs + 1, 4);
                list.seq_lens = take(reqs, 4);
                list.request_indices = take(items, 4);
                list.qo_tile_indices = take(items, 4);
                list.kv_tile_indices = take(items, 4);
                list.merge_indptr = take(size.max_tiles + 1, 4);
            }
        }
        let most_items = size.max_work_items[0].max(size.max_work_items[1]);
        let ptrs = Self {
            lists,
            query_start_loc: take(reqs + 1, 4),
            seq_lens: take(reqs, 4),
            num_splits: take(reqs, 4),
            row_order: take(reqs, 4),
            causal: take(reqs, 4),
            pages: take(size.max_pages, 4),
            plain_table: take(size.plain_entries, 4),
            partial_output: take(size.partial_rows, config.head_size as usize * 4),
            partial_lse: take(size.partial_rows, 4),
            merge_counters: take(most_items * config.num_kv_heads as usize, 4),
        };
        (ptrs, end)
    }
}

/// A workspace, owned: one allocation, zero when new.
#[derive(Debug)]
pub struct Workspace {
    size: WorkspaceSize,
    ptrs: WorkspacePtrs,
    bytes: usize,
    /// None where nothing is launched: tests of what is prepared.
    _memory: Option<DeviceBuffer>,
}

impl Workspace {
    /// Allocates it.
    ///
    /// # Errors
    /// `CudaError::OutOfMemory`, or what the driver says.
    pub fn new(device: &Device, config: &GroupConfig, size: WorkspaceSize) -> Result<Self> {
        let bytes = size.bytes(config);
        let memory = DeviceBuffer::alloc_zeroed(device, bytes, "an attention group's workspace")
            .map_err(|error| {
                error.with_remedy(
                    "lower --max-num-splits, --max-num-seqs or --max-num-batched-tokens",
                )
            })?;
        let (ptrs, bytes) = WorkspacePtrs::layout(config, &size, memory.ptr());
        Ok(Self {
            size,
            ptrs,
            bytes,
            _memory: Some(memory),
        })
    }

    /// One without memory, whose addresses begin at `base`.
    #[cfg(test)]
    pub(crate) fn at(config: &GroupConfig, size: WorkspaceSize, base: DevicePtr) -> Self {
        let (ptrs, bytes) = WorkspacePtrs::layout(config, &size, base);
        Self {
            size,
            ptrs,
            bytes,
            _memory: None,
        }
    }

    /// What it has room for.
    pub fn size(&self) -> &WorkspaceSize {
        &self.size
    }

    /// Its addresses.
    pub fn ptrs(&self) -> &WorkspacePtrs {
        &self.ptrs
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::testing;
    use timetable_types::{CaptureShape, LaunchPromise};

    #[test]
    fn partial_results_keep_to_their_bytes_and_captured_graphs_have_their_items() {
        for family in [Family::FlashAttn, Family::Flashinfer] {
            let mut config = testing::group(family);
            config.max_partial_bytes = 1 << 20;
            let shape = CaptureShape {
                num_tokens: 64,
                num_reqs: 64,
                max_query_len: 1,
                uniform_query_len: Some(1),
            };
            let promise = LaunchPromise {
                max_num_splits: 32,
                max_work_items: 100_000,
                scratch_bytes: 0,
                max_query_len: 1,
                uniform_query_len: Some(1),
            };
            let launch = Launch::captured(&config, &shape, &promise);
            let small = WorkspaceSize::new(&config, []);
            let size = WorkspaceSize::new(&config, [&launch]);
            assert!(size.holds(&small));
            assert!(size.max_work_items[0] >= launch.max_work_items() as usize);
            assert!(size.partial_rows * 65 * 4 <= 1 << 20);
            let (ptrs, bytes) = WorkspacePtrs::layout(&config, &size, DevicePtr::from_raw(256));
            assert!(ptrs.merge_counters.raw() < 256 + bytes as u64);
            assert!(
                ptrs.partial_lse.raw() - ptrs.partial_output.raw()
                    >= (size.partial_rows * 64 * 4) as u64
            );
        }
    }

    #[test]
    fn without_splits_there_are_no_partial_results_and_f32_has_no_lists() {
        let mut config = testing::group(Family::FlashAttn);
        config.max_num_splits = 1;
        assert_eq!(WorkspaceSize::new(&config, []).partial_rows, 1);
        config.element = crate::kernels::Element::F32;
        let size = WorkspaceSize::new(&config, []);
        assert_eq!((size.max_work_items, size.plain_entries), ([1, 1], 1));
        config.family = Family::Flashinfer;
        assert_eq!(WorkspaceSize::new(&config, []).plain_entries, 64 * 40);
    }
}
