//! Dispatch in the second-generation runner: the first captured graph that is compatible. It must never know a
//! captured graph, only what it is found by.
//!
//! Source: vLLM 0.33 `vllm/v1/worker/gpu/cudagraph_utils.py`, recorded in `tests/vectors/cudagraph_manager_v2.json`.

use timetable_types::CudagraphMode;

use super::RuntimeMode;
use super::modes::GraphModes;
use crate::batch::{UbatchConfig, check_ubatch_thresholds};

/// A graph that is captured, or the shape in which a batch runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchExecutionDescriptor {
    /// How it runs.
    pub cg_mode: RuntimeMode,
    /// Tokens, padded.
    pub num_tokens: u32,
    /// Rows, padded; `None` where a graph does not depend on them.
    pub num_reqs: Option<u32>,
    /// Query length of every row; `None`: any mix.
    pub uniform_token_count: Option<u32>,
    /// The longest query that a graph of varying lengths allows; `None`: any.
    pub max_query_len: Option<u32>,
    /// LoRA adapters.
    pub num_active_loras: u32,
    /// Micro-batches.
    pub num_ubatches: u32,
}

/// A batch that looks for a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchQuery {
    /// Rows.
    pub num_reqs: u32,
    /// Tokens.
    pub num_tokens: u32,
    /// See [`uniform_token_count`].
    pub uniform_token_count: Option<u32>,
    /// LoRA adapters.
    pub num_active_loras: u32,
    /// The longest query; `None` if any row prefills.
    pub max_query_len: Option<u32>,
    /// Micro-batches.
    pub num_ubatches: u32,
}

/// What is captured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManagerConfig<'a> {
    /// The resolved mode.
    pub mode: CudagraphMode,
    /// Decode query lengths: 1 + speculative tokens; several under dynamic speculation.
    pub decode_query_lens: &'a [u32],
    /// Do decode graphs take any mix of 1 to that many tokens per row (adaptive verification)?
    pub varlen_decode: bool,
    /// Rows that may run at once.
    pub max_num_reqs: u32,
    /// Sizes to capture.
    pub capture_sizes: &'a [u32],
    /// The largest size allowed.
    pub max_capture_size: u32,
    /// LoRA adapter counts that are captured, rising; `[0]` without LoRA.
    pub lora_cases: &'a [u32],
    /// Dual batch overlap: large decode graphs get a twin of two micro-batches.
    pub ubatching: Option<UbatchConfig>,
}

/// The captured graphs. (vLLM 0.33 `CudaGraphManager`.)
#[derive(Clone, Debug)]
pub struct CudagraphManager {
    lora_cases: Vec<u32>,
    /// Rising in tokens.
    full: Vec<BatchExecutionDescriptor>,
    /// Rising in tokens.
    piecewise: Vec<BatchExecutionDescriptor>,
}

impl CudagraphManager {
    /// The graphs of a mode.
    ///
    /// Where decodes are captured apart, a size s gives the graph of s rounded up to whole decodes (if so many rows may run
    /// and it is not above the maximum), or, for varying lengths, of s tokens in min(s, rows). Mixed batches give a graph of s
    /// tokens: full ones with min(s, rows) rows, piecewise ones of any.
    #[must_use]
    pub fn new(config: &ManagerConfig<'_>) -> Self {
        let mut sizes = config.capture_sizes.to_vec();
        sizes.sort_unstable();
        sizes.dedup();
        let mut made = Self {
            lora_cases: config.lora_cases.to_vec(),
            full: Vec::new(),
            piecewise: Vec::new(),
        };
        let longest = config.decode_query_lens.iter().copied().max().unwrap_or(1);
        for &size in &sizes {
            for &num_active_loras in config.lora_cases {
                let plain = BatchExecutionDescriptor {
                    cg_mode: RuntimeMode::Full,
                    num_tokens: size,
                    num_reqs: Some(size.min(config.max_num_reqs)),
                    uniform_token_count: None,
                    max_query_len: None,
                    num_active_loras,
                    num_ubatches: 1,
                };
                if config.mode.separate_routine() {
                    if config.varlen_decode {
                        if size <= config.max_num_reqs.saturating_mul(longest) {
                            made.add(BatchExecutionDescriptor {
                                max_query_len: Some(longest),
                                ..plain
                            });
                        }
                    } else {
                        for &query_len in config.decode_query_lens {
                            made.add_uniform(config, size, query_len, plain);
                        }
                    }
                }
                match config.mode.mixed_mode() {
                    RuntimeMode::None => {}
                    RuntimeMode::Full => made.add(plain),
                    RuntimeMode::Piecewise => {
                        made.add(BatchExecutionDescriptor {
                            cg_mode: RuntimeMode::Piecewise,
                            num_reqs: None,
                            ..plain
                        });
                    }
                }
            }
        }
        made.full.sort_by_key(|graph| graph.num_tokens);
        made
    }

    fn add_uniform(
        &mut self,
        config: &ManagerConfig<'_>,
        size: u32,
        query_len: u32,
        plain: BatchExecutionDescriptor,
    ) {
        let num_tokens = size.next_multiple_of(query_len);
        let num_reqs = num_tokens / query_len;
        if num_reqs > config.max_num_reqs || num_tokens > config.max_capture_size {
            return;
        }
        let graph = BatchExecutionDescriptor {
            num_tokens,
            num_reqs: Some(num_reqs),
            uniform_token_count: Some(query_len),
            ..plain
        };
        self.add(graph);
        if config
            .ubatching
            .is_some_and(|ubatching| check_ubatch_thresholds(&ubatching, num_tokens, true))
        {
            self.add(BatchExecutionDescriptor {
                num_ubatches: 2,
                ..graph
            });
        }
    }

    fn add(&mut self, graph: BatchExecutionDescriptor) {
        let list = if graph.cg_mode == RuntimeMode::Full {
            &mut self.full
        } else {
            &mut self.piecewise
        };
        if !list.contains(&graph) {
            list.push(graph);
        }
    }

    /// The graph of a batch: the first compatible one, full before piecewise, smallest first. A batch without one runs eager,
    /// unpadded.
    #[must_use]
    pub fn dispatch(&self, batch: &BatchQuery) -> BatchExecutionDescriptor {
        self.dispatch_among(&self.full, batch)
    }

    /// As [`CudagraphManager::dispatch`], for a batch whose attention is launched in several parts: never a full graph, which
    /// holds one launch for all rows.
    #[must_use]
    pub fn dispatch_in_parts(&self, batch: &BatchQuery) -> BatchExecutionDescriptor {
        self.dispatch_among(&[], batch)
    }

    fn dispatch_among(
        &self,
        full: &[BatchExecutionDescriptor],
        batch: &BatchQuery,
    ) -> BatchExecutionDescriptor {
        // The next captured adapter count; above the largest, the largest that there is.
        let at = self
            .lora_cases
            .partition_point(|&case| case < batch.num_active_loras);
        let num_active_loras = self
            .lora_cases
            .get(at)
            .copied()
            .unwrap_or(batch.num_active_loras);
        let fits = |graph: &&BatchExecutionDescriptor| {
            graph.num_tokens >= batch.num_tokens
                && graph
                    .uniform_token_count
                    .is_none_or(|count| batch.uniform_token_count == Some(count))
                && graph
                    .max_query_len
                    .is_none_or(|max| batch.max_query_len.is_some_and(|len| len <= max))
                && graph.num_reqs.is_none_or(|rows| rows >= batch.num_reqs)
                && graph.num_active_loras == num_active_loras
                && graph.num_ubatches == batch.num_ubatches
        };
        let eager = BatchExecutionDescriptor {
            cg_mode: RuntimeMode::None,
            num_tokens: batch.num_tokens,
            num_reqs: Some(batch.num_reqs),
            uniform_token_count: None,
            max_query_len: None,
            num_active_loras,
            num_ubatches: batch.num_ubatches,
        };
        let from = |list: &[BatchExecutionDescriptor]| {
            list.partition_point(|g| g.num_tokens < batch.num_tokens)
        };
        let full = full[from(full)..].iter().find(fits);
        full.or_else(|| self.piecewise[from(&self.piecewise)..].iter().find(fits))
            .copied()
            .unwrap_or(eager)
    }

    /// What is captured in a mode, the largest first, adapter counts rising.
    #[must_use]
    pub fn capture_order(&self, mode: RuntimeMode) -> Vec<BatchExecutionDescriptor> {
        let mut graphs = match mode {
            RuntimeMode::None => Vec::new(),
            RuntimeMode::Piecewise => self.piecewise.clone(),
            RuntimeMode::Full => self.full.clone(),
        };
        graphs.sort_by_key(|graph| core::cmp::Reverse(graph.num_tokens));
        graphs
    }
}

/// May a batch replay a decode graph: no row prefills, or each that does schedules exactly one new prompt token over existing
/// context. Never under prefill context parallelism.
#[must_use]
pub fn decode_graph_eligible(
    query_lens: &[u32],
    computed: &[u32],
    is_prefilling: &[bool],
    pcp: bool,
) -> bool {
    !pcp && is_prefilling
        .iter()
        .enumerate()
        .all(|(row, &prefills)| !prefills || (query_lens[row] == 1 && computed[row] > 0))
}

/// The query length that every row has, if the batch may replay a decode graph.
#[must_use]
pub fn uniform_token_count(
    eligible: bool,
    num_tokens: u32,
    num_reqs: u32,
    max_query_len: u32,
) -> Option<u32> {
    (eligible && num_tokens == max_query_len * num_reqs).then_some(max_query_len)
}

/// The mode in which all data-parallel ranks run: the weakest, so that all enter the same collectives.
#[must_use]
pub fn agree_across_ranks(modes: impl IntoIterator<Item = RuntimeMode>) -> RuntimeMode {
    modes.into_iter().min().unwrap_or(RuntimeMode::None)
}
