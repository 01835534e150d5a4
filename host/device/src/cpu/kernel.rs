//! Attention of one tile of query rows against one range of paged keys, for one KV head.
//!
//! Keys are taken in blocks of 64, counted from the range's first key, so that a query row's result depends on nothing but
//! its own range: not on the rows that share its tile, nor on where its mask begins. Within a block everything is f32;
//! across blocks the output and the sum of weights accumulate in f64 (one operation in 64), which keeps rounding flat at
//! any context length.
//!
//! Two forms of the same computation: up to four rows (a decode) take dot products along the head; more rows are spread
//! over the lanes, so that no sum runs across lanes. The code is plain Rust over fixed-size arrays; it is compiled three
//! times, and the best that the machine can run is chosen once.

use std::{ops::Range, sync::OnceLock};

use super::{
    AttentionConfig,
    math::{Element, exp, fma, tanh},
};

/// Keys of one block.
const BLOCK: usize = 64;
/// Rows that are computed together; a larger tile is cut.
const MAX_ROWS: usize = 64;
/// Up to this many rows take dot products.
const DOT_ROWS: usize = 4;
/// Lanes that the rows of a tile are padded to.
const LANES: usize = 16;

/// One tile's inputs. `pages` holds all keys of the request, and `cache` all of `pages`.
pub(super) struct Task<'a, E> {
    /// f32 [T, num_heads, head_size]
    pub query: &'a [f32],
    /// [num_blocks, num_kv_heads, block_size, 2 * head_size]
    pub cache: &'a [E],
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

    /// Index of the key of position `key` in the cache; its value follows it.
    fn offset(&self, key: usize) -> usize {
        let config = self.config;
        let block = self.pages[key / config.block_size] as usize;
        let state = key % config.block_size;
        ((block * config.num_kv_heads + self.kv_head) * config.block_size + state)
            * 2
            * config.head_size
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
    /// Unnormalised output, f64 [rows, head_size].
    sums: Vec<f64>,
    /// Lane form: a block's keys, then its values, widened, where the cache is not f32.
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

/// Attention of packed query rows `packed` of the task's request: normalised output f32 [rows, head_size], zeros for a row
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
    attend_on::<E, FMA, 16>(task, packed, workspace, output, lse);
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
    attend_on::<E, true, 16>(task, packed, workspace, output, lse);
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
    attend_on::<E, true, 32>(task, packed, workspace, output, lse);
}

/// `WIDE`: f32 that two registers hold.
#[inline(always)]
fn attend_on<E: Element, const FMA: bool, const WIDE: usize>(
    task: &Task<'_, E>,
    packed: Range<usize>,
    workspace: &mut Workspace,
    output: &mut [f32],
    lse: &mut [f64],
) {
    let size = task.config.head_size;
    let mut done = 0;
    while done < packed.len() {
        let first = packed.start + done;
        let rows = (packed.len() - done).min(MAX_ROWS);
        let output = &mut output[done * size..(done + rows) * size];
        let lse = &mut lse[done..done + rows];
        match rows {
            1 => dot_form::<E, FMA, WIDE, 1>(task, first, workspace, output, lse),
            2 => dot_form::<E, FMA, WIDE, 2>(task, first, workspace, output, lse),
            3 => dot_form::<E, FMA, WIDE, 3>(task, first, workspace, output, lse),
            DOT_ROWS => dot_form::<E, FMA, WIDE, 4>(task, first, workspace, output, lse),
            _ => lane_form::<E, FMA, WIDE>(task, first, rows, workspace, output, lse),
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
    sums.resize(padded * task.config.head_size, 0.0);
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
    let stride = 2 * task.config.head_size;
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

/// Sum of an array by halves.
#[inline(always)]
fn tree_sum(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn widen<E: Element, const N: usize>(from: &[E; N]) -> [f32; N] {
    let mut to = [0.0; N];
    for (to, &from) in to.iter_mut().zip(from) {
        *to = from.widen();
    }
    to
}

/// One to four query rows.
#[inline(always)]
fn dot_form<E: Element, const FMA: bool, const WIDE: usize, const R: usize>(
    task: &Task<'_, E>,
    first: usize,
    workspace: &mut Workspace,
    output: &mut [f32],
    lse: &mut [f64],
) {
    let size = task.config.head_size;
    let Workspace {
        query,
        scores,
        sums,
        rows,
        ..
    } = workspace;
    let visible = begin(task, first, R, R, rows, sums);
    let chunks = size.div_ceil(LANES);
    query.clear();
    query.resize(R * chunks * LANES, 0.0);
    for row in 0..R {
        query[row * chunks * LANES..][..size].copy_from_slice(task.query_row(first + row));
    }
    let query: [&[[f32; LANES]]; R] = core::array::from_fn(|row| {
        query[row * chunks * LANES..(row + 1) * chunks * LANES]
            .as_chunks()
            .0
    });
    scores.clear();
    scores.resize(R * BLOCK, 0.0);
    let cap = task.config.logits_soft_cap.map(|cap| (cap, 1.0 / cap));

    for (base, block) in blocks(task.keys.start, visible) {
        let offsets = offsets(task, base, &block);
        for key in block.clone() {
            let dots = dot::<E, FMA, R>(&query, &task.cache[offsets[key]..][..size]);
            for row in 0..R {
                scores[row * BLOCK + key] = dots[row];
            }
        }
        for (row, scores) in scores.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            let first = rows.first[row] - base as i32;
            let after = rows.after[row] - base as i32;
            let mut lanes = [f32::NEG_INFINITY; LANES];
            for (part, scores) in scores.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                for lane in 0..LANES {
                    let key = (part * LANES + lane) as i32;
                    let seen = key >= first && key < after;
                    let score = transform::<FMA>(scores[lane], task.config.scale, cap);
                    let score = if seen { score } else { f32::NEG_INFINITY };
                    scores[lane] = score;
                    lanes[lane] = if score > lanes[lane] {
                        score
                    } else {
                        lanes[lane]
                    };
                }
            }
            let block_max = lanes
                .iter()
                .fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
            let max = raise(&mut rows.max[row], &mut rows.shrink[row], block_max);
            let mut lanes = [0.0; LANES];
            for scores in scores.as_chunks_mut::<LANES>().0 {
                for lane in 0..LANES {
                    scores[lane] = exp::<FMA>(scores[lane] - max);
                    lanes[lane] += scores[lane];
                }
            }
            rows.weight[row] = rows.weight[row] * rows.shrink[row] + f64::from(tree_sum(lanes));
        }
        weigh::<E, FMA, WIDE, R>(
            &Values {
                elements: task.cache,
                offsets: &offsets,
                shift: size,
                size,
                block,
            },
            scores,
            (BLOCK, 1),
            &rows.shrink[..R],
            sums,
        );
    }
    finish(size, rows, sums, output, lse);
}

/// q·k of R query rows and one key.
#[inline(always)]
fn dot<E: Element, const FMA: bool, const R: usize>(
    query: &[&[[f32; LANES]]; R],
    key: &[E],
) -> [f32; R] {
    let mut lanes = [[0.0f32; LANES]; R];
    let (chunks, rest) = key.as_chunks::<LANES>();
    for (index, chunk) in chunks.iter().enumerate() {
        let key = widen(chunk);
        for row in 0..R {
            let query = &query[row][index];
            for lane in 0..LANES {
                lanes[row][lane] = fma::<FMA>(query[lane], key[lane], lanes[row][lane]);
            }
        }
    }
    for (lane, key) in rest.iter().enumerate() {
        for row in 0..R {
            let query = query[row][chunks.len()][lane];
            lanes[row][lane] = fma::<FMA>(query, key.widen(), lanes[row][lane]);
        }
    }
    lanes.map(tree_sum)
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
fn weigh<E: Element, const FMA: bool, const WIDE: usize, const R: usize>(
    values: &Values<'_, E>,
    weights: &[f32],
    strides: (usize, usize),
    shrink: &[f64],
    sums: &mut [f64],
) {
    let mut column = 0;
    while column + WIDE <= values.size {
        weigh_columns::<E, FMA, WIDE, R>(values, column, weights, strides, shrink, sums);
        column += WIDE;
    }
    while column + LANES <= values.size {
        weigh_columns::<E, FMA, LANES, R>(values, column, weights, strides, shrink, sums);
        column += LANES;
    }
    while column < values.size {
        weigh_columns::<E, FMA, 1, R>(values, column, weights, strides, shrink, sums);
        column += 1;
    }
}

#[inline(always)]
fn weigh_columns<E: Element, const FMA: bool, const N: usize, const R: usize>(
    values: &Values<'_, E>,
    column: usize,
    weights: &[f32],
    (row_stride, key_stride): (usize, usize),
    shrink: &[f64],
    sums: &mut [f64],
) {
    let mut total = [[0.0f32; N]; R];
    for key in values.block.clone() {
        let start = values.offsets[key] + values.shift + column;
        let Some(chunk) = values.elements[start..].first_chunk::<N>() else {
            continue;
        };
        let value = widen(chunk);
        for row in 0..R {
            let weight = weights[row * row_stride + key * key_stride];
            for lane in 0..N {
                total[row][lane] = fma::<FMA>(weight, value[lane], total[row][lane]);
            }
        }
    }
    for row in 0..R {
        let sums = &mut sums[row * values.size + column..][..N];
        for lane in 0..N {
            sums[lane] = sums[lane] * shrink[row] + f64::from(total[row][lane]);
        }
    }
}

/// Five to `MAX_ROWS` query rows.
#[inline(always)]
fn lane_form<E: Element, const FMA: bool, const WIDE: usize>(
    task: &Task<'_, E>,
    first: usize,
    count: usize,
    workspace: &mut Workspace,
    output: &mut [f32],
    lse: &mut [f64],
) {
    let size = task.config.head_size;
    let padded = count.next_multiple_of(LANES);
    let Workspace {
        query,
        scores,
        sums,
        staged,
        rows,
    } = workspace;
    let visible = begin(task, first, count, padded, rows, sums);
    transpose_queries::<E, WIDE>(task, first, count, padded, query);
    scores.clear();
    scores.resize(BLOCK * padded, 0.0);
    let cap = task.config.logits_soft_cap.map(|cap| (cap, 1.0 / cap));
    if E::AS_F32.is_none() {
        staged.resize(BLOCK * 2 * size, 0.0);
    }

    for (base, block) in blocks(task.keys.start, visible) {
        let mut offsets = offsets(task, base, &block);
        let elements = match E::AS_F32 {
            Some(as_f32) => as_f32(task.cache),
            None => {
                for key in block.clone() {
                    let content = &task.cache[offsets[key]..][..2 * size];
                    for (to, from) in staged[key * 2 * size..].iter_mut().zip(content) {
                        *to = from.widen();
                    }
                    offsets[key] = key * 2 * size;
                }
                &staged[..]
            }
        };
        let mut row = 0;
        while row + WIDE <= padded {
            let query = &query[row * size..(row + WIDE) * size];
            let scores = &mut scores[row..];
            score::<FMA, WIDE>(query, elements, &offsets, &block, size, padded, scores);
            row += WIDE;
        }
        while row < padded {
            let query = &query[row * size..(row + LANES) * size];
            let scores = &mut scores[row..];
            score::<FMA, LANES>(query, elements, &offsets, &block, size, padded, scores);
            row += LANES;
        }
        for row in (0..padded).step_by(LANES) {
            soften::<FMA>(
                base,
                &block,
                row,
                padded,
                task.config.scale,
                cap,
                rows,
                scores,
            );
        }
        let values = Values {
            elements,
            offsets: &offsets,
            shift: size,
            size,
            block,
        };
        for row in (0..padded).step_by(4) {
            weigh::<f32, FMA, WIDE, 4>(
                &values,
                &scores[row..],
                (1, padded),
                &rows.shrink[row..row + 4],
                &mut sums[row * size..],
            );
        }
    }
    finish(size, rows, sums, output, lse);
}

/// Query rows as lane blocks: [head_size, WIDE] for every WIDE rows, then [head_size, LANES] for the rest. Rows from
/// `count` on are zeros.
#[inline(always)]
fn transpose_queries<E, const WIDE: usize>(
    task: &Task<'_, E>,
    first: usize,
    count: usize,
    padded: usize,
    query: &mut Vec<f32>,
) {
    let size = task.config.head_size;
    query.clear();
    query.resize(padded * size, 0.0);
    for row in 0..count {
        let wide = padded / WIDE * WIDE;
        let lanes = if row < wide { WIDE } else { LANES };
        let start = row / lanes * lanes;
        for (index, &x) in task.query_row(first + row).iter().enumerate() {
            query[start * size + index * lanes + row - start] = x;
        }
    }
}

/// scores[key · padded + lane] = q·k for N query rows (`query`: [head_size, N]) and the keys of the block.
#[inline(always)]
fn score<const FMA: bool, const N: usize>(
    query: &[f32],
    elements: &[f32],
    offsets: &[usize; BLOCK],
    block: &Range<usize>,
    size: usize,
    padded: usize,
    scores: &mut [f32],
) {
    let query = query.as_chunks::<N>().0;
    let mut key = block.start;
    while key + 4 <= block.end {
        let keys: [&[f32]; 4] =
            core::array::from_fn(|index| &elements[offsets[key + index]..][..size]);
        for (index, total) in dots::<FMA, N, 4>(query, keys).iter().enumerate() {
            scores[(key + index) * padded..][..N].copy_from_slice(total);
        }
        key += 4;
    }
    while key < block.end {
        let keys = [&elements[offsets[key]..][..size]];
        let [total] = dots::<FMA, N, 1>(query, keys);
        scores[key * padded..][..N].copy_from_slice(&total);
        key += 1;
    }
}

#[inline(always)]
fn dots<const FMA: bool, const N: usize, const K: usize>(
    query: &[[f32; N]],
    keys: [&[f32]; K],
) -> [[f32; N]; K] {
    let mut total = [[0.0f32; N]; K];
    for (index, query) in query.iter().enumerate() {
        for key in 0..K {
            let x = keys[key][index];
            for lane in 0..N {
                total[key][lane] = fma::<FMA>(x, query[lane], total[key][lane]);
            }
        }
    }
    total
}

/// Scores to weights for LANES rows from `row` on.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "inlined into one caller")]
fn soften<const FMA: bool>(
    base: usize,
    block: &Range<usize>,
    row: usize,
    padded: usize,
    scale: f32,
    cap: Option<(f32, f32)>,
    rows: &mut Rows,
    scores: &mut [f32],
) {
    let lanes_of = |key: usize| key * padded + row..key * padded + row + LANES;
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut first = [0i32; LANES];
    let mut after = [0i32; LANES];
    first.copy_from_slice(&rows.first[row..row + LANES]);
    after.copy_from_slice(&rows.after[row..row + LANES]);
    for key in block.clone() {
        let scores = &mut scores[lanes_of(key)];
        let position = (base + key) as i32;
        for lane in 0..LANES {
            let seen = position >= first[lane] && position < after[lane];
            let score = transform::<FMA>(scores[lane], scale, cap);
            let score = if seen { score } else { f32::NEG_INFINITY };
            scores[lane] = score;
            max[lane] = if score > max[lane] { score } else { max[lane] };
        }
    }
    for lane in 0..LANES {
        max[lane] = raise(
            &mut rows.max[row + lane],
            &mut rows.shrink[row + lane],
            max[lane],
        );
    }
    let mut weight = [0.0f32; LANES];
    for key in block.clone() {
        let scores = &mut scores[lanes_of(key)];
        for lane in 0..LANES {
            scores[lane] = exp::<FMA>(scores[lane] - max[lane]);
            weight[lane] += scores[lane];
        }
    }
    for lane in 0..LANES {
        let total = &mut rows.weight[row + lane];
        *total = *total * rows.shrink[row + lane] + f64::from(weight[lane]);
    }
}
