//! f32 matrices in tiles of sixteen output features, and their product with a batch of activation rows.
//!
//! Every output element is one running sum over the inputs, in order, whatever the number of rows: a request's numbers
//! are bit for bit the same alone and in a batch.

use super::pool::{Pool, SharedOut};
use rayon::prelude::*;

/// Output features per tile.
const ROWS: usize = 16;
/// Most activation rows that a kernel handles at once.
const MAX_BATCH: usize = 8;

/// A weight matrix `[n, k]`.
pub(super) struct DenseTiles {
    n: usize,
    k: usize,
    /// `[tile][input][row]`; rows past `n` are zero.
    weights: Vec<[f32; ROWS]>,
}

impl DenseTiles {
    /// Lays out the rows of `parts` (`n_i × k` values each), concatenated.
    pub(super) fn pack(k: usize, parts: &[Vec<f32>]) -> Self {
        let rows: Vec<&[f32]> = parts.iter().flat_map(|p| p.chunks_exact(k)).collect();
        let n = rows.len();
        let mut weights = vec![[0f32; ROWS]; n.div_ceil(ROWS) * k];
        weights
            .par_chunks_mut(k)
            .zip(rows.par_chunks(ROWS))
            .for_each(|(tile, rows)| {
                for (r, row) in rows.iter().enumerate() {
                    for (column, w) in tile.iter_mut().zip(*row) {
                        column[r] = *w;
                    }
                }
            });
        Self { n, k, weights }
    }

    pub(super) fn rows(&self) -> usize {
        self.n
    }

    /// Copies one row into `out`, of length `k`.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        let tile = &self.weights[row / ROWS * self.k..][..self.k];
        for (out, column) in out.iter_mut().zip(tile) {
            *out = column[row % ROWS];
        }
    }

    /// `out[i · stride + column + j] = Σ_l x[i, l] · w[j, l]` for the `m` rows of `x`.
    pub(super) fn matmul(
        &self,
        pool: &Pool,
        m: usize,
        x: &[f32],
        out: &mut [f32],
        stride: usize,
        column: usize,
    ) {
        let out = SharedOut::new(out);
        let instructions = Instructions::detect();
        pool.run(self.n.div_ceil(ROWS), 1, &|tiles| {
            for t in tiles {
                let tile = &self.weights[t * self.k..][..self.k];
                let width = ROWS.min(self.n - t * ROWS);
                let mut first = 0;
                while first < m {
                    let mut sums = [[0f32; ROWS]; MAX_BATCH];
                    let x = &x[first * self.k..];
                    let count = match m - first {
                        1 => dot::<1>(instructions, tile, x, &mut sums),
                        2 | 3 => dot::<2>(instructions, tile, x, &mut sums),
                        4..=7 => dot::<4>(instructions, tile, x, &mut sums),
                        _ => dot::<8>(instructions, tile, x, &mut sums),
                    };
                    for (i, sums) in sums.iter().enumerate().take(count) {
                        let start = (first + i) * stride + column + t * ROWS;
                        // SAFETY: rows are `stride` apart and a tile's columns are its own.
                        unsafe { out.slice(start..start + width) }.copy_from_slice(&sums[..width]);
                    }
                    first += count;
                }
            }
        });
    }
}

#[derive(Clone, Copy)]
enum Instructions {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Fma,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Instructions {
    fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self::Fma;
            }
        }
        Self::Portable
    }
}

fn dot<const M: usize>(
    instructions: Instructions,
    tile: &[[f32; ROWS]],
    x: &[f32],
    sums: &mut [[f32; ROWS]; MAX_BATCH],
) -> usize {
    let k = tile.len();
    let x: [&[f32]; M] = std::array::from_fn(|i| &x[i * k..][..k]);
    let out = match instructions {
        Instructions::Portable => running_sums::<M, false>(tile, x),
        // SAFETY: made by `detect` only.
        #[cfg(target_arch = "x86_64")]
        Instructions::Fma => unsafe { running_sums_fma(tile, x) },
        // SAFETY: made by `detect` only.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512 => unsafe { running_sums_avx512(tile, x) },
    };
    sums[..M].copy_from_slice(&out);
    M
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // One index names the same row in several arrays.
fn running_sums<const M: usize, const FUSED: bool>(
    tile: &[[f32; ROWS]],
    x: [&[f32]; M],
) -> [[f32; ROWS]; M] {
    let k = tile.len();
    let x = x.map(|row| &row[..k]);
    let mut sums = [[0f32; ROWS]; M];
    for (l, weights) in tile.iter().enumerate() {
        for m in 0..M {
            let a = x[m][l];
            for r in 0..ROWS {
                // Without the instruction `mul_add` is a library call.
                sums[m][r] = if FUSED {
                    weights[r].mul_add(a, sums[m][r])
                } else {
                    weights[r] * a + sums[m][r]
                };
            }
        }
    }
    sums
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn running_sums_fma<const M: usize>(tile: &[[f32; ROWS]], x: [&[f32]; M]) -> [[f32; ROWS]; M] {
    running_sums::<M, true>(tile, x)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
fn running_sums_avx512<const M: usize>(tile: &[[f32; ROWS]], x: [&[f32]; M]) -> [[f32; ROWS]; M] {
    running_sums::<M, true>(tile, x)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        std::iter::repeat_with(next).take(n).collect()
    }

    #[test]
    fn product_equals_the_plain_formula_and_ignores_the_batch() {
        let pool = Pool::new(Some(2));
        let (n, k) = (37, 50);
        let w = values(n * k, 1);
        let tiles = DenseTiles::pack(k, &[w[..20 * k].to_vec(), w[20 * k..].to_vec()]);
        for m in [1, 2, 3, 5, 8, 13] {
            let x = values(m * k, 2);
            let stride = n + 3;
            let mut out = vec![f32::NAN; m * stride];
            tiles.matmul(&pool, m, &x, &mut out, stride, 2);
            for i in 0..m {
                let mut alone = vec![0.0; n];
                tiles.matmul(&pool, 1, &x[i * k..][..k], &mut alone, n, 0);
                assert_eq!(&out[i * stride + 2..][..n], alone, "row {i} of {m}");
                for j in 0..n {
                    let exact: f64 = (0..k)
                        .map(|l| f64::from(x[i * k + l]) * f64::from(w[j * k + l]))
                        .sum();
                    assert!(
                        (f64::from(alone[j]) - exact).abs() < 1e-5,
                        "{} against {exact}",
                        alone[j]
                    );
                }
                assert!(out[i * stride].is_nan() && out[i * stride + n + 2].is_nan());
            }
        }
        let mut row = vec![0.0; k];
        tiles.row(33, &mut row);
        assert_eq!(row, &w[33 * k..][..k]);
    }
}
