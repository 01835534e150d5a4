//! Products of few rows with a matrix of weights, either way round. It must never know what is projected.
//!
//! An element of a result is one sum in one order, whatever other rows are computed with it: sixteen lanes over the products
//! where weights lie along them, parts of sixteen products elsewhere.

use super::{LANES, Simd, Work, on_best};

/// Products that are summed before they join the total.
const PART: usize = 16;

/// Rows and the weights that they meet.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Projection<'a> {
    /// f32 [rows, x_stride], of which the first `inputs` count.
    pub x: &'a [f32],
    pub x_stride: usize,
    pub inputs: usize,
    /// `project`: f32 [outputs, inputs]; `combine`: f32 [inputs, outputs].
    pub weights: &'a [f32],
    pub outputs: usize,
}

/// out[row][o] = Σ_i x[row][i] · weights[o][i]. `out`: f32 [rows, stride], of which the first `outputs` are written.
pub(in crate::cpu) fn project(of: &Projection<'_>, rows: usize, out: &mut [f32], stride: usize) {
    on_best(Product::<false> {
        of,
        rows,
        out,
        stride,
    });
}

/// out[row][o] = Σ_i x[row][i] · weights[i][o].
pub(in crate::cpu) fn combine(of: &Projection<'_>, rows: usize, out: &mut [f32], stride: usize) {
    on_best(Product::<true> {
        of,
        rows,
        out,
        stride,
    });
}

struct Product<'a, const COMBINE: bool> {
    of: &'a Projection<'a>,
    rows: usize,
    out: &'a mut [f32],
    stride: usize,
}

impl<const COMBINE: bool> Work for Product<'_, COMBINE> {
    #[inline(always)]
    fn run<S: Simd, const FMA: bool>(self) {
        tiles::<S, COMBINE>(self.of, self.rows, self.out, self.stride);
    }
}

#[inline(always)]
fn tiles<S: Simd, const COMBINE: bool>(
    of: &Projection<'_>,
    rows: usize,
    out: &mut [f32],
    stride: usize,
) {
    let mut row = 0;
    while row + 4 <= rows {
        tile::<S, COMBINE, 4>(of, row, out, stride);
        row += 4;
    }
    while row < rows {
        tile::<S, COMBINE, 1>(of, row, out, stride);
        row += 1;
    }
}

#[inline(always)]
fn tile<S: Simd, const COMBINE: bool, const R: usize>(
    of: &Projection<'_>,
    first: usize,
    out: &mut [f32],
    stride: usize,
) {
    let x: [&[f32]; R] =
        core::array::from_fn(|row| &of.x[(first + row) * of.x_stride..][..of.inputs]);
    let out = &mut out[first * stride..];
    let mut at = 0;
    if COMBINE {
        while at < of.outputs {
            let lanes = LANES.min(of.outputs - at);
            let sums = columns::<S, R>(&x, of.weights, of.outputs, at, lanes);
            for (row, sums) in sums.iter().enumerate() {
                out[row * stride + at..][..lanes].copy_from_slice(&sums[..lanes]);
            }
            at += lanes;
        }
        return;
    }
    let weights = |output: usize| &of.weights[output * of.inputs..][..of.inputs];
    while at + 2 <= of.outputs {
        let sums = dots::<S, R, 2>(&x, [weights(at), weights(at + 1)]);
        for (row, sums) in sums.iter().enumerate() {
            out[row * stride + at..][..2].copy_from_slice(sums);
        }
        at += 2;
    }
    if at < of.outputs {
        for (row, [sum]) in dots::<S, R, 1>(&x, [weights(at)]).into_iter().enumerate() {
            out[row * stride + at] = sum;
        }
    }
}

/// x · w of R rows and O outputs.
#[inline(always)]
fn dots<S: Simd, const R: usize, const O: usize>(
    x: &[&[f32]; R],
    weights: [&[f32]; O],
) -> [[f32; O]; R] {
    let mut lanes = [[S::zero(); O]; R];
    let mut step = |x: [&[f32; LANES]; R], weights: [&[f32; LANES]; O]| {
        let weights = weights.map(S::load);
        for row in 0..R {
            let x = S::load(x[row]);
            for output in 0..O {
                lanes[row][output] = S::fma(x, weights[output], lanes[row][output]);
            }
        }
    };
    let chunks = x[0].len() / LANES;
    for chunk in 0..chunks {
        step(
            x.map(|x| chunk_of(x, chunk)),
            weights.map(|weights| chunk_of(weights, chunk)),
        );
    }
    if !x[0].len().is_multiple_of(LANES) {
        let x = x.map(|x| padded(&x[chunks * LANES..]));
        let weights = weights.map(|weights| padded(&weights[chunks * LANES..]));
        step(x.each_ref(), weights.each_ref());
    }
    lanes.map(|lanes| lanes.map(S::sum))
}

#[inline(always)]
fn chunk_of(of: &[f32], chunk: usize) -> &[f32; LANES] {
    of[chunk * LANES..]
        .first_chunk()
        .expect("rows and weights are as long as there are inputs")
}

#[inline(always)]
fn padded(rest: &[f32]) -> [f32; LANES] {
    let mut last = [0.0; LANES];
    last[..rest.len()].copy_from_slice(rest);
    last
}

/// Σ_i x[i] · weights[i][at + lane] of R rows; lanes from `count` on are zeros.
#[inline(always)]
fn columns<S: Simd, const R: usize>(
    x: &[&[f32]; R],
    weights: &[f32],
    outputs: usize,
    at: usize,
    count: usize,
) -> [[f32; LANES]; R] {
    let mut total = [S::zero(); R];
    let one = S::splat(1.0);
    for first in (0..x[0].len()).step_by(PART) {
        let mut sum = [S::zero(); R];
        for input in first..(first + PART).min(x[0].len()) {
            let weights = &weights[input * outputs + at..][..count];
            let weights = match weights.first_chunk() {
                Some(weights) => S::load(weights),
                None => S::load(&padded(weights)),
            };
            for row in 0..R {
                sum[row] = S::fma(S::splat(x[row][input]), weights, sum[row]);
            }
        }
        for row in 0..R {
            total[row] = S::fma(one, sum[row], total[row]);
        }
    }
    total.map(S::store)
}

#[cfg(test)]
mod tests {
    use super::{super::simd::Portable, Projection, combine, project, tiles};

    type Run = fn(&Projection<'_>, usize, &mut [f32], usize);

    /// In [−1, 1) with all the bits that f32 has, so that a sum shows its order.
    fn value(at: usize) -> f32 {
        let mixed = (at as u32 + 1).wrapping_mul(0x9e37_79b9);
        let mixed = (mixed ^ (mixed >> 15)).wrapping_mul(0x85eb_ca6b);
        (mixed >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    #[test]
    fn products_are_right_and_do_not_depend_on_their_neighbours() {
        let mut order_shows = 0;
        for (rows, inputs, outputs) in [(1, 1, 1), (5, 20, 7), (9, 33, 16), (4, 48, 35)] {
            let (x_stride, stride) = (inputs + 3, outputs + 2);
            let x: Vec<f32> = (0..rows * x_stride).map(value).collect();
            let weights: Vec<f32> = (0..inputs * outputs).map(|at| value(at + 7_000)).collect();
            let of = Projection {
                x: &x,
                x_stride,
                inputs,
                weights: &weights,
                outputs,
            };
            let all: [(Run, bool); 4] = [
                (project, false),
                (combine, true),
                (tiles::<Portable<false>, false>, false),
                (tiles::<Portable<false>, true>, true),
            ];
            for (run, across) in all {
                let mut out = vec![f32::NAN; rows * stride];
                run(&of, rows, &mut out, stride);
                for row in 0..rows {
                    let out = &out[row * stride..(row + 1) * stride];
                    for (output, &found) in out[..outputs].iter().enumerate() {
                        let products = (0..inputs).map(|input| {
                            let at = match across {
                                true => input * outputs + output,
                                false => output * inputs + input,
                            };
                            (x[row * x_stride + input], weights[at])
                        });
                        let exact: f64 = products
                            .clone()
                            .map(|(x, weight)| f64::from(x) * f64::from(weight))
                            .sum();
                        assert!((f64::from(found) - exact).abs() < 2e-6, "{found} {exact}");
                        let in_f32 = products.map(|(x, weight)| x * weight);
                        let (forth, back): (f32, f32) = (in_f32.clone().sum(), in_f32.rev().sum());
                        order_shows += usize::from(forth.to_bits() != back.to_bits());
                    }
                    assert!(out[outputs..].iter().all(|x| x.is_nan()));
                    // Without the other rows, and, of weights that lie along them, without the other outputs.
                    let alone = Projection {
                        x: &x[row * x_stride..],
                        ..of
                    };
                    let mut again = vec![f32::NAN; outputs];
                    run(&alone, 1, &mut again, outputs);
                    assert_eq!(bits(&again), bits(&out[..outputs]));
                    if !across {
                        for (output, weights) in weights.chunks(inputs).enumerate() {
                            let one = Projection {
                                weights,
                                outputs: 1,
                                ..alone
                            };
                            run(&one, 1, &mut again[output..=output], 1);
                        }
                        assert_eq!(bits(&again), bits(&out[..outputs]));
                    }
                }
            }
        }
        assert!(
            order_shows > 500,
            "{order_shows} of 1,276 sums show their order"
        );
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| x.to_bits()).collect()
    }
}
