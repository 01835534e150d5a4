//! From a loaded model to an executor that runs: buffers by the engine's sizes, workspaces by the builders' promises, the KV
//! cache by what memory is left, graphs last, because they hold the addresses of everything else.
//!
//! It must never know a step.

use std::sync::Arc;

use timetable_device_cuda::{
    CudaError,
    attention::{GroupConfig, GroupLaunch, GroupState, Workspace},
    blas::{Gemm, USUAL_WORKSPACE},
    cache::{CacheDtype, CacheShape, KvCaches},
    driver::{Device, Stream},
    upload::{StepBuffers, StepLimits, StepPtrs},
};
use timetable_types::{CaptureShape, Dtype, KvCacheLayout};

use super::{
    activations::{Activations, LargestStep},
    core::{Core, WHOLE},
    error::CudaStartError,
    executor::{DEPTH, Loaded, Running, StepState},
    flights::Flights,
    forward::Forward,
    graphs::{PiecewiseGraphs, SetPlan, attention_nodes},
    memory::{MemoryReport, Sizing, graph_estimate},
    pack::{PackScratch, upload_ring, upload_size},
    promises::Promises,
    recapture::Recapture,
};
use crate::{
    config::CacheSize,
    executor::{CacheRequest, ExecutorSetup, GraphPlan, eager_shape},
    model::ModelConfig,
};

/// Everything but the KV cache, the workspaces and the graphs.
pub(super) struct Parts {
    forward: Forward,
    step: StepBuffers,
    groups: Vec<GroupConfig>,
    /// Each layer's group.
    layer_groups: Vec<usize>,
    /// The largest step outside graphs.
    eager: CaptureShape,
    cache: CacheRequest,
    cache_dtype: CacheDtype,
    layout: KvCacheLayout,
    /// Kernel blocks of one of the manager's.
    ratio: usize,
    vocab_size: usize,
    /// Segments of a step at most.
    max_segments: usize,
}

/// What `start` leaves.
pub(super) struct Started {
    pub(super) running: Running,
    pub(super) recapture: Recapture,
    pub(super) memory: MemoryReport,
}

impl Parts {
    /// Buffers for the largest step of an engine.
    ///
    /// # Errors
    /// What the device does not run, or has no room for.
    pub(super) fn new(
        device: &Device,
        model: &ModelConfig,
        loaded: Loaded,
        setup: &ExecutorSetup<'_>,
    ) -> Result<Self, CudaStartError> {
        let Loaded {
            kernels,
            weights,
            rope,
        } = loaded;
        let element = weights.element;
        let shape = setup.shape;
        let limits = StepLimits {
            max_num_reqs: shape.max_num_seqs,
            max_num_tokens: shape.max_num_batched_tokens,
            table_width: setup.table_width,
            // Every row verifies its drafts, or the step is full before.
            max_num_logits: (shape.max_num_seqs * (1 + setup.config.num_speculative_tokens()))
                .min(shape.max_num_batched_tokens.max(shape.max_num_seqs)),
        };
        let kv_dtype = setup
            .config
            .kv_cache_dtype
            .resolve(setup.plan.facts().model_dtype);
        let cache_dtype = cache_dtype(kv_dtype)?;
        let groups = setup
            .groups
            .iter()
            .enumerate()
            .map(|(group, config)| {
                GroupConfig::new(
                    setup.plan.family(group),
                    config,
                    element,
                    cache_dtype,
                    limits,
                    device.num_multiprocessors(),
                )
            })
            .collect::<Result<Vec<_>, CudaError>>()?;
        let layer_groups = (0..model.num_hidden_layers)
            .map(|layer| {
                setup
                    .plan
                    .group_of(layer)
                    .filter(|group| *group < groups.len())
                    .ok_or(CudaStartError::NoGroup { layer })
            })
            .collect::<Result<_, _>>()?;
        // Scheduler and layout are the engine's: the same for every group.
        let (eager, layout) = setup
            .groups
            .first()
            .map(|config| {
                (
                    eager_shape(&config.scheduler),
                    config.attention.kv_cache_layout,
                )
            })
            .ok_or(CudaStartError::NoGroup { layer: 0 })?;
        let step = StepBuffers::new(device, limits)
            .map_err(|error| error.with_remedy("lower --max-num-seqs or --max-model-len"))?;
        let largest = LargestStep {
            tokens: limits.max_num_tokens,
            rows: limits.max_num_logits,
        };
        let activations = Activations::new(device, model, element, largest)?;
        let gemm = Gemm::new(device, USUAL_WORKSPACE)
            .map_err(|error| error.with_remedy("lower --max-num-batched-tokens or --max-num-seqs"))?
            .with_batch_invariance(setup.config.batch_invariant);
        let forward = Forward::new(
            device,
            kernels,
            gemm,
            model,
            weights,
            &rope,
            activations,
            step.ptrs(),
            shape.max_model_len,
        )?;
        Ok(Self {
            forward,
            step,
            groups,
            layer_groups,
            eager,
            cache: setup.cache,
            cache_dtype,
            layout,
            ratio: shape.block_size / shape.kernel_block_size,
            vocab_size: model.vocab_size,
            max_segments: setup.max_segments,
        })
    }

    /// The KV cache of so many of the manager's blocks.
    fn cache_shape(&self, num_blocks: usize) -> CacheShape {
        // Heads and blocks are the same in all groups: they share a backend and a block table.
        let group = &self.groups[0];
        CacheShape {
            num_layers: self.layer_groups.len(),
            num_blocks: num_blocks * self.ratio,
            num_kv_heads: group.num_kv_heads as usize,
            block_size: group.block_size as usize,
            head_size: group.head_size as usize,
            dtype: self.cache_dtype,
            layout: self.layout,
        }
    }
}

fn cache_dtype(dtype: Dtype) -> Result<CacheDtype, CudaError> {
    CacheDtype::of(dtype).ok_or_else(|| CudaError::Invalid {
        what: "kv_cache_dtype",
        value: format!("{dtype:?}"),
        remedy: "choose auto, bfloat16, float16, float32 or fp8_e4m3",
    })
}

/// Allocates what is left, and captures the graphs.
///
/// # Errors
/// Too little memory; a kernel or a capture that fails.
pub(super) fn start(
    device: &Device,
    parts: Parts,
    plan: &GraphPlan,
) -> Result<Started, CudaStartError> {
    let ptrs = parts.step.ptrs();
    let limits = ptrs.limits;
    let promises = Promises::of(plan);
    let max_segments = parts.max_segments;
    let set_plan = SetPlan::new(&parts.groups, promises.clone(), &parts.eager, max_segments);
    let workspaces = set_plan.workspaces(device, &parts.groups, &[])?;
    let upload = upload_size(&ptrs, &parts.groups, &workspaces);
    let ring = upload_ring(device, upload)?;
    let flights = Flights::new(device, DEPTH, limits.max_num_logits, parts.vocab_size)?;
    let stream = Stream::high_priority(device)?;

    let num_layers = parts.layer_groups.len();
    let pieces = parts.forward.num_kernels();
    let full = pieces + attention_nodes(num_layers, parts.groups.len());
    let nodes = plan.full.len() * full + plan.piecewise.len() * pieces;
    let estimate = graph_estimate(plan.full.len() + plan.piecewise.len(), nodes);
    let (num_blocks, budget) = num_blocks(device, &parts, estimate)?;
    let shape = parts.cache_shape(num_blocks);
    let caches = KvCaches::new(device, shape, None)?;

    let mut memory = MemoryReport {
        weights: parts.forward.weight_bytes(),
        activations: parts.forward.activation_bytes()
            + parts.step.bytes() as u64
            + ring.bytes() as u64,
        workspace: USUAL_WORKSPACE as u64
            + workspaces.iter().map(|w| w.bytes() as u64).sum::<u64>(),
        graphs: estimate,
        num_blocks: num_blocks as u64,
        budget,
        ..MemoryReport::default()
    };
    let core = Arc::new(Core::new(
        parts.forward,
        parts.groups,
        &parts.layer_groups,
        parts.step,
        caches,
    )?);
    memory.kv_cache = core.cache_bytes();
    // SAFETY: nothing else runs yet; the set's workspaces and the core's buffers are zeros, a step without requests.
    unsafe {
        core.warm_up(&stream)?;
        dry_run(&core, &set_plan, &workspaces, &ptrs, &stream)?;
    }
    let before = device.memory()?.free as u64;
    let piecewise = PiecewiseGraphs::capture(&core, &plan.piecewise, &stream)?;
    let set = set_plan.capture(&core, workspaces, &stream)?;
    let after = device.memory()?;
    let taken = before.saturating_sub(after.free as u64);
    if taken > estimate {
        tracing::warn!(
            taken,
            estimate,
            "CUDA graphs take more memory than was set aside: lower --gpu-memory-utilization if another reload needs it"
        );
    }
    memory.graphs = taken;
    memory.total = after.total as u64;
    let ours =
        memory.weights + memory.activations + memory.workspace + memory.graphs + memory.kv_cache;
    memory.outside = memory
        .total
        .saturating_sub(after.free as u64)
        .saturating_sub(ours);

    let recapture = Recapture {
        device: device.clone(),
        core: core.clone(),
        // Kernels of a graph have the priority of the stream that they were captured on.
        stream: Stream::high_priority(device)?,
        eager: parts.eager,
        max_segments,
        promises,
        workspaces: set.workspaces.clone(),
        upload,
    };
    let groups: Vec<GroupState> = core
        .groups
        .iter()
        .cycle()
        .zip(&set.workspaces)
        .map(|(config, workspace)| GroupState::new(config.clone(), ptrs, workspace.clone()))
        .collect();
    let running = Running {
        block_size: core.groups[0].block_size,
        steps: StepState::new(groups.len(), max_segments, limits.max_num_logits),
        core,
        groups,
        set,
        piecewise,
        manager: plan.manager.clone(),
        ring,
        flights,
        scratch: PackScratch::new(limits.max_num_logits),
        stream,
    };
    Ok(Started {
        running,
        recapture,
        memory,
    })
}

/// Blocks of the manager, and the bytes that may be used in all (0 where the blocks were given).
fn num_blocks(device: &Device, parts: &Parts, graphs: u64) -> Result<(usize, u64), CudaStartError> {
    let info = device.memory()?;
    let fraction = match parts.cache.size {
        CacheSize::Blocks(blocks) => return Ok((blocks, 0)),
        CacheSize::MemoryFraction(fraction) => fraction,
    };
    let sizing = Sizing {
        total: info.total as u64,
        free: info.free as u64,
        graphs,
        fraction,
        block_bytes: parts.cache_shape(1).block_bytes() as u64 * parts.ratio as u64,
        most: parts.cache.most,
    };
    Ok((sizing.blocks()?, sizing.budget()))
}

/// Runs the largest step outside graphs and waits, with no requests in it: each kernel that graphs and steps launch has then run,
/// and one that does not shows here.
///
/// # Safety
/// Nothing else runs; the step's tensors and `workspaces` are zeros, and no token has a slot.
unsafe fn dry_run(
    core: &Core,
    plan: &SetPlan,
    workspaces: &[Arc<Workspace>],
    ptrs: &StepPtrs,
    stream: &Stream,
) -> Result<(), CudaError> {
    let launches = plan.eager();
    let launch = |_: usize, group: usize| {
        let config = core.groups.get(group)?;
        Some(GroupLaunch::new(
            config,
            workspaces.get(group)?,
            ptrs,
            launches.get(group)?,
        ))
    };
    let tokens = ptrs.limits.max_num_tokens as u32;
    // SAFETY: the caller's; plans of no requests make no items, and attention clears its output.
    unsafe { core.whole(stream, WHOLE, &launch, tokens) }?;
    stream.synchronize()
}
