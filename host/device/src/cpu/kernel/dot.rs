//! One to four query rows (a decode): dot products along the head.

use super::{
    BLOCK, LANES, Simd, Task, Values, Workspace, begin, blocks, finish, offsets, raise, simd,
    transform, weigh,
};
use crate::cpu::math::{Element, exp};

/// One to four query rows.
#[inline(always)]
pub(super) fn dot_form<E: Element, S: Simd, const FMA: bool, const WIDE: usize, const R: usize>(
    task: &Task<'_, E>,
    first: usize,
    workspace: &mut Workspace,
    output: &mut [f32],
    lse: &mut [f64],
) {
    let (size, content) = (task.config.head_size, task.content);
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

    let mut blocks = blocks(task.keys.start, visible).peekable();
    while let Some((base, block)) = blocks.next() {
        let offsets = offsets(task, base, &block);
        // A decode reads each key once, from memory: while this block is computed, ask for the next.
        let ahead = blocks.peek().cloned();
        for key in block.clone() {
            if let Some((base, block)) = &ahead
                && block.contains(&key)
            {
                S::prefetch(&task.cache[task.offset(base + key)..][..content.stride]);
            }
            let dots = dot::<E, S, R>(&query, &task.cache[offsets[key]..][..size]);
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
            rows.weight[row] =
                rows.weight[row] * rows.shrink[row] + f64::from(simd::Portable::<FMA>::sum(lanes));
        }
        weigh::<E, S, FMA, WIDE, R>(
            &Values {
                elements: task.cache,
                offsets: &offsets,
                shift: content.value_start,
                size: content.value_size,
                block,
            },
            scores,
            (BLOCK, 1),
            &rows.shrink[..R],
            sums,
        );
    }
    finish(content.value_size, rows, sums, output, lse);
}

/// q·k of R query rows (each padded with zeros to whole chunks) and one key.
#[inline(always)]
fn dot<E: Element, S: Simd, const R: usize>(query: &[&[[f32; LANES]]; R], key: &[E]) -> [f32; R] {
    let mut lanes = [S::zero(); R];
    let (chunks, rest) = key.as_chunks::<LANES>();
    for (index, chunk) in chunks.iter().enumerate() {
        let key = E::load::<S>(chunk);
        for row in 0..R {
            lanes[row] = S::fma(S::load(&query[row][index]), key, lanes[row]);
        }
    }
    if !rest.is_empty() {
        let mut last = [0.0; LANES];
        for (last, key) in last.iter_mut().zip(rest) {
            *last = key.widen();
        }
        let key = S::load(&last);
        for row in 0..R {
            lanes[row] = S::fma(S::load(&query[row][chunks.len()]), key, lanes[row]);
        }
    }
    let mut dots = [0.0; R];
    for row in 0..R {
        dots[row] = S::sum(lanes[row]);
    }
    dots
}
