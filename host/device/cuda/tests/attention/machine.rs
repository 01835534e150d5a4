//! Device memory of one group, and a step through it. It must never know what is right.

use std::sync::Arc;

use timetable_device_cuda::{
    CudaError, Kernels,
    attention::{AttentionIo, GroupLaunch, GroupState, Launch, Workspace, WorkspaceSize},
    cache::{KvCaches, KvScales},
    driver::{CaptureMode, DeviceBuffer, GraphExec, Stream},
    ops::Rows,
    upload::{StepBuffers, UnpackStep, UploadRing, UploadSize},
};
use timetable_types::{CaptureShape, LaunchPromise};

use crate::batch::*;

/// Device memory of one setup, and the graph of its decode steps.
pub(crate) struct Machine<'k> {
    pub(crate) kernels: &'k Kernels,
    pub(crate) stream: &'k Stream,
    pub(crate) ring: UploadRing,
    pub(crate) buffers: StepBuffers,
    pub(crate) state: GroupState,
    pub(crate) captured: Launch,
    pub(crate) caches: KvCaches,
    pub(crate) query: DeviceBuffer,
    pub(crate) key: DeviceBuffer,
    pub(crate) value: DeviceBuffer,
    pub(crate) output: DeviceBuffer,
    pub(crate) lse: DeviceBuffer,
    pub(crate) graph: Option<GraphExec>,
}

pub(crate) const DECODES: CaptureShape = CaptureShape {
    num_tokens: 16,
    num_reqs: 16,
    max_query_len: 1,
    uniform_query_len: Some(1),
};

impl<'k> Machine<'k> {
    pub(crate) fn new(kernels: &'k Kernels, stream: &'k Stream, setup: &Setup) -> Self {
        let device = kernels.device();
        let group = &setup.group;
        let promise = LaunchPromise {
            max_num_splits: 8,
            max_work_items: 400,
            scratch_bytes: 0,
            max_query_len: 1,
            uniform_query_len: Some(1),
        };
        let captured = Launch::captured(group, &DECODES, &promise);
        let size = WorkspaceSize::new(group, [&captured]);
        let workspace = Workspace::new(device, group, size).expect("a workspace");
        let buffers = StepBuffers::new(device, group.limits).expect("buffers");
        let state = GroupState::new(group.clone(), buffers.ptrs(), Arc::new(workspace));
        let (bytes, ops) = state.max_upload();
        let size = UploadSize {
            num_slots: 2,
            max_bytes: bytes + MAX_REQS * (WIDTH + 8) * 4 + MAX_TOKENS * 32,
            max_ops: ops + 16,
        };
        let scales = setup.scales.map(|(key, value)| {
            let layer = |by: f32| KvScales {
                key: vec![key * by; group.num_kv_heads as usize],
                value: vec![value * by; group.num_kv_heads as usize],
            };
            // Of the other layer, which is not attended to.
            vec![layer(7.0), layer(1.0)]
        });
        let caches = KvCaches::new(device, setup.cache_shape(), scales.as_deref()).expect("caches");
        let tokens = |heads: u32, bytes: usize| {
            let bytes = MAX_TOKENS * (heads * group.head_size) as usize * bytes;
            DeviceBuffer::alloc_zeroed(device, bytes, "a test").expect("memory")
        };
        let element = group.element.bytes();
        Self {
            kernels,
            stream,
            ring: UploadRing::new(device, size).expect("a ring"),
            buffers,
            state,
            captured,
            caches,
            query: tokens(group.num_heads, element),
            key: tokens(group.num_kv_heads, element),
            value: tokens(group.num_kv_heads, element),
            output: tokens(group.num_heads, element),
            lse: DeviceBuffer::alloc_zeroed(
                device,
                MAX_TOKENS * group.num_heads as usize * 4,
                "a test",
            )
            .expect("memory"),
            graph: None,
        }
    }

    pub(crate) fn rows(buffer: &DeviceBuffer, heads: u32, size: u32) -> Rows {
        Rows {
            ptr: buffer.ptr(),
            stride: i64::from(heads * size),
        }
    }

    /// Everything of the step up to the upload's launch.
    pub(crate) fn upload(&mut self, setup: &Setup, batch: &Batch) {
        let group = &setup.group;
        let kv = (group.num_kv_heads * group.head_size) as usize;
        self.caches
            .memory()
            .write(0, &batch.cache(setup))
            .expect("written");
        let write = |buffer: &mut DeviceBuffer, values: &[f32]| {
            buffer
                .write(0, &encode(group.element, values))
                .expect("written");
        };
        write(&mut self.query, &batch.query);
        write(&mut self.key, &batch.fresh(&batch.keys, kv));
        write(&mut self.value, &batch.fresh(&batch.values, kv));
        self.poison();
        let (ptrs, tensors) = (self.buffers.ptrs(), &batch.step.tensors);
        let (reqs, tokens) = (tensors.seq_lens.len(), batch.num_tokens());
        let mut packer = self.ring.begin().expect("a slot");
        packer
            .values_i64("slots", ptrs.slot_mapping(tokens), &tensors.slot_mapping)
            .expect("room");
        packer
            .values_i32(
                "starts",
                ptrs.query_start_loc(reqs, 0),
                &tensors.query_start_loc,
            )
            .expect("room");
        packer
            .values_i32("lengths", ptrs.seq_lens(reqs), &tensors.seq_lens)
            .expect("room");
        packer
            .values_i32(
                "table",
                ptrs.table_run(0, 0, reqs * WIDTH),
                &tensors.block_table,
            )
            .expect("room");
        self.state.pack(&mut packer).expect("room");
        let packed = packer.finish();
        let step = UnpackStep::new(reqs, tokens, group.block_size);
        // SAFETY: everything belongs to `self`, which waits for the stream before anything is read or freed.
        unsafe {
            self.ring
                .submit(self.stream, self.kernels, packed, step, &ptrs, None)
        }
        .expect("submitted");
    }

    pub(crate) fn poison(&mut self) {
        self.output.fill(0xFF).expect("filled");
        self.lse.fill(0xFF).expect("filled");
    }

    pub(crate) fn launch(
        &self,
        launches: &GroupLaunch<'_>,
        setup: &Setup,
    ) -> Result<(), CudaError> {
        let group = &setup.group;
        let cache = self.caches.layer(1).expect("two layers");
        let io = AttentionIo {
            query: Self::rows(&self.query, group.num_heads, group.head_size),
            output: Self::rows(&self.output, group.num_heads, group.head_size),
            lse: self.lse.ptr(),
        };
        let (key, value) = (
            Self::rows(&self.key, group.num_kv_heads, group.head_size),
            Self::rows(&self.value, group.num_kv_heads, group.head_size),
        );
        // SAFETY: everything belongs to `self`, which waits for the stream before anything is read or freed.
        unsafe {
            launches.plan(self.stream, self.kernels)?;
            launches.update_cache(self.stream, self.kernels, &cache, key, value)?;
            launches.attend(self.stream, self.kernels, &cache, &io)
        }
    }

    /// Output bytes and LSE of the batch.
    pub(crate) fn results(&self, setup: &Setup, batch: &Batch) -> (Vec<u8>, Vec<f32>) {
        self.stream.synchronize().expect("no fault");
        let heads = setup.group.num_heads as usize;
        let mut output = vec![
            0;
            batch.num_tokens()
                * heads
                * setup.group.head_size as usize
                * setup.group.element.bytes()
        ];
        let mut lse = vec![0.0; batch.num_tokens() * heads];
        self.output.read(0, &mut output).expect("read");
        self.lse.read(0, &mut lse).expect("read");
        (output, lse)
    }

    /// The graph of decode steps, captured with nothing of a step but the promise.
    pub(crate) fn replay(&mut self, setup: &Setup) {
        if self.graph.is_none() {
            let captured = self.stream.capture(CaptureMode::ThreadLocal, |_| {
                self.launch(&self.state.launches(&self.captured), setup)
            });
            self.graph = Some(captured.expect("captured").instantiate().expect("a graph"));
        }
        let graph = self.graph.as_ref().expect("captured above");
        // SAFETY: what was captured belongs to `self`.
        unsafe { self.stream.launch_graph(graph) }.expect("launched");
    }
}

impl Drop for Machine<'_> {
    fn drop(&mut self) {
        // Nothing may run when buffers are freed; a fault was reported before.
        let _ = self.stream.synchronize();
    }
}
