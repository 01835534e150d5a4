//! How the device's memory is divided: what is taken before the KV cache, what graphs are expected to take after it, and the
//! blocks that fit between.
//!
//! Pure arithmetic over byte counts: this module must never know a device.

use std::fmt;

use serde::Serialize;

/// What a kernel's node of an instantiated graph is taken to cost on the device, in bytes. An estimate, above what drivers
/// since 12.4 use; the report compares it with what capture took.
const BYTES_PER_NODE: u64 = 8 << 10;
/// What capturing takes whatever its size: the driver's pools.
const GRAPH_BASE: u64 = 64 << 20;

/// What of the device's memory went where, in bytes; the start-up report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryReport {
    /// Of the device.
    pub total: u64,
    /// Other processes', the driver's context and the kernels' code.
    pub outside: u64,
    /// The model's weights and its table of rotations.
    pub weights: u64,
    /// Activations, logits, the step's inputs and the upload ring.
    pub activations: u64,
    /// Attention's work lists and partial results, and the matrix library's scratch.
    pub workspace: u64,
    /// Captured graphs: as estimated before capture, as measured after it.
    pub graphs: u64,
    /// The KV cache.
    pub kv_cache: u64,
    /// The KV cache's blocks, the null block included.
    pub num_blocks: u64,
    /// What may be used in all: the device's memory times the configured fraction; 0 where the blocks were given.
    pub budget: u64,
}

impl fmt::Display for MemoryReport {
    /// One line, in GiB.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        write!(
            f,
            "device memory {:.2} GiB: weights {:.2}, activations {:.2}, workspace {:.2}, graphs {:.2}, KV cache {:.2} in {} blocks, \
             driver and other processes {:.2}",
            gib(self.total),
            gib(self.weights),
            gib(self.activations),
            gib(self.workspace),
            gib(self.graphs),
            gib(self.kv_cache),
            self.num_blocks,
            gib(self.outside),
        )
    }
}

/// What is known when the KV cache is sized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sizing {
    /// Of the device.
    pub(super) total: u64,
    /// Free now, with weights, activations and workspace in place.
    pub(super) free: u64,
    /// What graphs are expected to take.
    pub(super) graphs: u64,
    /// `--gpu-memory-utilization`
    pub(super) fraction: f64,
    /// Bytes of one of the manager's blocks, over all layers.
    pub(super) block_bytes: u64,
    /// More blocks are of no use.
    pub(super) most: usize,
}

/// The memory does not hold a KV cache of two blocks.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error(
    "no memory for the KV cache: {fraction} of the device's {total} bytes is {budget}, and {used} are in use or set aside for graphs, \
     before a block of {block_bytes}: raise --gpu-memory-utilization, lower --max-num-batched-tokens or --max-num-seqs, end other \
     processes on the device, or choose a smaller model"
)]
pub struct NoCacheMemory {
    /// As configured.
    pub fraction: f64,
    /// Of the device.
    pub total: u64,
    /// The fraction of it.
    pub budget: u64,
    /// In use by anyone, and the estimate for graphs.
    pub used: u64,
    /// Of one block, over all layers.
    pub block_bytes: u64,
}

impl Sizing {
    /// What may be used in all.
    pub(super) fn budget(&self) -> u64 {
        (self.total as f64 * self.fraction) as u64
    }

    /// Blocks that fit into the fraction beside what is in use, graphs included; never more than are free.
    pub(super) fn blocks(&self) -> Result<usize, NoCacheMemory> {
        let used = self.total.saturating_sub(self.free) + self.graphs;
        let budget = self.budget();
        let room = budget
            .saturating_sub(used)
            .min(self.free.saturating_sub(self.graphs));
        let blocks = (room / self.block_bytes.max(1)).min(self.most as u64) as usize;
        if blocks < 2 {
            return Err(NoCacheMemory {
                fraction: self.fraction,
                total: self.total,
                budget,
                used,
                block_bytes: self.block_bytes,
            });
        }
        Ok(blocks)
    }
}

/// What so many graphs with so many kernels in all are expected to take.
pub(super) fn graph_estimate(num_graphs: usize, num_nodes: usize) -> u64 {
    if num_graphs == 0 {
        return 0;
    }
    GRAPH_BASE + BYTES_PER_NODE * num_nodes as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZING: Sizing = Sizing {
        total: 1_000_000,
        free: 600_000,
        graphs: 50_000,
        fraction: 0.9,
        block_bytes: 1_000,
        most: usize::MAX,
    };

    #[test]
    fn the_cache_gets_what_the_fraction_leaves() {
        // 900,000 may be used; 400,000 are, and 50,000 will be.
        assert_eq!(SIZING.blocks(), Ok(450));
    }

    #[test]
    fn no_more_blocks_than_are_of_use() {
        assert_eq!(Sizing { most: 77, ..SIZING }.blocks(), Ok(77));
    }

    #[test]
    fn all_of_the_memory_is_never_more_than_is_free() {
        let all = Sizing {
            fraction: 1.0,
            ..SIZING
        };
        assert_eq!(all.blocks(), Ok(550));
    }

    #[test]
    fn what_others_use_counts() {
        let full = Sizing {
            free: 151_500,
            ..SIZING
        };
        let error = full.blocks().expect_err("one block fits, two are needed");
        assert_eq!((error.budget, error.used), (900_000, 898_500));
        assert!(
            error.to_string().contains("--gpu-memory-utilization"),
            "{error}"
        );
        let over = Sizing { free: 10, ..SIZING };
        assert!(over.blocks().is_err(), "more in use than allowed");
    }

    #[test]
    fn no_graphs_cost_nothing() {
        assert_eq!(graph_estimate(0, 0), 0);
        assert!(graph_estimate(2, 700) > graph_estimate(1, 300));
    }
}
