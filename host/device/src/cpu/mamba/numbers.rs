//! Small loops over vectors, in a form that vectorises. They must never know what is summed.

/// a·b + c.
#[inline(always)]
pub(super) fn fma<const FMA: bool>(a: f64, b: f64, c: f64) -> f64 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// e^x to about 1 ulp, for x within ±700; beyond that as there, and NaN for NaN. Range reduction by ln 2 in two parts, and e^r's
/// series on [−ln 2 / 2, ln 2 / 2].
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f64) -> f64 {
    // 1.5 · 2^52: adding it leaves the nearest integer in the low bits of the mantissa.
    const MAGIC: f64 = 6_755_399_441_055_744.0;
    const SERIES: [f64; 12] = [
        1.0 / 479_001_600.0,
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
    ];
    let clamped = if x < -700.0 { -700.0 } else { x };
    let clamped = if clamped > 700.0 { 700.0 } else { clamped };
    let shifted = fma::<FMA>(clamped, std::f64::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    // ln 2, whose product with n is exact, and the rest of it.
    let (high, low) = (0x3fe6_2e42_fee0_0000, 0x3dea_39ef_3579_3c76);
    let r = fma::<FMA>(n, -f64::from_bits(high), clamped);
    let r = fma::<FMA>(n, -f64::from_bits(low), r);
    let mut p = 1.0 / 6_227_020_800.0;
    for factor in SERIES {
        p = fma::<FMA>(p, r, factor);
    }
    let y = fma::<FMA>(p, r, 1.0);
    // Multiply by 2^n: n is added to the exponent.
    let scaled = f64::from_bits(y.to_bits().wrapping_add(shifted.to_bits() << 52));
    if x.is_nan() { x } else { scaled }
}

/// y ← y + a·x.
#[inline(always)]
pub(super) fn add<const FMA: bool>(y: &mut [f64], a: f64, x: &[f64]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = fma::<FMA>(a, x, *y);
    }
}

/// a·b, in sums of eight lanes.
#[inline(always)]
pub(super) fn dot<const FMA: bool, A: Copy + Into<f64>>(a: &[A], b: &[f64]) -> f64 {
    const LANES: usize = 8;
    let mut lanes = [0.0; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] = fma::<FMA>(a[lane].into(), b[lane], lanes[lane]);
        }
    }
    let rest = a_rest.iter().zip(b_rest);
    let rest: f64 = rest.map(|(&a, b)| a.into() * b).sum();
    lanes.iter().sum::<f64>() + rest
}

/// ln(1 + e^x), where that is not x itself.
pub(super) fn softplus(x: f64) -> f64 {
    if x > 40.0 { x } else { x.exp().ln_1p() }
}

#[cfg(test)]
mod tests {
    #[test]
    fn sums_are_sums() {
        let a: Vec<f64> = (0..19u8).map(f64::from).collect();
        let exact: f64 = a.iter().map(|x| x * x).sum();
        assert_eq!(super::dot::<true, f64>(&a, &a), exact);
        assert_eq!(super::dot::<false, f64>(&a, &a), exact);
        let mut y = [1.0; 3];
        super::add::<false>(&mut y, 2.0, &a[..3]);
        assert_eq!(y, [1.0, 3.0, 5.0]);
        assert_eq!(super::softplus(0.0), 2f64.ln());
        assert!((super::softplus(39.9) - 39.9).abs() < 1e-15);
        assert!(super::softplus(-800.0) == 0.0 && super::softplus(f64::NAN).is_nan());
    }

    #[test]
    fn exp_is_accurate_and_total() {
        let mut worst = 0.0f64;
        for i in 0..200_000 {
            let x = -700.0 + f64::from(i) * 0.007;
            for got in [super::exp::<false>(x), super::exp::<true>(x)] {
                worst = worst.max((got / x.exp() - 1.0).abs());
            }
        }
        assert!(worst < 1e-15, "{worst:e}");
        assert_eq!(super::exp::<true>(0.0), 1.0);
        assert!(super::exp::<false>(f64::NEG_INFINITY) < 1e-300);
        assert!(super::exp::<true>(f64::INFINITY) > 1e300);
        assert!(super::exp::<true>(f64::NAN).is_nan());
    }
}
