//! Attention of one tile of query rows against one range of paged keys, for one KV head.
//!
//! Keys are taken in blocks of 64, counted from the range's first key, so that a query row's result depends on nothing but
//! its own range: not on the rows that share its tile, nor on where its mask begins. Within a block everything is f32;
//! across blocks the output and the sum of weights accumulate in f64 (one operation in 64), which keeps rounding flat at
//! any context length.
//!
//! Two forms of the same computation: up to four rows (a decode) take dot products along the head; more rows, and any number
//! where results are batch-invariant, are spread over the lanes, so that no sum runs across lanes. The code is plain Rust over fixed-size arrays; it is compiled three
//! times, and the best that the machine can run is chosen once.

mod dot;
mod lanes;
mod project;
mod simd;
#[cfg(test)]
mod tests;

use std::{ops::Range, sync::OnceLock};

pub(super) use project::{Projection, combine, project};
pub(super) use simd::Simd;

use super::{
    AttentionConfig,
    math::{Element, fma, tanh},
};

/// Keys of one block.
const BLOCK: usize = 64;
/// Rows that are computed together; a larger tile is cut.
const MAX_ROWS: usize = 64;
/// Up to this many rows take dot products.
const DOT_ROWS: usize = 4;
/// Lanes that the rows of a tile are padded to.
const LANES: usize = 16;

/// How a token's key and value of one KV head lie in a cache, in its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Content {
    /// From one token of a block to the next.
    pub stride: usize,
    /// Elements of a value, unpacked.
    pub value_size: usize,
    /// Where the value begins, unpacked and counted from its key.
    pub value_start: usize,
}

impl Content {
    /// A key, then a value of the same size: a paged KV cache.
    pub(super) fn key_then_value(head_size: usize) -> Self {
        Content {
            stride: 2 * head_size,
            value_size: head_size,
            value_start: head_size,
        }
    }

    /// Elements of a token, unpacked.
    fn width(&self, key_size: usize) -> usize {
        key_size.max(self.value_start + self.value_size)
    }
}

/// One tile's inputs. `pages` holds all keys of the request, and `cache` all of `pages`.
pub(super) struct Task<'a, E> {
    /// f32 [T, num_heads, head_size]
    pub query: &'a [f32],
    /// [num_blocks, num_kv_heads, block_size, content.stride]
    pub cache: &'a [E],
    pub content: Content,
    /// The request's pages.
    pub pages: &'a [i32],
    pub config: &'a AttentionConfig,
    /// The request's first token.
    pub token: usize,
    pub q_len: usize,
    pub kv_len: usize,
    pub causal: bool,
    pub kv_head: usize,
    /// Keys to attend to.
    pub keys: Range<usize>,
}

impl<E> Task<'_, E> {
    /// The keys within `self.keys` that packed row `packed` sees; empty if there are none. Bottom-right aligned: the last
    /// token of the request stands at its last key. A window of w reaches back w − 1 keys and, where attention is not
    /// causal, as far ahead.
    fn visible(&self, packed: usize) -> Range<usize> {
        let heads_per_kv_head = self.config.num_heads / self.config.num_kv_heads;
        let position = self.kv_len as i64 - self.q_len as i64 + (packed / heads_per_kv_head) as i64;
        let window = self.config.sliding_window.map(i64::from);
        let after = match (self.causal, window) {
            (true, _) => position + 1,
            (false, Some(window)) => position + window,
            (false, None) => i64::MAX,
        };
        let first = window.map_or(0, |window| position - window + 1);
        let (low, high) = (self.keys.start as i64, self.keys.end as i64);
        let (first, after) = (first.clamp(low, high), after.clamp(low, high));
        first as usize..after.max(first) as usize
    }

    /// Index of the key of position `key` in the cache.
    fn offset(&self, key: usize) -> usize {
        let config = self.config;
        let block = self.pages[key / config.block_size] as usize;
        let state = key % config.block_size;
        ((block * config.num_kv_heads + self.kv_head) * config.block_size + state)
            * self.content.stride
    }

    fn query_row(&self, packed: usize) -> &[f32] {
        let config = self.config;
        let heads_per_kv_head = config.num_heads / config.num_kv_heads;
        let (token, member) = (packed / heads_per_kv_head, packed % heads_per_kv_head);
        let head = self.kv_head * heads_per_kv_head + member;
        let start = ((self.token + token) * config.num_heads + head) * config.head_size;
        &self.query[start..start + config.head_size]
    }
}

/// Buffers of one thread, reused from tile to tile.
#[derive(Default)]
pub(super) struct Workspace {
    /// Dot form: [rows, head_size rounded up to LANES]. Lane form: lane blocks of [head_size, lanes].
    query: Vec<f32>,
    /// Dot form: [rows, BLOCK]. Lane form: [BLOCK, lanes].
    scores: Vec<f32>,
    /// Unnormalised output, f64 [rows, value_size].
    sums: Vec<f64>,
    /// Lane form: a block's keys and values, widened, where the cache is not f32.
    staged: Vec<f32>,
    rows: Rows,
}

/// What is kept for each row of a tile.
struct Rows {
    /// First visible key.
    first: [i32; MAX_ROWS],
    /// One past the last visible key; not above `first` if there is none.
    after: [i32; MAX_ROWS],
    /// Largest score so far.
    max: [f32; MAX_ROWS],
    /// Sum of weights e^(score − max) so far.
    weight: [f64; MAX_ROWS],
    /// What this block's maximum multiplies earlier sums by.
    shrink: [f64; MAX_ROWS],
}

impl Default for Rows {
    fn default() -> Self {
        Rows {
            first: [0; MAX_ROWS],
            after: [0; MAX_ROWS],
            max: [f32::NEG_INFINITY; MAX_ROWS],
            weight: [0.0; MAX_ROWS],
            shrink: [1.0; MAX_ROWS],
        }
    }
}

/// What the kernel was compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InstructionSet {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

fn detect() -> InstructionSet {
    static FOUND: OnceLock<InstructionSet> = OnceLock::new();
    *FOUND.get_or_init(|| {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx2 && avx512 {
                return InstructionSet::Avx512;
            }
            if avx2 {
                return InstructionSet::Avx2;
            }
        }
        InstructionSet::Portable
    })
}

/// The instruction set that attention runs on in this process: `"avx512"`, `"avx2"` or `"portable"`.
pub fn instruction_set() -> &'static str {
    match detect() {
        InstructionSet::Portable => "portable",
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => "avx2",
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => "avx512",
    }
}

/// Work whose loops gain from the machine's instruction set: `run` is compiled for each, with all that is inlined into it.
pub(super) trait Work {
    /// `S`: sixteen lanes. `FMA`: multiply and add are fused. To be `#[inline(always)]`.
    fn run<S: Simd, const FMA: bool>(self);
}

/// Runs `work` on the best instruction set that the machine has.
pub(super) fn on_best<W: Work>(work: W) {
    match detect() {
        InstructionSet::Portable => {
            // AArch64 always fuses; elsewhere the portable build may not.
            const FMA: bool = cfg!(target_arch = "aarch64");
            work.run::<simd::Portable<FMA>, FMA>();
        }
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => {
            // SAFETY: `detect` found avx2 and fma on this processor.
            unsafe { on_avx2(work) }
        }
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => {
            // SAFETY: `detect` found avx2, fma and avx512{f,bw,dq,vl} on this processor.
            unsafe { on_avx512(work) }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn on_avx2<W: Work>(work: W) {
    work.run::<simd::Avx2, true>();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
fn on_avx512<W: Work>(work: W) {
    work.run::<simd::Avx512, true>();
}

/// Attention of packed query rows `packed` of the task's request: normalised output f32 [rows, value_size], zeros for a row
/// that sees no key of `task.keys`, and log-sum-exp f64 [rows], −∞ for such a row.
pub(super) fn attend<E: Element>(
    task: &Task<'_, E>,
    packed: Range<usize>,
    workspace: &mut Workspace,
    output: &mut [f32],
    lse: &mut [f64],
) {
    match detect() {
        InstructionSet::Portable => {
            attend_portable(task, packed, workspace, output, lse);
        }
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => {
            // SAFETY: `detect` found avx2 and fma on this processor.
            unsafe { attend_avx2(task, packed, workspace, output, lse) }
        }
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => {
            // SAFETY: `detect` found avx2, fma and avx512{f,bw,dq,vl} on this processor.
            unsafe { attend_avx512(task, packed, workspace, output, lse) }
        }
    }
}

fn attend_portable<E: Element>(
    task: &Task<'_, E>,
    packed: Range<usize>,
    workspace: &mut Workspace,
    output: &mut [f32],
    lse: &mut [f64],
) {
    // AArch64 always fuses; elsewhere the portable build may not.
    const FMA: bool = cfg!(target_arch = "aarch64");
    attend_on::<E, simd::Portable<FMA>, FMA, 16>(task, packed, workspace, output, lse);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn attend_avx2<E: Element>(
    task: &Task<'_, E>,
    packed: Range<usize>,
    workspace: &mut Workspace,
    output: &mut [f32],
    lse: &mut [f64],
) {
    attend_on::<E, simd::Avx2, true, 16>(task, packed, workspace, output, lse);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
fn attend_avx512<E: Element>(
    task: &Task<'_, E>,
    packed: Range<usize>,
    workspace: &mut Workspace,
    output: &mut [f32],
    lse: &mut [f64],
) {
    attend_on::<E, simd::Avx512, true, 32>(task, packed, workspace, output, lse);
}

/// `WIDE`: f32 that two registers hold.
#[inline(always)]
fn attend_on<E: Element, S: Simd, const FMA: bool, const WIDE: usize>(
    task: &Task<'_, E>,
    packed: Range<usize>,
    workspace: &mut Workspace,
    output: &mut [f32],
    lse: &mut [f64],
) {
    let size = task.content.value_size;
    let mut done = 0;
    while done < packed.len() {
        let first = packed.start + done;
        let rows = (packed.len() - done).min(MAX_ROWS);
        let output = &mut output[done * size..(done + rows) * size];
        let lse = &mut lse[done..done + rows];
        match rows {
            _ if task.config.batch_invariant || !E::IN_PLACE => {
                lanes::lane_form::<E, S, FMA, WIDE>(task, first, rows, workspace, output, lse);
            }
            1 => dot::dot_form::<E, S, FMA, WIDE, 1>(task, first, workspace, output, lse),
            2 => dot::dot_form::<E, S, FMA, WIDE, 2>(task, first, workspace, output, lse),
            3 => dot::dot_form::<E, S, FMA, WIDE, 3>(task, first, workspace, output, lse),
            DOT_ROWS => dot::dot_form::<E, S, FMA, WIDE, 4>(task, first, workspace, output, lse),
            _ => lanes::lane_form::<E, S, FMA, WIDE>(task, first, rows, workspace, output, lse),
        }
        done += rows;
    }
}

/// Sets up `rows` and `sums` for packed rows from `first`; the keys that any of them sees.
#[inline(always)]
fn begin<E>(
    task: &Task<'_, E>,
    first: usize,
    count: usize,
    padded: usize,
    rows: &mut Rows,
    sums: &mut Vec<f64>,
) -> Range<usize> {
    sums.clear();
    sums.resize(padded * task.content.value_size, 0.0);
    let (mut start, mut end) = (usize::MAX, 0);
    for row in 0..padded {
        let visible = if row < count {
            task.visible(first + row)
        } else {
            0..0
        };
        if !visible.is_empty() {
            start = start.min(visible.start);
            end = end.max(visible.end);
        }
        rows.first[row] = visible.start as i32;
        rows.after[row] = visible.end as i32;
        rows.max[row] = f32::NEG_INFINITY;
        rows.weight[row] = 0.0;
    }
    start.min(end)..end
}

/// Normalises.
#[inline(always)]
fn finish(size: usize, rows: &Rows, sums: &[f64], output: &mut [f32], lse: &mut [f64]) {
    for (row, lse) in lse.iter_mut().enumerate() {
        let output = &mut output[row * size..(row + 1) * size];
        let weight = rows.weight[row];
        if weight == 0.0 {
            output.fill(0.0);
            *lse = f64::NEG_INFINITY;
            continue;
        }
        let inverse = 1.0 / weight;
        for (output, sum) in output.iter_mut().zip(&sums[row * size..]) {
            *output = (sum * inverse) as f32;
        }
        *lse = f64::from(rows.max[row]) + weight.ln();
    }
}

/// Blocks of keys that overlap `visible`: (first key of the block, keys of it to compute).
#[inline(always)]
fn blocks(origin: usize, visible: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let skipped = (visible.start - origin.min(visible.start)) / BLOCK;
    (origin + skipped * BLOCK..visible.end)
        .step_by(BLOCK)
        .map(move |base| {
            (
                base,
                visible.start.max(base) - base..visible.end.min(base + BLOCK) - base,
            )
        })
}

#[inline(always)]
fn offsets<E>(task: &Task<'_, E>, base: usize, block: &Range<usize>) -> [usize; BLOCK] {
    let mut offsets = [0; BLOCK];
    let block_size = task.config.block_size;
    let stride = task.content.stride;
    let mut next = block.start;
    while next < block.end {
        let key = base + next;
        let run = (block_size - key % block_size).min(block.end - next);
        let start = task.offset(key);
        for (index, offset) in offsets[next..next + run].iter_mut().enumerate() {
            *offset = start + index * stride;
        }
        next += run;
    }
    offsets
}

/// scale · score, capped.
#[inline(always)]
fn transform<const FMA: bool>(score: f32, scale: f32, cap: Option<(f32, f32)>) -> f32 {
    let score = score * scale;
    match cap {
        None => score,
        Some((cap, inverse)) => cap * tanh::<FMA>(score * inverse),
    }
}

/// (largest score, what to subtract): −∞ is never subtracted, so that a row without keys so far gets weights of 0.
#[inline(always)]
fn raise(max: &mut f32, shrink: &mut f64, block_max: f32) -> f32 {
    let old = *max;
    if block_max > old {
        *max = block_max;
        *shrink = (f64::from(old) - f64::from(block_max)).exp();
    } else {
        *shrink = 1.0;
    }
    if *max == f32::NEG_INFINITY { 0.0 } else { *max }
}

#[inline(always)]
fn widen<E: Element, const N: usize>(from: &[E; N]) -> [f32; N] {
    let mut to = [0.0; N];
    for (to, &from) in to.iter_mut().zip(from) {
        *to = from.widen();
    }
    to
}

/// The values of one block of keys.
struct Values<'a, E> {
    elements: &'a [E],
    /// Value of key j: elements [offsets[j] + shift, + size).
    offsets: &'a [usize; BLOCK],
    shift: usize,
    size: usize,
    block: Range<usize>,
}

/// sums[r] = sums[r] · shrink[r] + Σ over keys of weight · value, for R rows. `weights` has strides (row, key).
#[inline(always)]
fn weigh<E: Element, S: Simd, const FMA: bool, const WIDE: usize, const R: usize>(
    values: &Values<'_, E>,
    weights: &[f32],
    strides: (usize, usize),
    shrink: &[f64],
    sums: &mut [f64],
) {
    let mut column = 0;
    // As many accumulators as the instruction set has registers for.
    if WIDE == 2 * LANES {
        while column + 2 * LANES <= values.size {
            weigh_columns::<E, S, 2, R>(values, column, weights, strides, shrink, sums);
            column += 2 * LANES;
        }
    }
    while column + LANES <= values.size {
        weigh_columns::<E, S, 1, R>(values, column, weights, strides, shrink, sums);
        column += LANES;
    }
    while column < values.size {
        weigh_column::<E, FMA, R>(values, column, weights, strides, shrink, sums);
        column += 1;
    }
}

/// C · LANES columns from `column` on.
#[inline(always)]
fn weigh_columns<E: Element, S: Simd, const C: usize, const R: usize>(
    values: &Values<'_, E>,
    column: usize,
    weights: &[f32],
    (row_stride, key_stride): (usize, usize),
    shrink: &[f64],
    sums: &mut [f64],
) {
    let mut total = [[S::zero(); C]; R];
    for key in values.block.clone() {
        let start = values.offsets[key] + values.shift + column;
        let chunks = values.elements[start..][..C * LANES].as_chunks::<LANES>().0;
        let mut value = [S::zero(); C];
        for part in 0..C {
            value[part] = E::load::<S>(&chunks[part]);
        }
        for row in 0..R {
            let weight = S::splat(weights[row * row_stride + key * key_stride]);
            for part in 0..C {
                total[row][part] = S::fma(weight, value[part], total[row][part]);
            }
        }
    }
    for row in 0..R {
        let sums = &mut sums[row * values.size + column..][..C * LANES];
        for (part, sums) in sums.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let total = S::store(total[row][part]);
            for lane in 0..LANES {
                sums[lane] = sums[lane] * shrink[row] + f64::from(total[lane]);
            }
        }
    }
}

#[inline(always)]
fn weigh_column<E: Element, const FMA: bool, const R: usize>(
    values: &Values<'_, E>,
    column: usize,
    weights: &[f32],
    (row_stride, key_stride): (usize, usize),
    shrink: &[f64],
    sums: &mut [f64],
) {
    for row in 0..R {
        let mut total = 0.0;
        for key in values.block.clone() {
            let value = values.elements[values.offsets[key] + values.shift + column].widen();
            total = fma::<FMA>(weights[row * row_stride + key * key_stride], value, total);
        }
        let sum = &mut sums[row * values.size + column];
        *sum = *sum * shrink[row] + f64::from(total);
    }
}
