//! Up to 64 query rows, five of them or more worth its while: rows over the lanes, so that no sum runs across lanes.

use std::ops::Range;

use super::{
    BLOCK, LANES, Rows, Simd, Task, Values, Workspace, begin, blocks, finish, offsets, raise,
    transform, weigh,
};
use crate::cpu::math::{Element, exp, fma};

/// Up to `MAX_ROWS` query rows.
#[inline(always)]
pub(super) fn lane_form<E: Element, S: Simd, const FMA: bool, const WIDE: usize>(
    task: &Task<'_, E>,
    first: usize,
    count: usize,
    workspace: &mut Workspace,
    output: &mut [f32],
    lse: &mut [f64],
) {
    let (size, content) = (task.config.head_size, task.content);
    let width = content.width(size);
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
        staged.resize(BLOCK * width, 0.0);
    }

    for (base, block) in blocks(task.keys.start, visible) {
        let mut offsets = offsets(task, base, &block);
        let elements = match E::AS_F32 {
            Some(as_f32) => as_f32(task.cache),
            None => {
                for key in block.clone() {
                    let packed = &task.cache[offsets[key]..][..content.stride];
                    E::unpack(packed, &mut staged[key * width..][..width]);
                    offsets[key] = key * width;
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
            shift: content.value_start,
            size: content.value_size,
            block,
        };
        for row in (0..padded).step_by(4) {
            weigh::<f32, S, FMA, WIDE, 4>(
                &values,
                &scores[row..],
                (1, padded),
                &rows.shrink[row..row + 4],
                &mut sums[row * content.value_size..],
            );
        }
    }
    finish(content.value_size, rows, sums, output, lse);
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

/// Products that are summed before they join the total: a long sum in one register would round twice as much at heads of
/// 256.
const PART: usize = 16;

#[inline(always)]
fn dots<const FMA: bool, const N: usize, const K: usize>(
    query: &[[f32; N]],
    keys: [&[f32]; K],
) -> [[f32; N]; K] {
    let mut total = [[0.0f32; N]; K];
    let (parts, rest) = query.as_chunks::<PART>();
    for (part, query) in parts.iter().enumerate() {
        let keys: [&[f32; PART]; K] = core::array::from_fn(|key| part_of(keys[key], part * PART));
        add_dots::<FMA, N, K, PART>(query, keys, &mut total);
    }
    for (index, query) in rest.iter().enumerate() {
        let keys: [&[f32; 1]; K] =
            core::array::from_fn(|key| part_of(keys[key], parts.len() * PART + index));
        add_dots::<FMA, N, K, 1>(core::array::from_ref(query), keys, &mut total);
    }
    total
}

#[inline(always)]
fn part_of<const P: usize>(key: &[f32], start: usize) -> &[f32; P] {
    key[start..]
        .first_chunk()
        .expect("keys are as long as queries")
}

#[inline(always)]
fn add_dots<const FMA: bool, const N: usize, const K: usize, const P: usize>(
    query: &[[f32; N]; P],
    keys: [&[f32; P]; K],
    total: &mut [[f32; N]; K],
) {
    let mut sum = [[0.0f32; N]; K];
    for index in 0..P {
        for key in 0..K {
            let x = keys[key][index];
            for lane in 0..N {
                sum[key][lane] = fma::<FMA>(x, query[index][lane], sum[key][lane]);
            }
        }
    }
    for key in 0..K {
        for lane in 0..N {
            total[key][lane] += sum[key][lane];
        }
    }
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
    for (lane, max) in max.iter_mut().enumerate() {
        *max = raise(
            &mut rows.max[row + lane],
            &mut rows.shrink[row + lane],
            *max,
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
    for (lane, weight) in weight.into_iter().enumerate() {
        let total = &mut rows.weight[row + lane];
        *total = *total * rows.shrink[row + lane] + f64::from(weight);
    }
}
