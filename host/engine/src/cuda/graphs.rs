//! CUDA graphs: full ones with the attention workspaces that they were captured with, replaced as a whole; piecewise ones, which
//! hold no attention, once for the life of an engine.
//!
//! A graph reads persistent buffers only, so it replays whatever step was unpacked last. It was captured with the launch promise
//! of whoever may build that step's metadata. This module must never know a batch or a builder.

use std::{sync::Arc, time::Instant};

use timetable_attention::graphs::BatchExecutionDescriptor;
use timetable_device_cuda::{
    CudaError,
    attention::{GroupConfig, GroupLaunch, Launch, Workspace, WorkspaceSize},
    driver::{CaptureMode, Device, Graph, GraphExec, Stream},
    upload::UploadRing,
};
use timetable_types::CaptureShape;

use super::{
    core::{Core, WHOLE},
    promises::Promises,
};
use crate::executor::capture_shape;

/// A full graph.
pub(super) struct FullExec {
    pub(super) descriptor: BatchExecutionDescriptor,
    /// What it was captured with, for each attention group.
    pub(super) launches: Vec<Launch>,
    pub(super) exec: GraphExec,
}

/// Full graphs, and the workspaces that they and steps outside graphs run in.
pub(super) struct GraphSet {
    pub(super) promises: Promises,
    /// For each attention group; then again for each further segment that a step may have, which run outside full graphs.
    pub(super) workspaces: Vec<Arc<Workspace>>,
    /// The largest first.
    pub(super) full: Vec<FullExec>,
    /// A larger upload ring, where the workspaces' lists need one; the step thread takes it with the set.
    pub(super) ring: Option<UploadRing>,
}

/// How a set's graphs are launched, and what its workspaces must hold.
pub(super) struct SetPlan {
    promises: Promises,
    /// For each full graph, for each group.
    full: Vec<Vec<Launch>>,
    /// For each group, the largest step outside graphs.
    eager: Vec<Launch>,
    /// For each workspace.
    sizes: Vec<WorkspaceSize>,
}

/// A further segment's workspace has this part of the bytes of partial results that a whole step's has.
const SEGMENT_PARTIALS: usize = 8;

impl SetPlan {
    /// From promises to launches and sizes; `eager` is the largest step outside graphs, of at most `max_segments` segments.
    pub(super) fn new(
        groups: &[GroupConfig],
        promises: Promises,
        eager: &CaptureShape,
        max_segments: usize,
    ) -> Self {
        let full: Vec<Vec<Launch>> = promises
            .full
            .iter()
            .map(|graph| {
                let shape = capture_shape(&graph.descriptor);
                groups
                    .iter()
                    .zip(&graph.promises)
                    .map(|(group, promise)| Launch::captured(group, &shape, promise))
                    .collect()
            })
            .collect();
        let eager: Vec<Launch> = groups
            .iter()
            .zip(&promises.eager)
            .map(|(group, promise)| Launch::captured(group, eager, promise))
            .collect();
        let whole = groups.iter().enumerate().map(|(index, group)| {
            let captured = full.iter().filter_map(|launches| launches.get(index));
            WorkspaceSize::new(group, captured.chain(eager.get(index)))
        });
        let of_segment: Vec<WorkspaceSize> = groups
            .iter()
            .zip(&eager)
            .map(|(group, eager)| {
                let group = GroupConfig {
                    max_partial_bytes: group.max_partial_bytes / SEGMENT_PARTIALS,
                    ..group.clone()
                };
                WorkspaceSize::new(&group, [eager])
            })
            .collect();
        let further = (1..max_segments).flat_map(|_| &of_segment).copied();
        let sizes = whole.chain(further).collect();
        Self {
            promises,
            full,
            eager,
            sizes,
        }
    }

    /// For each group, the largest step outside graphs that its promise allows.
    pub(super) fn eager(&self) -> &[Launch] {
        &self.eager
    }

    /// Workspaces for it: those of `before` that hold it, else new ones.
    ///
    /// # Errors
    /// No room on the device.
    pub(super) fn workspaces(
        &self,
        device: &Device,
        groups: &[GroupConfig],
        before: &[Arc<Workspace>],
    ) -> Result<Vec<Arc<Workspace>>, CudaError> {
        let workspace = |index: usize| {
            let size = self.sizes[index];
            match before.get(index) {
                Some(workspace) if workspace.size().holds(&size) => Ok(workspace.clone()),
                _ => Workspace::new(device, &groups[index % groups.len()], size).map(Arc::new),
            }
        };
        (0..self.sizes.len()).map(workspace).collect()
    }

    /// Captures the full graphs on `stream`, on this thread, while other threads run steps. Nothing is allocated between the
    /// beginning and the end of a capture.
    ///
    /// # Errors
    /// What the device says, with the graph.
    pub(super) fn capture(
        self,
        core: &Core,
        workspaces: Vec<Arc<Workspace>>,
        stream: &Stream,
    ) -> Result<GraphSet, CudaError> {
        let begun = Instant::now();
        let ptrs = core.ptrs();
        let mut nodes = 0;
        let mut full = Vec::with_capacity(self.full.len());
        for (graph, launches) in self.promises.full.iter().zip(self.full) {
            let descriptor = graph.descriptor;
            let launch = |_: usize, group: usize| {
                let config = core.groups.get(group)?;
                let (workspace, launch) = (workspaces.get(group)?, launches.get(group)?);
                Some(GroupLaunch::new(config, workspace, &ptrs, launch))
            };
            let captured = stream.capture(CaptureMode::ThreadLocal, |stream| {
                // SAFETY: the graph runs on the step's stream only, after the unpacking of a step that keeps to the promise, and
                // no longer than this set lives, which keeps the workspaces, or the core, which keeps everything else.
                unsafe { core.whole(stream, WHOLE, &launch, descriptor.num_tokens) }
            });
            let exec = captured.and_then(|captured| runnable(&captured, stream, &mut nodes));
            let exec = exec.map_err(|error| {
                let (tokens, reqs) = (descriptor.num_tokens, descriptor.num_reqs.unwrap_or(0));
                error.about(&format!("the graph of {tokens} tokens in {reqs} requests"))
            })?;
            full.push(FullExec {
                descriptor,
                launches,
                exec,
            });
        }
        if !full.is_empty() {
            // The uploads.
            stream.synchronize()?;
            tracing::info!(
                graphs = full.len(),
                nodes,
                milliseconds = begun.elapsed().as_millis() as u64,
                "captured full CUDA graphs"
            );
        }
        Ok(GraphSet {
            promises: self.promises,
            workspaces,
            full,
            ring: None,
        })
    }
}

impl GraphSet {
    /// The graph of a shape.
    pub(super) fn find(&self, descriptor: &BatchExecutionDescriptor) -> Option<&FullExec> {
        self.full
            .iter()
            .find(|graph| graph.descriptor == *descriptor)
    }
}

/// The pieces of the forward pass between attentions, captured for some numbers of tokens.
#[derive(Default)]
pub(super) struct PiecewiseGraphs {
    /// (tokens, pieces), the largest first.
    graphs: Vec<(u32, Vec<GraphExec>)>,
}

impl PiecewiseGraphs {
    /// Captures the pieces for each of `descriptors` on `stream`.
    ///
    /// # Errors
    /// What the device says.
    pub(super) fn capture(
        core: &Core,
        descriptors: &[BatchExecutionDescriptor],
        stream: &Stream,
    ) -> Result<Self, CudaError> {
        let begun = Instant::now();
        let mut nodes = 0;
        let mut graphs: Vec<(u32, Vec<GraphExec>)> = Vec::with_capacity(descriptors.len());
        for descriptor in descriptors {
            let tokens = descriptor.num_tokens;
            let piece = |piece: usize| {
                let captured = stream.capture(CaptureMode::ThreadLocal, |stream| {
                    // SAFETY: as for full graphs; no more tokens are captured than the buffers have.
                    unsafe { core.forward.piece(stream, piece, tokens) }
                });
                captured
                    .and_then(|captured| runnable(&captured, stream, &mut nodes))
                    .map_err(|error| {
                        error.about(&format!("piece {piece} of the graph of {tokens} tokens"))
                    })
            };
            let pieces = (0..core.forward.num_pieces())
                .map(piece)
                .collect::<Result<_, _>>()?;
            graphs.push((tokens, pieces));
        }
        if !graphs.is_empty() {
            stream.synchronize()?;
            tracing::info!(
                sizes = graphs.len(),
                nodes,
                milliseconds = begun.elapsed().as_millis() as u64,
                "captured piecewise CUDA graphs"
            );
        }
        Ok(Self { graphs })
    }

    /// The pieces for so many tokens, in order.
    pub(super) fn find(&self, tokens: u32) -> Option<&[GraphExec]> {
        self.graphs
            .iter()
            .find(|(captured, _)| *captured == tokens)
            .map(|(_, pieces)| pieces.as_slice())
    }
}

fn runnable(graph: &Graph, stream: &Stream, nodes: &mut usize) -> Result<GraphExec, CudaError> {
    *nodes += graph.num_nodes()?;
    let exec = graph.instantiate().map_err(|error| {
        error.with_remedy(
            "lower --gpu-memory-utilization, or capture fewer sizes (--cudagraph-capture-sizes)",
        )
    })?;
    stream.upload_graph(&exec)?;
    Ok(exec)
}

/// Nodes that a full graph has beside the layers' kernels: for each layer a scatter and at most two attentions, for each group at
/// most two plans.
pub(super) fn attention_nodes(num_layers: usize, num_groups: usize) -> usize {
    3 * num_layers + 2 * num_groups
}
