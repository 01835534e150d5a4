//! How a result is compared with its f64 reference: every element, row by row and as a whole. It must never know a kernel.

use timetable_types::Dtype;

use crate::element;

/// The largest of: each row's error norm over its norm, each row's largest error over its largest value, and the whole
/// tensor's error norm over its norm. A row that should be zeros counts the errors themselves; NaN counts as infinite.
///
/// # Panics
/// If the lengths differ.
pub fn row_error(got: &[f32], want: &[f64], width: usize) -> f64 {
    assert_eq!(got.len(), want.len());
    let mut worst = 0.0f64;
    let (mut all_error, mut all_norm) = (0.0, 0.0);
    for (got, want) in got.chunks(width).zip(want.chunks(width)) {
        let (mut error, mut norm, mut largest_error, mut largest) = (0.0, 0.0, 0.0f64, 0.0f64);
        for (&got, &want) in got.iter().zip(want) {
            let off = distance(got, want);
            error += off * off;
            norm += want * want;
            largest_error = largest_error.max(off);
            largest = largest.max(want.abs());
        }
        all_error += error;
        all_norm += norm;
        worst = worst.max(if largest == 0.0 {
            largest_error
        } else {
            (error / norm).sqrt().max(largest_error / largest)
        });
    }
    if all_norm > 0.0 {
        worst = worst.max((all_error / all_norm).sqrt());
    }
    worst
}

/// The largest error of an element in units of what one rounding to `dtype` may do, relative to the larger of its size and
/// `floor` (what cancellation leaves): at most 1 passes.
///
/// # Panics
/// If the lengths differ.
pub fn rounding_error(got: &[f32], want: &[f64], dtype: Dtype, floor: f64) -> f64 {
    assert_eq!(got.len(), want.len());
    // Below its smallest normal number f16 has fewer bits.
    let subnormal = if dtype == Dtype::Float16 { 6.2e-5 } else { 0.0 };
    let mut worst = 0.0f64;
    for (&got, &want) in got.iter().zip(want) {
        let size = want.abs().max(floor).max(subnormal);
        let off = distance(got, want);
        worst = worst.max(if off == 0.0 {
            0.0
        } else {
            off / (size * element::rounding(dtype))
        });
    }
    worst
}

/// Largest difference of two LSEs, relative to the larger of 1 and the value; infinite where one is −∞ alone.
pub fn lse_error(got: &[f32], want: &[f64]) -> f64 {
    got.iter().zip(want).fold(0.0, |worst: f64, (&got, &want)| {
        worst.max(if want == f64::NEG_INFINITY {
            if got == f32::NEG_INFINITY {
                0.0
            } else {
                f64::INFINITY
            }
        } else {
            distance(got, want) / want.abs().max(1.0)
        })
    })
}

fn distance(got: f32, want: f64) -> f64 {
    let off = (f64::from(got) - want).abs();
    if off.is_nan() { f64::INFINITY } else { off }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_hides() {
        assert_eq!(row_error(&[0.0, 0.0], &[0.0, 0.0], 2), 0.0);
        assert!(row_error(&[0.0, f32::NAN, 1.0, 1.0], &[0.0, 0.0, 1.0, 1.0], 2).is_infinite());
        // One small row that is wrong is not drowned by a large one.
        assert!(row_error(&[1e6, 1e6, 0.1, 0.2], &[1e6, 1e6, 0.1, 0.1], 2) > 0.9);
        assert!(rounding_error(&[1.01], &[1.0], Dtype::Bfloat16, 0.0) > 2.0);
        assert!(rounding_error(&[1.003], &[1.0], Dtype::Bfloat16, 0.0) < 1.0);
        assert!(lse_error(&[0.0], &[f64::NEG_INFINITY]).is_infinite());
        assert_eq!(lse_error(&[f32::NEG_INFINITY], &[f64::NEG_INFINITY]), 0.0);
    }
}
