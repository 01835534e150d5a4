//! One step's metadata in the form that every layer of the group executes: rows, pages, work items, merge slots. It must
//! never know heads, dtypes or the cache: those are the layer's.

use timetable_attention::StepInputs;
use timetable_types::{Family, Metadata};

use super::prepare;

/// Why metadata could not be prepared. None of this passes the verifier, except what this device does not run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PrepareError {
    /// The record asks for something that no impl of this device executes.
    #[error("{what} is not executed by the CPU device yet: {remedy}")]
    Unsupported {
        /// What it asks for.
        what: &'static str,
        /// What would work.
        remedy: &'static str,
    },
    /// A field contradicts the step's tensors or another field.
    #[error("{field}: {problem}")]
    Inconsistent {
        /// The field.
        field: &'static str,
        /// The value, and the bound that it breaks.
        problem: String,
    },
}

/// "No such row", "no such item".
pub(super) const NONE: u32 = u32::MAX;

/// One request of the step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    /// Its first token.
    pub token: u32,
    /// Its query tokens.
    pub q_len: u32,
    /// Its keys. Its last token stands at key `kv_len − 1`.
    pub kv_len: u32,
    pub causal: bool,
    /// Index of its first page in `pages`, which hold all of `kv_len`.
    pub page: u32,
    /// Index of its first query tile.
    pub tile: u32,
    /// Units (see `StepMetadata::packed`) of one query tile.
    pub tile_units: u32,
}

/// Query units [q0, q1) of a row against its keys [k0, k1): one partial result for each KV head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub row: u32,
    pub q0: u32,
    pub q1: u32,
    pub k0: u32,
    pub k1: u32,
}

/// The layer hyperparameters that a FLASHINFER plan was made for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hyperparameters {
    pub num_qo_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub sm_scale: f64,
    pub window_left: i32,
    pub logits_soft_cap: Option<f64>,
}

/// One group's metadata of one step, prepared once from verified metadata and then valid for every layer of the group.
/// Owned by the step loop; its buffers are reused from step to step.
#[derive(Debug, Default)]
pub struct StepMetadata {
    /// None until prepared, and after a failure.
    pub(super) family: Option<Family>,
    pub(super) block_size: usize,
    pub(super) num_actual_tokens: usize,
    /// Ranks that the keys are divided among; 1 but for a pass of `ContextParallelMetadata`.
    pub(super) dcp_world_size: u32,
    /// One more than the largest page.
    pub(super) num_blocks_used: usize,
    /// One per plan.
    pub(super) hyperparameters: Vec<Hyperparameters>,
    /// Are units packed query rows (one token of one of the query heads that share a KV head, token-major)? Otherwise they
    /// are tokens.
    pub(super) packed: bool,
    pub(super) rows: Vec<Row>,
    /// Block ids, each below `num_blocks_used`.
    pub(super) pages: Vec<i32>,
    /// In order of execution.
    pub(super) items: Vec<Item>,
    /// [groups + 1]: items of a group run one after the other on one worker.
    pub(super) groups: Vec<u32>,
    /// [groups + 1]: running sum of the groups' units.
    pub(super) group_units: Vec<usize>,
    /// [groups + 1]: running sum of units × keys.
    pub(super) group_cost: Vec<u64>,
    /// [tiles + 1]: the merge slots of each query tile.
    pub(super) slot_indptr: Vec<u32>,
    /// The item whose partial result each slot takes, or `NONE`.
    pub(super) slot_items: Vec<u32>,
    /// The group of each item.
    pub(super) item_groups: Vec<u32>,
    /// Running sum of the items' units.
    pub(super) item_units: Vec<usize>,
    /// The row of each token, or `NONE`. Later tokens have none.
    pub(super) token_rows: Vec<u32>,
}

impl StepMetadata {
    /// Unprepared: `forward` refuses it.
    pub fn new() -> Self {
        StepMetadata::default()
    }

    /// Replaces the contents by `metadata`, resolved against `inputs`. `block_size`: tokens of one kernel block.
    ///
    /// The metadata should have passed the verifier. What contradicts the step's tensors is refused here; a schedule or
    /// work list that does not cover the keys is executed as it stands. After an error the contents are unprepared.
    pub fn prepare(
        &mut self,
        metadata: &Metadata,
        inputs: &StepInputs<'_>,
        block_size: u32,
    ) -> Result<(), PrepareError> {
        self.clear();
        if block_size == 0 {
            return Err(inconsistent(
                "block_size",
                "0 tokens; it must be at least 1".into(),
            ));
        }
        self.block_size = block_size as usize;
        match metadata {
            Metadata::FlashAttn(metadata) => prepare::flash_attn(self, metadata, inputs)?,
            Metadata::Flashinfer(metadata) => prepare::flashinfer(self, metadata, inputs)?,
            Metadata::TritonAttn(metadata) => prepare::triton_attn(self, metadata, inputs)?,
            Metadata::FlashMla(_) => {
                return Err(PrepareError::Unsupported {
                    what: "flash-mla as keys and values",
                    remedy: "latent attention is prepared by `MlaStepMetadata` and runs in `MlaImpl`",
                });
            }
            Metadata::Mamba(_) => {
                return Err(PrepareError::Unsupported {
                    what: "mamba as keys and values",
                    remedy: "recurrent layers are prepared by `MambaStepMetadata` and run in `MambaImpl`",
                });
            }
        }
        self.sum_groups();
        self.family = Some(metadata.family());
        Ok(())
    }

    /// The family whose metadata this is; none while unprepared.
    pub fn family(&self) -> Option<Family> {
        self.family
    }

    /// Tokens that `forward` writes, padding included.
    pub fn num_actual_tokens(&self) -> usize {
        self.num_actual_tokens
    }

    /// Work items: partial results per KV head.
    pub fn num_work_items(&self) -> usize {
        self.items.len()
    }

    /// The most partial results that any query tile merges; at least 1.
    pub fn max_splits(&self) -> usize {
        let splits = self
            .slot_indptr
            .windows(2)
            .map(|pair| (pair[1] - pair[0]) as usize);
        splits.max().unwrap_or(1).max(1)
    }

    pub(super) fn clear(&mut self) {
        self.family = None;
        self.dcp_world_size = 1;
        self.num_actual_tokens = 0;
        self.num_blocks_used = 0;
        self.packed = false;
        self.hyperparameters.clear();
        self.rows.clear();
        self.pages.clear();
        self.items.clear();
        self.groups.clear();
        self.groups.push(0);
        self.group_units.clear();
        self.group_cost.clear();
        self.item_groups.clear();
        self.item_units.clear();
        self.slot_indptr.clear();
        self.slot_indptr.push(0);
        self.slot_items.clear();
        self.token_rows.clear();
    }

    pub(super) fn sum_groups(&mut self) {
        let (mut units, mut cost) = (0usize, 0u64);
        self.group_units.push(0);
        self.group_cost.push(0);
        for (index, group) in self.groups.windows(2).enumerate() {
            for item in &self.items[group[0] as usize..group[1] as usize] {
                let rows = item.q1 - item.q0;
                self.item_groups.push(index as u32);
                self.item_units.push(units);
                units += rows as usize;
                cost += u64::from(rows) * u64::from(item.k1 - item.k0);
            }
            self.group_units.push(units);
            self.group_cost.push(cost);
        }
    }
}

pub(super) fn inconsistent(field: &'static str, problem: String) -> PrepareError {
    PrepareError::Inconsistent { field, problem }
}
