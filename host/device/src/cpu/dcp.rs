//! Decode context parallelism: the keys of a request are dealt to ranks, and every rank attends to its own share for the
//! query heads of all ranks. It must never know how queries and results travel between ranks: whoever runs them does that.
//!
//! One layer on rank r of W, with H query heads a rank: the queries of all ranks are gathered (heads of rank 0 first), r
//! attends to its share of the cache for all of them (`forward_shard`) and, for its own heads, to the step's own tokens
//! where the metadata say that the cache pass leaves them out (`forward_new_tokens`); then it merges what every rank found
//! for its heads by the log-sum-exps (`combine`). (vLLM 0.33 `_forward_with_dcp`, `cp_lse_ag_out_rs`.)
//!
//! FLASH_ATTN's cache pass covers the context of every row; FLASHINFER's covers all keys of a decode, this step's included,
//! and a prefill's context. A rank that holds nothing of a request finds zeros with a log-sum-exp of −∞.

use std::borrow::Cow;

use timetable_attention::{StepInputs, batch::ContextParallel};
use timetable_types::{
    Causal, DcpLocal, DcpSource, Family, Metadata, Tensor, batch::dcp_local_seq_lens_into,
    flash_attn, flashinfer,
};

use super::{
    AttentionConfig, CacheDtype, ImplError, KvCache, StepMetadata,
    config::{AttentionImpl, PagedAttentionImpl},
    execute::merge_states,
    prepare,
    step::{NONE, PrepareError, inconsistent},
    tensors,
};

/// One rank's metadata of one step, prepared once for every layer of the group.
#[derive(Debug, Default)]
pub struct ContextParallelMetadata {
    size: usize,
    /// Over the cache, the heads of all ranks as one layer's.
    gathered: StepMetadata,
    /// Over the cache, planned for the heads of one rank and run once for each rank's.
    by_rank: StepMetadata,
    /// Over the step's own tokens, for this rank's heads.
    new_tokens: StepMetadata,
}

impl ContextParallelMetadata {
    /// Unprepared: a pass refuses it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces the contents by `metadata` as built for `rank`, resolved against that rank's `inputs` (its own block table;
    /// global lengths). `block_size`: tokens of one kernel block on a rank. After an error the contents are unprepared.
    ///
    /// # Errors
    /// If the metadata are not of a rank of so many, contradict the step's tensors, or are of a family without ranks here.
    pub fn prepare(
        &mut self,
        metadata: &Metadata,
        inputs: &StepInputs<'_>,
        block_size: u32,
        rank: ContextParallel,
    ) -> Result<(), PrepareError> {
        self.size = 0;
        for step in [&mut self.gathered, &mut self.by_rank, &mut self.new_tokens] {
            step.clear();
        }
        let round = rank.size.checked_mul(rank.interleave);
        if rank.rank >= rank.size || !round.is_some_and(|round| (1..=1 << 30).contains(&round)) {
            return Err(inconsistent(
                "dcp_rank",
                format!(
                    "rank {} of {} with runs of {}: a rank is below their number, runs have at least 1 token",
                    rank.rank, rank.size, rank.interleave
                ),
            ));
        }
        if block_size == 0 {
            let problem = "0 tokens; it must be at least 1";
            return Err(inconsistent("block_size", problem.into()));
        }
        self.size = rank.size as usize;
        for (step, block_size) in [
            (&mut self.gathered, block_size),
            (&mut self.by_rank, block_size),
            (&mut self.new_tokens, 1),
        ] {
            step.block_size = block_size as usize;
            step.dcp_world_size = rank.size;
        }
        match metadata {
            Metadata::FlashAttn(metadata) => self.flash_attn(metadata, inputs, rank)?,
            Metadata::Flashinfer(metadata) => self.flashinfer(metadata, inputs)?,
            _ => {
                return Err(PrepareError::Unsupported {
                    what: metadata.family().interface(),
                    remedy: "under decode context parallelism choose FLASH_ATTN or FLASHINFER",
                });
            }
        }
        for step in [&mut self.gathered, &mut self.by_rank, &mut self.new_tokens] {
            step.sum_groups();
            step.family = Some(metadata.family());
        }
        Ok(())
    }

    fn flash_attn(
        &mut self,
        metadata: &flash_attn::Metadata,
        inputs: &StepInputs<'_>,
        rank: ContextParallel,
    ) -> Result<(), PrepareError> {
        let Some(lens) = &metadata.dcp_context_kv_lens else {
            return Err(inconsistent(
                "dcp_context_kv_lens",
                "absent: the metadata are not of a rank of decode context parallelism".into(),
            ));
        };
        let mut lens = match lens {
            Tensor::DcpLocal(local) => local_lens(local, inputs, rank)?,
            lens => tensors::vector("dcp_context_kv_lens", lens, inputs)?.into_owned(),
        };
        // Rows behind those that decode and extend have no context, where the builder counted them.
        let counted = metadata
            .num_decode_reqs
            .saturating_add(metadata.num_prefill_reqs) as usize;
        if metadata.max_dcp_context_kv_len == 0 {
            lens.fill(0);
        } else if counted > 0 {
            lens.iter_mut().skip(counted).for_each(|len| *len = 0);
        }
        // Every query stands behind the context.
        prepare::flash_attn_over(
            &mut self.gathered,
            metadata,
            &Tensor::Values(lens),
            &Causal::All(false),
            inputs,
        )?;
        prepare::begin(&mut self.by_rank, metadata.num_actual_tokens, inputs);
        prepare::begin(&mut self.new_tokens, metadata.num_actual_tokens, inputs);
        let starts = tensors::vector("query_start_loc", &metadata.query_start_loc, inputs)?;
        prepare::own_tokens(
            &mut self.new_tokens,
            &starts,
            metadata.max_query_len,
            |row| prepare::causal_of(&metadata.causal, inputs, row),
        )
    }

    fn flashinfer(
        &mut self,
        metadata: &flashinfer::Metadata,
        inputs: &StepInputs<'_>,
    ) -> Result<(), PrepareError> {
        let (decode, prefill) = prepare::plans(metadata)?;
        for step in [&mut self.gathered, &mut self.by_rank, &mut self.new_tokens] {
            prepare::begin(step, metadata.num_actual_tokens, inputs);
        }
        self.gathered.packed = true;
        self.by_rank.packed = true;
        if let Some(plan) = decode {
            prepare::append_plan(&mut self.gathered, plan, 0, inputs)?;
        }
        let Some(plan) = prefill else {
            return Ok(());
        };
        let first = metadata.num_decode_tokens;
        prepare::append_plan(&mut self.by_rank, plan, first, inputs)?;
        let starts = tensors::vector("qo_indptr", &plan.qo_indptr, inputs)?;
        let starts: Vec<i32> = starts
            .iter()
            .map(|start| start.saturating_add_unsigned(first))
            .collect();
        prepare::own_tokens(&mut self.new_tokens, &starts, u32::MAX, |_| Ok(plan.causal))
    }

    /// Tokens that a pass writes, padding included.
    pub fn num_actual_tokens(&self) -> usize {
        self.gathered.num_actual_tokens
    }

    /// The most partial results that any query tile of the cache pass merges; at least 1.
    pub fn max_splits(&self) -> usize {
        self.gathered.max_splits().max(self.by_rank.max_splits())
    }
}

/// This rank's share of the lengths that `local` names.
fn local_lens(
    local: &DcpLocal,
    inputs: &StepInputs<'_>,
    rank: ContextParallel,
) -> Result<Vec<i32>, PrepareError> {
    let field = "dcp_context_kv_lens";
    let of = match local.source {
        DcpSource::ContextLens => Tensor::ContextLens(local.rows.clone()),
        DcpSource::SeqLens => Tensor::Slice(timetable_types::TensorSlice {
            source: timetable_types::Input::SeqLens,
            start: local.rows.start,
            end: local.rows.end,
        }),
    };
    let lens: Cow<'_, [i32]> = tensors::vector(field, &of, inputs)?;
    if let Some(row) = lens.iter().position(|&len| len < 0) {
        return Err(inconsistent(field, format!("{} in row {row}", lens[row])));
    }
    let mut share = Vec::new();
    dcp_local_seq_lens_into(&lens, rank.size, rank.rank, rank.interleave, &mut share);
    Ok(share)
}

/// What one pass found: f32 [rows, head_size], and the natural log-sum-exp of each row, −∞ where there was no key.
#[derive(Clone, Copy, Debug)]
pub struct Partial<'a> {
    /// f32 [rows, head_size]
    pub output: &'a [f32],
    /// `f32 [rows]`
    pub lse: &'a [f32],
}

/// One layer's attention on a rank of decode context parallelism. Its keys and values are scattered like any layer's, by the
/// rank's own slots (`AttentionImpl::do_kv_cache_update`).
pub struct ContextParallelImpl {
    size: usize,
    gathered: PagedAttentionImpl,
    by_rank: PagedAttentionImpl,
    new_tokens: PagedAttentionImpl,
}

impl ContextParallelImpl {
    /// The impl of `family` for a layer of which `config` is one rank's part, on one of `size` ranks.
    ///
    /// # Errors
    /// As `new_impl`; a family without context parallelism here; a window, whose keys are no run of a rank's; more KV heads
    /// than one, which tensor parallelism would divide before keys are.
    pub fn new(family: Family, config: AttentionConfig, size: usize) -> Result<Self, ImplError> {
        let refuse = |name, value: String, remedy| {
            Err(ImplError::Config {
                name,
                value,
                remedy,
            })
        };
        if !matches!(family, Family::FlashAttn | Family::Flashinfer) {
            return Err(ImplError::NotOnThisDevice {
                interface: family.interface(),
                form: "under decode context parallelism",
                remedy: match family {
                    Family::FlashMla => "make an `MlaImpl`, which runs one rank's share",
                    Family::Mamba => "make a `MambaImpl`: every rank keeps whole states",
                    _ => "choose FLASH_ATTN or FLASHINFER (--attention-backend)",
                },
            });
        }
        if size == 0 {
            return refuse("dcp_world_size", "0".into(), "it must be at least 1");
        }
        if let Some(window) = config.sliding_window {
            return refuse(
                "sliding_window",
                window.to_string(),
                "under decode context parallelism leave a layer with a window unsharded",
            );
        }
        if config.num_kv_heads != 1 {
            return refuse(
                "num_kv_heads",
                config.num_kv_heads.to_string(),
                "ranks share the keys of one KV head: divide KV heads among tensor-parallel ranks first",
            );
        }
        let gathered = AttentionConfig {
            num_heads: config.num_heads.saturating_mul(size),
            ..config
        };
        let new_tokens = AttentionConfig {
            block_size: 1,
            kv_cache_dtype: CacheDtype::F32,
            ..config
        };
        Ok(Self {
            size,
            gathered: PagedAttentionImpl::new(family, gathered)?,
            by_rank: PagedAttentionImpl::new(family, config)?,
            new_tokens: PagedAttentionImpl::new(family, new_tokens)?,
        })
    }

    /// Attention of all ranks' queries (f32 [T', W · num_heads, head_size], the heads of rank 0 first) to this rank's share
    /// of the cache. Writes rows [0, num_actual_tokens) of `output` (f32 [T', W · num_heads, head_size]) and `lse`
    /// (f32 [T', W · num_heads], natural log): zeros and −∞ where this rank has no key.
    ///
    /// # Errors
    /// As `AttentionImpl::forward`.
    pub fn forward_shard(
        &self,
        query: &[f32],
        kv_cache: &KvCache,
        metadata: &ContextParallelMetadata,
        output: &mut [f32],
        lse: &mut [f32],
    ) -> Result<(), ImplError> {
        self.is_of(metadata)?;
        let gathered = &metadata.gathered;
        self.gathered
            .forward_with_lse(query, kv_cache, gathered, output, lse)?;
        let step = &metadata.by_rank;
        if step.rows.is_empty() {
            return Ok(());
        }
        let config = self.by_rank.config();
        let width = config.num_heads * config.head_size;
        let tokens = step.num_actual_tokens;
        let mut part = vec![0.0; tokens * width];
        let mut part_output = vec![0.0; tokens * width];
        let mut part_lse = vec![0.0; tokens * config.num_heads];
        for rank in 0..self.size {
            for (token, part) in part.chunks_mut(width).enumerate() {
                part.copy_from_slice(&query[(token * self.size + rank) * width..][..width]);
            }
            self.by_rank.forward_with_lse(
                &part,
                kv_cache,
                step,
                &mut part_output,
                &mut part_lse,
            )?;
            for (token, _) in covered(step) {
                let (at, heads) = (token * self.size + rank, config.num_heads);
                output[at * width..][..width]
                    .copy_from_slice(&part_output[token * width..][..width]);
                lse[at * heads..][..heads].copy_from_slice(&part_lse[token * heads..][..heads]);
            }
        }
        Ok(())
    }

    /// Attention of this rank's queries (f32 [T', num_heads, head_size]) to the step's own tokens (`key` and `value`: f32
    /// [T', head_size]), as far as the cache pass leaves them out. Writes rows [0, num_actual_tokens) of `output`
    /// (f32 [T', num_heads, head_size]) and `lse` (f32 [T', num_heads]): zeros and −∞ elsewhere.
    ///
    /// # Errors
    /// As `AttentionImpl::forward`; keys or values of fewer tokens than the step has.
    pub fn forward_new_tokens(
        &self,
        query: &[f32],
        (key, value): (&[f32], &[f32]),
        metadata: &ContextParallelMetadata,
        output: &mut [f32],
        lse: &mut [f32],
    ) -> Result<(), ImplError> {
        self.is_of(metadata)?;
        let (step, config) = (&metadata.new_tokens, self.new_tokens.config());
        let tokens = step.num_blocks_used;
        let expected = tokens * config.head_size;
        for (what, found) in [
            ("elements of key", key.len()),
            ("elements of value", value.len()),
        ] {
            at_least(what, found, expected)?;
        }
        // A token is a block of its own.
        let mut cache = KvCache::new(tokens, 1, 1, config.head_size, config.kv_cache_dtype);
        let slots: Vec<i64> = (0..tokens as i64).collect();
        cache.scatter(key, value, &slots);
        self.new_tokens
            .forward_with_lse(query, &cache, step, output, lse)
    }

    /// Merges what every rank found for the heads of `rank` (`shards`: all ranks', in their order, each f32
    /// [T, W · num_heads, head_size] as `forward_shard` wrote it) and what that rank found among the step's own tokens into
    /// `output`, f32 [T, num_heads, head_size], by their log-sum-exps; sums are f64. T follows from `output`.
    ///
    /// # Errors
    /// If there are not as many shards as ranks, no such rank, or a tensor is too short.
    pub fn combine(
        &self,
        rank: usize,
        shards: &[Partial<'_>],
        new_tokens: Partial<'_>,
        output: &mut [f32],
    ) -> Result<(), ImplError> {
        let (heads, size) = (
            self.by_rank.config().num_heads,
            self.by_rank.config().head_size,
        );
        let shape = |what, found, expected| {
            Err(ImplError::Shape {
                what,
                found,
                expected,
            })
        };
        if shards.len() != self.size {
            return shape("partial results of ranks", shards.len(), self.size);
        }
        if rank >= self.size {
            return shape("ranks", self.size, rank + 1);
        }
        let rows = output.len() / size;
        for (partial, rows) in shards
            .iter()
            .map(|shard| (shard, rows * self.size))
            .chain([(&new_tokens, rows)])
        {
            at_least(
                "elements of a partial output",
                partial.output.len(),
                rows * size,
            )?;
            at_least("elements of a partial lse", partial.lse.len(), rows)?;
        }
        for (row, output) in output.chunks_exact_mut(size).enumerate() {
            let (token, head) = (row / heads, row % heads);
            let gathered = (token * self.size + rank) * heads + head;
            let partials = shards
                .iter()
                .map(|&shard| (shard, gathered))
                .chain([(new_tokens, row)])
                .map(|(partial, row)| {
                    let output = &partial.output[row * size..(row + 1) * size];
                    (output, f64::from(partial.lse[row]))
                });
            merge_states(partials, output);
        }
        Ok(())
    }

    fn is_of(&self, metadata: &ContextParallelMetadata) -> Result<(), ImplError> {
        match metadata.size == self.size {
            true => Ok(()),
            false => Err(ImplError::Shape {
                what: "ranks of the metadata",
                found: metadata.size,
                expected: self.size,
            }),
        }
    }
}

/// Tokens that have a row, with it.
fn covered(step: &StepMetadata) -> impl Iterator<Item = (usize, u32)> {
    let rows = step.token_rows.iter().copied().enumerate();
    rows.filter(|&(_, row)| row != NONE)
}

fn at_least(what: &'static str, found: usize, expected: usize) -> Result<(), ImplError> {
    match found >= expected {
        true => Ok(()),
        false => Err(ImplError::Shape {
            what,
            found,
            expected,
        }),
    }
}
