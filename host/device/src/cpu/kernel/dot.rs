//! One to four query rows (a decode): dot products along the head.

use super::{
    BLOCK, LANES, Task, Values, Workspace, begin, blocks, finish, offsets, raise, transform, weigh,
    widen,
};
use crate::cpu::math::{Element, exp, fma};

/// One to four query rows.
#[inline(always)]
pub(super) fn dot_form<E: Element, const FMA: bool, const WIDE: usize, const R: usize>(
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
