//! One step's inputs, from the host's batch into the upload, and how much of it the largest step takes.
//!
//! It must never know what the device does with them.

use std::sync::Arc;

use timetable_device_cuda::{
    CudaError,
    attention::{GroupConfig, GroupState, Workspace},
    driver::Device,
    params::SampleRow,
    upload::{PackError, Packer, StepPtrs, UploadRing, UploadSize},
};

use crate::{
    batch::{InputBatch, TableUpdate},
    executor::RowSampling,
};

/// Table entries from which on a row's change travels as a run of its own (4 bytes each and an operation of 64) rather than as
/// triples (12 bytes each).
const MIN_RUN: usize = 12;
/// Operations of a step besides the table's and the groups'.
const FIXED_OPS: usize = 9;
/// Steps whose upload may be under way: one runs, one waits.
const NUM_SLOTS: usize = 2;

/// Memory that packing reuses from step to step.
#[derive(Debug, Default)]
pub(super) struct PackScratch {
    logits_rows: Vec<i32>,
    sample_rows: Vec<SampleRow>,
    triples: Vec<[i32; 3]>,
}

impl PackScratch {
    /// With room for the largest step: packing then allocates nothing.
    pub(super) fn new(max_rows: usize) -> Self {
        Self {
            logits_rows: Vec::with_capacity(max_rows),
            sample_rows: Vec::with_capacity(max_rows),
            triples: Vec::with_capacity(max_rows * MIN_RUN),
        }
    }

    /// Appends the step: tokens, positions, slots, rows, changes of the block table, sampling. `num_fed`: tokens of the step before
    /// that references may name. Table changes stay recorded until the step is submitted.
    ///
    /// # Errors
    /// If the upload is full, or the batch larger than the device's buffers.
    pub(super) fn step(
        &mut self,
        packer: &mut Packer<'_>,
        ptrs: &StepPtrs,
        batch: &InputBatch,
        sampling: &[RowSampling],
        num_fed: usize,
    ) -> Result<(), PackError> {
        let inputs = batch.inputs();
        let (num_reqs, num_tokens) = (inputs.seq_lens.len(), batch.token_ids().len());
        packer.feed_tokens(
            ptrs.token_ids(num_tokens),
            batch.token_ids(),
            ptrs.sampled,
            num_fed,
        )?;
        packer.values_i64("positions", ptrs.positions(num_tokens), inputs.positions)?;
        packer.values_i64("slots", ptrs.slot_mapping(num_tokens), inputs.slot_mapping)?;
        let last = inputs.query_start_loc.last().copied().unwrap_or(0);
        packer.values_i32(
            "query starts",
            ptrs.query_start_loc(num_reqs, last),
            inputs.query_start_loc,
        )?;
        packer.values_i32("lengths", ptrs.seq_lens(num_reqs), inputs.seq_lens)?;
        self.table(packer, ptrs, batch.table_updates())?;
        self.logits_rows.clear();
        self.logits_rows
            .extend(batch.logits_rows().iter().map(|&row| row as i32));
        packer.values_i32(
            "rows of logits",
            ptrs.logits_rows(self.logits_rows.len()),
            &self.logits_rows,
        )?;
        self.sample_rows.clear();
        self.sample_rows.extend(sampling.iter().map(sample_row));
        packer.sample_rows(
            ptrs.sample_rows,
            ptrs.limits.max_num_logits,
            &self.sample_rows,
        )
    }

    fn table<'a>(
        &mut self,
        packer: &mut Packer<'_>,
        ptrs: &StepPtrs,
        updates: impl Iterator<Item = TableUpdate<'a>>,
    ) -> Result<(), PackError> {
        self.triples.clear();
        for update in updates {
            let TableUpdate {
                row,
                first_column,
                entries,
            } = update;
            if entries.len() < MIN_RUN {
                let triples = entries.iter().zip(first_column..);
                self.triples
                    .extend(triples.map(|(&block, column)| [row as i32, column as i32, block]));
            } else {
                let to = ptrs.table_run(row, first_column, entries.len());
                packer.values_i32("block table", to, entries)?;
            }
        }
        packer.table_updates(&self.triples)
    }
}

/// A known token is not chosen: its row is read greedily, and nobody looks at the result.
fn sample_row(row: &RowSampling) -> SampleRow {
    let temperature = match row.forced {
        Some(_) => 0.0,
        None => row.temperature,
    };
    SampleRow {
        temperature,
        top_p: row.top_p,
        top_k: i32::try_from(row.top_k).unwrap_or(i32::MAX),
        reserved: 0,
        uniform: row.uniform,
    }
}

/// What the largest step uploads: `groups` with their workspaces, again for each further segment, all rows of the table anew,
/// every token and row.
pub(super) fn upload_size(
    ptrs: &StepPtrs,
    groups: &[GroupConfig],
    workspaces: &[Arc<Workspace>],
) -> UploadSize {
    let limits = ptrs.limits;
    let (rows, tokens) = (limits.max_num_reqs, limits.max_num_tokens);
    let logits = limits.max_num_logits;
    let table = rows * limits.table_width.max(3 * MIN_RUN) * size_of::<i32>();
    let of_rows =
        rows * 2 * size_of::<i32>() + logits * (size_of::<i32>() + size_of::<SampleRow>());
    let of_tokens = tokens * (size_of::<i32>() + 2 * size_of::<i64>());
    // Padding between lists: at most 8 bytes each.
    let ops = FIXED_OPS + rows;
    let mut size = UploadSize {
        num_slots: NUM_SLOTS,
        max_bytes: table + of_rows + of_tokens + 8 * (ops + 2),
        max_ops: ops,
    };
    for (config, workspace) in groups.iter().cycle().zip(workspaces) {
        let (bytes, ops) = GroupState::new(config.clone(), *ptrs, workspace.clone()).max_upload();
        size.max_bytes += bytes + 8;
        size.max_ops += ops;
    }
    size
}

/// A ring for such uploads.
///
/// # Errors
/// No room on the device, or no lockable memory on the host.
pub(super) fn upload_ring(device: &Device, size: UploadSize) -> Result<UploadRing, CudaError> {
    UploadRing::new(device, size).map_err(|error| {
        error.with_remedy("lower --max-num-seqs, --max-num-batched-tokens or --max-model-len")
    })
}

/// Does an upload of `size` take what `needed` takes?
pub(super) fn holds(size: &UploadSize, needed: &UploadSize) -> bool {
    size.max_bytes >= needed.max_bytes && size.max_ops >= needed.max_ops
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_token_is_read_greedily_and_others_as_asked() {
        let asked = RowSampling {
            temperature: 0.7,
            top_p: 0.9,
            top_k: 40,
            uniform: 0.25,
            forced: None,
            logits: false,
        };
        let row = sample_row(&asked);
        assert_eq!((row.temperature, row.top_p), (0.7, 0.9));
        assert_eq!((row.top_k, row.uniform), (40, 0.25));
        let forced = sample_row(&RowSampling {
            forced: Some(3),
            ..asked
        });
        assert_eq!(forced.temperature, 0.0);
        // More candidates than a count holds are all of them there can be.
        let all = sample_row(&RowSampling {
            top_k: u32::MAX,
            ..asked
        });
        assert_eq!(all.top_k, i32::MAX);
    }

    #[test]
    fn a_larger_upload_takes_a_smaller_one() {
        let size = |max_bytes, max_ops| UploadSize {
            num_slots: NUM_SLOTS,
            max_bytes,
            max_ops,
        };
        assert!(holds(&size(100, 10), &size(100, 10)));
        assert!(holds(&size(101, 11), &size(100, 10)));
        assert!(!holds(&size(100, 10), &size(101, 10)));
        assert!(!holds(&size(100, 10), &size(100, 11)));
    }
}
