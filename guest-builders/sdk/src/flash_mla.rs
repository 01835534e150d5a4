//! The part of the MLA backends' metadata that is the field's and not a policy: which rows decode and which prefill, and the
//! chunks in which a prefill's context is decompressed. After vLLM 0.33 `MLACommonMetadataBuilder`.
//!
//! It must never know how keys of a decode are split among workers; that is a builder's own business.

use std::marker::PhantomData;

use timetable_types::{
    BuildError, BuilderConfig, BuilderInfo, CaptureShape, Causal, CommonAttentionMetadata,
    CudagraphSupport, DcpLocal, DcpSource, Dtype, ErrorKind, HostInput, Input, LaunchPromise,
    RowRange, Tensor, TensorSlice,
    batch::{
        BatchRows, ContextWorkspace, DecodeRule, chunked_prefill_workspace_size,
        dcp_local_seq_len_upper_bound, reorder_batch_threshold, split_decodes_and_prefills,
    },
    flash_mla::{DecodeSchedule, Metadata, MlaDecode, MlaPrefill},
};

use crate::{Builder, decline, option};

/// Entry sizes that the family's kernels exist for: latent rank and rotary part together.
const HEAD_DIMS: [u32; 3] = [320, 512, 576];
/// The operator's option for the workspace's rows.
const WORKSPACE_OPTION: &str = "chunked_prefill_workspace_size";

/// What the backends of the family differ in.
#[derive(Clone, Copy, Debug)]
pub struct Backend {
    /// The field's name: "FLASHMLA".
    pub name: &'static str,
    /// Queries of at most so many tokens are decodes, before speculation is asked.
    pub base_threshold: u32,
    /// May decodes of one step have different query lengths?
    pub varlen: bool,
    /// May a decode have several query tokens under decode context parallelism, where the interleave is 1?
    pub dcp_with_varlen: bool,
    /// Can a drafter's next step go on with a step's metadata? Never under decode context parallelism.
    pub supports_draft_decode_metadata_update: bool,
}

/// The decodes of a step, as a builder's schedule sees them.
#[derive(Clone, Debug)]
pub struct Decodes<'c> {
    /// Their query starts: s32 [rows + 1].
    pub query_start_loc: &'c [i32],
    /// Bounds of their lengths: `s32 [rows]`, global; empty where the host does not know them.
    pub seq_lens: &'c [i32],
    /// Tokens, padding included where nothing prefills.
    pub num_tokens: u32,
    /// The longest query.
    pub max_query_len: u32,
    /// At least the longest keys on this rank.
    pub max_seq_len: u32,
    /// Their lengths on this rank, by reference.
    pub seq_lens_tensor: Tensor,
    /// Their query starts, by reference.
    pub query_start_loc_tensor: Tensor,
}

/// What a builder decides for the decodes.
#[derive(Clone, Debug)]
pub struct Choice {
    /// How their keys are divided.
    pub schedule: DecodeSchedule,
    /// The most parts of one request; 0 leaves it to the kernel.
    pub max_num_splits: u32,
    /// Does the kernel read query starts?
    pub with_query_start_loc: bool,
}

impl Choice {
    /// The kernel decides when it runs.
    pub const fn lazy() -> Self {
        Self {
            schedule: DecodeSchedule::Lazy,
            max_num_splits: 0,
            with_query_start_loc: false,
        }
    }
}

/// What the record needs to know of the configuration.
#[derive(Clone, Debug)]
pub struct Record {
    config: BuilderConfig,
    backend: Backend,
    threshold: u32,
    workspace: ContextWorkspace,
}

impl Record {
    /// The record's constants.
    ///
    /// # Errors
    /// If a size is out of range, or the head size is one that the backends do not have.
    pub fn new(config: BuilderConfig, backend: Backend) -> Result<Self, BuildError> {
        let (spec, parallel) = (&config.kv_cache_spec, &config.parallel);
        for (name, value, most) in [
            ("kv_cache_spec.block_size", spec.block_size, 1 << 16),
            ("attention.num_heads", config.attention.num_heads, 1 << 16),
            ("parallel.dcp_world_size", parallel.dcp_world_size, 1 << 10),
            (
                "parallel.cp_kv_cache_interleave_size",
                parallel.cp_kv_cache_interleave_size,
                1 << 16,
            ),
        ] {
            if value == 0 || value > most {
                return Err(decline(
                    ErrorKind::InvalidValue,
                    format!("{name} is {value}; it must be from 1 to {most}"),
                ));
            }
        }
        if !HEAD_DIMS.contains(&spec.head_size) {
            return Err(decline(
                ErrorKind::NotImplemented,
                format!(
                    "Head dimension {} is not supported by MLA. (kv_cache_spec.head_size must be 320, 512 or 576)",
                    spec.head_size
                ),
            ));
        }
        let default = chunked_prefill_workspace_size(&config).max(1);
        let rows = option(&config, WORKSPACE_OPTION, default, 1..=1 << 24)?;
        let Some(workspace) = ContextWorkspace::new(&config, rows) else {
            return Err(decline(
                ErrorKind::InvalidValue,
                format!(
                    "a workspace of whole blocks of {} tokens on {} ranks with an interleave of {} has more than 2^30 rows: \
                     choose smaller ones",
                    spec.block_size, parallel.dcp_world_size, parallel.cp_kv_cache_interleave_size
                ),
            ));
        };
        let varlen_ranks = backend.dcp_with_varlen && parallel.cp_kv_cache_interleave_size == 1;
        Ok(Self {
            threshold: reorder_batch_threshold(&config, backend.base_threshold, true, varlen_ranks),
            workspace,
            config,
            backend,
        })
    }

    /// The configuration that the builder was made with.
    pub const fn config(&self) -> &BuilderConfig {
        &self.config
    }

    /// Queries of at most so many tokens are decodes.
    pub const fn threshold(&self) -> u32 {
        self.threshold
    }

    const fn is_sharded(&self) -> bool {
        self.config.parallel.dcp_world_size > 1
    }

    /// What a builder of the backend called `name` says of itself.
    pub fn info(&self, name: &str) -> BuilderInfo {
        let mut needs = vec![HostInput::QueryStartLocCpu, HostInput::SeqLensCpuUpperBound];
        if self.config.parallel.prefill_context_parallel {
            needs.push(HostInput::IsPrefilling);
        }
        let workspace = self.workspace.scratch();
        let elements = workspace
            .shape
            .iter()
            .fold(1, |elements: u64, &size| elements * u64::from(size));
        BuilderInfo {
            name: name.to_owned(),
            cudagraph_support: CudagraphSupport::UniformBatch,
            reorder_batch_threshold: Some(self.threshold),
            varlen_cudagraph_max_query_len: None,
            supports_update_block_table: false,
            supports_draft_decode_metadata_update: self
                .backend
                .supports_draft_decode_metadata_update
                && !self.is_sharded(),
            needs,
            max_scratch_bytes: elements * element_bytes(workspace.dtype),
        }
    }

    /// A promise for graphs, which hold decodes only: no workspace, at most `max_num_splits` parts of a request.
    pub fn launch_promise(&self, shape: &CaptureShape, max_num_splits: u32) -> LaunchPromise {
        LaunchPromise {
            max_num_splits,
            max_work_items: 0,
            scratch_bytes: 0,
            max_query_len: shape.max_query_len,
            uniform_query_len: shape.uniform_query_len,
        }
    }

    /// The record of this step; `choose` decides for its decodes, if it has any.
    ///
    /// # Errors
    /// If the batch has no rows, is not causal, comes without the host's vectors, or has a context that no workspace takes.
    pub fn build(
        &self,
        common: &CommonAttentionMetadata,
        choose: impl FnOnce(&Decodes<'_>) -> Choice,
    ) -> Result<Metadata, BuildError> {
        if common.causal != Causal::All(true) {
            return Err(decline(
                ErrorKind::NotImplemented,
                format!(
                    "Non-causal multi-token MLA requires an explicitly supported attention group. ({} has causal groups only)",
                    self.backend.name
                ),
            ));
        }
        let rows = common.num_reqs as usize;
        if common.query_start_loc_cpu.len() != rows + 1 {
            return Err(missing(
                "query_start_loc_cpu",
                common.query_start_loc_cpu.len(),
                rows + 1,
            ));
        }
        let rule = DecodeRule {
            decode_threshold: self.threshold,
            require_uniform: !self.backend.varlen,
            treat_short_extends_as_decodes: !self.config.parallel.prefill_context_parallel,
        };
        let split = split_decodes_and_prefills(&BatchRows::from(common), rule)
            .map_err(|error| decline(ErrorKind::InvalidValue, error.to_string()))?;
        let sharded_decodes = self.is_sharded() && split.num_decodes > 0;
        let max_seq_len = match sharded_decodes {
            true => dcp_local_seq_len_upper_bound(
                common.max_seq_len,
                self.config.parallel.dcp_world_size,
                self.config.parallel.cp_kv_cache_interleave_size,
            ),
            false => common.max_seq_len,
        };
        let decodes = split.num_decodes as usize;
        Ok(Metadata {
            num_reqs: common.num_reqs,
            max_query_len: common.max_query_len,
            max_seq_len,
            num_actual_tokens: common.num_actual_tokens,
            query_start_loc: Tensor::Input(Input::QueryStartLoc),
            slot_mapping: Tensor::Input(Input::SlotMapping),
            num_decodes: split.num_decodes,
            num_decode_tokens: split.num_decode_tokens,
            num_prefills: split.num_prefills,
            causal: true,
            head_dim: self.config.kv_cache_spec.head_size,
            prefill: match split.num_prefills {
                0 => None,
                _ => Some(self.prefill(common, decodes)?),
            },
            decode: (decodes > 0).then(|| {
                self.decode(
                    common,
                    decodes,
                    split.num_decode_tokens,
                    max_seq_len,
                    choose,
                )
            }),
        })
    }

    /// As `build`, for a graph.
    ///
    /// # Errors
    /// As `build`; if the batch holds anything but decodes.
    pub fn build_for_cudagraph_capture(
        &self,
        common: &CommonAttentionMetadata,
        choose: impl FnOnce(&Decodes<'_>) -> Choice,
    ) -> Result<Metadata, BuildError> {
        let most = common.num_actual_tokens.saturating_mul(self.threshold);
        if common.num_reqs > most || common.max_query_len > self.threshold {
            return Err(decline(
                ErrorKind::Assertion,
                format!(
                    "MLA only supports decode-only full CUDAGraph capture. Make sure all cudagraph capture sizes <= max_num_seq. \
                     ({} rows, {} tokens, queries of up to {} where a decode has at most {})",
                    common.num_reqs, common.num_actual_tokens, common.max_query_len, self.threshold
                ),
            ));
        }
        self.build(common, choose)
    }

    fn decode(
        &self,
        common: &CommonAttentionMetadata,
        rows: usize,
        num_tokens: u32,
        max_seq_len: u32,
        choose: impl FnOnce(&Decodes<'_>) -> Choice,
    ) -> MlaDecode {
        let all = common.num_reqs;
        let starts = &common.query_start_loc_cpu[..=rows];
        let end = rows as u32;
        let global = part(Input::SeqLens, 0, end, all);
        let seq_lens = match self.is_sharded() {
            true => Tensor::DcpLocal(DcpLocal {
                source: DcpSource::SeqLens,
                rows: RowRange { start: 0, end },
            }),
            false => global.clone(),
        };
        let decodes = Decodes {
            query_start_loc: starts,
            seq_lens: common.seq_lens_cpu_upper_bound.get(..rows).unwrap_or(&[]),
            num_tokens,
            max_query_len: longest(starts),
            max_seq_len,
            seq_lens_tensor: seq_lens.clone(),
            query_start_loc_tensor: part(Input::QueryStartLoc, 0, end + 1, all + 1),
        };
        let choice = choose(&decodes);
        MlaDecode {
            block_table: part(Input::BlockTable, 0, end, all),
            seq_lens,
            dcp_tot_seq_lens: self.is_sharded().then_some(global),
            query_start_loc: choice
                .with_query_start_loc
                .then_some(decodes.query_start_loc_tensor),
            max_query_len: decodes.max_query_len,
            max_seq_len,
            max_num_splits: choice.max_num_splits,
            schedule: choice.schedule,
        }
    }

    /// Rows from `first` on.
    fn prefill(
        &self,
        common: &CommonAttentionMetadata,
        first: usize,
    ) -> Result<MlaPrefill, BuildError> {
        let all = common.num_reqs;
        let starts = &common.query_start_loc_cpu[first..];
        let query_start_loc: Vec<i32> = starts.iter().map(|start| start - starts[0]).collect();
        let query_lens_cpu: Vec<i32> = query_start_loc
            .windows(2)
            .map(|pair| pair[1] - pair[0])
            .collect();
        let bounds = &common.seq_lens_cpu_upper_bound;
        if bounds.len() != all as usize {
            return Err(missing(
                "seq_lens_cpu_upper_bound",
                bounds.len(),
                all as usize,
            ));
        }
        let context_lens = bounds[first..]
            .iter()
            .zip(&query_lens_cpu)
            .map(|(bound, query)| bound - query)
            .collect();
        let dtype = self.config.attention.model_dtype;
        Ok(MlaPrefill {
            block_table: part(Input::BlockTable, first as u32, all, all),
            query_start_loc: match first {
                0 => Tensor::Input(Input::QueryStartLoc),
                _ => Tensor::RebasedQueryStartLoc(RowRange {
                    start: first as u32,
                    end: all,
                }),
            },
            max_query_len: common.max_query_len,
            chunked_context: self
                .workspace
                .chunked_context(context_lens, &query_start_loc)
                .map_err(|error| decline(ErrorKind::InvalidValue, error.to_string()))?,
            q_data_type: dtype,
            output_dtype: dtype,
            query_lens_cpu,
            use_dense_mha: false,
        })
    }
}

/// Rows [start, end) of the host's `input`, which has `rows`; the whole tensor if those are all.
fn part(source: Input, start: u32, end: u32, rows: u32) -> Tensor {
    match (start, end) == (0, rows) {
        true => Tensor::Input(source),
        false => Tensor::Slice(TensorSlice { source, start, end }),
    }
}

/// Who a [`LazyDecodes`] is.
pub trait Lazy {
    /// The builder's name: "triton-mla".
    const NAME: &'static str;
    /// The backend whose record it makes.
    const BACKEND: Backend;
}

/// A builder that decides nothing: the common record, and the kernel divides the decodes' keys when it runs.
pub struct LazyDecodes<K> {
    record: Record,
    of: PhantomData<K>,
}

impl<K: Lazy> Builder for LazyDecodes<K> {
    type Metadata = Metadata;

    fn create(config: BuilderConfig) -> Result<Self, BuildError> {
        Ok(Self {
            record: Record::new(config, K::BACKEND)?,
            of: PhantomData,
        })
    }

    fn info(&self) -> BuilderInfo {
        self.record.info(K::NAME)
    }

    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise {
        self.record.launch_promise(shape, 1)
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        _fast_build: bool,
    ) -> Result<Metadata, BuildError> {
        self.record.build(common, |_| Choice::lazy())
    }

    fn build_for_cudagraph_capture(
        &mut self,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildError> {
        self.record
            .build_for_cudagraph_capture(common, |_| Choice::lazy())
    }
}

fn longest(starts: &[i32]) -> u32 {
    let lens = starts.iter().zip(starts.iter().skip(1));
    lens.fold(0, |longest, (start, end)| longest.max(end - start)) as u32
}

fn missing(name: &str, len: usize, needed: usize) -> BuildError {
    decline(
        ErrorKind::InvalidValue,
        format!("{name} has {len} entries, needed {needed}: the host must give it"),
    )
}

const fn element_bytes(dtype: Dtype) -> u64 {
    match dtype {
        Dtype::Float32 | Dtype::Int32 => 4,
        Dtype::Float16 | Dtype::Bfloat16 => 2,
        Dtype::Float8E4m3 | Dtype::Float8E5m2 | Dtype::Uint8 => 1,
    }
}
