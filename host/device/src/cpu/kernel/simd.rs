//! Sixteen f32 at once, for the two loops that a compiler does not vectorise by itself. It must never know attention.

use half::bf16;

use super::LANES;
use crate::cpu::math::fma;

/// An instruction set's sixteen lanes.
pub(in crate::cpu) trait Simd: 'static {
    /// f32 × 16.
    type Vector: Copy;
    fn zero() -> Self::Vector;
    fn splat(x: f32) -> Self::Vector;
    fn load(from: &[f32; LANES]) -> Self::Vector;
    /// Widened.
    fn load_bf16(from: &[bf16; LANES]) -> Self::Vector;
    fn store(from: Self::Vector) -> [f32; LANES];
    /// a·b + c.
    fn fma(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// Sum by halves.
    fn sum(of: Self::Vector) -> f32;
    /// Asks for the cache lines of `of`, where the processor can be asked.
    fn prefetch<E>(of: &[E]);
}

/// Plain arrays.
pub(super) struct Portable<const FMA: bool>;

impl<const FMA: bool> Simd for Portable<FMA> {
    type Vector = [f32; LANES];

    #[inline(always)]
    fn zero() -> Self::Vector {
        [0.0; LANES]
    }

    #[inline(always)]
    fn splat(x: f32) -> Self::Vector {
        [x; LANES]
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self::Vector {
        *from
    }

    #[inline(always)]
    fn load_bf16(from: &[bf16; LANES]) -> Self::Vector {
        super::widen(from)
    }

    #[inline(always)]
    fn store(from: Self::Vector) -> [f32; LANES] {
        from
    }

    #[inline(always)]
    fn fma(a: Self::Vector, b: Self::Vector, mut c: Self::Vector) -> Self::Vector {
        for lane in 0..LANES {
            c[lane] = fma::<FMA>(a[lane], b[lane], c[lane]);
        }
        c
    }

    #[inline(always)]
    fn sum(mut of: Self::Vector) -> f32 {
        let mut width = LANES / 2;
        while width > 0 {
            for lane in 0..width {
                of[lane] += of[lane + width];
            }
            width /= 2;
        }
        of[0]
    }

    #[inline(always)]
    fn prefetch<E>(_of: &[E]) {}
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

/// These types are named in `attend_avx2` and `attend_avx512` only, which run only where `detect` found the features:
/// that is what makes every intrinsic below executable. Everything is inlined into those two functions.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::bf16;

    use super::{LANES, Simd};

    /// Into the second level, a line of 64 bytes at a time.
    #[inline(always)]
    fn prefetch_lines<E>(of: &[E]) {
        let start: *const i8 = of.as_ptr().cast();
        for line in (0..size_of_val(of)).step_by(64) {
            // SAFETY: sse is part of x86-64; the address lies within `of`, and a prefetch reads nothing in any case.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(start.add(line)) }
        }
    }

    pub(in super::super) struct Avx2;

    impl Simd for Avx2 {
        type Vector = (__m256, __m256);

        #[inline(always)]
        fn zero() -> Self::Vector {
            Self::splat(0.0)
        }

        #[inline(always)]
        fn splat(x: f32) -> Self::Vector {
            // SAFETY: avx is present, see above.
            let x = unsafe { _mm256_set1_ps(x) };
            (x, x)
        }

        #[inline(always)]
        fn load(from: &[f32; LANES]) -> Self::Vector {
            // SAFETY: avx is present, see above; both unaligned loads lie within the array of 16.
            unsafe {
                (
                    _mm256_loadu_ps(from.as_ptr()),
                    _mm256_loadu_ps(from.as_ptr().add(8)),
                )
            }
        }

        #[inline(always)]
        fn load_bf16(from: &[bf16; LANES]) -> Self::Vector {
            // SAFETY: avx2 is present, see above; bf16 is a transparent u16, and the unaligned load of 32 bytes is the
            // whole array.
            unsafe {
                let bits = _mm256_loadu_si256(from.as_ptr().cast());
                let widen = |half: __m128i| {
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
                };
                (
                    widen(_mm256_castsi256_si128(bits)),
                    widen(_mm256_extracti128_si256::<1>(bits)),
                )
            }
        }

        #[inline(always)]
        fn store(from: Self::Vector) -> [f32; LANES] {
            let mut to = [0.0; LANES];
            // SAFETY: avx is present, see above; both unaligned stores lie within the array of 16.
            unsafe {
                _mm256_storeu_ps(to.as_mut_ptr(), from.0);
                _mm256_storeu_ps(to.as_mut_ptr().add(8), from.1);
            }
            to
        }

        #[inline(always)]
        fn fma(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
            // SAFETY: fma is present, see above.
            unsafe {
                (
                    _mm256_fmadd_ps(a.0, b.0, c.0),
                    _mm256_fmadd_ps(a.1, b.1, c.1),
                )
            }
        }

        #[inline(always)]
        fn sum(of: Self::Vector) -> f32 {
            // SAFETY: avx is present, see above.
            unsafe {
                let eight = _mm256_add_ps(of.0, of.1);
                let four = _mm_add_ps(
                    _mm256_castps256_ps128(eight),
                    _mm256_extractf128_ps::<1>(eight),
                );
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
            }
        }

        #[inline(always)]
        fn prefetch<E>(of: &[E]) {
            prefetch_lines(of);
        }
    }

    pub(in super::super) struct Avx512;

    impl Simd for Avx512 {
        type Vector = __m512;

        #[inline(always)]
        fn zero() -> Self::Vector {
            Self::splat(0.0)
        }

        #[inline(always)]
        fn splat(x: f32) -> Self::Vector {
            // SAFETY: avx512f is present, see above.
            unsafe { _mm512_set1_ps(x) }
        }

        #[inline(always)]
        fn load(from: &[f32; LANES]) -> Self::Vector {
            // SAFETY: avx512f is present, see above; the unaligned load is the whole array of 16.
            unsafe { _mm512_loadu_ps(from.as_ptr()) }
        }

        #[inline(always)]
        fn load_bf16(from: &[bf16; LANES]) -> Self::Vector {
            // SAFETY: avx512f is present, see above; bf16 is a transparent u16, and the unaligned load of 32 bytes is
            // the whole array.
            unsafe {
                let bits = _mm256_loadu_si256(from.as_ptr().cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
            }
        }

        #[inline(always)]
        fn store(from: Self::Vector) -> [f32; LANES] {
            let mut to = [0.0; LANES];
            // SAFETY: avx512f is present, see above; the unaligned store is the whole array of 16.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), from) }
            to
        }

        #[inline(always)]
        fn fma(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
            // SAFETY: avx512f is present, see above.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }

        #[inline(always)]
        fn sum(of: Self::Vector) -> f32 {
            // SAFETY: avx512f is present, see above.
            unsafe { _mm512_reduce_add_ps(of) }
        }

        #[inline(always)]
        fn prefetch<E>(of: &[E]) {
            prefetch_lines(of);
        }
    }
}
