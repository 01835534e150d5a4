//! What a recurrent layer is constructed with, and what it brings to a step. It must never know metadata.
//!
//! Names and shapes: vLLM `MambaMixer2`, `GatedDeltaNetAttention`, `MambaMixer`, `ShortConv` and `MiniMaxText01LinearAttention`
//! @0.32/0.33, what they do between their projections.

use std::ops::Range;

use timetable_types::MambaType;

/// What one layer is constructed with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MambaConfig {
    /// Mamba2.
    Mamba2(Mamba2Config),
    /// Gated delta net.
    Gdn(GdnConfig),
    /// Mamba1.
    Mamba1(Mamba1Config),
    /// A convolution alone.
    ShortConv(ShortConvConfig),
    /// Lightning attention.
    Linear(LinearConfig),
}

/// A Mamba2 layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mamba2Config {
    /// Heads.
    pub num_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Groups of heads that share B and C; divides `num_heads`.
    pub n_groups: usize,
    /// Elements of the state for each element of a head.
    pub state_size: usize,
    /// Taps of the convolution, the current token's included.
    pub conv_kernel: usize,
    /// Tokens of one chunk of the scan at most.
    pub chunk_size: usize,
    /// Bounds of dt after softplus.
    pub time_step_limit: (f32, f32),
}

/// A gated delta net layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GdnConfig {
    /// Query and key heads; divides `num_v_heads`.
    pub num_k_heads: usize,
    /// Value heads.
    pub num_v_heads: usize,
    /// Elements of a query or key.
    pub head_k_dim: usize,
    /// Elements of a value.
    pub head_v_dim: usize,
    /// Taps of the convolution, the current token's included.
    pub conv_kernel: usize,
}

/// A Mamba1 layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mamba1Config {
    /// Channels.
    pub intermediate_size: usize,
    /// Elements of a channel's state.
    pub state_size: usize,
    /// Taps of the convolution, the current token's included.
    pub conv_kernel: usize,
    /// Elements that dt is projected from.
    pub time_step_rank: usize,
}

/// A layer that is a convolution, without activation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShortConvConfig {
    /// Channels.
    pub conv_dim: usize,
    /// Taps of the convolution, the current token's included.
    pub conv_kernel: usize,
}

/// A layer of linear attention whose heads decay each at its own rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearConfig {
    /// Heads.
    pub num_heads: usize,
    /// Elements of a query, key or value.
    pub head_dim: usize,
}

impl MambaConfig {
    /// Which recurrence.
    pub fn mamba_type(&self) -> MambaType {
        match self {
            MambaConfig::Mamba2(_) => MambaType::Mamba2,
            MambaConfig::Gdn(_) => MambaType::Gdn,
            MambaConfig::Mamba1(_) => MambaType::Mamba1,
            MambaConfig::ShortConv(_) => MambaType::ShortConv,
            MambaConfig::Linear(_) => MambaType::Linear,
        }
    }

    /// Channels of the convolution: `[x, B, C]`, or `[q, k, v]`; 0 for a layer without one.
    pub fn conv_dim(&self) -> usize {
        match self {
            MambaConfig::Mamba2(c) => c.num_heads * c.head_dim + 2 * c.n_groups * c.state_size,
            MambaConfig::Gdn(c) => 2 * c.num_k_heads * c.head_k_dim + c.num_v_heads * c.head_v_dim,
            MambaConfig::Mamba1(c) => c.intermediate_size,
            MambaConfig::ShortConv(c) => c.conv_dim,
            MambaConfig::Linear(_) => 0,
        }
    }

    /// Taps of the convolution; 1 for a layer without one.
    pub fn conv_kernel(&self) -> usize {
        match self {
            MambaConfig::Mamba2(c) => c.conv_kernel,
            MambaConfig::Gdn(c) => c.conv_kernel,
            MambaConfig::Mamba1(c) => c.conv_kernel,
            MambaConfig::ShortConv(c) => c.conv_kernel,
            MambaConfig::Linear(_) => 1,
        }
    }

    /// Elements of a token's output.
    pub fn output_size(&self) -> usize {
        match self {
            MambaConfig::Mamba2(c) => c.num_heads * c.head_dim,
            MambaConfig::Gdn(c) => c.num_v_heads * c.head_v_dim,
            MambaConfig::Mamba1(c) => c.intermediate_size,
            MambaConfig::ShortConv(c) => c.conv_dim,
            MambaConfig::Linear(c) => c.num_heads * c.head_dim,
        }
    }

    /// Shapes of one state, in f32: the convolution's last inputs [conv_dim, conv_kernel − 1], and the recurrence's
    /// [num_heads, head_dim, state_size], [num_v_heads, head_v_dim, head_k_dim], [intermediate_size, state_size] or
    /// [num_heads, head_dim, head_dim] (keys first); `[0]` where the layer has none.
    pub fn state_shapes(&self) -> [Vec<u32>; 2] {
        let of = |sizes: &[usize]| sizes.iter().map(|&size| size as u32).collect();
        let window = match self.conv_dim() {
            0 => vec![0],
            channels => of(&[channels, self.conv_kernel().saturating_sub(1)]),
        };
        let recurrent = match self {
            MambaConfig::Mamba2(c) => of(&[c.num_heads, c.head_dim, c.state_size]),
            MambaConfig::Gdn(c) => of(&[c.num_v_heads, c.head_v_dim, c.head_k_dim]),
            MambaConfig::Mamba1(c) => of(&[c.intermediate_size, c.state_size]),
            MambaConfig::ShortConv(_) => vec![0],
            MambaConfig::Linear(c) => of(&[c.num_heads, c.head_dim, c.head_dim]),
        };
        [window, recurrent]
    }
}

/// What one layer brings to a step of T tokens: its projections of the tokens, and the weights of what happens to them.
#[derive(Clone, Copy, Debug)]
pub enum MambaInputs<'a> {
    /// Mamba2.
    Mamba2(Mamba2Inputs<'a>),
    /// Gated delta net.
    Gdn(GdnInputs<'a>),
    /// Mamba1.
    Mamba1(Mamba1Inputs<'a>),
    /// A convolution alone.
    ShortConv(ShortConvInputs<'a>),
    /// Lightning attention.
    Linear(LinearInputs<'a>),
}

impl MambaInputs<'_> {
    /// Those of the tokens `range` of a step of `tokens` tokens; the weights stay.
    ///
    /// # Panics
    /// If the range ends behind the step, or the inputs are those of fewer tokens.
    #[must_use]
    pub fn of_tokens(&self, range: Range<usize>, tokens: usize) -> Self {
        let mut part = *self;
        let cut = |elements: &mut &[f32]| {
            let width = elements.len().checked_div(tokens).unwrap_or(0);
            *elements = &elements[range.start * width..range.end * width];
        };
        match &mut part {
            MambaInputs::Mamba2(i) => {
                [&mut i.hidden_states_b_c, &mut i.dt]
                    .into_iter()
                    .for_each(cut);
            }
            MambaInputs::Gdn(i) => {
                [&mut i.mixed_qkv, &mut i.b, &mut i.a]
                    .into_iter()
                    .for_each(cut);
            }
            MambaInputs::Mamba1(i) => cut(&mut i.hidden_states),
            MambaInputs::ShortConv(i) => cut(&mut i.b_x),
            MambaInputs::Linear(i) => {
                [&mut i.query, &mut i.key, &mut i.value]
                    .into_iter()
                    .for_each(cut);
            }
        }
        part
    }
}

/// Mamba2's; the output is f32 [T, num_heads · head_dim], before the gate.
#[derive(Clone, Copy, Debug)]
pub struct Mamba2Inputs<'a> {
    /// f32 [T, conv_dim]: x, B and C before the convolution.
    pub hidden_states_b_c: &'a [f32],
    /// f32 [T, num_heads], before bias and softplus.
    pub dt: &'a [f32],
    /// f32 [conv_dim, conv_kernel]
    pub conv_weight: &'a [f32],
    /// `f32 [conv_dim]`
    pub conv_bias: Option<&'a [f32]>,
    /// `f32 [num_heads]`: −e^A_log.
    pub a: &'a [f32],
    /// `f32 [num_heads]`
    pub d: &'a [f32],
    /// `f32 [num_heads]`
    pub dt_bias: &'a [f32],
}

/// The gated delta net's; the output is f32 [T, num_v_heads · head_v_dim], before norm and gate.
#[derive(Clone, Copy, Debug)]
pub struct GdnInputs<'a> {
    /// f32 [T, conv_dim]: queries, keys and values before the convolution.
    pub mixed_qkv: &'a [f32],
    /// f32 [T, num_v_heads], before the sigmoid that makes β of it.
    pub b: &'a [f32],
    /// f32 [T, num_v_heads], before bias and softplus.
    pub a: &'a [f32],
    /// f32 [conv_dim, conv_kernel]
    pub conv_weight: &'a [f32],
    /// `f32 [num_v_heads]`
    pub a_log: &'a [f32],
    /// `f32 [num_v_heads]`
    pub dt_bias: &'a [f32],
}

/// Mamba1's; the output is f32 [T, intermediate_size], before the gate. Between convolution and scan dt, B and C are projected
/// from the convolution's output.
#[derive(Clone, Copy, Debug)]
pub struct Mamba1Inputs<'a> {
    /// f32 [T, intermediate_size]: x before the convolution.
    pub hidden_states: &'a [f32],
    /// f32 [intermediate_size, conv_kernel]
    pub conv_weight: &'a [f32],
    /// `f32 [intermediate_size]`
    pub conv_bias: Option<&'a [f32]>,
    /// f32 [time_step_rank + 2 · state_size, intermediate_size]: dt's, B's and C's rows.
    pub x_proj: &'a [f32],
    /// f32 [intermediate_size, time_step_rank]
    pub dt_proj: &'a [f32],
    /// `f32 [intermediate_size]`: added to the projected dt before softplus.
    pub dt_bias: &'a [f32],
    /// f32 [intermediate_size, state_size]: −e^A_log.
    pub a: &'a [f32],
    /// `f32 [intermediate_size]`
    pub d: &'a [f32],
}

/// A short convolution's; the output is f32 [T, conv_dim], before it is multiplied by C.
#[derive(Clone, Copy, Debug)]
pub struct ShortConvInputs<'a> {
    /// f32 [T, conv_dim]: B · x.
    pub b_x: &'a [f32],
    /// f32 [conv_dim, conv_kernel]
    pub conv_weight: &'a [f32],
    /// `f32 [conv_dim]`
    pub conv_bias: Option<&'a [f32]>,
}

/// Lightning attention's; the output is f32 [T, num_heads · head_dim], before norm and gate.
#[derive(Clone, Copy, Debug)]
pub struct LinearInputs<'a> {
    /// f32 [T, num_heads · head_dim], after the activation.
    pub query: &'a [f32],
    /// f32 [T, num_heads · head_dim]
    pub key: &'a [f32],
    /// f32 [T, num_heads · head_dim]
    pub value: &'a [f32],
    /// `f32 [num_heads]`: a token weighs e^(−slope) as much at the next one.
    pub slopes: &'a [f32],
}
