//! Small loops over vectors, in a form that vectorises. They must never know what is summed.

/// a·b + c.
#[inline(always)]
pub(super) fn fma<const FMA: bool>(a: f64, b: f64, c: f64) -> f64 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// y ← y + a·x.
#[inline(always)]
pub(super) fn add<const FMA: bool, X: Copy + Into<f64>>(y: &mut [f64], a: f64, x: &[X]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = fma::<FMA>(a, x.into(), *y);
    }
}

/// a·b, in sums of eight lanes.
#[inline(always)]
pub(super) fn dot<const FMA: bool>(a: &[f32], b: &[f32]) -> f64 {
    const LANES: usize = 8;
    let mut lanes = [0.0; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] = fma::<FMA>(a[lane].into(), b[lane].into(), lanes[lane]);
        }
    }
    let rest = a_rest.iter().zip(b_rest);
    let rest: f64 = rest.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
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
        let a: Vec<f32> = (0..19u8).map(f32::from).collect();
        let exact: f64 = (0..19u8).map(|x| f64::from(x).powi(2)).sum();
        assert_eq!(super::dot::<true>(&a, &a), exact);
        assert_eq!(super::dot::<false>(&a, &a), exact);
        let mut y = [1.0; 3];
        super::add::<false, f32>(&mut y, 2.0, &a[..3]);
        assert_eq!(y, [1.0, 3.0, 5.0]);
        assert_eq!(super::softplus(0.0), 2f64.ln());
        assert!((super::softplus(39.9) - 39.9).abs() < 1e-15);
        assert!(super::softplus(-800.0) == 0.0 && super::softplus(f64::NAN).is_nan());
    }
}
