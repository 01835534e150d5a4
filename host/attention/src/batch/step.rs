//! One KV cache group's step, owned: the field's CommonAttentionMetadata is the host record plus the tensors.
//! It must never know what a backend makes of it.
//!
//! Source: vLLM 0.33 `CommonAttentionMetadata`, recorded in `tests/vectors/common_attn_metadata_methods.json`.

use timetable_types::{Causal, CommonAttentionMetadata};

use crate::step::{BlockTable, StepInputs};

/// The tensors of a step, owned; [`StepInputs`] borrows them. R rows, T tokens, W columns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepTensors {
    /// `s32 [R + 1]`
    pub query_start_loc: Vec<i32>,
    /// `s32 [R]`
    pub seq_lens: Vec<i32>,
    /// `s32 [R * W]`, row-major.
    pub block_table: Vec<i32>,
    /// W
    pub block_table_width: usize,
    /// `s64 [at least T]`
    pub slot_mapping: Vec<i64>,
    /// `s64 [T]`; empty: not given.
    pub positions: Vec<i64>,
    /// `s32 [R]`, where `causal` is per request.
    pub causal: Option<Vec<i32>>,
    /// `s32 [R]`, under decode context parallelism.
    pub dcp_local_seq_lens: Option<Vec<i32>>,
    /// `s32 [R]`, for cross attention.
    pub encoder_seq_lens: Option<Vec<i32>>,
    /// `s32 [n]`, where fast prefill is armed.
    pub logits_indices_padded: Option<Vec<i32>>,
    /// `s32 [R]`, where the model uses R-SWA.
    pub rswa_prefix_lens: Option<Vec<i32>>,
}

impl StepTensors {
    /// The same, borrowed, without a model state's extras.
    #[must_use]
    pub fn inputs(&self) -> StepInputs<'_> {
        StepInputs {
            query_start_loc: &self.query_start_loc,
            seq_lens: &self.seq_lens,
            block_table: self.table(),
            slot_mapping: &self.slot_mapping,
            positions: &self.positions,
            causal: self.causal.as_deref(),
            dcp_local_seq_lens: self.dcp_local_seq_lens.as_deref(),
            encoder_seq_lens: self.encoder_seq_lens.as_deref(),
            logits_indices_padded: self.logits_indices_padded.as_deref(),
            rswa_prefix_lens: self.rswa_prefix_lens.as_deref(),
            extras: &[],
        }
    }

    /// The block table, borrowed.
    #[must_use]
    pub fn table(&self) -> BlockTable<'_> {
        BlockTable {
            data: &self.block_table,
            width: self.block_table_width,
        }
    }
}

/// What one KV cache group's step is: host record and tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupStep {
    /// The host-side part.
    pub cam: CommonAttentionMetadata,
    /// The tensors.
    pub tensors: StepTensors,
}

impl GroupStep {
    /// A step from its host vectors and tensors, everything else absent. Counts and widths follow from the vectors.
    #[must_use]
    pub fn new(
        tensors: StepTensors,
        seq_lens_cpu_upper_bound: Vec<i32>,
        num_actual_tokens: u32,
        max_query_len: u32,
        max_seq_len: u32,
    ) -> Self {
        let cam = CommonAttentionMetadata {
            num_reqs: tensors.seq_lens.len() as u32,
            num_actual_tokens,
            max_query_len,
            max_seq_len,
            causal: Causal::All(true),
            block_table_width: tensors.block_table_width as u32,
            slot_mapping_len: tensors.slot_mapping.len() as u32,
            query_start_loc_cpu: tensors.query_start_loc.clone(),
            seq_lens_cpu_upper_bound,
            is_prefilling: Vec::new(),
            dcp: None,
            encoder: None,
            fast_prefill: None,
            req_idx: Vec::new(),
            mm_req_doc_ranges: Vec::new(),
            replayssm_decode_base_cpu: Vec::new(),
            extras: Vec::new(),
        };
        Self { cam, tensors }
    }

    /// Rows: the field's `batch_size()`.
    #[must_use]
    pub fn batch_size(&self) -> usize {
        self.tensors.seq_lens.len()
    }

    /// Query length of each row, `s32 [R]`, from the device's query starts.
    #[must_use]
    pub fn naive_query_lens(&self) -> Vec<i32> {
        self.tensors
            .query_start_loc
            .windows(2)
            .map(|w| w[1] - w[0])
            .collect()
    }

    /// Tokens computed before this step, `s32 [R]`: `seq_lens` minus query lengths.
    #[must_use]
    pub fn compute_num_computed_tokens(&self) -> Vec<i32> {
        let starts = self.tensors.query_start_loc.windows(2);
        self.tensors
            .seq_lens
            .iter()
            .zip(starts)
            .map(|(&len, w)| len - (w[1] - w[0]))
            .collect()
    }

    /// The row of each token, `s32 [num_actual_tokens]`; padding tokens belong to row 0.
    #[must_use]
    pub fn token_to_req_indices(&self) -> Vec<i32> {
        let mut rows = vec![0; self.cam.num_actual_tokens as usize];
        for (row, w) in self.tensors.query_start_loc.windows(2).enumerate() {
            let end = (w[1] as usize).min(rows.len());
            let start = (w[0] as usize).min(end);
            rows[start..end].fill(row as i32);
        }
        rows
    }

    /// The first `num_actual_reqs` rows and `num_actual_tokens` tokens: the inverse of padding for full CUDA graphs.
    ///
    /// Per-request vectors are cut to the rows, slots to the tokens; maxima and logits fields stay; positions, multimodal
    /// ranges, request indices and a model state's extras are dropped, as in the field's `unpadded`.
    #[must_use]
    pub fn unpadded(&self, num_actual_tokens: u32, num_actual_reqs: u32) -> GroupStep {
        let rows = num_actual_reqs as usize;
        let tokens = (num_actual_tokens as usize).min(self.tensors.slot_mapping.len());
        let cut = |v: &Option<Vec<i32>>| v.as_ref().map(|v| first(v, rows));
        let tensors = StepTensors {
            query_start_loc: first(&self.tensors.query_start_loc, rows + 1),
            seq_lens: first(&self.tensors.seq_lens, rows),
            block_table: first(
                &self.tensors.block_table,
                rows * self.tensors.block_table_width,
            ),
            block_table_width: self.tensors.block_table_width,
            slot_mapping: self.tensors.slot_mapping[..tokens].to_vec(),
            positions: Vec::new(),
            causal: cut(&self.tensors.causal),
            dcp_local_seq_lens: cut(&self.tensors.dcp_local_seq_lens),
            encoder_seq_lens: cut(&self.tensors.encoder_seq_lens),
            logits_indices_padded: self.tensors.logits_indices_padded.clone(),
            rswa_prefix_lens: cut(&self.tensors.rswa_prefix_lens),
        };
        let from = &self.cam;
        let mut cam = CommonAttentionMetadata {
            num_reqs: num_actual_reqs,
            num_actual_tokens,
            slot_mapping_len: tokens as u32,
            query_start_loc_cpu: first(&from.query_start_loc_cpu, rows + 1),
            seq_lens_cpu_upper_bound: first(&from.seq_lens_cpu_upper_bound, rows),
            is_prefilling: first(&from.is_prefilling, rows),
            req_idx: Vec::new(),
            mm_req_doc_ranges: Vec::new(),
            replayssm_decode_base_cpu: first(&from.replayssm_decode_base_cpu, rows),
            extras: Vec::new(),
            ..from.clone()
        };
        if let Some(dcp) = &mut cam.dcp {
            dcp.dcp_local_seq_lens_cpu_upper_bound.truncate(rows);
        }
        if let Some(encoder) = &mut cam.encoder {
            encoder.encoder_seq_lens_cpu.truncate(rows);
        }
        GroupStep { cam, tensors }
    }
}

/// At most the first `n` elements.
pub(super) fn first<T: Clone>(list: &[T], n: usize) -> Vec<T> {
    list[..n.min(list.len())].to_vec()
}
