//! The element-wise parts of a decoder layer, on row-major f32 slices.
//!
//! Written so that the compiler vectorises them on any machine; rows are shared out among threads when there are many.

use super::pool::{Pool, SharedOut};

/// Values below which a second thread costs more than it saves.
const MIN_VALUES: usize = 1 << 14;

/// Partial sums of the mean square; fixed, so that the result does not depend on the machine.
const LANES: usize = 16;

/// `out = x / √(mean(x²) + eps) · weight` for every row of `weight.len()` values.
pub(super) fn rms_norm(pool: &Pool, x: &[f32], weight: &[f32], eps: f32, out: &mut Vec<f32>) {
    out.resize(x.len(), 0.0);
    let width = weight.len();
    let shared = SharedOut::new(out);
    pool.run(x.len() / width, MIN_VALUES.div_ceil(width), &|rows| {
        for i in rows {
            let range = i * width..(i + 1) * width;
            // SAFETY: one row each.
            let out = unsafe { shared.slice(range.clone()) };
            let x = &x[range];
            let scale = inverse_rms(x, eps);
            for ((y, x), w) in out.iter_mut().zip(x).zip(weight) {
                *y = x * scale * w;
            }
        }
    });
}

/// The same in place, for one head.
pub(super) fn rms_norm_head(head: &mut [f32], weight: &[f32], eps: f32) {
    let scale = inverse_rms(head, eps);
    for (x, w) in head.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
}

fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut sums = [0f32; LANES];
    for chunk in chunks {
        for (sum, v) in sums.iter_mut().zip(chunk) {
            *sum += v * v;
        }
    }
    let total: f32 = sums.iter().sum::<f32>() + rest.iter().map(|v| v * v).sum::<f32>();
    1.0 / (total / x.len() as f32 + eps).sqrt()
}

/// `out = silu(gate) · up`, where each row of `gate_up` is `width` gate values followed by `width` up values.
pub(super) fn silu_mul(pool: &Pool, gate_up: &[f32], width: usize, out: &mut Vec<f32>) {
    act_mul(pool, gate_up, width, silu, out);
}

/// The same with GELU's tanh formula.
pub(super) fn gelu_mul(pool: &Pool, gate_up: &[f32], width: usize, out: &mut Vec<f32>) {
    act_mul(pool, gate_up, width, gelu, out);
}

#[inline(always)]
fn act_mul(
    pool: &Pool,
    gate_up: &[f32],
    width: usize,
    act: impl Fn(f32) -> f32 + Sync,
    out: &mut Vec<f32>,
) {
    let rows = gate_up.len() / (2 * width);
    out.resize(rows * width, 0.0);
    let shared = SharedOut::new(out);
    pool.run(rows, MIN_VALUES.div_ceil(width), &|rows| {
        for i in rows {
            // SAFETY: one row each.
            let out = unsafe { shared.slice(i * width..(i + 1) * width) };
            let (gate, up) = gate_up[i * 2 * width..][..2 * width].split_at(width);
            for ((y, g), u) in out.iter_mut().zip(gate).zip(up) {
                *y = act(*g) * u;
            }
        }
    });
}

#[inline(always)]
fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `x/2 · (1 + tanh(u))`, u = √(2/π) · (x + 0.044715·x³), as x times the sigmoid of 2u.
#[inline(always)]
fn gelu(x: f32) -> f32 {
    const SCALE: f32 = 2.0 * 0.797_884_6;
    x / (1.0 + exp(-SCALE * (x + 0.044_715 * x * x * x)))
}

/// `1 / (1 + e^−x)`.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x *= sigmoid(gate)`.
pub(super) fn sigmoid_mul(x: &mut [f32], gate: &[f32]) {
    for (x, gate) in x.iter_mut().zip(gate) {
        *x *= sigmoid(*gate);
    }
}

/// `x *= silu(gate)`.
pub(super) fn silu_gate(x: &mut [f32], gate: &[f32]) {
    for (x, gate) in x.iter_mut().zip(gate) {
        *x *= silu(*gate);
    }
}

/// `x += y`.
pub(super) fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// e^x to about two units in the last place, without branches; overflows to infinity, underflows to zero.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2, so e^x = 2^n · e^r; e^r by its Taylor series to r⁷, ln 2 in two parts
/// (Cody and Waite), the power of two built from its bits.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// Adding and subtracting 1.5 · 2²³ rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.0, 88.0);
    let n = clamped * std::f32::consts::LOG2_E + ROUND - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    for c in [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        p = p * r + c;
    }
    let power = f32::from_bits(((n as i32 + 127) << 23) as u32);
    let y = p * power;
    if x > 88.0 {
        f32::INFINITY
    } else if x < -87.0 {
        0.0
    } else {
        y
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_range() {
        let mut worst = 0f64;
        for i in -86_000..=87_000 {
            let x = i as f32 / 1000.0;
            let exact = f64::from(x).exp();
            worst = worst.max(((f64::from(exp(x)) - exact) / exact).abs());
        }
        assert!(worst < 3e-7, "relative error {worst}");
        assert_eq!(exp(1000.0), f32::INFINITY);
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn norm_and_silu_equal_their_formulas() {
        let pool = Pool::new(Some(2));
        let width = 37;
        let x: Vec<f32> = (0..3 * width)
            .map(|i| (i as f32 * 0.37).sin() * 3.0)
            .collect();
        let weight: Vec<f32> = (0..width).map(|i| 1.0 + i as f32 * 0.01).collect();
        let mut out = Vec::new();
        rms_norm(&pool, &x, &weight, 1e-5, &mut out);
        for (row, got) in x.chunks(width).zip(out.chunks(width)) {
            let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / width as f64;
            for ((x, w), got) in row.iter().zip(&weight).zip(got) {
                let exact = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*w);
                assert!((exact - f64::from(*got)).abs() < 1e-6);
            }
            let mut head = row.to_vec();
            rms_norm_head(&mut head, &weight, 1e-5);
            assert_eq!(head, got);
        }
        let gate_up: Vec<f32> = (0..4 * width)
            .map(|i| (i as f32 * 0.7).cos() * 9.0)
            .collect();
        silu_mul(&pool, &gate_up, width, &mut out);
        for (i, got) in out.iter().enumerate() {
            let (row, j) = (i / width, i % width);
            let g = f64::from(gate_up[row * 2 * width + j]);
            let u = f64::from(gate_up[row * 2 * width + width + j]);
            assert!((g / (1.0 + (-g).exp()) * u - f64::from(*got)).abs() < 1e-4);
        }
        gelu_mul(&pool, &gate_up, width, &mut out);
        for (i, got) in out.iter().enumerate() {
            let (row, j) = (i / width, i % width);
            let g = f64::from(gate_up[row * 2 * width + j]);
            let u = f64::from(gate_up[row * 2 * width + width + j]);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
            let exact = 0.5 * g * (1.0 + inner.tanh()) * u;
            assert!((exact - f64::from(*got)).abs() < 1e-4, "{exact} {got}");
        }
    }
}
