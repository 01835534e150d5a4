//! The tile kernels for x86-64, chosen at run time; on other machines these names exist and are never chosen.
//!
//! Each computes what `tiles::portable` computes; only the rounding of the final multiply-adds differs.

use super::tiles::{ActRow, ROWS, Tile};

#[cfg(target_arch = "x86_64")]
pub(super) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
pub(super) fn has_avx512_vnni() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vnni")
}

/// See `tiles::portable`.
#[cfg(target_arch = "x86_64")]
pub(super) fn avx2<const M: usize, const BYTES: bool>(
    tile: Tile<'_>,
    acts: [ActRow<'_>; M],
    out: &mut [[f32; ROWS]; M],
) {
    // SAFETY: `Simd::Avx2` is only made after `has_avx2`.
    unsafe { x86::avx2::<M, BYTES>(tile, acts, out) }
}

/// See `tiles::portable`.
#[cfg(target_arch = "x86_64")]
pub(super) fn avx512_vnni<const M: usize, const BYTES: bool>(
    tile: Tile<'_>,
    acts: [ActRow<'_>; M],
    out: &mut [[f32; ROWS]; M],
) {
    // SAFETY: `Simd::Avx512Vnni` is only made after `has_avx512_vnni`.
    unsafe { x86::avx512_vnni::<M, BYTES>(tile, acts, out) }
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn has_avx2() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn has_avx512_vnni() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) use super::tiles::{portable as avx2, portable as avx512_vnni};

#[cfg(target_arch = "x86_64")]
#[allow(clippy::needless_range_loop)] // One index names the same row in several arrays.
mod x86 {
    use super::super::tiles::{ActRow, BLOCK, Line, ROWS, Tile};
    use std::arch::x86_64::*;

    /// Four activations, as the 32 bits that a broadcast repeats.
    #[inline(always)]
    fn four(codes: &[i8; BLOCK], at: usize) -> i32 {
        i32::from_le_bytes([
            codes[at] as u8,
            codes[at + 1] as u8,
            codes[at + 2] as u8,
            codes[at + 3] as u8,
        ])
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub(super) fn avx512_vnni<const M: usize, const BYTES: bool>(
        tile: Tile<'_>,
        acts: [ActRow<'_>; M],
        out: &mut [[f32; ROWS]; M],
    ) {
        let per_block = if BYTES { 8 } else { 4 };
        let blocks = tile.scales.len();
        // Equal lengths, said once, so that the loop needs no checks.
        let acts = acts.map(|a| (&a.codes[..blocks], &a.scales[..blocks], &a.sums[..blocks]));
        let low = _mm512_set1_epi8(15);
        let mut totals = [_mm512_setzero_ps(); M];
        for (b, (lines, scales)) in tile
            .lines
            .chunks_exact(per_block)
            .zip(tile.scales)
            .enumerate()
        {
            let mut dots = [_mm512_setzero_si512(); M];
            for m in 0..M {
                dots[m] = _mm512_set1_epi32(-tile.zero * acts[m].2[b]);
            }
            for (l, line) in lines.iter().enumerate() {
                // SAFETY: a line is 64 bytes, aligned to 64.
                let codes = unsafe { _mm512_load_si512(line.0.as_ptr().cast()) };
                if BYTES {
                    for m in 0..M {
                        let act = _mm512_set1_epi32(four(&acts[m].0[b], l * 4));
                        dots[m] = _mm512_dpbusd_epi32(dots[m], codes, act);
                    }
                } else {
                    let first = _mm512_and_si512(codes, low);
                    let second = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), low);
                    for m in 0..M {
                        let act = _mm512_set1_epi32(four(&acts[m].0[b], l * 4));
                        dots[m] = _mm512_dpbusd_epi32(dots[m], first, act);
                        let act = _mm512_set1_epi32(four(&acts[m].0[b], 16 + l * 4));
                        dots[m] = _mm512_dpbusd_epi32(dots[m], second, act);
                    }
                }
            }
            // SAFETY: sixteen halves are 32 bytes; the load is unaligned.
            let scales = _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(scales.as_ptr().cast()) });
            for m in 0..M {
                let scale = _mm512_mul_ps(scales, _mm512_set1_ps(acts[m].1[b]));
                totals[m] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dots[m]), totals[m]);
            }
            if let Some(minima) = tile.minima.get(b) {
                // SAFETY: as above.
                let minima = _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(minima.as_ptr().cast()) });
                for m in 0..M {
                    let sum = _mm512_set1_ps(acts[m].1[b] * acts[m].2[b] as f32);
                    totals[m] = _mm512_fmadd_ps(minima, sum, totals[m]);
                }
            }
        }
        for m in 0..M {
            // SAFETY: sixteen f32; the store is unaligned.
            unsafe { _mm512_storeu_ps(out[m].as_mut_ptr(), totals[m]) };
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn avx2<const M: usize, const BYTES: bool>(
        tile: Tile<'_>,
        acts: [ActRow<'_>; M],
        out: &mut [[f32; ROWS]; M],
    ) {
        let per_block = if BYTES { 8 } else { 4 };
        let blocks = tile.scales.len();
        let acts = acts.map(|a| (&a.codes[..blocks], &a.scales[..blocks], &a.sums[..blocks]));
        // Bytes are taken as signed here, which already subtracts 128.
        let zero = if BYTES { tile.zero - 128 } else { tile.zero };
        // Rows 0–7 and 8–15.
        let mut totals = [[_mm256_setzero_ps(); 2]; M];
        for (b, (lines, scales)) in tile
            .lines
            .chunks_exact(per_block)
            .zip(tile.scales)
            .enumerate()
        {
            for h in 0..2 {
                // SAFETY: eight halves are 16 bytes; the load is unaligned.
                let d =
                    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(scales.as_ptr().add(h * 8).cast()) });
                for m in 0..M {
                    let (codes, act_scales, sums) = acts[m];
                    let dots = if BYTES {
                        dot_bytes(lines, h, &codes[b])
                    } else {
                        dot_nibbles(lines, h, &codes[b])
                    };
                    let dots = _mm256_sub_epi32(dots, _mm256_set1_epi32(zero * sums[b]));
                    let scale = _mm256_mul_ps(d, _mm256_set1_ps(act_scales[b]));
                    totals[m][h] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(dots), totals[m][h]);
                }
                if let Some(minima) = tile.minima.get(b) {
                    // SAFETY: as above.
                    let minima = _mm256_cvtph_ps(unsafe {
                        _mm_loadu_si128(minima.as_ptr().add(h * 8).cast())
                    });
                    for m in 0..M {
                        let sum = _mm256_set1_ps(acts[m].1[b] * acts[m].2[b] as f32);
                        totals[m][h] = _mm256_fmadd_ps(minima, sum, totals[m][h]);
                    }
                }
            }
        }
        for m in 0..M {
            for h in 0..2 {
                // SAFETY: eight of sixteen f32; the store is unaligned.
                unsafe { _mm256_storeu_ps(out[m].as_mut_ptr().add(h * 8), totals[m][h]) };
            }
        }
    }

    /// Half `h` of a line: eight rows.
    #[target_feature(enable = "avx2")]
    fn half(line: &Line, h: usize) -> __m256i {
        // SAFETY: 32 of the line's 64 bytes, aligned to 32, since `h` is 0 or 1.
        unsafe { _mm256_load_si256(line.0.as_ptr().add(h * 32).cast()) }
    }

    #[target_feature(enable = "avx2")]
    fn dot_nibbles(lines: &[Line], h: usize, act: &[i8; BLOCK]) -> __m256i {
        let low = _mm256_set1_epi8(15);
        // All of a block fits 16 bits: 8 lines' halves × 2 products × 15 × 127 = 30,480.
        let mut sums = _mm256_setzero_si256();
        for (l, line) in lines.iter().enumerate() {
            let codes = half(line, h);
            let first = _mm256_and_si256(codes, low);
            let second = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), low);
            let first = _mm256_maddubs_epi16(first, _mm256_set1_epi32(four(act, l * 4)));
            let second = _mm256_maddubs_epi16(second, _mm256_set1_epi32(four(act, 16 + l * 4)));
            sums = _mm256_add_epi16(sums, _mm256_add_epi16(first, second));
        }
        _mm256_madd_epi16(sums, _mm256_set1_epi16(1))
    }

    #[target_feature(enable = "avx2")]
    fn dot_bytes(lines: &[Line], h: usize, act: &[i8; BLOCK]) -> __m256i {
        let ones = _mm256_set1_epi16(1);
        let mut dots = _mm256_setzero_si256();
        for (l, line) in lines.iter().enumerate() {
            // |w| · sign(a, w) = w · a, and two products of at most 128 × 127 fit 16 bits.
            let codes = _mm256_xor_si256(half(line, h), _mm256_set1_epi8(-128));
            let act = _mm256_sign_epi8(_mm256_set1_epi32(four(act, l * 4)), codes);
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), act);
            dots = _mm256_add_epi32(dots, _mm256_madd_epi16(pairs, ones));
        }
        dots
    }
}
