//! Attention of the requests that prefill: latents are projected to the keys and values of one head, a piece at a time, and
//! met by the request's queries; the pieces' results are merged by their log-sum-exps. It must never know how chunks were
//! planned.
//!
//! A leaf is one request and one head: its context in the order of its chunks, then its new tokens. What a leaf computes
//! depends on nothing but the two, so neither threads nor other requests can change it.

use std::cell::RefCell;

use super::{LatentCache, LatentInputs, LatentSizes, MlaStepMetadata, step::Prefill};
use crate::cpu::{
    AttentionConfig, CacheDtype,
    execute::Leaves,
    kernel::{self, Content, Projection, Task, Workspace},
};

/// Keys that are projected at a time: what a chunk's workspace would hold of one head is never there as a whole.
const PIECE: usize = 1024;

/// Buffers of one thread, reused from leaf to leaf.
#[derive(Default)]
struct Scratch {
    workspace: Workspace,
    /// f32 [q_len, qk_head_dim]
    query: Vec<f32>,
    /// Gathered tokens: f32 [PIECE, kv_lora_rank + qk_rope_head_dim]
    latents: Vec<f32>,
    /// f32 [PIECE, qk_head_dim + v_head_dim]
    content: Vec<f32>,
    /// f32 [q_len, v_head_dim]
    partial: Vec<f32>,
    partial_lse: Vec<f64>,
    sums: Sums,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    /// Results of one forward call, leaf by leaf.
    static RESULT: RefCell<(Vec<f32>, Vec<f64>)> = RefCell::default();
}

/// One call for all requests that prefill.
pub(super) struct Forward<'a> {
    pub sizes: LatentSizes,
    pub batch_invariant: bool,
    /// Of the prefill part's tokens.
    pub inputs: LatentInputs<'a>,
    pub cache: &'a LatentCache,
    pub step: &'a MlaStepMetadata,
}

impl Forward<'_> {
    /// `output`: f32 [tokens, num_heads, v_head_dim], zeros for tokens of no request; `lse`: f32 [tokens, num_heads].
    pub(super) fn run(&self, output: &mut [f32], lse: Option<&mut [f32]>) {
        let LatentSizes {
            num_heads,
            v_head_dim: size,
            ..
        } = self.sizes;
        let prefills = &self.step.prefills;
        let leaves = prefills.len() * num_heads;
        let rows = self.row(leaves);
        let (mut result, mut result_lse) = RESULT.take();
        result.resize(rows * size, 0.0);
        result_lse.resize(rows, 0.0);
        Leaves {
            cost: &|leaf| self.cost(leaf),
            row: &|leaf| self.row(leaf),
            width: size,
            run: &|leaf, output, lse| {
                let prefill = &prefills[leaf / num_heads];
                SCRATCH.with_borrow_mut(|scratch| {
                    self.leaf(leaf / num_heads, prefill, leaf % num_heads, scratch);
                    scratch.sums.finish(size, output, lse);
                });
            },
        }
        .run(
            leaves,
            self.sizes.qk_head_dim() as u64,
            &mut result,
            &mut result_lse,
        );

        output.fill(0.0);
        let mut lse = lse;
        if let Some(lse) = &mut lse {
            lse.fill(f32::NEG_INFINITY);
        }
        for leaf in 0..leaves {
            let (prefill, head) = (&prefills[leaf / num_heads], leaf % num_heads);
            for token in 0..prefill.q_len as usize {
                let from = self.row(leaf) + token;
                let to = (prefill.token as usize + token) * num_heads + head;
                output[to * size..][..size].copy_from_slice(&result[from * size..][..size]);
                if let Some(lse) = &mut lse {
                    lse[to] = result_lse[from] as f32;
                }
            }
        }
        RESULT.set((result, result_lse));
    }

    /// Rows of all leaves before `leaf`.
    fn row(&self, leaf: usize) -> usize {
        let (prefills, heads) = (&self.step.prefills, self.sizes.num_heads);
        let (row, head) = (leaf / heads, leaf % heads);
        match prefills.get(row) {
            Some(prefill) => prefill.token as usize * heads + head * prefill.q_len as usize,
            None => prefills
                .last()
                .map_or(0, |last| (last.token + last.q_len) as usize * heads),
        }
    }

    /// Query rows × keys of all leaves before `leaf`.
    fn cost(&self, leaf: usize) -> u64 {
        let (prefills, heads) = (&self.step.prefills, self.sizes.num_heads);
        let (row, head) = (leaf / heads, leaf % heads);
        let before = |row: usize| match prefills.get(row) {
            Some(prefill) => prefill.cost,
            None => self.step.prefills_cost,
        };
        let mut cost = before(row) * heads as u64;
        if head > 0 {
            cost += head as u64 * (before(row + 1) - before(row));
        }
        cost
    }

    /// Leaves the result of a request and a head in `scratch.sums`.
    fn leaf(&self, row: usize, prefill: &Prefill, head: usize, scratch: &mut Scratch) {
        let (sizes, step) = (&self.sizes, self.step);
        let (latent, rotated, key) = (
            sizes.kv_lora_rank,
            sizes.qk_rope_head_dim,
            sizes.qk_head_dim(),
        );
        let (token, q_len) = (prefill.token as usize, prefill.q_len as usize);
        scratch.query.clear();
        for token in token..token + q_len {
            let at = (token * sizes.num_heads + head) * key;
            scratch
                .query
                .extend_from_slice(&self.inputs.q[at..at + key]);
        }
        scratch.sums.clear(q_len, sizes.v_head_dim);
        if q_len == 0 {
            return;
        }
        let next = step.prefills.get(row + 1);
        let end = next.map_or(step.segments.len(), |next| next.segment as usize);
        let width = latent + rotated;
        for segment in &step.segments[prefill.segment as usize..end] {
            if segment.resets {
                scratch.sums.clear(q_len, sizes.v_head_dim);
            }
            for start in (0..segment.len as usize).step_by(PIECE) {
                let count = PIECE.min(segment.len as usize - start);
                let mut latents = std::mem::take(&mut scratch.latents);
                latents.resize(PIECE * width, 0.0);
                for (index, to) in latents.chunks_exact_mut(width).take(count).enumerate() {
                    let position = segment.start as usize + start + index;
                    let page = segment.page as usize + position / step.block_size;
                    let slot =
                        step.pages[page] as usize * step.block_size + position % step.block_size;
                    self.cache.read(slot, to);
                }
                self.project(
                    head,
                    (&latents, width),
                    (&latents[latent..], width),
                    count,
                    scratch,
                );
                scratch.latents = latents;
                self.attend(0..q_len, count, count, false, scratch);
            }
        }
        // New tokens are one rank's: merged, they count once.
        if step.rank.is_some_and(|rank| rank.rank > 0) {
            return;
        }
        for start in (0..q_len).step_by(PIECE) {
            let count = PIECE.min(q_len - start);
            let at = token + start;
            let kv_c = &self.inputs.kv_c_normed[at * latent..];
            let k_pe = &self.inputs.k_pe[at * rotated..];
            self.project(head, (kv_c, latent), (k_pe, rotated), count, scratch);
            // Earlier tokens see none of these; the others stand at their own key, counted from the piece's first.
            self.attend(start..q_len, q_len - start, count, true, scratch);
        }
    }

    /// Keys and values of `count` tokens for one head, into `scratch.content`: latents and rotated keys, each with its stride.
    fn project(
        &self,
        head: usize,
        (kv_c, kv_stride): (&[f32], usize),
        (k_pe, pe_stride): (&[f32], usize),
        count: usize,
        scratch: &mut Scratch,
    ) {
        let sizes = &self.sizes;
        let (nope, key) = (sizes.qk_nope_head_dim, sizes.qk_head_dim());
        let stride = key + sizes.v_head_dim;
        scratch.content.resize(PIECE * stride, 0.0);
        let per_head = (nope + sizes.v_head_dim) * sizes.kv_lora_rank;
        let weights = &self.inputs.kv_b_proj[head * per_head..(head + 1) * per_head];
        let (of_key, of_value) = weights.split_at(nope * sizes.kv_lora_rank);
        for (weights, outputs, at) in [(of_key, nope, 0), (of_value, sizes.v_head_dim, key)] {
            let projection = Projection {
                x: kv_c,
                x_stride: kv_stride,
                inputs: sizes.kv_lora_rank,
                weights,
                outputs,
            };
            kernel::project(&projection, count, &mut scratch.content[at..], stride);
        }
        for (token, content) in scratch.content.chunks_mut(stride).take(count).enumerate() {
            let from = &k_pe[token * pe_stride..][..sizes.qk_rope_head_dim];
            content[nope..key].copy_from_slice(from);
        }
    }

    /// Adds the attention of query rows `rows` to the `count` keys in `scratch.content`. `kv_len`: where the last row stands,
    /// if it sees no later key.
    fn attend(
        &self,
        rows: std::ops::Range<usize>,
        kv_len: usize,
        count: usize,
        causal: bool,
        scratch: &mut Scratch,
    ) {
        let sizes = &self.sizes;
        let size = sizes.v_head_dim;
        let Scratch {
            workspace,
            query,
            content,
            partial,
            partial_lse,
            sums,
            ..
        } = scratch;
        partial.resize(rows.len() * size, 0.0);
        partial_lse.resize(rows.len(), 0.0);
        let config = AttentionConfig {
            num_heads: 1,
            head_size: sizes.qk_head_dim(),
            scale: sizes.scale,
            num_kv_heads: 1,
            sliding_window: None,
            logits_soft_cap: None,
            kv_cache_dtype: CacheDtype::F32,
            block_size: PIECE,
            batch_invariant: self.batch_invariant,
        };
        let task = Task {
            query,
            cache: content,
            content: Content {
                stride: sizes.qk_head_dim() + size,
                value_size: size,
                value_start: sizes.qk_head_dim(),
            },
            pages: &[0],
            config: &config,
            token: 0,
            q_len: query.len() / sizes.qk_head_dim(),
            kv_len,
            causal,
            kv_head: 0,
            keys: 0..count,
        };
        kernel::attend(&task, rows.clone(), workspace, partial, partial_lse);
        sums.add(rows.start, size, partial, partial_lse);
    }
}

/// The merge of partial results ([`merge_states`](crate::cpu::merge_states)) one after the other, in f64.
#[derive(Default)]
struct Sums {
    /// f64 [rows, size]: Σ e^(lse − max) · partial.
    output: Vec<f64>,
    max: Vec<f64>,
    /// Σ e^(lse − max).
    weight: Vec<f64>,
}

impl Sums {
    fn clear(&mut self, rows: usize, size: usize) {
        for (of, count, value) in [
            (&mut self.output, rows * size, 0.0),
            (&mut self.max, rows, f64::NEG_INFINITY),
            (&mut self.weight, rows, 0.0),
        ] {
            of.clear();
            of.resize(count, value);
        }
    }

    /// Partial results of rows from `first` on.
    fn add(&mut self, first: usize, size: usize, partial: &[f32], lse: &[f64]) {
        for (index, (&lse, partial)) in lse.iter().zip(partial.chunks(size)).enumerate() {
            // As the field has it, +∞ counts as −∞. A NaN stays: it must not be merged away.
            if lse.is_infinite() {
                continue;
            }
            let row = first + index;
            let old = self.max[row];
            let max = if lse > old || lse.is_nan() { lse } else { old };
            let (shrink, weight) = ((old - max).exp(), (lse - max).exp());
            self.max[row] = max;
            self.weight[row] = self.weight[row] * shrink + weight;
            for (sum, &x) in self.output[row * size..].iter_mut().zip(partial) {
                *sum = *sum * shrink + weight * f64::from(x);
            }
        }
    }

    /// Normalised rows and their log-sum-exps; zeros and −∞ where nothing was added.
    fn finish(&self, size: usize, output: &mut [f32], lse: &mut [f64]) {
        let rows = output.chunks_mut(size).zip(lse).zip(&self.weight);
        for (row, ((output, lse), &weight)) in rows.enumerate() {
            *lse = self.max[row] + weight.ln();
            if weight == 0.0 {
                *lse = f64::NEG_INFINITY;
                output.fill(0.0);
                continue;
            }
            for (output, sum) in output.iter_mut().zip(&self.output[row * size..]) {
                *output = (sum / weight) as f32;
            }
        }
    }
}
