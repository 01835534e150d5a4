//! Layers that keep a state per request instead of keys and values. This module must never know how metadata was built.
//!
//! Names and shapes: vLLM `MambaMixer2` and `GatedDeltaNetAttention` @0.32/0.33, what they do between their projections.

use timetable_types::MambaType;

/// What one layer is constructed with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MambaConfig {
    /// Mamba2.
    Mamba2(Mamba2Config),
    /// Gated delta net.
    Gdn(GdnConfig),
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

impl MambaConfig {
    /// Which recurrence.
    pub fn mamba_type(&self) -> MambaType {
        match self {
            MambaConfig::Mamba2(_) => MambaType::Mamba2,
            MambaConfig::Gdn(_) => MambaType::Gdn,
        }
    }

    /// Channels of the convolution: `[x, B, C]`, or `[q, k, v]`.
    pub fn conv_dim(&self) -> usize {
        match self {
            MambaConfig::Mamba2(c) => c.num_heads * c.head_dim + 2 * c.n_groups * c.state_size,
            MambaConfig::Gdn(c) => 2 * c.num_k_heads * c.head_k_dim + c.num_v_heads * c.head_v_dim,
        }
    }

    /// Elements of a token's output.
    pub fn output_size(&self) -> usize {
        match self {
            MambaConfig::Mamba2(c) => c.num_heads * c.head_dim,
            MambaConfig::Gdn(c) => c.num_v_heads * c.head_v_dim,
        }
    }

    /// Shapes of one request's state, in f32: the convolution's last inputs [conv_dim, conv_kernel − 1], and the recurrence's
    /// [num_heads, head_dim, state_size] or [num_v_heads, head_v_dim, head_k_dim].
    pub fn state_shapes(&self) -> [Vec<u32>; 2] {
        let of = |sizes: &[usize]| sizes.iter().map(|&size| size as u32).collect();
        match self {
            MambaConfig::Mamba2(c) => [
                of(&[self.conv_dim(), c.conv_kernel - 1]),
                of(&[c.num_heads, c.head_dim, c.state_size]),
            ],
            MambaConfig::Gdn(c) => [
                of(&[self.conv_dim(), c.conv_kernel - 1]),
                of(&[c.num_v_heads, c.head_v_dim, c.head_k_dim]),
            ],
        }
    }
}

/// What one layer brings to a step of T tokens: its projections of the tokens, and the weights of what happens to them.
#[derive(Clone, Copy, Debug)]
pub enum MambaInputs<'a> {
    /// Mamba2.
    Mamba2(Mamba2Inputs<'a>),
    /// Gated delta net.
    Gdn(GdnInputs<'a>),
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
    /// f32 [conv_dim]
    pub conv_bias: Option<&'a [f32]>,
    /// f32 [num_heads]: −e^A_log.
    pub a: &'a [f32],
    /// f32 [num_heads]
    pub d: &'a [f32],
    /// f32 [num_heads]
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
    /// f32 [num_v_heads]
    pub a_log: &'a [f32],
    /// f32 [num_v_heads]
    pub dt_bias: &'a [f32],
}
