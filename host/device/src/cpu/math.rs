//! Elements and elementary functions in a form that vectorises: straight-line, no branches, no tables.
//!
//! `FMA` says whether the instruction set at hand fuses multiply and add; without it `f32::mul_add` would be a library
//! call.

use half::bf16;

use super::kernel::Simd;

/// A view of elements as f32.
pub(super) type AsF32<E> = for<'a> fn(&'a [E]) -> &'a [f32];

/// What a cache may hold.
pub(super) trait Element: Copy + Send + Sync + 'static {
    /// A slice of these as f32, where that is what they are.
    const AS_F32: Option<AsF32<Self>>;
    /// Are single elements numbers? Else only a token's content as a whole is.
    const IN_PLACE: bool = true;
    /// Exact.
    fn widen(self) -> f32;
    /// Sixteen, widened.
    fn load<S: Simd>(from: &[Self; 16]) -> S::Vector;
    /// To nearest, ties to even.
    fn narrow(x: f32) -> Self;
    /// The numbers of a token's content.
    #[inline(always)]
    fn unpack(content: &[Self], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(content) {
            *to = from.widen();
        }
    }
}

impl Element for f32 {
    const AS_F32: Option<AsF32<f32>> = Some(|elements| elements);

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn load<S: Simd>(from: &[f32; 16]) -> S::Vector {
        S::load(from)
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        x
    }
}

impl Element for bf16 {
    const AS_F32: Option<AsF32<bf16>> = None;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn load<S: Simd>(from: &[bf16; 16]) -> S::Vector {
        S::load_bf16(from)
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
        // A NaN whose payload would be rounded away stays a (quiet) NaN.
        let quiet = (bits >> 16) as u16 | 0x40;
        bf16::from_bits(if x.is_nan() { quiet } else { rounded })
    }
}

/// a·b + c.
#[inline(always)]
pub(super) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// e^x for x ≤ 88, about 1 ulp; 0 below −86, NaN for NaN. Range reduction by ln 2 in two parts and a polynomial of degree
/// 7 on [−ln 2 / 2, ln 2 / 2] (coefficients of Moshier's Cephes, expf).
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    // 1.5 · 2^23: adding it leaves the nearest integer in the low bits of the mantissa.
    const MAGIC: f32 = 12_582_912.0;
    const LOWEST: f32 = -86.0;
    let clamped = if x < LOWEST { LOWEST } else { x };
    let shifted = fma::<FMA>(clamped, core::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let r = fma::<FMA>(n, -0.693_359_4, clamped);
    let r = fma::<FMA>(n, 2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4;
    p = fma::<FMA>(p, r, 1.398_199_9e-3);
    p = fma::<FMA>(p, r, 8.333_452e-3);
    p = fma::<FMA>(p, r, 4.166_579_6e-2);
    p = fma::<FMA>(p, r, 1.666_666_6e-1);
    p = fma::<FMA>(p, r, 0.5);
    let y = fma::<FMA>(p, r * r, r) + 1.0;
    // Multiply by 2^n: n is added to the exponent.
    let scaled = f32::from_bits(y.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x < LOWEST {
        0.0
    } else if x.is_nan() {
        x
    } else {
        scaled
    }
}

/// tanh(x), about 1 ulp relative. Odd polynomial below 0.625 (Cephes, tanhf), 1 − 2 / (e^2x + 1) above.
#[inline(always)]
pub(super) fn tanh<const FMA: bool>(x: f32) -> f32 {
    let z = x * x;
    let mut p = -5.704_988_7e-3;
    p = fma::<FMA>(p, z, 2.063_908_8e-2);
    p = fma::<FMA>(p, z, -5.373_971_6e-2);
    p = fma::<FMA>(p, z, 1.333_144_2e-1);
    p = fma::<FMA>(p, z, -3.333_328e-1);
    let small = fma::<FMA>(p * z, x, x);
    let magnitude = if x.abs() > 20.0 { 20.0 } else { x.abs() };
    let large = (1.0 - 2.0 / (exp::<FMA>(2.0 * magnitude) + 1.0)).copysign(x);
    if x.abs() < 0.625 { small } else { large }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_and_total() {
        let mut worst = 0.0f64;
        for i in 0..400_000 {
            let x = -86.0 + i as f32 * (86.0 + 40.0) / 400_000.0;
            let exact = f64::from(x).exp();
            for got in [exp::<false>(x), exp::<true>(x)] {
                worst = worst.max(((f64::from(got) - exact) / exact).abs());
            }
        }
        assert!(worst < 1.5e-7, "{worst:e}");
        assert_eq!(exp::<false>(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp::<true>(-1e30), 0.0);
        assert_eq!(exp::<true>(0.0), 1.0);
        assert!(exp::<true>(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_accurate_and_total() {
        let mut worst = 0.0f64;
        for i in 1..400_000 {
            let x = i as f32 * 25.0 / 400_000.0;
            for x in [x, -x] {
                let exact = f64::from(x).tanh();
                for got in [tanh::<false>(x), tanh::<true>(x)] {
                    worst = worst.max(((f64::from(got) - exact) / exact).abs());
                }
            }
        }
        assert!(worst < 2.5e-7, "{worst:e}");
        assert_eq!(tanh::<true>(0.0), 0.0);
        assert_eq!(tanh::<true>(f32::INFINITY), 1.0);
        assert_eq!(tanh::<true>(f32::NEG_INFINITY), -1.0);
        assert!(tanh::<true>(f32::NAN).is_nan());
    }

    #[test]
    fn bf16_rounds_to_nearest_even() {
        for bits in (0..=u32::MAX).step_by(65_521) {
            let x = f32::from_bits(bits);
            let (ours, theirs) = (<bf16 as Element>::narrow(x), bf16::from_f32(x));
            assert!(ours == theirs || (x.is_nan() && ours.is_nan()), "{bits:#x}");
            if !x.is_nan() {
                assert_eq!(Element::widen(ours).to_bits(), theirs.to_f32().to_bits());
            }
        }
    }
}
