//! A step's own tensors, as bundles and recordings keep them: of the block table only the columns that a length reaches, for no rule looks at
//! the others.
//!
//! Must never know: what a builder made of the step.

use serde::{Deserialize, Serialize};
use timetable_attention::{BlockTable, Grant, StepInputs, VerifyContext};
use timetable_types::{BuilderConfig, CommonAttentionMetadata, KvCacheSpecKind, LaunchPromise};

/// Entries of the largest block table that is rebuilt: 256 MiB.
const MAX_TABLE: u64 = 1 << 26;

/// The tensors of one step, and the bounds that they are verified with. R rows, T tokens, W columns.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepRecord {
    /// `s32 [R + 1]`
    pub query_start_loc: Vec<i32>,
    /// `s32 [R]`
    pub seq_lens: Vec<i32>,
    /// W
    pub block_table_width: u32,
    /// `[R]`: the columns of each row that are kept.
    pub columns: Vec<u32>,
    /// The kept columns, row after row.
    pub blocks: Vec<i32>,
    /// `s64 [T]`
    pub slot_mapping: Vec<i64>,
    /// `s64 [T]`
    pub positions: Vec<i64>,
    /// `s32 [R]`
    pub causal: Option<Vec<i32>>,
    /// `s32 [R]`
    pub dcp_local_seq_lens: Option<Vec<i32>>,
    /// `s32 [R]`
    pub encoder_seq_lens: Option<Vec<i32>>,
    /// `s32 [n]`
    pub logits_indices_padded: Option<Vec<i32>>,
    /// `s32 [R]`
    pub rswa_prefix_lens: Option<Vec<i32>>,
    /// A model state's own device fields.
    pub extras: Vec<(String, Vec<i32>)>,
    /// Kernel blocks in the cache.
    pub num_blocks: u32,
    /// What the operator granted.
    pub grant: Grant,
    /// What the graph that the step replayed was captured with.
    pub promise: Option<LaunchPromise>,
}

impl StepRecord {
    /// A copy of what `context` refers to. None if it takes more than `max_bytes`.
    pub fn of(context: &VerifyContext<'_>, max_bytes: usize) -> Option<StepRecord> {
        let mut record = StepRecord::default();
        record.fill(context, max_bytes).then_some(record)
    }

    /// As [`StepRecord::of`], into the memory of a record that is used again. False, and nothing useful in it, if the copy
    /// would take more than `max_bytes`.
    pub fn fill(&mut self, context: &VerifyContext<'_>, max_bytes: usize) -> bool {
        let inputs = context.inputs;
        let table = &inputs.block_table;
        self.columns.clear();
        self.columns
            .extend((0..table.rows()).map(|row| columns(context, row)));
        let kept: u64 = self.columns.iter().map(|columns| u64::from(*columns)).sum();
        let bytes = 4 * kept as usize
            + 8 * (inputs.slot_mapping.len() + inputs.positions.len())
            + 4 * (inputs.query_start_loc.len() + 7 * inputs.seq_lens.len());
        if bytes > max_bytes {
            return false;
        }
        self.blocks.clear();
        for (row, columns) in self.columns.iter().enumerate() {
            self.blocks
                .extend_from_slice(&table.row(row)[..*columns as usize]);
        }
        copy(&mut self.query_start_loc, inputs.query_start_loc);
        copy(&mut self.seq_lens, inputs.seq_lens);
        copy(&mut self.slot_mapping, inputs.slot_mapping);
        copy(&mut self.positions, inputs.positions);
        self.block_table_width = u32::try_from(table.width).unwrap_or(u32::MAX);
        // What few steps have.
        let owned = |values: Option<&[i32]>| values.map(<[i32]>::to_vec);
        self.causal = owned(inputs.causal);
        self.dcp_local_seq_lens = owned(inputs.dcp_local_seq_lens);
        self.encoder_seq_lens = owned(inputs.encoder_seq_lens);
        self.logits_indices_padded = owned(inputs.logits_indices_padded);
        self.rswa_prefix_lens = owned(inputs.rswa_prefix_lens);
        let extras = inputs.extras.iter();
        self.extras = extras
            .map(|(name, data)| ((*name).to_owned(), data.to_vec()))
            .collect();
        self.num_blocks = context.num_blocks;
        self.grant = context.grant;
        self.promise = context.promise.cloned();
        true
    }

    /// The block table: `s32 [R, W]`, 0 where nothing was kept.
    ///
    /// # Errors
    /// If the record contradicts itself, or the table would be larger than is rebuilt.
    pub fn table(&self) -> Result<Vec<i32>, String> {
        let (rows, width) = (self.columns.len(), self.block_table_width as usize);
        let entries = rows as u64 * width as u64;
        if entries > MAX_TABLE {
            return Err(format!(
                "its block table has {rows} rows of {width} columns, more than {MAX_TABLE} entries"
            ));
        }
        let mut table = vec![0; entries as usize];
        let mut rest = self.blocks.as_slice();
        for (row, columns) in self.columns.iter().enumerate() {
            let columns = *columns as usize;
            let (kept, after) = rest
                .split_at_checked(columns)
                .filter(|_| columns <= width)
                .ok_or_else(|| {
                    format!("row {row} of its block table claims {columns} columns of {width}")
                })?;
            table[row * width..row * width + columns].copy_from_slice(kept);
            rest = after;
        }
        Ok(table)
    }

    /// What metadata for the step is verified against.
    ///
    /// # Errors
    /// As [`StepRecord::table`].
    pub fn with_context<R>(
        &self,
        config: &BuilderConfig,
        common: &CommonAttentionMetadata,
        look: impl FnOnce(&VerifyContext<'_>) -> R,
    ) -> Result<R, String> {
        let table = self.table()?;
        let extras: Vec<(&str, &[i32])> = self
            .extras
            .iter()
            .map(|(name, data)| (name.as_str(), data.as_slice()))
            .collect();
        let inputs = StepInputs {
            query_start_loc: &self.query_start_loc,
            seq_lens: &self.seq_lens,
            block_table: BlockTable {
                data: &table,
                width: self.block_table_width as usize,
            },
            slot_mapping: &self.slot_mapping,
            positions: &self.positions,
            causal: self.causal.as_deref(),
            dcp_local_seq_lens: self.dcp_local_seq_lens.as_deref(),
            encoder_seq_lens: self.encoder_seq_lens.as_deref(),
            logits_indices_padded: self.logits_indices_padded.as_deref(),
            rswa_prefix_lens: self.rswa_prefix_lens.as_deref(),
            extras: &extras,
        };
        Ok(look(&VerifyContext {
            config,
            common,
            inputs: &inputs,
            promise: self.promise.as_ref(),
            grant: self.grant,
            num_blocks: self.num_blocks,
        }))
    }
}

fn copy<T: Copy>(into: &mut Vec<T>, from: &[T]) {
    into.clear();
    into.extend_from_slice(from);
}

/// Columns of `row` that some length of the step reaches.
fn columns(context: &VerifyContext<'_>, row: usize) -> u32 {
    let spec = &context.config.kv_cache_spec;
    let width = u32::try_from(context.inputs.block_table.width).unwrap_or(u32::MAX);
    if spec.kind == KvCacheSpecKind::Mamba || spec.block_size == 0 {
        return width;
    }
    let at = |lens: &[i32]| lens.get(row).copied().unwrap_or(0).max(0) as u32;
    let longest = at(context.inputs.seq_lens)
        .max(at(&context.common.seq_lens_cpu_upper_bound))
        .max(context.inputs.encoder_seq_lens.map_or(0, at));
    longest.div_ceil(spec.block_size).min(width)
}
