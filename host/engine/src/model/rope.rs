//! Rotary position encoding: the angles of a batch's positions, and the rotation of its heads.
//!
//! The angles are computed once per step and used by every layer; no table limits the context. A device without the host's
//! arithmetic takes a table of them.

use super::config::{RopeConfig, RopeScaling, RopeStyle};

/// Frequencies of a model, and the sines and cosines of the current batch.
pub(crate) struct Rope {
    config: RopeConfig,
    /// Radians per position, one per rotated pair.
    frequencies: Vec<f32>,
    /// `[token][pair]`.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rope {
    /// `factors`, one per pair, divide the frequencies: GGUF's `rope_freqs.weight`, in which converters store
    /// Llama 3.1's scaling.
    pub(crate) fn new(config: RopeConfig, factors: Option<&[f32]>) -> Self {
        let mut frequencies = frequencies(&config);
        for (frequency, factor) in frequencies.iter_mut().zip(factors.unwrap_or_default()) {
            *frequency /= factor;
        }
        Self {
            config,
            frequencies,
            cos: Vec::new(),
            sin: Vec::new(),
        }
    }

    /// Computes the angles of a batch, in f32 as the field does.
    pub(crate) fn prepare(&mut self, positions: &[i64]) {
        self.cos.clear();
        self.sin.clear();
        for position in positions {
            for frequency in &self.frequencies {
                let angle = *position as f32 * frequency;
                let (sin, cos) = angle.sin_cos();
                self.cos.push(cos);
                self.sin.push(sin);
            }
        }
    }

    /// `f32 [len, dim]`: for each position from 0, the cosines of its angles, then their sines; the numbers of
    /// [`Rope::prepare`].
    pub(crate) fn table(&self, len: usize) -> Vec<f32> {
        let pairs = self.frequencies.len();
        let mut table = vec![0.0; len * 2 * pairs];
        for (position, row) in table.chunks_exact_mut(2 * pairs).enumerate() {
            let (cos, sin) = row.split_at_mut(pairs);
            for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&self.frequencies) {
                (*sin, *cos) = (position as f32 * frequency).sin_cos();
            }
        }
        table
    }

    /// Rotates one head of token `token` of the prepared batch.
    pub(crate) fn rotate(&self, token: usize, head: &mut [f32]) {
        let pairs = self.frequencies.len();
        let cos = &self.cos[token * pairs..][..pairs];
        let sin = &self.sin[token * pairs..][..pairs];
        let head = &mut head[..2 * pairs];
        match self.config.style {
            RopeStyle::HalfRotation => {
                let (first, second) = head.split_at_mut(pairs);
                for (((a, b), c), s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                    (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
                }
            }
            RopeStyle::Interleaved => {
                for ((pair, c), s) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                    *pair = [pair[0] * c - pair[1] * s, pair[1] * c + pair[0] * s];
                }
            }
        }
    }
}

/// `theta^(−2i/dim)`, scaled.
pub(super) fn frequencies(config: &RopeConfig) -> Vec<f32> {
    (0..config.dim / 2)
        .map(|i| {
            let frequency = 1.0 / config.theta.powf(2.0 * i as f32 / config.dim as f32);
            scaled(frequency, config.scaling)
        })
        .collect()
}

fn scaled(frequency: f32, scaling: RopeScaling) -> f32 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        // transformers, `_compute_llama3_parameters`.
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => {
            let context = original_context as f32;
            let wavelength = 2.0 * std::f32::consts::PI / frequency;
            if wavelength < context / high_freq_factor {
                frequency
            } else if wavelength > context / low_freq_factor {
                frequency / factor
            } else {
                let smooth =
                    (context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(style: RopeStyle, scaling: RopeScaling) -> RopeConfig {
        RopeConfig {
            theta: 10_000.0,
            dim: 8,
            style,
            scaling,
        }
    }

    /// The rotation of pair `i` at position `p`, in f64.
    fn rotated(a: f64, b: f64, p: f64, i: usize) -> (f64, f64) {
        let angle = p * 10_000f64.powf(-2.0 * i as f64 / 8.0);
        (
            a * angle.cos() - b * angle.sin(),
            a * angle.sin() + b * angle.cos(),
        )
    }

    #[test]
    fn both_styles_equal_the_formula_and_leave_the_rest_alone() {
        let head: Vec<f32> = (0..10).map(|i| (i as f32 * 1.3).sin()).collect();
        for style in [RopeStyle::HalfRotation, RopeStyle::Interleaved] {
            let mut rope = Rope::new(config(style, RopeScaling::None), None);
            rope.prepare(&[0, 17, 500]);
            for (token, p) in [0.0, 17.0, 500.0].into_iter().enumerate() {
                let mut got = head.clone();
                rope.rotate(token, &mut got);
                for i in 0..4 {
                    let (x, y) = match style {
                        RopeStyle::HalfRotation => (i, i + 4),
                        RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                    };
                    let (a, b) = rotated(f64::from(head[x]), f64::from(head[y]), p, i);
                    assert!(
                        (f64::from(got[x]) - a).abs() < 1e-4
                            && (f64::from(got[y]) - b).abs() < 1e-4
                    );
                }
                assert_eq!(got[8..], head[8..], "dimensions past the rotated ones");
            }
        }
    }

    #[test]
    fn llama3_scaling_keeps_short_and_divides_long_wavelengths() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        // Wavelengths 2π/f: 63 is short; 63 k is long; 4,096 lies between, smooth = (2 − 1) / 3.
        assert_eq!(scaled(0.1, scaling), 0.1);
        assert_eq!(scaled(1e-4, scaling), 1e-4 / 8.0);
        let frequency = 2.0 * std::f32::consts::PI / 4096.0;
        let expected = frequency * (2.0 / 3.0 / 8.0 + 1.0 / 3.0);
        assert!((scaled(frequency, scaling) / expected - 1.0).abs() < 1e-5);
    }

    #[test]
    fn the_table_holds_what_a_batch_is_rotated_with() {
        for (style, scaling) in [
            (RopeStyle::HalfRotation, RopeScaling::None),
            (RopeStyle::Interleaved, RopeScaling::Linear { factor: 3.0 }),
        ] {
            let mut rope = Rope::new(config(style, scaling), Some(&[1.0, 2.0, 1.5, 8.0]));
            let table = rope.table(600);
            rope.prepare(&[0, 1, 599]);
            for (token, position) in [0, 1, 599].into_iter().enumerate() {
                let row = &table[position * 8..][..8];
                assert_eq!(
                    row[..4],
                    rope.cos[token * 4..][..4],
                    "cosines of {position}"
                );
                assert_eq!(row[4..], rope.sin[token * 4..][..4], "sines of {position}");
            }
        }
    }

    #[test]
    fn frequency_factors_divide() {
        let style = RopeStyle::HalfRotation;
        let plain = Rope::new(config(style, RopeScaling::None), None);
        let divided = Rope::new(
            config(style, RopeScaling::None),
            Some(&[1.0, 2.0, 4.0, 8.0]),
        );
        let linear = Rope::new(config(style, RopeScaling::Linear { factor: 4.0 }), None);
        for i in 0..4 {
            assert_eq!(
                divided.frequencies[i],
                plain.frequencies[i] / [1.0, 2.0, 4.0, 8.0][i]
            );
            assert_eq!(linear.frequencies[i], plain.frequencies[i] / 4.0);
        }
    }
}
