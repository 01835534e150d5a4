//! A batch on the device, its work items, and launches of paged attention over them. It must never know a reference, nor who
//! chose the splits.

use timetable_device_cuda::{
    CudaError,
    driver::{DeviceBuffer, DevicePtr, Stream},
    kernels::{AttentionKernel, AttentionKind, CacheElement, Element},
    params::{
        AttentionParams, PlainAttentionParams, PlanParams, WorkHeader, WorkItem, WorkListParams,
        WorkListSizes,
    },
};
use timetable_types::Dtype;

use crate::{
    batch::{Batch, Shape},
    element,
    gpu::{Gpu, POISON},
    random::Random,
};

/// A cache's strides in elements.
#[derive(Clone, Copy, Debug)]
pub struct Strides {
    /// Of a block.
    pub block: i64,
    /// Of a KV head.
    pub head: i64,
    /// Of a token within a block.
    pub token: i64,
}

impl Strides {
    /// Of a batch's cache.
    pub fn of(shape: &Shape) -> Self {
        let at = |block, offset, head| shape.state_at(block, offset, head) as i64;
        Strides {
            block: at(1, 0, 0),
            head: at(0, 0, 1),
            token: at(0, 1, 0),
        }
    }
}

/// The kernels' types of a batch.
pub fn elements(shape: &Shape) -> (Element, CacheElement) {
    let element = Element::of(shape.dtype).unwrap_or(Element::F32);
    match shape.cache_dtype {
        Dtype::Float8E4m3 => (element, CacheElement::Fp8),
        _ => (element, CacheElement::Same),
    }
}

/// A batch's tensors.
pub struct OnDevice {
    /// What it looks like.
    pub shape: Shape,
    /// s32 [R + 1]
    pub query_start_loc: DeviceBuffer,
    /// s32 `[R]`
    pub seq_lens: DeviceBuffer,
    /// s32 [R, W]
    pub block_table: DeviceBuffer,
    /// W
    pub table_width: usize,
    /// [T, Hq, D]
    pub query: DeviceBuffer,
    /// The cache.
    pub cache: DeviceBuffer,
    scales: DeviceBuffer,
    /// R
    pub num_reqs: usize,
    /// T, padded.
    pub num_tokens: usize,
}

impl OnDevice {
    /// Copies a batch.
    ///
    /// # Errors
    /// No memory, or what the driver says.
    pub fn new(gpu: &Gpu, batch: &Batch) -> Result<Self, CudaError> {
        let tensors = &batch.step.tensors;
        let scales: Vec<f32> = [&batch.k_scale[..], &batch.v_scale[..]].concat();
        Ok(OnDevice {
            query_start_loc: gpu.upload(&tensors.query_start_loc)?,
            seq_lens: gpu.upload(&tensors.seq_lens)?,
            block_table: gpu.upload(&tensors.block_table)?,
            table_width: tensors.block_table_width,
            query: gpu.upload_as(batch.shape.dtype, &batch.query)?,
            cache: gpu.upload(&batch.cache)?,
            scales: gpu.upload(&scales)?,
            num_reqs: batch.num_reqs(),
            num_tokens: batch.num_tokens(),
            shape: batch.shape.clone(),
        })
    }

    /// A batch for timing: pages in a random order, contents random but repeated, made on the device.
    ///
    /// # Errors
    /// No memory, or what the driver says.
    pub fn for_timing(gpu: &Gpu, shape: &Shape, random: &mut Random) -> Result<Self, CudaError> {
        let pages = |len: &usize| len.div_ceil(shape.page);
        let width = shape.kv_lens.iter().map(pages).max().unwrap_or(1);
        let num_blocks: usize = shape.kv_lens.iter().map(pages).sum();
        let mut order: Vec<i32> = (0..num_blocks as i32).collect();
        random.shuffle(&mut order);
        let (mut table, mut starts) = (Vec::new(), vec![0i32]);
        for (q_len, kv_len) in shape.query_lens.iter().zip(&shape.kv_lens) {
            let blocks = order.split_off(order.len() - pages(kv_len));
            let unused = width - blocks.len();
            table.extend(blocks);
            table.extend(std::iter::repeat_n(0, unused));
            starts.push(starts[starts.len() - 1] + *q_len as i32);
        }
        let lens: Vec<i32> = shape.kv_lens.iter().map(|&len| len as i32).collect();
        let num_tokens = starts[starts.len() - 1] as usize;
        let element_bytes = element::bytes(shape.cache_dtype);
        let bytes = num_blocks * shape.block_elements() * element_bytes;
        let tile = element::encode(
            shape.cache_dtype,
            &random.normal((16 << 20) / element_bytes, 1.0),
        );
        let mut cache = DeviceBuffer::alloc(&gpu.device, bytes, "the KV cache that is measured")?;
        cache.write(0, &tile[..tile.len().min(bytes)])?;
        let mut done = tile.len().min(bytes);
        while done < bytes {
            let more = done.min(bytes - done);
            // SAFETY: both ranges are within the cache and apart, and it lives until the stream has been waited for.
            unsafe {
                gpu.stream
                    .copy_device(cache.ptr().offset(done), cache.ptr(), more)
            }?;
            done += more;
        }
        gpu.stream.synchronize()?;
        let query = random.normal(num_tokens * shape.heads() * shape.head_size, 1.0);
        Ok(OnDevice {
            query_start_loc: gpu.upload(&starts)?,
            seq_lens: gpu.upload(&lens)?,
            block_table: gpu.upload(&table)?,
            table_width: width,
            query: gpu.upload_as(shape.dtype, &query)?,
            cache,
            scales: gpu.upload(&vec![1.0f32; 2 * shape.kv_heads])?,
            num_reqs: lens.len(),
            num_tokens,
            shape: shape.clone(),
        })
    }

    fn scale_ptrs(&self) -> (DevicePtr, DevicePtr, i32) {
        if self.shape.cache_dtype != Dtype::Float8E4m3 {
            return (DevicePtr::NULL, DevicePtr::NULL, 0);
        }
        let k = self.scales.ptr();
        let v = k.offset(4 * self.shape.kv_heads);
        (k, v, 1)
    }

    /// The parameters of a launch of the plain f32 kernel.
    pub fn plain_params(&self, output: DevicePtr, lse: DevicePtr) -> PlainAttentionParams {
        let (shape, strides) = (&self.shape, Strides::of(&self.shape));
        let row = (shape.heads() * shape.head_size) as i64;
        PlainAttentionParams {
            query: self.query.ptr(),
            kv_cache: self.cache.ptr(),
            output,
            lse,
            block_table: self.block_table.ptr(),
            query_start_loc: self.query_start_loc.ptr(),
            seq_lens: self.seq_lens.ptr(),
            causal: DevicePtr::NULL,
            query_stride: row,
            output_stride: row,
            kv_block_stride: strides.block,
            kv_head_stride: strides.head,
            kv_token_stride: strides.token,
            block_table_stride: self.table_width as i64,
            num_reqs: self.num_reqs as i32,
            num_tokens: self.num_tokens as i32,
            num_heads: shape.heads() as i32,
            num_kv_heads: shape.kv_heads as i32,
            head_size: shape.head_size as i32,
            block_size: shape.page as i32,
            sliding_window: shape.window.unwrap_or(0) as i32,
            causal_all: i32::from(shape.causal),
            scale: shape.scale() as f32,
            soft_cap: shape.soft_cap.unwrap_or(0.0) as f32,
        }
    }
}

/// The work of one attention kernel: its items, planned on the device, and its scratch.
pub struct WorkList {
    header: DeviceBuffer,
    items: DeviceBuffer,
    /// FLASHINFER's own page list; none: the block table.
    pages: Option<DeviceBuffer>,
    /// The inputs of the plan, which lives as long as the list.
    inputs: Vec<DeviceBuffer>,
    max_items: usize,
    partial_rows: usize,
    partial_output: DeviceBuffer,
    partial_lse: DeviceBuffer,
    counters: DeviceBuffer,
}

/// Which requests of a batch a list is for, and how they are cut.
#[derive(Clone, Copy, Debug)]
pub struct Cut<'a> {
    /// Packed rows of a tile.
    pub tile_rows: usize,
    /// Only requests with at least this many packed rows.
    pub min_packed: usize,
    /// Only requests with at most this many.
    pub max_packed: usize,
    /// KV splits of each request; none: 1.
    pub splits: Option<&'a [i32]>,
    /// The order in which requests start; none: natural.
    pub order: Option<&'a [i32]>,
    /// The most splits that the launch promises, larger ones being cut to it; none: what the requests have.
    pub promise: Option<usize>,
    /// Clears tokens that no request covers.
    pub with_tail: bool,
}

impl Default for Cut<'_> {
    /// Every request, in its natural order, without splits, tails cleared. A tile's rows are the kernel's and still to be set.
    fn default() -> Self {
        Cut {
            tile_rows: 0,
            min_packed: 0,
            max_packed: usize::MAX,
            splits: None,
            order: None,
            promise: None,
            with_tail: true,
        }
    }
}

impl WorkList {
    fn new(
        gpu: &Gpu,
        shape: &Shape,
        max_items: usize,
        partial_rows: usize,
    ) -> Result<Self, CudaError> {
        let max_items = max_items.max(1);
        let alloc = |bytes| DeviceBuffer::alloc(&gpu.device, bytes, "attention's scratch");
        let slots = max_items * shape.kv_heads;
        let mut list = WorkList {
            header: alloc(size_of::<WorkHeader>())?,
            items: alloc(max_items * size_of::<WorkItem>())?,
            pages: None,
            inputs: Vec::new(),
            max_items,
            partial_rows,
            partial_output: alloc(4 * slots * partial_rows * shape.head_size)?,
            partial_lse: alloc(4 * slots * partial_rows)?,
            counters: DeviceBuffer::alloc_zeroed(&gpu.device, 4 * slots, "attention's counters")?,
        };
        // What is planned is all that may be read.
        for buffer in [
            &mut list.header,
            &mut list.items,
            &mut list.partial_output,
            &mut list.partial_lse,
        ] {
            buffer.fill(POISON)?;
        }
        Ok(list)
    }

    /// FLASH_ATTN's: room for the schedule, and the parameters that plan it.
    ///
    /// # Errors
    /// No memory, or what the driver says.
    pub fn flash_attn(
        gpu: &Gpu,
        on: &OnDevice,
        cut: Cut<'_>,
    ) -> Result<(Self, PlanParams), CudaError> {
        let shape = &on.shape;
        let (mut items, mut most, mut rows) = (0, 1, 1);
        for (row, &q_len) in shape.query_lens.iter().enumerate() {
            let packed = q_len * shape.group;
            if packed > 0 && (cut.min_packed..=cut.max_packed).contains(&packed) {
                let asked = cut.splits.map_or(1, |splits| splits[row].max(1) as usize);
                let splits = cut.promise.unwrap_or(asked);
                items += packed.div_ceil(cut.tile_rows) * splits;
                most = most.max(splits);
                rows = rows.max(packed.min(cut.tile_rows));
            }
        }
        let mut list = Self::new(gpu, shape, items, rows)?;
        let mut input = |values: Option<&[i32]>| -> Result<DevicePtr, CudaError> {
            let Some(values) = values else {
                return Ok(DevicePtr::NULL);
            };
            let buffer = gpu.upload(values)?;
            let at = buffer.ptr();
            list.inputs.push(buffer);
            Ok(at)
        };
        let (num_splits, row_order) = (input(cut.splits)?, input(cut.order)?);
        let params = PlanParams {
            header: list.header.ptr(),
            items: list.items.ptr(),
            query_start_loc: on.query_start_loc.ptr(),
            seq_lens: on.seq_lens.ptr(),
            num_splits,
            row_order,
            causal: DevicePtr::NULL,
            num_reqs: on.num_reqs as i32,
            num_tokens: on.num_tokens as i32,
            block_size: shape.page as i32,
            heads_per_kv_head: shape.group as i32,
            tile_rows: cut.tile_rows as i32,
            min_packed_rows: cut.min_packed as i32,
            max_packed_rows: cut.max_packed.min(i32::MAX as usize) as i32,
            max_num_splits: most as i32,
            max_work_items: list.max_items as i32,
            causal_all: i32::from(shape.causal),
            with_tail: i32::from(cut.with_tail),
            reserved: 0,
        };
        Ok((list, params))
    }

    /// FLASHINFER's: all requests as one part, chunks of `chunk` keys, the items in the order that `arrange` makes of theirs.
    ///
    /// # Errors
    /// No memory, or what the driver says.
    pub fn flashinfer(
        gpu: &Gpu,
        on: &OnDevice,
        batch: &Batch,
        tile_rows: usize,
        chunk: usize,
        arrange: impl FnOnce(&mut Vec<[i32; 3]>),
    ) -> Result<(Self, WorkListParams), CudaError> {
        let shape = &on.shape;
        let table = batch.step.tensors.table();
        let (mut items, mut merge, mut indptr, mut pages) =
            (Vec::new(), vec![0], vec![0], Vec::new());
        let mut rows = 1;
        for (row, (&q_len, &kv_len)) in shape.query_lens.iter().zip(&shape.kv_lens).enumerate() {
            pages.extend_from_slice(&table.row(row)[..kv_len.div_ceil(shape.page)]);
            indptr.push(pages.len() as i32);
            let packed = q_len * shape.group;
            rows = rows.max(packed.min(tile_rows));
            for tile in 0..packed.div_ceil(tile_rows) {
                // Chunks wholly before the window of the tile's first token are left out.
                let position = kv_len - q_len + tile * tile_rows / shape.group;
                let first = shape
                    .window
                    .map_or(0, |window| (position + 1).saturating_sub(window) / chunk);
                for index in first..kv_len.div_ceil(chunk).max(first + 1) {
                    items.push([row as i32, tile as i32, index as i32]);
                }
                merge.push(items.len() as i32);
            }
        }
        let num_tiles = merge.len() - 1;
        arrange(&mut items);
        let mut list = Self::new(gpu, shape, items.len(), rows)?;
        let sizes = WorkListSizes {
            num_items: items.len() as i32,
            num_reqs: on.num_reqs as i32,
            num_tiles: num_tiles as i32,
            first_token: 0,
            cta_tile_q: tile_rows as i32,
            kv_chunk_size: chunk as i32,
            causal: i32::from(shape.causal),
            tail_begin: (on.num_tokens - shape.padding) as i32,
            tail_end: on.num_tokens as i32,
            reserved: 0,
        };
        let column = |at: usize| -> Vec<i32> { items.iter().map(|item| item[at]).collect() };
        let buffers = [
            gpu.upload(&[sizes])?,
            gpu.upload(&indptr)?,
            gpu.upload(&column(0))?,
            gpu.upload(&column(1))?,
            gpu.upload(&column(2))?,
            gpu.upload(&merge)?,
        ];
        let [d_sizes, d_indptr, requests, tiles, chunks, d_merge] =
            buffers.each_ref().map(|buffer| buffer.ptr());
        list.pages = Some(gpu.upload(&pages)?);
        list.inputs.extend(buffers);
        let params = WorkListParams {
            header: list.header.ptr(),
            items: list.items.ptr(),
            sizes: d_sizes,
            qo_indptr: on.query_start_loc.ptr(),
            paged_kv_indptr: d_indptr,
            seq_lens: on.seq_lens.ptr(),
            request_indices: requests,
            qo_tile_indices: tiles,
            kv_tile_indices: chunks,
            merge_indptr: d_merge,
            heads_per_kv_head: shape.group as i32,
            tile_rows: tile_rows as i32,
            max_work_items: list.max_items as i32,
            max_reqs: on.num_reqs as i32,
            max_tiles: num_tiles as i32,
            max_tokens: on.num_tokens as i32,
        };
        Ok((list, params))
    }

    /// Launches the attention kernel over the planned items.
    ///
    /// # Errors
    /// What the driver says of the launch.
    ///
    /// # Safety
    /// The list was planned on the same stream for this batch with the kernel's tile; all buffers live until the stream has
    /// passed the launch, in a capture at every launch of the graph; `output` has [T, Hq, D], `lse` [T, Hq] or is null.
    pub unsafe fn attend(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        on: &OnDevice,
        kernel: &AttentionKernel,
        output: DevicePtr,
        lse: DevicePtr,
    ) -> Result<(), CudaError> {
        let (shape, strides) = (&on.shape, Strides::of(&on.shape));
        let row = (shape.heads() * shape.head_size) as i64;
        let (k_scale, v_scale, kv_scale_stride) = on.scale_ptrs();
        let (block_table, block_table_stride) = match &self.pages {
            Some(pages) => (pages.ptr(), 1),
            None => (on.block_table.ptr(), on.table_width as i64),
        };
        let params = AttentionParams {
            query: on.query.ptr(),
            kv_cache: on.cache.ptr(),
            output,
            lse,
            partial_output: self.partial_output.ptr(),
            partial_lse: self.partial_lse.ptr(),
            merge_counters: self.counters.ptr(),
            block_table,
            header: self.header.ptr(),
            items: self.items.ptr(),
            k_scale,
            v_scale,
            query_stride: row,
            output_stride: row,
            kv_block_stride: strides.block,
            kv_head_stride: strides.head,
            kv_token_stride: strides.token,
            block_table_stride,
            num_heads: shape.heads() as i32,
            num_kv_heads: shape.kv_heads as i32,
            block_size: shape.page as i32,
            sliding_window: shape.window.unwrap_or(0) as i32,
            partial_rows: self.partial_rows as i32,
            max_work_items: self.max_items as i32,
            kv_scale_stride,
            scale: shape.scale() as f32,
            soft_cap: shape.soft_cap.unwrap_or(0.0) as f32,
            reserved: 0,
        };
        // SAFETY: the caller's.
        unsafe { gpu.kernels.paged_attention(stream, kernel, &params, None) }
    }

    /// Are the merge counters zero, as every launch must leave them? The stream has been waited for.
    ///
    /// # Errors
    /// What the driver says.
    pub fn counters_are_zero(&self) -> Result<bool, CudaError> {
        Ok(self.counters.to_host::<i32>()?.iter().all(|&x| x == 0))
    }
}

/// The attention kernel of a batch for tiles of a kind.
///
/// # Errors
/// There is none for its types or head size.
pub fn kernel<'a>(
    gpu: &'a Gpu,
    shape: &Shape,
    kind: AttentionKind,
) -> Result<&'a AttentionKernel, CudaError> {
    let (element, cache) = elements(shape);
    gpu.kernels.attention(kind, element, cache, shape.head_size)
}
