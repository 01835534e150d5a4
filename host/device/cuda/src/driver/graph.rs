//! Captured work. It must never know which step a graph belongs to.

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUresult};

use super::{Device, fallible, log_drop};
use crate::error::{CudaError, Result};

/// Work that a stream has captured, not yet runnable. It holds the addresses it was captured with, not the memory.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    handle: CUgraph,
}

// SAFETY: a graph may be used by one thread at a time, on any thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Takes over a graph that `end_capture` gave.
    pub(super) fn from_handle(device: &Device, handle: CUgraph) -> Self {
        Self {
            device: device.clone(),
            handle,
        }
    }

    /// How many nodes (kernels, copies, fills) were captured.
    ///
    /// # Errors
    /// What the driver says.
    pub fn num_nodes(&self) -> Result<usize> {
        self.device.bind()?;
        // SAFETY: the graph is live; without a list the driver writes the number of nodes.
        unsafe { fallible::graph_num_nodes(self.handle) }
    }

    /// Makes it runnable. The graph itself is not needed afterwards.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], or what the driver says.
    pub fn instantiate(&self) -> Result<GraphExec> {
        self.device.bind()?;
        // SAFETY: the graph is live.
        let handle = unsafe { fallible::graph_instantiate(self.handle) }.map_err(|error| {
            if error.is_code(CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
                out_of_memory(&self.device)
            } else {
                error
            }
        })?;
        Ok(GraphExec {
            device: self.device.clone(),
            handle,
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the graph is live and ours.
        log_drop(
            self.device
                .bind()
                .and_then(|()| unsafe { fallible::graph_destroy(self.handle) }),
        );
    }
}

/// Runnable work ([`super::Stream::launch_graph`]). Dropped while it runs, the driver frees it when it has run.
#[derive(Debug)]
pub struct GraphExec {
    device: Device,
    handle: CUgraphExec,
}

// SAFETY: a runnable graph may be used by one thread at a time, on any thread.
unsafe impl Send for GraphExec {}

impl GraphExec {
    pub(super) fn handle(&self) -> CUgraphExec {
        self.handle
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        // SAFETY: the graph is live and ours; the driver defers the release of one that runs.
        log_drop(
            self.device
                .bind()
                .and_then(|()| unsafe { fallible::graph_exec_destroy(self.handle) }),
        );
    }
}

fn out_of_memory(device: &Device) -> CudaError {
    let memory = device
        .memory()
        .unwrap_or(super::MemoryInfo { free: 0, total: 0 });
    CudaError::OutOfMemory {
        what: "a CUDA graph",
        asked: 0,
        free: memory.free,
        total: memory.total,
        remedy: "capture fewer sizes, or leave more memory free",
    }
}
