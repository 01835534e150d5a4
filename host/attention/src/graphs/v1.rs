//! Dispatch in the first-generation runner: exact keys. It must never know a captured graph, only what it is found by.
//!
//! Source: vLLM 0.33 `vllm/v1/cudagraph_dispatcher.py`, recorded in `tests/vectors/cudagraph_dispatcher_v1.json`.

use std::collections::BTreeSet;

use thiserror::Error;
use timetable_types::CudagraphMode;

use super::RuntimeMode;
use super::modes::GraphModes;

/// What a captured graph is found by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchDescriptor {
    /// Tokens, padded.
    pub num_tokens: u32,
    /// Rows, padded; `None` where a graph does not depend on them.
    pub num_reqs: Option<u32>,
    /// Is it a graph of uniform decodes only?
    pub uniform: bool,
    /// LoRA adapters in the batch; 0 for a graph without.
    pub num_active_loras: u32,
}

/// Why there is no dispatcher, or no graph for a batch.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DispatcherError {
    /// A decode graph of that size would hold a shorter last row. A batch that meets it runs eager.
    #[error(
        "capture size {size} is not a multiple of the uniform decode query length {query_len}: round the capture sizes"
    )]
    NotUniform {
        /// The size.
        size: u32,
        /// 1 + speculative tokens.
        query_len: u32,
    },
}

/// Captured graphs by key. (vLLM 0.33 `CudagraphDispatcher`.)
#[derive(Clone, Debug)]
pub struct CudagraphDispatcher {
    mode: CudagraphMode,
    query_len: u32,
    max_num_seqs: u32,
    /// Rising.
    sizes: Vec<u32>,
    full: BTreeSet<BatchDescriptor>,
    piecewise: BTreeSet<BatchDescriptor>,
}

impl CudagraphDispatcher {
    /// The keys of a mode: mixed batches for every size, and, where decodes are captured apart, uniform decodes for the sizes
    /// of 1 to `max_num_seqs` of them. `lora_cases` are the adapter counts that are captured, `[0]` without LoRA.
    ///
    /// # Errors
    /// If a decode's size is not whole queries.
    pub fn new(
        mode: CudagraphMode,
        query_len: u32,
        max_num_seqs: u32,
        capture_sizes: &[u32],
        lora_cases: &[u32],
    ) -> Result<Self, DispatcherError> {
        let mut sizes = capture_sizes.to_vec();
        sizes.sort_unstable();
        sizes.dedup();
        let query_len = query_len.max(1);
        let mut made = Self {
            mode,
            query_len,
            max_num_seqs,
            sizes,
            full: BTreeSet::new(),
            piecewise: BTreeSet::new(),
        };
        for &num_active_loras in lora_cases {
            for &size in &made.sizes {
                match mode.mixed_mode() {
                    RuntimeMode::None => {}
                    RuntimeMode::Piecewise => {
                        made.piecewise.insert(Self::relaxed(size, num_active_loras));
                    }
                    RuntimeMode::Full => {
                        made.full.insert(made.exact(size, false, num_active_loras));
                    }
                }
                let decodes = query_len..=query_len.saturating_mul(max_num_seqs);
                if mode.separate_routine() && decodes.contains(&size) {
                    if !size.is_multiple_of(query_len) {
                        return Err(DispatcherError::NotUniform { size, query_len });
                    }
                    made.full.insert(made.exact(size, true, num_active_loras));
                }
            }
        }
        Ok(made)
    }

    fn exact(&self, num_tokens: u32, uniform: bool, num_active_loras: u32) -> BatchDescriptor {
        let rows = if uniform {
            num_tokens / self.query_len
        } else {
            num_tokens
        };
        BatchDescriptor {
            num_tokens,
            num_reqs: Some(rows.min(self.max_num_seqs)),
            uniform,
            num_active_loras,
        }
    }

    fn relaxed(num_tokens: u32, num_active_loras: u32) -> BatchDescriptor {
        BatchDescriptor {
            num_tokens,
            num_reqs: None,
            uniform: false,
            num_active_loras,
        }
    }

    /// The mode and graph of a batch; `allowed` may rule modes out (a batch whose metadata is not what full graphs need). A
    /// batch that no graph fits runs eager, unpadded.
    ///
    /// # Errors
    /// If the batch is uniform decodes and the next size is not whole queries: sizes that were not rounded.
    pub fn dispatch(
        &self,
        num_tokens: u32,
        uniform_decode: bool,
        num_active_loras: u32,
        allowed: impl Fn(RuntimeMode) -> bool,
    ) -> Result<(RuntimeMode, BatchDescriptor), DispatcherError> {
        let eager = (
            RuntimeMode::None,
            Self::relaxed(num_tokens, num_active_loras),
        );
        if self.mode == CudagraphMode::None {
            return Ok(eager);
        }
        let Some(&size) = self
            .sizes
            .get(self.sizes.partition_point(|&size| size < num_tokens))
        else {
            return Ok(eager);
        };
        let uniform = uniform_decode && self.mode.separate_routine();
        if uniform && !size.is_multiple_of(self.query_len) {
            return Err(DispatcherError::NotUniform {
                size,
                query_len: self.query_len,
            });
        }
        let key = self.exact(size, uniform, num_active_loras);
        if allowed(RuntimeMode::Full) && self.full.contains(&key) {
            return Ok((RuntimeMode::Full, key));
        }
        let key = Self::relaxed(size, num_active_loras);
        if allowed(RuntimeMode::Piecewise) && self.piecewise.contains(&key) {
            return Ok((RuntimeMode::Piecewise, key));
        }
        Ok(eager)
    }

    /// The keys of a mode, rising.
    pub fn keys(&self, mode: RuntimeMode) -> impl DoubleEndedIterator<Item = BatchDescriptor> + '_ {
        let keys = match mode {
            RuntimeMode::None => None,
            RuntimeMode::Piecewise => Some(&self.piecewise),
            RuntimeMode::Full => Some(&self.full),
        };
        keys.into_iter().flatten().copied()
    }

    /// What is captured, in order: piecewise before full, the largest first, so that smaller graphs reuse its memory.
    #[must_use]
    pub fn capture_order(&self) -> Vec<(RuntimeMode, Vec<BatchDescriptor>)> {
        [RuntimeMode::Piecewise, RuntimeMode::Full]
            .into_iter()
            .map(|mode| (mode, self.keys(mode).rev().collect::<Vec<_>>()))
            .filter(|(_, keys)| !keys.is_empty())
            .collect()
    }
}
