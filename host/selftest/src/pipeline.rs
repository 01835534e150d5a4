//! A step as the engine runs it, without an engine: metadata prepared, everything packed into the ring, one copy, one unpack,
//! then plan, scatter and attention of one layer. It must never know who built the metadata.

use std::sync::Arc;

use timetable_attention::{VerifyContext, batch::GroupStep};
use timetable_device_cuda::{
    CudaError,
    attention::{
        AttentionIo, GroupConfig, GroupLaunch, GroupState, Launch, PrepareError, Replay, Workspace,
        WorkspaceSize,
    },
    cache::{CacheDtype, CacheStrides, KvCache},
    driver::{DeviceBuffer, DevicePtr, Stream},
    ops::Rows,
    upload::{
        PackError, StepBuffers, StepLimits, StepMarks, TableMirror, UnpackStep, UploadRing,
        UploadSize,
    },
};
use timetable_types::{BuilderConfig, Dtype, Family, Metadata};

use crate::{
    batch::Shape,
    element,
    gpu::{Gpu, POISON},
    paged::{Strides, elements},
};

/// Why a step did not get to the device.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The device failed.
    #[error(transparent)]
    Device(#[from] CudaError),
    /// The metadata was not taken.
    #[error("not prepared: {0}")]
    Prepare(#[from] PrepareError),
    /// The step does not fit the upload.
    #[error("not packed: {0}")]
    Pack(#[from] PackError),
}

/// One attention group with one layer, and its step buffers.
pub struct Pipeline {
    /// The step's tensors.
    pub buffers: StepBuffers,
    /// Prepares and launches.
    pub group: GroupState,
    /// The layer's queries, `[T, Hq, D]`.
    pub query: DeviceBuffer,
    /// The layer's results, `[T, Hq, D]`.
    pub output: DeviceBuffer,
    /// f32 `[T, Hq]`
    pub lse: DeviceBuffer,
    /// The step's keys, `[T, Hkv, D]`.
    pub key: DeviceBuffer,
    /// The step's values, `[T, Hkv, D]`.
    pub value: DeviceBuffer,
    /// Marks around each step's copy and unpack, where its times are wanted.
    pub marks: Option<StepMarks>,
    ring: UploadRing,
    table: TableMirror,
    memory: DeviceBuffer,
    _scales: DeviceBuffer,
    cache: KvCache,
    row: usize,
    kv_row: usize,
    limits: StepLimits,
    block_size: u32,
}

/// Types, sizes and scales of a pipeline's layer.
pub struct Layer<'a> {
    /// FLASH_ATTN or FLASHINFER.
    pub family: Family,
    /// What the group's builder was made of.
    pub config: &'a BuilderConfig,
    /// Types, heads, layout.
    pub shape: &'a Shape,
    /// Blocks of the cache.
    pub num_blocks: usize,
    /// What bounds a step.
    pub limits: StepLimits,
    /// f32 `[Hkv]` each.
    pub scales: (&'a [f32], &'a [f32]),
}

impl Pipeline {
    /// Allocates everything for steps within the limits and for the graphs that `captured` names.
    ///
    /// # Errors
    /// Sizes that the device does not execute, no memory, or what the driver says.
    pub fn new(
        gpu: &Gpu,
        layer: &Layer<'_>,
        captured: impl FnOnce(&GroupConfig) -> Vec<Launch>,
    ) -> Result<Self, CudaError> {
        let Layer { shape, limits, .. } = *layer;
        let (element, _) = elements(shape);
        let dtype = CacheDtype::of(shape.cache_dtype).unwrap_or(CacheDtype::F32);
        let config = GroupConfig::new(
            layer.family,
            layer.config,
            element,
            dtype,
            limits,
            gpu.device.num_multiprocessors(),
        )?;
        let launches = captured(&config);
        let size = WorkspaceSize::new(&config, &launches);
        let workspace = Arc::new(Workspace::new(&gpu.device, &config, size)?);
        let buffers = StepBuffers::new(&gpu.device, limits)?;
        let group = GroupState::new(config, buffers.ptrs(), workspace);
        let (group_bytes, group_ops) = group.max_upload();
        let entries = limits.max_num_reqs * limits.table_width;
        let ring = UploadRing::new(
            &gpu.device,
            UploadSize {
                num_slots: 2,
                max_bytes: group_bytes
                    + 16 * entries
                    + 64 * (limits.max_num_reqs + limits.max_num_tokens + 64),
                max_ops: group_ops + TableMirror::max_ops(limits.max_num_reqs) + 16,
            },
        )?;
        let element_bytes = element::bytes(shape.cache_dtype);
        let poisoned = |bytes| -> Result<DeviceBuffer, CudaError> {
            let mut buffer = DeviceBuffer::alloc(&gpu.device, bytes, "a check's layer")?;
            buffer.fill(POISON)?;
            Ok(buffer)
        };
        let memory = poisoned(layer.num_blocks * shape.block_elements() * element_bytes)?;
        let scales = gpu.upload(&[layer.scales.0, layer.scales.1].concat())?;
        let fp8 = shape.cache_dtype == Dtype::Float8E4m3;
        let scale = |at: usize| {
            if fp8 {
                scales.ptr().offset(4 * at)
            } else {
                DevicePtr::NULL
            }
        };
        let strides = Strides::of(shape);
        let cache = KvCache {
            ptr: memory.ptr(),
            num_blocks: layer.num_blocks,
            num_kv_heads: shape.kv_heads,
            block_size: shape.page,
            head_size: shape.head_size,
            dtype,
            strides: CacheStrides {
                layer: (layer.num_blocks * shape.block_elements()) as i64,
                block: strides.block,
                head: strides.head,
                token: strides.token,
            },
            k_scale: scale(0),
            v_scale: scale(shape.kv_heads),
            scale_stride: i32::from(fp8),
        };
        let (row, kv_row) = (
            shape.heads() * shape.head_size,
            shape.kv_heads * shape.head_size,
        );
        let of = element::bytes(shape.dtype) * limits.max_num_tokens;
        Ok(Pipeline {
            query: poisoned(of * row)?,
            output: poisoned(of * row)?,
            lse: poisoned(4 * limits.max_num_tokens * shape.heads())?,
            key: poisoned(of * kv_row)?,
            value: poisoned(of * kv_row)?,
            marks: None,
            table: TableMirror::new(limits.max_num_reqs, limits.table_width, entries.min(4096)),
            block_size: shape.page as u32,
            _scales: scales,
            buffers,
            group,
            ring,
            memory,
            cache,
            row,
            kv_row,
            limits,
        })
    }

    /// Replaces the cache. The streams that use it have been waited for.
    ///
    /// # Errors
    /// More bytes than the cache has, or what the driver says.
    pub fn load_cache(&mut self, bytes: &[u8]) -> Result<(), CudaError> {
        self.memory.write(0, bytes)
    }

    /// Poisons everything that a step unpacks, beyond the step too. Block-table entries are then all sent again. The streams
    /// that use it have been waited for.
    ///
    /// # Errors
    /// What the driver says.
    pub fn poison_buffers(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let (_, bytes) =
            timetable_device_cuda::upload::StepPtrs::layout(self.limits, DevicePtr::NULL);
        let first = self.buffers.ptrs().token_ids;
        // SAFETY: the step's tensors lie one after the other from the first one, and live until the stream has been waited for.
        unsafe { stream.fill(first, POISON, bytes) }?;
        stream.synchronize()?;
        self.table.forget();
        Ok(())
    }

    /// Prepares the metadata, packs the step, begins its copy and its unpack on `stream`.
    ///
    /// # Errors
    /// See [`StepError`].
    pub fn begin(
        &mut self,
        gpu: &Gpu,
        stream: &Stream,
        metadata: &Metadata,
        context: &VerifyContext<'_>,
        step: &GroupStep,
        captured: Option<&Launch>,
    ) -> Result<Replay, StepError> {
        let replay = self.group.prepare(metadata, context, captured)?;
        let (ptrs, tensors) = (self.buffers.ptrs(), &step.tensors);
        let (reqs, tokens) = (step.batch_size(), step.cam.num_actual_tokens as usize);
        let last = tensors.query_start_loc.last().copied().unwrap_or(0);
        let mut packer = self.ring.begin()?;
        packer.values_i32(
            "query_start_loc",
            ptrs.query_start_loc(reqs, last),
            &tensors.query_start_loc,
        )?;
        packer.values_i32("seq_lens", ptrs.seq_lens(reqs), &tensors.seq_lens)?;
        packer.values_i64(
            "slot_mapping",
            ptrs.slot_mapping(tokens),
            &tensors.slot_mapping[..tokens],
        )?;
        packer.values_i64(
            "positions",
            ptrs.positions(tokens),
            &tensors.positions[..tokens],
        )?;
        let table = tensors.table();
        let pages = |row: usize| {
            let len = tensors.seq_lens[row].max(0) as usize;
            &table.row(row)[..len.div_ceil(self.block_size as usize)]
        };
        self.table.pack(reqs, pages, &ptrs, &mut packer)?;
        self.group.pack(&mut packer)?;
        let packed = packer.finish();
        let unpack = UnpackStep::new(reqs, tokens, self.block_size);
        // SAFETY: packed above for these buffers, which live as long as the pipeline; its owner waits for the stream.
        unsafe {
            self.ring.submit(
                stream,
                &gpu.kernels,
                packed,
                unpack,
                &ptrs,
                self.marks.as_ref(),
            )
        }?;
        Ok(replay)
    }

    /// Plan, scatter and attention of the step that was begun last, on the same stream, by the launches of `launch`.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// `launch` is of this pipeline's group, and executes the step that was unpacked last whenever the work runs. The pipeline
    /// lives until the stream has passed it, in a capture at every launch of the graph.
    pub unsafe fn layer(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        launch: &GroupLaunch<'_>,
        scatter: bool,
    ) -> Result<(), CudaError> {
        let rows = |buffer: &DeviceBuffer, stride: usize| Rows {
            ptr: buffer.ptr(),
            stride: stride as i64,
        };
        let io = AttentionIo {
            query: rows(&self.query, self.row),
            output: rows(&self.output, self.row),
            lse: self.lse.ptr(),
        };
        // SAFETY: the caller's.
        unsafe {
            launch.plan(stream, &gpu.kernels)?;
            if scatter {
                launch.update_cache(
                    stream,
                    &gpu.kernels,
                    &self.cache,
                    rows(&self.key, self.kv_row),
                    rows(&self.value, self.kv_row),
                )?;
            }
            launch.attend(stream, &gpu.kernels, &self.cache, &io)
        }
    }

    /// The eager launches of the step that was begun last, and their work.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// As [`Pipeline::layer`].
    pub unsafe fn eager(&self, gpu: &Gpu, stream: &Stream, scatter: bool) -> Result<(), CudaError> {
        match self.group.eager() {
            // SAFETY: the caller's; the launches are those of the step that was prepared.
            Some(launch) => unsafe { self.layer(gpu, stream, &launch, scatter) },
            None => Ok(()),
        }
    }
}
