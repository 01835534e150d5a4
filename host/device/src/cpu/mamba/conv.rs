//! The causal convolution over time, a channel by itself: y_t = act(bias + Σ_j w_j · x_(t − K + 1 + j)). It must never know what
//! comes after it.
//!
//! vLLM `causal_conv1d_fn` and `causal_conv1d_update`.

use super::{
    numbers::{exp, fma},
    step::{From, Runs},
};
use crate::cpu::kernel::{Simd, Work};

/// One layer's.
pub(super) struct Conv<'a> {
    /// f32 [T, conv_dim]
    pub input: &'a [f32],
    pub conv_dim: usize,
    /// Taps.
    pub kernel: usize,
    /// f32 [conv_dim, kernel]
    pub weight: &'a [f32],
    /// `f32 [conv_dim]`
    pub bias: Option<&'a [f32]>,
    /// Is the activation SiLU? Otherwise there is none.
    pub silu: bool,
}

/// Some channels of it.
pub(super) struct Unit<'a> {
    pub conv: &'a Conv<'a>,
    pub runs: &'a Runs,
    pub first: usize,
    pub width: usize,
    /// f32 [states, kernel − 1, width]
    pub states: &'a mut [f32],
    /// f64 [T, width]: a token that is not computed keeps what it has.
    pub output: &'a mut [f64],
    /// Holds the window and the taps.
    pub buffer: &'a mut Vec<f32>,
}

impl Work for Unit<'_> {
    #[inline(always)]
    fn run<S: Simd, const FMA: bool>(self) {
        let Unit { conv, width, .. } = self;
        let size = (conv.kernel - 1) * width;
        self.buffer.clear();
        self.buffer.resize(size + conv.kernel * width, 0.0);
        let (window, taps) = self.buffer.split_at_mut(size);
        for channel in 0..width {
            let weights = &conv.weight[(self.first + channel) * conv.kernel..][..conv.kernel];
            for (tap, &weight) in weights.iter().enumerate() {
                taps[tap * width + channel] = weight;
            }
        }
        let (last_taps, taps) = (&taps[size..], &taps[..size]);
        for (from, places) in self.runs.iter() {
            match from {
                From::State(state) => {
                    window.copy_from_slice(&self.states[state as usize * size..][..size]);
                }
                From::Zeros => window.fill(0.0),
                From::Before => {}
            }
            for place in places {
                let token = place.token as usize;
                let x = &conv.input[token * conv.conv_dim + self.first..][..width];
                if place.computed {
                    let out = &mut self.output[token * width..][..width];
                    match conv.bias {
                        Some(bias) => {
                            let bias = &bias[self.first..][..width];
                            out.iter_mut()
                                .zip(bias)
                                .for_each(|(out, &b)| *out = b.into());
                        }
                        None => out.fill(0.0),
                    }
                    let earlier = taps.chunks_exact(width).zip(window.chunks_exact(width));
                    for (taps, x) in earlier.chain([(last_taps, x)]) {
                        for ((out, &tap), &x) in out.iter_mut().zip(taps).zip(x) {
                            *out = fma::<FMA>(tap.into(), x.into(), *out);
                        }
                    }
                    if conv.silu {
                        out.iter_mut()
                            .for_each(|out| *out /= 1.0 + exp::<FMA>(-*out));
                    }
                }
                if size > 0 {
                    window.copy_within(width.., 0);
                    window[size - width..].copy_from_slice(x);
                }
                if place.keep != 0 {
                    self.states[place.keep as usize * size..][..size].copy_from_slice(window);
                }
            }
        }
    }
}
