//! Block-quantised matrices, repacked so that one instruction serves sixteen output features.
//!
//! ggml's 32-value types are all of the form `w = d · (q − zero) + m` with small unsigned `q`. Here sixteen rows are
//! interleaved: for every block of 32 inputs a tile holds sixteen scales, sixteen minima where the type has them, and
//! the codes in *lines* of 64 bytes, four consecutive inputs of each of the sixteen rows. A dot-product instruction
//! then multiplies four broadcast activations with a whole line and needs no horizontal sums. The bytes are the file's,
//! only their order differs: a tile is exactly as large as the blocks it was made from.
//!
//! Activations are quantised per block of 32 to int8. An output element is computed by the same operations in the same
//! order whatever the number of activation rows, so a request's numbers do not depend on who shares its batch.

use super::pool::{Pool, SharedOut};
use super::tiles_x86;
use candle_core::quantized::GgmlDType;
use half::f16;
use rayon::prelude::*;

/// Output features per tile.
pub(super) const ROWS: usize = 16;
/// Inputs per quantisation block.
pub(super) const BLOCK: usize = 32;
/// Most activation rows that a kernel handles at once.
const MAX_BATCH: usize = 4;
/// Blocks worth a thread's while to quantise.
const MIN_QUANTISE: usize = 256;

/// Four inputs (8-bit codes), or four and the four sixteen later (4-bit codes, low and high nibble), of sixteen rows;
/// byte `4 · row + input`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [u8; 64]);

/// Width of a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Codes {
    /// Four bits; four lines per block.
    Nibbles,
    /// Eight bits; eight lines per block.
    Bytes,
}

impl Codes {
    fn lines(self) -> usize {
        match self {
            Self::Nibbles => 4,
            Self::Bytes => 8,
        }
    }
}

/// A weight matrix `[n, k]` of one of ggml's 32-value block types.
pub(super) struct QuantTiles {
    n: usize,
    k: usize,
    codes: Codes,
    simd: Simd,
    /// Subtracted from every code; 0 for the types with minima.
    zero: i32,
    /// `[tile][block][line]`.
    lines: Vec<Line>,
    /// Scales as f16 bits, `[tile][block][row]`.
    scales: Vec<[u16; ROWS]>,
    /// Minima as f16 bits, likewise; empty for the symmetric types.
    minima: Vec<[u16; ROWS]>,
}

/// What a kernel reads of one tile.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    pub(super) zero: i32,
    pub(super) lines: &'a [Line],
    pub(super) scales: &'a [[u16; ROWS]],
    pub(super) minima: &'a [[u16; ROWS]],
}

/// Activations quantised to int8, one scale per 32.
#[derive(Default)]
pub(super) struct QuantActs {
    blocks_per_row: usize,
    codes: Vec<[i8; BLOCK]>,
    scales: Vec<f32>,
    /// Sum of a block's codes.
    sums: Vec<i32>,
}

/// One quantised activation row.
#[derive(Clone, Copy)]
pub(super) struct ActRow<'a> {
    pub(super) codes: &'a [[i8; BLOCK]],
    pub(super) scales: &'a [f32],
    pub(super) sums: &'a [i32],
}

/// Computes one tile for `M` activation rows.
pub(super) type Kernel<const M: usize> = fn(Tile<'_>, [ActRow<'_>; M], &mut [[f32; ROWS]; M]);

/// The instruction sets that have kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Simd {
    /// Plain Rust.
    Portable,
    /// 256-bit, `vpmaddubsw`.
    Avx2,
    /// 512-bit, `vpdpbusd`.
    Avx512Vnni,
}

impl Simd {
    /// The best of this machine.
    pub(super) fn detect() -> Self {
        if tiles_x86::has_avx512_vnni() {
            Self::Avx512Vnni
        } else if tiles_x86::has_avx2() {
            Self::Avx2
        } else {
            Self::Portable
        }
    }
}

impl QuantActs {
    /// Quantises `m` rows of `k` values; `k` is a multiple of 32.
    pub(super) fn quantise(&mut self, pool: &Pool, m: usize, k: usize, x: &[f32]) {
        let blocks = k / BLOCK;
        self.blocks_per_row = blocks;
        // `resize` reuses the storage; the old contents are overwritten below.
        self.codes.resize(m * blocks, [0; BLOCK]);
        self.scales.resize(m * blocks, 0.0);
        self.sums.resize(m * blocks, 0);
        let codes = SharedOut::new(&mut self.codes);
        let scales = SharedOut::new(&mut self.scales);
        let sums = SharedOut::new(&mut self.sums);
        pool.run(m * blocks, MIN_QUANTISE, &|range| {
            let x = &x[range.start * BLOCK..range.end * BLOCK];
            // SAFETY: the ranges of a region are disjoint.
            let (codes, scales, sums) = unsafe {
                (
                    codes.slice(range.clone()),
                    scales.slice(range.clone()),
                    sums.slice(range),
                )
            };
            quantise_blocks(x, codes, scales, sums);
        });
    }

    fn row(&self, i: usize) -> ActRow<'_> {
        let range = i * self.blocks_per_row..(i + 1) * self.blocks_per_row;
        ActRow {
            codes: &self.codes[range.clone()],
            scales: &self.scales[range.clone()],
            sums: &self.sums[range],
        }
    }
}

/// `d = max|x| / 127`, `q = round(x / d)`: ggml's Q8_1, with the scale and the sum kept in full precision.
fn quantise_blocks(x: &[f32], codes: &mut [[i8; BLOCK]], scales: &mut [f32], sums: &mut [i32]) {
    let blocks = x.as_chunks::<BLOCK>().0;
    for (((x, codes), scale), sum) in blocks.iter().zip(codes).zip(scales).zip(sums) {
        let max = x.iter().fold(0f32, |max, v| max.max(v.abs()));
        *scale = max / 127.0;
        let inverse = if max > 0.0 { 127.0 / max } else { 0.0 };
        let mut total = 0;
        for (code, v) in codes.iter_mut().zip(x) {
            // Rounds to nearest for |v| < 2^22 and vectorises everywhere; `as` saturates, and maps NaN to 0.
            let rounded = (v * inverse + 12_582_912.0) - 12_582_912.0;
            *code = rounded as i8;
            total += i32::from(*code);
        }
        *sum = total;
    }
}

impl QuantTiles {
    /// Whether the type has a tile form.
    pub(super) fn supports(dtype: GgmlDType) -> bool {
        use GgmlDType::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
        matches!(dtype, Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0)
    }

    /// Repacks the rows of `parts` (bytes of `n_i × k` elements each), concatenated.
    pub(super) fn pack(dtype: GgmlDType, k: usize, parts: &[(usize, &[u8])]) -> Self {
        let (codes, zero, has_minima) = match dtype {
            GgmlDType::Q4_0 => (Codes::Nibbles, 8, false),
            GgmlDType::Q4_1 => (Codes::Nibbles, 0, true),
            GgmlDType::Q5_0 => (Codes::Bytes, 16, false),
            GgmlDType::Q5_1 => (Codes::Bytes, 0, true),
            _ => (Codes::Bytes, 128, false),
        };
        let block_bytes = dtype.type_size();
        let blocks = k / BLOCK;
        let rows: Vec<&[u8]> = parts
            .iter()
            .flat_map(|(n, bytes)| bytes.chunks_exact(blocks * block_bytes).take(*n))
            .collect();
        let n = rows.len();
        let tiles = n.div_ceil(ROWS);
        let per_tile = blocks * codes.lines();
        let mut lines = vec![Line([0; 64]); tiles * per_tile];
        let mut scales = vec![[0u16; ROWS]; tiles * blocks];
        let mut minima = vec![[0u16; ROWS]; if has_minima { tiles * blocks } else { 0 }];
        lines
            .par_chunks_mut(per_tile)
            .zip(scales.par_chunks_mut(blocks))
            .zip(rows.par_chunks(ROWS))
            .for_each(|((lines, scales), rows)| {
                for (r, row) in rows.iter().enumerate() {
                    for (b, block) in row.chunks_exact(block_bytes).enumerate() {
                        let block = Block::decode(dtype, block);
                        scales[b][r] = block.scale;
                        let lines = &mut lines[b * codes.lines()..][..codes.lines()];
                        for (l, line) in lines.iter_mut().enumerate() {
                            for j in 0..4 {
                                line.0[r * 4 + j] = match codes {
                                    Codes::Nibbles => {
                                        block.codes[l * 4 + j] | block.codes[16 + l * 4 + j] << 4
                                    }
                                    Codes::Bytes => block.codes[l * 4 + j],
                                };
                            }
                        }
                    }
                }
            });
        if has_minima {
            minima
                .par_chunks_mut(blocks)
                .zip(rows.par_chunks(ROWS))
                .for_each(|(minima, rows)| {
                    for (r, row) in rows.iter().enumerate() {
                        for (b, block) in row.chunks_exact(block_bytes).enumerate() {
                            minima[b][r] = Block::decode(dtype, block).minimum;
                        }
                    }
                });
        }
        Self {
            n,
            k,
            codes,
            simd: Simd::detect(),
            zero,
            lines,
            scales,
            minima,
        }
    }

    pub(super) fn rows(&self) -> usize {
        self.n
    }

    /// Dequantises one row into `out`, of length `k`.
    pub(super) fn dequantise_row(&self, row: usize, out: &mut [f32]) {
        let tile = self.tile(row / ROWS);
        let r = row % ROWS;
        let per_block = self.codes.lines();
        for (b, out) in out.chunks_exact_mut(BLOCK).enumerate() {
            let lines = &tile.lines[b * per_block..][..per_block];
            let d = f16::from_bits(tile.scales[b][r]).to_f32();
            let m = tile
                .minima
                .get(b)
                .map_or(0.0, |m| f16::from_bits(m[r]).to_f32());
            for (i, out) in out.iter_mut().enumerate() {
                let code = match self.codes {
                    Codes::Nibbles => (lines[i % 16 / 4].0[r * 4 + i % 4] >> (i / 16 * 4)) & 15,
                    Codes::Bytes => lines[i / 4].0[r * 4 + i % 4],
                };
                *out = (i32::from(code) - self.zero) as f32 * d + m;
            }
        }
    }

    fn tile(&self, t: usize) -> Tile<'_> {
        let blocks = self.k / BLOCK;
        let per_tile = blocks * self.codes.lines();
        Tile {
            zero: self.zero,
            lines: &self.lines[t * per_tile..][..per_tile],
            scales: &self.scales[t * blocks..][..blocks],
            minima: self
                .minima
                .get(t * blocks..)
                .map_or(&[], |m| &m[..blocks.min(m.len())]),
        }
    }

    /// `out[i · stride + column + j] = Σ_l x[i, l] · w[j, l]` for `m` activation rows.
    pub(super) fn matmul(
        &self,
        pool: &Pool,
        m: usize,
        acts: &QuantActs,
        out: &mut [f32],
        stride: usize,
        column: usize,
    ) {
        let out = SharedOut::new(out);
        pool.run(self.n.div_ceil(ROWS), 1, &|tiles| {
            for t in tiles {
                let tile = self.tile(t);
                let width = ROWS.min(self.n - t * ROWS);
                let mut first = 0;
                while first < m {
                    let mut sums = [[0f32; ROWS]; MAX_BATCH];
                    let count = match m - first {
                        1 => self.dot::<1>(tile, acts, first, &mut sums),
                        2 | 3 => self.dot::<2>(tile, acts, first, &mut sums),
                        _ => self.dot::<4>(tile, acts, first, &mut sums),
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

    fn dot<const M: usize>(
        &self,
        tile: Tile<'_>,
        acts: &QuantActs,
        first: usize,
        sums: &mut [[f32; ROWS]; MAX_BATCH],
    ) -> usize {
        let rows = std::array::from_fn(|i| acts.row(first + i));
        let mut out = [[0f32; ROWS]; M];
        let kernel: Kernel<M> = match (self.codes, self.simd) {
            (Codes::Nibbles, Simd::Portable) => portable::<M, false>,
            (Codes::Bytes, Simd::Portable) => portable::<M, true>,
            (Codes::Nibbles, Simd::Avx2) => tiles_x86::avx2::<M, false>,
            (Codes::Bytes, Simd::Avx2) => tiles_x86::avx2::<M, true>,
            (Codes::Nibbles, Simd::Avx512Vnni) => tiles_x86::avx512_vnni::<M, false>,
            (Codes::Bytes, Simd::Avx512Vnni) => tiles_x86::avx512_vnni::<M, true>,
        };
        kernel(tile, rows, &mut out);
        sums[..M].copy_from_slice(&out);
        M
    }
}

/// The kernel in plain Rust; the others are tested against it.
#[allow(clippy::needless_range_loop)] // One index names the same row in several arrays.
pub(super) fn portable<const M: usize, const BYTES: bool>(
    tile: Tile<'_>,
    acts: [ActRow<'_>; M],
    out: &mut [[f32; ROWS]; M],
) {
    let per_block = if BYTES { 8 } else { 4 };
    for (b, (lines, scales)) in tile
        .lines
        .chunks_exact(per_block)
        .zip(tile.scales)
        .enumerate()
    {
        for (act, out) in acts.iter().zip(out.iter_mut()) {
            let codes = &act.codes[b];
            let mut sums = [-tile.zero * act.sums[b]; ROWS];
            for (l, line) in lines.iter().enumerate() {
                for r in 0..ROWS {
                    for j in 0..4 {
                        let code = line.0[r * 4 + j];
                        sums[r] += if BYTES {
                            i32::from(code) * i32::from(codes[l * 4 + j])
                        } else {
                            i32::from(code & 15) * i32::from(codes[l * 4 + j])
                                + i32::from(code >> 4) * i32::from(codes[16 + l * 4 + j])
                        };
                    }
                }
            }
            for r in 0..ROWS {
                out[r] += f16::from_bits(scales[r]).to_f32() * act.scales[b] * sums[r] as f32;
            }
            if let Some(minima) = tile.minima.get(b) {
                let scaled_sum = act.scales[b] * act.sums[b] as f32;
                for r in 0..ROWS {
                    out[r] += f16::from_bits(minima[r]).to_f32() * scaled_sum;
                }
            }
        }
    }
}

/// One ggml block: 32 codes, a scale and a minimum.
struct Block {
    /// f16 bits.
    scale: u16,
    /// f16 bits; 0 for the symmetric types.
    minimum: u16,
    codes: [u8; BLOCK],
}

impl Block {
    /// Layouts: ggml-common.h, `block_q4_0` to `block_q8_0`.
    fn decode(dtype: GgmlDType, bytes: &[u8]) -> Self {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let mut codes = [0u8; BLOCK];
        let nibbles = |codes: &mut [u8; BLOCK], qs: &[u8]| {
            for (j, q) in qs.iter().enumerate().take(16) {
                codes[j] = q & 15;
                codes[j + 16] = q >> 4;
            }
        };
        let fifth_bits = |codes: &mut [u8; BLOCK], at: usize| {
            let bits = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
            for (j, code) in codes.iter_mut().enumerate() {
                *code |= ((bits >> j & 1) as u8) << 4;
            }
        };
        let mut minimum = 0;
        match dtype {
            GgmlDType::Q4_0 => nibbles(&mut codes, &bytes[2..]),
            GgmlDType::Q4_1 => {
                minimum = half(2);
                nibbles(&mut codes, &bytes[4..]);
            }
            GgmlDType::Q5_0 => {
                nibbles(&mut codes, &bytes[6..]);
                fifth_bits(&mut codes, 2);
            }
            GgmlDType::Q5_1 => {
                minimum = half(2);
                nibbles(&mut codes, &bytes[8..]);
                fifth_bits(&mut codes, 4);
            }
            _ => {
                for (code, byte) in codes.iter_mut().zip(&bytes[2..]) {
                    *code = byte ^ 0x80;
                }
            }
        }
        Self {
            scale: half(0),
            minimum,
            codes,
        }
    }
}

#[cfg(test)]
#[path = "tiles_tests.rs"]
mod tests;
