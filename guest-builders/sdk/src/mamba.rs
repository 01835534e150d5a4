//! The Mamba family's metadata, which leaves a builder nothing to choose: counts, states by reference, chunks of the causal
//! convolution and of the chunked scan. After vLLM 0.33 `BaseMambaAttentionMetadataBuilder`, `Mamba2AttentionMetadataBuilder`,
//! `LinearAttentionMetadataBuilder` and `GDNAttentionMetadataBuilder`.
//!
//! A row's block table names its states: one, or one for each token that a verification may accept. It must never know what
//! a state is, nor a block id.

mod gdn;
mod rows;

use timetable_types::{
    BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata, CudagraphMode,
    CudagraphSupport, ErrorKind, ExtraGather, HostInput, Input, LaunchPromise, MambaCacheMode,
    MambaSpec, MambaType, PaddedTensor, RowRange, StateColumn, StateGather, Tensor, TensorSlice,
    batch::{
        BatchRows, DecodePrefillSplit, DecodeRule, NUM_ACCEPTED_TOKENS,
        NUM_DECODE_DRAFT_TOKENS_CPU, device_extra, host_extra, mamba_compute_chunk_metadata,
        reorder_batch_threshold, split_decodes_and_prefills, split_stateful,
    },
    mamba::{BaseMetadata, LinearMetadata, Mamba2Metadata, Metadata},
};

use crate::decline;
use rows::Rows;

/// The block that padding points to: the field's NULL_BLOCK_ID.
const NULL_BLOCK_ID: i32 = 0;

/// What is known of the tokens that each row's last verification accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Accepted {
    /// Nothing was verified: one of one.
    One,
    /// The model state's own device field, which has the step's rows or more.
    Extra { has_more: bool },
    /// A graph is captured: as if every token had been.
    All,
}

/// Everything of the record.
#[derive(Clone, Debug)]
pub struct Record {
    config: BuilderConfig,
    mamba: MambaSpec,
    /// States of a row: one, and one for each draft token.
    states: u32,
    decode_threshold: u32,
    /// Most rows (and with GDN tokens) of a captured graph.
    max_graph_size: u32,
    full_graphs: bool,
}

impl Record {
    /// The record's constants.
    ///
    /// # Errors
    /// If the group keeps no states, if a size that the record divides by is 0, or if the type takes no drafts and there are.
    pub fn new(config: BuilderConfig) -> Result<Self, BuildError> {
        let invalid = |message: String| decline(ErrorKind::InvalidValue, message);
        let Some(mamba) = config.kv_cache_spec.mamba.clone() else {
            return Err(invalid(
                "kv_cache_spec.mamba is missing: the group keeps no states; build it with its own family's builder"
                    .to_owned(),
            ));
        };
        let has_chunks = matches!(mamba.mamba_type, MambaType::Mamba2 | MambaType::Gdn);
        let drafts = config.scheduler.num_speculative_tokens;
        for (name, value, least) in [
            (
                "kv_cache_spec.block_size",
                config.kv_cache_spec.block_size,
                1,
            ),
            (
                "kv_cache_spec.mamba.chunk_size",
                mamba.chunk_size,
                u32::from(has_chunks),
            ),
            ("scheduler.num_speculative_tokens", drafts, 0),
        ] {
            if !(least..=1 << 30).contains(&value) {
                return Err(invalid(format!(
                    "{name} is {value}; it must be from {least} to 2^30"
                )));
            }
        }
        if drafts > 0 && matches!(mamba.mamba_type, MambaType::Mamba1 | MambaType::Linear) {
            return Err(decline(
                ErrorKind::NotImplemented,
                format!(
                    "{drafts} speculative tokens: {:?} layers keep no state for each draft; serve the model without speculation",
                    mamba.mamba_type
                ),
            ));
        }
        let states = 1 + drafts;
        let most = match mamba.mamba_type {
            MambaType::Gdn => config.scheduler.max_num_seqs.saturating_mul(states),
            _ => config.scheduler.max_num_seqs,
        };
        let takes_drafts = mamba.mamba_type != MambaType::Linear;
        Ok(Self {
            states,
            decode_threshold: reorder_batch_threshold(&config, 1, takes_drafts, false),
            max_graph_size: most.min(config.cudagraph.max_capture_size),
            full_graphs: matches!(
                config.cudagraph.mode,
                CudagraphMode::Full
                    | CudagraphMode::FullDecodeOnly
                    | CudagraphMode::FullAndPiecewise
            ),
            mamba,
            config,
        })
    }

    /// The configuration that the builder was made with.
    pub const fn config(&self) -> &BuilderConfig {
        &self.config
    }

    /// What a builder of the family called `name` says of itself.
    pub fn info(&self, name: &str) -> BuilderInfo {
        let (is_linear, is_gdn) = (
            self.mamba.mamba_type == MambaType::Linear,
            self.mamba.mamba_type == MambaType::Gdn,
        );
        let mut needs = vec![
            HostInput::QueryStartLocCpu,
            HostInput::SeqLensCpuUpperBound,
            HostInput::IsPrefilling,
        ];
        if self.states > 1 {
            needs.push(HostInput::Extras);
        }
        BuilderInfo {
            name: name.to_owned(),
            cudagraph_support: if is_linear {
                CudagraphSupport::UniformSingleTokenDecode
            } else {
                CudagraphSupport::UniformBatch
            },
            reorder_batch_threshold: Some(self.decode_threshold),
            varlen_cudagraph_max_query_len: (self.mamba.mamba_type == MambaType::Mamba2)
                .then_some(self.states),
            supports_update_block_table: !is_linear && !is_gdn && self.states == 1,
            supports_draft_decode_metadata_update: false,
            needs,
            max_scratch_bytes: 0,
        }
    }

    /// What a graph captured with `shape` may rely on: nothing is split, and there is no scratch.
    pub const fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        LaunchPromise {
            max_num_splits: 1,
            max_work_items: 0,
            scratch_bytes: 0,
            max_query_len: shape.max_query_len,
            uniform_query_len: shape.uniform_query_len,
        }
    }

    /// The record of this step.
    ///
    /// # Errors
    /// If the batch has no rows, or the host's vectors do not fit them.
    pub fn build(&self, common: &CommonAttentionMetadata) -> Result<Metadata, BuildError> {
        let drafts = host_extra(common, NUM_DECODE_DRAFT_TOKENS_CPU).unwrap_or_default();
        let given = device_extra(common, NUM_ACCEPTED_TOKENS);
        let accepted = match given {
            Some(rows) if self.states > 1 && rows >= common.num_reqs => Accepted::Extra {
                has_more: rows > common.num_reqs,
            },
            _ => Accepted::One,
        };
        self.build_with(common, drafts, accepted)
    }

    /// The record that a graph is captured with: decodes that verify all their drafts.
    ///
    /// # Errors
    /// As for `build`; if the batch is no such one, or larger than a graph may be.
    pub fn build_for_cudagraph_capture(
        &self,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildError> {
        let (rows, tokens, most) = (
            common.num_reqs,
            common.num_actual_tokens,
            self.max_graph_size,
        );
        let is_too_large = match self.mamba.mamba_type {
            MambaType::Linear => return self.build(common),
            MambaType::Gdn => (rows > most || tokens > most).then(|| {
                format!(
                    "GDN only supports decode-only full CUDAGraph capture. Make sure batch size ({rows}) <= cudagraph \
                     capture sizes ({most}), and number of tokens ({tokens}) <= cudagraph capture sizes ({most})."
                )
            }),
            _ if common.max_query_len > self.states || rows > most => Some(
                "Mamba only supports decode-only full CUDAGraph capture. Make sure all cudagraph capture sizes <= \
                 max_num_seq."
                    .to_owned(),
            ),
            _ => (common.max_query_len != self.states).then(|| {
                format!(
                    "a graph is captured with max_query_len {}; it must be {}: one token and the drafts",
                    common.max_query_len, self.states
                )
            }),
        };
        if let Some(message) = is_too_large {
            return Err(decline(ErrorKind::Assertion, message));
        }
        let all: Vec<i32> = match (self.mamba.mamba_type, self.states > 1) {
            (MambaType::Gdn, true) => rows::lens(common).map(|len| len - 1).collect(),
            _ => Vec::new(),
        };
        let accepted = match self.states > 1 {
            true => Accepted::All,
            false => Accepted::One,
        };
        self.build_with(common, &all, accepted)
    }

    /// `metadata` for the block table that `common` describes: references stay what they are.
    pub fn update_block_table(
        &self,
        metadata: Metadata,
        _common: &CommonAttentionMetadata,
    ) -> Metadata {
        metadata
    }

    fn build_with(
        &self,
        common: &CommonAttentionMetadata,
        drafts: &[i32],
        accepted: Accepted,
    ) -> Result<Metadata, BuildError> {
        let rows = common.num_reqs as usize;
        for (name, len, wanted) in [
            (
                "query_start_loc_cpu",
                common.query_start_loc_cpu.len(),
                rows + 1,
            ),
            (
                "seq_lens_cpu_upper_bound",
                common.seq_lens_cpu_upper_bound.len(),
                rows,
            ),
        ] {
            if len != wanted {
                return Err(decline(
                    ErrorKind::InvalidValue,
                    format!("{name} has {len} entries for {rows} requests; it must have {wanted}"),
                ));
            }
        }
        Ok(match self.mamba.mamba_type {
            MambaType::Mamba1 => Metadata::Mamba1(self.base(common, drafts, accepted)?.0),
            MambaType::ShortConv => Metadata::ShortConv(self.base(common, drafts, accepted)?.0),
            MambaType::Mamba2 => {
                let (base, prefills) = self.base(common, drafts, accepted)?;
                Metadata::Mamba2(self.mamba2(common, base, &prefills))
            }
            MambaType::Gdn => Metadata::Gdn(self.gdn(common, drafts, accepted)?),
            MambaType::Linear => Metadata::Linear(self.linear(common)?),
        })
    }

    /// The common part, and the rows that prefill.
    fn base<'a>(
        &self,
        common: &'a CommonAttentionMetadata,
        drafts: &[i32],
        accepted: Accepted,
    ) -> Result<(BaseMetadata, Rows<'a>), BuildError> {
        // Without accepted tokens no row is a verification, whatever its length.
        let threshold = match accepted {
            Accepted::One => 1,
            Accepted::Extra { .. } | Accepted::All => self.decode_threshold,
        };
        let split = split_stateful(&BatchRows::from(common), drafts, threshold)
            .map_err(|error| decline(ErrorKind::InvalidValue, error.to_string()))?;
        let DecodePrefillSplit {
            num_decodes,
            num_prefills,
            ..
        } = split;
        let decodes = Rows::range(common, 0, num_decodes);
        let prefills = Rows::range(common, num_decodes, common.num_reqs);
        let has_prefills = num_prefills > 0;
        let is_verified = self.states > 1 && num_decodes > 0;
        let base = BaseMetadata {
            num_prefills,
            num_prefill_tokens: split.num_prefill_tokens,
            num_decodes,
            num_decode_tokens: split.num_decode_tokens,
            num_reqs: common.num_reqs,
            has_initial_states_p: has_prefills.then(|| prefills.has_context()),
            query_start_loc_p: has_prefills.then_some(Tensor::RebasedQueryStartLoc(RowRange {
                start: num_decodes,
                end: common.num_reqs,
            })),
            state_indices_tensor_p: self.states_of(&prefills, 1),
            state_indices_tensor_d: PaddedTensor {
                tensor: self.states_of(&decodes, self.states_there(common)),
                rows: num_decodes,
                fill: NULL_BLOCK_ID,
            },
            query_start_loc_d: is_verified.then(|| PaddedTensor {
                tensor: first_query_starts(common, num_decodes),
                rows: num_decodes + 1,
                fill: 0,
            }),
            num_accepted_tokens: match (is_verified, accepted) {
                (true, _) => Some(self.accepted_tokens(&decodes, accepted, num_decodes)),
                // Nobody reads it; the field hands it on.
                (false, Accepted::Extra { has_more: false }) => Some(PaddedTensor {
                    tensor: Tensor::Extra(NUM_ACCEPTED_TOKENS.to_owned()),
                    rows: common.num_reqs,
                    fill: 1,
                }),
                _ => None,
            },
            seq_lens: Tensor::Input(Input::SeqLens),
            conv: has_prefills.then(|| prefills.conv()),
        };
        Ok((base, prefills))
    }

    fn mamba2(
        &self,
        common: &CommonAttentionMetadata,
        base: BaseMetadata,
        prefills: &Rows<'_>,
    ) -> Mamba2Metadata {
        let mut metadata = Mamba2Metadata {
            prep_initial_states: false,
            chunk_size: self.mamba.chunk_size,
            seq_idx_p: Vec::new(),
            cu_chunk_seqlen_p: Vec::new(),
            last_chunk_indices_p: Vec::new(),
            replayssm: None,
            base,
        };
        if metadata.base.num_prefills > 0 {
            let first = metadata.base.num_decodes as usize;
            let computed: Vec<i32> = common.seq_lens_cpu_upper_bound[first..]
                .iter()
                .zip(prefills.lens())
                .map(|(len, query)| len - query)
                .collect();
            let chunks = mamba_compute_chunk_metadata(
                self.mamba.chunk_size as i32,
                &computed,
                &prefills.query_starts(),
                &[],
            );
            metadata.prep_initial_states = computed.iter().any(|&computed| computed > 0);
            metadata.seq_idx_p = chunks.seq_idx;
            metadata.cu_chunk_seqlen_p = chunks.cu_chunk_seqlen;
            metadata.last_chunk_indices_p = chunks.last_chunk_indices;
        }
        metadata
    }

    fn linear(&self, common: &CommonAttentionMetadata) -> Result<LinearMetadata, BuildError> {
        let split = split_decodes_and_prefills(&BatchRows::from(common), DecodeRule::default())
            .map_err(|error| decline(ErrorKind::InvalidValue, error.to_string()))?;
        Ok(LinearMetadata {
            num_prefills: split.num_prefills,
            num_prefill_tokens: split.num_prefill_tokens,
            num_decodes: split.num_decodes,
            num_decode_tokens: split.num_decode_tokens,
            query_start_loc: Tensor::Input(Input::QueryStartLoc),
            seq_lens: Tensor::Input(Input::SeqLens),
            // The first column, whatever the cache mode.
            state_indices_tensor: Tensor::StateIndices(StateGather {
                rows: (0..common.num_reqs).collect(),
                column: StateColumn::First,
                width: 1,
            }),
        })
    }

    /// States of a decode; no more than the table has columns.
    fn states_there(&self, common: &CommonAttentionMetadata) -> u32 {
        match self.mamba.cache_mode {
            MambaCacheMode::None => self.states.min(common.block_table_width.max(1)),
            MambaCacheMode::Align => self.states,
        }
    }

    fn states_of(&self, rows: &Rows<'_>, width: u32) -> Tensor {
        Tensor::StateIndices(StateGather {
            rows: rows.list(),
            column: match self.mamba.cache_mode {
                MambaCacheMode::None => StateColumn::First,
                MambaCacheMode::Align => StateColumn::LastToken,
            },
            width,
        })
    }

    /// The tokens that were accepted of each of `rows`, in a buffer of `padded` rows.
    fn accepted_tokens(&self, rows: &Rows<'_>, accepted: Accepted, padded: u32) -> PaddedTensor {
        let name = || NUM_ACCEPTED_TOKENS.to_owned();
        PaddedTensor {
            tensor: match accepted {
                Accepted::One => Tensor::Values(vec![1; rows.len()]),
                Accepted::All => Tensor::Values(rows.lens().collect()),
                Accepted::Extra { has_more: false } if rows.is_whole() => Tensor::Extra(name()),
                Accepted::Extra { .. } => Tensor::ExtraRows(ExtraGather {
                    name: name(),
                    rows: rows.list(),
                }),
            },
            rows: padded,
            fill: 1,
        }
    }
}

/// The query starts of the first `rows` rows, which stand where they are.
fn first_query_starts(common: &CommonAttentionMetadata, rows: u32) -> Tensor {
    if rows == common.num_reqs {
        Tensor::Input(Input::QueryStartLoc)
    } else {
        Tensor::Slice(TensorSlice {
            source: Input::QueryStartLoc,
            start: 0,
            end: rows + 1,
        })
    }
}
