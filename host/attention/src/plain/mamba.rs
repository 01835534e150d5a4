//! The Mamba family, plainly: the split, states by reference, chunks from host lengths.

use timetable_types::{
    BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata, ConvChunks,
    CudagraphSupport, ErrorKind, ExtraGather, Family, HostInput, Input, LaunchPromise,
    MambaCacheMode, MambaSpec, MambaType, Metadata, PaddedTensor, RowRange, StateColumn,
    StateGather, Tensor, TensorSlice,
    batch::{
        BatchRows, CAUSAL_CONV1D_BLOCK_M, DecodePrefillSplit, NUM_ACCEPTED_TOKENS,
        NUM_DECODE_DRAFT_TOKENS_CPU, compute_causal_conv1d_metadata, device_extra, host_extra,
        mamba_compute_chunk_metadata, split_stateful,
    },
    mamba::{self, BaseMetadata, CausalConv1d, GdnMetadata, LinearMetadata, Mamba2Metadata},
};

use super::{invalid, row_vector};
use crate::builder::{BuildFault, MetadataBuilder};

pub(super) struct PlainMamba {
    spec: MambaSpec,
    info: BuilderInfo,
    /// One, and one for each draft token.
    states: u32,
}

/// A step's host vectors, each as long as it must be.
struct Step<'c> {
    common: &'c CommonAttentionMetadata,
    starts: &'c [i32],
    lens: &'c [i32],
    is_capture: bool,
}

impl Step<'_> {
    fn query_len(&self, row: u32) -> i32 {
        self.starts[row as usize + 1] - self.starts[row as usize]
    }

    /// `s32 [n + 1]`: the running sum of the rows' query tokens, from 0.
    fn query_starts(&self, rows: &[u32]) -> Vec<i32> {
        let mut starts = vec![0];
        for &row in rows {
            starts.push(starts[starts.len() - 1] + self.query_len(row));
        }
        starts
    }
}

impl PlainMamba {
    pub(super) fn new(config: BuilderConfig) -> Result<Self, BuildError> {
        let drafts = config.scheduler.num_speculative_tokens;
        let Some(spec) = config.kv_cache_spec.mamba else {
            return Err(invalid(
                "a group of family mamba has no Mamba spec".to_owned(),
            ));
        };
        let (type_, chunk) = (spec.mamba_type, spec.chunk_size);
        if matches!(type_, MambaType::Mamba2 | MambaType::Gdn) && !(1..=1 << 30).contains(&chunk) {
            return Err(invalid(format!(
                "chunk_size {chunk} must be from 1 to 2^30"
            )));
        }
        if drafts > 0 && matches!(type_, MambaType::Mamba1 | MambaType::Linear) {
            return Err(BuildError {
                kind: ErrorKind::NotImplemented,
                message: format!("{type_:?} layers keep no states for {drafts} speculative tokens"),
            });
        }
        let mut needs = vec![
            HostInput::QueryStartLocCpu,
            HostInput::SeqLensCpuUpperBound,
            HostInput::IsPrefilling,
        ];
        if drafts > 0 {
            needs.push(HostInput::Extras);
        }
        Ok(PlainMamba {
            states: 1 + drafts,
            info: BuilderInfo {
                name: "mamba, plain".to_owned(),
                cudagraph_support: match type_ {
                    MambaType::Linear => CudagraphSupport::UniformSingleTokenDecode,
                    _ => CudagraphSupport::UniformBatch,
                },
                reorder_batch_threshold: Some(1 + drafts),
                varlen_cudagraph_max_query_len: None,
                supports_update_block_table: true,
                supports_draft_decode_metadata_update: false,
                needs,
                max_scratch_bytes: 0,
            },
            spec,
        })
    }

    fn step<'c>(
        &self,
        common: &'c CommonAttentionMetadata,
        is_capture: bool,
    ) -> Result<Step<'c>, BuildFault> {
        let rows = common.num_reqs as usize;
        Ok(Step {
            common,
            starts: row_vector("query_start_loc_cpu", &common.query_start_loc_cpu, rows + 1)?,
            lens: row_vector(
                "seq_lens_cpu_upper_bound",
                &common.seq_lens_cpu_upper_bound,
                rows,
            )?,
            is_capture,
        })
    }

    /// Decodes first. What has no state yet prefills, whatever its flag says: only the rows of a capture have none and decode.
    fn split(&self, step: &Step<'_>, threshold: u32) -> DecodePrefillSplit {
        let common = step.common;
        let mut flags = common.is_prefilling.clone();
        flags.resize(step.lens.len(), 0);
        if !step.is_capture {
            for (row, flag) in flags.iter_mut().enumerate() {
                *flag |= u8::from(step.lens[row] <= step.query_len(row as u32));
            }
        }
        let rows = BatchRows {
            is_prefilling: &flags,
            ..BatchRows::from(common)
        };
        let drafts = self.drafts(step);
        // Without rows there is nothing to split.
        split_stateful(&rows, &drafts, threshold).unwrap_or_default()
    }

    /// The draft tokens of each row; none where no row has any.
    fn drafts(&self, step: &Step<'_>) -> Vec<i32> {
        match (self.states > 1, step.is_capture) {
            (false, _) => Vec::new(),
            (true, true) => step.starts.windows(2).map(|w| w[1] - w[0] - 1).collect(),
            (true, false) => host_extra(step.common, NUM_DECODE_DRAFT_TOKENS_CPU)
                .unwrap_or_default()
                .to_vec(),
        }
    }

    fn states_of(&self, rows: Vec<u32>, width: u32) -> Tensor {
        Tensor::StateIndices(StateGather {
            rows,
            column: match self.spec.cache_mode {
                MambaCacheMode::None => StateColumn::First,
                MambaCacheMode::Align => StateColumn::LastToken,
            },
            width,
        })
    }

    /// Are the accepted tokens the step's own?
    fn has_accepted(step: &Step<'_>) -> bool {
        device_extra(step.common, NUM_ACCEPTED_TOKENS) >= Some(step.common.num_reqs)
    }

    fn accepted(step: &Step<'_>, rows: &[u32]) -> PaddedTensor {
        let tensor = if step.is_capture && !Self::has_accepted(step) {
            Tensor::Values(rows.iter().map(|&row| step.query_len(row)).collect())
        } else if Self::has_accepted(step) {
            Tensor::ExtraRows(ExtraGather {
                name: NUM_ACCEPTED_TOKENS.to_owned(),
                rows: rows.to_vec(),
            })
        } else {
            Tensor::Values(vec![1; rows.len()])
        };
        padded(tensor, rows.len(), 1)
    }

    fn base(&self, step: &Step<'_>) -> BaseMetadata {
        let verifies = self.states > 1 && (step.is_capture || Self::has_accepted(step));
        let split = self.split(step, if verifies { self.states } else { 1 });
        let (decodes, rows) = (split.num_decodes, step.common.num_reqs);
        let prefills = RowRange {
            start: decodes,
            end: rows,
        };
        let has_prefills = split.num_prefills > 0;
        let has_states = self.states > 1 && decodes > 0;
        let of_decodes: Vec<u32> = (0..decodes).collect();
        BaseMetadata {
            num_prefills: split.num_prefills,
            num_prefill_tokens: split.num_prefill_tokens,
            num_decodes: decodes,
            num_decode_tokens: split.num_decode_tokens,
            num_reqs: rows,
            has_initial_states_p: has_prefills.then(|| Tensor::HasContext(prefills.clone())),
            query_start_loc_p: has_prefills.then(|| Tensor::RebasedQueryStartLoc(prefills.clone())),
            state_indices_tensor_p: self.states_of((decodes..rows).collect(), 1),
            num_accepted_tokens: has_states.then(|| Self::accepted(step, &of_decodes)),
            query_start_loc_d: has_states.then(|| {
                let starts = Tensor::Slice(TensorSlice {
                    source: Input::QueryStartLoc,
                    start: 0,
                    end: decodes + 1,
                });
                padded(starts, decodes as usize + 1, 0)
            }),
            state_indices_tensor_d: padded(
                self.states_of(of_decodes, self.states),
                decodes as usize,
                0,
            ),
            seq_lens: Tensor::Input(Input::SeqLens),
            conv: has_prefills.then(|| {
                let starts = step.query_starts(&(decodes..rows).collect::<Vec<_>>());
                conv(&starts, Some(prefills))
            }),
        }
    }

    fn mamba2(&self, step: &Step<'_>) -> Mamba2Metadata {
        let base = self.base(step);
        let rows: Vec<u32> = (base.num_decodes..base.num_reqs).collect();
        let computed: Vec<i32> = rows
            .iter()
            .map(|&row| step.lens[row as usize] - step.query_len(row))
            .collect();
        let mut metadata = Mamba2Metadata {
            base,
            prep_initial_states: computed.iter().any(|&computed| computed > 0),
            chunk_size: self.spec.chunk_size,
            seq_idx_p: Vec::new(),
            cu_chunk_seqlen_p: Vec::new(),
            last_chunk_indices_p: Vec::new(),
            replayssm: None,
        };
        if !rows.is_empty() {
            let starts = step.query_starts(&rows);
            let size = self.spec.chunk_size as i32;
            let chunks = mamba_compute_chunk_metadata(size, &computed, &starts, &[]);
            metadata.seq_idx_p = chunks.seq_idx;
            metadata.cu_chunk_seqlen_p = chunks.cu_chunk_seqlen;
            metadata.last_chunk_indices_p = chunks.last_chunk_indices;
        }
        metadata
    }

    fn linear(&self, step: &Step<'_>) -> LinearMetadata {
        let split = self.split(step, 1);
        LinearMetadata {
            num_prefills: split.num_prefills,
            num_prefill_tokens: split.num_prefill_tokens,
            num_decodes: split.num_decodes,
            num_decode_tokens: split.num_decode_tokens,
            query_start_loc: Tensor::Input(Input::QueryStartLoc),
            seq_lens: Tensor::Input(Input::SeqLens),
            state_indices_tensor: Tensor::StateIndices(StateGather {
                rows: (0..step.common.num_reqs).collect(),
                column: StateColumn::First,
                width: 1,
            }),
        }
    }

    /// Verifications apart; of the others, decodes first where there are none.
    fn gdn(&self, step: &Step<'_>) -> GdnMetadata {
        let (common, rows) = (step.common, step.common.num_reqs);
        let drafts = self.drafts(step);
        let is_verified = |row: &u32| drafts.get(*row as usize).is_some_and(|&drafts| drafts >= 0);
        let (verified, others): (Vec<u32>, Vec<u32>) = (0..rows).partition(is_verified);
        let has_verified = !verified.is_empty();
        let split = match has_verified {
            false => self.split(step, 1),
            true => DecodePrefillSplit::default(),
        };
        let all_starts = step.query_starts(&others);
        let prefills = others[split.num_decodes as usize..].to_vec();
        let starts = step.query_starts(&prefills);
        let prefill_tokens = starts[starts.len() - 1];
        let spec_starts = step.query_starts(&verified);
        let spec_tokens = spec_starts[spec_starts.len() - 1];
        let with_tokens = prefills.iter().filter(|&&row| step.query_len(row) > 0);
        let num_prefills = with_tokens.count() as u32;
        let has_others = !has_verified || num_prefills > 0;
        let mut metadata = GdnMetadata {
            num_prefills,
            num_prefill_tokens: prefill_tokens as u32,
            num_decodes: split.num_decodes,
            num_decode_tokens: split.num_decode_tokens,
            num_spec_decodes: verified.len() as u32,
            num_spec_decode_tokens: spec_tokens as u32,
            num_actual_tokens: common.num_actual_tokens,
            has_initial_state: None,
            spec_query_start_loc: has_verified
                .then(|| padded(Tensor::Values(spec_starts), verified.len() + 1, spec_tokens)),
            non_spec_query_start_loc: has_others.then(|| {
                let len = all_starts.len();
                padded(Tensor::Values(all_starts.clone()), len, 0)
            }),
            spec_state_indices_tensor: has_verified.then(|| {
                let states = self.states_of(verified.clone(), self.states);
                padded(states, verified.len(), 0)
            }),
            non_spec_state_indices_tensor: has_others
                .then(|| padded(self.states_of(others.clone(), 1), others.len(), 0)),
            spec_sequence_masks: has_verified
                .then(|| padded(Tensor::RowMask(verified.clone()), rows as usize, 0)),
            spec_token_indx: has_verified.then(|| Tensor::RowTokens(verified.clone())),
            non_spec_token_indx: has_verified.then(|| Tensor::RowTokens(others.clone())),
            num_accepted_tokens: has_verified.then(|| Self::accepted(step, &verified)),
            uniform_spec_sequence_length: None,
            chunk_indices: Vec::new(),
            chunk_offsets: Vec::new(),
            prefill_query_start_loc: None,
            prefill_state_indices: None,
            prefill_has_initial_state: None,
            conv: None,
        };
        if num_prefills > 0 {
            let has_context = |rows: &[u32]| {
                let has = rows
                    .iter()
                    .map(|&row| i32::from(step.lens[row as usize] > step.query_len(row)));
                Some(Tensor::Values(has.collect()))
            };
            metadata.has_initial_state = has_context(&others);
            metadata.prefill_has_initial_state = has_context(&prefills);
            metadata.conv = Some(conv(&all_starts, None));
            metadata.chunk_offsets.push(0);
            for (index, pair) in starts.windows(2).enumerate() {
                let chunks = ((pair[1] - pair[0]) as u32).div_ceil(self.spec.chunk_size) as i32;
                let of_row = (0..chunks).flat_map(|chunk| [index as i32, chunk]);
                metadata.chunk_indices.extend(of_row);
                let done = metadata.chunk_offsets[index] + chunks;
                metadata.chunk_offsets.push(done);
            }
            metadata.prefill_query_start_loc = Some(Tensor::Values(starts));
            metadata.prefill_state_indices = Some(self.states_of(prefills, 1));
        }
        metadata
    }

    fn metadata(&self, step: &Step<'_>) -> Metadata {
        Metadata::Mamba(match self.spec.mamba_type {
            MambaType::Mamba1 => mamba::Metadata::Mamba1(self.base(step)),
            MambaType::ShortConv => mamba::Metadata::ShortConv(self.base(step)),
            MambaType::Mamba2 => mamba::Metadata::Mamba2(self.mamba2(step)),
            MambaType::Gdn => mamba::Metadata::Gdn(self.gdn(step)),
            MambaType::Linear => mamba::Metadata::Linear(self.linear(step)),
        })
    }
}

fn padded(tensor: Tensor, rows: usize, fill: i32) -> PaddedTensor {
    PaddedTensor {
        tensor,
        rows: rows as u32,
        fill,
    }
}

/// The convolution over rows with these query starts: by reference, if they are `rows`.
fn conv(starts: &[i32], rows: Option<RowRange>) -> CausalConv1d {
    let plan = compute_causal_conv1d_metadata(starts);
    let (batch_ptr, token_chunk_offset_ptr) = match rows {
        Some(rows) => {
            let chunks = ConvChunks {
                rows,
                block_m: CAUSAL_CONV1D_BLOCK_M as u32,
                length: plan.padded_len,
            };
            (
                Tensor::ConvChunkRows(chunks.clone()),
                Tensor::ConvChunkOffsets(chunks),
            )
        }
        None => (
            Tensor::Values(plan.prefill_of_program),
            Tensor::Values(plan.block_of_program),
        ),
    };
    CausalConv1d {
        block_m: CAUSAL_CONV1D_BLOCK_M as u32,
        nums: plan.nums,
        total: plan.total,
        batch_ptr,
        token_chunk_offset_ptr,
    }
}

impl MetadataBuilder for PlainMamba {
    fn family(&self) -> Family {
        Family::Mamba
    }

    fn info(&self) -> &BuilderInfo {
        &self.info
    }

    fn launch_promise(&mut self, shape: &CaptureShape) -> Result<LaunchPromise, BuildFault> {
        Ok(LaunchPromise {
            max_num_splits: 1,
            max_work_items: 0,
            scratch_bytes: 0,
            max_query_len: shape.max_query_len,
            uniform_query_len: shape.uniform_query_len,
        })
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildFault> {
        Ok(self.metadata(&self.step(common, false)?))
    }

    fn build_for_cudagraph_capture(
        &mut self,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        Ok(self.metadata(&self.step(common, true)?))
    }

    fn update_block_table(
        &mut self,
        metadata: &Metadata,
        _common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        // States are references: they resolve to the other group's table.
        Ok(metadata.clone())
    }
}
